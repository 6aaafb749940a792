"""An assistant's files: its config, and its tensors under the names of the network's parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import frozen

from specdec.drafting.modules import read_stored
from specdec.errors import ArtifactError
from specdec.plugins.headers import read_drafter, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.plugins.headers import Stored
    from specdec_assistant.config import AssistantConfig

__all__ = [
    "CENTROIDS",
    "ORDERING",
    "AssistantFiles",
    "check_sizes",
    "read_files",
    "read_ordering",
    "read_tensors",
]

CENTROIDS: Final = "masked_embedding.centroids.weight"
"""The tensor whose presence makes the head a sparse one, whatever the config says."""

ORDERING: Final = "masked_embedding.token_ordering"
"""Ids, those of each centroid side by side."""


@frozen(kw_only=True)
class AssistantFiles:
    """What was found in an assistant's folder.

    Attributes:
        path: the folder.
        config: the object in ``config.json``.
        tensors: by name, without a leading ``model.``.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]


def read_files(folder: Path) -> AssistantFiles:
    """The config and the names of the tensors; no weight is read.

    Raises:
        ArtifactError: the folder, the config or a weights file is missing or unreadable.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArtifactError(f"{folder} {what}; give the folder that holds config.json")
    config = read_object(folder / "config.json")
    return AssistantFiles(path=folder, config=config, tensors=read_drafter(folder))


def check_sizes(what: str, files: AssistantFiles, config: AssistantConfig) -> None:
    """Check the sizes that a network is allocated by, before it is.

    Raises:
        ArtifactError: a tensor is missing or has other sizes; names it and both values.
    """
    own, table = config.hidden_size, "embed_tokens" if config.tied else "lm_head"
    wanted = {
        "pre_projection.weight": (own, 2 * config.backbone_size),
        "post_projection.weight": (config.backbone_size, own),
        f"{table}.weight": (config.vocab_size, own),
    }
    for number, kind in enumerate(config.layers):
        at, heads = f"layers.{number}", config.heads * config.head_dims[kind]
        wanted[f"{at}.self_attn.q_proj.weight"] = (heads, own)
        wanted[f"{at}.mlp.gate_proj.weight"] = (config.intermediate_size, own)
    for name, shape in wanted.items():
        stored = files.tensors.get(name)
        if stored is None:
            raise ArtifactError(f"{what} has no {name}; give a complete one of this target")
        packed = f"{name.removesuffix('weight')}scales" in files.tensors
        if stored.shape != shape and not (packed and stored.shape[:1] == shape[:1]):
            raise ArtifactError(
                f"the {name} of {what} has shape {stored.shape}, but its config and target need "
                f"{shape}; give the one of this target"
            )


def read_tensors(files: AssistantFiles, config: AssistantConfig) -> dict[str, mx.array]:
    """Weights by the names of the network's parameters; read when they are evaluated.

    The embedding that an untied head leaves unused is left out, and so is the copy of a tied one.

    Raises:
        ArtifactError: a file cannot be read.
    """
    unused = "lm_head." if config.tied else "embed_tokens."
    dropped = {ORDERING}
    if CENTROIDS not in files.tensors:  # nothing is ordered without them
        dropped |= {name for name in files.tensors if name.startswith("masked_embedding.")}
    return read_stored(
        {
            name: stored
            for name, stored in files.tensors.items()
            if not name.startswith(unused) and name not in dropped
        }
    )


def read_ordering(what: str, files: AssistantFiles, vocab_size: int) -> mx.array:
    """The ids by centroid, ``[V]`` int32.

    Raises:
        ArtifactError: there are none, or they are not each id once.
    """
    stored = files.tensors.get(ORDERING)
    if stored is None:
        raise ArtifactError(f"{what} has centroids but no {ORDERING}; give a complete release")
    if stored.shape != (vocab_size,) or not stored.dtype.startswith(("I", "U")):
        raise ArtifactError(
            f"{what}: {ORDERING} is {stored.dtype} of the shape {stored.shape}, but vocab_size is "
            f"{vocab_size}; give an intact release"
        )
    ids = read_stored({ORDERING: stored})[ORDERING].astype(mx.int64)
    if not mx.array_equal(mx.sort(ids), mx.arange(vocab_size, dtype=mx.int64)).item():
        raise ArtifactError(
            f"{what}: {ORDERING} does not hold each id below {vocab_size} once; give an intact "
            "release"
        )
    return ids.astype(mx.int32)
