"""Recording how a window updates recurrent state, so that part of the window can be dropped.

The modules that are given a recurrent cache are found once, by looking into a call of the model.
For the length of a recorded call each is wrapped. Its inputs are kept, and what its projections
gave, and from these it can be run again over fewer positions; only what the state needs is then
computed. Where the update is a loop over positions in Python, as the gated delta rule is on CPU and
CUDA, the states between the steps are kept as well, and nothing is run again.

On a backend that gives a position the same bits in a window of any width, a module that does not
(a chunked form of the recurrence) is run position by position, so that it does too.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from specdec.state import ListRows, RecurrentRows
from specdec.targets.intercept import Delegate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Recurrence", "Unit"]

_STEPS_KEPT = 64  # states per position are kept up to here; they are as big as the state


@frozen(eq=False)
class Unit:
    """A module that updates a recurrent cache, and its place in the model.

    Attributes:
        holder: the module or list that holds it.
        name: its name or number there.
        module: the module.
    """

    holder: Any
    name: Any
    module: Any

    def put(self, value: Any) -> None:
        """Put something in the module's place."""
        if isinstance(self.holder, list):
            self.holder[self.name] = value
        else:
            dict.__setitem__(self.holder, self.name, value)


@define(eq=False)
class _Call:
    """One call of a unit in a window ``[B, W]``: can run it again over its first positions."""

    unit: Unit
    rows: RecurrentRows
    arguments: inspect.BoundArguments
    shape: tuple[int, int]
    outputs: dict[str, mx.array]
    slots: frozenset[int]
    once: bool = True

    def __call__(self, cache: ArraysCache, rows: Sequence[int] | None, kept: int) -> None:
        index = None if rows is None else mx.array(list(rows), mx.int32)

        def cut(array: mx.array) -> mx.array:
            array = array if index is None else mx.take(array, index, axis=0)
            return array[:, :kept]

        # What follows the last write is not needed, where nothing is written twice.
        watched = _Until(cache, self.slots) if self.once else cache
        arguments = self.sliced(0, kept, watched, index)
        constants = {name: cut(array) for name, array in self.outputs.items()}
        stand_ins = {name: _Constant(array) for name, array in constants.items()}
        with _replaced(self.unit.module, stand_ins), suppress(_AllWritten):
            self.unit.module(*arguments.args, **arguments.kwargs)

    def sliced(
        self, start: int, end: int, cache: ArraysCache, index: mx.array | None = None
    ) -> inspect.BoundArguments:
        """The arguments for some positions, and some rows."""

        def part(name: str, value: Any) -> Any:
            if value is self.rows:
                return cache
            if isinstance(value, ListRows):
                return [cache if each is self.rows else _Nothing() for each in value.caches]
            if not isinstance(value, mx.array):
                return value + start if name == "offset" and isinstance(value, int) else value
            if name == "offset":
                taken = value if index is None or value.ndim == 0 else value[index]
                return taken + start
            if value.shape[:2] != self.shape:
                return value
            value = value if index is None else mx.take(value, index, axis=0)
            return value[:, start:end]

        return inspect.BoundArguments(
            self.arguments.signature,
            type(self.arguments.arguments)(
                (name, part(name, value)) for name, value in self.arguments.arguments.items()
            ),
        )


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


class _Remembered(Delegate):
    """Records what a projection gives for a window."""

    def __init__(self, module: Any, shape: tuple[int, int]) -> None:
        super().__init__(module)
        self._shape = shape
        self.calls = 0
        self.output: mx.array | None = None

    def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        output = self._module(hidden, *args, **kwargs)
        self.calls += 1
        shapes = hidden.shape[:2], getattr(output, "shape", ())[:2]
        fits = hidden.ndim == 3 and shapes == (self._shape, self._shape) and output.ndim == 3
        # An array of its own: `x *= y` in the unit's code would change this one.
        self.output = mx.array(output) if fits and self.calls == 1 else None
        return output


class _Watched(Delegate):
    """A unit that is recorded."""

    def __init__(self, unit: Unit, recurrence: Recurrence) -> None:
        super().__init__(unit.module)
        self._unit = unit
        self._recurrence = recurrence

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = _rows_of(args, kwargs)
        if rows is None or not rows.recording:
            return self._module(*args, **kwargs)
        return self._recurrence.run(self._unit, rows, args, kwargs)


