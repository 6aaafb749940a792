"""A request's draft policy, and drafts over part of the vocabulary: they leave the text alone.

The references are the target alone, plain float64 over the documented noise, and the distributions
and the drafter of the tests of rejection sampling.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve
from drafters.recurrent import RecurrentProvider
from hypothesis import given
from hypothesis import strategies as st
from test_rejection import HONEST, LYING, exact
from test_rejection_in_executor import (
    FILTERED,
    LISTED,
    MANY,
    PLAIN,
    ROWS,
    START,
    VOCABULARY,
    Near,
    emitted,
    near,
    normal,
    p_values,
    rate,
    rawly,
    run,
    table,
    target,
    truly,
)

import specdec
from specdec import Request, SamplingOptions, VerifyGroup
from specdec.cli.main import main
from specdec.contract import Greedy, Listed, Sampled
from specdec.errors import OptionError
from specdec.sampling import RowSamplers
from specdec.sampling.noise import gumbel, seed_words
from specdec.testing import TinyTarget
from specdec.verify.lane import DraftLane
from specdec.verify.live import LiveRows
from specdec.verify.members import MemberSampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify.prefill import Reading

Floats = npt.NDArray[np.float64]

SEEDED = SamplingOptions(temp=0.8, top_p=0.9, top_k=7)
POLICIES: dict[str, dict[str, Any]] = {
    "as it draws": {},
    "greedy": {"draft_temp": 0},
    "cold": {"draft_temp": 0.2},
    "hot": {"draft_temp": 5.0},
    "no filters": {"draft_filters": False},
    "hot without filters": {"draft_temp": 5.0, "draft_filters": False},
}


def samplers(*options: SamplingOptions) -> RowSamplers:
    rows = RowSamplers()
    rows.prepare_append([(each, each.resolved_seed()) for each in options]).commit()
    return rows


def scores(seed: int, size: int = VOCABULARY) -> Floats:
    """Log-probabilities ``[V]``, exact in float32."""
    logits = np.random.default_rng(seed).normal(size=size) * 1.5
    return normal(logits).astype(np.float32).astype(np.float64)


def stacked(parts: Sequence[Floats]) -> mx.array:
    return mx.array(np.stack(parts).astype(np.float32))


def listing(array: mx.array) -> list[int]:
    held: Any = array.tolist()
    return list(held)


def noise(seed: int, step: int, ids: Sequence[int]) -> Floats:
    found = gumbel(
        mx.array([seed_words(seed)], mx.uint32), mx.array([[step]]), mx.array(list(ids), mx.uint32)
    )
    result: Floats = np.array(found).astype(np.float64)[0, 0]
    return result


class Recorded:
    """A drafter, which is asked as it is; keeps what it drafted, and what it is told of the draws.

    Args:
        provider: the drafter.
        narrow: whether it is to draw from the listed ids alone, where it may.
    """

    weight_bytes = 0

    def __init__(self, provider: Any, *, narrow: bool = False) -> None:
        self.provider, self.narrow = provider, narrow
        self.id = provider.id
        self.drafts: list[list[list[int]]] = []
        self.selections: list[Any] = []
        self.rejecting: list[bool] = []

    @property
    def grouped(self) -> Recorded:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider.grouped, name)

    def open(self, *, sampling: Any, **others: Any) -> Any:
        self.selections.append(sampling.selection)
        self.rejecting.append(sampling.rejecting)
        if self.narrow and isinstance(self.selections[-1], Listed):
            sampling = Narrow(self.selections[-1])
        rows = self.provider.grouped.open(sampling=sampling, **others)
        draft = rows.draft

        def recorded(*asked: Any) -> Any:
            proposed = draft(*asked)
            told = getattr(proposed, "tokens", proposed)
            self.drafts.append([list(row) for row in told])
            return proposed

        rows.draft = recorded
        return rows

    def close(self) -> None:
        self.provider.close()


class Narrow:
    """Scores of the whole vocabulary, drawn from by their listed part alone."""

    def __init__(self, listed: Listed) -> None:
        self.listed = listed
        self.ids = mx.array(listed.ids)

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        return self.listed.sample(mx.take(logprobs, self.ids, axis=-1), steps)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        found = self.listed.log_distribution(mx.take(logprobs, self.ids, axis=-1), steps)
        places = mx.broadcast_to(self.ids, found.shape)
        return mx.put_along_axis(mx.full(logprobs.shape, -mx.inf), places, found, axis=-1)


# The policy of one row.


def test_drafts_follow_the_policy_and_the_target_s_draws_do_not() -> None:
    parts = [scores(each) for each in range(200)]
    window = stacked(parts)[None]
    drawn = listing(samplers(evolve(SEEDED, seed=5)).draw(window, [0])[0])
    found = {}
    for name, policy in POLICIES.items():
        rows = samplers(evolve(SEEDED, seed=5, **policy))
        assert listing(rows.draw(window, [0])[0]) == drawn
        found[name] = [listing(rows.sample(window[:, i], [i]))[0] for i in range(len(parts))]
    assert found["as it draws"] == drawn
    assert found["greedy"] == [int(part.argmax()) for part in parts]
    bare = {"no filters": 0.8, "hot without filters": 5.0}
    for name, temp in bare.items():
        assert found[name] == [
            int((part / temp + noise(5, i, range(VOCABULARY))).argmax())
            for i, part in enumerate(parts)
        ]
    for name in ("cold", "hot"):
        asked = samplers(evolve(SEEDED, seed=5, temp=POLICIES[name]["draft_temp"]))
        assert found[name] == listing(asked.draw(window, [0])[0])
    agreeing = [sum(map(int.__eq__, each, drawn)) for each in found.values()]
    assert len({tuple(each) for each in found.values()}) == len(POLICIES)
    assert max(agreeing[1:]) < agreeing[0] == len(parts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_greedy_request_may_have_drawn_drafts(policy: str) -> None:
    options = SamplingOptions(seed=3, top_k=2, **POLICIES[policy])
    rows = samplers(options)
    window = stacked([scores(each) for each in range(60)])[None]
    best = listing(mx.argmax(window[0], axis=-1))
    assert listing(rows.draw(window, [0])[0]) == best
    drafts = [listing(rows.sample(window[:, i], [i]))[0] for i in range(60)]
    assert (drafts == best) == (POLICIES[policy].get("draft_temp", 0) == 0)
    assert rows.selection == (Greedy() if drafts == best else Sampled())


def test_a_request_with_a_sampler_drafts_greedily_or_at_its_draft_temperature() -> None:
    def mine(logprobs: mx.array) -> mx.array:
        raise AssertionError("the round calls it, not a draft")

    row = scores(1)
    greedy, drawn = (
        samplers(SamplingOptions(sampler=mine, seed=4, draft_temp=temp)) for temp in (None, 3.0)
    )
    assert [listing(greedy.sample(stacked([row]), [i]))[0] for i in range(40)] == [
        row.argmax()
    ] * 40
    assert [listing(drawn.sample(stacked([row]), [i]))[0] for i in range(40)] == [
        int((row / 3.0 + noise(4, i, range(VOCABULARY))).argmax()) for i in range(40)
    ]
    assert (greedy.selection, drawn.selection) == (Greedy(), Sampled())


some_options = st.builds(
    SamplingOptions,
    temp=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    top_k=st.sampled_from([0, 3]),
    acceptance=st.sampled_from(["match", "rejection"]),
    draft_temp=st.sampled_from([None, 0, 0.3, 1.0, 2.0]),
    draft_filters=st.booleans(),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(st.data())
def test_rows_of_any_policies_draft_and_declare_in_a_batch_what_they_do_alone(
    data: st.DataObject,
) -> None:
    options = data.draw(st.lists(some_options, min_size=1, max_size=5))
    steps = [data.draw(st.integers(0, 2**31)) for _ in options]
    parts = [scores(data.draw(st.integers(0, 99))) for _ in options]
    rows = samplers(*options)
    drafts, declared = (
        rows.sample(stacked(parts), steps),
        rows.log_distribution(stacked(parts), steps),
    )
    window = rows.draw(stacked(parts)[:, None], steps)
    for r, each in enumerate(options):
        one, step = stacked([parts[r]]), [steps[r]]
        alone = samplers(each)
        assert alone.sample(one, step).item() == drafts[r].item()
        assert mx.array_equal(alone.log_distribution(one, step)[0], declared[r])
        assert mx.isfinite(declared[r, drafts[r]]).item()
        # The target's draw is that of the same request without a policy.
        plain = samplers(evolve(each, draft_temp=None, draft_filters=True))
        assert plain.draw(one[:, None], step).item() == window[r].item()


def test_what_is_declared_is_what_the_policy_draws_from() -> None:
    part = scores(9)
    for policy, asked in {
        "hot": evolve(SEEDED, temp=5.0),
        "no filters": SamplingOptions(temp=0.8),
        "hot without filters": SamplingOptions(temp=5.0),
    }.items():
        rows = samplers(evolve(SEEDED, seed=1, **POLICIES[policy]))
        got = np.exp(np.array(rows.log_distribution(stacked([part]), [0]))[0])
        assert np.abs(got - exact(part, asked)).max() < 1e-5
        assert np.abs(got - exact(part, SEEDED)).max() > 0.02
    rows = samplers(evolve(SEEDED, seed=1, draft_temp=0))
    got = np.exp(np.array(rows.log_distribution(stacked([part]), [0]))[0])
    assert got.tolist() == (np.arange(VOCABULARY) == part.argmax()).tolist()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"draft_temp": -1}, "draft_temp is -1; give 0 (greedy drafts), a number from"),
        ({"draft_temp": "hot"}, "draft_temp is 'hot'; give 0"),
        ({"draft_filters": 1}, "draft_filters is 1; give True or False"),
    ],
)
def test_a_policy_that_makes_no_sense_is_named(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as raised:
        SamplingOptions(temp=1.0, **bad)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


# In the executor.


@cache
def tiny() -> TinyTarget:
    return TinyTarget(24)


def generated(options: Sequence[SamplingOptions], drafter: Any) -> list[Any]:
    """Rows of different prompts and seeds, together."""
    group = VerifyGroup(tiny(), drafter)
    rows = group.admit(
        [
            Request(
                prompt=(3, 1 + b, 4),
                sampling=evolve(each, seed=40 + b),
                num_draft_tokens=3,
                max_tokens=40,
            )
            for b, each in enumerate(options)
        ]
    )
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    group.close()
    assert all(row.error is None and row.stats.draft_errors == 0 for row in rows)
    return rows


def test_by_match_every_policy_drafts_otherwise_and_gives_the_seed_s_text() -> None:
    hot = evolve(SEEDED, temp=1.5)
    plain = [row.emitted for row in generated([hot] * 4, None)]
    found = {}
    for name, policy in POLICIES.items():
        drafter = Recorded(RecurrentProvider.tiny())
        rows = generated([evolve(hot, **policy)] * 4, drafter)
        assert [row.emitted for row in rows] == plain
        assert sum(row.stats.accepted for row in rows) > 0
        found[name] = drafter.drafts
        assert drafter.selections == [Greedy() if name == "greedy" else Sampled()]
    firsts = [json.dumps(drafts[0]) for drafts in found.values()]
    assert len(set(firsts)) == len(firsts)  # of the same state: the first round's


def test_the_executor_s_greedy_drafts_are_the_drafter_s_best() -> None:
    drafter = Recorded(Near())
    run([evolve(PLAIN, acceptance="match", draft_temp=0)], drafter, rows=5, tokens=3)
    best = near(VOCABULARY).argmax(-1)
    assert drafter.drafts[0] == [[best[START], best[best[START]]]] * 5


def test_rows_of_different_policies_go_together_as_each_goes_alone() -> None:
    options = [
        evolve(each, **policy)
        for each in (PLAIN, evolve(FILTERED, acceptance="match"))
        for policy in POLICIES.values()
    ]
    for declares in (None, truly):
        rows = run(options, Near(declares=declares), rows=24, tokens=14)
        for b, row in enumerate(rows):
            [alone] = run(
                [options[b % 12]], Near(declares=declares), rows=1, tokens=14, first_seed=b
            )
            assert alone.emitted == row.emitted
            assert alone.stats == row.stats


# Under rejection each policy is another q, and p stays the request's.

JUDGED = {
    "hot": evolve(PLAIN, draft_temp=2.5),
    "greedy": evolve(PLAIN, draft_temp=0),
    "cold without filters": evolve(FILTERED, draft_temp=0.6, draft_filters=False),
}


@pytest.mark.parametrize("name", JUDGED)
def test_by_rejection_a_policy_keeps_the_target_s_distribution(
    name: str, record_property: Any
) -> None:
    options = JUDGED[name]
    rows = run([options], Near(declares=truly), **MANY)
    found = p_values(emitted(rows), options)
    record_property("p_values", found)
    assert min(found.values()) > HONEST, found
    assert rate(rows) > 0.2
    # It is another q: other drafts are accepted than without a policy.
    without = run([evolve(options, draft_temp=None, draft_filters=True)], Near(declares=truly))
    assert abs(rate(rows) - rate(without)) > 0.02


def test_a_q_that_leaves_the_policy_out_is_seen(record_property: Any) -> None:
    # The same drafts, declared as if they were drawn at the request's own temperature of 1.
    found = p_values(emitted(run([JUDGED["hot"]], Near(declares=rawly), **MANY)), PLAIN)
    record_property("p_values", found)
    assert found["y|y-1"] < LYING, found


def test_by_rejection_as_many_drafts_are_accepted_as_p_and_the_policy_s_q_allow() -> None:
    rows = run([JUDGED["hot"]], Near(declares=truly), tokens=2)
    p = exact(normal(table())[START], PLAIN)
    q = exact(near(VOCABULARY)[START], SamplingOptions(temp=2.5))
    chance = float(np.minimum(p, q).sum())
    assert abs(rate(rows) - chance) < 4 * (chance * (1 - chance) / ROWS) ** 0.5
    without = float(np.minimum(p, exact(near(VOCABULARY)[START], PLAIN)).sum())
    assert abs(rate(rows) - without) > 4 * (chance * (1 - chance) / ROWS) ** 0.5


# Part of the vocabulary.

ids_of = st.sets(st.integers(0, VOCABULARY - 1), min_size=1).map(sorted).map(tuple)
bare_options = st.builds(
    SamplingOptions,
    temp=st.sampled_from([0.0, 0.5, 1.0]),
    top_p=st.sampled_from([0.0, 1.0, 0.8]),
    draft_temp=st.sampled_from([None, 0, 0.3, 2.0]),
    draft_filters=st.just(False),
    seed=st.integers(-(2**63), 2**64 - 1),
)


def listed_of(rows: RowSamplers, ids: tuple[int, ...]) -> Listed | None:
    """What a drafter over these ids is shown, as the executor shows it."""
    selection = MemberSampling(rows, ids).selection
    return selection if isinstance(selection, Listed) else None


@given(st.data())
def test_a_draw_over_listed_ids_is_the_whole_draw_wherever_that_is_among_them(
    data: st.DataObject,
) -> None:
    options = data.draw(st.lists(bare_options, min_size=1, max_size=4))
    ids = data.draw(ids_of)
    steps = [data.draw(st.integers(0, 2**31)) for _ in options]
    parts = [scores(data.draw(st.integers(0, 99))) for _ in options]
    rows = samplers(*options)
    listed = listed_of(rows, ids)
    assert listed is not None
    assert listed.ids == ids
    whole = listing(rows.sample(stacked(parts), steps))
    cut = [part[list(ids)] for part in parts]
    drawn = listing(listed.sample(stacked(cut), steps))
    declared = np.exp(np.array(listed.log_distribution(stacked(cut), steps), np.float64))
    assert declared.shape == (len(options), len(ids))
    for r, each in enumerate(options):
        temp = each.temp if each.draft_temp is None else each.draft_temp
        if temp == 0:
            best = cut[r].argmax()
            want: Floats = (np.arange(len(ids)) == best).astype(np.float64)
        else:
            best = (cut[r] / temp + noise(each.resolved_seed(), steps[r], ids)).argmax()
            want = np.exp(normal(cut[r] / temp))
        assert drawn[r] == ids[best]
        assert np.abs(declared[r] - want).max() < 1e-5
        assert drawn[r] == whole[r] or whole[r] not in ids


def test_listed_draws_take_logits_of_any_size_and_16_bits() -> None:
    rows = samplers(SamplingOptions(), SamplingOptions(temp=1.0, seed=2))
    listed = listed_of(rows, LISTED)
    assert listed is not None
    logits = stacked([scores(1)[list(LISTED)], scores(2)[list(LISTED)]])
    for shift in (0.0, 8.0):
        assert listing(listed.sample(logits + shift, [3, 4])) == listing(
            listed.sample(logits, [3, 4])
        )
    half = logits.astype(mx.bfloat16)
    declared = listed.log_distribution(half + 8.0, [3, 4])
    assert declared.dtype == mx.float32
    assert np.abs(np.exp(np.array(declared)).sum(-1) - 1).max() < 1e-5
    assert listing(listed.sample(half, [3, 4])) == listing(
        listed.sample(half.astype(mx.float32), [3, 4])
    )


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}, {"xtc_probability": 0.5}]
)
def test_nothing_is_listed_while_a_row_drafts_with_filters(filters: dict[str, Any]) -> None:
    bare = SamplingOptions(temp=1.0, seed=1)
    filtered = SamplingOptions(temp=1.0, seed=2, **filters)
    assert listed_of(samplers(bare), LISTED) is not None
    assert listed_of(samplers(bare, filtered), LISTED) is None
    assert listed_of(samplers(bare, evolve(filtered, draft_filters=False)), LISTED) is not None
    assert listed_of(samplers(bare, evolve(filtered, draft_temp=0)), LISTED) is not None
    assert listed_of(samplers(bare, evolve(filtered, temp=0)), LISTED) is not None
    # Who joins a group where it was bound is drawn without its filters.
    rows = samplers(bare)
    listed = listed_of(rows, LISTED)
    assert listed is not None
    rows.prepare_append([(filtered, 2)]).commit()
    cut = [scores(each)[list(LISTED)] for each in (1, 2)]
    for step in range(40):
        drawn = listing(listed.sample(stacked(cut), [step, step]))
        want = [
            int((c + noise(seed, step, LISTED)).argmax())
            for c, seed in zip(cut, (1, 2), strict=True)
        ]
        assert drawn == [LISTED[best] for best in want]


def test_members_draw_over_listed_ids_as_their_rows_do() -> None:
    rows = samplers(
        SamplingOptions(temp=1.0, seed=1),
        SamplingOptions(),
        SamplingOptions(temp=0.5, seed=2),
        SamplingOptions(temp=1.0, seed=3, draft_temp=2.0),
    )
    of_rows, steps = listed_of(rows, LISTED), [5, 0, 9, 7]
    assert of_rows is not None
    cut = stacked([scores(each)[list(LISTED)] for each in range(4)])
    every = listing(of_rows.sample(cut, steps))
    assert len(set(every)) > 1
    declared = of_rows.log_distribution(cut, steps)
    members = MemberSampling(rows, LISTED)
    for places in (None, [0], [3], [1, 2], [0, 2, 3]):
        members.bind(places, 4)
        listed = members.selection
        assert isinstance(listed, Listed)
        assert listed.ids == LISTED
        who = [0, 1, 2, 3] if places is None else places
        theirs, at = cut[mx.array(who)], [steps[place] for place in who]
        assert listing(listed.sample(theirs, at)) == [every[place] for place in who]
        assert mx.array_equal(listed.log_distribution(theirs, at), declared[mx.array(who)])
    assert MemberSampling(rows).selection == Sampled()
    rows.prepare_append([(SEEDED, 1)]).commit()
    assert members.selection == Sampled()


def test_rows_that_judge_by_rejection_are_told_of_to_every_drafter() -> None:
    for options, rejecting in (([SEEDED, PLAIN], True), ([SEEDED, SamplingOptions()], False)):
        assert MemberSampling(samplers(*options)).rejecting == rejecting
        drafter = Recorded(Near())
        run(options, drafter, rows=2, tokens=2)
        assert drafter.rejecting == [rejecting]


BARE = SamplingOptions(temp=1.0)


@pytest.mark.parametrize(
    ("options", "plain", "whole"),
    [
        ([SamplingOptions()], Greedy, Listed),
        ([evolve(FILTERED, draft_temp=0)], Greedy, Listed),
        ([BARE, SamplingOptions()], Sampled, Listed),
        ([BARE, SEEDED], Sampled, Sampled),
        ([BARE, evolve(SEEDED, draft_filters=False)], Sampled, Listed),
    ],
)
def test_a_group_is_opened_with_the_selection_of_its_rows(
    options: list[SamplingOptions], plain: type, whole: type
) -> None:
    for listed, kind in ((None, plain), (LISTED, whole)):
        drafter = Recorded(Near(listed=listed))
        run(options, drafter, rows=2, tokens=3)
        assert [type(each) for each in drafter.selections] == [kind]


@pytest.mark.parametrize(
    "options", [[BARE, SamplingOptions()], [PLAIN, evolve(PLAIN, draft_temp=2)]]
)
def test_a_drafter_over_listed_ids_drafts_what_the_whole_vocabulary_without_others_gives(
    options: list[SamplingOptions],
) -> None:
    whole = Recorded(Near(declares=truly, listed=LISTED))
    narrow = Recorded(Near(declares=truly, listed=LISTED), narrow=True)
    want, got = (run(options, each, rows=30, tokens=12) for each in (whole, narrow))
    assert narrow.drafts == whole.drafts
    assert emitted(got).tolist() == emitted(want).tolist()
    assert {token for rows in narrow.drafts for row in rows for token in row} <= set(LISTED)
    assert sum(row.stats.accepted for row in got) > 0


def test_a_draft_vocabulary_is_asked_for_once_and_what_it_raises_is_raised() -> None:
    asked = []

    class Asking(Recorded):
        def draft_vocabulary(self, bound: Any, /) -> Any:
            asked.append(bound)
            if len(asked) > 1:
                raise LookupError("no such list")
            return LISTED

    run([BARE], Asking(Near(declares=truly)), rows=3, tokens=9)
    assert asked == [target()]
    with pytest.raises(LookupError, match="no such list"):
        DraftLane(Asking(Near()), "near", target())
    with pytest.raises(LookupError, match="no such list"):
        VerifyGroup(target(), Asking(Near()))


# Where a request says it.


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[SamplingOptions]:
    """How the rows that join are to be drawn."""
    found: list[SamplingOptions] = []
    join = LiveRows.join

    def joining(self: LiveRows, readings: Sequence[Reading]) -> None:
        found.extend(reading.row.request.sampling for reading in readings)
        join(self, readings)

    monkeypatch.setattr(LiveRows, "join", joining)
    return found


def policy(options: SamplingOptions) -> tuple[float | None, bool]:
    return options.draft_temp, options.draft_filters


def test_stream_generate_batches_and_the_command_take_a_policy(
    asked_for: list[SamplingOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = specdec.load_model("demo")
    usual: dict[str, Any] = {"drafter": "ngram", "max_tokens": 6}
    draw: dict[str, Any] = {"temp": 0.7, "top_p": 0.9, "seed": 2}
    texts = [
        specdec.generate(model, tokenizer, "def add(a, b):", **usual, **draw, **each)
        for each in ({}, {"draft_temp": 0.5, "draft_filters": False}, {"draft_temp": 0})
    ]
    assert [policy(each) for each in asked_for] == [(None, True), (0.5, False), (0, True)]
    assert len(set(texts)) == 1
    asked_for.clear()
    with specdec.BatchGenerator(model, tokenizer, **usual) as batch:
        of_all = SamplingOptions(temp=0.7, draft_temp=2.0)
        batch.insert(
            ["a", "b", "c"],
            sampling=[of_all] * 3,
            draft_temps=[None, 0, 0.5],
            draft_filters=[None, False, None],
        )
        with pytest.raises(OptionError, match=r"^prompt 1: draft_temp is -2; "):
            batch.insert(["a", "b"], draft_temps=[None, -2])
        while batch.has_work:
            batch.next()
    assert sorted(map(policy, asked_for), key=str) == [(0, False), (0.5, True), (2.0, True)]
    asked_for.clear()
    command = ["generate", "--prompt", "def add(a, b):", "--max-tokens", "6", "--json"]
    command += ["--drafter", "ngram", "--temp", "0.7", "--top-p", "0.9", "--seed", "2"]
    shown = []
    for more in ([], ["--draft-temp", "0.5", "--no-draft-filters"]):
        assert main([*command, *more]) == 0
        shown.append(json.loads(capsys.readouterr().out)["text"])
    assert [policy(each) for each in asked_for] == [(None, True), (0.5, False)]
    assert set(shown) == set(texts)
    assert main([*command, "--draft-temp", "-1"]) == 2
    assert capsys.readouterr().err.startswith("specdec: draft_temp is -1.0; give 0")
