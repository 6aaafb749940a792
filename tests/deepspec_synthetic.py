"""Small seeded releases of DeepSpec drafters and of vLLM's speculators, in float32.

The weights come from numpy, so that a recording that was made without specdec holds for them. All
are for a target of 4 layers, hidden size 64 and 64 tokens, such as :func:`target_model`'s.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from deepspec_tensors import (
    GLOBAL,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    RANK,
    SIZE,
    VOCABULARY,
    Draws,
    heads_tensors,
    own_tensors,
    second_tensors,
    trunk_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = [
    "DRAFT_IDS",
    "HIDDEN",
    "RELEASES",
    "VOCABULARY",
    "target_model",
    "write_gemma",
    "write_lfm2",
    "write_qwen",
    "write_release",
    "write_speculators",
]

DRAFT_IDS: Final = tuple(range(1, 64, 3))
"""What a drafter with a vocabulary of its own scores: 21 ids, none of them the mask's."""

_MASK: Final = 63

Spec = dict[str, Any]


def _qwen(**changes: Any) -> Spec:
    """What DeepSpec writes: a copy of a Qwen3 target's config, and the drafter's keys."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": False,
        "num_target_layers": 4,
        "num_anchors": 512,
        "block_size": 5,
        "mask_token_id": _MASK,
        "target_layer_ids": [0, 2],
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        **changes,
    }


def _gemma(**changes: Any) -> Spec:
    """The same of a Gemma 4 target; what it says of windows is of the target's own layers."""
    return {
        **_qwen(),
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 8,
        "global_head_dim": GLOBAL,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 4,
        "final_logit_softcapping": 5.0,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
        **changes,
    }


def _write(folder: Path, spec: Spec, draws: Draws, prefix: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(spec))
    named = {prefix + name: tensor for name, tensor in draws.tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named, metadata={"format": "pt"})
    return folder


