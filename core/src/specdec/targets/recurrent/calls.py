"""One recorded call of a unit, which can be run again over fewer of its positions.

The arguments that lie along the window are cut to the positions that are kept, and the unit's code
runs on them with the state from before the window. Its projections are not computed again: what
they gave for a position does not depend on later ones. The call ends once every array of the state
is written, so what the outputs would need is not even built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from specdec.state import ListRows
from specdec.targets.intercept import Delegate
from specdec.targets.recurrent.units import Unit, replaced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state import RecurrentRows

__all__ = ["RecordedCall", "Remembered", "Runner", "projections_of", "step_by_step"]

Runner = Callable[[Any, "Sequence[Any]", dict[str, Any]], Any]
"""Runs a module, given with its arguments, in place of its own code."""


@define(eq=False)
class RecordedCall:
    """One call of a unit in a window ``[B, W]``.

    Attributes:
        unit: the unit.
        rows: the cache that it updated.
        args: its positional arguments.
        kwargs: the others.
        outputs: what its projections gave ``[B, W, ·]``, by place.
        slots: the arrays that only running it again tells.
        once: whether it writes each array once.
        runner: what runs the unit's code, if not the unit itself.
    """

    unit: Unit
    rows: RecurrentRows
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[Unit, mx.array]] = field(factory=list)
    slots: frozenset[int] = frozenset()
    once: bool = True
    runner: Runner | None = None
    shape: tuple[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.shape = self.rows.window

    def __call__(self, cache: ArraysCache, rows: Sequence[int] | None, kept: int) -> None:
        """Run it again over its first positions; see ``specdec.state.Replay``."""
        index = None if rows is None else mx.array(list(rows), mx.int32)
        # What follows the last write is not needed, where nothing is written twice.
        watched = _Until(cache, self.slots) if self.once else cache
        args, kwargs = self.cut(0, kept, watched, index)
        known = [(place, _Constant(_part(a, 0, kept, index))) for place, a in self.outputs]
        with replaced(known), suppress(_AllWritten):
            self.run(args, kwargs)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the unit with other arguments."""
        if self.runner is None:
            return self.unit.module(*args, **kwargs)
        return self.runner(self.unit.module, args, kwargs)

    def cut(
        self, start: int, end: int, cache: ArraysCache, index: mx.array | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for some positions, and some rows, with another cache."""
        signature = inspect.signature(type(self.unit.module).__call__)
        names = list(signature.parameters)[1:]

        def part(name: str, value: Any) -> Any:
            if value is self.rows:
                return cache
            if isinstance(value, ListRows):
                return [cache if each is self.rows else _Nothing() for each in value.caches]
            if name == "offset":
                whole = index is None or not isinstance(value, mx.array) or value.ndim == 0
                return (value if whole else value[index]) + start
            if isinstance(value, mx.array) and value.shape[:2] == self.shape:
                return _part(value, start, end, index)
            return value

        # Positional arguments beyond the named ones are a catch-all's.
        names += [""] * (len(self.args) - len(names))
        args = [part(name, value) for name, value in zip(names, self.args, strict=False)]
        return args, {name: part(name, value) for name, value in self.kwargs.items()}


def _part(array: mx.array, start: int, end: int, index: mx.array | None) -> mx.array:
    array = array if index is None else mx.take(array, index, axis=0)
    return array[:, start:end]


def step_by_step(call: RecordedCall, cache: ArraysCache) -> tuple[Any, list[list[Any]]]:
    """Run a unit position by position.

    Args:
        call: the call to run so.
        cache: holds what there was before, and is given what there is after.

    Returns:
        What the unit gives for the window, and the arrays of the cache after each position.
    """
    outputs, steps = [], []
    for position in range(call.shape[1]):
        args, kwargs = call.cut(position, position + 1, cache)
        outputs.append(call.run(args, kwargs))
        steps.append(list(cache.cache))
    if isinstance(outputs[0], tuple):
        columns = zip(*outputs, strict=True)
        return tuple(_along_positions(column) for column in columns), steps
    return _along_positions(outputs), steps


def _along_positions(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, mx.array) and first.ndim > 1 and first.shape[1] == 1:
        return mx.concatenate(list(outputs), axis=1)
    return outputs[-1]


class Remembered(Delegate):
    """Records what a projection gives for a window.

    Args:
        place: the projection's.
        shape: rows and positions of the window.
    """

    def __init__(self, place: Unit, shape: tuple[int, int]) -> None:
        super().__init__(place.module)
        self._shape = shape
        self._calls = 0
        self.output: mx.array | None = None

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        """Run the projection."""
        output = self._module(hidden, *args, **kwargs)
        self._calls += 1
        shapes = hidden.shape[:2], getattr(output, "shape", ())[:2]
        fits = hidden.ndim == 3 and shapes == (self._shape, self._shape) and output.ndim == 3
        # An object of its own for the same array: `x *= y` in the unit's code changes its own.
        fresh = fits and self._calls == 1
        self.output = mx.reshape(output, output.shape) if fresh else None
        return output


def projections_of(unit: Unit) -> list[Unit]:
    """The places of a unit's projections: what multiplies every position by one matrix."""
    module = unit.module
    return [Unit(module, name, child) for name, child in module.items() if _is_projection(child)]


def _is_projection(child: Any) -> bool:
    if not isinstance(child, Module):
        return False
    weight = child.get("weight")
    if isinstance(weight, mx.array):
        return weight.ndim == 2
    return "linear" in child  # an adapter around one


class _AllWritten(BaseException):
    """All that was asked of a call is there."""


class _Until(ArraysCache):  # type: ignore[misc]  # mlx-lm ships no types
    """Writes through to a cache, and ends the call once everything is written."""

    def __init__(self, cache: ArraysCache, slots: frozenset[int]) -> None:
        super().__init__(len(cache.cache))
        self.cache = cache.cache
        self._missing = set(slots)

    def __setitem__(self, slot: int, value: Any) -> None:
        self.cache[slot] = value
        self._missing.discard(slot)
        if not self._missing:
            raise _AllWritten


class _Constant:
    """Stands in for a projection whose output is known."""

    def __init__(self, value: mx.array) -> None:
        self._value = value

    def __call__(self, *_args: Any, **_kwargs: Any) -> mx.array:
        return self._value


class _Nothing:
    """Stands in for an attention cache where only the recurrent state is wanted."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values
