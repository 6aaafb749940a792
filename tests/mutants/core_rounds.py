"""Mutants of one round: the accept walk, delivery, statistics, proposals."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["ROUND_MUTANTS"]

ACCEPT = "specdec/verify/accept.py"
ROUND = "specdec/verify/round.py"
STATS = "specdec/verify/stats.py"
PROPOSALS = "specdec/verify/proposals.py"
OF_ACCEPT = "tests/test_accept.py::"
OF_EXECUTOR = "tests/test_executor.py::"
OF_FAULTS = "tests/test_executor_faults.py::"
OF_GAPS = "tests/test_core_mutants_gaps.py::"
OF_PROPOSALS = "tests/test_proposals.py::"
OF_STATS = "tests/test_stats.py::"

ROUND_MUTANTS = (
    Mutant(
        name="everything-is-accepted",
        file=ACCEPT,
        old="matches = position < len(draft) and token == draft[position]",
        new="matches = position < len(draft)",
        killed_by=OF_ACCEPT + "test_a_drafter_that_is_always_wrong_has_nothing_accepted",
        why="Drafts are counted and never compared with what the target drew.",
    ),
    Mutant(
        name="first-draft-is-not-compared",
        file=ACCEPT,
        old="matches = position < len(draft) and token == draft[position]",
        new="matches = position < len(draft) and (position == 0 or token == draft[position])",
        killed_by=OF_ACCEPT + "test_a_drafter_that_is_always_wrong_has_nothing_accepted",
        why="The comparison begins at the second draft.",
    ),
    Mutant(
        name="end-token-is-content",
        file=ACCEPT,
        old="""        if token in end_tokens:
            return Acceptance(accepted, tuple(tokens), token, "stop")
        tokens.append(token)
""",
        new="""        tokens.append(token)
        if token in end_tokens:
            return Acceptance(accepted, tuple(tokens), token, "stop")
""",
        killed_by=OF_ACCEPT + "test_an_end_token_ends_the_row_wherever_it_falls",
        why="The token is emitted before anybody looks whether it is an end token.",
    ),
    Mutant(
        name="end-token-is-looked-for-in-the-last-place",
        file=ACCEPT,
        old="        if token in end_tokens:\n",
        new="        if token in end_tokens and not matches:\n",
        killed_by=OF_ACCEPT + "test_an_end_token_ends_the_row_wherever_it_falls",
        why="A whole block is taken, and only its last token ends the row (transformers #47912).",
    ),
    Mutant(
        name="budget-wins-over-the-end-token",
        file=ACCEPT,
        old="        if token in end_tokens:\n",
        new="        if token in end_tokens and (budget is None or len(tokens) + 1 < budget):\n",
        killed_by=OF_ACCEPT + "test_an_end_token_wins_over_a_budget_of_one",
        why="An end token on the last place of the budget is emitted, with finish reason length.",
    ),
    Mutant(
        name="correction-counts-as-accepted",
        file=ACCEPT,
        old="        accepted += matches\n",
        new="        accepted += position < len(draft)\n",
        killed_by=OF_ACCEPT + "test_an_end_token_as_the_correction_is_no_accepted_draft",
        why="Positions that were looked at are counted, not drafts that matched.",
    ),
    Mutant(
        name="all-samples-are-drawn-at-once",
        file=ACCEPT,
        old="for position, token in enumerate(samples):",
        new="for position, token in enumerate(list(samples)):",
        killed_by=OF_ACCEPT + "test_a_walk_gives_what_plain_decoding_gives_and_reads_no_further",
        why="A sampler with a state is called for positions that are never reached.",
    ),
    Mutant(
        name="delivered-backwards",
        file=ROUND,
        old="token = acceptance.tokens[position]",
        new="token = acceptance.tokens[last - position]",
        killed_by=OF_EXECUTOR
        + "test_emissions_say_what_was_drafted_and_carry_the_targets_log_probabilities",
        why="The tokens of a burst are handed out from its end.",
    ),
    Mutant(
        name="delivered-is-counted-after-the-consumer",
        file=ROUND,
        old="""            self.delivered[index] = position + 1
            finish = acceptance.ending if position == last and end_token is None else None
            if finish is not None:
                row.end(finish)
            yield outcome.emission(row, token, position, finish, content=True)
""",
        new="""\
            finish = acceptance.ending if position == last and end_token is None else None
            if finish is not None:
                row.end(finish)
            yield outcome.emission(row, token, position, finish, content=True)
            self.delivered[index] = position + 1
