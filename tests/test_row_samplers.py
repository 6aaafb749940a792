"""A row's draw is a function of its scores, seed and step: of no neighbour, place or width."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import sample_utils
from tiny_models import random_state

from specdec.contract import Greedy, Sampled
from specdec.errors import OptionError, RowIndexError
from specdec.sampling import RowSamplers, SamplingOptions
from specdec.sampling.rows import normalize

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = npt.NDArray[np.float64]

VOCABULARY = 16
WIDTH = 5


def samplers(*options: SamplingOptions, seeds: Sequence[int] | None = None) -> RowSamplers:
    rows = RowSamplers()
    chosen = seeds if seeds is not None else [o.resolved_seed() for o in options]
    rows.prepare_append(list(zip(options, chosen, strict=True))).commit()
    return rows


def scores(seed: int, width: int = WIDTH, vocabulary: int = VOCABULARY) -> Floats:
    """Log-probabilities ``[width, V]``."""
    logits = np.random.default_rng(seed).normal(size=(width, vocabulary)) * 1.5
    result: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return result


def stacked(parts: Sequence[Floats], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.stack(parts).astype(np.float32)).astype(dtype)


def ids(array: mx.array) -> list[list[int]]:
    result: list[list[int]] = array.tolist()  # type: ignore[assignment]
    return result


MIXED = [
    SamplingOptions(),
    SamplingOptions(temp=1.0, seed=1),
    SamplingOptions(temp=0.7, top_p=0.9, seed=2),
    SamplingOptions(temp=1.3, min_p=0.05, top_k=6, seed=3),
]
STEPS = [0, 7, 31, 1000]
SCORES = [scores(r) for r in range(4)]


def solo(row: int, dtype: mx.Dtype = mx.float32) -> list[int]:
    """One row's window, drawn position by position, alone."""
    alone = samplers(MIXED[row])
    return [
        ids(alone.draw(stacked([SCORES[row][i : i + 1]], dtype), [STEPS[row] + i]))[0][0]
        for i in range(WIDTH)
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_mixed_rows_draw_in_every_order_what_they_draw_alone(
    order: tuple[int, ...], dtype: mx.Dtype
) -> None:
    rows = samplers(*(MIXED[r] for r in order))
    got = rows.draw(stacked([SCORES[r] for r in order], dtype), [STEPS[r] for r in order])
    assert ids(got) == [solo(r, dtype) for r in order]
    first = rows.sample(stacked([SCORES[r][0] for r in order], dtype), [STEPS[r] for r in order])
    assert first.tolist() == [solo(r, dtype)[0] for r in order]


def test_the_rows_of_that_test_differ() -> None:
    assert len({tuple(solo(r)) for r in range(4)}) == 4
    greedy = SCORES[1].argmax(-1).tolist()
    assert solo(0) == SCORES[0].argmax(-1).tolist()
    assert solo(1) != greedy


some_options = st.builds(
    SamplingOptions,
    temp=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_p=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY, 99]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(st.data())
def test_any_batch_draws_what_its_rows_draw_alone_at_any_width(data: st.DataObject) -> None:
    options = data.draw(st.lists(some_options, min_size=1, max_size=5))
    width = data.draw(st.integers(1, 6))
    steps = [data.draw(st.integers(0, 2**31)) for _ in options]
    tables = [scores(data.draw(st.integers(0, 99)), width) for _ in options]
    rows = samplers(*options)
    before = random_state()
    got = ids(rows.draw(stacked(tables), steps))
    keep = data.draw(st.permutations(range(len(options))))
    keep = keep[: data.draw(st.integers(1, len(keep)))]
    rows.filter_rows(keep)
    again = ids(rows.draw(stacked([tables[k] for k in keep]), [steps[k] for k in keep]))
    assert again == [got[k] for k in keep]
    for each, step, table, drawn in zip(options, steps, tables, got, strict=True):
        alone = samplers(each)
        want = [
            ids(alone.draw(stacked([table[i : i + 1]]), [step + i]))[0][0] for i in range(width)
        ]
        assert drawn == want
    assert random_state() == before


def test_the_same_seed_and_step_draw_the_same_and_others_do_not() -> None:
    flat = mx.zeros((1, 64, 1000))
    one = ids(samplers(SamplingOptions(temp=1.0, seed=5)).draw(flat, [0]))
    assert ids(samplers(SamplingOptions(temp=1.0, seed=5)).draw(flat, [0])) == one
    assert ids(samplers(SamplingOptions(temp=1.0, seed=6)).draw(flat, [0])) != one
    later = ids(samplers(SamplingOptions(temp=1.0, seed=5)).draw(flat, [1]))
    assert later[0][:-1] == one[0][1:]
    assert len(set(one[0])) > 50


def test_a_seed_is_a_property_of_the_row_not_of_its_options() -> None:
    shared = SamplingOptions(temp=1.0)
    flat = mx.zeros((2, 32, 1000))
    first, second = ids(samplers(shared, shared, seeds=[8, 9]).draw(flat, [0, 0]))
    assert first != second
    assert first == ids(samplers(shared, seeds=[8]).draw(flat[:1], [0]))[0]


# Distribution.

DRAWS = 20_000


def bound(cells: int) -> float:
    """What chi-square over so many cells exceeds once in 1,000 (Wilson and Hilferty 1931)."""
    k = cells - 1
    return k * (1 - 2 / (9 * k) + 3.09 * math.sqrt(2 / (9 * k))) ** 3


def exact(table: Floats, options: SamplingOptions) -> Floats:
    """What is to be drawn, in float64, by the definitions of the options."""
    p = np.exp(table)
    ranked = np.argsort(-p)
    if 0 < options.top_p < 1:
        count = int(np.searchsorted(np.cumsum(p[ranked]), options.top_p)) + 1
        p = np.where(np.isin(np.arange(len(p)), ranked[:count]), p, 0)
    if options.min_p:
        p = np.where(p >= options.min_p * p.max(), p, 0)
    if 0 < options.top_k < len(p):
        p = np.where(np.isin(np.arange(len(p)), ranked[: options.top_k]), p, 0)
    p = p ** (1 / options.temp)
    result: Floats = p / p.sum()
    return result


def chi_square(counts: npt.NDArray[Any], p: Floats) -> float:
    assert (counts[p == 0] == 0).all(), "a token that was filtered out was drawn"
    expected = p[p > 0] * counts.sum()
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


def counted(table: Floats, options: SamplingOptions, draws: int = DRAWS) -> list[int]:
    wide = mx.broadcast_to(mx.array(table.astype(np.float32)), (1, draws, len(table)))
    return ids(samplers(options).draw(wide, [0]))[0]


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temp=1.0, seed=1),
        SamplingOptions(temp=1.0, seed=-12345),
        SamplingOptions(temp=0.6, seed=2**40),
        SamplingOptions(temp=2.0, seed=3),
        SamplingOptions(temp=1.0, top_p=0.9, seed=4),
        SamplingOptions(temp=0.7, top_p=0.75, seed=5),
        SamplingOptions(temp=1.5, min_p=0.1, seed=6),
        SamplingOptions(temp=1.0, top_k=5, seed=7),
        SamplingOptions(temp=1.3, top_p=0.95, min_p=0.02, top_k=9, seed=8),
    ],
)
def test_draws_have_the_distribution_that_the_options_ask_for(options: SamplingOptions) -> None:
    table = scores(17, 1)[0]
    p = exact(table, options)
    counts = np.bincount(counted(table, options), minlength=VOCABULARY)
    limit = bound(int((p > 0).sum()))
    assert chi_square(counts, p) < limit
    # The bound is one that a wrong distribution fails: a tenth more of the likeliest token.
    skewed = p.copy()
    skewed[p.argmax()] *= 1.1
    assert chi_square(counts, skewed / skewed.sum()) > limit


