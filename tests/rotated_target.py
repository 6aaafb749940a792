"""A model whose residual stream is rotated, beside the one it was made of.

A random orthogonal matrix that is dense and not symmetric is folded into every weight that reads or
writes the residual stream, and each norm's weights into the projections behind it, as is done to
make a model quantize better. Both compute the same logits; what is tapped differs.

Drafters are driven over them without an executor, so that the logits of their drafts are seen.

Shapes: B rows, L tokens, m tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from mlx.nn.layers.linear import Linear
from oracles.driven import Watched
from tiny_models import build_model

from specdec.contract import ContextKind, ResidualBasis
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from specdec.contract import DraftProvider

    Doubles = NDArray[np.float64]

__all__ = [
    "TEXTS",
    "Drafts",
    "OfferingTarget",
    "Pair",
    "drafts_of",
    "pair_of",
    "rotate",
    "rotation_of",
    "taps_of",
]

TEXTS = ((7, 1, 52, 20), (3, 44, 5, 61, 9, 30, 30, 12), (18,))
"""Ids of a vocabulary of 64."""

_DEPTH = 4
_PENDING = ((5, 2, 6), (1, 4, 3))
_ACCEPTED = ((2, 0, 4), (0, 0, 0))


class OfferingTarget(MlxLmTarget):
    """A model with the two ports that mlx-lm's models do not have.

    Args:
        model: an mlx-lm model.
        basis: that it reports.
        offered: operations for a drafter's projections.
    """

    def __init__(
        self,
        model: Any,
        basis: ResidualBasis | None = None,
        offered: Mapping[str, Callable[..., mx.array]] | None = None,
    ) -> None:
        super().__init__(model)
        self.basis = basis
        self.offered = offered

    @property
    def residual_basis(self) -> ResidualBasis | None:
        """As it was given."""
        return self.basis

    @property
    def draft_projections(self) -> Mapping[str, Callable[..., mx.array]] | None:
        """As they were given."""
        return self.offered


@frozen
class Pair:
    """A target, and the same one with a rotated residual stream.

    Attributes:
        original: reports no basis.
        rotated: reports its basis.
    """

    original: MlxLmTarget
    rotated: OfferingTarget
    basis: ResidualBasis = field(repr=False)


def rotation_of(size: int, seed: int = 0) -> Doubles:
    """A random orthogonal ``[size, size]`` matrix, neither sparse nor symmetric."""
    drawn = np.random.default_rng(seed).normal(size=(size, size))
    turned, _ = np.linalg.qr(drawn)
    return np.asarray(turned, np.float64)


def pair_of(architecture: str, seed: int = 0, **changes: Any) -> Pair:
    """A tiny model of ``qwen3`` or ``llama`` in float32, and its rotated twin."""
    models = [build_model(architecture, seed, **changes) for _ in range(2)]
    for model in models:  # a scale that cannot be overlooked
        norm = model.model.norm
        norm.weight = mx.linspace(0.4, 1.9, norm.weight.shape[0])
    basis = rotate(models[1], seed)
    return Pair(MlxLmTarget(models[0]), OfferingTarget(models[1], basis), basis)


def rotate(model: Any, seed: int = 0) -> ResidualBasis:
    """Rotate the residual stream of a Llama or a Qwen3 of mlx-lm, whose head becomes its own.

    Args:
        model: changed in place; not packed, without biases on what writes the residual stream.
        seed: of the rotation.
    """
    body = model.model
    dtype = body.norm.weight.dtype
    turn = rotation_of(body.norm.weight.shape[0], seed)
    embedding = doubles(body.embed_tokens.weight)
    head = embedding if model.args.tie_word_embeddings else doubles(model.lm_head.weight)
    scale = doubles(body.norm.weight)

    def reads(norm: Any, *projections: Any) -> None:
        for each in projections:
            folded = doubles(each.weight) * doubles(norm.weight)
            each.weight = mx.array(folded @ turn).astype(dtype)
        norm.weight = mx.ones_like(norm.weight)

    def writes(projection: Any) -> None:
        projection.weight = mx.array(turn.T @ doubles(projection.weight)).astype(dtype)

    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        reads(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        reads(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        writes(attention.o_proj)
        writes(mlp.down_proj)
    body.embed_tokens.weight = mx.array(embedding @ turn).astype(dtype)
    model.lm_head = Linear(1, 1, bias=False)
    model.lm_head.weight = mx.array(head * scale @ turn).astype(dtype)
    model.args.tie_word_embeddings = False
    body.norm.weight = mx.ones_like(body.norm.weight)
    mx.eval(model.parameters())
    return ResidualBasis(
        rotation=mx.array(turn.astype(np.float32)), scale=mx.array(scale.astype(np.float32))
    )


def doubles(array: mx.array) -> Doubles:
    """Weights as numpy's float64."""
    return np.array(array.astype(mx.float32), np.float64)


# Drafts.


@frozen(eq=False)
class Drafts:
    """Two rounds of drafts of rows that have read different texts.

    Attributes:
        tokens: per round and row.
        logprobs: per slot, ``[B, V]`` that the tokens were the largest of.
    """

    tokens: list[list[int]]
    logprobs: list[Doubles] = field(repr=False)

    def difference(self, other: Drafts) -> float:
        """The largest of two log-probabilities; infinite where others were scored."""
        mine, others = np.stack(self.logprobs), np.stack(other.logprobs)
        scored = np.isfinite(mine)
        if (scored != np.isfinite(others)).any():
            return float("inf")
        return float(np.abs(mine[scored] - others[scored]).max())


def taps_of(target: MlxLmTarget, text: Sequence[int], taps: Sequence[int]) -> mx.array:
    """Tapped hidden states ``[1, L, m·H]`` of a text."""
    state = target.new_state()
    state.begin_round(len(text), reading=True)
    found = target.forward(mx.array([list(text)]), state, ContextKind.TAPS, taps).context
    assert found is not None
    return found


def drafts_of(
    target: MlxLmTarget, provider: DraftProvider, texts: Sequence[Sequence[int]] = TEXTS
) -> Drafts:
    """What a drafter drafts after these texts, and again after a round."""
    grouped: Any = provider.grouped
    taps = grouped.target_tap_layers(target)
    read = []
    for text in texts:
        group = grouped.open_prefill(target=target, checkpoints=[None])
        group.prefill(mx.array([list(text)]), taps_of(target, text, taps))
        read.append(group.capture(0))
        group.close()
    watched = Watched()
    rows = grouped.open(target=target, sampling=watched, checkpoints=read)
    known, tokens = [list(text) for text in texts], []
    count = len(texts)
    for pending, accepted in zip(_PENDING, _ACCEPTED, strict=True):
        drafts = rows.draft(pending[:count], [_DEPTH] * count, [0] * count)
        drafted = [list(each) for each in getattr(drafts, "tokens", drafts)]
        tokens += drafted
        windows = [[first, *draft] for first, draft in zip(pending, drafted, strict=False)]
        contexts = [
            taps_of(target, text + window, taps)[:, len(text) :]
            for text, window in zip(known, windows, strict=True)
        ]
        rows.commit(accepted[:count], mx.concatenate(contexts))
        for text, window, kept in zip(known, windows, accepted, strict=False):
            text.extend(window[: 1 + kept])
    rows.close()
    return Drafts(tokens, [np.array(each, np.float64) for each in watched.seen])
