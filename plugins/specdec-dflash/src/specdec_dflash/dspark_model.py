"""The network of a ``dspark.json`` drafter, and its round over one target.

It is narrower than its target and stands beside it: what it attends to is the combined taps, a
block begins as the pending token's embedding and learned masks, and only the last projection leads
back to the target's hidden size, whose head then scores every slot. Attention has no rotary
positions; a block's columns are told apart by learned ones, and those of the context not at all.

Facts that the format's files do not tell were read off its only public implementation
(https://github.com/joshuarossi/mlx-bun): GELU (tanh) in the MLP, the target's embedding without
the scale of the target's own input, all of it in float32, and blocks always of their whole width.
Its recurrent head is Elman's: ``s' = tanh(s @ wH + w1[prev] + bH)``, s starts at zero in each
block, and the bias is ``s' @ wO``. A file whose ``wH`` is not ``[r, r]`` is refused.

Shapes: B rows, L positions, W columns of a block, m tapped layers, H hidden size, d width of the
drafter, r rank, V vocabulary.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from specdec.drafting import BlockDraft, ContextLayer, head_of
from specdec_dflash.basis import turned_linear
from specdec_dflash.confidence import ConfidenceHead, confident_lengths
from specdec_dflash.config import Markov
from specdec_dflash.markov import MarkovHead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.contract import HiddenTaps
    from specdec.drafting import BlockChoices, BlockContext, KeysAndValues
    from specdec_dflash.basis import TargetBasis
    from specdec_dflash.dspark_config import DsparkConfig

__all__ = ["DsparkDrafting", "DsparkModel", "module_weights", "turned"]


class DsparkLayer(Module):
    """A layer of two norms: attention over context and block, and a gated MLP.

    Args:
        config: of the drafter.
        number: of the layer.
    """

    def __init__(self, config: DsparkConfig, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        d = config.width
        self._number = number
        self._heads = config.heads
        self._scale = (d // config.heads) ** -0.5
        self.attn_norm = RMSNorm(d, eps=config.eps)
        self.q = Linear(d, d, bias=False)
        self.k = Linear(d, d, bias=False)
        self.v = Linear(d, d, bias=False)
        self.o = Linear(d, d, bias=False)
        self.ff_norm = RMSNorm(d, eps=config.eps)
        self.gate = Linear(d, config.inner, bias=False)
        self.up = Linear(d, config.inner, bias=False)
        self.down = Linear(config.inner, d, bias=False)

    def keys_and_values(self, x: mx.array) -> KeysAndValues:
        """``[B, heads, L, d / heads]`` of combined taps or a block ``[B, L, d]``, normed alike."""
        normed = self.attn_norm(x)
        return self._split(self.k(normed)), self._split(self.v(normed))

    def __call__(self, x: mx.array, context: BlockContext) -> mx.array:
        """``[B, W, d]`` to the same."""
        queries = self._split(self.q(self.attn_norm(x)))
        keys, values = self.keys_and_values(x)
        attended = context.attend(self._number, queries, keys, values, scale=self._scale)
        x = x + self.o(attended.swapaxes(1, 2).reshape(x.shape))
        normed = self.ff_norm(x)
        after: mx.array = x + self.down(gelu_approx(self.gate(normed)) * self.up(normed))
        return after

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], self._heads, -1).swapaxes(1, 2)


class DsparkModel(Module):
    """The network and its heads; parameters have the names of the file's tensors.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: DsparkConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        d, hidden, vocab = config.width, config.hidden_size, config.vocab_size
        self.W_c = Linear(len(config.taps) * hidden, d, bias=False)
        self.ctx_norm = RMSNorm(d, eps=config.eps)
        self.tok_proj = Linear(hidden, d, bias=False)
        if config.gamma > 1:
            self.mask_emb = mx.zeros((config.gamma - 1, d))
        self.block_pos = mx.zeros((config.gamma, d))
        self.bb = [DsparkLayer(config, number) for number in range(config.layers)]
        self.out_norm = RMSNorm(d, eps=config.eps)
        self.out_proj = Linear(d, hidden, bias=False)
        if config.rank:
            kind = "elman" if config.recurrent else "vanilla"
            self.markov = MarkovHead(Markov(config.rank, kind), d, vocab, vocab)
        if config.confidence:
            self.conf = ConfidenceHead(d + config.rank)

    def project(self, taps: mx.array) -> list[KeysAndValues]:
        """Each layer's context of tapped hidden states ``[B, L, m·H]``."""
        context = self.ctx_norm(self.W_c(taps.astype(mx.float32)))
        return [layer.keys_and_values(context) for layer in self.bb]

    def __call__(self, embedded: mx.array, context: BlockContext) -> mx.array:
        """Run a block.

        Args:
            embedded: ``[B, H]`` of the pending tokens.
            context: what it attends to.

        Returns:
            ``[B, W, d]`` after the final norm; columns behind the block are of no meaning.
        """
        x = self._block(embedded.astype(mx.float32), context.width)
        for layer in self.bb:
            x = layer(x, context)
        hidden: mx.array = self.out_norm(x)
        return hidden

    def _block(self, embedded: mx.array, width: int) -> mx.array:
        rows, (gamma, d) = embedded.shape[0], self.block_pos.shape
        columns = [self.tok_proj(embedded)[:, None]]
        if gamma > 1:
            columns.append(mx.broadcast_to(self.mask_emb, (rows, gamma - 1, d)))
        block = mx.concatenate(columns, axis=1) + self.block_pos
        return mx.pad(block, [(0, 0), (0, width - gamma), (0, 0)])


