"""What a plugin declares and exchanges: kinds, artifacts, load requests and loaded drafters.

A kind is a name with functions. Only ``load`` and ``create`` may import MLX; ``detect`` looks at
files, never at weights, so that listing and detection work where no MLX is installed.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from specdec.errors import ArtifactError, OptionError, PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from attrs import Attribute

    from specdec.contract import DraftProvider, TargetView

    _Validator = Callable[[Any, Attribute[Any], Any], None]

__all__ = [
    "Artifact",
    "DeclaresNativeDraft",
    "DraftKind",
    "LoadRequest",
    "LoadedDraft",
    "validated_kinds",
]

_KIND_NAME = re.compile(r"[a-z][a-z0-9-]*")
_FOLDER_NAME = re.compile(r"[^/\\:]+")


def _must(
    test: Callable[[Any], bool], be: str, error: type[PluginError | OptionError] = PluginError
) -> _Validator:
    """A validator whose message is one plain line, without attrs' own objects in it."""

    def check(instance: Any, attribute: Attribute[Any], value: Any) -> None:
        if not test(value):
            what = f"{type(instance).__name__}: {attribute.name}"
            raise error(f"{what} must be {be}, but is {reprlib.repr(value)}")

    return check


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_callable_or_none(value: Any) -> bool:
    return value is None or callable(value)


def _is_kind_name(value: Any) -> bool:
    return isinstance(value, str) and _KIND_NAME.fullmatch(value) is not None


def _is_folder_or_none(value: Any) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, str)
        and _FOLDER_NAME.fullmatch(value) is not None
        and value not in (".", "..")
    )


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and len(value.splitlines()) <= 1


def _as_path(value: str | os.PathLike[str]) -> Path:
    return Path(value)


def _as_optional_path(value: str | os.PathLike[str] | None) -> Path | None:
    return None if value is None else Path(value)


