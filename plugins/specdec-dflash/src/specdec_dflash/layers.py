"""Decoder layers of block drafters: a block attends to projected context and to itself.

Context and block go through the same projections of keys and values. The context's are made of the
combined taps as they are, once for each position; the block's of the layer's normed input.

Shapes: B rows, L positions, W columns of a block, H hidden size, D features of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu_approx, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope

from specdec.errors import ArtifactError, one_line
from specdec_dflash.config import Style
from specdec_dflash.convolution import DynamicConvolution

if TYPE_CHECKING:
    from specdec.drafting import BlockContext, KeysAndValues
    from specdec_dflash.config import BlockConfig, Rope

__all__ = ["GemmaLayer", "QwenLayer"]

Positions = int | mx.array


def make_rope(rope: Rope, dims: int) -> Any:
    """mlx-lm's rotary positions over so many features.

    Raises:
        ArtifactError: its numbers, each of which makes sense, make none together.
    """
    try:
        made: Any = initialize_rope(
            dims,
            rope.theta,
            rope.traditional,
            None if rope.scaling is None else dict(rope.scaling),  # mlx-lm changes what it is given
            rope.max_positions,
        )
    except (ArithmeticError, ValueError) as error:
        raise ArtifactError(
            f"rope_theta {rope.theta:g} with {one_line(dict(rope.scaling or {}))} makes no rotary "
            f"positions for {dims} features ({one_line(error)}); give an intact release"
        ) from error
    return made


class BlockAttention(Module):
    """Attention of a block over one layer's context and itself.

    Args:
        config: of the drafter.
        number: of the layer.
    """

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self._number = number
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_dim
        self._causal = config.causal[number]
        self._gemma = config.style is Style.GEMMA
        self._scale = 1.0 if self._gemma else config.head_dim**-0.5
        self._eps = config.eps
        hidden, bias = config.hidden_size, config.bias
        self.q_proj = Linear(hidden, config.heads * config.head_dim, bias=bias)
        self.k_proj = Linear(hidden, config.kv_heads * config.head_dim, bias=bias)
        if not config.shared_values:
            self.v_proj = Linear(hidden, config.kv_heads * config.head_dim, bias=bias)
        self.o_proj = Linear(config.heads * config.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, eps=config.eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.eps)
        self._rope = make_rope(config.rope, config.head_dim)

    def keys_and_values(self, x: mx.array, positions: Positions) -> KeysAndValues:
        """Keys and values ``[B, heads, L, D]`` of ``[B, L, H]`` that begins at these positions."""
        projected = self.k_proj(x)
        keys = self._split(projected, self._kv_heads)
        values = keys if "v_proj" not in self else self._split(self.v_proj(x), self._kv_heads)
        if self._gemma:
            values = mx.fast.rms_norm(values, None, self._eps)
        rotated: mx.array = self._rope(self.k_norm(keys).swapaxes(1, 2), offset=positions)
        return rotated, values.swapaxes(1, 2)

    def __call__(self, x: mx.array, context: BlockContext) -> mx.array:
        """Attend from the block's normed input ``[B, W, H]``."""
        queries = self.q_norm(self._split(self.q_proj(x), self._heads)).swapaxes(1, 2)
        queries = self._rope(queries, offset=context.positions)
        keys, values = self.keys_and_values(x, context.positions)
        attended = context.attend(
            self._number, queries, keys, values, scale=self._scale, causal=self._causal
        )
        rows, _, width, _ = attended.shape
        output: mx.array = self.o_proj(attended.swapaxes(1, 2).reshape(rows, width, -1))
        return output

    def _split(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self._size)


class GatedMlp(Module):
    """``down(act(gate(x)) * up(x))``.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self._gemma = config.style is Style.GEMMA
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=False)
        self.up_proj = Linear(hidden, inner, bias=False)
        self.down_proj = Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """``[B, W, H]`` to the same."""
        act = gelu_approx if self._gemma else silu
        output: mx.array = self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))
        return output


class QwenLayer(Module):
    """A layer of two norms; with DFlash 2's convolutions around both parts, where it has them.

    Args:
        config: of the drafter.
        number: of the layer.
    """

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.self_attn = BlockAttention(config, number)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        if config.convolutions is not None:
            self.attention_conv = DynamicConvolution(config.hidden_size, config.convolutions)
            self.mlp_conv = DynamicConvolution(config.hidden_size, config.convolutions)

    def __call__(self, x: mx.array, context: BlockContext) -> mx.array:
        """``[B, W, H]`` to the same."""
        normed = self.input_layernorm(x)
        if "attention_conv" not in self:
            x = x + self.self_attn(normed, context)
            after: mx.array = x + self.mlp(self.post_attention_layernorm(x))
            return after
        given, weights = self.attention_conv.before(normed)
        x = x + self.attention_conv.after(self.self_attn(given, context), weights)
        given, weights = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(given), weights)


class GemmaLayer(Module):
    """A layer of four norms and a scalar, as Gemma 4's.

    Args:
        config: of the drafter.
        number: of the layer.
    """

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.self_attn = BlockAttention(config, number)
        self.mlp = GatedMlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, eps=config.eps)
        self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, context: BlockContext) -> mx.array:
        """``[B, W, H]`` to the same."""
        attended = self.self_attn(self.input_layernorm(x), context)
        x = x + self.post_attention_layernorm(attended)
        made = self.mlp(self.pre_feedforward_layernorm(x))
        x = x + self.post_feedforward_layernorm(made)
        return x * self.layer_scalar
