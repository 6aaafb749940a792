"""Continuations that constraints force: drafts of the executor's own, in front of the drafter's.

A grammar often leaves one way to go on (a key of a JSON object, its quotes and colon). What is
forced is proposed as a draft, so it costs no forward of its own, and needs no drafter. A drafter
that can take tokens from outside (``consume``) drafts behind them; one that cannot drafts alone.
"""

from __future__ import annotations

import operator
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec.contract import RowConstraints
    from specdec.verify.lane import DraftLane
    from specdec.verify.row import Row

__all__ = ["Constraints", "forced_drafts"]


class Constraints:
    """The forced continuations of a group's rows; implements the contract's ``RowConstraints``."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        """Up to ``max_tokens`` forced ids for a row; changes no state."""
        constraint = self._rows[row].constraint
        if constraint is None or max_tokens < 1:
            return ()
        return _whole_numbers(islice(constraint.propose(max_tokens), max_tokens))


def _whole_numbers(items: Iterable[object]) -> list[int]:
    """Ints, up to the first item that is none: a constraint may be anybody's."""
    ids: list[int] = []
    for item in items:
        try:
            ids.append(operator.index(item))  # type: ignore[arg-type]  # that is the question
        except TypeError:
            break
    return ids


def forced_drafts(
    rows: Sequence[Row], lane: DraftLane | None, errors: dict[int, Exception]
) -> dict[int, list[int]]:
    """What is forced next, for the rows where it can stand in front of the drafter.

    Args:
        rows: all rows, between rounds.
        lane: the drafter of the next window, if it has one.
        errors: gets what a row's constraint raised, by row.

    Returns:
        Ids by row; no entry where nothing is forced.
    """
    constraints: RowConstraints = Constraints(rows)
    forced = {}
    for index, row in enumerate(rows):
        if row.constraint is None or (lane is not None and not lane.takes_tokens(index)):
            continue
        try:
            ids = constraints.propose(index, row.within_budget(row.request.num_forced_tokens))
        except Exception as error:
            errors[index] = error
            continue
        if ids:
            forced[index] = list(ids)
    return forced
