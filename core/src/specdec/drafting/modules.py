"""A drafter's modules from its tensors: read, packed as they are stored, every shape checked.

Shapes: a packed weight is ``[out, in * bits / 32]``, its scales ``[out, in / group_size]``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from specdec.errors import ArtifactError, OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx.nn.layers.base import Module

    from specdec.plugins.headers import Stored

__all__ = [
    "Packing",
    "load_module",
    "packing_of",
    "parameters_of",
    "quantize_module",
    "read_stored",
    "without_drawing",
]

_BITS: Final = (2, 3, 4, 5, 6, 8)
_GROUPS: Final = (32, 64, 128)
_FLOATS: Final = {(32, 4): "mxfp4", (32, 8): "mxfp8", (16, 4): "nvfp4"}  # by group and bits


@frozen
class Packing:
    """How a drafter that is stored in 16 bits is quantized when it is loaded.

    Attributes:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: values that share a scale: 32, 64 or 128.
    """

    bits: int
    group_size: int = 64


def packing_of(options: Mapping[str, Any], default: Packing | None = None) -> Packing | None:
    """The packing that options ask for: ``bits`` (0 for none) and ``group_size``.

    Args:
        options: by name.
        default: what holds where they name none.

    Raises:
        OptionError: a value that MLX has not, or a group size alone.
    """
    bits, group = options.get("bits"), options.get("group_size")
    if type(bits) is int and bits == 0 and group is None:
        return None
    if bits is None:
        if group is None:
            return default
        if default is None:
            raise OptionError(f"group_size is {group!r} without bits; give bits=4, or neither")
        bits = default.bits
    size = 64 if group is None else group
    for name, value, known in (("bits", bits, _BITS), ("group_size", size, _GROUPS)):
        if not isinstance(value, int) or isinstance(value, bool) or value not in known:
            raise OptionError(
                f"{name} is {one_line(repr(value))}; give one of {', '.join(map(str, known))}"
            )
    return Packing(bits, size)


def read_stored(tensors: Mapping[str, Stored]) -> dict[str, mx.array]:
    """Tensors of safetensors files; MLX reads an array's bytes when it is evaluated.

    Args:
        tensors: where each is, by the name it gets.

    Raises:
        ArtifactError: a file cannot be read.
    """
    found = {}
    for file in sorted({where.file for where in tensors.values()}):
        try:
            arrays = cast("dict[str, mx.array]", mx.load(str(file), format="safetensors"))
        except RuntimeError as error:
            raise ArtifactError(
                f"{file} cannot be read ({one_line(error)}); download it again"
            ) from error
        for name, where in tensors.items():
            if where.file == file:
                found[name] = arrays[where.name]
    return found


@contextmanager
def without_drawing() -> Iterator[None]:
    """Make modules, which draw start weights, without a change to anybody's random numbers."""
    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # a key is its seed's two words


def parameters_of(module: Module) -> dict[str, mx.array]:
    """A module's weights by name."""
    held: Any = module
    flat: Any = tree_flatten(held.parameters())
    return dict(flat)


def load_module(what: str, module: Module, tensors: Mapping[str, mx.array]) -> None:
    """Give a module its weights, evaluated, packed as they are stored.

    Args:
        what: it is, for messages, such as ``"the mtp head"``.
        module: changed in place; in ``eval`` mode afterwards.
        tensors: by the names of its parameters.

    Raises:
        ArtifactError: a tensor is missing, unknown, or of another shape or packing; names it.
    """
    _pack_as_stored(what, module, tensors)
    _check_shapes(what, module, tensors)
    held: Any = module
    held.load_weights(list(tensors.items()))
    held.eval()
    try:
        mx.eval(parameters_of(module))
    except RuntimeError as error:
        raise ArtifactError(
            f"{what} cannot be read ({one_line(error)}); download it again"
        ) from error


def quantize_module(
    what: str, module: Module, packing: Packing, fits: Callable[[str], bool] = lambda _: True
) -> None:
    """Quantize a module that is stored in 16 or 32 bits.

    Args:
        what: it is, for messages.
        module: changed in place.
        packing: bits and group size.
        fits: whether a part of it, by its path, is to be quantized.

    Raises:
        OptionError: MLX has no such format, or no weight has a size for it.
    """

    def wanted(path: str, part: Any) -> bool:
        return (
            hasattr(part, "to_quantized")
            and part.weight.shape[-1] % packing.group_size == 0
            and fits(path)
        )

    before = parameters_of(module)
    try:
        with without_drawing():
            quantize(module, packing.group_size, packing.bits, class_predicate=wanted)
        mx.eval(parameters_of(module))
    except ValueError as error:
        raise OptionError(
            f"bits is {packing.bits} with group_size {packing.group_size}, which mlx cannot do "
            f"({one_line(error)}); give 4 or 8 bits in groups of 32, 64 or 128"
        ) from error
    if len(parameters_of(module)) == len(before):
        raise OptionError(
            f"group_size is {packing.group_size}, which divides no weight of {what}; give a "
            "smaller one, or no bits where it is packed already"
        )


