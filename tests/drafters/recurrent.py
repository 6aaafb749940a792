"""A recurrent head that continues the target's last hidden, as heads for multi-token prediction do.

A step reads a hidden state and the token that came after it, so the head is one position behind:
the last true hidden waits for the pending token. Drafting goes on from the head's own output
instead of a true hidden, and what is accepted of that stays in the memory. The state therefore
depends on what was drafted, not on the tokens alone.

Memories are written in place, one array for each row.

Shapes: B rows, L tokens read, W = 1 + the longest draft, H hidden size, M memory size, V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import frozen
from drafters import verbs

from specdec.contract import (
    Attachment,
    ContextKind,
    Greedy,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    Swap,
    check_keep,
    require_port,
)
from specdec.errors import (
    CheckpointError,
    ClosedError,
    NoOpenRoundError,
    RoundOpenError,
    TargetLacksError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RecurrentMtp, RowConstraints, RowSampling, TargetView

__all__ = ["SCHEMA", "RecurrentProvider", "RecurrentRows"]

SCHEMA: Final = "recurrent-memory-v1"


@frozen(eq=False)
class _Round:
    pending: list[int]
    drafts: list[list[int]]
    memories: list[mx.array]  # [B, M] after each step of the chain


class RecurrentRows:
    """A group of rows that reads prompts and decodes.

    Args:
        weights: the provider's, not changed.
        namespace: the provider's ``checkpoint_namespace``.
        port: the target's embedding and head.
        vocab_size: V.
        sampling: the rows' draws; ``None`` in a prefill group, which rows may join cold.
    """

    prefill_mode = PrefillMode.FULL
    context = ContextKind.PRE_NORM
    tap_layers: tuple[int, ...] = ()

    def __init__(
        self,
        weights: dict[str, mx.array],
        namespace: str,
        *,
        port: RecurrentMtp,
        vocab_size: int,
        sampling: RowSampling | None,
    ) -> None:
        self.namespace = namespace
        self._port = port
        self._vocab_size = vocab_size
        self._weights = weights
        self._sampling = sampling
        self._counts: list[int] = []
        self._memories: list[mx.array] = []  # [M] each
        self._hiddens: list[mx.array] = []  # [H] each, the last true one
        self._round: _Round | None = None
        self._closed = False

    @property
    def row_count(self) -> int:
        """B."""
        return len(self._counts)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Copy the joining rows' state."""
        self._between_rounds("prepare_append")
        joining = [self._restored(checkpoint) for checkpoint in checkpoints]

        def join() -> None:
            if self._closed:
                return
            self._counts = [*self._counts, *(count for count, _, _ in joining)]
            self._memories = [*self._memories, *(memory for _, memory, _ in joining)]
            self._hiddens = [*self._hiddens, *(hidden for _, _, hidden in joining)]

        return Swap(join, joining.clear)

    def _restored(self, checkpoint: RowCheckpoint | None) -> tuple[int, mx.array, mx.array]:
        """Tokens read, memory and hidden of a row, in memory of their own."""
        memory_size, hidden_size = self._weights["out"].shape
        if checkpoint is None:
            if self._sampling is not None:
                raise CheckpointError("a cold row cannot decode; read its prompt first")
            return 0, mx.zeros((memory_size,)), mx.zeros((hidden_size,))
        if checkpoint.namespace != self.namespace:
            raise CheckpointError(f"the checkpoint is of {checkpoint.namespace}")
        if checkpoint.attachment.schema != SCHEMA:
            raise CheckpointError(f"the checkpoint has the schema {checkpoint.attachment.schema}")
        verbs.check_arrays(checkpoint, {"memory": (memory_size,), "hidden": (hidden_size,)})
        count = checkpoint.processed_tokens
        if checkpoint.attachment.metadata.get("tokens") != count:
            raise CheckpointError(f"the checkpoint's state is not that of {count} tokens")
        if not count and self._sampling is not None:
            raise CheckpointError("a row that has read nothing has no hidden to go on from")
        arrays = checkpoint.attachment.arrays
        return count, mx.contiguous(arrays["memory"]), mx.contiguous(arrays["hidden"])

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows, in the order that is asked for."""
        self._between_rounds("filter_rows")
        check_keep(keep, self.row_count)
        self._counts = [self._counts[row] for row in keep]
        self._memories = [self._memories[row] for row in keep]
        self._hiddens = [self._hiddens[row] for row in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's memory and last hidden; memories are written in place, so they are copied."""
        self._between_rounds("capture")
        place = verbs.row_of("capture", row, self.row_count)
        arrays = {
            "memory": mx.contiguous(self._memories[place]),
            "hidden": mx.contiguous(self._hiddens[place]),
        }
        mx.eval(arrays)
        return RowCheckpoint(
            namespace=self.namespace,
            processed_tokens=self._counts[place],
            attachment=Attachment(
                schema=SCHEMA, arrays=arrays, metadata={"tokens": self._counts[place]}
            ),
        )

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt: each token with the hidden before it."""
        self._between_rounds("prefill")
        chunks = verbs.token_rows("prefill", tokens, self.row_count, self._vocab_size)
        width = tokens.shape[1]
        hiddens = verbs.check_context(
            "prefill", context, self.row_count, width, self._port.hidden_size
        )
        if not self.row_count or not width:
            return
        memory, before = mx.stack(self._memories), mx.stack(self._hiddens)
        for at in range(width):
            # Nothing comes before the first token of a text.
            follows = mx.array([[count + at > 0] for count in self._counts])
            memory = mx.where(
                follows, self._step(memory, before, [chunk[at] for chunk in chunks]), memory
            )
            before = hiddens[:, at]
        self._keep(memory, before, [width] * self.row_count)

    def materialize(self) -> None:
        """Evaluate what was restored."""
        if self._closed:
            raise ClosedError("materialize")
        mx.eval(self._memories, self._hiddens)

    def _keep(self, memory: mx.array, hidden: mx.array, read: Sequence[int]) -> None:
        """Write every row's new state in place, and count what it has read."""
        for row, count in enumerate(read):
            self._memories[row][:] = memory[row]
            self._hiddens[row][:] = hidden[row]
            self._counts[row] += count
        mx.eval(self._memories, self._hiddens)

    def _step(self, memory: mx.array, hidden: mx.array, tokens: Any) -> mx.array:
        """The memory ``[B, M]`` after a hidden ``[B, H]`` and the token that follows it."""
        ids = tokens if isinstance(tokens, mx.array) else mx.array(tokens, mx.int32)
        seen = mx.concatenate(
            [mx.fast.rms_norm(hidden, None, 1e-6), self._port.embed(ids[:, None])[:, 0]], axis=-1
        )
        return mx.tanh(memory @ self._weights["memory"] + seen @ self._weights["seen"])

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round; chain the head over its own output."""
        self._between_rounds("draft")
        count = self.row_count
        heads = verbs.one_each("pending", pending, [self._vocab_size - 1] * count)
        asked = verbs.one_each("depths", depths, [1 << 30] * count)
        drawn = verbs.one_each("steps", steps, [1 << 62] * count)
        memories, tokens = self._chain(heads, max(asked, default=0), drawn)
        ids: Any = mx.stack(tokens, axis=1).tolist() if tokens else [[]] * count
        drafts = [row[:depth] for row, depth in zip(ids, asked, strict=True)]
        self._round = _Round(heads, drafts, memories)
        told = [list(draft) for draft in drafts]
        if not tokens or not self._greedy():
            return told  # a draw with the target's own noise is certain
        certain = mx.stack(tokens, axis=1)[..., None] == mx.arange(self._vocab_size)
        return Proposal(told, mx.where(certain, 0.0, -mx.inf))

    def _chain(
        self, heads: list[int], depth: int, drawn: list[int]
    ) -> tuple[list[mx.array], list[mx.array]]:
        """Memories ``[B, M]`` and ids ``[B]`` of each step."""
        memories: list[mx.array] = []
        tokens: list[mx.array] = []
        if not heads or not depth:
            return memories, tokens
        memory, hidden = mx.stack(self._memories), mx.stack(self._hiddens)
        last = mx.array(heads, mx.int32)
        for at in range(depth):
            memory = self._step(memory, hidden, last)
            hidden = memory @ self._weights["out"]
            last = self._chosen(hidden, [step + at for step in drawn])
            memories.append(memory)
            tokens.append(last)
        return memories, tokens

    def _greedy(self) -> bool:
        return self._sampling is None or isinstance(self._sampling.selection, Greedy)

    def _chosen(self, hidden: mx.array, steps: Sequence[int]) -> mx.array:
        logits = self._port.logits(mx.fast.rms_norm(hidden, None, 1e-6)[:, None])[:, 0]
        if self._sampling is None or self._greedy():
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return self._sampling.sample(logprobs, steps).astype(mx.int32)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """Keep the memory behind the accepted drafts, and the true hidden of the last of them."""
        if self._closed:
            raise ClosedError("commit")
        opened = self._round
        if opened is None:
            raise NoOpenRoundError
        counts = verbs.one_each("accepted", accepted, [len(draft) for draft in opened.drafts])
        if counts:
            width = 1 + max(map(len, opened.drafts))
            hiddens = verbs.check_context(
                "commit", context, len(counts), width, self._port.hidden_size
            )
            memory = mx.stack(
                [self._behind(opened, hiddens, row, n) for row, n in enumerate(counts)]
            )
            last = mx.stack([hiddens[row, n] for row, n in enumerate(counts)])
            self._keep(memory, last, [1 + n for n in counts])
        self._round = None

    def _behind(self, opened: _Round, hiddens: mx.array, row: int, accepted: int) -> mx.array:
        """A row's memory ``[M]`` behind its last accepted draft."""
        draft = opened.drafts[row]
        if accepted < len(draft):
            return opened.memories[accepted][row]
        # All were accepted: the chain has not read the last token yet. Its hidden is true.
        memory = opened.memories[accepted - 1][row] if draft else self._memories[row]
        before = hiddens[row, accepted - 1] if draft else self._hiddens[row]
        token = draft[-1] if draft else opened.pending[row]
        return self._step(memory[None], before[None], [token])[0]

    def close(self) -> None:
        """Let the rows go."""
        self._closed = True
        self._round = None
        self._counts, self._memories, self._hiddens = [], [], []

    def _between_rounds(self, verb: str) -> None:
        if self._closed:
            raise ClosedError(verb)
        if self._round is not None:
            raise RoundOpenError(verb)


