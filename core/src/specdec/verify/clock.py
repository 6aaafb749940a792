"""Where a round's wall time went, the delivery of its tokens left out."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RoundClock"]


@define(eq=False)
class RoundClock:
    """Seconds of the host, by part of one round.

    A window that is submitted before the one before it is delivered computes while the host is
    elsewhere. That time is in none of the parts: it is ``away``, and the wait of ``land`` is
    shorter by as much of it as the device needed.

    Attributes:
        launch: drafting, building the window and submitting it.
        away: from there to the wait for it.
        land: the wait, and the accept walks.
        commit: keeping what was accepted, in target and drafter.
    """

    launch: float = 0.0
    away: float = 0.0
    land: float = 0.0
    commit: float = 0.0
    _launched: float | None = None

    @property
    def seconds(self) -> float:
        """What the round cost the host: everything but ``away``."""
        return self.launch + self.land + self.commit

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Time the block as the launch."""
        begun = time.perf_counter()
        yield
        self._launched = time.perf_counter()
        self.launch += self._launched - begun

    @contextmanager
    def landing(self) -> Iterator[None]:
        """Time the block as the landing."""
        begun = time.perf_counter()
        if self._launched is not None:
            self.away += begun - self._launched
        yield
        self.land += time.perf_counter() - begun

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Time the block as the commit."""
        begun = time.perf_counter()
        yield
        self.commit += time.perf_counter() - begun
