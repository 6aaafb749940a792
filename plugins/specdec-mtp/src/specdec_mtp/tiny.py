"""Small heads with seeded random weights, for tests: nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.drafting.modules import parameters_of, without_drawing
from specdec_mtp.build import build_head
from specdec_mtp.find import HeadKind
from specdec_mtp.heads import MtpHead, NextnHead
from specdec_mtp.layers import family_of
from specdec_mtp.provider import HeadProvider, Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MTP_CONFIG", "NEXTN_CONFIG", "tiny_head"]

MTP_CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3_5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 8,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""A text config of the Qwen3.5 family."""

NEXTN_CONFIG: Mapping[str, Any] = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
"""A config of GLM's."""


def tiny_head(
    kind: HeadKind = HeadKind.MTP,
    *,
    seed: int = 0,
    reading: Reading | None = None,
    ids: tuple[int, ...] | None = None,
    config: Mapping[str, Any] | None = None,
) -> HeadProvider:
    """A head of hidden size 32.

    Args:
        kind: which.
        seed: of the weights, 0 or more.
        reading: how it is read.
        ids: a draft vocabulary.
        config: settings of its layer, in place of the small ones here.
    """
    config = config or (MTP_CONFIG if kind is HeadKind.MTP else NEXTN_CONFIG)
    family = family_of(kind, config)
    args = family.read(config)
    made = MtpHead if kind is HeadKind.MTP else NextnHead
    with without_drawing():
        shapes = parameters_of(made(args, family, dense=False))
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    tensors = {
        name: _drawn(name, array, key)
        for (name, array), key in zip(sorted(shapes.items()), keys, strict=True)
    }
    module = build_head(kind, tensors, args, family)
    return HeadProvider(
        f"tiny-{kind}-{seed}",
        kind,
        module,
        args.hidden_size,
        reading=reading or Reading(),
        ids=ids,
    )


def _drawn(name: str, array: mx.array, key: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape, key=key)
    if array.ndim == 1:  # norms are near one; what routers add to their scores is near zero
        return 0.1 * noise + (0.0 if "bias" in name else 1.0)
    # Gains at which a draft depends on the whole text and on its last token.
    gain: float = 2.0 * array.shape[-1] ** -0.5
    return noise * gain
