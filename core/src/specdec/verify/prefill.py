"""Reading a prompt: target and drafter in step, chunk by chunk, one row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import ContextKind, PrefillMode
from specdec.verify.request import Row
from specdec.verify.stats import GenerationStats

if TYPE_CHECKING:
    from specdec.contract import RowCheckpoint
    from specdec.state import RowState
    from specdec.targets import Target, Window
    from specdec.verify.lane import DraftLane
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
    state = target.new_state() if request.cache is None else target.state_of(request.cache)
    cached = state.lengths[0]
    group = lane.open_prefill() if lane is not None else None
    context = lane.context if group is not None and lane is not None else ContextKind.NONE
    taps = lane.taps if lane is not None else ()
    prompt, total = request.prompt, len(request.prompt)
    whole = group is not None and group.prefill_mode == PrefillMode.FULL
    progress = request.progress or (lambda _done, _of: None)

    def read(chunk: tuple[int, ...]) -> Window:
        nonlocal group
        ids = mx.array([chunk], mx.int32)
        state.begin_round(len(chunk))
        window = target.forward(ids, state, context, taps)
        state.commit_round()
        mx.eval(state.arrays())
        if group is not None and lane is not None and not lane.read(group, ids, window.context):
            group = None
        return window

    try:
        progress(0, total)
        for start in range(0, total - 1, step_size):
            chunk = prompt[start : min(start + step_size, total - 1)]
            read(chunk)
            progress(start + len(chunk), total)
            mx.clear_cache()
        first = read(prompt[-1:]).logits if whole else None
    except BaseException:
        if group is not None and lane is not None:
            lane.shut(group)
        raise
    checkpoint = lane.checkpoint(group) if group is not None and lane is not None else None
    row = Row(
        request=request,
        seed=request.sampling.resolved_seed(),
        tokens=list(prompt),
        width=request.num_draft_tokens if lane is not None else 0,
        processed=total if whole else total - 1,
        stats=GenerationStats(prompt_tokens=total, cached_tokens=cached),
    )
    return Newcomer(row, state, checkpoint, first)
