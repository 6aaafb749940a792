"""How likely the drafts of a row are to be accepted, from its recent rounds.

A draft at place k is accepted if all before it are and it is right. ``chance(k)`` is estimated by
place: accepted over verified, with old rounds fading, and what other rows of the drafter have seen
as a beginning (a Beta prior's counts, Beta-Bernoulli: Bishop 2006, section 2.1.1). A place that no
round has reached has the chance of the last one that any did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FADING", "PRIOR", "Survival"]

FADING: Final = 0.95
"""What a round counts for one round later."""

PRIOR: Final = 2.0
"""Rounds that what other rows have seen counts for."""

_UNKNOWN = 0.6  # before anybody has seen anything: worth a try


@define(eq=False)
class Survival:
    """What is known of a row's drafts, or of all rows of a drafter.

    Attributes:
        shared: of all rows; ``None`` for the shared one itself.
    """

    shared: Survival | None = None
    _tried: list[float] = field(factory=list)
    _right: list[float] = field(factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """A round was verified.

        Args:
            drafted: its drafts.
            accepted: how many of them were accepted, from the first one on.
        """
        if not drafted:
            return
        self._tried = [count * FADING for count in self._tried]
        self._right = [count * FADING for count in self._right]
        judged = min(drafted, accepted + 1)  # what stands behind a wrong one was not judged
        more = judged - len(self._tried)
        self._tried += [0.0] * more
        self._right += [0.0] * more
        for place in range(judged):
            self._tried[place] += 1
            self._right[place] += place < accepted
        if self.shared is not None:
            self.shared.add(drafted, accepted)

    def chance(self, place: int) -> float:
        """That the draft at a place is right, if all before it are."""
        prior = _UNKNOWN if self.shared is None else self.shared.chance(place)
        known = place < len(self._tried)
        if not known and self.shared is None and self._tried:
            prior = self.chance(len(self._tried) - 1)
        tried, right = (self._tried[place], self._right[place]) if known else (0.0, 0.0)
        return (right + PRIOR * prior) / (tried + PRIOR)

    def surviving(self, depth: int) -> Sequence[float]:
        """That drafts 1 to ``depth`` are all accepted, for each of them."""
        products, product = [], 1.0
        for place in range(depth):
            product *= self.chance(place)
            products.append(product)
        return products