class _Spy(Delegate):
    """Notes whether a module is given a recurrent cache."""

    def __init__(
        self, unit: Unit, calls: list[tuple[Unit, tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        super().__init__(unit.module)
        self._unit = unit
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _rows_of(args, kwargs) is not None:
            self._calls.append((self._unit, args, kwargs))
        return self._module(*args, **kwargs)


@define(eq=False)
class _Stepping:
    """A unit's code, with the loop over positions told to leave its states here."""

    run: Callable[..., Any]
    states: list[mx.array]


@define(eq=False)
class Recurrence:
    """The units of one model.

    Attributes:
        units: modules that update recurrent caches.
        one_by_one: classes whose modules are run position by position.
        keep_steps: whether states between positions are kept where they are computed anyway.
    """

    units: list[Unit]
    one_by_one: set[type[Any]] = field(factory=set)
    keep_steps: bool = True
    _stepping: dict[type[Any], _Stepping | None] = field(factory=dict)
    _asked: set[type[Any]] = field(factory=set)

    @classmethod
    def find(cls, model: Any, forward: Callable[[], Any]) -> Recurrence:
        """The units of a model.

        Args:
            model: the model.
            forward: calls it over a window of caches that have row forms, and commits nothing.
        """
        calls: list[tuple[Unit, tuple[Any, ...], dict[str, Any]]] = []
        places = list(_places(model))
        with _wrapped(places, lambda unit: _Spy(unit, calls)):
            forward()
        given = {id(unit.module) for unit, _, _ in calls}
        # Of modules inside each other the innermost: the others only pass the cache on.
        inner = [c for c in calls if not any(id(m) in given for m in _inside(c[0].module))]
        found = cls(list({(id(unit.holder), unit.name): unit for unit, _, _ in inner}.values()))
        if mx.default_device().type == mx.cpu:
            for unit, args, kwargs in inner:
                kind = type(unit.module)
                # One that reads other caches as well cannot be run by itself.
                if kind not in found._asked and _rows_alone(args, kwargs):
                    found._asked.add(kind)
                    if not _keeps_bits(unit, args, kwargs):
                        found.one_by_one.add(kind)
        return found

    def described(self) -> dict[str, str]:
        """By class, how many modules there are, and how a part of a window is dropped."""
        found: dict[str, str] = {}
        for kind in {type(unit.module): None for unit in self.units}:
            count = sum(type(unit.module) is kind for unit in self.units)
            if kind in self.one_by_one:
                how = "run position by position"
            elif self.keep_steps and _gated_delta_steps(kind) is not None:
                how = "states kept where computed one by one, else run again"
            else:
                how = "run again over what is kept"
            found[kind.__name__] = f"{count} modules, {how}"
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the units of one call of the model."""
        with _wrapped(self.units, lambda unit: _Watched(unit, self)):
            yield

    def run(
        self, unit: Unit, rows: RecurrentRows, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit over a window and tell its cache how to drop a part of it."""
        call = _Call(unit, rows, _bound(unit.module, args, kwargs), rows.window, {}, frozenset())
        before = list(rows.cache)
        rows.writes.clear()
        if type(unit.module) in self.one_by_one:
            return _one_by_one(call, before)
        projections = {
            name: _Remembered(child, call.shape)
            for name, child in unit.module.items()
            if _is_projection(child)
        }
        stepping = self._stepping_of(unit) if call.shape[1] <= _STEPS_KEPT else None
        with _replaced(unit.module, projections):
            if stepping is None:
                output = unit.module(*args, **kwargs)
            else:
                stepping.states.clear()
                output = stepping.run(unit.module, *args, **kwargs)
        call.outputs = {n: p.output for n, p in projections.items() if p.output is not None}
        written = {slot for slot, held in enumerate(rows.cache) if held is not before[slot]}
        if stepping is not None and len(stepping.states) == call.shape[1]:
            for slot in written:
                if rows.cache[slot] is stepping.states[-1]:
                    rows.add_steps(slot, list(stepping.states))
                    written = written - {slot}
            stepping.states.clear()
        call.slots, call.once = frozenset(written), max(rows.writes.values(), default=0) < 2
        rows.add_replay(call)
        return output

    def _stepping_of(self, unit: Unit) -> _Stepping | None:
        kind = type(unit.module)
        if not self.keep_steps:
            return None
        if kind not in self._stepping:
            self._stepping[kind] = _gated_delta_steps(kind)
        return self._stepping[kind]


def _gated_delta_steps(kind: type[Any]) -> _Stepping | None:
    """A copy of a module's code whose gated delta loop leaves its states behind, if it has one.

    mlx-lm's functions are looked up by name, and copied with another name bound; nothing of theirs
    is changed. Where a version names them otherwise, the update is run again instead.
    """
    states: list[mx.array] = []

    def rebound(function: Any, name: str, value: Any) -> Any:
        if not isinstance(function, FunctionType) or name not in function.__code__.co_names:
            return None
        if name not in function.__globals__:
            return None
        copy = FunctionType(
            function.__code__,
            {**function.__globals__, name: value},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    call = kind.__call__
    update = getattr(call, "__globals__", {}).get("gated_delta_update")
    loop = getattr(update, "__globals__", {}).get("gated_delta_ops")
    step = getattr(loop, "__globals__", {}).get("_gated_delta_step_ops")
    if step is None:
        return None

    def keeping(*args: Any, **kwargs: Any) -> Any:
        output, state = step(*args, **kwargs)
        states.append(state)
        return output, state

    loop = rebound(loop, "_gated_delta_step_ops", keeping)
    update = None if loop is None else rebound(update, "gated_delta_ops", loop)
    run = None if update is None else rebound(call, "gated_delta_update", update)
    return None if run is None else _Stepping(run, states)


def _one_by_one(call: _Call, before: list[Any]) -> Any:
    """Run a unit position by position, and keep the arrays after each."""
    rows = call.rows
    output, steps = _stepped(call, rows)
    for slot, held in enumerate(rows.cache):
        if held is not before[slot]:
            rows.add_steps(slot, [arrays[slot] for arrays in steps])
    return output


def _stepped(call: _Call, cache: ArraysCache) -> tuple[Any, list[list[Any]]]:
    outputs, steps = [], []
    for position in range(call.shape[1]):
        arguments = call.sliced(position, position + 1, cache)
        outputs.append(call.unit.module(*arguments.args, **arguments.kwargs))
        steps.append(list(cache.cache))
    if isinstance(outputs[0], tuple):
        columns = zip(*outputs, strict=True)
        return tuple(_along_positions(column) for column in columns), steps
    return _along_positions(outputs), steps


def _keeps_bits(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives the same bits as its positions one by one, state included."""
    rows = _rows_of(args, kwargs)
    assert rows is not None
    call = _Call(unit, rows, _bound(unit.module, args, kwargs), rows.window, {}, frozenset())
    caches = [ArraysCache(len(rows.cache)) for _ in range(2)]
    for cache in caches:
        cache.cache = list(rows.before)
    whole = call.sliced(0, call.shape[1], caches[0])
    outputs = [unit.module(*whole.args, **whole.kwargs), _stepped(call, caches[1])[0]]
    sides = [
        [*(o if isinstance(o, tuple) else (o,)), *cache.cache]
        for o, cache in zip(outputs, caches, strict=True)
    ]
    arrays = [
        pair for pair in zip(*sides, strict=True) if all(isinstance(a, mx.array) for a in pair)
    ]
    return all(a.shape == b.shape and mx.array_equal(a, b).item() for a, b in arrays)


def _along_positions(outputs: Sequence[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, mx.array) and first.ndim > 1 and first.shape[1] == 1:
        return mx.concatenate(list(outputs), axis=1)
    return outputs[-1]


def _bound(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call by name, without the module itself."""
    signature = inspect.signature(type(module).__call__)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature.bind(*args, **kwargs)


def _is_projection(child: Any) -> bool:
    weight = child.get("weight") if isinstance(child, Module) else None
    if isinstance(weight, mx.array):
        return weight.ndim == 2
    return isinstance(child, Module) and "linear" in child  # an adapter around one


def _rows_of(args: Sequence[Any], kwargs: dict[str, Any]) -> RecurrentRows | None:
    """The recurrent cache that a module is given, by itself or in a list of caches."""
    given = [*args, *kwargs.values()]
    lists = [part for each in given if isinstance(each, ListRows) for part in each.caches]
    return next((each for each in (*given, *lists) if isinstance(each, RecurrentRows)), None)


def _rows_alone(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return not any(isinstance(each, ListRows) for each in (*args, *kwargs.values()))


def _children(module: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Holder, name and value of the modules right inside one, those in lists and dicts too."""
    stack: list[tuple[Any, Any, Any]] = [(module, name, child) for name, child in module.items()]
    while stack:
        holder, name, child = stack.pop()
        if isinstance(child, Module):
            yield holder, name, child
        elif isinstance(child, list):
            stack += [(child, place, each) for place, each in enumerate(child)]
        elif isinstance(child, dict):
            stack += [(child, key, each) for key, each in child.items()]


def _inside(module: Any) -> Iterator[Any]:
    for _, _, child in _children(module):
        yield child
        yield from _inside(child)


def _places(model: Any) -> Iterator[Unit]:
    """Every module inside a model that has modules of its own."""
    for holder, name, child in _children(model):
        if next(_children(child), None) is not None:
            yield Unit(holder, name, child)
            yield from _places(child)


@contextmanager
def _wrapped(units: Sequence[Unit], wrap: Callable[[Unit], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.put, unit.module)
            unit.put(wrap(unit))
        yield


@contextmanager
def _replaced(module: Any, children: dict[str, Any]) -> Iterator[None]:
    held = {name: module[name] for name in children}
    try:
        for name, child in children.items():
            dict.__setitem__(module, name, child)
        yield
    finally:
        for name, child in held.items():
            dict.__setitem__(module, name, child)