def module_weights(stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """A file's tensors by the names of the modules' parameters.

    Args:
        stored: by the file's names; matrices are ``[in, out]``, those of modules ``[out, in]``.
    """
    inside = {
        "markov.w1": "markov.markov_w1.weight",
        "markov.w2": "markov.markov_w2.weight",
        "rnn.wH": "markov.state_proj.weight",
        "rnn.bH": "markov.state_proj.bias",
        "rnn.wO": "markov.markov_w2.weight",
        "conf.w": "conf.proj.weight",
        "conf.b": "conf.proj.bias",
    }
    as_they_are = ("mask_emb", "block_pos", "markov.w1")
    found = {}
    for name, array in stored.items():
        turned = array.ndim == 2 and name not in as_they_are
        own = name if name in ("mask_emb", "block_pos") else f"{name}.weight"
        found[inside.get(name, own)] = mx.contiguous(array.T) if turned else array
    return found


def turned(model: DsparkModel, basis: TargetBasis, taps: Sequence[int]) -> DsparkModel:
    """The network for the taps of a rotated target; it shares all but ``W_c`` with the given one.

    Args:
        model: in the basis of its training; stays as it is.
        basis: of the target.
        taps: of the target, in order.
    """
    made = copy(model)
    made.W_c = turned_linear(model.W_c, basis, taps)
    return made


class DsparkDrafting:
    """A drafter bound to one target; a ``BlockMethod``.

    Args:
        config: of the drafter.
        model: its network.
        port: the target's head.
        embed: the target's embedding as it is stored, ``[B, L, H]`` of ids ``[B, L]``.
        thresholds: per slot the confidence that a draft needs, or ``None`` for all drafts.
        basis: of a rotated target, which the network's taps are folded for.
    """

    def __init__(
        self,
        config: DsparkConfig,
        model: DsparkModel,
        port: HiddenTaps,
        embed: Callable[[mx.array], mx.array],
        *,
        thresholds: tuple[float, ...] | None = None,
        basis: TargetBasis | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._score = head_of(port.logits, port)
        self._embed = embed
        self._thresholds = thresholds
        self._basis = basis
        self._dtype = embed(mx.zeros((1, 1), mx.int32)).dtype  # never evaluated

    @property
    def layers(self) -> Sequence[ContextLayer]:
        """The drafter's layers."""
        return (ContextLayer(),) * self._config.layers

    @property
    def features(self) -> int:
        """Features of the taps, m·H."""
        return len(self._config.taps) * self._config.hidden_size

    @property
    def longest(self) -> int:
        """The most drafts of a block."""
        return self._config.longest

    @property
    def confidence_head(self) -> ConfidenceHead | None:
        """Tells how sure the drafter is, if it can."""
        return self._model.get("conf")

    def columns(self, depth: int, /) -> int:
        """Columns of a block: it is always whole, as its columns see each other."""
        del depth
        return self._config.gamma

    def project(self, hidden: mx.array, positions: int | mx.array, /) -> Sequence[KeysAndValues]:
        """Each layer's context of tapped hidden states ``[B, L, m·H]``, wherever they stand."""
        del positions
        return self._model.project(hidden)

    def draft_device(
        self, context: BlockContext, pending: mx.array, depth: int, choices: BlockChoices, /
    ) -> BlockDraft:
        """Fill a block in one pass and choose its tokens, from left to right where they depend."""
        hidden = self.hidden(context, pending)[:, :depth]
        base = self._logits(hidden)
        if "markov" not in self._model:
            return BlockDraft(choices.every(base))
        tokens, before = self._model.markov.walk(hidden, base, pending, choices)
        return BlockDraft(tokens, self._lengths(hidden, before))

    def hidden(
        self, context: BlockContext, pending: mx.array, first: int | None = None
    ) -> mx.array:
        """Hidden states of a block's columns, ``[B, W - first, d]``.

        Args:
            context: what the block attends to.
            pending: ``[B]`` ids.
            first: the first column that is wanted; by default the first that drafts.
        """
        first = int(not self._config.from_anchor) if first is None else first
        embedded = self._embed(pending[:, None])[:, 0]
        if self._basis is not None:
            embedded = self._basis.embedding(embedded)
        hidden: mx.array = self._model(embedded, context)
        return hidden[:, first:]

    def first_ids(self, hidden: mx.array, pending: mx.array) -> mx.array:
        """The ids ``[B]`` that a first slot with hidden states ``[B, 1, d]`` expects most."""
        logits = self._logits(hidden)[:, 0]
        if "markov" in self._model:
            markov = self._model.markov
            bias, _ = markov.step(markov.embed(pending), hidden[:, 0], None)
            logits = logits + bias
        return mx.argmax(logits, axis=-1)

    def _logits(self, hidden: mx.array) -> mx.array:
        """The target's head over ``[B, n, d]``, at the target's own precision: float32."""
        raised = self._model.out_proj(hidden)
        if self._basis is not None:
            raised = self._basis.head_input(raised)
        logits: mx.array = self._score(raised.astype(self._dtype))
        return logits.astype(mx.float32)

    def _lengths(self, hidden: mx.array, before: mx.array) -> mx.array | None:
        """How many drafts are proposed, ``[B]``: one at least."""
        if self._thresholds is None:
            return None
        first = 0 if self._config.from_anchor else 1
        own = self._thresholds[first + 1 : first + hidden.shape[1]]
        told = self._model.conf(mx.concatenate([hidden, before], axis=-1))
        return 1 + confident_lengths(told[:, 1:], own)
