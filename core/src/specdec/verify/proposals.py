"""Checking what drafters say and propose: what is no valid draft never reaches the target.

A drafter can make generation slow but cannot change a token or end a row. A proposal is cut at the
first id that is no valid draft, and what was wrong is counted against the row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import evolve, frozen

from specdec.contract import Proposal
from specdec.errors import one_line
from specdec.verify.members import spread_index

if TYPE_CHECKING:
    from specdec.contract import DeviceProposal

__all__ = ["Drafts", "check_device", "check_host", "cut_device"]

Checked = tuple[list[list[int]], list[str | None]]


@frozen(eq=False)
class Drafts:
    """One round's proposals, for all rows of a verify group.

    Attributes:
        rows: B lists of checked host drafts; empty where the drafts are on the device.
        depths: B ints that were asked for.
        device: a proposal of B rows that is still on the device. Rows that the drafter did not
            draft for have depth 0, and hold somebody's drafts.
        places: the rows that the drafter drafted for, in its order; ``None`` for all.
    """

    rows: Sequence[Sequence[int]]
    depths: Sequence[int]
    device: DeviceProposal | None = None
    places: Sequence[int] | None = None

    @classmethod
    def of(
        cls,
        depths: Sequence[int],
        places: Sequence[int] | None,
        count: int,
        rows: Sequence[Sequence[int]] | None = None,
        *,
        device: DeviceProposal | None = None,
    ) -> Self:
        """What a draft group proposed, spread over the ``count`` rows of its verify group.

        Args:
            depths: what it was asked for, one per member.
            places: the members' rows; ``None`` for all.
            count: rows, B.
            rows: checked host drafts, one list per member; none where they are on the device.
            device: the proposal on the device, one row per member.
        """
        if places is None:
            return cls(rows or [()] * count, depths, device)
        asked = [0] * count
        drafts: list[Sequence[int]] = [()] * count
        for number, place in enumerate(places):
            asked[place] = depths[number]
            drafts[place] = rows[number] if rows else ()
        if device is not None:
            index = mx.array(spread_index(places, count), mx.int32)
            tokens, lengths = device.tokens, device.lengths
            device = evolve(
                device,
                tokens=mx.take(tokens, index, axis=0),
                lengths=None if lengths is None else mx.take(lengths, index, axis=0),
            )
        return cls(drafts, asked, device, places)


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
