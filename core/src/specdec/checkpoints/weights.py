"""The identity of a model in memory."""

from __future__ import annotations

import weakref
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field
from mlx.nn.layers.base import Module

from specdec.checkpoints.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["weights_identity"]

_PLAIN = (int, float, bool, str)
_CONTAINERS = (list, tuple, dict)


def weights_identity(model: Module) -> str:
    """Identity of a model in memory: 64 hex digits over its weights and what computes with them.

    It covers the class and the plain numbers, switches and strings of every module (a LoRA's
    ``scale``), every parameter's name, dtype, shape and content, and the ``repr`` of the model's
    ``args``. Names with a leading underscore do not count.

    The content is hashed on the device (see ``fingerprint.py``) once per model: a second call
    looks whether everything is still the same object, and only then at what changed. So replace
    weights, as mlx does; what is assigned into an array is not seen.
    """
    with _known_lock:
        known = _known.get(id(model))
    if known is None or known.model() is not model:
        known = None
    elif known.is_untouched():
        return known.identity
    look = _Look()
    look.facts.append(repr(getattr(model, "args", None)))
    look.into(model)
    if known is None or not known.shows(look):
        known = _Known(weakref.ref(model, _forgetter(id(model))), look.facts, look.references())
        known.identity = _identity(look)
    known.watch(model, look)
    with _known_lock:
        _known[id(model)] = known
    return known.identity


def _identity(look: _Look) -> str:
    unique = list({id(array): array for array in look.arrays}.values())
    numbers = dict(zip(map(id, unique), fingerprints(unique), strict=True))
    content = [(str(a.dtype), list(a.shape), numbers[id(a)]) for a in look.arrays]
    text = repr((look.facts, content))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


class _Look:
    """What a model is made of.

    Attributes:
        facts: a flat account of its structure and its plain attributes.
        arrays: its parameters, in the order of the account.
        modules: its modules, the model first.
    """

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.arrays: list[mx.array] = []
        self.modules: list[Module] = []

    def references(self) -> list[weakref.ref[mx.array]]:
        """Weak references to the arrays."""
        return [weakref.ref(array) for array in self.arrays]

    def into(self, node: Any) -> None:
        """Add a module, an array, or a container of them."""
        kind, facts = type(node), self.facts
        if isinstance(node, mx.array):
            facts.append("array")
            self.arrays.append(node)
        elif isinstance(node, Module):
            self.modules.append(node)
            facts += ("module", kind.__module__, kind.__qualname__)
            for name, value in sorted(vars(node).items()):
                if type(value) in _PLAIN and name[0] != "_":
                    # The type too: 1, 1.0 and True are equal.
                    facts += (name, type(value).__name__, value)
            self._into_items(sorted(node.items()))
        elif isinstance(node, dict):
            facts += ("dict", len(node))
            self._into_items((str(key), value) for key, value in node.items())
        elif isinstance(node, list | tuple):
            facts += ("list", len(node))
            for part in node:
                self.into(part)
        elif kind in _PLAIN:
            facts += (kind.__name__, node)

    def _into_items(self, items: Iterable[tuple[str, Any]]) -> None:
        for name, value in items:
            if name[:1] != "_":
                self.facts.append(name)
                self.into(value)
        self.facts.append("end")


@define(eq=False)
class _Known:
    """An identity and what it was computed from; keeps no array and no module alive.

    Attributes:
        model: whose it is.
        facts: the account of it.
        arrays: its parameters.
        identity: the answer.
        modules: its modules, the model first.
        glance: the numbers of everything in them, good as long as those things live.
        args: kept so that its number stays its own; the facts keep the plain values.
    """

    model: weakref.ref[Module]
    facts: list[Any]
    arrays: list[weakref.ref[mx.array]]
    identity: str = ""
    modules: list[weakref.ref[Module]] = field(factory=list)
    glance: list[int] = field(factory=list)
    args: Any = None

    def is_untouched(self) -> bool:
        """Whether nothing was replaced. Looks at objects, not at values: a fast yes."""
        modules = [reference() for reference in self.modules]
        # While they all live, a number stands for the same object as it did.
        if None in modules or any(reference() is None for reference in self.arrays):
            return False
        return _glance(modules) == self.glance

    def shows(self, look: _Look) -> bool:
        """Whether a model that looks like this has the identity."""
        arrays = [reference() for reference in self.arrays]
        return (
            len(arrays) == len(look.arrays)
            and all(a is b for a, b in zip(arrays, look.arrays, strict=True))
            and self.facts == look.facts
        )

    def watch(self, model: Module, look: _Look) -> None:
        """Remember what is where. The facts are equal; these are the ones that are in place."""
        self.facts = look.facts
        self.modules = [weakref.ref(module) for module in look.modules]
        self.glance = _glance(look.modules)
        self.args = getattr(model, "args", None)


_known: dict[int, _Known] = {}
_known_lock = Lock()


def _forgetter(number: int) -> Any:
    def forget(reference: weakref.ref[Module]) -> None:
        known = _known.get(number)
        if known is not None and known.model is reference:
            del _known[number]

    return forget


def _glance(modules: Sequence[Any]) -> list[int]:
    seen: list[int] = []
    for module in modules:
        own = module.__dict__
        seen += map(id, own)
        seen += map(id, own.values())
        seen += map(id, module)
        for value in module.values():
            seen.append(id(value))
            if type(value) in _CONTAINERS:
                _glance_into(value, seen)
    return seen


def _glance_into(container: Any, seen: list[int]) -> None:
    parts = container.values() if type(container) is dict else container
    for part in parts:
        seen.append(id(part))
        if type(part) in _CONTAINERS:
            _glance_into(part, seen)
