"""A head's module from its tensors: packed as they are, every shape checked.

Shapes: a packed weight is ``[out, in * bits / 32]``, its scales ``[out, in / group_size]``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from specdec.errors import ArtifactError, OptionError, one_line
from specdec_mtp.find import HeadKind
from specdec_mtp.heads import MtpHead, NextnHead

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlx.nn.layers.base import Module

    from specdec_mtp.heads import HeadModule
    from specdec_mtp.layers import LayerFamily

__all__ = ["Packing", "build_head", "parameters_of", "quantize_head", "without_drawing"]

_KEPT: Final = ("mlp.gate", "mlp.shared_expert_gate")  # routers decide by small differences


@frozen
class Packing:
    """How a head that is stored in 16 bits is quantized when it is loaded.

    Attributes:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: values that share a scale: 32, 64 or 128.
    """

    bits: int
    group_size: int = 64


def build_head(
    kind: HeadKind, tensors: Mapping[str, mx.array], args: Any, family: LayerFamily
) -> HeadModule:
    """A head with these weights.

    Args:
        kind: which.
        tensors: by name, as ``read_tensors`` gives them, norms finished.
        args: settings of its decoder layer.
        family: makes that layer.

    Raises:
        ArtifactError: a tensor is missing, unknown or of another shape; names it.
    """
    dense = not any(".switch_mlp." in name for name in tensors)
    made = MtpHead if kind is HeadKind.MTP else NextnHead
    try:
        with without_drawing():
            head = made(args, family, dense=dense)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"the {kind} head's layer cannot be made with the target's settings "
            f"({one_line(error)}); give the head of this target"
        ) from error
    _pack_as_stored(head, tensors)
    _check_shapes(kind, head, tensors)
    head.load_weights(list(tensors.items()))
    head.eval()
    mx.eval(parameters_of(head))
    weights: HeadModule = head
    return weights


@contextmanager
def without_drawing() -> Iterator[None]:
    """Make modules, which draw start weights, without a change to anybody's random numbers."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # a key is its seed's two words


def parameters_of(head: Module) -> dict[str, mx.array]:
    """A module's weights by name."""
    held: Any = head
    flat: Any = tree_flatten(held.parameters())
    return dict(flat)


def _pack_as_stored(head: Any, tensors: Mapping[str, mx.array]) -> None:
    """Replace modules whose tensors are packed by quantized ones of that packing."""

    def packing(path: str, module: Any) -> bool | dict[str, Any]:
        scales, weight = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
        if scales is None or weight is None or not hasattr(module, "to_quantized"):
            return False
        size = module.weight.shape[-1]
        bits, group = weight.shape[-1] * 32 // size, size // max(scales.shape[-1], 1)
        if f"{path}.biases" in tensors:
            return {"bits": bits, "group_size": group, "mode": "affine"}
        # Without offsets it is a floating point format: by its group and bits.
        mode = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}.get((group, bits))
        if mode is None:
            raise ArtifactError(
                f"{path}.scales has shape {tuple(scales.shape)} without biases beside it; "
                f"{bits} bits in groups of {group} are no format of mlx"
            )
        return {"bits": bits, "group_size": group, "mode": mode}

    try:
        with without_drawing():
            quantize(head, class_predicate=packing)
    except ValueError as error:
        raise ArtifactError(
            f"the head's packed weights cannot be used ({one_line(error)}); convert them anew"
        ) from error


def _check_shapes(kind: HeadKind, head: Any, tensors: Mapping[str, mx.array]) -> None:
    wanted = parameters_of(head)
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted))
    if missing:
        raise ArtifactError(
            f"the {kind} head has no {_some(missing)}; give a complete head of this target"
        )
    if unknown:
        raise ArtifactError(
            f"the {kind} head has {_some(unknown)}, which the target's decoder layer has not; "
            "give the head of this target"
        )
    for name, array in wanted.items():
        if tuple(array.shape) != tuple(tensors[name].shape):
            raise ArtifactError(
                f"the {kind} head's {name} has shape {tuple(tensors[name].shape)}, but the target "
                f"needs {tuple(array.shape)}; give the head of this target"
            )

    _check_types(kind, tensors)


def _check_types(kind: HeadKind, tensors: Mapping[str, mx.array]) -> None:
    """Check that packed weights are what mlx multiplies with."""
    for name, scales in tensors.items():
        path = name.removesuffix(".scales")
        if path == name:
            continue
        offsets = tensors.get(f"{path}.biases")
        whole = scales.dtype == mx.uint8 if offsets is None else _floating(scales, offsets)
        if tensors[f"{path}.weight"].dtype != mx.uint32 or not whole:
            raise ArtifactError(
                f"the {kind} head's {path}.weight is {tensors[f'{path}.weight'].dtype} and its "
                f"{path}.scales are {scales.dtype}, which is no packing of mlx; convert it anew"
            )


def _floating(*arrays: mx.array) -> bool:
    return all(mx.issubdtype(array.dtype, mx.floating) for array in arrays)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[:3] if not more else names[:2]) + more


def quantize_head(head: HeadModule, packing: Packing) -> None:
    """Quantize a head that is stored in 16 or 32 bits; routers stay as they are.

    Args:
        head: changed in place.
        packing: bits and group size.

    Raises:
        OptionError: mlx has no such format.
    """

    def fits(path: str, module: Any) -> bool:
        return (
            hasattr(module, "to_quantized")
            and not path.endswith(_KEPT)
            and module.weight.shape[-1] % packing.group_size == 0
        )

    before = parameters_of(head)
    try:
        with without_drawing():
            quantize(head, packing.group_size, packing.bits, class_predicate=fits)
        mx.eval(parameters_of(head))
    except ValueError as error:
        raise OptionError(
            f"bits is {packing.bits} with group_size {packing.group_size}, which mlx cannot do "
            f"({one_line(error)}); give 4 or 8 bits in groups of 32, 64 or 128"
        ) from error
    if len(parameters_of(head)) == len(before):
        raise OptionError(
            f"group_size is {packing.group_size}, which divides no weight of this head; give a "
            "smaller one, or no bits for a head that is packed already"
        )
