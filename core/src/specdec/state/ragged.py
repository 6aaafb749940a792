"""The state of B rows over all layers, where every cache type has a row form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import Swap, check_keep
from specdec.errors import RoundOpenError, RowIndexError
from specdec.state.attention import AttentionRows
from specdec.state.positions import RowPositions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import PendingChange

__all__ = ["RaggedState"]


class RaggedState:
    """Rows of different length, rolled back one by one.

    ``caches`` goes to the model in place of mlx-lm's own list. Verbs come in this order:
    ``begin_round(width)``, one forward of that width, ``commit_round()`` or ``rollback(kept)``.

    Args:
        caches: one row's mlx-lm caches, all of a type that has a row form. Their arrays are
            taken over without a copy; do not use them until ``write_back``.
    """

    can_roll_back = True
    reason: str | None = None

    def __init__(self, caches: Sequence[Any]) -> None:
        self._positions = RowPositions([max((c.offset for c in caches), default=0)])
        self.caches: list[Any] = [AttentionRows.adopt(c, self._positions) for c in caches]

    @property
    def row_caches(self) -> Sequence[list[Any]]:
        """One list of caches for all rows together."""
        return (self.caches,)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row."""
        return self._positions.lengths

    @property
    def open_width(self) -> int:
        """Positions of the open window; 0 between rounds."""
        return self._positions.width

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self._positions.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes for layer in self.caches)

    def arrays(self) -> list[mx.array]:
        """Every buffer, to be evaluated after a prefill chunk."""
        return [array for layer in self.caches for array in layer.arrays()]

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` of at most ``most`` positions."""
        return self._positions.window_width(needed, most)

    def begin_round(self, width: int) -> None:
        """Open a window of ``width`` positions on every row. O(1).

        Raises:
            RoundOpenError: a round is open.
        """
        self._positions.begin(width)

    def commit_round(self) -> None:
        """Keep the whole window in every row.

        Raises:
            NoOpenRoundError: no round is open.
        """
        self._finish(None)

    def rollback(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` positions of the window in row b. O(1) in the context.

        Raises:
            NoOpenRoundError: no round is open.
            RollbackError: a count outside ``0 .. width``; nothing changed.
        """
        self._finish(kept)

    def _finish(self, kept: Sequence[int] | None) -> None:
        self._positions.finish(kept)
        for layer in self.caches:
            layer.finish_round()

    def prepare_append(self, rows: Sequence[RaggedState]) -> PendingChange:
        """Build this state's rows followed by those of ``rows``; the live rows stay as they are.

        Args:
            rows: states to take rows from, in order; they are not used afterwards.

        Raises:
            RoundOpenError: a round is open here or in one of ``rows``.
        """
        parts = [part for part in (self, *rows) if part.row_count] or [self]
        if any(part._positions.width for part in (self, *rows)):
            raise RoundOpenError("prepare_append")
        lengths = [length for part in parts for length in part.lengths]
        columns = list(zip(*(part.caches for part in parts), strict=True))
        buffers = [AttentionRows.merged(column) for column in columns]
        return Swap(lambda: self._swap(lengths, buffers))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows: ``keep`` lists old indices.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
            RoundOpenError: a round is open.
        """
        count = self._between_rounds("filter_rows")
        check_keep(keep, count)
        if list(keep) == list(range(count)):
            return
        lengths = [self.lengths[k] for k in keep]
        if keep:
            index = mx.array(list(keep), mx.int32)
            buffers = [layer.taken(index) for layer in self.caches]
        else:
            buffers = [(None, None) for _ in self.caches]
        self._swap(lengths, buffers)

    def extract_row(self, row: int) -> list[Any]:
        """One row as mlx-lm caches that share nothing with this state.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: a round is open.
        """
        count = self._between_rounds("extract_row")
        if not 0 <= row < count:
            raise RowIndexError("extract_row", row, count)
        caches = [layer.extract(row, self.lengths[row]) for layer in self.caches]
        mx.eval([a for c in caches for a in (c.keys, c.values) if a is not None])
        return caches

    def write_back(self, row: int, caches: Sequence[Any]) -> None:
        """Put one row into mlx-lm caches that the caller owns.

        The only row of a state hands its buffers over without a copy and is spent afterwards.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: a round is open.
        """
        if self.row_count == 1 and row == 0 and not self._positions.width:
            length = self.lengths[0]
            for cache, layer in zip(caches, self.caches, strict=True):
                cache.keys, cache.values, cache.offset = layer.keys, layer.values, length
            return
        for cache, copy in zip(caches, self.extract_row(row), strict=True):
            cache.keys, cache.values, cache.offset = copy.keys, copy.values, copy.offset

    def _swap(
        self,
        lengths: Sequence[int],
        buffers: Sequence[tuple[mx.array | None, mx.array | None]],
    ) -> None:
        self._positions.replace(lengths)
        for layer, (keys, values) in zip(self.caches, buffers, strict=True):
            layer.keys, layer.values = keys, values

    def _between_rounds(self, verb: str) -> int:
        if self._positions.width:
            raise RoundOpenError(verb)
        return self.row_count
