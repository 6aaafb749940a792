"""Where a row ends: its text, its reason, its counters and its cache, wherever in a block that is.

Each case is one request whose end falls on a chosen place of a burst, through ``stream_generate``
and as a row of a group, with drafts that go on behind the end. What it must give comes from a plain
loop (``request_oracle``), and the caller's cache must go on as mlx-lm's own would.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve
from mlx_lm.generate import generate_step
from mlx_lm.generate import stream_generate as mlx_lm_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from request_oracle import (
    JSON_PIECES,
    Asked,
    Told,
    alone,
    at_once,
    beyond,
    bytes_tokenizer,
    json_tokenizer,
    told_of,
)
from scripted import ScriptedProvider, drain, load_scripted, target
from tiny_models import VOCABULARY, build_model, tiny_model

from specdec import VerifyGroup, stream_generate
from specdec.errors import OptionError
from specdec.sampling import stateless

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from scripted import Plan

    from specdec import GenerationResponse

WIDTH = 7
OFFSETS = range(WIDTH + 1)  # the last one is the bonus
END = JSON_PIECES.index("<end>")
DRAWS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temp": 0.9, "seed": 77}}
NEXT_TURN = (5, 33, 2)


# Texts whose first burst has no letter twice, so that each place has an end of its own.


@cache
def distinct(draw: str) -> tuple[Asked, Told]:
    """A request, and its text without any end."""
    for start in range(2000):
        prompt = tuple((start * 5 + 11 * place) % VOCABULARY for place in range(1 + start % 7))
        asked = Asked(prompt, max_tokens=WIDTH + 12, **DRAWS[draw])
        told = alone(asked)
        first = told.tokens[: WIDTH + 3]
        letters = string_of(*first)
        if len(set(letters)) == len(letters) and END not in told.tokens:
            return asked, told
    raise AssertionError("no text without a repetition")


def string_of(*tokens: int) -> str:
    return "".join(JSON_PIECES[token] for token in tokens)


def ends(kind: str, asked: Asked, free: Told, offset: int) -> Asked:
    """The request with an end at a place of its first burst."""
    tokens = free.tokens
    if kind == "end token":
        return evolve(asked, end_tokens=frozenset([tokens[offset], END]))
    if kind == "budget":
        return evolve(asked, max_tokens=offset + 1)
    if kind == "stop sequence":
        return evolve(asked, stop_sequences=(tokens[max(0, offset - 1) : offset + 1],))
    string = string_of(tokens[offset])
    if kind == "stop string over two tokens":
        string = string_of(tokens[offset - 1])[-1] + string[0]
    return evolve(asked, stop_strings=(string,))


PLACES = [
    (kind, offset)
    for kind in (
        "end token",
        "stop string",
        "stop string over two tokens",
        "stop sequence",
        "budget",
    )
    for offset in OFFSETS
    if offset or kind != "stop string over two tokens"
]


def drafts_of(asked: Asked, told: Told, *boundaries: int, wrong: bool = False) -> Plan:
    """Drafts whose rounds give the tokens up to each boundary; then, full bursts.

    A boundary is met by a short draft, or by one that goes on with wrong tokens.
    """
    output = beyond(asked, told, WIDTH + 2)

    def plan(_tokens: tuple[int, ...], depth: int, step: int) -> list[int]:
        until = next((b for b in boundaries if b > step), None)
        if until is None:
            return list(output[step : step + depth])
        right = list(output[step : until - 1])
        return [*right, *((token + 1) % VOCABULARY for token in output[until - 1 :])][
            : depth if wrong else len(right)
        ]

    return plan


# Going on from a caller's cache.


@cache
def next_turn(read: tuple[int, ...]) -> list[int]:
    """What mlx-lm writes in the next turn, from the beginning."""
    prompt = mx.array((*read, *NEXT_TURN))
    return [token for token, _ in generate_step(prompt, tiny_model("qwen3"), max_tokens=5)]


def goes_on(caches: list[Any], read: tuple[int, ...]) -> None:
    """The caches cover exactly these tokens: mlx-lm goes on from them as from the beginning."""
    assert {each.offset for each in caches} == {len(read)}
    steps = generate_step(
        mx.array(NEXT_TURN), tiny_model("qwen3"), max_tokens=5, prompt_cache=caches
    )
    assert [token for token, _ in steps] == next_turn(read)


def content_of(told: Told) -> tuple[int, ...]:
    return told.tokens if told.end_token is None else (*told.tokens, told.end_token)


def streamed(
    asked: Asked, provider: ScriptedProvider | None, caches: list[Any], **options: Any
) -> Iterator[GenerationResponse]:
    """The request through ``stream_generate``."""
    return stream_generate(
        tiny_model("qwen3"),
        json_tokenizer(*sorted(asked.end_tokens)),
        list(asked.prompt),
        asked.max_tokens,
        drafter=None if provider is None else load_scripted(provider, WIDTH),
        seed=asked.seed,
        temp=asked.temp,
        stop=asked.stop_strings,
        stop_sequences=asked.stop_sequences,
        min_tokens=asked.min_tokens,
        logits_processors=list(asked.extra()),
        prompt_cache=caches,
        **options,
    )


def check_stream(asked: Asked, told: Told, plan: Plan, rounds: int | None = None) -> None:
    """Through ``stream_generate``: tokens, text, reason, counters and cache are what they must."""
    provider = ScriptedProvider(plan)
    caches = make_prompt_cache(tiny_model("qwen3"))
    responses = list(streamed(asked, provider, caches))
    last = responses[-1]
    assert provider.complaints == []
    assert tuple(each.token for each in responses) == content_of(told)
    assert "".join(each.text for each in responses) == told.text
    assert [each.finish_reason for each in responses[:-1]] == [None] * (len(responses) - 1)
    assert last.finish_reason == told.finish
    assert last.generation_tokens == len(content_of(told))
    check_counters(last.stats, responses, told, rounds)
    goes_on(caches, (*asked.prompt, *content_of(told)))


def check_counters(stats: Any, emissions: Sequence[Any], told: Told, rounds: int | None) -> None:
    """Nothing behind the end is counted, and each token comes from a draft or from a round."""
    content = emissions[: len(told.tokens)]
    drafted = sum(each.from_draft for each in content)
    assert stats.emitted == len(told.tokens)
    assert stats.accepted == drafted
    assert stats.accepted <= stats.drafted
    assert sum(stats.accepted_per_position) == stats.accepted
    assert sum(stats.drafted_per_position) == stats.drafted
    assert stats.emitted - stats.accepted <= stats.rounds == stats.target_forwards
    if rounds is not None:
        assert stats.rounds == rounds


def check_row(asked: Asked, told: Told, plan: Plan, rounds: int | None = None) -> None:
    """As a row of a group: the same."""
    provider = ScriptedProvider(plan)
    caches = make_prompt_cache(tiny_model("qwen3"))
    seen: list[Any] = []
    group = VerifyGroup(target(), provider)
    [row] = group.admit([asked.request(num_draft_tokens=WIDTH, cache=caches, consumer=seen.append)])
    emitted: list[int] = []
    while group.rows:
        before = len(seen)
        with group.round() as done:
            done.deliver_all()
        emitted.append(len(seen) - before)
    assert provider.complaints == []
    assert told_of(row) == told
    assert sum(emitted) == len(seen) == len(content_of(told))
    assert "".join(each.text for each in seen) == told.text
    assert [each.finish for each in seen] == [*[None] * (len(seen) - 1), told.finish]
    check_counters(row.stats, seen, told, rounds)
    goes_on(caches, (*asked.prompt, *content_of(told)))


# A1, A3, A4, A5, A6, A8: an end at every place of a burst.


@pytest.mark.parametrize(("kind", "offset"), PLACES)
@pytest.mark.parametrize("draw", DRAWS)
def test_an_end_anywhere_in_an_accepted_run_ends_the_row_there(
    draw: str, kind: str, offset: int
) -> None:
    plain, free = distinct(draw)
    asked = ends(kind, plain, free, offset)
    told = alone(asked)
    # Not vacuous: it ends at this very place, and the free text goes on.
    assert told.tokens == free.tokens[: offset + (kind != "end token")]
    assert len(free.tokens) > len(told.tokens)
    plan = drafts_of(plain, free)
    check_stream(asked, told, plan, rounds=1)
    check_row(asked, told, plan, rounds=1)


@pytest.mark.parametrize("wrong", [False, True], ids=["short draft", "rejection"])
@pytest.mark.parametrize(("kind", "offset"), [each for each in PLACES if each[1] in {1, 4, WIDTH}])
def test_an_end_whose_tokens_come_in_two_rounds_is_seen(
    kind: str, offset: int, wrong: bool
) -> None:
    plain, free = distinct("greedy")
    asked = ends(kind, plain, free, offset)
    told = alone(asked)
    plan = drafts_of(plain, free, offset, wrong=wrong)
    check_stream(asked, told, plan, rounds=2)
    check_row(asked, told, plan, rounds=2)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in PLACES}))
def test_what_was_drafted_behind_an_end_changes_no_other_request(kind: str) -> None:
    plain, free = distinct("seeded")
    other = evolve(plain, prompt=(9, *plain.prompt), seed=78)
    asked = ends(kind, plain, free, WIDTH if kind != "end token" else 3)
    expected = alone(other)
    plans = {
        len(plain.prompt): drafts_of(plain, free),
        len(other.prompt): drafts_of(other, expected, 3, 7, wrong=True),
    }

    def plan(tokens: tuple[int, ...], depth: int, step: int) -> Any:
        return plans[len(tokens) - step](tokens, depth, step)

    group = VerifyGroup(target(), ScriptedProvider(plan))
    rows = group.admit([each.request(num_draft_tokens=WIDTH) for each in (asked, other)])
    drain(group)
    assert [told_of(row) for row in rows] == [alone(asked), expected]
    # And the next one on the same group.
    [again] = group.admit([other.request(num_draft_tokens=WIDTH)])
    drain(group)
    assert told_of(again) == expected


# A5: counters against mlx-lm's.


@pytest.mark.parametrize("offset", OFFSETS)
def test_usage_is_what_mlx_lm_reports(offset: int) -> None:
    plain, free = distinct("greedy")
    asked = evolve(plain, end_tokens=frozenset([free.tokens[offset], END]))
    tokenizer = json_tokenizer(*sorted(asked.end_tokens))
    want = list(
        mlx_lm_stream_generate(tiny_model("qwen3"), tokenizer, list(asked.prompt), asked.max_tokens)
    )
    caches = make_prompt_cache(tiny_model("qwen3"))
    got = list(streamed(asked, ScriptedProvider(drafts_of(plain, free)), caches))
    fields = ("token", "text", "prompt_tokens", "generation_tokens", "finish_reason")
    assert [[getattr(each, name) for name in fields] for each in got] == [
        [getattr(each, name) for name in fields] for each in want
    ]


# A7: min_tokens.


def ending_from(prompt: tuple[int, ...], place: int, token: int) -> Callable[[], list[Any]]:
    """A target whose argmax is an end token from a place on."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size < len(prompt) + place:
            return logits
        return logits + 50.0 * (mx.arange(logits.shape[-1]) == token)

    return lambda: [stateless(process)]


