"""Where the positions of a sliding window stand, and which of them each query sees.

A ring of ``max_size + SLACK`` places: position p stands at place p until the ring is full, then it
takes the place of p less the ring's size. The first ``keep`` positions are never overwritten. The
place depends on the position alone, not on the widths of the windows it was written in, so a row's
sums are the same with and without a drafter. The slack is what a rollback needs: a window of up to
``SLACK + 1`` positions only overwrites what none of its queries sees, so dropping any part of it is
not moving the length on. The same holds of as many windows of one position in a row: together they
overwrite what one window of all their positions would.

Wider windows are not written before it is known what is kept of them: they see what the ring holds,
in order, followed by their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.state.positions import typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state.positions import Mask, RowPositions

__all__ = ["SLACK", "Ring"]

SLACK = 32


class Ring:
    """Places and masks of every layer whose window has this size.

    Args:
        positions: the lengths that all layers share.
        max_size: positions that a query sees, its own included.
        keep: positions at the beginning that every query sees.
    """

    __slots__ = ("_positions", "keep", "max_size", "size")

    def __init__(self, positions: RowPositions, max_size: int, keep: int) -> None:
        self._positions = positions
        self.max_size = max_size
        self.keep = keep
        self.size = max_size + SLACK

    @property
    def in_place(self) -> bool:
        """Whether the open window is written when it is appended."""
        return not self._positions.reading and self._positions.width <= SLACK + 1

    @property
    def reach(self) -> int:
        """Places that an open window written in place reads."""
        return min(self._positions.reach, self.size)

    @property
    def seen(self) -> int:
        """Positions before it that the first query of a window sees besides the kept ones."""
        return self.max_size - 1 - self.keep

    def place(self, position: int) -> int:
        """Where a position stands."""
        if position < self.size:
            return position
        return self.keep + (position - self.keep) % (self.size - self.keep)

    def places(self, positions: mx.array) -> mx.array:
        """Where positions stand; of any shape, none negative."""
        turned = self.keep + (positions - self.keep) % (self.size - self.keep)
        return mx.where(positions < self.size, positions, turned)

    def write_index(self) -> mx.array:
        """Places ``[B, 1, W, 1]`` that the open window is scattered to."""
        positions = self._positions
        return positions.once(
            ("ring write", self.size, self.keep, positions.width),
            lambda: self.places(positions.write_index()),
        )

    def last(self, lengths: Sequence[int], columns: int) -> mx.array | slice:
        """Where the last positions of rows stand, in temporal order.

        Args:
            lengths: of the rows; one or more.
            columns: positions a row; of one with fewer all, and behind them anything.

        Returns:
            A slice where the same places in a run will do, else places ``[B or 1, 1, n, 1]``.
        """
        starts = sorted({max(length - columns, 0) for length in lengths})
        first = self.place(starts[0])
        if len(starts) == 1 and first + columns <= self.size:
            return slice(first, first + columns)
        begin = [starts[0]] if len(starts) == 1 else [max(n - columns, 0) for n in lengths]
        positions = mx.array(begin, mx.int32)[:, None] + mx.arange(columns, dtype=mx.int32)
        return self.places(positions)[:, None, :, None]

    # What queries of a window see, where it is written in place.

    def mask(
        self, width: int, window_size: int | None, as_array: bool, dtype: mx.Dtype | None
    ) -> Mask:
        """As :meth:`RowPositions.mask`, over the places of the ring."""
        positions = self._positions
        size = min(window_size or self.max_size, self.max_size)
        longest = max(positions.lengths, default=0)
        if longest + width <= size and positions.reach_of(width) <= self.size:  # nothing is hidden
            return positions.mask(width, None, as_array, dtype)
        kind = dtype if positions.plans and not as_array and width > 1 else None
        key = ("ring mask", self.size, self.keep, size, width, kind)
        return positions.once(key, lambda: typed(self._make_mask(width, size), kind))

    def _make_mask(self, width: int, size: int) -> mx.array:
        queries = self._positions.queries(width)
        held = self._held(queries)
        shown = (held >= 0) & (held <= queries) & (held > queries - size + self.keep)
        if self.keep:
            places = mx.arange(self.reach, dtype=mx.int32)
            shown = shown | ((places < self.keep) & (places <= queries))
        return shown

    def _held(self, queries: mx.array) -> mx.array:
        """The position that stands at each place of a row that is written to its last query."""
        last = queries[..., -1:, :]
        places = mx.arange(self.reach, dtype=mx.int32)
        turn = self.size - self.keep
        newest = last - (last - places) % turn
        return mx.where((last < self.size) | (places < self.keep), places, newest)

    # What a drafter's block sees: the window before each of its positions, and the whole block.

    def block_mask(self, columns: Sequence[int], *, causal: bool, dtype: mx.Dtype | None) -> Mask:
        """As :meth:`RowPositions.block_mask`; the block is never hidden by the window's size."""
        positions = self._positions
        width = positions.width
        longest = max(positions.lengths, default=0)
        if self.in_place and longest + width <= self.max_size and positions.reach <= self.size:
            return positions.block_mask(columns, causal=causal, dtype=dtype)
        kind = dtype if positions.plans else None
        key = ("ring block", self.size, self.keep, width, tuple(columns), causal, kind)
        return positions.once(key, lambda: typed(self._make_block_mask(columns, causal), kind))

    def _make_block_mask(self, columns: Sequence[int], causal: bool) -> mx.array:
        positions = self._positions
        queries = positions.queries(positions.width)
        if self.in_place:
            held = self._held(queries)
        else:  # what the ring holds in order, then the block
            held = mx.concatenate([self.earlier(), positions.write_index()], axis=2).swapaxes(2, 3)
        first = mx.array(positions.lengths, mx.int32)[:, None, None, None]
        near = (held < self.keep) | (held > queries - self.max_size + self.keep)
        before = (held >= 0) & (held < first) & near
        block = (held >= first) & (held < positions.block_ends(columns))
        if causal:
            block = block & (held <= queries)
        return before | block

    # What queries see of a wider window: positions in order, then the window's own.

    def earlier(self) -> mx.array:
        """Positions ``[B, 1, n, 1]`` that a wide window sees before its own; negative for none."""
        positions = self._positions

        def make() -> mx.array:
            start = mx.array(positions.lengths, mx.int32)[:, None]
            run = start + mx.arange(-self.seen, 0, dtype=mx.int32)
            run = mx.where(run >= self.keep, run, -1)
            kept = mx.broadcast_to(
                mx.arange(self.keep, dtype=mx.int32), (len(positions.lengths), self.keep)
            )
            kept = mx.where(kept < start, kept, -1)
            return mx.concatenate([kept, run], axis=1)[:, None, :, None]

        return positions.once(("ring earlier", self.size, self.keep), make)

    def wide_mask(self, width: int, window_size: int | None) -> mx.array:
        """The mask ``[B, 1, W, n + W]`` of a wide window that may be rolled back."""
        positions = self._positions
        size = min(window_size or self.max_size, self.max_size)

        def make() -> mx.array:
            own = positions.write_index()  # [B, 1, W, 1]
            keys = mx.concatenate([self.earlier(), own], axis=2).swapaxes(2, 3)
            shown = (keys >= 0) & (keys <= own) & (keys > own - size + self.keep)
            return shown | ((keys >= 0) & (keys < self.keep) & (keys <= own))

        return positions.once(("ring wide", self.size, self.keep, size, width), make)
