"""Mutants of the core: each is run in a process of its own, on a copy of the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from attrs import evolve, frozen
from mutants.core_mutants import CORE_MUTANTS
from mutants.edits import apply
from mutants.suites import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mutants.edits import Mutant
    from mutants.suites import Verdict

__all__ = ["REPOSITORY", "SOURCES", "CoreSuite"]

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "core" / "src"
_TIMEOUT = 120.0
_TESTS_FAILED = 1


@frozen
class CoreSuite:
    """Edits under ``core/src``.

    Attributes:
        mutants: all of them.
        timeout: seconds that one test may take.
    """

    mutants: Sequence[Mutant] = CORE_MUTANTS
    timeout: float = _TIMEOUT
    name: str = "core"

    def run(self, mutants: Sequence[Mutant], jobs: int) -> Iterator[Result]:
        """Run the tests once without a mistake, all together, and once for each mutant."""
        with ThreadPoolExecutor(jobs) as pool:
            passing = pool.submit(self._unmutated, mutants)
            results = pool.map(self._one, mutants)
            unhealthy = passing.result()
            for result in results:
                yield evolve(result, verdict="broken", detail=unhealthy) if unhealthy else result

    def _unmutated(self, mutants: Sequence[Mutant]) -> str:
        """What the tests say of the sources as they are, if they do not pass."""
        tests = dict.fromkeys(mutant.killed_by for mutant in mutants)
        run = _pytest(SOURCES, list(tests))
        return "" if run.returncode == 0 else f"without a mistake: {_end(run.stdout)}"

    def _one(self, mutant: Mutant) -> Result:
        started = time.perf_counter()
        with TemporaryDirectory(prefix="specdec-mutant-") as folder:
            apply(mutant, SOURCES, Path(folder))
            try:
                run = _pytest(Path(folder), ["-x", mutant.killed_by], self.timeout)
            except subprocess.TimeoutExpired:
                late: Verdict = "killed" if mutant.endless else "timeout"
                return Result(mutant, late, time.perf_counter() - started)
        verdict: Verdict = "broken"
        if run.returncode in (0, _TESTS_FAILED):
            verdict = "killed" if run.returncode == _TESTS_FAILED else "survived"
        detail = f"exit status {run.returncode}: {_end(run.stdout)}"
        return Result(mutant, verdict, time.perf_counter() - started, detail)


def _pytest(
    sources: Path, arguments: Sequence[str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH comes before what is installed; mutants.guard makes sure of it.
    path = os.pathsep.join([str(sources), str(REPOSITORY / "tests")])
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "mutants.guard"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "SPECDEC_MUTANT": str(sources)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-25:])
