"""Small DFlash and DFlash 2 drafters in the layout of their public releases, one for each option.

Weights come from numpy by seed and tensor name. The target that they draft for is mlx-lm's qwen3
with random weights: it agrees with none of them, so tests decide what is accepted.

Shapes: H hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from oracles.tiny_releases import Draws
from tiny_models import VOCABULARY, build_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["CASES", "LAYERS", "MASK", "PROMPTS", "Release", "plan", "target_model"]

LAYERS = 4
"""Of the target."""

MASK = VOCABULARY - 1

PROMPTS: tuple[tuple[int, ...], ...] = (
    (9,),
    tuple((11 * place + 5) % VOCABULARY for place in range(9)),
    tuple((29 * place + place * place + 2) % VOCABULARY for place in range(30)),
)
"""Texts of 1, 9 and 30 tokens: shorter and longer than the windows below."""

_BACKBONE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "num_target_layers": LAYERS,
    "torch_dtype": "float32",
}
_S, _F = "sliding_attention", "full_attention"
_ROPE: Mapping[str, Any] = {"rope_theta": 10000.0}
_SECOND: Mapping[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 8,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@frozen(kw_only=True)
class Release:
    """One drafter.

    Attributes:
        name: of the case.
        kind: ``"dflash"`` or ``"dflash2"``.
        top: entries of ``config.json``, besides the usual ones.
        own: entries of its ``dflash_config``.
        prefix: of the tensors' names.
    """

    name: str
    kind: str = "dflash"
    top: Mapping[str, Any] = field(factory=dict)
    own: Mapping[str, Any] = field(factory=dict)
    prefix: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        second = self.kind == "dflash2"
        own = {"target_layer_ids": [0, 2], "mask_token_id": MASK, **(_SECOND if second else {})}
        return {
            **_BACKBONE,
            "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
            **self.top,
            "dflash_config": {**own, **self.own},
        }

    @property
    def block_size(self) -> int:
        """Columns of a block, the pending token's included."""
        return int(self.own.get("block_size", self.top.get("block_size", 0)))

    def draws(self) -> Draws:
        """Its tensors, by their names without the prefix."""
        config = self.config
        hidden, vocab, own = config["hidden_size"], config["vocab_size"], config["dflash_config"]
        draws = Draws(7)
        draws.matrix("fc.weight", hidden, len(own["target_layer_ids"]) * hidden)
        draws.vector("hidden_norm.weight", hidden)
        draws.vector("norm.weight", hidden)
        for number in range(config["num_hidden_layers"]):
            _layer(draws, f"layers.{number}.", config, second=self.kind == "dflash2")
        if self.kind == "dflash2":
            rank = own["selector_rank"]
            for name in ("predecessor_codebook", "successor_codebook"):
                draws.vector(f"candidate_selector.{name}", vocab, rank, center=0.0, spread=1.0)
            draws.matrix("candidate_selector.hidden_projection.weight", rank, hidden)
        return draws

    def write(self, folder: Path, *, prefix: str | None = None, **changes: Any) -> Path:
        """Write the drafter.

        Args:
            folder: is made.
            prefix: of the tensors' names, instead of its own.
            changes: entries of ``config.json``; of ``dflash_config`` where they are there already.
        """
        config, draws = self.config, self.draws()
        for key, value in changes.items():
            (config["dflash_config"] if key in config["dflash_config"] else config)[key] = value
        before = self.prefix if prefix is None else prefix
        named = {f"{before}{name}": tensor for name, tensor in draws.tensors.items()}
        Draws(0, named).write(folder, config)
        return folder


