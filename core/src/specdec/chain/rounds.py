"""A chain's rounds: whom to ask for which rows, and what everybody reads when one ends.

Members are asked in order, each for the rows that nobody before it proposed anything for. One that
is not needed is not asked at all, and consumes what came of the round.

Shapes: B rows, W = 1 + the longest draft, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec.chain.turn import Turn
from specdec.contract import SupportsDeviceDraft, SupportsPreview, SupportsStandDown
from specdec.drafting import Asked, checks
from specdec.errors import (
    ClosedError,
    ContractError,
    NoOpenRoundError,
    RoundOpenError,
    blamed_on,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.chain.members import Shared
    from specdec.contract import DeviceProposal, Proposal, RowSampling

__all__ = ["ChainRounds", "OpenMember"]


@frozen(eq=False)
class OpenMember:
    """A member with its group of the chain's rows.

    Attributes:
        name: its kind, for messages.
        group: a prefill group or a decode group, open.
        width: the most drafts a round.
        listed: ``[N]`` the ids that it selects over, where it declares some.
    """

    name: str
    group: Any
    width: int
    listed: mx.array | None = None

    @property
    def stood_down(self) -> Sequence[str | None]:
        """Per row why this member drafts nothing for it from now on, or ``None``."""
        rows = self.group.row_count
        if isinstance(self.group, SupportsStandDown):
            with blamed_on(self.name):
                return checks.row_reasons(self.group.stood_down, rows)
        return [None] * rows

    def call(self, verb: str, *given: Any) -> Any:
        """Call a verb of the group; what it raises is blamed on the member."""
        with blamed_on(self.name):
            return getattr(self.group, verb)(*given)


class ChainRounds:
    """The rounds of a chain's group.

    Args:
        members: in the order in which they are asked.
        shared: what they read of the target.
        vocab_size: V.
        sampling: the rows' draws; ``None`` in a prefill group.
    """

    def __init__(
        self,
        members: Sequence[OpenMember],
        shared: Shared,
        vocab_size: int,
        sampling: RowSampling | None,
    ) -> None:
        self._members = tuple(members)
        self._shared = shared
        self._vocab_size = vocab_size
        self._sampling = sampling
        self._turn: Turn | None = None
        self._asking = False  # some have been asked, and ``draft`` asks the others
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the group is closed."""
        return self._closed

    @property
    def row_count(self) -> int:
        """B."""
        count: int = self._members[0].group.row_count
        return count

    def check_open(self, verb: str) -> None:
        """Check that the group is not closed.

        Raises:
            ClosedError: it is.
        """
        if self._closed:
            raise ClosedError(verb)

    def between(self, verb: str) -> None:
        """Check that no round is open.

        Raises:
            RoundOpenError: one is.
            ClosedError: after :meth:`close`.
        """
        self.check_open(verb)
        if self._turn is not None:
            raise RoundOpenError(verb)

    def close(self) -> None:
        """No verb may follow but ``close``."""
        self._closed, self._turn = True, None

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[Any]] | Proposal:
        """Open a round and propose on the host; see the contract.

        After a ``draft_device`` that gave ``None``, only those are asked that it did not ask.
        """
        turn = self._begin("draft", pending, depths, steps)
        begun = len(self._members) - 1 if self._asking else 0
        self._turn, self._asking = turn, True
        for number in range(begun, len(self._members)):
            self._ask(turn, number)
        self._asking = False
        return turn.on_host(self._rejecting)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round whose last member's drafts stay on the device; see the contract.

        ``None`` where that cannot draft there, or is not needed: ``draft`` then tells what the
        others have already proposed.
        """
        turn = self._begin("draft_device", pending, depths, steps)
        last, member = len(self._members) - 1, self._members[-1]
        if not turn.asked.deepest or not isinstance(member.group, SupportsDeviceDraft):
            return None
        self._turn, self._asking = turn, True
        for number in range(last):
            self._ask(turn, number)
        own = self._depths(turn, last)
        asked = turn.asked
        if not any(own):
            return None
        device = member.call("draft_device", asked.pending, own, asked.steps)
        if device is None:
            return None
        self._asking = False
        return turn.on_device(last, member.name, device, own, self._rejecting)

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """What the first member shows; where it shows nothing of a single row, the next one.

        In several rows one could win that shows nothing, so nothing is said of any.
        """
        self.between("preview")
        turn = self._turn_of(pending, depths, steps)
        for number, each in enumerate(self._members):
            own = self._depths(turn, number)
            if not any(own):
                continue
            asked = zip(turn.asked.depths, own, strict=True)
            left_out = any(depth and not mine for depth, mine in asked)
            if left_out or not isinstance(each.group, SupportsPreview):
                return None
            seen: mx.array | None = each.call("preview", turn.asked.pending, own, turn.asked.steps)
            if seen is not None or len(own) != 1:
                return seen
        return None

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: every member reads what was kept, its own drafts or another's.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, ·]`` of the verify window.
        """
        self.check_open("commit")
        turn = self._turn
        if turn is None or self._asking:
            raise NoOpenRoundError
        if not turn.resolved:
            raise NoOpenRoundError("resolve() of the proposal comes before commit")
        lengths = turn.lengths
        counts = checks.row_ints("commit: accepted", accepted, lengths)
        self._shared.check("commit", context, self.row_count, 1 + max(lengths, default=0))
        self._turn = None
        kept = [draft[:count] for draft, count in zip(turn.drafts, counts, strict=True)]
        for number in range(len(self._members)):
            part = self._shared.part(number, context)
            if number in turn.members:
                mine = [winner == number for winner in turn.winners]
                own = [count if my else 0 for my, count in zip(mine, counts, strict=True)]
                self._members[number].call("commit", own, part)
                rest = [[] if my else ids for my, ids in zip(mine, kept, strict=True)]
                self._read(number, rest, None if part is None else part[:, 1:])
            else:
                pending = turn.asked.pending
                self._read(number, [[p, *ids] for p, ids in zip(pending, kept, strict=True)], part)

    def _read(self, number: int, chunks: list[list[Any]], context: mx.array | None) -> None:
        """A member consumes what others chose."""
        lengths = list(map(len, chunks))
        longest = max(lengths, default=0)
        if not longest:
            return
        padded = [[*map(int, ids), *[0] * (longest - len(ids))] for ids in chunks]
        own = None if context is None else context[:, :longest]
        self._members[number].call("consume", mx.array(padded, mx.int32), own, lengths)

    def _begin(
        self, verb: str, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> Turn:
        """A new round, or the one that is being asked for."""
        if self._asking and self._turn is not None and verb == "draft":
            asked = self._turn.asked
            if [asked.pending, asked.depths, asked.steps] != [*map(list, (pending, depths, steps))]:
                raise ContractError("draft() was asked other than draft_device() of the same round")
            return self._turn
        self.between(verb)
        return self._turn_of(pending, depths, steps)

    def _turn_of(self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]) -> Turn:
        count = self.row_count
        asked = Asked(
            checks.row_ints("pending", pending, [self._vocab_size - 1] * count),
            checks.row_ints("depths", depths, [None] * count),
            checks.row_ints("steps", steps, [None] * count),
        )
        return Turn(asked, self._vocab_size, [each.listed for each in self._members])

    def _depths(self, turn: Turn, number: int) -> list[int]:
        """What a member is asked for: nothing where another won, or where it has stood down."""
        member = self._members[number]
        rows = zip(turn.asked.depths, turn.winners, member.stood_down, strict=True)
        return [
            min(depth, member.width) if winner is None and down is None else 0
            for depth, winner, down in rows
        ]

    def _ask(self, turn: Turn, number: int) -> None:
        """Ask a member for the rows that nobody has won, if there are any."""
        own = self._depths(turn, number)
        if not any(own):
            return
        member, asked = self._members[number], turn.asked
        proposal = member.call("draft", list(asked.pending), own, list(asked.steps))
        turn.take(number, member.name, proposal, own)

    @property
    def _rejecting(self) -> bool:
        return self._sampling is not None and self._sampling.rejecting
