"""Rows join and leave in any order, and each of them gets the text that it gets alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from scripted import (
    RIGHT,
    WRONG,
    OnDevice,
    Script,
    ScriptedProvider,
    drain,
    ending_of,
    expected,
    on_device,
    request,
    solo,
    target,
    text_of,
)
from tiny_models import VOCABULARY

from specdec import Row, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.contract import DraftProvider

PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), tuple(range(20, 31)), (61, 60), (33, 8, 33, 8))
SAMPLINGS = ((0.0, None), (1.0, 7), (0.7, 8))
TEXTS = {
    (prompt, temp, seed): text_of(prompt, temp, seed)
    for prompt in PROMPTS
    for temp, seed in SAMPLINGS
}
MOVES = ([[RIGHT] * 3], [[RIGHT, WRONG], [WRONG], [RIGHT] * 4], [[], [RIGHT] * 2])

DRAFTERS = ("plain", "host", "device", "whole prompt", "hidden states", "ngram")


def drafter(kind: str) -> DraftProvider | None:
    texts = list(TEXTS.values())
    moves = [MOVES[place % len(MOVES)] for place in range(len(texts))]
    plan = Script(texts, moves)
    made: dict[str, Callable[[], DraftProvider | None]] = {
        "plain": lambda: None,
        "host": lambda: ScriptedProvider(plan),
        "device": lambda: ScriptedProvider(plan, device=on_device(plan, lengths=True)),
        "whole prompt": lambda: ScriptedProvider(plan, mode=PrefillMode.FULL),
        "hidden states": lambda: ScriptedProvider(
            plan, mode=PrefillMode.FULL, context=ContextKind.POST_NORM
        ),
        "ngram": NgramProvider,
    }
    return made[kind]()


def check_drafter(provider: DraftProvider | None) -> None:
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []


# Any history of joins and leaves.

JOINS = st.lists(
    st.tuples(
        st.integers(0, 3),  # rounds before this one joins
        st.sampled_from(PROMPTS),
        st.sampled_from(SAMPLINGS),
        st.integers(1, 14),  # budget
        st.integers(0, 5),  # width
        st.sampled_from([None, None, 2, 5]),  # an end token: the one written here
        st.sampled_from([None, None, None, 1, 4]),  # tokens after which the consumer goes
        st.booleans(),  # with a cache of the caller's
    ),
    min_size=1,
    max_size=6,
)


VERBS = (
    "open_prefill",
    "prefill",
    "capture",
    "open",
    "prepare_append",
    "join",
    "draft",
    "draft_device",
    "resolve",
    "commit",
    "filter_rows",
    "close",
)
FAULTS = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 12)), max_size=3)


@settings(max_examples=250, deadline=None)
@given(joins=JOINS, kind=st.sampled_from(DRAFTERS), faults=st.just([]) | FAULTS)
def test_each_row_gets_its_own_text_whoever_joins_and_leaves_and_whatever_the_drafter_raises(
    joins: list[tuple[int, tuple[int, ...], Any, int, int, int | None, int | None, bool]],
    kind: str,
    faults: list[tuple[str, int]],
) -> None:
    provider = drafter(kind)
    if isinstance(provider, ScriptedProvider):
        provider.faults = {verb: [n for v, n in faults if v == verb] for verb, _ in faults}
    group = VerifyGroup(target(), provider, prefill_step_size=4)
    served: list[tuple[Row, Any, list[KVCache] | None]] = []

    def step() -> None:
        with group.round() as done:
            done.deliver_all()

    for wait, prompt, (temp, seed), budget, width, place, patience, cached in joins:
        for _ in range(wait):
            step()
        text = TEXTS[prompt, temp, seed]
        ends = frozenset() if place is None else frozenset([text.output[place]])
        caches = [KVCache(), KVCache()] if cached else None
        heard = itertools.count(1)

        def consumer(
            _emission: Any, heard: Any = heard, patience: int | None = patience
        ) -> bool | None:
            return False if next(heard) == patience else None

        asked = request(
            prompt,
            temp=temp,
            seed=seed,
            max_tokens=budget,
            end_tokens=ends,
            num_draft_tokens=width,
            consumer=consumer,
            cache=caches,
        )
        [row] = group.admit([asked])
        served.append((row, (text, ends, budget, patience), caches))
    drain(group)

    for row, (text, ends, budget, patience), caches in served:
        full = expected(text.output, ends, budget)
        if patience is not None and len(full.tokens) > patience:
            assert row.emitted == full.tokens[:patience]
            assert row.finish == "cancelled"
        elif patience is not None and len(full.tokens) == patience:
            assert row.emitted == full.tokens
            # The consumer went at the last token; an end token behind it may never be drawn.
            assert row.finish in (full.finish, "cancelled")
        else:
            assert ending_of(row) == full
        if caches is not None:
            read = len(row.tokens) + (row.end_token is not None)
            assert {cache.offset for cache in caches} == {read}
        assert row.stats.emitted == len(row.emitted)
    check_drafter(provider)
    if isinstance(provider, ScriptedProvider):
        group.close()
        assert provider.left_open == []


# Identical requests.


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_identical_requests_get_identical_texts(kind: str, count: int, staggered: bool) -> None:
    prompt = PROMPTS[2]
    text = solo(prompt)[:16]
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    asked = [request(prompt, max_tokens=16, num_draft_tokens=3) for _ in range(count)]
    rows: list[Row] = []
    if staggered:
        for each in asked:
            rows += group.admit([each])
            with group.round() as done:
                done.deliver_all()
    else:
        rows = group.admit(asked)
    drain(group)
    assert [row.emitted for row in rows] == [text] * count
    check_drafter(provider)


# Named histories.


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_row_joins_right_after_another_has_left(kind: str) -> None:
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    short, long = group.admit(
        [
            request(PROMPTS[1], max_tokens=2, num_draft_tokens=3),
            request(PROMPTS[2], max_tokens=14, num_draft_tokens=3),
        ]
    )
    while short.finish is None:
        with group.round() as done:
            done.deliver_all()
    assert long.finish is None
    [late] = group.admit([request(PROMPTS[0], max_tokens=7, num_draft_tokens=3)])
    drain(group)
    assert short.emitted == solo(PROMPTS[1])[:2]
    assert long.emitted == solo(PROMPTS[2])[:14]
    assert late.emitted == solo(PROMPTS[0])[:7]
    check_drafter(provider)


@pytest.mark.parametrize("joining", [1, 2])
@pytest.mark.parametrize("rounds", range(1, 5))
def test_a_plain_window_that_was_begun_early_is_used_when_rows_join(
    joining: int, rounds: int
) -> None:
    group = VerifyGroup(target())
    [live] = group.admit([request(PROMPTS[2], temp=1.0, seed=7, max_tokens=12)])
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()
    assert group._live.flight is not None
    late = group.admit(
        [request(prompt, max_tokens=6) for prompt in (PROMPTS[0], PROMPTS[3])[:joining]]
    )
    with group.round() as done:
        done.deliver_all()
    assert len(live.emitted) == rounds + 1
    drain(group)
    assert live.emitted == solo(PROMPTS[2], 1.0, 7)[:12]
    for row, prompt in zip(late, (PROMPTS[0], PROMPTS[3]), strict=False):
        assert row.emitted == solo(prompt)[:6]
    assert live.stats.rounds == live.stats.target_forwards == 12


@pytest.mark.parametrize("kind", ["host", "whole prompt"])
@pytest.mark.parametrize("budget", [1, 2, 8])
@pytest.mark.parametrize("leaver", [False, True])
def test_a_row_that_drafts_joins_rows_that_decode_plainly_with_an_early_window(
    kind: str, budget: int, leaver: bool
) -> None:
    """The drafter rests meanwhile; the new row's first token may end it at once."""
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    live = group.admit(
        [
            request(PROMPTS[2], max_tokens=14, num_draft_tokens=0),
            request(PROMPTS[1], max_tokens=2 if leaver else 9, num_draft_tokens=0),
        ]
    )
    for _ in range(3):
        with group.round() as done:
            done.deliver_all()
    assert group._live.flight is not None
    late, later = group.admit(
        [
            request(PROMPTS[3], max_tokens=budget, num_draft_tokens=3),
            request(PROMPTS[5], max_tokens=6, num_draft_tokens=3),
        ]
    )
    drain(group)
    assert live[0].emitted == solo(PROMPTS[2])[:14]
    assert live[1].emitted == solo(PROMPTS[1])[: 2 if leaver else 9]
    assert late.emitted == solo(PROMPTS[3])[:budget]
    assert later.emitted == solo(PROMPTS[5])[:6]
    check_drafter(provider)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_group_that_ran_empty_serves_again(kind: str) -> None:
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    for prompts in (PROMPTS[:1], PROMPTS[1:4], PROMPTS[:1], PROMPTS[4:]):
        rows = group.admit(
            [request(prompt, max_tokens=9, num_draft_tokens=3) for prompt in prompts]
        )
        drain(group)
        assert [row.emitted for row in rows] == [solo(prompt)[:9] for prompt in prompts]
        assert {row.stats.reason for row in rows} == {None}
    if isinstance(provider, ScriptedProvider):
        # Drained, not closed: the rows that join later are in the same group.
        assert provider.calls["open"] == 1
    check_drafter(provider)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_leave_in_any_order(kind: str, order: tuple[int, ...]) -> None:
    limits = [4 + 5 * place for place in order]
    provider = drafter(kind)
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [
            request(prompt, max_tokens=limit, num_draft_tokens=3)
            for prompt, limit in zip(PROMPTS[1:4], limits, strict=True)
        ]
    )
    drain(group)
    for row, prompt, limit in zip(rows, PROMPTS[1:4], limits, strict=True):
        assert row.emitted == solo(prompt)[:limit]
    check_drafter(provider)


