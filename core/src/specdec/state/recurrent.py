"""Recurrent and convolution state of several rows: the row form of ``ArraysCache``.

A model rebinds the arrays of such a cache and never assigns into them, so what was there before a
window is kept by reference. What a row is after part of a window is found in one of three ways,
recorded while the window runs (see ``targets/recurrent``):

- as a slice of a convolution's input;
- as the state after its last position, where the model's code computes these one by one anyway, or
  one kernel gives all of them;
- else the update is run again over the kept positions, from the inputs that it had.

All give the bits that a window of the kept positions would have given.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from attrs import frozen
from mlx_lm.models.cache import ArraysCache

from specdec.errors import RollbackError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from specdec.state.positions import RowPositions

__all__ = ["RecurrentRows", "Replay"]

_FUSED = 10  # states that one kernel picks from
_PINNED = 4 << 20  # bytes of stacked states that a view of one may pin
_SHORT = 128  # positions of a convolution's input that a view of it may pin

Slots = list[Any]
"""Arrays ``[B, ...]``, or ``None`` where nothing was written yet."""


class Replay(Protocol):
    """One recorded update of the arrays of a cache."""

    @property
    def slots(self) -> frozenset[int]:
        """The arrays that it writes."""

    def __call__(self, cache: ArraysCache, rows: Sequence[int] | None, kept: int, /) -> None:
        """Run it again.

        Args:
            cache: holds what these rows were before; is given what they are after.
            rows: of the window, or ``None`` for all.
            kept: positions of the window to run, 1 or more and not all.
        """


@frozen(eq=False)
class _Link:
    """One window of a chain.

    Attributes:
        before: what was there before it: arrays of all rows, or of each row alone.
        kept: positions that each row kept of it, 0 or 1.
    """

    before: Slots | None
    before_apart: list[Slots]
    kept: list[int]

    @classmethod
    def joined(cls, parts: Sequence[tuple[_Link, Sequence[int]]]) -> _Link:
        """The window of the rows that are listed with each part."""
        link, rows = parts[0]
        if len(parts) == 1 and list(rows) == list(range(len(link.kept))):
            return link
        kept = [part.kept[row] for part, rows in parts for row in rows]
        before = [part.of(row) for part, rows in parts for row in rows]
        return cls(_joined(before), [], kept) if _alike(before) else cls(None, before, kept)

    def of(self, row: int) -> Slots:
        """What a row was before."""
        return self.before_apart[row] if self.before is None else _picked(self.before, [row])


class RecurrentRows(ArraysCache):  # type: ignore[misc]  # mlx-lm ships no types; models ask for it
    """Arrays ``[B, ...]`` of one layer.

    Args:
        size: number of arrays.
        positions: the lengths that all layers of the target share.

    Attributes:
        writes: how often each array was written, for the recorder, which clears it.
    """

    def __init__(self, size: int, positions: RowPositions) -> None:
        super().__init__(size)
        self.cache: Slots
        self._positions = positions
        self._before: Slots | None = None
        self._before_apart: list[Slots] | None = None
        self._chain: list[_Link] | None = None
        self._replays: list[Replay] = []
        self._steps: dict[int, Sequence[mx.array] | mx.array] = {}
        self._inputs: dict[int, mx.array] = {}
        self.writes: Counter[int] = Counter()
        # By row, where rows have come to have arrays of different shape.
        self._apart: list[Slots] | None = None

    # What the recorder tells.

    @property
    def recording(self) -> bool:
        """Whether part of the open window may be dropped later."""
        return not self._positions.reading and self._positions.width > 1

    @property
    def window(self) -> tuple[int, int]:
        """Rows and positions of the open window."""
        return len(self._positions.lengths), self._positions.width

    @property
    def before(self) -> Slots:
        """What was there before the open window."""
        return self.cache if self._before is None else self._before

    def __setitem__(self, slot: int, value: Any) -> None:
        """Rebind an array, as the model's code does, and count it."""
        self.writes[slot] += 1
        self.cache[slot] = value

    def add_replay(self, replay: Replay) -> None:
        """An update was run that can be run again; in order."""
        self._replays.append(replay)

    def add_steps(self, slot: int, states: Sequence[mx.array] | mx.array) -> None:
        """What an array was after each position of the open window.

        Args:
            slot: the array's number.
            states: one ``[B, ...]`` per position, or all stacked ``[W, B, ...]``.
        """
        self._steps[slot] = states

    def add_input(self, slot: int, given: mx.array) -> None:
        """What a convolution was given ``[B, n + W, C]``; after k positions, n from k on remain."""
        self._inputs[slot] = given

    # Rounds and rows; see CacheRows.

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> RecurrentRows:
        """One row that takes over an mlx-lm cache's arrays."""
        rows = cls(len(cache.cache), positions)
        rows.cache = list(cache.cache)
        return rows

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[RecurrentRows, Sequence[int]]], positions: RowPositions
    ) -> RecurrentRows:
        """A new layer of the rows that are listed with each part."""
        layer = cls(len(parts[0][0].cache), positions)
        layer.cache = _joined([part._taken(rows) for part, rows in parts])
        if any(part._knows_before for part, _ in parts):
            before = [part._before_of(row) for part, rows in parts for row in rows]
            if _alike(before):
                layer._before = _joined(before)
            else:
                layer._before_apart = before
        chains = [part._chain for part, _ in parts if part._chain is not None]
        if len(chains) == len(parts) and len(set(map(len, chains))) == 1:
            rows = [chosen for _, chosen in parts]
            links = zip(*chains, strict=True)
            layer._chain = [_Link.joined(list(zip(each, rows, strict=True))) for each in links]
        return layer

    def key(self, row: int) -> Hashable:
        """Rows whose arrays have the same shapes share them; one that has read nothing has none."""
        arrays = self.cache if self._apart is None else self._apart[row]
        return tuple(None if array is None else array.shape[1:] for array in arrays)

    @property
    def split(self) -> bool:
        """Whether rows have come to have arrays of different shape."""
        return self._apart is not None

    @property
    def rewinds(self) -> bool:
        """Only what the rows were before one position is kept."""
        return False

    @property
    def longest_chain(self) -> None:
        """No limit but that of memory: a chain holds the arrays of each of its windows."""
        return

    def begin_chain(self) -> None:
        """From here on, what is there before each window of one position is kept by reference."""
        self._chain = []

    def end_chain(self) -> None:
        """Only what was there before the last window is kept."""
        self._chain = None

    def begin(self) -> None:
        """A window was begun: what is there now is kept by reference."""
        self._before, self._before_apart = list(self.cache), None
        self._forget()

    def check(self, kept: Sequence[int] | None) -> None:
        """Check that somebody recorded how the arrays came about, where part is to be kept.

        Raises:
            RollbackError: nobody did.
        """
        width = self._positions.width
        partly = [count for count in kept or () if 0 < count < width]
        told = {*self._steps, *self._inputs}.union(*(r.slots for r in self._replays))
        if partly and not self._written <= told:
            raise RollbackError(
                f"a recurrent layer cannot keep {partly[0]} of {width} positions: "
                "nobody recorded how it was updated"
            )

    def finish(self, kept: Sequence[int] | None) -> None:
        """Keep part of the window."""
        before, width = self._before, self._positions.width
        assert before is not None
        if kept is None or all(count == width for count in kept):
            whole = {slot: _step(steps, width) for slot, steps in self._steps.items()}
            self.cache = [whole.get(slot, held) for slot, held in enumerate(self.cache)]
        elif self._told(kept, before):
            self.cache = [self._slot_after(slot, kept, before) for slot in range(len(before))]
        else:
            parts = {count: self._after(count, kept, before) for count in sorted({*kept})}
            if len(parts) == 1:
                self.cache = next(iter(parts.values()))[0]
            else:
                self._settle([parts[count][1].pop(0) for count in kept])
        self._forget()
        if width > 1:
            self._before = None
        elif self._chain is not None:
            ones = [1] * len(self._positions.lengths)
            self._chain.append(_Link(before, [], ones if kept is None else list(kept)))

    def take_back(self, counts: Sequence[int]) -> None:
        """Let rows be what they were before their last positions.

        Raises:
            RollbackError: that is not known any more.
        """
        if not any(counts):
            return
        if self._chain is not None:
            self._go_back(self._chain, [self._link_of(row, n) for row, n in enumerate(counts)])
        elif self._knows_before:
            self._settle(
                [
                    self._before_of(row) if count else self._taken([row])
                    for row, count in enumerate(counts)
                ]
            )
        else:
            raise RollbackError("what these recurrent rows were before is not kept any more")
        self._before = self._before_apart = None

    def extract(self, row: int, *, share: bool = False) -> ArraysCache:
        """One row as an mlx-lm cache."""
        cache = ArraysCache(len(self.cache))
        if share and len(self._positions.lengths) == 1 and self._apart is None:
            cache.cache = list(self.cache)
        else:
            arrays = self._taken([row])
            cache.cache = [None if array is None else mx.contiguous(array) for array in arrays]
        return cache

    def arrays(self) -> list[mx.array]:
        """What is held, to be evaluated."""
        held = [self.cache] if self._apart is None else self._apart
        return [array for arrays in held for array in arrays if array is not None]

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row: the same at any length."""
        del positions
        rows = max(1, len(self._positions.lengths))
        return sum(array.nbytes for array in self.arrays()) // rows

    def _forget(self) -> None:
        self._replays, self._steps, self._inputs = [], {}, {}

    def _told(self, kept: Sequence[int], before: Slots) -> bool:
        """Whether every array is told without running anything again."""
        if 0 in kept and any(before[slot] is None for slot in self._written):
            return False  # a row that keeps nothing has nothing
        return self._written <= {*self._steps, *self._inputs}

    @property
    def _written(self) -> set[int]:
        before = self.before
        return {slot for slot, held in enumerate(self.cache) if held is not before[slot]}

    def _slot_after(self, slot: int, kept: Sequence[int], before: Slots) -> mx.array | None:
        """One array after each row has kept its own number of positions."""
        held: mx.array | None = before[slot]
        now: mx.array | None = self.cache[slot]
        if now is held:
            return held
        if slot in self._inputs:
            return self._slice_after(self._inputs[slot], kept)
        steps = self._steps[slot]
        if isinstance(steps, mx.array):
            return self._stacked_after(steps, kept, held)
        # Where there was nothing before, every row keeps something.
        states: list[Any] = [steps[0] if held is None else held, *steps]
        if len({*kept}) == 1:
            after: mx.array | None = states[kept[0]]
            return after
        if len(states) > _FUSED:
            return mx.concatenate([states[count][row : row + 1] for row, count in enumerate(kept)])
        counts = self._positions.once(("kept", tuple(kept)), lambda: mx.array(list(kept), mx.int32))
        picked: mx.array = _pick(counts, *states)
        return picked

    def _stacked_after(
        self, steps: mx.array, kept: Sequence[int], held: mx.array | None
    ) -> mx.array | None:
        if len({*kept}) == 1:
            return _step(steps, kept[0]) if kept[0] else held

        def places() -> mx.array:
            at = [max(count - 1, 0) * len(kept) + row for row, count in enumerate(kept)]
            return mx.array(at, mx.int32)

        index = self._positions.once(("steps", tuple(kept)), places)
        picked = mx.take(steps.reshape(-1, *steps.shape[2:]), index, axis=0)
        if held is None or 0 not in kept:
            return picked
        some = self._positions.once(("some", tuple(kept)), lambda: mx.array(list(kept)) > 0)
        return mx.where(some.reshape(-1, *[1] * (picked.ndim - 1)), picked, held)

    def _slice_after(self, given: mx.array, kept: Sequence[int]) -> mx.array:
        size = given.shape[1] - self._positions.width
        if len({*kept}) == 1:
            return _end_of(given, kept[0], size)

        def places() -> mx.array:
            return (mx.array(list(kept), mx.int32)[:, None] + mx.arange(size))[..., None]

        index = self._positions.once(("convolution", size, tuple(kept)), places)
        return mx.take_along_axis(given, index, axis=1)

    def _after(self, count: int, kept: Sequence[int], before: Slots) -> tuple[Slots, list[Slots]]:
        """The rows that keep so many positions: together, and one by one if there are others."""
        rows = [row for row, own in enumerate(kept) if own == count]
        everyone = len(rows) == len(kept)
        if count == 0:
            together = before if everyone else _picked(before, rows)
        elif count == self._positions.width:
            together = self.cache if everyone else _picked(self.cache, rows)
        else:
            together = self._partly(count, None if everyone else rows, before)
        if everyone:
            return together, []
        return together, [_picked(together, [place]) for place in range(len(rows))]

    def _partly(self, count: int, rows: list[int] | None, before: Slots) -> Slots:
        cache = ArraysCache(len(before))
        cache.cache = before if rows is None else _picked(before, rows)
        cache.cache = list(cache.cache)
        for replay in self._replays:
            replay(cache, rows, count)
        for slot, given in self._inputs.items():
            size = given.shape[1] - self._positions.width
            part = _end_of(given, count, size)
            cache.cache[slot] = part if rows is None else _picked([part], rows)[0]
        for slot, states in self._steps.items():
            state = _step(states, count)
            cache.cache[slot] = state if rows is None else _picked([state], rows)[0]
        held: Slots = cache.cache
        return held

    def _taken(self, rows: Sequence[int]) -> Slots:
        if self._apart is not None:
            return _joined([self._apart[row] for row in rows])
        if list(rows) == list(range(len(self._positions.lengths))):
            arrays: Slots = self.cache
            return arrays
        return _picked(self.cache, rows)

    def _link_of(self, row: int, count: int) -> int:
        """The window of the chain that a row kept the last but ``count - 1`` position of."""
        chain = self._chain or []
        number = len(chain)
        while count:
            number -= 1
            count -= chain[number].kept[row]
        return number

    def _go_back(self, chain: Sequence[_Link], links: Sequence[int]) -> None:
        """Let each row be what it was before its window of the chain, or what it is."""
        numbers = sorted(set(links))
        now = self.cache if self._apart is None else None
        states = [chain[n].before if n < len(chain) else now for n in numbers]
        together = [state for state in states if state is not None]
        if len(together) == len(states) and _alike(together):
            self._apart, places = None, [numbers.index(n) for n in links]
            columns = list(zip(*together, strict=True))
            self.cache = [self._chosen(column, places) for column in columns]
        else:
            rows = enumerate(links)
            self._settle([chain[n].of(r) if n < len(chain) else self._taken([r]) for r, n in rows])

    def _chosen(self, states: Sequence[Any], places: Sequence[int]) -> Any:
        """Of each row the state at its place; no state, if there is none."""
        if all(state is states[0] for state in states):
            return states[0]
        if len(states) > _FUSED:
            return mx.concatenate([states[at][row : row + 1] for row, at in enumerate(places)])
        key = ("picked", tuple(places))
        return _pick(self._positions.once(key, lambda: mx.array(list(places), mx.int32)), *states)

    @property
    def _knows_before(self) -> bool:
        return self._before is not None or self._before_apart is not None

    def _before_of(self, row: int) -> Slots:
        """What a row was before its last position; where nobody knows, what it is."""
        if self._before_apart is not None:
            return self._before_apart[row]
        return self._taken([row]) if self._before is None else _picked(self._before, [row])

    def _settle(self, rows: list[Slots]) -> None:
        """Take single rows, together where their shapes allow it."""
        self._apart = None
        if _alike(rows):
            self.cache = _joined(rows)
        else:
            self._apart = rows


def _end_of(given: mx.array, start: int, size: int) -> mx.array:
    """A convolution's state; of a short window as a view, which pins little."""
    end = given[:, start : start + size]
    return end if given.shape[1] <= _SHORT else mx.contiguous(end)


