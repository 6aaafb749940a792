"""Simulated drafters: right as often as told, and never in the way of the target's text."""

from __future__ import annotations

from math import sqrt
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import tiny_tokenizer
from tiny_models import HYBRID, VOCABULARY, tiny_model

from specdec import bind_target
from specdec.bench import Simulated, compare, random_prompts
from specdec.bench.simulated import Coins, Script, Texts
from specdec.bench.turns import Setting, Way
from specdec.errors import CheckpointError, OptionError

TOKENS = 48


def model_and_prompts(count: int = 4) -> tuple[Any, list[list[int]]]:
    return tiny_model("qwen3"), random_prompts(VOCABULARY, count=count, length=6, seed=3)


def within(count: int, tried: int, chance: float) -> bool:
    """Whether a binomial count is within four standard deviations."""
    return abs(count - tried * chance) <= 4 * sqrt(tried * chance * (1 - chance)) + 1


def counted(rows: list[list[int]]) -> list[int]:
    """At the first two places of a draft, over all rows."""
    return [sum(row[place] for row in rows if len(row) > place) for place in range(2)]


@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_right_as_often_as_told_and_texts_are_plain_ones(batch: int) -> None:
    model, prompts = model_and_prompts(4)
    theirs, plain, *simulated = compare(
        model,
        None,
        prompts[: 4 - batch // 2],
        widths=[3],
        batches=[batch],
        simulate=[Simulated(chance) for chance in (0.3, 0.8, 1.0)],
        max_tokens=TOKENS,
        warmup=0,
        phase_turns=0,
        rehearse=batch > 1,
        with_mlx_lm=True,
    )
    assert theirs.tokens == plain.tokens
    assert all(len(text) == TOKENS for text in plain.tokens)
    assert [r.label for r in simulated] == [f"simulated-{each}@3" for each in ("0.3", "0.8", "1")]
    for result, chance in zip(simulated, (0.3, 0.8, 1.0), strict=True):
        assert result.tokens == plain.tokens
        assert (result.differing, result.error) == (0, None)
        drafted = counted([stats.drafted_per_position for stats in result.stats])
        accepted = counted([stats.accepted_per_position for stats in result.stats])
        # A draft is judged if all before it were right; the end of a text cuts the last round.
        assert drafted[0] >= 11 * len(result.stats)
        assert within(accepted[0], drafted[0], chance)
        assert within(accepted[1], accepted[0], chance)
    assert simulated[2].tokens_per_forward == TOKENS / 12, "all drafts are accepted"


def test_runs_of_several_widths_are_right_at_the_same_places() -> None:
    coins = Coins(0.5, "a seed")
    later = [coins[place] for place in (40, 3, 17)]
    again = Coins(0.5, "a seed")
    assert [again[place] for place in range(41)][40::-1][::37] == [later[0], later[1]]
    assert [Coins(0.5, "another")[p] for p in range(40)] != [coins[p] for p in range(40)]
    assert within(sum(coins[place] for place in range(2_000)), 2_000, 0.5)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(0, 12),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_a_draft_is_the_text_by_place_or_another_id(
    text: list[int], done: int, depth: int, chance: float
) -> None:
    coins = Coins(chance, "x")
    drafts = Script([text], coins).drafts(text[:done], depth, 10)
    ahead = text[done:][:depth]
    assert len(drafts) == len(ahead)
    for place, (draft, token) in enumerate(zip(drafts, ahead, strict=True), min(done, len(text))):
        assert (draft == token) is coins[place]
        assert 0 <= draft < 10


def test_a_row_that_parts_from_one_text_goes_on_with_another_or_by_place() -> None:
    texts = Texts()
    assert texts.learn([1], [5, 6, 7, 8])
    assert not texts.learn([1], [5, 6])
    assert texts.learn([1], [5, 9, 4, 3])
    script = Script(texts.of([1]), Coins(1.0, ""))
    assert script.drafts([5], 2, 50) == [6, 7]
    assert script.drafts([5, 9], 2, 50) == [4, 3]
    assert script.drafts([5, 2], 2, 50) == [7, 8], "by place"
    assert script.drafts([5, 2, 7, 8], 2, 50) == []
    assert Script(texts.of([2]), Coins(1.0, "")).drafts([], 3, 50) == []


def test_a_text_that_is_not_the_targets_changes_no_token() -> None:
    model, (prompt, *_) = model_and_prompts()
    target, texts = bind_target(model), Texts()
    setting = Setting(model, tiny_tokenizer(), TOKENS, {})
    plain = Way().run(setting, [prompt])
    written = list(plain.tokens[0])
    wrong = [*written[:20], (written[20] + 1) % VOCABULARY, *written[21:]]
    texts.learn(prompt, wrong)
    with Simulated(1.0, drafts=4).load(target, texts) as drafter:
        ran = Way(drafter, 4).run(setting, [prompt])
    assert ran.tokens == plain.tokens
    (stats,) = ran.stats
    # One draft was wrong, and the places behind it were right again.
    assert stats.drafted - stats.accepted <= 4
    assert stats.target_forwards <= TOKENS // 5 + 3


def test_sampled_texts_are_plain_ones_too() -> None:
    model, prompts = model_and_prompts(2)
    found = compare(
        model,
        None,
        prompts,
        simulate=[Simulated(0.7)],
        sampling={"temp": 0.9},
        max_tokens=16,
        warmup=0,
        phase_turns=0,
    )
    assert found[1].tokens == found[0].tokens
    assert found[1].acceptance_rate


def test_a_cost_is_spent_for_each_draft() -> None:
    model, prompts = model_and_prompts(1)
    free, dear = compare(
        model,
        None,
        prompts,
        widths=[2],
        simulate=[Simulated(1.0), Simulated(0.99, cost_ms=30)],
        max_tokens=10,
        warmup=1,
        phase_turns=1,
    )[1:]
    assert dear.phases is not None
    assert free.phases is not None
    per_round = dear.phases.per_round(dear.phases.draft)
    assert per_round > 40 > free.phases.per_round(free.phases.draft)


def test_rows_are_captured_and_restored_and_others_are_refused() -> None:
    model, (prompt, *_) = model_and_prompts()
    target, texts = bind_target(model), Texts()
    texts.learn(prompt, [4, 5, 6, 7])
    provider = Simulated(1.0).load(target, texts).provider.grouped
    prefill = provider.open_prefill(target=target, checkpoints=[None])
    empty = prefill.capture(0)
    prefill.prefill(mx.array([prompt[:-1]]), None)
    read = prefill.capture(0)
    assert (empty.processed_tokens, read.processed_tokens) == (0, len(prompt) - 1)
    rows: Any = provider.open(target=target, sampling=None, checkpoints=[read])  # type: ignore[arg-type]
    assert rows.draft([prompt[-1]], [2], [0]) == [[4, 5]]
    rows.commit([2], None)
    rows.consume(mx.array([[6]]), None, [1])
    assert rows.draft([7], [3], [4]) == [[]]
    rows.commit([0], None)
    assert rows.capture(0).processed_tokens == len(prompt) + 4
    with pytest.raises(CheckpointError, match="cold row"):
        provider.open(target=target, sampling=None, checkpoints=[None])  # type: ignore[list-item, arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": 1.5}, "acceptance is 1.5; give a number of 0 to 1"),
        ({"acceptance": True}, "acceptance is True"),
        ({"acceptance": 0.5, "drafts": 0}, "drafts is 0; give 1 or more"),
        ({"acceptance": 0.5, "cost_ms": -1.0}, r"cost_ms is -1\.0; give 0 or more"),
        ({"acceptance": 0.5, "cost_ms": float("nan")}, "cost_ms is nan"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Simulated(**options)


def test_a_recurrent_target_takes_simulated_drafts() -> None:
    model = tiny_model(HYBRID)
    prompts = random_prompts(VOCABULARY, count=1, length=5)
    found = compare(
        model,
        None,
        prompts,
        simulate=[Simulated(0.8, drafts=3)],
        max_tokens=16,
        warmup=0,
        phase_turns=1,
    )
    assert found[1].tokens == found[0].tokens
    assert found[1].phases is not None
    assert found[1].phases.rollback > 0
