"""What a target changes in a drafter before its first draft: a basis, and operations of its own.

A drafter is trained on hidden states in the basis of the published model. A target whose residual
stream was rotated (as QuaRot and SpinQuant do, so that it quantizes better) stores ``h @ R``. The
taps' rotation is taken back once, in the weights that combine them; embeddings and the head's input
are turned as they pass. Norm weights are ones in such a target: those of its final norm are in its
head.

Shapes: m tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx.utils import tree_map_with_path

from specdec.contract import require_port
from specdec.drafting.modules import without_drawing
from specdec.errors import ContractError, TargetLacksError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.contract import HiddenTaps, TargetView

    Operation = Callable[..., mx.array]

__all__ = ["Binding", "OfferedProjection", "TargetBasis", "basis_of", "turned_linear"]

M = TypeVar("M", bound=Module)

_ORTHOGONAL: Final = 0.05  # of rotation @ rotation.T from 1; a matrix of 16 bits is within 0.01


@frozen(eq=False)
class TargetBasis:
    """A rotated target, as a drafter in the basis of its training meets it.

    Everything is computed in float32 and given back in the type that it came in.

    Attributes:
        rotation: ``[H, H]`` float32; the target stores ``h @ rotation``.
        scale: ``[H]`` float32 of the final norm that is in the target's head, or ``None``.
        final: the tap after the final norm.
    """

    rotation: mx.array
    scale: mx.array | None
    final: int

    def embedding(self, embedded: mx.array) -> mx.array:
        """The target's embeddings ``[..., H]`` in the drafter's basis."""
        return (embedded.astype(mx.float32) @ self.rotation.T).astype(embedded.dtype)

    def head_input(self, hidden: mx.array) -> mx.array:
        """The drafter's hidden states ``[..., H]``, after its final norm, for the target's head."""
        plain = hidden.astype(mx.float32)
        if self.scale is not None:
            plain = plain / self.scale
        return (plain @ self.rotation).astype(hidden.dtype)

    def combiner(self, weight: mx.array, taps: Sequence[int]) -> mx.array:
        """Weights that do to the target's taps what these do to taps in the drafter's basis.

        Args:
            weight: ``[..., m·H]``, the features of the taps last.
            taps: of the target, m of them.
        """
        blocks = mx.split(weight.astype(mx.float32), len(taps), axis=-1)
        turned = [
            # After the final norm the original is n * scale, and the target has n @ rotation.
            (block * self.scale if tap == self.final and self.scale is not None else block)
            @ self.rotation
            for block, tap in zip(blocks, taps, strict=True)
        ]
        return mx.concatenate(turned, axis=-1).astype(weight.dtype)

    def is_same(self, other: TargetBasis) -> bool:
        """Whether another target's basis has the same numbers."""
        if self.final != other.final or (self.scale is None) != (other.scale is None):
            return False
        pairs = [(self.rotation, other.rotation)]
        if self.scale is not None and other.scale is not None:
            pairs.append((self.scale, other.scale))
        return all(a is b or bool(mx.array_equal(a, b).item()) for a, b in pairs)


def basis_of(target: TargetView, name: str) -> TargetBasis | None:
    """The basis of a target's residual stream, or ``None`` where it is not rotated.

    Args:
        target: with tapped layers.
        name: of the drafter, for messages.

    Raises:
        TargetLacksError: it has no tapped layers.
        ContractError: what it reports is no rotation of its hidden states.
    """
    port: HiddenTaps = require_port(target, "hidden_taps", name)
    basis = target.residual_basis
    if basis is None:
        return None
    size, rotation, scale = port.hidden_size, basis.rotation, basis.scale
    if rotation.shape != (size, size):
        raise _no_basis(f"rotation of shape {tuple(rotation.shape)}", f"[{size}, {size}]")
    rotation = rotation.astype(mx.float32)
    off = mx.max(mx.abs(rotation @ rotation.T - mx.eye(size)))
    if not (off < _ORTHOGONAL).item():
        raise _no_basis("rotation that is not orthogonal", "one whose transpose is its inverse")
    if scale is not None:
        if scale.shape != (size,):
            raise _no_basis(f"scale of shape {tuple(scale.shape)}", f"[{size}]")
        scale = scale.astype(mx.float32)
        if not mx.all(mx.isfinite(1.0 / scale) & mx.isfinite(scale)).item():
            raise _no_basis("scale with zeros or no numbers", "the weights of the final norm")
    mx.eval(rotation, *([] if scale is None else [scale]))
    return TargetBasis(rotation, scale, port.layer_count)


def _no_basis(found: str, wanted: str) -> ContractError:
    return ContractError(f"the target's residual_basis has a {found}; it must be {wanted}")


