"""Mutants of what a request asks beside tokens: shaped draws, the walk, forced drafts, reports."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["REQUEST_MUTANTS"]

DRAWS = "specdec/verify/draws.py"
FORCED = "specdec/verify/forced.py"
ASKING = "specdec/verify/asking.py"
DRAFTS = "specdec/verify/drafts.py"
LANE = "specdec/verify/lane.py"
LOGPROBS = "specdec/verify/logprobs.py"
POSITIONAL = "specdec/verify/positional.py"
PROPOSALS = "specdec/verify/proposals.py"
ROW = "specdec/verify/row.py"
VERIFIER = "specdec/verify/verifier.py"
WALK = "specdec/verify/walk.py"
OF_REQUESTS = "tests/test_core_mutants_gaps_requests.py::"
OF_ROWS = "tests/test_core_mutants_gaps_rows.py::"
OF_FAULTS = "tests/test_executor_faults.py::"

REQUEST_MUTANTS = (
    Mutant(
        name="mask-comes-before-the-processors",
        file=DRAWS,
        old="""    if row.processors:
        logits = row.processors.apply(view, logits)
    if mask is None:
        return logits
    count = min(mask.shape[0], logits.shape[0])
    masked = mx.where(mask[:count], logits[:count], -mx.inf)
    return masked if count == logits.shape[0] else mx.concatenate([masked, logits[count:]])
""",
        new="""    if mask is not None:
        count = min(mask.shape[0], logits.shape[0])
        masked = mx.where(mask[:count], logits[:count], -mx.inf)
        logits = mx.concatenate([masked, logits[count:]])
    return row.processors.apply(view, logits) if row.processors else logits
