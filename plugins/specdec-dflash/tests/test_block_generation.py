"""The trained block drafter of the demo model: the text is the target's, in clearly fewer forwards.

Acceptance is the witness of what was read: a row that was restored wrongly, or that another request
has touched, gives the same text with other drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from architectures import build
from demo_texts import Asked, DemoTexts, draws
from mlx_lm.generate import generate_step
from scripted import drain, request

from specdec import PrefixCache, VerifyGroup
from specdec.contract import ContextKind
from specdec.grammar import Grammar
from specdec.targets import MlxLmTarget
from specdec_dflash.tiny import tiny_block

if TYPE_CHECKING:
    from pathlib import Path

    from specdec import GenerationStats

MB = 1 << 20
BLOCK = DemoTexts("demo-qwen3", "demo-qwen3-dflash")
prompts = BLOCK.prompts


def acceptance(stats: GenerationStats) -> tuple[Any, ...]:
    return (
        stats.rounds,
        stats.target_forwards,
        stats.drafted_per_position,
        stats.accepted_per_position,
    )


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 15])
def test_greedy_tokens_are_mlx_lms_at_every_depth(depth: int) -> None:
    forwards = 0
    for prompt in prompts()[1:3]:
        found = BLOCK.drafted(prompt, BLOCK.load(), depth)
        assert found.tokens == BLOCK.greedy(prompt)
        assert (found.stats.drafter, found.stats.reason) == ("dflash", None)
        assert len(found.stats.drafted_per_position) == depth
        forwards += found.stats.target_forwards
    assert forwards <= {1: 31, 2: 26, 4: 24, 8: 24, 15: 24}[depth], "48 without drafts"


@pytest.mark.parametrize("depth", [1, 4])
def test_seeded_tokens_are_those_of_the_target_alone(depth: int) -> None:
    for prompt, seed in zip(prompts()[2:4], (3, 4), strict=True):
        found = BLOCK.drafted(prompt, BLOCK.load(), depth, seed=seed, **draws())
        assert found.tokens == BLOCK.seeded(prompt, seed)
        assert found.per_forward > 1.2
    other = BLOCK.drafted(prompts()[2], BLOCK.load(), depth, seed=5, **draws())
    assert other.tokens != BLOCK.seeded(prompts()[2], 3), "another seed gives another text"


def test_widths_are_pinned_to_what_the_block_was_trained_for() -> None:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert BLOCK.load().num_draft_tokens == (2 if on_cpu else 15)
    assert BLOCK.load(num_draft_tokens=40).num_draft_tokens == 15
    found = BLOCK.drafted(prompts()[2], BLOCK.load(num_draft_tokens=3))
    assert len(found.stats.drafted_per_position) == 3
    assert found.tokens == BLOCK.greedy(prompts()[2])


def test_a_whole_block_drafts_otherwise_and_writes_the_same() -> None:
    short, whole = BLOCK.load(), BLOCK.load(block="whole")
    names = {each.provider.grouped.checkpoint_namespace for each in (short, whole)}
    assert len(names) == 1, "the same rows serve both"
    given = prompts()[2:4]
    outputs = {
        each: [BLOCK.drafted(prompt, each, 3) for prompt in given] for each in (short, whole)
    }
    for found in outputs.values():
        assert [each.tokens for each in found] == [BLOCK.greedy(prompt) for prompt in given]
    first, second = ([acceptance(o.stats) for o in found] for found in outputs.values())
    assert first != second


FIRST = (
    Asked(BLOCK, 0, 24, 3),
    Asked(BLOCK, 1, 6, 1),
    Asked(BLOCK, 2, 24, 15),
    Asked(BLOCK, 3, 16, 2, seed=4),
)
LATER = (
    Asked(BLOCK, 2, 12, 2, seed=3),
    Asked(BLOCK, 0, 1, 3),
    Asked(BLOCK, 3, 16, 4),
    Asked(BLOCK, 1, 9, 0),
)


def test_eight_rows_that_join_and_leave_get_what_they_get_alone() -> None:
    assert BLOCK.came_and_went(FIRST, LATER, after=9)[FIRST[0]].accepted > 0


def test_a_prompt_from_the_prefix_cache_drafts_as_if_it_had_been_read(tmp_path: Path) -> None:
    prompt, loaded = prompts()[2], BLOCK.load()
    cold = BLOCK.drafted(prompt, loaded, 4)
    cache = PrefixCache(64 * MB, directory=tmp_path)
    first, warm = (BLOCK.drafted(prompt, loaded, 4, prefix_cache=cache) for _ in range(2))
    longer = prompt + BLOCK.greedy(prompt)[:6]
    more = BLOCK.drafted(longer, loaded, 4, max_tokens=8, prefix_cache=cache)
    cache.close()
    assert cold.tokens == first.tokens == warm.tokens == BLOCK.greedy(prompt)
    assert (first.stats.cached_tokens, warm.stats.cached_tokens) == (0, len(prompt) - 1)
    assert acceptance(cold.stats) == acceptance(first.stats) == acceptance(warm.stats)
    assert more.stats.cached_tokens >= len(prompt) - 1
    assert acceptance(more.stats) == acceptance(
        BLOCK.drafted(longer, loaded, 4, max_tokens=8).stats
    )
    other = PrefixCache(64 * MB, directory=tmp_path)
    again = BLOCK.drafted(prompt, loaded, 4, prefix_cache=other)
    assert other.stats.disk_hits == 1
    assert acceptance(again.stats) == acceptance(warm.stats)
    whole = BLOCK.load(block="whole")
    kept = BLOCK.drafted(prompt, whole, 4, prefix_cache=other)
    assert kept.stats.cached_tokens == len(prompt) - 1, "a row does not depend on its blocks"
    assert acceptance(kept.stats) == acceptance(BLOCK.drafted(prompt, whole, 4).stats)
    other.close()


@pytest.mark.parametrize("forced", [0, 16])
def test_a_grammar_is_obeyed_and_what_it_forces_is_read_by_the_drafter(forced: int) -> None:
    schema = Grammar.regex('(import|return) \\{"description": "[a-z ]{16,40}"\\};')
    options: dict[str, Any] = {"max_tokens": 30, "grammar": schema, "num_forced_tokens": forced}
    alone = BLOCK.drafted(prompts()[1], None, **options)
    found = BLOCK.drafted(prompts()[1], BLOCK.load(), 3, **options)
    assert (found.tokens, found.text, found.finish) == (alone.tokens, alone.text, alone.finish)
    assert (found.stats.forced > 0) == (forced > 0)
    assert found.stats.drafted > 0


def test_a_round_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, rounds = BLOCK.waits(monkeypatch)
    assert waits == ["host_read"] * rounds
    assert 3 < rounds < 12


# Taps, and targets of other kinds.


@pytest.mark.parametrize("width", [1, 2, 9])
def test_taps_change_no_bit_of_the_targets_logits(width: int) -> None:
    target = BLOCK.load().target
    tokens = mx.array([list(prompts()[3][:width])], mx.int32)
    logits, hidden = [], None
    for context, taps in ((ContextKind.NONE, ()), (ContextKind.TAPS, (1, 3, 4, 6))):
        state = target.new_state()
        state.begin_round(width)
        window = target.forward(tokens, state, context, taps)
        logits.append(window.logits)
        hidden = window.context
    assert mx.array_equal(logits[0], logits[1]).item()
    assert hidden is not None
    # The last tap is what the head is given; the others are residuals, which no norm has touched.
    port = target.hidden_taps
    assert port is not None
    parts = mx.split(hidden, 4, axis=-1)
    assert mx.array_equal(port.logits(parts[3]), logits[0]).item()
    model: Any = BLOCK.demo()[0]
    norm = model.model.norm
    before = [part for part in parts[:3] if not mx.array_equal(norm(part), parts[3]).item()]
    assert len(before) == 3


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text", "lfm2", "gpt_oss", "mamba2"])
def test_any_target_with_taps_writes_its_own_text(name: str) -> None:
    model = build(name)
    target = MlxLmTarget(model)
    port = target.hidden_taps
    assert port is not None
    provider = tiny_block(
        hidden_size=port.hidden_size,
        vocab_size=target.vocab_size,
        mask_token=3,
        taps=(0, port.layer_count),
        target_layers=port.layer_count,
        windows=(None, 12),
    )
    for prompt in ([5, 9, 40, 3, 22, 17], [8], list(range(30, 45))):
        steps = generate_step(mx.array(prompt), model, max_tokens=24)
        group = VerifyGroup(target, provider, drafter="dflash")
        [row] = group.admit([request(prompt, max_tokens=24, num_draft_tokens=4)])
        drain(group)
        assert list(row.emitted) == [int(token) for token, _ in steps]
        assert (row.stats.reason, row.stats.draft_errors) == (None, 0)
        assert row.stats.drafted > 20
