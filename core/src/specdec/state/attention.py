"""Attention K/V of several rows in one buffer: the row form of ``KVCache``.

Given to an mlx-lm model in place of its own cache, so the model's code runs as it is. Rows are
left-aligned: position p stands at place p, and a rollback does not touch the buffer.
``ConcatenateKVCache``, which mlx-lm uses for layers whose keys others read, has the same form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import KVCache

from specdec.errors import RollbackError
from specdec.state.buffers import Buffers, merged, of_rows, room_for
from specdec.state.cache_rows import OnlyLengthsTell

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import mlx.core as mx

    from specdec.state.positions import Mask, RowPositions

__all__ = ["AttentionRows", "append", "check_window", "merged_buffers"]


class AttentionRows(OnlyLengthsTell):
    """One layer's keys and values ``[B, heads, capacity, D]``, left-aligned.

    Args:
        positions: the lengths that all layers of the target share.
        kind: the mlx-lm class that a row of it is extracted as.
    """

    __slots__ = ("_appended", "_buffers", "_kind", "_positions")

    def __init__(self, positions: RowPositions, kind: type[Any] = KVCache) -> None:
        self._positions = positions
        self._kind = kind
        self._appended = False
        self._buffers = Buffers()

    # What an mlx-lm model calls.

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or ``[B]`` where rows differ."""
        return self._positions.end if self._appended else self._positions.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the window's keys and values ``[B, heads, W, D]``; returns all that is held.

        Raises:
            RollbackError: the window is not the one that was begun.
        """
        check_window(self._positions, keys.shape[2], appended=self._appended)
        append(self._buffers, self._positions, (keys, values))
        self._appended = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All that is held, the open window included."""
        positions = self._positions
        keys, values = self._buffers.first(positions.reach if self._appended else positions.limit)
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the window that is about to be appended (mlx-lm's signature)."""
        dtype = self._buffers.held[0].dtype if self._buffers.held else None
        return self._positions.mask(N, window_size, return_array, dtype)

    def block_mask(self, columns: Sequence[int], *, causal: bool = False) -> Mask:
        """The mask for an appended window that is a drafter's block.

        Args:
            columns: B ints, positions of each row's block; what is behind them is padding.
            causal: whether a position sees no later one of its block.
        """
        return self._positions.block_mask(columns, causal=causal, dtype=self._buffers.held[0].dtype)

    # Some models reach into their caches to keep the lazy graph short.

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys."""
        return self._buffers.held[0] if self._buffers.held else None

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._buffers.held[0] = keys

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values."""
        return self._buffers.held[1] if self._buffers.held else None

    @values.setter
    def values(self, values: mx.array) -> None:
        self._buffers.held[1] = values

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values held so far, the open window included."""
        if not self._buffers.held:
            return None, None
        keys, values = self._buffers.first(self._positions.limit)
        return keys, values

    def size(self) -> int:
        """Positions of the longest row."""
        return self._positions.limit

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return not self._buffers.held

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(a.nbytes for a in self._buffers.held)

    @property
    def quantizable(self) -> bool:
        """Whether mlx-lm would quantize a cache of this kind."""
        return hasattr(self._kind, "to_quantized")

    # Rounds and rows; see CacheRows.

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> AttentionRows:
        """One row that takes over an mlx-lm cache's arrays."""
        rows = cls(positions, type(cache))
        if cache.keys is not None:
            rows._buffers = Buffers([cache.keys, cache.values])
        return rows

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[AttentionRows, Sequence[int]]], positions: RowPositions
    ) -> AttentionRows:
        """A new layer of the rows that are listed with each part."""
        layer = cls(positions, parts[0][0]._kind)
        layer._buffers = merged_buffers(parts)
        return layer

    def key(self, row: int) -> Hashable:
        """Rows of plain keys and values share a buffer whatever their lengths."""
        del row
        return self._kind.__name__

    @property
    def rewinds(self) -> bool:
        """Each position has a place of its own for good."""
        return True

    def finish(self, kept: Sequence[int] | None) -> None:
        """Whatever is kept, only the lengths tell."""
        del kept
        self._appended = False

    def extract(self, row: int, *, share: bool = False) -> Any:
        """One row as an mlx-lm cache of the kind it came from."""
        cache, length = self._kind(), self._positions.lengths[row]
        if length and self._buffers.held:
            held = self._buffers
            if share and self._kind is KVCache:
                cache.keys, cache.values = held.held
            else:
                cache.keys, cache.values = held.row(row, length)
            cache.offset = length
        return cache

    def donor(self, columns: int, rows: Sequence[int] | None) -> tuple[mx.array, mx.array] | None:
        """Keys and values of the first positions, between rounds, for whoever borrows them.

        Args:
            columns: positions, as many as the longest of the rows has.
            rows: one or more numbers of rows; ``None`` for all.

        Returns:
            Each ``[rows, heads, columns, D]``, or fewer columns than there is room for; ``None``
            where nothing was ever appended.
        """
        if not self._buffers.held:
            return None
        keys, values = of_rows(self._buffers.first(columns), rows)
        return keys, values

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return list(self._buffers.held)

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row's share of the buffers."""
        return self._buffers.position_bytes * room_for(positions)


def check_window(positions: RowPositions, width: int, *, appended: bool) -> None:
    """Check that a window that is appended is the one that was begun.

    Raises:
        RollbackError: it is not.
    """
    if width != positions.width or appended:
        raise RollbackError(
            f"a window of {width} positions was appended, but a round of {positions.width} "
            "was begun; begin_round() comes before each forward"
        )


def append(buffers: Buffers, positions: RowPositions, new: Sequence[mx.array]) -> None:
    """Put the open window behind each row."""
    buffers.reserve(positions.reach, new)
    start = positions.start
    if isinstance(start, int):
        buffers.write(start, new)
    else:
        buffers.scatter(positions.write_index(), new)


def merged_buffers(parts: Sequence[tuple[Any, Sequence[int]]]) -> Buffers:
    """Buffers of the rows that are listed with each part; a whole part alone shares its own."""
    taken = []
    for part, rows in parts:
        held: Buffers = part._buffers
        whole = list(rows) == list(range(len(part._positions.lengths)))
        taken.append((held if whole or not held.held else held.taken(rows), len(rows)))
    if len(taken) == 1:
        return Buffers(taken[0][0].held)
    return merged(taken)
