"""Loading assistants in tests: one line for what is refused, and folders with something changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from assistant_lender import Lender
from assistant_synthetic import CASES

from specdec.plugins import LoadRequest
from specdec_assistant.loading import load_assistant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from specdec.contract import TargetView
    from specdec.errors import SpecdecError
    from specdec.plugins import LoadedDraft

__all__ = ["load", "named", "refused", "rewritten"]


def load(folder: Path | None, target: Any = None, **options: Any) -> LoadedDraft:
    view: TargetView = target or Lender()  # type: ignore[assignment]  # it has what is read of it
    return load_assistant(LoadRequest(kind="assistant", target=view, path=folder, options=options))


def refused(
    error: type[SpecdecError], folder: Path | None, target: Any = None, **options: Any
) -> str:
    with pytest.raises(error) as caught:
        load(folder, target, **options)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


def rewritten(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    """The folder with changed tensors."""
    file = folder / "model.safetensors"
    held: Any = mx.load(str(file))
    change(held)
    mx.eval(held)
    mx.save_safetensors(str(file), held, metadata={"format": "pt"})
    return folder


def named(folder: Path, kind: str) -> Path:
    """An assistant of this ``model_type``."""
    config = CASES["whole"].config | {"model_type": kind}
    CASES["whole"].write(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
