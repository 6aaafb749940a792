"""A window that was read, what each row takes from it, and how far the state has gone on with it.

Usually the state waits until the tokens are delivered, and keeps those alone. Where nothing stands
in the way, target and drafter keep all that was accepted at once, and the next window is submitted
before the first token is delivered: the device works while consumers run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.verify.flight import Flight
    from specdec.verify.round import RowOutcome
    from specdec.verify.row import Row

__all__ = ["Landing", "may_run_ahead"]


@define(eq=False)
class Landing:
    """What a window brought.

    Attributes:
        flight: the window.
        outcomes: one per row; ``None`` for rows that it gives nothing.
        kept: drafts per row that target and drafter have kept before anything was delivered;
            ``None`` where they wait for the delivery.
    """

    flight: Flight
    outcomes: list[RowOutcome | None]
    kept: list[int] | None = None

    def whole(self) -> list[int]:
        """Drafts per row that are kept if all is delivered."""
        return [0 if each is None else each.kept for each in self.outcomes]

    @property
    def rows(self) -> set[int]:
        """Rows that it gives something."""
        return {index for index, each in enumerate(self.outcomes) if each is not None}

    def show(self, rows: Sequence[Row]) -> None:
        """Tell the rows what they are to emit, so that the next window is built behind it."""
        for row, outcome in zip(rows, self.outcomes, strict=True):
            if outcome is not None:
                row.ahead.extend(outcome.acceptance.tokens)

    def count(self, rows: Sequence[Row], delivered: Sequence[int]) -> None:
        """Count what was read of what was delivered, and note whose state has read more.

        Args:
            rows: the rows, those that joined since included.
            delivered: drafts that each row delivered.
        """
        if self.kept is not None:
            counts = zip(rows, self.outcomes, delivered, self.kept, strict=False)
            for row, outcome, count, kept in counts:
                if outcome is not None:
                    row.processed += 1 + count
                    row.overran = count < kept
        for row in rows:
            row.overran |= bool(row.ahead)

    def forget_ended(self, rows: Sequence[Row]) -> None:
        """Note which ended rows' states have read what nobody will deliver."""
        if self.kept is None:
            return
        for row, outcome, kept in zip(rows, self.outcomes, self.kept, strict=False):
            if row.finish is not None and outcome is not None:
                row.overran = kept > 0
                row.processed += 1  # the token that headed the window, which was emitted before
                row.ahead.clear()

    def joined(self, rows: int) -> None:
        """Give nothing to rows that joined since, which are the last ones."""
        self.outcomes.extend([None] * (rows - len(self.outcomes)))

    def take(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows; those that joined since are behind the others."""
        self.joined(max(keep, default=-1) + 1)
        self.outcomes = [self.outcomes[index] for index in keep]
        if self.kept is not None:
            held = len(self.kept)
            self.kept = [self.kept[index] if index < held else 0 for index in keep]

    def read(self, index: int, row: Row) -> tuple[int, ...]:
        """What the target has read of a row, with what is kept and not delivered yet."""
        outcome = self.outcomes[index] if index < len(self.outcomes) else None
        if outcome is None or self.kept is None:
            return row.read
        accepted = outcome.acceptance
        ends = () if accepted.end_token is None else (accepted.end_token,)
        count = row.processed + 1 + self.kept[index]
        return (*row.tokens, *accepted.tokens, *ends)[:count]


def may_run_ahead(rows: Sequence[Row], outcomes: Sequence[RowOutcome | None]) -> bool:
    """Whether the next window can be submitted before these outcomes are delivered.

    Not if a row ends with them, for then its state is shown to others as it was delivered; not if
    one has emitted nothing yet, for a first token waits for nothing; not beside a row whose cache
    is the caller's, who may stop it at any token; and not where a constraint, or code that may
    hold state, would be shown tokens that may never come.
    """
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome is not None and (outcome.ends or not row.steps):
            return False
    return not any(
        row.finish is not None
        or row.request.cache is not None
        or row.constraint is not None
        or row.positional
        for row in rows
    )
