"""An operation over rows is given more rows than there are, where that was measured to be cheaper.

GPU kernels are chosen by shape, so the time over the number of rows is a staircase with steps down
as well as up: a product over five rows may cost more than one over eight. Nothing is assumed of it;
an operation is timed at its own number of rows and at a few rounder ones, once.

On a CPU nothing is measured and nothing is padded: there a product over more rows costs more.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from math import prod
from typing import TYPE_CHECKING, Final

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BUDGET", "MOST", "PaddedRows", "RowCounts", "cheapest_rows", "counts_of", "measured"]

MOST: Final = 32
"""Rows that an operation is padded to at most."""

BUDGET: Final = 0.02
"""Seconds that one measurement may take, about; loading kernels comes on top."""

_ROUND: Final = (2, 4, 8, 16, 32)
_WORTH = 0.95  # less than this of the time, or the rows stay as they are: clocks are not exact
_MOSTLY = 0.8  # of the turns must agree
_HOPELESS = 1.5  # times what the own number takes: not looked at again
_TURNS = (5, 25)  # the least and the most that a median is taken of

_measuring = threading.Lock()
_spent = 0.0
_counts: dict[int, RowCounts] = {}


def measured() -> float:
    """Seconds that this process has spent on measuring rows so far.

    Whoever times something that calls a padded operation takes the difference off: the first call
    with a new number of rows measures.
    """
    return _spent


def on_gpu() -> bool:
    """Whether operations run on a GPU by default."""
    return bool(mx.default_device().type == mx.gpu)


def candidates(rows: int, most: int = MOST) -> list[int]:
    """The numbers of rows that are tried: as they are, and the next multiples of 2, 4, 8, 16, 32.

    Args:
        rows: as they are.
        most: no number above it is tried.
    """
    rounder = {-(-rows // step) * step for step in _ROUND}
    return [rows, *sorted(count for count in rounder if rows < count <= most)]


def cheapest_rows(
    operation: Callable[[mx.array], mx.array],
    like: mx.array,
    rows: int,
    *,
    most: int = MOST,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Time an operation at its own number of rows and at rounder ones above, in turns.

    What is timed is a call with zeros, padded and cut as :class:`PaddedRows` does it, and the wait
    for it. The first call with each number of rows is thrown away; numbers that there is no time
    for are not tried.

    Args:
        operation: ``[n, ...] -> [n, ...]`` for any n.
        like: an array ``[B, ...]`` with the shape behind the first axis, and the type, of the
            input. Its values are not read.
        rows: that there are.
        most: the most that may be given.
        budget: seconds to spend, about.
        clock: seconds.

    Returns:
        The number with the smallest median, if it saves a twentieth; else ``rows``.
    """
    counts = candidates(rows, most)
    if len(counts) == 1:
        return rows
    given = mx.zeros((rows, *like.shape[1:]), like.dtype)
    mx.eval(given)
    mx.synchronize()  # what was submitted before is not this operation's

    def timed(count: int) -> float:
        begin = clock()
        mx.eval(_padded(operation, given, count))
        return clock() - begin

    kept = _worth_a_look(counts, timed, budget)
    times: dict[int, list[float]] = {count: [] for count in kept}
    spent = 0.0
    for turn in range(_TURNS[1] if len(kept) > 1 else 0):
        if turn >= _TURNS[0] and spent > budget / 2:
            break
        for count in kept[turn % len(kept) :] + kept[: turn % len(kept)]:
            times[count].append(timed(count))
            spent += times[count][-1]
    better = [count for count in kept[1:] if _is_cheaper(times[count], times[rows])]
    return min(better, key=lambda count: statistics.median(times[count]), default=rows)


def _worth_a_look(counts: Sequence[int], timed: Callable[[int], float], budget: float) -> list[int]:
    """The own number, and those of the others that there is time for and that may be cheaper."""
    timed(counts[0])
    own = timed(counts[0])
    spent, kept = own, [counts[0]]
    for count in counts[1:]:
        # As many turns as are due, of those that are kept and of this one.
        if spent > budget / 2 or own * _TURNS[0] * (1 + len(kept)) > budget / 2:
            break
        timed(count)  # what loading a kernel takes is nobody's
        once = timed(count)
        spent += 2 * once
        if once < _HOPELESS * own:
            kept.append(count)
    return kept


