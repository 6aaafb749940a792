"""Tiny Gemmas of mlx-lm, and assistants that are right about them often.

An assistant is fitted by least squares: its layers hardly change what goes in, so its head is a
linear function of the last token's embedding and the target's hidden state, and so is the state
that it goes on with. Both are fitted to texts that the target writes.

Shapes: H features of the target's hidden state, V vocabulary.
"""

from __future__ import annotations

import importlib
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from architectures import CONFIGS
from mlx_lm.generate import generate_step
from oracles.tiny_releases import Draws

from specdec.contract import ContextKind
from specdec.targets import MlxLmTarget
from specdec.testing.target import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["PROMPTS", "TARGETS", "bound", "greedy", "model_of", "write_fitted", "write_random"]

_S, _F = "sliding_attention", "full_attention"
_DENSE: Mapping[str, Any] = {"enable_moe_block": False, "hidden_size_per_layer_input": 0}

TARGETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma4 that shares": ("gemma4_text", {}),
    "gemma4": ("gemma4_text", {**_DENSE, "num_kv_shared_layers": 0}),
    "gemma4 of full layers": (
        "gemma4_text",
        {**_DENSE, "num_kv_shared_layers": 0, "layer_types": [_F] * 3, "num_hidden_layers": 3},
    ),
    "gemma3": ("gemma3_text", {}),
}
"""By name, an architecture of mlx-lm's and what is changed of its tiny config."""

PROMPTS: tuple[tuple[int, ...], ...] = (
    (7, 3, 19, 40, 22, 5),
    (8,),
    tuple((11 * place + 5) % 64 for place in range(21)),
    (50, 2, 33),
)
"""Texts of 6, 1, 21 and 3 tokens: windows have 8 positions."""

_COUNT = 40


@cache
def model_of(name: str) -> Any:
    """The model, in float32."""
    architecture, changes = TARGETS[name]
    held = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {"model_type": architecture, **deepcopy(CONFIGS[architecture]), **changes}
    return seeded_weights(held.Model(held.ModelArgs.from_dict(config)), 3)


@cache
def bound(name: str) -> MlxLmTarget:
    """The model as a target."""
    return MlxLmTarget(model_of(name))


@cache
def greedy(name: str, prompt: tuple[int, ...], count: int = _COUNT, **options: Any) -> list[int]:
    """mlx-lm's own tokens."""
    steps = generate_step(mx.array(prompt), model_of(name), max_tokens=count, **options)
    return [token for token, _ in steps]


def write_fitted(folder: Path, name: str, *, known: int = 2, sparse: bool = False) -> Path:
    """Write an assistant that is right about some texts, and about others now and then.

    Args:
        folder: is made.
        name: of the target.
        known: how many of ``PROMPTS`` it knows the target's texts of.
        sparse: whether it has the tensors of the sparse head.
    """
    target = bound(name)
    given, tokens, following = _seen(target, [[*p, *greedy(name, p)] for p in PROMPTS[:known]])
    size = given.shape[1]
    # The network gives its head the input, normed: what is fitted reads that.
    normed = given / np.sqrt(np.mean(given**2, axis=1, keepdims=True) + 1e-6)
    head = _fit(normed, np.eye(target.vocab_size)[tokens])
    onward = _fit(normed[:-1], following[:-1])
    config = _config(name, size)
    draws = _draws(config, 0.01)
    draws.tensors |= {
        "pre_projection.weight": np.eye(size, dtype=np.float32),
        "post_projection.weight": onward,
        "model.embed_tokens.weight": head,
        "model.norm.weight": np.ones(size, np.float32),
    }
    if sparse:
        order: Any = np.arange(target.vocab_size)
        draws.tensors["masked_embedding.token_ordering"] = order
        # The centroid of eight neighbours is their mean, so the best token's is among the best.
        draws.tensors["masked_embedding.centroids.weight"] = head.reshape(8, -1, size).mean(1)
    draws.write(folder, config)
    return folder


def write_random(folder: Path, name: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Write an assistant that is nearly always wrong, and whose attention decides its drafts.

    Returns:
        Its config and its tensors.
    """
    config = _config(name, 32)
    draws = _draws(config, 1.0)
    backbone, vocab_size = config["backbone_hidden_size"], bound(name).vocab_size
    draws.matrix("pre_projection.weight", 32, 2 * backbone)
    draws.matrix("post_projection.weight", backbone, 32)
    draws.matrix("model.embed_tokens.weight", vocab_size, 32)
    draws.vector("model.norm.weight", 32)
    draws.write(folder, config)
    return config, draws.tensors


def _config(name: str, size: int) -> dict[str, Any]:
    args, port = bound(name).model.args, bound(name).hidden_taps
    assert port is not None
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {
        "model_type": "gemma4_text",
        "hidden_size": size,
        "intermediate_size": 16,
        "layer_types": [_F] if name == "gemma4 of full layers" else [_S, _F],
        "num_attention_heads": 4,
        "head_dim": args.head_dim,
        "global_head_dim": getattr(args, "global_head_dim", None) or args.head_dim,
        "vocab_size": bound(name).vocab_size,
        "rms_norm_eps": 1e-6,
        "sliding_window": 8,
        "rope_parameters": {_S: rope, _F: rope},
    }
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": port.hidden_size,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 6,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def _draws(config: Mapping[str, Any], part: float) -> Draws:
    """Layers that add so large a part of everything."""
    draws, text = Draws(1), config["text_config"]
    size = text["hidden_size"]
    for number, kind in enumerate(text["layer_types"]):
        at = f"model.layers.{number}."
        head = text["global_head_dim" if kind == _F else "head_dim"]
        draws.matrix(f"{at}self_attn.q_proj.weight", 4 * head, size)
        draws.matrix(f"{at}self_attn.o_proj.weight", size, 4 * head)
        draws.vector(f"{at}self_attn.q_norm.weight", head)
        for each in ("gate_proj", "up_proj"):
            draws.matrix(f"{at}mlp.{each}.weight", 16, size)
        draws.matrix(f"{at}mlp.down_proj.weight", size, 16)
        for each in ("input", "pre_feedforward"):
            draws.vector(f"{at}{each}_layernorm.weight", size)
        for each in ("post_attention", "post_feedforward"):
            spread = 0.2 * part
            draws.vector(f"{at}{each}_layernorm.weight", size, center=part, spread=spread)
        draws.vector(f"{at}layer_scalar", 1)
    return draws


def _seen(target: MlxLmTarget, texts: Sequence[Sequence[int]]) -> tuple[Any, Any, Any]:
    """What an assistant is given ``[n, 2 H]``, the tokens that follow, and the next states."""
    port = target.hidden_taps
    assert port is not None
    given, tokens, following = [], [], []
    for text in texts:
        state = target.new_state()
        state.begin_round(len(text), reading=True)
        window = target.forward(mx.array([text]), state, ContextKind.POST_NORM)
        assert window.context is not None
        hidden = np.array(window.context[0], np.float64)
        embedded = np.array(port.embed(mx.array([text]))[0], np.float64)
        given.append(np.concatenate([embedded[1:-1], hidden[:-2]], axis=1))
        tokens.append(text[2:])
        following.append(hidden[1:-1])
    return np.concatenate(given), np.concatenate(tokens), np.concatenate(following)


def _fit(given: Any, wanted: Any) -> Any:
    """``[outputs, inputs]`` of a ridge regression."""
    left = given.T @ given + 1e-3 * np.eye(given.shape[1])
    return np.linalg.solve(left, given.T @ wanted).T.astype(np.float32)
