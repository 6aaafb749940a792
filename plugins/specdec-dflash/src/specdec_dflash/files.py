"""A block drafter's files: its config, and where its tensors are; no weight, and no MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from specdec.errors import ArtifactError
from specdec.plugins.headers import read_drafter, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.plugins.headers import Stored

__all__ = ["DrafterFiles", "read_files"]


@frozen(kw_only=True)
class DrafterFiles:
    """What was found in a drafter's folder.

    Attributes:
        path: the folder.
        config: its ``config.json`` (or ``dspark.json``).
        tensors: by name, without a leading ``model.``.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def read_files(folder: Path, config_name: str = "config.json") -> DrafterFiles:
    """The config and the names of the tensors of a drafter.

    Args:
        folder: of the drafter alone; nothing of the target's is in it.
        config_name: the file that describes it.

    Raises:
        ArtifactError: the folder, the config or a weights file is missing or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArtifactError(f"{folder} {what}; give the folder that holds {config_name}")
    return DrafterFiles(
        path=folder,
        config=read_object(folder / config_name),
        tensors=read_drafter(folder),
    )
