"""Small block drafters with seeded random weights, for tests: nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import evolve

from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec_dflash.config import BlockConfig, Rope, Style
from specdec_dflash.loading import provider_of
from specdec_dflash.method import Drafting
from specdec_dflash.model import BlockModel

if TYPE_CHECKING:
    from specdec.drafting import ProjectedProvider

__all__ = ["TINY", "random_weights", "tiny_block"]

TINY: Final = BlockConfig(
    style=Style.QWEN,
    hidden_size=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=8,
    eps=1e-6,
    rope=Rope(10000.0),
    windows=(None, None),
    causal=(False, False),
    block_size=6,
    from_anchor=False,
    mask_token=7,
    taps=(0, 1),
    target_layers=2,
)
"""A drafter of two layers, for a target of two layers and hidden size 32."""


def tiny_block(
    *,
    seed: int = 0,
    drafting: Drafting | None = None,
    own_embedding: bool = False,
    own_head: bool = False,
    ids: tuple[int, ...] | None = None,
    dtype: mx.Dtype = mx.float32,
    **changes: Any,
) -> ProjectedProvider:
    """A small drafter.

    Args:
        seed: of the weights, 0 or more.
        drafting: how its blocks are used.
        own_embedding: whether it has an embedding of its own.
        own_head: whether it has a head of its own.
        ids: what that head scores, ascending; ``draft_vocab`` is set to their number.
        dtype: of its weights.
        changes: of :data:`TINY`.
    """
    config = evolve(TINY, draft_vocab=None if ids is None else len(ids), **changes)
    with without_drawing():
        model = BlockModel(config, own_embedding=own_embedding, own_head=own_head or bool(ids))
    drawn = {name: array.astype(dtype) for name, array in random_weights(model, seed).items()}
    load_module("a tiny drafter", model, drawn)
    return provider_of(f"tiny-{seed}", config, model, drafting or Drafting(), ids)


def random_weights(model: BlockModel, seed: int) -> dict[str, mx.array]:
    """Weights at which a draft depends on the whole text, its last token and all parts.

    Args:
        model: tells names and shapes.
        seed: 0 or more.
    """
    shapes = parameters_of(model)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: _drawn(name, array, key)
        for (name, array), key in zip(sorted(shapes.items()), keys, strict=True)
    }


def _drawn(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim == 1:  # norms and scalars are near one, biases near zero
        return 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    if "base_kernel" in name:
        return 0.5 * noise
    gain: float = 2.0 * array.shape[-1] ** -0.5
    return noise * gain
