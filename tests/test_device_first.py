"""The next round is submitted before the last one is delivered, and nobody can tell but by a clock.

Rounds that go on ahead are compared with what the target writes alone, while consumers stop, raise
and cancel, rows come and go between any rounds, and drafters fail at any call.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest import mock

import kept_state
import mlx.core as mx
import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    ending_of,
    expected,
    load_scripted,
    on_device,
    request,
    solo,
    target,
    text_of,
    tiny_tokenizer,
)
from tiny_models import tiny_model

from specdec import (
    BatchGenerator,
    PrefixCache,
    Request,
    VerifyGroup,
    stream_generate,
)
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import GroupFailedError, OptionError
from specdec.sampling.penalties import make_logits_processors
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget
from specdec.verify import flight

if TYPE_CHECKING:
    from specdec import Emission, Row

PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (7,), tuple(range(20, 31)))
TEXTS = [text_of(prompt) for prompt in PROMPTS]
MOVES = [[[RIGHT] * 4], [[RIGHT, WRONG, RIGHT]], [[WRONG], [RIGHT] * 3, []], [[RIGHT] * 2]]
KINDS = ("host", "host with context", "device", "device with lengths", "whole prompt")


def drafter(kind: str, plan: Script, faults: dict[str, set[int]] | None = None) -> ScriptedProvider:
    options: dict[str, Any] = {"faults": faults or {}}
    if kind.startswith("device"):
        options["device"] = on_device(plan, lengths="lengths" in kind)
    if kind == "host with context":
        options["context"] = ContextKind.POST_NORM
    if kind == "whole prompt":
        options |= {"mode": PrefillMode.FULL, "context": ContextKind.PRE_NORM}
    return ScriptedProvider(plan, **options)


def scripted(kind: str = "host", rows: int = 2) -> ScriptedProvider:
    return drafter(kind, Script(TEXTS[:rows], MOVES[:rows]))


def early(group: VerifyGroup) -> bool:
    """Whether a window is on its way."""
    return group._live.flight is not None


def run_ahead(group: VerifyGroup, heard: list[int] | None = None) -> None:
    """Rounds until no row is left; the numbers of those that were delivered go into ``heard``."""
    while group.rows:
        with group.round(ahead=True) as done:
            done.deliver_all()
            if heard is not None:
                heard.append(len(heard))


# The order of things.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [True, False])
def test_the_next_window_is_drafted_and_submitted_before_the_first_token_is_delivered(
    kind: str, ahead: bool
) -> None:
    seen: list[str] = []
    provider = scripted(kind)
    group = VerifyGroup(target(), provider)

    def consumer(_emission: Emission) -> None:
        if not seen or seen[-1] != "token":
            seen.append("token")

    group.admit(
        [
            request(prompt, max_tokens=14, num_draft_tokens=4, consumer=consumer)
            for prompt in PROMPTS[:2]
        ]
    )
    forward = MlxLmTarget.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(f"window {len(provider.rounds)}")  # drafted by then
        return forward(*args, **kwargs)

    with mock.patch.object(MlxLmTarget, "forward", watched):
        while len(group.rows) == 2:
            with group.round(ahead=ahead) as done:
                done.deliver_all()
    if kind == "whole prompt":
        seen = seen[seen.index("token") + 1 :]  # what came with the prompts
    if not ahead:
        assert seen == ["window 1", "token", "window 2", "token", "window 3", "token"]
    elif kind == "whole prompt":
        assert seen == ["window 1", "window 2", "token", "window 3", "token"]
    else:  # a first token waits for nothing, and nothing is begun where a row ends
        assert seen == ["window 1", "token", "window 2", "window 3", "token"]
    assert provider.complaints == []


def in_the_way() -> dict[str, dict[str, Any]]:
    caches = make_prompt_cache(tiny_model("qwen3"))
    return {
        "nothing": {},
        "a penalty": {"processors": make_logits_processors(repetition_penalty=1.3)},
        "a stop sequence that does not come": {"stop_sequences": [[63, 63, 63]]},
        "a caller's cache": {"cache": caches},
        "a processor that may hold state": {"processors": [lambda _tokens, logits: logits]},
        "a sampler": {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
    }


@pytest.mark.parametrize("what", list(in_the_way()))
def test_rounds_go_ahead_where_nothing_stands_in_the_way(what: str) -> None:
    options = in_the_way()[what]
    alone = VerifyGroup(target())
    mine = {**options, "cache": None} if "cache" in options else options
    [plain] = alone.admit([request(PROMPTS[0], max_tokens=17, **mine)])
    drain(alone)

    group = VerifyGroup(target(), scripted())
    rows = group.admit(
        [
            request(PROMPTS[0], max_tokens=17, num_draft_tokens=4, **options),
            request(PROMPTS[1], max_tokens=17, num_draft_tokens=4),
        ]
    )
    begun = []
    while len(group.rows) == 2:
        with group.round(ahead=True) as done:
            begun.append(early(group))
            done.deliver_all()
    drain(group)
    free = what in ("nothing", "a penalty", "a stop sequence that does not come")
    assert begun == [False, *[free] * (len(begun) - 2), False]
    assert len(begun) >= 3
    assert [row.emitted for row in rows] == [plain.emitted, solo(PROMPTS[1])[:17]]
    if "cache" in options:
        assert options["cache"][0].offset == len(PROMPTS[0]) + 17


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [None, 2])
def test_a_drafter_is_asked_and_told_the_same_as_in_rounds_that_do_not_go_ahead(
    kind: str, fails: int | None
) -> None:
    found = []
    for ahead in (True, False):
        plan = Script(TEXTS, MOVES)
        provider = drafter(kind, plan, {} if fails is None else {"commit": {fails}})
        group = VerifyGroup(target(), provider)
        rows = group.admit(
            [
                request(prompt, max_tokens=12 + at, num_draft_tokens=4)
                for at, prompt in enumerate(PROMPTS)
            ]
        )
        while group.rows:
            with group.round(ahead=ahead) as done:
                done.deliver_all()
        asked = [(told.pending, told.depths, told.steps, told.accepted) for told in provider.rounds]
        found.append((asked, provider.calls, [(row.stats.as_dict(), row.emitted) for row in rows]))
        assert provider.complaints == []
        assert len(asked) >= 4 or fails is not None
    for *_, each in found:
        for stats, _ in each:
            stats.pop("time_to_first_token")
    assert found[0] == found[1]


def test_a_history_holds_each_token_once_however_often_it_is_looked_at() -> None:
    group = VerifyGroup(target())
    [row] = group.admit([request(PROMPTS[0], history=(60, 61))])
    for ahead, emitted in (((), 0), ((8, 9), 1), ((9, 10, 11), 2), ((11,), 1)):
        row.ahead.clear()
        row.ahead.extend(ahead)
        for _ in range(2):
            assert row.history().tolist() == [60, 61, *row.tokens, *ahead]
            assert row.pending == [*row.tokens, *ahead][-1]
            assert row.drawn == row.steps + len(ahead)
        for token in ahead[:emitted]:
            row.emit(token)
            assert row.history().tolist() == [60, 61, *row.known]
    assert row.emitted == (8, 9, 10, 11)
    group.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_round_waits_for_the_device_once_also_where_rows_join_and_leave(
    kind: str, temp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []

    def watched(owner: Any, name: str) -> None:
        wait = getattr(owner, name)

        def counted(*args: Any) -> Any:
            waits.append(name)
            return wait(*args)

        monkeypatch.setattr(owner, name, counted)

    texts = [text_of(prompt, temp, 5 if temp else None) for prompt in PROMPTS]
    provider = drafter(kind, Script(texts, MOVES))
    group = VerifyGroup(target(), provider)

    def asked(text: Text) -> Request:
        return request(
            text.prompt, temp=temp, seed=5 if temp else None, max_tokens=16, num_draft_tokens=4
        )

    rows = group.admit([asked(text) for text in texts[:3]])
    late = group.read(asked(texts[3]))
    while not late.done:
        late.step()
    for name in ("eval", "synchronize"):
        watched(mx, name)
    watched(flight, "host_read")
    rounds = 0
    while group.rows:
        before = waits.count("host_read")
        with group.round(ahead=True) as done:
            done.deliver_all()
        assert waits.count("host_read") - before <= 1
        rounds += 1
        if rounds == 2:
            rows += group.join([late])
        if rounds == 3:
            group.remove([rows[1]])
    assert waits.count("host_read") <= rounds
    firsts = 2 * (kind == "whole prompt")  # a reading of its own, of all that are new
    assert waits.count("eval") == firsts
    assert set(waits) <= {"host_read", "eval"}
    for row, text in zip(rows, texts, strict=True):
        if row is not rows[1]:
            assert row.emitted == text.output[:16]
        assert row.emitted == text.output[: row.steps]
    assert provider.complaints == []


# Whoever comes, goes, stops, raises and fails.


@frozen
class Asked:
    """A request of an example, and how its consumer leaves."""

    text: Text
    temp: float
    seed: int | None
    width: int
    max_tokens: int
    ends: frozenset[int]
    moves: list[Any]
    leaves: str | None
    place: int
    published: list[tuple[int, set[int], int | None]] = field(factory=list, repr=False)

    def request(self) -> Request:
        seen: list[int] = []

        def consumer(emission: Emission) -> bool | None:
            seen.append(emission.token)
            if len(seen) == self.place and self.leaves == "returns False":
                return False
            if len(seen) == self.place and self.leaves == "raises":
                raise Fault("consumer")
            return None

        def publish(row: Row, caches: list[Any], checkpoint: Any) -> None:
            drafted = None if checkpoint is None else checkpoint.processed_tokens
            self.published.append((row.processed, {each.offset for each in caches}, drafted))
            if checkpoint is not None:
                written = [*row.tokens, row.end_token][: row.processed]
                assert checkpoint.attachment.arrays["tokens"].tolist() == written

        return request(
            self.text.prompt,
            temp=self.temp,
            seed=self.seed,
            max_tokens=self.max_tokens,
            num_draft_tokens=self.width,
            end_tokens=self.ends,
            consumer=consumer,
            cancelled=(lambda: len(seen) >= self.place) if self.leaves == "cancels" else None,
            publish=publish,
        )

    def check(self, row: Row, *, removed: bool) -> None:
        """The row has the target's own text, up to where somebody stopped it, if anybody did."""
        whole = expected(self.text.output, self.ends, self.max_tokens)
        said = len(whole.tokens) + (whole.end_token is not None)
        left = self.leaves is not None and self.place <= said
        assert row.emitted == whole.tokens[: row.steps]
        for processed, offsets, drafted in self.published:
            assert offsets == {processed}
            assert drafted in (None, processed)
        if removed:
            return
        if not left:
            assert ending_of(row) == whole
        elif self.leaves == "cancels" and self.place == said:
            assert row.emitted == whole.tokens  # it had ended when it was to be cancelled
        else:
            assert row.steps == min(self.place, len(whole.tokens))
            assert row.finish is not None
        if not left:
            assert len(self.published) == 1


