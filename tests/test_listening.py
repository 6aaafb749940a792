"""A drafter at rest that looks its drafts up is listened to, and comes back when it is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, evolve, field
from scripted import RIGHT, WRONG, Script, ScriptedProvider, ScriptedRows, request, target, text_of

from specdec import VerifyGroup
from specdec.verify.pacing import Plan, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec import Row

PROMPT = (5, 9, 40, 3, 22, 17)
TEXT = text_of(PROMPT)


class LookedUp(ScriptedRows):
    """Rows that can be listened to."""

    def consume(self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int]) -> None:
        self._enter("consume")
        read: Any = tokens.tolist()
        for row, ids, length in zip(self.rows, read, lengths, strict=True):
            row.tokens.extend(ids[:length])

    def look_up(self, pending: Sequence[int], depths: Sequence[int], /) -> list[list[int]]:
        self._enter("look_up")
        plan = self.provider.plan
        texts = self._texts(pending)
        return [
            plan(text, depth, len(text) - len(PROMPT))
            for text, depth in zip(texts, depths, strict=True)
        ]


@define
class RestingPace:
    """Rests, and writes down what it hears."""

    listens: int = 3
    heard: list[tuple[int, int]] = field(factory=list)

    def plan(self, rows: Sequence[Row]) -> Plan:
        return Plan(0, rounds=4, listens=self.listens)

    def padded(self, rows: int, needed: int) -> int:
        return needed

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        assert seen.depth == 0

    def hear(self, row: Row, asked: int, right: int) -> None:
        self.heard.append((asked, right))


def play(moves: Any, pace: RestingPace, rows: type[ScriptedRows] = LookedUp) -> ScriptedProvider:
    provider = ScriptedProvider(Script.always([TEXT], moves), rows=rows)
    group = VerifyGroup(target(), provider, pace=pace)
    asked = request(PROMPT, max_tokens=24, num_draft_tokens=5)
    [row] = group.admit([evolve(asked, adaptive=True)])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert row.emitted == TEXT.output[:24]
    assert provider.complaints == []
    assert provider.calls["draft"] == 0
    return provider


@pytest.mark.parametrize(
    ("moves", "right"),
    [([RIGHT] * 3, 3), ([RIGHT, WRONG, RIGHT], 1), ([WRONG], 0), ([], 0), ([RIGHT], 1)],
)
def test_what_it_would_have_drafted_is_judged_by_the_tokens_that_came(
    moves: list[Any], right: int
) -> None:
    pace = RestingPace()
    play(moves, pace)
    assert pace.heard
    assert set(pace.heard) == {(3, right)}


def test_one_that_is_right_is_asked_more_often() -> None:
    good, bad = RestingPace(), RestingPace()
    asked = [play([RIGHT] * 3, good).calls["look_up"], play([WRONG], bad).calls["look_up"]]
    assert asked[0] > asked[1] >= 2


def test_nobody_listens_to_a_drafter_that_cannot_be_asked_for_nothing() -> None:
    class Following(LookedUp):
        look_up = None  # type: ignore[assignment]

    pace = RestingPace()
    play([RIGHT] * 3, pace, Following)
    assert pace.heard == []


def test_nobody_listens_where_the_plan_does_not() -> None:
    pace = RestingPace(listens=0)
    assert play([RIGHT] * 3, pace).calls["look_up"] == 0
    assert pace.heard == []


def test_a_drafter_that_raises_when_it_is_listened_to_ends_nothing() -> None:
    pace = RestingPace()
    provider = ScriptedProvider(Script.always([TEXT], [RIGHT]), rows=LookedUp)
    provider.faults = {"look_up": [1]}
    group = VerifyGroup(target(), provider, pace=pace)
    asked = request(PROMPT, max_tokens=24, num_draft_tokens=5)
    [row] = group.admit([evolve(asked, adaptive=True)])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert row.emitted == TEXT.output[:24]
    assert row.stats.draft_errors == 1
