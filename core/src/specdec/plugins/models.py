"""Models found by name: packages that ship some register them under ``specdec.models``.

An entry's object is called with the entry's name and returns the model's folder.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from specdec.errors import ModelNotFoundError

__all__ = ["find_model", "model_names"]

_GROUP = "specdec.models"


def model_names() -> tuple[str, ...]:
    """Names of all bundled models that are installed, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=_GROUP)}))


def find_model(name: str) -> Path | None:
    """The folder of a bundled model, or ``None`` where no installed package has one of this name.

    Raises:
        ModelNotFoundError: the package that registers the name fails to give the folder.
    """
    for entry in sorted(entry_points(group=_GROUP, name=name), key=lambda e: e.value):
        try:
            return Path(entry.load()(name))
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else entry.value
            raise ModelNotFoundError(
                f"model {name} of {owner} cannot be found ({type(error).__name__}: {error}); "
                f"install {owner} again"
            ) from error
    return None
