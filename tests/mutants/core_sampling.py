"""Mutants of the draws: keys, noise, filters, which rows draw together."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["SAMPLING_MUTANTS"]

FILTERS = "specdec/sampling/filters.py"
NOISE = "specdec/sampling/noise.py"
MEMBERS = "specdec/verify/members.py"
OPTIONS = "specdec/sampling/options.py"
PLANS = "specdec/sampling/plans.py"
ROWS = "specdec/sampling/rows.py"
OF_FILTERS = "tests/test_filters.py::"
OF_NOISE = "tests/test_noise.py::"
OF_POLICY = "tests/test_draft_policy.py::"
OF_SAMPLERS = "tests/test_row_samplers.py::"

SAMPLING_MUTANTS = (
    Mutant(
        name="seed-is-shared-between-rows",
        file=ROWS,
        old="mx.array([seed_words(row.seed) for row in self._rows] or [(0, 0)], mx.uint32)",
        new="mx.array([seed_words(self._rows[0].seed) for _ in self._rows] or [(0, 0)], mx.uint32)",
        killed_by=OF_SAMPLERS + "test_a_seed_is_a_property_of_the_row_not_of_its_options",
        why="Rows of equal options draw with the first one's seed (vllm #6038).",
    ),
    Mutant(
        name="step-does-not-advance-with-the-position",
        file=ROWS,
        old="mx.array(list(steps), mx.uint32)[:, None] + mx.arange(width, dtype=mx.uint32)",
        new="mx.array(list(steps), mx.uint32)[:, None] + mx.zeros(width, dtype=mx.uint32)",
        killed_by=OF_SAMPLERS + "test_the_same_seed_and_step_draw_the_same_and_others_do_not",
        why="All positions of a window use the noise of the first.",
    ),
    Mutant(
        name="rows-come-back-in-the-order-of-their-options",
        file=PLANS,
        old="return cls(groups, mx.array(inverse, mx.int32))",
        new="return cls(groups, mx.array(order, mx.int32))",
        killed_by=OF_SAMPLERS
        + "test_greedy_seeded_and_unseeded_rows_draw_in_all_24_orders_what_they_draw"
        "_alone",
        why="The permutation is applied where its inverse is wanted (vllm #9441).",
    ),
    Mutant(
        name="samplers-ignore-the-order-of-a-filter",
        file=ROWS,
        old="self._swap([self._rows[k] for k in keep])",
        new="self._swap([row for k, row in enumerate(self._rows) if k in keep])",
        killed_by=OF_SAMPLERS + "test_any_batch_draws_what_its_rows_draw_alone_at_any_width",
        why="Rows that change places draw with each other's options.",
    ),
    Mutant(
        name="greedy-compares-in-32-bits",
        file=ROWS,
        old="return logits - mx.logsumexp(logits, axis=-1, keepdims=True)",
        new="return logits.astype(mx.float32) - mx.logsumexp(\n"
        "        logits.astype(mx.float32), axis=-1, keepdims=True\n    )",
        killed_by=OF_SAMPLERS
        + "test_greedy_takes_the_first_of_tokens_that_tie_as_log_probabilities",
        why="Ties of 16 bits are broken in another way than by mlx-lm.",
    ),
    Mutant(
        name="filters-come-after-the-temperature",
        file=ROWS,
        old="        kept = self.logprobs\n",
        new="        kept = normalize(self.logprobs * (1.0 / temp))\n        temp = 1.0\n",
        killed_by=OF_FILTERS
        + "test_min_p_comes_between_top_p_and_top_k_and_before_the_temperature",
        why="The nucleus is that of the scaled distribution, not mlx-lm's.",
    ),
    Mutant(
        name="top-k-comes-before-top-p",
        file=ROWS,
        old="""        if top_p > 0:
            kept = filters.top_p(kept, top_p)
        if min_p > 0:
""",
        new="""        if 0 < top_k < kept.shape[-1]:
            kept = filters.top_k(kept, top_k)
            top_k = 0
        if top_p > 0:
            kept = filters.top_p(kept, top_p)
        if min_p > 0:
