"""Multi-token-prediction heads in plain numpy, float64, from the raw tensors of a release.

No cache, no batch, no mlx: every call computes all positions anew, one formula after the other, as
the papers and the published modelling code state them (Qwen3-Next and Qwen3.5; GLM-4.5;
DeepSeek-V3, arXiv 2412.19437, with its latent attention written out from ``kv_b_proj``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from oracles.rotary import Vectors, frequencies, magnitude_at, turned

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "Pair",
    "Vectors",
    "chain",
    "decoder_layer",
    "mtp_step",
    "nextn_step",
    "read_tensors",
    "rounded_norms",
]

Tensors = Mapping[str, Vectors]
Config = Mapping[str, Any]
Pair = tuple[Vectors, Vectors]
"""The embedding of token p + 1 and the target's hidden state of position p, both [H]."""


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Vectors]:
    """The tensors of ``model.safetensors`` whose names start with ``prefix``, as float64."""
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return {
        name: np.array(value.astype(mx.float32), dtype=np.float64)
        for name, value in loaded.items()
        if name.startswith(prefix)
    }


def rounded_norms(tensors: Tensors) -> dict[str, Vectors]:
    """Raw tensors of Qwen as if the 1 had been added to the head's norms in bfloat16.

    That is what a split release in bfloat16 holds, and what mlx-lm makes of the trunk. The sum
    loses bits of the stored weight, which moves the logits of the demo model by up to 0.07.
    """
    found = dict(tensors)
    for name, value in tensors.items():
        if name.startswith("mtp.") and value.ndim == 1:
            raised = mx.array(value + 1.0, dtype=mx.float32).astype(mx.bfloat16)
            found[name] = np.array(raised.astype(mx.float32), dtype=np.float64) - 1.0
    return found


def mtp_step(tensors: Tensors, config: Config, pairs: Sequence[Pair]) -> Vectors:
    """The head of qwen3_5, qwen3_5_moe or qwen3_next over the positions of ``pairs``.

    Returns:
        The output after ``mtp.norm``, [n, H]: it gives the logits, and is the next step's hidden.
    """
    c = config.get("text_config", config)
    w, eps = _shifted(_under(tensors, "mtp.")), c["rms_norm_eps"]
    embedding, hidden = (np.stack(each) for each in zip(*pairs, strict=True))
    both = [
        _rms(embedding, w["pre_fc_norm_embedding.weight"], eps),
        _rms(hidden, w["pre_fc_norm_hidden.weight"], eps),
    ]
    x = np.concatenate(both, axis=-1) @ w["fc.weight"].T
    w = {**w, **_under(w, "layers.0.")}
    x = x + _gated_attention(w, c, _rms(x, w["input_layernorm.weight"], eps))
    inner = _rms(x, w["post_attention_layernorm.weight"], eps)
    x = x + (_softmax_experts(w, c, inner) if c.get("num_experts") else _swiglu(w, "mlp.", inner))
    return _rms(x, w["norm.weight"], eps)


def nextn_step(tensors: Tensors, config: Config, pairs: Sequence[Pair]) -> tuple[Vectors, Vectors]:
    """The next-token layer of GLM or DeepSeek-V3 over the positions of ``pairs``.

    Returns:
        The output before and after ``shared_head.norm``, both [n, H].
    """
    w, eps = _under(tensors, f"model.layers.{config['num_hidden_layers']}."), config["rms_norm_eps"]
    embedding, hidden = (np.stack(each) for each in zip(*pairs, strict=True))
    both = [_rms(embedding, w["enorm.weight"], eps), _rms(hidden, w["hnorm.weight"], eps)]
    x = decoder_layer(w, config, np.concatenate(both, axis=-1) @ w["eh_proj.weight"].T)
    return x, _rms(x, w["shared_head.norm.weight"], eps)


def decoder_layer(w: Tensors, config: Config, x: Vectors) -> Vectors:
    """One layer of GLM or DeepSeek-V3 with experts; ``w`` has bare names, ``x`` is [n, H]."""
    eps = config["rms_norm_eps"]
    attention = _latent_attention if "kv_lora_rank" in config else _grouped_attention
    x = x + attention(w, config, _rms(x, w["input_layernorm.weight"], eps))
    inner = _rms(x, w["post_attention_layernorm.weight"], eps)
    return x + _sigmoid_experts(w, config, inner) + _swiglu(w, "mlp.shared_experts.", inner)


def chain(
    step: Callable[[Sequence[Pair]], tuple[Vectors, Vectors]],
    *,
    embed: Callable[[int], Vectors],
    score: Callable[[Vectors], Vectors],
    pairs: Sequence[Pair],
    depth: int,
) -> tuple[list[int], Vectors]:
    """Greedy drafts, each from the whole history anew.

    Args:
        step: gives, for all pairs, what the logits are read from and what is fed on, both [n, H].
        embed: a token's embedding, [H].
        score: logits [V] of an output [H].
        pairs: what the head has read from the target.
        depth: drafts.

    Returns:
        The drafts, and the logits each was the largest of, [depth, V].
    """
    known, tokens, logits = list(pairs), [], []
    for _ in range(depth):
        read, fed_on = step(known)
        logits.append(score(read[-1]))
        tokens.append(int(np.argmax(logits[-1])))
        known.append((embed(tokens[-1]), fed_on[-1]))
    return tokens, np.stack(logits)


