"""Rows of the n-gram drafter: one :class:`NgramHistory` each, on the host.

Rows share nothing, so a row drafts the same in a group as alone. A history holds exactly the
tokens that the target's row has read: ``draft`` looks the pending token up without storing it, and
``commit`` stores it with the accepted drafts. A rejected draft needs no undoing, because it was
never stored.

Shapes: B rows, L tokens read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import ContextKind, PrefillMode, Swap
from specdec.drafting import checks
from specdec.errors import (
    CheckpointError,
    ClosedError,
    NoOpenRoundError,
    RoundOpenError,
)
from specdec_ngram.attachment import restore, store
from specdec_ngram.history import NgramHistory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint

__all__ = ["NgramRows"]


@frozen(eq=False)
class _Round:
    """An open round, with its own rows: a row that joins meanwhile takes no part in it."""

    rows: tuple[NgramHistory, ...]
    pending: list[int]
    drafts: list[tuple[int, ...]]


class NgramRows:
    """A group of n-gram rows; it reads prompts and decodes.

    Args:
        namespace: the provider's ``checkpoint_namespace``.
        vocab_size: ids below it are tokens.
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.
        cold_rows: whether rows may join without a checkpoint, as in a prefill group.
    """

    def __init__(
        self, *, namespace: str, vocab_size: int, max_ngram: int, min_ngram: int, cold_rows: bool
    ) -> None:
        self._namespace = namespace
        self._vocab_size = vocab_size
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._cold_rows = cold_rows
        self._rows: list[NgramHistory] = []
        self._round: _Round | None = None
        self._closed = False

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._namespace

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """None of the target's layers."""
        return ()

    @property
    def context(self) -> ContextKind:
        """No hidden states of the target."""
        return ContextKind.NONE

    @property
    def prefill_mode(self) -> PrefillMode:
        """Target and drafter read all but the last prompt token."""
        return PrefillMode.TAIL_SPLIT

    @property
    def row_count(self) -> int:
        """Rows now in the group, B; 0 after ``close``."""
        return len(self._rows)

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the histories of new rows without touching the live ones. Between rounds.

        Args:
            checkpoints: one per new row, borrowed; ``None`` is a cold row, in prefill groups only.

        Raises:
            CheckpointError: one of them does not fit; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("prepare_append")
        joining = [self._build(checkpoint) for checkpoint in checkpoints]

        def join() -> None:
            if not self._closed:
                self._rows = [*self._rows, *joining]

        return Swap(join, joining.clear)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Retire and reorder rows. Between rounds.

        Args:
            keep: old row numbers in their new order; ``[]`` drains the group.

        Raises:
            RowIndexError: a number twice, negative or out of range; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("filter_rows")
        kept = checks.kept_rows("filter_rows", keep, self.row_count)
        self._rows = [self._rows[row] for row in kept]

    def capture(self, row: int, /) -> RowCheckpoint:
        """The row's tokens, in an array of their own. Between rounds.

        Args:
            row: the row's number; a row that has read nothing is captured too.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("capture")
        history = self._rows[checks.row_number("capture", row, self.row_count)]
        return store(history.tokens, self._namespace)

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read the chunk that the target has just read. Between rounds.

        Args:
            tokens: ``[B, L]`` ids, borrowed.
            context: ``None``.

        Raises:
            ContractError: a wrong shape or type, an id outside the vocabulary, or a context;
                nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("prefill")
        checks.check_no_context("prefill", context)
        chunks = checks.row_tokens("prefill", tokens, self.row_count)
        checks.check_ids("prefill", chunks, self._vocab_size)
        for history, chunk in zip(self._rows, chunks, strict=True):
            history.extend(chunk)

    def materialize(self) -> None:
        """Nothing to do: restored tokens are copied to the host when their row is prepared.

        Raises:
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("materialize")

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]]:
        """Open a round, and propose for each row what followed its last tokens before.

        Args:
            pending: B ids, not yet read by the target.
            depths: B ints, the most each row may propose.
            steps: B ints; a copy is not drawn, so they change nothing.

        Returns:
            B lists of ``depth`` ids, or of none where no n-gram matches.

        Raises:
            ContractError: a list of the wrong length, a negative number, or an id outside the
                vocabulary; no round is opened.
            RoundOpenError: a round is open.
            ClosedError: after ``close``.
        """
        self._between_rounds("draft")
        heads, drafts = self._propose(pending, depths, steps)
        self._round = _Round(tuple(self._rows), heads, [tuple(draft) for draft in drafts])
        return drafts

    def look_up(self, pending: Sequence[int], depths: Sequence[int], /) -> list[list[int]]:
        """What ``draft`` would propose; changes nothing. Between rounds.

        Args:
            pending: B ids, not yet read by the target.
            depths: B ints, the most each row may propose.

        Raises:
            ContractError: as ``draft``.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("look_up")
        return self._propose(pending, depths, [0] * len(pending))[1]

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The start of what ``draft`` would propose; changes nothing. Between rounds.

        Args:
            pending: B ids, not yet read by the target.
            depths: B ints, the most each row may propose.
            steps: B ints; they change nothing.

        Returns:
            ``[B, d]`` int32 ids, d the length of the shortest proposal; ``None`` if that is 0.

        Raises:
            ContractError: as ``draft``.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("preview")
        _, drafts = self._propose(pending, depths, steps)
        width = min(map(len, drafts), default=0)
        return mx.array([draft[:width] for draft in drafts], dtype=mx.int32) if width else None

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: each row reads its pending token and its accepted drafts.

        Args:
            accepted: B ints, 0 to the length that was proposed.
            context: ``None``.

        Raises:
            NoOpenRoundError: no round is open.
            ContractError: a count outside its range, a list of the wrong length, or a context;
                nothing changed and the round stays open.
            ClosedError: after ``close``.
        """
        if self._closed:
            raise ClosedError("commit")
        if self._round is None:
            raise NoOpenRoundError("commit")
        current = self._round
        checks.check_no_context("commit", context)
        proposed = [len(draft) for draft in current.drafts]
        counts = checks.row_ints("commit: accepted", accepted, proposed)
        for i, row in enumerate(current.rows):
            row.extend((current.pending[i], *current.drafts[i][: counts[i]]))
        self._round = None

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose. Between rounds.

        Args:
            tokens: ``[B, L]`` ids, borrowed, right-padded with anything.
            context: ``None``.
            lengths: B ints, 0 to L, how many of its tokens each row keeps.

        Raises:
            ContractError: a wrong shape, type or length, an id outside the vocabulary, or a
                context; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """
        self._between_rounds("consume")
        checks.check_no_context("consume", context)
        chunks = checks.row_tokens("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        kept = [chunk[:length] for chunk, length in zip(chunks, counts, strict=True)]
        checks.check_ids("consume", kept, self._vocab_size)
        for history, chunk in zip(self._rows, kept, strict=True):
            history.extend(chunk)

    def close(self) -> None:
        """Let all rows go. At any time, any number of times."""
        self._closed = True
        self._round = None
        self._rows = []

    def _between_rounds(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(verb)
        if self._round is not None:
            raise RoundOpenError(verb)

    def _propose(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[list[int], list[list[int]]]:
        """The checked pending tokens, and each row's proposal."""
        heads = checks.row_ints("pending", pending, [self._vocab_size - 1] * self.row_count)
        asked = checks.row_ints("depths", depths, [None] * self.row_count)
        checks.row_ints("steps", steps, [None] * self.row_count)
        rows = zip(self._rows, heads, asked, strict=True)
        return heads, [row.propose(head, depth) for row, head, depth in rows]

    def _build(self, checkpoint: RowCheckpoint | None) -> NgramHistory:
        if checkpoint is not None:
            tokens = restore(checkpoint, self._namespace, self._vocab_size)
        elif self._cold_rows:
            tokens = []
        else:
            raise CheckpointError("a cold row cannot decode; capture it from a prefill group")
        return NgramHistory(tokens, max_ngram=self._max_ngram, min_ngram=self._min_ngram)
