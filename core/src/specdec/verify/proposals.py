"""Checking what drafters say and propose: what is no valid draft never reaches the target.

A drafter can make generation slow but cannot change a token or end a row. A proposal is cut at the
first id that is no valid draft, and what was wrong is counted against the row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import evolve, frozen

from specdec.contract import Proposal
from specdec.errors import ContractError, one_line
from specdec.sampling import Drafted
from specdec.verify.members import spread_index

if TYPE_CHECKING:
    from specdec.contract import DeviceProposal
    from specdec.verify.row import Row

__all__ = [
    "Asked",
    "Drafts",
    "check_device",
    "check_host",
    "check_logq",
    "cut_device",
    "known_ids",
    "listed_ids",
]

Checked = tuple[list[list[int]], list[str | None]]


@frozen
class Asked:
    """What a drafter is asked for in a round, one entry per member.

    Attributes:
        pending: the token that each draft follows.
        depths: the most drafts.
        steps: samples drawn before the first of them.
    """

    pending: list[int]
    depths: list[int]
    steps: list[int]

    @classmethod
    def of(
        cls, members: Mapping[int, Row], forced: Mapping[int, Sequence[int]], *, behind: bool
    ) -> Self:
        """What to ask of these rows.

        Args:
            members: rows by their place in the verify group.
            forced: by place, what stands in front of a row's drafts.
            behind: whether it drafts behind what is forced, or not at all.
        """
        asked = cls([], [], [])
        for place, row in members.items():
            ahead = forced.get(place, ())
            count = len(ahead)
            room = row.within_budget(row.width + count) - count
            asked.pending.append(ahead[-1] if ahead and behind else row.pending)
            asked.depths.append(max(0, room) if behind or not ahead else 0)
            asked.steps.append(row.steps + (count if behind else 0))
        return asked

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """New lists for each call: a drafter that writes into them changes nothing here."""
        return list(self.pending), list(self.depths), list(self.steps)


@frozen(eq=False)
class Drafts:
    """One round's proposals, for all rows of a verify group.

    Attributes:
        rows: B lists of checked host drafts; empty where the drafts are on the device.
        depths: B ints that were asked for.
        device: a proposal of B rows that is still on the device. Rows that the drafter did not
            draft for have depth 0, and hold somebody's drafts.
        places: the rows that the drafter drafted for, in its order; ``None`` for all.
        logq: ``[B, d, V]`` the log-probabilities that the drafts were drawn from; ``None`` where
            each was certain, or nobody asks.
        forced: B ints, how many of a row's first drafts its constraint forces.
        refused: rows whose next draft was dropped because it cannot be the target's token. Under
            the rejection rule it was drawn all the same, and counts as rejected.
    """

    rows: Sequence[Sequence[int]]
    depths: Sequence[int]
    device: DeviceProposal | None = None
    places: Sequence[int] | None = None
    logq: mx.array | None = None
    forced: Sequence[int] = ()
    refused: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        depths: Sequence[int],
        places: Sequence[int] | None,
        count: int,
        rows: Sequence[Sequence[int]] | None = None,
        *,
        device: DeviceProposal | None = None,
        logq: mx.array | None = None,
    ) -> Self:
        """What a draft group proposed, spread over the ``count`` rows of its verify group.

        Args:
            depths: what it was asked for, one per member.
            places: the members' rows; ``None`` for all.
            count: rows, B.
            rows: checked host drafts, one list per member; none where they are on the device.
            device: the proposal on the device, one row per member.
            logq: ``[M, d, V]`` what the members' drafts were drawn from, or ``None``.
        """
        if places is None:
            return cls(rows or [()] * count, depths, device, logq=logq)
        asked = [0] * count
        drafts: list[Sequence[int]] = [()] * count
        for number, place in enumerate(places):
            asked[place] = depths[number]
            drafts[place] = rows[number] if rows else ()
        index = mx.array(spread_index(places, count), mx.int32)
        if logq is not None:
            logq = mx.take(logq, index, axis=0)
        if device is not None:
            tokens, lengths = device.tokens, device.lengths
            device = evolve(
                device,
                tokens=mx.take(tokens, index, axis=0),
                lengths=None if lengths is None else mx.take(lengths, index, axis=0),
            )
        return cls(drafts, asked, device, places, logq)

    def behind(self, forced: Mapping[int, Sequence[int]], vocab_size: int) -> Self:
        """These drafts behind what constraints force.

        Args:
            forced: ids by row.
            vocab_size: ids must be below it, V.
        """
        forced = known_ids(forced, vocab_size)
        if not forced:
            return self
        rows = [[*forced.get(index, ()), *row] for index, row in enumerate(self.rows)]
        counts = [len(forced.get(index, ())) for index in range(len(rows))]
        logq = self.logq
        if logq is not None:
            shifted = [_ahead(forced.get(b, ()), logq[b], vocab_size) for b in range(len(rows))]
            longest = max(each.shape[0] for each in shifted)
            logq = mx.stack(
                [mx.pad(each, [(0, longest - each.shape[0]), (0, 0)]) for each in shifted]
            )
        return evolve(self, rows=rows, logq=logq, forced=counts)

    def cut(self, counts: Mapping[int, int]) -> Self:
        """Keep the first drafts of some rows; what is behind them cannot be accepted.

        Args:
            counts: drafts to keep, by row.
        """
        kept = [row[: counts.get(b, len(row))] for b, row in enumerate(self.rows)]
        cut = {b for b, row in enumerate(self.rows) if len(kept[b]) < len(row)}
        return evolve(self, rows=kept, refused=self.refused | cut)

    def drafted(self, vocab_size: int) -> Drafted:
        """The drafts as the rejection rule looks at them.

        Args:
            vocab_size: what stands in for an id that the target does not have.
        """
        if self.device is not None:
            tokens = self.device.tokens
            lengths = mx.array(list(self.depths), mx.int32)
            if self.device.lengths is not None:
                lengths = mx.minimum(lengths, self.device.lengths.astype(mx.int32))
        else:
            rows = [
                [*row, vocab_size] if b in self.refused else list(row)
                for b, row in enumerate(self.rows)
            ]
            longest = max(map(len, rows))
            lengths = mx.array([len(row) for row in rows], mx.int32)
            tokens = mx.array([row + [0] * (longest - len(row)) for row in rows], mx.int32)
        logq, depth = self.logq, tokens.shape[1]
        if logq is not None:
            logq = mx.pad(logq[:, :depth], [(0, 0), (0, max(0, depth - logq.shape[1])), (0, 0)])
        return Drafted(tokens, lengths, logq)


def known_ids(forced: Mapping[int, Sequence[int]], vocab_size: int) -> dict[int, list[int]]:
    """What constraints force, by row, up to the first id that the target does not have."""
    known = {
        place: list(takewhile(lambda token: 0 <= token < vocab_size, ids))
        for place, ids in forced.items()
    }
    return {place: ids for place, ids in known.items() if ids}


def _ahead(forced: Sequence[int], logq: mx.array, vocab_size: int) -> mx.array:
    """``[f + d, V]``: forced drafts are certain."""
    if not forced:
        return logq
    ids = mx.array(list(forced), mx.int32)[:, None]
    certain = mx.where(mx.arange(vocab_size)[None] == ids, 0.0, -mx.inf).astype(logq.dtype)
    return mx.concatenate([certain, logq], axis=0)


def check_logq(
    logq: object, *, rows: int, depth: int, vocab_size: int, listed: mx.array | None
) -> mx.array:
    """The distribution that drafts were declared to be drawn from, over the whole vocabulary.

    Args:
        logq: what the proposal holds: ``[rows, depth, V or N]``, or wider in its second axis.
        rows: rows that were drafted for.
        depth: the longest draft, a last one that is no id included.
        vocab_size: V.
        listed: ``[N]`` the ids that the drafter selects over, if it declares some, from
            :func:`listed_ids`.

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


def listed_ids(listed: Sequence[int] | None, vocab_size: int) -> mx.array | None:
    """The ids that a drafter says it selects over: ``[N]`` int32, or ``None`` for all.

    Args:
        listed: what ``draft_vocabulary`` returned.
        vocab_size: ids must be below it: what is written elsewhere would overwrite other memory.

    Raises:
        ContractError: not ascending ids of the target.
    """
    if listed is None:
        return None
    ids = list(listed)
    ascend = all(map(operator.lt, ids, ids[1:]))
    if not ids or not ascend or not 0 <= ids[0] <= ids[-1] < vocab_size:
        shown = one_line(repr(ids[:8]))
        raise ContractError(
            f"draft_vocabulary() begins {shown}; it must be ascending ids below {vocab_size}"
        )
    return mx.array(ids, mx.int32)


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
