"""The live rows of a head: what it has read, what it has not, and the steps that it takes.

Entry p of a head's cache is made from the target's hidden state of position p and the token of
position p + 1. Between rounds a row keeps what the head has not read: the hidden states of its
last positions, each with the token that followed, and the last hidden, which waits for the pending
token. A round's first step reads all of it; further steps go on from the head's own output.

What is kept of those further steps is a setting. ``Chain.TRUE``: nothing; accepted tokens are read
anew, in the next round's first step, from the target's own hidden states, so a row's state follows
from its text. ``Chain.OWN``: the entries of accepted tokens stay as the head made them from its own
output. Where all drafts were accepted, the last of them was never read; it is read next, from the
true hidden.

Shapes: B rows, L positions, W = 1 + the longest draft, T unread hidden states, H hidden size.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import Swap
from specdec.state import RaggedState
from specdec_mtp.attachment import HeadRow
from specdec_mtp.reading import Unread, one_of_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import ContextKind, RecurrentMtp
    from specdec_mtp.attachment import RowLayout
    from specdec_mtp.heads import HeadModule, Step

__all__ = ["Chain", "HeadSettings", "LiveRows"]

_WHOLE = 2048  # positions of a prompt that the head reads at once


class Chain(StrEnum):
    """What becomes of the entries that a head made from its own output."""

    TRUE = "true"
    OWN = "own"


@frozen(kw_only=True, eq=False)
class HeadSettings:
    """A head, and how its rows use it.

    Attributes:
        module: the head.
        namespace: the provider's ``checkpoint_namespace``.
        layout: of a row's arrays.
        context: the target's hidden states that it reads.
        chain: what is kept of its own steps.
        feeds_raw: whether a step goes on from the output before the head's norm.
        reads_prompt: whether it reads the prompt; else its history starts with the first draft.
    """

    module: HeadModule
    namespace: str
    layout: RowLayout
    context: ContextKind
    chain: Chain
    feeds_raw: bool
    reads_prompt: bool


class LiveRows:
    """B rows of a head.

    Args:
        settings: the head and how it is used.
        port: the target's embedding.

    Attributes:
        tokens: that each row has processed, B ints.
    """

    def __init__(self, settings: HeadSettings, port: RecurrentMtp) -> None:
        self._settings = settings
        self._port = port
        self._caches: RaggedState | None = None
        self._unread = Unread([], None)
        self._widest = 1
        self.tokens: list[int] = []

    # Membership.

    def prepare_append(self, rows: Sequence[HeadRow]) -> Swap:
        """Build these rows behind the live ones, which stay as they are."""
        states = [RaggedState(row.caches) for row in rows]
        caches = states.pop(0) if self._caches is None else self._caches
        change = caches.prepare_append(states)
        unread = self._unread.joined(
            [(row.unread, row.hidden) for row in rows], self._port.hidden_size
        )

        def join() -> None:
            change.commit()
            self._caches, self._unread = caches, unread
            self.tokens = [*self.tokens, *(row.tokens for row in rows)]

        return Swap(join, change.discard)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if list(keep) == list(range(len(self.tokens))):
            return
        if not keep:
            self._caches = None
        elif self._caches is not None:
            self._caches.filter_rows(keep)
        self._unread = self._unread.taken(keep)
        self.tokens = [self.tokens[row] for row in keep]

    def row(self, row: int) -> HeadRow:
        """One row; its caches are copies, its hidden states are not."""
        unread, hidden = self._unread.row(row)
        return HeadRow(self.tokens[row], self._live.extract_row(row), unread, hidden)

    @property
    def _live(self) -> RaggedState:
        assert self._caches is not None, "there are no rows"
        return self._caches

    # Reading with the target.

    def follow(
        self, tokens: mx.array, hidden: mx.array, counts: list[int], *, everything: bool
    ) -> None:
        """Read what was unread, and new tokens with the hidden states before them.

        Args:
            tokens: ``[B, L]`` ids that the target has read.
            hidden: ``[B, at least L, H]`` its hidden states there.
            counts: B ints, tokens of each row.
            everything: whether the new tokens are read too, and not what was unread alone.
        """
        live = self._live
        plan = self._unread.followed(tokens, hidden, counts, everything=everything)
        most = max(plan.lengths)
        for start in range(0, most, _WHOLE):
            window = plan.window(start, min(start + _WHOLE, most))
            live.begin_round(window.width)
            self._step(window.tokens, window.hidden)
            live.rollback(window.lengths)
            if most > _WHOLE:  # keys and values alone: the layer's output is never computed
                mx.eval(live.arrays())
        self._unread = plan.after
        self.tokens = [had + count for had, count in zip(self.tokens, counts, strict=True)]

    def materialize(self) -> None:
        """Evaluate what was restored or read, and let go of what it was read from."""
        self._unread = self._unread.detached()
        mx.eval([] if self._caches is None else self._caches.arrays(), self._unread.arrays())

    def submit(self) -> None:
        """Compute what was read while the host goes on: no graph may grow from round to round."""
        mx.async_eval(*self._live.arrays())  # type: ignore[no-untyped-call]  # untyped in MLX

    def with_reading(self, ids: mx.array) -> mx.array:
        """The ids, to be computed together with all that was read.

        They need not depend on it by themselves, as where a draft vocabulary has one id; and what
        nobody computes is a graph that grows from round to round.
        """
        bound: mx.array = mx.depends(ids, self._live.arrays())
        return bound

    # A round's steps.

    def first(
        self, pending: list[int], depth: int, *, keep: bool = True
    ) -> tuple[mx.array, mx.array]:
        """Read what is unread, and the pending tokens.

        Args:
            pending: B ids.
            depth: drafts of the round; windows have one width where the backend asks for it.
            keep: whether the rows remember it.

        Returns:
            ``[B, 1, H]`` for the vocabulary head, and ``[B, 1, H]`` to go on from.
        """
        live, unread = self._live, self._unread
        widest = max(self._widest, 1 + depth)
        if keep:
            self._widest = widest
        needed = 1 + unread.longest
        width = live.window_width(needed, max(needed, widest))
        lengths = [1 + len(tokens) for tokens in unread.tokens]
        ids, hidden = unread.window(pending, width)
        live.begin_round(width)
        step = self._step(ids, hidden)
        live.rollback(lengths if keep else [0] * len(lengths))
        last = one_of_each([length - 1 for length in lengths], width)
        return last(step.scored), last(self._fed(step))

    def ahead(self, ids: mx.array, fed: mx.array) -> tuple[mx.array, mx.array]:
        """One step further, on ids ``[B]`` that are on the device; as :meth:`first`."""
        live = self._live
        live.begin_round(1)
        step = self._step(ids[:, None], fed)
        live.commit_round()
        return step.scored, self._fed(step)

    def settle(
        self, drafts: Sequence[Sequence[int]], counts: list[int], hidden: mx.array, steps: int
    ) -> None:
        """Keep what the settings say of the chain; the rest of what was accepted is unread.

        Args:
            drafts: what each row proposed.
            counts: B ints, accepted drafts.
            hidden: ``[B, W, H]`` the target's hidden states at the pending token and the drafts.
            steps: how often :meth:`ahead` was called.
        """
        own = self._settings.chain is Chain.OWN
        # A chain of d drafts has read d - 1 of them.
        kept = [
            min(count, max(len(draft) - 1, 0)) if own else 0
            for count, draft in zip(counts, drafts, strict=True)
        ]
        if steps:
            self._live.take_back([steps - count for count in kept])
        tokens = [
            tuple(draft[begin:count])
            for draft, begin, count in zip(drafts, kept, counts, strict=True)
        ]
        self._unread = Unread(tokens, _spans(hidden, kept, counts))
        self.tokens = [had + 1 + count for had, count in zip(self.tokens, counts, strict=True)]

    def _step(self, ids: mx.array, hidden: mx.array) -> Step:
        """One call of the head over the window that was begun: ``[B, L]``, ``[B, L, H]``."""
        [(caches, _)] = self._live.row_caches
        return self._settings.module(self._port.embed(ids), hidden, caches)

    def _fed(self, step: Step) -> mx.array:
        return step.raw if self._settings.feeds_raw else step.scored


def _spans(hidden: mx.array, begins: list[int], ends: list[int]) -> mx.array:
    """Row b's hidden states ``begins[b]`` to ``ends[b]``, left-aligned: ``[B, T, H]``."""
    most = 1 + max(end - begin for begin, end in zip(begins, ends, strict=True))
    if not any(begins):
        return hidden[:, :most]
    index = mx.array(begins, mx.int32)[:, None] + mx.arange(most, dtype=mx.int32)
    index = mx.minimum(index, hidden.shape[1] - 1)[..., None]
    return mx.take_along_axis(
        hidden, mx.broadcast_to(index, (*index.shape[:2], hidden.shape[2])), 1
    )
