"""What a pace makes of rows that it does not rule, of machines at their edges, and of new rows."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, evolve, field
from scripted import RIGHT, Script, ScriptedProvider, Text, drain, request, solo, target
from test_adaptive_in_executor import PROMPTS, TEXTS, Following, ScriptedPace, drafter
from test_adaptive_pace import FakeRow, FakeTarget

from specdec import VerifyGroup
from specdec.cost import Account, AdaptivePace, Costs, Curve, Kept, Point
from specdec.verify.pacing import Plan, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec import Row

# Costs.


def costs(windows: Mapping[int, float], plain: float, *, rows: int = 1, most: int = 15) -> Costs:
    made = Costs(FakeTarget(), "x", default=3, most=most, seconds=0)  # type: ignore[arg-type]
    made._add(Kept({Point(rows, width, 512): t for width, t in windows.items()}, {rows: plain}))
    return made


@pytest.mark.parametrize(
    ("needed", "wider", "width"), [(1, 8.7, 1), (1, 8.0, 8), (2, 9.2, 2), (2, 8.7, 8)]
)
def test_a_plain_window_is_padded_for_a_larger_gain_than_one_of_drafts(
    needed: int, wider: float, width: int
) -> None:
    assert costs({1: 10.0, 2: 10.0, 8: wider}, 10.0).padded(1, needed) == width


def test_no_window_is_padded_beyond_what_a_drafter_may_ask_for() -> None:
    falling = {1: 10.0, 2: 8.0, 4: 6.0, 8: 1.0}
    assert costs(falling, 10.0, most=15).padded(1, 2) == 8
    assert costs(falling, 10.0, most=3).padded(1, 2) == 4


def test_beyond_the_last_width_a_time_does_not_fall() -> None:
    falling = Curve({Point(1, width, 512): time for width, time in ((1, 9.0), (4, 8.0), (8, 3.0))})
    assert falling.at(1, 20, 512) == 3.0
    rising = Curve({Point(1, width, 512): time for width, time in ((1, 9.0), (4, 8.0), (8, 12.0))})
    assert rising.at(1, 20, 512) == 24.0


def test_a_row_has_what_it_has_seen_and_begins_with_what_others_have() -> None:
    known = costs({1: 10.0}, 10.0)
    first, second = FakeRow(), FakeRow()
    for _ in range(40):
        known.survival(first).add(3, 0)
    assert known.survival(first) is known.survival(first)
    assert known.survival(second) is not known.survival(first)
    assert known.survival(second).chance(0) < 0.1


# Choices.


class Fixed:
    adaptive = False


def test_a_row_that_has_drafts_does_not_make_up_for_those_that_want_none() -> None:
    """One row of eight would gain three drafts, for a window that costs all of them twice."""
    known = costs({1: 10.0, 4: 20.0, 8: 20.0, 16: 20.0}, 10.0, rows=8)
    rows = [FakeRow(), *[FakeRow(width=0, request=Fixed()) for _ in range(7)]]
    for _ in range(50):
        known.survival(rows[0]).add(3, 3)
        known.times.observe(8, 0, 1, 0, 10.0)
    pace: Any = AdaptivePace(known)
    assert pace.plan(rows).depth == 0
    alone = costs({1: 10.0, 4: 20.0, 8: 20.0, 16: 20.0}, 10.0)
    for _ in range(50):
        alone.survival(rows[0]).add(3, 3)
        alone.times.observe(1, 0, 1, 0, 10.0)
    pace = AdaptivePace(alone)
    assert pace.plan(rows[:1]).depth > 0


def test_what_was_gained_on_one_text_is_not_lost_on_the_next() -> None:
    account = Account()
    for _ in range(1000):
        account.drafted(3.0)
    assert account.affords(10)
    account.drafted(-40.0)
    assert not account.affords(1)


def test_a_drafter_that_nobody_has_seen_do_well_is_looked_at_now_and_then() -> None:
    known, row = costs({1: 10.0, 4: 12.0, 8: 13.0, 16: 14.0}, 10.0), FakeRow()
    pace: Any = AdaptivePace(known)
    depths = []
    for number in range(4000):
        depth = pace.plan([row]).depth
        accepted = min(depth, 3) if number >= 1500 else 0
        took = known.window(1, 1 + depth) + depth / 4
        pace.observe([row], Seen(depth, [depth], [accepted], depth, 1 + depth, took / 1000))
        depths.append(depth)
    assert sum(map(bool, depths[200:1500])) < 0.1 * 1300
    assert min(depths[3500:]) > 0


def test_rows_that_have_numbers_of_their_own_have_no_pace() -> None:
    pace: Any = AdaptivePace(costs({1: 10.0, 4: 20.0}, 10.0))
    assert pace.plan([FakeRow(request=Fixed()), FakeRow(width=0)]).depth is None


# In the executor.


def adaptive(place: int, **options: Any) -> Any:
    options = {"max_tokens": 14, "num_draft_tokens": 3, **options}
    return evolve(request(PROMPTS[place], **options), adaptive=True)


def group_of(pace: ScriptedPace, kind: str = "host") -> tuple[VerifyGroup, ScriptedProvider]:
    provider = drafter(kind)
    assert isinstance(provider, ScriptedProvider)
    return VerifyGroup(target(), provider, pace=pace), provider


def run(group: VerifyGroup, rounds: int, *, pause: float = 0.0, ahead: bool = False) -> None:
    for _ in range(rounds):
        with group.round(ahead=ahead) as done:
            time.sleep(pause)
            done.deliver_all()


def deliver_to(group: VerifyGroup, index: int) -> None:
    """A round of which one row alone is given its tokens; the others end without them."""
    with group.round() as done:
        assert list(done.deliver(index))


def test_a_plan_that_holds_for_long_ends_where_rows_join_or_leave() -> None:
    pace = ScriptedPace([Plan(0, rounds=99)])
    group, provider = group_of(pace)
    rows = group.admit([adaptive(2)])
    run(group, 3)
    assert pace.asked == 1
    pace.plans = [Plan(2, rounds=99)]
    rows += group.admit([adaptive(1)])
    run(group, 2)
    assert pace.asked == 2
    assert provider.rounds[0].depths == [2, 2]
    group.remove(rows[:1])
    run(group, 1)
    assert pace.asked == 3
    drain(group)
    assert pace.asked == 3
    assert rows[1].emitted == TEXTS[PROMPTS[1], 0.0, None].output[:14]
    assert provider.complaints == []


def test_a_row_that_joins_is_asked_for_what_the_plan_says() -> None:
    group, provider = group_of(ScriptedPace([Plan(1)]))
    group.admit([adaptive(2)])
    run(group, 1)
    group.admit([adaptive(1)])
    run(group, 1)
    assert [each.depths for each in provider.rounds] == [[1], [1, 1]]


@define
class Clock:
    """Every look at it takes a millisecond."""

    now: float = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@define
class Timed(ScriptedPace):
    """A pace that takes long to choose, as where it measures first."""

    clock: Clock = field(factory=Clock)

    def plan(self, rows: Sequence[Row]) -> Plan:
        self.clock.now += 20
        return super().plan(rows)


@pytest.mark.parametrize("plan", [Plan(0, rounds=4), Plan(0), Plan(2)])
def test_rounds_take_what_they_take_without_consumers_and_choices(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = Timed([plan])
    monkeypatch.setattr("specdec.verify.tempo.time", pace.clock)
    group, _ = group_of(pace)
    group.admit([adaptive(2)])
    rounds = 8 if plan.rests else 4
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()
            pace.clock.now += 30  # a consumer who waits
    told = sum(seen.rounds for seen in pace.seen)
    spent = sum(seen.seconds * seen.rounds for seen in pace.seen)
    own = pace.clock.now - 20 * pace.asked - 30 * rounds
    assert told >= 3
    # Consumers count up to as much as the rounds' own work, choices do not.
    assert 0 < spent <= 2 * own
    if plan.rests:
        assert max(seen.seconds for seen in pace.seen) <= 2 * own / rounds


def test_a_row_that_ended_before_its_window_was_read_says_nothing_about_its_drafts() -> None:
    pace = ScriptedPace([Plan(2)])
    group, provider = group_of(pace)
    rows = group.admit([adaptive(2), adaptive(1)])
    run(group, 2, ahead=True)
    assert group._live.flight is not None
    pace.seen = []
    group.remove(rows[1:])
    [seen] = pace.seen
    assert seen.asked == [2, 0]
    drain(group)
    assert rows[0].emitted == TEXTS[PROMPTS[2], 0.0, None].output[:14]
    assert provider.complaints == []


@pytest.mark.parametrize("takes_its_last", [True, False])
@pytest.mark.parametrize("kind", ["host", "hidden states"])
def test_what_a_row_leaves_behind_is_what_both_have_read(kind: str, takes_its_last: bool) -> None:
    left: list[Any] = []
    group, provider = group_of(ScriptedPace([Plan(0)]), kind)
    leaving = adaptive(1, publish=lambda row, caches, kept: left.append((row, kept)))
    rows = group.admit([adaptive(2), leaving])
    run(group, 4)
    assert group._live.flight is not None
    if takes_its_last:
        group.remove(rows[1:])
    else:
        deliver_to(group, 0)
    [(row, kept)] = left
    assert kept.processed_tokens == len(row.read)
    assert tuple(kept.attachment.arrays["tokens"].tolist()) == row.read
    drain(group)
    assert provider.complaints == []


def test_a_padded_plain_window_is_one_of_its_own_token() -> None:
    left: list[Any] = []
    pace = ScriptedPace([Plan(0, 3)])
    group, provider = group_of(pace, "hidden states")
    asked = adaptive(2, publish=lambda row, caches, kept: left.append((row, kept)))
    [row] = group.admit([asked])
    drain(group)
    assert row.emitted == TEXTS[PROMPTS[2], 0.0, None].output[:14]
    [(_, kept)] = left
    assert tuple(kept.attachment.arrays["tokens"].tolist()) == row.read
    assert {seen.width for seen in pace.seen} == {3}
    assert provider.complaints == []


def test_what_a_row_leaves_behind_takes_nothing_from_the_others() -> None:
    """The first of two rows gives its early position back; the second keeps its own."""
    group, provider = group_of(ScriptedPace([Plan(0)]))
    rows = group.admit([adaptive(1), adaptive(2)])
    run(group, 4)
    deliver_to(group, 1)
    assert rows[0].finish == "cancelled"
    run(group, 2)
    group.consume([[TEXTS[PROMPTS[2], 0.0, None].output[rows[1].steps]]])
    group.preview()  # it catches up
    [held] = provider.decoding.rows
    assert held.tokens == list(rows[1].tokens[:-1])
    drain(group)
    assert rows[1].emitted == TEXTS[PROMPTS[2], 0.0, None].output[:14]


@pytest.mark.parametrize(("kind", "width"), [("qwen3", 3), ("lfm2", 1)])
def test_a_plain_window_of_recurrent_rows_is_not_padded(kind: str, width: int) -> None:
    """They would have to replay it: a position of theirs cannot be cut off."""
    text = solo(PROMPTS[2], architecture=kind)
    provider = ScriptedProvider(Script.always([Text(PROMPTS[2], text)], [RIGHT]), rows=Following)
    pace = ScriptedPace([Plan(0, 3)])
    group = VerifyGroup(target(kind), provider, pace=pace)
    [row] = group.admit([adaptive(2)])
    widths = []
    while group.rows:
        with group.round() as done:
            done.deliver_all()
        flight = group._live.flight
        widths += [] if flight is None else [flight.width]
    assert set(widths) == {width}
    assert row.emitted == text[:14]


def test_beside_a_row_of_a_fixed_number_all_have_as_many() -> None:
    """Positions beside that row's are there anyway, and nothing has to be measured for it."""
    costs = Costs(FakeTarget(), "x", default=4, most=15, seconds=0)  # type: ignore[arg-type]
    pace = AdaptivePace(costs)
    rows: Any = [FakeRow(width=15), FakeRow(width=6, request=SimpleNamespace(adaptive=False))]
    for _ in range(5):
        assert pace.plan(rows).depth == 6
    rows[1].width = 0  # it stood down
    assert pace.plan(rows).depth == 0


def test_a_look_that_costs_more_than_there_is_is_not_taken() -> None:
    """Drafts take ten plain rounds, as was seen; long after, hope makes less of it."""
    known = costs({1: 10.0, 4: 20.0}, 10.0)
    rows: Any = [FakeRow()]
    for _ in range(9):
        known.times.observe(1, 0, 1, 0, 10.0)
        known.times.observe(1, 3, 4, 3, 100.0)
    known.times.observe(1, 0, 1, 0, 10.0, rounds=3000)
    known.account.balance = 10.0
    assert AdaptivePace(known).plan(rows).depth == 0
    known.account.balance = 30.0
    assert AdaptivePace(known).plan(rows).depth
