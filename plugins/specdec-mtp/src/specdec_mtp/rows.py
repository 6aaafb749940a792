"""A head's rows as the contract has them: every verb checks first, and changes afterwards.

Shapes: B rows, L positions, W = 1 + the longest draft, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define

from specdec.contract import DeviceProposal, PrefillMode, Proposal, Swap, check_keep
from specdec.drafting import checks
from specdec.errors import CheckpointError, ClosedError, NoOpenRoundError, RoundOpenError
from specdec_mtp.attachment import HeadRow, restore, store
from specdec_mtp.live import LiveRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import ContextKind, RecurrentMtp, RowCheckpoint
    from specdec_mtp.live import HeadSettings
    from specdec_mtp.select import Choice, Chooser

__all__ = ["HeadRows"]


@define(eq=False)
class _Round:
    depths: list[int]
    drafts: list[list[int]] | None = None  # None while they are on the device alone

    @property
    def steps(self) -> int:
        """Windows of one position that the head went ahead by, behind the first."""
        return max(max(self.depths, default=0) - 1, 0)


class HeadRows:
    """A group of rows that reads prompts and decodes.

    Args:
        settings: the head and how it is used.
        port: the target's embedding and head.
        vocab_size: V.
        choose: how tokens are drafted; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.FULL
    tap_layers: tuple[int, ...] = ()

    def __init__(
        self,
        settings: HeadSettings,
        port: RecurrentMtp,
        vocab_size: int,
        choose: Chooser | None,
    ) -> None:
        self._settings = settings
        self._hidden_size = port.hidden_size
        self._vocab_size = vocab_size
        self._choose = choose
        self._live = LiveRows(settings, port)
        self._round: _Round | None = None
        self._closed = False

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._settings.namespace

    @property
    def context(self) -> ContextKind:
        """The target's hidden states that the head reads."""
        return self._settings.context

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._live.tokens)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows' state; see the contract."""
        self._between_rounds("prepare_append")
        if not checkpoints:
            return Swap(lambda: None)
        change = self._live.prepare_append([self._restored(each) for each in checkpoints])

        def join() -> None:
            if not self._closed:
                change.commit()

        return Swap(join, change.discard)

    def _restored(self, checkpoint: RowCheckpoint | None) -> HeadRow:
        settings = self._settings
        caches = list(settings.module.family.caches())
        if checkpoint is None:
            row = HeadRow(0, caches, (), None)
        else:
            row = restore(checkpoint, settings.namespace, settings.layout, caches)
            checks.check_ids("checkpoint", [row.unread], self._vocab_size)
        if self._choose is not None and row.hidden is None:
            raise CheckpointError(
                "a row that has read nothing has no hidden state to draft from; read its prompt"
            )
        return row

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows, in the order that is asked for; see the contract."""
        self._between_rounds("filter_rows")
        check_keep(keep, self.row_count)
        self._live.filter_rows(keep)

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's state in memory of its own; see the contract."""
        self._between_rounds("capture")
        place = checks.row_number("capture", row, self.row_count)
        return store(self._live.row(place), self.namespace, self._settings.layout)

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt; see the contract.

        Only keys and values are evaluated, and the last hidden state.
        """
        self._between_rounds("prefill")
        checks.check_token_array("prefill", tokens, self.row_count)
        length = tokens.shape[1]
        hidden = self._features("prefill", context, length)
        if self.row_count and length:
            everything = self._settings.reads_prompt
            self._live.follow(tokens, hidden, [length] * self.row_count, everything=everything)
            self._live.materialize()

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose, from the target's hidden states; see the contract.

        Args:
            tokens: ``[B, L]`` ids, right-padded.
            context: ``[B, at least L, H]``.
            lengths: B ints, tokens of each row.
        """
        self._between_rounds("consume")
        checks.check_token_array("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        hidden = self._features("consume", context, max(counts, default=0))
        if any(counts):
            self._live.follow(tokens, hidden, counts, everything=True)
            self._live.submit()

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        if self._closed:
            raise ClosedError("materialize")
        self._live.materialize()

    def _features(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return checks.check_features(verb, context, self.row_count, width, self._hidden_size)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        opened, choices = self._open(pending, depths, steps)
        ids: Any = self._drafted(choices).tolist() if choices else [[]] * self.row_count
        opened.drafts = [row[:depth] for row, depth in zip(ids, opened.depths, strict=True)]
        told = [list(draft) for draft in opened.drafts]
        logq = _declared(choices)
        return told if logq is None else Proposal(told, logq)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round; the whole chain stays on the device. ``None`` where no row may draft."""
        if not any(depths):
            return None
        opened, choices = self._open(pending, depths, steps)
        width = len(choices)

        def resolve(read: Sequence[int]) -> list[list[int]]:
            opened.drafts = [
                [int(token) for token in read[row * width : row * width + depth]]
                for row, depth in enumerate(opened.depths)
            ]
            return [list(draft) for draft in opened.drafts]

        equal = all(depth == width for depth in opened.depths)
        lengths = None if equal else mx.array(opened.depths, mx.int32)
        return DeviceProposal(self._drafted(choices), resolve, lengths, _declared(choices))

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The first token ``[B, 1]`` that a draft would propose; changes nothing."""
        heads, asked, drawn = self._asked("preview", pending, depths, steps)
        if not any(asked):
            return None
        scored, _ = self._live.first(heads, max(asked), keep=False)
        return self._chosen(scored, drawn).ids[:, None]

    def _open(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[_Round, list[Choice]]:
        heads, asked, drawn = self._asked("draft", pending, depths, steps)
        depth = max(asked, default=0)
        choices = self._chain(heads, depth, drawn) if heads else []
        self._round = opened = _Round(asked)
        return opened, choices

    def _chain(self, heads: list[int], depth: int, drawn: list[int]) -> list[Choice]:
        """The head over what is unread, then over its own output: ``depth`` choices of ``[B]``."""
        live = self._live
        scored, fed = live.first(heads, depth)
        choices = [self._chosen(scored, drawn)] if depth else []
        for at in range(1, depth):
            scored, fed = live.ahead(choices[-1].ids, fed)
            choices.append(self._chosen(scored, [step + at for step in drawn]))
        if not depth:
            live.submit()
        return choices

    def _chosen(self, scored: mx.array, steps: list[int]) -> Choice:
        assert self._choose is not None, "a prefill group drafts nothing"
        return self._choose(scored, steps)

    def _drafted(self, choices: list[Choice]) -> mx.array:
        """``[B, d]`` int32. Whoever reads them computes what the head has read, too."""
        ids = mx.stack([choice.ids for choice in choices], axis=1).astype(mx.int32)
        return self._live.with_reading(ids)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round; see the contract.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, H]`` of the verify window.
        """
        if self._closed:
            raise ClosedError("commit")
        opened = self._round
        if opened is None:
            raise NoOpenRoundError
        if opened.drafts is None:
            raise NoOpenRoundError("resolve() of the proposal comes before commit")
        counts = checks.row_ints("commit: accepted", accepted, list(map(len, opened.drafts)))
        width = 1 + max(map(len, opened.drafts), default=0)
        hidden = self._features("commit", context, width)
        if counts:
            self._live.settle(opened.drafts, counts, hidden, opened.steps)
        self._round = None

    def close(self) -> None:
        """Let the rows go."""
        self._closed = True
        self._round = None
        self._live.filter_rows([])

    def _asked(
        self, verb: str, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        self._between_rounds(verb)
        count = self.row_count
        return (
            checks.row_ints("pending", pending, [self._vocab_size - 1] * count),
            checks.row_ints("depths", depths, [None] * count),
            checks.row_ints("steps", steps, [None] * count),
        )

    def _between_rounds(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(verb)
        if self._round is not None:
            raise RoundOpenError(verb)


def _declared(choices: list[Choice]) -> mx.array | None:
    """``[B, d, V or N]``, if they were asked for."""
    logq = [choice.logq for choice in choices if choice.logq is not None]
    return mx.stack(logq, axis=1) if logq and len(logq) == len(choices) else None
