"""Rotary positions in plain numpy: RoFormer (arXiv 2104.09864) and YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Vectors", "frequencies", "magnitude_at", "turned"]

Vectors = NDArray[np.float64]


def frequencies(
    size: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Vectors, float]:
    """Radians a position for each pair of a vector, [size / 2], and a factor of the vector."""
    plain = theta ** (-np.arange(0, size, 2) / size)
    scaling = scaling or {}
    kind = scaling.get("type", scaling.get("rope_type", "default"))
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind != "yarn":
        assert kind == "default", kind
        return plain, 1.0
    # YaRN, arXiv 2309.00071: a pair that turns often keeps its speed, one that hardly turns is
    # slowed by the factor, and the pairs between are mixed.
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return float(size * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta)))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), size - 1)
    slowed = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    magnitude = magnitude_at(factor, scaling.get("mscale", 1)) / magnitude_at(
        factor, scaling.get("mscale_all_dim", 0)
    )
    return plain * (1 - slowed) + plain / factor * slowed, magnitude


def magnitude_at(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def turned(x: Vectors, rope: tuple[Vectors, float], *, neighbours: bool) -> Vectors:
    """Rotary positions 0..n-1 on the first places of ``x`` [n, heads, D].

    A pair is two neighbours, or a place of the first half and its place in the second.
    """
    speeds, magnitude = rope
    count = len(speeds)
    head, tail = x[..., : 2 * count] * magnitude, x[..., 2 * count :]
    one, two = (
        (head[..., 0::2], head[..., 1::2]) if neighbours else (head[..., :count], head[..., count:])
    )
    angle = (np.arange(len(x))[:, None] * speeds)[:, None, :]
    first = one * np.cos(angle) - two * np.sin(angle)
    second = one * np.sin(angle) + two * np.cos(angle)
    if neighbours:
        turned = np.stack([first, second], axis=-1).reshape(head.shape)
    else:
        turned = np.concatenate([first, second], axis=-1)
    return np.concatenate([turned, tail], axis=-1)
