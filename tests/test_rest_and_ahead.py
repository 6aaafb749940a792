"""Drafters that rest, rounds that go on ahead, and listening, all at once and in any order.

Each round goes on ahead or not, and asks for as many drafts as some plan says, while rows come and
go, stop, raise and are given tokens from outside, and drafters fail at any verb. The tokens are the
target's own, caches cover what they are said to cover, and a drafter has read what its row has.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import kept_state
import mlx.core as mx
import pytest
import test_stand_down
from architectures import build
from attrs import define, evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedProvider,
    Text,
    drain,
    ending_of,
    expected,
    on_device,
    request,
)
from scripted import target as scripted_target
from test_adaptive_in_executor import Following, FollowingOnDevice
from test_listening import LookedUp
from tiny_models import VOCABULARY, build_model

from specdec import PrefixCache, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.sampling.penalties import make_logits_processors
from specdec.state import CacheOptions
from specdec.targets import MlxLmTarget
from specdec.verify import flight
from specdec.verify.pacing import Plan, Seen
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import Emission, Request, Row

PROMPTS: tuple[tuple[int, ...], ...] = ((7,), (1, 2, 3), tuple(range(20, 31)), (33, 8) * 11)
LENGTH = 34
QUANTIZED = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=9)


# What the target writes alone.


@cache
def model(name: str) -> Any:
    if name == "qwen3":
        return build_model("qwen3", head_dim=32)
    return build_model(name) if name in ("gemma3_text", "lfm2") else build(name)


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(model(name))


@define
class Toll:
    """Forces two tokens in every five, and allows even ones elsewhere."""

    place: int = 0

    def forced(self, place: int) -> int | None:
        return (7 * place + 3) % VOCABULARY if place % 5 in (2, 3) else None

    def allows(self, place: int, token: int) -> bool:
        forced = self.forced(place)
        return token % 2 == 0 if forced is None else token == forced

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array, int]:
        count = 0
        while count < len(draft) and self.allows(self.place + count, draft[count]):
            count += 1
        places = range(self.place, self.place + count + 1)
        return mx.array([[self.allows(p, t) for t in range(VOCABULARY)] for p in places]), count

    def advance(self, token: int, /) -> bool:
        assert self.allows(self.place, token)
        self.place += 1
        return False

    def propose(self, max_tokens: int, /) -> list[int]:
        said: list[int] = []
        while len(said) < max_tokens:
            forced = self.forced(self.place + len(said))
            if forced is None:
                break
            said.append(forced)
        return said


def stateful() -> Any:
    """A processor that does not declare how it may be called: it counts its calls."""
    calls = [0]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        calls[0] += 1
        return logits + mx.where(mx.arange(VOCABULARY) % 7 == calls[0] % 7, 2.0, 0.0)

    return process


SHAPES = ("", "", "", "", "penalty", "toll", "stateful")


def shaping(kind: str) -> dict[str, Any]:
    if kind == "penalty":
        chain = make_logits_processors(repetition_penalty=1.5, repetition_context_size=6)
        return {"processors": chain}
    if kind == "toll":
        return {"constraint": Toll}
    return {"processors": [stateful()]} if kind == "stateful" else {}


@cache
def text_of(
    name: str, prompt: tuple[int, ...], seed: int | None, shape: str, quantized: bool
) -> Text:
    group = VerifyGroup(target(name))
    options: dict[str, Any] = {"cache_options": QUANTIZED} if quantized else {}
    temp = 0.0 if seed is None else 1.0
    [row] = group.admit(
        [request(prompt, temp=temp, seed=seed, max_tokens=LENGTH, **shaping(shape), **options)]
    )
    drain(group)
    assert row.error is None
    return Text(prompt, row.emitted)


@cache
def hidden(name: str, tokens: tuple[int, ...]) -> mx.array:
    """``[1, L, H]``: what the target's last layer gives, read by itself."""
    bound = target(name)
    state = bound.state_of(make_prompt_cache(model(name)), CacheOptions())
    state.begin_round(len(tokens))
    window = bound.forward(mx.array([tokens], mx.int32), state, ContextKind.POST_NORM, ())
    assert window.context is not None
    mx.eval(window.context)
    return window.context