def test_draws_at_neighbouring_steps_are_independent() -> None:
    options = SamplingOptions(temp=1.0, seed=21)
    table = scores(17, 1)[0]
    drawn = np.array(counted(table, options, 100_000))
    p = exact(table, options)
    for distance in (1, 2, 5):
        pairs = drawn[:-distance] * VOCABULARY + drawn[distance:]
        counts = np.bincount(pairs, minlength=VOCABULARY**2)
        assert chi_square(counts, np.outer(p, p).ravel()) < bound(VOCABULARY**2)


def test_draws_of_two_seeds_are_independent() -> None:
    table = scores(17, 1)[0]
    p = exact(table, SamplingOptions(temp=1.0))
    one, two = (counted(table, SamplingOptions(temp=1.0, seed=s), 100_000) for s in (1, 2))
    pairs = np.array(one) * VOCABULARY + np.array(two)
    counts = np.bincount(pairs, minlength=VOCABULARY**2)
    assert chi_square(counts, np.outer(p, p).ravel()) < bound(VOCABULARY**2)


def test_a_draft_of_a_near_model_is_drawn_with_the_same_noise() -> None:
    # Acceptance is the chance that two models draw the same token. Coupled, it comes near to
    # 1 minus their total variation distance; drawn independently, it would be sum(p * q).
    table = scores(17, 1)[0]
    near = table + np.random.default_rng(5).normal(size=VOCABULARY) * 0.3
    near -= np.log(np.exp(near).sum())
    options = SamplingOptions(temp=1.0, seed=2)
    p, q = exact(table, options), exact(near, options)
    agree = np.mean(np.array(counted(table, options)) == np.array(counted(near, options)))
    distance = 0.5 * np.abs(p - q).sum()
    assert agree > 1 - 2 * distance
    assert agree > 2 * (p * q).sum()


