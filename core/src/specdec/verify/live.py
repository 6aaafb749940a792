"""The rows that decode together: target state, draws, drafter and host rows, always in one order.

Every method leaves them between rounds or inside one, as it says; when each may be called, and
what a failure means, is the group's matter (``verify/group.py``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import Swap, commit_all
from specdec.sampling import RowSamplers
from specdec.verify.external import read_external
from specdec.verify.handover import leave
from specdec.verify.landing import Landing, may_run_ahead
from specdec.verify.tempo import Tempo
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from specdec.contract import PendingChange
    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.drafting import DraftSide
    from specdec.verify.flight import Flight
    from specdec.verify.pacing import Pace
    from specdec.verify.prefill import Reading
    from specdec.verify.round import RowOutcome
    from specdec.verify.row import Row

__all__ = ["LiveRows"]


class LiveRows:
    """Rows of one target.

    Args:
        target: the bound target.
        drafting: who drafts for them.
        pace: chooses how many drafts a round asks for, of rows that leave that to it; or ``None``.

    Attributes:
        rows: the host's side.
        state: the target's side; ``None`` before the first rows join.
        samplers: their draws.
        drafting: the drafter's side.
        flight: a window that was begun early, on samples that nobody has read or before they were
            delivered; or ``None``.
        landed: what such a window brought where it had to be read between rounds; the next round
            delivers it.
        failure: what was raised when a window was begun before a delivery, which comes first.
        firsts: by row, logits after a prompt that was read whole, until they are drawn.
    """

    def __init__(self, target: Target, drafting: DraftSide, pace: Pace | None = None) -> None:
        self._target = target
        self.rows: list[Row] = []
        self.state: RowState | None = None
        self.samplers = RowSamplers()
        self.drafting = drafting
        self.flight: Flight | None = None
        self.landed: Landing | None = None
        self.failure: Exception | None = None
        self.firsts: dict[int, mx.array] = {}
        self._verifier = Verifier(target, self.samplers)
        self._rounds = 0
        self._tempo = Tempo(pace)

    @property
    def kind(self) -> list[str | None]:
        """Why the rows that decode are apart; nothing where there are none."""
        return [self.state.reason] if self.rows and self.state is not None else []

    def join(self, readings: Sequence[Reading]) -> None:
        """Let rows join, all or none; one or more, of one kind.

        An interrupt between one commit and another leaves ``samplers`` with another number of
        rows than ``rows`` had before.
        """
        if not self.rows:
            self.state = None  # the next rows may be of another kind
        self.land_early()
        self._tempo.changed()
        if self.flight is not None:
            # The live rows use its samples in the next round, and the new rows begin after it.
            self.commit_plain(self.flight)
        rows = [reading.row for reading in readings]
        lane, apart = self.drafting.for_join(readings), readings[0].apart
        live = len(self.rows)
        states = [reading.state for reading in readings]
        state = self.state or states[0]
        joining = states if self.state is not None else states[1:]
        samplers = [(row.request.sampling, row.seed) for row in rows]
        checkpoints = [reading.checkpoint for reading in readings]
        prepared: list[PendingChange] = []

        def enter() -> None:
            self.state = state
            self.rows.extend(rows)
            if lane is not None:
                self.drafting.wake(lane)
            elif apart is not None:
                self.drafting.rest()

        def prepare_drafts() -> PendingChange:
            if lane is not None:
                prepared.append(lane.prepare_append(rows, checkpoints, self.samplers, live))
            return prepared[-1] if prepared else Swap(lambda: None)

        try:
            commit_all(
                [
                    lambda: self.samplers.prepare_append(samplers),
                    lambda: state.prepare_append(joining),
                    lambda: Swap(enter),
                    prepare_drafts,
                ]
            )
        except BaseException:
            for change in prepared:
                change.discard()
            raise
        for offset, reading in enumerate(readings):
            self.drafting.describe(reading.row, apart)
            if reading.first is not None:
                self.firsts[live + offset] = reading.first

    # Rounds.

    def draw_firsts(self) -> list[RowOutcome | None]:
        """The tokens that come with prompts that were read whole; no window is opened."""
        firsts = [self.firsts.get(index) for index in range(len(self.rows))]
        return self._verifier.firsts(self.rows, firsts)

    def fly(self, *, ahead: bool) -> Landing:
        """Submit a window, or take the one that was begun early, and read it.

        The round is open on ``state`` afterwards, unless the window is settled.

        Args:
            ahead: whether the window behind it may be submitted as well, where that can be.
        """
        landing, self.landed = self.landed, None
        if landing is None:
            self._tempo.start()
            flight, self.flight = self.flight, None
            if flight is None:
                flight = self._launch()
            if self._may_begin_early(flight):
                self.commit_plain(flight)
                self.flight = self._launch(after=flight)
            landing = self._land(flight)
        landing.joined(len(self.rows))
        if ahead and self._may_run_ahead(landing):
            try:
                self._commit_ahead(landing)
                self._tempo.start()
                self.flight = self._launch()
                self._tempo.stop()
            except Exception as error:
                self.failure = error
        return landing

    def _land(self, flight: Flight, *, skip: Container[int] = ()) -> Landing:
        """Wait for a window, and walk all rows but some."""
        outcomes = self._verifier.land(self.rows, flight, self.drafting.lane, skip=skip)
        self._rounds += 1
        if self._rounds % 256 == 0:
            mx.clear_cache()
        self._tempo.stop()
        self._tempo.landed(self.rows, flight, outcomes)
        return Landing(flight, outcomes)

    def _may_run_ahead(self, landing: Landing) -> bool:
        """Whether the next window can be submitted before this one is delivered."""
        assert self.state is not None
        if self.flight is not None or not self.state.can_roll_back:
            return False
        return may_run_ahead(self.rows, landing.outcomes)

    def _commit_ahead(self, landing: Landing) -> None:
        """Let target and drafter keep what was accepted, before any of it is delivered."""
        if landing.kept is not None:
            return
        if not landing.flight.settled:
            landing.kept = landing.whole()
            self.commit(landing.kept, landing.flight)
        landing.show(self.rows)

    def land_early(self) -> None:
        """Let the drafter's round end, where a window of it was begun early; it is read for that.

        What it brought is kept for the next round. Rows that have ended keep nothing of it but the
        token that headed it, which was emitted, so that target and drafter have read the same.
        """
        flight = self.flight
        if flight is None or not flight.drafted:
            return
        self.flight = None
        self._tempo.start()
        ended = {index for index, row in enumerate(self.rows) if row.finish is not None}
        landing = self._land(flight, skip=ended)
        self._commit_ahead(landing)
        for index in ended:
            self.rows[index].processed += not self.rows[index].overran
        self.landed = landing

    def _launch(self, after: Flight | None = None) -> Flight:
        """Submit a window.

        Args:
            after: a plain window that is not read yet, on whose samples it is built.
        """
        assert self.state is not None
        plan = self._tempo.take(self.rows)
        lane, rests, padded = self.drafting.lane, False, None
        if lane is not None and self._tempo.rests and (lane.can_rest or not lane.is_open):
            rests, lane = True, lane if lane.is_open else None
            # Recurrent rows cannot take back a position of a window that was padded.
            if plan.width > 1 and not self.state.recurrent:
                padded = partial(max, plan.width)
        elif after is not None:
            lane = None
        else:
            self._tell_room()
            lane = self.drafting.ready(self.rows, self.samplers)
            if plan.depth and self.state.can_roll_back:
                padded = partial(self._tempo.padded, len(self.rows))
        flight = self._verifier.launch(
            self.rows, self.state, lane, after=after, rests=rests, padded=padded
        )
        flight.plan = plan
        return flight

    def _tell_room(self) -> None:
        """Tell each row how many positions its next window can keep."""
        assert self.state is not None
        for index, row in enumerate(self.rows):
            row.room = self.state.room(index)

    def _may_begin_early(self, flight: Flight) -> bool:
        """Whether the next window can be submitted before this one is read."""
        assert self.state is not None
        if not flight.plain or not self.state.can_roll_back or flight.row_count < len(self.rows):
            return False
        if any(row.constraint is not None or row.positional for row in self.rows):
            return False  # the samples must be known, or were drawn for nothing
        return self._stays_plain(flight) and any(
            row.budget is None or row.budget > 1 or row.request.cache is not None
            for row in self.rows
        )

    def _stays_plain(self, flight: Flight) -> bool:
        """Whether the window after this plain one is plain as well."""
        if not self.drafting.wanted(self.rows):
            return flight.width == 1
        lane = self.drafting.lane
        if lane is None or (flight.missed is None and lane.is_open):
            return False
        self._tempo.peek(self.rows)
        return self._tempo.rests

    def commit_plain(self, flight: Flight) -> None:
        """A plain window's only position is its pending token, which was emitted: keep it."""
        if flight.settled:
            return
        assert self.state is not None
        if flight.width == 1:
            self.state.commit_round()
        else:
            self.state.rollback([1] * flight.row_count)
        for row in self.rows:
            row.processed += 1
        flight.settled = True
        self._follow(flight, [1] * flight.row_count)

    def _follow(self, flight: Flight, kept: Sequence[int]) -> None:
        """Let a drafter at rest know of a plain window that was committed."""
        if flight.missed is not None and self.drafting.lane is not None:
            self.drafting.lane.follow(flight.missed, flight.context, kept)

    def commit(self, kept: Sequence[int], flight: Flight) -> None:
        """End a window: each row keeps its pending token and its first drafts.

        Args:
            kept: drafts to keep, per row.
            flight: the window, not settled.
        """
        assert self.state is not None
        self._tempo.start()
        self.state.rollback([1 + count for count in kept])
        if flight.missed is not None:
            self._follow(flight, [1 + count for count in kept])
        elif self.drafting.lane is not None:
            self.drafting.lane.commit(kept, flight.context)
        self._tempo.stop()
        flight.settled = True

    def settle(self, landing: Landing, kept: Sequence[int]) -> None:
        """A window was delivered, as far as it was: keep that, or note who went on without it.

        Args:
            landing: what it brought.
            kept: drafts that were delivered, per row.

        Raises:
            Exception: what was raised when the next window was begun.
        """
        flight = landing.flight
        if not flight.settled:
            self.commit(kept, flight)
            landing.kept = list(kept)
        landing.count(self.rows, kept)
        if self.failure is not None:
            raise self.failure
        if flight.missed is not None:
            self._tempo.listen(self.rows, self.drafting.lane)

    def consume(self, tokens: Sequence[Sequence[int]], *, step_size: int) -> None:
        """Take checked tokens that somebody else chose, between rounds.

        Args:
            tokens: ids per row.
            step_size: positions per window at most.
        """
        self.drop_flight()
        self._leave_pending_unread()
        self._tempo.changed()
        lane = self.drafting.ready(self.rows, self.samplers)
        assert self.state is not None
        read_external(self._target, self.state, lane, self.rows, tokens, step_size=step_size)

    def _leave_pending_unread(self) -> None:
        """Take back what an early window read that was kept since, for rows that joined or left."""
        early = [index not in self.firsts and not row.unread for index, row in enumerate(self.rows)]
        if not any(early):
            return
        assert self.state is not None
        self.state.take_back([int(each) for each in early])
        if self.drafting.lane is not None:
            self.drafting.lane.take_back([int(each) for each in early])
        for row, each in zip(self.rows, early, strict=True):
            row.processed -= each

    def preview(self) -> list[list[int]] | None:
        """What the drafter would propose now; ``None`` where nobody can tell."""
        if self.state is None or self.flight is not None or self.landed is not None:
            return None  # the next tokens are drawn already, and the target has read beyond them
        self._tell_room()
        lane = self.drafting.ready(self.rows, self.samplers)
        return None if lane is None else lane.preview(self.rows, self.state)

    @property
    def undelivered(self) -> set[int]:
        """Rows with tokens of their own that wait for a round; draws that can be dropped do not."""
        if self.flight is not None and self.flight.drafted:
            return set(range(len(self.rows)))
        return set(self.firsts) | (set() if self.landed is None else self.landed.rows)

    # Leaving.

    def extract(self, index: int) -> tuple[list[Any], tuple[int, ...]]:
        """A copy of a row's caches between rounds, and the tokens that they cover."""
        self.land_early()
        if self.flight is not None:
            self.commit_plain(self.flight)
        assert self.state is not None
        row, landed = self.rows[index], self.landed
        read = row.read if landed is None else landed.read(index, row)
        return self.state.extract_row(index), read

    def retire(self) -> None:
        """Give ended rows' caches back, then drop the rows everywhere."""
        keep = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(keep) == len(self.rows):
            return
        self._tempo.changed()
        assert self.state is not None
        if self.landed is not None:
            self.landed.forget_ended(self.rows)
        if self.flight is not None and self.flight.drafted:
            if keep or any(row.leaves_state for row in self.rows):
                self.land_early()
            else:
                self.drop_flight()
        flight = self.flight
        if flight is not None and not flight.settled:
            # The early window holds the last token. An ended row keeps it where its cache is the
            # caller's, for which it is the final read.
            early = [int(row.finish is None or row.unread == 1) for row in self.rows]
            self.state.rollback(early)
            for row, count in zip(self.rows, early, strict=True):
                row.processed += count
            flight.settled = True
            self._follow(flight, early)
        lane = self.drafting.lane
        for index, row in enumerate(self.rows):
            if row.finish is not None and not row.overran:
                leave(self._target, self.state, lane, index, row)
        self.state.filter_rows(keep)
        self.samplers.filter_rows(keep)
        if lane is not None:
            lane.filter_rows(keep)
        self.firsts = {new: self.firsts[k] for new, k in enumerate(keep) if k in self.firsts}
        if self.landed is not None:
            self.landed.take(keep)
        if flight is not None:
            # Rows that joined since are behind those of the window.
            still = [index for index in keep if index < flight.row_count]
            self.flight = flight if still else None
            flight.take(still)
        self.rows = [self.rows[index] for index in keep]

    def end(self) -> None:
        """Let all rows go, which have ended."""
        if self.flight is not None and not self.flight.drafted:
            self.drop_flight()
        self.retire()

    def drop_flight(self) -> None:
        """Take back a window that was begun early; its draws depend on seed and step alone."""
        state, flight, self.flight = self.state, self.flight, None
        if flight is not None and flight.drafted:
            self.drafting.close()  # nobody is left in the round that it is in
        if state is None or not state.open_width:
            return
        if state.can_roll_back or state.open_width > 1:
            state.rollback([0] * state.row_count)
            return
        # Its one position is the pending token, which was emitted and may as well be kept.
        if flight is not None:
            self.commit_plain(flight)
            return
        # It was being read when something interrupted that.
        state.commit_round()
        for row in self.rows:
            row.processed += 1