CELLS = st.sampled_from([RIGHT] * 5 + [WRONG])


@st.composite
def askings(draw: st.DrawFn) -> Asked:
    temp, seed = draw(st.sampled_from([(0.0, None), (0.0, None), (1.0, 7)]))
    text = text_of(draw(st.sampled_from(PROMPTS)), temp, seed)
    return Asked(
        text,
        temp,
        seed,
        draw(st.sampled_from([0, 1, 3, 4])),
        draw(st.integers(1, 20)),
        frozenset(draw(st.sampled_from([(), (), text.output[8:9]]))),
        draw(st.lists(st.lists(CELLS, max_size=5), min_size=1, max_size=3)),
        draw(st.sampled_from([None, None, None, "returns False", "raises", "cancels"])),
        draw(st.integers(1, 16)),
    )


VERBS = ("draft", "commit", "resolve", "filter_rows", "join", "capture", "open", "prefill")
FAULTS: st.SearchStrategy[dict[str, set[int]]] = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(VERBS), st.sets(st.integers(1, 6), max_size=2), max_size=2),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([*["go"] * 5, "join", "join", "remove", "extract", "at rest", "preview"]),
        st.integers(0, 5),
    ),
    max_size=16,
)


@settings(max_examples=100, deadline=None)
@given(
    asked=st.lists(askings(), min_size=1, max_size=4),
    later=st.lists(askings(), max_size=3),
    kind=st.sampled_from(KINDS),
    faults=FAULTS,
    steps=STEPS,
)
def test_tokens_are_the_targets_own_whoever_comes_goes_stops_or_fails(
    asked: list[Asked],
    later: list[Asked],
    kind: str,
    faults: dict[str, set[int]],
    steps: list[tuple[str, int]],
) -> None:
    everyone = [*asked, *later]
    plan = Script([each.text for each in everyone], [each.moves for each in everyone])
    provider = drafter(kind, plan, faults)
    group = VerifyGroup(target(), provider)
    rows = group.admit([each.request() for each in asked])
    waiting = []
    for each in later:
        waiting.append(group.read(each.request()))
        while not waiting[-1].done:
            waiting[-1].step()
    removed: set[int] = set()
    done = [(reading, each) for reading, each in zip(waiting, later, strict=True)]
    mine = dict(zip(map(id, rows), asked, strict=True))
    for number, (step, place) in enumerate([*steps, *[("go", 0)] * 60]):
        row = group.rows[place % len(group.rows)] if group.rows else None
        if step == "join" and done:
            reading, each = done.pop(0)
            rows += group.join([reading])
            mine[id(rows[-1])] = each
        elif step == "remove" and row is not None:
            removed.add(id(row))
            group.remove([row])
        elif step == "extract" and row is not None:
            caches, read = group.extract(row)
            assert {cache.offset for cache in caches} == {len(read)}
            wrote = (*row.request.prompt, *mine[id(row)].text.output)
            ends = mine[id(row)].ends
            assert read == wrote[: len(read)] or read[-1] in ends
            assert len(read) >= len(row.tokens) - 1
        elif step == "preview":
            group.preview()
        elif step in ("go", "at rest"):
            with group.round(ahead=step == "go") as verified:
                verified.deliver_all()
        if number > len(steps) and not group.rows and not done:
            break
        if number > len(steps) and done:
            reading, each = done.pop(0)
            rows += group.join([reading])
            mine[id(rows[-1])] = each
    assert not group.rows
    for row in rows:
        mine[id(row)].check(row, removed=id(row) in removed)
        assert not row.ahead or row.overran
    assert provider.complaints == []
    group.close()
    assert provider.left_open == []


