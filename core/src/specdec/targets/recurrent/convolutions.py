"""The inputs of a unit's convolutions, of which a convolution's state is a slice.

A causal convolution over positions is given its old state followed by the window, ``[B, n + W,
C]``, and its new state is the end of that. What it is after k positions is then the slice from k
on, for every row by itself. Whether an array of the state is such a slice is seen, not assumed: the
arrays are compared when the model is bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d
from mlx_lm.models.cache import ArraysCache

from specdec.targets.intercept import Delegate
from specdec.targets.recurrent.units import Unit, inside, replaced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.targets.recurrent.calls import RecordedCall

__all__ = ["Heard", "convolution_slots", "convolutions_of"]


class Heard(Delegate):
    """Records what a convolution is given."""

    def __init__(self, place: Unit) -> None:
        super().__init__(place.module)
        self.input: mx.array | None = None

    def __call__(self, given: mx.array, *args: Any, **kwargs: Any) -> Any:
        """Run the convolution."""
        self.input = given
        return self._module(given, *args, **kwargs)


def convolutions_of(unit: Unit) -> list[Unit]:
    """The places of a unit's convolutions, in one order for all units of a class."""
    return [place for place, child in inside(unit.module) if isinstance(child, Conv1d)]


def convolution_slots(call: RecordedCall, before: list[Any]) -> Mapping[int, int]:
    """Which arrays of a state are slices of which convolution's input.

    Args:
        call: of the unit, in a window.
        before: the arrays before the window.

    Returns:
        The convolution's number (``convolutions_of``) by array.
    """
    heard = [(place, Heard(place)) for place in convolutions_of(call.unit)]
    cache = ArraysCache(len(before))
    cache.cache = list(before)
    args, kwargs = call.cut(0, call.shape[1], cache)
    with replaced(heard):
        call.unit.module(*args, **kwargs)
    found = {}
    for slot, (old, new) in enumerate(zip(before, cache.cache, strict=True)):
        for number, (_, conv) in enumerate(heard):
            if slot not in found and _is_slice(conv.input, old, new, call.shape[1]):
                found[slot] = number
    return found


def _is_slice(given: mx.array | None, old: Any, new: Any, width: int) -> bool:
    if given is None or old is None or new is None or new.ndim != 3:
        return False
    size = new.shape[1]
    if old.shape != new.shape or given.shape != (new.shape[0], size + width, new.shape[2]):
        return False
    same = mx.array_equal(given[:, :size], old) & mx.array_equal(given[:, width:], new)
    return bool(same.item())