def write_qwen(folder: Path, *, own: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A ``Qwen3DSparkModel``.

    Args:
        folder: is made.
        own: whether it has an embedding and a head of its own.
        seed: of the weights.
        changes: of its config.
    """
    spec, draws = _qwen(**changes), Draws(seed)
    trunk_tensors(draws, spec, len(spec["target_layer_ids"]))
    heads_tensors(draws, spec)
    if own:
        own_tensors(draws)
    return _write(folder, spec, draws)


def write_gemma(folder: Path, *, own: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A ``Gemma4DSparkModel``; arguments as of :func:`write_qwen`."""
    spec, draws = _gemma(**changes), Draws(seed)
    trunk_tensors(draws, spec, len(spec["target_layer_ids"]))
    heads_tensors(draws, spec)
    if own:
        own_tensors(draws, gemma=True)
    return _write(folder, spec, draws)


def write_lfm2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """LiquidAI's: taps inside ``dflash_config``, neighbouring features rotated, no head."""
    spec, draws = (
        _qwen(architectures=["Lfm2DSparkDraftModel"], rope_is_neox_style=False),
        Draws(seed),
    )
    keys = ("mask_token_id", "target_layer_ids", "num_target_layers")
    spec["dflash_config"] = {key: spec.pop(key) for key in keys}
    del spec["confidence_head_with_markov"]  # no published one says it, and all have it
    spec.update(changes)
    trunk_tensors(draws, spec, 2)
    heads_tensors(draws, spec)
    return _write(folder, spec, draws)


def write_speculators(
    folder: Path,
    kind: str,
    *,
    draft_ids: Iterable[int] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A release of vLLM's speculators.

    Args:
        folder: is made.
        kind: ``"dspark"``, ``"dflash"`` or ``"dflash2"``.
        draft_ids: ascending ids that it scores; ``None`` for all, with the target's head.
        seed: of the weights.
        changes: of its config; those that are keys of ``transformer_layer_config`` go there.
    """
    others = {*_TOP_KEYS, *_HEAD_KEYS}
    layer = {key: value for key, value in _qwen().items() if key not in others}
    inside = {*layer, "rope_parameters", "sliding_window"}
    layer.update({key: changes.pop(key) for key in list(changes) if key in inside})
    anchor = kind == "dspark"
    spec: Spec = {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": VOCABULARY,
        "block_size": 5,
        "aux_hidden_state_layer_ids": [1, 3],  # the embedding is 0: after layers 0 and 2
        "mask_token_id": _MASK,
        "sample_from_anchor": anchor,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5 if anchor else 4}
            ],
        },
    }
    if kind == "dspark":
        spec.update({key: value for key, value in _qwen().items() if key in _HEAD_KEYS})
    if kind == "dflash2":
        spec.update(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4)
    draws = Draws(seed)
    ids = None if draft_ids is None else list(draft_ids)
    spec.update(changes)
    trunk_tensors(draws, spec, len(spec["aux_hidden_state_layer_ids"]))
    if kind == "dspark":
        heads_tensors(draws, spec, VOCABULARY if ids is None else len(ids))
    if kind == "dflash2":
        second_tensors(draws)
    draws.tensors["verifier_norm.weight"] = mx.ones(HIDDEN)  # of the target; not the drafter's
    if ids is not None:
        spec["draft_vocab_size"] = changes.get("draft_vocab_size", len(ids))
        draws.add("lm_head.weight", len(ids), HIDDEN)
        draws.tensors["d2t"] = mx.array([each - at for at, each in enumerate(ids)], mx.int64)
        draws.tensors["t2d"] = mx.array([token in ids for token in range(VOCABULARY)])
    return _write(folder, spec, draws)


_ARCHITECTURES: Final = {
    "dspark": "DSparkSpeculator",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
}
_HEAD_KEYS: Final = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_TOP_KEYS: Final = (
    "architectures",
    "block_size",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "target_layer_ids",
    "tie_word_embeddings",
)


_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

RELEASES: Final[Mapping[str, tuple[Callable[..., Path], Spec]]] = {
    "qwen": (write_qwen, {}),
    "qwen with the target's head": (write_qwen, {"own": False}),
    "qwen without a sequential head": (
        write_qwen,
        {"markov_rank": 0, "confidence_head_with_markov": False},
    ),
    "qwen gated": (write_qwen, {"markov_head_type": "gated", "confidence_head_with_markov": False}),
    "qwen rnn": (write_qwen, {"markov_head_type": "rnn"}),
    "qwen yarn": (write_qwen, {"rope_theta": None, "rope_parameters": _YARN, "own": False}),
    "qwen causal window": (write_qwen, {**_SLIDING, "is_causal": True}),
    "gemma": (write_gemma, {}),
    "gemma with the target's head": (write_gemma, {"own": False}),
    "gemma with values": (write_gemma, {"attention_k_eq_v": False}),
    "lfm2": (write_lfm2, {}),
    "lfm2 bonus": (write_lfm2, {"dspark_bonus_anchor": True, "enable_confidence_head": False}),
    "speculators dspark": (write_speculators, {"kind": "dspark"}),
    "speculators dspark listed": (write_speculators, {"kind": "dspark", "draft_ids": DRAFT_IDS}),
    "speculators dspark window": (
        write_speculators,
        {"kind": "dspark", **_SLIDING, "sliding_window_non_causal": False},
    ),
    "speculators dflash": (write_speculators, {"kind": "dflash"}),
    "speculators dflash listed": (
        write_speculators,
        {"kind": "dflash", "draft_ids": DRAFT_IDS, **_SLIDING, "sliding_window_non_causal": True},
    ),
    "speculators dflash2": (write_speculators, {"kind": "dflash2", **_SLIDING}),
}
"""Releases by name: what writes each, and how."""


def write_release(name: str, folder: Path) -> Path:
    """One of :data:`RELEASES`."""
    write, options = RELEASES[name]
    return write(folder, **options)


@cache
def target_model() -> Any:
    """A Qwen3 target of mlx-lm's that the releases fit."""
    from tiny_models import tiny_model

    return tiny_model("qwen3", num_hidden_layers=4)
