"""The identity of a model in memory."""

from __future__ import annotations

import weakref
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec.checkpoints.account import Account, glance
from specdec.checkpoints.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx.nn.layers.base import Module

__all__ = ["weights_identity"]


def weights_identity(model: Module) -> str:
    """Identity of a model in memory: 64 hex digits over its weights and what computes with them.

    It covers the class of every module and all of its attributes, private ones too: arrays with
    name, dtype, shape and content (rope frequencies, a LoRA's weights), numbers and strings (its
    ``scale``), configs, dtypes, and functions by their names. Other objects count with their class
    and their plain values. No address and no order of a set counts, so every process agrees.

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
    look = Account(model)
    if known is None or not known.shows(look):
        known = _Known(weakref.ref(model, _forgetter(id(model))), _identity(look))
    known.watch(look)
    with _known_lock:
        _known[id(model)] = known
    return known.identity


def _identity(look: Account) -> str:
    unique = list({id(array): array for array in look.arrays}.values())
    numbers = dict(zip(map(id, unique), fingerprints(unique), strict=True))
    content = [(str(a.dtype), list(a.shape), numbers[id(a)]) for a in look.arrays]
    text = repr((look.facts, content))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


@define(eq=False)
class _Known:
    """An identity and what it was computed from; keeps no array and no module alive.

    Attributes:
        model: whose it is.
        identity: the answer.
        facts: the account of it; they keep the plain values, so that their numbers stay theirs.
        arrays: its arrays.
        holders: its modules and the other objects that were looked into.
        seen: references to all that was met.
        glance: the numbers of everything in the holders, good as long as those things live.
    """

    model: weakref.ref[Module]
    identity: str
    facts: list[Any] = field(factory=list)
    arrays: list[Callable[[], Any]] = field(factory=list)
    holders: list[Callable[[], Any]] = field(factory=list)
    seen: list[Callable[[], Any]] = field(factory=list)
    glance: list[int] = field(factory=list)

    def is_untouched(self) -> bool:
        """Whether nothing was replaced. Looks at objects, not at values: a fast yes."""
        # While they all live, a number stands for the same object as it did.
        alive = [reference() for reference in self.seen]
        if any(thing is None for thing in alive):
            return False
        return glance([reference() for reference in self.holders]) == self.glance

    def shows(self, look: Account) -> bool:
        """Whether a model that looks like this has the identity."""
        arrays = [reference() for reference in self.arrays]
        return (
            len(arrays) == len(look.arrays)
            and all(a is b for a, b in zip(arrays, look.arrays, strict=True))
            and self.facts == look.facts
        )

    def watch(self, look: Account) -> None:
        """Remember what is where. The facts are equal; these are the ones that are in place."""
        self.facts, self.seen = look.facts, look.references()
        count = len(look.arrays)
        self.arrays = self.seen[:count]
        self.holders = self.seen[count : count + len(look.holders)]
        self.glance = glance(look.holders)


_known: dict[int, _Known] = {}
_known_lock = Lock()


def _forgetter(number: int) -> Any:
    def forget(reference: weakref.ref[Module]) -> None:
        known = _known.get(number)
        if known is not None and known.model is reference:
            del _known[number]

    return forget