""",
        killed_by=OF_EXECUTOR
        + "test_a_row_that_is_not_delivered_to_its_end_ends_with_what_it_was_given",
        why="A consumer that leaves with a token leaves it uncounted, and the state short of it.",
    ),
    Mutant(
        name="kept-is-what-was-accepted",
        file=ROUND,
        old="return accepted if ended else min(accepted, delivered)",
        new="return accepted",
        killed_by=OF_EXECUTOR
        + "test_a_row_that_is_not_delivered_to_its_end_ends_with_what_it_was_given",
        why="Drafts that a consumer never took stay in the cache.",
    ),
    Mutant(
        name="end-token-that-nobody-took-does-not-end-the-row",
        file=ROUND,
        old="if self.delivered[index] < len(outcome.acceptance.tokens) or outcome.ends:",
        new="if self.delivered[index] < len(outcome.acceptance.tokens):",
        killed_by=OF_GAPS + "test_a_row_whose_end_token_is_not_taken_ends_with_what_it_was_given",
        why="A caller that leaves between the last content token and the end is served on.",
    ),
    Mutant(
        name="cancellation-is-looked-at-once-a-round",
        file=ROUND,
        old="""<= last:
            if cancelled is not None and cancelled():
""",
        new="""<= last:
            if position == 0 and cancelled is not None and cancelled():
""",
        killed_by=OF_FAULTS + "test_cancellation_is_looked_at_before_each_token",
        why="A request that is cancelled in a burst still gets the rest of it.",
    ),
    Mutant(
        name="consumer-error-leaves-the-round",
        file=ROUND,
        old='                row.finish, row.error = "error", error\n',
        new='                row.finish, row.error = "error", error\n                raise\n',
        killed_by=OF_FAULTS + "test_a_consumer_that_leaves_in_a_burst_ends_its_row_alone",
        why="One row's consumer raises, and the rows behind it are not served.",
    ),
    Mutant(
        name="bonus-is-said-to-be-drafted",
        file=ROUND,
        old="            position < self.acceptance.accepted,\n",
        new="            position <= self.acceptance.accepted,\n",
        killed_by=OF_EXECUTOR
        + "test_emissions_say_what_was_drafted_and_carry_the_targets_log_probabilities",
        why="The target's own token behind the accepted drafts is reported as one of them.",
    ),
    Mutant(
        name="log-probabilities-of-the-position-before",
        file="specdec/verify/emission.py",
        old="return logprobs[self._row, self._position]",
        new="return logprobs[self._row, max(self._position - 1, 0)]",
        killed_by=OF_EXECUTOR
        + "test_emissions_say_what_was_drafted_and_carry_the_targets_log_probabilities",
        why="Values of a neighbouring position are reported (llama.cpp #27972).",
    ),
    Mutant(
        name="last-token-of-a-budget-is-drafted",
        file="specdec/verify/row.py",
        old="max(0, min(drafts, budget - 1))",
        new="max(0, min(drafts, budget))",
        killed_by=OF_EXECUTOR
        + "test_a_budget_is_spent_exactly_and_its_last_token_is_never_drafted",
        why="One draft too many: behind it there is no place for the target's own token.",
    ),
    Mutant(
        name="drafts-behind-the-end-are-counted",
        file=STATS,
        old="verified = emitted_drafts if ends_in_run or delivered < content else drafted",
        new="verified = drafted",
        killed_by=OF_STATS + "test_a_round_is_trimmed_to_the_output",
        why="The acceptance rate falls by drafts that no output could have used.",
    ),
    Mutant(
        name="accepted-is-counted-before-trimming",
        file=STATS,
        old="emitted_drafts = min(matched, delivered)",
        new="emitted_drafts = matched",
        killed_by=OF_STATS + "test_counters_add_up_to_the_output_however_it_ends",
        why="Drafts that were never emitted are called accepted (vllm #56101).",
    ),
    Mutant(
        name="drafts-are-not-clipped-to-the-depth",
        file=PROPOSALS,
        old="        if len(ids) == depth:\n",
        new="        if len(ids) > depth:\n",
        killed_by=OF_PROPOSALS + "test_more_drafts_than_were_asked_for_are_cut",
        why="A drafter that proposes one more than it was asked for gets it verified.",
    ),
    Mutant(
        name="invalid-id-is-skipped-and-not-cut",
        file=PROPOSALS,
        old='            return ids, f"a draft is {token}; ids are 0 to {vocab_size - 1}"\n',
        new="            continue\n",
        killed_by=OF_PROPOSALS
        + "test_each_row_keeps_its_valid_start_and_only_a_wrong_row_is_blamed",
        why="The drafts behind an invalid one move up into its place.",
    ),
    Mutant(
        name="padding-id-is-valid",
        file=PROPOSALS,
        old="if not 0 <= token < vocab_size:",
        new="if not -1 <= token < vocab_size:",
        killed_by=OF_PROPOSALS
        + "test_each_row_keeps_its_valid_start_and_only_a_wrong_row_is_blamed",
        why="A drafter's padding of -1 reaches the model (vllm #46899).",
    ),
    Mutant(
        name="device-lengths-are-ignored",
        file=PROPOSALS,
        old="list(row[: max(0, lengths[i])] if lengths is not None else row)[:depth]",
        new="list(row)[:depth]",
        killed_by=OF_PROPOSALS + "test_device_drafts_are_the_valid_start_that_both_copies_share",
        why="What a drafter padded its device drafts with is taken for drafts.",
    ),
)
