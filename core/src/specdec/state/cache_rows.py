"""What one layer's cache does for the rows that share it: the row form of a cache type.

A row form is given to the model in place of mlx-lm's cache, so it also has what the model's code
calls on that cache (``update_and_fetch``, ``offset``, ``make_mask``, ``[i]``, ...). Where each row
stands is told by the :class:`~specdec.state.positions.RowPositions` that all layers share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    import mlx.core as mx

    from specdec.state.positions import RowPositions

__all__ = ["CacheRows", "OnlyLengthsTell", "shortest"]


class CacheRows(Protocol):
    """Rows of one layer; ``positions`` is the state's and changes after the layers do."""

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions, /) -> Self:
        """One row that takes over an mlx-lm cache's arrays; its owner uses them no more."""

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[Self, Sequence[int]]], positions: RowPositions, /
    ) -> Self:
        """A new layer of the rows that are listed with each part, in order; the parts stay."""

    def key(self, row: int, /) -> Hashable:
        """Rows whose keys are equal can share a layer of this kind."""

    @property
    def split(self) -> bool:
        """Whether the keys of the rows have come to differ."""

    @property
    def rewinds(self) -> bool:
        """Whether any number of positions can be taken back, not the last one alone."""

    @property
    def longest_chain(self) -> int | None:
        """Windows of one position that a chain has at most; ``None`` for no limit."""

    def begin_chain(self) -> None:
        """From here on, what rows were before each window of one position is to be kept."""

    def end_chain(self) -> None:
        """Only the last window can be taken back now."""

    def begin(self) -> None:
        """A window was begun on ``positions``."""

    def check(self, kept: Sequence[int] | None, /) -> None:
        """Check that ``finish`` can do this; nothing changes.

        Raises:
            RollbackError: it cannot keep exactly that.
        """

    def finish(self, kept: Sequence[int] | None, /) -> None:
        """Keep the first ``kept[b]`` positions of the window in row b, or all (``None``).

        Called before ``positions`` moves, and after ``check``.
        """

    def take_back(self, counts: Sequence[int], /) -> None:
        """Let row b be what it was before its last ``counts[b]`` positions.

        Called before ``positions`` moves. Unless it ``rewinds``, a form is asked for what a row
        kept of the windows of one position of an open chain at most, as many as ``longest_chain``
        allows; without a chain for one position, and only after a window of one position.

        Raises:
            RollbackError: it cannot.
        """

    def extract(self, row: int, /, *, share: bool = False) -> Any:
        """One row as an mlx-lm cache.

        Args:
            row: its number.
            share: let the cache have this layer's arrays, which is used no more; else copies.
        """

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated."""

    def bytes_at(self, positions: int, /) -> int:
        """Bytes that a row of this layer takes at most at so many positions, by its shapes."""


class OnlyLengthsTell:
    """Verbs of forms for which dropping a part of a window is not moving a length on."""

    __slots__ = ()

    @property
    def split(self) -> bool:
        """Never: rows of any length share a buffer."""
        return False

    @property
    def rewinds(self) -> bool:
        """Not where places are used again, as in rings."""
        return False

    @property
    def longest_chain(self) -> int | None:
        """Where places are used again, only the form knows how long they are not."""
        return None if self.rewinds else 1

    def begin_chain(self) -> None:
        """Nothing has to be remembered."""

    def end_chain(self) -> None:
        """Nothing was."""

    def begin(self) -> None:
        """Nothing has to be remembered."""

    def check(self, kept: Sequence[int] | None, /) -> None:
        """Any part of a window can be kept."""

    def take_back(self, counts: Sequence[int], /) -> None:
        """The arrays stay as they are."""


def shortest(chains: Iterable[int | None]) -> int | None:
    """The least of what chains have at most, where ``None`` is no limit."""
    return min((most for most in chains if most is not None), default=None)
