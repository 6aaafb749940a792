"""Configurations of the model types Klear and afm7 to gemma4_text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FULL, _SLIDING, _CONV = "full_attention", "sliding_attention", "conv_mixer"

# Two query heads of 16 per key head; names that a type does not know are left out by from_dict.
_SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_HEADS: Mapping[str, Any] = {**_SIZES, "head_dim": 16}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_BAILING: Mapping[str, Any] = {
    **_SIZES,
    **_EXPERTS,
    "first_k_dense_replace": 1,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "use_qk_norm": True,
}
# Linear, full, linear, full: both orders of the two kinds.
_BAILING_LINEAR: Mapping[str, Any] = {
    **_BAILING,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "partial_rotary_factor": 0.5,
}
_LATENT: Mapping[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_YARN: Mapping[str, Any] = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_SIZES,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA3: Mapping[str, Any] = {
    **_HEADS,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
}
# The last two layers read the keys and values of the two before them.
_SHARED_KV: Mapping[str, Any] = {
    **_HEADS,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _FULL],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
}
_GEMMA4: Mapping[str, Any] = {
    **_SHARED_KV,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size_per_layer_input": 64,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Klear": {
        **_SIZES,
        **_EXPERTS,
        "intermediate_size": 48,
        "attention_bias": False,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "n_shared_experts": 1,
    },
    "afm7": {
        "vocab_size": 64,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim_scale_factor": 1.5,
        "rope_theta": 10000.0,
    },
    "afmoe": {
        **_HEADS,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        "sliding_window": 8,
        "num_dense_layers": 1,
    },
    "apertus": {
        **_SIZES,
        "intermediate_size": 128,
        "mlp_bias": False,
        "attention_bias": False,
        "post_norm": False,
        "qk_norm": True,
    },
    "baichuan_m1": {
        **_SIZES,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_layers": [0, 2],
        "num_swa_attention_heads": 2,
        "num_swa_key_value_heads": 1,
        "conv_window": 2,  # the only width that the type accepts
    },
    "bailing_hybrid": {
        **_BAILING_LINEAR,
        **_LATENT,
        "head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "bailing_moe": {**_BAILING, "moe_router_enable_expert_bias": False, "topk_group": 1},
    "bailing_moe_linear": {**_BAILING_LINEAR, "topk_group": 1},
    "bailing_moe_v3": {
        **_BAILING_LINEAR,
        **_LATENT,
        "head_dim": 32,  # the Metal kernel of its recurrence takes multiples of 32
        "short_conv_kernel_size": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "bitnet": _HEADS,
    "cohere": {**_SIZES, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "cohere2": {
        **_HEADS,
        "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "dbrx": {
        "vocab_size": 64,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek": {**_DEEPSEEK, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "deepseek_v2": {
        **_DEEPSEEK,
        **_LATENT,
        "rope_scaling": _YARN,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
    },
    "deepseek_v3": {**_DEEPSEEK, **_LATENT, "rope_scaling": _YARN},
    "deepseek_v32": {
        **_DEEPSEEK,
        **_LATENT,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 12,
    },
    "deepseek_v41": {
        **_DEEPSEEK,
        "num_hidden_layers": 5,
        "head_dim": 24,  # no multiple of 16, or it rounds its state to 8 and 4 bits
        "index_head_dim": 24,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "sliding_window": 8,
        "rope_scaling": _YARN,
        # Window alone; every position; groups of 4, and two layers that read those.
        "compress_ratios": (0, 1, 4, 4, 4),
        "kv_source_layer_ids": (1, 2),
        "index_source_layer_ids": (1, 2, 3),
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
        "index_n_heads": 2,
        "index_topk": 3,
    },
    "dots1": {**_DEEPSEEK, "head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "ernie4_5": {**_HEADS, "use_bias": False},
    "ernie4_5_moe": {
        **_HEADS,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "exaone": {**_HEADS, "num_layers": 3, "layer_norm_epsilon": 1e-6, "rope_scaling": _LLAMA3},
    "exaone4": {
        **_HEADS,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": "LLG",
        "rope_scaling": _LLAMA3,
    },
    "exaone_moe": {
        **_HEADS,
        **_EXPERTS,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "sliding_window": 8,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "is_moe_layer": [False, True, True, True, True],
    },
    "falcon_h1": {
        **_HEADS,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 32,  # the Metal kernel of its recurrence takes multiples of 32
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
    },
    "gear": {
        **_HEADS,
        "num_hidden_layers": 4,
        "layer_types": [_CONV, _SLIDING, _FULL, _CONV],
        "sliding_window": 8,
        "conv_L_cache": 4,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma": _HEADS,
    "gemma2": {**_HEADS, "num_hidden_layers": 4, "query_pre_attn_scalar": 16.0},
    "gemma3": {"vocab_size": 64, "text_config": {"model_type": "gemma3_text", **_GEMMA3}},
    "gemma3_text": _GEMMA3,
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n_text",
            **_SHARED_KV,
            "vocab_size_per_layer_input": 48,  # fewer than ids: the others share row 0
            "rope_local_base_freq": 1000.0,
            "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.0, 0.0],
            "hidden_size": 32,
            "altup_num_inputs": 4,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    },
    "gemma4": {"vocab_size": 64, "text_config": {"model_type": "gemma4_text", **_GEMMA4}},
    "gemma4_text": _GEMMA4,
}
