"""Small trained models for specdec: a target, a hybrid target with a native head, two drafters.

``MODEL_CARD.md`` beside this file says how they were trained and measured; the scripts that did it
are under ``training/`` in the source tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["MODELS", "PROMPTS", "path", "prompts"]

_HERE: Final = Path(__file__).parent

MODELS: Final = ("demo-qwen3", "demo-qwen3-draft", "demo-qwen3-dflash", "demo-qwen3_5")
"""Names of the models that this package ships; ``demo`` is short for the first one."""

PROMPTS: Final = {"demo": "prompts-dev.jsonl", "demo-copy": "prompts-copy.jsonl"}
"""Prompt files of this package, by name."""


def path(name: str = "demo") -> Path:
    """The folder of a model.

    Args:
        name: one of :data:`MODELS`, or ``"demo"``.

    Raises:
        ValueError: there is no such model; lists those there are.
    """
    chosen = MODELS[0] if name == "demo" else name
    if chosen not in MODELS:
        raise ValueError(f"there is no demo model {name!r}; there are {', '.join(MODELS)}")
    return _HERE / "models" / chosen


def prompts(name: str = "demo") -> Path:
    """A JSON Lines file of prompts, each an object with ``text``.

    Args:
        name: ``"demo"`` for 100 prompts of held-out files (code, prose, chat), ``"demo-copy"`` for
            prompts that ask for text to be repeated: edit this file, quote this passage.

    Raises:
        ValueError: there is no such file; lists those there are.
    """
    if name not in PROMPTS:
        raise ValueError(f"there are no demo prompts {name!r}; there are {', '.join(PROMPTS)}")
    return _HERE / PROMPTS[name]
