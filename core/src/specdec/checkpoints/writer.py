"""Writing prefix cache entries to the disk behind the requests' back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from filelock import Timeout

if TYPE_CHECKING:
    from threading import RLock

    from specdec.checkpoints.disk import DiskStore
    from specdec.checkpoints.memory import Key, Stored
    from specdec.checkpoints.tally import Tally

__all__ = ["Writer"]


class Writer:
    """One thread that writes entries in the order in which they came.

    Where the folder's lock is not to be had in time, whatever waits at that moment is given up with
    the entry that waited for it: nobody waits for the lock once per entry.

    Args:
        disk: where to.
        max_bytes: limit of the entries that wait, which memory may have dropped meanwhile.
        lock: guards the queue's size.
        tally: told of every entry's fate.
    """

    def __init__(self, disk: DiskStore, max_bytes: int, lock: RLock, tally: Tally) -> None:
        self._disk = disk
        self._max_bytes = max_bytes
        self._lock = lock
        self._tally = tally
        self._queued = 0
        self._added = 0
        self._given_up = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specdec-prefix-cache")

    def add(self, key: Key, stored: Stored) -> None:
        """Write an entry when its turn comes, or leave it out if too much waits already."""
        size = stored.nbytes
        with self._lock:
            if self._closed or self._queued + size > self._max_bytes:
                what = "the cache is closed" if self._closed else "too much waits to be written"
                self._tally.skip(f"{what}; an entry of {size} bytes was left out")
                return
            self._queued += size
            self._added += 1
            self._thread.submit(self._write, key, stored, self._added)

    def flush(self) -> None:
        """Wait for what was added so far."""
        with self._lock:
            if self._closed:
                return
            last = self._thread.submit(lambda: None)
        last.result()

    def close(self) -> None:
        """Write what waits and end the thread; may be called again."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)

    def _write(self, key: Key, stored: Stored, number: int) -> None:
        try:
            if number <= self._given_up:
                self._tally.skip("another process holds the folder's lock; what waited is left out")
                return
            written, evicted, reason = self._disk.write(key, stored)
            self._tally.count(written=written, disk_evicted=evicted)
            if reason:
                self._tally.skip(reason)
            else:
                self._tally.count(skipped=not written)
        except Timeout as error:
            with self._lock:
                self._given_up = self._added
                self._tally.disk_error(error)
        except Exception as error:  # whatever a folder does, no request may feel it
            self._tally.disk_error(error)
        finally:
            with self._lock:
                self._queued -= stored.nbytes
