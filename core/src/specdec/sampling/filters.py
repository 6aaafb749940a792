"""top-p, min-p, XTC and top-k, in mlx-lm's order and meaning, without its global random state.

mlx-lm compiles its filters over ``mx.random.state``: an option that raises inside one of them
leaves that state broken for the whole process. These are plain functions, and options are checked
before any graph is built (:class:`~specdec.sampling.SamplingOptions`). All work on
log-probabilities at temperature 1, row by row over the last axis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["min_p", "top_k", "top_p", "xtc"]


def top_p(logprobs: mx.array, p: float) -> mx.array:
    """Keep the smallest set of top tokens whose probability reaches ``p`` (nucleus sampling).

    Holtzman et al. 2019, arXiv 1904.09751. Ties with the last kept token are kept.

    Args:
        logprobs: ``[..., V]``.
        p: mass to keep, in (0, 1).

    Returns:
        ``[..., V]`` with ``-inf`` at the tokens left out.
    """
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending.astype(mx.float32))
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    dropped = (above >= p * total).sum(axis=-1, keepdims=True)
    # The top token stays, also where p is nothing in float32.
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    threshold = mx.take_along_axis(ascending, dropped, axis=-1)
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def min_p(logprobs: mx.array, p: float, least: int = 1) -> mx.array:
    """Keep tokens of at least ``p`` times the top token's probability.

    Nguyen et al. 2024, arXiv 2407.01082.

    Args:
        logprobs: ``[..., V]``.
        p: share of the top probability, in (0, 1].
        least: tokens that stay in any case, the most probable ones; V or more keeps all.

    Returns:
        ``[..., V]`` with ``-inf`` at the tokens left out.
    """
    if least >= logprobs.shape[-1]:
        return logprobs
    threshold = mx.max(logprobs, axis=-1, keepdims=True) + math.log(p)
    out = logprobs < threshold
    if least > 1:
        best = mx.argpartition(logprobs, kth=-least, axis=-1)[..., -least:]
        out = mx.put_along_axis(out, best, mx.array(False), axis=-1)
    return mx.where(out, -mx.inf, logprobs)


def xtc(logprobs: mx.array, threshold: float, special: Sequence[int] = ()) -> mx.array:
    """Exclude top choices: leave out all tokens above a threshold but the least probable of them.

    By p-e-w 2024 (oobabooga/text-generation-webui pull request 6335). It is applied to a share of
    the positions only; the coin is the caller's. Probabilities are those of the tokens that are
    left by the filters before it.

    Args:
        logprobs: ``[..., V]``.
        threshold: probability that makes a token a top choice, from 0 to 0.5.
        special: ids that are never left out. Ids of V or more are passed over: MLX checks no
            bounds.

    Returns:
        ``[..., V]`` with ``-inf`` at the tokens left out.
    """
    probs = mx.softmax(logprobs, axis=-1)
    last = mx.where(probs > threshold, probs, mx.inf).min(axis=-1, keepdims=True)
    out = probs > last
    known = [token for token in special if 0 <= token < logprobs.shape[-1]]
    if known:
        out[..., mx.array(known, mx.uint32)] = False
    return mx.where(out, -mx.inf, logprobs)


def top_k(logprobs: mx.array, k: int) -> mx.array:
    """Keep ``k`` tokens of the highest probability.

    Args:
        logprobs: ``[..., V]``.
        k: tokens to keep, in 1 .. V - 1.

    Returns:
        ``[..., V]`` with ``-inf`` at the tokens left out.
    """
    out = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[..., k:]
    return mx.put_along_axis(logprobs, out, mx.array(-mx.inf, logprobs.dtype), axis=-1)