def _pack_as_stored(what: str, module: Any, tensors: Mapping[str, mx.array]) -> None:
    """Replace parts whose tensors are packed by quantized ones of that packing."""

    def packing(path: str, part: Any) -> bool | dict[str, Any]:
        scales, weight = tensors.get(f"{path}.scales"), tensors.get(f"{path}.weight")
        if scales is None or weight is None or not hasattr(part, "to_quantized"):
            return False
        affine, size = f"{path}.biases" in tensors, part.weight.shape[-1]
        bits, group = _layout(weight.shape, scales.shape, size)
        if not group or (affine and (bits not in _BITS or group not in _GROUPS)):
            raise ArtifactError(
                f"the packed weights of {what} cannot be used: {path}.weight has shape "
                f"{tuple(weight.shape)} and {path}.scales has shape {tuple(scales.shape)}, which "
                f"is no packing of mlx for {size} columns; convert them anew"
            )
        if affine:
            return {"bits": bits, "group_size": group, "mode": "affine"}
        mode = _FLOATS.get((group, bits))  # without offsets it is a floating point format
        if mode is None:
            raise ArtifactError(
                f"{path}.scales has shape {tuple(scales.shape)} without biases beside it; "
                f"{bits} bits in groups of {group} are no format of mlx"
            )
        return {"bits": bits, "group_size": group, "mode": mode}

    try:
        with without_drawing():
            quantize(module, class_predicate=packing)
    except ValueError as error:
        raise ArtifactError(
            f"the packed weights of {what} cannot be used ({one_line(error)}); convert them anew"
        ) from error


def _layout(weight: Sequence[int], scales: Sequence[int], size: int) -> tuple[int, int]:
    """Bits and group size of a packed weight of so many columns; zeros where there are none.

    MLX divides by them, in native code that a wrong one ends the process in.
    """
    if min(len(weight), len(scales)) < 2 or tuple(weight[:-1]) != tuple(scales[:-1]):
        return 0, 0
    if not scales[-1] or size % scales[-1] or weight[-1] * 32 % size:
        return 0, 0
    return weight[-1] * 32 // size, size // scales[-1]


def _check_shapes(what: str, module: Module, tensors: Mapping[str, mx.array]) -> None:
    wanted = parameters_of(module)
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted))
    if missing:
        raise ArtifactError(f"{what} has no {_some(missing)}; give a complete one of this target")
    if unknown:
        raise ArtifactError(
            f"{what} has {_some(unknown)}, which no such drafter of this target has; give another "
            "release of it"
        )
    for name, array in wanted.items():
        if tuple(array.shape) != tuple(tensors[name].shape):
            raise ArtifactError(
                f"the {name} of {what} has shape {tuple(tensors[name].shape)}, but its config and "
                f"target need {tuple(array.shape)}; give the one of this target"
            )
    _check_types(what, wanted, tensors)


def _check_types(
    what: str, wanted: Mapping[str, mx.array], tensors: Mapping[str, mx.array]
) -> None:
    """Check that packed weights are what MLX multiplies with, and that plain ones are numbers."""
    for name, scales in tensors.items():
        path = name.removesuffix(".scales")
        if path == name:
            continue
        offsets = tensors.get(f"{path}.biases")
        whole = scales.dtype == mx.uint8 if offsets is None else _floating(scales, offsets)
        if tensors[f"{path}.weight"].dtype != mx.uint32 or not whole:
            raise ArtifactError(
                f"the {path}.weight of {what} is {tensors[f'{path}.weight'].dtype} and its "
                f"{path}.scales are {scales.dtype}, which is no packing of mlx; convert it anew"
            )
    for name, array in wanted.items():
        if _floating(array) and not _floating(tensors[name]):
            raise ArtifactError(
                f"the {name} of {what} is {tensors[name].dtype}, which is no floating point type; "
                "give an intact release"
            )


def _floating(*arrays: mx.array) -> bool:
    return all(mx.issubdtype(array.dtype, mx.floating) for array in arrays)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 3 else ""
    return ", ".join(names[:3] if not more else names[:2]) + more
