"""A chain of windows of one position: what each row kept since it began.

Rows may reach the length that they are quantized at in a chain, and come back from it. What they
were then is kept beside what they have become, by reference, until the chain ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import Factory, define, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state.batch import RowBatch

__all__ = ["Chain"]


@frozen(eq=False)
class _Older:
    """Rows before they were quantized.

    Attributes:
        batch: where they are still as they were.
        kept: by row of the state, in the batch's order, what it had kept of the chain.
    """

    batch: RowBatch
    kept: dict[int, int]


@define(eq=False)
class Chain:
    """What is known of an open chain.

    Attributes:
        kept: positions that each row kept since the chain began.
        longest: windows that it can have, if there is a limit.
        windows: windows that it has.
    """

    kept: list[int]
    longest: int | None
    windows: int = 0
    _older: list[_Older] = Factory(list)

    def add(self, kept: Sequence[int]) -> None:
        """A window of one position was closed."""
        self.windows += 1
        self.kept = [before + count for before, count in zip(self.kept, kept, strict=True)]

    @property
    def is_full(self) -> bool:
        """Whether one window more would be too many."""
        return self.longest is not None and self.windows >= self.longest

    def quantizes(self, batch: RowBatch, rows: Sequence[int]) -> RowBatch:
        """The same rows in another batch, to be quantized there; this one stays as it is."""
        self._older.append(_Older(batch, {row: self.kept[row] for row in rows}))
        return type(batch).of([(batch, range(batch.row_count))])

    def unquantized(self, counts: Sequence[int]) -> dict[int, tuple[RowBatch, int]]:
        """Take rows back that were not quantized yet, so many positions ago.

        Returns:
            By row of the state: the batch that it is in again, and its number there.
        """
        places: dict[int, tuple[RowBatch, int]] = {}
        for older in self._older:
            back = [counts[row] - (self.kept[row] - at) for row, at in older.kept.items()]
            if max(back) > 0:
                older.batch.take_back([max(count, 0) for count in back])
                for own, (row, count) in enumerate(zip(older.kept, back, strict=True)):
                    if count > 0:
                        places[row] = older.batch, own
        return places
