"""Every model type of mlx-lm speculates, and writes what mlx-lm writes, whatever is drafted.

Some types of every kind run always; ``SPECDEC_ALL_ARCHITECTURES=1`` runs them all, and a line at
the end says how many there are, and which do not speculate and why.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import pytest
from adversary import WIDEST, Adversary, planted
from architectures import CANNOT_BE_BUILT, CONFIGS, build, model_types
from architectures.chosen import CHOSEN, COUNT, PROMPTS, STEP, counting, offsets, target, text
from architectures.exceptions import CANNOT_RUN, PLAIN
from mlx_lm.models.cache import make_prompt_cache
from scripted import Script, ScriptedProvider, drain, request

from specdec import VerifyGroup
from specdec.state import RaggedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import Row

EVERY = os.environ.get("SPECDEC_ALL_ARCHITECTURES") == "1"
TYPES = tuple(model_types()) if EVERY else CHOSEN
LEAVES_AT = 24  # tokens after which the second row's consumer stops
_speculated: set[str] = set()
_excepted: dict[str, str] = {}


def check_lengths(group: VerifyGroup, name: str) -> None:
    """Between rounds every cache of a row holds all its tokens but the pending one."""
    for index, row in enumerate(group.rows):
        caches, read = group.extract(row)
        # A window of plain decoding is begun before the one before it is read.
        assert len(row.tokens) - len(read) in ({0, 1} if name in PLAIN else {1})
        assert read == tuple(row.tokens[: len(read)])
        assert row.processed == len(read)
        assert group._live.state is not None
        assert group._live.state.lengths[index] == len(read)
        assert offsets(caches) == [len(read) * counts for counts in counting(name)]


def one_row(name: str, provider: ScriptedProvider) -> Row:
    group = VerifyGroup(target(name), provider, drafter="adversary", prefill_step_size=STEP)
    [row] = group.admit([request(PROMPTS[0], max_tokens=COUNT, num_draft_tokens=WIDEST)])
    drain(group, lambda: check_lengths(group, name))
    return row


def three_rows(name: str, provider: ScriptedProvider) -> list[Row]:
    """Rows that join two rounds apart; the one in the middle leaves early."""
    group = VerifyGroup(target(name), provider, drafter="adversary", prefill_step_size=STEP)
    rows: list[Row] = []

    def stays(index: int) -> bool:
        return index != 1 or len(rows[1].emitted) < LEAVES_AT

    for index, prompt in enumerate(PROMPTS):
        rows += group.admit(
            [
                request(
                    prompt,
                    max_tokens=COUNT,
                    num_draft_tokens=WIDEST,
                    consumer=lambda _, index=index: stays(index),
                )
            ]
        )
        for _ in range(2):
            with group.round() as done:
                done.deliver_all()
            check_lengths(group, name)
    drain(group, lambda: check_lengths(group, name))
    return rows


def check_drafted(name: str, rows: Sequence[Row]) -> None:
    """Drafts were accepted and rejected, or the statistics say why there were none."""
    stats = [row.stats for row in rows]
    if name in PLAIN:
        for each in stats:
            assert each.drafted == 0
            assert PLAIN[name] in (each.reason or "")
        return
    assert [each.reason for each in stats] == [None] * len(stats)
    assert sum(each.accepted for each in stats) > 0
    assert sum(each.drafted - each.accepted for each in stats) > 0


def kind(name: str) -> tuple[Any, ...]:
    """The types of a model's caches, and which rows its code takes in one call."""

    def types(caches: Sequence[Any]) -> frozenset[Any]:
        return frozenset(
            types(each.caches) if hasattr(each, "caches") else type(each).__name__
            for each in caches
        )

    return types(make_prompt_cache(build(name))), target(name).together


def begin(name: str) -> None:
    """Let mlx-lm alone write with a model type, from importing it on."""
    importlib.import_module(f"mlx_lm.models.{name}")
    text(name, PROMPTS[0])


@pytest.mark.parametrize("name", TYPES)
def test_the_text_is_mlx_lms_in_a_row_alone_and_in_a_ragged_batch(name: str) -> None:
    if name in CANNOT_RUN:
        cannot = CANNOT_RUN[name]
        with pytest.raises(cannot.error) as raised:
            begin(name)
        assert cannot.words in str(raised.value)
        _excepted[name] = cannot.reason
        return
    texts = [text(name, prompt) for prompt in PROMPTS]
    first, second = (Adversary(texts, target(name).vocab_size, seed=seed) for seed in (1, 2))
    alone = one_row(name, first.device_provider)
    assert alone.emitted == texts[0].output
    check_drafted(name, [alone])
    rows = three_rows(name, second.provider)
    assert [row.finish for row in rows] == ["length", "cancelled", "length"]
    assert [len(row.emitted) for row in rows] == [COUNT, LEAVES_AT, COUNT]
    for row, each in zip(rows, texts, strict=True):
        assert row.emitted == each.output[: len(row.emitted)]
    check_drafted(name, rows)
    assert first.complaints == second.complaints == []
    if name in PLAIN:
        _excepted[name] = PLAIN[name]
        return
    assert {"one error", "on the device"} <= set(first.played)
    assert {"one error", "too many", "no token"} <= set(second.played)
    _speculated.add(name)


def test_every_model_type_is_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """One that mlx-lm has and the configurations lack fails here, whichever types were run.

    If all were, those that always run are of every kind there is, or this fails too.
    """
    every = set(model_types())
    assert set(CONFIGS) | set(CANNOT_BE_BUILT) == every
    assert set(CHOSEN) | set(PLAIN) | set(CANNOT_RUN) <= every
    assert _speculated | set(_excepted) == set(TYPES)
    if EVERY:
        ran = _speculated | set(PLAIN)
        assert {kind(name) for name in ran} == {kind(name) for name in CHOSEN}
        assert set(_excepted) == set(PLAIN) | set(CANNOT_RUN)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(_excepted.items()))
        with capsys.disabled():
            print(f"\n{len(_speculated)} of {len(every)} model types speculate. Not: {reasons}.")


@pytest.mark.parametrize("name", [name for name in CHOSEN if name not in PLAIN])
def test_drafts_that_were_kept_after_all_would_be_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: state that keeps what was rejected writes another text."""
    roll_back = RaggedState.rollback

    def keep_all(self: RaggedState, kept: Sequence[int]) -> None:
        roll_back(self, [self.open_width] * len(kept))

    monkeypatch.setattr(RaggedState, "rollback", keep_all)
    plan = Script.always([text(name, PROMPTS[0])], planted(4, 1))
    group = VerifyGroup(target(name), ScriptedProvider(plan), prefill_step_size=STEP)
    [row] = group.admit([request(PROMPTS[0], max_tokens=16, num_draft_tokens=4)])
    drain(group)
    assert row.emitted != text(name, PROMPTS[0]).output[:16]
