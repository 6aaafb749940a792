"""Rows that their drafter drafts for no more go on without it, and nobody else is touched."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedDeviceRows,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    on_device,
    request,
    target,
    text_of,
)

from specdec import VerifyGroup
from specdec.contract import SupportsStandDown
from specdec.verify.lane import MAX_FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec import Row

PROMPTS: tuple[tuple[int, ...], ...] = ((5, 9, 2), (17, 3, 40, 8), (21, 60, 1))
FULL = "its context\nis full"
SAID = "drafter scripted stood down: its context is full"
MOVES: tuple[Any, ...] = ([RIGHT, WRONG], [RIGHT] * 3, [WRONG])


class Limited(ScriptedProvider):
    """Drafts for a row in so many rounds, and then says that it will no more.

    Args:
        plan: what it drafts.
        limits: rounds by prompt; without an entry the row is drafted for to its end.
        options: of ``ScriptedProvider``.
    """

    def __init__(self, plan: Any, limits: dict[tuple[int, ...], int], **options: Any) -> None:
        rows = LimitedRows if "device" not in options else LimitedDeviceRows
        super().__init__(plan, rows=rows, **options)
        self.limits = limits
        self.drafted: Counter[tuple[int, ...]] = Counter()

    def said(self, rows: ScriptedRows) -> Sequence[str | None]:
        return [
            FULL if p in self.limits and self.drafted[p] >= self.limits[p] else None
            for p in map(prompt_of, rows.rows)
        ]

    def count(self, rows: ScriptedRows) -> None:
        self.drafted.update(map(prompt_of, rows.rows))


def prompt_of(row: Any) -> tuple[int, ...]:
    return next(p for p in PROMPTS if tuple(row.tokens[:2]) == p[:2])


class LimitedRows(ScriptedRows):
    provider: Limited

    @property
    def stood_down(self) -> Sequence[str | None]:
        return self.provider.said(self)

    def draft(self, *asked: Any) -> list[Any]:
        self.provider.count(self)
        return super().draft(*asked)


class LimitedDeviceRows(ScriptedDeviceRows):
    provider: Limited

    @property
    def stood_down(self) -> Sequence[str | None]:
        return self.provider.said(self)

    def draft_device(self, *asked: Any) -> Any:
        self.provider.count(self)
        return super().draft_device(*asked)


def script() -> Script:
    texts = [text_of(prompt) for prompt in PROMPTS]
    return Script(texts, [MOVES] * len(texts))


def admitted(
    provider: ScriptedProvider, prompts: Sequence[tuple[int, ...]] = PROMPTS, count: int = 30
) -> tuple[VerifyGroup, list[Row]]:
    group = VerifyGroup(target(), provider)
    asked = [request(p, max_tokens=count, num_draft_tokens=4) for p in prompts]
    return group, group.admit(asked)


def sizes(provider: ScriptedProvider) -> list[int]:
    """Rows of the draft group, round by round."""
    return [len(each.pending) for each in provider.rounds]


def unchanged(rows: Sequence[Row]) -> bool:
    texts: list[Text] = [text_of(row.request.prompt) for row in rows]
    return all(
        row.emitted == text.output[: row.request.max_tokens]
        for row, text in zip(rows, texts, strict=True)
    )


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_row_that_stands_down_leaves_before_the_next_round(where: str) -> None:
    plan = script()
    options = {} if where == "host" else {"device": on_device(plan, lengths=True)}
    provider = Limited(plan, {PROMPTS[1]: 3}, **options)
    group, rows = admitted(provider)
    assert isinstance(provider.kind(provider, [], True), SupportsStandDown)
    widths = []
    while group.rows:
        with group.round() as done:
            done.deliver_all()
        widths.append([row.width for row in rows])
    assert sizes(provider)[:5] == [3, 3, 3, 2, 2]
    assert widths[:4] == [[4, 4, 4], [4, 4, 4], [4, 0, 4], [4, 0, 4]]
    assert provider.calls["filter_rows"] >= 1
    assert [row.stats.reason for row in rows] == [None, SAID, None]
    assert unchanged(rows)
    assert provider.complaints == []
    assert all(row.stats.draft_errors == 0 == row.stats.invalid_drafts for row in rows)
    assert rows[1].stats.accepted > 0  # what was drafted before counts
    assert rows[1].stats.target_forwards > max(rows[k].stats.target_forwards for k in (0, 2))
    # The drafts of the others go on to their ends.
    assert {prompt_of(row) for row in provider.rounds[-1].group.rows} <= {PROMPTS[0], PROMPTS[2]}
    assert min(provider.drafted[PROMPTS[k]] for k in (0, 2)) > 5


def test_a_drafter_that_never_says_so_keeps_its_rows() -> None:
    provider = Limited(script(), {})
    group, rows = admitted(provider)
    drain(group)
    assert sizes(provider)[:8] == [3] * 8
    assert [row.stats.reason for row in rows] == [None] * 3
    assert unchanged(rows)


def test_where_all_rows_stand_down_the_group_goes_on_plainly() -> None:
    provider = Limited(script(), {PROMPTS[0]: 1, PROMPTS[1]: 4, PROMPTS[2]: 2})
    group, rows = admitted(provider)
    drain(group)
    assert sizes(provider) == [3, 2, 1, 1]
    assert provider.left_open == []
    assert [row.stats.reason for row in rows] == [SAID] * 3
    assert unchanged(rows)
    assert provider.complaints == []
    assert all(row.stats.draft_errors == 0 for row in rows)


def test_all_rows_at_once_and_a_new_one_after_them() -> None:
    provider = Limited(script(), {PROMPTS[0]: 2, PROMPTS[1]: 2})
    group, rows = admitted(provider, PROMPTS[:2])
    for _ in range(6):
        with group.round() as done:
            done.deliver_all()
    assert sizes(provider) == [2, 2]
    assert provider.left_open == []
    rows += group.admit([request(PROMPTS[2], max_tokens=30, num_draft_tokens=4)])
    drain(group)
    assert set(sizes(provider)[2:]) == {1}
    assert provider.drafted[PROMPTS[2]] > 5
    assert [row.stats.reason for row in rows] == [SAID, SAID, None]
    assert unchanged(rows)
    assert provider.complaints == []


class Miscounting(Limited):
    """Says it of another number of rows than it has."""

    def __init__(self, plan: Any, more: int) -> None:
        super().__init__(plan, {})
        self.more = more

    def said(self, rows: ScriptedRows) -> Sequence[str | None]:
        return [FULL] * (len(rows.rows) + self.more)


class Mistyped(Limited):
    """Says something else than texts, of one row or of all."""

    def __init__(self, plan: Any, say: Callable[[int], Any]) -> None:
        super().__init__(plan, {})
        self.say = say

    def said(self, rows: ScriptedRows) -> Any:
        return self.say(len(rows.rows))


class Raising(Limited):
    def said(self, rows: ScriptedRows) -> Sequence[str | None]:
        raise Fault("stood_down")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Miscounting(script(), -1), "stood_down gave 2 entries for 3 rows"),
        (lambda: Miscounting(script(), -2), "stood_down gave 1 entry for 3 rows"),
        (lambda: Miscounting(script(), 1), "stood_down gave 4 entries for 3 rows"),
        (
            lambda: Mistyped(script(), lambda rows: [FULL, *[True] * (rows - 1)]),
            "stood_down gave True for row 1; give a reason, or None",
        ),
        (
            lambda: Mistyped(script(), lambda rows: [False] * rows),
            "stood_down gave False for row 0; give a reason, or None",
        ),
        (
            lambda: Mistyped(script(), lambda rows: "yes"[:rows]),
            "stood_down gave 'yes'; give a list, one per row",
        ),
        (
            lambda: Mistyped(script(), lambda _: None),
            "stood_down gave None; give a list, one per row",
        ),
        (lambda: Raising(script(), {}), "Fault: stood_down"),
    ],
    ids=["too few", "one", "too many", "true", "false", "a text", "none", "raises"],
)
def test_a_stood_down_that_is_none_is_an_exception_of_the_drafter(
    make: Callable[[], Limited], says: str
) -> None:
    provider = make()
    group, rows = admitted(provider)
    with group.round() as done:
        done.deliver_all()
    assert [row.stats.draft_errors for row in rows] == [1] * 3
    assert all(str(row.stats.last_draft_error).endswith(says) for row in rows)
    assert [row.width for row in rows] == [4] * 3  # of no row was it said
    assert [row.stats.reason for row in rows] == [None] * 3
    assert provider.left_open == []
    drain(group)
    assert len(provider.rounds) == MAX_FAILURES
    assert all(str(row.stats.reason).startswith("drafter scripted failed: ") for row in rows)
    assert unchanged(rows)
    assert provider.complaints == []


@settings(max_examples=25)
@given(st.data())
def test_whoever_stands_down_and_whoever_ends_the_draft_group_is_the_others(
    data: st.DataObject,
) -> None:
    limit = st.none() | st.integers(1, 8)
    limits = {p: n for p in PROMPTS if (n := data.draw(limit, label=f"limit of {p}")) is not None}
    budgets = [data.draw(st.integers(1, 20), label="budget") for _ in PROMPTS]
    provider = Limited(script(), limits)
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [
            request(p, max_tokens=budget, num_draft_tokens=4)
            for p, budget in zip(PROMPTS, budgets, strict=True)
        ]
    )
    while group.rows:
        drafts = [
            row.request.prompt
            for row in group.rows
            if provider.drafted[row.request.prompt] < limits.get(row.request.prompt, 100)
        ]
        before = len(provider.rounds)
        with group.round() as done:
            asked = [
                [prompt_of(row) for row in each.group.rows] for each in provider.rounds[before:]
            ]
            done.deliver_all()
        assert asked == ([drafts] if drafts else [])
    assert unchanged(rows)
    assert provider.complaints == []
    for row in rows:
        prompt = row.request.prompt
        down = provider.drafted[prompt] >= limits.get(prompt, 100)
        assert row.stats.reason == (SAID if down else None)
        assert row.stats.draft_errors == 0


class RemarkingRows(ScriptedRows):
    provider: Remarking

    @property
    def remarks(self) -> Any:
        return self.provider.say(len(self.rows))


class Remarking(ScriptedProvider):
    """Says something of the rows that it drafts for."""

    def __init__(self, say: Callable[[int], Any]) -> None:
        super().__init__(script(), rows=RemarkingRows)
        self.say = say


def test_a_remark_is_said_of_a_row_that_is_drafted_for_and_can_be_taken_back() -> None:
    said: list[list[str | None]] = [["half of it\nis full", None, "slow"], [None, "slow", None]]
    provider = Remarking(lambda _: said[0])
    group, rows = admitted(provider)
    for wanted in (["half of it is full", None, "slow"], [None, "slow", None]):
        with group.round() as done:
            done.deliver_all()
        assert [row.stats.reason for row in rows] == wanted
        assert [row.width for row in rows] == [4] * 3
        said.reverse()
    group.close()


@pytest.mark.parametrize(
    ("say", "says"),
    [
        (lambda rows: [None] * (rows + 1), "remarks gave 4 entries for 3 rows"),
        (lambda _: None, "remarks gave None; give a list, one per row"),
        (lambda rows: [7] * rows, "remarks gave 7 for row 0; give a reason, or None"),
    ],
)
def test_remarks_that_are_none_are_an_exception_of_the_drafter(
    say: Callable[[int], Any], says: str
) -> None:
    provider = Remarking(say)
    group, rows = admitted(provider)
    with group.round() as done:
        done.deliver_all()
    assert all(str(row.stats.last_draft_error).endswith(says) for row in rows)
    assert [row.stats.reason for row in rows] == [None] * 3
    drain(group)
    assert all(str(row.stats.reason).startswith("drafter scripted failed: ") for row in rows)
    assert unchanged(rows)
    assert provider.left_open == []
