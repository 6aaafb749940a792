"""How many bytes a row's caches take, told by shapes, which MLX knows before it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.state import CacheOptions
from specdec.state.kernels import key_reach, plans_by_shape

if TYPE_CHECKING:
    from specdec.state import RowState
    from specdec.targets.protocol import Target

__all__ = ["RowSizes"]


class RowSizes:
    """Bytes of rows of one target, told by a row of one position that is never computed."""

    def __init__(self) -> None:
        self._states: dict[int | None, RowState] = {}

    def at(self, target: Target, tokens: int, options: CacheOptions) -> int:
        """Bytes of one row at so many positions at most.

        Args:
            target: the bound target.
            tokens: positions.
            options: how the row is cached; what is quantized on the way counts as it was before.
        """
        wanted = max(1, tokens)
        if plans_by_shape():
            wanted = key_reach(wanted, 2)  # keys are read up to a longer length there
        size = options.max_kv_size
        if size not in self._states:
            state = target.new_state(CacheOptions(max_kv_size=size))
            state.begin_round(1)
            target.forward(mx.zeros((1, 1), mx.int32), state)
            state.commit_round()
            self._states[size] = state
        return self._states[size].bytes_at(wanted)