# What is left behind.


@pytest.mark.parametrize("name", ["attention", "windows", "convolution"])
@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_caches_are_exact_between_rounds_and_at_the_end(name: str, wrong: int | None) -> None:
    prompts, count = kept_state.PROMPTS[:2], kept_state.COUNT
    texts = [kept_state.text(name, prompt) for prompt in prompts]
    move = [WRONG if place == wrong else RIGHT for place in range(3)]
    provider = ScriptedProvider(Script.always(texts, move))
    group = VerifyGroup(kept_state.target(name), provider)
    apart, beyond = [], 0

    def compare(row: Row, caches: list[Any], read: int) -> None:
        want = kept_state.states(name, row.request.prompt)[read]
        apart.append(kept_state.difference(kept_state.contents(caches), want))

    rows = group.admit(
        [
            request(
                prompt,
                max_tokens=count - at,
                num_draft_tokens=3,
                publish=lambda row, caches, _: compare(row, caches, row.processed),
            )
            for at, prompt in enumerate(prompts)
        ]
    )
    rounds = 0
    while group.rows:
        with group.round(ahead=True) as done:
            done.deliver_all()
        rounds += 1
        if group.rows and rounds % 3 == 1:
            row = group.rows[0]
            caches, read = group.extract(row)
            beyond += len(read) > len(row.tokens)
            compare(row, caches, len(read))
    assert [row.emitted for row in rows] == [
        text.output[: count - at] for at, text in enumerate(texts)
    ]
    assert beyond > 0 or wrong == 0
    assert len(apart) >= 4
    furthest: Any = mx.max(mx.stack(apart)).item()
    assert furthest <= kept_state.MARGIN


