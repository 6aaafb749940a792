"""Loading a target by path, by the name of a bundled model, or from the hub, through mlx-lm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specdec.errors import ModelNotFoundError
from specdec.plugins.models import find_model, model_names

__all__ = ["load_model", "locate_model"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
            if _HUB_ID.fullmatch(name) and not name.startswith("."):
                return name
            known = ", ".join(model_names()) or "none; pip install specdec-demo brings some"
            raise ModelNotFoundError(
                f"model {name} is neither a folder nor a bundled model (installed: {known})"
            )
        path = bundled
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"model {path} has no config.json; give a folder as mlx-lm loads")
    return str(path)


def load_model(name: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does.

    Args:
        name: as in :func:`locate_model`.

    Returns:
        The model and the tokenizer.

    Raises:
        ModelNotFoundError: it is not there, or mlx-lm cannot load it; one line.
    """
    where = locate_model(name)
    import mlx_lm

    try:
        loaded = mlx_lm.load(where)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ModelNotFoundError(
            f"model {name} cannot be loaded ({type(error).__name__}: {lines[0]})"
        ) from error
    return loaded[0], loaded[1]
