"""``drafter="auto"``: what the model brings along, else a copy of what was said before.

The order is always the same, whatever was installed first: the head that the checkpoint declares,
a drafter in a folder of its own inside the model's, a head among the model's own files, n-gram.
What is there and cannot be used is named in a warning, and the next one is tried.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from specdec.errors import (
    PluginError,
    SpecdecDrafterWarning,
    SpecdecError,
    one_line,
)
from specdec.plugins import Artifact, DeclaresNativeDraft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from specdec.pairing import LoadedDrafter
    from specdec.plugins import DraftKind, Registry
    from specdec.targets import Target

    Load = Callable[[DraftKind, Path | None], LoadedDrafter]

__all__ = ["AUTO", "load_automatic"]

AUTO: Final = "auto"
"""In place of a kind: the best drafter that there is without naming one."""

_LAST: Final = "ngram"


@frozen
class _Choice:
    """A drafter that the model brings along.

    Attributes:
        kind: its kind.
        what: the thing, for messages.
        path: its folder; ``None`` where it is among the model's own files.
    """

    kind: DraftKind = field(eq=False)
    what: str
    path: Path | None = None


def load_automatic(registry: Registry, target: Target, load: Load) -> LoadedDrafter:
    """Load the first drafter that fits.

    Args:
        registry: the kinds that are installed.
        target: the bound target.
        load: loads a drafter of a kind, from a folder or from the target's own.

    Raises:
        PluginError: nothing came along that can be used, and n-gram is not installed.

    Warns:
        SpecdecDrafterWarning: something came along that cannot be used; says why.
    """
    tried: set[str] = set()
    for choice in _choices(registry, target):
        if choice.kind.name in tried:
            continue  # it has looked in these places itself
        tried.add(choice.kind.name)
        try:
            return load(choice.kind, choice.path)
        except SpecdecError as error:
            _pass_over(choice.what, error)
    try:
        return load(registry.select(kind=_LAST), None)
    except PluginError as error:
        raise PluginError(
            f"drafter auto: the model brings along no drafter that can be used; {error}"
        ) from error


def _choices(registry: Registry, target: Target) -> Iterator[_Choice]:
    """What the model brings along, best first."""
    declared = target.native_draft if isinstance(target, DeclaresNativeDraft) else None
    if declared is not None:
        what = f"the head that the model declares ({declared})"
        try:
            yield _Choice(registry.select(target=target), what)
        except PluginError as error:
            _pass_over(what, error)
    if target.folder is None:
        return
    kinds = [kind for _, kind in sorted(registry.kinds.items())]
    for kind in kinds:
        path = None if kind.bundled_at is None else target.folder / kind.bundled_at
        if path is not None and path.exists() and _recognised(registry, kind, path):
            yield _Choice(kind, f"the drafter in {path}", path)
    for kind in kinds:
        # A kind that makes heads of a model's own files knows them there.
        if kind.create is not None and _recognised(registry, kind, target.folder):
            yield _Choice(kind, f"the {kind.name} head in {target.folder}")


def _recognised(registry: Registry, kind: DraftKind, path: Path) -> bool:
    """Whether the kind's own detector takes a folder for one of its drafters."""
    for answer in registry.detect(Artifact(path)):
        if answer.kind is kind:
            if answer.error is not None:
                _pass_over(f"the folder {path}", PluginError(f"{kind.name} {answer.message}"))
            return answer.answer == "yes"
    return False


def _pass_over(what: str, error: SpecdecError) -> None:
    warnings.warn(
        f"drafter auto: {what} is passed over: {one_line(error)}",
        SpecdecDrafterWarning,
        stacklevel=2,
    )
