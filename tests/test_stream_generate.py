"""``stream_generate`` gives mlx-lm's responses, with every drafter, and refuses at the call."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
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
    text_of,
    tiny_tokenizer,
    words,
)
from tiny_models import HYBRID, VOCABULARY, WINDOWED, OwnCache, build_model, tiny_model

import specdec_demo
from specdec import LoadedDrafter, VerifyGroup, generate, load_drafter, stream_generate
from specdec.contract import PrefillMode
from specdec.errors import (
    ArtifactError,
    GroupFailedError,
    OptionError,
    SpecdecError,
    UnknownKindError,
    UnsupportedOptionError,
)
from specdec.plugins import PluginReport, Registry
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec import GenerationResponse, GenerationStats, Row

PROMPT = (5, 9, 40, 3, 22, 17)


@cache
def demo() -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(specdec_demo.path()))[:2]
    return model, tokenizer


def task(name: str, what: str) -> str:
    return (
        f"<|im_start|>user\nWrite a Python function `{name}`. {what}<|im_end|>\n"
        "<|im_start|>assistant\n```python\n"
    )


def said(responses: Iterable[Any]) -> list[tuple[Any, ...]]:
    """What must be equal response by response."""
    return [
        (r.text, r.token, r.finish_reason, r.generation_tokens, r.prompt_tokens) for r in responses
    ]


def tokens_of(responses: Iterable[Any]) -> list[int]:
    return [response.token for response in responses]


def last_stats(responses: Sequence[GenerationResponse]) -> GenerationStats:
    stats = responses[-1].stats
    assert stats is not None
    return stats


def tiny(
    prompt: Any = PROMPT, max_tokens: int = 12, *, ends: Sequence[int] = (), **options: Any
) -> list[GenerationResponse]:
    model = tiny_model("qwen3")
    given: Any = list(prompt) if isinstance(prompt, tuple) else prompt
    return list(stream_generate(model, tiny_tokenizer(*ends), given, max_tokens, **options))


def eager_ngram(model: Any) -> LoadedDrafter:
    """The n-gram drafter where it drafts as often as it can, as a short test needs."""
    return load_drafter("ngram", model, min_ngram=1, num_draft_tokens=4)


# The same responses as mlx-lm's.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "finish"),
    [
        (task("add", "Add two numbers."), 60, "stop"),
        (task("get_name", "Return the name."), -1, "stop"),
        (task("get_name", "Return the name."), 28, "stop"),  # on the last token of the budget
        (task("get_name", "Return the name."), 27, "length"),
        ("def add(a, b):\n    return", 30, "length"),
        ("1 2 3 1 2 3 1 2", 1, "length"),
    ],
)
def test_the_demo_models_responses_are_those_of_mlx_lm(
    prompt: str, max_tokens: int, finish: str
) -> None:
    model, tokenizer = demo()
    theirs = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens))
    assert theirs[-1].finish_reason == finish
    ngram = eager_ngram(model)
    for options in ({}, {"drafter": ngram}, {"drafter": ngram, "num_draft_tokens": 8}):
        chosen: dict[str, Any] = options
        ours = list(stream_generate(model, tokenizer, prompt, max_tokens, **chosen))
        assert said(ours) == said(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert mx.array_equal(mine.logprobs, other.logprobs)
        assert [r.stats is not None for r in ours] == [False] * (len(ours) - 1) + [True]
        stats = last_stats(ours)
        assert stats.emitted == len(ours) - (finish == "stop")
        assert stats.prompt_tokens == ours[-1].prompt_tokens
        if options and max_tokens > 1:
            assert stats.accepted > 0
            assert stats.target_forwards < len(ours)
            assert any(response.from_draft for response in ours)


@pytest.mark.parametrize("width", range(1, 9))
def test_the_demo_model_draws_one_text_a_seed_at_any_width(width: int) -> None:
    model, tokenizer = demo()
    prompt = "for i in range(10):\n    print(i)\nfor i in range(10):\n    "
    options: dict[str, Any] = {"temp": 0.8, "top_p": 0.95, "seed": 11, "max_tokens": 20}
    plain = list(stream_generate(model, tokenizer, prompt, **options))
    drafted = list(
        stream_generate(
            model, tokenizer, prompt, drafter="ngram", num_draft_tokens=width, **options
        )
    )
    assert said(drafted) == said(plain)
    assert last_stats(drafted).drafted > 0


def drafting(kind: str, text: Text) -> dict[str, Any]:
    if kind == "plain":
        return {}
    if kind == "ngram":
        return {"drafter": eager_ngram(tiny_model("qwen3"))}
    moves: dict[str, list[Any]] = {
        "right": [[RIGHT] * 4],
        "wrong": [[WRONG] * 4],
        "mixed": [[RIGHT, RIGHT, WRONG], [], [RIGHT] * 4],
        "device": [[RIGHT] * 4, [RIGHT, WRONG]],
        "whole prompt": [[RIGHT] * 3],
    }
    plan = Script([text], [moves[kind]])
    provider = ScriptedProvider(
        plan,
        device=on_device(plan, lengths=True) if kind == "device" else None,
        mode=PrefillMode.FULL if kind == "whole prompt" else PrefillMode.TAIL_SPLIT,
    )
    return {"drafter": load_scripted(provider)}


KINDS = ("plain", "ngram", "right", "wrong", "mixed", "device", "whole prompt")
ENDS = {
    PROMPT: (50, 36, 24),
    (6, 1): (0,),  # an end token of id 0, as the demo models have
    (38, 1): (0,),
    (20, 9): (0, 31),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ENDS)
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("ending", [False, True])
def test_responses_are_those_of_mlx_lm_with_every_drafter(
    kind: str, prompt: tuple[int, ...], max_tokens: int, ending: bool
) -> None:
    model, ends = tiny_model("qwen3"), ENDS[prompt] if ending else ()
    theirs = list(
        mlx_lm.stream_generate(model, tiny_tokenizer(*ends), list(prompt), max_tokens=max_tokens)
    )
    ours = tiny(prompt, max_tokens, ends=ends, **drafting(kind, text_of(prompt)))
    assert said(ours) == said(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if kind == "plain":
            assert mx.array_equal(mine.logprobs, other.logprobs)
            assert mine.from_draft is False
        assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-4).item()
        assert mine.peak_memory > 0
        assert mine.generation_tps > 0
        assert mine.prompt_tps > 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_limit_runs_to_the_end_token(kind: str) -> None:
    text = text_of(PROMPT)
    place = next(i for i in range(6, 40) if text.output[i] not in text.output[:i])
    end = text.output[place]
    ours = tiny(PROMPT, -1, ends=(end,), **drafting(kind, text))
    assert tokens_of(ours) == list(text.output[: place + 1])
    assert ours[-1].finish_reason == "stop"
    theirs = list(
        mlx_lm.stream_generate(
            tiny_model("qwen3"), tiny_tokenizer(end), list(PROMPT), max_tokens=-1
        )
    )
    assert said(ours) == said(theirs)


STEP = 8


@pytest.mark.parametrize("kind", ["plain", "ngram", "right", "whole prompt"])
@pytest.mark.parametrize(
    "length", [1, 2, STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 1, 3 * STEP + 1]
)
def test_prompts_are_read_in_the_same_chunks_as_by_mlx_lm(length: int, kind: str) -> None:
    model = tiny_model("qwen3")
    prompt = tuple((7 * place + 3) % VOCABULARY for place in range(length))
    heard: dict[str, list[tuple[int, int]]] = {"theirs": [], "ours": []}
    theirs = list(
        mlx_lm.stream_generate(
            model,
            tiny_tokenizer(),
            list(prompt),
            max_tokens=8,
            prefill_step_size=STEP,
            prompt_progress_callback=lambda *done: heard["theirs"].append(done),
        )
    )
    text = Text(prompt, tuple(tokens_of(theirs)))
    ours = tiny(
        prompt,
        8,
        prefill_step_size=STEP,
        prompt_progress_callback=lambda *done: heard["ours"].append(done),
        **drafting(kind, text),
    )
    assert said(ours) == said(theirs)
    assert mx.array_equal(ours[0].logprobs, theirs[0].logprobs)
    assert heard["ours"] == heard["theirs"]
    assert heard["ours"][-1] == (length, length)


def test_the_last_progress_call_comes_before_the_first_response() -> None:
    heard: list[tuple[int, int]] = []
    responses = stream_generate(
        tiny_model("qwen3"),
        tiny_tokenizer(),
        list(PROMPT),
        prompt_progress_callback=lambda *done: heard.append(done),
    )
    assert heard == []
    next(responses)
    assert heard == [(0, 6), (5, 6), (6, 6)]
    next(responses)
    assert len(heard) == 3
    responses.close()


@pytest.mark.parametrize("form", ["list", "tuple", "array", "text", "uint32", "numpy"])
def test_a_prompt_may_be_text_or_ids(form: str) -> None:
    forms: dict[str, Any] = {
        "list": list(PROMPT),
        "tuple": tuple(PROMPT),
        "array": mx.array(PROMPT),
        "uint32": mx.array(PROMPT, mx.uint32),
        "text": " ".join(f"w{token}" for token in PROMPT),
        "numpy": np.array(PROMPT),
    }
    model = tiny_model("qwen3")
    ours = list(stream_generate(model, tiny_tokenizer(), forms[form], 6))
    assert tokens_of(ours) == list(solo(PROMPT)[:6])
    assert {response.prompt_tokens for response in ours} == {len(PROMPT)}


@pytest.mark.parametrize("prompt", ["w5 w9", "w60 w5 w9"])
def test_the_beginning_token_is_added_once_as_by_mlx_lm(prompt: str) -> None:
    tokenizer, model = tiny_tokenizer(begin="w60"), tiny_model("qwen3")
    theirs = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=5))
    ours = list(stream_generate(model, tokenizer, prompt, 5))
    assert said(ours) == said(theirs)
    assert tokens_of(ours) == list(solo((60, 5, 9))[:5])


def test_a_plain_tokenizer_is_wrapped_as_by_mlx_lm() -> None:
    bare = words()
    model = tiny_model("qwen3")
    ours = list(stream_generate(model, bare, list(PROMPT), 5))
    theirs = list(mlx_lm.stream_generate(model, bare, list(PROMPT), max_tokens=5))
    assert said(ours) == said(theirs)


@pytest.mark.parametrize("kind", ["plain", "ngram"])
def test_generate_gives_the_whole_text_and_prints_as_mlx_lm_does(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    options: dict[str, Any] = {} if kind == "plain" else {"drafter": "ngram"}
    theirs = mlx_lm.generate(model, tokenizer, list(PROMPT), verbose=True, max_tokens=9)
    printed = capsys.readouterr().out
    assert generate(model, tokenizer, list(PROMPT), max_tokens=9, **options) == theirs
    assert capsys.readouterr().out == ""
    assert generate(model, tokenizer, list(PROMPT), True, max_tokens=9, **options) == theirs
    ours = capsys.readouterr().out

    def lines(text: str) -> list[str]:
        return [line.partition(" tokens")[0] for line in text.splitlines()]

    assert lines(ours)[:4] == lines(printed)[:4]
    assert len(lines(ours)) == len(lines(printed))


# Sampling.


def test_requests_without_a_seed_differ_from_each_other() -> None:
    texts = {tuple(tokens_of(tiny(temp=1.0))) for _ in range(5)}
    assert len(texts) == 5


@pytest.mark.parametrize("width", range(1, 9))
def test_a_seeded_text_is_the_same_with_the_ngram_drafter_alone_and_in_a_ragged_batch(
    width: int,
) -> None:
    text = solo(PROMPT, 1.0, 7)[:16]
    alone = tiny(max_tokens=16, temp=1.0, seed=7)
    drafted = tiny(max_tokens=16, temp=1.0, seed=7, drafter="ngram", num_draft_tokens=width)
    assert tokens_of(alone) == tokens_of(drafted) == list(text)
    group = VerifyGroup(target(), NgramProvider())
    others = ((1, 2, 3), (7,), tuple(range(20, 31)))
    rows = group.admit(
        [
            request(prompt, temp=temp, seed=seed, max_tokens=16, num_draft_tokens=width)
            for prompt, temp, seed in (
                (others[0], 0.0, None),
                (others[1], 1.0, 3),
                (PROMPT, 1.0, 7),
                (others[2], 0.6, 7),
            )
        ]
    )
    drain(group)
    assert rows[2].emitted == text


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.05, "top_k": 5}],
)
def test_filters_are_passed_on_and_hold_with_a_drafter(options: dict[str, Any]) -> None:
    plain = tiny(temp=2.0, seed=3, max_tokens=30)
    filtered = tiny(temp=2.0, seed=3, max_tokens=30, **options)
    assert tokens_of(filtered) != tokens_of(plain)
    drafted = tiny(temp=2.0, seed=3, max_tokens=30, drafter="ngram", **options)
    assert tokens_of(drafted) == tokens_of(filtered)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_callable_is_used_as_by_mlx_lm(kind: str) -> None:
    def second(logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, VOCABULARY)
        return mx.argsort(logprobs, axis=-1)[:, -2]

    model = tiny_model("qwen3")
    theirs = list(
        mlx_lm.stream_generate(model, tiny_tokenizer(), list(PROMPT), max_tokens=12, sampler=second)
    )
    text = Text(PROMPT, tuple(tokens_of(theirs)))
    ours = tiny(max_tokens=12, sampler=second, **drafting(kind, text))
    assert said(ours) == said(theirs)
    assert tokens_of(ours) != list(solo(PROMPT)[:12])
    if kind == "right":
        assert last_stats(ours).accepted > 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_error_is_raised_to_the_caller_after_the_tokens_before(kind: str) -> None:
    draws = itertools.count()

    def sampler(logprobs: mx.array) -> mx.array:
        if next(draws) == 3:
            raise Fault("sampler")
        return mx.argmax(logprobs, axis=-1)

    received = []
    responses = stream_generate(
        tiny_model("qwen3"),
        tiny_tokenizer(),
        list(PROMPT),
        sampler=sampler,
        **drafting(kind, text_of(PROMPT)),
    )
    for _ in range(3):
        received.append(next(responses).token)
    with pytest.raises(Fault, match="sampler"):
        next(responses)
    assert received == list(solo(PROMPT)[:3])


# What ran, and why not.


def test_without_a_drafter_the_statistics_say_that_none_was_asked_for() -> None:
    stats = last_stats(tiny())
    assert (stats.drafter, stats.reason) == (None, "no drafter was asked for")
    assert (stats.num_draft_tokens, stats.rounds, stats.emitted) == (0, 12, 12)


def test_no_draft_tokens_run_plain_and_load_no_drafter() -> None:
    stats = last_stats(tiny(drafter="ngram", num_draft_tokens=0))
    assert (stats.drafter, stats.reason) == (None, "num_draft_tokens is 0")
    provider = ScriptedProvider()
    stats = last_stats(tiny(drafter=load_scripted(provider), num_draft_tokens=0))
    assert stats.reason == "num_draft_tokens is 0"
    assert provider.calls.total() == 0


def test_a_target_that_cannot_speculate_says_so_in_the_statistics() -> None:
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    ours = list(stream_generate(model, tiny_tokenizer(), list(PROMPT), 6, drafter="ngram"))
    assert tokens_of(ours) == list(solo(PROMPT)[:6])
    stats = last_stats(ours)
    assert (stats.drafter, stats.num_draft_tokens, stats.drafted) == (None, 0, 0)
    assert stats.reason == "no row form for cache type OwnCache"


@pytest.mark.parametrize("cells", [[RIGHT] * 4, [RIGHT, RIGHT, WRONG], [WRONG]])
@pytest.mark.parametrize("architecture", [HYBRID, WINDOWED])
def test_recurrent_and_windowed_targets_speculate(architecture: str, cells: list[str]) -> None:
    text = Text(PROMPT, solo(PROMPT, architecture=architecture))
    provider = ScriptedProvider(Script.always([text], cells))
    ours = list(
        stream_generate(
            tiny_model(architecture),
            tiny_tokenizer(),
            list(PROMPT),
            40,
            drafter=load_scripted(provider, 4, architecture),
        )
    )
    assert tokens_of(ours) == list(text.output[:40])
    stats = last_stats(ours)
    right = cells.count(RIGHT)
    assert (stats.drafter, stats.reason, stats.num_draft_tokens) == ("scripted", None, 4)
    assert stats.drafted > 0
    assert (stats.accepted > 0) is (right > 0)
    assert stats.target_forwards <= -(-40 // (1 + right)) + 1
    assert provider.complaints == []


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_drafter_is_called_and_named(kind: str) -> None:
    options = drafting(kind, text_of(PROMPT))
    stats = last_stats(tiny(**options))
    assert stats.drafter == ("ngram" if kind == "ngram" else "scripted")
    assert stats.reason is None
    assert stats.num_draft_tokens == 4
    assert stats.drafted > 0
    if kind != "ngram":
        provider: ScriptedProvider = options["drafter"].provider
        assert provider.calls["draft"] + provider.calls["draft_device"] > 0
        assert provider.complaints == []


def test_a_loaded_drafter_serves_many_requests_and_stays_open() -> None:
    provider = ScriptedProvider(Script.always([text_of(PROMPT)], [RIGHT] * 4))
    loaded = load_scripted(provider)
    first, second = last_stats(tiny(drafter=loaded)), last_stats(tiny(drafter=loaded))
    assert first == second
    assert provider.closed == 0
    assert provider.left_open == []
    assert len([group for group in provider.groups if group.decodes]) == 2


class Closing(NgramProvider):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> type[Closing]:
    Closing.closed = 0
    monkeypatch.setattr("specdec_ngram.provider.NgramProvider", Closing)
    return Closing


@pytest.mark.parametrize("way", ["to the end", "closed", "thrown"])
def test_a_drafter_that_was_loaded_for_one_call_is_closed_with_it(
    way: str, closing: type[Closing]
) -> None:
    responses = stream_generate(
        tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), 8, drafter="ngram"
    )
    next(responses)
    assert closing.closed == 0
    if way == "to the end":
        list(responses)
    elif way == "closed":
        responses.close()
    else:
        with pytest.raises(Fault):
            responses.throw(Fault("away"))
    assert closing.closed == 1


def test_a_drafter_that_was_loaded_for_a_call_that_is_refused_is_closed(
    closing: type[Closing],
) -> None:
    with pytest.raises(OptionError, match="the prompt has 64"):
        tiny([1, VOCABULARY], drafter="ngram")
    assert closing.closed == 1


def test_a_request_may_ask_for_another_number_of_drafts_up_to_the_drafters_limit() -> None:
    text = text_of(PROMPT)
    for asked, limit, width in (None, None, 3), (2, None, 2), (6, None, 6), (6, 5, 5):
        provider = ScriptedProvider(Script.always([text], [RIGHT] * 8))
        loaded = load_scripted(provider, 3)
        loaded.max_draft_tokens = limit
        stats = last_stats(tiny(max_tokens=20, drafter=loaded, num_draft_tokens=asked))
        assert stats.num_draft_tokens == width
        assert provider.rounds[0].depths == [width]


def test_a_model_that_fails_is_reported_and_its_drafter_closed(closing: type[Closing]) -> None:
    model: Any = build_model("qwen3")
    responses = stream_generate(model, tiny_tokenizer(), list(PROMPT), 8, drafter="ngram")
    next(responses)
    model.lm_head = None
    with pytest.raises(GroupFailedError, match="the target failed"):
        list(responses)
    assert closing.closed == 1


# What is refused, at the call.


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": mx.array([], mx.int32)}, "prompt is empty"),
        ({"prompt": [1, VOCABULARY]}, "the prompt has 64"),
        ({"prompt": [-1]}, "the prompt has -1"),
        ({"prompt": [1.5]}, "the prompt has 1.5"),
        ({"prompt": [[1, 2]]}, "the prompt has"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens"),
        ({"num_draft_tokens": "4"}, "num_draft_tokens"),
        ({"drafter": "ngram", "num_draft_tokens": -1}, "num_draft_tokens"),
        ({"temp": -0.1}, "temp"),
        ({"temp": float("nan")}, "temp"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"sampler": lambda _: None, "temp": 1.0}, "sampler"),
        ({"prefill_step_size": 0}, "prefill_step_size"),
        ({"prefill_step_size": 2.0}, "prefill_step_size"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_call_by_name(
    options: dict[str, Any], named: str
) -> None:
    given = {"prompt": list(PROMPT), **options}
    with pytest.raises(OptionError, match=named) as caught:
        stream_generate(tiny_model("qwen3"), tiny_tokenizer(), **given)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


UNSUPPORTED: dict[str, Any] = {
    "input_embeddings": mx.zeros((1, 64)),
}


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_an_option_of_mlx_lm_that_is_not_served_is_refused_by_name_and_its_default_passes(
    option: str,
) -> None:
    default: dict[str, Any] = {option: None}
    with pytest.raises(UnsupportedOptionError, match=f"^{option} is not supported") as caught:
        stream_generate(
            tiny_model("qwen3"),
            tiny_tokenizer(),
            list(PROMPT),
            **{option: UNSUPPORTED[option]},
        )
    assert caught.value.option == option
    assert tokens_of(tiny(max_tokens=4, **default)) == list(solo(PROMPT)[:4])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_group_size": 32},
        {"quantized_kv_start": 100},
        {"logits_processors": []},
        {"max_kv_size": None},
        {"max_kv_size": 64},  # longer than the text
        {"kv_bits": None},
    ],
)
def test_options_without_effect_are_taken(options: dict[str, Any]) -> None:
    assert tokens_of(tiny(max_tokens=4, **options)) == list(solo(PROMPT)[:4])


def test_every_option_of_mlx_lm_is_served_or_refused_by_name() -> None:
    import inspect

    known = set(inspect.signature(generate_step).parameters) - {"prompt", "model", "stream"}
    ours = set(inspect.signature(stream_generate).parameters)
    assert known - ours - set(UNSUPPORTED) == set()
    assert {"max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"} <= known & ours


def test_an_unknown_keyword_is_a_type_error_as_for_any_function() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        stream_generate(tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), temperature=1.0)


def test_a_drafter_of_another_model_is_refused() -> None:
    loaded = load_scripted(ScriptedProvider())
    with pytest.raises(OptionError, match="was loaded for another model"):
        stream_generate(tiny_model("qwen3", 1), tiny_tokenizer(), list(PROMPT), drafter=loaded)


def test_a_draft_model_drafts_as_in_mlx_lm_and_its_tokens_are_those_without_it() -> None:
    for draft_model, width in ((tiny_model("qwen3"), 3), (tiny_model("qwen3", 1), 2)):
        options: dict[str, Any] = {"draft_model": draft_model, "num_draft_tokens": width}
        responses = list(tiny(max_tokens=12, **options))
        assert tuple(each.token for each in responses) == solo(PROMPT)[:12]
        stats = responses[-1].stats
        assert stats is not None
        assert (stats.drafter, stats.num_draft_tokens) == ("two-model", width)
        assert stats.drafted > 0
        own = draft_model is tiny_model("qwen3")
        assert stats.acceptance_rate == 1.0 if own else stats.acceptance_rate < 1.0
    text = generate(
        tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), max_tokens=12, draft_model=draft_model
    )
    assert text == "".join(each.text for each in responses)
    stats = list(tiny(max_tokens=4, draft_model=draft_model, num_draft_tokens=0))[-1].stats
    assert stats is not None
    assert stats.reason == "num_draft_tokens is 0"


def test_a_draft_model_beside_a_drafter_or_none_at_all_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OptionError, match="draft_model and drafter are both given"):
        tiny(draft_model=tiny_model("qwen3", 1), drafter="ngram")
    with pytest.raises(SpecdecError) as caught:
        tiny(draft_model=object())
    assert "\n" not in str(caught.value)
    nothing = Registry(PluginReport())
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: nothing)
    said = r"^draft_model needs specdec-two-model \(pip install specdec-two-model\)$"
    with pytest.raises(UnknownKindError, match=said):
        tiny(draft_model=tiny_model("qwen3", 1))


@pytest.mark.parametrize(
    ("drafter", "error"),
    [
        ("no-such-kind", UnknownKindError),
        ("./no/such/folder", ArtifactError),
    ],
)
def test_a_drafter_that_cannot_be_loaded_is_refused_at_the_call(
    drafter: str, error: type[SpecdecError]
) -> None:
    with pytest.raises(error):
        stream_generate(tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), drafter=drafter)


@pytest.mark.parametrize(
    "caches",
    [[KVCache()], [KVCache() for _ in range(3)], make_prompt_cache(tiny_model(HYBRID))[:1]],
)
def test_a_prompt_cache_of_another_model_is_refused(caches: list[Any]) -> None:
    with pytest.raises(OptionError, match="prompt_cache"):
        tiny(prompt_cache=caches)


# Publishing.


@pytest.mark.parametrize("kind", ["ngram", "scripted"])
@pytest.mark.parametrize("ending", ["length", "stop", "cancelled"])
def test_a_published_row_can_be_gone_on_from(kind: str, ending: str) -> None:
    text = text_of(PROMPT)
    provider: Any = (
        NgramProvider()
        if kind == "ngram"
        else ScriptedProvider(Script.always([text], [RIGHT, RIGHT, WRONG]))
    )
    found: list[tuple[Row, list[Any], Any]] = []
    heard = itertools.count(1)
    group = VerifyGroup(target(), provider)
    other, row = group.admit(
        [
            request((1, 2, 3), max_tokens=30, num_draft_tokens=3),
            request(
                PROMPT,
                max_tokens=9,
                num_draft_tokens=3,
                end_tokens={text.output[7]} if ending == "stop" else (),
                consumer=lambda _: ending != "cancelled" or next(heard) < 6,
                publish=lambda *given: found.append(given),
            ),
        ]
    )
    drain(group)
    [(published, caches, checkpoint)] = found
    assert published is row
    assert row.finish == ending
    written = [*row.tokens] + ([] if row.end_token is None else [row.end_token])
    covered = written[: row.processed]
    assert {cache.offset for cache in caches} == {row.processed} == {len(covered)}
    assert row.processed in (len(written) - 1, len(written))
    assert checkpoint.processed_tokens == row.processed
    assert checkpoint.namespace == provider.grouped.checkpoint_namespace

    # The target goes on from the caches as from a cold start.
    tail = [*written[row.processed :], 5]
    steps = generate_step(mx.array(tail), tiny_model("qwen3"), max_tokens=8, prompt_cache=caches)
    assert [token for token, _ in steps] == list(solo((*covered, *tail))[:8])
    # The drafter goes on from the checkpoint as one that has read the same tokens itself.
    reader = provider.grouped.open_prefill(target=target(), checkpoints=[None])
    reader.prefill(mx.array([covered]), None)
    drafts = []
    for start in (checkpoint, reader.capture(0)):
        rows = provider.grouped.open(
            target=target(), sampling=group._live.samplers, checkpoints=[start]
        )
        drafts.append(rows.draft([text.output[row.processed - len(PROMPT)]], [3], [row.steps]))
        rows.commit([0], None)
        drafts.append(rows.capture(0).processed_tokens)
    assert drafts[:2] == drafts[2:]
    assert drafts[1] == row.processed + 1
    # It shares nothing with the group, which has gone on meanwhile.
    assert other.emitted == solo((1, 2, 3))[:30]


def test_a_published_plain_row_has_no_draft_checkpoint() -> None:
    found: list[tuple[Any, ...]] = []
    group = VerifyGroup(target())
    group.admit([request(PROMPT, max_tokens=5, publish=lambda *given: found.append(given))])
    drain(group)
    [(row, caches, checkpoint)] = found
    assert checkpoint is None
    assert {cache.offset for cache in caches} == {row.processed}
