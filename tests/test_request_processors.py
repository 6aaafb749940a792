"""Processors in the executor: applied at every position, each with the row's own history.

The oracle is a plain loop over mlx-lm's model with mlx-lm's own processors. Each case also shows
that its processors change the text, so that leaving them out could not pass.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve, frozen
from mlx_lm.models.cache import make_prompt_cache
from request_oracle import (
    DRAFTERS,
    WIDTH,
    Asked,
    Told,
    alone,
    beyond,
    drafter,
    json_tokenizer,
    plain_loop,
    ran,
    told_of,
)
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    Text,
    drain,
    load_scripted,
    on_device,
    silent,
    target,
)
from tiny_models import VOCABULARY, build_model, tiny_model

from specdec import VerifyGroup, stream_generate
from specdec.errors import OptionError
from specdec.sampling import AllowedTokens, BannedTokens, LogitBias, stateless
from specdec.targets import MlxLmTarget
from specdec.verify import flight

if TYPE_CHECKING:
    from collections.abc import Callable


PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), (20, 21, 22, 23))
DRAWS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temp": 0.8, "seed": 5}}


def declared(function: Callable[[mx.array, mx.array], mx.array]) -> Any:
    """The same, declared; ``stateless`` marks what it is given, so that is a new function."""

    def same(tokens: mx.array, logits: mx.array) -> mx.array:
        return function(tokens, logits)

    return stateless(same)


# E1: applied, and everywhere.


@cache
def repeating() -> tuple[int, ...]:
    """A prompt after which the target repeats itself."""
    for start in range(500):
        prompt = (start % VOCABULARY, (3 * start) % VOCABULARY)
        if len(set(alone(Asked(prompt)).tokens)) <= 6:
            return prompt
    raise AssertionError("this target does not repeat itself")


ALLOWED = (3, 12, 23, 40, 51)


def only_allowed(_tokens: mx.array, logits: mx.array) -> mx.array:
    """What ``allowed_token_ids`` means, by hand."""
    keep = mx.array([token in ALLOWED for token in range(VOCABULARY)])
    return mx.where(keep, logits, -mx.inf)


def allowed_alone() -> list[Any]:
    return [only_allowed]


def shaped(name: str, draw: str) -> tuple[Asked, list[Any] | None]:
    """A request whose penalties show, and our processors where the oracle has its own."""
    plain = Asked(repeating(), **DRAWS[draw])
    if name == "frequency -2":
        return evolve(plain, penalties={"frequency_penalty": -2.0}), None
    if name == "frequency +2":
        return evolve(plain, penalties={"frequency_penalty": 2.0}), None
    if name == "ban":
        second = alone(plain).tokens[1]
        return evolve(plain, penalties={"logit_bias": {second: -100.0}}), None
    if name == "banned":
        second = alone(plain).tokens[1]
        bias = {"logit_bias": {second: float("-inf")}}
        return evolve(plain, penalties=bias), [BannedTokens([second])]
    return evolve(plain, extra=allowed_alone), [AllowedTokens(list(ALLOWED))]


SHAPES = ("frequency -2", "frequency +2", "ban", "banned", "allowed")


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_penalty_is_applied_with_every_drafter(draw: str, name: str, kind: str) -> None:
    asked, ours = shaped(name, draw)
    told = alone(asked)
    options: dict[str, Any] = {} if ours is None else {"processors": ours}
    [row] = ran(drafter(kind, (asked, told)), asked.request(num_draft_tokens=WIDTH, **options))
    assert told_of(row) == told
    if kind in {"right", "mixed", "device", "full prefill"}:
        assert row.stats.accepted > 0


def test_each_of_these_penalties_changes_the_text() -> None:
    for draw in DRAWS:
        for name in SHAPES:
            asked, _ = shaped(name, draw)
            plain = evolve(asked, penalties={}, extra=tuple)
            # A negative frequency penalty only strengthens a repetition that is there.
            changed = alone(asked).tokens != alone(plain).tokens
            assert changed or (name, draw) == ("frequency -2", "greedy")


@pytest.mark.parametrize("kind", ["n-gram", "mixed"])
def test_stream_generate_applies_them_from_the_first_token_on(kind: str) -> None:
    plain = Asked(repeating())
    first = alone(plain).tokens[0]
    asked = evolve(plain, penalties={"logit_bias": {first: -100.0}})
    told = alone(asked)
    assert told.tokens[0] != first
    provider = drafter(kind, (asked, told))
    assert provider is not None
    loaded: Any = "ngram" if kind == "n-gram" else load_scripted(provider, WIDTH)  # type: ignore[arg-type]
    responses = stream_generate(
        tiny_model("qwen3"),
        json_tokenizer(),
        list(asked.prompt),
        asked.max_tokens,
        drafter=loaded,
        logits_processors=[LogitBias({first: -100.0})],
    )
    assert tuple(each.token for each in responses) == told.tokens


# E2: the history at each position.


@frozen(eq=False)
class Recorder:
    """Shows what it was called with, and lets the whole history decide."""

    seen: list[tuple[int, ...]]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        read: Any = tokens.tolist()
        self.seen.append(tuple(read))
        return by_history(tokens, logits)


def by_history(tokens: mx.array, logits: mx.array) -> mx.array:
    """Prefers an id that each token of the history has a say in."""
    places = mx.arange(1, tokens.size + 1)
    said = (tokens.astype(mx.int32) * places).sum() % logits.shape[-1]
    return logits + 4.0 * (mx.arange(logits.shape[-1]) == said)


def whole_history() -> list[Any]:
    return [by_history]


def prefixes(asked: Asked, told: Told) -> list[tuple[int, ...]]:
    """The history of each token that is emitted, an end token included."""
    count = len(told.tokens) + (told.end_token is not None)
    return [(*asked.prompt, *told.tokens[:place]) for place in range(count)]


def by_whole_history(draw: str, *, ending: bool) -> Asked:
    asked = Asked(PROMPTS[2], extra=whole_history, max_tokens=18, **DRAWS[draw])
    if not ending:
        return asked
    tokens = alone(asked).tokens
    last = next(t for place, t in enumerate(tokens) if place > 8 and t not in tokens[:place])
    return evolve(asked, end_tokens=frozenset([last]))


@pytest.mark.parametrize("ending", [False, True], ids=["budget", "end token"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_processor_that_may_hold_state_is_called_once_per_emitted_token_in_order(
    draw: str, kind: str, ending: bool
) -> None:
    asked = by_whole_history(draw, ending=ending)
    told = alone(asked)
    assert told.tokens != alone(evolve(asked, extra=tuple)).tokens
    seen: list[tuple[int, ...]] = []
    [row] = ran(
        drafter(kind, (asked, told)),
        asked.request(processors=[Recorder(seen)], num_draft_tokens=WIDTH),
    )
    assert told_of(row) == told
    want = prefixes(asked, told)
    if kind == "plain" and ending:
        # As in mlx-lm, the next token is on its way before it is known that this one ends.
        assert seen[len(want) :] in ([], [(*want[-1], told.end_token)])
        seen = seen[: len(want)]
    assert seen == want


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_declared_processor_is_shown_the_history_of_every_emitted_token(
    draw: str, kind: str
) -> None:
    asked = by_whole_history(draw, ending=False)
    told = alone(asked)
    seen: list[mx.array] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens)  # read after the run: it would wait for the device
        return by_history(tokens, logits)

    [row] = ran(
        drafter(kind, (asked, told)),
        asked.request(processors=[stateless(record)], num_draft_tokens=WIDTH),
    )
    assert told_of(row) == told
    shown = {tuple(each.tolist()) for each in seen}  # type: ignore[arg-type]  # a list of ints
    assert shown >= set(prefixes(asked, told))
    # Whatever else it was shown begins with what had been emitted then, and ends with drafts.
    whole = (*asked.prompt, *told.tokens)
    for tokens in shown - set(prefixes(asked, told)):
        agreed = next(
            (place for place, (a, b) in enumerate(zip(tokens, whole, strict=False)) if a != b),
            len(whole),
        )
        assert len(asked.prompt) <= agreed
        assert len(tokens) - agreed <= WIDTH


def test_a_continued_rows_processors_see_what_came_before_its_prompt() -> None:
    before, prompt = (4, 8, 15), (16, 23)
    asked = Asked((*before, *prompt), extra=whole_history)
    told = alone(asked)
    caches = make_prompt_cache(tiny_model("qwen3"))
    tiny_model("qwen3")(mx.array([before]), cache=caches)
    seen: list[tuple[int, ...]] = []
    provider = ScriptedProvider(lambda _tokens, depth, step: list(told.tokens[step : step + depth]))
    request = evolve(
        asked.request(processors=[Recorder(seen)], num_draft_tokens=WIDTH),
        prompt=prompt,
        history=before,
        continue_from=caches,
    )
    [row] = ran(provider, request)
    assert row.emitted == told.tokens
    assert seen == prefixes(asked, told)
    assert row.stats.accepted > 0


# E4: rows with and without drafts.


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("by", ["ours", "mlx-lm"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_rows_without_drafts_shift_no_other_rows_penalties(
    order: tuple[int, ...], by: Any, device: bool
) -> None:
    banned = [alone(Asked(prompt)).tokens[:3] for prompt in PROMPTS]
    asked = [
        Asked(
            PROMPTS[0],
            penalties={
                "repetition_penalty": 1.5,
                "logit_bias": dict.fromkeys(banned[0], -100.0),
            },
        ),
        Asked(PROMPTS[1]),
        Asked(
            PROMPTS[2],
            penalties={
                "repetition_penalty": 0.7,
                "logit_bias": dict.fromkeys(banned[2], -100.0),
            },
        ),
    ]
    rows = [(asked[place], alone(asked[place])) for place in order]
    counts = [(3, 0, 3)[place] for place in order]
    texts = [Text(each.prompt, beyond(each, told)) for each, told in rows]
    script = Script(texts, [[[RIGHT] * count, [RIGHT, WRONG][:count]] for count in counts])
    provider = ScriptedProvider(script, device=on_device(script, lengths=True) if device else None)
    done = ran(provider, *(each.request(by, num_draft_tokens=3) for each, _ in rows))
    for row, (each, told), count in zip(done, rows, counts, strict=True):
        assert told_of(row) == told
        assert (row.stats.accepted > 0) is (count > 0)
        if each.penalties:
            assert told.tokens != alone(evolve(each, penalties={})).tokens
    assert any(each.on_device for each in provider.rounds) is device


# E5: a penalty that multiplies.


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("by", ["ours", "mlx-lm"])
def test_a_repetition_penalty_divides_and_multiplies_with_every_drafter(
    by: Any, kind: str, penalty: float
) -> None:
    asked = Asked(repeating(), penalties={"repetition_penalty": penalty}, max_tokens=16)
    told = alone(asked)
    [row] = ran(drafter(kind, (asked, told)), asked.request(by, num_draft_tokens=WIDTH))
    assert told_of(row) == told


def test_these_penalties_meet_logits_of_both_signs() -> None:
    asked = Asked(repeating(), max_tokens=16)
    signs: set[bool] = set()

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        read: Any = logits[0, tokens[-20:]].tolist()
        signs.update(value > 0 for value in read)
        return logits

    texts = [
        alone(evolve(asked, penalties={"repetition_penalty": penalty}, extra=lambda: [look]))
        for penalty in (0.5, 1.3)
    ]
    assert signs == {True, False}
    assert len({alone(asked).tokens, *(each.tokens for each in texts)}) >= 2
    assert texts[1].tokens != alone(asked).tokens


def test_a_repetition_penalty_of_nothing_is_refused_at_the_request() -> None:
    with pytest.raises(OptionError, match=r"repetition_penalty is 0\.0"):
        Asked((1,), penalties={"repetition_penalty": 0.0}).request()


# Processors that hold state.


@cache
def every_third(token: int) -> Callable[[], list[Any]]:
    """Bans a token at every third call."""

    def fresh() -> list[Any]:
        calls = 0

        def ban(_tokens: mx.array, logits: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                logits[:, token] = -mx.inf
            return logits

        return [ban]

    return fresh


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_counter_inside_a_processor_counts_emitted_tokens_alone(draw: str, kind: str) -> None:
    tokens = alone(Asked(repeating(), **DRAWS[draw])).tokens
    token = max(set(tokens), key=tokens.count)
    asked = Asked(repeating(), extra=every_third(token), **DRAWS[draw])
    others = [
        Asked(PROMPTS[2], penalties={"presence_penalty": 1.5}),
        Asked(PROMPTS[3], temp=1.0, seed=9),
    ]
    rows = [(each, alone(each)) for each in (others[0], asked, others[1])]
    assert rows[1][1].tokens != tokens
    done = ran(drafter(kind, *rows), *(each.request(num_draft_tokens=WIDTH) for each, _ in rows))
    assert [told_of(row) for row in done] == [told for _, told in rows]


class Broken(RuntimeError):
    """What a processor raises."""


def raising_at(call: int) -> Callable[[mx.array, mx.array], mx.array]:
    calls = 0

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Broken(f"call {calls}")
        return by_history(tokens, logits)

    return process


@pytest.mark.parametrize("call", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_processor_that_raises_ends_its_row_alone(kind: str, call: int) -> None:
    asked = [
        Asked(PROMPTS[2], penalties={"presence_penalty": 1.5}),
        Asked(PROMPTS[1], extra=whole_history),
        Asked(PROMPTS[3], temp=1.0, seed=9),
    ]
    rows = [(each, alone(each)) for each in asked]
    requests = [each.request(num_draft_tokens=WIDTH) for each in asked]
    requests[1] = evolve(requests[1], processors=[raising_at(call)])
    first, failed, last = ran(drafter(kind, *rows), *requests)
    assert told_of(first) == rows[0][1]
    assert told_of(last) == rows[2][1]
    assert failed.finish == "error"
    assert isinstance(failed.error, Broken)
    assert failed.emitted == rows[1][1].tokens[: call - 1]
    assert failed.stats.emitted == call - 1
    assert failed.stats.accepted <= failed.stats.drafted


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("kind", ["plain", "right"])
def test_stream_generate_raises_what_a_processor_raised_after_the_tokens_before(
    kind: str, is_declared: bool
) -> None:
    asked = Asked(PROMPTS[1], extra=whole_history)
    told = alone(asked)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == len(asked.prompt) + 6:
            raise Broken
        return by_history(tokens, logits)

    provider = drafter(kind, (asked, told))
    got: list[int] = []
    caches = make_prompt_cache(tiny_model("qwen3"))
    with pytest.raises(Broken):
        got.extend(
            each.token
            for each in stream_generate(
                tiny_model("qwen3"),
                json_tokenizer(),
                list(asked.prompt),
                asked.max_tokens,
                drafter=None if provider is None else load_scripted(provider, WIDTH),  # type: ignore[arg-type]
                logits_processors=[stateless(process) if is_declared else process],
                prompt_cache=caches,
            )
        )
    # A declared one is called for a whole window before any of it is emitted.
    assert tuple(got) == told.tokens[: len(got)]
    assert len(got) == 6 or (is_declared and kind == "right" and len(got) == 5)
    assert {each.offset for each in caches} == {len(asked.prompt) + len(got)}


# Another dtype beside bfloat16.


@cache
def halves() -> tuple[Any, MlxLmTarget]:
    model = build_model("qwen3")
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model, MlxLmTarget(model)


def in_float32(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.astype(mx.float32) * 1.013


def rounded_anew(_tokens: mx.array, logits: mx.array) -> mx.array:
    """What joining rows of two dtypes would do to the others."""
    return logits.astype(mx.float32)


@cache
def sensitive(first: int) -> Asked:
    """A request whose text changes where its logits become float32."""
    model, _ = halves()
    for start in range(first, first + 200):
        prompt = (start % VOCABULARY, 3, (7 * start) % VOCABULARY)
        asked = Asked(prompt, temp=4.0, seed=start, max_tokens=30)
        other = evolve(asked, extra=lambda: [rounded_anew])
        if plain_loop(asked, model).tokens != plain_loop(other, model).tokens:
            return asked
    raise AssertionError("no text depends on the dtype")


@pytest.mark.parametrize("is_declared", [False, True])
@pytest.mark.parametrize("kind", ["plain", "right", "mixed"])
def test_a_processor_that_returns_another_dtype_changes_no_other_row(
    kind: str, is_declared: bool
) -> None:
    model, bound = halves()
    asked = [
        sensitive(38),
        Asked(PROMPTS[2], extra=lambda: [in_float32]),
        sensitive(55),
    ]
    rows = [(each, plain_loop(each, model)) for each in asked]
    plan: Any = silent
    if kind != "plain":
        texts = [Text(each.prompt, (*told.tokens, 0, 0, 0, 0)) for each, told in rows]
        moves = [[RIGHT] * WIDTH] if kind == "right" else [[RIGHT, WRONG], [RIGHT] * 3, []]
        plan = Script(texts, [moves] * 3)
    requests = [each.request(num_draft_tokens=WIDTH) for each in asked]
    if is_declared:
        requests[1] = evolve(requests[1], processors=[declared(in_float32)])
    group = VerifyGroup(bound, None if kind == "plain" else ScriptedProvider(plan))
    done = group.admit(requests)
    drain(group)
    assert [told_of(row) for row in done] == [told for _, told in rows]
    if kind == "right":
        assert all(row.stats.accepted > 5 for row in done)


# Host waits.


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the arrays that the executor waits for."""
    seen: list[tuple[int, ...]] = []
    wait = flight.host_read

    def counted(array: mx.array) -> Any:
        seen.append(array.shape)
        return wait(array)

    monkeypatch.setattr(flight, "host_read", counted)
    return seen


