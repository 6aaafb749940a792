"""Loading a target by path, by the name of a bundled model, or from the hub, through mlx-lm."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from specdec.errors import ArtifactError, ModelNotFoundError, one_line
from specdec.plugins.models import find_model, model_names

__all__ = ["download", "is_hub_id", "load_model", "locate_adapter", "locate_model"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAID_BY_THE_HUB = 120  # characters: its messages are paragraphs
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the hub's, ``org/name``, and is no path."""
    return _HUB_ID.fullmatch(name) is not None and not name.startswith(".")


def download(name: str) -> Path:
    """A drafter from the hub, as far as drafters have files: configs, tokenizers and weights.

    Args:
        name: a hub id.

    Returns:
        The folder it was put in, by whoever asked first.

    Raises:
        ArtifactError: it cannot be had; one line.
    """
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise ArtifactError(
            f"drafter {name} is no folder and cannot be had from the hub "
            f"({one_line(error, _SAID_BY_THE_HUB)}); check the name and the connection"
        ) from error


def locate_model(name: str) -> str:
    """Where a model is, without reading it.

    Args:
        name: a folder, the name of a bundled model, or a hub id such as ``org/model``.

    Returns:
        A folder's path, or the hub id.

    Raises:
        ModelNotFoundError: the folder is missing or has no ``config.json``, or no installed
            package has a model of this name.
    """
    path = Path(name)
    if not path.exists():
        bundled = find_model(name)
        if bundled is None:
            if is_hub_id(name):
                return name
            known = ", ".join(model_names()) or "none; pip install specdec-demo brings some"
            raise ModelNotFoundError(
                f"model {name} is neither a folder nor a bundled model (installed: {known})"
            )
        path = bundled
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"model {path} has no config.json; give a folder as mlx-lm loads")
    return str(path)


def locate_adapter(path: str | os.PathLike[str]) -> str:
    """Where an adapter is, without reading it.

    Args:
        path: a folder as ``mlx_lm.lora`` writes it.

    Returns:
        Its path.

    Raises:
        ArtifactError: there is no such folder, or it is no adapter of mlx-lm's.
    """
    name = os.fspath(path)
    want = "give a folder with " + " and ".join(_ADAPTER_FILES) + ", as mlx_lm.lora writes it"
    if not name or not Path(name).is_dir():
        raise ArtifactError(f"adapter_path is {name!r}, which is no folder; {want}")
    for file in _ADAPTER_FILES:
        if not (Path(name) / file).is_file():
            raise ArtifactError(f"adapter {name} has no {file}; {want}")
    return name


def load_model(name: str, *, adapter_path: str | os.PathLike[str] | None = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does.

    Args:
        name: as in :func:`locate_model`.
        adapter_path: a folder with a LoRA or DoRA adapter that ``mlx_lm.lora`` trained for this
            model; it is put on the model. Only drafters that support adapters draft for it then.

    Returns:
        The model and the tokenizer.

    Raises:
        ModelNotFoundError: it is not there, or mlx-lm cannot load it, or not with this adapter;
            one line.
        ArtifactError: there is no adapter of mlx-lm's at ``adapter_path``.
    """
    where = locate_model(name)
    adapter = None if adapter_path is None else locate_adapter(adapter_path)
    import mlx_lm

    try:
        loaded = mlx_lm.load(where, adapter_path=adapter)
    except Exception as error:
        what = name if adapter is None else f"{name} with adapter {adapter}"
        said = one_line(error, _SAID_BY_THE_HUB) if is_hub_id(where) else one_line(error)
        raise ModelNotFoundError(f"model {what} cannot be loaded ({said})") from error
    return loaded[0], loaded[1]
