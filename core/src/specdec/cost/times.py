"""What a round takes here, learned from the rounds themselves.

A round is told by how many rows it has, how many drafts were asked for, and how wide its window
was. Rounds that were seen are remembered as a mean of the recent ones; of those that were not, the
target's measured curve says what the window takes, and rounds that were seen say what the drafter
and everything else take beside it.

Machines drift: another process comes, a chip gets warm, contexts grow. That is common to all kinds
of rounds, so one factor follows it quickly from whatever rounds are seen, and what is remembered of
each kind is the time without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Kind", "RoundTimes", "bucket"]

_WARM_UP: Final = 1  # the first round of a shape makes kernels and plans
_LEAST: Final = 3  # rounds before one is believed: of the first ones the fastest counts
_SLOWEST: Final = 0.03
_FOLLOWS: Final = 0.25  # of what a round is off, how much is taken for drift
_YOUNG: Final = 8  # rounds whose mean a new kind is told by
_LATELY: Final = 64
_OLD: Final = 200  # rounds after which a time is doubted as much as that
_DOUBTED: Final = 0.7
_SPIKE: Final = 1.6  # how much one round may be off the mean and still be believed whole


@frozen(order=True)
class Kind:
    """Rounds that take the same.

    Attributes:
        rows: the bucket of their number.
        asked: drafts that were asked for at most; 0 in plain rounds.
        width: positions of the window, W.
    """

    rows: int
    asked: int
    width: int


def bucket(rows: int) -> int:
    """The power of two that stands for a number of rows: the next one."""
    return 1 << max(0, rows - 1).bit_length()


@define
class _Seen:
    time: float = 0.0
    count: int = 0
    age: int = 0

    def add(self, time: float, *, compared: bool) -> None:
        """A round was seen.

        Args:
            time: milliseconds, without drift.
            compared: whether rounds of another kind were seen lately: else nobody can tell what is
                this kind's own and what all have in common.
        """
        if self.age > _OLD and self.settled:
            self.count = _LEAST  # what it was is long ago
        self.count += 1
        self.age = 0
        if self.count <= _WARM_UP:
            self.time = time
            return
        number = self.count - _WARM_UP
        if self.count <= _LEAST:
            self.time = min(time, self.time)
            return
        time = min(max(time, self.time / _SPIKE), self.time * _SPIKE)
        slow = _SLOWEST if compared else 0.0
        self.time += (time - self.time) * (1 / number if number < _YOUNG else slow)

    @property
    def known(self) -> bool:
        return self.count >= _LEAST

    @property
    def settled(self) -> bool:
        return self.count > _LEAST


@define(eq=False)
class RoundTimes:
    """Milliseconds by kind of round.

    Attributes:
        window: the target's own part: milliseconds of a window, by rows and width.
        drift: how much longer rounds take now than what is remembered of them.
    """

    window: Callable[[int, int], float]
    drift: float = 1.0
    _seen: dict[Kind, _Seen] = field(factory=dict)
    _silent: dict[int, float] = field(factory=dict)  # share of asked rounds without any draft
    _filled: dict[int, float] = field(factory=dict)  # positions of the others, of those asked for
    _beside: dict[int, list[tuple[int, float]]] = field(factory=dict)

    def observe(  # noqa: PLR0917  # what a round is, and what it took
        self, rows: int, asked: int, width: int, longest: int, time: float, rounds: int = 1
    ) -> bool:
        """A round was seen, or several plain ones.

        Args:
            rows: B.
            asked: the most drafts that were asked for; 0 where none were.
            width: positions of its window.
            longest: the longest draft that came.
            time: milliseconds; of several rounds the mean.
            rounds: how many.

        Returns:
            Whether its kind is still new.
        """
        size = bucket(rows)
        compared = False
        held = self._seen.setdefault(Kind(size, asked, width), _Seen())
        for seen in self._seen.values():
            seen.age += rounds
            compared |= seen is not held and seen.age < _LATELY and seen.settled
        if held.settled:
            off = time / (self.drift * held.time)
            off = min(max(off, 1 / _SPIKE), _SPIKE)
            self.drift *= off**_FOLLOWS
        held.add(time / self.drift, compared=compared)
        self._beside.pop(size, None)
        if asked:
            self._note(self._silent, size, float(longest == 0), 0.0)
            if longest:
                self._note(self._filled, size, longest / asked, 1.0)
        return not held.settled

    @staticmethod
    def _note(shares: dict[int, float], size: int, value: float, first: float) -> None:
        before = shares.get(size, first)
        shares[size] = before + 0.1 * (value - before)

    def plain(self, rows: int, width: int = 1) -> float:
        """Milliseconds of a plain round."""
        size = bucket(rows)
        seen = self._seen.get(Kind(size, 0, width))
        known = seen.time if seen is not None and seen.known else self.window(size, width)
        return self.drift * known

    def plain_seen(self, size: int) -> float:
        """Milliseconds of a plain round as they were seen, without drift; 0 where none was."""
        seen = self._seen.get(Kind(size, 0, 1))
        return seen.time if seen is not None and seen.known else 0.0

    def drafted(
        self, rows: int, depth: int, padded: Callable[[int], int], *, hopeful: bool = False
    ) -> float:
        """Milliseconds of a round that asks for drafts, on average.

        Args:
            rows: B.
            depth: drafts that are asked for, 1 or more.
            padded: the width that a window of so many positions is given.
            hopeful: the least that it may be, where it was not seen.
        """
        size = bucket(rows)
        silent = self._silent.get(size, 0.0)
        drafts = max(1, round(self._filled.get(size, 1.0) * depth))
        full = self._asked(size, depth, padded(1 + drafts), hopeful=hopeful)
        if silent >= 0.01:
            empty = self._asked(size, depth, 1, hopeful=hopeful)
            full = silent * empty + (1 - silent) * full
        return self.drift * full

    def knows(self, rows: int, depth: int) -> bool:
        """Whether rounds that asked for so many drafts were seen."""
        return any(known == depth for known, _ in self._known(bucket(rows)))

    def deepest(self, rows: int) -> int:
        """The most drafts that rounds were seen to ask for; 0 where there were none."""
        known = self._known(bucket(rows))
        return known[-1][0] if known else 0

    def plain_age(self, rows: int, width: int = 1) -> int:
        """Rounds since the last plain one of this batch."""
        seen = self._seen.get(Kind(bucket(rows), 0, width))
        return 1 << 30 if seen is None or not seen.known else seen.age

    def as_dict(self) -> dict[Kind, float]:
        """What was seen often enough to be kept."""
        return {kind: s.time for kind, s in self._seen.items() if s.count > _YOUNG}

    def recall(self, times: Mapping[Kind, float]) -> None:
        """Begin with what was seen before, by this machine."""
        for kind, time in times.items():
            self._seen.setdefault(kind, _Seen(time, _LEAST + 1, age=_OLD))

    def _asked(self, size: int, depth: int, width: int, *, hopeful: bool) -> float:
        seen = self._seen.get(Kind(size, depth, width))
        if seen is not None and seen.known:
            if hopeful:
                # It may have been seen at a bad moment.
                doubted = seen.time * float(_DOUBTED ** (seen.age / _OLD))
                return min(seen.time, max(self.window(size, width), doubted))
            return seen.time
        return self.window(size, width) + self._rest(size, depth, hopeful=hopeful)

    def _rest(self, size: int, depth: int, *, hopeful: bool) -> float:
        """What the drafter and everything else take beside the window."""
        known = self._known(size)
        if not known:
            return 0.0 if hopeful else 0.3 * self.window(size, 1)
        near, beside = min(known, key=lambda each: abs(each[0] - depth))
        if near == depth:
            return beside
        # Some drafters take the same at any depth, some take so much a draft.
        if hopeful:
            return beside * min(1.0, (1 + depth) / (1 + near))
        if len(known) > 1:
            (low, first), (high, last) = known[0], known[-1]
            slope = max(0.0, (last - first) / (high - low))
            return max(0.0, beside + slope * (depth - near))
        return beside * (0.5 + 0.5 * (1 + depth) / (1 + near))

    def _known(self, size: int) -> list[tuple[int, float]]:
        """Depths that were seen, and what was beside their windows."""
        found = self._beside.get(size)
        if found is None:
            beside: dict[int, list[float]] = {}
            for kind, seen in self._seen.items():
                if kind.asked and kind.rows == size and seen.known:
                    rest = max(0.0, seen.time - self.window(size, kind.width))
                    beside.setdefault(kind.asked, []).append(rest)
            found = sorted((depth, sum(each) / len(each)) for depth, each in beside.items())
            self._beside[size] = found
        return found