class _Groups:
    """Makes groups of one drafter's rows."""

    supports_adapters = False  # it reads hidden states of the weights it was made for

    def __init__(self, weights: dict[str, mx.array]) -> None:
        self._weights = weights
        self.checkpoint_namespace = f"{SCHEMA}:{verbs.fingerprint(weights)}"

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> RecurrentRows:
        """A group that reads prompts."""
        return self._open(target, None, checkpoints)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> RecurrentRows:
        """A group that decodes."""
        return self._open(target, sampling, checkpoints)

    def _open(
        self,
        target: TargetView,
        sampling: RowSampling | None,
        checkpoints: Sequence[RowCheckpoint | None],
    ) -> RecurrentRows:
        port = require_port(target, "recurrent_mtp", "the recurrent drafter")
        if port.hidden_size != self._weights["out"].shape[1]:
            made_for = self._weights["out"].shape[1]
            raise TargetLacksError(f"recurrent_mtp of size {made_for}", "the recurrent drafter")
        rows = RecurrentRows(
            self._weights,
            self.checkpoint_namespace,
            port=port,
            vocab_size=target.vocab_size,
            sampling=sampling,
        )
        rows.prepare_append(checkpoints).commit()
        return rows


class RecurrentProvider:
    """The drafter.

    Args:
        weights: ``memory`` of ``[M, M]``, ``seen`` of ``[2·H, M]``, ``out`` of ``[M, H]``.
    """

    id = "recurrent"

    def __init__(self, weights: dict[str, mx.array]) -> None:
        self._weights = weights
        self.weight_bytes = sum(array.nbytes for array in weights.values())
        self.grouped = _Groups(weights)

    @classmethod
    def tiny(cls, seed: int = 0, *, hidden_size: int = 32, size: int = 16) -> RecurrentProvider:
        """Small random weights.

        Args:
            seed: of the weights.
            hidden_size: H of the target.
            size: M.
        """
        # Gains at which a draft depends on the whole text and on its last token.
        sizes = {
            "memory": (1.1, size, size),
            "seen": (0.9, 2 * hidden_size, size),
            "out": (0.9, size, hidden_size),
        }
        keys = mx.random.split(mx.random.key(seed), len(sizes))
        weights = {
            name: mx.random.normal((ins, outs), key=key) * gain * ins**-0.5
            for (name, (gain, ins, outs)), key in zip(sizes.items(), keys, strict=True)
        }
        mx.eval(weights)
        return cls(weights)

    def close(self) -> None:
        """Let the weights go."""
        self._weights.clear()
