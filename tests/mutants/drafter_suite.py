"""Mutants of drafters: each is loaded beside the original, and held to the conformance kit.

Mistakes that no check of the kit can see name a test, and are run on a copy as those of the core
are.

As a program it shows, for each mutant, which checks find it: ``python
tests/mutants/drafter_suite.py [-k NAME] [--all]``. The named check is meant to be the one whose
name says what is wrong; others may fail before it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest's pythonpath does

from attrs import evolve, frozen
from hypothesis.errors import Flaky, HypothesisException
from mutants.drafter_mutants import (
    ASSISTANT,
    DFLASH,
    DRAFTER_MUTANTS,
    MTP,
    NGRAM,
    RECURRENT,
    TAPPED,
)
from mutants.drafter_two_model import MODEL, MODEL_FILES, draft_model
from mutants.edits import edited
from mutants.suites import Result

from specdec.testing import DraftRowContract
from specdec.testing.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mutants.edits import Mutant
    from mutants.suites import Verdict

    from specdec.contract import DraftProvider

__all__ = ["SUBJECTS", "DrafterSuite", "Subject", "by_kit", "failing", "loaded", "subject_of"]

REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT = 120.0


@frozen
class Subject:
    """A drafter that mistakes are written into.

    Attributes:
        name: what it is called in tables.
        folder: where its files are, relative to the repository.
        package: what its files are imported as; the mutant is imported as something else.
        files: names of its files.
        make: from its provider module, the drafter and another one.
        contract: class attributes of its contract class.
    """

    name: str
    folder: str
    package: str
    files: tuple[str, ...]
    provider: str
    make: Callable[[Any, bool], DraftProvider]
    contract: dict[str, Any]

    def has(self, file: str) -> bool:
        """Whether a file, relative to the repository, is one of its files."""
        return file in {f"{self.folder}/{name}" for name in self.files}


SUBJECTS = (
    Subject(
        name="ngram",
        folder=NGRAM,
        package="specdec_ngram",
        files=("attachment.py", "history.py", "provider.py", "rows.py"),
        provider="provider",
        make=lambda made, other: made.NgramProvider(max_ngram=3, min_ngram=1 if other else 2),
        contract={"vocab_size": 3},
    ),
    Subject(
        name="tapped",
        folder=Path(TAPPED).parent.as_posix(),
        package="drafters",
        files=("tapped.py", "tapped_rows.py"),
        provider="tapped",
        make=lambda made, other: made.TappedProvider.tiny(seed=int(other)),
        contract={},
    ),
    Subject(
        name="recurrent",
        folder=Path(RECURRENT).parent.as_posix(),
        package="drafters",
        files=("recurrent.py",),
        provider="recurrent",
        make=lambda made, other: made.RecurrentProvider.tiny(seed=int(other)),
        contract={"state_is_history": False},
    ),
    Subject(
        name="mtp",
        folder=MTP,
        package="specdec_mtp",
        files=tuple(sorted(file.name for file in (REPOSITORY / MTP).glob("[a-z]*.py"))),
        provider="tiny",
        make=lambda made, other: made.tiny_head(seed=int(other)),
        contract={},
    ),
    Subject(
        name="dflash",
        folder=DFLASH,
        package="specdec_dflash",
        files=tuple(sorted(file.name for file in (REPOSITORY / DFLASH).glob("[a-z]*.py"))),
        provider="tiny",
        make=lambda made, other: made.tiny_block(seed=int(other)),
        contract={},
    ),
    Subject(
        name="assistant",
        folder=ASSISTANT,
        package="specdec_assistant",
        files=tuple(sorted(file.name for file in (REPOSITORY / ASSISTANT).glob("[a-z]*.py"))),
        provider="tiny",
        make=lambda made, other: made.tiny_assistant(seed=int(other)),
        contract={},
    ),
    Subject(
        name="model",
        folder=MODEL,
        package="specdec.drafting",
        files=MODEL_FILES,
        provider="model_provider",
        make=draft_model,
        contract={},
    ),
)


def by_kit(mutant: Mutant) -> bool:
    """Whether a check of the kit is to find it, and not a test of its own."""
    return "::" not in mutant.killed_by


def subject_of(mutant: Mutant) -> Subject:
    """The drafter whose file is edited."""
    [subject] = [each for each in SUBJECTS if each.has(mutant.file)]
    return subject


@contextmanager
def loaded(subject: Subject, mutant: Mutant | None = None) -> Iterator[DraftRowContract]:
    """A drafter's contract class, of a copy of the drafter with a mistake in it, or without.

    Raises:
        StaleMutantError: the mutant does not fit the sources any more.
    """
    with TemporaryDirectory(prefix="specdec_mutant_") as folder:
        package = Path(folder).name
        inside = Path(folder) / package
        inside.mkdir()
        for name in subject.files:
            file = f"{subject.folder}/{name}"
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            if mutant is not None and mutant.file == file:
                text = edited(mutant, REPOSITORY)
            for own in {Path(each).stem for each in subject.files}:
                text = text.replace(f"from {subject.package}.{own} ", f"from {package}.{own} ")
                text = text.replace(
                    f"from {subject.package} import {own}\n", f"from {package} import {own}\n"
                )
            (inside / name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            yield _contract(subject, importlib.import_module(f"{package}.{subject.provider}"))
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                del sys.modules[name]


def _contract(subject: Subject, module: Any) -> DraftRowContract:
    numeric = subject.name != "ngram"

    class Mutated(DraftRowContract):
        shrink = False
        settings = PROFILES["ci"].settings(numeric=numeric, shrink=False)

        def make_provider(self) -> DraftProvider:
            return subject.make(module, False)

        def make_other_provider(self) -> DraftProvider:
            return subject.make(module, True)

    for name, value in subject.contract.items():
        setattr(Mutated, name, value)
    return Mutated()


def outcome(contract: DraftRowContract, check: str) -> str:
    """What a check says of a drafter; nothing if it passes or does not apply.

    Raises:
        HypothesisException: it came to no end of its own.
    """
    try:
        contract.run_check(check)
    except Flaky as error:  # it failed, and not again: state that outlives a group
        return f"Flaky: {error}"
    except HypothesisException:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        if type(error).__name__ != "Skipped":
            raise
    return ""


def failing(mutant: Mutant) -> Iterator[str]:
    """The checks that find a mutant, in the order they run."""
    with loaded(subject_of(mutant), mutant) as contract:
        for check in contract.check_names():
            try:
                if outcome(contract, check):
                    yield check
            except HypothesisException:
                yield check


@frozen
class DrafterSuite:
    """Edits of plugins and of the reference drafters.

    Attributes:
        mutants: all of them.
    """

    mutants: Sequence[Mutant] = DRAFTER_MUTANTS
    name: str = "drafters"

    def run(self, mutants: Sequence[Mutant], jobs: int) -> Iterable[Result]:
        """Each subject as it is first, and then each mutant; those of the kit one by one."""
        named = [mutant for mutant in mutants if not by_kit(mutant)]
        with ThreadPoolExecutor(jobs) as pool:
            tests = pool.submit(_tests_unmutated, named)
            running = {mutant.name: pool.submit(_by_test, mutant) for mutant in named}
            sick = {subject.name: self.unmutated(subject, mutants) for subject in SUBJECTS}
            for mutant in mutants:
                wrong = sick[subject_of(mutant).name] if by_kit(mutant) else tests.result()
                if wrong:
                    yield Result(mutant, "broken", 0.0, f"without a mistake: {wrong}")
                else:
                    yield self.one(mutant) if by_kit(mutant) else running[mutant.name].result()

    def unmutated(self, subject: Subject, mutants: Sequence[Mutant]) -> str:
        """What the named checks say of a drafter as it is, if they do not pass."""
        named = {m.killed_by: None for m in mutants if by_kit(m) and subject.has(m.file)}
        if not named:
            return ""
        with loaded(subject) as contract:
            told = {check: outcome(contract, check) for check in named}
        return "; ".join(f"{check}: {what}" for check, what in told.items() if what)

    def one(self, mutant: Mutant) -> Result:
        """Run the check that a mutant names."""
        started = time.perf_counter()
        try:
            with loaded(subject_of(mutant), mutant) as contract:
                contract.make_kit().close()  # a drafter that cannot be opened tests no check
                found = outcome(contract, mutant.killed_by)
            result = Result(mutant, "killed" if found else "survived", 0.0, found)
        except Exception as error:
            result = Result(mutant, "broken", 0.0, f"{type(error).__name__}: {error}")
        return evolve(result, seconds=time.perf_counter() - started)


def _tests_unmutated(mutants: Sequence[Mutant]) -> str:
    """What the named tests say of each drafter as it is, if they do not pass."""
    wrong = []
    for subject in SUBJECTS:
        tests = dict.fromkeys(m.killed_by for m in mutants if subject.has(m.file))
        if tests:
            run = _pytest(subject, None, list(tests), None)
            wrong += [] if run.returncode == 0 else [run.stdout[-2000:]]
    return "; ".join(wrong)


def _by_test(mutant: Mutant) -> Result:
    """Run the test that a mutant names, in a process of its own."""
    started = time.perf_counter()
    verdict: Verdict = "timeout"
    detail = ""
    try:
        run = _pytest(subject_of(mutant), mutant, [mutant.killed_by], _TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    else:
        verdict = "broken" if run.returncode > 1 else "killed" if run.returncode else "survived"
        detail = f"exit status {run.returncode}: {run.stdout[-2000:]}"
    return Result(mutant, verdict, time.perf_counter() - started, detail)


def _pytest(
    subject: Subject, mutant: Mutant | None, tests: Sequence[str], timeout: float | None
) -> subprocess.CompletedProcess[str]:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    with TemporaryDirectory(prefix="specdec-mutant-") as folder:
        # The core is copied too: mutants.guard sees by it that nothing installed is tested.
        package = Path(folder) / subject.package
        shutil.copytree(REPOSITORY / "core/src", folder, ignore=ignored, dirs_exist_ok=True)
        shutil.copytree(REPOSITORY / subject.folder, package, ignore=ignored)
        if mutant is not None:
            inside = Path(mutant.file).relative_to(subject.folder)
            (package / inside).write_text(edited(mutant, REPOSITORY), encoding="utf-8")
        path = os.pathsep.join([folder, str(REPOSITORY / "tests")])
        options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-p", "mutants.guard"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path, "SPECDEC_MUTANT": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Show which checks find each mutant."""
    parser = argparse.ArgumentParser(description="Which checks of the kit find each mutant.")
    parser.add_argument("-k", dest="name", default="", help="only mutants with this in their name")
    parser.add_argument("--all", action="store_true", help="all checks that fail, not the first")
    given = parser.parse_args(arguments)
    print("mutant | named check | " + ("all that fail" if given.all else "first that fails"))
    missed = 0
    for mutant in DRAFTER_MUTANTS:
        if given.name not in mutant.name or not by_kit(mutant):
            continue
        found = failing(mutant)
        shown = list(found) if given.all else [next(found, "none")]
        missed += given.all and mutant.killed_by not in shown
        print(f"{mutant.name} | {mutant.killed_by} | {', '.join(shown)}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
