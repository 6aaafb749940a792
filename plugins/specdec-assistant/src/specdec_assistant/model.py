"""An assistant's network: one token and one hidden state in, scores and the next hidden state out.

Shapes: B rows, H features of the target's hidden state, h its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from specdec_assistant.heads import CentroidHead, every_score
from specdec_assistant.layers import AssistantLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec_assistant.config import AssistantConfig, LayerKind
    from specdec_assistant.heads import Scored
    from specdec_assistant.lent import Lent

__all__ = ["AssistantModel"]


class AssistantModel(Module):
    """The network; its parameters have the names of a release's tensors, without ``model.``.

    Args:
        config: of the drafter.
        ordering: ids by centroid, for the sparse head; ``None`` for the whole one.
    """

    def __init__(self, config: AssistantConfig, ordering: mx.array | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        own, backbone = config.hidden_size, config.backbone_size
        self.pre_projection = Linear(2 * backbone, own, bias=False)
        self.layers = [AssistantLayer(config, kind) for kind in config.layers]
        self.norm = RMSNorm(own, eps=config.eps)
        self.post_projection = Linear(own, backbone, bias=False)
        # A table in any case: the sparse head looks rows up in it.
        table = Embedding(config.vocab_size, own)
        if config.tied:
            self.embed_tokens = table
        else:
            self.lm_head = table
        if ordering is not None:
            self.masked_embedding = CentroidHead(config, ordering)

    def __call__(
        self,
        embedded: mx.array,
        hidden: mx.array,
        lent: Mapping[LayerKind, Lent],
        positions: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """One step.

        Args:
            embedded: ``[B, 1, H]`` the last token, as the target embeds it.
            hidden: ``[B, 1, H]`` the state that goes with it.
            lent: by kind of layer.
            positions: ``[B]`` of the queries.

        Returns:
            ``[B, h]`` after the final norm, for :meth:`score`, and ``[B, 1, H]`` for the next step.
        """
        x = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in self.layers:
            x = layer(x, lent[layer.kind], positions)
        x = self.norm(x)
        return x[:, 0], self.post_projection(x)

    def score(self, normed: mx.array, vocab_size: int) -> Scored:
        """Logits of all of the target's ids, or of those that are likely.

        Args:
            normed: ``[B, h]`` after the final norm.
            vocab_size: of the target.
        """
        table = self.embed_tokens if "embed_tokens" in self else self.lm_head
        if "masked_embedding" in self:
            scored: Scored = self.masked_embedding(table, normed, vocab_size)
            return scored
        return every_score(table, normed, vocab_size)
