"""Mutants of the target's rows: positions, masks, attention buffers, native caches."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["STATE_MUTANTS"]

ATTENTION = "specdec/state/attention.py"
BUFFERS = "specdec/state/buffers.py"
NATIVE = "specdec/state/native.py"
POSITIONS = "specdec/state/positions.py"
RAGGED = "specdec/state/ragged.py"
OF_NATIVE = "tests/test_native_state.py::"
OF_POSITIONS = "tests/test_positions.py::"
OF_ROWS = "tests/test_attention_rows.py::"

STATE_MUTANTS = (
    Mutant(
        name="positions-by-the-batch-maximum",
        file=POSITIONS,
        old="lengths = [length + k for length, k in zip(self._lengths, kept, strict=True)]",
        new="lengths = [length + max(kept) for length in self._lengths]",
        killed_by=OF_POSITIONS + "test_lengths_follow_a_list_through_any_rounds_and_replacements",
        why="All rows move on by what the luckiest of them keeps.",
    ),
    Mutant(
        name="uniform-if-the-ends-agree",
        file=POSITIONS,
        old="self.uniform = lengths.count(self._longest) == len(lengths)",
        new="self.uniform = not lengths or lengths[0] == lengths[-1] == self._longest",
        killed_by=OF_POSITIONS + "test_a_mask_shows_each_query_exactly_its_rows_positions",
        why="A shorter row in the middle gets the offset and the mask of the others.",
    ),
    Mutant(
        name="padding-is-attended-to",
        file=POSITIONS,
        old="mask = keys <= rows\n",
        new="mask = keys <= rows + 1\n",
        killed_by=OF_POSITIONS + "test_a_mask_shows_each_query_exactly_its_rows_positions",
        why="Each query sees one key behind its own.",
    ),
    Mutant(
        name="window-size-is-one-too-large",
        file=POSITIONS,
        old="(keys > rows - window_size)",
        new="(keys >= rows - window_size)",
        killed_by=OF_POSITIONS + "test_a_mask_shows_each_query_exactly_its_rows_positions",
        why="A layer with a sliding window sees one key too far back.",
    ),
    Mutant(
        name="masks-outlive-their-window",
        file=POSITIONS,
        old="self._made: dict[Hashable, Any] = {}",
        new='self._made = getattr(self, "_made", {})',
        killed_by=OF_POSITIONS + "test_a_mask_is_right_again_after_the_rows_moved",
        why="A mask is kept by its width, although the rows have moved on.",
    ),
    Mutant(
        name="layers-share-one-mask",
        file=POSITIONS,
        old="key = (width, window_size, kind)",
        new="key = (width, None, kind)",
        killed_by=OF_POSITIONS + "test_layers_of_different_windows_get_a_mask_each",
        why="The first layer's window is that of all layers.",
    ),
    Mutant(
        name="keys-are-read-too-short",
        file="specdec/state/kernels.py",
        old="return -(-limit // step) * step",
        new="return max(limit // step, 1) * step",
        killed_by=OF_POSITIONS
        + "test_keys_are_read_a_little_further_only_where_a_plan_would_be_built",
        why="The length of keys is rounded down.",
    ),
    Mutant(
        name="offset-stays-after-the-append",
        file=ATTENTION,
        old="return self._positions.end if self._appended else self._positions.start",
        new="return self._positions.start",
        killed_by=OF_ROWS + "test_every_row_equals_a_list_of_its_own_through_any_program",
        why="A model that asks for the offset behind its append gets the one before.",
    ),
    Mutant(
        name="values-are-scattered-from-the-keys",
        file=ATTENTION,
        old="buffers.scatter(positions.write_index(), new)",
        new="buffers.scatter(positions.write_index(), [new[0][..., : a.shape[-1]] for a in new])",
        killed_by=OF_ROWS + "test_every_row_equals_a_list_of_its_own_through_any_program",
        why="Where rows differ in length, a line that was copied still names the keys.",
    ),
    Mutant(
        name="buffer-grows-to-what-is-held",
        file=ATTENTION,
        old="buffers.reserve(positions.reach, new)",
        new="buffers.reserve(positions.limit, new)",
        killed_by=OF_ROWS + "test_a_buffer_of_an_exact_length_grows_before_it_is_read_further",
        why="Keys are read further than the buffer goes.",
    ),
    Mutant(
        name="buffer-grows-without-headroom",
        file=BUFFERS,
        old="wanted = positions * 9 // 8 if grown else positions",
        new="wanted = positions",
        killed_by=OF_ROWS + "test_growth_leaves_headroom_so_that_copies_stay_rare",
        why="A long context is copied every 256 tokens.",
    ),
    Mutant(
        name="extracted-row-is-a-view",
        file=BUFFERS,
        old="return [mx.contiguous(array[row : row + 1, :, :positions]) for array in self.held]",
        new="return [array[row : row + 1, :, :positions] for array in self.held]",
        killed_by=OF_ROWS + "test_an_extracted_row_does_not_keep_the_whole_buffer",
        why="A row that is kept keeps the buffer of all rows alive.",
    ),
    Mutant(
        name="join-is-appended-in-front",
        file=RAGGED,
        old="built = _grouped([place for s in (self, *rows) for place in s._places]",
        new="built = _grouped([place for s in (*rows, self) for place in s._places]",
        killed_by=OF_ROWS + "test_every_row_equals_a_list_of_its_own_through_any_program",
        why="New rows stand before the live ones in the target's state alone.",
    ),
    Mutant(
        name="filter-ignores-the-order",
        file=RAGGED,
        old="_grouped([self._places[k] for k in keep], self._together)",
        new="_grouped([self._places[k] for k in sorted(keep)], self._together)",
        killed_by=OF_ROWS + "test_every_row_equals_a_list_of_its_own_through_any_program",
        why="Rows that change places keep their old keys.",
    ),
    Mutant(
        name="lone-row-is-given-back-with-its-open-window",
        file=RAGGED,
        old='        self._between_rounds("write_back")\n',
        new='        _ = self.row_count == 1 or self._between_rounds("write_back")\n',
        killed_by=OF_ROWS + "test_the_only_row_is_not_handed_over_inside_a_round",
        why="The buffers of a round that is still open are handed over.",
    ),
    Mutant(
        name="dropped-window-takes-a-position-that-never-was",
        file=NATIVE,
        old="return [lambda: cache.trim(cache.offset - offset)]",
        new="return [lambda: cache.trim(1)]",
        killed_by=OF_NATIVE + "test_a_window_that_never_ran_or_half_ran_is_dropped_too",
        why="A window that failed in some layers is trimmed in all of them.",
    ),
    Mutant(
        name="snapshot-moves-with-the-padding",
        file=NATIVE,
        old="None if a is None else mx.array(a) for a in (cache.left_padding, cache.lengths)",
        new="a for a in (cache.left_padding, cache.lengths)",
        killed_by=OF_NATIVE + "test_padding_that_a_model_moves_in_place_is_taken_back",
        why="A reference is kept where the model writes in place.",
    ),
)
