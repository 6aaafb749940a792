"""What safetensors files say of themselves, read without MLX and without touching a weight.

A file begins with eight bytes that give the length of a JSON header, which holds every tensor's
name, shape, type and place (https://github.com/huggingface/safetensors). A checkpoint of several
files has an index beside them that says which tensor is in which.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "INDEX",
    "Header",
    "Stored",
    "read_drafter",
    "read_header",
    "read_index",
    "read_object",
]

INDEX: Final = "model.safetensors.index.json"
"""Name of the index of a checkpoint of several files."""

_SINGLE: Final = "model.safetensors"


@frozen
class Stored:
    """A tensor in a file: where it is and what the header says of it.

    Attributes:
        file: the safetensors file.
        name: its name in there.
        shape: its shape as it is stored, packed where it is quantized.
        dtype: its type in safetensors' words, such as ``BF16``.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@frozen
class Header:
    """A file's header.

    Attributes:
        from_mlx: whether the file says that MLX wrote it.
        tensors: every tensor, under its name.
    """

    from_mlx: bool
    tensors: Mapping[str, Stored] = field(repr=False)


def read_header(file: Path) -> Header:
    """Names, shapes and types of a safetensors file.

    Raises:
        ArtifactError: it is missing, no such file, or shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its beginning is no header's length")
            entries = json.loads(stream.read(length))
        says = entries.pop("__metadata__", None) or {}
        stored = {
            name: Stored(file, name, tuple(map(int, entry["shape"])), str(entry["dtype"]))
            for name, entry in entries.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        if end > size - 8 - length:
            raise ValueError(f"it has {size} bytes and should have {end + 8 + length}")
        return Header(says.get("format") == "mlx", stored)
    except FileNotFoundError as error:
        raise ArtifactError(f"{file} does not exist; download it") from error
    except (
        *(OSError, ValueError, LookupError, TypeError),
        *(AttributeError, RecursionError, OverflowError),  # the last from a shape of infinity
    ) as error:
        raise ArtifactError(
            f"{file} is no readable safetensors file ({one_line(error)}); download it again"
        ) from error


def read_index(folder: Path) -> Mapping[str, str] | None:
    """Tensor names to file names, or ``None`` where the folder has no index.

    Raises:
        ArtifactError: there is one that cannot be used.
    """
    file = folder / INDEX
    if not file.exists():
        return None
    found = read_object(file).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ArtifactError(f"{file} has no usable weight_map; download it again")
    return found


def read_drafter(folder: Path) -> Mapping[str, Stored]:
    """Where each tensor of a drafter is, by its name without a leading ``model.``.

    Args:
        folder: of the drafter alone; nothing of its target's is in it.

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
    missing = sorted(set(index or ()) - {stored.name for stored in found.values()})
    if missing:
        raise ArtifactError(
            f"{folder} lacks {missing[0]}, which its index names; download it again"
        )
    return found


def read_object(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        ArtifactError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{file} cannot be read ({one_line(error)}); download it again"
        ) from error
    if not isinstance(found, dict):
        raise ArtifactError(f"{file} holds no JSON object; download it again")
    return found
