"""What a block drafter over a transformer is, whatever its config calls it.

Three packagings say the same things in different words: z-lab's (``dflash_config``), DeepSpec's
(flat, on top of a copy of the target's config) and vLLM's speculators
(``transformer_layer_config``, tap numbers one higher). ``packagings.py`` reads each of them into a
:class:`BlockConfig`.

Shapes: H hidden size, V vocabulary.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BlockConfig",
    "Convolutions",
    "Markov",
    "Rope",
    "Selector",
    "Style",
    "config_digest",
]


def config_digest(config: object) -> str:
    """What tells a config from others, for the names that rows are stored under.

    Args:
        config: a frozen value; every attribute counts.
    """
    return sha256(repr(config).encode()).hexdigest()[:16]


class Style(StrEnum):
    """Whose decoder layers a drafter has.

    Attributes:
        QWEN: two norms a layer, SiLU, values as projected.
        GEMMA: four norms and a scalar a layer, tanh GELU, normalised values, scores unscaled.
    """

    QWEN = "qwen"
    GEMMA = "gemma"


@frozen
class Rope:
    """Rotary positions.

    Attributes:
        theta: their base.
        scaling: what mlx-lm's ``initialize_rope`` is given besides, such as ``rope_type``.
        traditional: whether neighbouring features are rotated, not those of the two halves.
        max_positions: that the drafter declares.
    """

    theta: float
    scaling: Mapping[str, Any] | None = None
    traditional: bool = False
    max_positions: int = 32768


@frozen
class Convolutions:
    """The dynamic convolutions around a DFlash 2 layer's two parts.

    Attributes:
        kernel_size: positions that are summed, the own one included.
        group_size: features that share a dynamic kernel.
    """

    kernel_size: int
    group_size: int


@frozen
class Selector:
    """What a DFlash 2 drafter chooses from a slot's best tokens with.

    Attributes:
        rank: of its codebooks.
        top_k: tokens that it looks at.
    """

    rank: int
    top_k: int


@frozen
class Markov:
    """The sequential head of a DSpark drafter.

    Attributes:
        rank: features of a token in it, r.
        kind: ``"vanilla"``, ``"gated"`` or ``"rnn"``; ``"elman"`` is the recurrent one of
            ``dspark.json``.
    """

    rank: int
    kind: str


@frozen(kw_only=True)
class BlockConfig:
    """A block drafter.

    Attributes:
        style: whose layers it has.
        hidden_size: H.
        heads: query heads.
        kv_heads: key heads.
        head_dim: features of a head.
        intermediate_size: of the MLP.
        vocab_size: ids that it may be given.
        eps: of its norms.
        rope: rotary positions.
        windows: per layer the positions a query sees, or ``None`` for all.
        causal: per layer, whether a column sees no later one.
        bias: whether the attention's projections have one.
        shared_values: whether values are made of the keys' projection.
        block_size: columns of the block that it was trained on.
        from_anchor: whether the first column, the pending token's, drafts too.
        mask_token: fills the other columns.
        taps: of the target, in order.
        target_layers: number of the target's layers, where the config says it.
        embedding_scale: of its input, besides the target's own.
        own_embedding_scale: of its input, where it has an embedding of its own.
        logit_scale: of its logits.
        soft_cap: of its logits, or ``None``.
        convolutions: of DFlash 2.
        selector: of DFlash 2.
        markov: of DSpark.
        confidence: whether it tells how sure it is.
        confidence_of_markov: whether that looks at the token before, too.
        draft_vocab: ids that its own head scores, where they are not all.
    """

    style: Style
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    bias: bool = False
    shared_values: bool = False
    block_size: int
    from_anchor: bool
    mask_token: int
    taps: tuple[int, ...] = field(converter=tuple[int, ...])
    target_layers: int | None
    embedding_scale: float = 1.0
    own_embedding_scale: float = 1.0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    convolutions: Convolutions | None = None
    selector: Selector | None = None
    markov: Markov | None = None
    confidence: bool = False
    confidence_of_markov: bool = False
    draft_vocab: int | None = None

    @property
    def layers(self) -> int:
        """Number of the drafter's layers."""
        return len(self.windows)

    @property
    def longest(self) -> int:
        """The most drafts of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1
