"""Rejection sampling keeps the target's distribution, accepts all that it can, and never fails.

The reference is plain float64: what the options' definitions say, and Pearson's chi-square.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import random_state

from specdec.sampling import RowSamplers, SamplingOptions, rejection
from specdec.sampling.noise import seed_words
from specdec.sampling.rejection import Drafted, log_normalize, rejection_draw
from specdec.sampling.rows import normalize, nothing_left

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

VOCABULARY = 16
ROUNDS = 20_000
DRAFTS = 2


# The reference.


def tail(statistic: float, degrees: int) -> float:
    """Chance that chi-square exceeds a value: the regularised incomplete gamma Q(k/2, x/2)."""
    a, x = degrees / 2, statistic / 2
    if x <= 0:
        return 1.0
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:  # series of P
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return 1 - front * total
    b = x + 1 - a  # continued fraction of Q, by Lentz
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        b += 2
        d = 1 / (-i * (i - a) * d + b)
        c = b - i * (i - a) / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * h


@pytest.mark.parametrize("x", [1e-3, 0.5, 3.0, 20.0, 90.0])
def test_the_tail_of_chi_square_is_what_closed_forms_say(x: float) -> None:
    assert tail(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-9)
    assert tail(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-9)
    assert tail(x, 6) == pytest.approx(math.exp(-x / 2) * (1 + x / 2 + x * x / 8), rel=1e-9)


def excluded(p: Floats, options: SamplingOptions) -> Floats:
    """XTC by its definition."""
    shares = p / p.sum()
    top = shares > options.xtc_threshold
    if top.any():
        top &= shares > shares[top].min()
    top[list(options.xtc_special_tokens)] = False
    return np.where(top, 0, p)


def exact(table: Floats, options: SamplingOptions) -> Floats:
    """The distribution of one draw, by the definitions of the options."""
    p = np.exp(table)
    ranked = np.argsort(-p)
    if 0 < options.top_p < 1:
        count = int(np.searchsorted(np.cumsum(p[ranked]), options.top_p)) + 1
        p = np.where(np.isin(np.arange(len(p)), ranked[:count]), p, 0)
    if options.min_p:
        kept = p >= options.min_p * p.max()
        kept[ranked[: options.min_tokens_to_keep]] = True
        p = np.where(kept, p, 0)
    result = np.zeros_like(p)
    for share, left in (
        (1 - options.xtc_probability, p),
        (options.xtc_probability, excluded(p, options)),
    ):
        if 0 < options.top_k < len(p):
            out = np.argsort(-left)[options.top_k :]
            left[out] = 0
        scaled = left ** (1 / options.temp)
        result += share * scaled / scaled.sum()
    return result


def chi_square(counts: Ints, p: Floats) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells that expect under 5 are one."""
    assert (counts[p == 0] == 0).all(), "a token without probability was drawn"
    counts, p = counts[p > 0], p[p > 0]
    small = p * counts.sum() < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        p = np.append(p[~small], p[small].sum())
    expected = p * counts.sum()
    if expected.min() < 1:
        return 0.0, 0  # too few to say anything
    return float(((counts - expected) ** 2 / expected).sum()), len(p) - 1


def p_value(counts: Ints, p: Floats) -> float:
    return tail(*chi_square(counts, p))


# A small world: the next token's distribution depends on the token before it.


