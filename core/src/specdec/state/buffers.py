"""Arrays ``[B, heads, capacity, D]`` that rows append to along their third axis.

Keys and values are two of them; quantized ones are six. Appending writes into a buffer that nobody
else holds: a held view would stop MLX from writing in place, so nobody keeps one between rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Buffers", "merged", "of_rows", "room_for"]

_STEP = 256  # capacity grows in mlx-lm's own unit


def room_for(positions: int, *, grown: bool = True) -> int:
    """The capacity that a buffer has for so many positions.

    Args:
        positions: that it must hold.
        grown: whether it was grown to hold them, rather than made for them.
    """
    # An eighth of headroom keeps the copies amortised at any context length.
    wanted = positions * 9 // 8 if grown else positions
    return -(-wanted // _STEP) * _STEP


class Buffers:
    """Arrays of one capacity.

    Attributes:
        held: the arrays; empty until something is written.
    """

    __slots__ = ("held",)

    def __init__(self, held: Sequence[mx.array] = ()) -> None:
        self.held = list(held)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.held[0].shape[2] if self.held else 0

    @property
    def position_bytes(self) -> int:
        """Bytes that one position of one row takes."""
        return sum(a.itemsize * a.shape[1] * a.shape[3] for a in self.held)

    def reserve(self, positions: int, new: Sequence[mx.array], most: int | None = None) -> None:
        """Let so many positions fit.

        Args:
            positions: of the longest row.
            new: arrays of the rows, heads, sizes and types to hold.
            most: a capacity that is never needed more of.
        """
        if positions <= self.capacity:
            return
        capacity = room_for(positions, grown=bool(self.held))
        capacity = capacity if most is None else min(capacity, most)
        if self.held:
            self.held = [_padded(array, capacity) for array in self.held]
        else:
            self.held = [
                mx.zeros((*array.shape[:2], capacity, array.shape[3]), array.dtype) for array in new
            ]

    def write(self, start: int, new: Sequence[mx.array]) -> None:
        """Put ``[B, heads, W, D]`` at one place of every row."""
        end = start + new[0].shape[2]
        for array, values in zip(self.held, new, strict=True):
            array[..., start:end, :] = values

    def scatter(self, index: mx.array, new: Sequence[mx.array]) -> None:
        """Put ``[B, heads, W, D]`` at the places ``[B, 1, W, 1]``."""
        self.held = [
            mx.put_along_axis(array, mx.broadcast_to(index, values.shape), values, axis=2)
            for array, values in zip(self.held, new, strict=True)
        ]

    def first(self, positions: int) -> list[mx.array]:
        """The first positions of every row."""
        return [array[..., :positions, :] for array in self.held]

    def gathered(self, index: mx.array) -> list[mx.array]:
        """What stands at the places ``[B, 1, n, 1]``, as ``[B, heads, n, D]``."""
        return [
            mx.take_along_axis(array, mx.broadcast_to(index, _at(array, index)), axis=2)
            for array in self.held
        ]

    def taken(self, rows: Sequence[int]) -> Buffers:
        """New buffers of these rows alone."""
        index = mx.array(list(rows), mx.int32)
        return Buffers([mx.take(array, index, axis=0) for array in self.held])

    def row(self, row: int, positions: int) -> list[mx.array]:
        """Copies of a row's first positions."""
        return [mx.contiguous(array[row : row + 1, :, :positions]) for array in self.held]


def merged(parts: Sequence[tuple[Buffers, int]]) -> Buffers:
    """New buffers that hold the rows of all parts, in order.

    Args:
        parts: buffers, each with the number of its rows, since empty ones cannot tell.
    """
    filled = [buffers for buffers, _ in parts if buffers.held]
    if not filled:
        return Buffers()
    capacity = max(buffers.capacity for buffers in filled)
    columns: list[list[mx.array]] = [[] for _ in filled[0].held]
    for buffers, count in parts:
        for column, like, place in zip(columns, filled[0].held, range(len(columns)), strict=True):
            if buffers.held:
                column.append(_padded(buffers.held[place], capacity))
            else:
                shape = (count, like.shape[1], capacity, like.shape[3])
                column.append(mx.zeros(shape, like.dtype))
    return Buffers([mx.concatenate(column, axis=0) for column in columns])


def of_rows(arrays: Sequence[mx.array], rows: Sequence[int] | None) -> list[mx.array]:
    """Some rows of arrays, as views where they are a run.

    Args:
        arrays: ``[B, ...]`` each.
        rows: one or more of their numbers; ``None`` for all.
    """
    if rows is None:
        return list(arrays)
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return [array[rows[0] : rows[0] + len(rows)] for array in arrays]
    index = mx.array(list(rows), mx.int32)
    return [mx.take(array, index, axis=0) for array in arrays]


def _at(array: mx.array, index: mx.array) -> tuple[int, ...]:
    return (*array.shape[:2], index.shape[2], array.shape[3])


def _padded(array: mx.array, capacity: int) -> mx.array:
    """``array`` with zeros up to ``capacity`` positions on its third axis."""
    missing = capacity - array.shape[2]
    if missing <= 0:
        return array
    zeros = mx.zeros((*array.shape[:2], missing, array.shape[3]), array.dtype)
    return mx.concatenate([array, zeros], axis=2)
