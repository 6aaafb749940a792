"""How many rows fit into a memory limit, told before anything is allocated.

All rows of a group lie in one buffer that is as long as its longest row, so what counts is the
number of rows times the longest final length, not the sum of the lengths. A row counts with its
final length from the moment its prompt is begun: a row that was let in never has to go again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec.contract import DeclaresRowBytes
from specdec.errors import OptionError
from specdec.state import CacheOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specdec.batch.entry import Entry
    from specdec.contract import DraftProvider
    from specdec.targets import Target

__all__ = ["MemoryPlan"]


@frozen
class MemoryPlan:
    """What rows need, and whether they fit.

    Attributes:
        target: tells the bytes of a row.
        limit: bytes that rows and drafter may take; ``None`` for no limit.
        drafter: its weights count, and its rows where it declares them.
        options: how rows are cached.
    """

    target: Target
    limit: int | None
    drafter: DraftProvider | None = None
    options: CacheOptions = field(factory=CacheOptions)

    def row_bytes(self, positions: int) -> int:
        """Bytes of a row of target and drafter at so many positions at most."""
        drafts = 0
        if self.drafter is not None and isinstance(self.drafter.grouped, DeclaresRowBytes):
            drafts = self.drafter.grouped.row_bytes(self.target, positions)
        return self.target.row_bytes(positions, self.options) + drafts

    @property
    def weight_bytes(self) -> int:
        """What the drafter's own weights take."""
        return 0 if self.drafter is None else self.drafter.weight_bytes

    def rows_need(self, entries: Iterable[Entry]) -> int:
        """Bytes that the rows of these requests need at their longest."""
        together, apart = [], 0
        for entry in entries:
            if entry.apart is None:
                together.append(entry)
            else:
                apart += self.row_bytes(entry.positions)
        if not together:
            return apart
        # A window is as wide as its widest row, on every row.
        longest = max(entry.positions for entry in together)
        longest += max(entry.window for entry in together)
        return len(together) * self.row_bytes(longest) + apart

    def fits(self, entry: Entry, active: Iterable[Entry]) -> bool:
        """Whether a request fits beside those that read or decode."""
        if self.limit is None:
            return True
        return self.weight_bytes + self.rows_need([*active, entry]) <= self.limit

    def check(self, entry: Entry) -> None:
        """Refuse a request that can never fit.

        Raises:
            OptionError: it has no limit of its own, or exceeds the limit when it is alone.
        """
        if self.limit is None:
            return
        if entry.row.request.max_tokens < 0:
            raise OptionError(
                "max_tokens is -1, so with a memory_limit nobody can tell whether it fits; "
                "give a number of tokens"
            )
        need = self.weight_bytes + self.rows_need([entry])
        if need > self.limit:
            drafter = f" and {self.weight_bytes} of the drafter" if self.weight_bytes else ""
            raise OptionError(
                f"{entry.positions} positions need {need - self.weight_bytes} bytes{drafter}, but "
                f"memory_limit is {self.limit}; give a shorter prompt, fewer max_tokens, or a "
                f"memory_limit of {need} or more"
            )
