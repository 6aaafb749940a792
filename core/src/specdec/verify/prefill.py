"""Reading a prompt: target and drafter in step, chunk by chunk, one row at a time.

What a prefix cache holds of it is restored instead, for both sides together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define, frozen

from specdec.contract import ContextKind, PrefillMode
from specdec.verify.prefix import bind_prefix
from specdec.verify.request import Row
from specdec.verify.stats import GenerationStats

if TYPE_CHECKING:
    from specdec.contract import DraftPrefillGroup, RowCheckpoint
    from specdec.state import RowState
    from specdec.targets import Target, Window
    from specdec.verify.lane import DraftLane
    from specdec.verify.prefix import PrefixBinding
    from specdec.verify.request import Request

__all__ = ["Newcomer", "read_prompt"]


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
    prefix = bind_prefix(target, lane, request)
    reader = (prefix and _restored(target, lane, request, prefix)) or _cold(target, lane, request)
    held = reader.state.lengths[0] if request.cache is not None else reader.start
    prompt, total = request.prompt, len(request.prompt)
    progress = request.progress or (lambda _done, _of: None)
    try:
        progress(reader.start, total)
        snapshots = prefix.boundaries(request, reader.start) if prefix is not None else []
        for start, end in _chunks(reader.start, total - 1, step_size, snapshots):
            reader.read(prompt[start:end])
            progress(end, total)
            if prefix is not None and end in snapshots:
                prefix.keep(target, prompt[:end], reader.state, 0, reader.snapshot())
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
        lane: the draft side, or ``None``.
        state: the target's row.
        group: the drafter's prefill group; ``None`` without one, or after it failed.
        start: prompt tokens that both sides hold from the beginning.
    """

    target: Target
    lane: DraftLane | None
    state: RowState
    group: DraftPrefillGroup | None
    start: int = 0

    @property
    def whole(self) -> bool:
        """Whether the target reads the last prompt token too."""
        return self.group is not None and self.group.prefill_mode == PrefillMode.FULL

    def read(self, chunk: tuple[int, ...]) -> Window:
        """The target reads a chunk, and then the drafter."""
        lane, group = self.lane, self.group
        context = ContextKind.NONE if lane is None or group is None else lane.context
        ids = mx.array([chunk], mx.int32)
        self.state.begin_round(len(chunk))
        window = self.target.forward(ids, self.state, context, lane.taps if lane else ())
        self.state.commit_round()
        mx.eval(self.state.arrays())
        if lane is not None and group is not None and not lane.read(group, ids, window.context):
            self.group = None
        return window

    def snapshot(self) -> RowCheckpoint | None:
        """The draft row as it is, while the prompt is read on."""
        if self.lane is None or self.group is None:
            return None
        checkpoint = self.lane.snapshot(self.group)
        if checkpoint is None:
            self.group = None
        return checkpoint

    def hand_over(self) -> RowCheckpoint | None:
        """The draft row's checkpoint; its group is closed."""
        group, self.group = self.group, None
        if self.lane is None or group is None:
            return None
        return self.lane.checkpoint(group)

    def shut(self) -> None:
        """Close the draft group."""
        group, self.group = self.group, None
        if self.lane is not None and group is not None:
            self.lane.shut(group)


def _cold(target: Target, lane: DraftLane | None, request: Request) -> _Reader:
    state = target.new_state() if request.cache is None else target.state_of(request.cache)
    return _Reader(target, lane, state, lane.open_prefill() if lane is not None else None)


def _restored(
    target: Target, lane: DraftLane | None, request: Request, prefix: PrefixBinding
) -> _Reader | None:
    """Both sides from the prefix cache; ``None`` where it holds nothing that fits."""
    hit = prefix.take(request.prompt)
    if hit is None:
        return None
    with hit:  # what is borrowed from a file is held until its copies are evaluated
        group = None
        try:
            state = target.state_of(hit.caches)
            if lane is not None and prefix.drafts:
                assert hit.checkpoint is not None
                group = lane.restore_prefill(hit.checkpoint)
                if group is None:
                    return None
            mx.eval(state.arrays())
        except Exception:
            # An entry that cannot be read is as good as none: the prompt is read instead.
            if lane is not None and group is not None:
                lane.shut(group)
            return None
    return _Reader(target, lane, state, group, start=hit.tokens)
