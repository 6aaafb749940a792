"""Rows of the simulated drafter: each remembers the tokens that it has read, and nothing else.

Shapes: B rows, L tokens read, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
from attrs import define

from specdec.contract import Attachment, ContextKind, PrefillMode, RowCheckpoint, Swap
from specdec.drafting import checks
from specdec.drafting.rounds import Drafted, Rounds
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DeviceProposal, Proposal
    from specdec.drafting.rounds import Asked

__all__ = ["Proposer", "SimulatedRows"]

_SCHEMA = "specdec-bench.simulated/1"


class Proposes(Protocol):
    """What to propose behind one prompt."""

    def drafts(self, emitted: list[int], depth: int, vocab_size: int) -> list[int]:
        """Drafts behind what was emitted."""


class Proposer(Protocol):
    """Who knows what comes next."""

    @property
    def checkpoint_namespace(self) -> str:
        """Identity of stored rows."""

    def script(self, prompt: Sequence[int]) -> Proposes:
        """What to propose behind a prompt."""

    def spend(self, depth: int) -> None:
        """Let the time pass that drafting takes."""


@define(eq=False)
class _Row:
    """What a row has read; its prompt is known once it drafts."""

    tokens: list[int]
    script: Proposes | None = None
    prompt: int = 0  # ids of it

    def emitted(self, pending: int, steps: int, proposer: Proposer) -> list[int]:
        """What was emitted so far, the pending token last, if that is no prompt's."""
        length = len(self.tokens) + 1 - steps
        if self.script is None or self.prompt != length:
            self.prompt = length
            self.script = proposer.script([*self.tokens, pending][:length])
        return [*self.tokens[length:], pending] if steps else []


class SimulatedRows:
    """A group; it reads prompts and decodes.

    Args:
        proposer: knows what comes next.
        vocab_size: ids below it are tokens.
        cold_rows: whether rows may join without a checkpoint.
    """

    def __init__(self, proposer: Proposer, vocab_size: int, *, cold_rows: bool) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._cold_rows = cold_rows
        self._rounds = Rounds(vocab_size)
        self._rows: list[_Row] = []
        self._pending: list[int] = []

    @property
    def namespace(self) -> str:
        """Identity of stored rows."""
        return self._proposer.checkpoint_namespace

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
        """Rows now in the group, B."""
        return len(self._rows)

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build new rows; between rounds.

        Raises:
            CheckpointError: one does not fit.
        """
        self._rounds.between("prepare_append")
        joining = [_Row(self._restored(checkpoint)) for checkpoint in checkpoints]

        def join() -> None:
            if not self._rounds.closed:
                self._rows = [*self._rows, *joining]

        return Swap(join)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Retire and reorder rows; between rounds."""
        self._rounds.between("filter_rows")
        self._rows = [
            self._rows[row] for row in checks.kept_rows("filter_rows", keep, self.row_count)
        ]

    def capture(self, row: int, /) -> RowCheckpoint:
        """The row's tokens; between rounds."""
        self._rounds.between("capture")
        tokens = self._rows[checks.row_number("capture", row, self.row_count)].tokens
        arrays = {"tokens": mx.array(tokens, mx.int32)} if tokens else {}
        return RowCheckpoint(
            namespace=self.namespace,
            processed_tokens=len(tokens),
            attachment=Attachment(schema=_SCHEMA, arrays=arrays),
        )

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of prompts, ``[B, L]``."""
        self._read("prefill", tokens, context, [tokens.shape[-1]] * self.row_count)

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose, ``[B, L]``, of which each row keeps some."""
        self._read("consume", tokens, context, lengths)

    def materialize(self) -> None:
        """Nothing is lazy."""
        self._rounds.check_open("materialize")

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> Sequence[Sequence[int]] | Proposal:
        """Open a round and propose on the host."""
        asked = self._rounds.asked("draft", self.row_count, pending, depths, steps)
        return self._rounds.open_host(asked, self._drafted(asked))

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round and propose on the device."""
        asked = self._rounds.asked("draft_device", self.row_count, pending, depths, steps)
        drafted = self._drafted(asked)
        return None if drafted is None else self._rounds.open_device(asked, drafted)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: each row reads its pending token and its accepted drafts."""
        drafts, counts = self._rounds.accepted(accepted)
        checks.check_no_context("commit", context)
        rows = zip(self._rows, self._pending, drafts, counts, strict=True)
        for row, pending, draft, count in rows:
            row.tokens.extend((pending, *draft[:count]))
        self._rounds.end()

    def close(self) -> None:
        """Let all rows go; any number of times."""
        self._rounds.close()
        self._rows = []

    def _drafted(self, asked: Asked) -> Drafted | None:
        """What comes next in each row, right-padded; ``None`` where nothing is known of any."""
        self._pending = asked.pending
        drafts = []
        for row, pending, depth, steps in zip(
            self._rows, asked.pending, asked.depths, asked.steps, strict=True
        ):
            emitted = row.emitted(pending, steps, self._proposer)
            assert row.script is not None
            drafts.append(row.script.drafts(emitted, depth, self._vocab_size))
        longest = max(map(len, drafts), default=0)
        self._proposer.spend(longest)
        if not longest:
            return None
        padded = [[*draft, *[0] * (longest - len(draft))] for draft in drafts]
        lengths = [len(draft) for draft in drafts]
        cut = mx.array(lengths, mx.int32) if min(lengths) < longest else None
        return Drafted(mx.array(padded, mx.int32), cut)

    def _read(
        self, verb: str, tokens: mx.array, context: mx.array | None, lengths: Sequence[int]
    ) -> None:
        self._rounds.between(verb)
        checks.check_no_context(verb, context)
        chunks = checks.row_tokens(verb, tokens, self.row_count)
        counts = checks.row_ints(f"{verb}: lengths", lengths, [tokens.shape[1]] * self.row_count)
        kept = [chunk[:count] for chunk, count in zip(chunks, counts, strict=True)]
        checks.check_ids(verb, kept, self._vocab_size)
        for row, chunk in zip(self._rows, kept, strict=True):
            row.tokens.extend(chunk)

    def _restored(self, checkpoint: RowCheckpoint | None) -> list[int]:
        if checkpoint is None:
            if self._cold_rows:
                return []
            raise CheckpointError("a cold row cannot decode; capture it from a prefill group")
        if checkpoint.namespace != self.namespace or checkpoint.attachment.schema != _SCHEMA:
            raise CheckpointError(
                f"a checkpoint of {checkpoint.namespace} is none of the simulated drafter; "
                "capture it from one of its rows"
            )
        held = checkpoint.attachment.arrays.get("tokens")
        tokens: list[int] = [] if held is None else held.tolist()  # type: ignore[assignment]
        if len(tokens) != checkpoint.processed_tokens:
            raise CheckpointError(
                f"a checkpoint of {checkpoint.processed_tokens} tokens holds {len(tokens)}; "
                "capture it again"
            )
        return tokens