@pytest.mark.parametrize("kind", ["host", "whole prompt"])
@pytest.mark.parametrize("stop", [None, *range(1, 9)])
def test_a_prefix_cache_keeps_what_was_read_and_delivered(kind: str, stop: int | None) -> None:
    cache = PrefixCache(2**24)
    told = [0]

    def consumer(_emission: Emission) -> bool:
        told[0] += 1
        return told[0] != stop

    plan = Script.always(TEXTS, [RIGHT] * 3)
    group = VerifyGroup(target(), drafter(kind, plan))
    options: dict[str, Any] = {"num_draft_tokens": 3, "prefix_cache": cache, "max_tokens": 14}
    first, other = group.admit(
        [request(PROMPTS[3], consumer=consumer, **options), request(PROMPTS[1], **options)]
    )
    begun = False
    while group.rows:
        with group.round(ahead=True) as done:
            begun |= early(group)
            done.deliver_all()
    assert begun
    assert other.emitted == TEXTS[1].output[:14]
    assert first.emitted == TEXTS[3].output[: stop or 14]
    for row, text in ((first, TEXTS[3]), (other, TEXTS[1])):
        prompt = [*row.tokens, 11]
        [again] = group.admit([request(prompt, **options)])
        held = again.stats.cached_tokens
        assert held in (row.processed, len(text.prompt) - 1)
        if row is other or stop is None:
            assert held == row.processed
        drain(group)
        assert again.emitted == solo(tuple(prompt))[:14]


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
def test_a_batch_gives_caches_of_exactly_what_it_has_answered(architecture: str) -> None:
    model = tiny_model(architecture)
    texts = [Text(prompt, solo(prompt, architecture=architecture)) for prompt in PROMPTS]
    plan = Script.always(texts, [RIGHT] * 3)
    loaded = load_scripted(ScriptedProvider(plan), architecture=architecture)
    with BatchGenerator(model, drafter=loaded, max_tokens=20) as generator:
        uids = generator.insert([PROMPTS[0], PROMPTS[1]])
        told: dict[int, list[int | None]] = {uid: [] for uid in uids}
        ahead = 0
        for turn in range(6):
            for answer in generator.next()[1]:
                told[answer.uid].append(answer.token)
            [group] = generator._engine._book.groups
            ahead += early(group)
            if turn == 3:
                generator.insert([PROMPTS[3]])
            for uid, (caches, tokens) in generator.extract_cache(uids).items():
                prompt = PROMPTS[uids.index(uid)]
                assert tokens == [*prompt, *told[uid]][: len(tokens)]
                assert len(tokens) >= len(prompt) + len(told[uid])
                own = make_prompt_cache(model)
                model(mx.array([tokens]), cache=own)
                offsets = {each.offset for each in caches if isinstance(each, KVCache)}
                assert offsets == {len(tokens)}
                probe = mx.array([[9]])
                same = mx.allclose(model(probe, cache=caches), model(probe, cache=own), atol=1e-3)
                assert same.item()
        assert ahead >= 2


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5, 6, 11])
def test_a_generator_that_is_closed_leaves_nothing_open_and_waits_for_nothing(taken: int) -> None:
    provider = scripted("device", rows=1)
    tokens = stream_generate(
        tiny_model("qwen3"),
        tiny_tokenizer(),
        list(PROMPTS[0]),
        max_tokens=30,
        drafter=load_scripted(provider),
    )
    with mock.patch.object(flight, "host_read", side_effect=flight.host_read) as read:
        got = [response.token for response in islice(tokens, taken)]
        waits = read.call_count
        tokens.close()
        assert read.call_count == waits
    assert tuple(got) == TEXTS[0].output[:taken]
    assert len(provider.rounds) == waits + (waits > 1)  # the next round was begun
    assert provider.complaints == []
    assert provider.left_open == []


