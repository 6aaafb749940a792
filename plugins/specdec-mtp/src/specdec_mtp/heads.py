"""The two kinds of head as modules over one decoder layer.

Both join the embedding of a token with the hidden state of the position before it, normalised
each for itself, embedding first; a linear map and a decoder layer make of it the hidden state that
predicts the token after. Embedding and vocabulary head are the target's.

Shapes: B rows, L positions, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
from attrs import frozen
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

if TYPE_CHECKING:
    from specdec_mtp.layers import LayerFamily

__all__ = ["HeadModule", "MtpHead", "NextnHead", "Step"]


@frozen(eq=False)
class Step:
    """What a head made of a window.

    Attributes:
        scored: ``[B, L, H]`` after the head's final norm: what the vocabulary head is given.
        raw: ``[B, L, H]`` before it.
    """

    scored: mx.array
    raw: mx.array


class _OneLayer(Module):
    """What both kinds share: a decoder layer, and the norm behind it.

    Args:
        args: settings of the decoder layer.
        family: makes the layer.
        dense: whether it has no experts.
    """

    def __init__(self, args: Any, family: LayerFamily, *, dense: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.layers = [family.make(args, dense=dense)]
        self.norm = RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.family = family

    def _through(self, x: mx.array, caches: list[Any]) -> Step:
        raw = self.layers[0](x, self.family.mask(x, caches[0]), caches[0])
        return Step(self.norm(raw), raw)


class MtpHead(_OneLayer):
    """``mtp.*`` of the Qwen3.5 family: ``fc([norm(embedding), norm(hidden)])``, layer, norm."""

    def __init__(self, args: Any, family: LayerFamily, *, dense: bool) -> None:
        super().__init__(args, family, dense=dense)
        size, eps = args.hidden_size, args.rms_norm_eps
        self.fc = Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[Any]) -> Step:
        """Read a window.

        Args:
            embedded: ``[B, L, H]`` the target's embeddings of the tokens at p + 1.
            hidden: ``[B, L, H]`` hidden states of the positions p.
            caches: the layer's caches, one entry.
        """
        joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self._through(self.fc(mx.concatenate(joined, axis=-1)), caches)


class NextnHead(_OneLayer):
    """The layer behind the target's last, of GLM and DeepSeek: ``eh_proj``, layer, shared norm."""

    def __init__(self, args: Any, family: LayerFamily, *, dense: bool) -> None:
        super().__init__(args, family, dense=dense)
        size, eps = args.hidden_size, args.rms_norm_eps
        self.eh_proj = Linear(2 * size, size, bias=False)
        self.enorm = RMSNorm(size, eps=eps)
        self.hnorm = RMSNorm(size, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[Any]) -> Step:
        """Read a window; as :meth:`MtpHead.__call__`."""
        joined = [self.enorm(embedded), self.hnorm(hidden)]
        return self._through(self.eh_proj(mx.concatenate(joined, axis=-1)), caches)


HeadModule: TypeAlias = MtpHead | NextnHead
"""A head as its rows call it."""
