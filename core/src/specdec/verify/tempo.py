"""What the rows of a group do about their pace: when it is asked, and what it is told.

A plain round of a small model takes a millisecond, so while a drafter rests nothing is asked or
told but once in several rounds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specdec.drafting.padding import measured
from specdec.verify.listening import Listener
from specdec.verify.pacing import AS_ASKED, Plan, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify.flight import Flight
    from specdec.verify.lane import DraftLane
    from specdec.verify.pacing import Pace
    from specdec.verify.round import RowOutcome
    from specdec.verify.row import Row

__all__ = ["Tempo"]

_AT_MOST = 2.0  # of the time of a round's own work, what counts with what others do between rounds


class Tempo:
    """The plans of one group, and the time that its rounds take.

    Args:
        pace: chooses how many drafts a round asks for; or ``None``.
    """

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self._plan = AS_ASKED
        self._rests = False
        self._left = 0  # rounds that the plan holds for
        self._next: Plan | None = None
        self._applied: Plan | None = None
        self._seconds = 0.0  # of the round's own work
        self._listener = Listener()
        self._ended = 0.0  # when the round before was read; 0 where that says nothing
        self._rested = 0  # plain rounds of one width that the pace was not told of
        self._rested_width = 1
        self._rested_seconds = 0.0

    # Plans.

    def peek(self, rows: Sequence[Row]) -> Plan:
        """What the next round is to be."""
        if self._next is None:
            self._next = AS_ASKED if self._pace is None else self._decide(rows, self._pace)
        return self._next

    def take(self, rows: Sequence[Row]) -> Plan:
        """The same, for the round that begins now; tells the rows."""
        plan, self._next = self.peek(rows), None
        if plan is not self._applied:
            for row in rows:
                row.paced = plan.depth if row.request.adaptive else None
            self._applied = plan
        return plan

    @property
    def rests(self) -> bool:
        """Whether nobody is drafted for in the round that was last looked at."""
        return self._rests

    def padded(self, rows: int, needed: int) -> int:
        """The width to give a window that needs so many positions."""
        return needed if self._pace is None else self._pace.padded(rows, needed)

    def changed(self) -> None:
        """Rows have come or gone: what was planned for the others is nothing."""
        self._next, self._left, self._applied = None, 0, None
        self._ended = 0.0
        self._listener.forget()
        self._rested, self._rested_seconds = 0, 0.0

    def _decide(self, rows: Sequence[Row], pace: Pace) -> Plan:
        if self._left > 0:
            self._left -= 1
            return self._plan
        begin = time.perf_counter()
        self._tell_of_rest(rows, pace)
        plan = self._plan = pace.plan(rows)
        self._left = plan.rounds - 1
        rests = plan.rests and all(row.request.adaptive or not row.width for row in rows)
        if not rests:
            self._listener.forget()
        elif not self._rests:
            for row in rows:
                row.stats.pauses += row.width > 0
        self._rests = rests
        aside = time.perf_counter() - begin  # it may have measured
        self._seconds -= aside
        if self._ended:
            self._ended += aside
        return plan

    # Rounds.

    def listen(self, rows: Sequence[Row], lane: DraftLane | None) -> None:
        """A plain round was delivered that the drafter was not asked in.

        Args:
            rows: all rows.
            lane: the drafter, at rest.
        """
        if self._plan.listens and self._rests and lane is not None and self._pace is not None:
            self._listener.listen(rows, lane, self._plan.listens, self._pace)

    def start(self) -> None:
        """Work on a round begins, or goes on; heads that are measured in it are none of it."""
        self._seconds -= time.perf_counter() - measured()

    def stop(self) -> None:
        """It pauses, while others have the thread."""
        self._seconds += time.perf_counter() - measured()

    def landed(
        self, rows: Sequence[Row], flight: Flight, outcomes: Sequence[RowOutcome | None]
    ) -> None:
        """A round was read.

        Args:
            rows: all rows; those that joined since the window was begun are the last ones.
            flight: the window.
            outcomes: what each takes from it.
        """
        seconds, self._seconds = self._seconds, 0.0
        joined, rows = len(rows) > flight.row_count, rows[: flight.row_count]
        now = time.perf_counter()
        if self._ended:
            # What comes between rounds is paid once a round too, if it is not a consumer who waits.
            seconds = min(max(seconds, now - self._ended), _AT_MOST * seconds)
        self._ended = now
        asked = flight.proposed.depths
        for row, depth in zip(rows, asked, strict=True):
            row.stats.count_width(depth)
        asked_for = flight.plan.depth  # the plan of the next round may be made already
        if self._pace is None or asked_for is None or joined:
            return  # a window of fewer rows says nothing about a batch of all
        if flight.missed is not None:
            if flight.width != self._rested_width:
                self._tell_of_rest(rows, self._pace)
            self._rested_width = flight.width
            self._rested += 1
            self._rested_seconds += seconds
            return
        self._tell_of_rest(rows, self._pace)
        accepted = [
            0 if outcome is None else max(0, outcome.acceptance.accepted - outcome.forced)
            for outcome in outcomes
        ]
        device = flight.proposed.device
        longest = max(map(len, flight.proposed.rows), default=0)
        if device is not None:
            longest = device.tokens.shape[1]
        self._pace.observe(
            rows,
            Seen(
                depth=asked_for,
                # Rows that have ended meanwhile were not looked at.
                asked=[0 if o is None else n for n, o in zip(asked, outcomes, strict=True)],
                accepted=accepted,
                longest=longest,
                width=flight.width,
                seconds=seconds,
            ),
        )

    def _tell_of_rest(self, rows: Sequence[Row], pace: Pace) -> None:
        rounds, self._rested = self._rested, 0
        if not rounds:
            return
        nothing = [0] * len(rows)
        seconds, self._rested_seconds = self._rested_seconds, 0.0
        pace.observe(
            rows,
            Seen(
                depth=0,
                asked=nothing,
                accepted=nothing,
                longest=0,
                width=self._rested_width,
                seconds=seconds / rounds,
                rounds=rounds,
            ),
        )
