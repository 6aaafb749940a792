"""Seeded tensors of block drafters, by the names that DeepSpec and speculators publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "HIDDEN",
    "RANK",
    "VOCABULARY",
    "Draws",
    "heads_tensors",
    "own_tensors",
    "second_tensors",
    "trunk_tensors",
]

VOCABULARY: Final = 64
HIDDEN: Final = 64
RANK: Final = 8
INNER: Final = 96
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
SIZE: Final = 16  # features of a head
GLOBAL: Final = 32  # of a head of a Gemma drafter


@define
class Draws:
    """Named tensors that are drawn one after the other."""

    seed: int
    tensors: dict[str, mx.array] = field(factory=dict)
    _random: Any = None

    def __attrs_post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def add(self, name: str, *shape: int, gain: float = 1.5) -> None:
        """A matrix that keeps the size of a signal, a norm near one, or a bias near zero."""
        drawn = self._random.standard_normal(shape)
        if len(shape) > 1:
            drawn = drawn * gain * shape[-1] ** -0.5
        else:
            drawn = 0.1 * drawn + (0.0 if name.endswith("bias") else 1.0)
        self.tensors[name] = mx.array(drawn.astype(np.float32))


def _decoder_layer(draws: Draws, at: str, heads: int, kv_heads: int, size: int, v: bool) -> None:
    own = f"{at}.self_attn"
    draws.add(f"{own}.q_proj.weight", heads * size, HIDDEN)
    draws.add(f"{own}.k_proj.weight", kv_heads * size, HIDDEN)
    if v:
        draws.add(f"{own}.v_proj.weight", kv_heads * size, HIDDEN)
    draws.add(f"{own}.o_proj.weight", HIDDEN, heads * size)
    draws.add(f"{own}.q_norm.weight", size)
    draws.add(f"{own}.k_norm.weight", size)
    draws.add(f"{at}.mlp.gate_proj.weight", INNER, HIDDEN)
    draws.add(f"{at}.mlp.up_proj.weight", INNER, HIDDEN)
    draws.add(f"{at}.mlp.down_proj.weight", HIDDEN, INNER)
    draws.add(f"{at}.input_layernorm.weight", HIDDEN)
    draws.add(f"{at}.post_attention_layernorm.weight", HIDDEN)


def trunk_tensors(draws: Draws, spec: Mapping[str, Any], taps: int) -> None:
    draws.add("fc.weight", HIDDEN, taps * HIDDEN)
    draws.add("hidden_norm.weight", HIDDEN)
    draws.add("norm.weight", HIDDEN)
    gemma = "Gemma4DSparkModel" in spec["architectures"]
    shared = bool(spec.get("attention_k_eq_v"))
    for number in range(LAYERS):
        at = f"layers.{number}"
        if not gemma:
            _decoder_layer(draws, at, HEADS, KV_HEADS, SIZE, True)
            continue
        _decoder_layer(draws, at, HEADS, 1 if shared else KV_HEADS, GLOBAL, not shared)
        draws.add(f"{at}.pre_feedforward_layernorm.weight", HIDDEN)
        draws.add(f"{at}.post_feedforward_layernorm.weight", HIDDEN)
        draws.add(f"{at}.layer_scalar", 1)


def heads_tensors(draws: Draws, spec: Mapping[str, Any], scored: int = VOCABULARY) -> None:
    """Markov and confidence heads, as far as a release has them."""
    rank = spec["markov_rank"]
    if rank:
        draws.add("markov_head.markov_w1.weight", VOCABULARY, rank, gain=3.0)
        draws.add("markov_head.markov_w2.weight", scored, rank, gain=3.0)
    if spec["markov_head_type"] == "gated":
        draws.add("markov_head.gate_proj.weight", rank, HIDDEN + rank)
        draws.add("markov_head.gate_proj.bias", rank)
    elif spec["markov_head_type"] == "rnn":
        draws.add("markov_head.joint_proj.weight", 3 * rank, 2 * rank + HIDDEN)
        draws.add("markov_head.joint_proj.bias", 3 * rank)
    if spec["enable_confidence_head"]:
        features = HIDDEN + (rank if spec.get("confidence_head_with_markov", bool(rank)) else 0)
        draws.add("confidence_head.proj.weight", 1, features)
        draws.add("confidence_head.proj.bias", 1)


def own_tensors(draws: Draws, *, gemma: bool = False) -> None:
    draws.add("embed_tokens.weight", VOCABULARY, HIDDEN, gain=1.0 if gemma else 4.0)
    draws.add("lm_head.weight", VOCABULARY, HIDDEN)


def second_tensors(draws: Draws) -> None:
    for number in range(LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            at = f"layers.{number}.{part}"
            draws.add(f"{at}.base_kernel", 2, 2, HIDDEN, gain=4.0)
            draws.add(f"{at}.kernel_projection.weight", 4 * HIDDEN // 16, HIDDEN, gain=0.3)
    draws.add("candidate_selector.hidden_projection.weight", RANK, HIDDEN)
    draws.add("candidate_selector.predecessor_codebook", VOCABULARY, RANK, gain=3.0)
    draws.add("candidate_selector.successor_codebook", VOCABULARY, RANK, gain=3.0)
