"""Log-probabilities of emitted tokens and of the best alternatives.

They are those of the target after processors and constraints, before filters and temperature, as
mlx-lm gives them, and come with the round's one host read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import frozen

from specdec.verify.emission import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HostLogprobs", "WindowLogprobs"]


@frozen
class HostLogprobs:
    """The log-probabilities of a window on the host; fields as in :class:`WindowLogprobs`."""

    chosen: list[list[float]]
    ranks: list[list[int]]
    ids: list[list[list[int]]]
    values: list[list[list[float]]]

    def at(self, row: int, position: int, count: int) -> TokenLogprobs:
        """What one emission reports.

        Args:
            row: row of the window.
            position: position of the window.
            count: alternatives to report.
        """
        top = zip(self.ids[row][position], self.values[row][position], strict=True)
        return TokenLogprobs(
            self.chosen[row][position],
            self.ranks[row][position],
            # What a processor or a constraint rules out is no alternative.
            tuple((token, value) for token, value in list(top)[:count] if value > -math.inf),
        )


@frozen(eq=False)
class WindowLogprobs:
    """The log-probabilities of a window on the device, float32.

    Attributes:
        chosen: ``[B, W]`` of the drawn tokens.
        ranks: ``[B, W]`` 1 + the number of tokens that are more probable.
        ids: ``[B, W, K]`` the most probable tokens, best first.
        values: ``[B, W, K]`` theirs.
    """

    chosen: mx.array
    ranks: mx.array
    ids: mx.array
    values: mx.array

    @classmethod
    def of(cls, logprobs: mx.array, samples: mx.array, count: int) -> Self:
        """Gather them from a window.

        Args:
            logprobs: ``[B, W, V]``.
            samples: ``[B, W]`` drawn ids; -1 where nothing could be drawn.
            count: alternatives to keep, K.
        """
        drawn = mx.maximum(samples.astype(mx.int32), 0)[..., None]
        scores = logprobs.astype(mx.float32)
        chosen = mx.take_along_axis(scores, drawn, axis=-1)
        ranks = 1 + (scores > chosen).sum(axis=-1)
        count = min(count, logprobs.shape[-1])
        if count == 0:
            ids = mx.zeros((*samples.shape, 0), mx.int32)
            return cls(chosen[..., 0], ranks, ids, ids.astype(mx.float32))
        ids = mx.arange(scores.shape[-1], dtype=mx.int32)
        if count < scores.shape[-1]:
            ids = mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]
        else:
            ids = mx.broadcast_to(ids, scores.shape)
        ids = mx.sort(ids, axis=-1)  # equal scores come in the order of their ids
        values = mx.take_along_axis(scores, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        return cls(
            chosen[..., 0],
            ranks,
            mx.take_along_axis(ids, order, axis=-1),
            mx.take_along_axis(values, order, axis=-1),
        )

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All of them, to be evaluated."""
        return self.chosen, self.ranks, self.ids, self.values

    def take(self, index: mx.array) -> Self:
        """Some rows, in a new order."""
        return type(self)(*(array[index] for array in self.arrays))

    def on_host(self, read: Sequence[list[list[float]]]) -> HostLogprobs:
        """What was read of ``arrays``, under their names."""
        chosen, ranks, ids, values = read
        return HostLogprobs(chosen, ranks, ids, values)  # type: ignore[arg-type]  # ints as read