@pytest.mark.parametrize("boundary", [None, 2, 3])
@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, WIDTH, WIDTH + 1])
@pytest.mark.parametrize("draw", DRAWS)
def test_an_end_token_is_banned_in_exactly_the_first_min_tokens_positions(
    draw: str, least: int, boundary: int | None
) -> None:
    plain, _ = distinct(draw)
    asked = evolve(
        plain,
        end_tokens=frozenset([END]),
        min_tokens=least,
        extra=ending_from(plain.prompt, 2, END),
    )
    told = alone(asked)
    assert len(told.tokens) == max(2, least)
    assert told.end_token == END
    # The drafter knows the text, and drafts the end token at every place where it may come.
    knows = evolve(asked, min_tokens=0, end_tokens=frozenset())
    output = (*told.tokens, END, *alone(knows).tokens)
    early = (*told.tokens[:2], END, *told.tokens[3:], END, END)
    for text in (output, early):

        def plan(_: Any, depth: int, step: int, text: tuple[int, ...] = text) -> list[int]:
            until = depth if boundary is None or step >= boundary else boundary - step - 1
            return list(text[step : step + until])

        check_stream(asked, told, plan)
        check_row(asked, told, plan)


@pytest.mark.parametrize("least", [1, 3, WIDTH, WIDTH + 1])
def test_stops_below_min_tokens_are_ordinary_content(least: int) -> None:
    plain, free = distinct("greedy")
    repeated = evolve(plain, min_tokens=least)
    for asked in (
        evolve(repeated, stop_strings=tuple(string_of(token) for token in free.tokens)),
        evolve(repeated, stop_sequences=tuple((token,) for token in free.tokens)),
    ):
        told = alone(asked)
        assert len(told.tokens) == least
        check_stream(asked, told, drafts_of(plain, free))
        check_row(asked, told, drafts_of(plain, free))


