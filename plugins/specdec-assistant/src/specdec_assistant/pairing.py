"""Whether an assistant belongs to a target: what its config tells at load, and K/V in a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from specdec.errors import ArtifactError, TargetLacksError
from specdec_assistant.config import LayerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx

    from specdec.contract import AssistantRows, TargetView
    from specdec_assistant.config import AssistantConfig

__all__ = ["check_donor", "check_pairing"]

_DONORS: Final[Mapping[LayerKind, str]] = {LayerKind.FULL: "full", LayerKind.SLIDING: "sliding"}


@frozen
class _Heads:
    """A target's keys: how many heads, of how many features."""

    count: int
    size: int


def check_pairing(
    what: str, config: AssistantConfig, port: AssistantRows, target: TargetView
) -> None:
    """Check what drafter and target must share, as far as it is known before a round.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        port: of the target.
        target: the bound target.

    Raises:
        ArtifactError: they differ; names the key and both values.
        TargetLacksError: the target has no layer whose K/V a layer of the drafter reads.
    """
    if config.backbone_size != port.hidden_size:
        raise _refused(what, "backbone_hidden_size", config.backbone_size, port.hidden_size)
    mtp, lends = target.recurrent_mtp, port.lends
    for kind in config.head_dims:
        if _DONORS[kind] not in lends:
            raise TargetLacksError(f"assistant_rows with K/V of a {kind} layer", what)
        heads = _heads_of(None if mtp is None else mtp.args, kind)
        if heads is not None:
            _check_heads(what, config, kind, heads)


def check_donor(
    what: str, config: AssistantConfig, kind: LayerKind, pair: tuple[mx.array, mx.array]
) -> None:
    """Check the heads of the keys that a layer is to read.

    Raises:
        ArtifactError: they are not the drafter's; names the key and both values.
    """
    keys, values = pair
    _check_heads(what, config, kind, _Heads(keys.shape[1], keys.shape[3]))
    if values.shape != keys.shape:  # latent attention keeps two things of different size
        raise _refused(
            what, "head_dim", config.head_dims[kind], f"{values.shape[3]} in values of {kind}"
        )


def _check_heads(what: str, config: AssistantConfig, kind: LayerKind, heads: _Heads) -> None:
    own = config.head_dims[kind]
    if own != heads.size:
        key = "head_dim" if kind is LayerKind.SLIDING else "head_dim or global_head_dim"
        raise _refused(what, key, own, f"{heads.size} in its {kind} layers")
    if config.heads % heads.count:
        raise _refused(
            what, "num_attention_heads", config.heads, f"{heads.count} heads of keys to share"
        )


def _refused(what: str, key: str, own: object, target: object) -> ArtifactError:
    return ArtifactError(
        f"{what}: {key} is {own}, but the target has {target}; give the assistant of this target"
    )


def _heads_of(args: Any, kind: LayerKind) -> _Heads | None:
    """A Gemma's heads by its settings; of any other target the donors tell, in the first round."""
    if not str(getattr(args, "model_type", "")).startswith("gemma"):
        return None
    size = getattr(args, "head_dim", None)
    count = getattr(args, "num_key_value_heads", None)
    if kind is LayerKind.FULL:
        size = getattr(args, "global_head_dim", None) or size
        if getattr(args, "attention_k_eq_v", False):
            count = getattr(args, "num_global_key_value_heads", None) or count
    return _Heads(count, size) if type(size) is int and type(count) is int else None
