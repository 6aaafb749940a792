"""Every error that specdec raises on purpose.

Each message is one line: what happened, what was given, what to do. The tree::

    SpecdecError
    ├── ContractError               a verb was called in a way the draft contract forbids
    │   ├── RoundOpenError          a round is open: commit it first
    │   ├── NoOpenRoundError        commit without a round
    │   ├── ClosedError             the group is closed
    │   ├── RowIndexError           a row number that the group does not have
    │   └── ProviderError           an object that is no DraftProvider
    ├── CheckpointError             a checkpoint that does not fit where it is restored
    ├── TargetError
    │   ├── TargetLacksError        the target has no such port
    │   ├── AdapterError            a drafter that is not made for a target under an adapter
    │   ├── UnsupportedModelError   a model that cannot be driven from outside
    │   └── RollbackError           state that cannot keep exactly what was asked
    ├── PluginError
    │   ├── BrokenPluginError       strict mode: a plugin or a kind is unusable
    │   ├── UnknownKindError        no installed plugin has this kind
    │   ├── KindConflictError       two distributions register one kind
    │   ├── AmbiguousArtifactError  two kinds recognise one artifact
    │   └── UnrecognizedArtifactError
    ├── ArtifactError               a folder or file that is missing or unreadable
    ├── ModelNotFoundError          a model name that leads nowhere
    ├── OptionError                 a request option that makes no sense (also a ValueError)
    │   └── UnsupportedOptionError  an option of mlx-lm that specdec does not serve yet
    ├── ConstraintError             a token that a row's constraint does not allow, or a constraint
    │                               that cannot go on
    └── GroupFailedError            the target failed; its requests can be admitted again
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "AdapterError",
    "AmbiguousArtifactError",
    "ArtifactError",
    "BrokenPluginError",
    "CheckpointError",
    "ClosedError",
    "ConstraintError",
    "ContractError",
    "GroupFailedError",
    "KindConflictError",
    "ModelNotFoundError",
    "NoOpenRoundError",
    "OptionError",
    "PluginError",
    "ProviderError",
    "RollbackError",
    "RoundOpenError",
    "RowIndexError",
    "SpecdecDrafterWarning",
    "SpecdecError",
    "SpecdecPluginWarning",
    "TargetError",
    "TargetLacksError",
    "UnknownKindError",
    "UnrecognizedArtifactError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "blamed_on",
    "one_line",
]

_LONGEST_LINE = 400
_BLAMED = "in the drafter "


@contextmanager
def blamed_on(drafter: str) -> Iterator[None]:
    """While the block runs, exceptions are of one drafter of several: a note of theirs says so.

    Args:
        drafter: its name; :func:`one_line` begins with it.
    """
    try:
        yield
    except Exception as error:
        note = _BLAMED + drafter
        if note not in getattr(error, "__notes__", ()):  # it may be raised again and again
            error.add_note(note)
        raise


def one_line(what: object, longest: int = _LONGEST_LINE) -> str:
    """Any text or exception as one line of bearable length, for messages and statistics.

    Args:
        what: the text; in front of an exception's stand its type and whom it is blamed on.
        longest: characters, after which the rest is left out.
    """
    try:
        text = " ".join(str(what).split())
    except Exception:  # an exception's own __str__ may raise
        text = ""
    if isinstance(what, BaseException):
        name = type(what).__name__
        text = f"{name}: {text}" if text else name
        notes = [note for note in getattr(what, "__notes__", ()) if isinstance(note, str)]
        whose = [note.removeprefix(_BLAMED) for note in notes if note.startswith(_BLAMED)]
        text = ": ".join([*whose, text])
    return text if len(text) <= longest else text[:longest] + " …"


class SpecdecError(Exception):
    """Root of all errors that specdec raises on purpose."""


class SpecdecDrafterWarning(UserWarning):
    """A drafter was loaded, and something about it costs drafts."""


class SpecdecPluginWarning(UserWarning):
    """A plugin could not be loaded; the others work."""


class ContractError(SpecdecError):
    """A verb was called in a way that the draft contract forbids."""


class RoundOpenError(ContractError):
    """A verb that belongs between rounds was called inside one.

    Attributes:
        verb: the verb that was called.
    """

    def __init__(self, verb: str) -> None:
        self.verb = verb
        super().__init__(f"{verb}() was called inside a round; call commit() first")


class NoOpenRoundError(ContractError):
    """``commit`` was called without a round.

    Attributes:
        verb: the verb that was called.
    """

    def __init__(self, verb: str = "commit") -> None:
        self.verb = verb
        super().__init__(f"{verb}() was called without an open round; call draft() first")


class ClosedError(ContractError):
    """A verb was called on a closed group, or on a closed batch generator.

    Attributes:
        verb: the verb that was called.
    """

    def __init__(self, verb: str, what: str = "group") -> None:
        self.verb = verb
        super().__init__(f"{verb}() was called on a closed {what}; open a new one")


class RowIndexError(ContractError, IndexError):
    """Row numbers that a group does not have, or that it was given twice."""

    def __init__(self, what: str, rows: Sequence[int] | int, row_count: int) -> None:
        self.rows = rows
        self.row_count = row_count
        has = f"rows 0 to {row_count - 1}" if row_count else "no rows"
        super().__init__(f"{what}: got {rows!r}, but the group has {has}")


class ProviderError(ContractError, TypeError):
    """An object that is no ``DraftProvider``.

    Attributes:
        plugin: who made the object.
        missing: the members it lacks.
    """

    def __init__(self, plugin: str, missing: Sequence[str]) -> None:
        self.plugin = plugin
        self.missing = tuple(missing)
        super().__init__(
            f"{plugin} returned an object that is no DraftProvider: it lacks {', '.join(missing)}"
        )


class CheckpointError(SpecdecError, ValueError):
    """A checkpoint that does not fit where it is restored; nothing was changed."""


class TargetError(SpecdecError):
    """The target model cannot do what was asked."""


class TargetLacksError(TargetError):
    """A drafter needs a port that the target does not have.

    Attributes:
        port: the port's name.
    """

    def __init__(self, port: str, needed_by: str = "this drafter") -> None:
        self.port = port
        self.needed_by = needed_by
        super().__init__(
            f"{needed_by} needs the target port '{port}', which this target does not have; "
            "choose another drafter (specdec plugins)"
        )


class AdapterError(TargetError):
    """A drafter is not made for a target that runs under an adapter.

    Attributes:
        drafter: the drafter's kind.
        adapters: types of the adapter layers in the target.
    """

    def __init__(self, drafter: str, adapters: Sequence[str]) -> None:
        self.drafter = drafter
        self.adapters = tuple(adapters)
        super().__init__(
            f"drafter {drafter} does not support a target under an adapter, and this one has "
            f"{', '.join(self.adapters)}; generate without a drafter, fuse the adapter "
            "(mlx_lm.fuse), or use a drafter that supports adapters, such as ngram"
        )


class UnsupportedModelError(TargetError):
    """A model that cannot be driven from outside."""


class RollbackError(TargetError):
    """State that cannot keep exactly the positions that were asked for."""


class PluginError(SpecdecError):
    """Something about finding or choosing a drafter."""


class BrokenPluginError(PluginError):
    """Strict mode: a plugin could not be loaded, or two plugins collide."""


class UnknownKindError(PluginError):
    """No installed plugin offers this kind."""


class KindConflictError(PluginError):
    """Two distributions register the same kind, so neither is used."""


class AmbiguousArtifactError(PluginError):
    """More than one kind recognises the artifact."""


class UnrecognizedArtifactError(PluginError):
    """No kind recognises the artifact."""


class ArtifactError(SpecdecError):
    """A folder or file that is missing or unreadable."""


class ModelNotFoundError(SpecdecError):
    """A model name that is neither a folder, nor a bundled model, nor a hub id."""


class OptionError(SpecdecError, ValueError):
    """A request option that makes no sense."""


class UnsupportedOptionError(OptionError):
    """An option of mlx-lm that specdec does not serve yet.

    Attributes:
        option: the keyword.
    """

    def __init__(self, option: str, hint: str) -> None:
        self.option = option
        super().__init__(f"{option} is not supported by specdec yet; {hint}")


class ConstraintError(SpecdecError):
    """A token that a row's constraint does not allow, or a constraint that cannot go on."""


class GroupFailedError(SpecdecError):
    """The target's graph or state failed, so the group is invalid.

    Every request's committed tokens are intact, and it can be admitted to a new group.
    """
