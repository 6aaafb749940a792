"""What looking for a better width may cost: an account of milliseconds.

Every round pays a small share in, drafts that paid off pay more in, and drafts that lost time take
it out. Rounds that are expected to lose are only tried out of what is there, so that a drafter
that never pays costs that share and no more.
"""

from __future__ import annotations

from typing import Final

from attrs import define

__all__ = ["SHARE", "Account"]

SHARE: Final = 0.009
"""Of the time, what trying may cost in the long run."""

_OF_GAINS = 0.3
_MOST = 24.0  # plain rounds' worth
_LEAST = -6.0


@define
class Account:
    """The balance, in plain rounds: milliseconds mean nothing across batch sizes.

    Attributes:
        balance: what may be spent.
    """

    balance: float = 8.0

    def passed(self, rounds: float) -> None:
        """Plain rounds' worth of time have passed."""
        self._add(SHARE * rounds)

    def drafted(self, gain: float) -> None:
        """A round with drafts gained or lost as many plain rounds."""
        self._add(_OF_GAINS * gain if gain > 0 else gain)

    def affords(self, price: float) -> bool:
        """Whether as many plain rounds may be lost now."""
        return self.balance >= price

    def _add(self, amount: float) -> None:
        self.balance = min(_MOST, max(_LEAST, self.balance + amount))
