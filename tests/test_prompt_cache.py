"""On every way out, the caller's prompt cache covers the prompt and every emitted token."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from attrs import frozen
from kept_state import contents, difference
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedProvider,
    Text,
    drain,
    load_scripted,
    on_device,
    request,
    solo,
    target,
    tiny_tokenizer,
)
from tiny_models import HYBRID, WINDOWED, OwnCache, tiny_model

import specdec_demo
from specdec import VerifyGroup, stream_generate
from specdec.contract import PrefillMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROMPT = (5, 9, 40, 3, 22, 17, 1, 2, 3)
NEXT = (11, 12, 13)
WIDTH = 4


@frozen
class Way:
    """A way out of a request.

    Attributes:
        max_tokens: the budget.
        end_at: place of the token that is declared an end token.
        leave_at: responses after which the caller goes.
        thrown: what the caller throws into the generator; it closes it where this is ``None``.
    """

    max_tokens: int = 17
    end_at: int | None = None
    leave_at: int | None = None
    thrown: type[BaseException] | None = None


WAYS = {
    "length": Way(),
    "one token": Way(max_tokens=1),
    "two tokens": Way(max_tokens=2),
    "end token first": Way(end_at=0),
    "end token second": Way(end_at=1),
    "end token third": Way(end_at=2),
    "end token fourth": Way(end_at=3),
    "end token fifth": Way(end_at=4),
    "end token sixth": Way(end_at=5),
    "end token on the last token of the budget": Way(max_tokens=6, end_at=5),
    "closed at the first token": Way(leave_at=1),
    "closed at the second token": Way(leave_at=2),
    "closed at the fourth token": Way(leave_at=4),
    "closed at the fifth token": Way(leave_at=5),
    "closed at the last token": Way(max_tokens=8, leave_at=8),
    "error thrown at the third token": Way(leave_at=3, thrown=Fault),
    "interrupt thrown at the third token": Way(leave_at=3, thrown=KeyboardInterrupt),
    "interrupt thrown at the sixth token": Way(leave_at=6, thrown=KeyboardInterrupt),
}

DRAFTERS = (
    "plain",
    "ngram",
    "right",
    "wrong",
    "mixed",
    "on the device",
    "whole prompt",
)
MOVES = {
    "right": [[RIGHT] * WIDTH],
    "wrong": [[WRONG] * WIDTH],
    "mixed": [[RIGHT, RIGHT, WRONG], [], [RIGHT] * WIDTH],
    "on the device": [[RIGHT, RIGHT, WRONG], [RIGHT] * WIDTH],
    "whole prompt": [[RIGHT] * WIDTH],
}


def drafting(kind: str, text: Text, architecture: str = "qwen3") -> dict[str, Any]:
    """Options of ``stream_generate`` that ask for a drafter."""
    if kind == "plain":
        return {}
    if kind == "ngram":
        return {"drafter": "ngram", "num_draft_tokens": WIDTH}
    plan = Script([text], [MOVES[kind]])
    provider = ScriptedProvider(
        plan,
        device=on_device(plan, lengths=True) if kind == "on the device" else None,
        mode=PrefillMode.FULL if kind == "whole prompt" else PrefillMode.TAIL_SPLIT,
    )
    return {"drafter": load_scripted(provider, WIDTH, architecture)}


def take(responses: Iterator[Any], way: Way) -> list[int]:
    """Read responses until the way out; the tokens that were received."""
    received = []
    generator: Any = responses
    for response in generator:
        received.append(response.token)
        if len(received) == way.leave_at:
            if way.thrown is None:
                generator.close()
            else:
                with pytest.raises(way.thrown):
                    generator.throw(way.thrown("thrown in"))
            break
    return received


def run(
    generate: Callable[..., Iterator[Any]],
    model: Any,
    prompt: Sequence[int],
    text: Sequence[int],
    way: Way,
    caches: list[Any],
    **options: Any,
) -> list[int]:
    ends = () if way.end_at is None else (text[way.end_at],)
    return take(
        generate(
            model,
            tiny_tokenizer(*ends),
            list(prompt),
            max_tokens=way.max_tokens,
            prompt_cache=caches,
            **options,
        ),
        way,
    )


def offsets(caches: Sequence[Any]) -> set[int]:
    return {cache.offset for cache in caches if isinstance(getattr(cache, "offset", None), int)}


def continued(model: Any, tokens: Sequence[int], caches: Any = None, count: int = 8) -> list[int]:
    """What mlx-lm writes after tokens, from caches or cold."""
    steps = generate_step(mx.array(list(tokens)), model, max_tokens=count, prompt_cache=caches)
    return [token for token, _ in steps]


def held(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of caches as far as it is in use."""
    leaves: Any = tree_flatten([cache.state for cache in caches], destination={})
    return [leaf for leaf in leaves.values() if isinstance(leaf, mx.array)]