def _step(steps: Sequence[mx.array] | mx.array, count: int) -> mx.array:
    """The state after so many positions; of small stacked ones as a view, which pins little."""
    state = steps[count - 1]
    pins = isinstance(steps, mx.array) and steps.nbytes > _PINNED
    return mx.contiguous(state) if pins else state


@mx.compile
def _pick(counts: mx.array, *states: mx.array) -> mx.array:
    """Of each row the state with its number, in one kernel."""
    counts = counts.reshape(-1, *[1] * (states[0].ndim - 1))
    picked = states[0]
    for number, state in enumerate(states[1:], 1):
        picked = mx.where(counts == number, state, picked)
    return picked


def _picked(arrays: Slots, rows: Sequence[int]) -> Slots:
    if len(rows) == 1:
        return [None if a is None else a[rows[0] : rows[0] + 1] for a in arrays]
    index = mx.array(list(rows), mx.int32)
    return [None if a is None else mx.take(a, index, axis=0) for a in arrays]


def _joined(rows: Sequence[Slots]) -> Slots:
    if len(rows) == 1:
        return list(rows[0])
    return [
        None if column[0] is None else mx.concatenate(list(column))
        for column in zip(*rows, strict=True)
    ]


def _alike(rows: Sequence[Slots]) -> bool:
    shapes = {tuple(None if a is None else a.shape[1:] for a in arrays) for arrays in rows}
    return len(shapes) == 1
