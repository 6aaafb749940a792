"""Reading a prompt: target and drafter in step, chunk by chunk, one row at a time.

What a prefix cache holds of it is restored instead, for both sides together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, evolve, frozen

from specdec.contract import PrefillMode
from specdec.errors import OptionError
from specdec.verify.prefix import bind_prefix
from specdec.verify.request import Row
from specdec.verify.stats import GenerationStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DraftPrefillGroup, RowCheckpoint
    from specdec.state import RowState
    from specdec.targets import Target, Window
    from specdec.verify.lane import DraftLane
    from specdec.verify.prefix import PrefixBinding
    from specdec.verify.prompts import DraftPrompts
    from specdec.verify.request import Request

__all__ = ["Newcomer", "read_prompt", "why_apart"]


@frozen(eq=False)
class Newcomer:
    """A row whose prompt was read, and which has joined nothing yet.

    Attributes:
        row: the host's side.
        state: the target's side, one row.
        checkpoint: the drafter's side; ``None`` without one or after it failed.
        first: ``[1, 1, V]`` logits after the last prompt token, where the whole prompt was read;
            ``None`` where that token is pending.
    """

    row: Row
    state: RowState
    checkpoint: RowCheckpoint | None
    first: mx.array | None


def read_prompt(
    target: Target, lane: DraftLane | None, request: Request, step_size: int
) -> Newcomer:
    """Read a request's prompt up to where its first round begins.

    The last prompt token is always a window of its own, as in mlx-lm, so the first token comes
    from the same shapes with and without a drafter.

    Args:
        target: the bound target.
        lane: the draft side, or ``None``.
        request: the request; its cache is continued from.
        step_size: tokens per chunk.

    Raises:
        OptionError: the request's cache does not fit the target.
    """
    prompts = None
    if lane is not None and request.num_draft_tokens and not lane.prompts.given_up:
        prompts = lane.prompts
    prefix = bind_prefix(request.prefix_cache, target, prompts)
    reader = None if prefix is None else _restored(target, prompts, request, prefix)
    reader = reader or _cold(target, prompts, request)
    if prefix is not None:
        prefix = evolve(prefix, untold=reader.start - reader.state.lengths[0])
    held = reader.state.lengths[0] if request.cache is not None else reader.start
    prompt, total = request.prompt, len(request.prompt)
    progress = request.progress or (lambda _done, _of: None)
    try:
        progress(reader.start, total)
        snapshots: list[int] = []
        if prefix is not None:
            snapshots = prefix.boundaries(prompt, request.snapshot_at, reader.start)
        for start, end in _chunks(reader.start, total - 1, step_size, snapshots):
            reader.read(prompt[start:end])
            progress(end, total)
            if prefix is not None and end in snapshots:
                prefix.keep(prompt[:end], reader.state, 0, reader.snapshot())
            mx.clear_cache()
        first = reader.read(prompt[-1:]).logits if reader.whole else None
        checkpoint = reader.hand_over()
    except BaseException:
        reader.shut()
        raise
    row = Row(
        request=request,
        seed=request.sampling.resolved_seed(),
        tokens=list(prompt),
        width=request.num_draft_tokens if lane is not None else 0,
        processed=total if first is not None else total - 1,
        stats=GenerationStats(prompt_tokens=total, cached_tokens=held),
        prefix=prefix,
    )
    return Newcomer(row, reader.state, checkpoint, first)


def why_apart(target: Target, requests: Sequence[Request], live: RowState | None) -> str | None:
    """Why the rows of these requests decode one position at a time, if they do.

    It depends on the caller's caches as well as on the target's own.

    Args:
        target: the bound target.
        requests: what is to be admitted.
        live: the state of the rows that decode already, if there are any.

    Raises:
        OptionError: they would share a group with rows of the other kind.
    """
    reasons = [
        target.no_speculation_reason
        if request.cache is None
        else target.state_of(request.cache).reason
        for request in requests
    ]
    if live is not None:
        reasons.append(live.reason)
    if len({reason is None for reason in reasons}) > 1:
        different = next(reason for reason in reasons if reason is not None)
        raise OptionError(
            f"a prompt_cache cannot join rows of another kind ({different}); "
            "generate it in a group of its own"
        )
    return next((reason for reason in reasons if reason is not None), None)


def _chunks(start: int, end: int, step: int, cuts: list[int]) -> list[tuple[int, int]]:
    """Chunks of at most ``step`` tokens that end at each of the ``cuts``."""
    places = [start]
    while places[-1] < end:
        places.append(min([end, places[-1] + step, *(cut for cut in cuts if cut > places[-1])]))
    return list(pairwise(places))


@define(eq=False)
class _Reader:
    """One row of target and drafter that reads a prompt.

    Attributes:
        target: the bound target.
        prompts: the drafter's side, or ``None``.
        state: the target's row.
        group: the drafter's prefill group; ``None`` without one, or after it failed.
        start: prompt tokens that both sides hold from the beginning.
    """

    target: Target
    prompts: DraftPrompts | None
    state: RowState
    group: DraftPrefillGroup | None
    start: int = 0

    @property
    def whole(self) -> bool:
        """Whether the target reads the last prompt token too."""
        return self.group is not None and self.group.prefill_mode == PrefillMode.FULL

    def read(self, chunk: tuple[int, ...]) -> Window:
        """The target reads a chunk, and then the drafter."""
        prompts, group = self.prompts, self.group
        ids = mx.array([chunk], mx.int32)
        self.state.begin_round(len(chunk))
        if prompts is None or group is None:
            window = self.target.forward(ids, self.state)
        else:
            window = self.target.forward(ids, self.state, prompts.context, prompts.taps)
        self.state.commit_round()
        mx.eval(self.state.arrays())
        if prompts is not None and group is not None:
            taken = prompts.read(group, ids, window.context)
            self.group = group if taken else None
        return window

    def snapshot(self) -> RowCheckpoint | None:
        """The draft row as it is, while the prompt is read on."""
        if self.prompts is None or self.group is None:
            return None
        checkpoint = self.prompts.snapshot(self.group)
        if checkpoint is None:
            self.group = None
        return checkpoint

    def hand_over(self) -> RowCheckpoint | None:
        """The draft row's checkpoint; its group is closed."""
        group, self.group = self.group, None
        if self.prompts is None or group is None:
            return None
        return self.prompts.hand_over(group)

    def shut(self) -> None:
        """Close the draft group."""
        group, self.group = self.group, None
        if self.prompts is not None and group is not None:
            self.prompts.shut(group)


