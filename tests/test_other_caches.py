"""Caches of the caller's that the model would not make: they speculate, or decode plainly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import mlx_lm
import pytest
from kept_state import contents, difference
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    Text,
    drain,
    request,
    solo,
    target,
    tiny_tokenizer,
)
from tiny_models import HYBRID, WINDOWED, OwnCache, build_model, tiny_model

from specdec import LoadedDrafter, VerifyGroup, load_drafter, stream_generate
from specdec.errors import OptionError
from specdec.plugins import LoadedDraft
from specdec.targets import MlxLmTarget
from specdec.verify import flight, handover
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = (1, 2, 3, 4) * 6
NEXT = (7, 8)
MODEL = build_model("qwen3", head_dim=32)
COUNT = 24


def own(model: Any) -> list[Any]:
    return [OwnCache() for _ in model.layers]


def rotating(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model, max_kv_size=512)
    return caches


def wrapping(model: Any) -> list[Any]:
    """A window that is full before the prompt's end, and keeps its first four positions."""
    caches: list[Any] = make_prompt_cache(model, max_kv_size=16)
    return caches


def wrapped_before(model: Any) -> list[Any]:
    """A window that mlx-lm has filled, token by token, and turned."""
    caches = wrapping(model)
    for place in range(21):
        model(mx.array([[5 + place]]), cache=caches)
    return caches


def trimmed(model: Any) -> list[Any]:
    """A window that mlx-lm has taken some positions out of."""
    caches = rotating(model)
    model(mx.array([[9, 8, 7, 6, 5]]), cache=caches)
    assert [cache.trim(2) for cache in caches] == [2, 2]
    return caches


def quantized(model: Any) -> list[Any]:
    """A cache of a first turn, quantized as mlx-lm does."""
    caches = make_prompt_cache(model)
    model(mx.array([NEXT]), cache=caches)
    return [cache.to_quantized(group_size=32, bits=8) for cache in caches]


def half_quantized(model: Any) -> list[Any]:
    """Each layer in its own way."""
    first, second = quantized(model), make_prompt_cache(model)
    model(mx.array([NEXT]), cache=second)
    return [first[0], second[1]]


CACHES = (rotating, wrapping, wrapped_before, trimmed, quantized, half_quantized)


def tokens(responses: Any) -> list[int]:
    return [response.token for response in responses]


def drafting(kind: str, text: Text) -> LoadedDrafter:
    if kind == "ngram":
        return load_drafter("ngram", MODEL)
    provider = ScriptedProvider(
        Script([text], [[[RIGHT, RIGHT, WRONG], [WRONG], [RIGHT] * 4, [RIGHT]]])
    )
    loaded = LoadedDraft(provider=provider, num_draft_tokens=4)
    return LoadedDrafter("scripted", loaded, MlxLmTarget(MODEL))


@pytest.mark.parametrize("kind", ["ngram", "scripted"])
@pytest.mark.parametrize("make", CACHES)
def test_a_caller_s_cache_of_another_kind_speculates_and_is_left_as_mlx_lm_leaves_it(
    make: Callable[[Any], list[Any]], kind: str
) -> None:
    tokenizer, theirs, ours = tiny_tokenizer(), make(MODEL), make(MODEL)
    told = tokens(
        mlx_lm.stream_generate(MODEL, tokenizer, list(PROMPT), COUNT, prompt_cache=theirs)
    )
    drafter = drafting(kind, Text(PROMPT, tuple(told)))
    responses = list(
        stream_generate(MODEL, tokenizer, list(PROMPT), COUNT, prompt_cache=ours, drafter=drafter)
    )
    assert tokens(responses) == told
    stats = responses[-1].stats
    assert stats is not None
    assert (stats.drafter, stats.reason) == (kind, None)
    assert stats.drafted > 0
    if kind == "scripted":
        assert 0 < stats.accepted < stats.drafted
        assert stats.target_forwards < COUNT
    assert [type(cache) for cache in ours] == [type(cache) for cache in theirs]
    assert [cache.offset for cache in ours] == [cache.offset for cache in theirs]
    assert apart(ours, theirs) < 1e-3
    # A position of another token's would be seen by this comparison.
    assert apart(ours, others(make, told)) > 0.1
    assert continued(ours) == continued(theirs)