# What is asked.


@frozen
class Asked:
    """A request of an example, and how its consumer leaves."""

    name: str
    text: Text = field(repr=lambda text: str(text.prompt))
    seed: int | None
    shape: str
    width: int
    adaptive: bool
    max_tokens: int
    ends: frozenset[int]
    moves: list[Any]
    leaves: str | None
    place: int
    keeps: str | None
    quantized: bool
    cache: list[Any] = field(factory=list, repr=False)
    published: list[int] = field(factory=list, repr=False)
    errors: list[str] = field(factory=list, repr=False)

    def request(self, prefixes: PrefixCache) -> Request:
        seen: list[int] = []

        def consumer(emission: Emission) -> bool | None:
            seen.append(emission.token)
            if len(seen) == self.place and self.leaves == "returns False":
                return False
            if len(seen) == self.place and self.leaves == "raises":
                raise Fault("consumer")
            return None

        options: dict[str, Any] = dict(shaping(self.shape))
        if self.quantized:
            options["cache_options"] = QUANTIZED
        if self.keeps == "cache":
            self.cache[:] = make_prompt_cache(model(self.name))
            options["cache"] = self.cache
        if self.keeps == "prefix":
            options["prefix_cache"] = prefixes
        if self.keeps == "publish":
            options["publish"] = self.publish
        asked = request(
            self.text.prompt,
            temp=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            num_draft_tokens=self.width,
            end_tokens=self.ends,
            consumer=consumer,
            cancelled=(lambda: len(seen) >= self.place) if self.leaves == "cancels" else None,
            **options,
        )
        return evolve(asked, adaptive=self.adaptive)

    def publish(self, row: Row, caches: list[Any], checkpoint: Any) -> None:
        self.published.append(row.processed)
        try:
            covers(self, caches, row.read)
            if checkpoint is not None and checkpoint.namespace == "scripted":
                held = checkpoint.attachment.arrays
                assert held["tokens"].tolist() == list(row.read)
                contexts = [held[f"context{n}"] for n in range(len(held) - 1)]
                if contexts:
                    got = mx.concatenate(contexts, axis=0)
                    want = hidden(self.name, row.read)[0]
                    assert got.shape == want.shape
                    assert self.quantized or mx.allclose(got, want, atol=2e-3, rtol=2e-3).item()
        except AssertionError as error:  # what a callback raises is the row's
            self.errors.append(repr(error))
            raise

    def check(self, row: Row, text: Sequence[int], *, removed: bool) -> None:
        """The row has the target's own text, up to where somebody stopped it, if anybody did."""
        assert self.errors == []
        whole = expected(text, self.ends, self.max_tokens)
        said = len(whole.tokens) + (whole.end_token is not None)
        left = self.leaves is not None and self.place <= said
        assert row.emitted == whole.tokens[: row.steps]
        if removed:
            return
        if not left:
            assert ending_of(row) == whole
            assert row.error is None
            assert len(self.published) == (self.keeps == "publish")
        elif self.leaves == "cancels" and self.place == said:
            assert row.emitted == whole.tokens  # it had ended when it was to be cancelled
        else:
            assert row.finish is not None
        if self.keeps == "cache":
            covers(
                self,
                self.cache,
                row.known if row.end_token is None else (*row.tokens, row.end_token),
            )


def covers(asked: Asked, caches: Sequence[Any], read: Sequence[int]) -> None:
    """Caches hold what the model leaves in its own after these tokens."""
    offsets = {each.offset for each in caches if hasattr(each, "offset")}
    assert offsets <= {len(read)}
    if read and not asked.quantized:
        want = held_after(asked.name, tuple(read))
        apart: Any = kept_state.difference(kept_state.contents(caches), want).item()
        assert apart <= 2e-3, f"caches are {apart} from those after {len(read)} tokens"


@cache
def held_after(name: str, tokens: tuple[int, ...]) -> list[mx.array]:
    caches = make_prompt_cache(model(name))
    mx.eval(model(name)(mx.array([tokens]), cache=caches))
    return [mx.contiguous(array) for array in kept_state.contents(caches)]


