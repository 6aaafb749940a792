"""Folders that hold the demo target, with its head where a test wants it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mtp_files import demo_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["edited", "linked", "without_head"]


def linked(folder: Path, *, but: tuple[str, ...] = ()) -> Path:
    """The demo's files as links, some left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in demo_folder().iterdir():
        if file.name not in but:
            (folder / file.name).symlink_to(file)
    return folder


def without_head(folder: Path) -> Path:
    """The demo as a conversion leaves it: the config still declares a head, its tensors are gone.

    Norms stay as they are, in the layout of Hugging Face.
    """
    linked(folder, but=("model.safetensors",))
    stored = mx.load(str(demo_folder() / "model.safetensors"))
    assert isinstance(stored, dict)
    kept = {name: weight for name, weight in stored.items() if not name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "pt"})
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a folder's config.json."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    change(config)
    file.unlink()
    file.write_text(json.dumps(config))
