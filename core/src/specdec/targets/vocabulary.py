"""A model's head over part of its vocabulary.

A drafter that scores a few thousand frequent ids alone reads that much less of the head in each
step. The rows of the head's weights are taken as they are packed; for the length of one call a
module with these rows stands in the head's place, so what the model's code does after its head
(scales, soft caps) is done here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from specdec.targets.adapters import adapter_layers
from specdec.targets.intercept import standing_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.targets.intercept import Backbone

__all__ = ["DraftVocabularyHead", "head_module"]

_PER_ROW = ("weight", "scales", "biases", "bias")


def head_module(backbone: Backbone) -> tuple[Any, str, Any] | None:
    """The module that turns hidden states into logits: its holder, its name there, itself.

    ``None`` where it has another name than in mlx-lm's models, or carries an adapter: whoever
    takes it reads its weights alone.
    """
    holder, name = backbone.parent, "lm_head"
    if holder.get(name) is None:
        holder, name = backbone.module, "embed_tokens"
    head = holder.get(name)
    known = isinstance(head, Linear | Embedding | QuantizedLinear | QuantizedEmbedding)
    return (holder, name, head) if known and not adapter_layers(head) else None


class _Rows:
    """Some rows of a head, called as a linear layer or as a tied embedding is."""

    def __init__(self, head: Any, index: mx.array) -> None:
        parts = {name: head[name][index] for name in _PER_ROW if name in head}
        mx.eval(list(parts.values()))
        self._parts = parts
        self._packing = (
            {"group_size": head.group_size, "bits": head.bits, "mode": head.mode}
            if "scales" in head
            else None
        )

    def __call__(self, hidden: mx.array) -> mx.array:
        parts = self._parts
        logits: mx.array
        if self._packing is None:
            logits = hidden @ parts["weight"].T
        else:
            logits = mx.quantized_matmul(
                hidden,
                parts["weight"],
                scales=parts["scales"],
                biases=parts.get("biases"),
                transpose=True,
                **self._packing,
            )
        return logits + parts["bias"] if "bias" in parts else logits

    as_linear = __call__


class DraftVocabularyHead:
    """A head over ascending ids; implements the contract's ``VocabularySubset``.

    Args:
        backbone: of the model.
        ids: N ascending ids.
    """

    def __init__(self, backbone: Backbone, ids: Sequence[int]) -> None:
        found = head_module(backbone)
        assert found is not None
        holder, name, head = found
        self._backbone = backbone
        self._ids = tuple(ids)
        self._stand_in = holder, name, _Rows(head, mx.array(self._ids, mx.int32))

    @property
    def ids(self) -> tuple[int, ...]:
        """Ascending full-vocabulary ids, N of them."""
        return self._ids

    def project(self, hidden: mx.array) -> mx.array:
        """Logits ``[B, L, N]`` of the listed ids for hidden states ``[B, L, H]``."""
        with standing_in([self._stand_in]):
            logits: mx.array = self._backbone.head(hidden, mx.zeros(hidden.shape[:2], mx.uint32))
        return logits

    @classmethod
    def of(cls, backbone: Backbone, ids: Sequence[int]) -> DraftVocabularyHead | None:
        """The head over these ids; ``None`` where the model's code has no head that can be cut."""
        if head_module(backbone) is None:
            return None
        subset = cls(backbone, ids)
        embedded = backbone.embed(mx.zeros((1, 2), mx.uint32))
        try:  # built, not evaluated
            shape = subset.project(embedded).shape
        except (ValueError, RuntimeError, IndexError, AttributeError):
            return None
        return subset if shape == (1, 2, len(subset.ids)) else None
