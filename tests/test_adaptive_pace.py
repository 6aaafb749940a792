"""What an adaptive pace makes of machines and texts that are known exactly: a virtual clock.

Rounds take what a table says, with noise, and drafts are right by chance; plain decoding and every
fixed number of drafts are computed beside it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, field, frozen

from specdec.cost import AdaptivePace, Costs, Curve, Kept, Point
from specdec.verify.pacing import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16)


class _Asks:
    adaptive = True


@define(eq=False)
class FakeRow:
    width: int = 15
    request: Any = field(factory=_Asks)


class FakeTarget:
    identity = None


@frozen
class Machine:
    """Times of a target and a drafter, milliseconds.

    Attributes:
        window: by width.
        plain: of a plain round.
        draft: by depth.
        rest: of a round with drafts, besides.
        rows: of the batch.
    """

    window: dict[int, float]
    plain: float
    draft: Callable[[int], float]
    rest: float
    rows: int = 1

    def curve(self) -> Curve:
        return Curve({Point(self.rows, w, 512): t for w, t in self.window.items()})

    def round(self, depth: int, width: int) -> float:
        return self.curve().at(self.rows, width, 512) + self.draft(depth) + self.rest


# The tables of the issue, and what the demo models were measured at.
GPU = Machine(
    dict(zip(WIDTHS, (1.0, 1.5, 1.55, 1.6, 1.6, 1.55, 1.5, 1.7, 1.9), strict=True)),
    1.1,
    lambda depth: 0.3 + 0.25 * depth,
    0.8,
)
CPU = Machine({w: 10 + 7.0 * w for w in WIDTHS}, 17.0, lambda depth: 3.0 * depth, 0.5)
LARGE = Machine(
    dict(zip(WIDTHS, (10.2, 16.6, 16.8, 17.0, 17.0, 17.0, 17.0, 15.0, 13.8), strict=True)),
    10.3,
    lambda depth: 1.0 * depth,
    0.5,
)
LARGE_8 = Machine(
    dict(zip(WIDTHS, (14.6, 13.0, 12.0, 10.7, 11.5, 12.0, 12.3, 11.5, 10.9), strict=True)),
    14.7,
    lambda depth: 1.2 * depth,
    0.5,
    rows=8,
)


@frozen
class Outcome:
    """Speeds as ratios."""

    over_plain: float
    over_best: float
    widths: dict[int, int]


def run(
    machine: Machine,
    chance: Callable[[int], float],
    *,
    requests: int = 10,
    tokens: int = 96,
    silent: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Serve requests one after another; the first one, in which all is new, does not count."""
    rng = random.Random(seed)
    costs = Costs(FakeTarget(), "x", default=4, most=15, seconds=0)  # type: ignore[arg-type]
    costs._add(Kept(dict(machine.curve().times), {machine.rows: machine.plain}))
    spent = emitted = 0.0
    widths: dict[int, int] = {}
    for number in range(requests + 1):
        if number == 1:
            spent, emitted, widths = 0.0, 0.0, {}
        pace, rows = AdaptivePace(costs), [FakeRow() for _ in range(machine.rows)]
        left = [tokens] * machine.rows
        while max(left) > 0:
            plan: Any = pace.plan(rows)  # type: ignore[arg-type]
            asked = plan.depth
            given = [0 if rng.random() < silent else asked for _ in rows]
            accepted = [_accepted(count, chance(number), rng) for count in given]
            longest = max(given)
            width = plan.width if plan.rests else pace.padded(machine.rows, 1 + longest)
            time = machine.plain if plan.rests else machine.round(asked, width)
            if plan.rests and width > 1:
                time = machine.curve().at(machine.rows, width, 512)
            time *= rng.lognormvariate(0, 0.05)
            seen = Seen(asked, [asked] * machine.rows, accepted, longest, width, time / 1000)
            pace.observe(rows, seen)  # type: ignore[arg-type]
            spent += time
            emitted += machine.rows + sum(accepted)
            left = [each - 1 - count for each, count in zip(left, accepted, strict=True)]
            widths[asked] = widths.get(asked, 0) + 1
    speed = emitted / spent
    plain = machine.rows / machine.plain
    fixed = [_fixed(machine, costs, depth, chance, requests, silent) for depth in costs.depths]
    return Outcome(speed / plain, speed / max(plain, *fixed), widths)


