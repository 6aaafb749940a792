"""Timing a target's forwards where it runs: windows over rows of random tokens, dropped again.

What is timed is what a round waits for: building the graph, submitting it, and one host read of the
argmax. Widths take turns, so that a machine that drifts drifts for all of them, and the first turn,
in which kernels and plans are made, is thrown away.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from specdec.cost.curve import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.state import RowState
    from specdec.targets import Target

__all__ = ["WIDTHS", "rows_at", "time_windows"]

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 11, 16)
"""Positions of the windows that are timed."""

_CHUNK = 2048
_LEAST = 3  # turns that a median is taken of


def rows_at(target: Target, batch: int, context: int) -> RowState:
    """Rows that have read as many random tokens.

    Args:
        target: the target.
        batch: rows.
        context: tokens of each.
    """
    ids = mx.random.randint(0, target.vocab_size, (1, max(1, context)), key=mx.random.key(0))
    first = target.new_state()
    for begin in range(0, ids.shape[1], _CHUNK):
        chunk = ids[:, begin : begin + _CHUNK]
        first.begin_round(chunk.shape[1], reading=True)
        target.forward(chunk, first)
        first.commit_round()
        mx.eval(first.arrays())
    if batch > 1:
        others = [target.state_of(first.extract_row(0)) for _ in range(batch - 1)]
        first.prepare_append(others).commit()
    return first


def time_windows(
    target: Target,
    state: RowState,
    *,
    widths: Sequence[int] = WIDTHS,
    seconds: float = 2.0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Point, float]:
    """Time windows of several widths over the same rows.

    Args:
        target: the target.
        state: its rows, between rounds; they are as they were afterwards.
        widths: positions of each window.
        seconds: to spend, about; three turns of each width are taken at least.
        progress: called with what is done and what there is, in thousandths.

    Returns:
        Milliseconds by point, medians.
    """
    rows, context = state.row_count, max(state.lengths)
    ids = mx.random.randint(0, target.vocab_size, (rows, max(widths)), key=mx.random.key(1))
    mx.eval(ids)
    times: dict[int, list[float]] = {width: [] for width in widths}
    end, turn = time.perf_counter() + seconds, 0
    while turn <= _LEAST or time.perf_counter() < end:
        for place in range(len(widths)):
            width = widths[(place + turn) % len(widths)]
            spent = _window(target, state, ids[:, :width])
            if turn:
                times[width].append(spent)
        turn += 1
        if progress is not None:
            left = max(0.0, end - time.perf_counter()) / seconds
            progress(int(1000 * (1 - left)), 1000)
    return {
        Point(rows, width, context): 1000 * statistics.median(spent)
        for width, spent in times.items()
    }


def _window(target: Target, state: RowState, ids: mx.array) -> float:
    begin = time.perf_counter()
    state.begin_round(ids.shape[1])
    best: Any = mx.argmax(target.forward(ids, state).logits, axis=-1)
    best.tolist()
    spent = time.perf_counter() - begin
    state.rollback([0] * state.row_count)
    return spent