@pytest.mark.parametrize("own", ["prompt_cache", "prefix_cache"])
def test_a_generator_with_a_cache_of_the_callers_stays_at_what_it_gave(own: str) -> None:
    for taken in range(1, 8):
        provider = scripted(rows=1)
        cache = make_prompt_cache(tiny_model("qwen3"))
        prefixes = PrefixCache(2**24)
        tokens = stream_generate(
            tiny_model("qwen3"),
            tiny_tokenizer(),
            list(PROMPTS[0]),
            max_tokens=30,
            drafter=load_scripted(provider),
            **({"prompt_cache": cache} if own == "prompt_cache" else {own: prefixes}),
        )
        rounds = [len(provider.rounds) for _ in islice(tokens, taken)]
        tokens.close()
        assert rounds == [1 + place // 5 for place in range(taken)]
        if own == "prompt_cache":
            assert cache[0].offset == len(PROMPTS[0]) + taken
        assert provider.left_open == []


# Failures of the target, and verbs that need rows at rest.


@pytest.mark.parametrize("failing", range(1, 6))
@pytest.mark.parametrize("kind", ["host", "device"])
def test_what_was_accepted_before_the_target_failed_is_delivered_first(
    failing: int, kind: str
) -> None:
    provider = scripted(kind)
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [request(prompt, max_tokens=24, num_draft_tokens=4) for prompt in PROMPTS[:2]]
    )
    forward, calls = MlxLmTarget.forward, iter(range(1, 100))

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == failing:
            raise Fault("forward")
        return forward(*args, **kwargs)

    heard: list[int] = []
    with mock.patch.object(MlxLmTarget, "forward", fails), pytest.raises(GroupFailedError):
        run_ahead(group, heard)
    assert len(heard) == failing - 1  # the window of the round that would have been next
    assert provider.left_open == []
    for row, text in zip(rows, TEXTS, strict=False):
        assert row.emitted == text.output[: row.steps]
        assert row.steps >= len(heard)
        assert row.finish is None
    with pytest.raises(GroupFailedError):
        group.round(ahead=True)
    again = VerifyGroup(target(), provider)
    readings = [again.read(row) for row in rows]
    for reading in readings:
        while not reading.done:
            reading.step()
    again.join(readings)
    run_ahead(again)
    assert [row.emitted for row in rows] == [text.output[:24] for text in TEXTS[:2]]
    assert provider.complaints == []


