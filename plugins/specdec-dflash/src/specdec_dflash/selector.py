"""DFlash 2's choice among a block's best tokens, from left to right.

All slots are scored at once, as if they did not depend on each other. The selector then walks the
slots: a candidate's score is its logit and how well it follows the token chosen before, by two
codebooks of low rank that the slot's hidden state weighs.

Shapes: B rows, d drafts, H hidden size, V vocabulary, R rank, k candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

if TYPE_CHECKING:
    from specdec.drafting import BlockChoices
    from specdec_dflash.config import Selector

__all__ = ["CandidateSelector"]


class CandidateSelector(Module):
    """The codebooks and the walk.

    Args:
        settings: rank and candidates.
        hidden_size: H.
        vocab_size: V.
    """

    def __init__(self, settings: Selector, hidden_size: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self._top_k = settings.top_k
        self.predecessor_codebook = Embedding(vocab_size, settings.rank)
        self.successor_codebook = Embedding(vocab_size, settings.rank)
        self.hidden_projection = Linear(hidden_size, settings.rank, bias=False)

    def walk(
        self, hidden: mx.array, logits: mx.array, pending: mx.array, choices: BlockChoices
    ) -> mx.array:
        """Choose a token for each slot.

        Args:
            hidden: ``[B, d, H]`` after the final norm.
            logits: ``[B, d, V]``.
            pending: ``[B]`` the token before the first slot.
            choices: chooses among each slot's candidates.

        Returns:
            ``[B, d]`` ids.
        """
        logits = logits.astype(mx.float32)
        most = min(self._top_k, logits.shape[-1])
        # Ascending ids: of equal scores the lower one, as over the whole vocabulary.
        candidates = mx.sort(mx.argpartition(logits, -most, axis=-1)[..., -most:], axis=-1)
        scores = mx.take_along_axis(logits, candidates, axis=-1)
        weights = self.hidden_projection(hidden).astype(mx.float32)
        follows = self.successor_codebook(candidates)
        last, chosen = pending, []
        for slot in range(logits.shape[1]):
            context = self.predecessor_codebook(last) * weights[:, slot]
            edges = (context[:, None] * follows[:, slot]).sum(-1)
            last = choices.next(scores[:, slot] + edges, candidates[:, slot])
            chosen.append(last)
        return mx.stack(chosen, axis=1)