@define
class Plans:
    """Goes through a list of plans, over and over."""

    plans: Sequence[Plan]
    pad: int = 0
    asked: int = 0
    given: list[Plan] = field(factory=list)
    seen: list[Seen] = field(factory=list)
    heard: list[tuple[int, int]] = field(factory=list)

    def plan(self, rows: Sequence[Row]) -> Plan:
        assert rows
        self.asked += 1
        self.given.append(self.plans[(self.asked - 1) % len(self.plans)])
        return self.given[-1]

    def padded(self, rows: int, needed: int) -> int:
        assert rows
        return needed + self.pad

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        assert len(rows) == len(seen.asked) == len(seen.accepted)
        assert seen.seconds > 0
        assert all(
            0 <= count <= depth for count, depth in zip(seen.accepted, seen.asked, strict=True)
        )
        if seen.depth == 0 and all(r.request.adaptive and not r.constraint for r in rows):
            assert seen.longest == 0
        for row, depth in zip(rows, seen.asked, strict=True):
            assert depth <= (seen.depth if row.request.adaptive else row.request.num_draft_tokens)
        self.seen.append(seen)

    def hear(self, row: Row, asked: int, right: int) -> None:
        assert 0 <= right <= asked <= row.request.num_draft_tokens
        assert asked > 0
        self.heard.append((asked, right))


class StandingDown(Following):
    """Rows that are drafted for so long, and then no more."""

    @property
    def stood_down(self) -> list[str | None]:
        return [
            "it is full" if len(row.tokens) > 12 + sum(row.tokens[:1]) % 9 else None
            for row in self.rows
        ]


KINDS = (
    "host",
    "device",
    "hidden states",
    "hidden tail",
    "cannot follow",
    "hidden, cannot follow",
    "ngram",
    "looked up",
    "stands down",
)


def drafter(kind: str, plan: Script, faults: dict[str, set[int]]) -> Any:
    options: dict[str, Any] = {"faults": faults}
    if kind == "ngram":
        return NgramProvider()
    if kind == "device":
        options |= {"device": on_device(plan, lengths=True), "rows": FollowingOnDevice}
    elif kind == "looked up":
        options["rows"] = Looked
    elif kind == "stands down":
        options["rows"] = StandingDown
    elif "cannot follow" not in kind:
        options["rows"] = Following
    if kind == "hidden states":
        options |= {"mode": PrefillMode.FULL, "context": ContextKind.POST_NORM}
    elif kind.startswith("hidden"):
        options["context"] = ContextKind.POST_NORM
    return ScriptedProvider(plan, **options)


class Looked(LookedUp):
    """As those, of any prompt."""

    def look_up(self, pending: Sequence[int], depths: Sequence[int], /) -> list[list[int]]:
        self._enter("look_up")
        if len(pending) != self.row_count or len(depths) != self.row_count:
            self._complain("look_up of another number of rows")
        said: list[list[int]] = []
        plan: Any = self.provider.plan
        for text, depth in zip(self._texts(pending), depths, strict=True):
            found = [t for t in plan.texts if t.whole[: len(text)] == text]
            if not found:
                self._complain(f"look_up: no request has the text {text}")
                said.append([])
                continue
            said.append(plan(text, depth, len(text) - len(found[0].prompt)))
        return said


PLAN = st.one_of(
    st.just(Plan(0)),
    st.builds(
        Plan,
        st.sampled_from([0, 0, 0, 1, 2, 5, None]),
        st.sampled_from([1, 1, 1, 3]),
        st.integers(1, 5),
        st.sampled_from([0, 3]),
    ),
)
CELLS = st.sampled_from([RIGHT] * 5 + [WRONG])
VERBS = (
    "draft",
    "commit",
    "resolve",
    "filter_rows",
    "join",
    "capture",
    "open",
    "prefill",
    "consume",
    "look_up",
    "prepare_append",
    "close",
)
FAULTS: st.SearchStrategy[dict[str, set[int]]] = st.one_of(
    st.just({}),
    st.just({}),
    st.dictionaries(st.sampled_from(VERBS), st.sets(st.integers(1, 6), max_size=2), max_size=2),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [*["go"] * 4, *["rest"] * 4, "join", "join", "remove", "extract", "preview", "consume"]
        ),
        st.integers(0, 5),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
    ),
    max_size=24,
)