@pytest.mark.parametrize("kind", ["plain", "right", "mixed", "device"])
def test_declared_processors_cost_no_host_wait(kind: str, reads: list[tuple[int, ...]]) -> None:
    asked = [
        Asked(PROMPTS[0], penalties={"repetition_penalty": 1.5, "logit_bias": {3: -2.0}}),
        Asked(PROMPTS[1], extra=lambda: [declared(by_history)]),
        Asked(PROMPTS[2], temp=0.7, seed=3, penalties={"frequency_penalty": 0.4}),
    ]
    rows = [(each, alone(each)) for each in asked]
    group = VerifyGroup(target(), drafter(kind, *rows))
    done = group.admit(
        [
            each.request(by, num_draft_tokens=WIDTH)  # type: ignore[arg-type]  # one of the two
            for each, by in zip(asked, ("ours", "ours", "mlx-lm"), strict=True)
        ]
    )
    reads.clear()
    rounds = 0
    while group.rows:
        with group.round() as verified:
            verified.deliver_all()
        rounds += 1
        assert len(reads) == rounds
    assert [told_of(row) for row in done] == [told for _, told in rows]


def test_positions_of_stateful_processors_are_waited_for_one_by_one(
    reads: list[tuple[int, ...]],
) -> None:
    asked = Asked(PROMPTS[1], extra=whole_history)
    told = alone(asked)
    group = VerifyGroup(target(), drafter("mixed", (asked, told)))
    [row] = group.admit([asked.request(num_draft_tokens=WIDTH)])
    wide = 0
    while group.rows:
        reads.clear()
        with group.round() as verified:
            verified.deliver_all()
        # One wait for the window, and where it has several positions, one for each that is walked.
        walked = verified.delivered[0] if reads[0][1] > 1 else 0
        assert reads[1:] == [(1, 1)] * walked
        wide += walked
    assert told_of(row) == told
    assert wide > 5
