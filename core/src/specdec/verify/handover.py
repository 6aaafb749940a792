"""What an ended row leaves behind: its caller's cache, and its state for whoever keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.lane import DraftLane
    from specdec.verify.row import Row

__all__ = ["give_back", "leave"]


def leave(target: Target, state: RowState, lane: DraftLane | None, index: int, row: Row) -> None:
    """What an ended row leaves behind before it goes: to its request, a prefix cache, its caller.

    Args:
        target: the bound target.
        state: the target's rows, between rounds.
        lane: the drafter, if there is one.
        index: the row's place.
        row: the row.
    """
    if row.request.publish is not None:
        _publish(state, lane, index, row)
    if row.prefix is not None:
        capture = None if lane is None else lane.capture
        row.prefix.keep_ended(target, row.read, state, index, capture)
    if row.request.cache is not None:
        give_back(target, state, index, row)


def _publish(state: RowState, lane: DraftLane | None, index: int, row: Row) -> None:
    """Show a row's state, of target and drafter, to its request before it goes.

    Args:
        state: the target's rows, between rounds.
        lane: the drafter, if there is one.
        index: the row's place.
        row: the row; what its callback raises is noted on it, and ends nothing else.
    """
    assert row.request.publish is not None
    checkpoint = lane.capture(index) if lane is not None else None
    try:
        row.request.publish(row, state.extract_row(index), checkpoint)
    except Exception as error:
        row.error = row.error or error


def give_back(target: Target, state: RowState, index: int, row: Row) -> None:
    """Write a row into its caller's cache, so that it covers every token, the last one too.

    Args:
        target: reads the last token, if it has not yet.
        state: the target's rows, between rounds.
        index: the row's place.
        row: the row, whose request has a cache.
    """
    cache = row.request.cache
    assert cache is not None
    state.write_back(index, cache)
    unread = row.unread_tokens
    if not unread:
        return
    alone = target.state_of(cache, row.request.cache_options)
    for token in unread:
        alone.begin_round(1)
        try:
            target.forward(mx.array([[token]], mx.int32), alone)
            mx.eval(alone.arrays())
        except BaseException:
            # Whoever tries again must find the token unread, or counted as read.
            if alone.can_roll_back:
                alone.rollback([0])
            else:
                row.processed += 1
            raise
        alone.commit_round()
        alone.write_back(0, cache)
        row.processed += 1
