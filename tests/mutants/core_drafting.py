"""Mutants of what drafters share: their rounds, their choices, their weights."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["DRAFTING_MUTANTS"]

ROUNDS = "specdec/drafting/rounds.py"
CHOOSE = "specdec/drafting/choose.py"
MODULES = "specdec/drafting/modules.py"
HEADERS = "specdec/plugins/headers.py"
OF_ROUNDS = "tests/test_drafting_rounds.py::"
OF_CHOICES = "tests/test_drafting_choose.py::"
OF_MODULES = "tests/test_drafting_modules.py::"
ROW_TABLES = "tests/test_row_tables.py::"
OF_HEADERS = "tests/test_headers.py::"
BOTH_DOORS = (
    OF_ROUNDS + "test_both_doors_remember_each_rows_drafts_up_to_its_depth_and_what_the_drafter_cut"
)
COMMIT = OF_ROUNDS + "test_a_commit_needs_a_round_whose_drafts_are_known"
OWN_DRAW = OF_CHOICES + "test_each_row_draws_by_its_own_options_and_step_from_what_was_scored"
LISTED = OF_CHOICES + "test_a_declared_vocabulary_is_drawn_from_as_it_was_scored"
SLOTS = OF_CHOICES + "test_slots_at_once_are_slots_one_by_one"
FUSED = OF_CHOICES + "test_a_fused_argmax_is_taken_only_where_nobody_asks_what_it_was_drawn_from"
UNFIT = OF_MODULES + "test_what_does_not_fit_is_named_with_both_values"

DRAFTING_MUTANTS = (
    # Rounds.
    Mutant(
        name="device-drafts-are-read-by-their-depth",
        file=ROUNDS,
        old="read[row * width : row * width + count]",
        new="read[row * count : row * count + count]",
        killed_by=BOTH_DOORS,
        why="A row that drafts less than the others is told another row's drafts.",
    ),
    Mutant(
        name="device-lengths-are-not-remembered",
        file=ROUNDS,
        old="counts = most if own is None else _cut(most, own)",
        new="counts = most",
        killed_by=BOTH_DOORS,
        why="A round remembers drafts that its drafter cut on the device.",
    ),
    Mutant(
        name="device-depths-cut-nothing",
        file=ROUNDS,
        old="if any(count < width for count in most):",
        new="if own is not None and any(count < width for count in most):",
        killed_by=OF_ROUNDS + "test_lengths_are_said_only_where_rows_differ_from_the_width",
        why="A row gets as many drafts as the one that asked for most.",
    ),
    Mutant(
        name="remembered-drafts-are-the-callers",
        file=ROUNDS,
        old="        told_drafts = [list(draft) for draft in drafts]\n",
        new="        told_drafts = drafts\n",
        killed_by=OF_ROUNDS + "test_what_a_caller_does_to_its_drafts_changes_no_round[False]",
        why="Who cuts the lists that it was given changes what may be accepted.",
    ),
    Mutant(
        name="unresolved-drafts-are-none",
        file=ROUNDS,
        old='            raise NoOpenRoundError("resolve() of the proposal comes before commit")\n',
        new="            drafts = [[] for _ in accepted]\n",
        killed_by=COMMIT,
        why="A commit before the host read ends the round as if nothing had been drafted.",
    ),
    Mutant(
        name="commit-opens-the-next-round",
        file=ROUNDS,
        old='        """The open round is committed."""\n        self._open = None\n',
        new='        """The open round is committed."""\n',
        killed_by=COMMIT,
        why="A round can be committed twice.",
    ),
    # Choices.
    Mutant(
        name="listed-draws-have-no-step",
        file=CHOOSE,
        old="drawn = selection.sample(logits, steps)",
        new="drawn = selection.sample(logits, [0] * len(steps))",
        killed_by=LISTED + "[False]",
        why="Drafts over listed ids are drawn with other noise than the target's tokens.",
    ),
    Mutant(
        name="any-ids-are-the-listed-ones",
        file=CHOOSE,
        old="isinstance(selection, Listed) and ids is not None and ids is self._listed",
        new="isinstance(selection, Listed) and ids is not None",
        killed_by=OF_CHOICES + "test_other_ids_than_the_declared_ones_go_through_the_whole_draw",
        why="Scores of other ids are drawn from as if they were those of the declared ones.",
    ),
    Mutant(
        name="unscored-ids-are-as-likely-as-zero",
        file=CHOOSE,
        old="every = mx.full((logits.shape[0], self._vocab_size), -mx.inf, logits.dtype)",
        new="every = mx.zeros((logits.shape[0], self._vocab_size), logits.dtype)",
        killed_by=OWN_DRAW,
        why="A drafter proposes ids that it never scored.",
    ),
    Mutant(
        name="picked-ids-are-the-first-rows",
        file=CHOOSE,
        old="mx.take_along_axis(ids, best[..., None], axis=-1)[..., 0]",
        new="ids[0][best]",
        killed_by=OF_CHOICES + "test_greedy_rows_take_the_best_id_of_what_was_scored",
        why="All rows pick from the candidates of the first.",
    ),
    Mutant(
        name="greedy-rows-declare-nothing",
        file=CHOOSE,
        old="isinstance(sampling.selection, Greedy) and not sampling.rejecting",
        new="isinstance(sampling.selection, Greedy)",
        killed_by=FUSED + "[True-selection0]",
        why="In a group of greedy rows the one that judges by rejection is not asked about.",
    ),
    Mutant(
        name="declared-distribution-is-of-the-step-before",
        file=CHOOSE,
        old="    return mx.stack(logq, axis=1) if logq",
        new="    return mx.stack([logq[0], *logq[:-1]], axis=1) if logq",
        killed_by=OF_CHOICES
        + "test_what_a_draft_declares_is_in_the_order_of_its_slots_and_complete_or_nothing",
        why="A draft is judged by the distribution of the draft before it.",
    ),
    Mutant(
        name="nothing-is-declared",
        file=CHOOSE,
        old="if logq and len(logq) == len(choices) else None",
        new="if not choices else None",
        killed_by=OF_CHOICES
        + "test_what_a_draft_declares_is_in_the_order_of_its_slots_and_complete_or_nothing",
        why="Rows that judge by rejection take their drafts for certain ones.",
    ),
    Mutant(
        name="slots-of-a-block-share-a-step",
        file=CHOOSE,
        old="[step + at for step in self._steps]",
        new="self._steps",
        killed_by=SLOTS + "[False-options1]",
        why="All drafts of a block are drawn with the noise of the first.",
    ),
    # Weights.
    Mutant(
        name="loading-draws-random-numbers",
        file=MODULES,
        old="        mx.random.seed(high << 32 | low)",
        new="        mx.random.seed(low)",
        killed_by=OF_MODULES + "test_random_numbers_are_left_alone_where_a_module_cannot_be_made",
        why="Loading a drafter changes what the user draws next.",
    ),
    Mutant(
        name="routers-are-quantized-too",
        file=MODULES,
        old="            and fits(path)\n",
        new="",
        killed_by=OF_MODULES + "test_a_module_is_quantized_where_its_parts_fit[packing0]",
        why="Parts that a drafter wants to keep are packed with the others.",
    ),
    Mutant(
        name="packed-formats-are-told-by-bits-alone",
        file=MODULES,
        old='(16, 4): "nvfp4"',
        new='(16, 4): "mxfp4"',
        killed_by=OF_MODULES + "test_packed_weights_are_used_as_they_are_packed[mxfp8 and nvfp4]",
        why="Groups of sixteen are multiplied as another format.",
    ),
    Mutant(
        name="probe-floor-is-not-kept",
        file="specdec/drafting/probe.py",
        old="    if agreement[best] < FLOOR:\n",
        new="    if agreement[best] < 0.0:\n",
        killed_by="plugins/specdec-mtp/tests/test_probe.py::"
        "test_another_model_s_head_is_refused_unless_nobody_looks",
        why="A drafter of another model is loaded without a word.",
    ),
    Mutant(
        name="probe-takes-what-is-not-allowed",
        file="specdec/drafting/probe.py",
        old="    better = max(allowed, key=lambda how: agreement[how])\n",
        new="    better = best\n",
        killed_by="plugins/specdec-dflash/tests/test_block_probe.py::"
        "test_what_an_option_says_is_kept_and_what_would_fit_is_told",
        why="An option of the user's is overruled.",
    ),
    Mutant(
        name="types-of-packed-weights-are-not-checked",
        file=MODULES,
        old="    _check_types(what, wanted, tensors)\n",
        new="",
        killed_by=UNFIT + "[a packed weight of floats]",
        why="Packed weights of another type fail in the first draft, and not when they are loaded.",
    ),
    Mutant(
        name="unknown-weights-are-passed-over",
        file=MODULES,
        old="    unknown = sorted(set(tensors) - set(wanted))\n",
        new="    unknown: list[str] = []\n",
        killed_by=UNFIT + "[one more]",
        why="A weight that no part takes is told by MLX alone, in its own words.",
    ),
    Mutant(
        name="zero-bits-with-a-group-are-no-packing",
        file=MODULES,
        old="bits == 0 and group is None",
        new="bits == 0",
        killed_by=OF_MODULES + "test_a_packing_that_makes_no_sense_is_named",
        why="A group size is dropped without a word.",
    ),
    # Headers.
    Mutant(
        name="cut-files-are-not-noticed",
        file=HEADERS,
        old="        if end > size - 8 - length:\n",
        new="        if end > size + length:\n",
        killed_by=OF_HEADERS + "test_what_lacks_of_a_cut_file_is_counted",
        why="A download that broke off is found out when its last weight is read.",
    ),
    # Operations by number of rows.
    Mutant(
        name="declared-rows-get-the-default",
        file="specdec/contract/row_table.py",
        old="return self.declared.get(rows, self.default)",
        new="return self.default",
        killed_by=ROW_TABLES + "test_a_declared_operation_is_called_for_its_rows_and_no_others",
        why="What was declared for a number of rows is never called.",
    ),
    Mutant(
        name="rows-are-measured-on-a-cpu",
        file="specdec/drafting/padding.py",
        old="if rows >= MOST or not self._measures():",
        new="if rows >= MOST:",
        killed_by=ROW_TABLES + "test_on_a_cpu_nothing_is_measured_and_the_input_is_passed_as_it_is",
        why="Each further row costs more there; measuring is time for nothing.",
    ),
    Mutant(
        name="padding-stands-before-the-rows",
        file="specdec/drafting/padding.py",
        old="return operation(mx.concatenate([x, last]))[:rows]",
        new="return operation(mx.concatenate([last, x]))[:rows]",
        killed_by=ROW_TABLES + "test_padding_changes_no_value",
        why="Rows get what another row was to get.",
    ),
    Mutant(
        name="loading-a-kernel-counts",
        file="specdec/drafting/padding.py",
        old="        timed(count)  # what loading a kernel takes is nobody's\n",
        new="",
        killed_by=ROW_TABLES
        + "test_the_first_calls_do_not_count_and_one_slow_call_changes_nothing",
        why="A number of rows whose kernel is loaded for the first time looks dear.",
    ),
    Mutant(
        name="types-share-their-row-counts",
        file="specdec/drafting/padding.py",
        old="key = (rows, tuple(like.shape[1:]), like.dtype)",
        new="key = (rows, tuple(like.shape[1:]), mx.float32)",
        killed_by=ROW_TABLES + "test_each_shape_is_measured_once_and_said_so_in_all_threads",
        why="Other types have other kernels.",
    ),
)
