"""Listening to a drafter at rest: what it would have drafted, beside the tokens that came.

Only drafters that look their drafts up on the host are listened to (``SupportsLookup``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify.lane import DraftLane
    from specdec.verify.pacing import Pace
    from specdec.verify.row import Row

__all__ = ["Listener"]

_OFTEN = 2  # rounds between two looks at a drafter that was right
_SELDOM = 6  # and at one that was not, or said nothing


@frozen(eq=False)
class _Heard:
    row: Row
    start: int  # tokens that the row had
    asked: int
    drafts: Sequence[int]

    @property
    def judged(self) -> int | None:
        """How many drafts were right; ``None`` while that cannot be told."""
        came = self.row.tokens[self.start : self.start + self.asked]
        right = 0
        for draft, token in zip(self.drafts, came, strict=False):
            if draft != token:
                return right
            right += 1
        if len(self.drafts) < self.asked or len(came) == self.asked:
            return right if len(came) >= len(self.drafts) else None
        return None


@define(eq=False)
class Listener:
    """What was heard of one group's drafter, and is not judged yet."""

    _heard: list[_Heard] = field(factory=list)
    _wait: int = _SELDOM

    def listen(self, rows: Sequence[Row], lane: DraftLane, depth: int, pace: Pace) -> None:
        """After a plain round that the drafter was not asked in.

        Args:
            rows: all rows.
            lane: the drafter, at rest.
            depth: drafts to ask for.
            pace: told of what was right.
        """
        waiting, right = [], False
        for each in self._heard:
            judged = each.judged
            if judged is None:
                if each.row.finish is None:
                    waiting.append(each)
                continue
            right |= judged > 0
            pace.hear(each.row, each.asked, judged)
        self._heard = waiting
        self._wait = min(self._wait - 1, _OFTEN) if right else self._wait - 1
        if self._wait > 0 or any(row.finish is not None for row in rows):
            return  # of a row that ended nothing is pending
        self._wait = _OFTEN if right or waiting else _SELDOM
        for row, asked, drafts in lane.look_up(depth):
            self._heard.append(_Heard(row, len(row.tokens), asked, drafts))

    def forget(self) -> None:
        """Rows have come or gone, or the drafter is asked again."""
        self._heard, self._wait = [], _OFTEN