MIXED: tuple[dict[str, Any], ...] = (
    {"temp": 0.0},
    {"temp": 1.0, "seed": 1},
    {"temp": 1.0, "seed": None},
    {"temp": 1.0, "seed": 2},
)


@pytest.mark.parametrize("kind", ["plain", "ngram"])
def test_seeded_rows_get_their_text_in_any_order_and_company(kind: str) -> None:
    prompt = PROMPTS[2]
    unseeded = []
    for order in itertools.permutations(range(4)):
        group = VerifyGroup(target(), drafter(kind))
        rows = group.admit(
            [
                request(prompt, max_tokens=8, num_draft_tokens=1 + place, **MIXED[which])
                for place, which in enumerate(order)
            ]
        )
        drain(group)
        for row, which in zip(rows, order, strict=True):
            if which == 2:
                unseeded.append(row.emitted)
            else:
                options = MIXED[which]
                assert row.emitted == solo(prompt, options["temp"], options.get("seed"))[:8]
    assert len(set(unseeded)) > 12
    assert all(len(set(emitted)) > 1 for emitted in unseeded)


@pytest.mark.parametrize("width", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["host", "device", "ngram"])
def test_a_seed_gives_one_text_alone_in_company_late_and_at_any_width(
    kind: str, width: int
) -> None:
    prompt = PROMPTS[3]
    text = solo(prompt, 1.0, 7)[:15]
    options: dict[str, Any] = {"temp": 1.0, "seed": 7, "max_tokens": 15}
    group = VerifyGroup(target(), drafter(kind))
    for _ in range(4):  # unrelated requests first
        group.admit([request(PROMPTS[1], max_tokens=5, num_draft_tokens=3)])
        drain(group)
    [alone] = group.admit([request(prompt, num_draft_tokens=width, **options)])
    drain(group)
    _, second, _ = group.admit(
        [
            request(PROMPTS[0], max_tokens=11, num_draft_tokens=2),
            request(prompt, num_draft_tokens=width, **options),
            request(PROMPTS[2], temp=0.7, seed=8, max_tokens=4, num_draft_tokens=5),
        ]
    )
    drain(group)
    assert alone.emitted == second.emitted == text


