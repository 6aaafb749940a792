"""Rows in mlx-lm's own caches, for targets whose cache types have no row form.

Each row keeps its own caches and is decoded by itself, one position a round, so nothing needs to
be rolled back but whole windows of one position: the one that pipelined decoding begins early, and
those of a chain. Recurrent caches rebind
their arrays, so a reference kept before the window is a snapshot; attention caches trim; a ring
that assigns into its arrays can do neither, and then nothing is begun early.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from specdec.contract import Swap, check_keep
from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError, RowIndexError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import PendingChange

__all__ = ["NativeState"]

_Undo = list["Callable[[], None]"]
"""Functions that take one window of a row back."""


class NativeState:
    """B rows of mlx-lm caches, decoded one by one.

    Args:
        caches: one row's caches; used as they are, so the caller sees them move.
        reason: why the rows do not speculate, for the statistics.
    """

    def __init__(self, caches: Sequence[Any], reason: str) -> None:
        self.reason: str | None = reason
        self._rows: list[list[Any]] = [list(caches)]
        self._lengths = [_length(caches)]
        self._width = 0
        self._undo: list[_Undo] = []
        # Per row, for each window of one position that it can take back: how.
        self._kept: list[list[_Undo]] = [[]]
        self._chaining = False
        self.can_roll_back = all(_can_undo(c) for c in caches)

    @property
    def row_caches(self) -> Sequence[tuple[list[Any], Sequence[int]]]:
        """One list of caches per row."""
        return [(caches, [row]) for row, caches in enumerate(self._rows)]

    @property
    def records(self) -> bool:
        """Never: no part of a window is dropped alone."""
        return False

    @property
    def recurrent(self) -> bool:
        """Never: no part of a window is dropped alone."""
        return False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row.

        Positions that were read before this state was made count only where a cache tells them.
        """
        return tuple(self._lengths)

    @property
    def open_width(self) -> int:
        """Positions of the open window; 0 between rounds."""
        return self._width

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self._rows)

    def arrays(self) -> list[mx.array]:
        """Every array of every cache."""
        states = [cache.state for row in self._rows for cache in row]
        leaves = cast("dict[str, Any]", tree_flatten(states, destination={}))
        return [leaf for leaf in leaves.values() if isinstance(leaf, mx.array)]

    def bytes_at(self, positions: int) -> int:
        """Bytes of one row, as its caches are now."""
        del positions
        return sum(array.nbytes for array in self.arrays()) // max(1, self.row_count)

    def room(self, row: int) -> int | None:
        """No limit but that of every window of these rows."""
        del row
        return None

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` of at most ``most`` positions."""
        return min(needed, most)

    def begin_round(self, width: int, *, reading: bool = False) -> None:
        """Open a window on every row.

        Raises:
            RoundOpenError: a round is open.
        """
        if self._width:
            raise RoundOpenError("begin_round")
        del reading
        self._width = width
        if width > 1 or not self._chaining:
            self._forget()
        # Only a window of one position is ever begun early, so only that needs a snapshot.
        if width == 1 and self.can_roll_back:
            self._undo = [[undo for c in row for undo in _undo(c)] for row in self._rows]

    def commit_round(self) -> None:
        """Keep the whole window in every row.

        Raises:
            NoOpenRoundError: no round is open.
        """
        self.rollback([self._width] * self.row_count)

    def rollback(self, kept: Sequence[int]) -> None:
        """Keep a row's window as it is, or drop it.

        Raises:
            NoOpenRoundError: no round is open.
            RollbackError: part of a window, or a window that cannot be dropped.
        """
        width = self._width
        if not width:
            raise NoOpenRoundError("rollback")
        if len(kept) != self.row_count or any(k != width and (k or not self._undo) for k in kept):
            raise RollbackError(
                f"these caches cannot keep {list(kept)} of a window of {width} positions; "
                f"{self.reason}"
            )
        for row, count in enumerate(kept):
            if count:
                self._lengths[row] += width
                self._kept[row] += self._undo[row : row + 1]
            else:
                for undo in self._undo[row]:
                    undo()
        self._width, self._undo = 0, []

    @property
    def longest_chain(self) -> int | None:
        """Windows that a chain has at most; none where nothing can be taken back."""
        return None if self.can_roll_back else 0

    def begin_chain(self) -> None:
        """From here on windows of one position can all be taken back.

        Raises:
            RoundOpenError: a round is open.
            RollbackError: a window cannot be dropped.
        """
        if self._width:
            raise RoundOpenError("begin_chain")
        if not self.can_roll_back:
            raise RollbackError(f"these caches cannot take positions back; {self.reason}")
        self._forget()
        self._chaining = True

    def take_back(self, counts: Sequence[int]) -> None:
        """Let rows be what they were before their last ``counts`` positions.

        These are of the windows of one position of a chain, or of the last window alone.

        Raises:
            RoundOpenError: a round is open.
            RollbackError: it is not known how; nothing changed.
        """
        if self._width:
            raise RoundOpenError("take_back")
        most = [len(kept) for kept in self._kept]
        if len(counts) != len(most) or any(
            not 0 <= count <= limit for count, limit in zip(counts, most, strict=True)
        ):
            raise RollbackError(
                f"these caches cannot take back {list(counts)} positions, {most} at most; "
                f"{self.reason}"
            )
        for row, count in enumerate(counts):
            if count:
                self._lengths[row] -= count
                for undo in self._kept[row][-count]:
                    undo()
        self._forget()

    def _forget(self) -> None:
        self._kept = [[] for _ in self._rows]
        self._chaining = False

    def prepare_append(self, rows: Sequence[NativeState]) -> PendingChange:
        """This state's rows followed by those of ``rows``; a swap of lists.

        Raises:
            RoundOpenError: a round is open here or in one of ``rows``.
        """
        if any(state._width for state in (self, *rows)):
            raise RoundOpenError("prepare_append")
        caches = [row for state in (self, *rows) for row in state._rows]
        lengths = [length for state in (self, *rows) for length in state._lengths]
        return Swap(lambda: self._swap(caches, lengths))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
            RoundOpenError: a round is open.
        """
        if self._width:
            raise RoundOpenError("filter_rows")
        check_keep(keep, self.row_count)
        self._swap([self._rows[k] for k in keep], [self._lengths[k] for k in keep])

    def extract_row(self, row: int) -> list[Any]:
        """A copy of one row's caches that shares nothing with them.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: a round is open.
        """
        if self._width:
            raise RoundOpenError("extract_row")
        if not 0 <= row < self.row_count:
            raise RowIndexError("extract_row", row, self.row_count)
        return copy.deepcopy(self._rows[row])

    def write_back(self, row: int, caches: Sequence[Any]) -> None:
        """Nothing to do where the row lives in the caller's caches, as it always should.

        Raises:
            RollbackError: they are other caches.
        """
        if [id(cache) for cache in self._rows[row]] != [id(cache) for cache in caches]:
            raise RollbackError("a row of native caches can only be given back to its own caches")

    def _swap(self, rows: list[list[Any]], lengths: list[int]) -> None:
        kept = {id(row): each[-1:] for row, each in zip(self._rows, self._kept, strict=True)}
        self._rows, self._lengths = rows, lengths
        self._kept = [kept.get(id(row), []) for row in rows]
        self._chaining = False


def _length(caches: Sequence[Any]) -> int:
    offsets = [c.offset for c in caches if isinstance(getattr(c, "offset", None), int)]
    return max(offsets, default=0)


def _can_undo(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(_can_undo(part) for part in cache.caches)
    return type(cache) in (KVCache, QuantizedKVCache, ArraysCache)


def _undo(cache: Any) -> list[Callable[[], None]]:
    """Functions that take one window back out of a cache, however far the window got."""
    if isinstance(cache, CacheList):
        return [undo for part in cache.caches for undo in _undo(part)]
    if type(cache) is ArraysCache:
        arrays = list(cache.cache)
        # advance() moves these two in place, so of them a reference is no snapshot.
        padding, lengths = (
            None if a is None else mx.array(a) for a in (cache.left_padding, cache.lengths)
        )

        def restore() -> None:
            cache.cache, cache.left_padding, cache.lengths = arrays, padding, lengths

        return [restore]
    offset = cache.offset
    return [lambda: cache.trim(cache.offset - offset)]