@st.composite
def askings(draw: st.DrawFn, name: str) -> Asked:
    seed = draw(st.sampled_from([None, None, 7]))
    shape = draw(st.sampled_from(SHAPES))
    quantized = name == "qwen3" and draw(st.sampled_from([False] * 5 + [True]))
    text = text_of(name, draw(st.sampled_from(PROMPTS)), seed, shape, quantized)
    keeps = draw(st.sampled_from([None, None, None, "publish", "publish", "cache", "prefix"]))
    return Asked(
        name,
        text,
        seed,
        shape,
        draw(st.sampled_from([0, 1, 3, 4])),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.integers(1, 30)),
        frozenset(draw(st.sampled_from([(), (), text.output[8:9]]))),
        draw(st.lists(st.lists(CELLS, max_size=5), min_size=1, max_size=3)),
        draw(st.sampled_from([None, None, None, "returns False", "raises", "cancels"])),
        draw(st.integers(1, 16)),
        keeps,
        quantized,
    )


@define
class Play:
    """One example, step by step."""

    name: str
    kind: str
    group: VerifyGroup
    provider: Any
    pace: Plans
    plan: Script
    prefixes: PrefixCache
    reads: list[int]
    rounds: int = 0
    rows: list[Row] = field(factory=list)
    mine: dict[int, Asked] = field(factory=dict)
    texts: dict[int, tuple[int, ...]] = field(factory=dict)
    removed: set[int] = field(factory=set)

    def welcome(self, rows: Sequence[Row], asked: Sequence[Asked]) -> None:
        for row, each in zip(rows, asked, strict=True):
            self.rows.append(row)
            self.mine[id(row)] = each
            self.texts[id(row)] = each.text.output

    def step(self, what: str, place: int, ids: list[int]) -> None:
        group = self.group
        row = group.rows[place % len(group.rows)] if group.rows else None
        if what in ("go", "rest"):
            self.rounds += 1
            with group.round(ahead=what == "go") as done:
                done.deliver_all()
            # One that was begun ahead is read early where a row leaves, and not in its round.
            if all(each.shape != "stateful" for each in self.mine.values()):
                assert len(self.reads) <= self.rounds + (group._live.landed is not None)
        elif row is None:
            return
        elif what == "remove":
            self.removed.add(id(row))
            group.remove([row])
        elif what == "extract":
            self.extract(row)
        elif what == "preview":
            group.preview()
        elif what == "consume":
            self.consume(row, ids)

    def extract(self, row: Row) -> None:
        caches, read = self.group.extract(row)
        wrote = (*row.request.prompt, *self.texts[id(row)])
        assert read == wrote[: len(read)] or read[-1] in self.mine[id(row)].ends
        assert len(read) >= len(row.tokens) - 1
        covers(self.mine[id(row)], caches, read)

    def consume(self, row: Row, ids: list[int]) -> None:
        asked, live = self.mine[id(row)], self.group._live
        index = self.group.rows.index(row)
        given = [token for token in ids if token not in asked.ends]
        given = given[: max(0, (row.budget or 0) - 1)]
        busy = index in live.undelivered
        greedy = asked.seed is None and not asked.shape and not asked.quantized
        if not given or busy or not greedy or live.state is None or live.state.reason is not None:
            return
        wrote = (*row.request.prompt, *row.emitted, *given)
        count = len(self.reads)
        rest = text_of(self.name, wrote, None, "", False).output
        del self.reads[count:]
        self.texts[id(row)] = (*row.emitted, *given, *rest)
        self.plan.texts.append(Text(row.request.prompt, self.texts[id(row)]))
        self.plan.moves.append(asked.moves)
        tokens: list[list[int]] = [[] for _ in self.group.rows]
        tokens[index] = given
        self.group.consume(tokens)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_comes_together_the_tokens_are_the_targets_own(
    name: str, data: st.DataObject
) -> None:
    play(name, data)


