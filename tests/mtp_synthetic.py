"""Tiny checkpoints with a multi-token-prediction head, in the raw layout of their public releases.

Weights come from numpy by seed and tensor name, so the same call writes the same tensors on every
machine, and a tensor does not change when another is added beside it. mlx-lm loads every folder
(``mlx_lm.utils.load_model``) and leaves the head aside, as it does with the real ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from oracles.tiny_releases import DELTA, GLM_EXPERTS, GLM_OWN, QWEN_EXPERTS, SIZES, Draws

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["GLM_TYPES", "split_release", "write_glm", "write_qwen3_5", "write_qwen3_next"]

GLM_TYPES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "glm_moe_dsa")
"""Model types that ``write_glm`` knows: those with a next-token layer behind their last one."""


def write_qwen3_5(
    folder: Path,
    *,
    seed: int = 0,
    experts: int = 0,
    tie: bool = True,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """A full release of qwen3_5 (``experts`` 0) or qwen3_5_moe: trunk, ``mtp.*``, norms as w - 1.

    ``rope`` adds to or replaces entries of ``rope_parameters``.
    """
    text = {
        **SIZES,
        **DELTA,
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "tie_word_embeddings": tie,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            **(rope or {}),
        },
    }
    if experts:
        text |= {**QWEN_EXPERTS, "num_experts": experts}
    draws = Draws(seed)
    _qwen(draws, "model.language_model.", text, fused=True)
    config = {
        "architectures": [f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if experts else "qwen3_5",
        "tie_word_embeddings": tie,
        "eos_token_id": 0,
        "text_config": text,
    }
    draws.write(folder, config)
    return folder


def write_qwen3_next(folder: Path, *, seed: int = 0, tie: bool = False) -> Path:
    """A full release of qwen3_next: a flat config, and one tensor for each expert's projection."""
    config = {
        **SIZES,
        **DELTA,
        **QWEN_EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "tie_word_embeddings": tie,
        "mtp_num_hidden_layers": 1,
    }
    draws = Draws(seed)
    _qwen(draws, "model.", config, fused=False)
    draws.write(folder, config)
    return folder


def _qwen(draws: Draws, trunk: str, c: Mapping[str, Any], *, fused: bool) -> None:
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    draws.matrix(f"{trunk}embed_tokens.weight", vocab, hidden, gain=1.0)
    for number in range(c["num_hidden_layers"]):
        full = (number + 1) % c["full_attention_interval"] == 0
        _qwen_layer(draws, f"{trunk}layers.{number}.", c, full=full, fused=fused)
    draws.vector(f"{trunk}norm.weight", hidden, center=0.0)
    if not c["tie_word_embeddings"]:
        draws.matrix("lm_head.weight", vocab, hidden)
    draws.matrix("mtp.fc.weight", hidden, 2 * hidden)
    # The means that were found in a public release; near 1 where somebody has added the 1.
    draws.vector("mtp.pre_fc_norm_embedding.weight", hidden, center=-0.44)
    draws.vector("mtp.pre_fc_norm_hidden.weight", hidden, center=0.0)
    draws.vector("mtp.norm.weight", hidden, center=0.0)
    _qwen_layer(draws, "mtp.layers.0.", c, full=True, fused=fused)


def _qwen_layer(draws: Draws, at: str, c: Mapping[str, Any], *, full: bool, fused: bool) -> None:
    hidden, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        draws.vector(f"{at}{name}.weight", hidden, center=0.0)
    if full:
        draws.matrix(f"{at}self_attn.q_proj.weight", 2 * heads * size, hidden)
        for name in ("k_proj", "v_proj"):
            draws.matrix(f"{at}self_attn.{name}.weight", c["num_key_value_heads"] * size, hidden)
        draws.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * size)
        for name in ("q_norm", "k_norm"):
            draws.vector(f"{at}self_attn.{name}.weight", size, center=0.3)
    else:
        _delta(draws, f"{at}linear_attn.", c, fused=not fused)
    if c.get("num_experts"):
        _qwen_experts(draws, f"{at}mlp.", c, fused=fused)
    else:
        _swiglu(draws, f"{at}mlp.", hidden, c["intermediate_size"])