def turned_linear(linear: Module, basis: TargetBasis, taps: Sequence[int]) -> Linear:
    """A projection of tapped hidden states for a rotated target.

    A packed one is not packed again: that would cost more of its precision than it saves.

    Args:
        linear: of ``m·H`` features; a ``Linear`` or a ``QuantizedLinear``. It stays as it is.
        basis: of the target.
        taps: of the target, m of them.
    """
    weight: mx.array = linear["weight"]
    if isinstance(linear, QuantizedLinear):
        weight = mx.dequantize(
            weight,
            linear["scales"],
            linear.get("biases"),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    with without_drawing():
        turned = Linear(1, 1, bias=False)
    turned.weight = basis.combiner(weight, taps)
    if "bias" in linear:
        turned.bias = linear["bias"]
    mx.eval(turned.weight)
    return turned


class OfferedProjection(Module):
    """A projection of a drafter that is computed by its target's operation.

    Args:
        linear: a ``Linear`` or a ``QuantizedLinear``.
        operation: called with the input ``[..., in]`` and ``linear``; returns ``[..., out]``.
        name: that the target offers it under.
    """

    def __init__(self, linear: Module, operation: Operation, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.linear = linear
        self._operation = operation
        self._name = name

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., out]`` of ``[..., in]``.

        Raises:
            ContractError: the operation returned something else. What it raises is raised as it is.
        """
        made = self._operation(x, self.linear)
        wanted = (*x.shape[:-1], self.linear["weight"].shape[0])
        if not isinstance(made, mx.array) or made.shape != wanted:
            found = getattr(made, "shape", type(made).__name__)
            raise ContractError(
                f"the target's operation {self._name} returned {one_line(found)}; it must return "
                f"an array of shape {wanted}"
            )
        return made


class Binding(Generic[M]):
    """A drafter's network, and the one basis and the operations that it was bound to, for good.

    The network that is given stays as it is; :attr:`model` shares its arrays.

    Args:
        name: of the drafter, for messages.
        model: its network, as it was trained; perhaps packed.
        fold: the network for a rotated target; leaves the one it is given alone.

    Attributes:
        model: the network as it is to be called.
        basis: of the target, or ``None`` where it is not rotated or nothing was bound yet.
    """

    def __init__(self, name: str, model: M, fold: Callable[[M, TargetBasis], M]) -> None:
        self.model = model
        self.basis: TargetBasis | None = None
        self._name = name
        self._fold = fold
        self._is_turned = False
        self._operations: Mapping[str, Operation] | None = None

    def turn(self, target: TargetView) -> None:
        """Take a target's basis; the network may be packed afterwards, and is to be bound then.

        Raises:
            TargetLacksError: another target's basis was taken, and this one has none.
            ContractError: another basis was taken, or none, or this is no basis.
        """
        basis, held = basis_of(target, self._name), self.basis
        if not self._is_turned:
            if basis is not None:
                self.model = self._fold(self.model, basis)
            self.basis, self._is_turned = basis, True
            return
        if held is not None and basis is None:
            raise TargetLacksError("residual_basis", self._name)
        if basis is not None and (held is None or not held.is_same(basis)):
            was = "not rotated" if held is None else "rotated otherwise"
            raise ContractError(
                f"{self._name} is bound to a target whose residual stream is {was}; load it again "
                "for this one"
            )

    def bind(self, target: TargetView) -> None:
        """Take a target's basis and operations, once; the same ones again change nothing.

        Raises:
            TargetLacksError: another target's basis was taken, and this one has none.
            ContractError: another basis or other operations were taken, or these are none.
        """
        offered = dict(target.draft_projections or {})
        for name, operation in offered.items():
            if not callable(operation):
                raise ContractError(
                    f"the target's draft_projections have {one_line(repr(operation))} for {name}; "
                    "offer something that can be called"
                )
        if self._operations is not None and self._operations != offered:
            raise ContractError(
                f"{self._name} is bound to a target that offers other draft_projections; load it "
                "again for this one"
            )
        self.turn(target)
        if self._operations is None:
            self.model = _through(self.model, offered)
            self._operations = offered


def _through(model: M, offered: Mapping[str, Operation]) -> M:
    """The network with the projections that are offered called through the operations."""

    def stand_in(path: str, part: Module) -> Module:
        name = path.rpartition(".")[2]
        if name not in offered or not isinstance(part, Linear | QuantizedLinear):
            return part
        return OfferedProjection(part, offered[name], name)

    if not offered:
        return model
    made: Any = _sharing(model)
    made.update_modules(tree_map_with_path(stand_in, made.leaf_modules(), is_leaf=Module.is_module))
    return cast("M", made)


def _sharing(part: Any) -> Any:
    """The same modules with the same arrays: a change to one is none to the other."""
    if isinstance(part, list):
        return [_sharing(each) for each in part]
    if not isinstance(part, Module):
        return part
    made = copy(part)
    for name, child in part.items():
        dict.__setitem__(made, name, _sharing(child))
    return made
