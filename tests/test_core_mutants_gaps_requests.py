"""What mutants of the shaping of logits and of the walk got away with before these tests."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mutants.constrained import EVERY, PROMPT, Steps, constrained, drafting, parity, plain, within
from scripted import Text, drain, request, solo, target, text_of
from tiny_models import VOCABULARY, tiny_model

from specdec import VerifyGroup
from specdec.errors import ConstraintError
from specdec.sampling import make_logits_processors, stateless
from specdec.verify.row import Row


@stateless
def loud(_tokens: mx.array, logits: mx.array) -> mx.array:
    """Wants token 5 above all."""
    return mx.where(mx.arange(VOCABULARY) == 5, 1000.0, logits)


@pytest.mark.parametrize("width", [0, 4])
def test_a_constraint_has_the_last_word_behind_the_processors(width: int) -> None:
    text = Text(PROMPT, plain(PROMPT, 12, lambda _, logits, __: within(logits, EVERY - {5})))
    group = VerifyGroup(target(), drafting(text))
    options: dict[str, Any] = {"processors": [loud], "num_draft_tokens": width, "max_tokens": 12}
    [row] = group.admit(
        [request(PROMPT, constraint=lambda: Steps(lambda _: EVERY - {5}), **options)]
    )
    [free] = group.admit([request(PROMPT, **options)])
    drain(group)
    assert (row.error, row.emitted) == (None, text.output)
    assert free.emitted == (5,) * 12


@pytest.mark.parametrize("drafts", [False, True])
def test_penalties_see_each_token_once_and_in_time(drafts: bool) -> None:
    penalties: dict[str, Any] = {
        "frequency_penalty": 1.5,
        "frequency_context_size": 7,
        "repetition_penalty": 1.3,
    }
    steps = generate_step(
        mx.array(PROMPT),
        tiny_model("qwen3"),
        max_tokens=24,
        logits_processors=mlx_lm_processors(**penalties),
    )
    text = Text(PROMPT, tuple(token for token, _ in steps))
    group = VerifyGroup(target(), drafting(text) if drafts else None)
    [row] = group.admit(
        [
            request(
                PROMPT,
                max_tokens=24,
                num_draft_tokens=4,
                processors=make_logits_processors(**penalties),
            )
        ]
    )
    drain(group)
    assert row.emitted == text.output != solo(PROMPT)[:24]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_with_nothing_left_to_draw_ends_with_what_it_had(drafts: bool) -> None:
    @stateless
    def closing(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits if tokens.size < len(PROMPT) + 3 else logits - mx.inf

    group = VerifyGroup(target(), drafting(text_of(PROMPT)) if drafts else None)
    row, other = group.admit(
        [
            request(PROMPT, max_tokens=9, num_draft_tokens=4, processors=[closing]),
            request(PROMPT, max_tokens=9, num_draft_tokens=4),
        ]
    )
    drain(group)
    assert (row.finish, row.emitted) == ("error", solo(PROMPT)[:3])
    assert isinstance(row.error, ConstraintError)
    assert other.emitted == solo(PROMPT)[:9]


def test_a_row_of_another_dtype_draws_what_it_draws_alone() -> None:
    @stateless
    def coarse(_tokens: mx.array, logits: mx.array) -> mx.array:
        # Two bfloat16 numbers that become one log-probability: mlx-lm takes the first.
        ids = mx.arange(VOCABULARY)
        steps = mx.where(ids == 3, 1.0, mx.where(ids == 9, 1.0078125, 0.0))
        return (steps + mx.zeros_like(logits)).astype(mx.bfloat16)

    options: dict[str, Any] = {"max_tokens": 3, "processors": [coarse]}
    alone, mixed = VerifyGroup(target()), VerifyGroup(target())
    [row] = alone.admit([request(PROMPT, **options)])
    same, other = mixed.admit([request(PROMPT, **options), request(PROMPT, max_tokens=3)])
    drain(alone)
    drain(mixed)
    assert row.emitted == same.emitted == (3, 3, 3)
    assert other.emitted == solo(PROMPT)[:3]


def test_a_rows_history_is_what_was_before_its_prompt_and_all_of_its_tokens() -> None:
    row = Row.of(request((4, 5), history=(1, 2, 3)), VOCABULARY)
    assert row.history().tolist() == [1, 2, 3, 4, 5]
    row.tokens += [6, 7]
    assert row.history().tolist() == [1, 2, 3, 4, 5, 6, 7]
    row.tokens.append(8)
    assert row.history().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_code_with_a_state_runs_once_a_token_with_the_tokens_of_plain_decoding() -> None:
    seen: list[Any] = []

    def recording(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    text = text_of(PROMPT, 1.0, 7)
    group = VerifyGroup(target(), drafting(text))
    options: dict[str, Any] = {"max_tokens": 16, "num_draft_tokens": 4, "processors": [recording]}
    [row] = group.admit([request(PROMPT, temp=1.0, seed=7, **options)])
    drain(group)
    assert row.emitted == text.output[:16]
    assert seen == [list(text.whole[: len(PROMPT) + count]) for count in range(16)]
    assert row.stats.accepted > 0


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("width", [0, 4])
def test_each_position_has_the_mask_of_its_own_place(width: int, stateful: bool) -> None:
    def keeping(_tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    text = constrained(parity)
    group = VerifyGroup(target(), drafting(text) if width else None)
    chain = [keeping] if stateful else []
    [row] = group.admit(
        [
            request(
                PROMPT,
                max_tokens=24,
                num_draft_tokens=width,
                processors=chain,
                constraint=lambda: Steps(parity),
            )
        ]
    )
    drain(group)
    assert (row.error, row.emitted) == (None, text.output)
    assert row.stats.accepted >= min(width, 1)


def test_a_rule_is_told_the_token_with_which_another_ends_the_row() -> None:
    told: list[int] = []

    def hear(token: int) -> bool:
        told.append(token)
        return False

    text = text_of(PROMPT)
    group = VerifyGroup(target(), drafting(text))
    [row] = group.admit(
        [
            request(
                PROMPT,
                num_draft_tokens=4,
                stop_sequences=[text.output[:3]],
                stops=hear,
            )
        ]
    )
    drain(group)
    assert (row.finish, row.emitted) == ("stop", text.output[:3])
    assert told == list(text.output[:3])
