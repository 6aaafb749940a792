"""Row samplers that remember what a drafter asked of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.sampling import RowSamplers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

__all__ = ["WatchedSamplers"]


class WatchedSamplers(RowSamplers):
    """The executor's samplers.

    Attributes:
        asked: the steps of every draw of a drafter, B ints each, oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []

    def sample(
        self, logprobs: mx.array, steps: Sequence[int], ids: mx.array | None = None
    ) -> mx.array:
        """Each row's draw at one position: ``[B, V] -> [B]``."""
        self.asked.append(tuple(int(step) for step in steps))
        return super().sample(logprobs, steps, ids)
