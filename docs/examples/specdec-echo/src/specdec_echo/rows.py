"""Rows of the echo drafter: the verbs of the contract, over one ``History`` a row.

Every verb checks first and changes afterwards, so a call that is refused changes nothing.

Shapes: B rows, L tokens read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from specdec.contract import ContextKind, PrefillMode, Swap, check_keep
from specdec.errors import (
    CheckpointError,
    ClosedError,
    ContractError,
    NoOpenRoundError,
    RoundOpenError,
    RowIndexError,
)
from specdec_echo.history import History, restore

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.contract import RowCheckpoint

__all__ = ["EchoRows"]


class EchoRows:
    """A group of rows; it reads prompts and decodes.

    Args:
        namespace: the provider's ``checkpoint_namespace``.
        memory: how many of its last tokens a row keeps.
        cold_rows: whether rows may join without a checkpoint, as in a prefill group.
    """

    def __init__(self, namespace: str, memory: int, *, cold_rows: bool) -> None:
        self._namespace = namespace
        self._memory = memory
        self._cold_rows = cold_rows
        self._rows: list[History] = []
        # Inside a round: for each row its pending token and its drafts.
        self._windows: list[tuple[int, ...]] | None = None
        self._closed = False

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._namespace

    @property
    def context(self) -> ContextKind:
        """The rows read tokens alone, no hidden states."""
        return ContextKind.NONE

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """None of the target's layers."""
        return ()

    @property
    def prefill_mode(self) -> PrefillMode:
        """The last prompt token is the first pending one."""
        return PrefillMode.TAIL_SPLIT

    @property
    def row_count(self) -> int:
        """Rows now in the group, B."""
        return len(self._rows)

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build new rows; they are seen after ``commit``. Raises ``CheckpointError``."""
        self._check_between_rounds("prepare_append")
        joining = [self._build(checkpoint) for checkpoint in checkpoints]

        def join() -> None:
            if not self._closed:
                self._rows = [*self._rows, *joining]

        return Swap(join)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep the rows with these numbers, in this order. Raises ``RowIndexError``."""
        self._check_between_rounds("filter_rows")
        check_keep(keep, self.row_count)
        self._rows = [self._rows[row] for row in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        """The state of one row. Raises ``RowIndexError``."""
        self._check_between_rounds("capture")
        if not 0 <= row < self.row_count:
            raise RowIndexError("capture", row, self.row_count)
        return self._rows[row].store(self._namespace)

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk ``[B, L]`` of the prompts. Raises ``ContractError``."""
        self._check_between_rounds("prefill")
        if tokens.ndim != 2 or tokens.shape[0] != self.row_count or context is not None:
            raise ContractError(f"prefill: pass tokens [{self.row_count}, L] and no context")
        chunks = cast("list[list[int]]", tokens.tolist())
        self._rows = [
            row.read(chunk, self._memory) for row, chunk in zip(self._rows, chunks, strict=True)
        ]

    def materialize(self) -> None:
        """Nothing to do: a restored row is a copy on the host."""
        self._check_between_rounds("materialize")

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]]:
        """Open a round: B lists of at most ``depths`` ids. Raises ``ContractError``."""
        self._check_between_rounds("draft")
        if not len(pending) == len(depths) == len(steps) == self.row_count:
            raise ContractError(f"draft: pass {self.row_count} numbers, one for each row")
        asked = zip(self._rows, pending, depths, strict=True)
        drafts = [row.draft(head, depth) for row, head, depth in asked]
        self._windows = [(head, *draft) for head, draft in zip(pending, drafts, strict=True)]
        return drafts

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: row i reads its pending token and ``accepted[i]`` of its drafts."""
        if self._closed:
            raise ClosedError("commit")
        windows = self._windows
        if windows is None:
            raise NoOpenRoundError("commit")
        drafted = [len(window) - 1 for window in windows]
        if len(accepted) != len(drafted) or context is not None:
            raise ContractError(f"commit: pass {len(drafted)} numbers and no context")
        if any(not 0 <= kept <= most for kept, most in zip(accepted, drafted, strict=True)):
            raise ContractError(f"commit: got {list(accepted)} where {drafted} were drafted")
        self._rows = [
            row.read(window[: kept + 1], self._memory)
            for row, window, kept in zip(self._rows, windows, accepted, strict=True)
        ]
        self._windows = None

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens ``[B, L]`` that others chose, ``lengths[i]`` of row i, as if committed."""
        self._check_between_rounds("consume")
        if tokens.ndim != 2 or tokens.shape[0] != self.row_count or context is not None:
            raise ContractError(f"consume: pass tokens [{self.row_count}, L] and no context")
        width = tokens.shape[1]
        if len(lengths) != self.row_count or any(not 0 <= count <= width for count in lengths):
            raise ContractError(f"consume: got {list(lengths)} for tokens of {tokens.shape}")
        chunks = cast("list[list[int]]", tokens.tolist())
        self._rows = [
            row.read(chunk[:count], self._memory)  # behind that is padding
            for row, chunk, count in zip(self._rows, chunks, lengths, strict=True)
        ]

    def close(self) -> None:
        """Let all rows go. At any time, any number of times."""
        self._closed = True
        self._windows = None
        self._rows = []

    def _build(self, checkpoint: RowCheckpoint | None) -> History:
        if checkpoint is not None:
            return restore(checkpoint, self._namespace, self._memory)
        if not self._cold_rows:
            raise CheckpointError("a cold row cannot decode; let it read its prompt first")
        return History()

    def _check_between_rounds(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(verb)
        if self._windows is not None:
            raise RoundOpenError(verb)
