"""Rows that attend to what two of the target's layers said of the text.

Each token that was read leaves a key and a value, projected from the tapped hidden states and the
token's embedding. A draft is a chain: the embedding of the last token is the query, and the newest
positions weigh most.

All rows live in one buffer, ``[B, capacity, D]``, right-padded, with a length for each row.

Shapes: B rows, L tokens read, W = 1 + the longest draft, H hidden size, m = 2 tapped layers, D
features of a key, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import define
from drafters import verbs

from specdec.contract import (
    Attachment,
    ContextKind,
    DeviceProposal,
    Greedy,
    PrefillMode,
    RowCheckpoint,
    Swap,
    check_keep,
    require_port,
)
from specdec.errors import (
    CheckpointError,
    ClosedError,
    ContractError,
    NoOpenRoundError,
    RoundOpenError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowSampling, TargetView

__all__ = ["SCHEMA", "TappedRows", "tapped_layers"]

SCHEMA: Final = "tapped-context-v1"
_STEP: Final = 4  # positions that the buffer grows by
_PADDING: Final = 3.0  # a row that reads what it has not written gives itself away
_FADE: Final = 0.4  # how much less a key weighs for each position that it is older


def tapped_layers(target: TargetView) -> tuple[int, ...]:
    """The first layer and the last."""
    last = require_port(target, "hidden_taps", "the tapped drafter").layer_count - 1
    return (0, last)


@define
class _Round:
    pending: list[int]
    depths: list[int]
    drafts: list[list[int]] | None = None  # on the host


class TappedRows:
    """A group of rows that reads prompts and decodes.

    Args:
        weights: the provider's, not changed.
        namespace: the provider's ``checkpoint_namespace``.
        target: the bound target.
        sampling: the rows' draws; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.TAIL_SPLIT
    context = ContextKind.TAPS

    def __init__(
        self,
        weights: dict[str, mx.array],
        namespace: str,
        target: TargetView,
        sampling: RowSampling | None,
    ) -> None:
        self.namespace = namespace
        self.tap_layers = tapped_layers(target)
        self._port = require_port(target, "hidden_taps", "the tapped drafter")
        self._vocab_size = target.vocab_size
        self._features = len(self.tap_layers) * self._port.hidden_size
        self._weights = weights
        self._size = weights["query"].shape[1]
        self._sampling = sampling
        self._lengths: list[int] = []
        self._keys = mx.zeros((0, _STEP, self._size))
        self._values = mx.zeros((0, _STEP, self._size))
        self._round: _Round | None = None
        self._closed = False

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._lengths)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Copy the joining rows' keys and values."""
        self._between_rounds("prepare_append")
        joining = [self._restored(checkpoint) for checkpoint in checkpoints]
        most = max((keys.shape[0] for keys, _ in joining), default=0)

        def join() -> None:
            if self._closed or not joining:
                return
            self._grow(most)
            capacity = self._keys.shape[1]
            for place, name in enumerate(("_keys", "_values")):
                fresh = [_padded(pair[place][None], capacity) for pair in joining]
                setattr(self, name, mx.concatenate([getattr(self, name), *fresh], axis=0))
            self._lengths = [*self._lengths, *(keys.shape[0] for keys, _ in joining)]

        return Swap(join, joining.clear)

    def _restored(self, checkpoint: RowCheckpoint | None) -> tuple[mx.array, mx.array]:
        """A row's keys and values, ``[n, D]`` each."""
        if checkpoint is None:
            if self._sampling is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
            return mx.zeros((0, self._size)), mx.zeros((0, self._size))
        if checkpoint.namespace != self.namespace:
            raise CheckpointError(f"the checkpoint is of {checkpoint.namespace}")
        if checkpoint.attachment.schema != SCHEMA:
            raise CheckpointError(f"the checkpoint has the schema {checkpoint.attachment.schema}")
        shape = (checkpoint.processed_tokens, self._size)
        verbs.check_arrays(checkpoint, {"keys": shape, "values": shape})
        arrays = checkpoint.attachment.arrays
        return arrays["keys"], arrays["values"]  # never written to: joining copies them

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Gather the kept rows."""
        self._between_rounds("filter_rows")
        check_keep(keep, self.row_count)
        kept = mx.array(list(keep), mx.int32)
        self._keys = mx.take(self._keys, kept, axis=0)
        self._values = mx.take(self._values, kept, axis=0)
        self._lengths = [self._lengths[row] for row in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's keys and values, without the padding, in memory of their own."""
        self._between_rounds("capture")
        length = self._lengths[verbs.row_of("capture", row, self.row_count)]
        arrays = {
            "keys": mx.contiguous(self._keys[row, :length]),
            "values": mx.contiguous(self._values[row, :length]),
        }
        mx.eval(arrays)
        return RowCheckpoint(
            namespace=self.namespace,
            processed_tokens=length,
            attachment=Attachment(schema=SCHEMA, arrays=arrays),
        )

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt."""
        self._between_rounds("prefill")
        chunks = verbs.token_rows("prefill", tokens, self.row_count, self._vocab_size)
        width = tokens.shape[1]
        held = self._checked("prefill", context, width)
        self._write(chunks, held)

    def materialize(self) -> None:
        """Evaluate what was restored."""
        if self._closed:
            raise ClosedError("materialize")
        mx.eval(self._keys, self._values)

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read tokens that somebody else chose, of a different number in each row."""
        self._between_rounds("consume")
        chunks = verbs.token_rows("consume", tokens, self.row_count, self._vocab_size)
        width = tokens.shape[1]
        counts = verbs.one_each("consume: lengths", lengths, [width] * self.row_count)
        held = self._checked("consume", context, width)
        self._write([chunk[:count] for chunk, count in zip(chunks, counts, strict=True)], held)

    def _checked(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return verbs.check_context(verb, context, self.row_count, width, self._features)

    def _write(self, chunks: Sequence[Sequence[int]], context: mx.array) -> None:
        """Store the keys and values of chunks of different length; ``context`` is padded."""
        width = max(map(len, chunks), default=0)
        if not width:
            return
        self._grow(max(n + len(c) for n, c in zip(self._lengths, chunks, strict=True)))
        padded = mx.array([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks], mx.int32)
        parts = (context[:, :width], self._port.embed(padded))
        seen = mx.concatenate([mx.fast.rms_norm(part, None, 1e-6) for part in parts], axis=-1)
        new_keys, new_values = seen @ self._weights["keys"], seen @ self._weights["values"]
        places = [(row, at) for row, chunk in enumerate(chunks) for at in range(len(chunk))]
        rows, source = (mx.array(part, mx.int32) for part in zip(*places, strict=True))
        goal = mx.array([self._lengths[row] + at for row, at in places], mx.int32)
        self._keys[rows, goal] = new_keys[rows, source]
        self._values[rows, goal] = new_values[rows, source]
        self._lengths = [n + len(c) for n, c in zip(self._lengths, chunks, strict=True)]
        mx.eval(self._keys, self._values)

    def _grow(self, positions: int) -> None:
        """Make room for this many positions in a row."""
        capacity = -(-positions // _STEP) * _STEP
        if capacity > self._keys.shape[1]:
            self._keys = _padded(self._keys, capacity)
            self._values = _padded(self._values, capacity)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]]:
        """Draft, and read the ids."""
        self._between_rounds("draft")
        opened, tokens = self._proposed(pending, depths, steps)
        self._round = opened
        return self._resolve(opened, tokens.tolist())

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Draft, and leave the ids where they are."""
        self._between_rounds("draft_device")
        opened, tokens = self._proposed(pending, depths, steps)
        width = tokens.shape[1]
        if not width:
            return None
        self._round = opened

        def resolve(ids: Sequence[int]) -> list[list[int]]:
            rows = [list(ids[start : start + width]) for start in range(0, len(ids), width)]
            return self._resolve(opened, rows)

        ragged = len(set(opened.depths)) > 1
        return DeviceProposal(
            tokens, resolve, lengths=mx.array(opened.depths, mx.int32) if ragged else None
        )

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """What a draft would be; no round is opened."""
        self._between_rounds("preview")
        _, tokens = self._proposed(pending, depths, steps)
        return tokens if tokens.shape[1] else None

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """Store the keys and values of each row's pending token and accepted drafts."""
        if self._closed:
            raise ClosedError("commit")
        opened = self._round
        if opened is None:
            raise NoOpenRoundError
        if opened.drafts is None:
            raise ContractError("commit: the device draft was not resolved; call resolve() first")
        counts = verbs.one_each("accepted", accepted, [len(draft) for draft in opened.drafts])
        windows = [
            [head, *draft[:count]]
            for head, draft, count in zip(opened.pending, opened.drafts, counts, strict=True)
        ]
        if windows:
            width = 1 + max(map(len, opened.drafts))
            held = self._checked("commit", context, width)
            self._write(windows, held)
        self._round = None

    def close(self) -> None:
        """Let the rows go."""
        self._closed = True
        self._round = None
        self._lengths = []
        self._keys = self._values = mx.zeros((0, _STEP, self._size))

    def _between_rounds(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(verb)
        if self._round is not None:
            raise RoundOpenError(verb)

    def _proposed(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[_Round, mx.array]:
        """A round to open, and ids ``[B, the largest depth]``."""
        count = self.row_count
        heads = verbs.one_each("pending", pending, [self._vocab_size - 1] * count)
        asked = verbs.one_each("depths", depths, [1 << 30] * count)
        drawn = verbs.one_each("steps", steps, [1 << 62] * count)
        tokens: list[mx.array] = []
        last = mx.array(heads, mx.int32)
        for depth in range(max(asked, default=0)):
            logits = self._scores(last, depth)
            last = self._chosen(logits, [step + depth for step in drawn])
            tokens.append(last)
        drafts = mx.stack(tokens, axis=1) if tokens else mx.zeros((count, 0), mx.int32)
        return _Round(heads, asked), drafts

    def _scores(self, last: mx.array, depth: int) -> mx.array:
        """The target's head over what the last ids ``[B]`` attend to: ``[B, V]``."""
        asking = self._port.embed(last[:, None])[:, 0]
        queries = (asking @ self._weights["query"])[:, None]
        age = mx.array(self._lengths, mx.int32)[:, None] - mx.arange(self._keys.shape[1])
        scores = (self._keys * queries).sum(-1) * self._size**-0.5 - _FADE * (age + depth)
        scores = mx.where(age > 0, scores, -mx.inf)
        # One more place that says nothing: a row that has read nothing attends to it.
        scores = mx.concatenate([mx.zeros((scores.shape[0], 1)), scores], axis=1)
        weights = mx.softmax(scores, axis=-1)[:, 1:]
        found = (weights[..., None] * self._values).sum(1) @ self._weights["out"]
        hidden = mx.fast.rms_norm(asking + found, None, 1e-6)
        logits: mx.array = self._port.logits(hidden[:, None])[:, 0]
        return logits

    def _chosen(self, logits: mx.array, steps: Sequence[int]) -> mx.array:
        sampling = self._sampling
        if sampling is None or isinstance(sampling.selection, Greedy):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return sampling.sample(logprobs, steps).astype(mx.int32)

    @staticmethod
    def _resolve(opened: _Round, rows: Any) -> list[list[int]]:
        """Cut the ids to each row's depth, and remember them."""
        opened.drafts = [
            [int(token) for token in row[:depth]]
            for row, depth in zip(rows, opened.depths, strict=True)
        ]
        return [list(draft) for draft in opened.drafts]


def _padded(rows: mx.array, capacity: int) -> mx.array:
    """``[B, n, D]`` as ``[B, capacity, D]``."""
    widths = [(0, 0), (0, capacity - rows.shape[1]), (0, 0)]
    return mx.pad(rows, widths, constant_values=_PADDING)
