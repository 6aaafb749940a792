"""Loading a chain of drafters: each by its own name, for the same model, and all or none."""

from __future__ import annotations

import os
import reprlib
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

__all__ = ["Found", "check_members", "load_chain", "members_of"]

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
        if not drafter.strip():
            raise OptionError(f"drafter {drafter!r} is empty; give a kind or a folder")
        if "," not in drafter or _exists(drafter):
            return None
        names: list[Name] = [name.strip() for name in drafter.split(",")]
    else:
        names = list(drafter) if isinstance(drafter, Sequence) else [drafter]
    if not names:
        what = type(drafter).__name__
        raise OptionError(f"drafter is an empty {what}; give a kind or a folder, or none at all")
    for name in names:
        if not isinstance(name, str | os.PathLike):
            shown = one_line(reprlib.repr(name))
            raise OptionError(
                f"drafter {shown} is no name; give a kind or a folder; a model is a draft_model"
            )
    shown = one_line(",".join(os.fspath(name) for name in names))
    if not all(os.fspath(name) for name in names):
        raise OptionError(f"drafter {shown!r} has an empty name; write a chain as ngram,mtp")
    if len(names) < 2:
        raise OptionError(f"drafter {shown!r} is a chain of {len(names)}; give two or more")
    for name in names:
        if name in _NOT_IN_A_CHAIN:
            raise OptionError(f"drafter {shown!r}: {name} cannot stand in a chain; name drafters")
    _check_once([os.fspath(name) for name in names], shown)
    return names


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # it is longer than any file's
        return False


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
    labels = [one_line(label) for label in _labels(members)]
    provider = ChainProvider(
        [
            ChainMember(label, each.provider, each.num_draft_tokens)
            for label, each in zip(labels, loaded, strict=True)
        ]
    )
    return tried(",".join(labels), LoadedDraft(provider, width, width), target, "specdec")


def check_members(members: Sequence[Found], options: Iterable[str]) -> None:
    """Check that members are different drafters, and that every option says whose it is.

    Raises:
        OptionError: one drafter twice, or an option that names no member, or several.
    """
    _options(members, dict.fromkeys(options))


def _options(members: Sequence[Found], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = one_line(",".join(os.fspath(each.name) for each in members))
    _check_once([f"{each.kind} {each.path and each.path.resolve()}" for each in members], shown)
    own: list[dict[str, Any]] = [{} for _ in members]
    known = [f"{label}." for label in _labels(members)]
    for option, value in options.items():
        called, _, name = option.rpartition(".")
        places = [place for place, each in enumerate(members) if called in each.called]
        if called and name and not places:
            members_are = ", ".join(each.removesuffix(".") for each in known)
            raise OptionError(
                f"option {option}: {called} is no member of the chain; its members are "
                f"{members_are}"
            )
        if len(places) != 1 or not name:
            raise OptionError(
                f"option {option} does not say which drafter of the chain it is of; "
                f"begin it with one of {', '.join(known)}"
            )
        if name in own[places[0]]:
            raise OptionError(f"option {option} is given under two names of its drafter; give one")
        own[places[0]][name] = value
    return own


def _labels(members: Sequence[Found]) -> list[str]:
    """What to call members by: their kinds, or as they were given where a kind repeats."""
    kinds = [each.kind for each in members]
    return [each.kind if kinds.count(each.kind) == 1 else each.called[0] for each in members]


def _check_once(names: Sequence[str], shown: str) -> None:
    if len(set(names)) < len(names):
        raise OptionError(f"drafter {shown!r} has one drafter twice; give each once")
