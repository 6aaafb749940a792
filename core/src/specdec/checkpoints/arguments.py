"""What a prefix cache may be given; everything else is an ``OptionError``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    import os

__all__ = ["check_limit", "count_of", "folder_of", "namespace_of"]


def check_limit(name: str, value: object) -> None:
    """Refuse a limit that is no positive number of bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} is {value!r}; give a number of bytes, 1 or more")


def namespace_of(value: object) -> str:
    """A namespace, which must be text and not empty."""
    try:
        if isinstance(value, str) and value.encode():
            return value
    except UnicodeEncodeError:
        pass
    raise OptionError(one_line(f"the namespace is {value!r}; give a non-empty string"))


def folder_of(directory: str | os.PathLike[str]) -> Path:
    """The folder that a path names, which need not be there yet."""
    folder = Path(directory).expanduser()
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"the directory '{folder}' is a file; give a folder")
    return folder


def count_of(longest: object) -> int:
    """A number of tokens; below 0 counts as 0."""
    if not isinstance(longest, int):
        raise OptionError(f"longest is {longest!r}; give a number of tokens")
    return max(0, longest)
