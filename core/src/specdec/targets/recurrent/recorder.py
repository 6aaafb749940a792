"""Running units over a window, and telling their caches how to drop a part of it."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field
from mlx_lm.models.cache import ArraysCache

from specdec.targets.intercept import Delegate
from specdec.targets.recurrent.calls import (
    RecordedCall,
    Remembered,
    Runner,
    projections_of,
    step_by_step,
)
from specdec.targets.recurrent.convolutions import Heard, convolution_slots, convolutions_of
from specdec.targets.recurrent.cuda import cuda_update
from specdec.targets.recurrent.gated_delta import Stepping, stepping_of
from specdec.targets.recurrent.units import Seen, Unit, find_units, inside, replaced, rows_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specdec.state import RecurrentRows
    from specdec.targets.recurrent.update import DeltaUpdate

__all__ = ["Recurrence"]

_STEPS_KEPT = 64  # states per position are kept up to here; they are as big as the state


@define(eq=False)
class _Kind:
    """What is known of a class of units.

    Attributes:
        one_by_one: whether its modules are run position by position.
        convolved: the arrays that are slices of a convolution's input, and of which.
        stepping: code that leaves the states between steps, if it has such a loop.
        covered: whether the last window told every array, so that nothing was run again.
    """

    one_by_one: bool = False
    convolved: Mapping[int, int] = field(factory=dict)
    stepping: Stepping | None = None
    covered: bool = False


# With the modules that the model had then, by number; the same ones are there while units are.
_known: dict[int, tuple[list[int], list[Unit], dict[type[Any], _Kind]]] = {}


@define(eq=False)
class Recurrence:
    """The units of one model.

    Attributes:
        units: modules that update recurrent caches.
        keep_steps: whether states between positions and inputs of convolutions are kept; without
            them everything is run again.
        update: computes the gated delta rule over a window or a prompt's chunk in place of mlx-lm's
            loop over positions; where it is ``None`` the loop runs.
    """

    units: list[Unit]
    keep_steps: bool = True
    update: DeltaUpdate | None = field()
    _kinds: dict[type[Any], _Kind] = field(factory=dict)
    _watched: list[tuple[Unit, _Watched]] = field(factory=list)
    _model: Any = None

    @update.default
    def _of_the_device(self) -> DeltaUpdate | None:
        return cuda_update()

    @classmethod
    def find(cls, model: Any, forward: Callable[[], Any]) -> Recurrence:
        """The units of a model; looked for once, however often it is bound.

        Args:
            model: the model.
            forward: calls it over windows of caches that have row forms, the last of which stays
                open.
        """
        key, modules = id(model), [id(module) for _, module in inside(model)]
        if key not in _known:
            weakref.finalize(model, _known.pop, key, None).atexit = False
        if key not in _known or _known[key][0] != modules:
            seen = find_units(model, forward)
            kinds: dict[type[Any], _Kind] = {}
            for each in seen:
                if type(each.unit.module) not in kinds:
                    kinds[type(each.unit.module)] = _learn(each)
            _known[key] = modules, [each.unit for each in seen], kinds
        _, units, kinds = _known[key]
        if any(unit.holder is model for unit in units):
            del _known[key]  # it would hold the model
        found = cls(units, kinds=kinds, model=model)
        found._watched = [(unit, _Watched(unit, found)) for unit in units]
        return found

    @property
    def is_current(self) -> bool:
        """Whether the units are still where they were found."""
        return all(unit.is_in(self._model) for unit in self.units)

    @property
    def one_by_one(self) -> set[type[Any]]:
        """Classes whose modules are run position by position."""
        return {kind for kind, known in self._kinds.items() if known.one_by_one}

    @property
    def updates(self) -> bool:
        """Whether every forward is to be recorded, since part of it is computed otherwise here."""
        return self.update is not None and any(k.stepping for k in self._kinds.values())

    def described(self) -> dict[str, str]:
        """By class, how many modules there are, and how a part of a window is dropped."""
        found: dict[str, str] = {}
        for kind, known in self._kinds.items():
            count = sum(type(unit.module) is kind for unit in self.units)
            ways = []
            if known.one_by_one:
                ways.append("run position by position")
            else:
                ways += ["inputs of convolutions kept"] if known.convolved else []
                ways += [self._stepped()] if known.stepping else []
                ways.append("else run again over what is kept")
            found[kind.__name__] = f"{count} modules, {', '.join(ways)}"
        return found

    def _stepped(self) -> str:
        if self.update is None:
            return "states kept where they are computed one by one"
        failures: list[str] = getattr(self.update, "failures", [])
        return "; ".join(["gated delta rule in one kernel, its states kept", *failures])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the units of one call of the model."""
        with replaced(self._watched):
            yield

    def read(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit over a prompt's chunk or one position, of which nothing is recorded.

        Args:
            unit: the unit.
            args: its positional arguments.
            kwargs: the others.
        """
        runner = self._runner(self._kinds[type(unit.module)].stepping)
        return unit.module(*args, **kwargs) if runner is None else runner(unit.module, args, kwargs)

    def _runner(self, stepping: Stepping | None) -> Runner | None:
        """What runs a unit where no states are kept, if not the unit itself."""
        if self.update is None or stepping is None:
            return None
        return partial(stepping.run, keep=False, at_once=self.update)

    def run(
        self,
        unit: Unit,
        heard: Sequence[tuple[Unit, Heard]],
        rows: RecurrentRows,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit over a window and tell its cache how to drop a part of it.

        Args:
            unit: the unit.
            heard: its convolutions, and what listens to them.
            rows: the cache that it updates.
            args: its positional arguments.
            kwargs: the others.
        """
        kind = self._kinds[type(unit.module)]
        call = RecordedCall(unit, rows, args, kwargs, runner=self._runner(kind.stepping))
        before = list(rows.cache)
        rows.writes.clear()
        if kind.one_by_one:
            output, steps = step_by_step(call, rows)
            for slot in _written(rows, before):
                rows.add_steps(slot, [arrays[slot] for arrays in steps])
            return output
        heard = heard if self.keep_steps and kind.convolved else ()
        places = [] if self.keep_steps and kind.covered else projections_of(unit)
        projected = [(place, Remembered(place, call.shape)) for place in places]
        keep = self.keep_steps and call.shape[1] <= _STEPS_KEPT
        stepping = kind.stepping if keep or self.update is not None else None
        with replaced([*heard, *projected]):
            if stepping is None:
                output = unit.module(*args, **kwargs)
            else:
                output = stepping.run(unit.module, args, kwargs, keep=keep, at_once=self.update)
        untold = _written(rows, before)
        if heard:
            untold -= _tell_inputs(rows, heard, kind.convolved, before)
        if stepping is not None:
            untold -= _tell_steps(rows, stepping, untold)
        kind.covered = not untold
        if untold:
            call.outputs = [(p, each.output) for p, each in projected if each.output is not None]
            call.slots, call.once = frozenset(untold), max(rows.writes.values(), default=0) < 2
            rows.add_replay(call)
        return output


class _Watched(Delegate):
    """A unit that is recorded."""

    def __init__(self, unit: Unit, recurrence: Recurrence) -> None:
        super().__init__(unit.module)
        self._unit = unit
        self._recurrence = recurrence
        self._heard = [(place, Heard(place)) for place in convolutions_of(unit)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = rows_in(args, kwargs)
        if rows is None:
            return self._module(*args, **kwargs)
        if not rows.recording:
            return self._recurrence.read(self._unit, args, kwargs)
        return self._recurrence.run(self._unit, self._heard, rows, args, kwargs)


def _written(rows: RecurrentRows, before: list[Any]) -> set[int]:
    return {slot for slot, held in enumerate(rows.cache) if held is not before[slot]}


def _tell_inputs(
    rows: RecurrentRows,
    heard: Sequence[tuple[Unit, Heard]],
    convolved: Mapping[int, int],
    before: list[Any],
) -> set[int]:
    told = set()
    for slot, number in convolved.items():
        given, heard[number][1].input = heard[number][1].input, None
        if given is not None and before[slot] is not None:
            rows.add_input(slot, given)
            told.add(slot)
    return told


def _tell_steps(rows: RecurrentRows, stepping: Stepping, slots: set[int]) -> set[int]:
    states, last = stepping.states, stepping.last
    stepping.clear()
    if len(states) != rows.window[1]:
        return set()  # a kernel of mlx-lm's did it all at once, or nobody asked for them
    told = {slot for slot in slots if rows.cache[slot] is last}
    for slot in told:
        rows.add_steps(slot, states)
    return told


def _learn(seen: Seen) -> _Kind:
    """What one call of a unit tells about its class."""
    known = _Kind(stepping=stepping_of(type(seen.unit.module)))
    if not seen.by_itself:
        return known  # it reads other caches as well, so it cannot be run by itself
    call, before = RecordedCall(seen.unit, seen.rows, seen.args, seen.kwargs), seen.rows.before
    known.convolved = convolution_slots(call, before)
    if mx.default_device().type == mx.cpu:
        known.one_by_one = not _keeps_bits(call, before)
    return known


def _keeps_bits(call: RecordedCall, before: list[Any]) -> bool:
    """Whether a call gives the same bits as its positions one by one, state included."""
    caches = [ArraysCache(len(before)) for _ in range(2)]
    for cache in caches:
        cache.cache = list(before)
    args, kwargs = call.cut(0, call.shape[1], caches[0])
    outputs = [call.unit.module(*args, **kwargs), step_by_step(call, caches[1])[0]]
    sides = [
        [*(o if isinstance(o, tuple) else (o,)), *cache.cache]
        for o, cache in zip(outputs, caches, strict=True)
    ]
    pairs = [p for p in zip(*sides, strict=True) if all(isinstance(a, mx.array) for a in p)]
    return all(a.shape == b.shape and bool(mx.array_equal(a, b).item()) for a, b in pairs)
