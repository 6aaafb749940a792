"""Speculative rejection sampling: drafts are accepted as often as the distribution allows.

Leviathan, Kalman and Matias 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318. A draft x
that was drawn from q is accepted with probability min(1, p(x) / q(x)), p being the target's
distribution; in place of a rejected one, a token is drawn from the residual norm(max(p - q, 0)).
Either way the position's token has the distribution p, whatever q is. No other rule accepts more
of the drafts than this, the overlap of p and q.

Here that is another way to compute the target's samples: at a drafted position the sample *is*
the draft where the draft is accepted. The walk that accepts a draft where the sample equals it
stays as it is, for a residual has no mass at a draft that could be rejected.

Why streams: a drafter draws x with the noise of (seed, step) in stream 0, the one that the match
rule uses. Whether x is accepted, and what takes its place, must be independent of x: they use
streams of their own (:class:`~specdec.sampling.noise.Stream`). Behind the drafts, and where a row
has none, the target draws with the residual's stream too: a drafter may have drawn a token there
and left it out because it is an improbable one. A drafter that declares a q must not do that: of
the drafts that are left, q is not the distribution any more.

Nothing is read on the host, and nothing here can fail on what a drafter says. A q that is not the
one the drafts were drawn from changes the distribution, and no check can see that; no declared q
at all (one-hot) is right for any drafter.
"""

from __future__ import annotations

from typing import Self

import mlx.core as mx
from attrs import evolve, frozen

from specdec.sampling.noise import Stream, gumbel, uniform

__all__ = ["Drafted", "log_normalize", "rejection_draw"]


@frozen(eq=False)
class Drafted:
    """The drafts of B rows, on the device, with the distribution they were drawn from.

    Attributes:
        tokens: integer ids ``[B, d]``. An id outside the vocabulary is rejected at its own
            position; leave it in its place, for a draft that is dropped because of what it is
            makes the distribution another one.
        lengths: ``[B]`` ints that cut each row; ``None`` for d in every row.
        logq: ``[B, d, V]`` log-probabilities the drafts were drawn from, after the drafter's
            filters and temperature. A position with NaN counts as one-hot at the draft, as ``None``
            does for all; that is right whatever the drafter did.
    """

    tokens: mx.array
    lengths: mx.array | None = None
    logq: mx.array | None = None

    def take(self, rows: mx.array) -> Self:
        """The drafts of some rows, by their numbers ``[b]``."""
        return evolve(
            self,
            tokens=self.tokens[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
            logq=None if self.logq is None else self.logq[rows],
        )


def log_normalize(scores: mx.array) -> mx.array:
    """Log-probabilities ``[..., V]`` of scores; ``-inf`` throughout where nothing is left."""
    total = mx.logsumexp(scores, axis=-1, keepdims=True)
    return mx.where(mx.isfinite(total), scores - total, -mx.inf)


def rejection_draw(
    scores: mx.array, steps: mx.array, *, seeds: mx.array, drafted: Drafted
) -> mx.array:
    """The target's samples at every position of a window, drafts accepted by rejection sampling.

    Args:
        scores: ``[b, W, V]`` float32 after processors, filters and temperature; they need not be
            normalised.
        steps: ``[b, W]`` uint32, samples drawn before each position.
        seeds: ``[b, 2]`` uint32.
        drafted: one draft per position from the first on, 1 or more; those beyond W are not
            looked at.

    Returns:
        ``[b, W]`` uint32 ids. An id whose score is ``-inf`` is drawn nowhere, unless nothing is
        left at that position: there the id means nothing
        (:func:`~specdec.sampling.rows.nothing_left`).
    """
    width, vocabulary = scores.shape[1:]
    depth = min(drafted.tokens.shape[1], width)
    ids = mx.arange(vocabulary, dtype=mx.uint32)
    tokens = drafted.tokens[:, :depth].astype(mx.int64)
    known = (tokens >= 0) & (tokens < vocabulary)
    # An id of a larger vocabulary than the target's: p is 0 there, and so it is rejected.
    tokens = mx.where(known, tokens, vocabulary).astype(mx.uint32)
    judged = mx.ones(tokens.shape, mx.bool_)
    if drafted.lengths is not None:
        judged = mx.arange(depth) < drafted.lengths[:, None]

    logp = log_normalize(scores[:, :depth])
    logq = None if drafted.logq is None else _log_shares(drafted.logq[:, :depth], tokens)
    accepted = (
        judged
        & known
        & _accepts(logp, logq, tokens, uniform(seeds, steps[:, :depth], Stream.ACCEPT))
    )
    left = mx.where(judged[..., None], _residual(logp, logq, tokens), scores[:, :depth])
    if depth < width:
        left = mx.concatenate([left, scores[:, depth:]], axis=1)
    drawn = mx.argmax(left + gumbel(seeds, steps, ids, stream=Stream.RESIDUAL), axis=-1)
    front = mx.where(accepted, tokens, drawn[:, :depth])
    return front if depth == width else mx.concatenate([front, drawn[:, depth:]], axis=1)


def _log_shares(logq: mx.array, tokens: mx.array) -> mx.array:
    """``[b, d, V]``; one-hot at the draft, which is always right, where that is no distribution.

    It is none with a NaN in it, nor where the draft has no chance: logits that are all NaN end as
    chances of 0 throughout, over which every draft would be accepted.
    """
    logq = logq.astype(mx.float32)
    size = logq.shape[-1]
    at = tokens[..., None]
    certain = mx.where(mx.arange(size, dtype=mx.uint32) == at, 0.0, -mx.inf)
    impossible = mx.take_along_axis(logq, mx.minimum(at, size - 1), axis=-1) == -mx.inf
    broken = mx.isnan(logq).any(axis=-1, keepdims=True) | (impossible & (at < size))
    return mx.where(broken, certain, logq)


def _accepts(logp: mx.array, logq: mx.array | None, tokens: mx.array, noise: mx.array) -> mx.array:
    """``[b, d]``: u < p(x) / q(x), on logarithms, where no small probability is lost.

    p(x) = 0 is rejected for any q: -inf is below every log u, and NaN compares as false. Where p
    is at least q, u is not asked: no rounding of a logarithm just below 0 rejects a sure draft.
    """
    index = mx.minimum(tokens, logp.shape[-1] - 1)[..., None]
    ratio = mx.take_along_axis(logp, index, axis=-1)[..., 0]
    if logq is not None:
        ratio = ratio - mx.take_along_axis(logq, index, axis=-1)[..., 0]
    return (ratio >= 0) | (mx.log(noise) < ratio)


def _residual(logp: mx.array, logq: mx.array | None, tokens: mx.array) -> mx.array:
    """``[b, d, V]`` scores of norm(max(p - q, 0)), or of p where that has no mass.

    It has none where p equals q up to rounding; there a rejection is rounding as well. Tokens with
    p = 0 have no mass in it.
    """
    if logq is None:
        ids = mx.arange(logp.shape[-1], dtype=mx.uint32)
        left = mx.where(ids == tokens[..., None], -mx.inf, logp)
    else:
        left = mx.log(mx.maximum(mx.exp(logp) - mx.exp(logq), 0.0))
    some = mx.max(left, axis=-1, keepdims=True) > -mx.inf
    return mx.where(some, left, logp)
