"""Whatever a pace chooses, tokens stay the target's, and a drafter at rest misses nothing."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedDeviceRows,
    ScriptedProvider,
    ScriptedRows,
    drain,
    ending_of,
    expected,
    on_device,
    request,
    target,
    text_of,
)

from specdec import VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.verify import flight
from specdec.verify.pacing import Plan, Seen
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec import Row
    from specdec.contract import DraftProvider

PROMPTS: tuple[tuple[int, ...], ...] = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), (33, 8, 33, 8))
SAMPLINGS: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, 7))
TEXTS = {
    (prompt, temp, seed): text_of(prompt, temp, seed)
    for prompt in PROMPTS
    for temp, seed in SAMPLINGS
}
MOVES = ([[RIGHT] * 3], [[RIGHT, WRONG], [WRONG], [RIGHT] * 4], [[], [RIGHT] * 2])


def consume(
    self: ScriptedRows, tokens: mx.array, context: mx.array | None, lengths: Sequence[int]
) -> None:
    self._enter("consume")
    read: Any = tokens.tolist()
    self._check_context("consume", context, tokens.shape)
    for index, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
        row.tokens.extend(read[index][:length])
        if context is not None:
            row.contexts.append(context[index, :length])


class Following(ScriptedRows):
    """Rows that can take tokens of others."""

    consume = consume


class FollowingOnDevice(ScriptedDeviceRows):
    """The same, with drafts on the device."""

    consume = consume


@define
class ScriptedPace:
    """Goes through a list of plans, over and over."""

    plans: Sequence[Plan]
    pad: int = 0
    seen: list[Seen] = field(factory=list)
    asked: int = 0

    def plan(self, rows: Sequence[Row]) -> Plan:
        assert rows
        self.asked += 1
        return self.plans[(self.asked - 1) % len(self.plans)]

    def padded(self, rows: int, needed: int) -> int:
        assert rows
        return needed + self.pad

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        assert len(rows) == len(seen.asked) == len(seen.accepted)
        assert seen.seconds > 0
        self.seen.append(seen)

    def hear(self, row: Row, asked: int, right: int) -> None:
        raise AssertionError("no plan listens")


DRAFTERS = ("host", "device", "hidden states", "cannot follow", "ngram")


def drafter(kind: str) -> DraftProvider:
    texts = list(TEXTS.values())
    script = Script(texts, [MOVES[place % len(MOVES)] for place in range(len(texts))])
    made: dict[str, Callable[[], DraftProvider]] = {
        "host": lambda: ScriptedProvider(script, rows=Following),
        "device": lambda: ScriptedProvider(
            script, device=on_device(script, lengths=True), rows=FollowingOnDevice
        ),
        "hidden states": lambda: ScriptedProvider(
            script, rows=Following, mode=PrefillMode.FULL, context=ContextKind.POST_NORM
        ),
        "cannot follow": lambda: ScriptedProvider(script),
        "ngram": NgramProvider,
    }
    return made[kind]()


PLANS = st.lists(
    st.sampled_from([Plan(0), Plan(0), Plan(0), Plan(0, 3), Plan(1), Plan(2), Plan(5), Plan()]),
    min_size=1,
    max_size=8,
)
JOINS = st.lists(
    st.tuples(
        st.integers(0, 5),  # rounds before this one joins
        st.sampled_from(PROMPTS),
        st.sampled_from(SAMPLINGS),
        st.integers(1, 14),  # budget
        st.integers(0, 5),  # width
        st.booleans(),  # whether it leaves its width to the pace
        st.sampled_from([None, None, 2, 5]),  # an end token: the one written here
        st.booleans(),  # with a cache of the caller's
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(joins=JOINS, kind=st.sampled_from(DRAFTERS), plans=PLANS, pad=st.sampled_from([0, 0, 2]))
def test_each_row_gets_its_own_text_and_the_drafter_reads_it_whole(
    joins: list[tuple[int, tuple[int, ...], Any, int, int, bool, int | None, bool]],
    kind: str,
    plans: list[Plan],
    pad: int,
) -> None:
    provider, pace = drafter(kind), ScriptedPace(plans, pad)
    group = VerifyGroup(target(), provider, prefill_step_size=4, pace=pace)
    served: list[tuple[Row, Any, list[KVCache] | None]] = []
    for wait, prompt, (temp, seed), budget, width, adaptive, place, cached in joins:
        for _ in range(wait):
            with group.round() as done:
                done.deliver_all()
        text = TEXTS[prompt, temp, seed]
        ends = frozenset() if place is None else frozenset([text.output[place]])
        caches = [KVCache(), KVCache()] if cached else None
        asked = request(
            prompt,
            temp=temp,
            seed=seed,
            max_tokens=budget,
            end_tokens=ends,
            num_draft_tokens=width,
            cache=caches,
        )
        [row] = group.admit([evolve(asked, adaptive=adaptive)])
        served.append((row, (text, ends, budget), caches))
    drain(group)
    for row, (text, ends, budget), caches in served:
        assert ending_of(row) == expected(text.output, ends, budget)
        if caches is not None:
            read = len(row.tokens) + (row.end_token is not None)
            assert {cache.offset for cache in caches} == {read}
        assert row.stats.draft_errors == 0
        # A window of a row's firsts is none of its rounds.
        assert sum(row.stats.widths.values()) >= row.stats.rounds
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []
        group.close()
        assert provider.left_open == []


@pytest.mark.parametrize("rests", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_drafter_that_rested_has_read_tokens_and_hidden_states_as_if_it_had_not(
    rests: int, rows: int
) -> None:
    """Its rows are captured behind the same tokens by runs with and without rest."""
    captured = []
    for plans in ([Plan(2)], [Plan(2), *[Plan(0)] * rests]):
        provider = drafter("hidden states")
        left: list[Any] = []
        group = VerifyGroup(target(), provider, pace=ScriptedPace(plans))
        asked = [
            request(
                PROMPTS[place],
                max_tokens=12 + place,
                num_draft_tokens=3,
                publish=lambda row, caches, kept, left=left: left.append((row, kept)),
            )
            for place in range(rows)
        ]
        group.admit([evolve(each, adaptive=True) for each in asked])
        drain(group)
        captured.append(sorted(left, key=lambda each: each[0].request.max_tokens))
    for (row, kept), (other, rested) in zip(*captured, strict=True):
        assert row.emitted == other.emitted
        # What was read of the last token depends on the window that it came in.
        count = min(kept.processed_tokens, rested.processed_tokens)
        assert count >= len(row.tokens) - 4
        for each in (kept, rested):
            held = each.attachment.arrays
            assert held["tokens"].tolist()[:count] == list(row.tokens[:count])
        states = [hidden_of(each.attachment.arrays) for each in (kept, rested)]
        assert mx.array_equal(states[0][:count], states[1][:count])


def hidden_of(arrays: Mapping[str, mx.array]) -> mx.array:
    return mx.concatenate([arrays[f"context{n}"] for n in range(len(arrays) - 1)])


def test_a_drafter_at_rest_is_not_asked_and_windows_are_begun_early() -> None:
    provider = drafter("host")
    assert isinstance(provider, ScriptedProvider)
    group = VerifyGroup(target(), provider, pace=ScriptedPace([Plan(0)]))
    asked = request(PROMPTS[2], max_tokens=12, num_draft_tokens=3)
    group.admit([evolve(asked, adaptive=True)])
    early = 0
    while group.rows:
        with group.round() as done:
            done.deliver_all()
        early += group._live.flight is not None
    assert provider.calls["draft"] == 0
    assert early >= 9
    assert provider.complaints == []


@pytest.mark.parametrize("kind", ["host", "device", "hidden states"])
def test_a_round_reads_the_device_once_whatever_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = itertools.count()
    real = flight.host_read

    def counted(array: mx.array) -> Any:
        next(reads)
        return real(array)

    monkeypatch.setattr(flight, "host_read", counted)
    plans = [Plan(2), Plan(0), Plan(0), Plan(0, 3), Plan(3)]
    group = VerifyGroup(target(), drafter(kind), pace=ScriptedPace(plans))
    asked = [request(p, max_tokens=14, num_draft_tokens=3) for p in PROMPTS[:3]]
    group.admit([evolve(each, adaptive=True) for each in asked])
    rounds = drain(group)
    assert next(reads) == rounds


def test_tokens_from_outside_come_after_what_was_missed() -> None:
    provider = drafter("hidden states")
    assert isinstance(provider, ScriptedProvider)
    prompt = PROMPTS[2]
    text = TEXTS[prompt, 0.0, None]
    group = VerifyGroup(target(), provider, pace=ScriptedPace([Plan(0)]))
    [row] = group.admit([evolve(request(prompt, max_tokens=14, num_draft_tokens=3), adaptive=True)])
    for _ in range(4):
        with group.round() as done:
            done.deliver_all()
    at = len(row.emitted)
    group.consume([text.output[at : at + 3]])
    [held] = provider.decoding.rows
    assert held.tokens == list(row.tokens[:-1])
    assert sum(each.shape[0] for each in held.contexts) == len(held.tokens)
    drain(group)
    assert row.emitted == text.output[:14]
    assert provider.complaints == []


def test_more_than_fits_into_the_backlog_is_read_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec.verify.lane.MOST", 4)
    provider = drafter("hidden states")
    assert isinstance(provider, ScriptedProvider)
    group = VerifyGroup(target(), provider, pace=ScriptedPace([Plan(0)]))
    asked = request(PROMPTS[2], max_tokens=14, num_draft_tokens=3)
    [row] = group.admit([evolve(asked, adaptive=True)])
    for _ in range(10):
        with group.round() as done:
            done.deliver_all()
    assert provider.calls["consume"] == 2
    drain(group)
    assert row.emitted == TEXTS[PROMPTS[2], 0.0, None].output[:14]
    assert provider.complaints == []


def test_a_fixed_row_keeps_its_number_beside_adaptive_ones() -> None:
    provider = drafter("host")
    assert isinstance(provider, ScriptedProvider)
    group = VerifyGroup(target(), provider, pace=ScriptedPace([Plan(1), Plan(0)]))
    fixed = request(PROMPTS[1], max_tokens=10, num_draft_tokens=3)
    paced = evolve(request(PROMPTS[2], max_tokens=10, num_draft_tokens=3), adaptive=True)
    group.admit([fixed, paced])
    for _ in range(3):
        with group.round() as done:
            done.deliver_all()
    assert [each.depths for each in provider.rounds[:2]] == [[3, 1], [3, 0]]
