"""Driving a drafter as the executor does, and keeping the log that a lone row is driven by.

The kit's one oracle: *a row in a group drafts what a row alone drafts* that was driven through the
same log of reads and rounds. ``DrivenGroup`` drives a group and keeps the rows' logs; ``Harness``
makes groups, lone rows and checkpoints for one drafter.

Shapes: B rows, L tokens read, W = 1 + the longest draft, H features of the declared context.
"""

from __future__ import annotations

import copy
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from attrs import Factory, define, evolve, frozen

from specdec.contract import (
    ContextKind,
    DeviceProposal,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    commit_all,
)
from specdec.sampling import SamplingOptions
from specdec.testing.watched import WatchedSamplers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import (
        DraftPrefillGroup,
        DraftProvider,
        DraftRowGroup,
        PendingChange,
    )
    from specdec.testing.target import TinyTarget

__all__ = ["Consumed", "DrivenGroup", "DrivenRow", "Harness", "Kept", "Read", "RoundDone", "Step"]

GREEDY = SamplingOptions()
_junk = count(1)


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


class Harness:
    """One drafter on one target, driven by the kit.

    Args:
        provider: the drafter.
        target: the tiny target.
        max_rows: rows that a group has at most.
        max_depth: drafts that a row is asked for at most.
    """

    def __init__(
        self, provider: DraftProvider, target: TinyTarget, *, max_rows: int, max_depth: int
    ) -> None:
        self.provider = provider
        self.grouped = provider.grouped
        self.target = target
        self.max_rows = max_rows
        self.max_depth = max_depth
        with self.prefill_group([None]) as probe:
            self.kind = ContextKind(probe.context)
            self.taps = tuple(probe.tap_layers)
            self.mode = PrefillMode(probe.prefill_mode)
        if not target.can_tap(self.taps):
            layers = target.hidden_taps and target.hidden_taps.layer_count
            raise AssertionError(
                f"the group taps the layers {self.taps}, but the target has layers 0 to {layers}, "
                "each at most once; say so in target_tap_layers()"
            )

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.vocab_size

    @property
    def numeric(self) -> bool:
        """Whether an example costs forwards."""
        return self.kind is not ContextKind.NONE or self.provider.weight_bytes > 0

    @property
    def shortest(self) -> int:
        """Tokens that a prompt has read at least before a row decodes."""
        return int(self.mode is PrefillMode.FULL)

    def context(
        self, before: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], width: int
    ) -> mx.array | None:
        """Hidden states of chunks that follow what each row has read.

        Args:
            before: B lists of ids.
            chunks: B lists of ids, each up to ``width`` long.
            width: positions to give; behind a row's own there is junk that differs each time,
                so that a drafter that reads it gives itself away.

        Returns:
            ``[B, width, ·]``, or ``None`` where the drafter declares no context.
        """
        if self.kind is ContextKind.NONE or not chunks:
            return None
        rows = []
        for held, chunk in zip(before, chunks, strict=True):
            if not chunk:
                known = self.target.hidden((0,), self.kind, self.taps)[:, :0]
            else:
                known = self.target.hidden((*held, *chunk), self.kind, self.taps)[:, len(held) :]
            junk = mx.full((1, width - len(chunk), known.shape[2]), 0.37 * next(_junk))
            rows.append(mx.concatenate([known, junk.astype(known.dtype)], axis=1))
        return mx.concatenate(rows, axis=0)

    # Prompts.

    def prefill_group(self, checkpoints: Sequence[RowCheckpoint | None]) -> _Closing:
        """A prefill group that closes itself."""
        return _Closing(self.grouped.open_prefill(target=self.target, checkpoints=checkpoints))

    def read(
        self, group: DraftPrefillGroup, rows: Sequence[DrivenRow], chunks: Sequence[Sequence[int]]
    ) -> None:
        """Every row of a prefill group reads a chunk; all chunks have one length."""
        [width] = {len(chunk) for chunk in chunks}
        if not width:
            return
        context = self.context([row.tokens for row in rows], chunks, width)
        group.prefill(mx.array([list(chunk) for chunk in chunks], mx.int32), context)
        for row, chunk in zip(rows, chunks, strict=True):
            row.tokens += chunk
            row.log.append(Read(tuple(chunk)))

    def cold(self, tokens: Sequence[int], *, cut: int = 0, row: DrivenRow | None = None) -> Kept:
        """A row that reads its prompt from nothing.

        Args:
            tokens: what it reads; may be empty where the drafter shares the tail.
            cut: length of the first of two chunks; 0 for one chunk.
            row: its options and seed.
        """
        fresh = DrivenRow() if row is None else evolve(row, tokens=[], log=[], drawn=0)
        cut = cut if 0 < cut < len(tokens) else len(tokens)
        with self.prefill_group([None]) as group:
            for chunk in (tokens[:cut], tokens[cut:]):
                self.read(group, [fresh], [chunk])
            group.materialize()
            return Kept(group.capture(0), fresh)

    # Rows.

    def open(self, kept: Sequence[Kept]) -> DrivenGroup:
        """A decode group of these rows."""
        return DrivenGroup(self, kept)

    def alone(self, row: DrivenRow) -> DrivenGroup:
        """A group of one row, cold, driven through the log of another row."""
        reads = [step for step in row.log if isinstance(step, Read)]
        fresh = evolve(row, tokens=[], log=[], drawn=0)
        with self.prefill_group([None]) as prefill:
            for chunk in reads:
                self.read(prefill, [fresh], [chunk.tokens])
            prefill.materialize()
            lone = self.open([Kept(prefill.capture(0), fresh)])
        for number, step in enumerate(row.log):
            if isinstance(step, Consumed):
                lone.consume([step.tokens])
            elif isinstance(step, RoundDone):
                [draft] = lone.draft([step.pending], [step.depth])
                assert draft == step.drafts, (
                    f"a row in a group drafted {list(step.drafts)}, but the same row driven alone "
                    f"through the same log drafts {list(draft)} (step {number} of {row.log})"
                )
                lone.commit([step.accepted])
        return lone

    def next_of(self, row: DrivenRow, pending: int, depth: int) -> tuple[int, ...]:
        """What a lone row with this log would draft next."""
        with self.alone(row) as lone:
            [draft] = lone.draft([pending], [depth])
            return draft

    def next_of_cold(self, row: DrivenRow, pending: int, depth: int) -> tuple[int, ...]:
        """What a cold row that read this row's tokens would draft next."""
        fresh = self.cold(row.tokens, row=row)
        fresh.row.drawn = row.drawn
        with self.open([fresh]) as lone:
            [draft] = lone.draft([pending], [depth])
            return draft

    def same_state(
        self, one: RowCheckpoint, other: RowCheckpoint, *, beside_others: bool = False
    ) -> bool:
        """Whether two checkpoints hold the same.

        Args:
            one: a checkpoint.
            other: another.
            beside_others: whether the two came from groups of different size: then, on a host
                where a row's bits depend on that, they are compared with a margin of 1 %.
        """
        exactly = not beside_others or self.target.keeps_bits
        return (
            one.namespace == other.namespace
            and one.processed_tokens == other.processed_tokens
            and one.attachment.schema == other.attachment.schema
            and dict(one.attachment.metadata) == dict(other.attachment.metadata)
            and set(one.attachment.arrays) == set(other.attachment.arrays)
            and all(
                held.shape == other.attachment.arrays[name].shape
                and held.dtype == other.attachment.arrays[name].dtype
                and _same(held, other.attachment.arrays[name], exactly)
                for name, held in one.attachment.arrays.items()
            )
        )

    def on(self, target: TinyTarget) -> Harness:
        """The same drafter on another target."""
        return Harness(self.provider, target, max_rows=self.max_rows, max_depth=self.max_depth)


def _same(one: mx.array, other: mx.array, exactly: bool) -> bool:
    if exactly or not mx.issubdtype(one.dtype, mx.floating):
        numbers = mx.issubdtype(one.dtype, mx.inexact)
        return bool(mx.array_equal(one, other, equal_nan=numbers))
    close = mx.allclose(
        one.astype(mx.float32), other.astype(mx.float32), rtol=1e-2, atol=1e-2, equal_nan=True
    )
    return bool(close)


class _Closing:
    """A prefill group as a context manager that closes it."""

    def __init__(self, group: DraftPrefillGroup) -> None:
        self._group = group

    def __enter__(self) -> DraftPrefillGroup:
        return self._group

    def __exit__(self, *_: object) -> None:
        self._group.close()


def frozen_copy(checkpoint: RowCheckpoint) -> RowCheckpoint:
    """A copy that shares no array object with the checkpoint."""
    attachment = checkpoint.attachment
    arrays = {name: mx.array(held) for name, held in attachment.arrays.items()}
    mx.eval(arrays)
    return evolve(
        checkpoint,
        attachment=evolve(
            attachment, arrays=arrays, metadata=copy.deepcopy(dict(attachment.metadata))
        ),
    )