def _cold(target: Target, prompts: DraftPrompts | None, request: Request) -> _Reader:
    state = target.new_state() if request.cache is None else target.state_of(request.cache)
    return _Reader(target, prompts, state, prompts.open() if prompts is not None else None)


def _restored(
    target: Target, prompts: DraftPrompts | None, request: Request, prefix: PrefixBinding
) -> _Reader | None:
    """Both sides from the prefix cache; ``None`` where it holds nothing that fits."""
    hit = prefix.take(request.prompt)
    if hit is None:
        return None
    with hit:  # what is borrowed from a file is held until its copies are evaluated
        group = None
        try:
            state = target.state_of(hit.caches)
            if prompts is not None and hit.checkpoint is not None:
                group = prompts.restore(hit.checkpoint)
                if group is None:
                    return None
            mx.eval(state.arrays())
            # A state of recurrent caches alone cannot tell.
            if state.lengths[0] not in {0, hit.tokens}:
                raise ValueError(f"{hit.tokens} tokens, but {state.lengths[0]} positions")
        except BaseException as error:
            if prompts is not None and group is not None:
                prompts.shut(group)
            if not isinstance(error, Exception):
                raise
            return None  # an entry that cannot be read is as good as none: the prompt is read
    return _Reader(target, prompts, state, group, start=hit.tokens)