def play(name: str, data: Any) -> None:
    asked = data.draw(st.lists(askings(name), min_size=1, max_size=4), label="asked")
    later = data.draw(st.lists(askings(name), max_size=3), label="later")
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    faults = data.draw(FAULTS, label="faults")
    steps = data.draw(STEPS, label="steps")
    plans = data.draw(st.lists(PLAN, min_size=1, max_size=8), label="plans")
    pad = data.draw(st.sampled_from([0, 0, 2]), label="pad")
    everyone = [*asked, *later]
    plan = Script([each.text for each in everyone], [each.moves for each in everyone])
    provider = drafter(kind, plan, faults)
    pace = Plans(plans, pad)
    reads: list[int] = []
    real = flight.host_read

    def counted(array: mx.array) -> Any:
        reads.append(1)
        return real(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flight, "host_read", counted)
        group = VerifyGroup(target(name), provider, prefill_step_size=8, pace=pace)
        prefixes = PrefixCache(2**24)
        run = Play(name, kind, group, provider, pace, plan, prefixes, reads)
        run.welcome(group.admit([each.request(prefixes) for each in asked]), asked)
        waiting = []
        for each in later:
            waiting.append((group.read(each.request(prefixes)), each))
            while not waiting[-1][0].done:
                waiting[-1][0].step()
        for number, (what, place, ids) in enumerate([*steps, *[("go", 0, [0])] * 140]):
            if waiting and (what == "join" or number >= len(steps)):
                reading, each = waiting.pop(0)
                run.welcome(group.join([reading]), [each])
            else:
                run.step(what, place, ids)
            if number >= len(steps) and not group.rows and not waiting:
                break
    assert not group.rows
    for row in run.rows:
        run.mine[id(row)].check(row, run.texts[id(row)], removed=id(row) in run.removed)
        assert not row.ahead or row.overran
        if not faults:
            assert row.stats.draft_errors == 0, row.stats.last_draft_error
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == [], provider.complaints[:2]
    group.close()
    if isinstance(provider, ScriptedProvider):
        assert provider.left_open == []


# Faults that this has found.


def paced(prompt: tuple[int, ...], **options: Any) -> Request:
    return evolve(
        request(prompt, **{"max_tokens": 14, "num_draft_tokens": 3, **options}), adaptive=True
    )


def scripted(kind: str, shape: str = "") -> tuple[Script, ScriptedProvider]:
    texts = [text_of("qwen3", prompt, None, shape, False) for prompt in PROMPTS]
    plan = Script.always(texts, [RIGHT] * 3)
    return plan, drafter(kind, plan, {})


