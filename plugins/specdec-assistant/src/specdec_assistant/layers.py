"""Decoder layers without keys and values of their own: queries over what the target has stored.

Shapes: B rows, h hidden size, D features of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import ProportionalRoPE

if TYPE_CHECKING:
    from specdec_assistant.config import AssistantConfig, LayerKind, Rope
    from specdec_assistant.lent import Lent

__all__ = ["AssistantLayer"]


class _Attention(Module):
    """Queries of one position over the target's keys and values."""

    def __init__(self, config: AssistantConfig, kind: LayerKind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        size, self.heads, self.head_dim = config.hidden_size, config.heads, config.head_dims[kind]
        self.scale = config.scale
        self.q_proj = Linear(size, self.heads * self.head_dim, bias=config.bias)
        self.o_proj = Linear(self.heads * self.head_dim, size, bias=config.bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.eps)
        self.rope = _rotary(config.ropes[kind], self.head_dim)

    def __call__(self, x: mx.array, lent: Lent, positions: mx.array) -> mx.array:
        rows = x.shape[0]
        queries = self.q_norm(self.q_proj(x).reshape(rows, 1, self.heads, self.head_dim))
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=positions)
        # The few queries take the type of the many keys, which are not to be copied.
        seen = mx.fast.scaled_dot_product_attention(
            queries.astype(lent.keys.dtype),
            lent.keys,
            lent.values,
            scale=self.scale,
            mask=lent.mask,
        )
        joined = seen.astype(x.dtype).transpose(0, 2, 1, 3).reshape(rows, 1, -1)
        output: mx.array = self.o_proj(joined)
        return output


class _Mlp(Module):
    """A GELU-gated MLP."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate = gelu_approx(self.gate_proj(x))
        output: mx.array = self.down_proj(gate * self.up_proj(x))
        return output


class AssistantLayer(Module):
    """A decoder layer of Gemma 4 with norms before and behind both of its parts.

    Args:
        config: of the drafter.
        kind: which of the target's keys and values it reads.
    """

    def __init__(self, config: AssistantConfig, kind: LayerKind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.kind = kind
        self.self_attn = _Attention(config, kind)
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, lent: Lent, positions: mx.array) -> mx.array:
        """The layer's output.

        Args:
            x: ``[B, 1, h]``.
            lent: of the layer's kind.
            positions: ``[B]`` of the queries.
        """
        attended = self.self_attn(self.input_layernorm(x), lent, positions)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        scaled: mx.array = x * self.layer_scalar
        return scaled


def _rotary(rope: Rope, head_dim: int) -> Any:
    """Rotary positions as mlx-lm's own layers turn their keys, so that roundings agree."""
    if rope.rotated < head_dim:
        return ProportionalRoPE(
            dims=head_dim, rotated_dims=rope.rotated, base=rope.theta, factor=rope.factor
        )
    return RoPE(head_dim, traditional=False, base=rope.theta, scale=1.0 / rope.factor)