def apart(caches: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference of what a later query can see."""
    found: Any = difference(contents(caches), contents(others)).item()
    return float(found)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", WAYS)
def test_the_cache_covers_the_prompt_and_every_emitted_token(name: str, kind: str) -> None:
    way = WAYS[name]
    model = tiny_model("qwen3")
    text = Text(PROMPT, solo(PROMPT))
    theirs = make_prompt_cache(model)
    told = run(mlx_lm.stream_generate, model, PROMPT, text.output, way, theirs)
    ours = make_prompt_cache(model)
    received = run(stream_generate, model, PROMPT, text.output, way, ours, **drafting(kind, text))

    assert received == told == list(text.output[: len(told)])
    whole = [*PROMPT, *received]
    assert offsets(ours) == offsets(theirs) == {len(whole)}
    if kind == "plain":
        for mine, other in zip(held(ours), held(theirs), strict=True):
            assert mx.array_equal(mine, other)
    # A second turn, through specdec with the same kind of drafter and then through mlx-lm.
    turn = [*whole, *NEXT]
    cold = continued(model, turn, count=14)
    again = Text(NEXT, tuple(cold))
    second = run(stream_generate, model, NEXT, (), Way(max_tokens=6), ours, **drafting(kind, again))
    assert second == cold[:6]
    assert offsets(ours) == {len(turn) + 6}
    assert continued(model, [4, 44], ours) == continued(model, [*turn, *cold[:6], 4, 44])


@pytest.mark.parametrize("kind", ["plain", "ngram", "mixed"])
@pytest.mark.parametrize("architecture", [HYBRID, WINDOWED])
@pytest.mark.parametrize("name", WAYS)
def test_recurrent_and_windowed_caches_are_left_as_mlx_lm_leaves_them(
    name: str, architecture: str, kind: str
) -> None:
    """Windows are left in order, and of mlx-lm's own what a later query can see is compared."""
    way = WAYS[name]
    model = tiny_model(architecture)
    text = Text(PROMPT, solo(PROMPT, architecture=architecture))
    theirs, ours = make_prompt_cache(model), make_prompt_cache(model)
    told = run(mlx_lm.stream_generate, model, PROMPT, text.output, way, theirs)
    options = drafting(kind, text, architecture)
    received = run(stream_generate, model, PROMPT, text.output, way, ours, **options)
    assert received == told
    whole = [*PROMPT, *received]
    assert offsets(ours) == offsets(theirs) == {len(whole)}
    if kind == "plain" and architecture == HYBRID:
        for mine, other in zip(held(ours), held(theirs), strict=True):
            assert mx.array_equal(mine, other)
    assert apart(ours, theirs) < 1e-3
    # A second turn, drafted again, and a third one through mlx-lm alone.
    turn = [*whole, *NEXT]
    cold = continued(model, turn, count=14)
    again = drafting(kind, Text(NEXT, tuple(cold)), architecture)
    second = run(stream_generate, model, NEXT, (), Way(max_tokens=6), ours, **again)
    assert second == cold[:6]
    assert offsets(ours) == {len(turn) + 6}
    assert continued(model, [4, 44], ours) == continued(model, [*turn, *cold[:6], 4, 44])


@pytest.mark.parametrize("architecture", [HYBRID, WINDOWED])
def test_a_cache_that_holds_another_token_is_seen(architecture: str) -> None:
    model = tiny_model(architecture)
    left = []
    for place, token in ((0, PROMPT[0]), (-1, 44), (-4, 44)):
        tokens = list(PROMPT)
        tokens[place] = token
        caches = make_prompt_cache(model)
        model(mx.array([tokens]), cache=caches)
        left.append(caches)
    assert apart(left[0], left[0]) == 0
    assert apart(left[0], left[1]) > 0.1
    # Four positions back a convolution has forgotten it, but not the attention beside it.
    assert apart(left[0], left[2]) > 0.1


@pytest.mark.parametrize("kind", ["plain", "ngram"])
@pytest.mark.parametrize("name", WAYS)
def test_caches_without_a_row_form_are_left_as_mlx_lm_leaves_them(name: str, kind: str) -> None:
    way = WAYS[name]
    model = tiny_model("qwen3")
    text = solo(PROMPT)
    theirs, ours = ([OwnCache() for _ in model.layers] for _ in range(2))
    told = run(mlx_lm.stream_generate, model, PROMPT, text, way, theirs)
    options: dict[str, Any] = {"drafter": "ngram"} if kind == "ngram" else {}
    received = run(stream_generate, model, PROMPT, text, way, ours, **options)
    assert received == told
    whole = [*PROMPT, *received]
    assert offsets(ours) == offsets(theirs) == {len(whole)}
    for mine, other in zip(held(ours), held(theirs), strict=True):
        assert mx.array_equal(mine, other)
    turn = [*whole, *NEXT]
    assert continued(model, NEXT, ours) == continued(model, turn)


@pytest.mark.parametrize("architecture", ["qwen3", HYBRID, WINDOWED])
@pytest.mark.parametrize("kind", ["plain", "host", "on the device", "whole prompt"])
def test_each_row_of_a_batch_gives_its_callers_cache_back(kind: str, architecture: str) -> None:
    """One is stopped by an end token, one by its budget, two by their consumers, one runs on."""
    model = tiny_model(architecture)
    prompts = (PROMPT, (1, 2, 3), (7,), tuple(range(20, 31)), (61, 60))
    texts = [Text(prompt, solo(prompt, architecture=architecture)) for prompt in prompts]
    plan = Script(texts, [[[RIGHT] * 4], [[RIGHT, WRONG]], [[RIGHT] * 2], [[]], [[WRONG]]])
    provider = ScriptedProvider(
        plan,
        device=on_device(plan, lengths=True) if kind == "on the device" else None,
        mode=PrefillMode.FULL if kind == "whole prompt" else PrefillMode.TAIL_SPLIT,
    )
    group = VerifyGroup(target(architecture), None if kind == "plain" else provider)
    caches = [make_prompt_cache(model) for _ in prompts]

    def leaving(after: int, boom: Exception | None = None) -> Callable[[Any], bool | None]:
        heard = itertools.count(1)

        def consumer(_emission: Any) -> bool | None:
            if next(heard) < after:
                return None
            if boom is not None:
                raise boom
            return False

        return consumer

    ways: list[dict[str, Any]] = [
        {"max_tokens": 20, "end_tokens": {texts[0].output[2]}},
        {"max_tokens": 5},
        {"max_tokens": 20, "consumer": leaving(4)},
        {"max_tokens": 20, "consumer": leaving(6, Fault("consumer"))},
        {"max_tokens": 14},
    ]
    rows = group.admit(
        [
            request(prompt, num_draft_tokens=4, cache=held, **way)
            for prompt, held, way in zip(prompts, caches, ways, strict=True)
        ]
    )
    drain(group)
    assert [row.finish for row in rows] == ["stop", "length", "cancelled", "error", "length"]
    assert [len(row.emitted) for row in rows] == [2, 5, 4, 6, 14]
    for row, held_by in zip(rows, caches, strict=True):
        written = [*row.tokens, *([] if row.end_token is None else [row.end_token])]
        assert offsets(held_by) == {len(written)}
        assert continued(model, NEXT, held_by) == continued(model, [*written, *NEXT])
    assert provider.complaints == []


@pytest.mark.parametrize("architecture", ["qwen3", HYBRID])
@pytest.mark.parametrize("name", ["length", "one token", "end token third"])
def test_a_plain_request_runs_the_model_as_often_as_mlx_lm(
    name: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WAYS[name]
    model = tiny_model(architecture)
    text = solo(PROMPT, architecture=architecture)
    ends = () if way.end_at is None else (text[way.end_at],)
    calls: list[tuple[int, ...]] = []
    call = type(model).__call__

    def counted(this: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        calls.append(inputs.shape)
        return call(this, inputs, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    counts = []
    for generate in (mlx_lm.stream_generate, stream_generate):
        function: Any = generate
        caches = make_prompt_cache(model)
        responses = function(
            model,
            tiny_tokenizer(*ends),
            list(PROMPT),
            max_tokens=way.max_tokens,
            prompt_cache=caches,
        )
        calls.clear()  # a model is looked at when it is bound
        take(responses, way)
        counts.append(list(calls))
    assert counts[0] == counts[1]
    assert len(counts[0]) == 2 + (3 if way.end_at else way.max_tokens)


# The demo model with recurrent layers.


@cache
def demo(name: str) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(specdec_demo.path(name)))[:2]
    return model, tokenizer


@pytest.mark.parametrize(
    "way",
    [
        Way(max_tokens=5),
        Way(max_tokens=9, end_at=2),
        Way(max_tokens=9, leave_at=1),
        Way(max_tokens=9, leave_at=3),
        Way(max_tokens=9, leave_at=2, thrown=KeyboardInterrupt),
    ],
)
def test_the_recurrent_demo_model_is_left_as_mlx_lm_leaves_it(way: Way) -> None:
    model, tokenizer = demo("demo-qwen3_5")
    prompt = tokenizer.encode("def read(path):\n    with open(path)")
    text = continued(model, prompt, count=9)
    ends = set(tokenizer.eos_token_ids)
    theirs, ours = make_prompt_cache(model), make_prompt_cache(model)
    left = []
    turns: list[tuple[Any, Any, dict[str, Any]]] = [
        (mlx_lm.stream_generate, theirs, {}),
        (stream_generate, ours, {"drafter": "ngram"}),
    ]
    for generate, caches, options in turns:
        tokenizer._eos_token_ids = ends | ({text[way.end_at]} if way.end_at is not None else set())
        try:
            responses = generate(
                model,
                tokenizer,
                prompt,
                max_tokens=way.max_tokens,
                prompt_cache=caches,
                **options,
            )
            left.append(take(responses, way))
        finally:
            tokenizer._eos_token_ids = ends
    assert left[0] == left[1] == text[: len(left[0])]
    assert offsets(ours) == offsets(theirs) == {len(prompt) + len(left[0])}
    for mine, other in zip(held(ours), held(theirs), strict=True):
        assert mx.array_equal(mine, other)
    turn = tokenizer.encode(" as file:")
    assert continued(model, turn, ours, 4) == continued(model, [*prompt, *left[0], *turn], count=4)


# Errors on the way.


def raising_sampler(draws: int) -> Callable[[mx.array], mx.array]:
    calls = 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > draws:
            raise Fault("sampler")
        return mx.argmax(logprobs, axis=-1)

    return sampler


def read(
    generate: Callable[..., Iterator[Any]] = stream_generate,
    prompt: Sequence[int] = PROMPT,
    **options: Any,
) -> tuple[list[int], BaseException | None]:
    """The tokens that were received, and what then was raised."""
    received: list[int] = []
    try:
        for response in generate(
            tiny_model("qwen3"), tiny_tokenizer(), list(prompt), max_tokens=12, **options
        ):
            received.append(response.token)
    except BaseException as error:
        return received, error
    return received, None


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("draws", [0, 1, 2, 3, 5])
def test_after_a_sampler_error_the_cache_covers_what_was_received(draws: int, kind: str) -> None:
    model = tiny_model("qwen3")
    text = Text(PROMPT, solo(PROMPT))
    caches = make_prompt_cache(model)
    received, error = read(
        sampler=raising_sampler(draws), prompt_cache=caches, **drafting(kind, text)
    )
    assert isinstance(error, Fault)
    assert received == list(text.output[:draws])
    whole = [*PROMPT, *received]
    assert offsets(caches) == {len(whole)}
    assert continued(model, NEXT, caches) == continued(model, [*whole, *NEXT])


def raising_progress(call: int, error: type[BaseException]) -> Callable[[int, int], None]:
    calls: list[int] = []

    def progress(_done: int, _total: int) -> None:
        calls.append(len(calls))
        if calls[-1] == call:
            raise error("progress")

    return progress


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(4))
def test_after_an_error_in_the_progress_callback_the_cache_can_be_gone_on_from(
    call: int, error: type[BaseException], kind: str, turn: int
) -> None:
    """Calls 0 to 2 come while the prompt is read in two chunks, 3 comes with the first token."""
    model = tiny_model("qwen3")
    before = [] if turn == 1 else [3, 1, 4, 1, 5]
    cold = continued(model, [*before, *PROMPT])
    both = []
    runs: list[tuple[Any, dict[str, Any]]] = [
        (mlx_lm.stream_generate, {}),
        (stream_generate, drafting(kind, Text(PROMPT, tuple(cold)))),
    ]
    for generate, options in runs:
        caches = make_prompt_cache(model)
        if before:
            model(mx.array([before]), cache=caches)
        received, raised = read(
            generate,
            prefill_step_size=4,
            prompt_cache=caches,
            prompt_progress_callback=raising_progress(call, error),
            **options,
        )
        assert isinstance(raised, error)
        assert received == []
        both.append(caches)
    [theirs], [ours] = map(offsets, both)
    whole = [*before, *PROMPT, cold[0]]
    if call == 3:
        assert ours == theirs == len(whole)
    else:
        # An interrupted prompt is not in the cache, or as far as it was read.
        assert len(before) <= ours <= theirs
    assert continued(model, [*whole[ours:], *NEXT], both[1]) == continued(model, [*whole, *NEXT])


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_generator_that_was_never_started_leaves_the_cache_alone(kind: str) -> None:
    model = tiny_model("qwen3")
    caches = make_prompt_cache(model)
    responses = stream_generate(
        model,
        tiny_tokenizer(),
        PROMPT,
        prompt_cache=caches,
        **drafting(kind, Text(PROMPT, solo(PROMPT))),
    )
    assert offsets(caches) == {0}
    responses.close()
    assert offsets(caches) == {0}
