"""Mutants of the assistants' plugin: mistakes that cost acceptance, and never a token.

Where a reference says what an assistant drafts (transformers' and mlx-vlm's recordings, plain
float64 computations), a test is named; where only the verbs of its rows are wrong, a check of the
kit.
"""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["ASSISTANT", "ASSISTANT_MUTANTS"]

ASSISTANT = "plugins/specdec-assistant/src/specdec_assistant"
TESTS = "plugins/specdec-assistant/tests"
OFFICIAL = (
    f"{TESTS}/test_assistant_parity.py::"
    "test_rows_of_different_length_draft_together_what_transformers_drafts_for_each"
)
WHOLE = f"{OFFICIAL}[whole-None]"
SPARSE = f"{OFFICIAL}[sparse-None]"
UNTIED = f"{OFFICIAL}[untied-None]"
ADVANCING = f"{TESTS}/test_assistant_parity.py::test_steps_may_advance[whole]"
FITTED = f"{TESTS}/test_assistant_parity.py::test_ids_of_one_vocabulary_alone_are_cut_or_impossible"
DENIED = f"{TESTS}/test_assistant_parity.py::test_centroids_are_used_where_the_config_denies_them"
IN_A_ROUND = (
    f"{TESTS}/test_assistant_pairing.py::"
    "test_what_only_a_round_shows_is_refused_there_and_no_round_is_open"
)
GEMMAS = (
    f"{TESTS}/test_assistant_pairing.py::"
    "test_what_a_gemmas_settings_tell_is_refused_when_it_is_loaded"
)

