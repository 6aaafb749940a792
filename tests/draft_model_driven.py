"""Draft-model rows driven by hand, beside the same model run plainly by mlx-lm's own code.

Shapes: B rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from specdec.sampling import SamplingOptions
from specdec.testing.driven import host_drafts, resolved
from specdec.testing.watched import WatchedSamplers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import Proposal, RowCheckpoint, TargetView
    from specdec.drafting import DraftModelProvider, DraftModelRows

__all__ = ["DrivenRows", "cold", "greedy", "scores"]


def scores(model: Any, tokens: Sequence[int]) -> mx.array:
    """Logits ``[len(tokens), V]`` of mlx-lm alone, a token at a time."""
    caches = make_prompt_cache(model)
    rows = [model(mx.array([[token]]), cache=caches)[0, 0] for token in tokens]
    mx.eval(rows)
    return mx.stack(rows)


def greedy(model: Any, tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """How mlx-lm alone goes on from a text, greedily."""
    caches = make_prompt_cache(model)
    text, held = list(tokens), 0
    while len(text) < len(tokens) + count:
        for token in text[held:]:
            logits = model(mx.array([[token]]), cache=caches)
        held = len(text)
        best: Any = mx.argmax(logits[0, -1]).item()
        text.append(best)
    return tuple(text[len(tokens) :])


def cold(
    provider: DraftModelProvider, target: TargetView, tokens: Sequence[int], *, step: int = 2048
) -> RowCheckpoint:
    """The checkpoint of a row that has read these tokens, chunk by chunk."""
    group = provider.grouped.open_prefill(target=target, checkpoints=[None])
    for begin in range(0, len(tokens), step):
        group.prefill(mx.array([list(tokens[begin : begin + step])], mx.int32), None)
    group.materialize()
    checkpoint = group.capture(0)
    group.close()
    return checkpoint


class DrivenRows:
    """A decode group with the samplers of its rows.

    Args:
        provider: the drafter.
        target: what it drafts for.
        checkpoints: B rows.
        options: how they draw; all greedy where nothing is given.
        seeds: of their draws.
    """

    def __init__(
        self,
        provider: DraftModelProvider,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint],
        options: Sequence[SamplingOptions] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        count = len(checkpoints)
        chosen = [SamplingOptions()] * count if options is None else options
        self.samplers = WatchedSamplers()
        self.samplers.prepare_append(list(zip(chosen, seeds or [0] * count, strict=True))).commit()
        self.drawn = [0] * count
        self.group: DraftModelRows = provider.grouped.open(
            target=target, sampling=self.samplers, checkpoints=checkpoints
        )

    def join(self, checkpoints: Sequence[RowCheckpoint]) -> None:
        """Greedy rows join."""
        self.samplers.prepare_append([(SamplingOptions(), 0)] * len(checkpoints)).commit()
        self.group.prepare_append(checkpoints).commit()
        self.drawn += [0] * len(checkpoints)

    def filter(self, keep: Sequence[int]) -> None:
        """Rows leave and change places."""
        self.group.filter_rows(keep)
        self.samplers.filter_rows(keep)
        self.drawn = [self.drawn[row] for row in keep]

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], *, on_device: bool = True
    ) -> list[tuple[int, ...]]:
        """Open a round, on the device where a row may draft."""
        if on_device:
            proposal = self.group.draft_device(pending, depths, self.drawn)
            if proposal is not None:
                return resolved(proposal, len(pending))
        return host_drafts(self.proposed(pending, depths))

    def proposed(self, pending: Sequence[int], depths: Sequence[int]) -> list[list[int]] | Proposal:
        """Open a round on the host."""
        return self.group.draft(pending, depths, self.drawn)

    def commit(self, accepted: Sequence[int]) -> None:
        """End the round."""
        self.group.commit(accepted, None)
        self.drawn = [at + 1 + count for at, count in zip(self.drawn, accepted, strict=True)]
