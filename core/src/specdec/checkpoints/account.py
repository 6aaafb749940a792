"""What a model in memory is made of: a flat account that is equal in every process."""

from __future__ import annotations

import dataclasses
import weakref
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Account", "glance"]

_PLAIN = (int, float, bool, str, bytes, complex)
_CONTAINERS = (list, tuple, dict, set, frozenset)

_VALUES = (*_PLAIN, Enum, mx.Dtype, mx.Device, type(mx.exp))

_BOOKKEEPING = frozenset({"_no_grad", "_training"})
"""What ``nn.Module`` itself keeps; neither reaches the numbers of a model that infers."""

_MADE_IN_FORWARD = frozenset(
    {
        # The sum of a weight and an offset, and the weight that it was made of.
        ("mlx_lm.models.plamo3", "_scale"),
        ("mlx_lm.models.plamo3", "_scale_weight"),
        # A method, compiled.
        ("mlx_lm.models.kimi_k3", "_step"),
        # Products of weights.
        ("mlx_lm.models.kimi_k3", "_attn_res_w_eff"),
        ("mlx_lm.models.kimi_k3", "_mlp_res_w_eff"),
        ("mlx_lm.models.kimi_k3", "_output_res_w_eff"),
    }
)
"""Modules of mlx-lm whose first forward sets an attribute: all that there are in 0.32.2.

Each is made from what counts anyway, and would make the identity another one after the forward.
"""


class Account:
    """What a model is made of.

    Attributes:
        facts: a flat account of its structure and of everything that is no array of MLX's.
        arrays: its arrays, private ones too, in the order of the account.
        holders: its modules, the model first, and the other objects that were looked into.
        others: functions, dtypes and whatever else was met, to be kept in sight.
    """

    def __init__(self, model: Module) -> None:
        self.facts: list[Any] = []
        self.arrays: list[mx.array] = []
        self.holders: list[Any] = []
        self.others: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._shallow = False
        self._into(model)

    def references(self) -> list[Callable[[], Any]]:
        """References to arrays, holders and others; they keep values alive, but nothing else."""
        found = [*self.arrays, *self.holders, *self.others]
        return [_reference(thing) for thing in found]

    def _into(self, node: Any) -> None:
        if isinstance(node, mx.array):
            self.facts.append("array")
            self.arrays.append(node)
        elif isinstance(node, Module):
            self._module(node)
        elif isinstance(node, _CONTAINERS):
            self._container(node)
        elif node is None or type(node) in _PLAIN:
            # The type too: 1, 1.0 and True are equal.
            self.facts += (type(node).__name__, node)
        else:
            self.others.append(node)
            self._other(node)

    def _other(self, node: Any) -> None:
        kind = type(node)
        if kind.__module__ == "numpy" and hasattr(node, "tobytes"):  # an array or a scalar
            content = repr(node.tolist()) if node.dtype.hasobject else _digest(node.tobytes())
            self.facts += ("numpy", node.dtype.str, list(node.shape), content)
        elif isinstance(node, Enum):
            self.facts += ("enum", _name(kind), node.name)
        elif isinstance(node, _PLAIN):
            base = next(
                plain for plain in (str, bytes, int, float, complex) if issubclass(kind, plain)
            )
            self.facts += (_name(kind), base.__repr__(node))
        elif isinstance(node, mx.Dtype | mx.Device):
            self.facts += (_name(kind), str(node))
        elif isinstance(node, partial):
            self.facts.append("partial")
            for part in (node.func, node.args, node.keywords):
                self._into(part)
        elif isinstance(getattr(node, "__qualname__", None), str):
            self.facts += ("named", _name(node))
        elif isinstance(node, ModuleType):
            self.facts += ("library", node.__name__)
        else:
            self._object(node, kind)

    def _object(self, node: Any, kind: type) -> None:
        self.facts += ("object", _name(kind))
        if self._shallow or self._met(node):
            return
        self.holders.append(node)
        # A dataclass says what belongs to it. Of others only what is plain counts, one level deep.
        self._shallow = not dataclasses.is_dataclass(node)
        self._items(sorted(_own(node)))
        self._shallow = False

    def _module(self, node: Module) -> None:
        kind = type(node)
        self.facts += ("module", _name(kind))
        if self._met(node):
            return
        self.holders.append(node)
        shallow, self._shallow = self._shallow, False
        for found in (vars(node), node):
            self._items(
                (name, value)
                for name, value in sorted(found.items(), key=lambda item: str(item[0]))
                if name not in _BOOKKEEPING and (kind.__module__, name) not in _MADE_IN_FORWARD
            )
        self._shallow = shallow

    def _container(self, node: Any) -> None:
        self.facts += (next(k for k in _CONTAINERS if isinstance(node, k)).__name__, len(node))
        if id(node) in self._open:  # it holds itself
            return
        self._open.add(id(node))
        if isinstance(node, dict):
            self._items(node.items())
        elif isinstance(node, set | frozenset):
            # Their order differs from process to process.
            self.facts.append(sorted(_text(part) for part in node))
        else:
            for part in node:
                self._into(part)
        self._open.remove(id(node))

    def _items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            self.facts.append(name if type(name) is str else _text(name))
            self._into(value)
        self.facts.append("end")

    def _met(self, node: Any) -> bool:
        met = id(node) in self._numbers
        self.facts.append(self._numbers.setdefault(id(node), len(self._numbers)))
        return met


def glance(holders: Sequence[Any]) -> list[int]:
    """The numbers of everything in these objects, good as long as those things live."""
    seen: list[int] = []
    for holder in holders:
        seen.append(id(type(holder)))
        # One request asks this of every module: what can be done in C is.
        own = getattr(holder, "__dict__", None)
        for found in (dict(_own(holder)) if own is None else own, holder):
            if found is holder and not isinstance(holder, Module):
                continue
            seen += map(id, found)
            seen += map(id, found.values())
            for value in found.values():
                if isinstance(value, _CONTAINERS) and not isinstance(value, Module):
                    _glance_into(value, seen, 0)
    return seen


def _glance_into(container: Any, seen: list[int], depth: int) -> None:
    seen.append(id(type(container)))
    if isinstance(container, dict):
        seen += map(id, container)
        container = container.values()
    for part in container:
        seen.append(id(part))
        if isinstance(part, _CONTAINERS) and not isinstance(part, Module) and depth < 50:
            _glance_into(part, seen, depth + 1)


def _own(node: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's attributes, wherever they are kept."""
    if hasattr(node, "__dict__"):
        yield from vars(node).items()
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield field.name, getattr(node, field.name, None)


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return cast("Callable[[], Any]", weakref.ref(thing))
    except TypeError:
        # A compiled function, or an object with slots, may hold the model itself. It looks as if it
        # had gone, so that it is looked at each time.
        return partial(_itself, thing if isinstance(thing, _VALUES) else None)


def _itself(value: Any) -> Any:
    return value


def _name(node: Any) -> str:
    return f"{getattr(node, '__module__', None)}.{node.__qualname__}"


def _text(value: Any) -> str:
    return repr(value) if type(value) in _PLAIN or value is None else _name(type(value))


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
