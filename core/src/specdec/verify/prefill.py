"""Reading a prompt: target and drafter in step, chunk by chunk, one row at a time.

A reading belongs to nobody until it is joined, so other rows can decode between its chunks. What a
prefix cache holds of the prompt is restored instead, for both sides together. A row that has
emitted already, in a group that failed, is read the same way: all but its pending token.
"""

from __future__ import annotations

import time
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, evolve, field

from specdec.errors import OptionError
from specdec.verify.prefix import bind_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint
    from specdec.state import RowState
    from specdec.targets import Target, Window
    from specdec.verify.lane import DraftLane
    from specdec.verify.prefix import PrefixBinding
    from specdec.verify.prompts import DraftPrompt, DraftPrompts
    from specdec.verify.request import Request
    from specdec.verify.row import Row

__all__ = ["Reading", "begin_reading", "check_alike", "why_apart"]


@define(eq=False)
class Reading:
    """A row whose prompt is read, and which has joined nothing yet.

    Attributes:
        row: the host's side.
        state: the target's side, one row.
        draft: the drafter's side; ``None`` without one.
        apart: why the row decodes one position at a time, if it does.
        first: ``[1, 1, V]`` logits after the last token, where the drafter wants the whole prompt
            read and all of it was; else that token is pending.
        checkpoint: the draft row, once all is read; ``None`` without one or after a failure.
        done: whether all is read.
    """

    row: Row
    state: RowState
    draft: DraftPrompt | None
    apart: str | None
    first: mx.array | None = None
    checkpoint: RowCheckpoint | None = None
    done: bool = False
    _target: Target = field(kw_only=True)
    _chunks: list[tuple[int, int]] = field(kw_only=True)
    _snapshots: list[int] = field(kw_only=True)

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        if self.done:
            return 0
        return len(self.row.tokens) - (self._chunks[0][0] if self._chunks else self._last)

    @property
    def next_chunk(self) -> int:
        """Tokens that the next ``step`` reads."""
        if self._chunks:
            start, end = self._chunks[0]
            return end - start
        return int(not self.done and self.draft is not None and self.draft.whole)

    @property
    def _last(self) -> int:
        return len(self.row.tokens) - 1

    def step(self) -> int:
        """Read the next chunk, on the current stream.

        The last token is always a window of its own, as in mlx-lm, so the first sample comes from
        the same shapes with and without a drafter.

        Returns:
            Tokens that were read.
        """
        row = self.row
        try:
            if self._chunks:
                start, end = self._chunks.pop(0)
                self._read(start, end)
                if row.request.progress is not None:
                    row.request.progress(end, len(row.tokens))
                if row.prefix is not None and end in self._snapshots:
                    drafted = None if self.draft is None else self.draft.snapshot()
                    row.prefix.keep(tuple(row.tokens[:end]), self.state, 0, drafted)
                mx.clear_cache()
                return end - start
            return self._finish()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the reading up, whatever was read."""
        if self.draft is not None:
            self.draft.close()

    def _finish(self) -> int:
        whole = self.draft is not None and self.draft.whole
        if whole:
            self.first = self._read(self._last, self._last + 1).logits
        if self.draft is not None:
            self.checkpoint = self.draft.hand_over()
        self.row.processed = self._last + whole
        self.done = True
        return int(whole)

    def _read(self, start: int, end: int) -> Window:
        """The target reads a chunk, and then the drafter.

        What was emitted before, by a row that is read again, is read in windows as it was decoded:
        a prompt's chunk may see keys that are not quantized yet, or have left a window.
        """
        decoded = len(self.row.request.prompt) - 1
        if start < decoded < end:
            self._window(start, decoded, reading=True)
            start = decoded
        while start >= decoded:
            room = self.state.room(0)
            step = end - start if room is None else min(end - start, room)
            window = self._window(start, start + step, reading=False)
            start += step
            if start == end:
                return window
        return self._window(start, end, reading=True)

    def _window(self, start: int, end: int, *, reading: bool) -> Window:
        draft, state = self.draft, self.state
        ids = mx.array([self.row.tokens[start:end]], mx.int32)
        state.begin_round(end - start, reading=reading)
        if draft is None or draft.group is None:
            window = self._target.forward(ids, state)
        else:
            prompts = draft.prompts
            window = self._target.forward(ids, state, prompts.context, prompts.taps)
        state.commit_round()
        mx.eval(state.arrays())
        if draft is not None:
            draft.read(ids, window.context)
        return window


def begin_reading(
    target: Target,
    lane: DraftLane | None,
    row: Row,
    *,
    step_size: int,
    apart: str | None,
    cuts: Sequence[int] = (),
) -> Reading:
    """Begin to read a row's tokens, up to where its next round begins.

    Args:
        target: the bound target.
        lane: the draft side, or ``None``.
        row: the row; the caches of its request are continued from.
        step_size: tokens per chunk.
        apart: why the row decodes one position at a time, if it does.
        cuts: numbers of tokens at which a chunk ends.

    Raises:
        OptionError: the request's caches do not fit the target.
    """
    request = row.request
    prompts = None
    if lane is not None and request.num_draft_tokens and not lane.prompts.given_up:
        prompts = lane.prompts
    tokens = tuple(row.tokens)
    row.prefix = prefix = bind_prefix(request.prefix_cache, target, prompts, request.cache_options)
    row.width = request.num_draft_tokens if lane is not None else 0
    row.admitted = row.admitted or time.perf_counter()
    begun = None if prefix is None else _restored(target, prompts, tokens, prefix)
    state, draft, start = begun or _cold(target, prompts, request)
    try:
        snapshots: list[int] = []
        if prefix is not None:
            row.prefix = evolve(prefix, untold=start - state.lengths[0])
            snapshots = prefix.boundaries(tokens, request.snapshot_at, start)
        continued = request.cache is not None or request.continue_from is not None
        if not row.steps:
            row.stats.prompt_tokens = len(tokens)
            row.stats.cached_tokens = state.lengths[0] if continued else start
        if request.progress is not None:
            request.progress(start, len(tokens))
    except BaseException:
        if draft is not None:
            draft.close()
        raise
    return Reading(
        row,
        state,
        draft,
        apart,
        target=target,
        chunks=_chunks(start, len(tokens) - 1, step_size, [*snapshots, *cuts]),
        snapshots=snapshots,
    )


def why_apart(target: Target, request: Request) -> str | None:
    """Why the row of this request decodes one position at a time, if it does.

    It depends on the caller's caches as well as on the target's own.

    Args:
        target: the bound target.
        request: what is to be admitted.

    Raises:
        OptionError: the request's caches do not fit the target.
    """
    given = request.cache if request.cache is not None else request.continue_from
    if given is None:
        return target.no_speculation_reason
    return target.state_of(given, request.cache_options).reason


def check_alike(apart: Sequence[str | None]) -> None:
    """Check that rows are of one kind.

    Args:
        apart: of each row, why it decodes one position at a time, if it does.

    Raises:
        OptionError: they would share a group with rows of the other kind.
    """
    if len({reason is None for reason in apart}) > 1:
        different = next(reason for reason in apart if reason is not None)
        raise OptionError(
            f"a prompt_cache cannot join rows of another kind ({different}); "
            "generate it in a group of its own"
        )


def _chunks(start: int, end: int, step: int, cuts: list[int]) -> list[tuple[int, int]]:
    """Chunks of at most ``step`` tokens that end at each of the ``cuts``."""
    places = [start]
    while places[-1] < end:
        places.append(min([end, places[-1] + step, *(cut for cut in cuts if cut > places[-1])]))
    return list(pairwise(places))


def _cold(
    target: Target, prompts: DraftPrompts | None, request: Request
) -> tuple[RowState, DraftPrompt | None, int]:
    """Both sides where no token of the prompt is read yet."""
    options = request.cache_options
    if request.cache is not None:
        state = target.state_of(request.cache, options)
    elif request.continue_from is not None:
        # Native rows live in the caches that they are given.
        state = target.state_of(deepcopy(list(request.continue_from)), options)
    else:
        state = target.new_state(options)
    return state, prompts.open() if prompts is not None else None, 0


def _restored(
    target: Target,
    prompts: DraftPrompts | None,
    tokens: tuple[int, ...],
    prefix: PrefixBinding,
) -> tuple[RowState, DraftPrompt | None, int] | None:
    """Both sides from the prefix cache; ``None`` where it holds nothing that fits."""
    hit = prefix.take(tokens)
    if hit is None:
        return None
    with hit:  # what is borrowed from a file is held until its copies are evaluated
        draft = None
        try:
            state = target.state_of(hit.caches, prefix.options)
            if prompts is not None and hit.checkpoint is not None:
                draft = prompts.restore(hit.checkpoint)
                if draft is None:
                    return None
            mx.eval(state.arrays())
            # A state of recurrent caches alone cannot tell.
            if state.lengths[0] not in {0, hit.tokens}:
                raise ValueError(f"{hit.tokens} tokens, but {state.lengths[0]} positions")
        except BaseException as error:
            if draft is not None:
                draft.close()
            if not isinstance(error, Exception):
                raise
            return None  # an entry that cannot be read is as good as none: the prompt is read
    return state, draft, hit.tokens
