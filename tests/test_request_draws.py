"""Draws in the executor: what is accepted, what a seed means in company, and where ties fall."""

from __future__ import annotations

from functools import cache, partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from request_oracle import (
    DRAFTERS,
    JSON_PIECES,
    WIDTH,
    Asked,
    Told,
    alone,
    drafter,
    ngram,
    plain_loop,
    ran,
    told_of,
)
from scripted import ScriptedProvider, drain, target
from tiny_models import VOCABULARY, build_model
from tiny_models import alone as logits_alone

from specdec import Row, SamplingOptions, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.grammar import Grammar
from specdec.sampling import stateless
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), (20, 21, 22, 23))


# C1: nothing is accepted but what the target would have drawn.


def untouched(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


def one_by_one() -> list[Any]:
    return [untouched]


LIED_TO: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temp": 1.0, "seed": 4},
    "with a penalty": {"penalties": {"repetition_penalty": 1.4}},
    "position by position": {"extra": one_by_one},
    "with a grammar": {"grammar": Grammar.regex("[a-z]*")},
}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("kind", LIED_TO)
def test_of_a_drafter_that_is_always_wrong_nothing_is_accepted(kind: str, width: int) -> None:
    asked = Asked(PROMPTS[2], **LIED_TO[kind])
    told = alone(asked)
    # A letter, so that the grammar allows it and it is verified.
    letters = [JSON_PIECES.index(letter) for letter in "ab"]
    wrong = [letters[token == letters[0]] for token in told.tokens]
    provider = ScriptedProvider(lambda _tokens, depth, step: wrong[step : step + depth])
    [row] = ran(provider, asked.request(num_draft_tokens=width, num_forced_tokens=0))
    assert told_of(row) == told
    assert row.stats.accepted == 0
    assert row.stats.drafted >= len(told.tokens) - 1
    assert row.stats.rounds == len(told.tokens)


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("prompt", [(1, 1, 1), (1, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("kind", list(LIED_TO)[:4])
def test_a_constant_prompt_with_the_ngram_drafter(
    kind: str, prompt: tuple[int, ...], width: int
) -> None:
    asked = Asked(prompt, **LIED_TO[kind])
    told = alone(asked)
    seen: list[Any] = []
    [row] = ran(ngram(), asked.request(num_draft_tokens=width, consumer=seen.append))
    assert told_of(row) == told
    assert row.stats.drafted > 0
    assert row.stats.accepted == sum(each.from_draft for each in seen) < row.stats.drafted
    assert told.tokens[0] != 1  # the first draft repeats the prompt, and is wrong


# C5: a seed means the same in any company.

SEEDED = Asked(PROMPTS[2], temp=1.0, seed=2**33 + 5, max_tokens=24)
COMPANY = (
    Asked(PROMPTS[0], temp=1.0, seed=1, max_tokens=30),
    Asked(PROMPTS[1], penalties={"presence_penalty": 1.0}, max_tokens=30),
)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_seeds_text_is_the_same_alone_and_as_any_row(kind: str, width: int) -> None:
    told = alone(SEEDED)
    for place in range(3):
        asked = [*COMPANY[:place], SEEDED, *COMPANY[place:]]
        rows = [(each, alone(each)) for each in asked]
        done = ran(drafter(kind, *rows), *(each.request(num_draft_tokens=width) for each in asked))
        assert told_of(done[place]) == told
    [row] = ran(drafter(kind, (SEEDED, told)), SEEDED.request(num_draft_tokens=width))
    assert told_of(row) == told


@pytest.mark.parametrize("plain", [False, True])
def test_a_seeds_text_is_the_same_after_fifty_other_requests(plain: bool) -> None:
    group = VerifyGroup(target(), None if plain else ngram())
    for number in range(50):
        prompt = (number % VOCABULARY, (7 * number) % VOCABULARY)
        other = Asked(prompt, temp=0.5 + number % 3, seed=None if number % 2 else number)
        group.admit([evolve(other, max_tokens=1 + number % 6).request(num_draft_tokens=3)])
        with group.round() as done:
            done.deliver_all()
    [row] = group.admit([SEEDED.request(num_draft_tokens=WIDTH)])
    drain(group)
    assert told_of(row) == alone(SEEDED)


def test_other_seeds_give_other_texts() -> None:
    texts = {alone(evolve(SEEDED, seed=seed)).tokens for seed in (1, 2, 2**33 + 5, 5)}
    assert len(texts) == 4


# C7: rows of every kind in one batch, in every order.

MIXED = (
    Asked(PROMPTS[0], max_tokens=12),
    Asked(PROMPTS[1], temp=1.0, seed=1, max_tokens=12),
    Asked(PROMPTS[2], temp=1.0, seed=None, max_tokens=12),
    Asked(PROMPTS[3], temp=1.0, seed=2, max_tokens=12),
)


@cache
def unseeded_texts(plain: bool) -> list[tuple[int, ...]]:
    """The unseeded row's texts in all orders; the other rows are looked at on the way."""
    texts = []
    for order in permutations(range(4)):
        requests = [MIXED[place].request(num_draft_tokens=WIDTH) for place in order]
        for place, row in zip(order, ran(None if plain else ngram(), *requests), strict=True):
            if MIXED[place].seed is None and MIXED[place].temp:
                assert row.finish == "length"
                texts.append(row.emitted)
            else:
                assert told_of(row) == alone(MIXED[place]), order
    return texts


@pytest.mark.parametrize("plain", [False, True])
def test_greedy_seeded_and_unseeded_rows_do_not_disturb_each_other_in_any_order(
    plain: bool,
) -> None:
    texts = unseeded_texts(plain)
    assert len(texts) == 24
    assert len(set(texts)) == 24  # new noise each time
    assert all(len(set(text)) > 2 for text in texts)


# C8: the support under speculation is that of mlx-lm's filters.

PROBS = {3: 0.35, 60: 0.25, 12: 0.20, 33: 0.05, 1: 0.03, 8: 0.03, 21: 0.03, 44: 0.03, 50: 0.03}
ROW: list[float] = [float(mx.log(mx.array(PROBS.get(i, 0.0) or 1e-30))) for i in range(VOCABULARY)]


@stateless
def planned(_tokens: mx.array, logits: mx.array) -> mx.array:
    """The same distribution at every position, whatever the target says."""
    return mx.array([ROW], logits.dtype)


def plan() -> list[Any]:
    return [planned]


FILTERS: dict[str, dict[str, Any]] = {
    "top-k and top-p": {"top_k": 4, "top_p": 0.82},
    "top-p": {"top_p": 0.82},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.12},
    "min-p and top-p": {"min_p": 0.5, "top_p": 0.9},
    "as many as there are": {"top_k": VOCABULARY},
    "more than there are": {"top_k": VOCABULARY + 36},
}


def support(options: dict[str, Any]) -> set[int]:
    """What mlx-lm's filters leave; it refuses a top-k that keeps everything."""
    logprobs = mx.array([ROW])
    for name, apply in (
        ("top_p", partial(apply_top_p, top_p=options.get("top_p"))),
        ("min_p", partial(apply_min_p, min_p=options.get("min_p"))),
        ("top_k", partial(apply_top_k, top_k=options.get("top_k"))),
    ):
        if options.get(name, VOCABULARY) < VOCABULARY:
            logprobs = apply(logprobs)
    left: Any = logprobs[0].tolist()
    return {token for token, score in enumerate(left) if score > -30}


def test_these_filters_tell_the_orders_apart() -> None:
    assert support(FILTERS["top-k and top-p"]) == {3, 60, 12, 33}
    # Renormalised after top-k, three tokens would have had the mass.
    assert (0.35 + 0.25 + 0.20) / 0.85 > 0.82
    assert support(FILTERS["more than there are"]) == set(PROBS)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_support_under_speculation_is_mlx_lms(name: str, acceptance: Any) -> None:
    options = FILTERS[name]
    emitted: set[int] = set()
    drafted = accepted = 0
    for seed in range(3):
        asked = Asked(
            PROMPTS[2],
            temp=1.0,
            seed=seed,
            max_tokens=160,
            extra=plan,
            **{**options, "top_k": min(options.get("top_k", 0), VOCABULARY - 1)},
        )
        sampling = SamplingOptions(temp=1.0, seed=seed, acceptance=acceptance, **options)
        [row] = ran(ngram(), asked.request(num_draft_tokens=WIDTH, sampling=sampling))
        if acceptance == "match" and not name.endswith("there are"):
            assert told_of(row) == alone(asked)
        emitted |= set(row.emitted)
        drafted += row.stats.drafted
        accepted += row.stats.accepted
    assert emitted == support(options)
    assert 0 < accepted < drafted


# D1: ties.


def tied(seed: int = 0) -> tuple[Any, int, int]:
    """A bfloat16 model in which a token that it often writes has a twin with equal logits."""
    model = build_model("qwen3", seed)
    model.set_dtype(mx.bfloat16)
    often = [token for prompt in PROMPTS for token in plain_loop(Asked(prompt), model).tokens]
    first = max(set(often), key=often.count)
    twin = first + 1 if first + 1 < VOCABULARY else first - 1
    weight = model.lm_head.weight
    weight[twin] = weight[first]
    mx.eval(model.parameters())
    return model, min(first, twin), max(first, twin)


def knows(rows: Sequence[tuple[Asked, Told]], **options: Any) -> ScriptedProvider:
    """Right drafts and, at every fifth place, a wrong one; rows differ in their prompts' length."""
    texts = {len(asked.prompt): told.tokens for asked, told in rows}
    assert len(texts) == len(rows)

    def draft(tokens: tuple[int, ...], depth: int, step: int) -> list[int]:
        text = texts[len(tokens) - step]
        return [
            token if place % 5 else (token + 1) % VOCABULARY
            for place, token in enumerate(text[step : step + depth], start=step)
        ]

    return ScriptedProvider(draft, **options)


def flips(model: Any, row: Row, asked: Asked) -> int:
    """Tokens that are not the plain loop's argmax behind the same text; none is far from it."""
    whole = [*asked.prompt, *row.emitted]
    count = 0
    logits = logits_alone(model, whole[:-1])[len(asked.prompt) - 1 :].astype(mx.float32)
    for scores, token in zip(logits, row.emitted, strict=True):
        best = int(mx.argmax(scores))
        count += best != token
        # One unit of bfloat16 at the magnitude of these logits.
        assert float(scores[best] - scores[token]) <= min(0.3, 2.0**-7 * float(scores[best]))
    return count


@pytest.mark.parametrize("width", [1, 3, 7])
def test_ties_fall_as_in_plain_decoding(width: int) -> None:
    model, low, high = tied()
    asked = [Asked(prompt, max_tokens=30) for prompt in PROMPTS]
    rows = [(each, plain_loop(each, model)) for each in asked]
    group = VerifyGroup(MlxLmTarget(model), knows(rows))
    done = group.admit([each.request(num_draft_tokens=width) for each in asked])
    drain(group)
    emitted = [token for row in done for token in row.emitted]
    count = sum(flips(model, row, each) for row, each in zip(done, asked, strict=True))
    assert all(row.stats.accepted > 0 for row in done)
    # The twins are equal at every position, and met often; the first one wins.
    assert emitted.count(low) > 5
    if mx.default_device() == mx.Device(mx.cpu):
        assert count == 0
        assert high not in emitted
        assert [told_of(row) for row in done] == [told for _, told in rows]


# D3: a prompt's last chunk.

STEP = 8


def ragged(length: int) -> tuple[int, ...]:
    return tuple((5 * place * place + 3 * place + length) % VOCABULARY for place in range(length))


def tied_at_first(prompt: tuple[int, ...]) -> tuple[Any, int]:
    """A bfloat16 model in which the first token's logit has an equal just above it or below."""
    model = build_model("qwen3")
    model.set_dtype(mx.bfloat16)
    first = plain_loop(Asked(prompt, max_tokens=1), model).tokens[0]
    twin = (first + 1) % VOCABULARY
    weight = model.lm_head.weight
    weight[twin] = weight[first]
    mx.eval(model.parameters())
    return model, min(first, twin)


@pytest.mark.parametrize("kind", ["plain", "drafts", "full prefill"])
@pytest.mark.parametrize("length", [1, 2, STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 1])
def test_a_prompts_last_chunk_gives_the_first_token_of_plain_decoding(
    length: int, kind: str
) -> None:
    prompt = ragged(length)
    model, first = tied_at_first(prompt)
    steps = generate_step(mx.array(prompt), model, max_tokens=12, prefill_step_size=STEP)
    want = tuple(token for token, _ in steps)
    assert want[0] == first
    asked = Asked(prompt, max_tokens=12)
    provider = None
    if kind != "plain":
        full = {"mode": PrefillMode.FULL, "context": ContextKind.PRE_NORM}
        told = Told(want, None, "length", "")
        provider = knows([(asked, told)], **(full if kind == "full prefill" else {}))
    group = VerifyGroup(MlxLmTarget(model), provider, prefill_step_size=STEP)
    [row] = group.admit([asked.request(num_draft_tokens=WIDTH)])
    drain(group)
    assert row.emitted == want
    if kind != "plain":
        assert row.stats.accepted > 0
