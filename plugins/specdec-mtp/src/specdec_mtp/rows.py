"""A head's rows: they read with the target, go ahead of it, and follow it.

Entry p of a head's cache is made from the target's hidden state of position p and the token of
position p + 1. Between rounds a row keeps what the head has not read: the hidden states of its
last positions, each with the token that followed, and the last hidden, which waits for the pending
token. A round's first step reads all of it; further steps go on from the head's own output.

What is kept of those further steps is a setting. ``Chain.TRUE``: nothing; accepted tokens are read
anew, in the next round's first step, from the target's own hidden states, so a row's state follows
from its text. ``Chain.OWN``: the entries of accepted tokens stay as the head made them from its own
output. Where all drafts were accepted, the last of them was never read; it is read next, from the
true hidden.

Shapes: B rows, L positions, W = 1 + the longest draft, T unread hidden states, H hidden size.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, frozen

from specdec.contract import DeviceProposal, PrefillMode, Proposal, Swap, check_keep
from specdec.drafting import checks
from specdec.errors import CheckpointError, ClosedError, NoOpenRoundError, RoundOpenError
from specdec.state import RaggedState
from specdec_mtp.attachment import HeadRow, restore, store
from specdec_mtp.reading import Unread, one_of_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import ContextKind, RecurrentMtp, RowCheckpoint
    from specdec_mtp.attachment import RowLayout
    from specdec_mtp.heads import HeadModule, Step
    from specdec_mtp.select import Choice, Chooser

__all__ = ["Chain", "HeadRows", "HeadSettings"]

_WHOLE = 2048  # positions of a prompt that the head reads at once


class Chain(StrEnum):
    """What becomes of the entries that a head made from its own output."""

    TRUE = "true"
    OWN = "own"


@frozen(kw_only=True, eq=False)
class HeadSettings:
    """A head, and how its rows use it.

    Attributes:
        module: the head.
        namespace: the provider's ``checkpoint_namespace``.
        layout: of a row's arrays.
        context: the target's hidden states that it reads.
        chain: what is kept of its own steps.
        feeds_raw: whether a step goes on from the output before the head's norm.
        reads_prompt: whether it reads the prompt; else its history starts with the first draft.
    """

    module: HeadModule
    namespace: str
    layout: RowLayout
    context: ContextKind
    chain: Chain
    feeds_raw: bool
    reads_prompt: bool


@define(eq=False)
class _Round:
    pending: list[int]
    depths: list[int]
    steps: int  # windows of one position behind the first
    drafts: list[list[int]] | None  # None while they are on the device alone


class HeadRows:
    """A group of rows that reads prompts and decodes.

    Args:
        settings: the head and how it is used.
        port: the target's embedding.
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
        self._port = port
        self._vocab_size = vocab_size
        self._choose = choose
        self._state: RaggedState | None = None
        self._tokens: list[int] = []
        self._unread = Unread([], None)
        self._widest = 1
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
        return len(self._tokens)

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows' state; see the contract."""
        self._between_rounds("prepare_append")
        if not checkpoints:
            return Swap(lambda: None)
        rows = [self._restored(checkpoint) for checkpoint in checkpoints]
        states = [RaggedState(row.caches) for row in rows]
        first = self._state is None
        state = states[0] if first else self._state
        assert state is not None
        change = state.prepare_append(states[1:] if first else states)
        unread = self._unread.joined(
            [(row.unread, row.hidden) for row in rows], self._port.hidden_size
        )

        def join() -> None:
            if self._closed:
                return
            change.commit()
            self._state, self._unread = state, unread
            self._tokens = [*self._tokens, *(row.tokens for row in rows)]

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
        if list(keep) == list(range(self.row_count)):
            return
        if not keep:
            self._state = None
        elif self._state is not None:
            self._state.filter_rows(keep)
        self._unread = self._unread.taken(keep)
        self._tokens = [self._tokens[row] for row in keep]

    def capture(self, row: int, /) -> RowCheckpoint:
        """A row's state in memory of its own; see the contract."""
        self._between_rounds("capture")
        place = checks.row_number("capture", row, self.row_count)
        assert self._state is not None
        unread, hidden = self._unread.row(place)
        caches = self._state.extract_row(place)
        kept = HeadRow(self._tokens[place], caches, unread, hidden)
        return store(kept, self.namespace, self._settings.layout)

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read a chunk of every row's prompt; see the contract.

        Only keys and values are evaluated, and the last hidden state.
        """
        self._between_rounds("prefill")
        checks.check_token_array("prefill", tokens, self.row_count)
        length = tokens.shape[1]
        hidden = self._features("prefill", context, length)
        if not self.row_count or not length:
            return
        self._follow(tokens, hidden, [length] * self.row_count, self._settings.reads_prompt)
        self.materialize()

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
            self._follow(tokens, hidden, counts, everything=True)
            assert self._state is not None
            _submit(self._state)

    def _follow(
        self, tokens: mx.array, hidden: mx.array, counts: list[int], everything: bool
    ) -> None:
        """Read what was unread, and the new tokens with the hidden states before them."""
        state = self._state
        assert state is not None
        plan = self._unread.followed(tokens, hidden, counts, everything=everything)
        for start in range(0, max(plan.lengths), _WHOLE):
            window = plan.window(start, min(start + _WHOLE, max(plan.lengths)))
            state.begin_round(window.width)
            self._read(window.tokens, window.hidden)
            state.rollback(window.lengths)
            if start:
                mx.eval(state.arrays())
        self._unread = plan.after
        self._tokens = [had + count for had, count in zip(self._tokens, counts, strict=True)]

    def materialize(self) -> None:
        """Evaluate what was restored or read."""
        if self._closed:
            raise ClosedError("materialize")
        arrays = [] if self._state is None else self._state.arrays()
        self._unread = self._unread.detached()
        mx.eval(arrays, self._unread.arrays())

    def _read(self, ids: mx.array, hidden: mx.array) -> Step:
        """One call of the head over the window that was begun: ``[B, L]``, ``[B, L, H]``."""
        assert self._state is not None
        [(caches, _)] = self._state.row_caches
        return self._settings.module(self._port.embed(ids), hidden, caches)

    def _features(self, verb: str, context: mx.array | None, width: int) -> mx.array:
        return checks.check_features(verb, context, self.row_count, width, self._port.hidden_size)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[int]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        opened, choices = self._open(pending, depths, steps)
        ids: Any = _stacked(choices).tolist() if choices else [[]] * self.row_count
        drafts = [row[:depth] for row, depth in zip(ids, opened.depths, strict=True)]
        opened.drafts = drafts
        told = [list(draft) for draft in drafts]
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
        return DeviceProposal(_stacked(choices), resolve, lengths, _declared(choices))

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The first token ``[B, 1]`` that a draft would propose; changes nothing."""
        heads, asked, drawn = self._asked("preview", pending, depths, steps)
        if not any(asked):
            return None
        scored, _ = self._first(heads, most=1, keep=False)
        return self._chosen(scored, drawn).ids[:, None]

    def _open(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> tuple[_Round, list[Choice]]:
        heads, asked, drawn = self._asked("draft", pending, depths, steps)
        depth = max(asked, default=0)
        self._widest = max(self._widest, 1 + depth)
        choices: list[Choice] = []
        if heads:
            choices = self._chain(heads, depth, drawn)
        self._round = _Round(heads, asked, max(depth - 1, 0), None)
        return self._round, choices

    def _chain(self, heads: list[int], depth: int, drawn: list[int]) -> list[Choice]:
        """The head over what is unread, then over its own output: ``depth`` choices of ``[B]``."""
        state = self._state
        assert state is not None
        scored, fed = self._first(heads, most=self._widest, keep=True)
        choices: list[Choice] = []
        for at in range(depth):
            choices.append(self._chosen(scored, [step + at for step in drawn]))
            if at + 1 < depth:
                state.begin_round(1)
                step = self._read(choices[-1].ids[:, None], fed)
                state.commit_round()
                scored, fed = step.scored, self._fed(step)
        if not depth:
            _submit(state)
        return choices

    def _first(self, heads: list[int], *, most: int, keep: bool) -> tuple[mx.array, mx.array]:
        """Read what is unread and the pending tokens; ``[B, 1, H]`` scored, and to go on from."""
        state, unread = self._state, self._unread
        assert state is not None
        needed = 1 + unread.longest
        width = state.window_width(needed, max(needed, most))
        lengths = [1 + len(tokens) for tokens in unread.tokens]
        ids, hidden = unread.window(heads, width)
        state.begin_round(width)
        step = self._read(ids, hidden)
        state.rollback(lengths if keep else [0] * len(lengths))
        last = one_of_each([length - 1 for length in lengths], width)
        return last(step.scored), last(self._fed(step))

    def _fed(self, step: Step) -> mx.array:
        return step.raw if self._settings.feeds_raw else step.scored

    def _chosen(self, scored: mx.array, steps: list[int]) -> Choice:
        assert self._choose is not None, "a prefill group drafts nothing"
        return self._choose(scored, steps)

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
            self._settle(opened, opened.drafts, counts, hidden)
        self._round = None

    def _settle(
        self, opened: _Round, drafts: list[list[int]], counts: list[int], hidden: mx.array
    ) -> None:
        """Keep what the settings say of the chain; the rest of what was accepted is unread."""
        state = self._state
        assert state is not None
        own = self._settings.chain is Chain.OWN
        # A chain of d drafts has read d - 1 of them.
        kept = [
            min(count, max(len(draft) - 1, 0)) if own else 0
            for count, draft in zip(counts, drafts, strict=True)
        ]
        if opened.steps:
            state.take_back([opened.steps - count for count in kept])
        tokens = [
            tuple(draft[begin:count])
            for draft, begin, count in zip(drafts, kept, counts, strict=True)
        ]
        self._unread = Unread(tokens, _spans(hidden, kept, counts))
        self._tokens = [had + 1 + count for had, count in zip(self._tokens, counts, strict=True)]

    def close(self) -> None:
        """Let the rows go."""
        self._closed = True
        self._round = self._state = None
        self._tokens, self._unread = [], Unread([], None)

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


def _submit(state: RaggedState) -> None:
    """Compute what was read while the host goes on: no graph may grow from round to round."""
    mx.async_eval(*state.arrays())  # type: ignore[no-untyped-call]  # untyped in MLX's stubs


def _stacked(choices: list[Choice]) -> mx.array:
    """``[B, d]`` int32."""
    return mx.stack([choice.ids for choice in choices], axis=1).astype(mx.int32)


def _declared(choices: list[Choice]) -> mx.array | None:
    """``[B, d, V or N]``, if they were asked for."""
    logq = [choice.logq for choice in choices if choice.logq is not None]
    return mx.stack(logq, axis=1) if logq and len(logq) == len(choices) else None


def _spans(hidden: mx.array, begins: list[int], ends: list[int]) -> mx.array:
    """Row b's hidden states ``begins[b]`` to ``ends[b]``, left-aligned: ``[B, T, H]``."""
    most = 1 + max(end - begin for begin, end in zip(begins, ends, strict=True))
    if not any(begins):
        return hidden[:, :most]
    index = mx.array(begins, mx.int32)[:, None] + mx.arange(most, dtype=mx.int32)
    index = mx.minimum(index, hidden.shape[1] - 1)[..., None]
    return mx.take_along_axis(
        hidden, mx.broadcast_to(index, (*index.shape[:2], hidden.shape[2])), 1
    )
