"""What the executor asks of target state, whatever the caches behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.contract import PendingChange

__all__ = ["RowState"]


class RowState(Protocol):
    """Caches of B rows of one target; see :class:`~specdec.state.RaggedState`."""

    @property
    def can_roll_back(self) -> bool:
        """Whether any window can be rolled back row by row."""

    @property
    def reason(self) -> str | None:
        """Why windows of more than one position are refused, if they are."""

    @property
    def row_caches(self) -> Sequence[list[Any]]:
        """Cache lists to run the model with: one for all rows together, or one per row."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row."""

    @property
    def open_width(self) -> int:
        """Positions of the open window; 0 between rounds."""

    @property
    def row_count(self) -> int:
        """Rows, B."""

    def arrays(self) -> list[mx.array]:
        """Every buffer, to be evaluated."""

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` of at most ``most`` positions.

        More than needed is right padding: never sampled, never kept.
        """

    def begin_round(self, width: int) -> None:
        """Open a window of ``width`` positions on every row."""

    def commit_round(self) -> None:
        """Keep the whole window in every row."""

    def rollback(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` positions of the window in row b; raises if it cannot."""

    def prepare_append(self, rows: Sequence[Self]) -> PendingChange:
        """Build this state's rows followed by those of ``rows``."""

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows: ``keep`` lists old indices."""

    def extract_row(self, row: int) -> list[Any]:
        """One row as mlx-lm caches that share nothing with this state."""

    def write_back(self, row: int, caches: Sequence[Any]) -> None:
        """Put one row into mlx-lm caches that the caller owns."""
