"""One round of a chain: who was asked, who won which row, and what all proposed together.

Shapes: B rows, d drafts, V vocabulary, N ids of a listed vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, evolve, field

from specdec.contract import DeviceProposal, Proposal
from specdec.errors import ContractError, blamed_on

if TYPE_CHECKING:
    from specdec.drafting import Asked

__all__ = ["Turn"]


@define(eq=False)
class Turn:
    """A round that was opened.

    Attributes:
        asked: what it was opened with.
        vocab_size: V.
        listed: per member the ``[N]`` ids of its draft vocabulary, or ``None``.
        winners: per row the member whose proposal is taken, or ``None`` for nobody's yet.
        drafts: per row what that member proposed, as it said it.
        members: those whose own round is open.
        logq: by member what its drafts were drawn from, where it says so.
        resolved: whether ``drafts`` are known on the host.
    """

    asked: Asked
    vocab_size: int
    listed: Sequence[mx.array | None]
    winners: list[int | None] = field(init=False)
    drafts: list[list[Any]] = field(init=False)
    members: set[int] = field(factory=set)
    logq: dict[int, mx.array] = field(factory=dict)
    resolved: bool = True

    def __attrs_post_init__(self) -> None:
        self.winners = [None] * len(self.asked.pending)
        self.drafts = [[] for _ in self.asked.pending]

    @property
    def longest(self) -> int:
        """The most that was said for any row."""
        return max(map(len, self.drafts), default=0)

    @property
    def lengths(self) -> list[int]:
        """Per row how many of its drafts can be verified: those before the first that is no id."""
        known = [[self._known(token) for token in draft] for draft in self.drafts]
        return [(*ids, self.vocab_size).index(self.vocab_size) for ids in known]

    def take(self, member: int, name: str, proposal: object, depths: Sequence[int]) -> None:
        """What a member proposed on the host; it wins the rows that it proposes something for.

        Args:
            member: its number.
            name: its name, for messages.
            proposal: what its ``draft`` returned.
            depths: B ints, what it was asked for.

        Raises:
            ContractError: no list of ids for each row.
        """
        self.members.add(member)
        logq = proposal.logq if isinstance(proposal, Proposal) else None
        said = proposal.tokens if isinstance(proposal, Proposal) else proposal
        for row, draft in enumerate(_lists(said, depths, f"draft() of {name}")):
            if draft:
                self.winners[row], self.drafts[row] = member, draft
        if logq is not None:
            self.logq[member] = logq

    def on_host(self, rejecting: bool) -> list[list[Any]] | Proposal:
        """All members' proposals as one.

        Args:
            rejecting: whether anybody asks what drafts were drawn from.
        """
        drafts = [list(draft) for draft in self.drafts]
        if not rejecting or not self.logq or not self.longest:
            return drafts
        width = self.longest
        known = [[*map(self._known, d), *[self.vocab_size] * (width - len(d))] for d in drafts]
        return Proposal(drafts, self._logq(mx.array(known, mx.int32)))

    def on_device(
        self, member: int, name: str, device: DeviceProposal, depths: Sequence[int], rejecting: bool
    ) -> DeviceProposal:
        """All members' proposals as one, of which the last one's stay on the device.

        Args:
            member: the number of the last.
            name: its name, for messages.
            device: what its ``draft_device`` returned.
            depths: B ints, what it was asked for.
            rejecting: whether anybody asks what drafts were drawn from.
        """
        self.members.add(member)
        self.resolved = False
        own = device.tokens.shape[1]
        most = [min(depth, own) for depth in depths]
        before, width = self.longest, max(self.longest, own)
        for row, depth in enumerate(depths):
            if depth:
                self.winners[row] = member

        def resolve(read: Sequence[int]) -> list[list[Any]]:
            # What stands in rows that others won is theirs; it was asked for nothing there.
            mine = [
                token
                for row in range(len(depths))
                for token in read[row * width : row * width + own]
            ]
            with blamed_on(name):
                read_by_it = device.resolve(mine)
            said = _lists(read_by_it, most, f"resolve() of {name}")
            for row, draft in enumerate(said):
                if self.winners[row] == member:
                    self.drafts[row] = draft
            self.resolved = True
            return [list(draft) for draft in self.drafts]

        if device.logq is not None:
            self.logq[member] = device.logq
        tokens, lengths = device.tokens, device.lengths
        if before:
            tokens = self._with_host_drafts(tokens, width)
        if before or any(count < own for count in most):
            lengths = self._lengths(lengths, most)
        logq = self._logq(tokens) if rejecting and self.logq else None
        return evolve(device, tokens=tokens, lengths=lengths, logq=logq, resolve=resolve)

    def _with_host_drafts(self, tokens: mx.array, width: int) -> mx.array:
        """``[B, width]``: the device's ids, in rows that others won theirs; V for what is no id."""
        ids = [[self._known(token) for token in draft] for draft in self.drafts]
        rows = [draft + [0] * (width - len(draft)) for draft in ids]
        won = mx.array([bool(draft) for draft in self.drafts])[:, None]
        padded = mx.pad(tokens.astype(mx.int32), [(0, 0), (0, width - tokens.shape[1])])
        return mx.where(won, mx.array(rows, mx.int32), padded)

    def _lengths(self, lengths: mx.array | None, most: Sequence[int]) -> mx.array:
        """``[B]`` drafts of each row."""
        counts = mx.array([len(d) or m for d, m in zip(self.drafts, most, strict=True)], mx.int32)
        if lengths is None:
            return counts
        won = mx.array([bool(draft) for draft in self.drafts])
        return mx.where(won, counts, mx.minimum(lengths.astype(mx.int32), counts))

    def _logq(self, ids: mx.array) -> mx.array:
        """``[B, d, V]`` of drafts ``[B, d]``.

        Those of a member that does not say are one-hot: what it proposed was certain.
        """
        width = ids.shape[1]
        hot = mx.arange(self.vocab_size) == ids[..., None]
        whole = mx.where(hot, 0.0, -mx.inf).astype(mx.float32)
        for member, logq in self.logq.items():
            mine = mx.array([winner == member for winner in self.winners])[:, None, None]
            drawn = self._everywhere(logq[:, :width], self.listed[member])
            drawn = mx.pad(drawn, [(0, 0), (0, width - drawn.shape[1]), (0, 0)])
            whole = mx.where(mine, drawn, whole)
        return whole

    def _known(self, draft: Any) -> int:
        """A drafted id; V, which no id is, for anything else."""
        try:
            token = operator.index(draft)
        except TypeError:
            return self.vocab_size
        return token if 0 <= token < self.vocab_size else self.vocab_size

    def _everywhere(self, logq: mx.array, listed: mx.array | None) -> mx.array:
        """``[B, d, V]``, with ``-inf`` at what a member cannot draw."""
        if listed is None or logq.shape[-1] != listed.size or listed.size == self.vocab_size:
            return logq
        every = mx.full((*logq.shape[:2], self.vocab_size), -mx.inf, logq.dtype)
        return mx.put_along_axis(every, mx.broadcast_to(listed, logq.shape), logq, axis=-1)


def _lists(said: object, most: Sequence[int], what: str) -> list[list[Any]]:
    """B lists, each cut to what was asked for; the executor checks the ids."""
    if not isinstance(said, Sequence) or isinstance(said, str) or len(said) != len(most):
        raise ContractError(f"{what} returned no {len(most)} lists of ids")
    if any(not isinstance(row, Sequence) or isinstance(row, str) for row in said):
        raise ContractError(f"{what} returned what is no list of ids for a row")
    return [list(row[:count]) for row, count in zip(said, most, strict=True)]
