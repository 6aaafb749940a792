"""Numbers of drafts are chosen by expected tokens per time, whatever the shape of the costs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cost import Account, Curve, Kind, Point, RoundTimes, Survival, choose
from specdec.errors import OptionError

TIMES = st.floats(0.1, 100)
WIDTHS = st.dictionaries(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), TIMES, min_size=1)


def stairs(times: dict[int, float]) -> Curve:
    return Curve({Point(1, width, 512): time for width, time in times.items()})


# Curves.


def test_between_measured_points_times_lie_between_theirs() -> None:
    points = [Point(b, w, c) for b in (1, 8) for w in (1, 4) for c in (512, 1024)]
    curve = Curve({p: p.batch * 10.0 + p.width + p.context / 512 for p in points})
    assert curve.at(1, 1, 512) == 12
    assert curve.at(1, 2, 512) == pytest.approx(13)
    assert curve.at(1, 1, 768) == pytest.approx(12.5)
    assert curve.at(4, 4, 512) == pytest.approx(45)


@given(WIDTHS, st.integers(1, 20))
def test_a_padded_window_never_costs_more_than_the_needed_one(
    times: dict[int, float], needed: int
) -> None:
    curve = stairs(times)
    width, time = curve.cheapest(1, needed, 16, 512)
    assert needed <= width
    assert time <= curve.at(1, needed, 512)
    assert time == curve.at(1, width, 512)


def test_a_step_down_is_taken() -> None:
    """The H200's times of a Qwen3-8B shape: 16 positions cost less than 2."""
    curve = stairs({1: 10.2, 2: 16.6, 4: 17.0, 8: 17.0, 16: 13.8})
    assert curve.cheapest(1, 3, 16, 512) == (16, 13.8)
    assert curve.cheapest(1, 1, 16, 512) == (1, 10.2)


def test_no_times_are_no_curve() -> None:
    for times in ({}, {1: 0.0}, {1: float("nan")}):
        with pytest.raises(OptionError, match="measure it again"):
            stairs(times)


# Choices.

CHANCES = st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=4)


@given(CHANCES, st.lists(TIMES, min_size=7, max_size=7), st.integers(0, 6))
def test_no_other_depth_is_faster_but_by_the_margin(
    chances: list[list[float]], times: list[float], kept: int
) -> None:
    surviving = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]

    def speed(depth: int) -> float:
        return (len(chances) + sum(sum(row[:depth]) for row in surviving)) / times[depth]

    best = choose(surviving, range(7), times.__getitem__)
    assert best.speed == pytest.approx(speed(best.depth))
    assert best.speed == pytest.approx(max(map(speed, range(7))))
    steady = choose(surviving, range(7), times.__getitem__, kept=kept, margin=0.1)
    if steady.depth == kept:
        assert best.speed <= steady.speed * 1.1 * (1 + 1e-9)
    else:
        assert steady.speed == pytest.approx(best.speed)
        assert steady.speed > speed(kept) * 1.1 * (1 - 1e-9)


def test_one_good_row_makes_the_window_wide_for_all() -> None:
    good, bad = [0.9, 0.8, 0.7, 0.6], [0.0] * 4
    times = [10.0, 11.0, 12.0, 13.0, 14.0]
    assert choose([bad, bad], range(5), times.__getitem__).depth == 0
    assert choose([good, bad], range(5), times.__getitem__).depth > 0
    assert choose([good], range(5), times.__getitem__).depth == 4


# Chances.


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30), st.integers(0, 99))
def test_chances_are_chances_and_survival_never_grows_with_depth(
    rounds: list[tuple[int, int]], rests: int
) -> None:
    shared = Survival()
    row = Survival(shared)
    for drafted, accepted in rounds:
        row.add(drafted, min(drafted, accepted))
    row.rest(rests)
    for each in (row, shared):
        for chances in (list(each.surviving(8)), each.hoped(8)):
            assert all(0 <= chance <= 1 for chance in chances)
            assert all(b <= a for a, b in itertools.pairwise(chances))
        hoped, known = each.hoped(8), each.surviving(8)
        assert all(h >= k - 1e-12 for h, k in zip(hoped, known, strict=True))


def test_a_chance_comes_to_what_rounds_have_shown() -> None:
    row = Survival(Survival())
    for number in range(400):
        row.add(3, 3 if number % 4 else 1)  # the second draft is right three times in four
    assert row.chance(0) == pytest.approx(1, abs=0.02)
    assert row.chance(1) == pytest.approx(0.75, abs=0.05)
    assert row.chance(2) == pytest.approx(1, abs=0.05)
    assert row.chance(7) == pytest.approx(row.chance(2), abs=0.05)  # nobody has been there


def test_a_new_row_begins_with_what_others_have_seen() -> None:
    shared = Survival()
    other = Survival(shared)
    for _ in range(50):
        other.add(4, 0)
    assert Survival(shared).chance(0) < 0.1
    assert Survival(Survival()).chance(0) == pytest.approx(0.6)


def test_what_stands_behind_a_wrong_draft_is_not_judged() -> None:
    row = Survival(Survival())
    before = row.chance(2)
    row.add(3, 1)
    assert row.chance(2) <= before
    assert len(row._tried) == 2


def test_at_rest_a_row_forgets_slowly() -> None:
    row = Survival(Survival())
    for _ in range(30):
        row.add(2, 0)
    low = row.chance(0)
    row.shared = Survival()  # others do well
    row.rest(10)
    soon = row.chance(0)
    row.rest(2000)
    assert low <= soon < 0.3
    assert row.chance(0) == pytest.approx(0.6, abs=0.01)


