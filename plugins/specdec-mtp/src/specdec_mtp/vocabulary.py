"""The draft vocabulary: frequent ids that a head scores alone, as a file or as an option."""

from __future__ import annotations

import json
from itertools import pairwise
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specdec.errors import ArtifactError, OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FILE", "read_vocabulary"]

FILE: Final = "draft_vocab.json"
"""``{"ids": [...]}``, beside the head or the target."""


def read_vocabulary(
    given: object, folders: Iterable[Path | None], vocab_size: int
) -> tuple[int, ...] | None:
    """The ids to draft over, ascending.

    Args:
        given: a list of ids, the path of a file, ``False`` for all ids, or ``None``: the first
            ``draft_vocab.json`` in ``folders``, if there is one.
        folders: where to look; ``None`` among them is passed over.
        vocab_size: V of the target.

    Raises:
        OptionError: an option that is none of these, or ids that the target has not.
        ArtifactError: a file that cannot be read, or ids in it that the target has not.
    """
    if given is False:
        return None
    if given is None:
        found = (folder / FILE for folder in folders if folder is not None)
        path = next((file for file in found if file.is_file()), None)
        return None if path is None else _read(path, vocab_size, ArtifactError)
    if isinstance(given, str | Path):
        return _read(Path(given), vocab_size, OptionError)
    if not isinstance(given, list | tuple):
        raise OptionError(
            f"draft_vocab is {one_line(repr(given))}; give a list of ids, the path of a "
            f"{FILE}, or false for the whole vocabulary"
        )
    return _checked(given, "draft_vocab", vocab_size, OptionError)


def _read(path: Path, vocab_size: int, error: type[ArtifactError | OptionError]) -> tuple[int, ...]:
    try:
        held: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as raised:
        raise error(f"{path} cannot be read ({one_line(raised)}); give a {FILE}") from raised
    ids = held.get("ids") if isinstance(held, dict) else None
    if not isinstance(ids, list):
        raise error(f'{path} has no list "ids"; write {{"ids": [...]}}')
    return _checked(ids, str(path), vocab_size, error)


def _checked(
    ids: list[Any] | tuple[Any, ...],
    name: str,
    vocab_size: int,
    error: type[ArtifactError | OptionError],
) -> tuple[int, ...]:
    numbers = []
    for each in ids:
        try:
            number = index(each) if not isinstance(each, bool) else -1
        except TypeError:
            number = -1
        if not 0 <= number < vocab_size:
            raise error(
                f"{name} has {one_line(repr(each))}; this target's ids are 0 to {vocab_size - 1}"
            )
        numbers.append(number)
    if not numbers:
        raise error(f"{name} is empty; list some ids, or leave it away for the whole vocabulary")
    ascending = sorted(numbers)
    twice = next((one for one, other in pairwise(ascending) if one == other), None)
    if twice is not None:
        raise error(f"{name} has {twice} twice; list each id once")
    return tuple(ascending)
