"""A group that is driven as the executor drives it, and what its rows have been through.

Shapes: B rows, L tokens read, W = 1 + the longest draft or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from attrs import Factory, define, evolve, frozen

from specdec.contract import DeviceProposal, Proposal, RowCheckpoint, commit_all
from specdec.sampling import SamplingOptions
from specdec.testing.watched import WatchedSamplers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import DraftRowGroup, PendingChange
    from specdec.testing.harness import Harness

__all__ = [
    "Consumed",
    "DrivenGroup",
    "DrivenRow",
    "Kept",
    "Read",
    "RoundDone",
    "Step",
    "host_drafts",
    "resolved",
]

GREEDY = SamplingOptions()


@frozen
class Read:
    """The row read a chunk of its prompt."""

    tokens: tuple[int, ...]


@frozen
class RoundDone:
    """The row went through a round: what it drafted, and how many drafts were accepted."""

    pending: int
    depth: int
    drafts: tuple[int, ...]
    accepted: int


@frozen
class Consumed:
    """The row was given tokens that somebody else chose."""

    tokens: tuple[int, ...]


Step = Read | RoundDone | Consumed


@define
class DrivenRow:
    """What a row has been through.

    Attributes:
        options: how it draws.
        seed: of its draws.
        tokens: everything it has processed, oldest first.
        log: how it came to that.
        drawn: samples drawn so far: the step of its next draw.
    """

    options: SamplingOptions = GREEDY
    seed: int = 0
    tokens: list[int] = Factory(list)
    log: list[Step] = Factory(list)
    drawn: int = 0

    def copy(self) -> DrivenRow:
        """The row as it is now."""
        return evolve(self, tokens=list(self.tokens), log=list(self.log))


@frozen(eq=False)
class Kept:
    """A checkpoint, and the row as it was when it was captured."""

    checkpoint: RowCheckpoint
    row: DrivenRow


@frozen
class _Open:
    pending: tuple[int, ...]
    depths: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]


class DrivenGroup:
    """A decode group, and what its rows have been through.

    Attributes:
        group: the drafter's group.
        rows: the model of its rows, in its order.
        samplers: their draws, as the executor hands them to the drafter.
        round: the open round, or ``None``.
    """

    def __init__(self, harness: Harness, kept: Sequence[Kept]) -> None:
        self.harness = harness
        self.rows = [k.row.copy() for k in kept]
        self.samplers = WatchedSamplers()
        self.samplers.prepare_append([(row.options, row.seed) for row in self.rows]).commit()
        self.round: _Open | None = None
        self.group: DraftRowGroup = harness.grouped.open(
            target=harness.target,
            sampling=self.samplers,
            checkpoints=[k.checkpoint for k in kept],
        )
        self.tell()

    def tell(self) -> None:
        """Show the target's live rows to whoever reads K/V donors."""
        self.harness.target.show([row.tokens for row in self.rows])

    # Membership.

    def prepare(self, kept: Sequence[Kept]) -> PendingChange:
        """The drafter's half of a join, not committed."""
        return self.group.prepare_append([k.checkpoint for k in kept])

    def join(self, kept: Sequence[Kept]) -> None:
        """Rows join, in two phases, the samplers first, as in the executor."""
        rows = [k.row.copy() for k in kept]
        samplers = [(row.options, row.seed) for row in rows]
        commit_all([lambda: self.samplers.prepare_append(samplers), lambda: self.prepare(kept)])
        self.rows += rows
        self.tell()

    def filter(self, keep: Sequence[int]) -> None:
        """Rows leave and change places."""
        self.group.filter_rows(keep)
        self.samplers.filter_rows(keep)
        self.rows = [self.rows[row] for row in keep]
        self.tell()

    def capture(self, row: int) -> Kept:
        """A row's checkpoint, and the row."""
        return Kept(self.group.capture(row), self.rows[row].copy())

    # Rounds.

    def asked(
        self, pending: Sequence[int], depths: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Arguments of a draft: lists cut to the rows there are, with each row's step."""
        size = len(self.rows)
        return list(pending[:size]), list(depths[:size]), [row.drawn for row in self.rows]

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], *, on_device: bool = False
    ) -> list[tuple[int, ...]]:
        """Open a round.

        Args:
            pending: at least B ids; the first B are used.
            depths: at least B ints; the first B are used.
            on_device: ask ``draft_device`` first, as the executor does where it can.

        Returns:
            B tuples of ids, whichever way they came.
        """
        asked = self.asked(pending, depths)
        self.tell()
        proposed = None
        if on_device and any(asked[1]):  # it is not asked where no row may draft
            device: Callable[..., DeviceProposal | None] = self.group.draft_device  # type: ignore[attr-defined]  # the caller knows it is offered
            proposed = device(*asked)
        drafts = (
            host_drafts(self.group.draft(*asked))
            if proposed is None
            else resolved(proposed, len(self.rows))
        )
        self.round = _Open(tuple(asked[0]), tuple(asked[1]), tuple(drafts))
        return drafts

    def commit(self, accepted: Sequence[int]) -> list[int]:
        """End the round.

        Args:
            accepted: at least B ints; each is cut to the length of its row's draft.

        Returns:
            The counts that were committed.
        """
        opened = self.round
        assert opened is not None
        counts = [
            min(many, len(draft)) for many, draft in zip(accepted, opened.drafts, strict=False)
        ]
        self.group.commit(counts, self.window_context())
        for row, pending, depth, draft, kept in zip(
            self.rows, opened.pending, opened.depths, opened.drafts, counts, strict=True
        ):
            row.tokens += [pending, *draft[:kept]]
            row.log.append(RoundDone(pending, depth, draft, kept))
            row.drawn += 1 + kept
        self.round = None
        self.tell()
        return counts

    def consume(self, chunks: Sequence[Sequence[int]]) -> None:
        """Give each row tokens that somebody else chose; lengths may differ."""
        width = max(map(len, chunks), default=0)
        padded = [[*chunk, *[chunk[-1] if chunk else 0] * (width - len(chunk))] for chunk in chunks]
        tokens = mx.array(padded, mx.int32).reshape(len(chunks), width)
        context = self.harness.context([row.tokens for row in self.rows], chunks, width)
        consume: Callable[..., None] = self.group.consume  # type: ignore[attr-defined]  # as above
        consume(tokens, context, [len(chunk) for chunk in chunks])
        for row, chunk in zip(self.rows, chunks, strict=True):
            row.tokens += chunk
            row.drawn += len(chunk)
            if chunk:
                row.log.append(Consumed(tuple(chunk)))
        self.tell()

    def window_context(self) -> mx.array | None:
        """The verify window's hidden states ``[B, W, ·]``, with junk behind each row's own.

        W is 1 + the longest draft, or one more, as where windows have one width.
        """
        opened = self.round
        assert opened is not None
        windows = [
            (head, *draft) for head, draft in zip(opened.pending, opened.drafts, strict=True)
        ]
        width = max(map(len, windows), default=0) + sum(opened.pending) % 2
        return self.harness.context([row.tokens for row in self.rows], windows, width)

    def close(self) -> None:
        """Close the drafter's group."""
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_drafts(proposed: Sequence[Sequence[int]] | Proposal) -> list[tuple[int, ...]]:
    """The ids of a host proposal."""
    rows = proposed.tokens if isinstance(proposed, Proposal) else proposed
    return [tuple(int(token) for token in row) for row in rows]


def resolved(proposal: DeviceProposal, rows: int) -> list[tuple[int, ...]]:
    """The ids of a device proposal, cut by its lengths, and resolved as the executor does."""
    read: Any = proposal.tokens.tolist()
    width = proposal.tokens.shape[1]
    lengths: Any = [width] * rows if proposal.lengths is None else proposal.lengths.tolist()
    told = proposal.resolve([token for row in read for token in row])
    drafts = [tuple(row[:length]) for row, length in zip(read, lengths, strict=True)]
    assert [tuple(row) for row in told] == drafts, (
        f"resolve() returned {[list(row) for row in told]}, but tokens cut by lengths are "
        f"{[list(row) for row in drafts]}"
    )
    return drafts
