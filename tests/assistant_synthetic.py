"""Small assistants in the layout of Gemma 4's, one for each way they differ, and K/V to borrow.

Weights, keys, values and hidden states come from numpy by seed and name. There is no target: what
it would lend is drawn, so that implementations can be compared step by step.

Shapes: H features of the target's hidden state, V vocabulary, n positions, D features of a head.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen
from oracles.tiny_releases import Draws

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "BACKBONE",
    "CASES",
    "LENGTHS",
    "STEPS",
    "VOCABULARY",
    "WINDOW",
    "Loan",
    "Release",
    "embedding",
]

BACKBONE = 24
"""H of the target that is not there."""

VOCABULARY = 48

WINDOW = 6

LENGTHS = (1, 5, 23)
"""Positions that three rows' targets have read: within the window, and far beyond it."""

STEPS = 4

_S, _F = "sliding_attention", "full_attention"
_TEXT: Mapping[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": [_S, _S, _S, _F],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rope_parameters": {
        _S: {"rope_type": "default", "rope_theta": 10000.0},
        _F: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}


@frozen(eq=False)
class Loan:
    """What one row's target lends, and its state at the last position.

    Attributes:
        kv: by layer type, keys and values ``[kv heads, n, D]`` of all positions.
        hidden: ``[H]``.
        pending: the token that the first draft follows.
    """

    kv: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
    hidden: NDArray[np.float32]
    pending: int


@frozen(kw_only=True)
class Release:
    """One assistant.

    Attributes:
        top: entries of ``config.json``.
        text: entries of its ``text_config``.
        sparse: whether it has the tensors of the sparse head.
    """

    top: Mapping[str, Any] = field(factory=dict)
    text: Mapping[str, Any] = field(factory=dict)
    sparse: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": BACKBONE,
            "use_ordered_embeddings": self.sparse,
            "num_centroids": 8,
            "centroid_intermediate_top_k": 3,
            "tie_word_embeddings": True,
            **self.top,
            "text_config": {**deepcopy(dict(_TEXT)), **self.text},
        }

    def draws(self) -> Draws:
        """Its tensors by name."""
        config, draws = self.config, Draws(11)
        text, backbone = config["text_config"], config["backbone_hidden_size"]
        size = text["hidden_size"]
        draws.matrix("pre_projection.weight", size, 2 * backbone)
        draws.matrix("post_projection.weight", backbone, size)
        draws.matrix("model.embed_tokens.weight", text["vocab_size"], size)
        draws.vector("model.norm.weight", size)
        for number, kind in enumerate(text["layer_types"]):
            _layer(draws, f"model.layers.{number}.", text, kind)
        if not config["tie_word_embeddings"]:
            draws.matrix("lm_head.weight", text["vocab_size"], size)
        if self.sparse:
            draws.matrix("masked_embedding.centroids.weight", config["num_centroids"], size)
            order: Any = np.random.default_rng(3).permutation(text["vocab_size"])
            draws.tensors["masked_embedding.token_ordering"] = order.astype(np.int64)
        return draws

    def write(self, folder: Path, drop: str = "", **changes: Any) -> Path:
        """Write the assistant.

        Args:
            folder: is made.
            drop: name of a tensor that is left out.
            changes: entries of ``config.json``; of ``text_config`` where they are there already.
        """
        config, draws = self.config, self.draws()
        for key, value in changes.items():
            (config["text_config"] if key in config["text_config"] else config)[key] = value
        draws.tensors.pop(drop, None)
        draws.write(folder, config)
        return folder

    def loan(self, length: int) -> Loan:
        """What a target lends that has read so many tokens."""
        text = self.config["text_config"]
        own = np.random.default_rng([5, length])
        shapes = {
            _S: (text["num_key_value_heads"], length, text["head_dim"]),
            _F: (text["num_global_key_value_heads"], length, text["global_head_dim"]),
        }
        kv = {
            kind: (_normal(own, shape) * shape[2] ** -0.25, _normal(own, shape))
            for kind, shape in shapes.items()
        }
        return Loan(kv, _normal(own, (BACKBONE,)), int(own.integers(VOCABULARY)))


def embedding() -> NDArray[np.float32]:
    """``[V, H]``: how the target embeds each token, scaled as it scales them."""
    return _normal(np.random.default_rng(8), (VOCABULARY, BACKBONE))


def _normal(draws: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return draws.standard_normal(shape).astype(np.float32)


def _layer(draws: Draws, at: str, text: Mapping[str, Any], kind: str) -> None:
    size, inner = text["hidden_size"], text["intermediate_size"]
    head = text["global_head_dim" if kind == _F else "head_dim"]
    heads = text["num_attention_heads"] * head
    draws.matrix(f"{at}self_attn.q_proj.weight", heads, size)
    draws.matrix(f"{at}self_attn.o_proj.weight", size, heads)
    draws.vector(f"{at}self_attn.q_norm.weight", head)
    for name in ("gate_proj", "up_proj"):
        draws.matrix(f"{at}mlp.{name}.weight", inner, size)
    draws.matrix(f"{at}mlp.down_proj.weight", size, inner)
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        draws.vector(f"{at}{name}_layernorm.weight", size)
    draws.vector(f"{at}layer_scalar", 1)


_ODD: Mapping[str, Any] = {
    "layer_types": [_F, _S, _F],
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 0,
    "head_dim": 12,
    "global_head_dim": 20,
    "rope_parameters": {
        _S: {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        _F: {
            "rope_type": "proportional",
            "rope_theta": 2000.0,
            "partial_rotary_factor": 0.35,  # of 20 features: 3 pairs and a half
            "factor": 2.0,
        },
    },
}

CASES: Mapping[str, Release] = {
    "whole": Release(),
    "sparse": Release(sparse=True),
    "untied": Release(top={"tie_word_embeddings": False}, text=_ODD),
    "sparse-untied": Release(top={"tie_word_embeddings": False}, sparse=True),
}
