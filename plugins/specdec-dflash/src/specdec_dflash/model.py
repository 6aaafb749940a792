"""A block drafter's network: combined taps in, hidden states of a block out.

Chen et al. 2026, *DFlash: Block Diffusion for Flash Speculative Decoding*, arXiv 2602.06036.

Shapes: B rows, L positions, W columns of a block, m tapped layers, H hidden size, V vocabulary, N
ids that its own head scores.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from specdec_dflash.basis import turned_linear
from specdec_dflash.confidence import ConfidenceHead
from specdec_dflash.config import Style
from specdec_dflash.layers import GemmaLayer, QwenLayer
from specdec_dflash.markov import MarkovHead
from specdec_dflash.selector import CandidateSelector

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.drafting import BlockContext, KeysAndValues
    from specdec_dflash.basis import TargetBasis
    from specdec_dflash.config import BlockConfig

__all__ = ["BlockModel", "folded"]


class BlockModel(Module):
    """The network and its heads.

    Args:
        config: of the drafter.
        own_embedding: whether it embeds its input itself; else the target does.
        own_head: whether it scores tokens itself; else the target's head does.
    """

    def __init__(self, config: BlockConfig, *, own_embedding: bool, own_head: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        size = config.hidden_size
        scored = config.draft_vocab or config.vocab_size
        layer = GemmaLayer if config.style is Style.GEMMA else QwenLayer
        self.fc = Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps=config.eps)
        self.layers = [layer(config, number) for number in range(config.layers)]
        self.norm = RMSNorm(size, eps=config.eps)
        if own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, size)
        if own_head:
            self.lm_head = Linear(size, scored, bias=False)
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(config.selector, size, config.vocab_size)
        if config.markov is not None:
            self.markov_head = MarkovHead(config.markov, size, config.vocab_size, scored)
        if config.confidence:
            more = config.markov.rank if config.markov and config.confidence_of_markov else 0
            self.confidence_head = ConfidenceHead(size + more)

    def project(self, taps: mx.array, positions: int | mx.array) -> list[KeysAndValues]:
        """Each layer's context of tapped hidden states.

        Args:
            taps: ``[B, L, m·H]``.
            positions: of the first of them: an int, or ``[B]``.
        """
        context = self.hidden_norm(self.fc(taps))
        return [layer.self_attn.keys_and_values(context, positions) for layer in self.layers]

    def __call__(self, embedded: mx.array, context: BlockContext, first: int) -> mx.array:
        """Run a block.

        Args:
            embedded: ``[B, W, H]``.
            context: what it attends to.
            first: the first column that drafts.

        Returns:
            ``[B, W - first, H]`` after the final norm.
        """
        x = embedded
        for layer in self.layers:
            x = layer(x, context)
        hidden: mx.array = self.norm(x[:, first:])
        return hidden


def folded(model: BlockModel, basis: TargetBasis, taps: Sequence[int]) -> BlockModel:
    """The network for the taps of a rotated target; it shares all but ``fc`` with the given one.

    Args:
        model: in the basis of its training; stays as it is.
        basis: of the target.
        taps: of the target, in order.
    """
    turned = copy(model)
    turned.fc = turned_linear(model.fc, basis, taps)
    return turned
