"""Model types of every kind, served: seeded, from a prefix cache, and in a mixed batch."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from adversary import WIDEST, Adversary, planted
from architectures.chosen import PROMPTS, SERVED, STEP, model, target, text
from architectures.exceptions import PLAIN
from scripted import Script, ScriptedProvider, Text, drain, request, tiny_tokenizer

from specdec import BatchGenerator, LoadedDrafter, PrefixCache, VerifyGroup, stream_generate
from specdec.plugins import LoadedDraft
from specdec.sampling import SamplingOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec import Row


@cache
def sampled(name: str, prompt: tuple[int, ...], seed: int, count: int = 20) -> Text:
    """What our own plain run writes at a temperature."""
    group = VerifyGroup(target(name), prefill_step_size=STEP)
    [row] = group.admit([request(prompt, temp=0.8, seed=seed, max_tokens=count)])
    drain(group)
    return Text(prompt, row.emitted)


@pytest.mark.parametrize("name", SERVED)
def test_a_seeded_text_is_the_same_with_a_drafter(name: str) -> None:
    plain = sampled(name, PROMPTS[2], 5)
    assert plain.output != text(name, PROMPTS[2]).output[: len(plain.output)]
    adversary = Adversary([plain], target(name).vocab_size, seed=len(name))
    loaded = LoadedDraft(provider=adversary.provider, num_draft_tokens=WIDEST)
    responses = list(
        stream_generate(
            model(name),
            tiny_tokenizer(),
            list(PROMPTS[2]),
            max_tokens=len(plain.output),
            temp=0.8,
            seed=5,
            drafter=LoadedDrafter("adversary", loaded, target(name)),
            prefill_step_size=STEP,
        )
    )
    assert tuple(response.token for response in responses) == plain.output
    stats = responses[-1].stats
    assert stats is not None
    if name in PLAIN:
        assert PLAIN[name] in (stats.reason or "")
    else:
        assert 0 < stats.accepted < stats.drafted
    assert adversary.complaints == []


def served(name: str, cache: PrefixCache) -> tuple[Row, ScriptedProvider]:
    """A request whose second draft of three is wrong, every round."""
    provider = ScriptedProvider(Script.always([text(name, PROMPTS[0])], planted(3, 1)))
    group = VerifyGroup(target(name), provider, prefill_step_size=STEP)
    asked = request(PROMPTS[0], max_tokens=16, num_draft_tokens=3, prefix_cache=cache)
    [row] = group.admit([asked])
    drain(group)
    assert provider.complaints == []
    return row, provider


@pytest.mark.parametrize("name", SERVED)
def test_a_restored_row_speculates_at_once_and_writes_the_cold_text(
    name: str, tmp_path: Path
) -> None:
    cold = text(name, PROMPTS[0]).output[:16]
    known = len(PROMPTS[0]) - 1 if name != "deepseek_v41" else 0  # its class cannot be stored
    with PrefixCache(1 << 24, tmp_path) as cache:
        for cached in (0, known):
            row, provider = served(name, cache)
            assert row.emitted == cold
            assert row.stats.cached_tokens == cached
            check_first_round(name, provider)
        cache.flush()
    with PrefixCache(1 << 24, tmp_path) as cache:
        row, provider = served(name, cache)
        assert row.emitted == cold
        assert row.stats.cached_tokens == known
        assert cache.stats.disk_hits == int(known > 0)
        check_first_round(name, provider)


def check_first_round(name: str, provider: ScriptedProvider) -> None:
    if name in PLAIN:
        assert provider.rounds == []
        return
    first = provider.rounds[0]
    assert (len(first.drafts[0]), first.accepted) == (3, [1])


@pytest.mark.parametrize("name", SERVED)
def test_a_mixed_batch_gives_each_request_what_it_gets_alone(name: str) -> None:
    """Greedy, seeded, without drafts, and one more that joins when they decode."""
    greedy, short, long = (text(name, PROMPTS[index]) for index in (0, 1, 2))
    drawn = sampled(name, PROMPTS[1], 7)
    adversary = Adversary([greedy, drawn, short, long], target(name).vocab_size, seed=len(name))
    loaded = LoadedDraft(provider=adversary.provider, num_draft_tokens=WIDEST)
    generator = BatchGenerator(
        model(name),
        drafter=LoadedDrafter("adversary", loaded, target(name)),
        max_tokens=20,
        prefill_step_size=STEP,
    )
    wanted: dict[int, tuple[int, ...]] = {}
    given: dict[int, list[int]] = {}
    stats: dict[int, Any] = {}

    def insert(each: Text, **options: Any) -> None:
        [uid] = generator.insert([each.prompt], **options)
        wanted[uid], given[uid] = each.output[:20], []

    def take(answers: Sequence[Any]) -> None:
        for answer in answers:
            given[answer.uid].append(answer.token)
            if answer.finish_reason is not None:
                stats[answer.uid] = answer.stats

    with generator:
        insert(drawn, sampling=[SamplingOptions(temp=0.8)], seeds=[7])
        insert(short, num_draft_tokens=[0])
        insert(greedy)
        for _ in range(3):
            take(generator.next_generated())
        insert(long)
        while generator.has_work:
            take(generator.next()[1])
    assert given == {uid: list(output) for uid, output in wanted.items()}
    drafting = [stats[uid].drafted for uid in wanted]
    assert drafting[1] == 0
    assert (sum(drafting) > 0) is (name not in PLAIN)
    assert adversary.complaints == []