def apart(caches: Sequence[Any], others: Sequence[Any]) -> float:
    found: Any = difference(contents(caches), contents(others)).item()
    return float(found)


def others(make: Callable[[Any], list[Any]], told: Sequence[int]) -> list[Any]:
    """Caches of the same text but for the third last token."""
    caches, wrong = make(MODEL), [*PROMPT, *told]
    wrong[-3] = (wrong[-3] + 1) % 64
    MODEL(mx.array([wrong]), cache=caches)
    return caches


def continued(caches: list[Any], count: int = 8) -> list[int]:
    steps = generate_step(mx.array(NEXT), MODEL, max_tokens=count, prompt_cache=caches)
    return [token for token, _ in steps]


@pytest.mark.parametrize("drafter", ["ngram", None])
def test_a_caller_s_cache_without_a_row_form_decodes_plainly_and_says_why(
    drafter: str | None,
) -> None:
    tokenizer, theirs, ours = tiny_tokenizer(), own(MODEL), own(MODEL)
    told = tokens(mlx_lm.stream_generate(MODEL, tokenizer, list(PROMPT), 12, prompt_cache=theirs))
    responses = list(
        stream_generate(MODEL, tokenizer, list(PROMPT), 12, prompt_cache=ours, drafter=drafter)
    )
    assert tokens(responses) == told
    stats = responses[-1].stats
    assert stats is not None
    assert (stats.drafter, stats.drafted) == (None, 0)
    assert stats.reason is not None
    if drafter is not None:
        assert stats.reason == "no row form for cache type OwnCache"
    assert {type(cache) for cache in ours} == {OwnCache}
    for mine, other in zip(contents(ours), contents(theirs), strict=True):
        assert mx.array_equal(mine, other)
    assert continued(ours) == continued(theirs)


def test_a_cache_without_a_row_form_does_not_join_and_the_live_rows_live_on() -> None:
    group = VerifyGroup(target(), NgramProvider(), drafter="ngram")
    [live] = group.admit([request(PROMPT, max_tokens=12, num_draft_tokens=3)])
    with group.round() as done:
        done.deliver_all()
    other = request(PROMPT, max_tokens=4, cache=own(tiny_model("qwen3")))
    with pytest.raises(OptionError, match="OwnCache") as raised:
        group.admit([other])
    assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(OptionError, match="a group of its own"):
        VerifyGroup(target()).admit([request(PROMPT, max_tokens=4), other])
    drain(group)
    assert live.emitted == solo(PROMPT)[:12]
    # Once the live rows have left, there is nothing that it could not join.
    [alone] = group.admit([other])
    drain(group)
    assert alone.emitted == solo(PROMPT)[:4]


