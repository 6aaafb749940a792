"""The sequential heads of DSpark: what a token says of the one after it.

All slots are scored at once; from left to right each slot's logits then get a bias that the token
before it gives through a low rank. A gated head weighs that token by the slot's hidden state, a
recurrent one (gated, or Elman's) keeps a state over the block.

Shapes: B rows, d drafts, H hidden size, V vocabulary, N scored ids, r rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

if TYPE_CHECKING:
    from specdec.drafting import BlockChoices
    from specdec_dflash.config import Markov

__all__ = ["MarkovHead"]


class MarkovHead(Module):
    """A sequential head.

    Args:
        settings: rank and kind.
        hidden_size: H.
        vocab_size: V, of the tokens that were chosen.
        scored: N, of the logits.
    """

    def __init__(self, settings: Markov, hidden_size: int, vocab_size: int, scored: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self._rank = settings.rank
        self.markov_w1 = Embedding(vocab_size, settings.rank)
        self.markov_w2 = Linear(settings.rank, scored, bias=False)
        if settings.kind == "gated":
            self.gate_proj = Linear(hidden_size + settings.rank, settings.rank)
        elif settings.kind == "rnn":
            self.joint_proj = Linear(hidden_size + 2 * settings.rank, 3 * settings.rank)
        elif settings.kind == "elman":
            self.state_proj = Linear(settings.rank, settings.rank)

    def embed(self, tokens: mx.array) -> mx.array:
        """``[..., r]`` of ids ``[...]``."""
        embedded: mx.array = self.markov_w1(tokens)
        return embedded

    def step(
        self, before: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The bias of one slot.

        Args:
            before: ``[B, r]`` the embedded token before it.
            hidden: ``[B, H]`` the slot's hidden state, after the final norm.
            state: ``[B, r]`` of the slot before; ``None`` at the first one.

        Returns:
            ``[B, N]``, and the state for the next slot.
        """
        latent = before
        if "gate_proj" in self:
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, before], axis=-1)))
            latent = gate.astype(before.dtype) * before
        elif "joint_proj" in self:
            state = mx.zeros_like(before) if state is None else state
            joined = mx.concatenate([state, before, hidden], axis=-1)
            gate, candidate, output = mx.split(self.joint_proj(joined), 3, axis=-1)
            gate = mx.sigmoid(gate)
            state = gate * state + (1.0 - gate) * mx.tanh(candidate)
            latent = mx.tanh(output)
        elif "state_proj" in self:
            state = mx.zeros_like(before) if state is None else state
            latent = state = mx.tanh(self.state_proj(state) + before)
        bias: mx.array = self.markov_w2(latent)
        return bias, state

    def walk(
        self,
        hidden: mx.array,
        base: mx.array,
        pending: mx.array,
        choices: BlockChoices,
        ids: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Choose a token for each slot, from left to right.

        Args:
            hidden: ``[B, d, H]`` after the final norm.
            base: ``[B, d, N]`` the slots' own logits.
            pending: ``[B]`` the token before the first slot.
            choices: chooses each slot's token.
            ids: ``[N]`` that were scored, or ``None`` for the whole vocabulary.

        Returns:
            ``[B, d]`` ids, and ``[B, d, r]`` the embedded token before each.
        """
        last, state = pending, None
        tokens, before = [], []
        for slot in range(hidden.shape[1]):
            embedded = self.embed(last)
            bias, state = self.step(embedded, hidden[:, slot], state)
            last = choices.next(base[:, slot] + bias.astype(base.dtype), ids)
            tokens.append(last)
            before.append(embedded)
        return mx.stack(tokens, axis=1), mx.stack(before, axis=1)
