"""The drafter of a verify group: at work, at rest, or let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from specdec.verify.lane import MAX_FAILURES, DraftLane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.sampling import RowSamplers
    from specdec.verify.prefill import Reading
    from specdec.verify.row import Row

__all__ = ["DraftSide"]


@define(eq=False)
class DraftSide:
    """Which lane drafts, if any, and why not.

    Attributes:
        lane: drafts now; ``None`` where nobody does.
        resting: set aside until a request wants drafts again.
        reason: why there is no drafter.
    """

    lane: DraftLane | None
    reason: str | None
    resting: DraftLane | None = None

    def for_prompt(self, num_draft_tokens: int, apart: str | None) -> DraftLane | None:
        """The lane that reads a prompt with the target.

        Args:
            num_draft_tokens: drafts a round that its request wants.
            apart: why its row decodes one position at a time, if it does.
        """
        if apart is not None:
            return None
        return self.lane or (self.resting if num_draft_tokens else None)

    def for_join(self, readings: Sequence[Reading]) -> DraftLane | None:
        """The lane that rows join; one that rests comes back if it has read a prompt of theirs."""
        if any(reading.apart is not None for reading in readings):
            return None
        if self.lane is None and any(reading.row.width for reading in readings):
            return self.resting
        return self.lane

    def wanted(self, rows: Sequence[Row]) -> bool:
        """Whether a lane drafts, or one that rests is to: a row that paused drafts again."""
        rests = self.resting is not None and any(row.width for row in rows)
        return self.lane is not None or rests

    def wake(self, lane: DraftLane) -> None:
        """Let a lane draft."""
        self.lane, self.resting = lane, None

    def rest(self) -> None:
        """Set the lane aside, after too many failures for good; a new request brings it back."""
        lane, self.lane = self.lane, None
        if lane is None:
            return
        lane.close()
        if lane.failures < MAX_FAILURES:
            self.resting = lane  # plain rounds cost nothing more
        else:
            self.reason = lane.reason

    def ready(self, rows: Sequence[Row], sampling: RowSamplers) -> DraftLane | None:
        """The lane, if it drafts in the next window; it is set aside where no row wants drafts.

        Args:
            rows: all rows, between rounds.
            sampling: the group's draws.
        """
        if self.resting is not None and self.wanted(rows):
            self.wake(self.resting)
        lane = self.lane
        if lane is None:
            return None
        lane.bring_in(rows, sampling)
        if lane.serves:
            return lane
        if any(row.width for row in rows):
            lane.close()  # who is in it would miss this window; it is tried again after it
        else:
            self.rest()
        return None

    def describe(self, row: Row, apart: str | None) -> None:
        """Say in a new row's statistics who drafts for it, or why nobody does."""
        stats, lane = row.stats, self.lane or self.resting
        if lane is None or apart is not None:
            stats.reason = self.reason if lane is None else apart
        elif row.request.num_draft_tokens == 0:
            stats.reason = "num_draft_tokens is 0"
        else:
            stats.drafter = lane.name
            stats.num_draft_tokens = row.width
            stats.adaptive = row.request.adaptive and row.width > 0

    def close(self) -> None:
        """Close the lane; the provider stays."""
        if self.lane is not None:
            self.lane.close()
