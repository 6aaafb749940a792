"""Mutants of the heads plugin: mistakes that cost acceptance, and never a token.

Where a reference says what a head drafts (mlx-vlm's recording, the float64 head), a test is named;
where only the verbs of its rows are wrong, a check of the kit.
"""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["MTP", "MTP_MUTANTS"]

MTP = "plugins/specdec-mtp/src/specdec_mtp"
TESTS = "plugins/specdec-mtp/tests"
ROUNDS = "test_a_row_alone_drafts_what_mlx_vlm_drafts_in_both_rounds"
DENSE = f"{TESTS}/test_parity.py::{ROUNDS}[dense-true]"
GLM = f"{TESTS}/test_parity.py::{ROUNDS}[glm_moe_dsa-true]"
THREE = (
    f"{TESTS}/test_parity.py::"
    "test_three_rows_of_different_lengths_draft_what_each_drafts_alone_in_mlx_vlm[dense-true]"
)
OWN_CHAIN = (
    f"{TESTS}/test_nextn.py::"
    "test_a_chain_of_its_own_keeps_what_the_head_made_of_accepted_drafts[qwen3_5]"
)
FLOAT64 = (
    f"{TESTS}/test_nextn.py::"
    "test_after_every_acceptance_a_next_token_layer_drafts_from_the_targets_hiddens"
    "[glm4_moe_lite-own-raw]"
)
FORCED = (
    f"{TESTS}/test_nextn.py::"
    "test_after_every_acceptance_a_qwen_head_drafts_from_the_targets_hiddens[qwen3_5]"
)
POSITIONS = (
    f"{TESTS}/test_head_positions.py::"
    "test_positions_go_on_without_a_gap_whatever_is_accepted[qwen3_5-own-prompt]"
)
LET_GO = f"{TESTS}/test_head_positions.py::test_a_chunks_hidden_states_are_let_go[own]"
MTP_KIT = f"{TESTS}/test_head_contract.py::TestMtpRows"
PROBED = f"{TESTS}/test_probe.py::test_the_right_reading_agrees_most_and_the_head_is_left_as_it_was"
GAPS = f"{TESTS}/test_gaps.py"

