"""What a drafter is asked for, and what a round's proposals come to for all rows of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import evolve, frozen

from specdec.sampling import Drafted
from specdec.verify.members import spread_index
from specdec.verify.proposals import known_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import DeviceProposal
    from specdec.verify.row import Row

__all__ = ["Asked", "Drafts"]


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
            room = row.within_budget(row.asked_width + count) - count
            asked.pending.append(ahead[-1] if ahead and behind else row.pending)
            asked.depths.append(max(0, room) if behind or not ahead else 0)
            asked.steps.append(row.drawn + (count if behind else 0))
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


def _ahead(forced: Sequence[int], logq: mx.array, vocab_size: int) -> mx.array:
    """``[f + d, V]``: forced drafts are certain."""
    if not forced:
        return logq
    ids = mx.array(list(forced), mx.int32)[:, None]
    certain = mx.where(mx.arange(vocab_size)[None] == ids, 0.0, -mx.inf).astype(logq.dtype)
    return mx.concatenate([certain, logq], axis=0)
