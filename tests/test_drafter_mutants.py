"""Mutants of drafters fit the sources, and the conformance kit finds some of each drafter.

``python tests/mutants/run.py drafters`` runs them all.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
from mutants.drafter_mutants import DRAFTER_MUTANTS
from mutants.drafter_suite import (
    REPOSITORY,
    SUBJECTS,
    DrafterSuite,
    Subject,
    by_kit,
    loaded,
    subject_of,
)
from mutants.edits import Mutant, edited

from specdec.testing import CHECKS

# Of each subject some, of each theme of the kit some, and none that takes long to find.
FAST = (
    "ngram-namespace-lacks-a-setting",
    "ngram-draft-inside-a-round",
    "ngram-negative-rows-count-from-the-end",
    "ngram-pending-is-not-stored",
    "ngram-good-rows-of-a-bad-append-stay",
    "ngram-processed-tokens-is-not-read",
    "tapped-layers-in-another-order",
    "tapped-step-stands-still",
    "tapped-filter-forgets-the-values",
    "tapped-device-draft-without-lengths",
    "recurrent-port-is-missed-in-decode-groups",
    "recurrent-filter-forgets-the-hiddens",
    "recurrent-capture-is-the-live-memory",
    "recurrent-checkpoint-is-adopted",
    "mtp-preview-is-remembered",
    "mtp-chain-draws-with-one-step",
)
# One that a test finds: each of those is a process of its own.
BY_TEST = "mtp-layout-of-the-trunk-tells-the-contrary"


def test_there_are_enough_and_no_name_is_used_twice() -> None:
    names = [mutant.name for mutant in DRAFTER_MUTANTS]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    for subject in SUBJECTS:
        assert sum(subject.has(mutant.file) for mutant in DRAFTER_MUTANTS) >= 10, subject.name


@pytest.mark.parametrize("mutant", DRAFTER_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies(mutant: Mutant) -> None:
    ast.parse(edited(mutant, REPOSITORY))  # a mistake in what the code does
    assert subject_of(mutant).name == mutant.name.split("-")[0]
    assert mutant.why.endswith(".")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's tests; of a contract's class that it has those of the kit."""
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return frozenset(names | {f"{each}::test_{check}" for each in classes for check in CHECKS})


def test_every_killer_is_a_check_of_the_kit_or_a_test_that_exists() -> None:
    for mutant in DRAFTER_MUTANTS:
        if by_kit(mutant):
            assert mutant.killed_by in CHECKS, mutant.name
        else:
            file, _, name = mutant.killed_by.partition("::")
            assert name.partition("[")[0] in names_in(file), mutant.name


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_copy_without_a_mistake_passes_what_finds_the_mistakes(subject: Subject) -> None:
    chosen = [mutant for mutant in DRAFTER_MUTANTS if mutant.name in FAST]
    assert DrafterSuite().unmutated(subject, chosen) == ""
    with loaded(subject) as contract:
        made = contract.make_provider()
        # A block drafter's provider is the core's; what binds it is the copy's.
        maker: Any = getattr(made.grouped, "_bind", type(made))
        assert maker.__module__.startswith("specdec_mutant_")
        made.close()


@pytest.mark.parametrize("name", FAST)
def test_the_kit_finds(name: str) -> None:
    [mutant] = [each for each in DRAFTER_MUTANTS if each.name == name]
    result = DrafterSuite().one(mutant)
    assert result.verdict == "killed", result.detail


def test_a_test_finds_the_mutant_that_names_it() -> None:
    [mutant] = [each for each in DRAFTER_MUTANTS if each.name == BY_TEST]
    assert not by_kit(mutant)
    [result] = DrafterSuite().run([mutant], jobs=2)
    assert result.verdict == "killed", result.detail
