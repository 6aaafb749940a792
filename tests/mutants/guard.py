"""A pytest plugin for the runs of mutants: what does not test the mutant never counts as a kill.

``SPECDEC_MUTANT`` names the folder that specdec has to come from. The run ends with another exit
status than that of failed tests where specdec comes from elsewhere, or where something other than
the body of a test fails.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["ELSEWHERE", "NOT_THE_TEST"]

NOT_THE_TEST = 60  # a fixture failed
ELSEWHERE = 61  # another copy of specdec was tested

_outside: list[str] = []


def _is_the_mutant(file: str | None) -> bool:
    folder = Path(os.environ["SPECDEC_MUTANT"]).resolve()
    return file is not None and Path(file).resolve().is_relative_to(folder)


def pytest_configure() -> None:
    """Look before anything is imported."""
    spec = find_spec("specdec")
    if spec is None or not _is_the_mutant(spec.origin):
        origin = None if spec is None else spec.origin
        raise pytest.UsageError(f"specdec would come from {origin}, which is not the mutant")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what fails outside of a test's body."""
    if report.failed and report.when != "call":
        _outside.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the runner where the failure was no failed test."""
    loaded = sys.modules.get("specdec")
    if loaded is not None and not _is_the_mutant(loaded.__file__):
        session.exitstatus = ELSEWHERE
    elif _outside:
        session.exitstatus = NOT_THE_TEST
