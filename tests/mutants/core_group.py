"""Mutants of the group: commits, membership, early windows, caches that are given back."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["GROUP_MUTANTS"]

GROUP = "specdec/verify/group.py"
HANDOVER = "specdec/verify/handover.py"
LIVE = "specdec/verify/live.py"
ROW = "specdec/verify/row.py"
OF_EXECUTOR = "tests/test_executor.py::"
OF_FAULTS = "tests/test_executor_faults.py::"
OF_GAPS = "tests/test_core_mutants_gaps.py::"
OF_MEMBERSHIP = "tests/test_executor_membership.py::"
OF_PROMPT_CACHE = "tests/test_prompt_cache.py::"

GROUP_MUTANTS = (
    Mutant(
        name="rollback-by-the-batch-maximum",
        file=LIVE,
        old="self.state.rollback([1 + count for count in kept])",
        new="self.state.rollback([1 + max(kept)] * len(kept))",
        killed_by=OF_EXECUTOR + "test_host_drafts_never_change_a_token_and_state_stays_exact",
        why="The shorter rows of a batch keep drafts that they rejected.",
    ),
    Mutant(
        name="one-position-too-many-is-kept",
        file=LIVE,
        old="self.state.rollback([1 + count for count in kept])",
        new="self.state.rollback([min(2 + count, flight.width) for count in kept])",
        killed_by=OF_EXECUTOR + "test_a_drafter_that_is_always_wrong_has_nothing_accepted",
        why="The first rejected draft stays in the cache.",
    ),
    Mutant(
        name="drafter-is-told-before-delivery",
        file=GROUP,
        old="kept = [done.kept(index) for index in range(len(self.rows))]",
        new="kept = [o.acceptance.accepted if o else 0 for o in done.outcomes]",
        killed_by=OF_FAULTS + "test_a_consumer_that_leaves_in_a_burst_ends_its_row_alone",
        why="What was accepted is committed, also where the consumer stopped before its end.",
    ),
    Mutant(
        name="failed-join-leaves-the-samplers",
        file=LIVE,
        old="lambda: self.samplers.prepare_append(samplers),",
        new="lambda: self.samplers.prepare_append(samplers).commit() or Swap(lambda: None),",
        killed_by=OF_FAULTS + "test_rows_that_cannot_be_joined_leave_the_live_rows_as_they_were",
        why="Samplers take the new rows while the target's state may still refuse them.",
    ),
    Mutant(
        name="host-rows-join-before-the-state-is-prepared",
        file=LIVE,
        old="        samplers = [(row.request.sampling, row.seed) for row in rows]\n",
        new="        samplers = [(row.request.sampling, row.seed) for row in rows]\n"
        "        self.rows, rows = self.rows + rows, []\n",
        killed_by=OF_FAULTS + "test_rows_that_cannot_be_joined_leave_the_live_rows_as_they_were",
        why="The host has rows that nothing else has when the preparation fails.",
    ),
    Mutant(
        name="samplers-do-not-leave-with-their-rows",
        file=LIVE,
        old="        self.samplers.filter_rows(keep)\n",
        new="",
        killed_by=OF_MEMBERSHIP
        + "test_a_sampler_with_a_state_is_called_once_a_position_whoever_joins_and_leaves",
        why="After a row has left, the others draw with their neighbours' seeds.",
    ),
    Mutant(
        name="early-window-behind-the-last-token",
        file=LIVE,
        old="row.budget is None or row.budget > 1 or row.request.cache is not None",
        new="row.budget is None or row.budget >= 1",
        killed_by=OF_GAPS + "test_a_request_without_a_cache_runs_the_model_once_a_token",
        why="A forward is begun for a token that the budget does not have.",
    ),
    Mutant(
        name="early-window-without-the-new-rows",
        file=LIVE,
        old="not self.state.can_roll_back or flight.row_count < len(self.rows):",
        new="not self.state.can_roll_back:",
        killed_by=OF_MEMBERSHIP + "test_a_plain_window_that_was_begun_early_is_used_when_rows_join",
        why="The next window is built on the samples of a window that the new rows are not in.",
    ),
    Mutant(
        name="early-window-of-an-ended-row-is-not-taken-back",
        file=LIVE,
        old="early = [int(row.finish is None or row.unread == 1) for row in self.rows]",
        new="early = [1 for row in self.rows]",
        killed_by="tests/test_core_mutants_gaps_early.py::"
        "test_a_cancelled_row_leaves_no_early_position_in_its_callers_cache",
        why="A row that ended keeps a position that its output does not have.",
    ),
    Mutant(
        name="early-window-keeps-all-rows",
        file=LIVE,
        old="flight.take(still)",
        new="flight.take(list(range(len(still))))",
        killed_by=OF_MEMBERSHIP + "test_rows_leave_in_any_order",
        why="After a row has left, the others take the samples of their neighbours.",
    ),
    Mutant(
        name="close-does-not-give-caches-back",
        file=HANDOVER,
        old="    if row.request.cache is not None:\n        give_back(target, state, index, row)\n",
        new='    if row.request.cache is not None and row.finish != "cancelled":\n'
        "        give_back(target, state, index, row)\n",
        killed_by=OF_PROMPT_CACHE + "test_the_cache_covers_the_prompt_and_every_emitted_token"
        "[closed at the first token-plain]",
        why="A caller that closes the generator is left with the cache of before the request.",
    ),
    Mutant(
        name="failed-group-does-not-give-caches-back",
        file=GROUP,
        old="                if row.request.cache is not None and live.state is not None:\n",
        new="                if row.finish and row.request.cache is not None and live.state:\n",
        killed_by=OF_FAULTS
        + "test_a_target_that_fails_leaves_rows_to_be_admitted_again_with_the_same_text"
        "[True-1-plain]",
        why="Rows that were running when the target failed lose their caches.",
    ),
    Mutant(
        name="end-token-is-not-read-into-the-cache",
        file=HANDOVER,
        old="    for token in unread:\n",
        new="    for token in [row.pending] * len(unread):\n",
        killed_by=OF_PROMPT_CACHE
        + "test_the_cache_covers_the_prompt_and_every_emitted_token[end token first-ngram]",
        why="The caller's cache ends in the last content token twice, and not in the end token.",
    ),
    Mutant(
        name="last-token-is-not-read-into-the-cache",
        file=ROW,
        old="len(self.tokens) + (self.end_token is not None) - self.processed",
        new="len(self.tokens) - 1 + (self.end_token is not None) - self.processed",
        killed_by=OF_PROMPT_CACHE
        + "test_the_cache_covers_the_prompt_and_every_emitted_token[length-plain]",
        why="What was processed is counted one too high, and prompt_cache lacks the last token.",
    ),
    Mutant(
        name="interrupted-final-read-stays-in-the-cache",
        file=HANDOVER,
        old="            alone.rollback([0])\n",
        new="            alone.commit_round()\n",
        killed_by=OF_GAPS
        + "test_an_interrupt_in_the_final_read_leaves_no_token_twice_in_the_state",
        why="Whoever gives the cache back again reads the last token a second time.",
    ),
    Mutant(
        name="publishers-error-hides-the-rows-own",
        file=HANDOVER,
        old="row.error = row.error or error",
        new="row.error = error",
        killed_by=OF_GAPS + "test_a_publisher_that_raises_does_not_hide_the_rows_own_error",
        why="Why a row ended is lost when its publisher raises as well.",
    ),
    Mutant(
        name="changes-commit-one-by-one",
        file="specdec/contract/changes.py",
        old="            prepared.append(build())\n",
        new="            prepared.append(build())\n            prepared[-1].commit()\n",
        killed_by=OF_FAULTS + "test_rows_that_cannot_be_joined_leave_the_live_rows_as_they_were",
        why="Each change is committed as soon as it is prepared.",
    ),
)
