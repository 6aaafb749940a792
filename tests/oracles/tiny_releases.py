"""Configurations of the tiny releases, and the draws of their weights by seed and tensor name."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["DELTA", "GLM_EXPERTS", "GLM_OWN", "QWEN_EXPERTS", "SIZES", "Draws"]

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
# Linear, full, linear. Metal's recurrent kernel takes 32 of a key at a time.
DELTA: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
QWEN_EXPERTS: Mapping[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
GLM_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GLM_OWN: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
    },
    "deepseek_v3": {
        **_LATENT,
        # mlx-lm drops the next-token layer by its number in the real release, 61, and no other.
        "num_hidden_layers": 61,
        "first_k_dense_replace": 59,
        "n_group": 4,
        "topk_group": 2,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
    "glm_moe_dsa": {
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 16,  # of few heads, all may be cut to 0, and the choice is a tie
        "index_head_dim": 16,
        "index_topk": 12,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}


@define
class Draws:
    """Named float32 tensors of one seed."""

    seed: int
    tensors: dict[str, NDArray[np.float32]] = field(factory=dict)

    def matrix(self, name: str, *shape: int, gain: float = 1.6) -> None:
        """Rows whose product with a unit-variance input has a standard deviation of ``gain``."""
        self.vector(name, *shape, center=0.0, spread=gain * shape[-1] ** -0.5)

    def vector(self, name: str, *shape: int, center: float = 1.0, spread: float = 0.2) -> None:
        own = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        self.tensors[name] = (center + spread * own.standard_normal(shape)).astype(np.float32)

    def copy(self, name: str, source: str) -> None:
        self.tensors[name] = self.tensors[source].copy()

    def write(self, folder: Path, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {name: mx.array(value) for name, value in self.tensors.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
