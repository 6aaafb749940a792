"""Log-probabilities that the executor reports, token by token, against a plain loop's.

They are those after processors and grammar, before filters and temperature: what mlx-lm's own loop
has in its hands when it draws the token.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve
from request_oracle import (
    DRAFTERS,
    WIDTH,
    Asked,
    Told,
    alone,
    drafter,
    json_tokenizer,
    ran,
    told_of,
)
from scripted import load_scripted
from tiny_models import VOCABULARY, tiny_model

from specdec import stream_generate
from specdec.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

REL, ABS = 1e-3, 1e-6
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temp": 1.0, "seed": 31},
    "filtered": {"temp": 1.3, "seed": 31, "top_p": 0.9, "top_k": 9},
}
GRAMMAR = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 3, "maxLength": 5}},
        "required": ["name"],
        "additionalProperties": False,
    }
)


def bare(_tokens: mx.array, logits: mx.array) -> mx.array:
    """Changes nothing, and does not say that it holds no state: rows are drawn one by one."""
    return logits


def by_position() -> list[Any]:
    return [bare]


KINDS: dict[str, dict[str, Any]] = {
    "bare": {},
    "processors": {"penalties": {"repetition_penalty": 1.6, "logit_bias": {2: -9.0}}},
    "banned": {"penalties": {"logit_bias": dict.fromkeys(range(3, VOCABULARY), -math.inf)}},
    "grammar": {"grammar": GRAMMAR, "max_tokens": 30},
    "grammar and processors": {
        "grammar": GRAMMAR,
        "penalties": {"presence_penalty": 1.4},
        "max_tokens": 30,
    },
    "position by position": {"extra": by_position},
    "position by position, grammar": {"extra": by_position, "grammar": GRAMMAR},
}


def ending(asked: Asked) -> Asked:
    """The request with an end token that it reaches in the middle of a burst."""
    tokens = alone(asked).tokens
    last = next(
        (token for place, token in enumerate(tokens) if place > 6 and token not in tokens[:place]),
        None,
    )
    return asked if last is None else evolve(asked, end_tokens=frozenset([last]))


def check(reports: Sequence[Any], told: Told, count: int) -> None:
    """Each token's report is that of the plain loop."""
    emitted = told.tokens if told.end_token is None else (*told.tokens, told.end_token)
    assert len(reports) == len(emitted) == len(told.logprobs)
    for report, token, logprobs in zip(reports, emitted, told.logprobs, strict=True):
        scores: Any = logprobs.tolist()
        best = sorted(range(VOCABULARY), key=lambda i: (-scores[i], i))
        top = [token for token in best if scores[token] > -math.inf][:count]
        assert report.logprob == pytest.approx(scores[token], rel=REL, abs=ABS)
        assert report.rank == 1 + sum(score > scores[token] for score in scores)
        assert [each for each, _ in report.top] == top
        assert [value for _, value in report.top] == pytest.approx(
            [scores[each] for each in top], rel=REL, abs=ABS
        )
        if report.rank <= count:
            assert report.top[report.rank - 1] == (token, report.logprob)


