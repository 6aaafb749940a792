"""The decoder layer that a head is made of: one of mlx-lm's own, as the target's layers are.

So a head has its target's attention, rotary scaling and experts, and no copy of any of them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from specdec.errors import ArtifactError
from specdec_mtp.find import HeadKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import mlx.core as mx

__all__ = ["LayerFamily", "family_of", "known_model_types", "layer_args"]


@frozen(kw_only=True)
class LayerFamily:
    """How mlx-lm's decoder layers of one kind of model are made and called.

    Attributes:
        module: name of the module in ``mlx_lm.models`` that has the settings.
        layer: name of the layer's class.
        layer_module: the module that has it, where that is another.
        arguments: name of the class of its settings.
        experts: the setting that says how many routed experts there are.
        mask_as_array: whether the layer computes with the mask itself.
        indexed: whether a layer keeps a second cache, for an index over its keys.
    """

    module: str
    layer: str
    layer_module: str | None = None
    arguments: str = "ModelArgs"
    experts: str
    mask_as_array: bool = False
    indexed: bool = False

    def make(self, args: Any, *, dense: bool) -> Any:
        """A layer with full attention.

        Args:
            args: the target's settings, an instance of ``arguments``.
            dense: whether the head has one feed-forward network in place of experts.
        """
        if dense and getattr(args, self.experts, None):
            args = replace(args, **{self.experts: None if self.experts[0] == "n" else 0})
        made: Callable[[Any, int], Any] = getattr(
            _module(self.layer_module or self.module), self.layer
        )
        return made(args, _index(args))

    def caches(self) -> Sequence[Any]:
        """One row's caches of the layer, empty."""
        return [CacheList(KVCache(), KVCache()) if self.indexed else KVCache()]

    def mask(self, hidden: mx.array, cache: Any) -> Any:
        """The mask of a window that is about to be read."""
        first = cache[0] if self.indexed else cache
        return create_attention_mask(hidden, first, return_array=self.mask_as_array)

    def read(self, config: Mapping[str, Any]) -> Any:
        """Settings from a text config."""
        return getattr(_module(self.module), self.arguments).from_dict(dict(config))

    def fits(self, args: Any) -> bool:
        """Whether a target's settings are those of this family."""
        return isinstance(args, getattr(_module(self.module), self.arguments))


def _module(name: str) -> Any:
    return import_module(f"mlx_lm.models.{name}")


def _index(args: Any) -> int:
    """The number of a layer behind the target's last, such that it attends over all positions.

    Where layers alternate, between full attention and others or between experts and none, the
    number decides what a layer is made of.
    """
    interval = getattr(args, "full_attention_interval", None) or 1
    sparse = getattr(args, "decoder_sparse_step", None) or 1
    frequency = getattr(args, "moe_layer_freq", None) or 1
    index: int = args.num_hidden_layers
    while (index + 1) % interval or (index + 1) % sparse or index % frequency:
        index += 1
        if index > args.num_hidden_layers + interval * sparse * frequency:
            return int(args.num_hidden_layers)
    return index


_QWEN: Final = {
    "qwen3_5": LayerFamily(
        module="qwen3_5",
        layer="DecoderLayer",
        arguments="TextModelArgs",
        experts="num_experts",
    ),
    "qwen3_next": LayerFamily(
        module="qwen3_next", layer="Qwen3NextDecoderLayer", experts="num_experts"
    ),
}
_QWEN_TYPES: Final = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
}
_NEXTN: Final = {
    "glm4_moe": LayerFamily(module="glm4_moe", layer="DecoderLayer", experts="n_routed_experts"),
    "glm4_moe_lite": LayerFamily(
        module="glm4_moe_lite",
        layer="Glm4MoeLiteDecoderLayer",
        experts="n_routed_experts",
        mask_as_array=True,
    ),
    "deepseek_v3": LayerFamily(
        module="deepseek_v3",
        layer="DeepseekV3DecoderLayer",
        experts="n_routed_experts",
        mask_as_array=True,
    ),
    "deepseek_v32": LayerFamily(
        module="deepseek_v32",
        layer="DeepseekV32DecoderLayer",
        experts="n_routed_experts",
        mask_as_array=True,
        indexed=True,
    ),
    "glm_moe_dsa": LayerFamily(
        module="glm_moe_dsa",
        layer="DeepseekV32DecoderLayer",
        layer_module="deepseek_v32",
        experts="n_routed_experts",
        mask_as_array=True,
        indexed=True,
    ),
}


def known_model_types(kind: HeadKind) -> tuple[str, ...]:
    """Model types whose heads can be made."""
    return tuple(_QWEN_TYPES if kind is HeadKind.MTP else _NEXTN)


def family_of(kind: HeadKind, config: Mapping[str, Any]) -> LayerFamily:
    """The family of a head, by the model type that its config names.

    Raises:
        ArtifactError: no family is known for it.
    """
    name = str(config.get("model_type")).removesuffix("_mtp")
    found = _QWEN.get(_QWEN_TYPES.get(name, "")) if kind is HeadKind.MTP else _NEXTN.get(name)
    if found is None:
        raise ArtifactError(
            f"model_type is {config.get('model_type')!r}, of which no {kind} head is known; "
            f"known are {', '.join(known_model_types(kind))}"
        )
    return found


def layer_args(family: LayerFamily, config: Mapping[str, Any], target_args: Any) -> Any:
    """The settings of a head's layer: the target's as it runs, rotary scaling included.

    Args:
        family: of the head.
        config: text config that describes the head, for targets that are no mlx-lm models.
        target_args: what the target's layers were made with, or ``None``.
    """
    return target_args if family.fits(target_args) else family.read(config)