# Times.


def window(size: int, width: int) -> float:
    return size * (8.0 + 2 * width)


def as_needed(needed: int) -> int:
    return needed


def test_rounds_that_were_seen_tell_what_they_take() -> None:
    times = RoundTimes(window)
    assert times.plain(1) == 10
    for _ in range(20):
        times.observe(1, 0, 1, 0, 12.0)
        times.observe(1, 3, 4, 3, 20.0)
    assert times.plain(1) == pytest.approx(12)
    assert times.drafted(1, 3, as_needed) == pytest.approx(20)
    assert times.knows(1, 3)
    assert not times.knows(1, 4)


def test_what_the_drafter_takes_is_carried_over_to_other_depths() -> None:
    """20 ms at 3 drafts, of which the window is 16; 4 ms are beside it, or part of them."""
    times = RoundTimes(window)
    for _ in range(9):
        times.observe(1, 3, 4, 3, 20.0)
    assert 24 <= times.drafted(1, 7, as_needed) <= 24 + 8
    assert times.drafted(1, 7, as_needed, hopeful=True) == pytest.approx(24 + 4)
    assert 12 <= times.drafted(1, 1, as_needed, hopeful=True) <= 12 + 4
    for _ in range(9):
        times.observe(1, 1, 2, 1, 14.0)  # 2 beside it: one millisecond a draft
    assert times.drafted(1, 7, as_needed) == pytest.approx(24 + 8, abs=0.5)


def test_a_machine_that_slows_down_does_so_for_all_rounds() -> None:
    times = RoundTimes(window)
    for _ in range(20):
        times.observe(1, 0, 1, 0, 10.0)
        times.observe(1, 3, 4, 3, 20.0)
    for _ in range(40):
        times.observe(1, 3, 4, 3, 40.0)
    assert times.plain(1) == pytest.approx(20, rel=0.15)
    assert times.drafted(1, 3, as_needed) == pytest.approx(40, rel=0.05)


def test_rounds_of_one_kind_say_nothing_about_another() -> None:
    """However long they are noisy: what all have in common cannot be told from one kind."""
    rng = random.Random(1)
    times = RoundTimes(window)
    for _ in range(20):
        times.observe(1, 0, 1, 0, 10.0)
        times.observe(1, 3, 4, 3, 20.0)
    for _ in range(5000):
        spike = 4.0 if rng.random() < 0.05 else 1.0
        times.observe(1, 0, 1, 0, 10.0 * spike * rng.lognormvariate(0, 0.2))
    ratio = times.drafted(1, 3, as_needed) / times.plain(1)
    assert ratio == pytest.approx(2, rel=0.1)
    assert times.plain(1) == pytest.approx(10, rel=0.3)


def test_a_kind_that_is_seen_again_after_long_is_told_anew() -> None:
    times = RoundTimes(window)
    for _ in range(20):
        times.observe(1, 0, 1, 0, 10.0)
        times.observe(1, 3, 4, 3, 40.0)  # at a bad moment
    for _ in range(300):
        times.observe(1, 0, 1, 0, 10.0)
    for _ in range(3):
        times.observe(1, 3, 4, 3, 20.0)
        times.observe(1, 0, 1, 0, 10.0)
    assert times.drafted(1, 3, as_needed) < 32


def test_a_single_slow_round_changes_little() -> None:
    times = RoundTimes(window)
    for _ in range(20):
        times.observe(1, 0, 1, 0, 10.0)
    times.observe(1, 0, 1, 0, 500.0)
    assert times.plain(1) < 12.5
    young = RoundTimes(window)
    for _ in range(4):
        young.observe(1, 0, 1, 0, 10.0)
    young.observe(1, 0, 1, 0, 500.0)
    assert young.plain(1) < 14


def test_the_first_round_of_a_shape_is_not_believed() -> None:
    times = RoundTimes(window)
    times.observe(1, 3, 4, 3, 900.0)
    times.observe(1, 3, 4, 3, 20.0)
    assert not times.knows(1, 3)
    times.observe(1, 3, 4, 3, 24.0)
    assert times.drafted(1, 3, as_needed) == pytest.approx(20)


def test_a_drafter_that_is_often_silent_costs_what_its_rounds_take_on_average() -> None:
    times = RoundTimes(window)
    for number in range(200):
        if number % 4:
            times.observe(1, 4, 1, 0, 11.0)
        else:
            times.observe(1, 4, 5, 4, 19.0)
    assert times.drafted(1, 4, as_needed) == pytest.approx(0.75 * 11 + 0.25 * 19, rel=0.1)


def test_what_was_seen_is_recalled() -> None:
    times = RoundTimes(window)
    for _ in range(12):
        times.observe(3, 2, 3, 2, 33.0)
    kept = times.as_dict()
    assert kept == {Kind(4, 2, 3): pytest.approx(33.0)}
    later = RoundTimes(window)
    later.recall(kept)
    assert later.drafted(4, 2, as_needed) == pytest.approx(33)


# The account.


@given(st.lists(st.floats(-50, 50), max_size=50))
def test_an_account_has_ends(gains: list[float]) -> None:
    account = Account()
    for gain in gains:
        account.drafted(gain)
        account.passed(3)
        assert -20 <= account.balance <= 40


def test_an_account_that_is_spent_fills_slowly() -> None:
    account = Account()
    account.drafted(-account.balance)
    assert not account.affords(1)
    account.passed(100)
    assert not account.affords(1)
    account.passed(100)
    assert account.affords(1)
