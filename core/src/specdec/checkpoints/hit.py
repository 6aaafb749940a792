"""What a prefix cache gives: state that the caller owns, leased until it is taken over."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    from specdec.checkpoints.disk import DiskStore
    from specdec.checkpoints.memory import Key
    from specdec.contract import RowCheckpoint

__all__ = ["Leases", "PrefixHit"]


class Leases:
    """Which files are in use. Without a disk there is nothing to lease.

    Attributes:
        dropped: keys whose hits were dropped unreleased.
    """

    def __init__(self, disk: DiskStore | None, lock: RLock) -> None:
        self._disk = disk
        self._lock = lock
        self.dropped: deque[Key] = deque()

    def begin(self, key: Key) -> None:
        """Keep an entry's file; counted."""
        if self._disk is not None:
            self._disk.lease(key)

    def end(self, key: Key) -> None:
        """End one lease."""
        if self._disk is not None:
            self._disk.release(key)

    def end_dropped(self) -> None:
        """End the leases of the hits that the collector found."""
        with self._lock:
            while self.dropped:
                self.end(self.dropped.popleft())


class PrefixHit:
    """An entry that was found, leased until :meth:`release` or the end of the ``with`` block.

    Attributes:
        tokens: how many tokens of the prompt the state covers.
        caches: one row of mlx-lm caches, the caller's own.
        checkpoint: the drafter's state at the same place, if one was stored.
        source: where it came from.
    """

    def __init__(
        self,
        tokens: int,
        state: tuple[list[Any], RowCheckpoint | None],
        source: Literal["memory", "disk"],
        release: Callable[[], None],
        dropped: Callable[[], None],
    ) -> None:
        self.tokens = tokens
        self.caches, self.checkpoint = state
        self.source = source
        self._release = release
        # A hit that is dropped unreleased must not hold its file for ever. The collector may run
        # anywhere, also where the lock is held, so it only leaves a note.
        self._guard = weakref.finalize(self, dropped)
        self._guard.atexit = False

    def release(self) -> None:
        """End the lease; may be called again. An entry from the disk is then kept in memory."""
        if self._guard.detach() is not None:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
