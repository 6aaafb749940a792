"""What a prefix cache has done so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from specdec.errors import one_line

if TYPE_CHECKING:
    from threading import RLock

__all__ = ["PrefixCacheStats", "Tally"]


@frozen(kw_only=True)
class PrefixCacheStats:
    """What a prefix cache has done so far.

    Attributes:
        hits: takes that found an entry.
        disk_hits: those of them that came from the disk.
        misses: takes that found none.
        stored: entries that were put into memory, promotions from the disk included.
        refused: entries that were not: too big, or of a kind that cannot be stored.
        evicted: entries that left memory for others.
        written: files written.
        skipped: entries in memory that were not written: queue or folder full, or there already.
        disk_evicted: files deleted for others.
        disk_errors: failures of the folder, each survived.
        last_error: the last of them, of the refusals, or of the reasons to skip, as one line; empty
            without one. After ``close`` it says why nothing was kept on the disk.
    """

    hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    written: int = 0
    skipped: int = 0
    disk_evicted: int = 0
    disk_errors: int = 0
    last_error: str = ""


class Tally:
    """Counts, under the lock of the cache that they belong to."""

    def __init__(self, lock: RLock) -> None:
        self._lock = lock
        self._stats = PrefixCacheStats()

    @property
    def stats(self) -> PrefixCacheStats:
        """The counts now."""
        with self._lock:
            return self._stats

    def count(self, **more: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            now = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = evolve(self._stats, **now)

    def refuse(self, error: object) -> None:
        """An entry was refused."""
        self._note(error, "refused")

    def skip(self, reason: object) -> None:
        """An entry was not written, without a failure."""
        self._note(reason, "skipped")

    def disk_error(self, error: object) -> None:
        """The folder failed, and it was survived."""
        self._note(error, "disk_errors")

    def _note(self, error: object, name: str) -> None:
        changes: dict[str, Any] = {"last_error": one_line(error)}
        with self._lock:
            self.count(**{name: 1})
            self._stats = evolve(self._stats, **changes)
