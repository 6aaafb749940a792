"""Mutants of rejection sampling: the ratio, the residual, the streams of noise, whose drafts."""

from __future__ import annotations

from mutants.edits import Mutant

__all__ = ["REJECTION_MUTANTS"]

NOISE = "specdec/sampling/noise.py"
REJECTION = "specdec/sampling/rejection.py"
ROWS = "specdec/sampling/rows.py"
OF_NOISE = "tests/test_noise.py::"
OF_REJECTION = "tests/test_rejection.py::"
OF_SAMPLERS = "tests/test_row_samplers.py::"

REJECTION_MUTANTS = (
    Mutant(
        name="ratio-is-inverted",
        file=REJECTION,
        old="ratio = ratio - mx.take_along_axis(logq, index, axis=-1)[..., 0]",
        new="ratio = mx.take_along_axis(logq, index, axis=-1)[..., 0] - ratio",
        killed_by=OF_REJECTION + "test_a_draft_is_rejected_just_where_u_reaches_p_over_q",
        why="Drafts that the target finds improbable are the ones that are accepted.",
    ),
    Mutant(
        name="drafts-are-accepted-by-p-alone",
        file=REJECTION,
        old="    if logq is not None:\n        ratio = ratio",
        new="    if logq is not None and False:\n        ratio = ratio",
        killed_by=OF_REJECTION + "test_drafts_are_accepted_as_often_as_p_and_q_overlap",
        why="What the drafter declared is left out of the ratio.",
    ),
    Mutant(
        name="sure-drafts-are-asked-u",
        file=REJECTION,
        old="return (ratio >= 0) | (mx.log(noise) < ratio)",
        new="return mx.log(noise) < ratio - 1e-6",
        killed_by=OF_REJECTION + "test_where_p_is_q_every_draft_is_accepted",
        why="The rounding of a logarithm rejects drafts where p equals q.",
    ),
    Mutant(
        name="residual-keeps-what-is-negative",
        file=REJECTION,
        old="mx.log(mx.maximum(mx.exp(logp) - mx.exp(logq), 0.0))",
        new="mx.log(mx.abs(mx.exp(logp) - mx.exp(logq)))",
        killed_by=OF_REJECTION + "test_by_rejection_each_token_has_the_target_s_distribution",
        why="Tokens that the drafter likes too much are drawn in place of its rejected drafts.",
    ),
    Mutant(
        name="rejected-drafts-are-drawn-from-p",
        file=REJECTION,
        old="left = mx.where(judged[..., None], _residual(logp, logq, tokens), scores[:, :depth])",
        new="left = scores[:, :depth]",
        killed_by=OF_REJECTION + "test_by_rejection_each_token_has_the_target_s_distribution",
        why="Without the residual the drafter's favourites come too often.",
    ),
    Mutant(
        name="residual-without-mass-is-drawn-from",
        file=REJECTION,
        old="return mx.where(some, left, logp)",
        new="return left",
        killed_by=OF_REJECTION + "test_a_residual_without_mass_or_with_nan_becomes_a_draw_from_p",
        why="Where p equals q the residual is empty, and an excluded token is taken.",
    ),
    Mutant(
        name="coin-of-acceptance-is-the-drafts-noise",
        file=REJECTION,
        old="uniform(seeds, steps[:, :depth], Stream.ACCEPT)",
        new="mx.exp(-mx.exp(-gumbel(seeds, steps[:, :depth], ids))).min(axis=-1)",
        killed_by=OF_REJECTION + "test_by_rejection_each_token_has_the_target_s_distribution",
        why="Whether a draft is accepted depends on the noise that it was drawn with.",
    ),
    Mutant(
        name="residual-has-the-drafts-noise",
        file=REJECTION,
        old="gumbel(seeds, steps, ids, stream=Stream.RESIDUAL)",
        new="gumbel(seeds, steps, ids, stream=Stream.DRAW)",
        killed_by=OF_REJECTION + "test_by_rejection_each_token_has_the_target_s_distribution",
        why="What takes a rejected draft's place depends on the noise that drew the draft.",
    ),
    Mutant(
        name="padding-is-judged",
        file=REJECTION,
        old="    if drafted.lengths is not None:\n",
        new="    if drafted.lengths is not None and False:\n",
        killed_by=OF_SAMPLERS
        + "test_by_rejection_no_draw_of_the_target_depends_on_the_noise_of_drafters",
        why="Positions behind a row's drafts are taken for drafts, and may be accepted.",
    ),
    Mutant(
        name="ids-beyond-the-vocabulary-are-accepted",
        file=REJECTION,
        old="        & known\n",
        new="",
        killed_by=OF_REJECTION
        + "test_drafts_beyond_the_target_s_vocabulary_keep_the_distribution_where_they_stand",
        why="An id that the target does not have is judged by the last id's probability.",
    ),
    Mutant(
        name="nan-is-a-distribution",
        file=REJECTION,
        old="return mx.where(broken, certain, logq)",
        new="return logq",
        killed_by=OF_REJECTION
        + "test_a_q_with_nan_anywhere_counts_as_one_hot_at_that_position_alone",
        why="One wrong number of a drafter makes every comparison false.",
    ),
    Mutant(
        name="draft-without-a-chance-is-accepted",
        file=REJECTION,
        old=" | (impossible & (at < size))",
        new="",
        killed_by=OF_REJECTION + "test_a_q_without_a_chance_for_its_own_draft_counts_as_one_hot",
        why="Logits that are all NaN end as chances of 0, over which every draft is accepted.",
    ),
    Mutant(
        name="drafter-draws-in-the-residuals-stream",
        file=ROWS,
        old="return self.sample(self.scores(self.key), Stream.DRAW)",
        new="return self.sample(self.scores(self.key), Stream.RESIDUAL)",
        killed_by=OF_SAMPLERS + "test_under_either_rule_a_drafter_draws_with_the_noise_of_stream_0",
        why="What a drafter drew and left out is what the target draws afterwards.",
    ),
    Mutant(
        name="target-draws-with-the-drafters-noise",
        file=ROWS,
        old="Stream.RESIDUAL if self.key.rejection else Stream.DRAW)",
        new="Stream.DRAW)",
        killed_by=OF_SAMPLERS + "test_the_target_s_noise_by_rejection_is_another_than_the_drafters",
        why="Behind the drafts the target repeats a draw that the drafter has looked at.",
    ),
    Mutant(
        name="rows-judge-the-first-rows-drafts",
        file=ROWS,
        old="theirs = drafted.take(index)",
        new="theirs = drafted.take(index * 0)",
        killed_by=OF_SAMPLERS + "test_any_batch_judges_drafts_as_its_rows_do_alone",
        why="Rows of other options shift whose drafts are whose.",
    ),
    Mutant(
        name="xtc-tosses-the-drafts-noise",
        file=ROWS,
        old="uniform(self.seeds, self.steps, Stream.XTC)",
        new="uniform(self.seeds, self.steps, Stream.DRAW)",
        killed_by=OF_SAMPLERS + "test_the_coin_of_xtc_is_the_row_s_own_at_each_step",
        why="Whether top choices are left out depends on the noise of token 0.",
    ),
    Mutant(
        name="xtc-applies-always",
        file=ROWS,
        old="kept = mx.where(applies[..., None], filters.xtc(kept, threshold, special), kept)",
        new="kept = filters.xtc(kept, threshold, special)",
        killed_by=OF_SAMPLERS + "test_the_coin_of_xtc_is_the_row_s_own_at_each_step",
        why="The probability of XTC is not looked at.",
    ),
    Mutant(
        name="min-tokens-to-keep-is-ignored",
        file=ROWS,
        old="filters.min_p(kept, min_p, least)",
        new="filters.min_p(kept, min_p)",
        killed_by=OF_SAMPLERS + "test_draws_have_the_distribution_that_the_options_ask_for",
        why="min-p leaves one token where the request asked for more.",
    ),
    Mutant(
        name="nan-can-be-drawn-from",
        file=ROWS,
        old="return mx.logical_not(mx.max(logits, axis=-1) > -mx.inf)",
        new="return mx.max(logits, axis=-1) == -mx.inf",
        killed_by=OF_REJECTION
        + "test_a_position_where_nothing_is_left_is_known_and_spoils_no_other",
        why="A position whose log-probabilities are NaN gives token 0.",
    ),
    Mutant(
        name="declared-distribution-is-not-normalised",
        file=ROWS,
        old="return log_normalize(self.scores(self.key))",
        new="return self.scores(self.key)",
        killed_by=OF_SAMPLERS + "test_the_declared_distribution_is_that_of_the_options",
        why="A drafter declares scores where its probabilities are wanted.",
    ),
    Mutant(
        name="one-row-draws-with-the-first-rows-seed",
        file=ROWS,
        old="seeds = self._seeds[row : row + 1]",
        new="seeds = self._seeds[:1]",
        killed_by=OF_SAMPLERS + "test_any_batch_judges_drafts_as_its_rows_do_alone",
        why="A row that is drawn position by position takes another row's noise.",
    ),
    Mutant(
        name="streams-differ-in-the-key-alone",
        file=NOISE,
        old="return _mix(_mix(key ^ (number * golden)) + number)",
        new="return key ^ (number * golden)",
        killed_by=OF_NOISE + "test_the_bits_of_these_streams_never_change",
        why="One stream's step has the noise of another one's.",
    ),
)
