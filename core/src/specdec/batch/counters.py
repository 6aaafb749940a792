"""What a batch generator counts: mlx-lm's numbers, and those of speculation."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import asdict, define, field
from mlx_lm.generate_utils import BatchStats as _MlxLmStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specdec.verify import Row

__all__ = ["BatchStats", "Counters", "Moment", "RowSums"]


@dataclass(kw_only=True)
class BatchStats(_MlxLmStats):  # type: ignore[misc]  # mlx-lm ships no types
    """mlx-lm's statistics of an interval, with those of speculation.

    ``generation_tokens`` counts responses with a token, end tokens included, as mlx-lm does;
    ``generation_steps`` counts rounds of groups.

    Attributes:
        rounds: rounds of rows: one verify window of one row is one.
        drafted: drafts that were verified, as far as the outputs go.
        accepted: drafts that were emitted.
        emitted: content tokens that were emitted.
        forced: tokens that grammars forced and that were emitted; neither drafted nor accepted.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    forced: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of what was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@define
class RowSums:
    """Sums over the counters of some rows."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    forced: int = 0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> RowSums:
        """The sums as they are now."""
        sums = cls()
        for row in rows:
            stats = row.stats
            sums.rounds += stats.rounds
            sums.drafted += stats.drafted
            sums.accepted += stats.accepted
            sums.emitted += stats.emitted
            sums.forced += stats.forced
        return sums


@define
class Counters(RowSums):
    """Everything since the generator was made; no number ever decreases."""

    prompt_tokens: int = 0
    prompt_time: float = 0.0
    generation_tokens: int = 0
    generation_steps: int = 0
    decode_time: float = 0.0

    def count_rows(self, before: RowSums, after: RowSums) -> None:
        """Count what rows did between two readings of their own counters."""
        self.rounds += after.rounds - before.rounds
        self.drafted += after.drafted - before.drafted
        self.accepted += after.accepted - before.accepted
        self.emitted += after.emitted - before.emitted
        self.forced += after.forced - before.forced


@define
class Moment:
    """The counters at one moment.

    Attributes:
        counted: all of them.
        at: the moment, in seconds.
        peak_memory: the process's peak, in GB.
    """

    counted: dict[str, float]
    at: float = field(factory=time.perf_counter)
    peak_memory: float = field(factory=lambda: mx.get_peak_memory() / 1e9)

    @classmethod
    def of(cls, counters: Counters) -> Moment:
        """The counters now."""
        return cls(asdict(counters))

    def since(self, start: Moment, stats: BatchStats) -> None:
        """Add the interval from ``start`` to this moment to ``stats``."""
        for name, value in self.counted.items():
            setattr(stats, name, getattr(stats, name) + value - start.counted[name])
        stats.wall_time += self.at - start.at
        stats.peak_memory = max(stats.peak_memory, start.peak_memory, self.peak_memory)