def test_a_row_that_was_interrupted_ahead_goes_on_with_the_history_that_it_emitted() -> None:
    chain = make_logits_processors(repetition_penalty=1.5, repetition_context_size=6)
    asked: dict[str, Any] = {"max_tokens": 24, "processors": chain}
    alone = VerifyGroup(target())
    [plain] = alone.admit([request(PROMPTS[0], **asked)])
    drain(alone)
    assert plain.emitted != TEXTS[0].output[:24]
    text = Text(PROMPTS[0], plain.emitted)
    group = VerifyGroup(target(), ScriptedProvider(Script.always([text], [RIGHT] * 3)))
    [row] = group.admit([request(PROMPTS[0], num_draft_tokens=3, **asked)])
    begin, calls = RaggedState.begin_round, iter(range(1, 100))

    def interrupted(state: RaggedState, width: int, **options: Any) -> None:
        if next(calls) == 3:
            group.rows[0].history()  # with what is accepted by then
            raise KeyboardInterrupt  # nothing of it is delivered
        begin(state, width, **options)

    with (
        mock.patch.object(RaggedState, "begin_round", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        run_ahead(group)
    assert row.emitted == plain.emitted[:4]
    again = VerifyGroup(target(), ScriptedProvider(Script.always([text], [RIGHT] * 3)))
    reading = again.read(row)
    while not reading.done:
        reading.step()
    again.join([reading])
    run_ahead(again)
    assert row.emitted == plain.emitted


def test_verbs_that_need_rows_at_rest_are_served_after_a_round_that_does_not_go_ahead() -> None:
    provider = scripted()
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [request(prompt, max_tokens=30, num_draft_tokens=4) for prompt in PROMPTS[:2]]
    )
    for _ in range(2):
        with group.round(ahead=True) as done:
            done.deliver_all()
    assert group.preview() is None
    with pytest.raises(OptionError, match="row 0 has tokens of its own that are not delivered"):
        group.consume([[9], []])
    assert early(group)  # nothing changed
    group.extract(rows[0])  # what was begun is read for it, and waits to be delivered
    assert not early(group)
    assert group.preview() is None
    with pytest.raises(OptionError, match="row 1 has tokens of its own that are not delivered"):
        group.consume([[], [9]])
    with group.round() as done:
        done.deliver_all()
    assert not early(group)
    before = [row.emitted for row in rows]
    taken = (3, 1, 4)
    group.consume([taken, ()])
    assert rows[0].emitted == (*before[0], *taken)
    run_ahead(group)
    written = (*PROMPTS[0], *before[0], *taken)
    assert rows[0].emitted[len(before[0]) + 3 :] == solo(written)[: 30 - len(before[0]) - 3]
    assert rows[1].emitted == TEXTS[1].output[:30]


class Telling(ScriptedRows):
    """Rows that say what they would propose."""

    def preview(self, pending: Any, _depths: Any, _steps: Any, /) -> mx.array:
        self._enter("preview")
        return mx.array([[7, 8]] * len(pending), mx.int32)


def test_a_drafter_that_can_tell_what_it_would_propose_is_not_asked_ahead() -> None:
    provider = ScriptedProvider(Script(TEXTS, MOVES), rows=Telling)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(PROMPTS[0], max_tokens=30, num_draft_tokens=4)])
    assert group.preview() == [[7, 8]]
    for _ in range(2):
        with group.round(ahead=True) as done:
            done.deliver_all()
    assert group.preview() is None
    group.extract(row)
    assert group.preview() is None  # what was read for it waits to be delivered
    with group.round() as done:
        done.deliver_all()
    assert group.preview() == [[7, 8]]
    assert provider.complaints == []
    group.close()