def _is_cheaper(times: Sequence[float], own: Sequence[float]) -> bool:
    """By the median, and turn by turn: on a busy machine a median alone may be chance."""
    saves = statistics.median(times) < _WORTH * statistics.median(own)
    return saves and sum(a < b for a, b in zip(times, own, strict=True)) >= _MOSTLY * len(own)


class RowCounts:
    """How many rows the operation of one owner is given; each shape is measured once.

    May be used from several threads.

    Args:
        measures: whether to measure at all; on a GPU, where none is given.
        find: as :func:`cheapest_rows`.
    """

    def __init__(
        self,
        *,
        measures: Callable[[], bool] = on_gpu,
        find: Callable[[Callable[[mx.array], mx.array], mx.array, int], int] = cheapest_rows,
    ) -> None:
        self._measures = measures
        self._find = find
        self._known: dict[tuple[int, Sequence[int], mx.Dtype], int] = {}

    def at(self, operation: Callable[[mx.array], mx.array], like: mx.array, rows: int) -> int:
        """The number of rows to give.

        Args:
            operation: of the owner.
            like: as for :func:`cheapest_rows`.
            rows: that there are.
        """
        if rows >= MOST or not self._measures():
            return rows
        key = (rows, tuple(like.shape[1:]), like.dtype)
        found = self._known.get(key)
        if found is None:
            found = self._measured(key, operation, like)
        return found

    def _measured(
        self,
        key: tuple[int, Sequence[int], mx.Dtype],
        operation: Callable[[mx.array], mx.array],
        like: mx.array,
    ) -> int:
        global _spent  # noqa: PLW0603  # one clock for the process, under its lock
        with _measuring:  # one at a time, in the whole process: they would time each other
            if key not in self._known:
                begin = time.perf_counter()
                try:
                    self._known[key] = self._find(operation, like, key[0])
                except (RuntimeError, ValueError):
                    # There may be no memory for more rows. What fails with the rows as they are
                    # fails in the call itself, which comes next.
                    self._known[key] = key[0]
                finally:
                    _spent += time.perf_counter() - begin
            return self._known[key]


def counts_of(owner: object) -> RowCounts:
    """What is known of an owner's operation, for as long as the owner lives.

    Args:
        owner: whose operation it is, such as a target's port; one operation for each owner. Of an
            object that takes no weak references nothing is remembered.
    """
    with _measuring:
        found = _counts.get(id(owner))
        if found is None:
            found = RowCounts()
            try:
                gone = weakref.finalize(owner, _counts.pop, id(owner), None)
            except TypeError:
                return found
            gone.atexit = False
            _counts[id(owner)] = found
        return found


class PaddedRows:
    """An operation over rows that is given as many as are cheapest: the last row stands in.

    Args:
        operation: ``[n, ...] -> [n, ...]`` for any n, where no row depends on another.
        counts: how many rows it is given.
        axes: leading axes of what is passed that count as rows together: 1, or 2 for ``[B, L, H]``
            with an operation that takes each position by itself. Padded, it gets ``[n, 1, H]``.
    """

    def __init__(
        self,
        operation: Callable[[mx.array], mx.array],
        counts: RowCounts | None = None,
        *,
        axes: int = 1,
    ) -> None:
        self._operation = operation
        self._counts = RowCounts() if counts is None else counts
        self._axes = axes

    def __call__(self, x: mx.array) -> mx.array:
        """What the operation gives for ``x``, up to rounding."""
        leading, axes = x.shape[: self._axes], self._axes
        rows = prod(leading)
        flat = x.reshape(rows, *[1] * (axes - 1), *x.shape[axes:])
        count = self._counts.at(self._operation, flat, rows)
        if count <= rows or not rows:
            return self._operation(x)
        given = _padded(self._operation, flat, count)
        return given.reshape(*leading, *given.shape[axes:])


def _padded(operation: Callable[[mx.array], mx.array], x: mx.array, count: int) -> mx.array:
    """What an operation gives for ``[B, ...]`` among ``count`` rows."""
    rows = x.shape[0]
    if count == rows:
        return operation(x)
    last = mx.broadcast_to(x[-1:], (count - rows, *x.shape[1:]))
    return operation(mx.concatenate([x, last]))[:rows]
