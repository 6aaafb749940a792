"""A row's draw is a function of its scores, seed and step: of no neighbour, place or width."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import sample_utils
from tiny_models import random_state

from specdec.contract import Greedy, Sampled
from specdec.errors import OptionError, RowIndexError
from specdec.sampling import RowSamplers, SamplingOptions, filters
from specdec.sampling import rejection as sampling_rejection
from specdec.sampling import rows as sampling_rows
from specdec.sampling.noise import Stream, gumbel, seed_words, uniform
from specdec.sampling.rejection import Drafted
from specdec.sampling.rows import normalize
from specdec.verify.members import MemberSampling

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
    min_tokens_to_keep=st.sampled_from([1, 3]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.05, 0.2]),
    xtc_special_tokens=st.sampled_from([(), (1, 5), (VOCABULARY,)]),
    top_k=st.sampled_from([0, 1, 5, VOCABULARY, 99]),
    acceptance=st.sampled_from(["match", "rejection"]),
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


# Drafts, and the two rules that judge them.


def drafts_of(rows: int, depth: int, data: st.DataObject) -> Drafted:
    """Drafts of any kind: some the target's favourites, cut or not, with a q or without one."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="drafts"))
    lengths = mx.array(rng.integers(0, depth + 1, rows)) if data.draw(st.booleans()) else None
    logq = rng.normal(size=(rows, depth, VOCABULARY)).astype(np.float32)
    return Drafted(
        mx.array(rng.integers(0, VOCABULARY, (rows, depth))),
        lengths,
        normalize(mx.array(logq)) if data.draw(st.booleans()) else None,
    )


@given(st.data())
def test_any_batch_judges_drafts_as_its_rows_do_alone(data: st.DataObject) -> None:
    options = data.draw(st.lists(some_options, min_size=1, max_size=5))
    width = data.draw(st.integers(1, 5))
    steps = [data.draw(st.integers(0, 2**31)) for _ in options]
    window = stacked([scores(data.draw(st.integers(0, 99)), width) for _ in options])
    drafted = drafts_of(len(options), data.draw(st.integers(1, width)), data)
    rows = samplers(*options)
    assert rows.rejecting == any(each.acceptance == "rejection" for each in options)
    got = ids(rows.draw(window, steps, drafted))
    for r, each in enumerate(options):
        index = mx.array([r])
        theirs = drafted.take(index)
        assert ids(samplers(each).draw(window[index], [steps[r]], theirs)) == [got[r]]
        assert ids(rows.draw_one(r, window[index], steps[r], theirs)) == [got[r]]
        for i in range(width):  # and position by position, each with the draft that stands there
            left = None
            if i < theirs.tokens.shape[1]:
                left = Drafted(
                    theirs.tokens[:, i : i + 1],
                    None if theirs.lengths is None else theirs.lengths - i,
                    None if theirs.logq is None else theirs.logq[:, i : i + 1],
                )
            one = rows.draw_one(r, window[index, i : i + 1], steps[r] + i, left)
            assert ids(one) == [[got[r][i]]]
        if each.acceptance == "match" or each.temp == 0:
            assert ids(samplers(each).draw(window[index], [steps[r]])) == [got[r]]


class Heard:
    """Counts the noise that is asked for, by stream, and can replace that of stream 0."""

    def __init__(self, patch: pytest.MonkeyPatch, *, silent: bool = False) -> None:
        self.streams: set[int] = set()
        self.silent = silent
        for module in (sampling_rows, sampling_rejection):
            patch.setattr(module, "gumbel", self.gumbel)

    def gumbel(self, *args: Any, stream: int = Stream.DRAW) -> mx.array:
        self.streams.add(int(stream))
        noise = gumbel(*args, stream=stream)
        return mx.zeros_like(noise) if self.silent and stream == Stream.DRAW else noise


