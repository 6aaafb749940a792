"""Chunked attention K/V: the row form of ``ChunkedKVCache``, whose queries see their own chunk.

The model's code computes its mask from two plain numbers, so rows share buffers only while their
lengths are equal. What no query sees any more is dropped in steps, not at every position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from specdec.errors import RollbackError
from specdec.state.attention import check_window, merged_buffers
from specdec.state.buffers import Buffers, room_for
from specdec.state.cache_rows import OnlyLengthsTell

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from specdec.state.positions import RowPositions

__all__ = ["ChunkedRows"]

_STEP = 256  # dropped at once


class ChunkedRows(OnlyLengthsTell):
    """One layer's keys and values ``[B, heads, capacity, D]`` from ``start_position`` on.

    Args:
        positions: the lengths that all layers of the target share.
        chunk_size: positions of an attention chunk.
        start_position: the first position that is held.
    """

    __slots__ = ("_appended", "_buffers", "_chaining", "_positions", "chunk_size", "start_position")

    def __init__(self, positions: RowPositions, chunk_size: int, start_position: int = 0) -> None:
        self._positions = positions
        self._appended = False
        self._chaining = False
        self._buffers = Buffers()
        self.chunk_size = chunk_size
        self.start_position = start_position

    # What an mlx-lm model calls.

    @property
    def offset(self) -> int:
        """Position of the next token.

        Raises:
            RollbackError: rows of different length share this layer.
        """
        start = self._positions.start
        if not isinstance(start, int):
            raise RollbackError("rows of different length cannot share a chunked attention layer")
        return start + (self._positions.width if self._appended else 0)

    def maybe_trim_front(self) -> None:
        """Drop what no query sees any more, in steps; in a chain a row may see it again."""
        if self._chaining:
            return
        held = self.offset - self.start_position
        drop = (held - self.chunk_size) // _STEP * _STEP
        if drop > 0 and self._buffers.held:
            self.start_position += drop
            self._buffers = Buffers(
                [mx.contiguous(array[..., drop:held, :]) for array in self._buffers.held]
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the window's keys and values ``[B, heads, W, D]``; returns all that is held.

        Raises:
            RollbackError: the window is not the one that was begun.
        """
        width = keys.shape[2]
        check_window(self._positions, width, appended=self._appended)
        place = self.offset - self.start_position
        self._buffers.reserve(place + width, (keys, values))
        self._buffers.write(place, (keys, values))
        self._appended = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All that is held, the open window included."""
        keys, values = self._buffers.first(self.offset - self.start_position)
        return keys, values

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return not self._buffers.held

    # Rounds and rows; see CacheRows.

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> ChunkedRows:
        """One row that takes over an mlx-lm cache's arrays."""
        rows = cls(positions, cache.chunk_size, cache.start_position)
        if cache.keys is not None:
            rows._buffers = Buffers([cache.keys, cache.values])
        return rows

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[ChunkedRows, Sequence[int]]], positions: RowPositions
    ) -> ChunkedRows:
        """A new layer of the rows that are listed with each part."""
        like = parts[0][0]
        layer = cls(positions, like.chunk_size, like.start_position)
        layer._buffers = merged_buffers(parts)
        layer._chaining = like._chaining
        return layer

    def key(self, row: int) -> Hashable:
        """Rows of one length that hold the same positions share a buffer."""
        return self.chunk_size, self.start_position, self._positions.lengths[row]

    @property
    def split(self) -> bool:
        """Whether rows have come to have different lengths."""
        return not self._positions.uniform

    @property
    def longest_chain(self) -> None:
        """No limit: nothing is dropped in a chain."""
        return

    def begin_chain(self) -> None:
        """Nothing is dropped from here on."""
        self._chaining = True

    def end_chain(self) -> None:
        """What no query sees any more is dropped again."""
        self._chaining = False

    def finish(self, kept: Sequence[int] | None) -> None:
        """Whatever is kept, only the lengths tell."""
        del kept
        self._appended = False

    def extract(self, row: int, *, share: bool = False) -> ChunkedKVCache:
        """One row as an mlx-lm cache."""
        cache, length = ChunkedKVCache(self.chunk_size), self._positions.lengths[row]
        if length and self._buffers.held:
            held = length - self.start_position
            cache.keys, cache.values = self._buffers.held if share else self._buffers.row(row, held)
            cache.offset, cache.start_position = length, self.start_position
        return cache

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return list(self._buffers.held)

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row's share of the buffers."""
        held = min(positions, self.chunk_size + _STEP)
        return self._buffers.position_bytes * room_for(held)