# A8: budgets.


@pytest.mark.parametrize("right", [True, False], ids=["all accepted", "none accepted"])
@pytest.mark.parametrize("budget", [1, 2, WIDTH, WIDTH + 1, WIDTH + 2, 2 * WIDTH + 2])
def test_a_budget_is_never_passed_and_its_last_token_never_drafted(
    budget: int, right: bool
) -> None:
    plain, free = distinct("greedy")
    asked = evolve(plain, max_tokens=budget)
    told = alone(asked)
    knows = drafts_of(plain, free)

    def plan(tokens: tuple[int, ...], depth: int, step: int) -> list[int]:
        assert depth <= max(0, budget - step - 1)
        return [(token + (not right)) % VOCABULARY for token in knows(tokens, depth, step)]

    check_stream(asked, told, plan, rounds=None if right else budget)
    check_row(asked, told, plan, rounds=None if right else budget)


def test_with_one_token_left_no_drafter_is_asked_for_a_draft() -> None:
    plain, free = distinct("greedy")
    provider = ScriptedProvider(drafts_of(plain, free))
    group = VerifyGroup(target(), provider)
    group.admit([evolve(plain, max_tokens=1).request(num_draft_tokens=WIDTH)])
    drain(group)
    assert all(each.depths == [0] for each in provider.rounds)