""",
        killed_by=OF_FILTERS + "test_top_p_reads_the_whole_distribution_before_top_k_cuts_it",
        why="The nucleus is taken of what top-k has left (sglang's sampling filter test).",
    ),
    Mutant(
        name="nucleus-takes-one-token-more",
        file=FILTERS,
        old="dropped = (above >= p * total)",
        new="dropped = (above > p * total)",
        killed_by=OF_FILTERS + "test_a_mass_that_is_reached_exactly_needs_no_further_token",
        why="A mass that is reached exactly is not seen as reached.",
    ),
    Mutant(
        name="noise-ignores-the-id",
        file=NOISE,
        old="return _mix(_mix(key ^ (ids * golden)) + ids)",
        new="return _mix(_mix(key ^ golden) + mx.zeros_like(ids))",
        killed_by=OF_NOISE + "test_bits_equal_the_documented_hash",
        why="All tokens of a position get one value, and every draw is greedy.",
    ),
    Mutant(
        name="noise-depends-on-the-row",
        file=NOISE,
        old="steps.astype(mx.uint32)[:, :, None], ids",
        new="(steps + mx.arange(len(steps))[:, None]).astype(mx.uint32)[:, :, None], ids",
        killed_by=OF_NOISE + "test_noise_depends_on_nothing_but_seed_step_and_id",
        why="A row's place in the batch goes into the key.",
    ),
    Mutant(
        name="seed-is-cut-to-32-bits",
        file=NOISE,
        old="return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF",
        new="return seed & 0xFFFFFFFF, 0",
        killed_by=OF_NOISE + "test_a_seed_of_any_size_and_sign_gives_two_words",
        why="Half of a request's seed is thrown away.",
    ),
    Mutant(
        name="uniform-may-be-nought",
        file=NOISE,
        old=".astype(mx.float32) + 0.5) * (2.0**-32)",
        new=".astype(mx.float32)) * (2.0**-32)",
        killed_by=OF_NOISE + "test_noise_is_finite_at_both_ends_of_the_bits",
        why="One draw in four billion is minus infinity.",
    ),
    Mutant(
        name="draft-temperature-is-ignored",
        file=OPTIONS,
        old="temp = self.temp if self.draft_temp is None else self.draft_temp",
        new="temp = self.temp",
        killed_by=OF_POLICY
        + "test_by_match_every_policy_drafts_otherwise_and_gives_the_seed_s_text",
        why="Drafts are drawn as the request draws, whatever it asks for.",
    ),
    Mutant(
        name="target-draws-by-the-draft-policy",
        file=ROWS,
        old="Plan.of([row.options.draw_key for row in self._rows])",
        new="Plan.of([row.options.draft_key for row in self._rows])",
        killed_by=OF_POLICY + "test_drafts_follow_the_policy_and_the_target_s_draws_do_not",
        why="What was meant for drafts changes the text.",
    ),
    Mutant(
        name="policy-is-not-in-what-is-declared",
        file=ROWS,
        old="throughout where nothing is left.\n"
        '        """\n'
        "        plan = self._drafts if ids is None",
        new="throughout where nothing is left.\n"
        '        """\n'
        "        plan = self._draws if ids is None",
        killed_by=OF_POLICY + "test_by_rejection_a_policy_keeps_the_target_s_distribution[hot]",
        why="Drafts of the policy are declared as drawn from the request's own distribution.",
    ),
    Mutant(
        name="listed-ids-have-the-noise-of-their-places",
        file=ROWS,
        old="mx.arange(scores.shape[-1], dtype=mx.uint32) if self.ids is None else self.ids",
        new="mx.arange(scores.shape[-1], dtype=mx.uint32)",
        killed_by=OF_POLICY
        + "test_a_draw_over_listed_ids_is_the_whole_draw_wherever_that_is_among_them",
        why="A draft over part of the vocabulary is coupled with the draws of other tokens.",
    ),
    Mutant(
        name="rows-with-filters-are-listed",
        file=PLANS,
        old="listable=all(key is None or key == key.bare for key in keys)",
        new="listable=True",
        killed_by=OF_POLICY + "test_nothing_is_listed_while_a_row_drafts_with_filters",
        why="Filters are left out of drafts that were to be drawn with them.",
    ),
    Mutant(
        name="group-is-opened-with-nobodys-selection",
        file=MEMBERS,
        old="self._entering = Drafting.of([each.row.request.sampling for each in joining])",
        new="pass",
        killed_by=OF_POLICY + "test_a_group_is_opened_with_the_selection_of_its_rows",
        why="Draws of rows that have not joined yet are taken for greedy ones.",
    ),
    Mutant(
        name="listed-draws-are-those-of-the-first-rows",
        file=MEMBERS,
        old="partial(self._as_rows, draw)",
        new="draw",
        killed_by=OF_POLICY + "test_members_draw_over_listed_ids_as_their_rows_do",
        why="Members that are not all rows draw with their neighbours' seeds.",
    ),
)
