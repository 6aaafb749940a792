"""What the core knows of plugins that may not be installed: their kinds, and how folders name them.

It is used in messages alone; no choice between kinds depends on it.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from specdec.errors import UnknownKindError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.plugins.kinds import Artifact

__all__ = ["KNOWN_PLUGINS", "kind_named_in", "missing_for"]

KNOWN_PLUGINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "assistant": "specdec-assistant",
        "deepspec": "specdec-dflash",
        "dflash": "specdec-dflash",
        "dflash2": "specdec-dflash",
        "dspark": "specdec-dflash",
        "mtp": "specdec-mtp",
        "nextn": "specdec-mtp",
        "ngram": "specdec-ngram",
        "two-model": "specdec-two-model",
    }
)
"""The package of each kind."""

_NAMED: Final = ("assistant", "dflash", "dspark", "mtp")  # as releases write them
_WHOLE_MODEL: Final = re.compile(r"For(CausalLM|ConditionalGeneration)\b")


def missing_for(what: str, kind: str, error: UnknownKindError) -> UnknownKindError:
    """The error where an option needs a kind that cannot be used.

    Args:
        what: the option.
        kind: the kind.
        error: why it cannot be used.
    """
    install = f"pip install {KNOWN_PLUGINS[kind]}"
    why = install if str(error).endswith(install) else str(error)
    return UnknownKindError(f"{what} needs {KNOWN_PLUGINS[kind]} ({why})")


def kind_named_in(artifact: Artifact) -> str | None:
    """A kind that a folder is likely of, by the names in its config and of its files.

    Returns:
        The kind whose name is in there, else that of whole models if it looks like one; ``None``
        where nothing tells.
    """
    config = artifact.config or {}
    listed = config.get("architectures")
    words = [config.get("model_type"), config.get("speculators_model_type")]
    words += [key for key in config if key.endswith("_config")]
    words += listed if isinstance(listed, list) else []
    text = " ".join(word for word in words if isinstance(word, str))
    for kind in _NAMED:
        files = (f"{kind}.json", f"{kind}.safetensors", f"model-{kind}.safetensors")
        if kind in text.lower() or any(map(artifact.has, files)):
            return kind
    return "two-model" if _WHOLE_MODEL.search(text) else None