@pytest.mark.parametrize("cancels", [True, False])
def test_an_end_token_that_was_read_and_not_delivered_is_in_no_state_that_is_shown(
    cancels: bool,
) -> None:
    text, place = next(
        (text, at)
        for text in (TEXTS[0], *TEXTS[2:])
        for at in range(10, 14)  # drafts of the third window
        if text.output[at] not in text.output[:at]
    )
    heard: list[int] = []
    published: list[tuple[int, set[int]]] = []
    group = VerifyGroup(target(), ScriptedProvider(Script.always(TEXTS, [RIGHT] * 4)))
    row, other = group.admit(
        [
            request(
                text.prompt,
                max_tokens=20,
                num_draft_tokens=4,
                end_tokens={text.output[place]},
                consumer=lambda emission: heard.append(emission.token),
                cancelled=lambda: cancels and len(heard) >= place,
                publish=lambda row, caches, _: published.append(
                    (row.processed, {cache.offset for cache in caches})
                ),
            ),
            request(PROMPTS[1], max_tokens=20, num_draft_tokens=4),
        ]
    )
    for _ in range(2):
        with group.round(ahead=True) as done:
            done.deliver_all()
    group.extract(other)  # so the window with the end token is read and kept before its round
    run_ahead(group)
    assert row.emitted == text.output[:place]
    whole = len(text.prompt) + place + 1
    assert row.finish == ("cancelled" if cancels else "stop")
    assert published == ([] if cancels else [(whole, {whole})])
    assert other.emitted == TEXTS[1].output[:20]


def test_an_interrupt_while_tokens_are_delivered_ends_what_was_not_delivered_alone() -> None:
    group = VerifyGroup(target(), scripted())
    rows = group.admit(
        [request(prompt, max_tokens=14, num_draft_tokens=4) for prompt in PROMPTS[:2]]
    )
    with suppress(KeyboardInterrupt), group.round(ahead=True) as done:
        list(done.deliver(0))
        next(done.deliver(1))
        raise KeyboardInterrupt
    assert rows[1].finish == "cancelled"
    assert rows[1].emitted == TEXTS[1].output[:1]
    assert group.rows == [rows[0]]
    run_ahead(group)
    assert rows[0].emitted == TEXTS[0].output[:14]