MTP_MUTANTS = (
    # The head's own arithmetic.
    Mutant(
        name="mtp-hidden-is-joined-before-the-embedding",
        file=f"{MTP}/heads.py",
        old="[self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]",
        new="[self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embedded)]",
        killed_by=DENSE,
        why="The two halves of the joint map's columns are exchanged.",
    ),
    Mutant(
        name="mtp-norms-of-the-two-inputs-are-exchanged",
        file=f"{MTP}/heads.py",
        old="[self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]",
        new="[self.pre_fc_norm_hidden(embedded), self.pre_fc_norm_embedding(hidden)]",
        killed_by=DENSE,
        why="Each input gets the weights of the other one's norm.",
    ),
    Mutant(
        name="mtp-next-token-layer-joins-the-hidden-first",
        file=f"{MTP}/heads.py",
        old="[self.enorm(embedded), self.hnorm(hidden)]",
        new="[self.hnorm(hidden), self.enorm(embedded)]",
        killed_by=GLM,
        why="GLM's eh_proj is given the hidden state first.",
    ),
    Mutant(
        name="mtp-feed-is-the-other-output",
        file=f"{MTP}/live.py",
        old="return step.raw if self._settings.feeds_raw else step.scored",
        new="return step.scored if self._settings.feeds_raw else step.raw",
        killed_by=FLOAT64,
        why="A step goes on from the output on the other side of the head's norm.",
    ),
    Mutant(
        name="mtp-mask-is-a-word-for-latent-attention",
        file=f"{MTP}/layers.py",
        old="return_array=self.mask_as_array)",
        new="return_array=False)",
        killed_by=GLM,
        why="Layers that compute with the mask are given the word for it.",
    ),
    Mutant(
        name="mtp-no-mask-over-a-window",
        file=f"{MTP}/layers.py",
        old="return create_attention_mask(hidden, first, return_array=self.mask_as_array)",
        new="return None",
        killed_by=FORCED,
        why="Positions of a window see those behind them.",
    ),
    Mutant(
        name="mtp-layer-is-the-targets-next-one",
        file=f"{MTP}/layers.py",
        old="    while (index + 1) % interval or",
        new="    while",
        killed_by=f"{GAPS}::test_a_layer_attends_to_all_positions_wherever_the_targets_end",
        why="The head's number makes a linear attention layer, which has no such weights.",
    ),
    Mutant(
        name="mtp-layer-between-those-with-experts",
        file=f"{MTP}/layers.py",
        old="or index % frequency:",
        new="or (index + 1) % frequency:",
        killed_by=f"{GAPS}::test_a_layer_has_experts_where_only_some_of_the_targets_have",
        why="Every second layer has experts, and the head's number is one of the others.",
    ),
    # How a file is read.
    Mutant(
        name="mtp-norms-are-shifted-twice",
        file=f"{MTP}/loading.py",
        old="shifted(stored, 1.0) if shift else stored",
        new="shifted(stored, 2.0) if shift else stored",
        killed_by=DENSE,
        why="Norm weights get their 1 twice.",
    ),
    Mutant(
        name="mtp-norms-are-never-shifted",
        file=f"{MTP}/loading.py",
        old="shifted(stored, 1.0) if shift else stored",
        new="stored",
        killed_by=DENSE,
        why="Norm weights are used less 1, as they are stored.",
    ),
    Mutant(
        name="mtp-layout-of-the-trunk-tells-the-contrary",
        file=f"{MTP}/norms.py",
        old="        return files.raw_trunk, f",
        new="        return not files.raw_trunk, f",
        killed_by=f"{TESTS}/test_norms.py::test_a_converted_release_that_kept_its_head_has_had_it",
        why="A raw trunk is taken as the sign of finished norm weights.",
    ),
    Mutant(
        name="mtp-negative-means-do-not-decide",
        file=f"{MTP}/norms.py",
        old="    shift = seen if seen is True or told is None else told\n",
        new="    shift = seen if told is None else told\n",
        killed_by=f"{TESTS}/test_norms.py::"
        "test_a_split_release_of_unchanged_values_is_found_out_by_them",
        why="A file that says the wrong thing is believed against its values.",
    ),
    Mutant(
        name="mtp-own-tables-are-kept",
        file=f"{MTP}/loading.py",
        old="    return evolve(files, tensors=kept)\n",
        new="    return files if kept else files\n",
        killed_by=f"{TESTS}/test_loading.py::"
        "test_next_token_layers_load_from_their_release_by_kind[glm4_moe]",
        why="The copies of the target's embedding and head are read with the head.",
    ),
    Mutant(
        name="mtp-block-counts-as-drafts",
        file=f"{MTP}/loading.py",
        old="        return block - 1\n",
        new="        return block\n",
        killed_by=f"{GAPS}::test_a_block_counts_the_pending_token_and_absurd_ones_are_passed_over",
        why="A release's block is proposed in whole, though its first token is the pending one.",
    ),
    Mutant(
        name="mtp-router-is-quantized",
        file=f"{MTP}/build.py",
        old="not path.endswith(_KEPT)",
        new="bool(path)",
        killed_by=f"{GAPS}::test_routers_stay_as_they_are_when_a_head_is_quantized",
        why="Experts are chosen by four bits.",
    ),
    Mutant(
        name="mtp-draft-vocabulary-keeps-the-lists-order",
        file=f"{MTP}/vocabulary.py",
        old="    return tuple(ascending)\n",
        new="    return tuple(numbers)\n",
        killed_by=f"{TESTS}/test_vocabulary.py::test_numbers_of_numpy_and_tuples_are_ids_too",
        why="Ids are not sorted, so that rows of the cut head belong to others.",
    ),
    # The probe.
    Mutant(
        name="mtp-probe-compares-one-position-off",
        file=f"{MTP}/probe.py",
        old="[0, 1:]\n",
        new="[0, :-1]\n",
        killed_by=PROBED,
        why="The head is held to what the target says one position before.",
    ),
    Mutant(
        name="mtp-probe-leaves-the-last-norms",
        file=f"{MTP}/probe.py",
        old="set_norms(head, {name: before[name] for each in norms.values() for name in each})",
        new="set_norms(head, {})",
        killed_by=PROBED,
        why="The head is left with the norm weights of the last reading that was tried.",
    ),
    Mutant(
        name="mtp-probe-exchanges-the-hiddens",
        file=f"{MTP}/probe.py",
        old="last, final = port.layer_count - 1, port.layer_count\n",
        new="final, last = port.layer_count - 1, port.layer_count\n",
        killed_by=PROBED,
        why="Hidden states before and after the norm are taken for each other.",
    ),
    # What is read, and with which hidden state.
    Mutant(
        name="mtp-hidden-is-of-the-other-side-of-the-norm",
        file=f"{MTP}/provider.py",
        old="                context=self.reading.context,\n",
        new="                context=ContextKind.PRE_NORM,\n",
        killed_by=DENSE,
        why="The target's hidden states are taken before its final norm.",
    ),
    Mutant(
        name="mtp-prompt-is-read-one-hidden-late",
        file=f"{MTP}/reading.py",
        old="[(start - 1 + new, start - 1 + new) for new in range(1, count)]",
        new="[(start - 1 + new, start + new) for new in range(1, count)]",
        killed_by=DENSE,
        why="A token goes with the hidden state of its own position, which has seen it.",
    ),
    Mutant(
        name="mtp-cold-row-reads-its-first-token",
        file=f"{MTP}/reading.py",
        old="own += [] if cold else [(start - 1, len(had))]",
        new="own += [(start - 1, len(had))]",
        killed_by=DENSE,
        why="The first token of a prompt is read with a hidden state of zeros.",
    ),
    Mutant(
        name="mtp-warm-row-goes-on-from-padding",
        file=f"{MTP}/reading.py",
        old="own += [] if cold else [(start - 1, len(had))]",
        new="own += [] if cold else [(start - 1, start - 1)]",
        killed_by=f"{GAPS}::test_tokens_from_outside_go_on_from_what_each_row_has_not_read",
        why="The first token from outside goes with the last hidden of the row with most unread.",
    ),
    Mutant(
        name="mtp-unread-hidden-is-the-one-before",
        file=f"{MTP}/reading.py",
        old="            rest.append([start + count - 1])\n",
        new="            rest.append([start + count - 2])\n",
        killed_by=DENSE,
        why="The pending token is read with the hidden state before its own.",
    ),
    Mutant(
        name="mtp-row-without-new-tokens-loses-its-unread-ones",
        file=f"{MTP}/reading.py",
        old="[0] if cold else list(range(1 + len(had)))",
        new="[0] if cold else [len(had)]",
        killed_by=f"{GAPS}::test_tokens_from_outside_go_on_from_what_each_row_has_not_read",
        why="Others are given tokens, and a row keeps its last hidden and not those before.",
    ),
    Mutant(
        name="mtp-chunk-is-kept-alive",
        file=f"{MTP}/reading.py",
        old="else mx.contiguous(self.hidden)\n",
        new="else self.hidden\n",
        killed_by=LET_GO,
        why="The last hidden state is a view into a chunk's, which stay in memory.",
    ),
    Mutant(
        name="mtp-prompt-is-read-whatever-the-reading",
        file=f"{MTP}/rows.py",
        old="            everything = self._settings.reads_prompt\n",
        new="            everything = True\n",
        killed_by=FLOAT64,
        why="A head whose history is its own reads the prompt.",
    ),
    Mutant(
        name="mtp-consume-reads-the-padding",
        file=f"{MTP}/rows.py",
        old="self._live.follow(tokens, hidden, counts, everything=True)",
        new="self._live.follow(tokens, hidden, [tokens.shape[1]] * len(counts), everything=True)",
        killed_by="consumed_tokens_count_as_committed",
        why="Every row is given as many tokens as the longest.",
    ),
    Mutant(
        name="mtp-later-parts-of-a-long-text-have-whole-lengths",
        file=f"{MTP}/reading.py",
        old="[min(max(length - start, 0), end - start) for length in self.lengths]",
        new="[min(length, end - start) for length in self.lengths]",
        killed_by=f"{GAPS}::test_texts_of_unequal_length_are_read_alike_in_parts_and_at_once",
        why="A row that ended in an earlier part reads padding in the later ones.",
    ),
    # The rounds.
    Mutant(
        name="mtp-rows-end-at-the-padding",
        file=f"{MTP}/live.py",
        old="one_of_each([length - 1 for length in lengths], width)",
        new="one_of_each([width - 1 for _ in lengths], width)",
        killed_by=FORCED,
        why="The first draft is taken from the last place of the window, which may be padding.",
    ),
    Mutant(
        name="mtp-window-width-is-ignored",
        file=f"{MTP}/live.py",
        old="        width = live.window_width(needed, max(needed, widest))\n",
        new="        width = needed\n",
        killed_by=f"{GAPS}::test_first_windows_have_the_width_that_the_backend_asks_for",
        why="First windows have as many widths as there are acceptances.",
    ),
    Mutant(
        name="mtp-settled-hidden-is-one-late",
        file=f"{MTP}/live.py",
        old="        return hidden[:, :most]\n",
        new="        return mx.roll(hidden, -1, axis=1)[:, :most]\n",
        killed_by=DENSE,
        why="Accepted tokens are read with the hidden states of their own positions.",
    ),
    Mutant(
        name="mtp-settled-span-begins-one-late",
        file=f"{MTP}/live.py",
        old="mx.array(begins, mx.int32)[:, None] + mx.arange(most, dtype=mx.int32)",
        new="mx.array(begins, mx.int32)[:, None] + mx.arange(1, 1 + most, dtype=mx.int32)",
        killed_by=OWN_CHAIN,
        why="Behind kept entries a row goes on from the hidden state after the right one.",
    ),
    Mutant(
        name="mtp-own-chain-keeps-one-too-few",
        file=f"{MTP}/live.py",
        old="min(count, max(len(draft) - 1, 0)) if own else 0",
        new="min(count, max(len(draft) - 2, 0)) if own else 0",
        killed_by=OWN_CHAIN,
        why="An entry that was to be kept is read anew.",
    ),
    Mutant(
        name="mtp-own-chain-keeps-a-rejected-entry",
        file=f"{MTP}/live.py",
        old="min(count, max(len(draft) - 1, 0)) if own else 0",
        new="min(count + 1, max(len(draft) - 1, 0)) if own else 0",
        killed_by=OWN_CHAIN,
        why="The entry of the first rejected draft stays.",
    ),
    Mutant(
        name="mtp-true-chain-keeps-its-entries",
        file=f"{MTP}/live.py",
        old="min(count, max(len(draft) - 1, 0)) if own else 0",
        new="min(count, max(len(draft) - 1, 0)) if own or count else 0",
        killed_by=DENSE,
        why="Entries of accepted drafts stay as they were drafted, under both settings.",
    ),
    Mutant(
        name="mtp-too-little-is-taken-back",
        file=f"{MTP}/live.py",
        old="self._live.take_back([steps - count for count in kept])",
        new="self._live.take_back([max(steps - count - 1, 0) for count in kept])",
        killed_by=POSITIONS,
        why="One entry of a rejected draft stays in the head's history.",
    ),
    Mutant(
        name="mtp-commit-takes-nothing-back",
        file=f"{MTP}/rows.py",
        old="self._live.settle(drafts, counts, hidden, max(longest - 1, 0))",
        new="self._live.settle(drafts, counts, hidden, 0)",
        killed_by=THREE,
        why="All entries of a chain stay in the head's history.",
    ),
    Mutant(
        name="mtp-unread-tokens-are-one-short",
        file=f"{MTP}/live.py",
        old="            tuple(draft[begin:count])\n",
        new="            tuple(draft[begin : max(count - 1, begin)])\n",
        killed_by=DENSE,
        why="The last accepted token is never read, and the pending one takes its hidden.",
    ),
    Mutant(
        name="mtp-preview-is-remembered",
        file=f"{MTP}/live.py",
        old="        live.rollback(lengths if keep else [0] * len(lengths))\n",
        new="        live.rollback(lengths)\n",
        killed_by="preview_changes_nothing",
        why="A preview leaves its pairs in the head's history, and the draft reads them again.",
    ),
    # Draws.
    Mutant(
        name="mtp-chain-draws-with-one-step",
        file=f"{MTP}/rows.py",
        old="[step + at for step in asked.steps]",
        new="asked.steps",
        killed_by="draws_count_on_from_the_rows_step",
        why="All drafts of a chain are drawn with the noise of the first.",
    ),
    Mutant(
        name="mtp-rows-of-the-cut-head-are-of-another-target",
        file=f"{MTP}/provider.py",
        old="if self._subset is None or self._subset[0] is not target.identity:",
        new="if self._subset is None:",
        killed_by=f"{GAPS}::test_another_target_has_its_own_listed_rows",
        why="Listed ids are scored with the rows of the target that was opened first.",
    ),
    Mutant(
        name="mtp-listed-rows-are-scored-in-whole",
        file=f"{MTP}/select.py",
        old="        if self._project is not None and self._choose.lists:\n",
        new="        if self._project is not None and not self._choose.lists:\n",
        killed_by=f"{GAPS}::test_listed_drafts_are_drawn_at_their_own_steps_from_the_listed_rows",
        why="The target's whole head scores where the rows draw over listed ids.",
    ),
    # Membership and checkpoints.
    Mutant(
        name="mtp-filter-forgets-the-order-of-the-unread",
        file=f"{MTP}/live.py",
        old="        self._unread = self._unread.taken(keep)\n",
        new="        self._unread = self._unread.taken(range(len(keep)))\n",
        killed_by="filter_keeps_and_reorders",
        why="Rows change places, and what they have not read does not.",
    ),
    Mutant(
        name="mtp-cold-rows-keep-their-old-places",
        file=f"{MTP}/reading.py",
        old="frozenset(new for new, old in enumerate(keep) if old in self.cold)",
        new="frozenset(old for old in keep if old in self.cold)",
        killed_by=f"{GAPS}::test_a_cold_row_that_changes_places_is_cold_there",
        why="A row that has read nothing is taken for one that has after a filter.",
    ),
    Mutant(
        name="mtp-joining-rows-are-padded-on-the-left",
        file=f"{MTP}/reading.py",
        old="[(0, 0), (0, width - held), (0, 0)]",
        new="[(0, 0), (width - held, 0), (0, 0)]",
        killed_by="rows_join_behind_the_others",
        why="A row with fewer unread hidden states than others reads zeros first.",
    ),
    Mutant(
        name="mtp-capture-without-unread-tokens",
        file=f"{MTP}/reading.py",
        old="        return tokens, self.hidden[row : row + 1, : 1 + len(tokens)]\n",
        new="        return (), self.hidden[row : row + 1, len(tokens) : 1 + len(tokens)]\n",
        killed_by=f"{GAPS}::test_what_a_stored_row_has_not_read_comes_back_with_it",
        why="Accepted tokens that were not read yet are missing in a stored row's history.",
    ),
    Mutant(
        name="mtp-restored-row-loses-its-last-hidden",
        file=f"{MTP}/attachment.py",
        old="    return HeadRow(tokens, caches, unread, mx",
        new="    return HeadRow(tokens, caches, unread[:-1], mx",
        killed_by="restored_row_goes_on_the_same",
        why="The pending token is read with the hidden state before the last.",
    ),
    Mutant(
        name="mtp-namespace-lacks-the-reading",
        file=f"{MTP}/provider.py",
        old="{weights_identity(self._head)}:{self.reading}",
        new="{weights_identity(self._head)}",
        killed_by=f"{MTP_KIT}::test_namespace_tells_artifacts_apart",
        why="Rows stored under one reading are restored under another.",
    ),
    Mutant(
        name="mtp-namespace-lacks-the-weights",
        file=f"{MTP}/provider.py",
        old="{weights_identity(self._head)}:{self.reading}",
        new="{self.reading}",
        killed_by=f"{MTP_KIT}::test_namespace_tells_artifacts_apart",
        why="Rows stored by one head are restored by another.",
    ),
    Mutant(
        name="mtp-layout-is-of-the-first-targets-type",
        file=f"{MTP}/provider.py",
        old="dtype = port.embed(mx.zeros((1, 1), mx.int32)).dtype",
        new="dtype = [*self._settings, port.embed(mx.zeros((1, 1), mx.int32)).dtype][0]",
        killed_by=f"{GAPS}::test_rows_over_targets_of_two_types_are_stored_and_restored",
        why="Over a target of another type a stored row is never taken back.",
    ),
)
