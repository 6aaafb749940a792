"""The modules of a model that update recurrent caches, and their places in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from mlx.nn.layers.base import Module

from specdec.state import ListRows, RecurrentRows
from specdec.targets.intercept import Delegate, standing_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Seen", "Unit", "find_units", "inside", "replaced", "rows_in"]


@frozen(eq=False)
class Unit:
    """A module that updates a recurrent cache, and its place in the model.

    Attributes:
        holder: the module, list or dict that holds it.
        name: its name or number there.
        module: the module.
        path: names that lead to it from the model.
    """

    holder: Any
    name: Any
    module: Any
    path: tuple[Any, ...] = ()

    def is_in(self, model: Any) -> bool:
        """Whether the path leads to the module."""
        found = model
        try:
            for name in self.path:
                found = found[name]
        except (KeyError, IndexError, TypeError):
            return False
        return found is self.module


@frozen(eq=False)
class Seen:
    """One call of a unit, while the units were looked for.

    Attributes:
        unit: the unit.
        args: its positional arguments.
        kwargs: the others.
        rows: the recurrent cache among them.
        by_itself: whether it is given by itself, and not in a list with other caches.
    """

    unit: Unit
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: RecurrentRows
    by_itself: bool


class _Spy(Delegate):
    """Notes whether a module is given a recurrent cache."""

    def __init__(self, unit: Unit, seen: list[Seen]) -> None:
        super().__init__(unit.module)
        self._unit = unit
        self._seen = seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = rows_in(args, kwargs)
        if rows is not None:
            alone = any(each is rows for each in (*args, *kwargs.values()))
            self._seen.append(Seen(self._unit, args, kwargs, rows, alone))
        return self._module(*args, **kwargs)


def find_units(model: Any, forward: Callable[[], Any]) -> list[Seen]:
    """The calls of the units of a model; the last call of each.

    Args:
        model: the model.
        forward: calls it over windows of caches that have row forms, the last of which stays open.
    """
    seen: list[Seen] = []
    with replaced([(unit, _Spy(unit, seen)) for unit in _places(model)]):
        forward()
    given = {id(call.unit.module) for call in seen}
    # Of modules inside each other the innermost: the others only pass the cache on.
    inner = [s for s in seen if not any(id(m) in given for _, m in inside(s.unit.module))]
    last: dict[Any, Seen] = {}
    for call in inner:
        last[id(call.unit.holder), call.unit.name] = call
    return list(last.values())


def rows_in(args: Sequence[Any], kwargs: dict[str, Any]) -> RecurrentRows | None:
    """The recurrent cache that a module is given, by itself or in a list of caches."""
    given = [*args, *kwargs.values()]
    lists = [part for each in given if isinstance(each, ListRows) for part in each.caches]
    return next((each for each in (*given, *lists) if isinstance(each, RecurrentRows)), None)


def inside(module: Any) -> Iterator[tuple[Unit, Any]]:
    """Every module inside one, at any depth, with its place."""
    for unit in _children(module, ()):
        yield unit, unit.module
        yield from inside(unit.module)


def _children(module: Any, path: tuple[Any, ...]) -> Iterator[Unit]:
    """The modules right inside one, those in lists and dicts too."""
    stack: list[tuple[Any, tuple[Any, ...]]] = [(module, path)]
    while stack:
        holder, way = stack.pop()
        items = enumerate(holder) if isinstance(holder, list) else holder.items()
        for name, child in items:
            if isinstance(child, Module):
                yield Unit(holder, name, child, (*way, name))
            elif isinstance(child, list | dict):
                stack.append((child, (*way, name)))


def _places(model: Any, path: tuple[Any, ...] = ()) -> Iterator[Unit]:
    """Every module inside a model that has modules of its own."""
    for unit in _children(model, path):
        if next(_children(unit.module, ()), None) is not None:
            yield unit
            yield from _places(unit.module, unit.path)


def replaced(places: Sequence[tuple[Unit, Any]]) -> AbstractContextManager[None]:
    """Put values in these places for a while.

    What somebody has put there since the model was bound is left alone.
    """
    return standing_in(
        [(p.holder, p.name, value) for p, value in places if p.holder[p.name] is p.module]
    )