@given(st.data())
def test_by_rejection_no_draw_of_the_target_depends_on_the_noise_of_drafters(
    data: st.DataObject,
) -> None:
    options = evolve(data.draw(some_options), acceptance="rejection")
    window = stacked([scores(data.draw(st.integers(0, 99)))] * 3)
    drafted = evolve(drafts_of(3, 3, data), lengths=mx.array([0, 1, 3]))
    steps = [data.draw(st.integers(0, 99))] * 3
    rows = samplers(*[options] * 3, seeds=[1, 2, 3])
    got, plain = ids(rows.draw(window, steps, drafted)), ids(rows.draw(window, steps))
    with pytest.MonkeyPatch.context() as patch:
        heard = Heard(patch, silent=True)
        assert ids(rows.draw(window, steps, drafted)) == got
        assert ids(rows.draw(window, steps)) == plain
        assert heard.streams == (set() if options.temp == 0 else {Stream.RESIDUAL})
    # Behind its drafts a row draws what it draws without any.
    assert [row[n:] for row, n in zip(got, (0, 1, 3), strict=True)] == [
        row[n:] for row, n in zip(plain, (0, 1, 3), strict=True)
    ]
    if options.temp == 0:
        match = evolve(options, acceptance="match")
        assert got == ids(samplers(*[match] * 3, seeds=[1, 2, 3]).draw(window, steps))


@given(st.data())
def test_under_either_rule_a_drafter_draws_with_the_noise_of_stream_0(data: st.DataObject) -> None:
    options = data.draw(some_options)
    table = stacked([scores(data.draw(st.integers(0, 99)), 1)] * 3)
    steps = [data.draw(st.integers(0, 99))] * 3
    rules: list[Any] = ["match", "rejection"]
    drawn = []
    for rule in rules:
        rows = samplers(*[evolve(options, acceptance=rule)] * 3, seeds=[1, 2, 3])
        with pytest.MonkeyPatch.context() as patch:
            heard = Heard(patch)
            drawn.append(rows.sample(table[:, 0], steps).tolist())
            assert heard.streams == (set() if options.temp == 0 else {Stream.DRAW})
    assert drawn[0] == drawn[1]
    match = samplers(*[evolve(options, acceptance="match")] * 3, seeds=[1, 2, 3])
    assert drawn[0] == [row[0] for row in ids(match.draw(table, steps))]


def test_the_target_s_noise_by_rejection_is_another_than_the_drafters() -> None:
    flat = mx.zeros((1, 64, VOCABULARY))
    options = SamplingOptions(temp=1.0, acceptance="rejection")
    rows = samplers(options, seeds=[5])
    target = np.array(rows.draw(flat, [0]))[0]
    drafter = np.array([rows.sample(flat[:, 0], [step]).item() for step in range(64)])
    assert (target == drafter).mean() < 0.25


def test_by_rejection_drafts_decide_what_is_drawn() -> None:
    options = SamplingOptions(temp=1.0, seed=1, acceptance="rejection")
    flat = mx.zeros((1, 40, VOCABULARY)) - math.log(VOCABULARY)
    drafts = mx.arange(40)[None] % VOCABULARY
    got = np.array(samplers(options).draw(flat, [0], Drafted(drafts)))
    sure = np.array(samplers(options).draw(flat, [0], Drafted(drafts, None, flat)))
    assert (sure == np.array(drafts)).all()
    assert 0 < (got == np.array(drafts)).sum() < 12


def solo_of(options: SamplingOptions, seed: int, row: int, drafted: Drafted) -> list[int]:
    """A row's window alone, after 50 unrelated requests have come and gone."""
    alone = samplers(*[SamplingOptions(temp=0.8)] * 50)
    alone.filter_rows([])
    alone.prepare_append([(options, seed)]).commit()
    theirs = drafted.take(mx.array([row]))
    return ids(alone.draw(stacked([SCORES[row]]), [STEPS[row]], theirs))[0]


