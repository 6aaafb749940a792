"""A drafter that rested knows each row's tokens once, whoever joins, leaves or is taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from scripted import ScriptedProvider, drain, request, target
from test_adaptive_in_executor import PROMPTS, TEXTS, ScriptedPace, drafter

from specdec import VerifyGroup
from specdec.verify.pacing import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import Row


def adaptive(place: int, **options: Any) -> Any:
    options = {"max_tokens": 14, "num_draft_tokens": 3, **options}
    return evolve(request(PROMPTS[place], **options), adaptive=True)


def at_rest(
    kind: str, *requests: Any, plans: Sequence[Plan] = (Plan(0),), rounds: int = 4
) -> tuple[VerifyGroup, ScriptedProvider, list[Row]]:
    provider = drafter(kind)
    assert isinstance(provider, ScriptedProvider)
    group = VerifyGroup(target(), provider, pace=ScriptedPace(plans))
    rows = group.admit(requests)
    run(group, rounds)
    return group, provider, rows


def run(group: VerifyGroup, rounds: int) -> None:
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()


@pytest.mark.parametrize("kind", ["host", "hidden states"])
@pytest.mark.parametrize("change", ["joins", "leaves", "leaves and is published", "nothing"])
def test_tokens_from_outside_are_read_once_after_rows_came_or_went(kind: str, change: str) -> None:
    left = {"publish": lambda *_: None} if change == "leaves and is published" else {}
    group, provider, rows = at_rest(kind, adaptive(2), adaptive(1, **left))
    if change == "joins":
        rows += group.admit([adaptive(0)])[-1:]
    elif change.startswith("leaves"):
        group.remove(rows[1:])
        rows = rows[:1]
    texts = [TEXTS[row.request.prompt, 0.0, None].output for row in rows]
    given: list[Sequence[int]] = [()] * len(rows)
    given[0] = texts[0][len(rows[0].emitted) :][:3]
    group.consume(given)
    group.preview()  # it catches up
    for row, held in zip(rows, provider.decoding.rows, strict=True):
        assert held.tokens == list(row.tokens[:-1])
        if kind == "hidden states":
            assert sum(each.shape[0] for each in held.contexts) == len(held.tokens)
    drain(group)
    assert [row.emitted for row in rows] == [text[:14] for text in texts]
    assert provider.complaints == []
