"""The draws of a group's rows: which token each row takes at each position of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import Swap, check_keep
from specdec.sampling import filters
from specdec.sampling.noise import Stream, gumbel, seed_words, uniform
from specdec.sampling.plans import Drafting, Plan
from specdec.sampling.rejection import log_normalize, rejection_draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import PendingChange, Selection
    from specdec.sampling.options import DrawKey, SamplingOptions
    from specdec.sampling.rejection import Drafted

__all__ = ["RowSamplers", "normalize", "nothing_left"]


def normalize(logits: mx.array) -> mx.array:
    """Log-probabilities of logits, in their own dtype, as mlx-lm computes them.

    Greedy rows take the argmax of these, not of the logits: in 16 bits the subtraction rounds,
    so two logits that differ can become one log-probability, and mlx-lm takes the first of them.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def nothing_left(logits: mx.array) -> mx.array:
    """Where every id is excluded, so that no token can be drawn.

    Args:
        logits: ``[..., V]`` logits or log-probabilities, after processors and grammar masks.

    Returns:
        ``[...]`` bools: all of a position's scores are ``-inf`` (their log-probabilities are
        NaN), or one of them is NaN.
    """
    # A comparison with NaN is false, and the maximum of anything with NaN is NaN.
    return mx.logical_not(mx.max(logits, axis=-1) > -mx.inf)


@frozen(eq=False)
class _Row:
    options: SamplingOptions
    seed: int


@frozen(eq=False)
class _Alike:
    """Rows that are drawn in one operation, at W positions each.

    Attributes:
        key: what they share; ``None`` for greedy rows.
        logprobs: ``[b, W, V]`` log-probabilities at temperature 1.
        steps: ``[b, W]`` uint32.
        seeds: ``[b, 2]`` uint32.
        drafted: their drafts, where they judge them by rejection.
        ids: ``[V]`` the tokens that are scored, where they are not the whole vocabulary.
    """

    key: DrawKey | None
    logprobs: mx.array
    steps: mx.array
    seeds: mx.array
    drafted: Drafted | None = None
    ids: mx.array | None = None

    def scores(self, key: DrawKey) -> mx.array:
        """Scores ``[b, W, V]`` float32 after filters and temperature, not normalised."""
        temp, top_p, (min_p, least), xtc, top_k, _ = key
        kept = self.logprobs
        if top_p > 0:
            kept = filters.top_p(kept, top_p)
        if min_p > 0:
            kept = filters.min_p(kept, min_p, least)
        if xtc is not None:
            probability, threshold, special = xtc
            applies = uniform(self.seeds, self.steps, Stream.XTC) <= probability
            kept = mx.where(applies[..., None], filters.xtc(kept, threshold, special), kept)
        if 0 < top_k < kept.shape[-1]:
            kept = filters.top_k(kept, top_k)
        return kept.astype(mx.float32) * (1.0 / temp)

    def draw(self) -> mx.array:
        """Ids ``[b, W]``, or their places in ``ids``."""
        if self.key is None or self.key.temp == 0:  # greedy, or a callable of the user's
            return mx.argmax(self.logprobs, axis=-1)
        scores = self.scores(self.key)
        if self.key.rejection and self.drafted is not None and self.drafted.tokens.shape[1]:
            return rejection_draw(scores, self.steps, seeds=self.seeds, drafted=self.drafted)
        return self.sample(scores, Stream.RESIDUAL if self.key.rejection else Stream.DRAW)

    def draft(self) -> mx.array:
        """As :meth:`draw`, for a drafter: with the match rule's noise under either rule.

        Under rejection the target never draws with that noise: a drafter may draw a token with it
        and keep it to itself because of what it is.
        """
        if self.key is None or self.key.temp == 0:
            return mx.argmax(self.logprobs, axis=-1)
        return self.sample(self.scores(self.key), Stream.DRAW)

    def sample(self, scores: mx.array, stream: Stream) -> mx.array:
        """The best places ``[b, W]`` of scores, with the noise of a stream."""
        ids = mx.arange(scores.shape[-1], dtype=mx.uint32) if self.ids is None else self.ids
        return mx.argmax(scores + gumbel(self.seeds, self.steps, ids, stream=stream), axis=-1)

    def log_distribution(self) -> mx.array:
        """``[b, W, V]`` float32, normalised: what :meth:`draft` draws from."""
        if self.key is None or self.key.temp == 0:
            best = mx.argmax(self.logprobs, axis=-1, keepdims=True)
            ids = mx.arange(self.logprobs.shape[-1], dtype=best.dtype)
            sure = mx.where(ids == best, 0.0, -mx.inf).astype(mx.float32)
            return mx.where(nothing_left(self.logprobs)[..., None], -mx.inf, sure)
        return log_normalize(self.scores(self.key))


