"""Rows that decode together on one target with one drafter: the verify executor.

The lane that every request takes; a single request is a group of one row. ``docs/how-a-round-
works.md`` follows a row through it. Here is decided when each verb may be called, and what a
failure means; the rows themselves are in ``verify/live.py``.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.errors import (
    ClosedError,
    ContractError,
    GroupFailedError,
    OptionError,
    RoundOpenError,
    one_line,
)
from specdec.verify.drafting import DraftSide
from specdec.verify.external import check_external
from specdec.verify.handover import give_back
from specdec.verify.lane import DraftLane
from specdec.verify.live import LiveRows
from specdec.verify.prefill import begin_reading, check_alike, why_apart
from specdec.verify.round import Round
from specdec.verify.row import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.contract import DraftProvider
    from specdec.targets import Target
    from specdec.verify.landing import Landing
    from specdec.verify.pacing import Pace
    from specdec.verify.prefill import Reading
    from specdec.verify.request import Request

__all__ = ["VerifyGroup"]


class VerifyGroup:
    """A batch of rows: admission, rounds, retirement.

    Every verb but ``round``'s block belongs between rounds, and raises ``RoundOpenError`` inside
    one, ``ClosedError`` after ``close``, and ``GroupFailedError`` after a failure of the target.

    Args:
        target: the bound target.
        provider: the drafter, or ``None`` to decode plainly. It outlives the group.
        drafter: the drafter's kind, for the statistics.
        reason: why there is no drafter, for the statistics.
        prefill_step_size: prompt tokens per chunk.
        stream: the MLX stream to compute on.
        pace: chooses how many drafts a round asks for, of requests that are ``adaptive``.

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
        pace: Pace | None = None,
    ) -> None:
        self.target = target
        self._stream = stream if stream is not None else mx.default_stream(mx.default_device())
        self._step_size = prefill_step_size
        if provider is not None and target.no_speculation_reason is not None:
            provider, reason = None, target.no_speculation_reason
        lane = None if provider is None else DraftLane(provider, drafter or provider.id, target)
        self._live = LiveRows(target, DraftSide(lane, reason), pace)
        self._in_round = False
        self._closing = False
        self._dead: str | None = None

    @property
    def rows(self) -> list[Row]:
        """The rows that decode, in order."""
        return self._live.rows

    # Membership.

    def admit(self, requests: Sequence[Request]) -> list[Row]:
        """Read the prompts of new requests and let their rows join, all or none.

        Args:
            requests: what to serve; must not be admitted elsewhere.

        Returns:
            The host rows, in the group's order.

        Raises:
            OptionError: a request does not fit this target; the group is as it was.
        """
        self._check("admit")
        caches = [id(request.cache) for request in requests if request.cache is not None]
        caches += [id(row.request.cache) for row in self.rows if row.request.cache is not None]
        if len(set(caches)) < len(caches):
            raise OptionError("one prompt_cache was given to two requests; give each its own")
        apart = [why_apart(self.target, request) for request in requests]
        check_alike([*apart, *self._live.kind])
        readings: list[Reading] = []
        try:
            for request in requests:
                readings.append(self.read(request))
                with mx.stream(self._stream):
                    while not readings[-1].done:
                        readings[-1].step()
            return self.join(readings)
        except BaseException:
            for reading in readings:
                reading.close()
            raise

    def read(self, request: Request | Row, *, cuts: Sequence[int] = ()) -> Reading:
        """Begin to read a request's prompt; its row joins later.

        Args:
            request: what to serve, or a row of a group that failed, which goes on where it was.
            cuts: numbers of tokens at which a chunk ends.

        Returns:
            The reading: call ``step`` on it, between rounds, until it is done, and then ``join``.

        Raises:
            OptionError: the request does not fit this target.
        """
        self._check("read")
        if isinstance(request, Row):
            row = request
            row.begin_again()
        else:
            row = Row.of(request, self.target.vocab_size)
        apart = why_apart(self.target, row.request)
        lane = self._live.drafting.for_prompt(row.request.num_draft_tokens, apart)
        with mx.stream(self._stream):
            return begin_reading(
                self.target, lane, row, step_size=self._step_size, apart=apart, cuts=cuts
            )

    def join(self, readings: Sequence[Reading]) -> list[Row]:
        """Let rows join whose prompts are read, all or none.

        Args:
            readings: begun by this group's ``read``, and done.

        Returns:
            Their rows, in the group's order.

        Raises:
            OptionError: rows that can draft would share a group with rows that cannot.
            ContractError: a reading is not done.
        """
        self._check("join")
        if not all(reading.done for reading in readings):
            raise ContractError("join() was given a prompt that is not read; call step() first")
        if len({id(reading) for reading in readings}) < len(readings):
            raise ContractError("join() was given a reading twice; give each once")
        check_alike([*(reading.apart for reading in readings), *self._live.kind])
        live = len(self.rows)
        if readings:
            with self._or_fail():
                self._live.land_early()
        for reading in readings:
            if reading.draft is not None:
                reading.draft.answer_for(reading.row, reading.checkpoint)
        try:
            if readings:
                with mx.stream(self._stream):
                    self._live.join(readings)
        except BaseException as error:
            if self._live.samplers.row_count != live:  # interrupted between two commits
                self._fail(error)
            raise
        return [reading.row for reading in readings]

    def remove(self, rows: Sequence[Row]) -> None:
        """End rows as cancelled and let them go; what has ended already is gone.

        Raises:
            GroupFailedError: the target failed while it completed a caller's cache.
        """
        self._check("remove")
        for row in rows:
            row.end("cancelled")
        with self._or_fail():
            self._live.retire()

    def extract(self, row: Row) -> tuple[list[Any], tuple[int, ...]]:
        """A copy of a row's target caches, and the tokens that they cover.

        Args:
            row: one of ``rows``.

        Returns:
            mlx-lm caches, and what they have read of prompt and output.

        Raises:
            ContractError: the group has no such row.
        """
        self._check("extract")
        places = [index for index, each in enumerate(self.rows) if each is row]
        if not places:
            raise ContractError("extract() was given a row that the group does not have")
        with self._or_fail():
            return self._live.extract(places[0])

    # Tokens from outside.

    def preview(self) -> list[list[int]] | None:
        """What the drafter would propose now, with nothing changed.

        Returns:
            One draft a row, empty for rows without the drafter; ``None`` where there is no
            drafter that can tell.
        """
        self._check("preview")
        with self._or_fail():
            return self._live.preview()

    def consume(self, tokens: Sequence[Sequence[int]]) -> None:
        """Take tokens that somebody else chose as the rows' own output.

        The target reads them, and a drafter that can follow does; the last one is pending
        afterwards. They count against the budget, and end a row where its stop rules or its
        constraint say so; what follows there is left out.

        Args:
            tokens: ids per row, which may be none.

        Raises:
            OptionError: ids that are none, end a row, exceed a budget or break a constraint, or
                rows that cannot take several positions at once; nothing changed.
        """
        self._check("consume")
        live = self._live
        checked = check_external(self.rows, tokens, self.target, live.state, live.undelivered)
        with self._or_fail():
            if any(checked):
                live.consume(checked, step_size=self._step_size)
                live.retire()

    # Rounds.

    def round(self, *, ahead: bool = False) -> Round:
        """Draft, verify and accept for every row; deliver inside the returned ``with`` block.

        Args:
            ahead: whether target and drafter may go on before the tokens are delivered, so that
                the device computes the next round while consumers run. Where nothing stands in the
                way, the next window is submitted before this returns. A row that is then stopped
                before its last token leaves no state behind (``publish``, prefix cache), and
                between rounds ``preview`` knows nothing, ``consume`` refuses, and ``extract``
                gives a row with tokens that the next round delivers.

        Raises:
            GroupFailedError: the target failed; rows keep their committed tokens. Where it failed
                ahead, this is raised when the block is left.
            RoundOpenError: the round before was not left.
        """
        if self._in_round or self._dead is not None:
            self._check("round")
        if not self.rows:
            return Round((), (), lambda _: None)
        self._in_round = True
        with self._or_fail():
            if self._live.firsts:
                outcomes = self._live.draw_firsts()
                return Round(self.rows, outcomes, lambda done: self._settle(done, None))
            landing = self._live.fly(ahead=ahead)
            return Round(self.rows, landing.outcomes, lambda done: self._settle(done, landing))

    def _settle(self, done: Round, landing: Landing | None) -> None:
        """Commit what was delivered to target and drafter, then retire rows that ended."""
        live = self._live
        with self._or_fail():
            # What was delivered counts, whatever becomes of the commit.
            kept = [done.kept(index) for index in range(len(self.rows))]
            ended = False
            for row, outcome, delivered in zip(
                self.rows, done.outcomes, done.delivered, strict=True
            ):
                ended |= row.finish is not None
                if outcome is None:
                    continue
                row.stats.count_round(
                    outcome.drafted, outcome.acceptance, delivered, outcome.forced
                )
                if landing is None:
                    row.stats.rounds -= 1  # a target forward, but no verify window
            if landing is None:
                live.firsts = {}
            else:
                live.settle(landing, kept)
            self._in_round = False
            if ended:
                live.retire()
        if self._closing:
            self.close()

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
        with self._or_fail():
            self._live.end()
        self._live.drafting.close()
        self._dead = "closed"

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Compute on the group's stream; what is raised there makes the group invalid."""
        try:
            with mx.stream(self._stream):
                yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """The group is invalid; its rows' committed tokens and the callers' caches are saved.

        Raises:
            GroupFailedError: from the error, unless that is an interrupt.
        """
        self._in_round = False
        self._dead = one_line(error)
        live = self._live
        live.drafting.close()
        with mx.stream(self._stream):
            with suppress(Exception):
                live.drop_flight()
            for index, row in enumerate(self.rows):
                if row.request.cache is not None and live.state is not None:
                    with suppress(Exception):
                        give_back(self.target, live.state, index, row)
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
