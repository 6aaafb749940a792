"""Configurations of the model types glm to mimo_v2_flash."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# mlx-lm drops the keys that a type does not know, so the types share these.
_SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1000.0,
    "rotary_emb_base": 1000,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "use_qk_norm": True,
    "tie_word_embeddings": False,
}
_GPT: Mapping[str, Any] = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_heads": 2,
    "n_ctx": 512,
    "n_positions": 512,
    "block_size": 512,
    "layer_norm_epsilon": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
# The first layer is dense where a type knows dense layers, the others hold experts.
_EXPERTS: Mapping[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {**_EXPERTS, **_LATENT}
_WINDOWS: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
_DYNAMIC = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0, "alpha": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
_ROPES = {
    "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 100.0},
}
_GRANITE: Mapping[str, Any] = {
    **_EXPERTS,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
_MAMBA: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_RECURRENT: Mapping[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
}
_LFM2: Mapping[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "conv", "full_attention"],
    "conv_bias": False,
    "conv_L_cache": 4,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
_KIMI: Mapping[str, Any] = {
    **_DEEPSEEK,
    "num_hidden_layers": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "model_max_length": 512,
    "mla_use_output_gate": True,
    "attn_res_block_size": 2,
    "activation_situ_beta": 2.0,
    "activation_situ_linear_beta": 4.0,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "kda_layers": [1, 3],  # counted from 1
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
}
_LLAMA4: Mapping[str, Any] = {
    **_SIZES,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,  # every fourth layer is a full one, and one is needed
    "num_local_experts": 4,
    "num_experts_per_tok": 1,  # more are refused
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 8,
    "floor_scale": 8,  # the scale of the full layers' queries grows within the tests
    "no_rope_layers": [1, 0, 1, 0],
}
_LONGCAT: Mapping[str, Any] = {
    **_SIZES,
    **_LATENT,
    "num_layers": 2,
    "attention_method": "MLA",
    "mla_scale_q_lora": True,  # the attribute is missing, but read, where this is false
    "mla_scale_kv_lora": True,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "moe_topk": 2,
    "routed_scaling_factor": 1.5,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "glm": _SIZES,
    "glm4": {**_SIZES, "partial_rotary_factor": 0.5},
    "glm4_moe": {**_EXPERTS, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {
        **_DEEPSEEK,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 12,
        "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {**_SIZES, "num_hidden_layers": 3, "rotary_pct": 0.5},
    "gptj": {**_GPT, "rotary_dim": 8},
    "gpt_oss": {
        **_EXPERTS,
        **_WINDOWS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "rope_scaling": _YARN,
    },
    "granite": {**_GRANITE, "num_hidden_layers": 2},
    "granitemoe": {**_GRANITE, "intermediate_size": 64},
    "granitemoehybrid": {
        **_GRANITE,
        **_MAMBA,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "helium": _SIZES,
    "hunyuan": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "num_shared_expert": 1,
        "moe_topk": 2,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": _DYNAMIC,
    },
    "hunyuan_v1_dense": {**_SIZES, "intermediate_size": 64, "rope_scaling": _DYNAMIC},
    "internlm2": {
        **_SIZES,
        "num_hidden_layers": 3,
        "rope_scaling": {"type": "linear", "factor": 2},
    },
    "internlm3": {**_SIZES, "bias": True, "qkv_bias": True, "rope_scaling": _DYNAMIC},
    "iquestloopcoder": {**_SIZES, "loop_num": 2, "loop_window_size": 8},
    "jamba": {
        **_EXPERTS,
        **_MAMBA,
        "num_hidden_layers": 4,
        "attn_layer_offset": 0,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 3,
    },
    "kimi_k25": {"text_config": {**_DEEPSEEK, "n_group": 2, "topk_group": 1}},
    "kimi_k3": {"text_config": _KIMI},
    "kimi_linear": _KIMI,
    "kimi_vl": {"text_config": _DEEPSEEK},
    "laguna": {
        **_EXPERTS,
        **_WINDOWS,
        "num_attention_heads_per_layer": [2, 4, 2, 4],
        "shared_expert_intermediate_size": 32,
        "moe_router_logit_softcapping": 4.0,
        "rope_parameters": _ROPES,
    },
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": {**_LFM2, "model_type": "lfm2"}},
    "lfm2_moe": {
        **_EXPERTS,
        **_LFM2,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "use_expert_bias": True,
    },
    "lille-130m": _GPT,  # the width between its layers rounds to 0 where n_embd is below 49
    "llama": {**_SIZES, **_WINDOWS},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {
        **_LONGCAT,
        "hidden_size": 48,  # a multiple of the number of embedders, 6
        "ngram_vocab_size_ratio": 4,
        "emb_neighbor_num": 4,
        "emb_split_num": 2,
    },
    # Few states and many heads: among them are some that remember more than a few positions.
    "mamba": {**_RECURRENT, "intermediate_size": 128, "state_size": 4},
    "mamba2": {
        **_RECURRENT,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "time_step_limit": (0.001, 100.0),
    },
    "mellum": {**_EXPERTS, **_WINDOWS, "hidden_size": 48, "head_dim": 8, "rope_parameters": _ROPES},
    "mimo": {**_SIZES, "intermediate_size": 64},
    "mimo_v2_flash": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 8,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "swa_rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    },
}
