"""What a block drafter says of itself: its layers, its context, and how a block is drafted.

Shapes: B rows, L positions, H hidden size, m tapped layers, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.drafting.choose import BlockChoices
    from specdec.drafting.context import BlockContext, ContextLayer, KeysAndValues

__all__ = ["BlockDraft", "BlockMethod"]


@frozen(eq=False)
class BlockDraft:
    """What a block drafted.

    Attributes:
        tokens: ``[B, d]`` ids on the device, d at most the depth that was asked for.
        lengths: ``[B]`` ints on the device, where confidence cuts rows shorter.
    """

    tokens: mx.array
    lengths: mx.array | None = None


class BlockMethod(Protocol):
    """A block drafter's numerics, bound to one target."""

    @property
    def layers(self) -> Sequence[ContextLayer]:
        """Its layers, whose context is kept."""

    @property
    def features(self) -> int:
        """Features of the tapped hidden states, m·H."""

    @property
    def longest(self) -> int:
        """The most drafts of a block, which it was trained for."""

    def columns(self, depth: int, /) -> int:
        """Positions of the block that drafts so many tokens, 1 or more; the first is pending's."""

    def project(self, hidden: mx.array, positions: int | mx.array, /) -> Sequence[KeysAndValues]:
        """A layer's keys and values of positions that the target has read.

        Args:
            hidden: ``[B, L, m·H]`` tapped hidden states.
            positions: of the first of them: an int, or ``[B]`` where rows differ.

        Returns:
            Per layer, ``[B, heads, L, D]`` each, position by position: what one position gives
            must not depend on its neighbours.
        """

    def draft_device(
        self, context: BlockContext, pending: mx.array, depth: int, choices: BlockChoices, /
    ) -> BlockDraft:
        """Draft a block.

        Args:
            context: what it attends to; ``context.width`` columns, at least ``columns(depth)``.
            pending: ``[B]`` ids, which stand at ``context.positions``.
            depth: the most drafts of any row, 1 to ``longest``.
            choices: chooses the tokens, slot by slot or all at once.
        """