def test_a_budget_of_none_is_refused_before_model_and_cache_are_touched() -> None:
    class Watched:
        def __init__(self) -> None:
            self.calls = 0
            self.inner = build_model("qwen3")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.inner(*args, **kwargs)

    model = Watched()
    caches = make_prompt_cache(model.inner)
    with pytest.raises(OptionError, match="max_tokens is 0"):
        stream_generate(model, json_tokenizer(), [1, 2], 0, drafter="ngram", prompt_cache=caches)
    assert model.calls == 0
    assert {each.offset for each in caches} == {0}


# A consumer that leaves in the middle of a burst.


class Gone(RuntimeError):
    """What a consumer raises."""


def raises_after(count: int, seen: list[Any]) -> Callable[[Any], None]:
    def consume(emission: Any) -> None:
        seen.append(emission)
        if len(seen) == count:
            raise Gone

    return consume


def stops_after(count: int, seen: list[Any]) -> Callable[[Any], bool]:
    def consume(emission: Any) -> bool:
        seen.append(emission)
        return len(seen) < count

    return consume


WAYS_OUT = ("cancelled", "consumer stops", "consumer raises")


@pytest.mark.parametrize("count", range(1, WIDTH + 3))
@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_that_is_left_in_a_burst_covers_exactly_what_was_delivered(
    draw: str, way: str, count: int
) -> None:
    asked, free = distinct(draw)
    caches = make_prompt_cache(tiny_model("qwen3"))
    seen: list[Any] = []
    options: dict[str, Any] = {"consumer": seen.append, "cancelled": lambda: len(seen) == count}
    if way == "consumer stops":
        options = {"consumer": stops_after(count, seen)}
    elif way == "consumer raises":
        options = {"consumer": raises_after(count, seen)}
    # A stop string whose beginning is the last token's text: what was held back is shown now.
    held = string_of(free.tokens[count - 1]) + "never"
    group = VerifyGroup(target(), ScriptedProvider(drafts_of(asked, free)))
    [row] = group.admit(
        [
            evolve(asked, stop_strings=(held,)).request(
                num_draft_tokens=WIDTH, cache=caches, **options
            )
        ]
    )
    drain(group)
    assert row.emitted == free.tokens[:count]
    assert row.finish == ("error" if way == "consumer raises" else "cancelled")
    assert isinstance(row.error, Gone) is (way == "consumer raises")
    assert row.text == at_once(asked.tokenizer, row.emitted)
    assert row.stats.emitted == len(seen) == count
    assert row.stats.accepted == sum(each.from_draft for each in seen) <= row.stats.drafted
    goes_on(caches, (*asked.prompt, *row.emitted))


@pytest.mark.parametrize("way", ["closed", "raised", "dropped"])
@pytest.mark.parametrize("count", range(1, WIDTH + 3))
@pytest.mark.parametrize("draw", DRAWS)
def test_a_generator_that_is_left_in_a_burst_leaves_a_cache_that_goes_on(
    draw: str, count: int, way: str
) -> None:
    asked, free = distinct(draw)
    caches = make_prompt_cache(tiny_model("qwen3"))
    responses: Any = streamed(asked, ScriptedProvider(drafts_of(asked, free)), caches)
    got = [next(responses).token for _ in range(count)]
    if way == "closed":
        responses.close()
    elif way == "raised":
        with pytest.raises(Gone):
            responses.throw(Gone())
    del responses
    assert tuple(got) == free.tokens[:count]
    goes_on(caches, (*asked.prompt, *got))