@pytest.mark.parametrize("kind", ["looked up", "hidden states", "hidden tail"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_position_that_is_given_back_is_not_read_twice(kind: str, leaves: bool) -> None:
    """Somebody joins or leaves beside a plain window on its way; then tokens come from outside."""
    plan, provider = scripted(kind)
    group = VerifyGroup(target("qwen3"), provider, pace=Plans([Plan(0)]))
    kept: list[Any] = []
    first, second = group.admit(
        [paced(PROMPTS[2]), paced(PROMPTS[1], publish=lambda *given: kept.append(given))]
    )
    for _ in range(4):
        with group.round() as done:
            done.deliver_all()
    assert group._live.flight is not None
    if leaves:
        group.remove([second])
        assert len(kept[0][2].attachment.arrays["tokens"]) == second.processed == len(second.tokens)
    else:
        group.admit([paced(PROMPTS[0])])
    group.consume([[9, 8], *[[] for _ in group.rows[1:]]])
    group._live.drafting.lane.catch_up()  # type: ignore[union-attr]
    # One that has just joined may have read its prompt whole.
    live = [first] if leaves else [first, second]
    for row, held in zip(live, provider.decoding.rows, strict=False):
        assert held.tokens == row.tokens[:-1]
        if held.contexts:
            got, want = mx.concatenate(held.contexts), hidden("qwen3", tuple(row.tokens[:-1]))[0]
            assert mx.allclose(got, want, atol=2e-3, rtol=2e-3).item()
    wrote = (*PROMPTS[2], *first.emitted)
    plan.texts.append(
        Text(PROMPTS[2], (*first.emitted, *text_of("qwen3", wrote, None, "", False).output))
    )
    plan.moves.append([[RIGHT] * 3])
    drain(group)
    assert first.emitted == plan.texts[-1].output[:14]
    assert provider.complaints == []


@pytest.mark.parametrize("kind", ["host", "hidden states"])
def test_what_a_constraint_forced_is_read_by_a_drafter_at_rest(kind: str) -> None:
    plan, provider = scripted(kind, "toll")
    pace = Plans([Plan(0, rounds=4), Plan(3)])
    group = VerifyGroup(target("qwen3"), provider, pace=pace)
    kept: list[Any] = []
    rows = group.admit(
        [
            paced(prompt, constraint=Toll, publish=lambda *given: kept.append(given), max_tokens=20)
            for prompt in PROMPTS[:2]
        ]
    )
    drain(group)
    assert [row.emitted for row in rows] == [text.output[:20] for text in plan.texts[:2]]
    assert any(not row.depth for row in pace.seen)
    for row, _, checkpoint in kept:
        held = checkpoint.attachment.arrays
        assert held["tokens"].tolist() == row.tokens[: row.processed]
    assert provider.complaints == []


def test_a_row_is_heard_for_as_many_drafts_as_it_wants() -> None:
    _, provider = scripted("looked up")
    pace = Plans([Plan(0, rounds=4, listens=3)])
    group = VerifyGroup(target("qwen3"), provider, pace=pace)
    group.admit([paced(PROMPTS[1], num_draft_tokens=1, max_tokens=24)])
    drain(group)
    assert set(pace.heard) == {(1, 1)}


@pytest.mark.parametrize("said", [[], [[1], [2]], None, "no", [None]])
def test_look_ups_that_are_none_end_nothing(said: Any) -> None:
    class Wrong(Looked):
        def look_up(self, _pending: Any, _depths: Any, /) -> Any:
            return said

    plan = Script.always([text_of("qwen3", PROMPTS[1], None, "", False)], [RIGHT])
    pace = Plans([Plan(0, rounds=4, listens=3)])
    group = VerifyGroup(target("qwen3"), ScriptedProvider(plan, rows=Wrong), pace=pace)
    [row] = group.admit([paced(PROMPTS[1], max_tokens=24)])
    drain(group)
    assert row.emitted == plan.texts[0].output[:24]
    assert row.stats.draft_errors == (said != [None])
    assert {right for _, right in pace.heard} <= {0}


def test_a_round_is_told_of_as_what_it_was_not_as_what_comes_next() -> None:
    """A window that is begun early has the next plan made before the one before it is read."""
    _, provider = scripted("host")
    pace = Plans([Plan(0, 3), Plan(0), Plan(2)])
    group = VerifyGroup(target("qwen3"), provider, pace=pace)
    group.admit([paced(PROMPTS[1], max_tokens=30)])
    drain(group)
    assert {(seen.depth, seen.width) for seen in pace.seen} == {(0, 3), (0, 1), (2, 3)}
    assert [(seen.depth, seen.width) for seen in pace.seen[:6]] == [(0, 3), (0, 1), (2, 3)] * 2


@settings(max_examples=10, deadline=None)
@given(
    limits=st.dictionaries(st.sampled_from(test_stand_down.PROMPTS), st.integers(1, 8)),
    budgets=st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_a_row_that_stood_down_is_not_drafted_for_ahead_either(
    limits: dict[tuple[int, ...], int], budgets: list[int]
) -> None:
    provider = test_stand_down.Limited(test_stand_down.script(), limits)
    group = VerifyGroup(scripted_target(), provider)
    asked = zip(test_stand_down.PROMPTS, budgets, strict=True)
    rows = group.admit([request(p, max_tokens=n, num_draft_tokens=4) for p, n in asked])
    while group.rows:
        with group.round(ahead=True) as done:
            done.deliver_all()
    assert test_stand_down.unchanged(rows)
    assert provider.complaints == []
    for row in rows:
        prompt = row.request.prompt
        assert provider.drafted[prompt] <= limits.get(prompt, 100)
        down = provider.drafted[prompt] == limits.get(prompt)
        assert row.stats.reason == (test_stand_down.SAID if down else None)
