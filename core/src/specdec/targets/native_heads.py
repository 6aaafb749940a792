"""Which draft head a checkpoint's config says that it carries.

mlx-lm leaves such heads aside when it loads a model; a drafter's package reads them anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.plugins import Artifact

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["declared_head"]

_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
_OWN_TENSORS = "qwen3"  # model types that keep the head under names of its own, mtp.*


def declared_head(folder: Path) -> str | None:
    """The kind that makes the head of the checkpoint in ``folder``; ``None`` if it declares none.

    ``"mtp"``: tensors of its own. ``"nextn"``: a layer behind the target's last.
    """
    config = Artifact(folder).config
    if config is None:
        return None
    inner = config.get("text_config")
    parts: list[Mapping[str, Any]] = [config, inner] if isinstance(inner, dict) else [config]
    if not any(_is_count(part.get(name)) for part in parts for name in _COUNTS):
        return None
    return "mtp" if str(config.get("model_type")).startswith(_OWN_TENSORS) else "nextn"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
