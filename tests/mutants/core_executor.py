"""Mutants of the executor's parts: prefill, lane, verifier, flight; and of what is around them."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["EXECUTOR_MUTANTS"]

FLIGHT = "specdec/verify/flight.py"
LANE = "specdec/verify/lane.py"
PREFILL = "specdec/verify/prefill.py"
VERIFIER = "specdec/verify/verifier.py"
WALK = "specdec/verify/walk.py"
OF_EXECUTOR = "tests/test_executor.py::"
OF_FAULTS = "tests/test_executor_faults.py::"
OF_GAPS = "tests/test_core_mutants_gaps.py::"
OF_MEMBERSHIP = "tests/test_executor_membership.py::"
OF_PROMPT_CACHE = "tests/test_prompt_cache.py::"
OF_PROPOSALS = "tests/test_proposals.py::"
OF_STREAM = "tests/test_stream_generate.py::"

EXECUTOR_MUTANTS = (
    Mutant(
        name="last-chunk-reads-the-last-prompt-token",
        file=PREFILL,
        old="chunks=_chunks(start, len(tokens) - 1, step_size",
        new="chunks=_chunks(start, len(tokens), step_size",
        killed_by=OF_STREAM + "test_prompts_are_read_in_the_same_chunks_as_by_mlx_lm",
        why="The token that heads the first window has been read already (mlx-lm #1109).",
    ),
    Mutant(
        name="drafter-reads-the-first-chunk-alone",
        file=PREFILL,
        old="        if draft is not None:\n            draft.read(ids, window.context)\n",
        new="        if draft is not None and start == 0:\n"
        "            draft.read(ids, window.context)\n",
        killed_by=OF_EXECUTOR + "test_a_drafter_reads_each_prompt_position_once_with_the_targets"
        "_own_hidden_states",
        why="A drafter that has taken a chunk is not given the next one (mlx-vlm #1293).",
    ),
    Mutant(
        name="whole-prompt-counts-one-too-few",
        file=PREFILL,
        old="self.row.processed = self._last + whole",
        new="self.row.processed = self._last",
        killed_by=OF_PROMPT_CACHE
        + "test_the_cache_covers_the_prompt_and_every_emitted_token[end token second-whole prompt]",
        why="Where the whole prompt was read, its last token is read again at the end.",
    ),
    Mutant(
        name="drafter-writes-into-the-executors-lists",
        file="specdec/verify/drafts.py",
        old="return list(self.pending), list(self.depths), list(self.steps)",
        new="return list(self.pending), self.depths, list(self.steps)",  # type checkers agree
        killed_by=OF_FAULTS + "test_a_drafter_may_write_into_the_lists_that_it_is_given",
        why="The very list that proposals are cut with is lent to the drafter.",
    ),
    Mutant(
        name="one-rows-faults-stop-every-row",
        file=LANE,
        old="""\
                row.width = 0
                row.stats.reason = f"drafter {self.name} stood down: {fault}""",
        new="""\
                for each in rows:
                    each.width = 0
                row.stats.reason = f"drafter {self.name} stood down: {fault}""",
        killed_by=OF_FAULTS
        + "test_a_row_with_invalid_proposals_stands_down_and_the_others_keep_drafting",
        why="A drafter that cannot serve one request is taken from all of them.",
    ),
    Mutant(
        name="drafter-goes-on-after-an-exception",
        file=LANE,
        old="        self._drop()\n        self._note(error)\n",
        new="        self._note(error)\n",
        killed_by=OF_FAULTS
        + "test_a_drafter_that_raises_changes_no_token_and_is_reported[join-1-tokens]",
        why="A group that failed in the middle of a verb is asked again as if it were whole.",
    ),
    Mutant(
        name="reopened-drafter-has-read-the-pending-token",
        file=LANE,
        old="history = row.known[:-1]",
        new="history = row.known",
        killed_by=OF_FAULTS + "test_a_drafter_of_tokens_alone_is_opened_again_and_drafts_as_before",
        why="The pending token is read twice: with the history, and at the head of the window.",
    ),
    Mutant(
        name="device-ids-reach-the-embedding-unchecked",
        file=FLIGHT,
        old="mx.clip(device.astype(mx.int32), 0, vocab - 1)",
        new="device.astype(mx.int32)",
        killed_by=OF_PROPOSALS
        + "test_a_wrong_device_id_is_brought_into_range_before_the_target_reads_it",
        why="A wrong id on the device reads outside of the embedding.",
    ),
    Mutant(
        name="landed-device-drafts-begin-one-too-early",
        file=FLIGHT,
        old="[row[width : width + drafted] for row in read]",
        new="[row[width - 1 : width - 1 + drafted] for row in read]",
        killed_by=OF_EXECUTOR + "test_device_drafts_never_change_a_token_and_state_stays_exact",
        why="The host takes the last sample for the first draft.",
    ),
    Mutant(
        name="filtered-flight-keeps-its-log-probabilities",
        file=FLIGHT,
        old="            draw.logprobs[index],\n",
        new="            draw.logprobs,\n",
        killed_by=OF_GAPS
        + "test_after_a_row_has_left_the_others_report_their_own_log_probabilities",
        why="After a row has left, the others report their neighbours' log-probabilities.",
    ),
    Mutant(
        name="filtered-flight-keeps-its-errors",
        file=FLIGHT,
        old="{new: draw.errors[k] for new, k in enumerate(keep) if k in draw.errors}",
        new="{k: draw.errors[k] for k in keep if k in draw.errors}",
        killed_by="tests/test_core_mutants_gaps_early.py::"
        "test_a_processor_that_raises_while_another_row_leaves_ends_its_own_row",
        why="After a row has left, a sampler's error ends another row than its own.",
    ),
    Mutant(
        name="early-window-draws-with-the-step-before",
        file=VERIFIER,
        old="[row.drawn + 1 for row in rows]",
        new="[row.drawn for row in rows]",
        killed_by=OF_MEMBERSHIP
        + "test_a_seed_gives_one_text_alone_in_company_late_and_at_any_width",
        why="The token before is not counted, since it has not been read yet.",
    ),
    Mutant(
        name="first-tokens-draw-with-the-wrong-rows-options",
        file=VERIFIER,
        old="[(row.request.sampling, row.seed) for row in theirs]",
        new="[(row.request.sampling, row.seed) for row in rows[: len(fresh)]]",
        killed_by=OF_MEMBERSHIP
        + "test_each_row_gets_its_own_text_whoever_joins_and_leaves_and_whatever_the_drafter"
        "_raises",
        why="Rows whose prompt was read whole are taken for the first of the group.",
    ),
    Mutant(
        name="tokens-before-a-stop-rules-error-are-lost",
        file=WALK,
        old="error, acceptance = raised, Acceptance(len(passed), tuple(passed))",
        new="error, acceptance = raised, Acceptance(0, ())",
        killed_by=OF_FAULTS
        + "test_a_stop_rule_that_raises_ends_its_row_alone_after_the_tokens_before",
        why="What the target had written before the error is not handed out.",
    ),
    Mutant(
        name="end-token-is-written-into-the-text",
        file="specdec/generation.py",
        old="        text=emission.text,\n",
        new="        text=emission.text\n"
        "        + row.request.tokenizer.decode([row.end_token])\n"
        "        if row is not None and row.end_token is not None\n"
        "        else emission.text,\n",
        killed_by=OF_STREAM
        + "test_responses_are_those_of_mlx_lm_with_every_drafter[True-1-prompt0-plain]",
        why="The text ends in the end token's own.",
    ),
    Mutant(
        name="pre-norm-is-post-norm",
        file="specdec/targets/mlx_lm.py",
        old="ContextKind.PRE_NORM: (last - 1,),",
        new="ContextKind.PRE_NORM: (last,),",
        killed_by="tests/test_mlx_lm_target.py::test_the_final_norm_leads_from_pre_to_post",
        why="A drafter that norms by itself is given normed hidden states.",
    ),
    Mutant(
        name="probe-with-as-many-rows-as-heads",
        file="specdec/targets/fit.py",
        old="_MANY = 11",
        new="_MANY = 2",
        killed_by="tests/test_mlx_lm_target.py::"
        "test_what_a_model_can_take_in_one_call_is_found_by_trying[DropsRows]",
        why="What is right for a few rows by chance is taken to be right for many.",
    ),
    Mutant(
        name="taps-come-in-the-order-of-the-layers",
        file="specdec/targets/mlx_lm.py",
        old="outputs = [recorded[i].output for i in wanted]",
        new="outputs = [recorded[i].output for i in sorted(wanted)]",
        killed_by="tests/test_mlx_lm_target.py::"
        "test_a_tap_is_the_residual_stream_after_its_layer[demo-qwen3]",
        why="A drafter that declares its layers in another order is given them mixed up.",
    ),
)
