"""Chains in the executor: the text is the target's own, and no member ever loses its place.

The oracle is mlx-lm's own greedy text, or the target's seeded one without a drafter. Scripted
members recognise each row by its whole text, so one that has missed a token complains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_demo import HEAD, drafted, draws, greedy, prompts, seeded
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedDeviceRows,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    on_device,
    request,
    target,
    text_of,
    tiny_tokenizer,
)
from tiny_models import VOCABULARY, tiny_model

from specdec import (
    LoadedDrafter,
    PrefixCache,
    Request,
    SamplingOptions,
    VerifyGroup,
    load_drafter,
    stream_generate,
)
from specdec.chain import ChainMember, ChainProvider
from specdec.contract import ContextKind, PrefillMode
from specdec.plugins import LoadedDraft
from specdec.testing import TinyTarget
from specdec.verify import flight
from specdec_mtp.tiny import tiny_head
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPTS = ((5, 9, 2, 40, 9, 2), (17, 3, 17, 3, 17), (33, 8, 60, 8))
DEPTH = 4


def consume(self: ScriptedRows, tokens: mx.array, context: mx.array | None, lengths: Any) -> None:
    """What scripted rows do to read tokens that others chose."""
    self._enter("consume")
    self._check_context("consume", context, tokens.shape)
    chunks: Any = tokens.tolist()
    for index, (row, chunk, count) in enumerate(zip(self.rows, chunks, lengths, strict=True)):
        row.tokens.extend(chunk[:count])
        if context is not None:
            row.contexts.append(context[index, :count])


def filter_rows(self: ScriptedRows, keep: Sequence[int]) -> None:
    """Look at the rows that leave, before they do."""
    for place, row in enumerate(self.rows):
        if place not in keep and self.decodes:
            look(self, row)
    ScriptedRows.filter_rows(self, keep)


def look(rows: ScriptedRows, row: Any) -> None:
    """Every hidden state that a row was given is that of its own token."""
    if rows.context == ContextKind.NONE:
        return
    tokens, state = mx.array([row.tokens], mx.int32), target().new_state()
    state.begin_round(len(row.tokens), reading=True)
    wanted = target().forward(tokens, state, rows.context, rows.tap_layers).context
    assert wanted is not None
    held = mx.concatenate(row.contexts)
    if held.shape != wanted[0].shape or not mx.allclose(held, wanted[0], atol=1e-3):
        rows._complain(f"hidden states are not those of {row.tokens}")
    rows.provider.calls["looked"] += 1


class Rows(ScriptedRows):
    consume = consume
    filter_rows = filter_rows


class DeviceRows(ScriptedDeviceRows):
    """Rows on the device; what stands in rows that they were asked nothing for is not theirs."""

    consume = consume
    filter_rows = filter_rows

    def _complain(self, what: str) -> None:
        if not what.startswith("resolve() got"):
            super()._complain(what)


def chain(*members: Any) -> ChainProvider:
    return ChainProvider(
        [ChainMember(f"m{number}", each, DEPTH) for number, each in enumerate(members)]
    )


def member(script: Any, **options: Any) -> ScriptedProvider:
    return ScriptedProvider(script, rows=Rows, **options)


def last_on_device(script: Script, *, lengths: bool = True, **options: Any) -> ScriptedProvider:
    """A member that leaves its drafts on the device where it has any."""
    plan = on_device(script, lengths=lengths)

    def of_those_asked(texts: Any, depths: Any, steps: Any) -> Any:
        said = plan(texts, depths, steps)
        if said is None:
            return None
        cuts = [min(d, len(r)) for d, r in zip(depths, said.rows, strict=True)]
        if said.lengths is not None:
            cuts = [min(pair) for pair in zip(cuts, said.lengths, strict=True)]
        return type(said)(said.rows, cuts)

    return ScriptedProvider(script, device=of_those_asked, rows=DeviceRows, **options)


def check(provider: ScriptedProvider) -> None:
    """Nothing was wrong about any call, and every hidden state was that of its own token."""
    assert provider.complaints == []
    if provider.context != ContextKind.NONE:
        assert provider.calls["looked"] == len(PROMPTS)


def run(provider: Any, texts: Sequence[Text], **options: Any) -> list[Any]:
    group = VerifyGroup(target(), provider, drafter="chain")
    asked = [
        request(text.prompt, max_tokens=16, num_draft_tokens=DEPTH, **options) for text in texts
    ]
    rows = list(group.admit(asked[:1]))
    with group.round() as done:
        done.deliver_all()
    rows += group.admit(asked[1:])  # the others join while the first one decodes
    drain(group)
    return rows


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"context": ContextKind.TAPS, "taps": (0, 1)},
    {"context": ContextKind.POST_NORM, "mode": PrefillMode.FULL},
    {"context": ContextKind.PRE_NORM},
)
MOVES = st.lists(
    st.lists(st.sampled_from([RIGHT, RIGHT, WRONG, -1, VOCABULARY]), max_size=DEPTH + 1),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_whatever_members_propose_the_text_is_the_targets_and_all_follow_it(
    data: st.DataObject,
) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    members = []
    for number in range(data.draw(st.integers(2, 3))):
        kind = data.draw(st.sampled_from(KINDS))
        moves = [data.draw(MOVES) for _ in texts]
        polite = data.draw(st.booleans())
        script = Script(texts, moves, polite=polite)
        if number and data.draw(st.booleans()):
            legal = [[[c for c in move if c in (RIGHT, WRONG)] for move in row] for row in moves]
            members.append(last_on_device(Script(texts, legal), **kind))
        else:
            members.append(member(script, **kind))
    rows = run(chain(*members), texts)
    for row, text in zip(rows, texts, strict=True):
        assert row.emitted == text.output[:16]
        assert row.stats.draft_errors == 0, row.stats.last_draft_error
    for each in members:
        check(each)


@pytest.mark.parametrize("verb", ["draft", "commit", "consume", "join", "open", "prefill"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_member_that_raises_costs_drafts_and_no_token(verb: str, place: int) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    faults = {verb: {1, 2, 5, 6, 7}}
    members = [
        member(Script.always(texts, [RIGHT] * 2), faults=faults if place == 0 else None),
        member(Script.always(texts, [RIGHT] * 2), faults=faults if place == 1 else None),
    ]
    rows = run(chain(*members), texts)
    assert [row.emitted for row in rows] == [text.output[:16] for text in texts]


def test_rows_of_one_batch_are_won_by_different_members() -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    first = member(Script(texts, [[[RIGHT] * 3], [[]], [[], [RIGHT]]]))
    second = member(Script(texts, [[[WRONG]], [[RIGHT] * 2], [[RIGHT] * 3]]))
    rows = run(chain(first, second), texts)
    assert [row.emitted for row in rows] == [text.output[:16] for text in texts]
    for row in rows:
        assert row.stats.accepted == row.stats.drafted > 0, "every draft was a right one"
        assert row.stats.drafter == "chain"
    together = [asked for asked in second.rounds if len(asked.depths) == 3]
    assert together
    assert all(asked.depths[0] == 0 < asked.depths[1] for asked in together)
    check(first)
    check(second)


def test_a_seeded_text_is_that_of_the_target_alone() -> None:
    texts = [text_of(prompt, 0.9, 5) for prompt in PROMPTS]
    first = member(Script(texts, [[[], [RIGHT, WRONG]]] * 3))
    second = last_on_device(Script(texts, [[[RIGHT] * 3, [RIGHT]]] * 3))
    rows = run(chain(first, second), texts, temp=0.9, seed=5)
    assert [row.emitted for row in rows] == [text.output[:16] for text in texts]
    check(first)
    check(second)


# One host read a round.


def test_a_round_of_host_and_device_drafts_is_one_host_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    seen: list[Any] = []
    wait = flight.host_read

    def counted(array: mx.array) -> Any:
        seen.append(array.shape)
        return wait(array)

    monkeypatch.setattr(flight, "host_read", counted)
    first = member(Script(texts, [[[RIGHT] * 2], [[]], [[]]]))
    second = last_on_device(Script(texts, [[[RIGHT] * 3]] * 3))
    group = VerifyGroup(target(), chain(first, second))
    asked = [request(text.prompt, max_tokens=16, num_draft_tokens=DEPTH) for text in texts]
    rows = list(group.admit(asked))
    rounds = drain(group)
    assert [row.emitted for row in rows] == [text.output[:16] for text in texts]
    assert len(seen) == rounds
    assert any(asked.on_device for asked in second.rounds)
    assert sum(row.stats.accepted for row in rows) > len(texts)


# A grammar in front.


@define
class Segments:
    """Some places of a row's output are given, and its own row may write nothing else there."""

    given: dict[int, int]
    at: int = 0

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        allowed = 0
        while allowed < len(draft):
            wanted = self.given.get(self.at + allowed, draft[allowed])
            if wanted != draft[allowed]:
                break
            allowed += 1
        rows = [
            [self.given.get(self.at + place, token) == token for token in range(VOCABULARY)]
            for place in range(allowed + 1)
        ]
        return mx.array(rows), allowed

    def advance(self, token: int, /) -> bool:
        assert self.given.get(self.at, token) == token
        self.at += 1
        return False

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        run: list[int] = []
        while len(run) < max_tokens and self.at + len(run) in self.given:
            run.append(self.given[self.at + len(run)])
        return run


