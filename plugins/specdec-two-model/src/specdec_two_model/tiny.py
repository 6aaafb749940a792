"""Small draft models with seeded random weights, for tests: nothing is downloaded."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.utils import tree_unflatten

from specdec.drafting import DraftModelProvider
from specdec.drafting.modules import parameters_of, without_drawing
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KINDS", "tiny_draft_model", "tiny_model"]

_SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
}

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "attention": {"model_type": "llama", **_SIZES, "tie_word_embeddings": False},
    "sliding": {
        "model_type": "gemma3_text",
        **_SIZES,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16.0,
    },
    "recurrent": {
        "model_type": "mamba",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "state_size": 4,
        "conv_kernel": 4,
        "time_step_rank": 4,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "hybrid": {
        "model_type": "lfm2",
        **_SIZES,
        "norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "conv_bias": False,
        "conv_L_cache": 4,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
        "rope_theta": 10000.0,
    },
    "positions": {
        "model_type": "gpt2",
        "n_ctx": 64,
        "n_positions": 64,
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "layer_norm_epsilon": 1e-5,
    },
}
"""Configs by what a row's state is made of; ``positions`` has a table of 64 learned ones."""


def tiny_model(kind: str = "attention", seed: int = 0, *, vocab_size: int = 8) -> Any:
    """A small mlx-lm model in float32 whose text does not get stuck on one token.

    Args:
        kind: of :data:`KINDS`.
        seed: of its weights, 0 or more.
        vocab_size: V.
    """
    config = {**KINDS[kind], "vocab_size": vocab_size}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    with without_drawing():
        model = module.Model(module.ModelArgs.from_dict(config))
    shapes = parameters_of(model)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    drawn = [
        (name, _drawn(name, array, key))
        for (name, array), key in zip(sorted(shapes.items()), keys, strict=True)
    ]
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return model


def tiny_draft_model(
    kind: str = "attention", *, seed: int = 0, vocab_size: int = 8, limit: int | None = None
) -> DraftModelProvider:
    """A small draft model.

    Args:
        kind: of :data:`KINDS`.
        seed: of its weights, 0 or more.
        vocab_size: V of the draft model.
        limit: positions that a row has at most.
    """
    target = _bound(kind, seed, vocab_size)
    weights = parameters_of(target.model).values()
    return DraftModelProvider(
        f"tiny-{kind}-{seed}",
        target,
        weight_bytes=sum(array.nbytes for array in weights),
        limit=limit,
    )


@cache
def _bound(kind: str, seed: int, vocab_size: int) -> MlxLmTarget:
    return MlxLmTarget(tiny_model(kind, seed, vocab_size=vocab_size))


def _drawn(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim == 1 or name.endswith("A_log"):  # around its own start
        return array + 0.1 * noise
    if "embed" in name or "wte" in name or "wpe" in name:
        scale: float = array.shape[-1] ** -0.5
        return noise * scale
    gain: float = 2.0 * array[0].size ** -0.5
    return noise * gain
