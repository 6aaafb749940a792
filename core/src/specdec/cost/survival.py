"""How likely the drafts of a row are to be accepted, from its recent rounds.

A draft at place k is accepted if all before it are and it is right. ``chance(k)`` is estimated by
place: right over asked for, with old rounds fading, and what other rows of the drafter have seen
as a beginning (a Beta prior's counts, Beta-Bernoulli: Bishop 2006, section 2.1.1). A place that no
round has reached has the chance of the last one that any did. A draft that was asked for and not
proposed counts as wrong, so what a drafter that is often silent brings is told as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FADING", "FADING_SHARED", "PRIOR", "Survival"]

FADING: Final = 0.96
"""What a row's round counts for one round later."""

FADING_SHARED: Final = 0.99
"""What a round of some row counts for one round later, for all rows."""

FADING_AT_REST: Final = 0.995
"""What a round counts for one plain round later: a text may have become another one."""

PRIOR: Final = 4.0
"""Rounds that what other rows have seen counts for."""

_BEGINNING = 1.0  # rounds that the first guess counts for
_UNKNOWN = 0.6  # before anybody has seen anything: worth a try
_SURE = 0.99  # no estimate is surer than this, as no row is seen forever


@define(eq=False)
class Survival:
    """What is known of a row's drafts, or of all rows of a drafter.

    Attributes:
        shared: of all rows; ``None`` for the shared one itself.
    """

    shared: Survival | None = None
    _tried: list[float] = field(factory=list)
    _right: list[float] = field(factory=list)
    _chances: list[float] = field(factory=list)  # as they follow from what was tried
    _surviving: list[float] = field(factory=list)

    def add(self, asked: int, accepted: int) -> None:
        """A round was verified.

        Args:
            asked: drafts that were asked for.
            accepted: how many were accepted, from the first one on; ``asked`` at most.
        """
        if asked < 1:
            return
        tried, right = self._tried, self._right
        fading = FADING_SHARED if self.shared is None else FADING
        for place in range(len(tried)):
            tried[place] *= fading
            right[place] *= fading
        judged = min(asked, accepted + 1)  # what stands behind a wrong one was not judged
        missing = judged - len(tried)
        if missing > 0:
            tried.extend([0.0] * missing)
            right.extend([0.0] * missing)
        for place in range(judged):
            tried[place] += 1
            right[place] += place < accepted
        self._chances, self._surviving = [], []
        if self.shared is not None:
            self.shared.add(asked, accepted)

    def rest(self, rounds: int = 1) -> None:
        """As many plain rounds have passed since."""
        share = FADING_AT_REST**rounds
        self._tried = [count * share for count in self._tried]
        self._right = [count * share for count in self._right]
        self._chances, self._surviving = [], []

    def hoped(self, depth: int) -> list[float]:
        """As ``surviving``, if every place had been right once more than it was."""
        products, product, tried = [], 1.0, self._tried
        for place, chance in enumerate(self.chances(depth)):
            count = (tried[place] if place < len(tried) else 0.0) + PRIOR
            product *= min(_SURE, (chance * count + 1) / (count + 1))
            products.append(product)
        return products

    def chances(self, depth: int) -> Sequence[float]:
        """That the draft at each place is right, if all before it are."""
        known, tried, right = self._chances, self._tried, self._right
        if len(known) >= depth:
            return known[:depth]
        shared = self.shared
        weight = _BEGINNING if shared is None else PRIOR
        priors = () if shared is None else shared.chances(depth)
        for place in range(len(known), depth):
            seen = place < len(tried)
            if shared is not None:
                prior = priors[place]
            elif seen or not tried:
                prior = _UNKNOWN
            else:
                prior = known[len(tried) - 1]
            if seen:
                prior = (right[place] + weight * prior) / (tried[place] + weight)
            known.append(min(_SURE, prior))
        return known

    def chance(self, place: int) -> float:
        """That the draft at a place is right, if all before it are."""
        return self.chances(place + 1)[place]

    def surviving(self, depth: int) -> Sequence[float]:
        """That drafts 1 to ``k`` are all accepted, for each k up to ``depth``."""
        known = self._surviving
        if len(known) < depth:
            product = known[-1] if known else 1.0
            for chance in self.chances(depth)[len(known) :]:
                product *= chance
                known.append(product)
        return known[:depth]
