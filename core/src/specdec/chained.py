"""Loading a chain of drafters: each by its own name, for the same model, and all or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.chain import ChainMember, ChainProvider
from specdec.errors import OptionError, one_line
from specdec.pairing import tried
from specdec.plugins import LoadedDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from specdec.pairing import LoadedDrafter
    from specdec.targets import Target

    Name = str | os.PathLike[str]
    Load = Callable[["Found", Mapping[str, Any]], LoadedDrafter]

__all__ = ["Found", "check_options", "load_chain", "members_of"]

_NOT_IN_A_CHAIN = ("auto", "none")


@frozen(eq=False)
class Found:
    """A member that was found, and is not loaded yet.

    Attributes:
        name: as it was given.
        kind: the name of its kind.
        path: its folder, if it has one.
        native: whether it is the head that the model declares.
    """

    name: Name
    kind: str
    path: Path | None
    native: bool = False

    @property
    def called(self) -> tuple[str, ...]:
        """What options may call it by."""
        return tuple(dict.fromkeys((os.fspath(self.name), self.kind)))


def members_of(drafter: Name | Sequence[Name]) -> list[Name] | None:
    """The members that a chain is asked for with; ``None`` where one drafter is meant.

    Args:
        drafter: names or folders, in a sequence or with commas between them. A path that exists is
            one drafter, whatever it is called.

    Raises:
        OptionError: fewer than two, an empty name, one twice, or what is no drafter of its own.
    """
    if isinstance(drafter, os.PathLike):
        return None
    if isinstance(drafter, str):
        if "," not in drafter or Path(drafter).exists():
            return None
        names: list[Name] = [name.strip() for name in drafter.split(",")]
    else:
        names = list(drafter) if isinstance(drafter, Sequence) else [drafter]
    for name in names:
        if not isinstance(name, str | os.PathLike):
            raise OptionError(f"drafter {one_line(repr(name))} is no name; give a kind or a folder")
    shown = ",".join(os.fspath(name) for name in names)
    if not all(os.fspath(name) for name in names):
        raise OptionError(f"drafter {shown!r} has an empty name; write a chain as ngram,mtp")
    if len(names) < 2:
        raise OptionError(f"drafter {shown!r} is a chain of {len(names)}; give two or more")
    for name in names:
        if name in _NOT_IN_A_CHAIN:
            raise OptionError(f"drafter {shown!r}: {name} cannot stand in a chain; name drafters")
    _check_once([os.fspath(name) for name in names], shown)
    return names


def load_chain(
    members: Sequence[Found], load: Load, target: Target, options: Mapping[str, Any]
) -> LoadedDrafter:
    """Load every member, and open the chain once.

    Args:
        members: in the order in which they are asked.
        load: loads one of them with its own options.
        target: the bound target.
        options: by member and name, such as ``ngram.max_ngram``.

    Raises:
        OptionError: one member twice, an option of no member, or a member that cannot stand in a
            chain. What ``load`` raises passes through; those that were loaded are closed.
    """
    shown = ",".join(os.fspath(each.name) for each in members)
    _check_once([f"{each.kind} {each.path and each.path.resolve()}" for each in members], shown)
    own = _options(members, options)
    loaded: list[LoadedDrafter] = []
    try:
        for member, given in zip(members, own, strict=True):
            loaded.append(load(member, given))
    except BaseException:
        for each in loaded:
            with suppress(Exception):  # the others are closed too, and the cause is raised
                each.close()
        raise
    width = max(each.num_draft_tokens for each in loaded)
    provider = ChainProvider(
        [ChainMember(each.kind, each.provider, each.num_draft_tokens) for each in loaded]
    )
    name = ",".join(each.kind for each in loaded)
    return tried(name, LoadedDraft(provider, width, width), target, "specdec")


def check_options(members: Sequence[Found], options: Iterable[str]) -> None:
    """Check that every option says which member it is of.

    Raises:
        OptionError: one does not, or it names no member, or several.
    """
    _options(members, dict.fromkeys(options))


def _options(members: Sequence[Found], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = [{} for _ in members]
    known = ", ".join(f"{each.called[-1]}." for each in members)
    for option, value in options.items():
        called, _, name = option.rpartition(".")
        places = [place for place, each in enumerate(members) if called in each.called]
        if len(places) != 1 or not name:
            raise OptionError(
                f"option {option} does not say which drafter of the chain it is of; "
                f"begin it with one of {known}"
            )
        own[places[0]][name] = value
    return own


def _check_once(names: Sequence[str], shown: str) -> None:
    if len(set(names)) < len(names):
        raise OptionError(f"drafter {shown!r} has one drafter twice; give each once")