def test_caches_of_every_kind_join_one_group_and_each_row_is_what_it_is_alone() -> None:
    bound, moves = MlxLmTarget(MODEL), [[RIGHT, RIGHT, WRONG], [WRONG], [RIGHT, WRONG, RIGHT]]
    prompts = [(*PROMPT[: 10 + 3 * place], 40 + place) for place in range(len(CACHES) + 1)]
    texts, left, caches = [], [], []
    for make, prompt in zip((*CACHES, make_prompt_cache), prompts, strict=True):
        theirs = make(MODEL)
        steps = generate_step(mx.array(prompt), MODEL, max_tokens=COUNT, prompt_cache=theirs)
        texts.append(Text(prompt, tuple(token for token, _ in steps)))
        left.append(theirs)
        caches.append(make(MODEL))
    # In one round some rows keep all, others a part or nothing.
    plan = Script(texts, [moves[place % 3 :] + moves[: place % 3] for place in range(len(texts))])
    provider = ScriptedProvider(plan)
    group = VerifyGroup(bound, provider)
    requests = [
        request(prompt, max_tokens=COUNT, num_draft_tokens=4, cache=held)
        for prompt, held in zip(prompts, caches, strict=True)
    ]
    rows = group.admit(requests[:3])
    for late in requests[3:]:
        with group.round() as done:
            done.deliver_all()
        rows += group.admit([late])
    drain(group)
    for row, text, theirs, ours in zip(rows, texts, left, caches, strict=True):
        assert row.emitted == text.output
        assert row.stats.reason is None
        assert 0 < row.stats.accepted < row.stats.drafted
        assert [type(cache) for cache in ours] == [type(cache) for cache in theirs]
        assert [cache.offset for cache in ours] == [cache.offset for cache in theirs]
        assert apart(ours, theirs) < 1e-3
        assert continued(ours) == continued(theirs)
    assert provider.complaints == []


def goes_on(model: Any, cache: Sequence[Any], text: Sequence[int]) -> bool:
    """Whether mlx-lm, continuing from the cache, writes what it writes after the whole text."""
    warm = generate_step(mx.array(NEXT), model, max_tokens=5, prompt_cache=cache)
    cold = generate_step(mx.array([*text, *NEXT]), model, max_tokens=5)
    return [int(t) for t, _ in warm] == [int(t) for t, _ in cold]


def collected(responses: Any) -> list[int]:
    """Tokens up to an interrupt, which there must be."""
    found: list[int] = []
    try:
        for response in responses:
            found.append(response.token)  # what came before the interrupt counts
    except KeyboardInterrupt:
        return found
    raise AssertionError("nothing interrupted it")


@pytest.mark.parametrize("kind", ["qwen3", WINDOWED, HYBRID, "own"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("read", [1, 2, 3, 5])
def test_an_interrupt_while_the_host_waits_leaves_no_token_twice(
    kind: str, drafter: str | None, read: int
) -> None:
    model = tiny_model("qwen3" if kind == "own" else kind)
    cache = own(model) if kind == "own" else make_prompt_cache(model)
    reads, real = 0, flight.host_read

    def interrupted(array: mx.array) -> Any:
        nonlocal reads
        reads += 1
        found = real(array)
        if reads == read:
            raise KeyboardInterrupt
        return found

    responses = stream_generate(
        model, tiny_tokenizer(), list(PROMPT), 12, prompt_cache=cache, drafter=drafter
    )
    with mock.patch.object(flight, "host_read", interrupted):
        emitted = collected(responses)
    assert goes_on(model, cache, [*PROMPT, *emitted])


@pytest.mark.parametrize("kind", ["qwen3", WINDOWED, HYBRID, "own"])
def test_an_interrupt_in_the_final_read_leaves_no_token_twice(kind: str) -> None:
    """Where the last token is read by itself: behind a drafter, or where nothing is begun early."""
    architecture = "qwen3" if kind == "own" else kind
    model = tiny_model(architecture)
    cache = own(model) if kind == "own" else make_prompt_cache(model)
    calls = 0

    def interrupted(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        mx.eval(*arrays)
        if calls == 1:
            raise KeyboardInterrupt

    responses = stream_generate(
        model,
        tiny_tokenizer(),
        list(PROMPT),
        6,
        prompt_cache=cache,
        drafter="ngram",
        num_draft_tokens=3,
    )
    only = SimpleNamespace(array=mx.array, int32=mx.int32, eval=interrupted)
    with mock.patch.object(handover, "mx", only):
        emitted = collected(responses)
    assert calls >= 1
    # The last token was handed to nobody, but it was emitted: the cache covers it.
    text = [*PROMPT, *solo(PROMPT, architecture=architecture)[:6]]
    assert emitted == text[len(PROMPT) : -1]
    assert goes_on(model, cache, text)
