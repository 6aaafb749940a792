"""Widths are chosen by expected tokens per time, whatever the shape of the cost curve."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cost.choose import choose
from specdec.cost.curve import Curve, Point
from specdec.cost.survival import Survival
from specdec.errors import OptionError

TIMES = st.floats(0.1, 100)


def stairs(times: dict[int, float]) -> Curve:
    return Curve({Point(1, width, 512): time for width, time in times.items()})


def test_between_measured_points_times_lie_between_theirs() -> None:
    curve = Curve({Point(b, w, c): b * 10.0 + w + c / 512 for b in (1, 8) for w in (1, 4) for c in (512, 1024)})
    assert curve.at(1, 1, 512) == 12
    assert curve.at(1, 2, 512) == pytest.approx(13)
    assert curve.at(1, 1, 768) == pytest.approx(12.5)
    assert curve.at(4, 4, 512) == pytest.approx(45)


@given(st.dictionaries(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), TIMES, min_size=1), st.integers(1, 20))
def test_a_padded_window_never_costs_more_than_the_needed_one(times: dict[int, float], needed: int) -> None:
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


rows = st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=4)


@given(rows, st.dictionaries(st.integers(1, 8), TIMES, min_size=8), TIMES, TIMES, TIMES)
def test_no_other_depth_is_faster(
    chances: list[list[float]], times: dict[int, float], draft: float, rest: float, plain: float
) -> None:
    surviving = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    curve = stairs(times)

    def verify(needed: int) -> tuple[int, float]:
        return curve.cheapest(1, needed, 8, 512)

    best = choose(surviving, verify=verify, draft=lambda d: draft * d, rest=rest, plain=plain)
    speeds = [len(chances) / plain]
    for depth in range(1, 7):
        if any(len(row) >= depth for row in surviving):
            tokens = len(chances) + sum(sum(row[:depth]) for row in surviving)
            speeds.append(tokens / (verify(1 + depth)[1] + draft * depth + rest))
    assert best.speed == pytest.approx(max(speeds))


def test_a_drafter_that_is_always_wrong_is_soon_left_alone() -> None:
    row = Survival(Survival())
    drafted = []
    for _ in range(40):
        best = choose([row.surviving(4)], verify=lambda n: (n, 10.0 + n), draft=lambda d: 1.0 * d, rest=0.5, plain=10.0)
        drafted.append(best.depths[0])
        row.add(best.depths[0], 0)
    assert drafted[0] > 0
    assert drafted[8:] == [0] * 32


def test_a_drafter_that_is_always_right_gets_all_it_can() -> None:
    row = Survival(Survival())
    for _ in range(40):
        row.add(4, 4)
    best = choose([row.surviving(4)], verify=lambda n: (n, 10.0 + n), draft=lambda d: 1.0 * d, rest=0.5, plain=10.0)
    assert best.depths == (4,)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_chances_are_chances_and_survival_never_grows_with_depth(rounds: list[tuple[int, int]]) -> None:
    row = Survival(Survival())
    for drafted, accepted in rounds:
        row.add(drafted, min(drafted, accepted))
    chances = list(row.surviving(8))
    assert all(0 <= chance <= 1 for chance in chances)
    assert all(b <= a for a, b in itertools.pairwise(chances))
