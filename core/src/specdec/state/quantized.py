"""Quantized K/V of several rows: the row form of ``QuantizedKVCache``.

A position is quantized when it is appended, by itself, so what a row holds does not depend on the
width of its windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen
from mlx_lm.models.cache import QuantizedKVCache

from specdec.state.attention import append, check_window, merged_buffers
from specdec.state.buffers import Buffers, of_rows, room_for
from specdec.state.cache_rows import OnlyLengthsTell

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from specdec.state.attention import AttentionRows
    from specdec.state.positions import Mask, RowPositions

__all__ = ["Format", "QuantizedRows"]

Packed = tuple[mx.array, ...]
"""Packed values, scales and biases."""


@frozen
class Format:
    """How keys and values are quantized.

    Attributes:
        group_size: values that share a scale.
        bits: of each value.
    """

    group_size: int
    bits: int


class QuantizedRows(OnlyLengthsTell):
    """One layer's quantized keys and values, left-aligned.

    Args:
        positions: the lengths that all layers of the target share.
        packing: how they are quantized.
    """

    __slots__ = ("_appended", "_buffers", "_format", "_positions")

    def __init__(self, positions: RowPositions, packing: Format) -> None:
        self._positions = positions
        self._format = packing
        self._appended = False
        self._buffers = Buffers()

    # What an mlx-lm model calls; its attention looks for ``bits``.

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return self._format.bits

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self._format.group_size

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or ``[B]`` where rows differ."""
        return self._positions.end if self._appended else self._positions.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Quantize and append the window's ``[B, heads, W, D]``; returns all that is held.

        Raises:
            RollbackError: the window is not the one that was begun.
        """
        check_window(self._positions, keys.shape[2], appended=self._appended)
        append(self._buffers, self._positions, self._packed(keys, values))
        self._appended = True
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """All that is held, the open window included."""
        positions = self._positions
        held = self._buffers.first(positions.reach if self._appended else positions.limit)
        return tuple(held[:3]), tuple(held[3:])

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """The mask for the window that is about to be appended (mlx-lm's signature)."""
        dtype = self._buffers.held[1].dtype if self._buffers.held else None
        return self._positions.mask(N, window_size, return_array, dtype)

    def size(self) -> int:
        """Positions of the longest row."""
        return self._positions.limit

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return not self._buffers.held

    # Rounds and rows; see CacheRows.

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> QuantizedRows:
        """One row that takes over an mlx-lm cache's arrays."""
        rows = cls(positions, Format(cache.group_size, cache.bits))
        if cache.keys is not None:
            rows._buffers = Buffers([*cache.keys, *cache.values])
        return rows

    @classmethod
    def of(cls, rows: AttentionRows, positions: RowPositions, packing: Format) -> QuantizedRows:
        """The same rows, quantized."""
        layer = cls(positions, packing)
        held = rows.arrays()
        if held:
            layer._buffers = Buffers(layer._packed(*held))
        return layer

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[QuantizedRows, Sequence[int]]], positions: RowPositions
    ) -> QuantizedRows:
        """A new layer of the rows that are listed with each part."""
        layer = cls(positions, parts[0][0]._format)
        layer._buffers = merged_buffers(parts)
        return layer

    def key(self, row: int) -> Hashable:
        """Rows that are quantized alike share a buffer."""
        del row
        return self._format

    @property
    def rewinds(self) -> bool:
        """Each position has a place of its own for good."""
        return True

    def finish(self, kept: Sequence[int] | None) -> None:
        """Whatever is kept, only the lengths tell."""
        del kept
        self._appended = False

    def extract(self, row: int, *, share: bool = False) -> QuantizedKVCache:
        """One row as an mlx-lm cache."""
        cache, length = QuantizedKVCache(self.group_size, self.bits), self._positions.lengths[row]
        if length and self._buffers.held:
            held = self._buffers.held if share else self._buffers.row(row, length)
            cache.keys, cache.values = tuple(held[:3]), tuple(held[3:])
            cache.offset = length
        return cache

    def donor(self, columns: int, rows: Sequence[int] | None) -> tuple[mx.array, mx.array] | None:
        """As :meth:`AttentionRows.donor`, in the type that was quantized."""
        if not self._buffers.held:
            return None
        held = of_rows(self._buffers.first(columns), rows)
        return self._unpacked(*held[:3]), self._unpacked(*held[3:])

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return list(self._buffers.held)

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row's share of the buffers."""
        return self._buffers.position_bytes * room_for(positions)

    def _packed(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        def pack(array: mx.array) -> list[mx.array]:
            return list(mx.quantize(array, group_size=self.group_size, bits=self.bits))

        return [*pack(keys), *pack(values)]

    def _unpacked(self, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)
