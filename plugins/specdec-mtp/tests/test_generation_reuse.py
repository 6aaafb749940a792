"""A request takes over what another one read, and nothing else of it.

Acceptance is the witness: a head whose row was restored wrongly, or that another request has
touched, gives the same text with other drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mtp_demo import demo, drafted, draws, greedy, head, prompts, seeded
from scripted import drain, request

from specdec import PrefixCache, VerifyGroup

if TYPE_CHECKING:
    from pathlib import Path

    from specdec import GenerationStats

MB = 1 << 20
READINGS: tuple[dict[str, Any], ...] = ({}, {"hidden": "pre_norm", "chain": "own"})


def acceptance(stats: GenerationStats) -> tuple[Any, ...]:
    return (
        stats.rounds,
        stats.target_forwards,
        stats.drafted_per_position,
        stats.accepted_per_position,
    )


@pytest.mark.parametrize("options", READINGS, ids=str)
def test_a_prompt_from_the_prefix_cache_drafts_as_if_it_had_been_read(
    options: dict[str, Any],
) -> None:
    prompt, loaded = prompts()[2], head(**options)
    cold = drafted(prompt, loaded, 3)
    cache = PrefixCache(64 * MB)
    first, warm = (drafted(prompt, loaded, 3, prefix_cache=cache) for _ in range(2))
    assert cold.tokens == first.tokens == warm.tokens == greedy(prompt)
    assert (first.stats.cached_tokens, warm.stats.cached_tokens) == (0, len(prompt) - 1)
    assert acceptance(cold.stats) == acceptance(first.stats) == acceptance(warm.stats)
    assert warm.stats.accepted > 0


def test_a_longer_prompt_goes_on_from_a_row_that_was_left() -> None:
    prompt = prompts()[2]
    longer = prompt + greedy(prompt)[:6]
    cache = PrefixCache(64 * MB)
    cold = drafted(longer, head(), 3, max_tokens=16)
    drafted(prompt, head(), 3, max_tokens=2, prefix_cache=cache)
    warm = drafted(longer, head(), 3, max_tokens=16, prefix_cache=cache)
    assert warm.stats.cached_tokens >= len(prompt) - 1
    assert warm.tokens == cold.tokens == greedy(prompt)[6:22]
    assert acceptance(warm.stats) == acceptance(cold.stats)


def test_rows_on_the_disk_serve_another_process_of_the_same_head(tmp_path: Path) -> None:
    prompt = prompts()[3]
    first = PrefixCache(64 * MB, directory=tmp_path)
    cold = drafted(prompt, head(), 3, prefix_cache=first)
    first.close()
    assert first.stats.written > 0, first.stats.last_error
    second = PrefixCache(64 * MB, directory=tmp_path)
    warm = drafted(prompt, head(), 3, prefix_cache=second)
    assert second.stats.disk_hits == 1
    assert warm.stats.cached_tokens == len(prompt) - 1
    assert warm.tokens == cold.tokens == greedy(prompt)
    assert acceptance(warm.stats) == acceptance(cold.stats)
    # Another reading of the head is another drafter: its rows are none of this one's.
    other = drafted(prompt, head(history="own"), 3, max_tokens=4, prefix_cache=second)
    assert other.stats.cached_tokens == 0
    assert other.tokens == greedy(prompt)[:4]
    second.close()


def test_a_request_behind_another_one_drafts_as_on_a_fresh_executor() -> None:
    group = VerifyGroup(head().target, head().provider, drafter="mtp")
    _, tokenizer = demo()
    ends = frozenset(tokenizer.eos_token_ids)
    for prompt in (prompts()[0], prompts()[2], prompts()[0]):
        asked = request(prompt, max_tokens=16, num_draft_tokens=3, end_tokens=ends)
        [row] = group.admit([asked])
        drain(group)
        fresh = drafted(prompt, head(), 3, max_tokens=16)
        assert row.emitted == fresh.tokens == greedy(prompt)[:16]
        assert acceptance(row.stats) == acceptance(fresh.stats)
    group.close()


def test_a_text_that_ends_early_leaves_nothing_behind() -> None:
    prompt = prompts()[2]
    before = drafted(prompt, head(), 4)
    drafted(prompts()[1], head(), 4, max_tokens=3, seed=1, **draws())
    drafted(prompts()[3], head(), 4, stop="one")
    after = drafted(prompt, head(), 4)
    assert acceptance(after.stats) == acceptance(before.stats)
    assert after.tokens == before.tokens == greedy(prompt)
    assert drafted(prompt, head(), 2, seed=3, **draws()).tokens == seeded(prompt, 3)