def _read_only(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


@frozen
class Artifact:
    """A drafter on disk, as ``detect`` sees it: files by name and the config, never weights.

    Attributes:
        path: the folder (or single file).
    """

    path: Path = field(converter=_as_path)

    def has(self, name: str) -> bool:
        """Whether the folder has a file or sub-folder of this name."""
        return os.path.exists(self.path / name)

    @cached_property
    def config(self) -> Mapping[str, Any] | None:
        """``config.json``, read once; ``None`` if it is absent, unreadable or no JSON object."""
        try:
            found = json.loads((self.path / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        # Read-only: all detectors share it, and none may change what the next one sees.
        return MappingProxyType(found) if isinstance(found, dict) else None

    def require_exists(self) -> None:
        """Check that there is something at ``path``.

        Raises:
            ArtifactError: there is nothing.
        """
        if not os.path.exists(self.path):
            raise ArtifactError(f"there is no file or folder {self.path}")

    def require_readable(self) -> None:
        """Check that ``path`` is a readable file, or a folder with at least one in it.

        Raises:
            ArtifactError: nothing is there, or nothing that can be read.
        """
        self.require_exists()
        try:
            files = list(self.path.iterdir()) if self.path.is_dir() else [self.path]
        except OSError as error:
            raise ArtifactError(f"{self.path} cannot be read: {error.strerror}") from error
        if not any(os.path.isfile(file) and os.access(file, os.R_OK) for file in files):
            raise ArtifactError(
                f"{self.path} has no readable files; pass the folder that holds config.json"
            )


@runtime_checkable
class DeclaresNativeDraft(Protocol):
    """Optional, for a target whose own checkpoint carries a draft head."""

    @property
    def native_draft(self) -> str | None:
        """Name of the kind whose ``create`` makes the head's drafter, or ``None``."""


@frozen(kw_only=True, eq=False)
class LoadRequest:
    """What a kind's ``load`` is given.

    Attributes:
        kind: name of the kind that was chosen; one function may serve several.
        path: the drafter's artifact; ``None`` for a kind that has none, or where the user named
            none: a drafter that may come along with its target looks in ``target.folder``.
        target: the bound target; check its ports before anything is allocated.
        tokenizer: the target's tokenizer, or ``None``.
        num_draft_tokens: the most drafts a round that the user asked for, or ``None``.
        options: further settings by name, read-only.
    """

    kind: str = field(validator=_must(_is_kind_name, "a kind's name", OptionError))
    path: Path | None = field(default=None, converter=_as_optional_path)
    target: TargetView
    tokenizer: Any | None = None
    num_draft_tokens: int | None = field(
        default=None, validator=_must(_is_count_or_none, "1 or more, or None", OptionError)
    )
    options: Mapping[str, Any] = field(factory=dict, converter=_read_only)


@frozen(eq=False)
class LoadedDraft:
    """What a kind's ``load`` returns.

    Attributes:
        provider: the drafter; the core checks that it has every member of a ``DraftProvider``.
        num_draft_tokens: the most drafts a round, 1 or more; never above what the drafter was
            trained for.
        max_draft_tokens: what it was trained for, where a single request may ask for more than
            ``num_draft_tokens``; ``None`` for a drafter that has no such limit.
    """

    provider: DraftProvider
    num_draft_tokens: int = field(validator=_must(_is_count, "1 or more"))
    max_draft_tokens: int | None = field(
        default=None, validator=_must(_is_count_or_none, "1 or more, or None")
    )


@frozen(kw_only=True)
class DraftKind:
    """One kind of drafter that a plugin offers.

    Attributes:
        name: lower-case letters, digits and hyphens, such as ``"two-model"``.
        load: makes the drafter; heavy imports belong inside it.
        detect: whether an artifact is of this kind; ``None``: chosen by name only.
        create: makes the drafter of the head that the request's target declares as its own; the
            request has no path.
        fallback: takes what no other kind recognises; if it has ``detect``, that is asked last.
        bundled_at: sub-folder of a target in which such a drafter may come along.
        artifact: whether the kind has files of its own; by default, if anything above needs them.
        default_width: drafts a round where the user names no number, as listings show it; ``load``
            is what applies it.
        summary: one line for people.
    """

    name: str = field(
        validator=_must(_is_kind_name, "lower-case letters, digits and hyphens, letter first")
    )
    load: Callable[[LoadRequest], LoadedDraft] = field(validator=_must(callable, "a function"))
    detect: Callable[[Artifact], bool] | None = field(
        default=None, validator=_must(_is_callable_or_none, "a function or None")
    )
    create: Callable[[LoadRequest], LoadedDraft] | None = field(
        default=None, validator=_must(_is_callable_or_none, "a function or None")
    )
    fallback: bool = field(default=False, validator=_must(_is_bool, "True or False"))
    bundled_at: str | None = field(
        default=None, validator=_must(_is_folder_or_none, "the name of a sub-folder, or None")
    )
    artifact: bool = field(validator=_must(_is_bool, "True or False"))
    default_width: int | None = field(
        default=None, validator=_must(_is_count_or_none, "1 or more, or None")
    )
    summary: str = field(default="", validator=_must(_is_line, "one line of text"))

    @artifact.default
    def _needs_artifact(self) -> bool:
        return self.detect is not None or self.fallback or self.bundled_at is not None

    def __attrs_post_init__(self) -> None:
        if self._needs_artifact() and not self.artifact:
            raise PluginError(
                f"DraftKind: '{self.name}' has detect, fallback or bundled_at, "
                "so it cannot have artifact=False"
            )


def validated_kinds(results: Iterable[object]) -> tuple[DraftKind, ...]:
    """The kinds of one plugin, sorted by name.

    Args:
        results: what its implementations of ``specdec_draft_kinds`` returned.

    Raises:
        PluginError: a result is no list of kinds, or names one kind twice.
    """
    kinds: dict[str, DraftKind] = {}
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginError(
                "specdec_draft_kinds must return a list of DraftKind, "
                f"but returned {type(result).__name__}"
            )
        for kind in result:
            if not isinstance(kind, DraftKind):
                raise PluginError(
                    "specdec_draft_kinds must return a list of DraftKind, "
                    f"but the list has {type(kind).__name__}"
                )
            if kind.name in kinds:
                raise PluginError(f"specdec_draft_kinds returned the kind '{kind.name}' twice")
            kinds[kind.name] = kind
    return tuple(kinds[name] for name in sorted(kinds))
