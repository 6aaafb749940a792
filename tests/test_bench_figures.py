"""What a benchmark's figures are, recomputed by hand from turns that a scripted clock made."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from attrs import define, evolve, field, frozen

from specdec.bench.contest import Contest
from specdec.bench.entrants import Entrant
from specdec.bench.figures import Result, quartiles
from specdec.bench.growth import GrowthPoint
from specdec.bench.phases import Phases, Recorder, summed
from specdec.bench.picture import check_picture, draw_growth, draw_ratios
from specdec.bench.progress import Bar
from specdec.bench.report import as_json, growth_table, markdown, notes, table
from specdec.bench.turns import Setting, Turn, Way
from specdec.errors import OptionError
from specdec.verify import GenerationStats

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SETTING = Setting(None, None, 4, {})
PROMPTS = [[1, 2], [3], [4, 5, 6]]


def turn(seconds: float, *rows: Sequence[int], **more: Any) -> Turn:
    tokens = tuple(tuple(row) for row in rows)
    count = sum(map(len, tokens))
    return Turn(seconds, count, seconds, count, first=seconds / 10, tokens=tokens, **more)


@define
class Clockwork(Way):
    """A way whose turns are written down; notes who ran when."""

    turns: list[Turn | Exception] = field(factory=list)
    log: list[tuple[str, int]] = field(factory=list)
    name: str = ""

    def run(self, setting: Setting, prompts: Any, began: Any = None) -> Turn:
        self.log.append((self.name, len(prompts[0])))
        now = self.turns.pop(0)
        if isinstance(now, Exception):
            raise now
        return now


@frozen
class Drafter:
    """Stands for a loaded drafter."""


def entrant(name: str, turns: list[Any], log: list[Any], **way: Any) -> Entrant:
    class Named(Entrant):
        @property
        def is_plain(self) -> bool:
            return self.name == "plain"

    return Named(name, Clockwork(turns=turns, log=log, name=name, **way))


def contest(entrants: Sequence[Entrant], batch: int = 1) -> Contest:
    return Contest.of(SETTING, entrants, "set", PROMPTS, batch=batch)


def test_ratios_are_taken_per_prompt_and_the_order_rotates() -> None:
    log: list[tuple[str, int]] = []
    cold = turn(9.0, [0])
    plain = entrant("plain", [cold, turn(2, [7] * 4), turn(4, [7] * 4), turn(1, [7] * 4)], log)
    fast = entrant(
        "fast",
        [cold, turn(1, [7] * 4), turn(1, [7] * 4), turn(2, [7, 7, 7, 8])],
        log,
        drafter=Drafter(),
    )
    ran = contest([plain, fast])
    ran.run(1, 0, Bar(False))
    first, second = ran.results
    assert first.ratios == [1, 1, 1]
    assert second.ratios == [2, 4, 0.5]
    assert second.ratio == 2
    assert second.quartiles == (1.25, 3)
    assert second.tokens_per_second == 12 / 4
    assert (second.same, second.differing, first.same) == (2, 1, None)
    assert [name for name, _ in log] == [
        *("fast", "plain"),  # the one that warms up is turn -1
        *("plain", "fast"),
        *("fast", "plain"),
        *("plain", "fast"),
    ]
    assert [length for _, length in log] == [3, 3, 2, 2, 1, 1, 3, 3]
    assert second.time_to_first_token == 0.1


def test_mlx_lm_is_the_reference_of_texts_and_a_second_base() -> None:
    log: list[tuple[str, int]] = []
    theirs = entrant("mlx-lm", [turn(1, [7] * 4) for _ in PROMPTS], log, mlx_lm=True)
    plain = entrant("plain", [turn(2, [7] * 3 + [9]) for _ in PROMPTS], log)
    ran = contest([theirs, plain])
    ran.run(0, 0, Bar(False))
    mlx_lm, ours = ran.results
    assert (mlx_lm.over_mlx_lm, ours.over_mlx_lm) == ([1] * 3, [0.5] * 3)
    assert (mlx_lm.ratios, ours.ratios) == ([2] * 3, [1] * 3)
    assert (mlx_lm.same, ours.same, ours.differing) == (None, 0, 3)


def test_a_drafter_that_fails_ends_its_own_run_with_a_line() -> None:
    log: list[tuple[str, int]] = []
    plain = entrant("plain", [turn(1, [7])] * 3, log)
    broken = entrant(
        "broken", [turn(0.5, [7]), ValueError("no\nmore")], log, drafter=Drafter(), width=2
    )
    ran = contest([plain, broken])
    ran.run(0, 0, Bar(False))
    assert len(ran.results[0].turns) == 3
    assert ran.results[1].ratios == [2]
    assert ran.results[1].same is None
    (line,) = notes(ran.results)
    assert line.startswith("broken@2 (set, batch 1) failed: ")
    assert "\n" not in line
    with pytest.raises(ValueError, match="the model"):
        contest([entrant("plain", [ValueError("the model")], log)]).run(0, 0, Bar(False))


def test_where_mlx_lm_fails_plain_decoding_is_the_reference() -> None:
    log: list[tuple[str, int]] = []
    theirs = entrant("mlx-lm", [turn(1, [7]), TypeError("no batch")], log, mlx_lm=True)
    plain = entrant("plain", [turn(1, [7])] * 3, log)
    fast = entrant("fast", [turn(0.5, [7])] * 3, log, drafter=Drafter())
    ran = contest([theirs, plain, fast])
    ran.run(0, 0, Bar(False))
    first, base, result = ran.results
    assert first.error is not None
    assert (base.same, result.same, result.over_mlx_lm) == (None, 3, [])


def test_a_batch_has_four_groups_at_least_and_uses_every_prompt() -> None:
    prompts = [[each] for each in range(6)]
    ran = Contest.of(SETTING, [entrant("plain", [], [])], "set", prompts, batch=4)
    assert [len(group) for group in ran.groups] == [4] * 4
    assert sorted({p[0] for group in ran.groups for p in group}) == list(range(6))
    alone = Contest.of(SETTING, [entrant("plain", [], [])], "set", prompts, batch=1)
    assert alone.groups == [[prompt] for prompt in prompts]


def test_phases_add_up_and_the_bound_has_no_host_in_it() -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 4.0, 10.0, 10.25])
    recorder = Recorder(clock=lambda: next(times))
    with recorder.phase("verify"):  # 0 to 4, the draft inside left out
        with recorder.phase("draft"):  # 1 to 3
            pass
        recorder.rounds += 1
    assert recorder.spent == {"verify": 1.5, "draft": 2.0}
    with recorder.phase("rollback"):
        pass
    found = recorder.phases(seconds=20.0, tokens=30)
    assert found == Phases(1, 30, draft=2.0, verify=1.5, rollback=6.0, host=10.5)
    assert found.bound == pytest.approx(30 / 9.5)
    assert found.serial == pytest.approx(30 / 20)
    assert found.share(30 / 19) == pytest.approx(0.5)
    assert found.tokens_per_round == 30
    assert found.per_round(found.draft) == 2000
    twice = summed([found, found])
    assert (twice.rounds, twice.tokens) == (2, 60)
    assert twice.bound == pytest.approx(found.bound)


def test_acceptance_is_counted_by_place_over_all_rows() -> None:
    one = GenerationStats(
        emitted=10,
        target_forwards=4,
        drafted=9,
        accepted=6,
        drafted_per_position=[4, 3, 2],
        accepted_per_position=[3, 2, 1],
    )
    two = GenerationStats(
        emitted=5,
        target_forwards=5,
        drafted=4,
        accepted=0,
        drafted_per_position=[4],
        accepted_per_position=[],
        reason="it stood down",
    )
    result = Result("a", turns=[turn(1, [1], [2], stats=(one, two))])
    assert result.acceptance_per_position == [3 / 8, 2 / 3, 1 / 2]
    assert result.acceptance_rate == 6 / 13
    assert result.tokens_per_forward == 15 / 9
    assert result.remarks == ["it stood down"]
    assert Result("plain", turns=result.turns).remarks == []


def test_drafts_that_were_asked_for_are_averaged_over_rounds() -> None:
    one, two = GenerationStats(widths={0: 6, 3: 2}), GenerationStats(widths={3: 1, 1: 1})
    result = Result("a", adaptive=True, turns=[turn(1, [1], [2], stats=(one, two))])
    assert result.widths == {0: 6, 1: 1, 3: 3}
    assert result.asked == 1.0
    assert Result("plain", turns=result.turns).asked is None


def test_labels_are_short() -> None:
    assert Result("ngram,/some/where/b/", 3).label == "ngram,b@3"
    assert Result("org/name").label == "name"


def test_quartiles_of_few_values() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def results() -> list[Result]:
    made = []
    for batch, each in itertools.product((1, 8), ("code", "random")):
        for name, width, ratio in (("plain", None, 1.0), ("a|b", 2, 1.5), ("c", None, 0.9)):
            result = Result(name, width, name == "c", each, batch)
            result.turns = [turn(1.0, [1] * 10), turn(1.0, [1] * 10)]
            result.ratios = [ratio, ratio + 0.2]
            result.phases = Phases(4, 20, draft=0.25, verify=0.5, rollback=0.25, host=0.5)
            result.shares = [0.5, 0.7]
            made.append(result)
    made.append(Result("broken", prompt_set="code", error="it broke"))
    return made


def test_tables_and_json_hold_the_figures() -> None:
    found = results()
    lines = table(found).splitlines()
    assert lines[0] == "code, batch 1"
    assert lines[3].split()[:4] == ["a|b@2", "10.0", "1.60", "1.55-1.65"]
    # Draft, verify, rollback, host, bound, share.
    assert lines[3].split()[7:13] == ["62.50", "125.00", "62.50", "125.00", "20.0", "0.60"]
    assert lines[5].split()[:3] == ["broken", "failed", "-"]
    text = markdown(found, ["- here"])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "a\\|b@2" in text
    assert all(row.replace("\\|", "").count("|") == rows[0].count("|") for row in rows[:6])
    assert "- broken (code, batch 1) failed: it broke" in text
    one = json.loads(json.dumps(as_json(found, [], model="m")))
    assert (one["model"], len(one["results"])) == ("m", 13)
    assert one["results"][1]["phases"]["bound"] == 20
    assert one["results"][1]["share_of_bound"] == pytest.approx(0.6)
    assert one["results"][2]["adaptive"] is True


def growth() -> list[GrowthPoint]:
    speeds = itertools.count(100, 10)
    return [
        GrowthPoint(name, batch, context, float(next(speeds)))
        for context in (64, 256)
        for batch in (1, 4)
        for name in ("plain", "a")
    ] + [GrowthPoint("b", 1, 64, None, "it broke")]


def test_growth_is_a_table_with_the_best_over_plain() -> None:
    lines = [line.split() for line in growth_table(growth()).splitlines()]
    assert lines[1] == ["64", "1", "100.0", "110.0", "-", "1.10"]
    assert len(lines) == 5


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_are_written(tmp_path: Path, ending: str) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    ratios, lines = (tmp_path / f"{name}.{ending}" for name in ("ratios", "growth"))
    check_picture(str(ratios))
    draw_ratios(results(), str(ratios), "a title", "below")
    draw_growth(growth(), str(lines), "a title", "below")
    for file in (ratios, lines):
        data = file.read_bytes()
        assert data.startswith(begins)
        assert len(data) > 5_000
    slower = [evolve(r, ratios=[0.5], shares=[]) for r in results()]
    other = tmp_path / f"other.{ending}"
    draw_ratios(slower, str(other), "a title", "below")
    assert other.read_bytes() != ratios.read_bytes()
    with pytest.raises(OptionError, match="nothing to draw"):
        draw_ratios([], str(other), "a title", "below")
    (tmp_path / f"folder.{ending}").mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        draw_growth(growth(), str(tmp_path / f"folder.{ending}"), "a title", "below")


def test_a_picture_that_cannot_be_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b.png").mkdir()
    for name, message in (
        ("a.txt", r"picture a\.txt ends in no"),
        (f"{tmp_path}/no/a.png", "there is no folder"),
        (f"{tmp_path}/b.png", "is a folder; give a file in it"),
    ):
        with pytest.raises(OptionError, match=message):
            check_picture(name)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r'pip install "specdec-core\[bench\]"'):
        check_picture(str(tmp_path / "a.png"))
