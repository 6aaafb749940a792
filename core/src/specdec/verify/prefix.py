"""What a row takes from the prefix cache when it comes, and leaves there.

A row is bound once, when it is admitted: which cache, and the namespace that names everything its
state depends on besides its tokens. The same binding is used to look up, to snapshot at a prefill
boundary and to store the row when it ends. Rows of target and drafter are stored together, under
the tokens that both have read (``docs/checkpoints-and-prefix-cache.md``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.checkpoints import PrefixCache, PrefixHit
    from specdec.contract import RowCheckpoint
    from specdec.state import CacheOptions, RowState
    from specdec.targets import Target
    from specdec.verify.prompts import DraftPrompts

__all__ = ["PrefixBinding", "bind_prefix"]


@frozen(eq=False)
class PrefixBinding:
    """One request's place in a prefix cache.

    Attributes:
        cache: where rows are taken from and left.
        namespace: the target's weights and adapters, its caches, the backend and the drafter.
        identity: the target's part of it, to notice weights that changed meanwhile.
        drafts: whether an entry holds a draft row too.
        options: how the rows are cached.
        untold: restored tokens that the target's state does not count, as recurrent caches alone
            tell no length.
    """

    cache: PrefixCache
    namespace: str
    identity: str
    drafts: bool
    options: CacheOptions
    untold: int = 0

    def take(self, prompt: tuple[int, ...]) -> PrefixHit | None:
        """The longest stored prefix that leaves at least the last prompt token to read."""
        hit = self.cache.take(self.namespace, prompt, longest=len(prompt) - 1)
        if hit is not None and self.drafts and hit.checkpoint is None:
            hit.release()
            return None
        return hit

    def boundaries(self, prompt: tuple[int, ...], asked: tuple[int, ...], cached: int) -> list[int]:
        """Where to snapshot while the prompt is read, in order.

        Before the last token, so that the same prompt is read once; where the request says; and
        where this prompt parts from a stored one, since what two prompts share a third will share
        too (Pan et al. 2024, "Marconi", arXiv 2411.19379). Entries are never cut: a snapshot holds
        for every kind of state.

        Args:
            prompt: token ids.
            asked: numbers of tokens that the request names.
            cached: tokens that were restored.
        """
        last = len(prompt) - 1
        wanted = {last, *(min(place, last) for place in asked)}
        wanted.add(min(self.cache.branch(self.namespace, prompt), last))
        return sorted(place for place in wanted if place > cached)

    def keep(
        self,
        tokens: tuple[int, ...],
        state: RowState,
        index: int,
        checkpoint: RowCheckpoint | None,
    ) -> None:
        """Store a row of target and drafter that have read ``tokens``.

        Args:
            tokens: every token that both have read, and no other.
            state: the target's rows, between rounds.
            index: the row's place.
            checkpoint: the draft row's; without one, a row that drafts is not stored.
        """
        if not tokens or state.lengths[index] + self.untold != len(tokens):
            return
        drafted = None if checkpoint is None else checkpoint.processed_tokens
        if drafted != (len(tokens) if self.drafts else None):
            return
        self.cache.put(self.namespace, tokens, state.extract_row(index), checkpoint)

    def keep_ended(
        self,
        target: Target,
        tokens: tuple[int, ...],
        state: RowState,
        index: int,
        capture: Callable[[int], RowCheckpoint | None] | None,
    ) -> None:
        """Store a row that ended, under what was really processed of its output.

        Args:
            target: the bound target; if its weights changed meanwhile, nothing is stored.
            tokens: every token that was read.
            state: the target's rows, between rounds.
            index: the row's place.
            capture: gives the draft row's checkpoint; ``None`` without a drafter.
        """
        if target.state_identity(self.options) != self.identity:
            return
        checkpoint = capture(index) if self.drafts and capture is not None else None
        self.keep(tokens, state, index, checkpoint)


def bind_prefix(
    cache: PrefixCache | None,
    target: Target,
    prompts: DraftPrompts | None,
    options: CacheOptions,
) -> PrefixBinding | None:
    """Bind a request to its prefix cache.

    Args:
        cache: the request's, if it has one.
        target: the bound target.
        prompts: the drafter's side of reading prompts, or ``None``.
        options: how the request's rows are cached.

    Returns:
        The binding; ``None`` without a cache.
    """
    if cache is None:
        return None
    method = None
    if prompts is not None:
        method = prompts.namespace
        if method is None:
            return None  # the drafter did not say what its state depends on
    identity = target.state_identity(options)
    return PrefixBinding(
        cache=cache,
        namespace=json.dumps({"target": identity, "drafter": method}, sort_keys=True),
        identity=identity,
        drafts=method is not None,
        options=options,
    )
