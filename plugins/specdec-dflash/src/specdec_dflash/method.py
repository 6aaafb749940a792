"""A block drafter's round over one target: embed a block, run it, choose its tokens.

Shapes: B rows, W columns of a block, d drafts, H hidden size, V vocabulary, N scored ids.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.drafting import BlockDraft, ContextLayer, head_of
from specdec_dflash.confidence import confident_lengths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import HiddenTaps
    from specdec.drafting import BlockChoices, BlockContext, KeysAndValues
    from specdec_dflash.basis import TargetBasis
    from specdec_dflash.confidence import ConfidenceHead
    from specdec_dflash.config import BlockConfig
    from specdec_dflash.model import BlockModel

__all__ = ["BlockDrafting", "Drafting"]


@frozen(kw_only=True)
class Drafting:
    """How a block is used; none of it changes a token of the text.

    Attributes:
        whole_block: whether a block always has the columns it was trained with; else as many as
            the drafts that are asked for need.
        thresholds: per slot the confidence that a draft needs, or ``None`` for all drafts.
        head_is_whole: whether the target's head scales and caps its logits itself.
    """

    whole_block: bool = False
    thresholds: tuple[float, ...] | None = None
    head_is_whole: bool = True


class BlockDrafting:
    """A block drafter bound to one target; a ``BlockMethod``.

    Args:
        config: of the drafter.
        model: its network.
        port: the target's embedding and head.
        drafting: how blocks are used.
        ids: ``[N]`` what its own head scores, where that is not the whole vocabulary.
        basis: of a rotated target, which the network's taps are folded for.
    """

    def __init__(
        self,
        config: BlockConfig,
        model: BlockModel,
        port: HiddenTaps,
        drafting: Drafting,
        *,
        ids: mx.array | None = None,
        basis: TargetBasis | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._port = port
        own = "lm_head" in model
        self._score = head_of(partial(_own, model), model) if own else head_of(port.logits, port)
        self._drafting = drafting
        self._ids = ids
        self._basis = basis
        self._layers = tuple(ContextLayer(window) for window in config.windows)

    @property
    def layers(self) -> Sequence[ContextLayer]:
        """The drafter's layers."""
        return self._layers

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
        return self._model.get("confidence_head")

    def columns(self, depth: int, /) -> int:
        """Columns of the block that drafts so many tokens."""
        if self._drafting.whole_block:
            return self._config.block_size
        return depth if self._config.from_anchor else depth + 1

    def project(self, hidden: mx.array, positions: int | mx.array, /) -> Sequence[KeysAndValues]:
        """Each layer's context of tapped hidden states ``[B, L, m·H]``."""
        return self._model.project(hidden, positions)

    def draft_device(
        self, context: BlockContext, pending: mx.array, depth: int, choices: BlockChoices, /
    ) -> BlockDraft:
        """Fill a block in one pass and choose its tokens, from left to right where they depend."""
        model = self._model
        hidden = self.hidden(context, pending)[:, :depth]
        logits, before = self._logits(hidden), None
        if "markov_head" in model:
            tokens, before = model.markov_head.walk(hidden, logits, pending, choices, self._ids)
        elif "candidate_selector" in model:
            tokens = model.candidate_selector.walk(hidden, logits, pending, choices)
        else:
            tokens = choices.every(logits, self._ids)
        return BlockDraft(tokens, self._lengths(hidden, before))

    def hidden(
        self, context: BlockContext, pending: mx.array, first: int | None = None
    ) -> mx.array:
        """Hidden states of a block's columns that draft, ``[B, W or W - 1, H]``.

        Args:
            context: what the block attends to.
            pending: ``[B]`` ids.
            first: the first column that is wanted; by default the first that drafts.
        """
        config = self._config
        masks = mx.full((pending.shape[0], context.width - 1), config.mask_token, pending.dtype)
        embedded = self._embed(mx.concatenate([pending[:, None], masks], axis=1))
        if first is None:
            first = 0 if config.from_anchor else 1
        return self._model(embedded, context, first)

    def first_ids(self, hidden: mx.array, pending: mx.array) -> mx.array:
        """The ids ``[B]`` that a first slot with hidden states ``[B, 1, H]`` expects most."""
        logits = self._logits(hidden)[:, 0]
        if "markov_head" in self._model:
            markov = self._model.markov_head
            bias, _ = markov.step(markov.embed(pending), hidden[:, 0], None)
            logits = logits + bias.astype(logits.dtype)
        best = mx.argmax(logits, axis=-1)
        return best if self._ids is None else self._ids[best]

    def confidence(self, hidden: mx.array, before: mx.array | None) -> mx.array | None:
        """How sure the drafter is of each slot, ``[B, d]``; ``None`` where it cannot tell.

        Args:
            hidden: ``[B, d, H]`` after the final norm.
            before: ``[B, d, r]`` the embedded tokens before each slot.
        """
        if "confidence_head" not in self._model:
            return None
        features = hidden
        if self._config.confidence_of_markov and before is not None:
            features = mx.concatenate([hidden, before.astype(hidden.dtype)], axis=-1)
        told: mx.array = self._model.confidence_head(features)
        return told

    def _lengths(self, hidden: mx.array, before: mx.array | None) -> mx.array | None:
        thresholds = self._drafting.thresholds
        if thresholds is None:
            return None
        confidence = self.confidence(hidden, before)
        return None if confidence is None else confident_lengths(confidence, thresholds)

    def _embed(self, ids: mx.array) -> mx.array:
        config, model = self._config, self._model
        if "embed_tokens" in model:
            embedded: mx.array = model.embed_tokens(ids)
            return _scaled(embedded, config.own_embedding_scale)
        given = self._port.embed(ids)
        if self._basis is not None:
            given = self._basis.embedding(given)
        return _scaled(given, config.embedding_scale)

    def _logits(self, hidden: mx.array) -> mx.array:
        model = self._model
        if "lm_head" in model:
            return self._capped(self._score(hidden))
        if self._basis is not None:
            hidden = self._basis.head_input(hidden)
        logits: mx.array = self._score(hidden)
        return logits if self._drafting.head_is_whole else self._capped(logits)

    def _capped(self, logits: mx.array) -> mx.array:
        cap = self._config.soft_cap
        logits = _scaled(logits, self._config.logit_scale)
        return logits if cap is None else mx.tanh(logits / cap) * cap


def _own(model: BlockModel, hidden: mx.array) -> mx.array:
    logits: mx.array = model.lm_head(hidden)
    return logits


def _scaled(x: mx.array, scale: float) -> mx.array:
    return x if scale == 1.0 else x * scale
