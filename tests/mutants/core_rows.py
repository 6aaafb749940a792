"""Mutants of rows as they come, live, take tokens from outside, and go."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["ROW_MUTANTS"]

EXTERNAL = "specdec/verify/external.py"
GROUP = "specdec/verify/group.py"
HANDOVER = "specdec/verify/handover.py"
LANE = "specdec/verify/lane.py"
LIVE = "specdec/verify/live.py"
PREFILL = "specdec/verify/prefill.py"
ROW = "specdec/verify/row.py"
OF_EXECUTOR = "tests/test_executor.py::"
OF_FAULTS = "tests/test_executor_faults.py::"
OF_OUTSIDE = "tests/test_external_tokens.py::"
OF_PREFIX = "tests/test_prefix_in_executor.py::"
OF_REQUESTS = "tests/test_core_mutants_gaps_requests.py::"
OF_ROWS = "tests/test_core_mutants_gaps_rows.py::"
OF_STREAM = "tests/test_stream_generate.py::"

ROW_MUTANTS = (
    Mutant(
        name="chunks-are-one-token-too-long",
        file=PREFILL,
        old="places[-1] + step, *",
        new="places[-1] + step + 1, *",
        killed_by=OF_STREAM + "test_prompts_are_read_in_the_same_chunks_as_by_mlx_lm",
        why="A chunk takes more tokens than the caller allows.",
    ),
    Mutant(
        name="chunks-pass-over-the-cuts",
        file=PREFILL,
        old="*(cut for cut in cuts if cut > places[-1])",
        new="*(cut for cut in cuts if cut > end)",
        killed_by=OF_PREFIX + "test_a_snapshot_is_taken_where_the_request_says",
        why="No chunk ends where a snapshot is wanted.",
    ),
    Mutant(
        name="snapshot-is-taken-a-chunk-late",
        file=PREFILL,
        old="end in self._snapshots:",
        new="start in self._snapshots:",
        killed_by=OF_PREFIX + "test_a_snapshot_is_taken_where_the_request_says",
        why="The row is kept after the chunk behind the place that was asked for.",
    ),
    Mutant(
        name="snapshot-is-kept-under-one-token-less",
        file=PREFILL,
        old="tuple(row.tokens[:end])",
        new="tuple(row.tokens[: end - 1])",
        killed_by=OF_PREFIX + "test_the_same_prompt_is_read_once",
        why="A state is stored under fewer tokens than it has read.",
    ),
    Mutant(
        name="drafter-reads-each-chunk-twice",
        file=PREFILL,
        old="            draft.read(ids, window.context)\n",
        new="            draft.read(ids, window.context)\n"
        "            draft.read(ids, window.context)\n",
        killed_by=OF_EXECUTOR + "test_a_drafter_reads_each_prompt_position_once_with_the_targets"
        "_own_hidden_states",
        why="The draft row is twice as far as the target's.",
    ),
    Mutant(
        name="what-is-left-lags-a-chunk-behind",
        file=PREFILL,
        old="(self._chunks[0][0] if self._chunks else self._last)",
        new="(self._chunks[0][1] if self._chunks else self._last)",
        killed_by=OF_ROWS + "test_a_reading_tells_what_is_left_of_it",
        why="Whoever shares steps among prompts counts the next chunk as read.",
    ),
    Mutant(
        name="reading-is-done-before-its-last-step",
        file=PREFILL,
        old="                mx.clear_cache()\n                return end - start\n",
        new="                mx.clear_cache()\n                self.done = not self._chunks\n"
        "                return end - start\n",
        killed_by=OF_EXECUTOR + "test_host_drafts_never_change_a_token_and_state_stays_exact",
        why="A row joins without its checkpoint, and with nothing counted as read.",
    ),
    Mutant(
        name="failed-rows-begin-at-their-prompt",
        file=PREFILL,
        old="    tokens = tuple(row.tokens)\n",
        new="    tokens = row.request.prompt\n",
        killed_by=OF_ROWS + "test_a_row_of_a_failed_group_goes_on_where_it_was",
        why="A row that goes on in a new group has read less than it has emitted.",
    ),
    Mutant(
        name="early-window-in-spite-of-a-constraint",
        file=LIVE,
        old="if any(row.constraint is not None or row.positional for row in self.rows):",
        new="if any(row.constraint is None or row.positional for row in self.rows):",
        killed_by=OF_REQUESTS + "test_each_position_has_the_mask_of_its_own_place",
        why="A window is begun before it is known what may stand in it.",
    ),
    Mutant(
        name="first-tokens-keep-their-old-places",
        file=LIVE,
        old="{new: self.firsts[k] for new, k in enumerate(keep) if k in self.firsts}",
        new="{k: self.firsts[k] for k in keep if k in self.firsts}",
        killed_by=OF_ROWS
        + "test_first_tokens_stay_with_their_rows_when_another_leaves_before_them",
        why="After a row has left, first tokens go to other rows than their own.",
    ),
    Mutant(
        name="first-tokens-go-to-the-first-rows",
        file=LIVE,
        old="self.firsts[live + offset] = reading.first",
        new="self.firsts[offset] = reading.first",
        killed_by=OF_ROWS
        + "test_first_tokens_stay_with_their_rows_when_another_leaves_before_them",
        why="Rows that join count from the group's first row.",
    ),
    Mutant(
        name="firsts-are-drawn-again",
        file=GROUP,
        old="                live.firsts = {}\n",
        new="                live.firsts = dict(live.firsts)\n",
        killed_by=OF_ROWS
        + "test_first_tokens_stay_with_their_rows_when_another_leaves_before_them",
        why="The tokens that came with the prompts are emitted in each round.",
        endless=True,
    ),
    Mutant(
        name="extracted-row-lacks-the-open-window",
        file=LIVE,
        old="        if self.flight is not None:\n            self.commit_plain(self.flight)\n"
        "        assert self.state is not None\n        row, landed =",
        new="        assert self.state is not None\n        row, landed =",
        killed_by=OF_ROWS + "test_a_copy_of_a_rows_caches_covers_what_it_says",
        why="A row is copied in the middle of a window that was begun early.",
    ),
    Mutant(
        name="read-includes-what-is-pending",
        file=ROW,
        old="return (*self.tokens, *ends)[: self.processed]",
        new="return (*self.tokens, *ends)",
        killed_by=OF_PREFIX + "test_what_is_kept_is_what_was_really_read",
        why="A state is kept under a token that it has not read.",
    ),
    Mutant(
        name="outside-tokens-meet-a-window-begun-early",
        file=LIVE,
        old="        self.drop_flight()\n        self._leave",
        new="        self.flight = None\n        self._leave",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="A window that stands on other tokens is still open.",
    ),
    Mutant(
        name="outside-tokens-follow-a-pending-one-that-was-read",
        file=LIVE,
        old="        if not any(early):\n            return\n",
        new="        if early:\n            return\n",
        killed_by=OF_OUTSIDE + "test_a_window_that_was_begun_early_is_taken_back",
        why="What an early window read and kept is read again in front of the outside tokens.",
    ),
    Mutant(
        name="all-rows-lose-a-drafter-that-cannot-follow",
        file=LANE,
        old="gone = [place for place, chunk in chunks.items() if chunk]",
        new="gone = list(chunks)",
        killed_by=OF_OUTSIDE + "test_a_row_that_consumed_nothing_keeps_its_drafter",
        why="Rows that were given nothing from outside stop drafting with the others.",
    ),
    Mutant(
        name="pending-stays-unread-before-outside-tokens",
        file=EXTERNAL,
        old="        unread.append(row.pending)\n",
        new="        unread.append(token)\n",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="The target reads what it was given and never the token before it.",
    ),
    Mutant(
        name="outside-tokens-exceed-the-budget",
        file=EXTERNAL,
        old="if row.budget is not None and len(ids) > row.budget:",
        new="if row.budget is not None and len(ids) > row.budget + 1:",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="One token more than the request allows is taken.",
    ),
    Mutant(
        name="outside-tokens-are-padded-into-the-state",
        file=EXTERNAL,
        old="state.rollback([len(chunk) for chunk in chunks])",
        new="state.rollback([width for _ in chunks])",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="Rows that were given less keep the padding.",
    ),
    Mutant(
        name="drafter-misses-outside-tokens",
        file=EXTERNAL,
        old="            lane.consume(dict(enumerate(chunks)), context)\n",
        new="            lane.consume({}, context)\n",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="The drafter goes on from before the tokens that came from outside.",
    ),
    Mutant(
        name="outside-tokens-do-not-count-as-read",
        file=EXTERNAL,
        old="            row.processed += len(chunk)\n",
        new="            row.processed += 0 * len(chunk)\n",
        killed_by=OF_ROWS + "test_tokens_from_outside_are_read_as_if_the_row_had_written_them",
        why="What a row has read is counted too low from then on.",
    ),
    Mutant(
        name="outside-tokens-behind-an-end-are-taken",
        file=EXTERNAL,
        old='            row.end("stop")\n            break\n',
        new='            row.end("stop")\n',
        killed_by=OF_ROWS + "test_outside_tokens_end_a_row_where_its_rules_say",
        why="A row goes on behind its stop sequence.",
    ),
    Mutant(
        name="outside-tokens-never-spend-the-budget",
        file=EXTERNAL,
        old='    if row.budget == 0:\n        row.end("length")\n',
        new="",
        killed_by=OF_ROWS + "test_outside_tokens_end_a_row_where_its_rules_say",
        why="A row whose budget was filled from outside goes on, with a token too many.",
    ),
    Mutant(
        name="outside-tokens-break-a-constraint",
        file=EXTERNAL,
        old="    if allowed == len(ids):\n        return None\n",
        new="    if allowed >= len(ids) - 1:\n        return None\n",
        killed_by=OF_ROWS + "test_outside_tokens_end_a_row_where_its_rules_say",
        why="The last token is not checked, and its row fails over it with the others.",
    ),
    Mutant(
        name="final-read-is-not-written-back",
        file=HANDOVER,
        old="        alone.write_back(0, cache)\n",
        new="",
        killed_by="tests/test_prompt_cache.py::"
        "test_the_cache_covers_the_prompt_and_every_emitted_token[length-ngram]",
        why="The caller's cache lacks the last token, which was read.",
    ),
)
