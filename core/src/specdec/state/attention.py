"""Attention K/V of several rows in one buffer: the row form of mlx-lm's ``KVCache``.

Given to an mlx-lm model in place of its own cache, so the model's code runs as it is. Appending a
window writes W positions per row into a buffer that nobody else holds: a held view of it would
stop MLX from writing in place, so no reference to the buffer is kept between rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from specdec.errors import RollbackError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state.positions import Mask, RowPositions

__all__ = ["AttentionRows"]

_STEP = 256  # capacity grows in mlx-lm's own unit


class AttentionRows:
    """One layer's keys and values ``[B, heads, capacity, D]``, left-aligned.

    Args:
        positions: the lengths that all layers of the target share.
    """

    __slots__ = ("_appended", "_positions", "keys", "values")

    cache_type = KVCache

    def __init__(self, positions: RowPositions) -> None:
        self._positions = positions
        self._appended = False
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

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
        positions = self._positions
        width = keys.shape[2]
        if width != positions.width or self._appended:
            raise RollbackError(
                f"a window of {width} positions was appended, but a round of {positions.width} "
                "was begun; begin_round() comes before each forward"
            )
        limit, reach = positions.limit, positions.reach
        if self.keys is None or self.values is None or reach > self.keys.shape[2]:
            self._grow(reach, keys, values)
        assert self.keys is not None
        assert self.values is not None
        start = positions.start
        if isinstance(start, int):
            self.keys[..., start:limit, :] = keys
            self.values[..., start:limit, :] = values
        else:
            index = positions.write_index()
            self.keys = mx.put_along_axis(
                self.keys, mx.broadcast_to(index, keys.shape), keys, axis=2
            )
            self.values = mx.put_along_axis(
                self.values, mx.broadcast_to(index, values.shape), values, axis=2
            )
        self._appended = True
        return self.keys[..., :reach, :], self.values[..., :reach, :]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the window that is about to be appended (mlx-lm's signature)."""
        dtype = None if self.keys is None else self.keys.dtype
        return self._positions.mask(N, window_size, return_array, dtype)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values held so far, the open window included."""
        if self.keys is None or self.values is None:
            return None, None
        limit = self._positions.limit
        return self.keys[..., :limit, :], self.values[..., :limit, :]

    def size(self) -> int:
        """Positions of the longest row."""
        return self._positions.limit

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(a.nbytes for a in self.arrays())

    # Rounds.

    def finish_round(self) -> None:
        """The shared positions have closed the window."""
        self._appended = False

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return [a for a in (self.keys, self.values) if a is not None]

    # Membership. Each of these builds new arrays and leaves the layer as it was.

    @classmethod
    def adopt(cls, cache: KVCache, positions: RowPositions) -> AttentionRows:
        """One row that takes over an mlx-lm cache's arrays; the cache is emptied by its owner."""
        rows = cls(positions)
        rows.keys, rows.values = cache.keys, cache.values
        return rows

    @staticmethod
    def merged(parts: Sequence[AttentionRows]) -> tuple[mx.array | None, mx.array | None]:
        """Buffers that hold the rows of all parts, in order."""
        filled = [p for p in parts if p.keys is not None and p.values is not None]
        if not filled:
            return None, None
        if len(parts) == 1:
            return filled[0].keys, filled[0].values
        capacity = max(a.shape[2] for p in filled for a in p.arrays())

        def stack(name: str) -> mx.array:
            like = getattr(filled[0], name)
            blocks = []
            for part in parts:
                array = getattr(part, name)
                count = len(part._positions.lengths)
                if array is None:
                    shape = (count, like.shape[1], capacity, like.shape[3])
                    blocks.append(mx.zeros(shape, like.dtype))
                else:
                    blocks.append(_padded(array, capacity))
            return mx.concatenate(blocks, axis=0)

        return stack("keys"), stack("values")

    def taken(self, keep: mx.array) -> tuple[mx.array | None, mx.array | None]:
        """Buffers of the rows ``keep`` (int32 indices) alone."""
        if self.keys is None or self.values is None:
            return None, None
        return mx.take(self.keys, keep, axis=0), mx.take(self.values, keep, axis=0)

    def extract(self, row: int, length: int) -> KVCache:
        """One row as an mlx-lm cache that shares nothing with this buffer (evaluate it)."""
        cache = KVCache()
        if length and self.keys is not None and self.values is not None:
            cache.keys = mx.contiguous(self.keys[row : row + 1, :, :length])
            cache.values = mx.contiguous(self.values[row : row + 1, :, :length])
            cache.offset = length
        return cache

    def _grow(self, reach: int, keys: mx.array, values: mx.array) -> None:
        # An eighth of headroom keeps the copies amortised at any context length.
        wanted = reach if self.keys is None else reach * 9 // 8
        capacity = -(-wanted // _STEP) * _STEP
        grown = []
        for held, new in ((self.keys, keys), (self.values, values)):
            if held is None:
                grown.append(mx.zeros((*new.shape[:2], capacity, new.shape[3]), new.dtype))
            else:
                grown.append(_padded(held, capacity))
        self.keys, self.values = grown


def _padded(array: mx.array, capacity: int) -> mx.array:
    """``array`` with zeros up to ``capacity`` positions on its third axis."""
    missing = capacity - array.shape[2]
    if missing <= 0:
        return array
    zeros = mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array, zeros], axis=2)
