"""Which round of a group is open, what it proposed, and what may be asked when.

A group whose drafts come from the device as one array of ids keeps a :class:`Rounds`, so that its
verbs check alike.

Shapes: B rows, d drafts, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, frozen

from specdec.contract import DeviceProposal, Proposal
from specdec.drafting.checks import row_ints
from specdec.errors import ClosedError, NoOpenRoundError, RoundOpenError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Asked", "Drafted", "OpenRound", "Rounds"]


@frozen
class Asked:
    """What a group is asked to draft from, one entry per row.

    Attributes:
        pending: the token that each draft follows.
        depths: the most drafts.
        steps: samples drawn before the first of them.
    """

    pending: list[int]
    depths: list[int]
    steps: list[int]

    @property
    def deepest(self) -> int:
        """The most drafts of any row."""
        return max(self.depths, default=0)


@frozen(eq=False)
class Drafted:
    """Ids on the device, and what they were drawn from.

    Attributes:
        tokens: ``[B, d]`` int32.
        lengths: ``[B]`` ints on the device that cut a row shorter than it was asked for, or
            ``None``.
        logq: ``[B, d, V or N]``, or ``None`` where nobody asks.
    """

    tokens: mx.array
    lengths: mx.array | None = None
    logq: mx.array | None = None


@define(eq=False)
class OpenRound:
    """A round that was opened.

    Attributes:
        asked: what it was opened with.
        drafts: what each row proposed at most; ``None`` while that is on the device alone.
    """

    asked: Asked
    drafts: list[list[int]] | None = None


class Rounds:
    """The rounds of one group.

    Args:
        vocab_size: ids below it are tokens, V.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._open: OpenRound | None = None
        self._closed = False

    def between(self, verb: str) -> None:
        """Check that no round is open.

        Raises:
            RoundOpenError: one is.
            ClosedError: after :meth:`close`.
        """
        self.check_open(verb)
        if self._open is not None:
            raise RoundOpenError(verb)

    @property
    def closed(self) -> bool:
        """Whether the group is closed."""
        return self._closed

    def check_open(self, verb: str) -> None:
        """Check that the group is not closed.

        Raises:
            ClosedError: it is.
        """
        if self._closed:
            raise ClosedError(verb)

    def close(self) -> None:
        """No verb may follow but ``close``."""
        self._closed = True
        self._open = None

    def asked(
        self,
        verb: str,
        row_count: int,
        pending: Sequence[int],
        depths: Sequence[int],
        steps: Sequence[int],
    ) -> Asked:
        """Check what a group is asked to draft from.

        Raises:
            ContractError: not one int per row, or a token outside the vocabulary.
            RoundOpenError: a round is open.
            ClosedError: after :meth:`close`.
        """
        self.between(verb)
        return Asked(
            row_ints("pending", pending, [self._vocab_size - 1] * row_count),
            row_ints("depths", depths, [None] * row_count),
            row_ints("steps", steps, [None] * row_count),
        )

    def open_host(self, asked: Asked, drafted: Drafted | None) -> list[list[int]] | Proposal:
        """Open a round and read its drafts.

        Args:
            asked: checked.
            drafted: what was drafted; ``None`` for nothing at all.
        """
        ids: Any = [[]] * len(asked.pending) if drafted is None else drafted.tokens.tolist()
        lengths = asked.depths
        if drafted is not None and drafted.lengths is not None:
            lengths = _cut(asked.depths, drafted.lengths)
        drafts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        self._open = OpenRound(asked, drafts)
        told_drafts = [list(draft) for draft in drafts]
        logq = None if drafted is None else drafted.logq
        return told_drafts if logq is None else Proposal(told_drafts, logq)

    def open_device(self, asked: Asked, drafted: Drafted) -> DeviceProposal:
        """Open a round whose drafts stay on the device."""
        self._open = opened = OpenRound(asked)
        width, own = drafted.tokens.shape[1], drafted.lengths
        most = [min(depth, width) for depth in asked.depths]

        def resolve(read: Sequence[int]) -> list[list[int]]:
            counts = most if own is None else _cut(most, own)
            opened.drafts = [
                [int(token) for token in read[row * width : row * width + count]]
                for row, count in enumerate(counts)
            ]
            return [list(draft) for draft in opened.drafts]

        lengths = own
        if any(count < width for count in most):
            depths = mx.array(most, mx.int32)
            lengths = depths if own is None else mx.minimum(own.astype(mx.int32), depths)
        return DeviceProposal(drafted.tokens, resolve, lengths, drafted.logq)

    def accepted(self, accepted: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Check what is committed; the round stays open until :meth:`end`.

        Args:
            accepted: B ints.

        Returns:
            The drafts of the open round, and how many of each row's were accepted.

        Raises:
            NoOpenRoundError: no round is open, or its device drafts were not resolved.
            ContractError: a count outside its range.
            ClosedError: after :meth:`close`.
        """
        self.check_open("commit")
        if self._open is None:
            raise NoOpenRoundError
        drafts = self._open.drafts
        if drafts is None:
            raise NoOpenRoundError("resolve() of the proposal comes before commit")
        return drafts, row_ints("commit: accepted", accepted, list(map(len, drafts)))

    def end(self) -> None:
        """The open round is committed."""
        self._open = None


def _cut(depths: Sequence[int], lengths: mx.array) -> list[int]:
    """Depths as the drafter cut them; its array was computed with the ids that are read."""
    told: Any = lengths.tolist()
    return [max(0, min(depth, length)) for depth, length in zip(depths, told, strict=True)]
