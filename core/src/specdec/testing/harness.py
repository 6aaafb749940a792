"""One drafter on one target: its groups, its lone rows, and the hidden states that they are given.

The kit's one oracle: *a row in a group drafts what a row alone drafts* that was driven through the
same log of reads and rounds.

Shapes: B rows, L tokens read, W = 1 + the longest draft or more.
"""

from __future__ import annotations

import copy
from itertools import count
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve

from specdec.contract import ContextKind, PrefillMode, RowCheckpoint
from specdec.testing.driven import Consumed, DrivenGroup, DrivenRow, Kept, Read, RoundDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DraftPrefillGroup, DraftProvider
    from specdec.testing.target import TinyTarget

__all__ = ["Harness", "frozen_copy"]

_junk = count(1)


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
