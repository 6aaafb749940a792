"""Small assistants with seeded random weights, for tests: nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import evolve

from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec_assistant.config import AssistantConfig, Centroids, LayerKind, Rope
from specdec_assistant.model import AssistantModel
from specdec_assistant.provider import Assistant, AssistantProvider, Positions

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TINY", "random_weights", "tiny_assistant"]

FULL: Final = LayerKind.FULL
SLIDING: Final = LayerKind.SLIDING

TINY: Final = AssistantConfig(
    backbone_size=32,
    hidden_size=24,
    heads=2,
    intermediate_size=40,
    vocab_size=8,
    eps=1e-6,
    layers=(SLIDING, FULL),
    head_dims={SLIDING: 16, FULL: 16},
    ropes={SLIDING: Rope(10000.0, 16), FULL: Rope(1000000.0, 4)},
    window=5,
    centroids=Centroids(count=4, top_k=2),
)
"""An assistant of two layers, for a target of hidden size 32 with heads of 16 features."""


def tiny_assistant(
    *,
    seed: int = 0,
    sparse: bool = False,
    positions: Positions = Positions.CONSTANT,
    **changes: Any,
) -> AssistantProvider:
    """A small assistant.

    Args:
        seed: of the weights, 0 or more.
        sparse: whether its head looks at the best centroids alone.
        positions: where its queries stand.
        changes: of :data:`TINY`.
    """
    config = evolve(TINY, **changes)
    ordering = None
    if sparse:
        ordering = mx.random.permutation(config.vocab_size, key=mx.random.key(seed + 17))
    with without_drawing():
        model = AssistantModel(config, ordering)
    load_module("a tiny assistant", model, random_weights(model, seed))
    return AssistantProvider(
        Assistant(name=f"tiny-{seed}", config=config, model=model, positions=positions)
    )


def random_weights(model: AssistantModel, seed: int) -> Mapping[str, mx.array]:
    """Weights at which a draft depends on the text, its last token and all parts.

    Args:
        model: tells names and shapes.
        seed: 0 or more.
    """
    shapes = parameters_of(model)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: _drawn(array, key)
        for (name, array), key in zip(sorted(shapes.items()), keys, strict=True)
    }


def _drawn(array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim == 1:  # norms and scalars are near one
        return 0.1 * noise + 1.0
    gain: float = 2.0 * array.shape[-1] ** -0.5
    return noise * gain
