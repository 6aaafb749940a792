"""Rows that decode together on one target with one drafter: the verify executor.

The lane that every request takes; a single request is a group of one row. ``docs/how-a-round-
works.md`` follows a row through it.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import Swap, commit_all
from specdec.errors import (
    ClosedError,
    GroupFailedError,
    RoundOpenError,
    one_line,
)
from specdec.sampling import RowSamplers
from specdec.verify.handover import give_back, leave
from specdec.verify.lane import MAX_FAILURES, DraftLane
from specdec.verify.prefill import read_prompt, why_apart
from specdec.verify.round import Round
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DraftProvider, PendingChange
    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.flight import Flight
    from specdec.verify.prefill import Newcomer
    from specdec.verify.request import Request, Row
    from specdec.verify.round import RowOutcome

__all__ = ["VerifyGroup"]


class VerifyGroup:
    """A batch of rows: admission, rounds, retirement.

    Args:
        target: the bound target.
        provider: the drafter, or ``None`` to decode plainly. It outlives the group.
        drafter: the drafter's kind, for the statistics.
        reason: why there is no drafter, for the statistics.
        prefill_step_size: prompt tokens per chunk.
        stream: the MLX stream to compute on.

    Raises:
        TargetLacksError: the drafter needs what this target does not have.
    """

    def __init__(
        self,
        target: Target,
        provider: DraftProvider | None = None,
        *,
        drafter: str | None = None,
        reason: str | None = None,
        prefill_step_size: int = 2048,
        stream: Any = None,
    ) -> None:
        self.target = target
        self.rows: list[Row] = []
        self._stream = stream if stream is not None else mx.default_stream(mx.default_device())
        self._step_size = prefill_step_size
        self._reason = reason
        self._drafter = drafter
        if provider is not None and target.no_speculation_reason is not None:
            provider, self._reason = None, target.no_speculation_reason
        self._lane: DraftLane | None = None
        self._resting: DraftLane | None = None
        if provider is not None:
            self._lane = DraftLane(provider, drafter or provider.id, target)
        self._state: RowState | None = None
        self._samplers = RowSamplers()
        self._verifier = Verifier(target, self._samplers)
        self._flight: Flight | None = None
        self._firsts: dict[int, mx.array] = {}
        self._in_round = False
        self._closing = False
        self._dead: str | None = None
        self._rounds = 0

    # Membership.

    def admit(self, requests: Sequence[Request]) -> list[Row]:
        """Read the prompts of new requests and let their rows join, all or none.

        Args:
            requests: what to serve; must not be admitted elsewhere.

        Returns:
            The host rows, in the group's order.

        Raises:
            OptionError: a request does not fit this target; the group is as it was.
            GroupFailedError: the group failed before.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._check("admit")
        if not self.rows:
            self._state = None  # the next rows may be of another kind
        apart = why_apart(self.target, requests, self._state)
        lane = self._lane
        if lane is None and any(request.num_draft_tokens for request in requests):
            lane = self._resting
        if apart is not None:
            lane = None
        if lane is not None:
            lane.prompts.forget()
        newcomers = []
        admitted = time.perf_counter()
        with mx.stream(self._stream):
            for request in requests:
                newcomer = read_prompt(self.target, lane, request, self._step_size)
                newcomer.row.admitted = admitted
                if lane is not None:
                    lane.prompts.answer_for(newcomer.row, newcomer.checkpoint)
                newcomers.append(newcomer)
            if newcomers:
                self._join(newcomers, lane, apart)
        return [newcomer.row for newcomer in newcomers]

    def _join(
        self, newcomers: Sequence[Newcomer], lane: DraftLane | None, apart: str | None
    ) -> None:
        if self._flight is not None:
            # The live rows use its samples in the next round, and the new rows begin after it.
            self._commit_plain(self._flight)
        rows = [newcomer.row for newcomer in newcomers]
        live = len(self.rows)
        states = [newcomer.state for newcomer in newcomers]
        state = self._state or states[0]
        joining = states if self._state is not None else states[1:]
        samplers = [(row.request.sampling, row.seed) for row in rows]
        drafting: list[PendingChange] = []

        def enter() -> None:
            self._state = state
            self.rows.extend(rows)
            if lane is not None:
                self._lane, self._resting = lane, None
            elif apart is not None:
                self._rest()

        def prepare_drafts() -> PendingChange:
            checkpoints = [newcomer.checkpoint for newcomer in newcomers]
            if lane is not None:
                drafting.append(lane.prepare_append(rows, checkpoints, self._samplers, live))
            return drafting[-1] if drafting else Swap(lambda: None)

        try:
            commit_all(
                [
                    lambda: self._samplers.prepare_append(samplers),
                    lambda: state.prepare_append(joining),
                    lambda: Swap(enter),
                    prepare_drafts,
                ]
            )
        except BaseException as error:
            for change in drafting:
                change.discard()
            if self._samplers.row_count != live:  # interrupted between one commit and another
                self._fail(error)
            raise
        for offset, newcomer in enumerate(newcomers):
            self._describe(newcomer.row, apart)
            if newcomer.first is not None:
                self._firsts[live + offset] = newcomer.first

    def _describe(self, row: Row, apart: str | None) -> None:
        stats, lane = row.stats, self._lane or self._resting
        if lane is None or apart is not None:
            stats.reason = self._reason if lane is None else apart
        elif row.request.num_draft_tokens == 0:
            stats.reason = "num_draft_tokens is 0"
        else:
            stats.drafter = lane.name
            stats.num_draft_tokens = row.width

    def _rest(self) -> None:
        """Set the lane aside, after too many failures for good; a new request brings it back."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        lane.close()
        if lane.failures < MAX_FAILURES:
            self._resting = lane  # plain rounds cost nothing more
        else:
            self._reason = lane.reason

    # Rounds.

    def round(self) -> Round:
        """Draft, verify and accept for every row; deliver inside the returned ``with`` block.

        Raises:
            GroupFailedError: the target failed; rows keep their committed tokens.
            RoundOpenError: the round before was not left.
            ClosedError: after ``close``.
        """
        if self._in_round or self._dead is not None:
            self._check("round")
        if not self.rows:
            return Round((), (), lambda _: None)
        self._in_round = True
        try:
            with mx.stream(self._stream):
                if self._firsts:
                    firsts = [self._firsts.get(index) for index in range(len(self.rows))]
                    outcomes = self._verifier.firsts(self.rows, firsts)
                    return Round(self.rows, outcomes, lambda done: self._settle(done, None))
                flight, outcomes = self._fly()
                return Round(self.rows, outcomes, lambda done: self._settle(done, flight))
        except BaseException as error:
            self._fail(error)
            raise

    def _fly(self) -> tuple[Flight, list[RowOutcome | None]]:
        assert self._state is not None
        flight, self._flight = self._flight, None
        if flight is None:
            lane = self._drafting_lane()
            flight = self._verifier.launch(self.rows, self._state, lane)
        if self._may_begin_early(flight):
            self._commit_plain(flight)
            self._flight = self._verifier.launch(self.rows, self._state, None, after=flight)
        outcomes = self._verifier.land(self.rows, flight, self._lane)
        self._rounds += 1
        if self._rounds % 256 == 0:
            mx.clear_cache()
        return flight, outcomes

    def _may_begin_early(self, flight: Flight) -> bool:
        """Whether the next window can be submitted before this one is read."""
        assert self._state is not None
        if self._lane is not None or flight.width != 1 or not self._state.can_roll_back:
            return False
        if flight.row_count < len(self.rows):
            return False
        for row in self.rows:
            budget = row.budget
            if budget is None or budget > 1 or row.request.cache is not None:
                return True
        return False

    def _commit_plain(self, flight: Flight) -> None:
        """A plain window's only position is its pending token, which was emitted: keep it."""
        if flight.settled:
            return
        assert self._state is not None
        self._state.commit_round()
        for row in self.rows:
            row.processed += 1
        flight.settled = True

    def _drafting_lane(self) -> DraftLane | None:
        """The lane, if it drafts in the next window; it is set aside where no row wants drafts."""
        lane = self._lane
        if lane is None:
            return None
        lane.bring_in(self.rows, self._samplers)
        if lane.serves:
            return lane
        if any(row.width for row in self.rows):
            lane.close()  # who is in it would miss this window; it is tried again after it
        else:
            self._rest()
        return None

    # What follows a round.

    def _settle(self, done: Round, flight: Flight | None) -> None:
        """Commit what was delivered to target and drafter, then retire rows that ended."""
        try:
            if flight is None:
                self._firsts = {}
            elif not flight.settled:
                self._commit([done.kept(index) for index in range(len(self.rows))], flight)
            ended = False
            for row, outcome, delivered in zip(
                self.rows, done.outcomes, done.delivered, strict=True
            ):
                ended |= row.finish is not None
                if outcome is None:
                    continue
                row.stats.count_round(outcome.drafted, outcome.acceptance, delivered)
                if flight is None:
                    row.stats.rounds -= 1  # a target forward, but no verify window
            self._in_round = False
            if ended:
                with mx.stream(self._stream):
                    self._retire()
        except BaseException as error:
            self._fail(error)
            raise
        if self._closing:
            self.close()

    def _commit(self, kept: Sequence[int], flight: Flight) -> None:
        assert self._state is not None
        self._state.rollback([1 + count for count in kept])
        for row, count in zip(self.rows, kept, strict=True):
            row.processed += 1 + count
        if self._lane is not None:
            with mx.stream(self._stream):
                self._lane.commit(kept, flight.context)

    def _retire(self) -> None:
        """Give ended rows' caches back, then drop the rows everywhere."""
        keep = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(keep) == len(self.rows):
            return
        assert self._state is not None
        flight = self._flight
        if flight is not None and not flight.settled:
            # The early window holds the last token. An ended row keeps it where its cache is the
            # caller's, for which it is the final read.
            early = [int(row.finish is None or row.unread == 1) for row in self.rows]
            self._state.rollback(early)
            for row, count in zip(self.rows, early, strict=True):
                row.processed += count
            flight.settled = True
        for index, row in enumerate(self.rows):
            if row.finish is None:
                continue
            leave(self.target, self._state, self._lane, index, row)
        self._state.filter_rows(keep)
        self._samplers.filter_rows(keep)
        if self._lane is not None:
            self._lane.filter_rows(keep)
        if flight is not None:
            # Rows that joined since are behind those of the window.
            still = [index for index in keep if index < flight.row_count]
            self._flight = flight if still else None
            flight.take(still)
        self.rows = [self.rows[index] for index in keep]

    # Ends.

    def close(self) -> None:
        """End all rows and give their caches back; at any time, any number of times.

        Inside a round it takes effect when the round is left.

        Raises:
            GroupFailedError: the target failed while it completed a caller's cache.
        """
        if self._dead is not None:
            return
        for row in self.rows:
            row.end("cancelled")
        if self._in_round:
            self._closing = True
            return
        with mx.stream(self._stream):
            try:
                self._drop_flight()
                self._retire()
            except BaseException as error:
                self._fail(error)
                raise
        if self._lane is not None:
            self._lane.close()
        self._dead = "closed"

    def _drop_flight(self) -> None:
        """Take back a window that was begun early; its draws depend on seed and step alone."""
        state, self._flight = self._state, None
        if state is None or not state.open_width:
            return
        if state.can_roll_back or state.open_width > 1:
            state.rollback([0] * state.row_count)
            return
        # Its one position is the pending token, which was emitted and may as well be kept.
        state.commit_round()
        for row in self.rows:
            row.processed += 1

    def _fail(self, error: BaseException) -> None:
        """The group is invalid; its rows' committed tokens and the callers' caches are saved.

        Raises:
            GroupFailedError: from the error, unless that is an interrupt.
        """
        self._in_round = False
        self._dead = one_line(error)
        if self._lane is not None:
            self._lane.close()
        with mx.stream(self._stream):
            with suppress(Exception):
                self._drop_flight()
            for index, row in enumerate(self.rows):
                if row.request.cache is not None and self._state is not None:
                    with suppress(Exception):
                        give_back(self.target, self._state, index, row)
        if isinstance(error, Exception):
            raise GroupFailedError(
                f"the target failed ({self._dead}); committed tokens are kept, "
                "admit the requests to a new group"
            ) from error

    def _check(self, verb: str) -> None:
        if self._in_round:
            raise RoundOpenError(verb)
        if self._dead == "closed":
            raise ClosedError(verb)
        if self._dead is not None:
            raise GroupFailedError(
                f"the group failed before ({self._dead}); admit its requests to a new one"
            )
