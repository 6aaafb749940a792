"""Which rows of a verify group its draft group serves, and how more of them get in.

The draft group's rows are its *members*: rows of the verify group, in the same order, but not
always all of them. What a drafter raises passes through this module, except where the question is
whose checkpoint it refuses.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx
from attrs import define, field, frozen

from specdec.contract import Listed, SupportsConsume, Swap
from specdec.sampling.plans import Drafting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from specdec.contract import (
        DraftRowGroup,
        PendingChange,
        RowCheckpoint,
        Selection,
    )
    from specdec.sampling import RowSamplers
    from specdec.verify.row import Row

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
        ids: ascending ids that the drafter can select over alone, if it lists some.
    """

    def __init__(self, sampling: RowSamplers, ids: Sequence[int] | None = None) -> None:
        self._sampling = sampling
        self._entering: Drafting | None = None
        self._places: list[int] | None = None
        self._spread: list[int] = []
        self._listed: Listed | None = None
        if ids is not None:
            array = mx.array(list(ids), mx.uint32)
            draw = partial(sampling.sample, ids=array)
            declare = partial(sampling.log_distribution, ids=array)
            self._listed = Listed(
                ids, partial(self._as_rows, draw), partial(self._as_rows, declare)
            )

    def bind(self, places: list[int] | None, rows: int) -> None:
        """Say which rows the members are, before a round.

        Args:
            places: the members' rows; ``None`` for all.
            rows: rows of the verify group.
        """
        self._places = places
        if places is not None:
            self._spread = spread_index(places, rows)

    @contextmanager
    def entered_by(self, joining: Sequence[Joining]) -> Iterator[None]:
        """While a group is opened for rows: how they select, for they have no draws yet."""
        self._entering = Drafting.of([each.row.request.sampling for each in joining])
        try:
            yield
        finally:
            self._entering = None

    @property
    def selection(self) -> Selection:
        """How the rows select; what all of them can do, the members can."""
        rows = self._entering or self._sampling.drafting
        return self._listed if self._listed is not None and rows.listable else rows.selection

    @property
    def rejecting(self) -> bool:
        """Whether a row judges its drafts by rejection sampling, member or not."""
        return (self._entering or self._sampling.drafting).rejecting

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Each member's draw: ``[M, V] -> [M]``, as :class:`~specdec.contract.RowSampling`."""
        return self._as_rows(self._sampling.sample, logprobs, steps)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """What each member draws from, ``[M, V] -> [M, V]``: see ``RowSampling``."""
        return self._as_rows(self._sampling.log_distribution, logprobs, steps)

    def _as_rows(
        self,
        ask: Callable[[mx.array, Sequence[int]], mx.array],
        logprobs: mx.array,
        steps: Sequence[int],
    ) -> mx.array:
        if self._places is None:
            return ask(logprobs, steps)
        # The rows between them are asked as well, of what is not theirs, and nobody looks.
        every = mx.take(logprobs, mx.array(self._spread, mx.int32), axis=0)
        answer = ask(every, pick(steps, self._spread))
        return mx.take(answer, mx.array(self._places, mx.int32), axis=0)


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
    _looked_at: DraftRowGroup | None = None
    _offers: dict[type, bool] = field(factory=dict)

    def offers(self, verbs: type) -> bool:
        """Whether the draft group has optional verbs: looked up once, which takes a while.

        Args:
            verbs: a ``Supports...`` protocol.
        """
        if self._looked_at is not self.group:
            self._looked_at, self._offers = self.group, {}
        found = self._offers.get(verbs)
        if found is None:
            found = self._offers[verbs] = isinstance(self.group, verbs)
        return found

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

    def consume(self, chunks: Mapping[int, Sequence[int]], context: mx.array | None) -> None:
        """Let the draft group read tokens that somebody else chose.

        Args:
            chunks: tokens by row of the verify group; rows that are no members are passed over.
            context: ``[B, L, ·]`` hidden states at those tokens, of all rows, or ``None``.
        """
        if self.group is None or not any(chunks.get(place) for place in self.rows):
            return
        assert isinstance(self.group, SupportsConsume)
        mine = [list(chunks.get(place, ())) for place in self.rows]
        longest = max(map(len, mine))
        padded = [chunk + [0] * (longest - len(chunk)) for chunk in mine]
        if context is not None:
            places = mx.array(list(self.rows), mx.int32)
            context = mx.take(context[:, :longest], places, axis=0)
        self.group.consume(mx.array(padded, mx.int32), context, [len(chunk) for chunk in mine])

    def follow(self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int]) -> None:
        """Let the draft group read what the target read while it rested.

        Args:
            tokens: ``[B, L]`` ids of all rows of the verify group.
            context: ``[B, L, ·]`` hidden states there, or ``None``.
            lengths: B ints, how many of them each row keeps.
        """
        if self.group is None or not any(lengths[place] for place in self.rows):
            return
        assert isinstance(self.group, SupportsConsume)
        places = self.places(len(lengths))
        if places is not None:
            index = mx.array(places, mx.int32)
            tokens = mx.take(tokens, index, axis=0)
            context = None if context is None else mx.take(context, index, axis=0)
        self.group.consume(tokens, context, list(pick(lengths, places)))

    def remove(self, places: Collection[int]) -> None:
        """Let rows be members no more; they stay in the verify group."""
        if not places:
            return
        staying = [number for number, place in enumerate(self.rows) if place not in places]
        if self.group is not None:
            self.group.filter_rows(staying)
        self._unsay(place for place in self.rows if place in places)
        self.rows = {place: row for place, row in self.rows.items() if place not in places}

    def forget(self) -> None:
        """Let no row be a member any more; the draft group is closed."""
        self._unsay(self.rows)
        self.rows = {}

    def _unsay(self, places: Iterable[int]) -> None:
        """Take back what the drafter remarked of rows that it drafted for to the last."""
        for place in places:
            if self.rows[place].width:
                self.rows[place].stats.reason = None