def test_the_coldest_and_hottest_temperatures_still_draw_what_they_should() -> None:
    table = scores(17, 1)[0]
    order = np.argsort(-table)
    cold = counted(table, SamplingOptions(temp=1e-30, seed=1), 50)
    assert set(cold) == {int(order[0])}
    hot = counted(table, SamplingOptions(temp=1e30, top_k=4, seed=1), 500)
    assert set(hot) == set(order[:4].tolist())


# Greedy.


def planted() -> mx.array:
    """bf16 logits ``[1, 1, V]`` whose best token ties with an earlier one once normalised."""
    logits = np.full(8192, 3.5, np.float32)
    logits[50], logits[70] = 4.0, 4.03125  # neighbours in bf16
    return mx.array(logits).astype(mx.bfloat16)[None, None]


@pytest.mark.parametrize("others", [(), (SamplingOptions(temp=1.0, seed=1),)])
def test_greedy_takes_the_first_of_tokens_that_tie_as_log_probabilities(
    others: tuple[SamplingOptions, ...],
) -> None:
    logits = planted()
    as_mlx_lm = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    want = sample_utils.make_sampler(temp=0.0)(as_mlx_lm).item()
    assert want == 50
    assert mx.argmax(logits, axis=-1).item() == 70, "else this test could not fail"
    logprobs = normalize(logits)
    assert logprobs.dtype == mx.bfloat16
    assert mx.array_equal(logprobs, as_mlx_lm).item()
    rows = samplers(SamplingOptions(), *others)
    wide = mx.broadcast_to(logprobs, (1 + len(others), 3, 8192))
    assert ids(rows.draw(wide, [0] * (1 + len(others))))[0] == [want] * 3


# Rows with a sampler of the user's.


def test_a_row_with_a_callable_draws_its_argmax_here_and_gives_the_callable() -> None:
    def mine(logprobs: mx.array) -> mx.array:
        raise AssertionError("the round calls it, not a draw")

    custom = SamplingOptions(sampler=mine)
    alone = samplers(custom)
    assert not alone.stateless
    assert alone.callable_of(0) is mine
    assert alone.selection == Sampled()
    assert ids(alone.draw(stacked([SCORES[0]]), [3])) == [SCORES[0].argmax(-1).tolist()]
    assert alone.sample(stacked([SCORES[0][0]]), [3]).tolist() == [SCORES[0][0].argmax()]
    rows = samplers(*MIXED[:2], custom)
    assert not rows.stateless
    assert rows.callable_of(1) is None
    assert rows.callable_of(2) is mine
    got = ids(rows.draw(stacked(SCORES[:3]), STEPS[:3]))
    assert got == [solo(0), solo(1), SCORES[2].argmax(-1).tolist()]
    rows.filter_rows([0, 1])
    assert rows.stateless


