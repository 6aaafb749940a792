"""What an assistant is, read from its ``config.json``: sizes, layers, positions and head.

The layout is that of transformers' ``Gemma4AssistantConfig``: a few keys of the assistant around a
``text_config`` of Gemma 4.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from specdec.errors import ArtifactError
from specdec.plugins.config_keys import Keys

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MODEL_TYPES",
    "AssistantConfig",
    "Centroids",
    "LayerKind",
    "Rope",
    "check_centroids",
    "read_config",
]

MODEL_TYPES: Final = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of ``model_type`` whose network is the one here."""

_TEXT_TYPES: Final = ("gemma4_text", "gemma4_unified_text")
_ROPES: Final = ("default", "linear", "proportional")


class LayerKind(StrEnum):
    """Which of the target's keys and values a layer reads.

    Attributes:
        FULL: those of its last layer that sees everything.
        SLIDING: those of its last layer that sees a window.
    """

    FULL = "full_attention"
    SLIDING = "sliding_attention"


@frozen
class Rope:
    """Rotary positions of one kind of layer.

    Attributes:
        theta: their base.
        rotated: features of a head that are turned; the exponents are over all of its features.
        factor: that positions are divided by.
    """

    theta: float
    rotated: int
    factor: float = 1.0


@frozen
class Centroids:
    """What the sparse head is chosen from.

    Attributes:
        count: groups of tokens, of one size each.
        top_k: groups whose tokens are scored.
    """

    count: int
    top_k: int


@frozen(kw_only=True)
class AssistantConfig:
    """An assistant.

    Attributes:
        backbone_size: features of the target's hidden state.
        hidden_size: its own features.
        heads: query heads.
        intermediate_size: of its MLPs.
        vocab_size: ids that its head scores.
        eps: of its norms.
        layers: what each of them reads.
        head_dims: features of a head, by kind of layer.
        ropes: rotary positions, by kind of layer.
        window: positions that a sliding layer sees.
        scale: of the products of queries and keys.
        bias: whether the attention's projections have one.
        tied: whether the head is the table ``embed_tokens``; else it is ``lm_head``.
        centroids: as declared; whether there are any is for the tensors to say.
        block_size: tokens of a round as it is published, the pending one included.
    """

    backbone_size: int
    hidden_size: int
    heads: int
    intermediate_size: int
    vocab_size: int
    eps: float
    layers: tuple[LayerKind, ...] = field(converter=tuple[LayerKind, ...])
    head_dims: Mapping[LayerKind, int]
    ropes: Mapping[LayerKind, Rope]
    window: int | None = None
    scale: float = 1.0
    bias: bool = False
    tied: bool = True
    centroids: Centroids
    block_size: int | None = None


def read_config(what: str, config: Mapping[str, Any]) -> AssistantConfig:
    """A config, checked.

    Args:
        what: names the drafter in messages.
        config: the object in ``config.json``.

    Raises:
        ArtifactError: a key that is missing, wrong, or asks for what no assistant here has.
    """
    top = Keys(what, config)
    if config.get("model_type") not in MODEL_TYPES:
        raise top.wrong("model_type", " or ".join(MODEL_TYPES))
    text = top.under("text_config")
    _refuse_others(text)
    kinds = [LayerKind(word) for word in text.words("layer_types", list(LayerKind))]
    _check_layers(text, len(kinds))
    used = sorted(set(kinds))
    head_dims = {kind: _head_dim(text, kind) for kind in used}
    ropes = text.under("rope_parameters")
    return AssistantConfig(
        backbone_size=top.count("backbone_hidden_size"),
        hidden_size=text.count("hidden_size"),
        heads=text.count("num_attention_heads"),
        intermediate_size=text.count("intermediate_size"),
        vocab_size=text.count("vocab_size"),
        eps=text.number("rms_norm_eps", 1e-6, above=0),
        layers=kinds,
        head_dims=head_dims,
        ropes={kind: _rope(ropes.under(kind), head_dims[kind]) for kind in used},
        window=text.count("sliding_window") if LayerKind.SLIDING in used else None,
        # Gemma 4 normalises queries and keys and scales no more; Gemma 2 and 3 name a scalar.
        scale=text.number("query_pre_attn_scalar", 1.0, above=0) ** -0.5,
        bias=text.flag("attention_bias", False),
        tied=top.flag("tie_word_embeddings", True),
        centroids=Centroids(
            top.count("num_centroids", 2048), top.count("centroid_intermediate_top_k", 32)
        ),
        block_size=top.count("block_size", least=2) if top.has("block_size") else None,
    )


def _refuse_others(text: Keys) -> None:
    """Refuse settings that would need another network."""
    text.must_be("model_type", *_TEXT_TYPES)
    text.must_be("hidden_activation", "gelu_pytorch_tanh")
    text.must_be("use_bidirectional_attention", "vision")
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        text.must_be(key, 0)
    for key in ("enable_moe_block", "use_double_wide_mlp", "rope_traditional"):
        text.must_be(key, False)


def _check_layers(text: Keys, count: int) -> None:
    layers = text.count("num_hidden_layers", count)
    if layers != count:
        raise text.wrong("num_hidden_layers", f"{count}, the number of layer_types")
    if text.has("num_kv_shared_layers"):  # absent or 0 is all of them
        shared = text.count("num_kv_shared_layers", least=0)
        if shared not in (0, layers):
            raise text.wrong("num_kv_shared_layers", f"0 or {layers}: an assistant has no keys")


def _head_dim(text: Keys, kind: LayerKind) -> int:
    wide = kind is LayerKind.FULL and text.has("global_head_dim")
    key = "global_head_dim" if wide else "head_dim"
    found = text.count(key, least=2)
    if found % 2:
        raise text.wrong(key, "an even number")
    return found


def _rope(keys: Keys, head_dim: int) -> Rope:
    kind = keys.one_of("rope_type", _ROPES, "default")
    theta = keys.number("rope_theta", above=0)
    factor = 1.0 if kind == "default" else keys.number("factor", 1.0, above=0)
    if kind != "proportional":  # the others turn whole heads, whatever else they name
        return Rope(theta, head_dim, factor)
    part = keys.number("partial_rotary_factor", 1.0, above=0)
    if part > 1.0:
        raise keys.wrong("partial_rotary_factor", "a number above 0 and at most 1")
    return Rope(theta, 2 * int(part * head_dim // 2), factor)


def check_centroids(what: str, config: AssistantConfig, stored: tuple[int, ...]) -> None:
    """Check the sparse head's settings against its tensor.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        stored: shape of the centroids, ``[count, hidden size]`` or packed.

    Raises:
        ArtifactError: they do not belong together; names the key and both values.
    """
    own = config.centroids
    if len(stored) != 2 or stored[0] != own.count:
        raise ArtifactError(
            f"{what}: num_centroids is {own.count}, but masked_embedding.centroids.weight has the "
            f"shape {stored}; give an intact release"
        )
    if own.top_k > own.count:
        raise ArtifactError(
            f"{what}: centroid_intermediate_top_k is {own.top_k}, but num_centroids is "
            f"{own.count}; give an intact release"
        )
    if config.vocab_size % own.count:
        raise ArtifactError(
            f"{what}: vocab_size is {config.vocab_size}, which num_centroids {own.count} "
            "does not divide; give an intact release"
        )