def _under(tensors: Tensors, prefix: str) -> dict[str, Vectors]:
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def _shifted(w: Tensors) -> dict[str, Vectors]:
    """Qwen's release stores the weights of its norms less 1, and no other vectors."""
    return {name: value + 1.0 if value.ndim == 1 else value for name, value in w.items()}


def _rms(x: Vectors, weight: Vectors, eps: float) -> Vectors:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight)


def _sigmoid(x: Vectors) -> Vectors:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def _softmax(x: Vectors) -> Vectors:
    raised = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def _linear(w: Tensors, name: str, x: Vectors) -> Vectors:
    bias = w.get(f"{name}.bias", np.zeros(()))
    return np.asarray(x @ w[f"{name}.weight"].T + bias)


def _swiglu(w: Tensors, at: str, x: Vectors) -> Vectors:
    gate = _linear(w, f"{at}gate_proj", x)
    return _linear(w, f"{at}down_proj", gate * _sigmoid(gate) * _linear(w, f"{at}up_proj", x))


def _attend(
    q: Vectors, k: Vectors, v: Vectors, scale: float, seen: NDArray[np.bool_] | None = None
) -> Vectors:
    """Causal attention of [n, heads, D], a key head for a run of query heads; [n, heads * D]."""
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    q, k, v = (np.ascontiguousarray(each.swapaxes(0, 1)) for each in (q, k, v))
    n, out = q.shape[1], []
    for start in range(0, n, 64):  # few at a time, for the memory of long texts
        end = min(start + 64, n)
        allowed = np.tril(np.ones((end - start, end), dtype=np.bool_), start)
        if seen is not None:
            allowed &= seen[start:end, :end]
        scores = q[:, start:end] @ k[:, :end].swapaxes(1, 2) * scale
        out.append(_softmax(np.where(allowed, scores, -np.inf)) @ v[:, :end])
    return np.concatenate(out, axis=1).swapaxes(0, 1).reshape(n, -1)


def _gated_attention(w: Tensors, c: Config, x: Vectors) -> Vectors:
    n, size, eps = len(x), c["head_dim"], c["rms_norm_eps"]
    rope = c.get("rope_parameters") or c
    scaling = c.get("rope_parameters") or c.get("rope_scaling")
    turns = frequencies(int(size * rope["partial_rotary_factor"]), rope["rope_theta"], scaling)
    queries_and_gates = _linear(w, "self_attn.q_proj", x).reshape(n, -1, 2 * size)
    q, gate = queries_and_gates[..., :size], queries_and_gates[..., size:]
    k = _linear(w, "self_attn.k_proj", x).reshape(n, -1, size)
    v = _linear(w, "self_attn.v_proj", x).reshape(n, -1, size)
    q = turned(_rms(q, w["self_attn.q_norm.weight"], eps), turns, neighbours=False)
    k = turned(_rms(k, w["self_attn.k_norm.weight"], eps), turns, neighbours=False)
    out = _attend(q, k, v, size**-0.5) * _sigmoid(gate.reshape(n, -1))
    return _linear(w, "self_attn.o_proj", out)


def _grouped_attention(w: Tensors, c: Config, x: Vectors) -> Vectors:
    n, size, eps = len(x), c["head_dim"], c["rms_norm_eps"]
    turns = frequencies(int(size * c["partial_rotary_factor"]), c["rope_theta"], None)
    q, k, v = (_linear(w, f"self_attn.{name}_proj", x).reshape(n, -1, size) for name in "qkv")
    if c["use_qk_norm"]:
        q = _rms(q, w["self_attn.q_norm.weight"], eps)
        k = _rms(k, w["self_attn.k_norm.weight"], eps)
    q, k = (turned(each, turns, neighbours=False) for each in (q, k))
    return _linear(w, "self_attn.o_proj", _attend(q, k, v, size**-0.5))