# Membership.


def test_the_selection_is_greedy_only_while_every_row_is() -> None:
    rows = samplers(SamplingOptions(), SamplingOptions(top_p=0.5))
    seen = [rows.selection]
    change = rows.prepare_append([(SamplingOptions(temp=1.0), 1)])
    seen.append(rows.selection)
    assert rows.row_count == 2
    change.commit()
    seen.append(rows.selection)
    assert rows.row_count == 3
    rows.filter_rows([1, 0])
    seen.append(rows.selection)
    rows.filter_rows([])
    assert rows.row_count == 0
    rows.prepare_append([(SamplingOptions(temp=1.0), 1)]).commit()
    seen.append(rows.selection)
    assert seen == [Greedy(), Greedy(), Sampled(), Greedy(), Sampled()]


def test_a_discarded_row_is_not_there() -> None:
    rows = samplers(MIXED[1])
    rows.prepare_append([(MIXED[2], 2)]).discard()
    assert rows.row_count == 1
    assert ids(rows.draw(stacked([SCORES[1]]), [STEPS[1]])) == [solo(1)]


@pytest.mark.parametrize("keep", [[0, 0], [-1], [4], [0, 1, 2, 3, 4]])
def test_a_filter_of_rows_that_are_not_there_changes_nothing(keep: list[int]) -> None:
    rows = samplers(*MIXED)
    with pytest.raises(RowIndexError):
        rows.filter_rows(keep)
    assert rows.row_count == 4
    assert ids(rows.draw(stacked(SCORES), STEPS)) == [solo(r) for r in range(4)]


# Options.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temp", "top_p", "min_p"], [-0.1, math.nan, math.inf, True, "1", None]),
        *itertools.product(["temp"], [1e-31, 5e-324, 1e31, -0.5, -1]),
        *itertools.product(["top_p", "min_p"], [1.01, 2]),
        *itertools.product(["top_k"], [-1, 1.0, True, "3", None]),
        *itertools.product(["seed"], [1.0, False, "3"]),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_its_option(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as raised:
        SamplingOptions(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name} is {value!r};")
    assert "\n" not in message
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("other", [{"temp": 1.0}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4}])
def test_a_sampler_leaves_nothing_to_the_other_options(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="sampler") as raised:
        SamplingOptions(sampler=lambda logprobs: logprobs, **other)
    assert "\n" not in str(raised.value)
    SamplingOptions(sampler=lambda logprobs: logprobs, seed=4)


@pytest.mark.parametrize(
    "good",
    [
        {"temp": 0},
        {"temp": 3},
        {"temp": 1e-30},
        {"temp": 1e30},
        {"top_p": 0},
        {"top_p": 1},
        {"min_p": 1.0},
        {"top_k": 0},
        {"top_k": 10**9},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"seed": None},
    ],
)
def test_values_at_the_edges_are_taken(good: dict[str, Any]) -> None:
    options = SamplingOptions(**good)
    assert all(getattr(options, name) == value for name, value in good.items())


def test_no_seed_means_a_new_one_each_time() -> None:
    options = SamplingOptions(temp=1.0)
    drawn = {options.resolved_seed() for _ in range(10)}
    assert len(drawn) == 10
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert max(drawn) >= 2**56
    assert SamplingOptions(seed=-3).resolved_seed() == -3


def test_only_a_temperature_of_0_without_a_sampler_is_greedy() -> None:
    assert SamplingOptions().greedy
    assert SamplingOptions(top_p=0.5, top_k=3).greedy
    assert not SamplingOptions(temp=0.01).greedy
    assert not SamplingOptions(sampler=lambda logprobs: logprobs).greedy
