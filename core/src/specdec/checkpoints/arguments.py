"""What a prefix cache may be given; everything else is an ``OptionError``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR

from specdec.contract import RowCheckpoint
from specdec.errors import OptionError, one_line

__all__ = ["check_limit", "check_row", "count_of", "folder_of", "namespace_of"]

_LONGEST_NAMESPACE = 1 << 16


def check_limit(name: str, value: object) -> None:
    """Refuse a limit that is no positive number of bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} is {value!r}; give a number of bytes, 1 or more")


def namespace_of(value: object) -> str:
    """A namespace, which must be text, not empty and of 64 KiB at the most."""
    try:
        size = len(value.encode()) if isinstance(value, str) else 0
        if size > _LONGEST_NAMESPACE:
            raise OptionError(
                f"the namespace has {size} bytes; give {_LONGEST_NAMESPACE} at the most"
            )
        if isinstance(value, str) and size:
            return value
    except UnicodeEncodeError:
        pass
    raise OptionError(one_line(f"the namespace is {value!r}; give a non-empty string"))


def folder_of(directory: str | os.PathLike[str]) -> Path:
    """The folder that a path names, which need not be there yet."""
    try:
        if not os.fspath(directory):
            raise OptionError("the directory is an empty string; give a folder")
        folder = Path(directory).expanduser()
        # Not Path.exists, which takes some failures for an answer.
        with contextlib.suppress(FileNotFoundError):
            if not S_ISDIR(folder.stat().st_mode):
                raise OptionError(f"the directory '{folder}' is a file; give a folder")
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, OptionError):
            raise
        what = f"the directory {directory!r} cannot be used ({one_line(error)}); give a folder"
        raise OptionError(one_line(what)) from error
    return folder


def check_row(caches: object, checkpoint: object) -> None:
    """Refuse what is no row of caches, or no drafter's state."""
    if not isinstance(caches, Sequence):
        raise OptionError(one_line(f"the caches are {caches!r}; give the list of a row's caches"))
    if checkpoint is not None and not isinstance(checkpoint, RowCheckpoint):
        raise OptionError(one_line(f"the checkpoint is {checkpoint!r}; give a RowCheckpoint"))


def count_of(longest: object) -> int:
    """A number of tokens; below 0 counts as 0."""
    if not isinstance(longest, int):
        raise OptionError(f"longest is {longest!r}; give a number of tokens")
    return max(0, longest)
