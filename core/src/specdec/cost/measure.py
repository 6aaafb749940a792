"""Timing a target's forwards where it runs: windows over rows of random tokens, dropped again.

What is timed is what a round waits for: building the graph, submitting it, and one host read of the
argmax. Widths take turns, so that a machine that drifts drifts for all of them, and the first turn,
in which kernels and plans are made, is thrown away. Plain decoding is timed as it runs: each window
is submitted before the one before it is read.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import evolve, frozen

from specdec.cost.curve import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.state import RowState
    from specdec.targets import Target

__all__ = ["WIDTHS", "Measured", "measure", "rows_at", "time_plain", "time_windows"]

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 11, 16)
"""Positions of the windows that are timed."""

_CHUNK = 2048
_LEAST = 2  # turns that a median is taken of


@frozen
class Measured:
    """What a batch of one size takes.

    Attributes:
        windows: milliseconds by point.
        plain: milliseconds of a plain round, one after another.
    """

    windows: dict[Point, float]
    plain: float


def measure(
    target: Target,
    batch: int,
    context: int,
    *,
    widths: Sequence[int] = WIDTHS,
    seconds: float = 1.5,
    progress: Callable[[float], None] | None = None,
) -> Measured:
    """Time a target's rounds at one batch size and context.

    Args:
        target: the target.
        batch: rows.
        context: tokens of each.
        widths: positions of the windows.
        seconds: to spend, about; a target that is slow gets fewer widths, and then more time.
        progress: called with the share that is done.
    """
    state = rows_at(target, batch, context)
    if not state.can_roll_back:
        widths = (1,)
    begin = time.perf_counter()
    plain = time_plain(target, state, seconds=seconds / 5)
    if 3 * sum(widths) * plain / 1000 > 4 * seconds:
        widths = [width for width in widths if width in {1, 2, 4, 8, 16}]
    left = max(0.0, seconds - (time.perf_counter() - begin))
    windows = time_windows(target, state, widths=widths, seconds=left, progress=progress)
    # Plain rounds have made the rows a little longer, which differs from run to run.
    return Measured({evolve(p, context=context): time for p, time in windows.items()}, plain)


def rows_at(target: Target, batch: int, context: int) -> RowState:
    """Rows that have read as many random tokens.

    Args:
        target: the target.
        batch: rows.
        context: tokens of each.
    """
    ids = mx.random.randint(0, target.vocab_size, (1, max(1, context)), key=mx.random.key(0))
    first = target.new_state()
    step = _CHUNK if first.can_roll_back else 1
    for begin in range(0, ids.shape[1], step):
        chunk = ids[:, begin : begin + step]
        first.begin_round(chunk.shape[1], reading=True)
        target.forward(chunk, first)
        first.commit_round()
        mx.eval(first.arrays())
    if batch > 1:
        others = [target.state_of(first.extract_row(0)) for _ in range(batch - 1)]
        first.prepare_append(others).commit()
    return first


def time_plain(target: Target, state: RowState, *, seconds: float) -> float:
    """Milliseconds of a plain round, in a run of them; the rows have read those tokens after it.

    Args:
        target: the target.
        state: its rows, between rounds.
        seconds: to spend, about.
    """
    rows = state.row_count
    ids = mx.zeros((rows, 1), mx.int32)
    spent: list[float] = []
    waiting: mx.array | None = None
    end = time.perf_counter() + seconds
    while len(spent) < 3 + _LEAST or (time.perf_counter() < end and len(spent) < 64):
        begin = time.perf_counter()
        state.begin_round(1)
        ids = mx.argmax(target.forward(ids, state).logits, axis=-1)
        mx.async_eval(ids)  # type: ignore[no-untyped-call]  # untyped in MLX's stubs
        state.commit_round()
        if waiting is not None:
            waiting.tolist()
        waiting = ids
        spent.append(time.perf_counter() - begin)
    mx.eval(ids, *state.arrays())
    return 1000 * statistics.median(spent[3:])


def time_windows(
    target: Target,
    state: RowState,
    *,
    widths: Sequence[int] = WIDTHS,
    seconds: float = 1.5,
    progress: Callable[[float], None] | None = None,
) -> dict[Point, float]:
    """Time windows of several widths over the same rows.

    Args:
        target: the target.
        state: its rows, between rounds; they are as they were afterwards.
        widths: positions of each window.
        seconds: to spend, about; two turns of each width are taken at least.
        progress: called with the share that is done.

    Returns:
        Milliseconds by point, medians.
    """
    rows, context = state.row_count, max(state.lengths)
    ids = mx.random.randint(0, target.vocab_size, (rows, max(widths)), key=mx.random.key(1))
    mx.eval(ids)
    times: dict[int, list[float]] = {width: [] for width in widths}
    begin, turn, done = time.perf_counter(), 0, 0.0
    while done < 1:
        for place in range(len(widths)):
            width = widths[(place + turn) % len(widths)]
            spent = _window(target, state, ids[:, :width])
            if turn:
                times[width].append(spent)
        turn += 1
        passed = (time.perf_counter() - begin) / seconds if seconds > 0 else 1.0
        done = min(1.0, passed, turn / (1 + _LEAST))
        if progress is not None:
            progress(done)
    return {
        Point(rows, width, context): 1000 * statistics.median(spent)
        for width, spent in times.items()
    }


def _window(target: Target, state: RowState, ids: mx.array) -> float:
    begin = time.perf_counter()
    state.begin_round(ids.shape[1])
    best: Any = mx.argmax(target.forward(ids, state).logits, axis=-1)
    best.tolist()
    if state.can_roll_back:
        # One position stays in half the rounds or more, and what comes after it was rejected.
        state.rollback([0] * state.row_count)
    else:
        state.commit_round()
    return time.perf_counter() - begin
