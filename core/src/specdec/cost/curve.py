"""Times of an operation by batch size, width and context, as they were measured.

The times of a forward over its width are a staircase with steps down as well as up (kernels are
chosen by shape), so nothing is assumed of them but this: between two measured widths a time lies
between theirs, and a window may be padded to a wider one that is cheaper.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Curve", "Point"]


@frozen(order=True)
class Point:
    """Where an operation was timed.

    Attributes:
        batch: rows.
        width: positions of each row.
        context: positions before them.
    """

    batch: int
    width: int
    context: int


def _times(given: Mapping[Point, float]) -> dict[Point, float]:
    times = dict(sorted(given.items()))
    wrong = [point for point, time in times.items() if not 0 < time < float("inf")]
    if not times or wrong:
        what = f"{wrong[0]} took {times[wrong[0]]}" if wrong else "nothing was timed"
        raise OptionError(f"a cost curve needs times above 0 ({what}); measure it again")
    return times


@frozen
class Curve:
    """Measured times, and what lies between them.

    Attributes:
        times: milliseconds by point; one at least.

    Raises:
        OptionError: no times, or one that is none.
    """

    times: Mapping[Point, float] = field(converter=_times)

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that were timed, ascending."""
        return tuple(sorted({point.width for point in self.times}))

    def at(self, batch: int, width: int, context: int) -> float:
        """Milliseconds at a point: between its neighbours in each direction, never outside.

        Args:
            batch: rows, 1 or more.
            width: positions, 1 or more.
            context: positions before them.
        """
        return _between(
            batch, self._values(lambda p: p.batch), lambda b: self._at_batch(b, width, context)
        )

    def cheapest(self, batch: int, needed: int, most: int, context: int) -> tuple[int, float]:
        """The width to give a window, and its time: as needed, or wider where that is cheaper.

        Args:
            batch: rows.
            needed: positions that are needed.
            most: positions that it may have; ``needed`` or more.
            context: positions before them.
        """
        candidates = [needed, *(w for w in self.widths if needed < w <= most)]
        timed = [(self.at(batch, width, context), width) for width in candidates]
        time, width = min(timed)
        return width, time

    def _at_batch(self, batch: int, width: int, context: int) -> float:
        contexts = self._values(lambda p: p.context, batch=batch)
        return _between(context, contexts, lambda c: self._at_context(batch, width, c))

    def _at_context(self, batch: int, width: int, context: int) -> float:
        here = [p for p in self.times if p.batch == batch and p.context == context]
        widths = sorted(p.width for p in here)
        return _between(width, widths, lambda w: self.times[Point(batch, w, context)])

    def _values(self, of: object, batch: int | None = None) -> Sequence[int]:
        assert callable(of)
        points: Iterable[Point] = self.times
        return sorted({of(p) for p in points if batch is None or p.batch == batch})


def _between(value: int, known: Sequence[int], time: object) -> float:
    """Linear between the two neighbours of a value; beyond the ends in proportion to the last step.

    Behind the last one the time grows as it did between the last two, where it grew.
    """
    assert callable(time)
    place = bisect_left(known, value)
    if place < len(known) and known[place] == value:
        found: float = time(value)
        return found
    if place == 0:
        first: float = time(known[0])
        return first
    if place == len(known):
        last: float = time(known[-1])
        if len(known) == 1:
            return last
        before: float = time(known[-2])
        slope = max(0.0, (last - before) / (known[-1] - known[-2]))
        return last + slope * (value - known[-1])
    low, high = known[place - 1], known[place]
    share = (value - low) / (high - low)
    mixed: float = time(low) * (1 - share) + time(high) * share
    return mixed
