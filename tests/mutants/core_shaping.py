"""Mutants of what shapes logits before a draw: processors, penalties, masks of tokens."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["SHAPING_MUTANTS"]

MASKS = "specdec/sampling/masks.py"
PENALTIES = "specdec/sampling/penalties.py"
PROCESSORS = "specdec/sampling/processors.py"
OF_PROCESSORS = "tests/test_processors.py::"

SHAPING_MUTANTS = (
    Mutant(
        name="history-lacks-the-token-of-the-position",
        file=PROCESSORS,
        old="return self.tokens[: self.history + 1 + position]",
        new="return self.tokens[: self.history + position]",
        killed_by=OF_PROCESSORS
        + "test_a_stateless_callable_sees_exactly_each_positions_own_tokens",
        why="A processor is shown one token too few: the one that the logits follow is missing.",
    ),
    Mutant(
        name="later-drafts-are-in-the-history",
        file=PROCESSORS,
        old="return self.tokens[: self.history + 1 + position]",
        new="return self.tokens",
        killed_by=OF_PROCESSORS
        + "test_a_stateless_callable_sees_exactly_each_positions_own_tokens",
        why="Every position of a window is shown the whole window.",
    ),
    Mutant(
        name="later-drafts-are-in-the-context",
        file=PROCESSORS,
        old="ends = mx.arange(self.history, self.tokens.size)[:, None]",
        new="ends = mx.full((self.width, 1), self.tokens.size - 1, mx.int32)",
        killed_by=OF_PROCESSORS + "test_later_drafts_never_reach_earlier_positions",
        why="Penalties of all positions look back from the last draft.",
    ),
    Mutant(
        name="context-is-the-first-positions",
        file=PROCESSORS,
        old="ends = mx.arange(self.history, self.tokens.size)[:, None]",
        new="ends = mx.full((self.width, 1), self.history, mx.int32)",
        killed_by=OF_PROCESSORS
        + "test_a_window_processor_is_shown_the_same_tokens_by_at_and_by_context",
        why="Penalties know what was emitted, and not the accepted drafts of the same window.",
    ),
    Mutant(
        name="context-is-one-token-too-long",
        file=PROCESSORS,
        old="count = min(size, self.tokens.size)",
        new="count = min(size + 1, self.tokens.size)",
        killed_by=OF_PROCESSORS
        + "test_a_penalty_over_a_window_has_the_bits_of_mlx_lms_at_each_position",
        why="A penalty looks back one token further than it was told.",
    ),
    Mutant(
        name="filling-of-a-short-context-counts",
        file=PROCESSORS,
        old="return self.tokens[mx.maximum(places, 0)], places >= 0",
        new="return self.tokens[mx.maximum(places, 0)], None",
        killed_by=OF_PROCESSORS
        + "test_a_penalty_over_a_window_has_the_bits_of_mlx_lms_at_each_position",
        why="The first token of a short history is counted as often as it fills up the context.",
    ),
    Mutant(
        name="processors-share-one-array-of-logits",
        file=PROCESSORS,
        old="member.process_window(view, logits[:])",
        new="member.process_window(view, logits)",
        killed_by=OF_PROCESSORS + "test_a_processor_that_assigns_changes_nobody_elses_array",
        why="A processor that assigns into its logits writes into the target's.",
    ),
    Mutant(
        name="all-positions-get-the-first-ones-logits",
        file=PROCESSORS,
        old="member(view.at(i), logits[i : i + 1])",
        new="member(view.at(i), logits[:1])",
        killed_by=OF_PROCESSORS + "test_a_window_is_its_positions_one_by_one",
        why="A callable is given the logits of the pending token at each position.",
    ),
    Mutant(
        name="processors-run-from-the-last",
        file=PROCESSORS,
        old="        for member in self.chain:\n"
        "            if isinstance(member, WindowProcessor):",
        new="        for member in self.chain[::-1]:\n"
        "            if isinstance(member, WindowProcessor):",
        killed_by=OF_PROCESSORS + "test_the_whole_chain_has_the_bits_of_mlx_lms_whole_chain",
        why="The chain is applied backwards: penalties before the bias that they should see.",
    ),
    Mutant(
        name="mark-of-statelessness-is-inherited",
        file=PROCESSORS,
        old="return getattr(function, _MARK, None) in {id(owner) for owner in owners}",
        new="return any(getattr(owner, _MARK, None) is not None for owner in owners)",
        killed_by=OF_PROCESSORS + "test_any_other_callable_makes_the_chain_positional",
        why="A wrapper that copies attributes is taken for stateless, whatever it counts.",
    ),
    Mutant(
        name="stateful-processor-takes-a-window",
        file=PROCESSORS,
        old="return bool(self._stateful)",
        new="return False",
        killed_by=OF_PROCESSORS + "test_any_other_callable_makes_the_chain_positional",
        why="A callable that holds state is called for drafts that are rejected afterwards.",
    ),
    Mutant(
        name="dtypes-of-one-window-are-joined",
        file=PROCESSORS,
        old="    if len(dtypes) > 1:\n",
        new="    if len(dtypes) > 2:\n",
        killed_by=OF_PROCESSORS + "test_a_declared_callable_keeps_to_one_dtype_within_a_window",
        why="One position's dtype rounds the logits of another one.",
    ),
    Mutant(
        name="repetition-penalty-by-the-wrong-sign",
        file=PENALTIES,
        old="mx.where(held < 0, held * self.penalty, held / self.penalty)",
        new="mx.where(held > 0, held * self.penalty, held / self.penalty)",
        killed_by=OF_PROCESSORS + "test_repetition_divides_positive_and_multiplies_negative_logits",
        why="Tokens that were repeated become more probable.",
    ),
    Mutant(
        name="repetition-penalty-divides-all",
        file=PENALTIES,
        old="mx.where(held < 0, held * self.penalty, held / self.penalty)",
        new="held / self.penalty",
        killed_by=OF_PROCESSORS + "test_repetition_divides_positive_and_multiplies_negative_logits",
        why="A negative logit is raised where it should be lowered.",
    ),
    Mutant(
        name="presence-is-counted-by-occurrence",
        file=PENALTIES,
        old="return mx.put_along_axis(logits, ids, held - self.penalty, axis=1)",
        new="return logits.at[mx.arange(view.width)[:, None], ids].add(held * 0 - self.penalty)",
        killed_by=OF_PROCESSORS
        + "test_a_penalty_over_a_window_has_the_bits_of_mlx_lms_at_each_position",
        why="A token that occurs twice is penalised twice.",
    ),
    Mutant(
        name="frequency-is-counted-once",
        file=PENALTIES,
        old="return logits.at[rows, ids].add(step)",
        new="return logits.at[rows, ids].minimum(logits[rows, ids] + step)",
        killed_by=OF_PROCESSORS
        + "test_frequency_rounds_at_each_occurrence_and_repetition_counts_a_token_once",
        why="A token that occurs three times is penalised once.",
    ),
    Mutant(
        name="bias-reaches-the-first-position-alone",
        file=PENALTIES,
        old="logits.at[:, ids].add(",
        new="logits.at[:1, ids].add(",
        killed_by=OF_PROCESSORS
        + "test_a_bias_over_a_window_has_the_bits_of_mlx_lms_at_each_position",
        why="Drafts are verified against logits without the bias.",
    ),
    Mutant(
        name="min-tokens-is-one-too-low",
        file=MASKS,
        old="missing = self.count - view.emitted\n",
        new="missing = self.count - view.emitted - 1\n",
        killed_by=OF_PROCESSORS
        + "test_min_tokens_bans_the_end_exactly_while_too_few_tokens_are_emitted",
        why="The pending token is counted twice, and a text may end one token early.",
    ),
    Mutant(
        name="min-tokens-bans-the-whole-window",
        file=MASKS,
        old="< min(missing, view.width)",
        new="< view.width",
        killed_by=OF_PROCESSORS
        + "test_min_tokens_bans_the_end_exactly_while_too_few_tokens_are_emitted",
        why="Positions behind the floor are forbidden to end as well, so the width changes texts.",
    ),
    Mutant(
        name="banned-are-the-only-ones-left",
        file=MASKS,
        old="return mx.where(_mask(self._array, logits.shape[-1]), -mx.inf, logits)\n\n\n"
        "@frozen(eq=False)\nclass MinTokens:",
        new="return mx.where(_mask(self._array, logits.shape[-1]), logits, -mx.inf)\n\n\n"
        "@frozen(eq=False)\nclass MinTokens:",
        killed_by=OF_PROCESSORS + "test_allowed_and_banned_tokens_are_what_a_plain_loop_leaves",
        why="The mask is applied the wrong way round.",
    ),
    Mutant(
        name="first-id-beyond-the-vocabulary-passes",
        file=MASKS,
        old="    if highest >= vocab_size:\n",
        new="    if highest > vocab_size:\n",
        killed_by=OF_PROCESSORS
        + "test_an_id_beyond_the_vocabulary_is_refused_before_and_when_it_is_applied",
        why="MLX writes out of bounds without a word.",
    ),
)
