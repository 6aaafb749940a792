"""Rows with the demo model's head come, go and take tokens from outside, each as if it were alone.

Greedy references are mlx-lm's tokens, seeded ones the target's alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from demo_texts import Asked
from mtp_demo import HEAD, demo, drafted, greedy, head, prompts
from scripted import drain, request

from specdec import BatchGenerator, VerifyGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify import Row


FIRST = (
    Asked(HEAD, 0, 24, 3),
    Asked(HEAD, 1, 6, 1),
    Asked(HEAD, 2, 24, 4),
    Asked(HEAD, 3, 16, 2, seed=3),
)
LATER = (
    Asked(HEAD, 2, 12, 2, seed=4),
    Asked(HEAD, 0, 1, 3),
    Asked(HEAD, 3, 16, 4),
    Asked(HEAD, 1, 9, 0),
)


@pytest.mark.parametrize("options", [{}, {"chain": "own", "hidden": "pre_norm"}], ids=str)
def test_rows_that_join_and_leave_get_what_they_get_alone(options: dict[str, Any]) -> None:
    found: dict[int, list[int | None]] = {}
    last: dict[int, Any] = {}
    with BatchGenerator(*demo(), drafter=head(**options), prefill_step_size=16) as generator:

        def steps(count: int) -> None:
            for _ in range(count):
                for answer in generator.next()[1]:
                    found.setdefault(answer.uid, []).append(answer.token)
                    last[answer.uid] = answer

        asked = {each.insert(generator): each for each in FIRST}
        steps(9)
        asked |= {each.insert(generator): each for each in LATER}
        steps(5)
        gone = next(uid for uid, each in asked.items() if each is FIRST[0])
        assert last[gone].finish_reason is None
        generator.remove([gone])
        calls = 0
        while generator.has_work:
            steps(1)
            calls += 1
            assert calls < 200
    for uid, each in asked.items():
        got = tuple(found[uid])
        if uid == gone:
            assert 0 < len(got) < each.budget
            assert got == each.expected()[: len(got)]
        else:
            assert got == each.expected(), each
    drafts = {uid: answer.stats for uid, answer in last.items() if answer.stats is not None}
    assert all(stats.draft_errors == 0 for stats in drafts.values())
    assert all(stats.reason is None for uid, stats in drafts.items() if asked[uid].depth)
    used = [stats for uid, stats in drafts.items() if asked[uid].depth and asked[uid].budget > 1]
    assert sum(stats.accepted for stats in used) > 14


def alone(asked: Asked, **options: Any) -> list[int]:
    found = drafted(asked.prompt, head(**options), asked.depth, max_tokens=asked.budget)
    return found.stats.accepted_per_position


@pytest.mark.parametrize("leaving", [0, 2])
def test_rows_that_stay_draft_as_if_the_one_that_leaves_had_never_been(leaving: int) -> None:
    asked = [Asked(HEAD, place, 16, 3) for place in (0, 1, 2, 3)]
    group = VerifyGroup(head().target, head().provider, drafter="mtp")
    rows = group.admit([_request(each) for each in asked])
    for _ in range(2):
        with group.round() as done:
            done.deliver_all()
    group.remove([rows[leaving]])
    drain(group)
    for place, (row, each) in enumerate(zip(rows, asked, strict=True)):
        assert row.emitted == each.expected()[: len(row.emitted)]
        if place != leaving:
            assert (row.finish, len(row.emitted)) == ("length", each.budget)
            assert row.stats.accepted_per_position == alone(each)
        else:
            assert row.finish == "cancelled"
    group.close()


def _request(asked: Asked) -> Any:
    return request(asked.prompt, max_tokens=asked.budget, num_draft_tokens=asked.depth)


# Tokens from outside.


@pytest.mark.parametrize("given", [1, 2, 7])
def test_a_row_goes_on_behind_tokens_from_outside(given: int) -> None:
    prompt, other = prompts()[2], prompts()[1]
    outside = greedy(prompt)[4 : 4 + given]
    group = VerifyGroup(head().target, head().provider, drafter="mtp")
    rows: Sequence[Row] = group.admit(
        [
            request(other, max_tokens=16, num_draft_tokens=3),
            request(prompt, max_tokens=16 + given, num_draft_tokens=3),
        ]
    )
    with group.round() as done:
        done.deliver_all()
    wrote = rows[1].emitted
    group.consume([(), outside])
    assert rows[1].emitted == (*wrote, *outside)
    drain(group)
    assert rows[0].emitted == greedy(other)[:16]
    text = prompt + wrote + outside
    left = 16 + given - len(wrote) - given
    assert rows[1].emitted == (*wrote, *outside, *greedy(text, left))
    assert [row.stats.draft_errors for row in rows] == [0, 0]
    assert rows[1].stats.reason is None
    # What the head drafts behind them is what it drafts for a row that read the whole text.
    fresh = drafted(text, head(), 3, max_tokens=left)
    first = [row.stats.accepted for row in rows]
    assert first[1] >= fresh.stats.accepted > 0
    group.close()


def test_a_preview_is_the_first_token_that_is_drafted_next() -> None:
    group = VerifyGroup(head().target, head().provider, drafter="mtp")
    [row] = group.admit([_request(Asked(HEAD, 2, 16, 3))])
    right = 0
    while group.rows:
        shown = [group.preview() for _ in range(2)]
        before, accepted = len(row.emitted), row.stats.accepted
        with group.round() as done:
            done.deliver_all()
        if row.finish is None:
            assert shown[0] is not None
            assert shown[0] == shown[1]
            [[first]] = shown[0]
            was_right = first == row.emitted[before]
            assert was_right == (row.stats.accepted > accepted)
            right += was_right
    assert right > 2
    assert row.emitted == greedy(prompts()[2])[:16]
    group.close()