@pytest.mark.parametrize("rules", ["mmmm", "rrrr", "mrmr", "rmrm", "mmrr"])
def test_greedy_seeded_and_unseeded_rows_draw_in_all_24_orders_what_they_draw_alone(
    rules: str,
) -> None:
    asked = (
        SamplingOptions(),
        SamplingOptions(temp=1.0, seed=1),
        SamplingOptions(temp=1.0),
        SamplingOptions(temp=1.0, seed=2),
    )
    named: dict[str, Any] = {"m": "match", "r": "rejection"}
    options = [
        evolve(each, acceptance=named[rule]) for each, rule in zip(asked, rules, strict=True)
    ]
    seeds = [each.resolved_seed() for each in options]
    logq = normalize(stacked([scores(50 + r, 3) for r in range(4)]))
    drafted = Drafted(mx.argmax(logq, axis=-1), mx.array([3, 2, 3, 1]), logq)
    want = [solo_of(options[r], seeds[r], r, drafted) for r in range(4)]
    for order in itertools.permutations(range(4)):
        rows = samplers(*(options[r] for r in order), seeds=[seeds[r] for r in order])
        theirs = drafted.take(mx.array(order))
        window = stacked([SCORES[r] for r in order])
        assert ids(rows.draw(window, [STEPS[r] for r in order], theirs)) == [want[r] for r in order]
    for r in range(4):  # as row 2 of 3
        others = [other for other in range(4) if other != r]
        order = (others[0], r, others[1])
        rows = samplers(*(options[o] for o in order), seeds=[seeds[o] for o in order])
        window = stacked([SCORES[o] for o in order])
        got = rows.draw(window, [STEPS[o] for o in order], drafted.take(mx.array(order)))
        assert ids(got)[1] == want[r]
    assert want[0] == SCORES[0].argmax(-1).tolist()
    flat = mx.zeros((1, 64, 1000))
    unseeded = samplers(options[2], seeds=[seeds[2]]).draw(flat, [0])
    assert len(set(ids(unseeded)[0])) > 50


def test_the_coin_of_xtc_is_the_row_s_own_at_each_step() -> None:
    table = scores(17, 1)[0]
    options = SamplingOptions(temp=1.0, xtc_probability=0.3, xtc_threshold=0.1)
    logprobs = mx.broadcast_to(mx.array(table.astype(np.float32)), (2, VOCABULARY))
    rows = samplers(options, options, seeds=[5, 6])
    plain = samplers(*[SamplingOptions(temp=1.0)] * 2, seeds=[5, 6])
    out = filters.xtc(logprobs, 0.1)
    fell: list[list[bool]] = []
    for step in range(400):
        got = rows.log_distribution(logprobs, [step, step + 1000])
        words = mx.array([seed_words(5), seed_words(6)], mx.uint32)
        coin = uniform(words, mx.array([[step], [step + 1000]]), Stream.XTC)[:, 0] <= 0.3
        with_xtc = normalize(out)
        want = mx.where(coin[:, None], with_xtc, plain.log_distribution(logprobs, [0, 0]))
        assert mx.allclose(mx.exp(got), mx.exp(want), atol=1e-6).item()
        fell.append(coin.tolist())  # type: ignore[arg-type]
    shares = np.mean(np.array(fell), axis=0)
    assert (np.abs(shares - 0.3) < 4 * math.sqrt(0.21 / 400)).all()
    assert fell != [[both[1], both[0]] for both in fell]


# What a drafter can say that it drew from.


@given(st.data())
def test_the_declared_distribution_is_that_of_the_options(data: st.DataObject) -> None:
    # XTC's two cases are told apart above; here it applies always or never.
    options = [
        evolve(each, xtc_probability=float(each.xtc_probability > 0.5))
        for each in data.draw(st.lists(some_options, min_size=1, max_size=4))
    ]
    parts = [scores(data.draw(st.integers(0, 99)), 1)[0] for _ in options]
    steps = [data.draw(st.integers(0, 99)) for _ in options]
    rows = samplers(*options)
    got = rows.log_distribution(stacked(parts), steps)
    assert got.dtype == mx.float32
    for each, table, row in zip(options, parts, np.array(got, np.float64), strict=True):
        if each.temp == 0:
            want = np.where(np.arange(VOCABULARY) == table.argmax(), 1.0, 0.0)
            assert np.exp(row).tolist() == want.tolist()
        else:
            want = exact(table, each)
            assert np.abs(np.exp(row) - want).max() < 1e-5
            assert ((row == -np.inf) == (want == 0)).all()
    drawn = rows.sample(stacked(parts), steps)
    assert mx.isfinite(mx.take_along_axis(got, drawn[:, None], axis=1)).all().item()


def test_a_row_with_a_callable_declares_what_it_drafts() -> None:
    rows = samplers(SamplingOptions(sampler=lambda logprobs: logprobs), SamplingOptions(temp=1.0))
    got = np.array(rows.log_distribution(stacked([SCORES[0][0], SCORES[1][0]]), [0, 0]))
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == [SCORES[0][0].argmax()]
    assert not rows.rejecting