class RowSamplers:
    """Samplers of B rows; implements the contract's ``RowSampling``.

    Rows with equal options are drawn in one operation, and so are drafts of rows with an equal
    draft policy. A draw depends on the row's ``(seed, step)`` and scores alone, and with the
    rejection rule also on its drafts.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._bind()

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self._rows)

    @property
    def stateless(self) -> bool:
        """Whether no row has a sampler callable of the user's."""
        return self._stateless

    @property
    def rejecting(self) -> bool:
        """Whether a row judges its drafts by rejection sampling."""
        return self._drafting.rejecting

    @property
    def selection(self) -> Selection:
        """How drafters select: greedy if every row's drafts are, else each row's own draw."""
        return self._drafting.selection

    @property
    def drafting(self) -> Drafting:
        """What the rows have in common as drafters see them."""
        return self._drafting

    def callable_of(self, row: int) -> Callable[[mx.array], mx.array] | None:
        """A row's sampler callable; ``None`` for rows that draw by seed and step."""
        return self._rows[row].options.sampler

    def prepare_append(self, rows: Sequence[tuple[SamplingOptions, int]]) -> PendingChange:
        """Rows to add, as options and resolved seeds."""
        grown = self._rows + [_Row(options, seed) for options, seed in rows]
        return Swap(lambda: self._swap(grown))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
        """
        check_keep(keep, self.row_count)
        self._swap([self._rows[k] for k in keep])

    def sample(
        self, logprobs: mx.array, steps: Sequence[int], ids: mx.array | None = None
    ) -> mx.array:
        """Each row's draw at one position, by its draft policy: ``[B, V] -> [B]``.

        Args:
            logprobs: ``[B, V]`` log-probabilities at temperature 1.
            steps: B ints.
            ids: ``[N]`` uint32, tokens that alone are scored, without filters; logits will do.
        """
        plan = self._drafts if ids is None else self._bare
        alike = self._alike(plan, logprobs[:, None], steps, ids=ids)
        places = plan.in_order([each.draft() for each in alike])[:, 0]
        return places if ids is None else ids[places]

    def log_distribution(
        self, logprobs: mx.array, steps: Sequence[int], ids: mx.array | None = None
    ) -> mx.array:
        """What :meth:`sample` draws from: ``[B, V] -> [B, V]`` float32 log-probabilities.

        After filters (XTC's coin of that step included) and temperature, normalised. For greedy
        drafts 0 at the argmax and ``-inf`` elsewhere; ``-inf`` throughout where nothing is left.
        """
        plan = self._drafts if ids is None else self._bare
        alike = self._alike(plan, logprobs[:, None], steps, ids=ids)
        return plan.in_order([each.log_distribution() for each in alike])[:, 0]

    def draw(
        self, logprobs: mx.array, steps: Sequence[int], drafted: Drafted | None = None
    ) -> mx.array:
        """Each row's draw at every position of a window.

        Args:
            logprobs: ``[B, W, V]`` log-probabilities at temperature 1.
            steps: B ints, samples drawn before the window's first position.
            drafted: the drafts of all rows, from the window's first position on. Only rows with
                the rejection rule look at them.

        Returns:
            ``[B, W]`` uint32 ids, on the device. Rows with a callable get their argmax: the
            round calls their sampler itself, position by position.
        """
        plan = self._draws
        if plan.greedy:
            return mx.argmax(logprobs, axis=-1)
        alike = self._alike(plan, logprobs, steps, drafted=drafted)
        return plan.in_order([each.draw() for each in alike])

    def draw_one(
        self, row: int, logprobs: mx.array, step: int, drafted: Drafted | None = None
    ) -> mx.array:
        """One row's draw alone, the same as :meth:`draw` gives it: ``[1, w, V] -> [1, w]``.

        For rows that are drawn position by position; not for rows with a callable.

        Args:
            row: its number.
            logprobs: ``[1, w, V]`` log-probabilities at temperature 1.
            step: samples drawn before the first of these positions.
            drafted: its drafts, one row, from the first of these positions on.
        """
        width = logprobs.shape[1]
        positions = mx.array([step], mx.uint32)[:, None] + mx.arange(width, dtype=mx.uint32)
        seeds = self._seeds[row : row + 1]
        key = self._rows[row].options.draw_key
        return _Alike(key, logprobs, positions, seeds, drafted).draw()

    def _alike(
        self,
        plan: Plan,
        logprobs: mx.array,
        steps: Sequence[int],
        *,
        drafted: Drafted | None = None,
        ids: mx.array | None = None,
    ) -> list[_Alike]:
        width = logprobs.shape[1]
        positions = mx.array(list(steps), mx.uint32)[:, None] + mx.arange(width, dtype=mx.uint32)
        parts = []
        for key, index in plan.groups:
            if index is None:
                return [_Alike(key, logprobs, positions, self._seeds, drafted, ids)]
            theirs = None
            if drafted is not None and key is not None and key.rejection:
                theirs = drafted.take(index)
            scores, seeds = logprobs[index], self._seeds[index]
            parts.append(_Alike(key, scores, positions[index], seeds, theirs, ids))
        return parts

    def _swap(self, rows: list[_Row]) -> None:
        self._rows = rows
        self._bind()

    def _bind(self) -> None:
        """Group rows by equal options; resolved at membership changes, not in rounds."""
        keys = [row.options.draft_key for row in self._rows]
        self._draws = Plan.of([row.options.draw_key for row in self._rows])
        self._drafts = Plan.of(keys)
        self._bare = Plan.of([None if key is None else key.bare for key in keys])
        self._drafting = Drafting.of([row.options for row in self._rows])
        self._stateless = all(row.options.sampler is None for row in self._rows)
        self._seeds = mx.array([seed_words(row.seed) for row in self._rows] or [(0, 0)], mx.uint32)
