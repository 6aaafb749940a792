"""Choosing, round by round, how many drafts a group of rows asks for.

The choice is the depth with the most expected tokens per millisecond, plain decoding among them.
Where plain decoding wins the drafter rests; now and then it is asked again, as often as the account
of what trying may cost allows, because texts change and so does what a round takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.cost.choose import choose
from specdec.verify.pacing import AS_ASKED, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.cost.choose import Choice
    from specdec.cost.costs import Costs
    from specdec.verify.pacing import Seen
    from specdec.verify.row import Row

__all__ = ["AdaptivePace"]

_MARGIN = 0.02  # what another depth must be better by
_TRIAL = 3  # rounds of one look
_LISTENING = 4  # rounds for which one rests at least that is listened to
_LISTENS = 4  # drafts of a drafter at rest that are compared with what comes
_SILENT = 12  # rounds of one where the drafter says nothing
_CHEAP = 1.25  # plain rounds that such a round takes at most
_HOPE = 0.8  # the chance of a draft that a look hopes to find
_CLOSE = 1.15  # where drafting is not faster than this, plain rounds are timed again
_STALE = 256  # rounds after which they are
_SPARSE = 4  # rounds for which a larger batch keeps a choice
_CHEAPEST = 1.2  # plain rounds that no look costs less than
_SKIPS = 8  # times that a rest is prolonged without a new choice
_AT_REST = 16  # rounds for which a drafter rests at least
_NEW = 3.0  # plain rounds that a round of a new shape is charged with at most
_MOST = 8.0  # and any other: what takes longer was disturbed
_KEEP_EVERY = 2048  # rounds after which what was learned is written down


class AdaptivePace:
    """The pace of one group.

    Args:
        costs: what is known, shared with other groups of the drafter.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._depth = costs.default
        self._hold = 1  # rounds that the next plan holds for
        self._looking = 0  # rounds that are left of a look
        self._was_look = False
        self._looked = 0  # its rounds so far
        self._rested = 0
        self._skipped = 0
        self._heard = self._listened = False
        self._members: tuple[int, ...] = ()
        self._rounds = 0

    def plan(self, rows: Sequence[Row]) -> Plan:
        """What the next round is to be; see :class:`specdec.verify.pacing.Pace`."""
        adaptive = [row for row in rows if row.width and row.request.adaptive]
        if not adaptive:
            return AS_ASKED
        fixed = [row.width for row in rows if row.width and not row.request.adaptive]
        if fixed:
            return Plan(max(fixed))  # the window is as wide as that for all rows
        self._costs.prepare(len(rows))
        if self._looking > 0:
            self._looking -= 1
            self._hold = 1
        else:
            self._choose(rows, adaptive)
        return Plan(
            self._depth,
            self._costs.padded(len(rows), 1),
            self._hold,
            listens=0 if self._depth else _LISTENS,
        )

    def hear(self, row: Row, asked: int, right: int) -> None:
        """What a drafter at rest would have proposed; see ``Pace``."""
        self._costs.survival(row).add(asked, right)
        self._heard = self._listened = True

    def padded(self, rows: int, needed: int) -> int:
        """The width to give a window; see :class:`specdec.verify.pacing.Pace`."""
        return self._costs.padded(rows, needed)

    def observe(self, rows: Sequence[Row], seen: Seen) -> None:
        """A round is over; see :class:`specdec.verify.pacing.Pace`."""
        costs, count = self._costs, len(rows)
        time = 1000 * seen.seconds
        plain = costs.times.plain(count, costs.padded(count, 1))
        new = costs.times.observe(
            count, seen.depth, seen.width, seen.longest, time, rounds=seen.rounds
        )
        self._rounds += seen.rounds
        if self._rounds >= _KEEP_EVERY:
            self._rounds = 0
            costs.keep()
        if not seen.depth:
            self._rested += seen.rounds
            costs.account.passed(seen.rounds)
            return
        # What a shape takes once, to make kernels and plans, says nothing about the next round.
        price = min(time / plain, _NEW if new else _MOST)
        gain = 1 + sum(seen.accepted) / count - price
        costs.account.drafted(gain)
        for row, depth, accepted in zip(rows, seen.asked, seen.accepted, strict=True):
            if depth:
                costs.survival(row).add(depth, min(accepted, depth))
        if not self._was_look:
            return
        self._looked += 1
        if not seen.longest and price < _CHEAP and self._looked < _SILENT:
            self._looking += 1  # nothing was seen of its drafts, and little was paid
        elif self._looking == 0 and gain > 0:
            self._looking = 1  # it pays here: look on

    def _choose(self, rows: Sequence[Row], adaptive: Sequence[Row]) -> None:
        costs, count = self._costs, len(rows)
        if not costs.knows_plain(count):
            self._depth, self._hold = 0, _TRIAL
            return
        if self._at_rest(adaptive):
            return
        most = max(row.width for row in adaptive)
        depths = [depth for depth in costs.depths if depth <= most] or [most]
        depths = list(self._near_known(count, depths))
        chances = []
        for row in adaptive:
            survival = costs.survival(row)
            if self._rested:
                survival.rest(self._rested)
            chances.append(survival.surviving(min(row.width, most)))
        self._rested = 0
        plain_width = costs.padded(count, 1)
        plain = costs.times.plain(count, plain_width)

        def time(depth: int) -> float:
            if not depth:
                return plain
            return costs.times.drafted(count, depth, lambda n: costs.padded(count, n))

        # Rows that want no drafts stand in the batch, and are no reason for another width.
        others: list[Sequence[float]] = [[]] * (count - len(adaptive))
        best = choose([*chances, *others], (0, *depths), time, kept=self._depth, margin=_MARGIN)
        self._depth, self._was_look = best.depth, False
        # Choosing takes time, too, and most of it where there are many rows.
        self._hold = _SPARSE if count > 4 else 1
        if not best.depth:
            self._hold = _LISTENING if self._listened else _AT_REST
        # What plain rounds take is the measure of all else, and is looked at again.
        stale = _STALE if best.speed < _CLOSE * count / plain else 4 * _STALE
        if best.depth and costs.times.plain_age(count, plain_width) > stale:
            self._depth, self._hold = 0, _TRIAL
            return
        look = self._look(adaptive, others, depths, best)
        if look is not None and look != best.depth:
            self._depth, self._hold = look, 1
            self._looking, self._looked, self._was_look = _TRIAL - 1, 0, True

    def _at_rest(self, adaptive: Sequence[Row]) -> bool:
        """Whether the drafter rests on: nothing was learned, and nothing can be tried."""
        members = tuple(map(id, adaptive))
        same, self._members = members == self._members, members
        heard, self._heard = self._heard, False
        if self._depth or heard or not same or self._costs.account.affords(_CHEAPEST):
            self._skipped = 0
            return False
        self._skipped += 1
        if self._skipped < _SKIPS:
            return True
        self._skipped = 0
        return False

    def _near_known(self, rows: int, depths: Sequence[int]) -> Sequence[int]:
        """Depths whose time is known or can be told from one that is: first the usual number."""
        times, default = self._costs.times, self._costs.default
        deepest = times.deepest(rows)
        most = 2 * deepest + 1 if deepest else min(default, depths[-1])
        near = [d for d in depths if d <= max(most, deepest)]
        return near if deepest else [d for d in near if d == most] or near[-1:] or depths[:1]

    def _look(
        self,
        adaptive: Sequence[Row],
        others: Sequence[Sequence[float]],
        depths: Sequence[int],
        best: Choice,
    ) -> int | None:
        """A depth that may be better than the best that is known, if there is means to look.

        First what rounds have said so far is read hopefully. Where even that says plain decoding,
        the text may have become another one since.
        """
        costs, count = self._costs, len(adaptive) + len(others)
        if not costs.account.affords(1):
            return None

        plain = costs.times.plain(count, costs.padded(count, 1))

        def hoped(depth: int) -> float:
            return costs.times.drafted(
                count, depth, lambda needed: costs.padded(count, needed), hopeful=True
            )

        known = [costs.survival(row).surviving(row.width) for row in adaptive]
        if best.depth:
            # What is known of the drafts is enough: only times are hoped for.
            unknown = [depth for depth in depths if not costs.times.knows(count, depth)]
            if not unknown:
                return None
            found = choose([*known, *others], unknown, hoped)
            return found.depth if found.speed > best.speed * (1 + _MARGIN) else None
        chances = [costs.survival(row).hoped(row.width) for row in adaptive]
        usual = min(costs.default, depths[-1])
        found = choose([*chances, *others], [usual], hoped)
        if found.speed <= best.speed:
            found = choose([*chances, *others], depths, hoped)
        if found.speed <= best.speed:
            # The text may have become another one since.
            hope = [[_HOPE ** (k + 1) for k in range(row.width)] for row in adaptive]
            found = choose([*hope, *others], [usual], hoped)
            if found.speed <= best.speed:
                return None  # not even good drafts would pay here
        expected = 1 + sum(sum(each[: found.depth]) for each in known) / count
        time = costs.times.drafted(count, found.depth, lambda needed: costs.padded(count, needed))
        price = 0.5 + _TRIAL * max(0.25, time / plain - expected)
        return found.depth if costs.account.affords(price) else None
