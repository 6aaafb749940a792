"""Configurations of the model types minicpm to youtu_llm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def _sized(
    *,
    hidden: int = 64,
    inner: int = 96,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Keys that a type does not know are dropped where its arguments are read."""
    return {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": theta,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


_PLAIN = _sized()
_LOCAL_GLOBAL = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
}
# The names that the families give to four experts, two per token, and one for every token.
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "norm_topk_prob": True,
}
_SHARED_EXPERT = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Keys of 32, as Metal's recurrent kernels take 32 at a time.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
# 16 positions, so that the attention scale grows inside short texts.
_SCALED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.1, 1.3, 1.6],
    "original_max_position_embeddings": 256,
}
_MINICPM = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 4.0}
_MINISTRAL3 = _PLAIN | _LOCAL_GLOBAL | {"rope_parameters": _SCALED_YARN}
_QWEN3_MOE = _PLAIN | _EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
_QWEN3_5 = _sized(layers=4, inner=80) | _DELTA
_QWEN2 = _sized(layers=6, inner=128, kv_heads=1, theta=100.0)

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "minicpm": _PLAIN | _MINICPM,
    "minicpm3": _PLAIN | _LATENT | _MINICPM | {"rope_scaling": _LONG},
    "minimax": _sized(inner=64, heads=8, kv_heads=4, theta=100.0) | _EXPERTS | {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": _sized(inner=32, layers=4)
        | _EXPERTS
        | {
            "dense_intermediate_size": 64,
            "moe_layer_freq": [0, 1, 1, 0],
            "sparse_attention_freq": [0, 1, 0, 1],
            "index_n_heads": 2,  # one per kv head: a choice of blocks is widened to its group
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 2,
        }
    },
    "ministral3": _MINISTRAL3,
    "mistral3": {"text_config": _MINISTRAL3 | {"model_type": "ministral3"}},
    "mistral4": _PLAIN | _EXPERTS | _SHARED_EXPERT | _LATENT | {"rope_parameters": _SCALED_YARN},
    "mixtral": _sized(hidden=48, inner=160, layers=2, heads=3, kv_heads=1) | _EXPERTS,
    "muse_glimmer": _PLAIN | _LOCAL_GLOBAL | {"output_multiplier": 1.0},
    "muse_spark": {
        "text_config": _PLAIN
        | _LOCAL_GLOBAL
        | _EXPERTS
        | {
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_theta": 10000.0},
            "layer_rope_theta": [10000.0, 0, 10000.0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 32,
        }
    },
    "nanbeige": _sized(layers=2) | {"num_loops": 2},
    "nanochat": _PLAIN,
    "nemotron": _PLAIN | {"hidden_act": "relu2", "norm_eps": 1e-5},
    "nemotron-nas": _sized(layers=4)
    | {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ],
    },
    "nemotron_h": _PLAIN
    | _EXPERTS
    | _SHARED_EXPERT
    | {
        "hybrid_override_pattern": ["M", "E", "*", "-", "M"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 32,  # Metal's kernel takes 32 at a time
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_latent_size": 32,
    },
    "olmo2": _sized(inner=48, layers=2, theta=100000.0),
    "olmo3": _PLAIN | _LOCAL_GLOBAL,
    "olmo_hybrid": _PLAIN
    | _DELTA
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_allow_neg_eigval": True,
    },
    "olmoe": _sized(inner=48, layers=2, heads=8, kv_heads=4, theta=100.0)
    | _EXPERTS
    | {"norm_topk_prob": False},
    "openelm": _PLAIN
    | {
        "num_transformer_layers": 3,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 4, 4],
        "num_kv_heads": [1, 1, 2],
        "ffn_multipliers": [0.5, 1.0, 1.5],
        "share_input_output_layers": False,
    },
    "phi": _sized(layers=4, theta=100.0) | {"partial_rotary_factor": 1.0},
    "phi3": _PLAIN | {"rope_scaling": _LONG, "original_max_position_embeddings": 256},
    "phi3small": _sized(hidden=32, layers=4)
    | {
        "vocab_size": 100352,  # it writes into the logits of ids up to 100351
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 32,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,  # the smaller of the two that it takes
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
        "mup_attn_multiplier": 4.0,
        "mup_embedding_multiplier": 0.5,
        "mup_width_multiplier": 1.0,
        "rope_embedding_base": 10000.0,
    },
    "phimoe": _sized(hidden=48, layers=2, heads=3, kv_heads=1)
    | _EXPERTS
    | {
        "original_max_position_embeddings": 256,
        "rope_scaling": {
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        },
    },
    "phixtral": _EXPERTS
    | {"num_vocab": 64, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8},
    "pixtral": {"text_config": _PLAIN | _LOCAL_GLOBAL | {"model_type": "llama"}},
    "plamo": _PLAIN | {"n_shared_head": 2},
    "plamo2": _PLAIN
    | {
        "hidden_size_per_head": 16,
        "mamba_d_state": 32,  # Metal's kernel takes 32 at a time
        "mamba_num_heads": 4,
        "attention_window_size": 8,
    },
    "plamo3": _PLAIN | {"window_size": 8, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        # Widths that can be packed: multiples of 128, and of 512 under a rotation.
        "text_config": _QWEN3_5 | {"hidden_size": 128, "intermediate_size": 512},
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": path, "embedding": False, "dtype": "float16", "block": block}
            for path, block in (
                ("model.layers.3.mlp.down_proj", 512),
                ("model.layers.1.self_attn.q_proj", 0),
            )
        ],
    },
    "qwen": _PLAIN | {"kv_channels": 16},
    "qwen2": _QWEN2,
    "qwen2_moe": _sized(hidden=32, kv_heads=1, theta=100.0) | _EXPERTS,
    "qwen2_vl": {"text_config": _QWEN2 | {"model_type": "qwen2"}},
    "qwen3": _PLAIN,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": {"text_config": _QWEN3_5 | _EXPERTS},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": _QWEN3_MOE | _DELTA | {"intermediate_size": 48},
    "qwen3_vl": {"text_config": _PLAIN | {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text_config": _QWEN3_MOE | {"model_type": "qwen3_moe"}},
    "recurrent_gemma": _sized(layers=4)
    | {
        "block_types": ["recurrent", "recurrent", "attention"],
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
    },
    "rwkv7": _sized(inner=32)
    | {
        "norm_eps": 1e-5,
        "head_dim": 32,  # Metal's kernel takes 32 at a time
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
    "seed_oss": _PLAIN,
    "smollm3": _PLAIN | {"no_rope_layer_interval": 2},
    "solar_open": _PLAIN | _EXPERTS | _SHARED_EXPERT,
    "spark2_5": _PLAIN
    | _LOCAL_GLOBAL
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1000.0},
            "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }
    },
    "stablelm": _sized(hidden=48, inner=48, layers=6, heads=6, theta=1000.0)
    | {"partial_rotary_factor": 1.0, "use_qkv_bias": True, "use_parallel_residual": True},
    "starcoder2": _sized(inner=48, layers=2, theta=1000.0),
    "step3p5": _PLAIN
    | _LOCAL_GLOBAL
    | _EXPERTS
    | {
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3},
        "partial_rotary_factors": [1.0, 0.5, 1.0],
        "swiglu_limits": [0, 0, 2.0],
    },
    "talkie": _PLAIN,
    "telechat3": _PLAIN | {"rope_scaling": _SCALED_YARN | {"rope_type": "telechat3-yarn"}},
    "youtu_llm": _PLAIN | _LATENT,
}
