"""Rows of an assistant: one hidden state each, and the target's keys and values, read each round.

Shapes: B rows, L positions, W = 1 + the longest draft, H hidden size of the target, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve, frozen

from specdec.contract import Attachment, ContextKind, PrefillMode, RowCheckpoint, Swap, check_keep
from specdec.drafting import checks
from specdec.drafting.choose import declared
from specdec.drafting.rounds import Drafted, Rounds
from specdec.drafting.row_arrays import check_arrays, check_identity
from specdec.errors import CheckpointError, ContractError
from specdec_assistant.lent import lend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import AssistantRows, DeviceProposal, Proposal
    from specdec.drafting.choose import Choice, Chooser
    from specdec.drafting.rounds import Asked
    from specdec_assistant.config import AssistantConfig
    from specdec_assistant.model import AssistantModel

__all__ = ["AssistantGroup", "RowsSettings"]


@frozen(kw_only=True, eq=False)
class RowsSettings:
    """A drafter over a target, and how its rows are told from others.

    Attributes:
        name: of the drafter, for messages.
        config: of the network.
        model: the network.
        advances: whether each step of a round stands a position further.
        namespace: the provider's ``checkpoint_namespace``.
        schema: name of the layout of a row's arrays.
        dtype: of the target's embedding, for rows that have read nothing.
        vocab_size: V of the target.
    """

    name: str
    config: AssistantConfig
    model: AssistantModel
    advances: bool
    namespace: str
    schema: str
    dtype: mx.Dtype
    vocab_size: int


class AssistantGroup:
    """A group of rows that reads prompts and decodes.

    Args:
        settings: the drafter.
        port: the target's embedding, and the K/V of the group's rows.
        choose: how tokens are drafted; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.TAIL_SPLIT
    context = ContextKind.POST_NORM
    tap_layers: tuple[int, ...] = ()

    def __init__(self, settings: RowsSettings, port: AssistantRows, choose: Chooser | None) -> None:
        self._settings = settings
        self._port = port
        self._choose = choose
        self._rounds = Rounds(settings.vocab_size)
        self._tokens: list[int] = []  # that each row has processed
        self._hidden = self._nothing(0)  # [B, 1, H] at the last position read

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._settings.namespace

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._tokens)

    def _nothing(self, rows: int) -> mx.array:
        return mx.zeros((rows, 1, self._port.hidden_size), self._settings.dtype)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows' state; see the contract."""
        self._rounds.between("prepare_append")
        joining = [self._restored(each) for each in checkpoints]
        if not joining:
            return Swap(lambda: None)
        tokens = self._tokens + [count for count, _ in joining]
        hidden = mx.concatenate([self._hidden, *(state for _, state in joining)], axis=0)
        _submit(hidden)

        def join() -> None:
            if not self._rounds.closed:
                self._tokens, self._hidden = tokens, hidden

        return Swap(join)

    def _restored(self, checkpoint: RowCheckpoint | None) -> tuple[int, mx.array]:
        if checkpoint is None:
            if self._choose is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
            return 0, self._nothing(1)
        attachment = check_identity(checkpoint, self.namespace, self._settings.schema)
        tokens = checkpoint.processed_tokens
        if attachment.metadata.get("tokens") != tokens:
            raise CheckpointError(
                f"the checkpoint is of {tokens} tokens, but its state says "
                f"{attachment.metadata.get('tokens')!r}; read the text again"
            )
        wanted = {"hidden": ((1, 1, self._port.hidden_size), None)} if tokens else {}
        check_arrays(attachment.arrays, wanted)
        return tokens, mx.array(attachment.arrays["hidden"]) if tokens else self._nothing(1)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows, in the order that is asked for; see the contract."""
        self._rounds.between("filter_rows")
        check_keep(keep, self.row_count)
        self._tokens = [self._tokens[row] for row in keep]
        self._hidden = self._hidden[mx.array(list(keep), mx.int32)] if keep else self._nothing(0)
        _submit(self._hidden)

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's hidden state in memory of its own; see the contract."""
        self._rounds.between("capture")
        place = checks.row_number("capture", row, self.row_count)
        tokens = self._tokens[place]
        arrays = {"hidden": mx.contiguous(self._hidden[place : place + 1])} if tokens else {}
        mx.eval(arrays)
        return RowCheckpoint(
            namespace=self.namespace,
            processed_tokens=tokens,
            attachment=Attachment(
                schema=self._settings.schema, arrays=arrays, metadata={"tokens": tokens}
            ),
        )

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt; see the contract. The last position's state stays."""
        self._rounds.between("prefill")
        checks.check_token_array("prefill", tokens, self.row_count)
        length = tokens.shape[1]
        hidden = self._features("prefill", context, length)
        if self.row_count and length:
            # In memory of its own: the chunk's states go.
            self._hidden = mx.contiguous(hidden[:, length - 1 : length])
            self._tokens = [count + length for count in self._tokens]
            mx.eval(self._hidden)

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
            last = _at(hidden, [max(count - 1, 0) for count in counts])
            read = mx.array([count > 0 for count in counts])[:, None, None]
            self._hidden = mx.where(read, last, self._hidden)
            self._tokens = [held + count for held, count in zip(self._tokens, counts, strict=True)]
            _submit(self._hidden)

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        self._rounds.check_open("materialize")
        mx.eval(self._hidden)

    def _features(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return checks.check_features(verb, context, self.row_count, width, self._port.hidden_size)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        asked = self._asked("draft", pending, depths, steps)
        return self._rounds.open_host(asked, self._drafted(asked) if asked.deepest else None)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round whose drafts stay on the device. ``None`` where no row may draft."""
        asked = self._asked("draft_device", pending, depths, steps)
        return self._rounds.open_device(asked, self._drafted(asked)) if asked.deepest else None

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """Ids ``[B, d]`` that a draft would propose; changes nothing.

        ``None`` also while a row that is asked has no hidden state yet: one array has no lengths.
        """
        asked = self._asked("preview", pending, depths, steps)
        if not asked.deepest or any(
            own < wanted for own, wanted in zip(asked.depths, depths, strict=True)
        ):
            return None
        return self._drafted(asked).tokens

    def _asked(
        self, verb: str, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> Asked:
        """What is asked, without drafts for rows that have no hidden state yet."""
        asked = self._rounds.asked(verb, self.row_count, pending, depths, steps)
        own = [
            depth if tokens else 0 for depth, tokens in zip(asked.depths, self._tokens, strict=True)
        ]
        return evolve(asked, depths=own)

    def _drafted(self, asked: Asked) -> Drafted:
        """The network over the pending tokens, then over its own drafts and states."""
        if self._choose is None:
            raise ContractError("a prefill group drafts nothing; open a group that decodes")
        own, port = self._settings, self._port
        # Read once a round, and let go with it: a copy that is held stops writes in place.
        lent = lend(own.name, own.config, port.read_donors(), self._tokens)
        anchors = mx.array([max(count - 1, 0) for count in self._tokens], mx.int32)
        token, hidden = mx.array(asked.pending, mx.int32), self._hidden
        choices: list[Choice] = []
        for at in range(asked.deepest):
            positions = anchors + at if own.advances else anchors
            normed, hidden = own.model(port.embed(token[:, None]), hidden, lent, positions)
            logits, ids = own.model.score(normed, own.vocab_size)
            choices.append(self._choose(logits, [step + at for step in asked.steps], ids))
            token = choices[-1].ids.astype(mx.int32)
        tokens = mx.stack([choice.ids for choice in choices], axis=1).astype(mx.int32)
        return Drafted(tokens, logq=declared(choices))

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: keep the state at the last position that stays; see the contract.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, H]`` of the verify window.
        """
        drafts, counts = self._rounds.accepted(accepted)
        width = 1 + max(map(len, drafts), default=0)
        hidden = self._features("commit", context, width)
        if counts:
            self._hidden = _at(hidden, counts)
            self._tokens = [
                held + 1 + count for held, count in zip(self._tokens, counts, strict=True)
            ]
            # Nothing of the window but this stays alive, whether a draft follows or not.
            _submit(self._hidden)
        self._rounds.end()

    def close(self) -> None:
        """Let the rows go."""
        self._rounds.close()
        self._tokens, self._hidden = [], self._nothing(0)


def _at(hidden: mx.array, places: Sequence[int]) -> mx.array:
    """``[B, 1, H]``: of each row the state at one place."""
    index = mx.array(list(places), mx.int32)[:, None, None]
    return mx.take_along_axis(hidden, index, axis=1)


def _submit(hidden: mx.array) -> None:
    """Compute it while the host goes on: no graph may grow from round to round."""
    mx.async_eval(hidden)  # type: ignore[no-untyped-call]  # untyped in MLX
