"""Block drafters over projected context: everything but their numerics.

A drafter of this family (DFlash, https://arxiv.org/abs/2602.06036, and its kin) projects tapped
hidden states of the target into keys and values of its own layers, once for each position of the
accepted stream, and fills a whole block of masked positions in one pass. What it has to say is a
:class:`~specdec.drafting.block_method.BlockMethod`; rows of different length, checkpoints, device
drafts and previews are here.

Shapes: B rows, L positions, W = 1 + the longest draft, H hidden size, m tapped layers, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec.contract import Attachment, ContextKind, PrefillMode, RowCheckpoint, Swap, check_keep
from specdec.drafting import checks
from specdec.drafting.choose import BlockChoices
from specdec.drafting.context import ContextRows
from specdec.drafting.rounds import Asked, Drafted, Rounds
from specdec.drafting.row_arrays import (
    cache_arrays,
    check_arrays,
    check_identity,
    expected_shapes,
    fill_caches,
)
from specdec.errors import CheckpointError, ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import DeviceProposal, Proposal
    from specdec.drafting.block_method import BlockDraft, BlockMethod
    from specdec.drafting.choose import Chooser

__all__ = ["ProjectedRows", "RowsSettings", "cache_layout"]


@frozen(kw_only=True, eq=False)
class RowsSettings:
    """A block drafter, and how its rows are told from others.

    Attributes:
        method: bound to the target.
        namespace: the provider's ``checkpoint_namespace``.
        schema: name of the layout of a row's arrays.
        layout: shape ``[1, heads, 1, D]`` and type of every array at one position, by name.
        dtype: that taps are read in: of the target's embedding, whatever its layers make of it.
        tap_layers: of the target, m of them.
    """

    method: BlockMethod
    namespace: str
    schema: str
    layout: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
    dtype: mx.Dtype
    tap_layers: tuple[int, ...]


def cache_layout(
    method: BlockMethod, dtype: mx.Dtype
) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """What a row's arrays are at one position, from a projection that is never evaluated.

    Args:
        method: the drafter.
        dtype: of the target's hidden states.
    """
    projected = method.project(mx.zeros((1, 1, method.features), dtype), 0)
    return {
        f"{number}.{name}": (tuple(array.shape), array.dtype)
        for number, pair in enumerate(projected)
        for name, array in zip(("keys", "values"), pair, strict=True)
    }


class ProjectedRows:
    """A group of rows that reads prompts and decodes.

    Args:
        settings: the drafter.
        vocab_size: V.
        choose: how tokens are drafted; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.TAIL_SPLIT
    context = ContextKind.TAPS

    def __init__(self, settings: RowsSettings, vocab_size: int, choose: Chooser | None) -> None:
        self._settings = settings
        self._method = settings.method
        self._choose = choose
        self._vocab_size = vocab_size
        self._rows = ContextRows(settings.method.layers)
        self._rounds = Rounds(vocab_size)

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._settings.namespace

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Tapped layers of the target, in order."""
        return self._settings.tap_layers

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._rows.lengths)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows' context; see the contract."""
        self._rounds.between("prepare_append")
        change = self._rows.prepare_append([self._restored(each) for each in checkpoints])

        def join() -> None:
            if not self._rounds.closed:
                change.commit()

        return Swap(join, change.discard)

    def _restored(self, checkpoint: RowCheckpoint | None) -> list[Any]:
        settings, caches = self._settings, self._rows.empty_caches()
        if checkpoint is None:
            if self._choose is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
            return caches
        attachment = check_identity(checkpoint, settings.namespace, settings.schema)
        tokens = checkpoint.processed_tokens
        if attachment.metadata.get("tokens") != tokens:
            raise CheckpointError(
                f"the checkpoint is of {tokens} tokens, but its state says "
                f"{attachment.metadata.get('tokens')!r}; read the text again"
            )
        check_arrays(attachment.arrays, expected_shapes(caches, settings.layout, tokens))
        fill_caches(caches, attachment.arrays, tokens)
        return caches

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows, in the order that is asked for; see the contract."""
        self._rounds.between("filter_rows")
        check_keep(keep, self.row_count)
        self._rows.filter_rows(keep)

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's context in memory of its own; see the contract."""
        self._rounds.between("capture")
        place = checks.row_number("capture", row, self.row_count)
        tokens = self._rows.lengths[place]
        arrays = cache_arrays(self._rows.extract(place)) if tokens else {}
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
        """Read a chunk of every row's prompt; see the contract."""
        self._rounds.between("prefill")
        checks.check_token_array("prefill", tokens, self.row_count)
        length = tokens.shape[1]
        hidden = self._features("prefill", context, length)
        if self.row_count and length:
            self._append(hidden, [length] * self.row_count)
            mx.eval(self._rows.arrays())

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose, from the target's hidden states; see the contract.

        Args:
            tokens: ``[B, L]`` ids, right-padded.
            context: ``[B, at least L, m·H]``.
            lengths: B ints, tokens of each row.
        """
        self._rounds.between("consume")
        checks.check_token_array("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        hidden = self._features("consume", context, max(counts, default=0))
        if any(counts):
            self._append(hidden, counts)
            self._submit()

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        self._rounds.check_open("materialize")
        mx.eval(self._rows.arrays())

    def _features(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return checks.check_features(verb, context, self.row_count, width, self._method.features)

    def _append(self, hidden: mx.array, counts: list[int]) -> None:
        """Project and keep the first ``counts[b]`` positions of each row."""
        taps = hidden[:, : max(counts)].astype(self._settings.dtype)
        projected = self._method.project(taps, self._rows.positions)
        self._rows.append(projected, counts)

    def _submit(self) -> None:
        """Compute what was read while the host goes on: no graph may grow from round to round."""
        mx.async_eval(*self._rows.arrays())  # type: ignore[no-untyped-call]  # untyped in MLX

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        asked = self._asked("draft", pending, depths, steps)
        if asked.deepest:
            return self._rounds.open_host(asked, self._drafted(asked))
        if asked.pending:
            self._submit()
        return self._rounds.open_host(asked, None)

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

        Of drafts that confidence cuts, the first one.
        """
        asked = self._asked("preview", pending, depths, steps)
        if not asked.deepest:
            return None
        drafted = self._drafted(asked)
        return drafted.tokens if drafted.lengths is None else drafted.tokens[:, :1]

    def _asked(
        self, verb: str, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> Asked:
        asked = self._rounds.asked(verb, self.row_count, pending, depths, steps)
        longest = self._method.longest
        return Asked(asked.pending, [min(d, longest) for d in asked.depths], asked.steps)

    def _drafted(self, asked: Asked) -> Drafted:
        if self._choose is None:
            raise ContractError("a prefill group drafts nothing; open a group that decodes")
        method, depth = self._method, asked.deepest
        choices = BlockChoices(self._choose, asked.steps)
        # Each row's block is as wide as its own drafts need, whatever its neighbours do.
        with self._rows.block([method.columns(max(each, 1)) for each in asked.depths]) as block:
            pending = mx.array(asked.pending, mx.int32)
            drafted = method.draft_device(block, pending, depth, choices)
        _check_draft(drafted, len(asked.pending), depth)
        # Whoever reads the ids computes all that was read, too.
        tokens: mx.array = mx.depends(drafted.tokens.astype(mx.int32), self._rows.arrays())
        return Drafted(tokens, drafted.lengths, choices.logq)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: project what was accepted; see the contract.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, m·H]`` of the verify window.
        """
        drafts, counts = self._rounds.accepted(accepted)
        width = 1 + max(map(len, drafts), default=0)
        hidden = self._features("commit", context, width)
        if counts:
            self._append(hidden, [1 + count for count in counts])
        self._rounds.end()

    def close(self) -> None:
        """Let the rows go."""
        self._rounds.close()
        self._rows.filter_rows([])


def _check_draft(drafted: BlockDraft, rows: int, depth: int) -> None:
    shape = tuple(drafted.tokens.shape)
    if len(shape) != 2 or shape[0] != rows or not 1 <= shape[1] <= depth:
        raise ContractError(
            f"the block drafted tokens of shape {shape}; draft [{rows}, 1 to {depth}]"
        )
