"""top-p, min-p and top-k, in mlx-lm's order and meaning, without its global random state.

mlx-lm compiles its filters over ``mx.random.state``: an option that raises inside one of them
leaves that state broken for the whole process. These are plain functions, and options are checked
before any graph is built (:class:`~specdec.sampling.SamplingOptions`). All work on
log-probabilities at temperature 1, row by row over the last axis.
"""

from __future__ import annotations

import math

import mlx.core as mx

__all__ = ["min_p", "top_k", "top_p"]


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


def min_p(logprobs: mx.array, p: float) -> mx.array:
    """Keep tokens of at least ``p`` times the top token's probability.

    Nguyen et al. 2024, arXiv 2407.01082.

    Args:
        logprobs: ``[..., V]``.
        p: share of the top probability, in (0, 1].

    Returns:
        ``[..., V]`` with ``-inf`` at the tokens left out.
    """
    threshold = mx.max(logprobs, axis=-1, keepdims=True) + math.log(p)
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


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