GIVEN = {2: 11, 3: 12, 4: 13, 9: 50, 10: 51, 14: 1}


def written(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The target's greedy text with the given tokens at their places, without any cache."""
    model, out = tiny_model("qwen3"), list[int]()
    for place in range(count):
        best: Any = mx.argmax(model(mx.array([[*prompt, *out]]))[0, -1]).item()
        out.append(GIVEN.get(place, best))
    return tuple(out)


@pytest.mark.parametrize("kinds", [(0, 0), (0, 2), (1, 3)])
def test_forced_tokens_stand_in_front_of_a_chain_and_all_members_read_them(
    kinds: tuple[int, int],
) -> None:
    texts = [Text(prompt, written(prompt, 24)) for prompt in PROMPTS]
    first = member(Script(texts, [[[], [RIGHT, WRONG]]] * 3), **KINDS[kinds[0]])
    second = member(Script(texts, [[[RIGHT] * 2, []]] * 3), **KINDS[kinds[1]])
    rows = run(chain(first, second), texts, constraint=lambda: Segments(dict(GIVEN)))
    for row, text in zip(rows, texts, strict=True):
        assert row.emitted == text.output[:16]
        assert row.stats.forced > 0
        assert row.stats.draft_errors == 0, row.stats.last_draft_error
    check(first)
    check(second)


# Rejection.


def test_rejection_takes_what_each_member_says_of_its_drafts() -> None:
    tiny, texts = TinyTarget(), ((1, 2, 3, 1, 2), (5, 5, 0), (7, 4, 2, 6))
    greedy_texts = []
    for text in texts:
        plain = VerifyGroup(tiny)
        greedy_texts += plain.admit([request(text, max_tokens=16)])
        drain(plain)
    asked = [
        Request(
            prompt=text,
            max_tokens=16,
            num_draft_tokens=2,
            sampling=SamplingOptions(temp=temp, acceptance="rejection", seed=seed),
        )
        for seed, (text, temp) in enumerate(zip(texts * 2, [0.0] * 3 + [1.0] * 3, strict=True))
    ]
    group = VerifyGroup(tiny, chain(NgramProvider(), tiny_head()))
    rows = list(group.admit(asked))
    drain(group)
    assert [row.emitted for row in rows[:3]] == [row.emitted for row in greedy_texts]
    for row in rows:
        assert row.stats.draft_errors == row.stats.invalid_drafts == 0, row.stats.last_draft_error
        assert row.stats.drafted > 4


def test_a_prefix_cache_on_disk_keeps_rows_of_chains(tmp_path: Path) -> None:
    members = chain(NgramProvider(), NgramProvider(max_ngram=3))
    loaded = LoadedDrafter("ngram,ngram", LoadedDraft(members, DEPTH), target())
    prompt, cached = list(PROMPTS[0]) * 3, []
    for _ in range(2):
        cache = PrefixCache(1 << 24, tmp_path)
        responses = list(
            stream_generate(
                tiny_model("qwen3"),
                tiny_tokenizer(),
                prompt,
                max_tokens=12,
                drafter=loaded,
                prefix_cache=cache,
            )
        )
        cache.close()
        assert tuple(each.token for each in responses) == text_of(prompt).output[:12]
        stats = responses[-1].stats
        assert stats is not None
        assert stats.draft_errors == 0
        assert not cache.stats.last_error
        cached.append(stats.cached_tokens)
    assert cached[0] == 0 < cached[1]


# Real drafters.


def test_ngram_before_a_trained_head_writes_the_same_text_in_fewer_forwards() -> None:
    with load_drafter("ngram,mtp", *HEAD.demo(), num_draft_tokens=2) as both:
        assert both.kind == "ngram,mtp"
        texts = prompts()[:2]
        outputs = [drafted(prompt, both, 2) for prompt in texts]
        assert [out.tokens for out in outputs] == [greedy(prompt) for prompt in texts]
        assert {out.stats.drafter for out in outputs} == {"ngram,mtp"}
        assert all(out.per_forward > 1.3 for out in outputs)
        again = drafted(texts[0], both, 2, seed=7, **draws())
        assert again.tokens == seeded(texts[0], 7)


# What is said of the members.


FULL_AT = 12


def full(rows: ScriptedRows) -> list[str | None]:
    return ["its context\nis full" if len(row.tokens) > FULL_AT else None for row in rows.rows]


class FullRows(Rows):
    """Rows of a member whose context ends."""

    stood_down = property(full)


class FullDeviceRows(DeviceRows):
    stood_down = property(full)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_member_that_stands_down_is_named_while_the_others_draft_on(where: str) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    first = member(Script(texts, [[[]]] * 3))
    limited = Script.always(texts, [RIGHT] * 2)
    second = (
        ScriptedProvider(limited, rows=FullRows)
        if where == "host"
        else ScriptedProvider(limited, device=on_device(limited, lengths=True), rows=FullDeviceRows)
    )
    third = member(Script.always(texts, [RIGHT]))
    order = (first, second, third) if where == "host" else (first, third, second)
    group = VerifyGroup(target(), chain(*order), drafter="chain")
    asked = [request(text.prompt, max_tokens=16, num_draft_tokens=DEPTH) for text in texts]
    rows = list(group.admit(asked))
    name = f"m{order.index(second)}"
    with group.round() as done:
        done.deliver_all()
    assert [row.stats.reason for row in rows] == [None] * 3
    drain(group)
    assert [row.emitted for row in rows] == [text.output[:16] for text in texts]
    assert [row.stats.reason for row in rows] == [f"{name} stood down: its context is full"] * 3
    assert all(row.width == DEPTH and row.stats.draft_errors == 0 for row in rows)


def test_a_remark_gives_way_to_why_the_drafter_was_let_go() -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    second = member(Script.always(texts, [RIGHT]), faults={"draft": set(range(6, 99))})
    first = ScriptedProvider(Script.always(texts, [RIGHT] * 2), rows=FullRows)
    group = VerifyGroup(target(), chain(first, second), drafter="chain")
    rows = list(group.admit([request(texts[0].prompt, max_tokens=30, num_draft_tokens=DEPTH)]))
    seen = []
    while group.rows:
        with group.round() as done:
            done.deliver_all()
        seen.append(rows[0].stats.reason)
    assert "m0 stood down: its context is full" in seen
    assert str(seen[-1]).startswith("drafter chain failed: m1: Fault: ")
    assert str(rows[0].stats.last_draft_error).startswith("m1: Fault: ")
    assert rows[0].emitted == texts[0].output[:30]