def tables(seed: int, spread: float) -> Floats:
    """Log-probabilities ``[V + 1, V]``: after each token, and (last) at the start."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(VOCABULARY + 1, VOCABULARY)) * spread
    result: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return result


TARGET = tables(1, 1.5)
NEAR = TARGET + tables(2, 0.7)
NEAR -= np.log(np.exp(NEAR).sum(-1, keepdims=True))


def rows_of(options: SamplingOptions, seeds: list[int]) -> RowSamplers:
    rows = RowSamplers()
    rows.prepare_append([(options, seed) for seed in seeds]).commit()
    return rows


class Drafter:
    """Draws from NEAR with the row's own options and noise, and declares what it drew from.

    ``how``: ``sampled``, or ``one-hot`` of the same draws, or ``greedy`` (one-hot too).
    """

    def __init__(self, how: str) -> None:
        self.how = how

    def draft(self, rows: RowSamplers, last: mx.array, steps: list[int]) -> Drafted:
        near = mx.array(NEAR.astype(np.float32))
        tokens, declared = [], []
        for i in range(DRAFTS):
            at = [step + i for step in steps]
            logprobs = near[last]
            last = mx.argmax(logprobs, -1) if self.how == "greedy" else rows.sample(logprobs, at)
            tokens.append(last)
            declared.append(self.declare(rows, logprobs, at))
        logq = None if self.how in ("greedy", "one-hot") else mx.stack(declared, axis=1)
        return Drafted(mx.stack(tokens, axis=1), None, logq)

    def declare(self, rows: RowSamplers, logprobs: mx.array, steps: list[int]) -> mx.array:
        return rows.log_distribution(logprobs, steps)


class Unfiltered(Drafter):
    """Declares its raw probabilities, not what filters and temperature made of them."""

    def declare(self, rows: RowSamplers, logprobs: mx.array, steps: list[int]) -> mx.array:
        return logprobs


class Certain(Drafter):
    """Drafts its best token and declares a distribution (transformers #32867)."""

    def __init__(self) -> None:
        super().__init__("greedy")

    def draft(self, rows: RowSamplers, last: mx.array, steps: list[int]) -> Drafted:
        said = super().draft(rows, last, steps)
        return evolve(said, logq=mx.array(NEAR.astype(np.float32))[behind(last, said)])


def behind(last: mx.array, said: Drafted) -> mx.array:
    """The token before each draft, ``[b, d]``."""
    return mx.concatenate([last[:, None], said.tokens[:, :-1].astype(last.dtype)], axis=1)


class Choosy(Drafter):
    """Stops its draft before a token that it drew and finds improbable (q below 0.1).

    Of the drafts that are left, q is not the distribution any more.
    """

    def draft(self, rows: RowSamplers, last: mx.array, steps: list[int]) -> Drafted:
        said = super().draft(rows, last, steps)
        share = mx.exp(mx.array(NEAR.astype(np.float32))[behind(last, said), said.tokens])
        kept = mx.cumprod((share >= 0.1).astype(mx.int32), axis=1)
        return evolve(said, lengths=kept.sum(axis=1))


class Emitted(SimpleNamespace):
    tokens: Ints  # [ROUNDS, DRAFTS + 1]
    first_drafts_accepted: float


def emitted(options: SamplingOptions, drafter: Drafter, first_seed: int = 0) -> Emitted:
    """The first three tokens of 20,000 requests, in as many rounds as they take."""
    rows = rows_of(options, list(range(first_seed, first_seed + ROUNDS)))
    target = mx.array(TARGET.astype(np.float32))
    out = np.full((ROUNDS, DRAFTS + 1), -1)
    count = np.zeros(ROUNDS, np.int64)
    last = np.full(ROUNDS, VOCABULARY)
    accepted = None
    while (count <= DRAFTS).any():
        steps = count.tolist()
        pending = mx.array(last)
        said = drafter.draft(rows, pending, steps)
        drafts = said.tokens.astype(pending.dtype)
        window = target[mx.concatenate([pending[:, None], drafts], axis=1)]
        samples = np.array(rows.draw(window, steps, said)).astype(np.int64)
        going = np.ones(ROUNDS, bool)  # the walk: on as long as the sample is the draft
        agreed = samples[:, :DRAFTS] == np.array(drafts)
        if said.lengths is not None:
            agreed &= np.arange(DRAFTS) < np.array(said.lengths)[:, None]
        if accepted is None:
            accepted = float(agreed[:, 0].mean())
        for i in range(DRAFTS + 1):
            takes = np.flatnonzero(going & (count <= DRAFTS))
            out[takes, count[takes]] = last[takes] = samples[takes, i]
            count[takes] += 1
            if i < DRAFTS:
                going &= agreed[:, i]
    assert accepted is not None
    return Emitted(tokens=out, first_drafts_accepted=accepted)


def p_values(tokens: Ints, options: SamplingOptions) -> dict[str, float]:
    """Chi-square of each position alone, and of each given the token before it."""
    after = np.stack([exact(row, options) for row in TARGET])
    found = {}
    marginal = after[VOCABULARY]
    for i in range(tokens.shape[1]):
        counts = np.bincount(tokens[:, i], minlength=VOCABULARY)
        found[f"y{i + 1}"] = p_value(counts, marginal)
        marginal = marginal @ after[:VOCABULARY]
        if i == 0:
            continue
        statistic, degrees = 0.0, 0
        for token in range(VOCABULARY):
            given_token = tokens[tokens[:, i - 1] == token, i]
            if len(given_token):
                counts = np.bincount(given_token, minlength=VOCABULARY)
                each = chi_square(counts, after[token])
                statistic, degrees = statistic + each[0], degrees + each[1]
        found[f"y{i + 1}|y{i}"] = tail(statistic, degrees)
    return found


OPTIONS = {
    "plain": SamplingOptions(temp=1.0),
    "warm": SamplingOptions(temp=1.6),
    "nucleus": SamplingOptions(temp=0.7, top_p=0.9),
    "min-p": SamplingOptions(temp=1.4, min_p=0.12, min_tokens_to_keep=3),
    "top-k": SamplingOptions(temp=1.2, top_k=5),
    "xtc": SamplingOptions(
        temp=1.0, xtc_probability=0.4, xtc_threshold=0.12, xtc_special_tokens=(3,)
    ),
    "all": SamplingOptions(
        temp=1.3, top_p=0.95, min_p=0.02, xtc_probability=0.5, xtc_threshold=0.2, top_k=7
    ),
}
HONEST = 1e-4
LYING = 1e-6


@pytest.mark.parametrize("how", ["greedy", "one-hot", "sampled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_by_rejection_each_token_has_the_target_s_distribution(
    name: str, how: str, record_property: Any
) -> None:
    options = evolve(OPTIONS[name], acceptance="rejection")
    before = random_state()
    found = p_values(emitted(options, Drafter(how)).tokens, options)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert random_state() == before


@pytest.mark.parametrize("name", OPTIONS)
def test_by_match_each_token_has_the_target_s_distribution_and_is_the_seed_s(
    name: str, record_property: Any
) -> None:
    options = OPTIONS[name]
    got = emitted(options, Drafter("sampled")).tokens
    found = p_values(got, options)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert (got == emitted(options, Drafter("greedy")).tokens).all()


@pytest.mark.parametrize(
    ("liar", "name"),
    [(Unfiltered("sampled"), "nucleus"), (Unfiltered("sampled"), "warm"), (Certain(), "plain")],
)
def test_a_declared_distribution_that_was_not_drawn_from_is_seen_and_hurts_no_match(
    liar: Drafter, name: str, record_property: Any
) -> None:
    options = evolve(OPTIONS[name], acceptance="rejection")
    found = p_values(emitted(options, liar).tokens, options)
    record_property("p_values", found)
    assert found["y1"] < LYING
    assert found["y2|y1"] < LYING
    matched = p_values(emitted(OPTIONS[name], liar).tokens, OPTIONS[name])
    assert min(matched.values()) > HONEST, matched


def test_drafts_left_out_for_what_they_are_do_no_harm_where_none_is_declared(
    record_property: Any,
) -> None:
    options = evolve(OPTIONS["plain"], acceptance="rejection")
    found = p_values(emitted(options, Choosy("one-hot")).tokens, options)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    # The docstring of sampling/rejection.py says that this one is wrong.
    declared = p_values(emitted(options, Choosy("sampled")).tokens, options)
    record_property("declared", declared)
    assert declared["y1"] < LYING
    assert declared["y2|y1"] < LYING
    matched = emitted(OPTIONS["plain"], Choosy("sampled")).tokens
    assert (matched == emitted(OPTIONS["plain"], Drafter("greedy")).tokens).all()


@pytest.mark.parametrize(("shared", "how"), [("ACCEPT", "sampled"), ("RESIDUAL", "one-hot")])
def test_noise_that_is_shared_with_the_drafter_s_draw_would_be_seen(
    shared: str, how: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    streams = {"DRAW": 0, "ACCEPT": 2, "RESIDUAL": 3, shared: 0}
    monkeypatch.setattr(rejection, "Stream", SimpleNamespace(**streams))
    options = evolve(OPTIONS["plain"], acceptance="rejection")
    found = p_values(emitted(options, Drafter(how)).tokens, options)
    record_property("p_values", found)
    assert found["y1"] < LYING


@pytest.mark.parametrize("name", ["plain", "nucleus", "top-k"])
def test_drafts_are_accepted_as_often_as_p_and_q_overlap(name: str) -> None:
    options = evolve(OPTIONS[name], acceptance="rejection")
    p, q = exact(TARGET[-1], options), exact(NEAR[-1], options)
    for how, chance in (
        ("sampled", np.minimum(p, q).sum()),
        ("one-hot", (p * q).sum()),
        ("greedy", p[q.argmax()]),
    ):
        got = emitted(options, Drafter(how)).first_drafts_accepted
        assert abs(got - chance) < 4 * math.sqrt(chance * (1 - chance) / ROUNDS), how
    matched = emitted(OPTIONS[name], Drafter("sampled")).first_drafts_accepted
    assert matched < np.minimum(p, q).sum()


def test_drafts_beyond_the_target_s_vocabulary_keep_the_distribution_where_they_stand() -> None:
    # The drafter draws over 20 ids; the target has 16 of them, and q is cut to these.
    wide = np.random.default_rng(9).normal(size=20)
    wide -= np.log(np.exp(wide).sum())
    options = SamplingOptions(temp=1.0, acceptance="rejection")
    rows = rows_of(options, list(range(ROUNDS)))
    everywhere = mx.broadcast_to(mx.array(wide.astype(np.float32)), (ROUNDS, 20))
    drafts = rows.sample(everywhere, [0] * ROUNDS)[:, None]
    assert np.array(drafts).max() > VOCABULARY
    target = mx.array(np.stack([TARGET[-1]] * 2).astype(np.float32))
    window = mx.broadcast_to(target, (ROUNDS, 2, VOCABULARY))
    drafted = Drafted(drafts, None, everywhere[:, None, :VOCABULARY])
    got = np.array(rows.draw(window, [0] * ROUNDS, drafted))[:, 0]
    counts = np.bincount(got, minlength=VOCABULARY)
    assert p_value(counts, exact(TARGET[-1], options)) > HONEST
    # A draft that is dropped for what it is, and drawn again, is not made up for.
    dropped = mx.where(drafts[:, 0] < VOCABULARY, 1, 0)
    drafted = evolve(drafted, lengths=dropped)
    got = np.array(rows.draw(window, [0] * ROUNDS, drafted))[:, 0]
    assert p_value(np.bincount(got, minlength=VOCABULARY), exact(TARGET[-1], options)) < LYING


# Edges (jaymody/speculative-sampling #5, youssofal/MTPLX #82).

LOWEST, HIGHEST = 2.0**-33, 1 - 2.0**-24


def judge(
    monkeypatch: pytest.MonkeyPatch,
    p: Any,
    q: Any,
    drafts: list[int],
    u: float,
    seeds: int = 64,
) -> Ints:
    """Samples ``[seeds, d]`` with u as given; ``p``, ``q`` are log-probabilities ``[d, V]``."""
    monkeypatch.setattr(
        rejection, "uniform", lambda seeds, steps, stream: mx.full(steps.shape, u, mx.float32)
    )
    many = (seeds, len(drafts))
    scores = mx.broadcast_to(mx.array(np.array(p)), (*many, np.shape(p)[-1]))
    logq = None if q is None else mx.broadcast_to(mx.array(np.array(q)), (*many, np.shape(q)[-1]))
    got = rejection_draw(
        scores,
        mx.broadcast_to(mx.arange(len(drafts), dtype=mx.uint32), many),
        seeds=mx.array([seed_words(seed) for seed in range(seeds)], mx.uint32),
        drafted=Drafted(mx.broadcast_to(mx.array(drafts), many), None, logq),
    )
    return np.array(got).astype(np.int64)


def logs(*shares: float) -> npt.NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        result: npt.NDArray[np.float32] = np.log(np.array(shares)).astype(np.float32)
        return result


@pytest.mark.parametrize("u", [LOWEST, 0.5, HIGHEST])
@given(numbers=st.integers(0, 2**32 - 1), draft=st.integers(0, 15))
def test_where_p_is_q_every_draft_is_accepted(u: float, numbers: int, draft: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        scores = np.random.default_rng(numbers).normal(size=(1, 16)) * 4
        scores = scores.astype(np.float32)
        q = log_normalize(mx.array(scores))
        assert (judge(patch, scores, q, [draft], u, seeds=2) == draft).all()


@pytest.mark.parametrize("u", [LOWEST, 0.5, HIGHEST])
@given(numbers=st.integers(0, 2**32 - 1))
def test_where_p_is_q_up_to_rounding_no_token_without_probability_is_drawn(
    u: float, numbers: int
) -> None:
    rng = np.random.default_rng(numbers)
    scores = rng.normal(size=(1, 16)) * 4
    gone = rng.random(16) < 0.5
    gone[5] = False
    scores[:, gone] = -np.inf
    p = np.array(log_normalize(mx.array(scores.astype(np.float32))))
    share = np.exp(p.astype(np.float64))
    for noise in (1e-8, -1e-8):
        q = logs(*(np.maximum(share[0] + noise * rng.random(16), 0)))[None]
        with pytest.MonkeyPatch.context() as patch:
            got = judge(patch, p, q, [int(rng.integers(16))], u, seeds=8)
        assert not gone[got].any()


@pytest.mark.parametrize("u", [LOWEST, HIGHEST])
@pytest.mark.parametrize("with_q", [False, True])
def test_a_certain_target_draws_its_token_whatever_was_drafted(
    u: float, with_q: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sure = logs(0, 0, 1, 0)
    for q in (sure, logs(1, 0, 0, 0), logs(0.25, 0.25, 0.25, 0.25)):
        for draft in range(4):
            got = judge(monkeypatch, [sure], [q] if with_q else None, [draft], u)
            assert (got == 2).all()


def test_a_residual_without_mass_or_with_nan_becomes_a_draw_from_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = logs(0.5, 0.3, 0.2, 0)
    above = p + np.float32(0.1)  # q above p everywhere: nothing is left of p - q
    nan = np.full(4, np.nan, np.float32)
    infinite = np.full(4, np.inf, np.float32)
    for q in (above, infinite, np.where([1, 0, 0, 0], infinite, nan)):
        got = judge(monkeypatch, [p], [q], [0], HIGHEST, seeds=4000)
        counts = np.bincount(got[:, 0], minlength=4)
        assert p_value(counts, np.array([0.5, 0.3, 0.2, 0])) > HONEST or q is not above
        assert counts[3] == 0
        assert (counts[1:3] > 0).all()


@pytest.mark.parametrize("place", [0, 1, 2, 3, None])
@pytest.mark.parametrize("draft", [1, 2, 3])
@pytest.mark.parametrize("u", [LOWEST, 0.25, HIGHEST])
def test_a_q_with_nan_anywhere_counts_as_one_hot_at_that_position_alone(
    u: float, draft: int, place: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, fine = logs(0.5, 0.3, 0.2, 0), logs(0.1, 0.2, 0.3, 0.4)
    broken = fine.copy()
    broken[slice(None) if place is None else place] = np.nan
    got = judge(monkeypatch, [p, p], [broken, fine], [draft, draft], u)
    want = judge(monkeypatch, [p], None, [draft], u)
    assert (got[:, :1] == want).all()
    sure = judge(monkeypatch, [p, p], [fine, fine], [draft, draft], u)
    assert (got[:, 1] == sure[:, 1]).all()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("draft", [0, 1, 2, 3])
@pytest.mark.parametrize("u", [LOWEST, 0.25, HIGHEST])
def test_a_q_without_a_chance_for_its_own_draft_counts_as_one_hot(
    u: float, draft: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a drafter whose logits are all NaN: no draft may be accepted for having had none."""
    p, fine = logs(0.5, 0.3, 0.2, 0), logs(0.1, 0.2, 0.3, 0.4)
    broken = fine.copy()
    broken[slice(None) if everywhere else draft] = -np.inf
    got = judge(monkeypatch, [p, p], [broken, fine], [draft, draft], u)
    want = judge(monkeypatch, [p], None, [draft], u)
    assert (got[:, :1] == want).all()
    sure = judge(monkeypatch, [p, p], [fine, fine], [draft, draft], u)
    assert (got[:, 1] == sure[:, 1]).all()


def test_u_at_its_ends_accepts_and_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = logs(0.5, 0.5 - 1e-6, 1e-6), logs(1e-6, 0.5 - 1e-6, 0.5)
    assert (judge(monkeypatch, [p], [q], [0], HIGHEST) == 0).all()
    assert (judge(monkeypatch, [p], [q], [2], LOWEST) == 2).all()
    assert (judge(monkeypatch, [p], [q], [2], HIGHEST) == 0).all(), "the residual is all at 0"
    assert (judge(monkeypatch, [p], None, [0], LOWEST) == 0).all()
    assert not (judge(monkeypatch, [p], None, [0], HIGHEST) == 0).any()


def test_a_draft_is_rejected_just_where_u_reaches_p_over_q(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, q = logs(0.485, 0.515), logs(0.5, 0.5)  # 0.97 of q
    assert (judge(monkeypatch, [p], [q], [0], 0.9699) == 0).all()
    assert (judge(monkeypatch, [p], [q], [0], 0.9701) == 1).all()
    assert (judge(monkeypatch, [p], None, [0], 0.4849) == 0).all()
    assert (judge(monkeypatch, [p], None, [0], 0.4851) == 1).all()


@pytest.mark.parametrize("draft", [-1, 4, 2**31, 2**40])
def test_a_certain_draft_that_is_no_id_leaves_a_draw_from_p(
    draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = judge(monkeypatch, [logs(0.5, 0.3, 0.2, 0)], None, [draft], LOWEST, seeds=4000)
    counts = np.bincount(got[:, 0], minlength=4)
    assert p_value(counts, np.array([0.5, 0.3, 0.2, 0])) > HONEST


@given(st.data())
def test_whatever_a_drafter_says_only_tokens_with_probability_are_drawn(
    data: st.DataObject,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scores = rng.normal(size=(3, 4, 9)) * data.draw(st.sampled_from([0.1, 3.0, 80.0]))
    scores[rng.random(scores.shape) < 0.5] = -np.inf
    scores[..., 4] = np.where(np.isinf(scores).all(-1), 0.0, scores[..., 4])
    depth = data.draw(st.integers(1, 5))
    kinds = np.array([np.nan, np.inf, -np.inf, 0.0, -1.0, -1e30, 1e30, -0.1])
    logq = rng.choice(kinds, size=(3, depth, 9)) if data.draw(st.booleans()) else None
    dtype = data.draw(st.sampled_from([mx.int32, mx.uint32, mx.int64, mx.uint8, mx.int16]))
    extremes = [0, 3, 8, 9, 100] + ([-1, -(2**15)] if dtype not in (mx.uint32, mx.uint8) else [])
    tokens = mx.array(rng.choice(extremes, size=(3, depth))).astype(dtype)
    lengths = mx.array(rng.integers(-2, 9, size=3)) if data.draw(st.booleans()) else None
    got = rejection_draw(
        mx.array(scores.astype(np.float32)),
        mx.broadcast_to(mx.arange(4, dtype=mx.uint32), (3, 4)),
        seeds=mx.array([seed_words(seed) for seed in range(3)], mx.uint32),
        drafted=Drafted(
            tokens, lengths, None if logq is None else mx.array(logq.astype(np.float32))
        ),
    )
    assert got.shape == (3, 4)
    assert got.dtype == mx.uint32
    drawn = np.take_along_axis(scores, np.array(got).astype(np.int64)[..., None], -1)
    assert np.isfinite(drawn).all()


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_a_position_where_nothing_is_left_is_known_and_spoils_no_other(acceptance: Any) -> None:
    logits = np.random.default_rng(3).normal(size=(2, 3, 8)).astype(np.float32)
    logits[0, 1] = -np.inf
    masked = mx.array(logits)
    assert nothing_left(masked).tolist() == [[False, True, False], [False] * 3]
    assert nothing_left(normalize(masked)).tolist() == [[False, True, False], [False] * 3]
    spoiled = np.where(np.arange(8) == 3, np.nan, logits)
    assert nothing_left(mx.array(spoiled)).all().item()
    rows = rows_of(SamplingOptions(temp=1.0, acceptance=acceptance), [1, 2])
    tokens = mx.array([[1, 2], [3, 4]])
    for logq in (None, mx.zeros((2, 2, 8)) - math.log(8)):
        drafted = Drafted(tokens, None, logq)
        got = np.array(rows.draw(normalize(masked), [0, 0], drafted))
        assert got.max() < 8
        whole = np.where(np.isinf(logits), 0, logits)
        want = np.array(rows.draw(normalize(mx.array(whole)), [0, 0], drafted))
        elsewhere = np.isfinite(logits).all(-1)
        assert (got == want)[elsewhere].all()
    nowhere = rows.log_distribution(normalize(masked[:, 1]), [0, 0])
    assert (np.array(nowhere[0]) == -np.inf).all()
    assert np.exp(np.array(nowhere[1])).sum() == pytest.approx(1)
