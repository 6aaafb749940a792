"""Checking what drafters say and propose: what is no valid draft never reaches the target.

A drafter can make generation slow but cannot change a token or end a row. A proposal is cut at the
first id that is no valid draft, and what was wrong is counted against the row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.contract import DeclaresVocabulary, Proposal
from specdec.errors import ContractError, one_line

if TYPE_CHECKING:
    from specdec.contract import DeviceProposal, GroupedDraftProvider, TargetView

__all__ = [
    "check_device",
    "check_host",
    "check_logq",
    "cut_device",
    "draft_vocabulary",
    "known_ids",
]

Checked = tuple[list[list[int]], list[str | None]]


def known_ids(forced: Mapping[int, Sequence[int]], vocab_size: int) -> dict[int, list[int]]:
    """What constraints force, by row, up to the first id that the target does not have."""
    known = {
        place: list(takewhile(lambda token: 0 <= token < vocab_size, ids))
        for place, ids in forced.items()
    }
    return {place: ids for place, ids in known.items() if ids}


def check_logq(
    logq: object, *, rows: int, depth: int, vocab_size: int, listed: mx.array | None
) -> mx.array:
    """The distribution that drafts were declared to be drawn from, over the whole vocabulary.

    Args:
        logq: what the proposal holds: ``[rows, depth, V or N]``, or wider in its second axis.
        rows: rows that were drafted for.
        depth: the longest draft, a last one that is no id included.
        vocab_size: V.
        listed: ``[N]`` the ids that the drafter selects over, if it declares some: those of
            :func:`draft_vocabulary`.

    Returns:
        ``[rows, d, V]``, with ``-inf`` at ids that it cannot draw.

    Raises:
        ContractError: a wrong type or shape.
    """
    if not isinstance(logq, mx.array) or not mx.issubdtype(logq.dtype, mx.floating):
        raise ContractError(f"logq is {type(logq).__name__}; it must be a floating array")
    size = logq.shape[-1] if logq.ndim else 0
    known = {vocab_size} if listed is None else {vocab_size, listed.size}
    if logq.ndim != 3 or logq.shape[0] != rows or logq.shape[1] < depth or size not in known:
        raise ContractError(f"logq has the shape {logq.shape}, not ({rows}, {depth}, {vocab_size})")
    if size == vocab_size or listed is None:
        return logq
    ids = mx.broadcast_to(listed, logq.shape)
    everywhere = mx.full((*logq.shape[:2], vocab_size), -mx.inf, logq.dtype)
    return mx.put_along_axis(everywhere, ids, logq, axis=-1)


def draft_vocabulary(grouped: GroupedDraftProvider, target: TargetView) -> tuple[int, ...] | None:
    """The ids that a drafter says it selects over; ``None`` for all.

    Args:
        grouped: the drafter's factory of groups. What it raises passes through.
        target: ids must be below its V: what is written elsewhere would overwrite other memory.

    Raises:
        ContractError: not ascending ids of the target.
    """
    if not isinstance(grouped, DeclaresVocabulary):
        return None
    listed = grouped.draft_vocabulary(target)
    if listed is None:
        return None
    size = target.vocab_size
    try:
        ids = tuple(map(operator.index, listed))
    except TypeError:
        ids = ()
    ascend = all(map(operator.lt, ids, ids[1:]))
    if not ids or not ascend or not 0 <= ids[0] <= ids[-1] < size:
        shown = one_line(repr(ids[:8] or listed))
        raise ContractError(
            f"draft_vocabulary() begins {shown}; it must be ascending ids below {size}"
        )
    return ids


def check_host(proposal: object, depths: Sequence[int], vocab_size: int) -> Checked:
    """Cut a host proposal to valid drafts.

    Args:
        proposal: what ``draft`` returned.
        depths: B ints, the most each row was asked for.
        vocab_size: ids must be below it.

    Returns:
        B lists of valid ids, and per row what was wrong with it, if anything.
    """
    rows = proposal.tokens if isinstance(proposal, Proposal) else proposal
    lists = rows if isinstance(rows, Sequence) and not isinstance(rows, str) else None
    if lists is None or len(lists) != len(depths):
        found = type(rows).__name__ if lists is None else len(lists)
        fault = f"draft() returned {found} where {len(depths)} lists were asked for"
        return [[] for _ in depths], [fault] * len(depths)
    cut = [_cut(row, depth, vocab_size) for row, depth in zip(lists, depths, strict=True)]
    return [ids for ids, _ in cut], [fault for _, fault in cut]


def check_lookup(said: object, depths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Cut what ``look_up`` returned to valid drafts.

    Args:
        said: what it returned.
        depths: B ints, the most each row was asked for.
        vocab_size: ids must be below it.

    Raises:
        ContractError: it is no list, or not of one entry per row.
    """
    if not isinstance(said, Sequence) or isinstance(said, str):
        raise ContractError(f"look_up() returned {type(said).__name__}; give a list, one per row")
    if len(said) != len(depths):
        raise ContractError(f"look_up() returned {len(said)} lists for {len(depths)} rows")
    return [_cut(row, depth, vocab_size)[0] for row, depth in zip(said, depths, strict=True)]