def test_one_request_leaves_nothing_of_itself_to_the_next_drafter_row() -> None:
    long, short = PROMPTS[3], PROMPTS[5]

    def served(group: VerifyGroup) -> Row:
        [row] = group.admit([request(short, max_tokens=12, num_draft_tokens=4)])
        drain(group)
        return row

    fresh = served(VerifyGroup(target(), NgramProvider()))
    used = VerifyGroup(target(), NgramProvider())
    used.admit([request(long, max_tokens=40, num_draft_tokens=4)])
    drain(used)
    again = served(used)
    assert again.emitted == fresh.emitted
    assert again.stats == fresh.stats
    # Interleaved in one batch, too.
    beside = VerifyGroup(target(), NgramProvider())
    _, mixed = beside.admit(
        [
            request(long, max_tokens=40, num_draft_tokens=4),
            request(short, max_tokens=12, num_draft_tokens=4),
        ]
    )
    drain(beside)
    assert mixed.stats == fresh.stats
    assert fresh.stats.drafted > 0


class Counter:
    """A sampler with a state: each call gives the next id."""

    def __init__(self) -> None:
        self.next = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, VOCABULARY)
        self.next += 1
        return mx.array([self.next - 1])


def counting(kind: str) -> DraftProvider | None:
    """A drafter that often says what the counter will say."""

    def plan(_text: tuple[int, ...], depth: int, step: int) -> list[int]:
        return [step, step + 1, 0][:depth] if step % 4 else [0][:depth]

    def device(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> OnDevice:
        return OnDevice([[step, step + 1, 0][: max(depths)] for step in steps])

    made: dict[str, DraftProvider | None] = {
        "plain": None,
        "host": ScriptedProvider(plan),
        "device": ScriptedProvider(plan, device=device),
        "whole prompt": ScriptedProvider(plan, mode=PrefillMode.FULL),
        "ngram": NgramProvider(),
    }
    return made[kind]


@pytest.mark.parametrize("kind", ["plain", "host", "device", "whole prompt", "ngram"])
@pytest.mark.parametrize("wait", range(3))
def test_a_sampler_with_a_state_is_called_once_a_position_whoever_joins_and_leaves(
    kind: str, wait: int
) -> None:
    sampler = Counter()
    provider = counting(kind)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(PROMPTS[2], sampler=sampler, max_tokens=20, num_draft_tokens=3)])
    others: list[Row] = []
    joining = (PROMPTS[0], PROMPTS[1], PROMPTS[3])
    for prompt in joining:
        for _ in range(wait):
            with group.round() as done:
                done.deliver_all()
        others += group.admit([request(prompt, max_tokens=3, num_draft_tokens=0)])
    drain(group)
    assert row.emitted == tuple(range(20))
    assert row.error is None
    # Plain decoding asks for one token ahead, as mlx-lm does.
    assert sampler.next in ((20, 21) if kind == "plain" else (20,))
    if kind in ("host", "device", "whole prompt"):
        assert row.stats.accepted > 5
    for other, prompt in zip(others, joining, strict=True):
        assert other.emitted == solo(prompt)[:3]
    check_drafter(provider)