ASSISTANT_MUTANTS = (
    # The network.
    Mutant(
        name="assistant-hidden-is-joined-before-the-embedding",
        file=f"{ASSISTANT}/model.py",
        old="mx.concatenate([embedded, hidden], axis=-1)",
        new="mx.concatenate([hidden, embedded], axis=-1)",
        killed_by=WHOLE,
        why="The two halves of the first projection's columns are exchanged.",
    ),
    Mutant(
        name="assistant-scale-of-a-layer-is-left-out",
        file=f"{ASSISTANT}/layers.py",
        old="x * self.layer_scalar",
        new="x + 0 * self.layer_scalar",
        killed_by=WHOLE,
        why="A layer's output is not scaled.",
    ),
    Mutant(
        name="assistant-products-are-scaled-by-the-head",
        file=f"{ASSISTANT}/layers.py",
        old="        self.scale = config.scale\n",
        new="        self.scale = self.head_dim**-0.5\n",
        killed_by=WHOLE,
        why="Products of normed queries and keys are scaled once more.",
    ),
    Mutant(
        name="assistant-queries-stand-behind-the-last-key",
        file=f"{ASSISTANT}/rows.py",
        old="mx.array([max(count - 1, 0) for count in self._tokens], mx.int32)",
        new="mx.array([max(count, 0) for count in self._tokens], mx.int32)",
        killed_by=WHOLE,
        why="Queries stand at the pending token's position.",
    ),
    Mutant(
        name="assistant-steps-never-advance",
        file=f"{ASSISTANT}/rows.py",
        old="anchors + at if own.advances else anchors",
        new="anchors",
        killed_by=ADVANCING,
        why="The option that lets steps advance does nothing.",
    ),
    Mutant(
        name="assistant-normed-state-goes-on",
        file=f"{ASSISTANT}/rows.py",
        old="            normed, hidden = own.model(",
        new="            normed, _ = own.model(",
        killed_by=WHOLE,
        why="Every step is given the target's own state.",
    ),
    Mutant(
        name="assistant-rotated-pairs-are-rounded-up",
        file=f"{ASSISTANT}/config.py",
        old="2 * int(part * head_dim // 2)",
        new="2 * int(part * head_dim // 2 + 1)",
        killed_by=UNTIED,
        why="One pair more is turned where the part of a head is odd.",
    ),
    # What is borrowed.
    Mutant(
        name="assistant-window-is-one-wider",
        file=f"{ASSISTANT}/lent.py",
        old="columns >= ends - window",
        new="columns >= ends - window - 1",
        killed_by=WHOLE,
        why="A sliding layer sees a position more than the target's does.",
    ),
    Mutant(
        name="assistant-padding-is-seen",
        file=f"{ASSISTANT}/lent.py",
        old="    seen = columns < ends\n",
        new="    seen = columns < length + 0 * ends\n",
        killed_by=WHOLE,
        why="Shorter rows look at what is behind their own positions.",
    ),
    Mutant(
        name="assistant-donors-of-other-rows-are-taken",
        file=f"{ASSISTANT}/lent.py",
        old="if tuple(donors.positions) != tuple(tokens):",
        new="if len(donors.positions) != len(tokens):",
        killed_by=f"{IN_A_ROUND}[donors4-ContractError-[3] tokens]",
        why="K/V that hold rejected drafts are read without a word.",
    ),
    Mutant(
        name="assistant-global-heads-are-not-known",
        file=f"{ASSISTANT}/pairing.py",
        old='size = getattr(args, "global_head_dim", None) or size',
        new="pass",
        killed_by=GEMMAS,
        why="Heads of full layers are taken for those of sliding ones.",
    ),
    # Heads.
    Mutant(
        name="assistant-centroids-are-the-worst",
        file=f"{ASSISTANT}/heads.py",
        old="mx.argpartition(-self.centroids(hidden)",
        new="mx.argpartition(self.centroids(hidden)",
        killed_by=SPARSE,
        why="The tokens of the least fitting centroids are scored.",
    ),
    Mutant(
        name="assistant-candidates-are-in-no-order",
        file=f"{ASSISTANT}/heads.py",
        old="ids = mx.sort(groups.reshape(hidden.shape[0], -1), axis=-1)",
        new="ids = groups.reshape(hidden.shape[0], -1)",
        killed_by=f"{FITTED}[64-sparse]",
        why="A tie falls to any of the tokens.",
    ),
    Mutant(
        name="assistant-head-is-what-the-config-says",
        file=f"{ASSISTANT}/loading.py",
        old="    if CENTROIDS in files.tensors:\n",
        new='    if files.config.get("use_ordered_embeddings"):\n',
        killed_by=DENIED,
        why="The head is chosen by a config that releases get wrong.",
    ),
    Mutant(
        name="assistant-missing-ids-score-zero",
        file=f"{ASSISTANT}/heads.py",
        old="    nothing = mx.array(-mx.inf, logits.dtype)\n",
        new="    nothing = mx.array(0.0, logits.dtype)\n",
        killed_by=f"{FITTED}[64-whole]",
        why="Ids that the drafter lacks may be drafted.",
    ),
    # Rows.
    Mutant(
        name="assistant-state-is-of-the-pending-token",
        file=f"{ASSISTANT}/rows.py",
        old="            self._hidden = _at(hidden, counts)\n",
        new="            self._hidden = hidden[:, :1]\n",
        killed_by="rows_draft_as_cold_rows",
        why="After accepted drafts the state is of a position too early.",
    ),
    Mutant(
        name="assistant-filter-forgets-the-states",
        file=f"{ASSISTANT}/rows.py",
        old="self._hidden = self._hidden[mx.array(list(keep), mx.int32)] if keep",
        new="self._hidden = self._hidden[: len(keep)] if keep",
        killed_by="filter_keeps_and_reorders",
        why="Rows change places, and their states do not.",
    ),
    Mutant(
        name="assistant-unread-rows-lose-their-state",
        file=f"{ASSISTANT}/rows.py",
        old="            self._hidden = mx.where(read, last, self._hidden)\n",
        new="            self._hidden = last + 0 * read\n",
        killed_by="consumed_tokens_count_as_committed",
        why="A row that consumes nothing takes what is in its neighbour's column.",
    ),
    Mutant(
        name="assistant-steps-of-draws-stand-still",
        file=f"{ASSISTANT}/rows.py",
        old="[step + at for step in asked.steps]",
        new="asked.steps",
        killed_by="draws_count_on_from_the_rows_step",
        why="All drafts of a round are drawn with the noise of the first.",
    ),
    Mutant(
        name="assistant-chunk-is-not-counted",
        file=f"{ASSISTANT}/rows.py",
        old="            self._tokens = [count + length for count in self._tokens]\n",
        new="            self._tokens = [length for _ in self._tokens]\n",
        killed_by="prefill_in_chunks_equals_prefill_at_once",
        why="A second chunk counts as the first.",
    ),
)