def _cut(row: object, depth: int, vocab_size: int) -> tuple[list[int], str | None]:
    if not isinstance(row, Sequence) or isinstance(row, str):
        return [], f"draft() returned {type(row).__name__} where a list of ids was asked for"
    ids: list[int] = []
    for item in row:
        if len(ids) == depth:
            return ids, f"{len(row)} drafts were proposed where at most {depth} were asked for"
        try:
            token = operator.index(item)
        except TypeError:
            return ids, f"a draft is {one_line(repr(item))}; ids are whole numbers"
        if not 0 <= token < vocab_size:
            return ids, f"a draft is {token}; ids are 0 to {vocab_size - 1}"
        ids.append(token)
    return ids, None


def check_device(proposal: DeviceProposal, depths: Sequence[int]) -> str | None:
    """What is wrong with a device proposal's arrays, from their shapes and types alone."""
    tokens, lengths = proposal.tokens, proposal.lengths
    rows, depth = len(depths), max(depths)
    if not isinstance(tokens, mx.array) or not mx.issubdtype(tokens.dtype, mx.integer):
        return f"draft_device() returned tokens of {getattr(tokens, 'dtype', type(tokens))}"
    if tokens.ndim != 2 or tokens.shape[0] != rows or not 1 <= tokens.shape[1] <= depth:
        return f"draft_device() returned tokens of shape {tokens.shape}, not ({rows}, 1..{depth})"
    if lengths is None:
        return None
    if not isinstance(lengths, mx.array) or not mx.issubdtype(lengths.dtype, mx.integer):
        return "draft_device() returned lengths that are no integers"
    if lengths.shape != (rows,):
        return f"draft_device() returned lengths of shape {lengths.shape}, not ({rows},)"
    return None


def cut_device(
    read: Sequence[Sequence[int]],
    lengths: Sequence[int] | None,
    resolved: object,
    depths: Sequence[int],
    vocab_size: int,
) -> Checked:
    """Cut a device proposal, after the round's host read, to what was really verified.

    Args:
        read: the host copy of ``tokens``, B lists of d.
        lengths: the host copy of ``lengths``, if the proposal has them.
        resolved: what ``resolve`` returned: the drafts as the group remembers them.
        depths: B ints, the most each row was asked for.
        vocab_size: ids must be below it.

    Returns:
        As :func:`check_host`: per row the common start of both copies that is valid.
    """
    kept = [
        list(row[: max(0, lengths[i])] if lengths is not None else row)[:depth]
        for i, (row, depth) in enumerate(zip(read, depths, strict=True))
    ]
    drafts, faults = check_host(kept, depths, vocab_size)
    remembered, more = check_host(resolved, [len(row) for row in read], vocab_size)
    for i, draft in enumerate(drafts):
        same = 0
        while same < min(len(draft), len(remembered[i])) and draft[same] == remembered[i][same]:
            same += 1
        if more[i] is not None and same < len(draft):
            faults[i] = faults[i] or more[i]
        elif same < min(len(draft), len(remembered[i])):
            faults[i] = faults[i] or "resolve() returned other ids than tokens holds"
        drafts[i] = draft[:same]
    return drafts, faults
