"""What ``specdec bench`` is asked for, checked before a run: numbers, prompt sets, files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from specdec.cli.options import check_text, read_text
from specdec.errors import OptionError
from specdec.plugins.models import find_prompts, prompt_names

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BUILT_IN",
    "check_file",
    "drafters",
    "numbers",
    "prompt_sets",
    "read_prompts",
    "shares",
    "widths",
]

BUILT_IN: Final = ("code", "prose", "copy-heavy", "chat", "random")
"""The names of ``specdec.bench.BUILT_IN``, which would import MLX."""


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Whole numbers with commas between them.

    Raises:
        OptionError: anything else, or one below ``least``.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [least - 1]
    if min(found) < least:
        raise OptionError(
            f"{option} is {text!r}; give whole numbers of {least} or more, such as {least},8"
        )
    return list(dict.fromkeys(found))


def shares(option: str, text: str) -> list[float]:
    """Numbers of 0 to 1 with commas between them.

    Raises:
        OptionError: anything else.
    """
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 1 for each in found):
        raise OptionError(f"{option} is {text!r}; give numbers of 0 to 1, such as 0.6,0.8")
    return list(dict.fromkeys(found))


def widths(text: str) -> list[int | Literal["default"] | None]:
    """Drafts a round to time besides those that specdec chooses: ``None``, and it comes first.

    Raises:
        OptionError: what is neither a number of 1 or more nor ``default``.
    """
    found: list[int | Literal["default"] | None] = [None]
    for part in text.split(",") if text else ():
        if part == "default":
            found.append("default")
            continue
        if not part.strip().isdecimal() or int(part) < 1:
            raise OptionError(
                f"--widths is {text}; give whole numbers of 1 or more, such as 1,2,4, or default"
            )
        found.append(int(part))
    return found


def drafters(asked: list[str] | None, simulated: bool) -> list[str]:
    """What is timed: what was asked for, else all that need no folder.

    Args:
        asked: names.
        simulated: whether drafters are simulated, in which case nothing else is timed unasked.
    """
    if asked is not None:
        return [drafter for drafter in asked if drafter != "none"]
    if simulated:
        return []
    from specdec.plugins import default_registry

    kinds = default_registry().kinds
    found = [name for name, kind in kinds.items() if not kind.artifact]
    if not found:
        print(
            "specdec: no drafter is timed: none that is installed works without a folder; name one "
            "with --drafter (a folder, mtp, native), or pip install specdec-ngram",
            file=sys.stderr,
        )
    return found


def prompt_sets(names: str, limit: int | None) -> dict[str, list[str] | None]:
    """Texts by the name of their set; ``None`` for a set that needs the model's tokenizer.

    Args:
        names: with commas between them; or one file that has commas in its name.
        limit: the first prompts of each set only.

    Raises:
        OptionError: a set that is not there, or twice.
    """
    check_limit(limit)
    whole = find_prompts(names) is not None or _is_file(names)
    sets: dict[str, list[str] | None] = {}
    for name in [names] if whole else names.split(","):
        if not name:
            raise OptionError(f"--prompts {names!r} has an empty name; give {', '.join(BUILT_IN)}")
        if name in sets:
            raise OptionError(f"--prompts {names} has {name} twice; give each once")
        built_in = name in BUILT_IN and not (whole and name == names)
        sets[name] = None if built_in else read_prompts(name, limit)
    return {_short(name, sets): texts for name, texts in sets.items()}


def _is_file(name: str) -> bool:
    try:
        return name == "-" or Path(name).is_file()
    except OSError:  # a name that no file can have
        return False


def _short(name: str, sets: Mapping[str, Any]) -> str:
    """A file's name without folders, where that is not another set's as well."""
    short = Path(name).name
    return short if sum(Path(each).name == short for each in sets) == 1 else name


def check_limit(limit: int | None) -> None:
    """Check a number of prompts, or none.

    Raises:
        OptionError: it is below 1.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"--limit is {limit}; give 1 or more")


def read_prompts(name: str, limit: int | None = None) -> list[str]:
    """Texts of a JSON Lines file, or of a bundled one.

    Raises:
        OptionError: no such file, a line without ``text``, or a limit below 1.
    """
    bundled = find_prompts(name)
    where = name if bundled is None else str(bundled)
    text = read_text(where) if bundled is not None or name != "demo" else ""
    lines = text.removesuffix("\n").split("\n") if text else []  # JSON may hold other line ends
    if not lines:
        known = ", ".join(prompt_names()) or "none; pip install specdec-demo brings some"
        raise OptionError(f"prompts {name}: nothing is there; give a file (bundled: {known})")
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            text = str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(f'{where}: line {number} is no JSON object with "text"') from error
        prompts.append(check_text(text, f"{where}: line {number}"))
    check_limit(limit)
    return prompts[:limit]


def check_file(option: str, name: str) -> None:
    """Check that a file can be written, before anything is run.

    Raises:
        OptionError: its folder is not there, or it is a folder itself.
    """
    path = Path(name)
    if not path.parent.is_dir():
        raise OptionError(f"{option} {name}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise OptionError(f"{option} {name} is a folder; give a file in it")
