"""A drafter that rested knows each row's tokens once, whoever joins, leaves or is taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from scripted import ScriptedProvider, drain, request, target
from test_adaptive_in_executor import PROMPTS, TEXTS, ScriptedPace, drafter

from specdec import VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.verify.pacing import Plan, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import Row


def adaptive(place: int, **options: Any) -> Any:
    options = {"max_tokens": 14, "num_draft_tokens": 3, **options}
    return evolve(request(PROMPTS[place], **options), adaptive=True)


def at_rest(
    kind: str, *requests: Any, pace: ScriptedPace | None = None, rounds: int = 4
) -> tuple[VerifyGroup, ScriptedProvider, list[Row]]:
    provider = drafter(kind)
    assert isinstance(provider, ScriptedProvider)
    group = VerifyGroup(target(), provider, pace=pace or ScriptedPace([Plan(0)]))
    rows = group.admit(requests)
    run(group, rounds)
    return group, provider, rows


def run(group: VerifyGroup, rounds: int) -> None:
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()


def check_read(group: VerifyGroup, provider: ScriptedProvider) -> None:
    """Each row of the drafter has read its tokens once, all but the pending one."""
    group.preview()  # it catches up
    for row, held in zip(group.rows, provider.decoding.rows, strict=True):
        # A prompt that is read whole has no pending token before its first round.
        pending = bool(row.emitted) or provider.mode != PrefillMode.FULL
        assert held.tokens == list(row.tokens[: len(row.tokens) - pending])
        if provider.context is not ContextKind.NONE:
            assert sum(each.shape[0] for each in held.contexts) == len(held.tokens)


@pytest.mark.parametrize("most", [256, 4])
@pytest.mark.parametrize("rounds", [3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["host", "hidden states"])
@pytest.mark.parametrize("change", ["joins", "leaves", "leaves and is published", "nothing"])
def test_tokens_from_outside_are_read_once_after_rows_came_or_went(
    kind: str, change: str, rounds: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.verify.lane.MOST", most)
    left = {"publish": lambda *_: None} if change == "leaves and is published" else {}
    group, provider, rows = at_rest(kind, adaptive(2), adaptive(1, **left), rounds=rounds)
    if change == "joins":
        rows += group.admit([adaptive(0)])[-1:]
    elif change.startswith("leaves"):
        group.remove(rows[1:])
        rows = rows[:1]
    texts = [TEXTS[row.request.prompt, 0.0, None].output for row in rows]
    given: list[Sequence[int]] = [()] * len(rows)
    given[0] = texts[0][len(rows[0].emitted) :][:3]
    group.consume(given)
    check_read(group, provider)
    drain(group)
    assert [row.emitted for row in rows] == [text[:14] for text in texts]
    assert provider.complaints == []


@pytest.mark.parametrize("kind", ["host", "device", "hidden states"])
@pytest.mark.parametrize("rests", [1, 3])
def test_rows_that_join_and_leave_while_the_drafter_rests_are_read_whole(
    kind: str, rests: int
) -> None:
    pace = ScriptedPace([Plan(0)])
    joined = adaptive(2), adaptive(1, max_tokens=5)
    group, provider, rows = at_rest(kind, *joined, pace=pace, rounds=2)
    for place in (0, 3, 1):
        rows += group.admit([adaptive(place, publish=lambda *_: None)])[-1:]
        run(group, rests)
    group.remove(rows[:1])
    run(group, 2)
    assert group._live.flight is not None
    pace.plans = [Plan(2)]
    run(group, 3)  # the last plain window, and two of drafts
    check_read(group, provider)
    drain(group)
    for row in rows[1:]:
        text = TEXTS[row.request.prompt, 0.0, None].output
        assert row.emitted == text[: row.request.max_tokens]
    assert provider.complaints == []


class Noting(ScriptedPace):
    """Notes of how many rows it was told, once a round."""

    counts: list[int]

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        super().observe(rows, seen)
        self.counts.extend([len(rows)] * seen.rounds)


def test_a_window_that_was_begun_before_a_row_joined_is_not_timed_for_both() -> None:
    pace = Noting([Plan(0)])
    pace.counts = []
    group, _, [first] = at_rest("host", adaptive(2), pace=pace)
    assert group._live.flight is not None
    [second] = group.admit([adaptive(1)])
    run(group, 5)
    windows = sum(second.stats.widths.values())
    assert windows == 4
    assert pace.counts.count(2) == windows - 1  # the last one is told of with the next plan
    assert first.stats.widths == {0: 9}