@pytest.mark.parametrize("end", [False, True], ids=["budget", "end token"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("shape", KINDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_reports_are_those_of_the_plain_loop_in_a_batch(
    draw: str, shape: str, kind: str, end: bool
) -> None:
    wanted = Asked((5, 9, 40), **{"max_tokens": 14, **DRAWS[draw], **KINDS[shape]})
    if end and wanted.grammar is None:
        wanted = ending(wanted)
    asked = [
        Asked((7,), max_tokens=11, temp=0.9, seed=3),
        wanted,
        Asked((20, 21), max_tokens=17, **KINDS["processors"]),
    ]
    rows = [(each, alone(each)) for each in asked]
    counts = (None, 5, 2)
    seen: list[list[Any]] = [[], [], []]
    done = ran(
        drafter(kind, *rows),
        *(
            each.request(num_draft_tokens=WIDTH, logprobs=count, consumer=emissions.append)
            for each, count, emissions in zip(asked, counts, seen, strict=True)
        ),
    )
    assert [told_of(row) for row in done] == [told for _, told in rows]
    # A row that does not ask gets none, whoever is in the batch.
    assert [each.token_logprobs for each in seen[0]] == [None] * len(seen[0])
    for (_, told), count, emissions in zip(rows[1:], counts[1:], seen[1:], strict=True):
        assert count is not None
        check([each.token_logprobs for each in emissions], told, count)


def test_the_cases_have_accepted_drafts_end_tokens_and_tokens_of_every_rank() -> None:
    ended, ranks = 0, set()
    for draw, shape in itertools.product(DRAWS.values(), KINDS.values()):
        asked = Asked((5, 9, 40), **{"max_tokens": 14, **draw, **shape})
        told = alone(asked if asked.grammar else ending(asked))
        ended += told.end_token is not None
        for token, logprobs in zip(told.tokens, told.logprobs, strict=False):
            ranks.add(1 + int(mx.sum(logprobs > logprobs[token])))
    assert ended > len(DRAWS) * 3
    assert {1, 2, 3} < ranks
    asked = Asked((5, 9, 40), max_tokens=14, **DRAWS["seeded"])
    told = alone(asked)
    for kind in ("right", "mixed", "device", "full prefill"):
        [row] = ran(drafter(kind, (asked, told)), asked.request(num_draft_tokens=WIDTH))
        assert row.stats.accepted > 4


@pytest.mark.parametrize("kind", ["plain", "mixed", "device", "full prefill"])
def test_what_a_grammar_or_a_processor_excludes_is_no_alternative(kind: str) -> None:
    for shape in ("grammar", "banned"):
        asked = Asked((5, 9, 40), **KINDS[shape])
        told = alone(asked)
        seen: list[Any] = []
        request = asked.request(num_draft_tokens=WIDTH, logprobs=VOCABULARY, consumer=seen.append)
        ran(drafter(kind, (asked, told)), request)
        sizes = set()
        for emission, logprobs in zip(seen, told.logprobs, strict=True):
            report = emission.token_logprobs
            scores: Any = logprobs.tolist()
            allowed = {token for token in range(VOCABULARY) if scores[token] > -math.inf}
            assert {token for token, _ in report.top} == allowed
            assert sum(math.exp(value) for _, value in report.top) == pytest.approx(1, abs=1e-5)
            sizes.add(len(allowed))
        assert min(sizes) < VOCABULARY


@pytest.mark.parametrize("count", [0, 1, 2, 5, VOCABULARY, VOCABULARY + 9])
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_as_many_alternatives_as_were_asked_for(kind: str, count: int) -> None:
    asked = Asked((1, 2, 3), **DRAWS["seeded"])
    told = alone(asked)
    seen: list[Any] = []
    ran(
        drafter(kind, (asked, told)),
        asked.request(num_draft_tokens=WIDTH, logprobs=count, consumer=seen.append),
    )
    check([each.token_logprobs for each in seen], told, count)
    assert {len(each.token_logprobs.top) for each in seen} == {min(count, VOCABULARY)}


@pytest.mark.parametrize("kind", ["plain", "mixed", "full prefill"])
@pytest.mark.parametrize("draw", DRAWS)
def test_stream_generate_reports_with_every_response(draw: str, kind: str) -> None:
    asked = ending(Asked((5, 9, 40), max_tokens=14, **DRAWS[draw]))
    tokenizer = json_tokenizer(*sorted(asked.end_tokens))
    asked = evolve(asked, end_tokens=frozenset(tokenizer.eos_token_ids))
    told = alone(asked)
    provider: Any = drafter(kind, (asked, told))
    options: dict[str, Any] = {
        "seed": asked.seed,
        "temp": asked.temp,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "drafter": None if provider is None else load_scripted(provider, WIDTH),
    }
    responses = list(
        stream_generate(
            tiny_model("qwen3"),
            tokenizer,
            list(asked.prompt),
            asked.max_tokens,
            logprobs=5,
            **options,
        )
    )
    check([each.token_logprobs for each in responses], told, 5)
    # The whole distribution comes too, and is the same one.
    for response, logprobs in zip(responses, told.logprobs, strict=True):
        assert mx.allclose(response.logprobs, logprobs, rtol=REL, atol=ABS).item()