def _layer(draws: Draws, at: str, config: Mapping[str, Any], *, second: bool) -> None:
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        draws.vector(f"{at}{name}.weight", hidden)
    draws.matrix(f"{at}self_attn.q_proj.weight", heads * size, hidden)
    for name in ("k_proj", "v_proj"):
        draws.matrix(f"{at}self_attn.{name}.weight", config["num_key_value_heads"] * size, hidden)
    draws.matrix(f"{at}self_attn.o_proj.weight", hidden, heads * size)
    for name in ("q_norm", "k_norm"):  # above 1, so that attention prefers some positions
        draws.vector(f"{at}self_attn.{name}.weight", size, center=1.5)
    for name in ("gate_proj", "up_proj"):
        draws.matrix(f"{at}mlp.{name}.weight", config["intermediate_size"], hidden)
    draws.matrix(f"{at}mlp.down_proj.weight", hidden, config["intermediate_size"])
    if not second:
        return
    own = config["dflash_config"]
    taps, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
    for name in ("attention_conv", "mlp_conv"):
        draws.vector(f"{at}{name}.base_kernel", 2, taps, hidden, center=0.3, spread=0.4)
        draws.matrix(f"{at}{name}.kernel_projection.weight", 2 * taps * groups, hidden, gain=0.4)


def _listed(*releases: Release) -> dict[str, Release]:
    return {release.name: release for release in releases}


CASES: Mapping[str, Release] = _listed(
    Release(name="plain", top={**_ROPE, "block_size": 6}),
    Release(
        name="inside",
        top={"rope_parameters": {"rope_type": "default", **_ROPE}},
        own={"block_size": 6},
        prefix="model.",
    ),
    Release(name="yarn", top={**_ROPE, "block_size": 6, "rope_scaling": _YARN}),
    Release(
        name="linear",
        top={
            "block_size": 4,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        },
        own={"target_layer_ids": [3, 0, 1]},
    ),
    Release(
        name="sliding", top={**_ROPE, "block_size": 6, "layer_types": [_S] * 3, "sliding_window": 8}
    ),
    Release(
        name="sliding-both-ways",
        top={
            **_ROPE,
            "layer_types": [_S] * 3,
            "sliding_window": 8,
            "is_causal": False,
            "num_key_value_heads": 4,
        },
        own={"block_size": 6},
    ),
    Release(
        name="mixed",
        top={**_ROPE, "block_size": 6, "layer_types": [_S, _S, _F], "sliding_window": 7},
    ),
    Release(
        name="mixed-causal",
        top={
            **_ROPE,
            "block_size": 6,
            "layer_types": [_F, _S, _F],
            "sliding_window": 7,
            "is_causal": True,
        },
    ),
    Release(
        name="full-causal",
        top={**_ROPE, "block_size": 6, "is_causal": True, "num_key_value_heads": 1},
        own={"target_layer_ids": [1]},
    ),
    Release(
        name="narrow",  # a window of fewer positions than a block
        top={**_ROPE, "block_size": 6, "layer_types": [_S, _F, _S], "sliding_window": 3},
    ),
    Release(
        name="scaled",
        top={**_ROPE, "block_size": 6},
        own={
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    Release(name="capped", top={**_ROPE, "block_size": 6, "final_logit_softcapping": 1.5}),
    Release(
        name="second",
        kind="dflash2",
        top={
            "layer_types": [_S] * 3,
            "sliding_window": 8,
            "is_causal": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        },
        own={"block_size": 6},
    ),
    Release(
        name="second-full",
        kind="dflash2",
        top={**_ROPE, "is_causal": False},
        own={"block_size": 6, "selector_top_k": 16, "selector_rank": 4},
        prefix="model.",
    ),
    Release(
        name="second-wide",
        kind="dflash2",
        top={**_ROPE, "block_size": 6, "layer_types": [_S, _F, _S], "sliding_window": 9},
        own={
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
            "input_embedding_scale": 2.0,
        },
    ),
)
"""The drafters by name."""


@cache
def target_model() -> Any:
    """The target: do not change it."""
    return build_model("qwen3", 3, num_hidden_layers=LAYERS)


def plan(release: Release, row: int) -> list[tuple[int, int]]:
    """Drafts that each round asks for, and how many of them are taken as accepted.

    Args:
        release: the drafter.
        row: number of the prompt; each has the rounds in another order.
    """
    most = release.block_size - 1
    rounds = [(most, 0), (most, 2), (most, most), (2, 1), (most, 0), (most, 1), (1, 0), (most, 0)]
    return [*rounds[row:], *rounds[:row]]
