"""Which rows of a verify group its draft group serves, and how more of them get in.

The draft group's rows are its *members*: rows of the verify group, in the same order, but not
always all of them. What a drafter raises passes through this module, except where the question is
whose checkpoint it refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx
from attrs import define, field, frozen

from specdec.contract import Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import (
        DraftRowGroup,
        PendingChange,
        RowCheckpoint,
        RowSampling,
        Selection,
    )
    from specdec.verify.request import Row

    Refuse = Callable[[Sequence["Joining"], Exception], None]

__all__ = ["Joining", "MemberSampling", "Members", "pick"]

Item = TypeVar("Item")


def pick(items: Sequence[Item], places: Sequence[int] | None) -> Sequence[Item]:
    """The items at ``places``; all of them, not copied, where it is ``None``."""
    return items if places is None else [items[place] for place in places]


class MemberSampling:
    """The draws of a verify group's rows, as the members of its draft group see them.

    Args:
        sampling: the draws of all rows.
    """

    def __init__(self, sampling: RowSampling) -> None:
        self._sampling = sampling
        self._places: list[int] | None = None
        self._spread: list[int] = []

    def bind(self, places: list[int] | None, rows: int) -> None:
        """Say which rows the members are, before a round.

        Args:
            places: the members' rows; ``None`` for all.
            rows: rows of the verify group.
        """
        self._places = places
        if places is not None:
            self._spread = spread_index(places, rows)

    @property
    def selection(self) -> Selection:
        """How the rows select; what all of them can do, the members can."""
        return self._sampling.selection

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Each member's draw: ``[M, V] -> [M]``, as :class:`~specdec.contract.RowSampling`."""
        if self._places is None:
            return self._sampling.sample(logprobs, steps)
        # The rows between them draw as well, from what is not theirs, and nobody looks.
        every = mx.take(logprobs, mx.array(self._spread, mx.int32), axis=0)
        drawn = self._sampling.sample(every, pick(steps, self._spread))
        return mx.take(drawn, mx.array(self._places, mx.int32), axis=0)


def spread_index(places: Sequence[int], rows: int) -> list[int]:
    """For each of ``rows`` the number of its member; 0 for those that are none."""
    index = [0] * rows
    for number, place in enumerate(places):
        index[place] = number
    return index


@frozen(eq=False)
class Joining:
    """A row that may become a member.

    Attributes:
        index: its place in the verify group.
        row: the row.
        checkpoint: its draft state.
    """

    index: int
    row: Row
    checkpoint: RowCheckpoint


@define(eq=False)
class Members:
    """An open draft group, or none, and the rows that it serves.

    Attributes:
        group: the draft group.
        rows: its rows by their place in the verify group, in the draft group's order.
    """

    group: DraftRowGroup | None = None
    rows: dict[int, Row] = field(factory=dict)

    def places(self, count: int) -> list[int] | None:
        """The members' places among ``count`` rows; ``None`` where all are members."""
        return None if len(self.rows) == count else list(self.rows)

    def prepare(
        self,
        joining: Sequence[Joining],
        build: Callable[[Sequence[Joining]], PendingChange],
        refuse: Refuse,
    ) -> PendingChange:
        """Build a change for the rows that the drafter takes; nothing is raised.

        Args:
            joining: who may become a member.
            build: asks the drafter, for some of them.
            refuse: told of those that it does not take, with what it raised.
        """
        nothing = Swap(lambda: None)
        if not joining:
            return nothing
        try:
            return build(joining)
        except Exception as error:
            together = error
        if len(joining) == 1:
            refuse(joining, together)
            return nothing
        taken = []
        for each in joining:
            try:
                build([each]).discard()
            except Exception as error:
                refuse([each], error)
            else:
                taken.append(each)
        if len(taken) == len(joining):
            refuse(joining, together)  # nobody alone is to blame; all may try once more
        try:
            return build(taken) if taken else nothing
        except Exception as error:
            refuse(taken, error)
            return nothing

    def append(self, joining: Sequence[Joining]) -> None:
        """Count rows as members, behind the others."""
        for each in joining:
            self.rows[each.index] = each.row

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Retire and reorder rows of the verify group, members or not."""
        old = self.rows
        number = {place: number for number, place in enumerate(old)}
        staying = [number[place] for place in keep if place in number]
        if self.group is not None and staying != list(range(len(old))):
            self.group.filter_rows(list(staying))
        self.rows = {new: old[place] for new, place in enumerate(keep) if place in old}

    def put_in_order(self) -> None:
        """Let the draft group's rows stand in the verify group's order."""
        places = list(self.rows)
        order = sorted(range(len(places)), key=places.__getitem__)
        if self.group is not None and order != list(range(len(places))):
            self.group.filter_rows(list(order))
            self.rows = dict(sorted(self.rows.items()))

    def capture(self, place: int) -> RowCheckpoint | None:
        """The checkpoint of a row of the verify group; ``None`` if it is no member."""
        if self.group is None or place not in self.rows:
            return None
        return self.group.capture(list(self.rows).index(place))

    def commit(self, accepted: Sequence[int], context: mx.array | None) -> None:
        """End a round: the members' part of what all rows of the verify group accepted."""
        if self.group is None or not self.rows:
            return
        places = self.places(len(accepted))
        if places is not None and context is not None:
            context = mx.take(context, mx.array(places, mx.int32), axis=0)
        self.group.commit(list(pick(accepted, places)), context)
