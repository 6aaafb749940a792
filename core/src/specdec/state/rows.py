"""What the executor asks of target state, whatever the caches behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.contract import PendingChange

__all__ = ["RowState"]


class RowState(Protocol):
    """Caches of B rows of one target; see ``RaggedState``."""

    @property
    def can_roll_back(self) -> bool:
        """Whether any window can be rolled back row by row."""

    @property
    def reason(self) -> str | None:
        """Why windows of more than one position are refused, if they are."""

    @property
    def row_caches(self) -> Sequence[tuple[list[Any], Sequence[int]]]:
        """Caches to run the model with, each list with the numbers of the rows that it holds."""

    @property
    def records(self) -> bool:
        """Whether a forward of the open window is to be recorded, for part of it to be dropped."""

    @property
    def recurrent(self) -> bool:
        """Whether positions of a window are dropped by computing what is left of it again."""

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

    def bytes_at(self, positions: int, /) -> int:
        """Bytes of one row at so many positions at most, once something was appended."""

    def room(self, row: int, /) -> int | None:
        """Positions that a window on this row can keep at most, if there is a limit."""

    def begin_round(self, width: int, *, reading: bool = False) -> None:
        """Open a window of ``width`` positions on every row; a prompt's chunk is kept whole."""

    def commit_round(self) -> None:
        """Keep the whole window in every row."""

    def rollback(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` positions of the window in row b; raises if it cannot."""

    def begin_chain(self) -> None:
        """From here on windows of one position can all be taken back, between rounds.

        A chain ends with ``take_back``, with a wider window, and with any change of the rows. It
        has ``longest_chain`` windows at most; one more ends it. A second one begins anew.

        Raises:
            RoundOpenError: a round is open.
            RollbackError: these caches can take nothing back; says why.
        """

    @property
    def longest_chain(self) -> int | None:
        """Windows that a chain has at most; ``None`` for no limit."""

    def take_back(self, counts: Sequence[int]) -> None:
        """Let row b be what it was before its last ``counts[b]`` positions; raises if it cannot.

        In a chain (``begin_chain``) these are of what the row kept since it began, for any caches.
        Else attention keys go back any number; for other caches it is the last window alone, if it
        was of one position and none was begun since.
        """

    def prepare_append(self, rows: Sequence[Self]) -> PendingChange:
        """Build this state's rows followed by those of ``rows``."""

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows: ``keep`` lists old indices."""

    def extract_row(self, row: int) -> list[Any]:
        """One row as mlx-lm caches that share nothing with this state."""

    def write_back(self, row: int, caches: Sequence[Any]) -> None:
        """Put one row into mlx-lm caches that the caller owns."""
