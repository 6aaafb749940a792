"""The dynamic convolutions of DFlash 2, one before and one after each part of a layer.

Each sums a column and those just before it in the block, with weights of two kinds: one per feature
that is fixed, and one per group of features that the column itself gives. Nothing crosses the
block's start.

Shapes: B rows, W columns, H features, G groups, K kernel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

if TYPE_CHECKING:
    from specdec_dflash.config import Convolutions

__all__ = ["DynamicConvolution"]


class DynamicConvolution(Module):
    """Both convolutions of one part; their dynamic weights come from its normed input.

    Args:
        hidden_size: H.
        settings: kernel and groups.
    """

    def __init__(self, hidden_size: int, settings: Convolutions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self._size = settings.group_size
        self._taps = settings.kernel_size
        groups = hidden_size // settings.group_size
        self.base_kernel = mx.zeros((2, settings.kernel_size, hidden_size))
        self.kernel_projection = Linear(hidden_size, 2 * settings.kernel_size * groups, bias=False)

    def before(self, normed: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve a part's normed input ``[B, W, H]``.

        Returns:
            ``[B, W, H]``, and the weights ``[B, W, K, G]`` for :meth:`after`.
        """
        rows, width, _ = normed.shape
        weights = self.kernel_projection(normed).reshape(rows, width, 2, self._taps, -1)
        return self._convolved(normed, weights[:, :, 0], self.base_kernel[0]), weights[:, :, 1]

    def after(self, output: mx.array, weights: mx.array) -> mx.array:
        """Convolve a part's output ``[B, W, H]``."""
        return self._convolved(output, weights, self.base_kernel[1])

    def _convolved(self, values: mx.array, weights: mx.array, base: mx.array) -> mx.array:
        rows, width, hidden = values.shape
        grouped = values.astype(mx.float32).reshape(rows, width, -1, self._size)
        fixed = base.astype(mx.float32).reshape(self._taps, -1, self._size)
        total = mx.zeros_like(grouped)
        for back in range(min(self._taps, width)):
            shifted = mx.pad(grouped[:, : width - back], [(0, 0), (back, 0), (0, 0), (0, 0)])
            total = total + shifted * (fixed[back] + weights[:, :, back, :, None])
        return total.reshape(rows, width, hidden).astype(values.dtype)
