"""A block drafter's files: its config, and where its tensors are; no weight, and no MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from specdec.errors import ArtifactError
from specdec.plugins.headers import read_header, read_index, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.plugins.headers import Stored

__all__ = ["DrafterFiles", "read_files", "read_tensor_names"]

_SINGLE: Final = "model.safetensors"


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
        tensors=read_tensor_names(folder),
    )


def read_tensor_names(folder: Path) -> Mapping[str, Stored]:
    """Where each tensor is, by its name without a leading ``model.``.

    Raises:
        ArtifactError: no weights, an unreadable file, or a name twice.
    """
    index = read_index(folder)
    if index is not None:
        files = [folder / name for name in sorted(set(index.values()))]
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{folder} has no safetensors files; download the whole drafter")
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(file).tensors.items():
            bare = name.removeprefix("model.")
            if bare in found:
                raise ArtifactError(
                    f"{folder} has the tensor {bare} twice, in {found[bare].file.name} and "
                    f"{file.name}; download it again"
                )
            found[bare] = stored
    missing = sorted(set(index or ()) - {s.name for s in found.values()})
    if missing:
        raise ArtifactError(
            f"{folder} lacks {missing[0]}, which its index names; download it again"
        )
    return found
