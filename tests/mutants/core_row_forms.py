"""Mutants of recurrent and quantized rows, of batches, and of how models are driven."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["ROW_FORM_MUTANTS"]

BATCH = "specdec/state/batch.py"
CHUNKED = "specdec/state/chunked.py"
FIT = "specdec/targets/fit.py"
NATIVE = "specdec/state/native.py"
QUANTIZED = "specdec/state/quantized.py"
RAGGED = "specdec/state/ragged.py"
RECURRENT = "specdec/state/recurrent.py"
OF_FORMS = "tests/test_row_forms.py::"
OF_GAPS = "tests/test_core_mutants_gaps_state.py::"
OF_RECURRENT = "tests/test_row_forms_recurrent.py::"
OF_TARGETS = "tests/test_mlx_lm_target.py::"
SHARED = OF_RECURRENT + (
    "test_rows_that_keep_nothing_part_or_all_and_rows_that_read_nothing_share_a_round"
)
FOUND = OF_TARGETS + "test_what_a_model_can_take_in_one_call_is_found_by_trying"
EQUAL = OF_TARGETS + (
    "test_a_model_that_spreads_the_mask_over_its_heads_is_given_rows_of_equal_length"
)
ACROSS = OF_FORMS + "test_a_window_keeps_no_position_across_the_place_where_its_row_is_quantized"
MOVE = OF_GAPS + "test_rows_of_one_batch_move_apart_when_their_lengths_do_and_together_again"
SAME_CHUNKS = OF_FORMS + "test_rows_share_a_chunked_layer_only_while_their_lengths_are_equal"

RECURRENT_MUTANTS = (
    Mutant(
        name="state-before-a-window-moves-with-it",
        file=RECURRENT,
        old="self._before, self._before_apart = list(self.cache), None",
        new="self._before, self._before_apart = self.cache, None",
        killed_by=SHARED + "[mamba]",
        why="What a dropped window is taken back to is what it made.",
    ),
    Mutant(
        name="recurrent-steps-are-off-by-one",
        file=RECURRENT,
        old="states: list[Any] = [steps[0] if held is None else held, *steps]",
        new="states: list[Any] = [steps[0] if held is None else held, steps[0], *steps[:-1]]",
        killed_by=SHARED + "[mamba2]",
        why="A row gets the state after one position less than it keeps.",
    ),
    Mutant(
        name="convolution-is-off-by-one",
        file=RECURRENT,
        old="[:, None] + mx.arange(size))[..., None]",
        new="[:, None] + mx.arange(1, size + 1))[..., None]",
        killed_by=SHARED + "[lfm2]",
        why="A convolution remembers a rejected draft.",
    ),
    Mutant(
        name="recurrent-rows-that-keep-the-same-change-places",
        file=RECURRENT,
        old="self._settle([parts[count][1].pop(0) for count in kept])",
        new="self._settle([parts[count][1].pop() for count in kept])",
        killed_by=OF_GAPS + "test_rows_that_keep_as_much_as_each_other_keep_their_places",
        why="Rows are taken from the end of those that keep as many.",
    ),
    Mutant(
        name="recurrent-position-is-taken-back-from-the-others",
        file=RECURRENT,
        old="self._before_of(row) if count else self._taken([row])",
        new="self._taken([row]) if count else self._before_of(row)",
        killed_by=OF_RECURRENT
        + "test_a_position_is_taken_back_after_rows_joined_or_left[mamba2-warm-rows change places]",
        why="The row that was begun too early keeps it; its neighbour loses one.",
    ),
    Mutant(
        name="chunked-recurrence-is-taken-to-keep-its-bits",
        file="specdec/targets/recurrent/recorder.py",
        old="known.one_by_one = not _keeps_bits(call, before)",
        new="known.one_by_one = False",
        killed_by=SHARED + "[mamba2]",
        why="A row's state depends on the widths of its windows.",
    ),
)

BATCH_MUTANTS = (
    Mutant(
        name="row-is-quantized-a-position-late",
        file=BATCH,
        old="0 < length >= wanted.start",
        new="0 < length > wanted.start",
        killed_by=ACROSS + "[5]",
        why="The first window over quantized keys sees plain ones.",
    ),
    Mutant(
        name="window-crosses-where-its-row-is-quantized",
        file=BATCH,
        old="return start - length if length < start else None",
        new="return start - length + 1 if length < start else None",
        killed_by=ACROSS + "[5]",
        why="A draft is kept that saw keys as mlx-lm would not have shown them.",
    ),
    Mutant(
        name="rows-of-any-format-share-a-buffer",
        file=QUANTIZED,
        old="return self._format\n",
        new='return "quantized"\n',
        killed_by=OF_GAPS + "test_rows_that_are_quantized_otherwise_do_not_share_a_buffer",
        why="Packed values are read with another number of bits.",
    ),
    Mutant(
        name="what-a-chunk-still-sees-is-dropped",
        file=CHUNKED,
        old="drop = (held - self.chunk_size) // _STEP * _STEP",
        new="drop = held // _STEP * _STEP",
        killed_by=OF_GAPS + "test_a_chunk_that_does_not_end_where_a_step_does_is_held_whole",
        why="A step is dropped as soon as it is full.",
    ),
    Mutant(
        name="chunked-rows-of-any-length-stay-together",
        file=CHUNKED,
        old="return not self._positions.uniform",
        new="return False",
        killed_by=MOVE + "[chunked]",
        why="Rows that have come to differ in length are not moved apart.",
    ),
    Mutant(
        name="rows-are-not-grouped-anew-after-a-rollback",
        file=RAGGED,
        old="        self._regroup(apart=width > 1)\n",
        new="",
        killed_by=SAME_CHUNKS,
        why="Rows stay in the batches of the lengths that they had.",
    ),
    Mutant(
        name="what-can-be-taken-back-is-told-by-the-place",
        file=RAGGED,
        old="self._single = [self._single[k] for k in keep]",
        new="self._single = self._single[: len(keep)]",
        killed_by=OF_GAPS + "test_a_row_that_changed_its_place_can_take_back_what_it_kept_itself",
        why="A row that kept nothing loses a position for the one that left its place.",
    ),
    Mutant(
        name="places-in-a-batch-are-reversed",
        file=RAGGED,
        old="{row: (batch, own) for own, row in enumerate(rows)}",
        new="{row: (batch, own) for own, row in enumerate(rows[::-1])}",
        killed_by=OF_GAPS + "test_rows_that_change_places_take_what_they_hold_with_them",
        why="What is done with one row next is done with another.",
    ),
    Mutant(
        name="rows-that-only-change-places-stay",
        file=RAGGED,
        old="if len(parts) > 1 or own_rows != list(range(batch.row_count)):",
        new="if len(parts) > 1 or len(own_rows) != batch.row_count:",
        killed_by=OF_GAPS + "test_rows_that_change_places_take_what_they_hold_with_them",
        why="A filter that keeps all rows in another order is taken for none.",
    ),
    Mutant(
        name="rows-of-equal-length-stay-together-for-ever",
        file=RAGGED,
        old="equal = self._together is Together.EQUAL\n",
        new="equal = self._together is Together.ALONE\n",
        killed_by=MOVE + "[attention]",
        why="A model that cannot take rows of different length is given them after a round.",
    ),
    Mutant(
        name="lengths-of-a-new-batch-are-sorted",
        file=BATCH,
        old="RowPositions(lengths, exact_keys=not parts[0][0].positions.plans)",
        new="RowPositions(sorted(lengths), exact_keys=not parts[0][0].positions.plans)",
        killed_by=OF_GAPS + "test_rows_that_change_places_take_what_they_hold_with_them",
        why="Rows change places, and their lengths do not.",
    ),
    Mutant(
        name="logits-stay-in-the-order-of-the-batches",
        file="specdec/targets/mlx_lm.py",
        old="index = mx.array(sorted(range(len(order)), key=order.__getitem__), mx.int32)",
        new="index = mx.array(order, mx.int32)",
        killed_by=EQUAL,
        why="The inverse of a permutation is taken for itself, which it is for two or three rows.",
    ),
    Mutant(
        name="rows-of-different-length-are-not-tried",
        file=FIT,
        old="not in _COUNT_KEYS and fits([0, 2])",
        new="not in _COUNT_KEYS and fits([0, 1])",
        killed_by=FOUND + "[TakesTheFirst]",
        why="A model is given them because it can take rows of equal length.",
    ),
    Mutant(
        name="what-was-found-outlives-its-model",
        file=FIT,
        old="weakref.finalize(model, _known.pop, key, None).atexit = False",
        new="weakref.finalize(model, _known.get, key, None).atexit = False",
        killed_by=OF_TARGETS + "test_what_was_found_of_a_model_is_forgotten_with_it",
        why="The next model at this address is driven as that one was.",
    ),
    Mutant(
        name="positions-are-taken-back-from-rows-by-their-old-places",
        file=NATIVE,
        old="self._kept = [kept.get(id(row), []) for row in rows]",
        new="self._kept = list(kept.values())",
        killed_by="tests/test_native_state.py::"
        "test_a_position_is_taken_back_from_the_rows_that_it_was_begun_for_too_early[qwen3]",
        why="Rows have changed places since the window was begun.",
    ),
    Mutant(
        name="token-that-a-ring-has-read-is-read-again",
        file="specdec/verify/handover.py",
        old="row.processed += 1\n            raise",
        new="row.processed += 0\n            raise",
        killed_by="tests/test_core_mutants_gaps.py::"
        "test_an_interrupt_in_the_final_read_leaves_no_token_twice_in_the_state",
        why="What cannot be dropped from a cache has to count as read.",
    ),
)

ROW_FORM_MUTANTS = (*RECURRENT_MUTANTS, *BATCH_MUTANTS)
