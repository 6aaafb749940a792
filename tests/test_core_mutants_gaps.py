"""What mutants of the core got away with before these tests were written."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from attrs import evolve
from llguidance import LLParserLimits
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from request_oracle import json_tokenizer
from scripted import (
    RIGHT,
    Fault,
    Script,
    ScriptedProvider,
    drain,
    request,
    solo,
    target,
    text_of,
    tiny_tokenizer,
)
from tiny_models import HYBRID, VOCABULARY, WINDOWED, tiny_model

from specdec import VerifyGroup, stream_generate
from specdec.grammar import Grammar, matcher
from specdec.targets import mlx_lm
from specdec.targets.fit import fit_of
from specdec.verify import handover
from specdec.verify.text import RowText

if TYPE_CHECKING:
    from specdec import Emission, Row

PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17))


@pytest.mark.parametrize("leaver", range(3))
def test_after_a_row_has_left_the_others_report_their_own_log_probabilities(leaver: int) -> None:
    heard: list[list[Emission]] = [[], [], []]
    group = VerifyGroup(target())
    group.admit(
        [
            request(prompt, max_tokens=3 if row == leaver else 8, consumer=heard[row].append)
            for row, prompt in enumerate(PROMPTS)
        ]
    )
    drain(group)
    for prompt, emissions in zip(PROMPTS, heard, strict=True):
        whole = [*prompt, *(emission.token for emission in emissions)]
        logits = tiny_model("qwen3")(mx.array([whole]))[0, len(prompt) - 1 : -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for emission, row in zip(emissions, logprobs, strict=True):
            assert mx.allclose(emission.logprobs, row, atol=1e-4).item()


@pytest.mark.parametrize("leaves", range(1, 4))
def test_a_sampler_that_raises_while_another_row_leaves_ends_its_own_row(leaves: int) -> None:
    boom, calls = Fault("sampler"), itertools.count()

    def sampler(logprobs: mx.array) -> mx.array:
        if next(calls) == leaves:  # in the window that is begun before the other row has left
            raise boom
        return mx.argmax(logprobs, axis=-1)

    group = VerifyGroup(target())
    first, gone, last = group.admit(
        [
            request(PROMPTS[0], max_tokens=leaves),
            request(PROMPTS[1], max_tokens=9, sampler=sampler),
            request(PROMPTS[2], max_tokens=9),
        ]
    )
    drain(group)
    assert (gone.finish, gone.error) == ("error", boom)
    assert gone.emitted == solo(PROMPTS[1])[:leaves]
    assert first.emitted == solo(PROMPTS[0])[:leaves]
    assert (last.finish, last.emitted) == ("length", solo(PROMPTS[2])[:9])


@pytest.mark.parametrize("taken", range(4))
def test_a_row_whose_end_token_is_not_taken_ends_with_what_it_was_given(taken: int) -> None:
    text = text_of(PROMPTS[1])
    group = VerifyGroup(target(), ScriptedProvider(Script.always([text], [RIGHT] * 4)))
    [row] = group.admit(
        [request(text.prompt, max_tokens=9, num_draft_tokens=4, end_tokens={text.output[3]})]
    )
    assert text.output[3] not in text.output[:3]
    with group.round() as done:
        got = [emission.token for emission in itertools.islice(done.deliver(0), taken)]
    assert (row.finish, row.end_token) == ("cancelled", None)
    assert tuple(got) == row.emitted == text.output[:taken]
    assert group.rows == []


def test_a_publisher_that_raises_does_not_hide_the_rows_own_error() -> None:
    boom = Fault("sampler")

    def sampler(_logprobs: mx.array) -> mx.array:
        raise boom

    def publish(_row: Row, _caches: list[Any], _checkpoint: Any) -> None:
        raise Fault("publish")

    group = VerifyGroup(target())
    [row] = group.admit([request(PROMPTS[1], sampler=sampler, publish=publish)])
    drain(group)
    assert (row.finish, row.error) == ("error", boom)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_request_without_a_cache_runs_the_model_once_a_token(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = VerifyGroup(target())
    shapes = []
    forward = group.target.forward

    def counted(tokens: mx.array, *rest: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return forward(tokens, *rest)

    monkeypatch.setattr(group.target, "forward", counted)
    group.admit([request(PROMPTS[2], max_tokens=max_tokens)])
    drain(group)
    assert shapes == [(1, len(PROMPTS[2]) - 1)] + [(1, 1)] * max_tokens


@pytest.mark.parametrize(
    ("name", "native", "reads"),
    [
        ("qwen3", False, 2),
        (HYBRID, False, 2),
        (WINDOWED, False, 2),
        (HYBRID, True, 2),
        (WINDOWED, True, 1),  # a ring cannot drop what it has read: it counts as read
    ],
)
def test_an_interrupt_in_the_final_read_leaves_no_token_twice_in_the_state(
    name: str, native: bool, reads: int
) -> None:
    model = tiny_model(name)
    cache = make_prompt_cache(model)
    calls = itertools.count()

    def interrupted(*arrays: Any) -> None:
        mx.eval(*arrays)
        if next(calls) == 0:
            raise KeyboardInterrupt

    reason = "its rows are native in this test" if native else None
    found = fit_of(model, VOCABULARY)
    with mock.patch.object(mlx_lm, "fit_of", return_value=evolve(found, reason=reason)):
        responses = stream_generate(
            model, tiny_tokenizer(), list(PROMPTS[2]), 6, prompt_cache=cache
        )
        text = [*PROMPTS[2], next(responses).token, next(responses).token]
    only = SimpleNamespace(array=mx.array, int32=mx.int32, eval=interrupted)
    with mock.patch.object(handover, "mx", only), pytest.raises(KeyboardInterrupt):
        responses.close()
    assert next(calls) == reads
    offsets = {each.offset for each in cache if isinstance(getattr(each, "offset", None), int)}
    assert offsets == {len(text)}
    warm = generate_step(mx.array([7, 8]), model, max_tokens=5, prompt_cache=cache)
    cold = generate_step(mx.array([*text, 7, 8]), model, max_tokens=5)
    assert [token for token, _ in warm] == [token for token, _ in cold]


def grammar_row(grammar: Grammar) -> Any:
    return grammar.bind(json_tokenizer(63), VOCABULARY, {63})()


def ids(text: str) -> list[int]:
    return [json_tokenizer(63).convert_tokens_to_ids(letter) for letter in text]


def allowed(row: Any) -> set[int]:
    mask, count = row.masks([])
    assert count == 0
    return {token for token in range(VOCABULARY) if mask[0, token].item()}


def test_a_draft_moves_no_half_of_a_marker() -> None:
    a, b, c = ids("abc")
    row = grammar_row(Grammar.regex("[0-9]ab", after=[a, b]))
    assert row.masks([c, a])[0] is None
    row.advance(b)
    assert row.masks([])[0] is None
    assert row.propose(5) == ()
    row.advance(a)
    assert row.masks([c, c])[0] is None
    row.advance(b)
    assert allowed(row) == set(ids("0123456789"))


def test_what_a_grammar_forces_is_not_forced_before_its_marker() -> None:
    a, b, c = ids("abc")
    row = grammar_row(Grammar.regex("1cc1", after=[a, b]))
    for token in (c, a, b):
        assert row.propose(5) == ()
        row.advance(token)
    assert list(row.propose(1)) == ids("1")


def test_a_matcher_that_drafts_have_broken_goes_on_behind_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = LLParserLimits(verbose_errors=False, max_items_in_row=20)
    monkeypatch.setattr(matcher, "limits", lambda: few)
    lark = 'start: "y" /[a-z]+/ | "z" heap\nheap: "a" | heap heap | "a" heap "a"?\n'
    calm, broken = grammar_row(Grammar.lark(lark)), grammar_row(Grammar.lark(lark))
    before = allowed(calm)
    for row in (calm, broken):
        row.advance(ids("z")[0])
    assert broken.masks(ids("a") * 40)[1] == 0
    assert allowed(broken) == allowed(calm) != before


def test_of_two_stop_strings_in_one_token_the_one_that_begins_first_cuts() -> None:
    tokenizer = tiny_tokenizer()
    text = RowText(lambda: tokenizer.detokenizer, ["2", "12"], decode=tokenizer.decode)
    both = RowText(lambda: tokenizer.detokenizer, ["1", "w12"], decode=tokenizer.decode)
    for each, shown in ((text, "w"), (both, "")):
        assert each.push(12, may_stop=True)
        assert each.text(1) == shown
