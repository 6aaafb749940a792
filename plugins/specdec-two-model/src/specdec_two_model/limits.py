"""How long a text a draft model can read.

A table of learned positions ends where it ends: what is looked up behind it is other memory. Other
models can be run behind the length that their config names, and only draft badly there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from specdec.drafting import BEYOND
from specdec.errors import ArtifactError, OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["context_limit"]

_NAMES: Final = ("max_position_embeddings", "n_positions", "n_ctx")
_TABLE: Final = "wpe"  # what mlx-lm's gpt2 and gpt_bigcode call it


def context_limit(
    what: str, model: Any, config: Mapping[str, Any], max_context: object
) -> int | None:
    """Positions that a row of a draft model may have, or ``None`` for any number.

    Args:
        what: names the model in messages.
        model: mlx-lm's.
        config: ``config.json``, or the arguments that the model was made with.
        max_context: what the user asked for, or ``None``.

    Raises:
        OptionError: ``max_context`` is no positive whole number.
        ArtifactError: the model's table of positions is too short to draft with.
    """
    limit = _named(config)
    if max_context is not None:
        if type(max_context) is not int or max_context < 1:
            raise OptionError(
                f"max_context is {one_line(repr(max_context))}; give a positive whole number of "
                "tokens"
            )
        limit = max_context
    table = _table(model)
    if table is None:
        return limit
    # Rows go along with their neighbours' drafts before that is taken back.
    longest = table - BEYOND
    if longest < 1:
        raise ArtifactError(
            f"{what} has a table of {table} positions, and needs more than {BEYOND} to draft"
        )
    return longest if limit is None else min(limit, longest)


def _named(config: Mapping[str, Any]) -> int | None:
    """The length that a config names, perhaps in the part about text."""
    inner = config.get("text_config")
    levels = [config, inner] if isinstance(inner, dict) else [config]
    named = [level.get(name) for level in levels for name in _NAMES]
    return min((value for value in named if type(value) is int and value > 0), default=None)


def _table(model: Any) -> int | None:
    """Positions that the model has learned, if it looks them up."""
    sizes = [
        part.weight.shape[0]
        for path, part in model.named_modules()
        if path.rpartition(".")[2] == _TABLE and isinstance(part, Embedding | QuantizedEmbedding)
    ]
    return min(sizes, default=None)