""",
        killed_by=OF_REQUESTS + "test_a_constraint_has_the_last_word_behind_the_processors",
        why="A processor gives back what the constraint has excluded.",
    ),
    Mutant(
        name="early-sample-is-not-in-the-history",
        file=DRAWS,
        old="window[known:].astype(mx.int32)",
        new="window[1:].astype(mx.int32)",
        killed_by=OF_REQUESTS + "test_penalties_see_each_token_once_and_in_time",
        why="The token that a window begun early is built on is unknown to its processors.",
    ),
    Mutant(
        name="pending-token-is-twice-in-the-history",
        file=DRAWS,
        old="window[known:].astype(mx.int32)",
        new="window.astype(mx.int32)",
        killed_by=OF_REQUESTS + "test_penalties_see_each_token_once_and_in_time",
        why="The head of the window is part of the history already.",
    ),
    Mutant(
        name="nothing-left-gives-a-token",
        file=DRAWS,
        old="        samples = mx.where(nothing, -1, samples.astype(mx.int32))\n",
        new="        samples = samples.astype(mx.int32)\n",
        killed_by=OF_REQUESTS + "test_a_row_with_nothing_left_to_draw_ends_with_what_it_had",
        why="Where all ids are excluded, the row emits token 0.",
    ),
    Mutant(
        name="minus-one-is-emitted",
        file=WALK,
        old="        if sample < 0:\n",
        new="        if sample < -1:\n",
        killed_by=OF_REQUESTS + "test_a_row_with_nothing_left_to_draw_ends_with_what_it_had",
        why="The mark of an empty draw becomes a token.",
    ),
    Mutant(
        name="dtypes-of-rows-are-joined",
        file=DRAWS,
        old="        if len({part.dtype for part in parts}) == 1:\n",
        new="        if parts:\n",
        killed_by=OF_REQUESTS + "test_a_row_of_another_dtype_draws_what_it_draws_alone",
        why="A row's draw depends on the dtype that a neighbour's processor returns.",
    ),
    Mutant(
        name="history-on-the-device-skips-what-came-before",
        file=ROW,
        old="done = held.shape[0] - len(before)",
        new="done = held.shape[0]",
        killed_by=OF_REQUESTS
        + "test_a_rows_history_is_what_was_before_its_prompt_and_all_of_its_tokens",
        why="After the first round, a row with a history misses as many of its new tokens.",
    ),
    Mutant(
        name="history-on-the-device-is-kept-as-it-was",
        file=ROW,
        old="        if fresh:\n            ids = mx",
        new="        if fresh and held is None:\n            ids = mx",
        killed_by=OF_REQUESTS
        + "test_a_rows_history_is_what_was_before_its_prompt_and_all_of_its_tokens",
        why="Processors see the prompt and nothing of the output.",
    ),
    Mutant(
        name="positions-draw-with-one-step",
        file=POSITIONAL,
        old="row, step = self.row, self.row.drawn + position",
        new="row, step = self.row, self.row.drawn",
        killed_by=OF_REQUESTS
        + "test_code_with_a_state_runs_once_a_token_with_the_tokens_of_plain_decoding",
        why="All positions of a window use the noise of its first.",
    ),
    Mutant(
        name="positions-share-one-history",
        file=POSITIONAL,
        old="            if position < len(self.draft):\n                history",
        new="            if position < 0:\n                history",
        killed_by=OF_REQUESTS
        + "test_code_with_a_state_runs_once_a_token_with_the_tokens_of_plain_decoding",
        why="A processor is not shown the drafts that were accepted before its position.",
    ),
    Mutant(
        name="positions-are-drawn-ahead",
        file=POSITIONAL,
        old="        history = self.row.history()\n"
        "        for position in range(len(self.draft) + 1):\n"
        "            yield self._draw(history, position)\n"
        "            if position < len(self.draft):\n"
        "                history = mx.concatenate("
        "[history, mx.array([self.draft[position]], mx.int32)])\n",
        new="        history, drawn = self.row.history(), []\n"
        "        for position in range(len(self.draft) + 1):\n"
        "            drawn.append(self._draw(history, position))\n"
        "            history = mx.concatenate("
        "[history, mx.array([*self.draft, 0][position : position + 1], mx.int32)])\n"
        "        yield from drawn\n",
        killed_by=OF_REQUESTS
        + "test_code_with_a_state_runs_once_a_token_with_the_tokens_of_plain_decoding",
        why="Code with a state is called for positions that are never reached.",
    ),
    Mutant(
        name="positions-have-the-first-ones-mask",
        file=POSITIONAL,
        old="allowed = self.mask[position][None]",
        new="allowed = self.mask[0][None]",
        killed_by=OF_REQUESTS + "test_each_position_has_the_mask_of_its_own_place",
        why="What the constraint allows behind the drafts is not looked at.",
    ),
    Mutant(
        name="constraint-is-not-advanced",
        file=ROW,
        old="stop = self.constraint is not None and bool(self.constraint.advance(token))",
        new="stop = self.constraint is None and False",
        killed_by=OF_REQUESTS + "test_each_position_has_the_mask_of_its_own_place",
        why="Each round begins the constraint where the one before did.",
    ),
    Mutant(
        name="rules-behind-an-end-are-skipped",
        file=ROW,
        old="stop |= stops is not None and bool(stops(token))",
        new="stop = stop or (stops is not None and bool(stops(token)))",
        killed_by=OF_REQUESTS + "test_a_rule_is_told_the_token_with_which_another_ends_the_row",
        why="A rule misses the last token of a row that another rule ends.",
    ),
    Mutant(
        name="token-passes-before-its-rules",
        file=WALK,
        old="        stop = row.ends_with",
        new="        passed.append(token)\n        stop = row.ends_with",
        killed_by=OF_FAULTS
        + "test_a_stop_rule_that_raises_ends_its_row_alone_after_the_tokens_before",
        why="The token over which a rule raised is emitted all the same.",
    ),
    Mutant(
        name="forced-drafts-exceed-the-budget",
        file=FORCED,
        old="row.within_budget(row.request.num_forced_tokens)",
        new="row.request.num_forced_tokens",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="A window is wider than the tokens that may still be emitted.",
    ),
    Mutant(
        name="forced-drafts-reach-who-cannot-follow",
        file=ASKING,
        old="return place not in members.rows or members.offers(SupportsConsume)",
        new="return members.group is not None",
        killed_by=OF_ROWS + "test_a_drafter_that_cannot_follow_drafts_without_what_is_forced",
        why="A drafter without consume() is asked to take tokens, and fails.",
    ),
    Mutant(
        name="forced-drafts-are-not-consumed",
        file=ASKING,
        old="        if self._ahead and context is ContextKind.NONE:\n",
        new="        if self._ahead and context is not ContextKind.NONE:\n",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="The drafter drafts behind tokens that it has never read.",
    ),
    Mutant(
        name="consumed-includes-the-pending-token-twice",
        file=ASKING,
        old="{row: [rows[row].pending, *ids[:-1]] for row, ids in self._ahead.items()}",
        new="{row: [rows[row].pending, *ids] for row, ids in self._ahead.items()}",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="The last forced token is read, and is the pending one of the draft as well.",
    ),
    Mutant(
        name="forced-drafts-are-committed-as-drafted",
        file=ASKING,
        old="own = [count - len(ahead.get(row, ())) for row, count in enumerate(accepted)]",
        new="own = list(accepted)",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="The drafter is told that it drafted what the constraint forced.",
    ),
    Mutant(
        name="drafts-behind-forced-ones-have-the-wrong-step",
        file=DRAFTS,
        old="asked.steps.append(row.drawn + (count if behind else 0))",
        new="asked.steps.append(row.drawn)",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="A drafter that samples draws with the noise of an earlier position.",
    ),
    Mutant(
        name="drafts-follow-the-pending-token",
        file=DRAFTS,
        old="asked.pending.append(ahead[-1] if ahead and behind else row.pending)",
        new="asked.pending.append(row.pending)",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="A drafter is asked what follows a token that others stand behind.",
    ),
    Mutant(
        name="forced-drafts-come-behind-the-drafters",
        file=DRAFTS,
        old="[[*forced.get(index, ()), *row] for index",
        new="[[*row, *forced.get(index, ())] for index",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="What is certain stands behind what is guessed.",
    ),
    Mutant(
        name="drafts-behind-forced-ones-exceed-the-budget",
        file=DRAFTS,
        old="room = row.within_budget(row.asked_width + count) - count",
        new="room = row.within_budget(row.asked_width)",
        killed_by=OF_ROWS + "test_a_drafter_drafts_behind_what_is_forced",
        why="The budget of the drafts is counted without the forced ones in front of them.",
    ),
    Mutant(
        name="rank-counts-the-token-itself",
        file=LOGPROBS,
        old="ranks = 1 + (scores > chosen).sum(axis=-1)",
        new="ranks = 1 + (scores >= chosen).sum(axis=-1)",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="The most probable token has rank 2.",
    ),
    Mutant(
        name="reports-of-the-position-before",
        file=LOGPROBS,
        old="            self.chosen[row][position],\n",
        new="            self.chosen[row][max(position - 1, 0)],\n",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="A drafted token reports its neighbour's log-probability (llama.cpp #27972).",
    ),
    Mutant(
        name="reports-come-before-the-processors",
        file=DRAWS,
        old="""            logits = mx.stack(parts)
            logprobs = normalize(logits)
            samples = samplers.draw(logprobs, plan.steps, plan.drafted)
""",
        new="""            logprobs, logits = normalize(logits), mx.stack(parts)
            samples = samplers.draw(normalize(logits), plan.steps, plan.drafted)
""",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="What is reported is not what was drawn from.",
    ),
    Mutant(
        name="alternatives-come-worst-first",
        file=LOGPROBS,
        old="order = mx.argsort(-values, axis=-1)",
        new="order = mx.argsort(values, axis=-1)",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="The alternatives are sorted the wrong way round.",
    ),
    Mutant(
        name="excluded-ids-are-alternatives",
        file=LOGPROBS,
        old="for token, value in list(top)[:count] if value > -math.inf)",
        new="for token, value in list(top)[:count] if value >= -math.inf)",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="Ids that a processor rules out are reported with minus infinity.",
    ),
    Mutant(
        name="alternatives-as-many-as-a-neighbour-wants",
        file=LOGPROBS,
        old="for token, value in list(top)[:count] if value > -math.inf)",
        new="for token, value in top if value > -math.inf)",
        killed_by=OF_ROWS + "test_each_token_reports_its_own_place_in_what_it_was_drawn_from",
        why="A row reports more alternatives in company than alone.",
    ),
)
