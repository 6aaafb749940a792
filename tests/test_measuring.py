"""Forwards are timed in turns, over rows that nobody has changed afterwards."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st
from scripted import target
from tiny_models import HYBRID, WINDOWED, OwnCache, build_model, random_state

from specdec.cost import Point, measure
from specdec.cost.measure import rows_at, time_plain, time_windows
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.state import RowState

MODULE = importlib.import_module("specdec.cost.measure")  # the package has a function so named
KINDS = ("qwen3", HYBRID, WINDOWED)


def one_by_one() -> MlxLmTarget:
    """A target whose rows cannot be rolled back."""
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    bound = MlxLmTarget(model)
    assert not bound.new_state().can_roll_back
    return bound


def logits_after(bound: MlxLmTarget, state: RowState) -> mx.array:
    """What the rows' next three tokens are given; the rows do not keep them."""
    state.begin_round(3)
    logits = bound.forward(mx.array([[5, 9, 40]] * state.row_count), state).logits
    mx.eval(logits)
    state.rollback([0] * state.row_count)
    return logits


# With a real clock.


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_as_they_were_after_windows_of_all_widths(kind: str, batch: int) -> None:
    bound = target(kind)
    state = rows_at(bound, batch, 20)
    assert list(state.lengths) == [20] * batch
    before = logits_after(bound, state)
    for row in range(1, batch):
        assert mx.array_equal(before[row], before[0])
    times = time_windows(bound, state, widths=(1, 2, 5, 8), seconds=0.0)
    assert set(times) == {Point(batch, width, 20) for width in (1, 2, 5, 8)}
    assert min(times.values()) > 0
    assert list(state.lengths) == [20] * batch
    assert mx.array_equal(logits_after(bound, state), before)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_read_what_a_target_reads_at_once(kind: str) -> None:
    bound = target(kind)
    ids = mx.random.randint(0, bound.vocab_size, (1, 20), key=mx.random.key(0))
    state = bound.new_state()
    state.begin_round(20, reading=True)
    bound.forward(ids, state)
    state.commit_round()
    want = logits_after(bound, state)
    assert mx.array_equal(logits_after(bound, rows_at(bound, 1, 20)), want)


@pytest.mark.parametrize("batch", [1, 2])
def test_plain_rounds_are_read_by_all_rows(batch: int) -> None:
    bound = target()
    state = rows_at(bound, batch, 9)
    assert time_plain(bound, state, seconds=0.0) > 0
    [length] = set(state.lengths)
    assert 9 + 3 < length <= 9 + 64
    assert not state.open_width


@pytest.mark.parametrize("kind", KINDS)
def test_a_measurement_has_all_widths_at_the_context_that_was_asked_for(kind: str) -> None:
    shares: list[float] = []
    found = measure(target(kind), 2, 16, widths=(1, 3, 4), seconds=0.02, progress=shares.append)
    assert set(found.windows) == {Point(2, width, 16) for width in (1, 3, 4)}
    assert found.plain > 0
    assert shares == sorted(shares)
    assert 0 < shares[0] <= 1
    assert shares[-1] == 1


def test_of_a_target_that_cannot_roll_back_single_positions_are_timed() -> None:
    bound = one_by_one()
    found = measure(bound, 1, 6, widths=(1, 2, 8), seconds=0.01)
    assert set(found.windows) == {Point(1, 1, 6)}
    assert found.plain > 0


def test_measuring_leaves_the_global_random_state_alone() -> None:
    before = random_state()
    measure(target(), 1, 8, widths=(1, 2), seconds=0.0)
    assert random_state() == before


# With a clock of our own.


