"""What an assistant scores: every token, or those of the groups whose centroids fit best.

Shapes: B rows, h hidden size, V tokens, C centroids, N scored tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from specdec.drafting.padding import PaddedRows, counts_of

if TYPE_CHECKING:
    from specdec_assistant.config import AssistantConfig

__all__ = ["CentroidHead", "Scored", "every_score"]

Scored = tuple[mx.array, mx.array | None]
"""Logits ``[B, N]`` and their ids ``[B, N]``; no ids where all tokens were scored."""


def every_score(table: Any, hidden: mx.array, vocab_size: int) -> Scored:
    """Logits over the target's ids.

    Args:
        table: an embedding ``[V, h]``, packed or not.
        hidden: ``[B, h]`` after the final norm.
        vocab_size: of the target. Ids that the drafter has besides are left out; those that it
            lacks are impossible.
    """
    logits = PaddedRows(table.as_linear, counts_of(table))(hidden)
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size], None
    nothing = mx.array(-mx.inf, logits.dtype)
    return mx.pad(logits, [(0, 0), (0, missing)], constant_values=nothing), None


class CentroidHead(Module):
    """Scores of the tokens that belong to the best centroids alone (Gemma 4 E2B and E4B).

    Args:
        config: of the drafter.
        ordering: ``[V]`` ids, those of each centroid side by side.
    """

    def __init__(self, config: AssistantConfig, ordering: mx.array) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.centroids = Linear(config.hidden_size, config.centroids.count, bias=False)
        self.top_k = config.centroids.top_k
        # No parameter: it is never converted nor quantized.
        self._groups = ordering.astype(mx.int32).reshape(config.centroids.count, -1)

    def __call__(self, table: Any, hidden: mx.array, vocab_size: int) -> Scored:
        """Logits of some ids, ascending in each row, so that a tie falls to the lowest.

        Args:
            table: as in :func:`every_score`.
            hidden: ``[B, h]`` after the final norm.
            vocab_size: of the target.
        """
        best = mx.argpartition(-self.centroids(hidden), kth=self.top_k - 1, axis=-1)
        groups = self._groups[best[:, : self.top_k]]
        ids = mx.sort(groups.reshape(hidden.shape[0], -1), axis=-1)
        logits = (table(ids) @ hidden[:, :, None])[..., 0]
        own = self._groups.size
        if own <= vocab_size:
            return logits, ids
        # Some ids may be none of the target's, and where none is, any may be drafted: no draw is
        # from a distribution without mass.
        every = mx.full((hidden.shape[0], own), -mx.inf, logits.dtype)
        known = mx.put_along_axis(every, ids, logits, axis=-1)[:, :vocab_size]
        some = mx.max(known, axis=-1, keepdims=True) > -mx.inf
        return mx.where(some, known, mx.zeros_like(known)), None
