"""One draft group behind a wall: whatever a drafter does, the round goes on.

Exceptions of the drafter never leave this module. What it raises over one row's prompt or
checkpoint counts against that row, which stays outside the draft group, and its members do not
notice. What it raises in a verb that serves all members counts against the lane, and closes the
group. A drafter that needs tokens alone then reads the histories of the rows outside that want
drafts, a few times; others go on without it, with the reason in their statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import mlx.core as mx

from specdec.contract import (
    ContextKind,
    SupportsConsume,
    SupportsLookup,
    SupportsStandDown,
    Swap,
)
from specdec.drafting.checks import row_reasons
from specdec.errors import one_line
from specdec.verify.asking import DraftRounds
from specdec.verify.backlog import MOST, Backlog
from specdec.verify.drafts import Drafts
from specdec.verify.members import Joining, Members, MemberSampling
from specdec.verify.prompts import DraftPrompts
from specdec.verify.proposals import draft_vocabulary, known_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from specdec.contract import (
        DraftProvider,
        DraftRowGroup,
        PendingChange,
        RowCheckpoint,
        TargetView,
    )
    from specdec.sampling import RowSamplers
    from specdec.state import RowState
    from specdec.verify.row import Row

__all__ = ["FORGIVEN_AFTER", "MAX_FAILURES", "MAX_FAULTS", "DraftLane"]

Result = TypeVar("Result")

# Exceptions after which the drafter is let go: those that came from verbs of all members, for
# everybody; those that one row has met, its own prompt's and checkpoint's included, for that row.
MAX_FAILURES = 3
FORGIVEN_AFTER = 64  # rounds in a row without an exception, after which the lane's are forgotten
MAX_FAULTS = 3  # rounds with an invalid proposal after which a row goes on without it


class DraftLane:
    """The draft side of one verify group.

    Args:
        provider: the drafter; outlives the lane.
        name: its kind, for the statistics.
        target: the bound target.

    Attributes:
        failures: exceptions of the verbs that serve all members; :data:`MAX_FAILURES` at most.
        last_error: the last of them.
        taps: the layers that the drafter reads.
        context: the hidden states that it reads.

    Raises:
        TargetLacksError: the drafter taps layers that the target cannot capture.
        ContractError: its draft vocabulary is none of the target. What it raises when it is asked
            for it is raised as it is.
    """

    def __init__(self, provider: DraftProvider, name: str, target: TargetView) -> None:
        self.name = name
        self._grouped = provider.grouped
        self._members = Members()
        self._sampling: MemberSampling | None = None
        self._ids = draft_vocabulary(self._grouped, target)
        self._rounds = DraftRounds(self._members, self._grouped, target, self._ids)
        self.failures = 0
        self._clean = 0  # rounds since the last exception
        self._leaving: list[Row] = []  # they stood down, and leave between rounds
        self._backlog = Backlog()
        self.last_error: str | None = None
        self.prompts = DraftPrompts(self._grouped, name, target)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers that the drafter reads."""
        return self.prompts.taps

    @property
    def context(self) -> ContextKind:
        """The hidden states that it reads."""
        return self.prompts.context

    @property
    def is_open(self) -> bool:
        """Whether there is a group that drafts."""
        return self._members.group is not None

    @property
    def serves(self) -> bool:
        """Whether the next window is one of drafts, or one that the drafter must not miss."""
        if self.context is not ContextKind.NONE:
            return bool(self._members.rows)
        return any(row.width for row in self._members.rows.values())

    @property
    def reason(self) -> str:
        """Why it failed, for rows that go on without it."""
        return self._failed(self.last_error)

    # Membership.

    def prepare_append(
        self,
        rows: Sequence[Row],
        checkpoints: Sequence[RowCheckpoint | None],
        sampling: RowSamplers,
        live: int,
    ) -> PendingChange:
        """Rows that join; the first members open the draft group.

        A row whose prompt could not be read, or whose checkpoint is refused, joins outside the
        draft group. Nothing is raised, and the members are as they were.

        Args:
            rows: the new rows.
            checkpoints: one per new row; ``None`` where its prompt could not be read.
            sampling: the group's samplers; they hold the new rows by the time of ``commit``.
            live: rows before them.
        """
        joining = [
            Joining(live + place, row, checkpoint)
            for place, (row, checkpoint) in enumerate(zip(rows, checkpoints, strict=True))
            if checkpoint is not None
        ]
        self.catch_up(hold=range(live))
        return self._members.prepare(joining, self._build(sampling), self._refuse)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Retire and reorder rows, members or not."""
        self._backlog.filter(keep)
        self._try(lambda: self._members.filter_rows(keep))

    def capture(self, row: int) -> RowCheckpoint | None:
        """A row's checkpoint between rounds; ``None`` for no member, or after a failure."""
        self.catch_up(hold=[place for place in self._members.rows if place != row])
        return self._try(lambda: self._members.capture(row))

    def bring_in(self, rows: Sequence[Row], sampling: RowSamplers) -> None:
        """Let the rows that want drafts into the draft group, opening it again if needed.

        A drafter that needs tokens alone reads their histories, once a round. Rows that it cannot
        or will not take stand down.

        Args:
            rows: all rows, between rounds.
            sampling: the group's samplers.
        """
        members = self._members
        self.catch_up()
        self._let_leave()
        if len(members.rows) == len(rows):
            return
        outside = [
            (index, row)
            for index, row in enumerate(rows)
            if row.width and index not in members.rows
        ]
        joining = []
        for index, row in outside:
            checkpoint = self._read_again(row)
            if checkpoint is not None:
                joining.append(Joining(index, row, checkpoint))
        members.prepare(joining, self._build(sampling), self._refuse).commit()
        self._try(members.put_in_order)
        for index, row in outside:
            if index not in members.rows and not self._may_enter(row):
                row.width = 0
                said = row.stats.last_draft_error or self.last_error
                said = said or "it cannot read the row again without the target"
                row.stats.reason = row.stats.reason or self._failed(said)

    def _let_leave(self) -> None:
        """Let rows that stood down out of the draft group."""
        leaving, self._leaving = {id(row) for row in self._leaving}, []
        gone = [place for place, row in self._members.rows.items() if id(row) in leaving]
        self._try(lambda: self._members.remove(gone))

    def _may_enter(self, row: Row) -> bool:
        failures = max(self.failures, row.stats.draft_errors)
        return self.prompts.need_tokens_alone and failures < MAX_FAILURES

    def _read_again(self, row: Row) -> RowCheckpoint | None:
        """A checkpoint from a row's history, all but its pending token."""
        if not self._may_enter(row):
            return None
        prompt, checkpoint = self.prompts.open(), None
        history = row.known[:-1]
        try:
            if self._may_enter(row):  # it may have said only now what it needs
                if history:
                    prompt.read(mx.array([history], mx.int32), None)
                checkpoint = prompt.hand_over()
        finally:
            prompt.close()
        prompt.answer_for(row, checkpoint)
        return checkpoint

    def _build(self, sampling: RowSamplers) -> Callable[[Sequence[Joining]], PendingChange]:
        """How the drafter is asked to take rows; that raises what it raises."""
        members = self._members
        self._sampling = seen = self._sampling or MemberSampling(sampling, self._ids)

        def build(joining: Sequence[Joining]) -> PendingChange:
            checkpoints = [each.checkpoint for each in joining]
            if members.group is None:
                with seen.entered_by(joining):
                    opened = self._grouped.open(
                        target=self._rounds.view,
                        sampling=seen,
                        checkpoints=checkpoints,
                        constraints=None,
                    )
                commit, discard = (lambda: self._take(opened)), opened.close
            else:
                change = members.group.prepare_append(checkpoints)
                commit, discard = change.commit, change.discard
            return Swap(lambda: self._enter(joining, commit), lambda: self._give_up(discard))

        return build

    def _enter(self, joining: Sequence[Joining], commit: Callable[[], None]) -> None:
        self._members.append(joining)
        for each in joining:
            each.row.stats.reason = None
        self._try(commit)

    def _take(self, group: DraftRowGroup) -> None:
        self._members.group = group

    # Rest.

    @property
    def can_rest(self) -> bool:
        """Whether the drafter can miss plain windows, and read them later."""
        return bool(self._members.rows) and self._members.offers(SupportsConsume)

    def follow(self, tokens: mx.array, context: mx.array | None, kept: Sequence[int]) -> None:
        """A plain window was committed that the drafter was not asked for.

        Args:
            tokens: ``[B, W]`` ids of the window.
            context: ``[B, W, ·]`` hidden states there, or ``None``.
            kept: B ints, how many positions each row keeps: more than one where drafts that a
                constraint forced were accepted.
        """
        if not self.is_open:
            return
        if (most := max(kept)) > 1:
            self.catch_up()
            states = None if context is None else context[:, :most]
            self._try(lambda: self._members.follow(tokens[:, :most], states, kept))
            return
        if len(self._backlog) >= MOST or not self._backlog.continues(len(kept)):
            self.catch_up()
        self._backlog.add(tokens, context, kept)

    def take_back(self, counts: Sequence[int]) -> None:
        """Rows give back the last position that they followed: B ints, 0 or 1."""
        self._backlog.shorten(counts)

    def look_up(self, depth: int) -> list[tuple[Row, int, list[int]]]:
        """What a drafter on the host would propose now, for rows that want drafts; not of others.

        Args:
            depth: drafts to ask for at most.

        Returns:
            Rows, with how many drafts each was asked for, and those drafts.
        """
        if not self._members.rows or not self._members.offers(SupportsLookup):
            return []
        self.catch_up(settled=True)
        return self._try(lambda: self._rounds.look_up(depth)) or []

    def catch_up(self, *, hold: Collection[int] = (), settled: bool = False) -> None:
        """Let the drafter read what it has missed.

        Args:
            hold: rows that may have to give their last position back: it waits on.
            settled: whether the rows' ``processed`` tells what the target has read.
        """
        if self._backlog:
            self._backlog.widen(1 + max(self._members.rows, default=-1))
            missed = self._backlog.take(hold)
            known = self._on_host(missed[2]) if settled and missed[1] is None else None
            if known is not None:
                self._try(lambda: self._members.consume(known, None))
            else:
                self._try(lambda: self._members.follow(*missed))

    def _on_host(self, lengths: Sequence[int]) -> dict[int, list[int]] | None:
        """The ids that the members have missed, as the host knows them; ``None`` where it does not.

        Reading them from the device would wait for the window that is on its way.
        """
        chunks = {}
        for place, row in self._members.rows.items():
            end = row.processed - self._backlog.waits(place)
            chunks[place] = row.tokens[end - lengths[place] : end]
            if end > len(row.tokens):
                return None
        return chunks

    # Rounds.

    def takes_tokens(self, place: int) -> bool:
        """Whether the drafter can follow where somebody else chooses a row's tokens."""
        return self._rounds.takes_tokens(place)

    def propose(
        self,
        rows: Sequence[Row],
        vocab_size: int,
        *,
        state: RowState,
        on_device: bool,
        forced: Mapping[int, Sequence[int]],
        rejecting: bool,
    ) -> Drafts:
        """Open a round; what comes back is valid, and empty where nothing was.

        Args:
            rows: the host rows, in group order.
            vocab_size: ids must be below it.
            state: the target's rows, between rounds.
            on_device: whether drafts may stay on the device: nothing of the requests needs them
                on the host.
            forced: by row, what stands in front of its drafts.
            rejecting: whether a row asks from which distribution the drafts were drawn.
        """
        forced = known_ids(forced, vocab_size)
        nothing = Drafts([()] * len(rows), [0] * len(rows)).behind(forced, vocab_size)
        group = self._members.group
        if group is None or not self._members.rows:
            return nothing
        places = self._bind_draws(rows)
        try:
            with self._rounds.lending(state, places):
                proposed, faults = self._rounds.propose(
                    rows,
                    group,
                    context=self.context,
                    on_device=on_device,
                    forced=forced,
                    rejecting=rejecting,
                )
            self._stand_down(group)
        except Exception as error:
            self.fail(error)
            return nothing
        if faults:
            self.blame(list(self._members.rows.values()), faults)
        return proposed

    def _stand_down(self, group: DraftRowGroup) -> None:
        """End drafting for the rows that the drafter says it drafts for no more."""
        if not self._members.offers(SupportsStandDown):
            return
        said = cast("SupportsStandDown", group).stood_down
        rows = self._members.rows.values()
        for row, reason in zip(rows, row_reasons(said, len(rows)), strict=True):
            if reason is not None and row.width:
                row.width = 0
                row.stats.reason = f"drafter {self.name} stood down: {one_line(reason)}"
                self._leaving.append(row)

    def _bind_draws(self, rows: Sequence[Row]) -> list[int] | None:
        assert self._sampling is not None
        places = self._members.places(len(rows))
        self._sampling.bind(places, len(rows))
        return places

    def commit(self, accepted: Sequence[int], context: mx.array | None) -> None:
        """End the round that ``propose`` opened.

        Args:
            accepted: B ints, those of rows outside the draft group and forced drafts included.
            context: ``[B, W, ·]`` of the window, or ``None``.
        """
        failures = self.failures
        self._try(lambda: self._rounds.commit(accepted, context))
        self._clean = self._clean + 1 if self.failures == failures else 0
        if self._clean >= FORGIVEN_AFTER:
            self.failures = 0

    def preview(self, rows: Sequence[Row], state: RowState) -> list[list[int]] | None:
        """What the drafter would propose now; ``None`` where it cannot say. Changes no state.

        Args:
            rows: all rows, between rounds.
            state: the target's.
        """
        if not self.is_open:
            return None
        self.catch_up()
        with self._rounds.lending(state, self._bind_draws(rows)):
            return self._try(lambda: self._rounds.preview(len(rows)))

    def consume(self, chunks: Mapping[int, Sequence[int]], context: mx.array | None) -> None:
        """Let the drafter read tokens that somebody else chose; one that cannot loses those rows.

        Args:
            chunks: what each row's target has read, its pending token first.
            context: ``[B, L, ·]`` hidden states there, or ``None``.
        """
        self.catch_up()
        if self._members.offers(SupportsConsume):
            self._try(lambda: self._members.consume(chunks, context))
        elif self.is_open:
            self.last_error = "it cannot take tokens that it did not draft"
            gone = [place for place, chunk in chunks.items() if chunk]
            self._try(lambda: self._members.remove(gone))

    def blame(self, rows: Sequence[Row], faults: Sequence[str | None]) -> None:
        """Count invalid proposals; a row stands down after :data:`MAX_FAULTS` of them."""
        for row, fault in zip(rows, faults, strict=True):
            if fault is None:
                continue
            row.faults += 1
            row.stats.invalid_drafts += 1
            row.stats.last_draft_error = fault
            if row.faults >= MAX_FAULTS and row.width:
                row.width = 0
                row.stats.reason = f"drafter {self.name} stood down: {fault}"

    def fail(self, error: Exception) -> None:
        """Count an exception of a verb that serves all members, and close their group."""
        self._drop()
        self._note(error)
        self._members.forget()

    def close(self) -> None:
        """Close the group; the provider stays."""
        self._drop()
        self._members.rows = {}

    def _drop(self) -> None:
        self._backlog.clear()
        group, self._members.group = self._members.group, None
        if group is not None:
            self._give_up(group.close)

    def _try(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception as error:
            self.fail(error)
            return None

    def _give_up(self, call: Callable[[], None]) -> None:
        """Close or discard. Raising here is counted, but leaves nothing to give up."""
        try:
            call()
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Count against the lane, and show it to the rows that it serves."""
        self.failures += 1
        self.last_error = one_line(error)
        self.prompts.given_up = self.failures >= MAX_FAILURES
        for row in self._members.rows.values():
            row.stats.count_draft_error(error)

    def _refuse(self, joining: Sequence[Joining], error: Exception) -> None:
        """Count against rows that stay outside; a row that gets in after all forgets the reason."""
        for each in joining:
            each.row.stats.count_draft_error(error)
            each.row.stats.reason = self._failed(one_line(error))

    def _failed(self, error: str | None) -> str:
        return f"drafter {self.name} failed: {error}"
