"""How many bytes a row's caches take, told by shapes, which MLX knows before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from specdec.targets.protocol import Target

__all__ = ["RowSizes"]

_STEP = 256  # positions that buffers grow by
_CHUNK = 2048  # positions that are read at once


class RowSizes:
    """Bytes of rows of one target, each size of buffer computed once."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def at(self, target: Target, tokens: int) -> int:
        """Bytes of one row at so many positions at most."""
        state = target.new_state()
        # Buffers of rows that share one may grow by an eighth (state/attention.py).
        wanted = tokens if state.reason is not None else tokens * 9 // 8
        room = -(-max(1, wanted) // _STEP) * _STEP
        if room not in self._bytes:
            for start in range(0, room, _CHUNK):
                width = min(_CHUNK, room - start)
                state.begin_round(width)
                target.forward(mx.zeros((1, width), mx.int32), state)
                state.commit_round()
            self._bytes[room] = sum(array.nbytes for array in state.arrays())
        return self._bytes[room]
