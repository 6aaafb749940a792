"""Heads of tiny releases: exact text, and each draft as the float64 head would have drafted it."""

from __future__ import annotations

from functools import cache, partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mtp_synthetic import GLM_TYPES, write_glm, write_qwen3_5, write_qwen3_next
from oracles.driven import Driven, RoundLog, head_of, log_softmax, redrafted, tokenizer
from oracles.plain import Release

import specdec
from specdec import Request, SamplingOptions, VerifyGroup
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mtp_reference import Pair
    from oracles.driven import Drafted, RoundOfRow

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": partial(write_qwen3_5, experts=4, tie=False),
    "qwen3_next": write_qwen3_next,
    **{name: partial(write_glm, model_type=name) for name in GLM_TYPES},
}
QUICK = [name for name in WRITERS if name != "deepseek_v3"]  # of 61 layers
NEXTN = [name for name in QUICK if name in GLM_TYPES]
PROMPTS = ((3, 17, 42, 8, 5, 90, 33), (11,), tuple((7 * place + 2) % 96 for place in range(19)))
NEAR = 1e-3  # logits that float32 may order otherwise


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp-nextn")


@cache
def release(name: str, scratch: Path) -> Release:
    return Release.of(WRITERS[name](scratch / name))


@cache
def bound(name: str, scratch: Path) -> MlxLmTarget:
    own = release(name, scratch)
    return MlxLmTarget(own.model, own.folder)


def kind_of(name: str) -> str:
    return "nextn" if name in GLM_TYPES else "mtp"


@cache
def plain(name: str, prompt: tuple[int, ...], scratch: Path, count: int = 18) -> list[int]:
    """mlx-lm's own greedy text."""
    model = release(name, scratch).model
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> RoundLog:
    return RoundLog.of(monkeypatch)


def pairs_of(own: Release, prompt: Sequence[int], output: Sequence[int], **how: Any) -> list[Pair]:
    """What the head has read: all of the text, or what its own history holds of it."""
    start = len(prompt) - 1 if how.get("history") == "own" else 0
    normed = how.get("hidden") != "pre_norm"
    return own.pairs([*prompt, *output], normed=normed)[start:]


def compared(
    own: Release, prompt: Sequence[int], rounds: Sequence[RoundOfRow], **how: Any
) -> tuple[int, int]:
    """Check every draft of a row against the float64 head; how many drafts, and how many near."""
    output: list[int] = []
    count = near = 0
    for each in rounds:
        output.append(each.pending)
        if not each.drafts:  # the row's budget left no room
            assert not each.accepted
            continue
        pairs = pairs_of(own, prompt, output, **how)
        tokens, logits = redrafted(own, pairs, len(each.drafts), raw=how.get("feed") == "raw")
        best = np.sort(logits, axis=-1)
        close = [place for place, row in enumerate(best) if row[-1] - row[-2] < NEAR]
        sure = close[0] if close else len(tokens)
        assert each.drafts[:sure] == tokens[:sure]
        count, near = count + sure, near + len(tokens) - sure
        output += each.drafts[: each.accepted]
    return count, near


def generated(
    name: str, scratch: Path, provider: Any, width: int, count: int = 18
) -> list[list[int]]:
    """The group's texts, one row for each prompt."""
    group = VerifyGroup(bound(name, scratch), provider, drafter=kind_of(name))
    rows = group.admit(
        [
            Request(
                prompt=prompt,
                sampling=SamplingOptions(),
                max_tokens=count,
                num_draft_tokens=width,
            )
            for prompt in PROMPTS
        ]
    )
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert [row.error for row in rows] == [None] * len(rows)
    assert [row.stats.reason for row in rows] == [None] * len(rows)
    assert all(row.stats.drafted > 0 for row in rows)
    return [list(row.emitted) for row in rows]


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mtp": {"history": "prompt", "feed": "normed"},
    "nextn": {"history": "own", "feed": "raw"},
}


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_writes_mlx_lms_text_and_drafts_as_the_float64_head_does(
    name: str, scratch: Path, log: RoundLog
) -> None:
    own, kind = release(name, scratch), kind_of(name)
    texts = generated(name, scratch, head_of(bound(name, scratch), kind), width=3)
    assert texts == [plain(name, prompt, scratch) for prompt in PROMPTS]
    total = 0
    for row, prompt in enumerate(PROMPTS):
        count, near = compared(own, prompt, log.rounds[row], **DEFAULTS[kind])
        assert near <= 3
        total += count
    assert total > 90


def test_deepseeks_own_layer_drafts_as_the_float64_head_does(scratch: Path, log: RoundLog) -> None:
    own = release("deepseek_v3", scratch)
    provider = head_of(bound("deepseek_v3", scratch), "nextn")
    texts = generated("deepseek_v3", scratch, provider, width=2, count=6)
    assert texts == [plain("deepseek_v3", prompt, scratch, 6) for prompt in PROMPTS]
    results = [
        compared(own, prompt, log.rounds[row], **DEFAULTS["nextn"])
        for row, prompt in enumerate(PROMPTS)
    ]
    assert sum(count for count, _ in results) > 15
    assert sum(near for _, near in results) <= 1


@pytest.mark.parametrize("name", QUICK)
def test_the_head_that_a_checkpoint_declares_is_found_by_the_targets_folder(
    name: str, scratch: Path, log: RoundLog
) -> None:
    own = release(name, scratch)
    with specdec.load_drafter("native", own.model, tokenizer(own.folder)) as loaded:
        assert loaded.kind == kind_of(name)
        width = loaded.width(None)
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        assert width == (1 if on_cpu or loaded.kind == "nextn" else 2)
        texts = generated(name, scratch, loaded.provider, width)
    assert texts == [plain(name, prompt, scratch) for prompt in PROMPTS]
    count, _ = compared(own, PROMPTS[0], log.rounds[0], **DEFAULTS[loaded.kind])
    assert count >= 14  # of 17 tokens after the first


