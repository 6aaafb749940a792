"""Small mlx-lm models with seeded random weights, for tests of any part.

``tiny_model`` gives one shared instance per architecture and seed: do not change it. Whoever
quantizes or breaks a model takes a fresh one from ``build_model``. Weights are float32 and do not
depend on MLX's global random state. They are scaled so that greedy text does not get stuck on one
token, and so that two models of different seeds disagree often.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from specdec.testing.target import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "ATTENTION",
    "HYBRID",
    "VOCABULARY",
    "WINDOWED",
    "OwnCache",
    "alone",
    "build_model",
    "logits_check",
    "random_state",
    "tiny_model",
]

VOCABULARY = 64

_USUAL: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
}

_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 16, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16.0,
    },
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 4,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
}

ATTENTION = ("qwen3", "qwen2", "llama", "phi3", "gemma", "cohere", "granite")
"""Architectures whose caches are all plain attention K/V, and whose code takes ragged rows."""

WINDOWED = "gemma3_text"
"""One sliding-window layer of 16 positions, then one of full attention."""

HYBRID = "lfm2"
"""One short-convolution layer, then one of full attention."""


class OwnCache(KVCache):  # type: ignore[misc]  # mlx-lm ships no types
    """A cache type that nobody has registered a row form of."""


def build_model(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A fresh model; ``changes`` override entries of its config."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {**_USUAL, "model_type": architecture, **_CONFIGS[architecture], **changes}
    return seeded_weights(module.Model(module.ModelArgs.from_dict(config)), seed)


tiny_model = cache(build_model)


def random_state() -> list[Any]:
    """MLX's global random state, as numbers."""
    state: Any = mx.random.state
    return [array.tolist() for array in state]


def alone(model: Any, tokens: Sequence[int]) -> mx.array:
    """Logits ``[len(tokens), V]`` of mlx-lm itself: one row, its own caches, one at a time."""
    caches = make_prompt_cache(model)
    rows = []
    for token in tokens:
        logits = model(mx.array([[token]]), cache=caches)
        mx.eval(logits)
        rows.append(logits[0, 0])
    return mx.stack(rows)


def logits_check(model: Any) -> Callable[[mx.array, mx.array], None]:
    """How logits of one position from windows of different shape are to be compared.

    MLX does not promise that a row's bits are independent of the window's width or of the batch;
    on some hosts they are. A probe that uses mlx-lm alone decides: where they are, the check
    demands equal bits, else a difference below a stated margin (0.3 in 16 bits, 1e-3 in 32).
    """
    exact = _width_keeps_bits(model)

    def check(got: mx.array, want: mx.array) -> None:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        if exact:
            assert mx.array_equal(got, want).item()
        else:
            margin = 1e-3 if got.dtype == mx.float32 else 0.3
            difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
            assert mx.all(difference <= margin).item()

    return check


def _width_keeps_bits(model: Any) -> bool:
    tokens = [(7 * i + 3) % VOCABULARY for i in range(12)]
    want = alone(model, tokens)
    for rows, widths in ((1, (5, 4, 3)), (3, (2, 5, 5))):
        caches, start = make_prompt_cache(model), 0
        for width in widths:
            window = mx.array([tokens[start : start + width]] * rows)
            logits = model(window, cache=caches)
            for row in range(rows):
                if not mx.array_equal(logits[row], want[start : start + width]).item():
                    return False
            start += width
    # Keys that the mask hides must not change a sum either.
    keys = mx.random.split(mx.random.key(0), 3)
    q, k, v = (
        mx.random.normal((2, 4, n, 16), key=key).astype(want.dtype)
        for n, key in zip((3, 40, 40), keys, strict=True)
    )
    for length in (1, 7, 40):
        seen = mx.broadcast_to(mx.arange(40) < length, (2, 1, 3, 40))
        padded = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=seen)
        exact = mx.fast.scaled_dot_product_attention(
            q, k[..., :length, :], v[..., :length, :], scale=0.25
        )
        if not mx.array_equal(padded, exact).item():
            return False
    return True
