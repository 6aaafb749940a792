"""Mutants of block drafters' shared machinery: context rows, blocks over them, their checkpoints.

None of them can change a token of the text: they cost drafts, memory or time.
"""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["PROJECTED_MUTANTS"]

POSITIONS = "specdec/state/positions.py"
RINGS = "specdec/state/rings.py"
CONTEXT = "specdec/drafting/context.py"
PROJECTED = "specdec/drafting/projected.py"
PROVIDER = "specdec/drafting/projected_provider.py"
CHOOSE = "specdec/drafting/choose.py"
ARRAYS = "specdec/drafting/row_arrays.py"

OF_MASKS = "tests/test_block_masks.py::"
OF_CONTEXT = "tests/test_context_rows.py::"
OF_ROWS = "tests/test_projected_rows.py::"
SEEN = OF_MASKS + "test_each_column_sees_its_rows_context_and_its_block_and_nothing_else"
EQUAL_ROWS = OF_MASKS + "test_equal_rows_see_the_same"
HELD = OF_CONTEXT + "test_rows_hold_what_each_was_given_through_any_changes"
NO_COPY = OF_CONTEXT + "test_a_round_copies_no_context_and_memory_grows_in_steps_alone[False]"
ARRAYS_NAMED = OF_CONTEXT + "test_other_arrays_are_refused_by_name"
ALONE = OF_ROWS + "test_a_rows_drafts_are_those_it_makes_alone_whatever_others_ask"
AT_ONCE = OF_ROWS + "test_rounds_and_consumed_tokens_leave_the_state_of_a_text_read_at_once"
BAD_COMMIT = OF_ROWS + "test_a_bad_commit_leaves_the_round_open"
NO_GRAPH = OF_ROWS + "test_rounds_without_drafts_let_no_graph_grow"
AGREE = OF_ROWS + "test_preview_draft_and_device_draft_agree_and_a_preview_changes_nothing"
UNFIT = OF_ROWS + "test_a_checkpoint_that_does_not_fit_is_refused_with_what_is_wrong"