READINGS = [
    {"history": history, "feed": feed}
    for history in ("own", "prompt")
    for feed in ("raw", "normed")
]


def assert_drafts(
    own: Release, drafted: Drafted, pairs: Sequence[Pair], how: Mapping[str, Any]
) -> int:
    """One row's logits within 1e-4 of the float64 head's, and its drafts; gives their number."""
    depth = len(drafted.tokens)
    if not depth:
        return 0
    tokens, logits = redrafted(own, pairs, depth, raw=how["feed"] == "raw")
    assert drafted.tokens == tokens
    np.testing.assert_allclose(drafted.logprobs, log_softmax(logits), rtol=0, atol=1e-4)
    return depth


def forced(
    name: str, scratch: Path, how: Mapping[str, Any], depth: int = 3, rounds: int = 9
) -> tuple[int, set[int]]:
    """Rows of which a test says how much is accepted; every logit checked in every round."""
    own = release(name, scratch)
    provider = head_of(bound(name, scratch), kind_of(name), **how)
    driven = Driven.of(bound(name, scratch), provider, PROMPTS)
    draws = np.random.default_rng(5)
    accepts = cycle([(0, 1, depth), (depth, 0, 1), (2, depth, 0), (1, 2, 2)])
    checked, counts = 0, set()
    for number in range(rounds):
        pending = [int(token) for token in draws.integers(1, 96, len(PROMPTS))]
        depths = [depth, depth, depth] if number % 3 else [depth, depth - 1, 0]
        drafted = driven.draft(pending, depths)
        for row, prompt in enumerate(PROMPTS):
            output = [*driven.texts[row][len(prompt) :], pending[row]]
            pairs = pairs_of(own, prompt, output, **how)
            checked += assert_drafts(own, drafted[row], pairs, how)
        taken = [min(a, d) for a, d in zip(next(accepts), depths, strict=True)]
        counts |= set(taken)
        driven.commit(taken)
    return checked, counts


@pytest.mark.parametrize("how", READINGS, ids=lambda how: f"{how['history']}-{how['feed']}")
@pytest.mark.parametrize("name", NEXTN)
def test_after_every_acceptance_a_next_token_layer_drafts_from_the_targets_hiddens(
    name: str, how: Mapping[str, Any], scratch: Path
) -> None:
    checked, counts = forced(name, scratch, how)
    assert checked == 6 * 9 + 3 * 5
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("name", [name for name in QUICK if name not in GLM_TYPES])
def test_after_every_acceptance_a_qwen_head_drafts_from_the_targets_hiddens(
    name: str, scratch: Path
) -> None:
    for history in ("prompt", "own"):
        checked, counts = forced(name, scratch, {"history": history, "feed": "normed"})
        assert checked == 6 * 9 + 3 * 5
        assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["glm4_moe", "glm_moe_dsa", "qwen3_5"])
def test_a_chain_of_its_own_keeps_what_the_head_made_of_accepted_drafts(
    name: str, scratch: Path
) -> None:
    own, depth = release(name, scratch), 3
    how: dict[str, Any] = {"feed": "normed", "history": "prompt"}
    provider = head_of(bound(name, scratch), kind_of(name), chain="own", **how)
    driven = Driven.of(bound(name, scratch), provider, PROMPTS)
    read = [own.pairs(prompt) if len(prompt) > 1 else [] for prompt in PROMPTS]
    for number, accepted in enumerate([(0, 1, 3), (3, 2, 0), (3, 3, 1), (2, 0, 2), (1, 1, 1)]):
        pending = [5 + 7 * number, 11, 90 - number]
        drafted = driven.draft(pending, depth)
        for row, count in enumerate(accepted):
            text, drafts = driven.texts[row], drafted[row].tokens
            known = [*read[row], own.pairs([*text, pending[row]])[-1]]
            assert_drafts(own, drafted[row], known, how)
            # The last of the drafts is read later, if at all, and then from the true hidden.
            for draft in drafts[: min(count, depth - 1)]:
                known.append((own.embed(draft), own.step(known)[-1]))
            if count == depth:
                known.append(own.pairs([*text, pending[row], *drafts])[-1])
            read[row] = known
        driven.commit(accepted)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_a_head_can_be_given_the_hidden_before_the_targets_last_norm(
    name: str, scratch: Path
) -> None:
    how = {"history": "prompt", "feed": "normed", "hidden": "pre_norm"}
    assert forced(name, scratch, how, rounds=4)[0] > 25


@pytest.mark.parametrize("name", NEXTN)
@pytest.mark.parametrize(
    "wrong", [{"history": "prompt"}, {"feed": "normed"}, {"hidden": "pre_norm"}]
)
def test_another_reading_is_told_from_the_default_one(
    name: str, wrong: Mapping[str, Any], scratch: Path
) -> None:
    """Of every reading the float64 head would draft otherwise, so the checks above can fail."""
    own, how = release(name, scratch), DEFAULTS["nextn"]
    driven = Driven.of(bound(name, scratch), head_of(bound(name, scratch), "nextn"), PROMPTS[:1])
    [drafted] = driven.draft([9], 3)
    assert assert_drafts(own, drafted, pairs_of(own, PROMPTS[0], [9], **how), how) == 3
    other = {**how, **wrong}
    with pytest.raises(AssertionError):
        assert_drafts(own, drafted, pairs_of(own, PROMPTS[0], [9], **other), other)
