"""How many bytes a row's caches take, told by shapes, which MLX knows before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.state.kernels import key_reach, plans_by_shape

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
        together = state.reason is None
        wanted = max(1, tokens)
        if together:
            # Buffers of rows that share one grow by an eighth (state/attention.py), and on some
            # backends to the length that keys are read at.
            wanted = (key_reach(wanted, 2) if plans_by_shape() else wanted) * 9 // 8
        room = -(-wanted // _STEP) * _STEP
        if room not in self._bytes:
            # Caches of windows hold what one chunk brings, so these are filled as prompts are.
            chunk = room if together else _CHUNK
            for start in range(0, room, chunk):
                width = min(chunk, room - start)
                state.begin_round(width)
                target.forward(mx.zeros((1, width), mx.int32), state)
                state.commit_round()
            self._bytes[room] = sum(array.nbytes for array in state.arrays())
        return self._bytes[room]