@define
class Clock:
    """Seconds that pass where the test says so."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@define(eq=False)
class FakeTarget:
    """Its rows too: a forward takes what ``takes`` says of its width and number."""

    clock: Clock
    takes: Callable[[int, int], float]
    row_count: int = 2
    vocab_size: int = 8
    can_roll_back: bool = True
    widths: list[int] = field(factory=list)
    open: int = 0
    lengths: Sequence[int] = (30, 33)

    def begin_round(self, width: int) -> None:
        assert self.open == 0
        self.open = width

    def forward(self, ids: mx.array, state: object) -> Any:
        assert state is self
        assert ids.shape == (self.row_count, self.open)
        self.clock.now += self.takes(self.open, self.widths.count(self.open))
        self.widths.append(self.open)
        return SimpleNamespace(logits=mx.zeros((*ids.shape, self.vocab_size)))

    def rollback(self, counts: Sequence[int]) -> None:
        assert list(counts) == [0] * self.row_count
        self.open = 0

    def commit_round(self) -> None:
        self.open = 0

    def arrays(self) -> list[mx.array]:
        return []


def fake(
    monkeypatch: pytest.MonkeyPatch, takes: Callable[[int, int], float], **options: Any
) -> Any:
    clock = Clock()
    monkeypatch.setattr(MODULE, "time", clock)
    return FakeTarget(clock, takes, **options)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.dictionaries(st.tuples(st.integers(1, 9), st.integers(0, 9)), st.floats(0.01, 9)),
    st.floats(0, 50),
)
def test_a_time_is_the_median_of_all_turns_but_the_first(
    widths: list[int], taken: dict[tuple[int, int], float], seconds: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bound = fake(patch, lambda width, turn: taken.get((width, turn), 1.0 + turn % 3))
        shares: list[float] = []
        begin = bound.clock.now
        times = time_windows(bound, bound, widths=widths, seconds=seconds, progress=shares.append)
        turns = bound.widths.count(widths[0])
    for width in widths:
        seen = sorted(taken.get((width, turn), 1.0 + turn % 3) for turn in range(1, turns))
        middle = (seen[(len(seen) - 1) // 2] + seen[len(seen) // 2]) / 2
        assert times[Point(2, width, 33)] == pytest.approx(1000 * middle)
    assert turns >= 3
    spent = bound.clock.now - begin
    assert turns == 3 or spent - 9 * len(widths) <= seconds <= spent
    # Each turn has each width once, and none is always the first.
    for turn in range(turns):
        assert sorted(bound.widths[turn * len(widths) :][: len(widths)]) == sorted(widths)
    if len(widths) > 1:
        assert len({bound.widths[turn * len(widths)] for turn in range(turns)}) > 1
    assert len(shares) == turns
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert all(share < 1 for share in shares[:-1])


def test_a_machine_that_slows_down_does_so_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = fake(monkeypatch, lambda width, turn: width * (1.0 + turn))
    times = time_windows(bound, bound, widths=(1, 2, 4), seconds=60.0)
    one = times[Point(2, 1, 33)]
    assert [times[Point(2, width, 33)] / one for width in (1, 2, 4)] == [1, 2, 4]


def test_a_plain_round_is_a_median_without_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = fake(monkeypatch, lambda _, turn: 90.0 if turn < 3 else 2.0 + (turn % 2))
    assert time_plain(bound, bound, seconds=0.0) == pytest.approx(2500)
    bound = fake(monkeypatch, lambda _, turn: 90.0 if turn == 5 else 2.0)
    assert time_plain(bound, bound, seconds=200.0) == pytest.approx(2000)
    assert len(bound.widths) == 56  # as long as there is time


def test_plain_rounds_are_not_run_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = fake(monkeypatch, lambda *_: 0.001)
    time_plain(bound, bound, seconds=1e9)
    assert len(bound.widths) == 64


@pytest.mark.parametrize(("plain", "timed"), [(0.001, (1, 3, 8, 11, 16)), (2.0, (1, 8, 16))])
def test_a_slow_target_has_fewer_widths_timed(
    plain: float, timed: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = fake(monkeypatch, lambda width, _: width * plain)
    monkeypatch.setattr(MODULE, "rows_at", lambda *_: bound)
    found = measure(bound, 2, 16, widths=(1, 3, 8, 11, 16), seconds=10.0)
    assert set(found.windows) == {Point(2, width, 16) for width in timed}
    assert found.plain == pytest.approx(1000 * plain)
    assert found.windows[Point(2, 8, 16)] == pytest.approx(8000 * plain)