def _latent_attention(w: Tensors, c: Config, x: Vectors) -> Vectors:
    """Keys and values of every head out of one small vector a position, as first published."""
    n, nope, rope = len(x), c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    dsa = "index_topk" in c
    # The published code of DeepSeek-V3 leaves these two norms at their own default.
    eps = c["rms_norm_eps"] if c["model_type"] == "glm4_moe_lite" else 1e-6
    parameters = c.get("rope_parameters") or c
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    turns = frequencies(rope, parameters["rope_theta"], scaling)
    low = _rms(_linear(w, "self_attn.q_a_proj", x), w["self_attn.q_a_layernorm.weight"], eps)
    q = _linear(w, "self_attn.q_b_proj", low).reshape(n, -1, nope + rope)
    together = _linear(w, "self_attn.kv_a_proj_with_mqa", x)
    latent = _rms(together[:, : c["kv_lora_rank"]], w["self_attn.kv_a_layernorm.weight"], eps)
    k_rope = turned(together[:, None, c["kv_lora_rank"] :], turns, neighbours=True)
    keys_and_values = _linear(w, "self_attn.kv_b_proj", latent).reshape(n, q.shape[1], -1)
    k = [keys_and_values[..., :nope], np.repeat(k_rope, q.shape[1], axis=1)]
    q = np.concatenate([q[..., :nope], turned(q[..., nope:], turns, neighbours=True)], axis=-1)
    scale = (nope + rope) ** -0.5
    scale *= magnitude_at(scaling.get("factor", 1), scaling.get("mscale_all_dim", 0)) ** 2
    seen = _chosen_positions(w, c, x, low, turns) if dsa else None
    out = _attend(q, np.concatenate(k, axis=-1), keys_and_values[..., nope:], scale, seen)
    return _linear(w, "self_attn.o_proj", out)


def _chosen_positions(
    w: Tensors, c: Config, x: Vectors, low: Vectors, rope: tuple[Vectors, float]
) -> NDArray[np.bool_]:
    """The positions that the indexer of sparse attention lets each position see, [n, n]."""
    n, heads, size = len(x), c["index_n_heads"], c["index_head_dim"]
    q = _linear(w, "self_attn.indexer.wq_b", low).reshape(n, heads, size)
    k = _linear(w, "self_attn.indexer.wk", x)
    k = (k - k.mean(axis=-1, keepdims=True)) / np.sqrt(k.var(axis=-1, keepdims=True) + 1e-5)
    k = k * w["self_attn.indexer.k_norm.weight"] + w["self_attn.indexer.k_norm.bias"]
    neighbours = c.get("indexer_rope_interleave", c["model_type"] == "glm_moe_dsa")
    q = turned(q, rope, neighbours=neighbours)
    k = turned(k[:, None], rope, neighbours=neighbours)[:, 0]
    weights = _linear(w, "self_attn.indexer.weights_proj", x) * (heads * size) ** -0.5
    scores = np.einsum("qhk,qh->qk", np.maximum(np.einsum("qhd,kd->qhk", q, k), 0.0), weights)
    scores = np.where(np.tril(np.ones((n, n), dtype=np.bool_)), scores, -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")
    seen = np.zeros((n, n), dtype=np.bool_)
    np.put_along_axis(seen, order[:, : c["index_topk"]], True, axis=-1)
    return seen


def _expert(w: Tensors, number: int, x: Vectors) -> Vectors:
    """One expert's output; its projections are one tensor each, or a slice of a fused one."""
    if "mlp.experts.gate_up_proj" not in w:
        return _swiglu(w, f"mlp.experts.{number}.", x)
    gate, up = np.split(w["mlp.experts.gate_up_proj"][number], 2)
    own = {"gate_proj.weight": gate, "up_proj.weight": up}
    return _swiglu({**own, "down_proj.weight": w["mlp.experts.down_proj"][number]}, "", x)


def _softmax_experts(w: Tensors, c: Config, x: Vectors) -> Vectors:
    """Qwen's experts: the probabilities of the most probable ones, and one that is always asked."""
    shares = _softmax(_linear(w, "mlp.gate", x))
    default = "qwen3_5" in c["model_type"]  # mlx-lm's where the config is silent
    always = _sigmoid(_linear(w, "mlp.shared_expert_gate", x))
    out = always * _swiglu(w, "mlp.shared_expert.", x)
    for row, share in enumerate(shares):
        best = np.argsort(-share, kind="stable")[: c["num_experts_per_tok"]]
        whole = share[best].sum() if c.get("norm_topk_prob", default) else 1.0
        for number in best:
            out[row] += share[number] / whole * _expert(w, number, x[row])
    return out


def _sigmoid_experts(w: Tensors, c: Config, x: Vectors) -> Vectors:
    """DeepSeek-V3's experts: chosen by a corrected score within the best groups, without loss."""
    scores = _sigmoid(_linear(w, "mlp.gate", x))
    corrected = scores + w["mlp.gate.e_score_correction_bias"]
    out = np.zeros_like(x)
    for row, choice in enumerate(corrected):
        groups = choice.reshape(c["n_group"], -1)
        strength = np.sort(groups, axis=-1)[:, -2:].sum(axis=-1)
        # A group that is not chosen counts as 0, as published; not as minus infinity.
        weak = np.argsort(-strength, kind="stable")[c["topk_group"] :]
        groups = np.where(np.isin(np.arange(len(groups)), weak)[:, None], 0.0, groups)
        best = np.argsort(-groups.reshape(-1), kind="stable")[: c["num_experts_per_tok"]]
        normal = c["num_experts_per_tok"] > 1 and c["norm_topk_prob"]
        whole = scores[row, best].sum() if normal else 1.0
        for number in best:
            share = scores[row, number] / whole * c["routed_scaling_factor"]
            out[row] += share * _expert(w, number, x[row])
    return out
