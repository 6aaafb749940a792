"""Mutants of what the executor does about a pace, and for a drafter that rests."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["TEMPO_MUTANTS"]

BACKLOG = "specdec/verify/backlog.py"
LANE = "specdec/verify/lane.py"
LIVE = "specdec/verify/live.py"
TEMPO = "specdec/verify/tempo.py"
OF_CHOICES = "tests/test_pace_choices.py::"
OF_EXECUTOR = "tests/test_adaptive_in_executor.py::"
OF_MEMBERSHIP = "tests/test_pace_membership.py::"
OF_REQUESTS = "tests/test_adaptive_requests.py::"

TEMPO_MUTANTS = (
    Mutant(
        name="plan-outlives-a-join",
        file=TEMPO,
        old="self._next, self._left, self._applied = None, 0, None",
        new="self._next, self._applied = None, None",
        killed_by=OF_CHOICES + "test_a_plan_that_holds_for_long_ends_where_rows_join_or_leave",
        why="A plan for other rows holds on.",
    ),
    Mutant(
        name="new-rows-are-not-told-the-plan",
        file=TEMPO,
        old="self._next, self._left, self._applied = None, 0, None",
        new="self._next, self._left = None, 0",
        killed_by=OF_CHOICES + "test_a_row_that_joins_is_asked_for_what_the_plan_says",
        why="A row that joins asks for its own number.",
    ),
    Mutant(
        name="each-plain-round-is-told-as-all",
        file=TEMPO,
        old="seconds=seconds / rounds,",
        new="seconds=seconds,",
        killed_by=OF_CHOICES + "test_rounds_take_what_they_take_without_consumers_and_choices",
        why="Plain rounds look as slow as all of a rest together.",
    ),
    Mutant(
        name="choosing-counts-as-the-round",
        file=TEMPO,
        old=("        self._seconds -= aside\n"),
        new="",
        killed_by=OF_CHOICES + "test_rounds_take_what_they_take_without_consumers_and_choices",
        why="A measurement of seconds counts as a slow round.",
    ),
    Mutant(
        name="pauses-of-rows-without-drafts",
        file=TEMPO,
        old="row.stats.pauses += row.width > 0",
        new="row.stats.pauses += 1",
        killed_by=OF_REQUESTS + "test_a_row_that_wants_no_drafts_reports_no_pause",
        why="A row that wants no drafts reports pauses of the drafter.",
    ),
    Mutant(
        name="a-rest-takes-fixed-rows-their-drafts",
        file=TEMPO,
        old="rests = plan.rests and all(row.request.adaptive or not row.width for row in rows)",
        new="rests = plan.rests",
        killed_by=OF_EXECUTOR + "test_a_fixed_row_keeps_its_number_beside_adaptive_ones",
        why="The pace of some rows is that of all.",
    ),
    Mutant(
        name="window-of-fewer-rows-is-timed-for-all",
        file=TEMPO,
        old="asked_for is None or joined:",
        new="asked_for is None:",
        killed_by=OF_MEMBERSHIP
        + "test_a_window_that_was_begun_before_a_row_joined_is_not_timed_for_both",
        why="A window of one row tells what two take.",
    ),
    Mutant(
        name="ended-rows-drafts-count-as-wrong",
        file=TEMPO,
        old="[0 if o is None else n for n, o in zip(asked, outcomes, strict=True)]",
        new="list(asked)",
        killed_by=OF_CHOICES
        + "test_a_row_that_ended_before_its_window_was_read_says_nothing_about_its_drafts",
        why="Every row that ends says that its last drafts were wrong.",
    ),
    Mutant(
        name="what-waits-is-read-twice",
        file=BACKLOG,
        old="lengths = [before + kept - on for kept, on in zip(self._kept, held, strict=True)]",
        new="lengths = [before + kept for kept in self._kept]",
        killed_by=OF_MEMBERSHIP + "test_tokens_from_outside_are_read_once_after_rows_came_or_went",
        why="The drafter reads a position that is held back, and reads it again.",
    ),
    Mutant(
        name="drafter-reads-padding",
        file=BACKLOG,
        old="self._tokens.append(tokens[:, :1] if padded else tokens)",
        new="self._tokens.append(tokens)",
        killed_by=OF_CHOICES + "test_a_padded_plain_window_is_one_of_its_own_token",
        why="A drafter at rest reads what a plain window was padded with.",
    ),
    Mutant(
        name="rows-that-left-keep-their-counts",
        file=BACKLOG,
        old="self._kept = [self._kept[row] for row in keep]",
        new="self._kept = self._kept[: len(keep)]",
        killed_by=OF_CHOICES + "test_what_a_row_leaves_behind_takes_nothing_from_the_others",
        why="A row has the count of the one that stood in its place.",
    ),
    Mutant(
        name="windows-of-other-rows-wait-together",
        file=BACKLOG,
        old="(not self.ragged and len(self._kept) == rows)",
        new="not self.ragged",
        killed_by=OF_MEMBERSHIP
        + "test_rows_that_join_and_leave_while_the_drafter_rests_are_read_whole",
        why="Windows of two rows and of three are taken for one.",
    ),
    Mutant(
        name="padding-of-a-plain-window-is-kept",
        file=LIVE,
        old=(
            "        if flight.width == 1:\n"
            "            self.state.commit_round()\n"
            "        else:\n"
            "            self.state.rollback([1] * flight.row_count)\n"
        ),
        new=("        self.state.commit_round()\n"),
        killed_by=OF_CHOICES + "test_a_padded_plain_window_is_one_of_its_own_token",
        why="The target keeps what a plain window was padded with.",
    ),
    Mutant(
        name="ended-rows-follow-a-window-that-was-taken-back",
        file=LIVE,
        old=("            self._follow(flight, early)\n"),
        new=("            self._follow(flight, [1] * len(early))\n"),
        killed_by=OF_CHOICES + "test_what_a_row_leaves_behind_is_what_both_have_read",
        why="The drafter keeps the last token of an ended row, the target does not.",
    ),
    Mutant(
        name="drafter-keeps-what-is-taken-back",
        file=LIVE,
        old=("            self.drafting.lane.take_back([int(each) for each in early])\n"),
        new=("            pass\n"),
        killed_by=OF_MEMBERSHIP + "test_tokens_from_outside_are_read_once_after_rows_came_or_went",
        why="The drafter reads twice what the target gave back.",
    ),
    Mutant(
        name="recurrent-rows-are-padded",
        file=LIVE,
        old="if plan.width > 1 and not self.state.recurrent:",
        new="if plan.width > 1:",
        killed_by=OF_CHOICES + "test_a_plain_window_of_recurrent_rows_is_not_padded",
        why="Recurrent rows replay every plain window.",
    ),
    Mutant(
        name="a-capture-catches-up-for-all",
        file=LANE,
        old="self.catch_up(hold=[place for place in self._members.rows if place != row])",
        new="self.catch_up()",
        killed_by=OF_MEMBERSHIP + "test_tokens_from_outside_are_read_once_after_rows_came_or_went",
        why="What other rows may have to give back is read.",
    ),
    Mutant(
        name="a-join-catches-up-for-all",
        file=LANE,
        old="self.catch_up(hold=range(live))",
        new="self.catch_up()",
        killed_by=OF_MEMBERSHIP + "test_tokens_from_outside_are_read_once_after_rows_came_or_went",
        why="What the rows before it may have to give back is read.",
    ),
    Mutant(
        name="backlog-grows-without-end",
        file=LANE,
        old="if len(self._backlog) >= MOST or not self._backlog.continues(len(kept)):",
        new="if not self._backlog.continues(len(kept)):",
        killed_by=OF_EXECUTOR + "test_more_than_fits_into_the_backlog_is_read_on_the_way",
        why="Hidden states of all plain windows stay in memory.",
    ),
    Mutant(
        name="drafter-is-asked-before-it-has-caught-up",
        file=LANE,
        old=(
            "        members = self._members\n        self.catch_up()\n        self._let_leave()\n"
        ),
        new=("        members = self._members\n        self._let_leave()\n"),
        killed_by=OF_EXECUTOR
        + "test_a_drafter_that_rested_has_read_tokens_and_hidden_states_as_if_it_had_not",
        why="A drafter drafts behind a text with a hole.",
    ),
)
