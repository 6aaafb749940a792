"""A head's rows as the contract has them: every verb checks first, and changes afterwards.

Shapes: B rows, L positions, W = 1 + the longest draft, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.contract import PrefillMode, Swap, check_keep
from specdec.drafting import checks
from specdec.drafting.choose import declared
from specdec.drafting.rounds import Drafted, Rounds
from specdec.errors import CheckpointError
from specdec_mtp.attachment import HeadRow, restore, store
from specdec_mtp.live import LiveRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import (
        ContextKind,
        DeviceProposal,
        Proposal,
        RecurrentMtp,
        RowCheckpoint,
    )
    from specdec.drafting.choose import Choice
    from specdec.drafting.rounds import Asked
    from specdec_mtp.live import HeadSettings
    from specdec_mtp.select import HeadChooser

__all__ = ["HeadRows"]


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
        choose: HeadChooser | None,
    ) -> None:
        self._settings = settings
        self._hidden_size = port.hidden_size
        self._vocab_size = vocab_size
        self._choose = choose
        self._live = LiveRows(settings, port)
        self._rounds = Rounds(vocab_size)

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
        self._rounds.between("prepare_append")
        if not checkpoints:
            return Swap(lambda: None)
        change = self._live.prepare_append([self._restored(each) for each in checkpoints])

        def join() -> None:
            if not self._rounds.closed:
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
        self._rounds.between("filter_rows")
        check_keep(keep, self.row_count)
        self._live.filter_rows(keep)

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's state in memory of its own; see the contract."""
        self._rounds.between("capture")
        place = checks.row_number("capture", row, self.row_count)
        return store(self._live.row(place), self.namespace, self._settings.layout)

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt; see the contract.

        Only keys and values are evaluated, and the last hidden state.
        """
        self._rounds.between("prefill")
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
        self._rounds.between("consume")
        checks.check_token_array("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        hidden = self._features("consume", context, max(counts, default=0))
        if any(counts):
            self._live.follow(tokens, hidden, counts, everything=True)
            self._live.submit()

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        self._rounds.check_open("materialize")
        self._live.materialize()

    def _features(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return checks.check_features(verb, context, self.row_count, width, self._hidden_size)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        asked = self._rounds.asked("draft", self.row_count, pending, depths, steps)
        if asked.deepest:
            return self._rounds.open_host(asked, self._drafted(asked))
        if asked.pending:
            self._live.first(asked.pending, 0)
            self._live.submit()
        return self._rounds.open_host(asked, None)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round; the whole chain stays on the device. ``None`` where no row may draft."""
        asked = self._rounds.asked("draft_device", self.row_count, pending, depths, steps)
        return self._rounds.open_device(asked, self._drafted(asked)) if asked.deepest else None

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The first token ``[B, 1]`` that a draft would propose; changes nothing."""
        asked = self._rounds.asked("preview", self.row_count, pending, depths, steps)
        if not asked.deepest:
            return None
        scored, _ = self._live.first(asked.pending, asked.deepest, keep=False)
        return self._chosen(scored, asked.steps).ids[:, None]

    def _drafted(self, asked: Asked) -> Drafted:
        """The head over what is unread, then over its own output, as deep as any row asks."""
        live = self._live
        scored, fed = live.first(asked.pending, asked.deepest)
        choices = [self._chosen(scored, asked.steps)]
        for at in range(1, asked.deepest):
            scored, fed = live.ahead(choices[-1].ids, fed)
            choices.append(self._chosen(scored, [step + at for step in asked.steps]))
        ids = mx.stack([choice.ids for choice in choices], axis=1).astype(mx.int32)
        # Whoever reads the ids computes all that was read, too.
        return Drafted(live.with_reading(ids), logq=declared(choices))

    def _chosen(self, scored: mx.array, steps: list[int]) -> Choice:
        assert self._choose is not None, "a prefill group drafts nothing"
        return self._choose(scored, steps)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round; see the contract.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, H]`` of the verify window.
        """
        drafts, counts = self._rounds.accepted(accepted)
        longest = max(map(len, drafts), default=0)
        hidden = self._features("commit", context, 1 + longest)
        if counts:
            # A chain goes ahead once for each draft but the first.
            self._live.settle(drafts, counts, hidden, max(longest - 1, 0))
        self._rounds.end()

    def close(self) -> None:
        """Let the rows go."""
        self._rounds.close()
        self._live.filter_rows([])
