"""What the command line asks of a suite of mutants, whatever it is that they break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mutants.edits import Mutant

__all__ = ["Result", "Suite", "Verdict", "table"]

# Only "killed" is as it should be. "broken": the run ended in another way than by a failed test,
# or the test fails without the mistake as well.
Verdict = Literal["killed", "survived", "timeout", "broken"]


@frozen
class Result:
    """What became of one mutant.

    Attributes:
        mutant: which one.
        verdict: whether its test found it.
        seconds: how long that took.
        detail: the end of what the run printed.
    """

    mutant: Mutant
    verdict: Verdict
    seconds: float
    detail: str = ""


class Suite(Protocol):
    """Mutants of one kind, and how they are run."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def mutants(self) -> Sequence[Mutant]:
        """All of them."""

    def run(self, mutants: Sequence[Mutant], jobs: int) -> Iterable[Result]:
        """Run some of them, up to ``jobs`` at a time; results come in the order of ``mutants``."""


def table(results: Sequence[Result]) -> str:
    """The results, aligned, and a line that sums them up."""
    lines = [("mutant", "file", "killed by", "seconds")]
    for result in results:
        mutant, by = result.mutant, result.mutant.killed_by
        if result.verdict != "killed":
            by = f"{result.verdict.upper()}, not killed by {by}"
        lines.append((mutant.name, mutant.file, by, f"{result.seconds:.1f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    shown = [
        " | ".join((*(cell.ljust(w) for cell, w in zip(line[:3], widths, strict=False)), line[3]))
        for line in lines
    ]
    killed = sum(result.verdict == "killed" for result in results)
    written, survived = len(results), len(results) - killed
    return "\n".join([*shown, f"{written} written, {killed} killed, {survived} survived"])
