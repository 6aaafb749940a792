"""Filters keep exactly the tokens that mlx-lm keeps, and what their names promise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils
from tiny_models import random_state

from specdec.sampling import RowSamplers, SamplingOptions, filters
from specdec.sampling.rejection import Drafted
from specdec.sampling.rows import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

FILTERS: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "top_p": (filters.top_p, sample_utils.apply_top_p),
    "min_p": (filters.min_p, sample_utils.apply_min_p),
    "top_k": (filters.top_k, sample_utils.apply_top_k),
}


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    # mlx-lm compiles its filters anew for each value of an option, which takes a second each.
    mx.disable_compile()
    yield
    mx.enable_compile()


def drawn_logprobs(data: st.DataObject) -> mx.array:
    """Log-probabilities ``[B, V]``, often with ties, in 16 or 32 bits."""
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(2, 40)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="numbers"))
    logits = rng.normal(size=shape) * data.draw(st.sampled_from([0.0, 0.3, 2.0, 12.0]))
    if data.draw(st.booleans(), label="ties"):
        logits = np.round(logits * 2) / 2
    dtype = data.draw(st.sampled_from([mx.float32, mx.bfloat16, mx.float16]))
    return normalize(mx.array(logits.astype(np.float32)).astype(dtype))


def same(got: mx.array, want: mx.array) -> None:
    assert got.dtype == want.dtype
    assert mx.array_equal(got, want).item()


shares = st.floats(0.001, 0.999) | st.sampled_from([0.05, 0.5, 0.9, 0.95, 0.99])


@settings(max_examples=300)
@given(st.data())
def test_every_filter_gives_what_mlx_lm_gives(data: st.DataObject) -> None:
    logprobs = drawn_logprobs(data)
    name = data.draw(st.sampled_from(sorted(FILTERS)), label="filter")
    vocabulary = logprobs.shape[-1]
    value: Any = data.draw(st.integers(1, vocabulary - 1) if name == "top_k" else shares)
    if name == "top_p" and data.draw(st.booleans(), label="at a step"):
        # As close as can be to where one more token is needed.
        row = np.exp(np.sort(np.array(logprobs[0].astype(mx.float32), np.float64))[::-1])
        mass = np.cumsum(row)[data.draw(st.integers(0, vocabulary - 2))] / row.sum()
        value = float(np.clip(mass * (1 + data.draw(st.sampled_from([-1e-4, 0, 1e-4]))), 1e-6, 1))
    ours, theirs = FILTERS[name]
    same(ours(logprobs, value), theirs(logprobs, value))


thresholds = st.floats(0.0, 0.5) | st.sampled_from([0.05, 0.1, 0.25, 0.5])


@settings(max_examples=300)
@given(st.data())
def test_xtc_gives_what_mlx_lm_s_gives_when_its_coin_falls(data: st.DataObject) -> None:
    logprobs = drawn_logprobs(data)
    if data.draw(st.booleans(), label="filtered before"):
        logprobs = filters.min_p(logprobs, 0.1)
    threshold = data.draw(thresholds)
    if data.draw(st.booleans(), label="at a token"):
        shares = np.array(mx.softmax(logprobs, axis=-1).astype(mx.float32))[0]
        threshold = min(float(data.draw(st.sampled_from(shares.tolist()))), 0.5)
    special = data.draw(st.lists(st.integers(0, logprobs.shape[-1] - 1), max_size=4))
    got = filters.xtc(logprobs, threshold, special)
    same(got, sample_utils.apply_xtc(logprobs, 1.0, threshold, special))


@settings(max_examples=200)
@given(st.data())
def test_min_p_leaves_as_many_tokens_as_in_mlx_lm(data: st.DataObject) -> None:
    logprobs = drawn_logprobs(data)
    if data.draw(st.booleans(), label="filtered before"):
        logprobs = filters.top_p(logprobs, 0.8)
    vocabulary = logprobs.shape[-1]
    least, p = data.draw(st.integers(1, vocabulary)), data.draw(shares)
    same(filters.min_p(logprobs, p, least), sample_utils.apply_min_p(logprobs, p, least))
    assert mx.array_equal(filters.min_p(logprobs, p, vocabulary + 1), logprobs).item()


def test_ids_that_the_vocabulary_does_not_have_are_no_one_s_memory() -> None:
    logprobs = mx.array(np.log(C8).astype(np.float32))[None]
    want = filters.xtc(logprobs, 0.1, [1])
    assert kept(want) == [{1, 2, *range(3, 9)}]
    same(filters.xtc(logprobs, 0.1, [1, 9, 2**31, 2**40]), want)
    same(filters.xtc(logprobs, 0.1, [9]), filters.xtc(logprobs, 0.1))


@settings(max_examples=200)
@given(st.data())
def test_filters_in_a_row_give_what_mlx_lm_s_sampler_chain_gives(data: st.DataObject) -> None:
    logprobs = drawn_logprobs(data)
    p, m = data.draw(shares, label="top_p"), data.draw(shares, label="min_p")
    k = data.draw(st.integers(1, logprobs.shape[-1] - 1), label="top_k")
    x = data.draw(thresholds, label="xtc_threshold")
    got = filters.top_k(filters.xtc(filters.min_p(filters.top_p(logprobs, p), m), x), k)
    want = sample_utils.apply_top_p(logprobs, p)
    want = sample_utils.apply_min_p(want, m)
    want = sample_utils.apply_xtc(want, 1.0, x, [])
    same(got, sample_utils.apply_top_k(want, k))


def kept(filtered: mx.array) -> list[set[int]]:
    """Tokens left in each row."""
    return [set(np.flatnonzero(row).tolist()) for row in np.array(mx.isfinite(filtered))]


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(2, 30), shares, st.integers(1, 29))
def test_filters_keep_what_their_definitions_say(
    numbers: int, vocabulary: int, share: float, k: int
) -> None:
    # Without ties, and away from the thresholds, so that float64 decides alone.
    logits = np.random.default_rng(numbers).normal(size=vocabulary) * 3
    probabilities = np.exp(logits) / np.exp(logits).sum()
    logprobs = mx.array(np.log(probabilities).astype(np.float32))[None]
    ranked = np.argsort(-probabilities)
    mass = np.cumsum(probabilities[ranked])

    if np.abs(mass - share).min() > 1e-5:
        nucleus = set(ranked[: int(np.searchsorted(mass, share)) + 1].tolist())
        assert kept(filters.top_p(logprobs, share)) == [nucleus]
    relative = probabilities / probabilities.max()
    if np.abs(relative - share).min() > 1e-5:
        assert kept(filters.min_p(logprobs, share)) == [
            set(np.flatnonzero(relative >= share).tolist())
        ]
    if k < vocabulary:
        assert kept(filters.top_k(logprobs, k)) == [set(ranked[:k].tolist())]


@given(
    st.lists(st.floats(-30, 0, width=32), min_size=2, max_size=9),
    st.floats(0, 1, exclude_min=True, exclude_max=True),
)
@example([-1.0, -2.0, -0.5], 5e-324)
@example([-1.0, -2.0, -0.5], 1e-46)
@example([0.0, 0.0], 1 - 2**-53)
def test_the_most_probable_token_survives_every_filter(scores: list[float], share: float) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        logprobs = normalize(mx.array([scores]).astype(dtype))
        values = np.array(logprobs.astype(mx.float32))[0]
        best = set(np.flatnonzero(values == values.max()).tolist())
        for name, value in (("top_p", share), ("min_p", share), ("top_k", 1)):
            (left,) = kept(FILTERS[name][0](logprobs, value))
            assert left & best, name
            got = FILTERS[name][0](logprobs, value)
            held = mx.isfinite(got)
            assert mx.array_equal(mx.where(held, logprobs, 0), mx.where(held, got, 0)).item()


# The composition that engines get wrong: renormalising after top-k before finding the nucleus.

C8 = np.array([0.35, 0.25, 0.20, 0.05, *[0.03] * 5])


def draws(
    options: SamplingOptions, probabilities: npt.NDArray[np.float64], count: int
) -> list[int]:
    samplers = RowSamplers()
    samplers.prepare_append([(options, options.resolved_seed())]).commit()
    logprobs = mx.array(np.log(probabilities).astype(np.float32))
    wide = mx.broadcast_to(logprobs, (1, count, len(probabilities)))
    ids: list[list[int]] = samplers.draw(wide, [0]).tolist()  # type: ignore[assignment]
    return ids[0]


def test_top_p_reads_the_whole_distribution_before_top_k_cuts_it() -> None:
    logprobs = mx.array(np.log(C8).astype(np.float32))[None]
    assert kept(filters.top_k(filters.top_p(logprobs, 0.82), 4)) == [{0, 1, 2, 3}]
    # The other way round, on what is left, the nucleus would be a token smaller.
    cut = normalize(filters.top_k(logprobs, 4))
    assert kept(filters.top_p(cut, 0.82)) == [{0, 1, 2}]
    options = SamplingOptions(temp=1.0, top_p=0.82, top_k=4, seed=1)
    assert set(draws(options, C8, 2000)) == {0, 1, 2, 3}


def test_min_p_comes_between_top_p_and_top_k_and_before_the_temperature() -> None:
    # At T = 5 the flattened distribution would let every token pass min_p = 0.5.
    options = SamplingOptions(temp=5.0, min_p=0.5, seed=1)
    assert set(draws(options, C8, 2000)) == {0, 1, 2}
    # Each of the three cuts where the other two would keep more.
    for top_p, min_p, top_k in ((0.599, 0.1, 8), (0.9, 0.6, 8), (0.9, 0.1, 2)):
        options = SamplingOptions(temp=1.0, top_p=top_p, min_p=min_p, top_k=top_k, seed=1)
        assert set(draws(options, C8, 2000)) == {0, 1}


def support(options: SamplingOptions, drafted: Drafted | None = None) -> set[int]:
    """What 2,000 requests draw at one position."""
    samplers = RowSamplers()
    samplers.prepare_append([(options, seed) for seed in range(2000)]).commit()
    logprobs = mx.broadcast_to(mx.array(np.log(C8).astype(np.float32)), (2000, 2, len(C8)))
    return set(np.array(samplers.draw(logprobs, [0] * 2000, drafted))[:, 0].tolist())


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_k": 4, "top_p": 0.82}, {0, 1, 2, 3}),
        ({"top_k": 4, "min_p": 0.5}, {0, 1, 2}),
        ({"top_p": 0.82, "min_p": 0.14}, {0, 1, 2, 3}),
        ({"min_p": 0.9, "min_tokens_to_keep": 3}, {0, 1, 2}),
        ({"top_p": 0.82, "xtc_probability": 1.0, "xtc_threshold": 0.1}, {2, 3}),
        # The nucleus of 0.6 is 0.35 and 0.25, 0.58 and 0.42 of it: XTC sees that.
        ({"top_p": 0.599, "xtc_probability": 1.0, "xtc_threshold": 0.4}, {1}),
        ({"top_k": 3, "xtc_probability": 1.0, "xtc_threshold": 0.22}, {1, 2, 3}),
        ({"top_k": 2, "xtc_probability": 0.5, "xtc_threshold": 0.1}, {0, 1, 2, 3}),
        ({"xtc_probability": 1.0, "xtc_special_tokens": [0]}, {0, 2, *range(3, 9)}),
        ({"top_k": 8}, None),
        ({"top_k": 9}, set(range(9))),
        ({"top_k": 10**6}, set(range(9))),
    ],
)
def test_both_acceptance_rules_reach_what_mlx_lm_s_sampler_reaches(
    settings: dict[str, Any], tokens: set[int] | None
) -> None:
    # A position for each draft, also for those that the filters exclude.
    drafts = mx.array([[seed % 9, 0] for seed in range(2000)])
    reached = [
        support(SamplingOptions(temp=1.0, **settings)),
        support(SamplingOptions(temp=1.0, acceptance="rejection", **settings)),
        support(SamplingOptions(temp=1.0, acceptance="rejection", **settings), Drafted(drafts)),
        support(
            SamplingOptions(temp=1.0, acceptance="rejection", **settings),
            Drafted(drafts, None, mx.full((2000, 2, 9), -math.log(9))),
        ),
    ]
    if settings.get("top_k", 0) < len(C8):  # else mlx-lm raises
        one = mx.array(np.log(C8).astype(np.float32))[None]
        sampler = sample_utils.make_sampler(temp=1.0, **settings)
        mx.random.seed(0)
        if 0 < settings.get("xtc_probability", 0) < 1:  # one coin for a whole array
            theirs = {sampler(one).item() for _ in range(300)}
        else:
            theirs = set(sampler(mx.broadcast_to(one, (2000, 9))).tolist())
        reached.append(theirs)
    if tokens is None:  # which of five equal tokens goes is the partition's choice
        tokens = reached[-1]
        assert len(tokens) == settings["top_k"]
    assert reached == [tokens] * len(reached)


@pytest.mark.parametrize(("top_p", "count"), [(0.3499, 1), (0.3501, 2), (0.7999, 3), (0.8001, 4)])
def test_a_nucleus_takes_the_token_that_reaches_its_mass(top_p: float, count: int) -> None:
    options = SamplingOptions(temp=1.0, top_p=top_p, seed=1)
    assert set(draws(options, C8, 2000)) == set(range(count))


def test_a_mass_that_is_reached_exactly_needs_no_further_token() -> None:
    sure = mx.array([[0.0, -math.inf, -math.inf]])  # exp() is exact here on every host
    assert kept(filters.top_p(sure, 1 - 2**-24)) == [{0}]
    halves = mx.array(np.log([[0.125, 0.5, 0.125, 0.25]]).astype(np.float32))
    for mass in (0.5, 0.75, 0.875):
        same(filters.top_p(halves, mass), sample_utils.apply_top_p(halves, mass))


@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_top_k_at_or_above_the_vocabulary_keeps_all_and_breaks_nothing(beyond: int) -> None:
    mx.enable_compile()  # it is the compiled function that mlx-lm leaves broken
    try:
        before = random_state()
        every = draws(SamplingOptions(temp=1.0, seed=3), C8, 500)
        assert draws(SamplingOptions(temp=1.0, seed=3, top_k=len(C8) + beyond), C8, 500) == every
        assert set(every) == set(range(len(C8)))
        assert random_state() == before
        assert math.isfinite(mx.random.uniform().item())  # type: ignore[arg-type]
        ids = sample_utils.categorical_sampling(mx.zeros((1, 9)), 1.0)
        assert 0 <= ids.item() < 9
    finally:
        mx.disable_compile()


@pytest.mark.parametrize("top_p", [0, 0.0, 1, 1.0])
def test_a_top_p_of_nothing_or_everything_keeps_all(top_p: float) -> None:
    every = draws(SamplingOptions(temp=1.0, seed=3), C8, 500)
    assert draws(SamplingOptions(temp=1.0, seed=3, top_p=top_p, min_p=0, top_k=0), C8, 500) == every