def test_members_of_a_group_are_told_their_own_rows_distributions() -> None:
    rows = samplers(*MIXED)
    members = MemberSampling(rows)
    whole = np.array(rows.log_distribution(stacked([s[0] for s in SCORES]), STEPS))
    members.bind(None, 4)
    got = members.log_distribution(stacked([s[0] for s in SCORES]), STEPS)
    assert np.array(got).tolist() == whole.tolist()
    members.bind([1, 3], 4)
    got = members.log_distribution(stacked([SCORES[1][0], SCORES[3][0]]), [STEPS[1], STEPS[3]])
    assert np.array(got).tolist() == whole[[1, 3]].tolist()


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
        enough = p >= options.min_p * p.max()
        enough[ranked[: options.min_tokens_to_keep]] = True
        p = np.where(enough, p, 0)
    if options.xtc_probability:
        assert options.xtc_probability == 1, "else there are two distributions"
        top = p / p.sum() > options.xtc_threshold
        top &= p > p[top].min(initial=np.inf)
        top[[token for token in options.xtc_special_tokens if token < len(p)]] = False
        p = np.where(top, 0, p)
        ranked = np.argsort(-p)
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
        SamplingOptions(temp=1.0, min_p=0.4, min_tokens_to_keep=6, seed=9),
        SamplingOptions(temp=1.2, xtc_probability=1.0, xtc_special_tokens=(2,), seed=10),
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
    assert alone.selection == Greedy()  # of drafts: what it will choose is not known
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
        *itertools.product(["xtc_probability"], [-0.1, 1.01, math.nan, True, "1", None]),
        *itertools.product(["xtc_threshold"], [-0.1, 0.51, math.nan, math.inf, False, "0", None]),
        *itertools.product(["min_tokens_to_keep"], [0, -1, 1.0, True, "3", None]),
        *itertools.product(["xtc_special_tokens"], [None, 3, "12", b"12", {1: 2}]),
        *itertools.product(["acceptance"], ["Match", "", None, True, ["match"], 1]),
        *itertools.product(["draft_temp"], [-0.1, 1e-31, 1e31, math.nan, True, "1", [1.0]]),
        *itertools.product(["draft_filters"], [None, 0, 1, "no"]),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_its_option(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as raised:
        SamplingOptions(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name} is {value!r};")
    assert "\n" not in message
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("token", [-1, 1.0, True, "3", None, [1]])
def test_a_special_token_that_is_no_id_is_named(token: Any) -> None:
    with pytest.raises(OptionError) as raised:
        SamplingOptions(xtc_special_tokens=(3, token))
    assert str(raised.value).startswith(f"xtc_special_tokens has {token!r};")
    assert "\n" not in str(raised.value)


def test_a_special_token_beyond_a_vocabulary_is_refused_where_that_is_known() -> None:
    options = SamplingOptions(xtc_special_tokens=[3, 9])
    assert options.xtc_special_tokens == (3, 9)
    options.check_vocabulary(10)
    with pytest.raises(OptionError, match=r"^xtc_special_tokens has 9; .* 0 to 8$"):
        options.check_vocabulary(9)


def test_both_acceptance_rules_are_named_where_another_one_is_asked_for() -> None:
    with pytest.raises(OptionError, match=r"'typical'.*'match' or 'rejection'"):
        SamplingOptions(acceptance="typical")  # type: ignore[arg-type]


def test_a_sampler_s_distribution_is_not_known_so_nothing_is_rejected_by_it() -> None:
    with pytest.raises(OptionError, match="'rejection' with a sampler") as raised:
        SamplingOptions(sampler=lambda logprobs: logprobs, acceptance="rejection")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "other",
    [{"temp": 1.0}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4}, {"xtc_probability": 0.1}],
)
def test_a_sampler_leaves_nothing_to_the_other_options(other: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="sampler") as raised:
        SamplingOptions(sampler=lambda logprobs: logprobs, **other)
    assert "\n" not in str(raised.value)
    SamplingOptions(sampler=lambda logprobs: logprobs, seed=4)
    SamplingOptions(sampler=lambda logprobs: logprobs, draft_temp=0.5, draft_filters=False)


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
        {"xtc_probability": 1},
        {"xtc_threshold": 0},
        {"xtc_threshold": 0.5},
        {"xtc_special_tokens": ()},
        {"min_tokens_to_keep": 10**9},
        {"acceptance": "rejection"},
        {"draft_temp": None},
        {"draft_temp": 0},
        {"draft_temp": 1e-30},
        {"draft_temp": 1e30},
        {"draft_filters": False},
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
