"""The demo models: a text is the target's, and a draft is accepted exactly where mlx-lm accepts it.

Acceptance is the witness of what was read: a row that was restored wrongly, or that another request
has touched, gives the same text with other drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from demo_texts import Asked, DemoTexts, draws
from mlx_lm.generate import speculative_generate_step

from specdec import BatchGenerator, PrefixCache, load_drafter, stream_generate
from specdec.drafters import load_draft_model
from specdec.drafting import BlockChoices, Chooser

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec import LoadedDrafter

MB = 1 << 20
DRAFT = DemoTexts("demo-qwen3", "demo-qwen3-draft")
prompts = DRAFT.prompts


@pytest.mark.parametrize("width", [2, 4])
def test_tokens_and_which_of_them_were_drafted_are_mlx_lms(width: int) -> None:
    (model, tokenizer), loaded = DRAFT.demo(), DRAFT.load()
    drafted = 0
    for prompt in prompts()[:4]:
        steps = speculative_generate_step(
            mx.array(prompt),
            model,
            loaded.provider.grouped.model.model,  # type: ignore[attr-defined]  # of this kind
            num_draft_tokens=width,
            max_tokens=16,
        )
        wanted = [(int(token), from_draft) for token, _, from_draft in steps]
        responses = stream_generate(
            model, tokenizer, prompt, 16, drafter=loaded, num_draft_tokens=width
        )
        found = [(each.token, each.from_draft) for each in responses]
        assert [token for token, _ in found] == [token for token, _ in wanted]
        # In its last round mlx-lm drafts one token more, which is then the last.
        assert found[:-1] == wanted[:-1]
        drafted += sum(from_draft for _, from_draft in found)
    assert drafted > 16, "of 64"


def test_a_target_that_is_its_own_drafter_is_always_right() -> None:
    model, tokenizer = DRAFT.demo()
    with load_draft_model(model, model, tokenizer) as loaded:
        assert loaded.provider.weight_bytes == 0, "they are the target's"
        found = DRAFT.drafted(prompts()[0], loaded, 3, max_tokens=61)
    stats = found.stats
    assert found.tokens == DRAFT.greedy(prompts()[0], 61)
    assert stats.accepted == stats.drafted == 45
    assert stats.rounds == 16


def test_a_seeded_text_is_the_targets_and_its_noise_is_the_drafts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed, given, accepted = 3, prompts()[1:3], []
    for coupled in (True, False):
        if not coupled:
            monkeypatch.setattr("specdec.drafting.model_rows.BlockChoices", _other_noise)
        found = [DRAFT.drafted(p, DRAFT.load(), 2, seed=seed, **draws()) for p in given]
        if coupled:
            assert [each.tokens for each in found] == [DRAFT.seeded(p, seed) for p in given]
        accepted.append(sum(each.stats.accepted for each in found))
    assert accepted[0] > accepted[1] + 2


def _other_noise(choose: Chooser, steps: Sequence[int]) -> BlockChoices:
    return BlockChoices(choose, [step + 10_000 for step in steps])


def test_under_rejection_drafts_are_declared_and_taken() -> None:
    taken = drafted = 0
    for prompt in prompts()[:2]:
        found = DRAFT.drafted(prompt, DRAFT.load(), 2, temp=1.0, seed=5, acceptance="rejection")
        taken, drafted = taken + found.stats.accepted, drafted + found.stats.drafted
    assert 0.2 < taken / drafted < 1


FIRST = (
    Asked(DRAFT, 0, 16, 3),
    Asked(DRAFT, 1, 6, 1),
    Asked(DRAFT, 2, 16, 8),
    Asked(DRAFT, 3, 12, 2, seed=4),
)
LATER = (
    Asked(DRAFT, 2, 12, 2, seed=3),
    Asked(DRAFT, 0, 1, 3),
    Asked(DRAFT, 3, 16, 4),
    Asked(DRAFT, 1, 9, 0),
)


def test_eight_rows_that_join_and_leave_get_what_they_get_alone() -> None:
    stats = DRAFT.came_and_went(FIRST, LATER, after=7)
    beside = LATER[2]
    alone = DRAFT.drafted(beside.prompt, DRAFT.load(), beside.depth, max_tokens=beside.budget)
    assert stats[beside].accepted == alone.stats.accepted > 0


def _limited(limit: int) -> LoadedDrafter:
    return load_drafter(DRAFT.drafter, *DRAFT.demo(), max_context=limit)


def test_a_row_that_outgrows_the_draft_models_context_goes_on_plainly_and_alone() -> None:
    asked = [Asked(DRAFT, 0, 24, 2), Asked(DRAFT, 7, 24, 2), Asked(DRAFT, 1, 6, 2)]
    limit = len(asked[1].prompt) + 8
    last: dict[int, Any] = {}
    tokens: dict[int, list[int | None]] = {}
    with _limited(limit) as loaded, BatchGenerator(*DRAFT.demo(), drafter=loaded) as generator:
        uids = [each.insert(generator) for each in asked]
        for _ in range(60):
            for answer in generator.next()[1]:
                tokens.setdefault(answer.uid, []).append(answer.token)
                last[answer.uid] = answer
    for uid, each in zip(uids, asked, strict=True):
        assert tuple(tokens[uid]) == each.expected()
        assert last[uid].stats.draft_errors == 0
    first, second, third = (last[uid].stats for uid in uids)
    full = f"the draft model's context of {limit} tokens is full"
    for stats in (first, second):
        assert stats.reason is not None
        assert full in stats.reason
    assert (third.reason, third.drafted > 0) == (None, True)
    assert 0 < second.drafted < first.drafted, "the longer prompt is there earlier"


def test_a_prompt_that_is_longer_than_the_draft_model_reads_is_answered_all_the_same() -> None:
    with _limited(10) as loaded:
        found = DRAFT.drafted(prompts()[0], loaded, 2)
    assert found.tokens == DRAFT.greedy(prompts()[0])
    assert (found.stats.drafted, found.stats.draft_errors) == (0, 0)
    assert "context of 10 tokens is full" in (found.stats.reason or "")


def test_a_prompt_from_the_prefix_cache_drafts_as_if_it_had_been_read(tmp_path: Path) -> None:
    prompt, loaded = prompts()[2], DRAFT.load()
    cold = DRAFT.drafted(prompt, loaded, 3)
    cache = PrefixCache(64 * MB, directory=tmp_path)
    first, warm = (DRAFT.drafted(prompt, loaded, 3, prefix_cache=cache) for _ in range(2))
    longer = prompt + DRAFT.greedy(prompt)[:6]
    more = DRAFT.drafted(longer, loaded, 3, max_tokens=8, prefix_cache=cache)
    cache.close()
    assert cold.tokens == first.tokens == warm.tokens == DRAFT.greedy(prompt)
    assert warm.stats.cached_tokens == len(prompt) - 1
    assert cold.stats.accepted == first.stats.accepted == warm.stats.accepted
    assert more.stats.cached_tokens >= len(prompt) - 1
    alone = DRAFT.drafted(longer, loaded, 3, max_tokens=8)
    assert more.stats.accepted_per_position == alone.stats.accepted_per_position
    other = PrefixCache(64 * MB, directory=tmp_path)
    again = DRAFT.drafted(prompt, loaded, 3, prefix_cache=other)
    assert (other.stats.disk_hits, again.stats.accepted) == (1, cold.stats.accepted)
    other.close()


def test_a_round_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, rounds = DRAFT.waits(monkeypatch)
    assert waits == ["host_read"] * rounds
    assert 3 < rounds < 12
