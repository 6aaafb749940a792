"""Rows of a draft model as the contract has them: every verb checks first, and changes afterwards.

The model is a bound target of its own, of any cache kind: speculative decoding with a second model
(https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318). It reads tokens and nothing
else of the target it drafts for.

Shapes: B rows, A of them not ended, L positions, d drafts, V vocabulary of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.contract import ContextKind, PrefillMode, Swap, check_keep
from specdec.drafting import checks
from specdec.drafting.choose import BlockChoices
from specdec.drafting.model_attachment import ModelRow, restore, store
from specdec.drafting.model_live import LiveModelRows
from specdec.drafting.rounds import Asked, Drafted, Rounds
from specdec.errors import CheckpointError, ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DeviceProposal, Proposal, RowCheckpoint
    from specdec.drafting.choose import Chooser
    from specdec.drafting.model_live import ModelSettings
    from specdec.state import RowState

__all__ = ["DraftModelRows"]


class DraftModelRows:
    """A group of rows that reads prompts and decodes.

    Args:
        settings: the draft model.
        vocab_size: V.
        choose: how tokens are drafted; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.TAIL_SPLIT
    context = ContextKind.NONE
    tap_layers: tuple[int, ...] = ()

    def __init__(self, settings: ModelSettings, vocab_size: int, choose: Chooser | None) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._choose = choose
        self._live = LiveModelRows(settings, vocab_size)
        self._rounds = Rounds(vocab_size)

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._settings.namespace

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._live.rows)

    @property
    def stood_down(self) -> list[str | None]:
        """Why a row drafts nothing any more: its text is longer than the draft model reads."""
        reason = f"the draft model's context of {self._settings.limit} tokens is full"
        return [reason if row.ended else None for row in self._live.rows]

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows' state; see the contract."""
        self._rounds.between("prepare_append")
        change = self._live.prepare_append([self._restored(each) for each in checkpoints])

        def join() -> None:
            if not self._rounds.closed:
                change.commit()

        return Swap(join, change.discard)

    def _restored(self, checkpoint: RowCheckpoint | None) -> tuple[ModelRow, RowState | None]:
        settings = self._settings
        if checkpoint is None:
            if self._choose is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
            return ModelRow(), settings.model.new_state()
        row, state = restore(
            checkpoint, settings.namespace, settings.model, settings.shapes, self._vocab_size
        )
        if state is not None and settings.limit is not None and row.read > settings.limit:
            raise CheckpointError(
                f"the checkpoint's row has read {row.read} tokens, but the draft model reads "
                f"{settings.limit}; read the text again"
            )
        return row, state

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows, in the order that is asked for; see the contract."""
        self._rounds.between("filter_rows")
        check_keep(keep, self.row_count)
        self._live.filter_rows(keep)

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's state in memory of its own; see the contract."""
        self._rounds.between("capture")
        place = checks.row_number("capture", row, self.row_count)
        return store(self._live.rows[place], self._live.caches(place), self.namespace)

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt; see the contract.

        A row that would pass the model's context ends.
        """
        self._rounds.between("prefill")
        checks.check_no_context("prefill", context)
        checks.check_token_array("prefill", tokens, self.row_count)
        length = tokens.shape[1]
        if length and self._make_room([length] * self.row_count):
            self._live.read_chunk(self._of_live(tokens))
        self._count_ended([length] * self.row_count)

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose; see the contract.

        Args:
            tokens: ``[B, L]`` ids, right-padded.
            context: none.
            lengths: B ints, tokens of each row.
        """
        self._rounds.between("consume")
        checks.check_no_context("consume", context)
        checks.check_token_array("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        if any(counts):
            live = self._make_room(counts)
            if any(counts[row] for row in live):
                self._live.follow(self._of_live(tokens), [counts[row] for row in live])
        self._count_ended(counts)

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        self._rounds.check_open("materialize")
        mx.eval(self._live.arrays())

    def _make_room(self, counts: Sequence[int]) -> list[int]:
        """End rows that cannot read so many tokens.

        Returns:
            The rows that have not ended.
        """
        ending = []
        for row in self._live.places:
            left = self._live.left(row)
            if left is not None and counts[row] > left:
                ending.append(row)
        self._live.end(ending)
        return list(self._live.places)

    def _count_ended(self, counts: Sequence[int]) -> None:
        rows = self._live.rows
        for number, row in enumerate(rows):
            if row.ended:
                rows[number] = ModelRow(row.tokens + counts[number], ended=True)

    def _of_live(self, per_row: mx.array) -> mx.array:
        """What is given per row, of those that have not ended."""
        live = list(self._live.places)
        return per_row if len(live) == self.row_count else per_row[mx.array(live, mx.int32)]

    def _of_all(self, logits: mx.array) -> mx.array:
        """Logits ``[B, V]`` of ``[A, V]``; those of an ended row are never used."""
        places = self._live.places
        if len(places) == self.row_count:
            return logits
        return logits[mx.array([places.get(row, 0) for row in range(self.row_count)], mx.int32)]

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        asked = self._asked("draft", pending, depths, steps)
        if asked.deepest:
            return self._rounds.open_host(asked, self._drafted(asked))
        if live := self._make_room([1] * self.row_count):
            self._live.first([asked.pending[row] for row in live])
            self._live.submit()
        return self._rounds.open_host(asked, None)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round; the whole chain stays on the device. ``None`` where no row may draft."""
        asked = self._asked("draft_device", pending, depths, steps)
        return self._rounds.open_device(asked, self._drafted(asked)) if asked.deepest else None

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The first token ``[B, 1]`` that a draft would propose; changes nothing."""
        asked = self._asked("preview", pending, depths, steps)
        if not asked.deepest:
            return None
        logits = self._live.first([asked.pending[row] for row in self._live.places], keep=False)
        return self._choices(asked).next(self._of_all(logits))[:, None]

    def _asked(
        self, verb: str, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> Asked:
        """What is asked, with depths that the rows have room for; changes nothing."""
        asked = self._rounds.asked(verb, self.row_count, pending, depths, steps)
        most = self._live.longest_chain + 1
        room = [self._live.left(row) for row in range(self.row_count)]
        cut = [
            min(depth, most) if left is None else min(depth, most, left)
            for depth, left in zip(asked.depths, room, strict=True)
        ]
        return Asked(asked.pending, cut, asked.steps)

    def _choices(self, asked: Asked) -> BlockChoices:
        if self._choose is None:
            raise ContractError("a prefill group drafts nothing; open a group that decodes")
        return BlockChoices(self._choose, asked.steps)

    def _drafted(self, asked: Asked) -> Drafted:
        """The model over what is unread and pending, then over its own drafts.

        All rows go along to the deepest one's depth; ``commit`` takes back what is beyond theirs.
        """
        choices, live = self._choices(asked), self._live
        rows = self._make_room([1] * self.row_count)
        ids = [choices.next(self._of_all(live.first([asked.pending[row] for row in rows])))]
        for _ in range(1, asked.deepest):
            # The device computes a draft while the host builds the next one's graph.
            mx.async_eval(ids[-1])  # type: ignore[no-untyped-call]  # untyped in MLX
            ids.append(choices.next(self._of_all(live.ahead(self._of_live(ids[-1])))))
        # Whoever reads the ids computes all that was read, too.
        tokens: mx.array = mx.depends(mx.stack(ids, axis=1).astype(mx.int32), live.arrays())
        return Drafted(tokens, logq=choices.logq)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: take back what was not accepted; see the contract.

        Args:
            accepted: B ints.
            context: none.
        """
        drafts, counts = self._rounds.accepted(accepted)
        checks.check_no_context("commit", context)
        self._live.settle(drafts, counts)
        self._rounds.end()

    def close(self) -> None:
        """Let the rows go."""
        self._rounds.close()
        self._live.filter_rows([])
