"""Tokens that somebody else chose become a row's output: the target reads them, drafters follow.

For methods that compare a drafter with a text that exists already, or that let another model
write a part of it.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import ContextKind
from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Sequence

    from specdec.contract import TokenConstraint
    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.lane import DraftLane
    from specdec.verify.row import Row

__all__ = ["check_external", "read_external"]


def check_external(
    rows: Sequence[Row],
    tokens: Sequence[Sequence[int]],
    target: Target,
    state: RowState | None,
    undelivered: Container[int],
) -> list[list[int]]:
    """Check tokens that are to be consumed.

    Args:
        rows: the rows.
        tokens: ids per row.
        target: the bound target.
        state: its rows.
        undelivered: rows with tokens of their own that are not delivered yet.

    Returns:
        The tokens as lists of ints.

    Raises:
        OptionError: they cannot be; names why.
    """
    if len(tokens) != len(rows):
        raise OptionError(f"consume() was given {len(tokens)} lists; give one per row, {len(rows)}")
    checked = [_whole_numbers(index, ids) for index, ids in enumerate(tokens)]
    for index, (row, ids) in enumerate(zip(rows, checked, strict=True)):
        if not ids:
            continue
        if index in undelivered:
            if not row.steps:
                raise OptionError(f"row {index} has a first token of its own; call round() first")
            raise OptionError(
                f"row {index} has tokens of its own that are not delivered; call round() first, "
                "without ahead"
            )
        wrong = [token for token in ids if not 0 <= token < target.vocab_size]
        if wrong:
            raise OptionError(
                f"row {index} was given {wrong[0]}; this model's ids are 0 to "
                f"{target.vocab_size - 1}"
            )
        ends = [token for token in ids if token in row.request.end_tokens]
        if ends:
            raise OptionError(f"row {index} was given the end token {ends[0]}; leave it out")
        if row.budget is not None and len(ids) > row.budget:
            raise OptionError(
                f"row {index} was given {len(ids)} tokens, but max_tokens leaves it {row.budget}"
            )
        if row.constraint is not None:
            refused = _refused(row.constraint, ids, row.request.end_tokens)
            if refused is not None:
                raise OptionError(
                    f"row {index} was given {refused}, which its constraint does not allow"
                )
    if state is not None and state.reason is not None and any(checked):
        raise OptionError(f"these rows take one position at a time ({state.reason})")
    return checked


def _whole_numbers(index: int, ids: Any) -> list[int]:
    numbers = []
    try:
        for token in ids:
            numbers.append(operator.index(token))
    except TypeError:
        wrong = one_line(repr(token if isinstance(ids, list | tuple) else ids))
        raise OptionError(f"row {index} was given {wrong}; give a list of token ids") from None
    return numbers


def _refused(
    constraint: TokenConstraint, ids: list[int], end_tokens: Collection[int]
) -> int | None:
    """The first id that a constraint does not allow; none where it is complete before it."""
    mask, allowed = constraint.masks(list(ids))
    if allowed == len(ids):
        return None
    if mask is not None and mask.shape[0] > allowed:
        shown: Any = mask[allowed].tolist()
        left = {token for token, may_follow in enumerate(shown) if may_follow}
        if left and left <= set(end_tokens):
            return None
    return ids[allowed]


def read_external(
    target: Target,
    state: RowState,
    lane: DraftLane | None,
    rows: Sequence[Row],
    tokens: Sequence[Sequence[int]],
    *,
    step_size: int,
) -> None:
    """Read the rows' pending tokens and all but the last of the tokens that follow.

    Args:
        target: the bound target.
        state: its rows, between rounds.
        lane: the drafter, or ``None``.
        rows: the rows.
        tokens: ids per row, checked.
        step_size: positions per window at most.
    """
    # The rules first: what follows an end is not read.
    taken = [_take(row, ids) for row, ids in zip(rows, tokens, strict=True)]
    while any(taken):
        rooms = [state.room(index) for index in range(len(taken))]
        most = [step_size if room is None else min(step_size, room) for room in rooms]
        chunks = [ids[:count] for ids, count in zip(taken, most, strict=True)]
        taken = [ids[count:] for ids, count in zip(taken, most, strict=True)]
        width = max(map(len, chunks))
        padded = [chunk + [0] * (width - len(chunk)) for chunk in chunks]
        state.begin_round(width)
        window = mx.array(padded, mx.int32)
        if lane is not None and lane.is_open and lane.context is not ContextKind.NONE:
            context = target.forward(window, state, lane.context, lane.taps).context
        else:
            target.forward(window, state)
            context = None
        state.rollback([len(chunk) for chunk in chunks])
        mx.eval(state.arrays())
        if lane is not None:
            lane.consume(dict(enumerate(chunks)), context)
        for row, chunk in zip(rows, chunks, strict=True):
            row.processed += len(chunk)


def _take(row: Row, ids: Sequence[int]) -> list[int]:
    """Emit tokens up to where they end the row; what its target must read for it.

    What the request's own code raises ends its row before the token that it raised over.
    """
    unread: list[int] = []
    for token in ids:
        try:
            stop = row.ends_with(token)
        except Exception as error:
            row.end("error", error)
            break
        unread.append(row.pending)
        row.tokens.append(token)
        row.stats.consumed += 1
        if stop:
            row.end("stop")
            break
    if row.budget == 0:
        row.end("length")
    return unread
