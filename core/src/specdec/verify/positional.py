"""A row's window drawn position by position, where code of the request's own holds state.

The accept walk asks for a position only when every draft before it was accepted, so a sampler or a
processor is called exactly once per emitted token, in order, with the history that plain decoding
would show it. Each position is a host wait of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, field

from specdec.sampling.processors import WindowView
from specdec.sampling.rejection import Drafted
from specdec.sampling.rows import normalize, nothing_left
from specdec.verify.draws import sampled_id, shape_row
from specdec.verify.flight import host_reads
from specdec.verify.logprobs import HostLogprobs, WindowLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.sampling import RowSamplers
    from specdec.verify.row import Row

__all__ = ["PositionByPosition"]


@define(eq=False)
class PositionByPosition:
    """Iterate over it for the row's samples; each is drawn when it is asked for.

    Attributes:
        row: the row.
        index: its place in the group.
        samplers: the group's.
        logits: ``[W, V]`` as the target gave them.
        mask: allowed ids ``[n, V]`` of the first positions, or ``None``.
        draft: the row's drafts.
        logq: ``[d, V]`` what they were drawn from, or ``None``.
        refused: whether one more was drawn, and dropped because it cannot be the target's token.
    """

    row: Row
    index: int
    samplers: RowSamplers
    logits: mx.array
    mask: mx.array | None
    draft: Sequence[int]
    logq: mx.array | None = None
    refused: bool = False
    _logprobs: list[mx.array] = field(factory=list)
    _reports: list[HostLogprobs] = field(factory=list)

    @property
    def drawn(self) -> int:
        """Positions that were drawn."""
        return len(self._logprobs)

    @property
    def logprobs(self) -> mx.array:
        """``[1, n, V]`` of the positions that were drawn."""
        return mx.stack(self._logprobs)[None]

    @property
    def reports(self) -> HostLogprobs | None:
        """The log-probabilities to report of these positions, as of a window of one row."""
        if not self._reports:
            return None
        return HostLogprobs(
            [[each.chosen[0][0] for each in self._reports]],
            [[each.ranks[0][0] for each in self._reports]],
            [[each.ids[0][0] for each in self._reports]],
            [[each.values[0][0] for each in self._reports]],
        )

    def __iter__(self) -> Iterator[int]:
        history = self.row.history()
        for position in range(len(self.draft) + 1):
            yield self._draw(history, position)
            if position < len(self.draft):
                history = mx.concatenate([history, mx.array([self.draft[position]], mx.int32)])

    def _draw(self, history: mx.array, position: int) -> int:
        row, step = self.row, self.row.drawn + position
        allowed = None
        if self.mask is not None and position < self.mask.shape[0]:
            allowed = self.mask[position][None]
        logits = shape_row(
            row, WindowView(history, 1, step), self.logits[position : position + 1], allowed
        )
        logprobs = normalize(logits)
        sampler = row.request.sampling.sampler
        if sampler is None:
            drawn = self.samplers.draw_one(
                self.index, logprobs[None], step, drafted=self._drafted(position)
            )
        else:
            drawn = sampled_id(sampler(logprobs), logprobs.shape[-1])
        samples = mx.where(nothing_left(logits), -1, drawn.reshape(1, 1).astype(mx.int32))
        reports = None
        if row.request.logprobs is not None:
            reports = WindowLogprobs.of(logprobs[None], samples, row.request.logprobs)
        [[sample]], *read = host_reads(samples, *(() if reports is None else reports.arrays))
        self._logprobs.append(logprobs[0])
        if reports is not None:
            self._reports.append(reports.on_host(read))
        return int(sample)

    def _drafted(self, position: int) -> Drafted | None:
        if position < len(self.draft):
            token = self.draft[position]
        elif self.refused:
            token = self.logits.shape[-1]  # an id that the target does not have
        else:
            return None
        logq = None
        if self.logq is not None and position < self.logq.shape[0]:
            logq = self.logq[position][None, None]
        return Drafted(mx.array([[token]], mx.int32), logq=logq)
