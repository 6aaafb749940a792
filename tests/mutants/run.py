"""Run mutants: ``python tests/mutants/run.py [core|drafters|all] [-k NAME] [--jobs N]``.

Prints a table and ends with status 1 unless every mutant was killed by the test it names.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest's pythonpath does

from mutants.core_suite import CoreSuite
from mutants.drafter_suite import DrafterSuite
from mutants.suites import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mutants.suites import Suite

__all__ = ["SUITES", "main"]

SUITES: Sequence[Suite] = (CoreSuite(), DrafterSuite())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; gives the exit status."""
    parser = argparse.ArgumentParser(description="Run mutants and see whether tests find them.")
    names = [suite.name for suite in SUITES]
    parser.add_argument("suite", nargs="?", default="all", choices=[*names, "all"])
    parser.add_argument("-k", dest="name", default="", help="only mutants with this in their name")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("-v", "--verbose", action="store_true", help="show how each run ended")
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    results = []
    for suite in SUITES:
        chosen = [mutant for mutant in suite.mutants if given.name in mutant.name]
        if given.suite not in (suite.name, "all") or not chosen:
            continue
        for result in suite.run(chosen, given.jobs):
            results.append(result)
            if given.verbose or result.verdict != "killed":
                print(f"--- {result.mutant.name}: {result.verdict}\n{result.detail}\n", flush=True)
    print(table(results))
    print(f"{time.perf_counter() - started:.0f} seconds", file=sys.stderr)
    return int(not results or any(result.verdict != "killed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