def _accepted(count: int, chance: float, rng: random.Random) -> int:
    accepted = 0
    while accepted < count and rng.random() < chance:
        accepted += 1
    return accepted


def _fixed(
    machine: Machine,
    costs: Costs,
    depth: int,
    chance: Callable[[int], float],
    requests: int,
    silent: float,
) -> float:
    """Tokens per millisecond at a fixed number of drafts, padded as well as may be."""
    time = 0.0
    for number in range(1, requests + 1):
        gained = sum(chance(number) ** place for place in range(1, 1 + depth)) * (1 - silent)
        full = machine.round(depth, costs.padded(machine.rows, 1 + depth))
        nobody = silent**machine.rows
        time += ((1 - nobody) * full + nobody * machine.round(depth, 1)) / (1 + gained)
    return machine.rows * requests / time


MACHINES = {"gpu": GPU, "cpu": CPU, "large": LARGE, "large, 8 rows": LARGE_8}


@pytest.mark.parametrize("silent", [0.0, 0.97])
@pytest.mark.parametrize("chance", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_are_wrong_cost_next_to_nothing(
    machine: str, chance: float, silent: float
) -> None:
    out = run(MACHINES[machine], lambda _: chance, silent=silent)
    assert out.over_plain >= 0.985


@pytest.mark.parametrize("chance", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_number_is_much_faster(machine: str, chance: float) -> None:
    out = [run(MACHINES[machine], lambda _: chance, seed=seed) for seed in range(3)]
    assert sum(each.over_best for each in out) / 3 >= 0.92
    assert min(each.over_plain for each in out) >= 0.98


def test_good_drafts_get_what_they_are_worth() -> None:
    assert run(GPU, lambda _: 0.95).over_best >= 0.95
    assert run(LARGE, lambda _: 0.95).over_best >= 0.95
    assert run(LARGE_8, lambda _: 0.6).over_best >= 0.97


def test_texts_that_differ_are_served_better_than_by_any_fixed_number() -> None:
    """Every other request is one whose drafts are right: no fixed number suits both."""

    def chance(number: int) -> float:
        return 0.97 if number % 2 else 0.02

    assert run(LARGE, chance, tokens=256, requests=16).over_best >= 1.1


def test_a_batch_whose_padded_windows_are_cheaper_is_padded_without_drafts_too() -> None:
    costs = Costs(FakeTarget(), "x", default=4, most=15, seconds=0)  # type: ignore[arg-type]
    costs._add(Kept(dict(LARGE_8.curve().times), {8: LARGE_8.plain}))
    assert costs.padded(8, 1) == 4
    assert costs.padded(8, 3) == 4
    assert costs.padded(8, 5) == 5  # 10.9 against 11.5 may be noise
    assert costs.padded(1, 3) == 3  # nobody has measured one row


def test_a_drafter_that_came_to_be_bad_is_left_and_found_again_when_it_is_good() -> None:
    costs = Costs(FakeTarget(), "x", default=4, most=15, seconds=0)  # type: ignore[arg-type]
    costs._add(Kept(dict(LARGE.curve().times), {1: LARGE.plain}))
    rng, row = random.Random(3), FakeRow()
    pace = AdaptivePace(costs)
    history: list[int] = []
    for number in range(3000):
        good = number < 200 or number >= 1400
        plan: Any = pace.plan([row])  # type: ignore[list-item]
        accepted = _accepted(plan.depth, 0.95 if good else 0.0, rng)
        width = pace.padded(1, 1 + plan.depth)
        time = LARGE.plain if plan.rests else LARGE.round(plan.depth, width)
        seen = Seen(plan.depth, [plan.depth], [accepted], plan.depth, width, time / 1000)
        pace.observe([row], seen)  # type: ignore[list-item]
        history.append(plan.depth)
    assert min(history[50:200]) > 0
    assert sum(map(bool, history[260:1400])) < 0.04 * 1140
    assert min(history[2600:]) > 0