def _delta(draws: Draws, at: str, c: Mapping[str, Any], *, fused: bool) -> None:
    """A gated delta net; Qwen3-Next keeps its input projections in two tensors, Qwen3.5 in four."""
    hidden, values = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    wide = values * c["linear_value_head_dim"]
    rows = {"in_proj_qkv": 2 * keys + wide, "in_proj_z": wide}
    rows |= {"in_proj_b": values, "in_proj_a": values}
    if fused:
        rows = {"in_proj_qkvz": 2 * keys + 2 * wide, "in_proj_ba": 2 * values}
    for name, count in rows.items():
        draws.matrix(f"{at}{name}.weight", count, hidden)
    draws.matrix(f"{at}conv1d.weight", 2 * keys + wide, 1, c["linear_conv_kernel_dim"])
    draws.vector(f"{at}A_log", values, center=0.5, spread=0.5)
    draws.vector(f"{at}dt_bias", values, center=0.5)
    draws.vector(f"{at}norm.weight", c["linear_value_head_dim"])  # the one norm stored as w
    draws.matrix(f"{at}out_proj.weight", hidden, wide)


def _swiglu(draws: Draws, at: str, hidden: int, inner: int) -> None:
    draws.matrix(f"{at}gate_proj.weight", inner, hidden)
    draws.matrix(f"{at}up_proj.weight", inner, hidden)
    draws.matrix(f"{at}down_proj.weight", hidden, inner)


def _qwen_experts(draws: Draws, at: str, c: Mapping[str, Any], *, fused: bool) -> None:
    hidden, inner, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
    draws.matrix(f"{at}gate.weight", count, hidden)
    if fused:
        draws.matrix(f"{at}experts.gate_up_proj", count, 2 * inner, hidden)
        draws.matrix(f"{at}experts.down_proj", count, hidden, inner)
    else:
        for number in range(count):
            _swiglu(draws, f"{at}experts.{number}.", hidden, inner)
    _swiglu(draws, f"{at}shared_expert.", hidden, c["shared_expert_intermediate_size"])
    draws.matrix(f"{at}shared_expert_gate.weight", 1, hidden)


def split_release(full: Path, folder: Path) -> Path:
    """The split release of a full one: bare names, norms as w, experts stacked by projection.

    The layout of mlx-community's ``-MTP-`` repositories (``model_type`` ``qwen3_5_mtp``).
    """
    config = json.loads((full / "config.json").read_text())
    text = config.get("text_config", config)
    loaded = mx.load(str(full / "model.safetensors"))
    assert isinstance(loaded, dict)
    head: dict[str, mx.array] = {}
    for name, value in loaded.items():
        if name.startswith("mtp."):
            head[name.removeprefix("mtp.")] = value + 1.0 if value.ndim == 1 else value
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), _stacked(head), metadata={"format": "mlx"}
    )
    split = {
        "model_type": "qwen3_5_mtp",
        "block_size": text["mtp_num_hidden_layers"] + 2,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(split, indent=2))
    return folder


def _stacked(head: Mapping[str, mx.array]) -> dict[str, mx.array]:
    found = dict(head)
    at = "layers.0.mlp."
    fused = found.pop(f"{at}experts.gate_up_proj", None)
    if fused is not None:
        gate, up = mx.split(fused, 2, axis=-2)
        down = found.pop(f"{at}experts.down_proj")
        for name, value in (("gate", gate), ("up", up), ("down", down)):
            found[f"{at}switch_mlp.{name}_proj.weight"] = mx.contiguous(value)
    count = len(
        [name for name in found if name.endswith("gate_proj.weight") and "experts." in name]
    )
    for name in ("gate_proj", "up_proj", "down_proj") if count else ():
        each = [found.pop(f"{at}experts.{number}.{name}.weight") for number in range(count)]
        found[f"{at}switch_mlp.{name}.weight"] = mx.stack(each)
    return found


