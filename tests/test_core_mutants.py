"""The tests of the core find mistakes: the mutants are up to date, and some are really run.

All of them are run by ``python tests/mutants/run.py core``, in some minutes.
"""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from mutants import run
from mutants.core_mutants import CORE_MUTANTS
from mutants.core_suite import REPOSITORY, SOURCES, CoreSuite
from mutants.edits import Mutant, StaleMutantError, apply, edited
from mutants.suites import table

if TYPE_CHECKING:
    from pathlib import Path

    from mutants.suites import Result

FAST = (
    "everything-is-accepted",
    "drafts-behind-the-end-are-counted",
    "drafts-are-not-clipped-to-the-depth",
    "padding-is-attended-to",
    "top-k-comes-before-top-p",
    "later-drafts-are-in-the-history",
    "ratio-is-inverted",
    "floor-is-one-token-too-high",
    "end-is-always-allowed",
    "mask-comes-before-the-processors",
    "forced-drafts-are-committed-as-drafted",
    "reports-of-the-position-before",
    "first-tokens-keep-their-old-places",
    "pending-stays-unread-before-outside-tokens",
    "ring-shows-one-position-too-far-back",
    "places-in-a-batch-are-reversed",
    "rows-of-different-length-are-not-tried",
)
HARMLESS = Mutant(
    name="harmless",
    file="specdec/verify/accept.py",
    old="    tokens: list[int] = []\n",
    new="    tokens: list[int] = list()\n",
    killed_by="tests/test_accept.py::test_a_drafter_that_is_always_wrong_has_nothing_accepted",
    why="The same in other words.",
)


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def named(*names: str) -> list[Mutant]:
    return [mutant for mutant in CORE_MUTANTS if mutant.name in names]


def run_all(*mutants: Mutant, **options: Any) -> list[Result]:
    return list(CoreSuite(**options).run(mutants, jobs=2))


@pytest.mark.parametrize("mutant", CORE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_names_a_test_that_exists(mutant: Mutant) -> None:
    ast.parse(edited(mutant, SOURCES))  # a mistake in what the code does, not in how it is written
    file, _, function = mutant.killed_by.partition("::")
    assert function.partition("[")[0] in functions_of(file)
    assert function.startswith("test_")


def test_there_are_mutants_of_all_parts() -> None:
    assert len(CORE_MUTANTS) >= 240
    assert len({mutant.file for mutant in CORE_MUTANTS}) >= 45
    assert [name for name, n in Counter(m.name for m in CORE_MUTANTS).items() if n > 1] == []
    edits = Counter((mutant.file, mutant.old, mutant.new) for mutant in CORE_MUTANTS)
    assert max(edits.values()) == 1


def test_a_mutant_that_does_not_fit_is_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"old": "no such text"}, "occurs 0 times"),
        ({"old": "accepted"}, "times in specdec/verify/accept.py, not once"),
        ({"file": "specdec/nowhere.py"}, "there is no"),
        ({"new": HARMLESS.old}, "changes nothing"),
    ]
    for changes, said in unfit:
        with pytest.raises(StaleMutantError, match=f"mutant harmless no longer applies: .*{said}"):
            apply(evolve(HARMLESS, **changes), SOURCES, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    apply(HARMLESS, SOURCES, tmp_path / "copy")
    assert (tmp_path / "copy" / HARMLESS.file).read_text() == edited(HARMLESS, SOURCES)


def test_some_mutants_are_killed_by_the_tests_that_they_name() -> None:
    results = run_all(*named(*FAST))
    assert len(results) == len(FAST)
    assert [(r.mutant.name, r.detail) for r in results if r.verdict != "killed"] == []


def test_only_a_test_that_fails_counts_as_a_kill() -> None:
    unwritten = evolve(HARMLESS, name="unwritten", new="    tokens: list[int] = [\n")
    endless = evolve(HARMLESS, name="endless", new=HARMLESS.new + "    while True:\n        pass\n")
    results = run_all(HARMLESS, unwritten, timeout=20)
    assert [result.verdict for result in results] == ["survived", "broken"]
    assert table(results).endswith("\n2 written, 0 killed, 2 survived")
    late = run_all(endless, evolve(endless, endless=True), timeout=2)
    assert [result.verdict for result in late] == ["timeout", "killed"]


def test_a_test_that_fails_without_the_mistake_kills_nothing() -> None:
    absent = evolve(HARMLESS, killed_by="tests/test_accept.py::test_that_is_not_there")
    [result] = run_all(absent)
    assert result.verdict == "broken"
    assert result.detail.startswith("without a mistake: ")


def test_the_command_ends_with_an_error_where_nothing_was_run_or_a_mutant_survives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(["core", "-k", "no such mutant"]) == 1
    monkeypatch.setattr(run, "SUITES", [CoreSuite([HARMLESS, *named("everything-is-accepted")])])
    assert run.main(["core", "--jobs", "2"]) == 1
    shown = capsys.readouterr().out
    assert f"SURVIVED, not killed by {HARMLESS.killed_by} | " in shown
    assert shown.endswith("2 written, 1 killed, 1 survived\n")