PROJECTED_MUTANTS = (
    # What a block sees.
    Mutant(
        name="projected-block-sees-its-neighbours-columns",
        file=POSITIONS,
        old="[length + count for length, count in zip(self._lengths, columns, strict=True)]\n"
        "        return mx.array(ends",
        new="[length + max(columns) for length in self._lengths]\n        return mx.array(ends",
        killed_by=SEEN,
        why="Padding behind a short block is attended to.",
    ),
    Mutant(
        name="projected-block-misses-its-last-column",
        file=POSITIONS,
        old="        shown = keys < ends\n",
        new="        shown = keys < ends - 1\n",
        killed_by=SEEN,
        why="The end of a block is off by one.",
    ),
    Mutant(
        name="projected-causal-column-sees-the-next",
        file=POSITIONS,
        old="return shown & (keys <= self.queries(self.width)) if causal else shown",
        new="return shown & (keys <= self.queries(self.width) + 1) if causal else shown",
        killed_by=SEEN,
        why="The diagonal is off by one.",
    ),
    Mutant(
        name="projected-causal-is-the-other-way-round",
        file=POSITIONS,
        old='return "causal" if causal and width > 1 else None',
        new='return "causal" if not causal and width > 1 else None',
        killed_by=EQUAL_ROWS + "[False-None-False]",
        why="Equal rows see one way what they should see both ways.",
    ),
    Mutant(
        name="projected-uniform-rows-forget-short-blocks",
        file=POSITIONS,
        old="        if self.uniform and whole and self.reach == self.limit:\n",
        new="        if self.uniform and self.reach == self.limit:\n",
        killed_by=SEEN,
        why="Rows of one length need no mask only where their blocks are of one width.",
    ),
    Mutant(
        name="projected-ragged-rows-are-not-masked",
        file=POSITIONS,
        old="        if self.uniform and whole and self.reach == self.limit:\n",
        new="        if whole and self.reach == self.limit:\n",
        killed_by=SEEN,
        why="A short row sees what lies behind its end.",
    ),
    Mutant(
        name="projected-reach-is-taken-for-the-end",
        file=POSITIONS,
        old="        if self.uniform and whole and self.reach == self.limit:\n",
        new="        if self.uniform and whole:\n",
        killed_by=EQUAL_ROWS + "[True-None-False]",
        why="Keys that are read further than there are stay visible.",
    ),
    Mutant(
        name="projected-masks-are-one-for-both-ways",
        file=POSITIONS,
        old='key = ("block", width, tuple(columns), causal, kind)',
        new='key = ("block", width, tuple(columns), kind)',
        killed_by=SEEN,
        why="A causal layer gets the mask of one that is not.",
    ),
    Mutant(
        name="projected-window-shows-one-position-too-far-back",
        file=RINGS,
        old="near = (held < self.keep) | (held > queries - self.max_size + self.keep)",
        new="near = (held < self.keep) | (held >= queries - self.max_size + self.keep)",
        killed_by=SEEN,
        why="The edge of a block's window is off by one.",
    ),
    Mutant(
        name="projected-window-is-that-of-the-first-column",
        file=RINGS,
        old="near = (held < self.keep) | (held > queries - self.max_size + self.keep)",
        new="near = (held < self.keep) | (held > first - self.max_size + self.keep)",
        killed_by=SEEN,
        why="Later columns see as far back as the first one.",
    ),
    Mutant(
        name="projected-window-hides-what-is-kept-for-good",
        file=RINGS,
        old="near = (held < self.keep) | (held > queries - self.max_size + self.keep)",
        new="near = held > queries - self.max_size + self.keep",
        killed_by=OF_MASKS
        + "test_first_positions_that_a_ring_keeps_for_good_are_seen_by_every_column[6]",
        why="The first positions of a ring that keeps them are hidden from a block.",
    ),
    Mutant(
        name="projected-window-hides-part-of-the-block",
        file=RINGS,
        old="        return before | block\n",
        new="        return before | (block & (held > queries - self.max_size))\n",
        killed_by=SEEN,
        why="A block wider than the window is cut by it.",
    ),
    Mutant(
        name="projected-ring-block-sees-later-columns",
        file=RINGS,
        old="        if causal:\n            block = block & (held <= queries)\n",
        new="        if causal and not self.in_place:\n"
        "            block = block & (held <= queries)\n",
        killed_by=SEEN,
        why="Causal layers of a window see their whole block.",
    ),
    Mutant(
        name="projected-full-ring-is-not-masked",
        file=RINGS,
        old="if self.in_place and longest + width <= self.max_size and",
        new="if self.in_place and longest + width <= self.max_size + 1 and",
        killed_by=SEEN,
        why="The first position that leaves a block's window is still shown.",
    ),
    Mutant(
        name="projected-ring-counts-from-its-end",
        file=RINGS,
        old="block = (held >= first) & (held < positions.block_ends(columns))",
        new="block = (held > first) & (held < positions.block_ends(columns))",
        killed_by=SEEN,
        why="The first column of a block is in nobody's sight.",
    ),
    # Context rows.
    Mutant(
        name="projected-block-stays",
        file=CONTEXT,
        old="            live.rollback([0] * live.row_count)\n",
        new="            live.rollback([1] * live.row_count)\n",
        killed_by=HELD,
        why="The pending token's column is left in the context.",
    ),
    Mutant(
        name="projected-failed-block-stays-open",
        file=CONTEXT,
        old="            yield block\n            block.check_attended()\n        finally:\n",
        new="            yield block\n            block.check_attended()\n"
        "        except ValueError:\n            raise\n        else:\n",
        killed_by=OF_CONTEXT + "test_a_block_that_fails_leaves_the_rows_as_they_were",
        why="After an error in a drafter no round can be begun.",
    ),
    Mutant(
        name="projected-block-begins-behind-itself",
        file=CONTEXT,
        old="        positions = self.positions\n        live.begin_round(width)\n",
        new="        positions = self.positions + 1\n        live.begin_round(width)\n",
        killed_by=OF_CONTEXT + "test_a_block_begins_where_each_row_ends[lengths0]",
        why="Positions of a block are off by one.",
    ),
    Mutant(
        name="projected-failed-append-stays-open",
        file=CONTEXT,
        old="            live.rollback(kept)  # a failure leaves the rows as they were\n",
        new="            if any(kept):\n                live.rollback(kept)\n",
        killed_by=OF_CONTEXT + "test_a_failed_append_leaves_the_rows_as_they_were",
        why="After an error in project() no round can be begun.",
    ),
    Mutant(
        name="projected-layer-may-be-forgotten",
        file=CONTEXT,
        old="            block.check_attended()\n",
        new="",
        killed_by=OF_CONTEXT + "test_each_layer_is_attended_once_with_the_whole_block[not all]",
        why="A layer that a drafter forgets to attend is not heard of.",
    ),
    Mutant(
        name="projected-taps-keep-their-own-type",
        file=PROJECTED,
        old=".astype(self._settings.dtype)",
        new="",
        killed_by="tests/test_block_mistakes.py::"
        "test_a_target_whose_layers_compute_in_another_type_is_drafted_for[mlx.core.bfloat16]",
        why="Rows of a target of mixed types are refused when they are handed over.",
    ),
    Mutant(
        name="projected-rows-keep-what-all-keep",
        file=CONTEXT,
        old="            kept = list(counts)\n",
        new="            kept = [max(counts)] * len(counts)\n",
        killed_by=HELD,
        why="Padding of the shorter rows becomes context.",
    ),
    Mutant(
        name="projected-layers-are-not-counted",
        file=CONTEXT,
        old="        if len(projected) != len(self._layers):\n",
        new="        if len(projected) < len(self._layers):\n",
        killed_by=OF_CONTEXT + "test_another_number_of_layers_is_refused_and_appends_nothing",
        why="A method that returns too many layers fails inside of an open round.",
    ),
    Mutant(
        name="projected-windows-are-kept-whole",
        file=CONTEXT,
        old="return KVCache() if self.window is None else RotatingKVCache(self.window, keep=0)",
        new="return KVCache()",
        killed_by=OF_CONTEXT + "test_windows_stay_small_over_a_long_text_and_others_grow_in_steps",
        why="Layers of a window hold and see the whole text.",
    ),
    Mutant(
        name="projected-joining-rows-go-first",
        file=CONTEXT,
        old="        change = state.prepare_append(states)\n",
        new="        change = state.prepare_append(states[::-1])\n",
        killed_by=HELD,
        why="Rows that join together change places.",
    ),
    Mutant(
        name="projected-join-before-the-commit",
        file=CONTEXT,
        old="        change = state.prepare_append(states)\n",
        new="        change = state.prepare_append(states)\n        change.commit()\n",
        killed_by=HELD,
        why="Rows join although the change is discarded.",
    ),
    Mutant(
        name="projected-last-rows-stay",
        file=CONTEXT,
        old="        if not keep:\n            self._state = None\n",
        new="        if not keep:\n            return\n",
        killed_by=OF_CONTEXT + "test_rows_that_left_leave_nothing_for_those_that_come",
        why="An emptied group still has its rows.",
    ),
    # Rounds.
    Mutant(
        name="projected-pending-is-not-read",
        file=PROJECTED,
        old="self._append(hidden, [1 + count for count in counts])",
        new="self._append(hidden, counts)",
        killed_by=AT_ONCE,
        why="A round leaves one position too few.",
    ),
    Mutant(
        name="projected-depth-is-not-pinned",
        file=PROJECTED,
        old="[min(d, longest) for d in asked.depths]",
        new="list(asked.depths)",
        killed_by=ALONE,
        why="A block is wider than any it was trained on.",
    ),
    Mutant(
        name="projected-blocks-are-as-wide-as-the-widest",
        file=PROJECTED,
        old="method.columns(max(each, 1)) for each in asked.depths",
        new="method.columns(depth) for _ in asked.depths",
        killed_by=ALONE,
        why="A row's drafts depend on how deep its neighbours draft.",
    ),
    Mutant(
        name="projected-depth-zero-computes-nothing",
        file=PROJECTED,
        old="        if asked.pending:\n            self._submit()\n",
        new="",
        killed_by=NO_GRAPH,
        why="While rows stand down, every round's hidden states are held.",
    ),
    Mutant(
        name="projected-consume-computes-nothing",
        file=PROJECTED,
        old="            self._append(hidden, counts)\n            self._submit()\n",
        new="            self._append(hidden, counts)\n",
        killed_by=OF_ROWS + "test_rounds_that_only_consume_let_no_graph_grow",
        why="What is consumed is held as a graph for ever.",
    ),
    Mutant(
        name="projected-commit-takes-short-contexts",
        file=PROJECTED,
        old="        width = 1 + max(map(len, drafts), default=0)\n",
        new="        width = 1 + max(counts, default=0)\n",
        killed_by=BAD_COMMIT,
        why="A context of another window than the round's is not noticed.",
    ),
    Mutant(
        name="projected-round-ends-before-its-context-is-looked-at",
        file=PROJECTED,
        old="        drafts, counts = self._rounds.accepted(accepted)\n",
        new="        drafts, counts = self._rounds.accepted(accepted)\n"
        "        self._rounds.end()\n",
        killed_by=BAD_COMMIT,
        why="A commit that was refused cannot be made again.",
    ),
    Mutant(
        name="projected-preview-shows-what-may-be-cut",
        file=PROJECTED,
        old="drafted.tokens if drafted.lengths is None else drafted.tokens[:, :1]",
        new="drafted.tokens",
        killed_by=AGREE,
        why="A preview shows more than the draft that confidence cuts.",
    ),
    Mutant(
        name="projected-rows-join-a-closed-group",
        file=PROJECTED,
        old="            if not self._rounds.closed:\n                change.commit()\n",
        new="            change.commit()\n",
        killed_by=OF_ROWS + "test_rows_that_join_after_the_end_do_not",
        why="A closed group takes rows, and holds their memory.",
    ),
    Mutant(
        name="projected-cold-rows-decode",
        file=PROJECTED,
        old="            if self._choose is not None:\n",
        new="            if self._choose is None and self.row_count < 0:\n",
        killed_by=OF_ROWS + "test_a_wrong_use_says_what_is_wrong_and_changes_nothing",
        why="A row whose prompt was never read drafts from nothing.",
    ),
    Mutant(
        name="projected-prefill-fails-without-a-word",
        file=PROJECTED,
        old='            raise ContractError("a prefill group drafts nothing; open a group that '
        'decodes")\n',
        new='            raise RuntimeError("a prefill group drafts nothing")\n',
        killed_by=OF_ROWS + "test_a_prefill_group_drafts_nothing",
        why="A misuse is told as an error of another kind.",
    ),
    # Choices and checkpoints.
    Mutant(
        name="projected-walks-share-a-step",
        file=CHOOSE,
        old="[step + at for step in self._steps]",
        new="list(self._steps)",
        killed_by="tests/test_drafting_choose.py::test_slots_at_once_are_slots_one_by_one",
        why="Every slot of a walk is drawn with the noise of the first.",
    ),
    Mutant(
        name="projected-tokens-are-not-compared",
        file=PROJECTED,
        old='        if attachment.metadata.get("tokens") != tokens:\n',
        new='        if attachment.metadata.get("tokens", tokens) != tokens:\n',
        killed_by=UNFIT,
        why="A checkpoint that does not say how far it is is believed.",
    ),
    Mutant(
        name="projected-window-is-stored-as-a-whole",
        file=ARRAYS,
        old="most = cache.max_size if isinstance(cache, RotatingKVCache) else positions",
        new="most = positions",
        killed_by=OF_CONTEXT + "test_a_windows_arrays_are_as_long_as_the_window_at_most",
        why="Full windows are never taken back.",
    ),
    Mutant(
        name="projected-row-is-restored-as-far-as-it-is-held",
        file=ARRAYS,
        old="        cache.offset = positions\n",
        new="        cache.offset = cache.keys.shape[2]\n",
        killed_by=HELD,
        why="A layer of a window believes that the text is as short as the window.",
    ),
    Mutant(
        name="projected-values-are-restored-as-keys",
        file=ARRAYS,
        old='cache.values = mx.array(arrays[f"{number}.values"])',
        new='cache.values = mx.array(arrays[f"{number}.keys"])',
        killed_by=HELD,
        why="One of two arrays is restored twice.",
    ),
    Mutant(
        name="projected-types-are-not-compared",
        file=ARRAYS,
        old="if tuple(array.shape) != shape or (dtype is not None and array.dtype != dtype):",
        new="if tuple(array.shape) != shape:",
        killed_by=ARRAYS_NAMED,
        why="A row of another type changes that of all rows.",
    ),
    Mutant(
        name="projected-more-arrays-than-asked-are-passed-over",
        file=ARRAYS,
        old="    if set(held) != set(wanted):\n",
        new="    if not set(held) >= set(wanted):\n",
        killed_by=ARRAYS_NAMED,
        why="A checkpoint of a deeper drafter is taken for one of this.",
    ),
    Mutant(
        name="projected-schemas-are-not-compared",
        file=ARRAYS,
        old="    if attachment.schema != schema:\n",
        new="    if not attachment.schema:\n",
        killed_by=UNFIT,
        why="A layout of another meaning is read as this one.",
    ),
    Mutant(
        name="projected-bound-method-is-of-the-first-target",
        file=PROVIDER,
        old="if self._bound is not None and self._bound[0] is target.identity:",
        new="if self._bound is not None:",
        killed_by=OF_ROWS + "test_a_method_is_bound_once_for_each_target",
        why="Drafts for one target are scored by another one's head.",
    ),
)
