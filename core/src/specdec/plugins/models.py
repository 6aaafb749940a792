"""Models and prompt files found by name, in packages that ship some.

A package registers names under the entry point groups ``specdec.models`` and ``specdec.prompts``.
An entry's object is called with the entry's name and returns a path.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from specdec.errors import ModelNotFoundError

__all__ = ["find_model", "find_prompts", "model_names", "prompt_names"]

_MODELS = "specdec.models"
_PROMPTS = "specdec.prompts"


def model_names() -> tuple[str, ...]:
    """Names of all bundled models that are installed, sorted."""
    return _names(_MODELS)


def prompt_names() -> tuple[str, ...]:
    """Names of all bundled prompt files that are installed, sorted."""
    return _names(_PROMPTS)


def find_model(name: str) -> Path | None:
    """The folder of a bundled model, or ``None`` where no installed package has one of this name.

    Raises:
        ModelNotFoundError: the package that registers the name fails to give the folder.
    """
    return _find(_MODELS, name)


def find_prompts(name: str) -> Path | None:
    """A bundled prompt file, or ``None`` where no installed package has one of this name.

    Raises:
        ModelNotFoundError: the package that registers the name fails to give the file.
    """
    return _find(_PROMPTS, name)


def _names(group: str) -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def _find(group: str, name: str) -> Path | None:
    for entry in sorted(entry_points(group=group, name=name), key=lambda e: e.value):
        try:
            return Path(entry.load()(name))
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            raise ModelNotFoundError(
                f"{name} of {owner} cannot be found ({type(error).__name__}: {error}); "
                f"install {owner} again"
            ) from error
    return None