def write_glm(
    folder: Path, model_type: str, *, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> Path:
    """A full release with ``model.layers.{n}.*``; ``changes`` replaces entries of the config."""
    config = {**SIZES, **GLM_EXPERTS, **GLM_OWN[model_type], **(changes or {})}
    config["model_type"] = model_type
    draws = Draws(seed)
    hidden, vocab, last = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    draws.matrix("model.embed_tokens.weight", vocab, hidden, gain=1.0)
    for number in range(last + 1):
        _glm_layer(draws, f"model.layers.{number}.", config, number)
    draws.vector("model.norm.weight", hidden)
    draws.matrix("lm_head.weight", vocab, hidden)
    at = f"model.layers.{last}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        draws.vector(f"{at}{name}.weight", hidden)
    draws.matrix(f"{at}eh_proj.weight", hidden, 2 * hidden)
    if model_type != "glm_moe_dsa":  # GLM-5's release has one embedding and one output head
        draws.copy(f"{at}embed_tokens.weight", "model.embed_tokens.weight")
        draws.copy(f"{at}shared_head.head.weight", "lm_head.weight")
    draws.write(folder, config)
    return folder


def _glm_layer(draws: Draws, at: str, c: Mapping[str, Any], number: int) -> None:
    hidden = c["hidden_size"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        draws.vector(f"{at}{name}.weight", hidden)
    if "kv_lora_rank" in c:
        _latent(draws, f"{at}self_attn.", c)
    else:
        _grouped(draws, f"{at}self_attn.", c)
    if number < c["first_k_dense_replace"]:
        _swiglu(draws, f"{at}mlp.", hidden, c["intermediate_size"])
        return
    inner = c["moe_intermediate_size"]
    draws.matrix(f"{at}mlp.gate.weight", c["n_routed_experts"], hidden)
    draws.vector(f"{at}mlp.gate.e_score_correction_bias", c["n_routed_experts"], center=0.3)
    for expert in range(c["n_routed_experts"]):
        _swiglu(draws, f"{at}mlp.experts.{expert}.", hidden, inner)
    _swiglu(draws, f"{at}mlp.shared_experts.", hidden, inner * c["n_shared_experts"])


def _projection(draws: Draws, at: str, rows: int, columns: int, *, bias: bool) -> None:
    draws.matrix(f"{at}.weight", rows, columns)
    if bias:
        draws.vector(f"{at}.bias", rows, center=0.0)


def _grouped(draws: Draws, at: str, c: Mapping[str, Any]) -> None:
    hidden, size = c["hidden_size"], c["head_dim"]
    rows = {"q": c["num_attention_heads"], "k": c["num_key_value_heads"]}
    rows["v"] = rows["k"]
    for name, heads in rows.items():
        _projection(draws, f"{at}{name}_proj", heads * size, hidden, bias=c["attention_bias"])
    draws.matrix(f"{at}o_proj.weight", hidden, rows["q"] * size)
    for name in ("q_norm", "k_norm") if c["use_qk_norm"] else ():
        draws.vector(f"{at}{name}.weight", size)


def _latent(draws: Draws, at: str, c: Mapping[str, Any]) -> None:
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c["attention_bias"]
    low, latent, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    _projection(draws, f"{at}q_a_proj", low, hidden, bias=bias)
    draws.vector(f"{at}q_a_layernorm.weight", low)
    draws.matrix(f"{at}q_b_proj.weight", heads * (nope + rope), low)
    _projection(draws, f"{at}kv_a_proj_with_mqa", latent + rope, hidden, bias=bias)
    draws.vector(f"{at}kv_a_layernorm.weight", latent)
    draws.matrix(f"{at}kv_b_proj.weight", heads * (nope + value), latent)
    _projection(draws, f"{at}o_proj", hidden, heads * value, bias=bias)
    if "index_topk" in c:
        inner = c["index_head_dim"]
        draws.matrix(f"{at}indexer.wq_b.weight", c["index_n_heads"] * inner, low)
        draws.matrix(f"{at}indexer.wk.weight", inner, hidden)
        draws.vector(f"{at}indexer.k_norm.weight", inner)
        draws.vector(f"{at}indexer.k_norm.bias", inner, center=0.0)
        draws.matrix(f"{at}indexer.weights_proj.weight", c["index_n_heads"], hidden)
