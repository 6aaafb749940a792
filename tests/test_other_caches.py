"""Caches of the caller's that have no row form: they decode plainly, say why, and stay exact."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from scripted import drain, request, solo, target, tiny_tokenizer
from tiny_models import WINDOWED, build_model, tiny_model

from specdec import VerifyGroup, stream_generate
from specdec.errors import OptionError
from specdec.verify import flight, handover
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = (1, 2, 3, 4) * 6
NEXT = (7, 8)


def rotating(model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model, max_kv_size=512)
    return caches


def quantized(model: Any) -> list[Any]:
    """A cache of a first turn, quantized as mlx-lm does."""
    caches = make_prompt_cache(model)
    model(mx.array([NEXT]), cache=caches)
    return [cache.to_quantized(group_size=32, bits=8) for cache in caches]


def tokens(responses: Any) -> list[int]:
    return [response.token for response in responses]


@pytest.mark.parametrize(
    ("make", "named"), [(rotating, "RotatingKVCache"), (quantized, "QuantizedKVCache")]
)
def test_a_caller_s_cache_without_a_row_form_decodes_plainly_and_says_why(
    make: Callable[[Any], list[Any]], named: str
) -> None:
    model, tokenizer = build_model("qwen3", head_dim=32), tiny_tokenizer()
    theirs = tokens(
        mlx_lm.stream_generate(model, tokenizer, list(PROMPT), 12, prompt_cache=make(model))
    )
    cache = make(model)
    ours = list(
        stream_generate(model, tokenizer, list(PROMPT), 12, prompt_cache=cache, drafter="ngram")
    )
    assert tokens(ours) == theirs
    stats = ours[-1].stats
    assert stats is not None
    assert stats.drafter is None
    assert stats.reason is not None
    assert named in stats.reason


def test_a_cache_of_another_kind_does_not_join_and_the_live_rows_live_on() -> None:
    group = VerifyGroup(target(), NgramProvider(), drafter="ngram")
    [live] = group.admit([request(PROMPT, max_tokens=12, num_draft_tokens=3)])
    with group.round() as done:
        done.deliver_all()
    other = request(PROMPT, max_tokens=4, cache=rotating(tiny_model("qwen3")))
    with pytest.raises(OptionError, match="RotatingKVCache") as raised:
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


@pytest.mark.parametrize("architecture", ["qwen3", WINDOWED])
@pytest.mark.parametrize("read", [1, 2, 3, 5])
def test_an_interrupt_while_the_host_waits_leaves_no_token_twice(
    architecture: str, read: int
) -> None:
    model = tiny_model(architecture)
    cache = make_prompt_cache(model)
    reads, real = 0, flight.host_read

    def interrupted(array: mx.array) -> Any:
        nonlocal reads
        reads += 1
        found = real(array)
        if reads == read:
            raise KeyboardInterrupt
        return found

    responses = stream_generate(model, tiny_tokenizer(), list(PROMPT), 12, prompt_cache=cache)
    with mock.patch.object(flight, "host_read", interrupted):
        emitted = collected(responses)
    assert goes_on(model, cache, [*PROMPT, *emitted])


@pytest.mark.parametrize("architecture", ["qwen3", WINDOWED])
def test_an_interrupt_in_the_final_read_leaves_no_token_twice(architecture: str) -> None:
    model = tiny_model(architecture)
    cache = make_prompt_cache(model)
    calls = 0

    def interrupted(*arrays: Any) -> None:
        nonlocal calls
        calls += 1
        mx.eval(*arrays)
        if calls == 1:
            raise KeyboardInterrupt

    drafts = "ngram" if architecture == "qwen3" else None
    responses = stream_generate(
        model, tiny_tokenizer(), list(PROMPT), 6, prompt_cache=cache, drafter=drafts
    )
    only = SimpleNamespace(array=mx.array, int32=mx.int32, eval=interrupted)
    with mock.patch.object(handover, "mx", only):
        emitted = collected(responses)
    assert calls >= 1
    # The last token was handed to nobody, but it was emitted: the cache covers it.
    text = [*PROMPT, *solo(PROMPT, architecture=architecture)[:6]]
    assert emitted == text[len(PROMPT) : -1]
    assert goes_on(model, cache, text)
