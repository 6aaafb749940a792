"""A mutant: one small mistake, written into a copy of the sources."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Mutant", "StaleMutantError", "apply", "edited"]


class StaleMutantError(Exception):
    """The sources have moved on; the mutant has to be written again."""


@frozen(kw_only=True)
class Mutant:
    """One mistake, and the test that finds it.

    Attributes:
        name: a few words with hyphens.
        file: what is edited, relative to the root of the sources.
        old: text that occurs there exactly once.
        new: what stands in its place.
        killed_by: node id of the test that fails on it, relative to the repository.
        why: the mistake, in one sentence.
        endless: whether it makes a loop endless, so that a timeout finds it too.
    """

    name: str
    file: str
    old: str
    new: str
    killed_by: str
    why: str
    endless: bool = False


def edited(mutant: Mutant, root: Path) -> str:
    """The mutated file's text.

    Raises:
        StaleMutantError: the mutant does not fit the sources any more.
    """
    path = root / mutant.file
    if not path.is_file():
        raise _stale(mutant, f"there is no {path}")
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        raise _stale(mutant, f"its old text occurs {count} times in {mutant.file}, not once")
    if mutant.old == mutant.new:
        raise _stale(mutant, "it changes nothing")
    return text.replace(mutant.old, mutant.new)


def apply(mutant: Mutant, root: Path, destination: Path) -> None:
    """Copy the sources under ``root`` into ``destination``, with the mistake in them.

    Raises:
        StaleMutantError: the mutant does not fit the sources any more; nothing was copied.
    """
    text = edited(mutant, root)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(root, destination, ignore=ignored, dirs_exist_ok=True)
    (destination / mutant.file).write_text(text, encoding="utf-8")


def _stale(mutant: Mutant, reason: str) -> StaleMutantError:
    return StaleMutantError(f"mutant {mutant.name} no longer applies: {reason}")
