"""Changes to a release's files, for tests of what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["edited", "proposal", "retensored"]


def edited(folder: Path, **changes: Any) -> Path:
    """Change top keys of a config; ``None`` takes one away."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def retensored(folder: Path, **changes: mx.array | None) -> Path:
    """Change tensors, ``__`` for a dot; ``None`` takes one away."""
    file = str(folder / "model.safetensors")
    tensors: Any = mx.load(file)
    tensors.update({name.replace("__", "."): array for name, array in changes.items()})
    mx.eval(tensors)
    mx.save_safetensors(file, {name: each for name, each in tensors.items() if each is not None})
    return folder


def proposal(tokens: int) -> dict[str, Any]:
    """``speculators_config`` with so many drafts a round."""
    return {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
