"""The kernel where it fits and where it works; elsewhere mlx-lm's loop stays."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from specdec.errors import one_line
from specdec.targets.recurrent.kernel import run_kernel, takes
from specdec.targets.recurrent.update import DeltaWindow

__all__ = ["CudaUpdate", "cuda_update"]

_CLOSE = 0.02  # of the largest number, to what mlx-lm's loop gives; in 16 bits rounding is 0.004


class CudaUpdate:
    """The CUDA kernel, as a ``DeltaUpdate``.

    For every combination of types and key size it is tried once beside mlx-lm's loop, on a few
    numbers. Where it does not compile, or gives something else, the loop is used instead.

    Attributes:
        failures: why it is not used for a combination, in the order in which that was seen.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._works: dict[tuple[Any, ...], bool] = {}

    def __call__(self, window: DeltaWindow, /, *, every: bool) -> tuple[mx.array, mx.array] | None:
        """See ``DeltaUpdate``."""
        if not takes(window) or not _on_gpu():
            return None
        arrays = (window.q, window.k, window.v, window.g, window.beta)
        key = (window.k.shape[3], window.g.ndim, window.mask is None, *(a.dtype for a in arrays))
        if key not in self._works:
            fault = _fault_of(_small(window))
            self._works[key] = fault is None
            self.failures += [] if fault is None else [fault]
        return run_kernel(window, every=every) if self._works[key] else None


def _on_gpu() -> bool:
    return bool(mx.default_device().type == mx.gpu)


@cache
def cuda_update() -> CudaUpdate | None:
    """The kernel, where MLX computes on CUDA; one for all models."""
    return CudaUpdate() if mx.cuda.is_available() else None


def _fault_of(window: DeltaWindow) -> str | None:
    """What is wrong with the kernel for such arrays, if anything is."""
    try:
        # Whether every state is wanted makes another kernel; both are needed sooner or later.
        (outputs, states), (same, last) = (run_kernel(window, every=each) for each in (True, False))
        mx.eval(outputs, states, same, last)
    except (RuntimeError, ValueError) as error:
        return f"the CUDA kernel does not run here ({one_line(error)})"
    wanted, state = gated_delta_ops(*(getattr(window, name) for name in _NAMES))
    pairs = [(outputs, wanted), (same, wanted), (states[-1], state), (last[0], state)]
    far = [distance for distance in (_distance(*pair) for pair in pairs) if not distance < _CLOSE]
    return f"the CUDA kernel is {max(far):.2g} off mlx-lm's loop here" if far else None


_NAMES = ("q", "k", "v", "g", "beta", "state", "mask")


def _small(window: DeltaWindow) -> DeltaWindow:
    """Numbers of the same types: three positions of two rows, one key head, two value heads."""
    keys = window.k.shape[3]

    seeds = count()

    def numbers(like: mx.array, low: float, high: float, *shape: int) -> mx.array:
        key = mx.random.key(next(seeds))
        return mx.random.uniform(low, high, shape, key=key).astype(like.dtype)

    gate = (2, 3, 2, keys)[: window.g.ndim]
    spread = keys**-0.5
    return DeltaWindow(
        q=numbers(window.q, -spread, spread, 2, 3, 1, keys),
        k=numbers(window.k, -spread, spread, 2, 3, 1, keys),
        v=numbers(window.v, -1, 1, 2, 3, 2, 5),
        g=numbers(window.g, 0.5, 1, *gate),
        beta=numbers(window.beta, 0, 1, 2, 3, 2),
        state=mx.random.uniform(-1, 1, (2, 2, 5, keys), key=mx.random.key(5)),
        mask=None if window.mask is None else mx.array([[True, False, True], [True] * 3]),
    )


def _distance(got: mx.array, want: mx.array) -> float:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    farthest: Any = (mx.abs(got - want).max() / mx.abs(want).max()).item()
    return float(farthest)