def test_two_turns_that_were_left_early_are_one_conversation() -> None:
    """The cache of a turn that was left goes on here too, not in mlx-lm alone."""
    asked, free = distinct("greedy")
    caches = make_prompt_cache(tiny_model("qwen3"))
    responses: Any = streamed(asked, ScriptedProvider(drafts_of(asked, free)), caches)
    got = [next(responses).token for _ in range(4)]
    responses.close()
    whole = (*asked.prompt, *got, *NEXT_TURN)
    want = alone(Asked(whole, max_tokens=9))
    turn = evolve(asked, prompt=NEXT_TURN, max_tokens=9)
    again = [each.token for each in streamed(turn, None, caches)]
    assert tuple(again) == want.tokens
    goes_on(caches, (*whole, *again))


# I6: characters of several tokens.

EMOJI = "\U0001f600".encode()


@cache
def smiling() -> tuple[Asked, Told, int]:
    """A target that writes an emoji, byte by byte: its tokenizer is made for its text."""
    plain, free = distinct("greedy")
    place = 3
    letters = (bytes([byte]) for byte in range(33, 127))
    pieces: list[bytes | None] = [None] * VOCABULARY
    for token, byte in zip(free.tokens[place : place + 4], EMOJI, strict=True):
        pieces[token] = bytes([byte])
    spelt = [next(letters) if piece is None else piece for piece in pieces]
    asked = evolve(plain, tokenizer=bytes_tokenizer(spelt))
    told = alone(asked)
    assert EMOJI.decode() in told.text
    return asked, told, place


@pytest.mark.parametrize("wrong", [False, True], ids=["short draft", "rejection"])
@pytest.mark.parametrize("inside", [0, 1, 2, 3, 4])
def test_an_emoji_split_by_a_round_is_whole(inside: int, wrong: bool) -> None:
    asked, told, place = smiling()
    for boundaries in ((place + inside,), tuple(range(1, place + inside + 1))):
        seen: list[Any] = []
        group = VerifyGroup(
            target(), ScriptedProvider(drafts_of(asked, told, *boundaries, wrong=wrong))
        )
        [row] = group.admit([asked.request(num_draft_tokens=WIDTH, consumer=seen.append)])
        drain(group)
        assert told_of(row) == told
        shown = [each.text for each in seen]
        assert "".join(shown) == told.text == asked.tokenizer.decode(list(told.tokens))
        assert EMOJI.decode() in "".join(shown[: place + 4])
        assert all("\ufffd" not in text for text in shown[: place + 4])


@pytest.mark.parametrize("inside", [1, 2, 3, 4])
@pytest.mark.parametrize("way", ["budget", "cancelled", "end token"])
def test_an_emoji_cut_by_an_end_is_what_one_shot_decoding_gives(way: str, inside: int) -> None:
    whole, told, place = smiling()
    count = place + inside
    asked, seen = whole, list[Any]()
    options: dict[str, Any] = {}
    if way == "budget":
        asked = evolve(whole, max_tokens=count)
    elif way == "end token":
        asked = evolve(whole, end_tokens=frozenset([told.tokens[count]]))
    else:
        options = {"cancelled": lambda: len(seen) == count}
    group = VerifyGroup(target(), ScriptedProvider(drafts_of(whole, told)))
    [row] = group.admit([asked.request(num_draft_tokens=WIDTH, consumer=seen.append, **options)])
    drain(group)
    assert row.emitted == told.tokens[:count]
    assert row.text == asked.tokenizer.decode(list(row.emitted))
    assert ("\ufffd" in row.text) is (inside < 4)
    if way != "cancelled":  # a row that is cancelled before a token has no last emission
        assert "".join(each.text for each in seen) == row.text


@pytest.mark.parametrize("wrong", [False, True], ids=["short draft", "rejection"])
@pytest.mark.parametrize("inside", [0, 1, 2, 3])
def test_a_stop_string_that_is_an_emoji_is_seen_across_rounds(inside: int, wrong: bool) -> None:
    whole, free, place = smiling()
    asked = evolve(whole, stop_strings=(EMOJI.decode(),))
    told = alone(asked)
    assert told.tokens == free.tokens[: place + 4]
    plan = drafts_of(whole, free, place + inside, wrong=wrong)
    check_row(asked, told, plan)
