"""Counter-based noise: a function of (seed, step, token id, stream), with no state anywhere.

A draw is ``argmax(logits / T + gumbel(seed, step, id))`` (the Gumbel-max trick: Gumbel 1954;
Maddison, Tarlow and Minka 2014, arXiv 1411.0030). Noise per token id means that a draft drawn over
any subset of the vocabulary, by any model, uses the very noise of the target's draw there, so
draft and target agree far more often while each emitted token stays the target's own sample.

The bits come from rounds of the 32-bit "lowbias32" integer finaliser (C. Wellons, hash-prospector)
over the counters: plain integer arithmetic, equal on every backend. All 32 bits are used: with 24,
a token of probability under 6e-8 could never be drawn, and in a vocabulary of 150,000 such tails
add up.

What must not follow from a draw has a stream of its own (:class:`Stream`): a stream's number is
mixed into the key of (seed, step), and stream 0 leaves that key as it is.
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stream", "gumbel", "seed_words", "uniform", "uniform_bits"]

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: spreads consecutive counters
_BELOW_ONE = 1.0 - 2.0**-24  # largest float32 below 1


class Stream(IntEnum):
    """What a row's noise is for. Streams of one (seed, step) have nothing to do with each other.

    The numbers are part of every seeded text: they may be added to, never changed.
    """

    DRAW = 0
    """The draw of a token, the drafter's and the target's alike."""
    XTC = 1
    """The coin that decides whether XTC applies."""
    ACCEPT = 2
    """Whether rejection sampling accepts a draft."""
    RESIDUAL = 3
    """The draw that takes a rejected draft's place."""


def seed_words(seed: int) -> tuple[int, int]:
    """The low and high 32 bits of a seed of any size and sign."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def _mix(x: mx.array) -> mx.array:
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def _in_stream(key: mx.array, stream: int) -> mx.array:
    if stream == Stream.DRAW:
        return key
    golden = mx.array(_GOLDEN, mx.uint32)
    number = mx.array(stream, mx.uint32)
    # Two rounds: a plain xor would give one stream's step the noise of another one's.
    return _mix(_mix(key ^ (number * golden)) + number)


def _bits(low: mx.array, high: mx.array, steps: mx.array, ids: mx.array, stream: int) -> mx.array:
    golden = mx.array(_GOLDEN, mx.uint32)
    key = _mix(low + golden)
    key = _mix(key ^ high)
    key = _in_stream(_mix(key ^ (steps * golden)), stream)
    # Two rounds: one would leave neighbouring ids of one key visibly related.
    return _mix(_mix(key ^ (ids * golden)) + ids)


def _unit(bits: mx.array) -> mx.array:
    return mx.minimum((bits.astype(mx.float32) + 0.5) * (2.0**-32), _BELOW_ONE)


def _noise(low: mx.array, high: mx.array, steps: mx.array, ids: mx.array, stream: int) -> mx.array:
    # -log1p(-u) keeps full precision where u is small, which is where the winners are.
    return -mx.log(-mx.log1p(-_unit(_bits(low, high, steps, ids, stream))))


_compiled_bits: Callable[..., mx.array] = partial(mx.compile, shapeless=True)(_bits)
_compiled_noise: Callable[..., mx.array] = partial(mx.compile, shapeless=True)(_noise)


def _counters(
    seeds: mx.array, steps: mx.array, ids: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    words = seeds.astype(mx.uint32)[:, :, None, None]
    return words[:, 0], words[:, 1], steps.astype(mx.uint32)[:, :, None], ids.astype(mx.uint32)


def uniform_bits(
    seeds: mx.array, steps: mx.array, ids: mx.array, *, stream: int = Stream.DRAW
) -> mx.array:
    """The 32 uniform bits of each (row, position, token id).

    Args:
        seeds: ``[B, 2]`` uint32, from :func:`seed_words`.
        steps: ``[B, W]`` ints, samples drawn before each position.
        ids: ``[N]`` token ids.
        stream: a :class:`Stream`.

    Returns:
        ``[B, W, N]`` uint32, the same on every backend.
    """
    return _compiled_bits(*_counters(seeds, steps, ids), int(stream))


def gumbel(
    seeds: mx.array, steps: mx.array, ids: mx.array, *, stream: int = Stream.DRAW
) -> mx.array:
    """Standard Gumbel noise of each (row, position, token id).

    Args:
        seeds: ``[B, 2]`` uint32, from :func:`seed_words`.
        steps: ``[B, W]`` ints, samples drawn before each position.
        ids: ``[N]`` token ids.
        stream: a :class:`Stream`.

    Returns:
        ``[B, W, N]`` float32, between -2.9 and 22.9.
    """
    return _compiled_noise(*_counters(seeds, steps, ids), int(stream))


def uniform(seeds: mx.array, steps: mx.array, stream: int) -> mx.array:
    """One uniform number of each (row, position).

    Args:
        seeds: ``[B, 2]`` uint32, from :func:`seed_words`.
        steps: ``[B, W]`` ints, samples drawn before each position.
        stream: a :class:`Stream`.

    Returns:
        ``[B, W]`` float32, from 2**-33 to 1 - 2**-24: never 0, never 1.
    """
    return _unit(uniform_bits(seeds, steps, mx.zeros(1, mx.uint32), stream=stream))[..., 0]
