"""How many drafts a round asks for, where the rows leave that to somebody.

Without a pace every round asks for each row's own number. With one, it asks for as many as pay:
what a round costs and what it brings are the pace's matter (``specdec.cost``), what follows from
its choice is the executor's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify.row import Row

__all__ = ["AS_ASKED", "Pace", "Plan", "Seen"]


@frozen
class Plan:
    """What the next round is to be.

    Attributes:
        depth: drafts to ask for at most, of the rows that leave it to the pace; ``None`` leaves
            all rows their own number.
        width: positions of a window without drafts, 1 or more.
        rounds: how many rounds it holds for, if no rows come or go.
        listens: drafts of a drafter at rest that are compared with what comes, where it can be
            asked at no cost; 0 does not listen.
    """

    depth: int | None = None
    width: int = 1
    rounds: int = 1
    listens: int = 0

    @property
    def rests(self) -> bool:
        """Whether the drafter is not asked, unless a row insists on a number of its own."""
        return self.depth == 0


AS_ASKED = Plan()


@frozen
class Seen:
    """A round that is over, or several plain ones.

    Attributes:
        depth: drafts that the plan asked for; 0 in plain rounds.
        asked: B ints, drafts that each row was asked for: its budget may leave it fewer.
        accepted: B ints, how many of them were accepted; those that a constraint forced are none.
        longest: the longest draft that came.
        width: positions of its window, W.
        seconds: from the end of the round before it to its own, what consumers take between rounds
            included up to as much as the round's own work; of several rounds the mean.
        rounds: how many.
    """

    depth: int

    asked: Sequence[int]
    accepted: Sequence[int]
    longest: int
    width: int
    seconds: float
    rounds: int = 1


class Pace(Protocol):
    """Chooses for one group of rows, round by round."""

    def plan(self, rows: Sequence[Row]) -> Plan:
        """What the next round is to be.

        Args:
            rows: all rows, between rounds or while a plain window is on its way.
        """

    def padded(self, rows: int, needed: int) -> int:
        """The width to give a window that needs so many positions: as many, or more."""

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        """A round is over.

        Args:
            rows: those of the round, in order.
            seen: what it took and gave.
        """

    def hear(self, row: Row, asked: int, right: int) -> None:
        """What a drafter at rest would have proposed has come, or not.

        Args:
            row: whose.
            asked: drafts that it was asked for.
            right: how many were the row's own tokens, from the first one on.
        """
