"""Prefix cache entries in a folder that several processes share.

``directory/v1/<hash of namespace>/<token count>-<hash of tokens>.safetensors``. One file lock, held
while writing, makes one writer of all processes; readers need none, because a file appears under
its name when it is whole and is never written again. Entries of another version are left alone.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen
from filelock import FileLock

from specdec.checkpoints.disk_index import ENTRY_NAME, FOLDER_NAME, DiskIndex
from specdec.checkpoints.entry import ENTRY_FORMAT, key_of
from specdec.checkpoints.memory import Stored
from specdec.checkpoints.seal import check_seal, sealed
from specdec.checkpoints.tensors import (
    FOREIGN,
    SUFFIX,
    file_header,
    file_of,
    refusal,
    size_bound,
    sync_folder,
    write,
)
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import RLock

    from specdec.checkpoints.memory import Key

__all__ = ["DiskStore"]

VERSION = "v1"
LOCK_SECONDS = 10.0
"""How long a writer waits for the others before it leaves its entry out."""

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp\.safetensors")


@frozen
class _File:
    """One entry's file.

    Attributes:
        path: where.
        size: bytes.
        used: when it was last used, in nanoseconds.
    """

    path: Path
    size: int
    used: int


class DiskStore:
    """Entries as files, and an index of them. Thread-safe.

    Args:
        directory: made when it is first written to.
        max_bytes: limit of all entries together, one that is being written included.
        lock: guards the index and the leases; not held while files are read or written.
        note: told of each thing that went wrong and was survived.

    Attributes:
        index: which entries there are.
    """

    def __init__(
        self, directory: Path, max_bytes: int, lock: RLock, note: Callable[[object], None]
    ) -> None:
        self._root = directory / VERSION
        self._max_bytes = max_bytes
        self._lock = lock
        self._note = note
        self.index = DiskIndex(self._root, lock, note)
        self._leases: dict[Path, int] = {}
        self._formats: dict[Path, tuple[int, int, bool]] = {}
        self._clock = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, of every namespace and process; 0 where they cannot be seen."""
        try:
            return sum(file.size for file in self._files())
        except OSError as error:
            self._note(error)
            return 0

    # Reading.

    def load(self, key: Key) -> Stored:
        """Read an entry; its arrays are evaluated.

        Raises:
            CheckpointError: the file is gone, damaged, or another entry's.
        """
        path = self.index.path(key)
        where = f"'{path}'"
        arrays, header = file_of(path, where)
        try:
            # Here and now: a lazy array could be evaluated in this thread alone.
            mx.eval(list(arrays.values()))
            if key_of(arrays, header, where) != key:
                raise refusal(where, "it is another entry", "it is left out")
            check_seal(arrays, header, where)
        except CheckpointError:
            raise
        except FOREIGN as error:
            raise refusal(where, error, "it is left out") from error
        return Stored(arrays, header)

    def touch(self, key: Key) -> None:
        """Mark an entry as used now, if it has a file."""
        try:
            self._stamp(self.index.path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(error)

    def lease(self, key: Key) -> None:
        """Keep an entry's file from being evicted by this process; counted."""
        with self._lock:
            path = self.index.path(key)
            self._leases[path] = self._leases.get(path, 0) + 1

    def release(self, key: Key) -> None:
        """End one lease."""
        with self._lock:
            path = self.index.path(key)
            left = self._leases.pop(path, 0) - 1
            if left > 0:
                self._leases[path] = left

    # Writing.

    def write(self, key: Key, stored: Stored) -> tuple[bool, int, str]:
        """Write an entry, unless it is there.

        Returns:
            Whether it was written, how many others had to go, and why it was not written, if there
            is anything to say: it has no room, or something else is in its place. An entry that is
            there already is nothing to speak of.

        Raises:
            CheckpointError: the file came out incomplete; it was removed.
            OSError: the file system refused, or the lock was not to be had.
        """
        path, header = self.index.path(key), sealed(stored.arrays, stored.header)
        bound = size_bound(stored.arrays, header)
        if bound > self._max_bytes:
            what = f"a file of {bound} bytes is above max_disk_bytes {self._max_bytes}"
            return False, 0, f"{what}; raise it to keep the entry on the disk"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._root / "lock", timeout=LOCK_SECONDS):
            self._sweep()
            self.index.refresh(key.namespace)
            if key in self.index:
                self.touch(key)
                return False, 0, ""
            if path.exists() and not self._is_ours(path):
                return False, 0, f"'{path}' is none of ours; move it to keep the entry on the disk"
            evicted = self._make_room(bound)
            if evicted is None:
                return False, 0, f"no room for {bound} bytes beside what is in use; it was left out"
            self._put_file(path, Stored(stored.arrays, header), bound)
        self.index.learn(key)
        return True, evicted, ""

    def clear(self, seconds: float) -> None:
        """Delete every entry that is not leased; a failure is noted.

        Args:
            seconds: how long to wait for other writers at the most.
        """
        try:
            if self._root.is_dir():
                with FileLock(self._root / "lock", timeout=seconds):
                    self._sweep()
                    for file in self._files():
                        self._evict(file.path)
        except (OSError, RuntimeError) as error:
            self._note(error)

    def _put_file(self, path: Path, stored: Stored, bound: int) -> None:
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp{SUFFIX}")
        try:
            write(temporary, stored.arrays, stored.header)
            if temporary.stat().st_size > bound:
                raise CheckpointError(f"'{path}' is larger than its bound; it was left out")
            self._stamp(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)

    def _make_room(self, size: int) -> int | None:
        files = sorted(self._files(), key=lambda file: file.used)
        excess = sum(file.size for file in files) + size - self._max_bytes
        with self._lock:
            free = [file for file in files if file.path not in self._leases]
        victims = []
        for file in free:
            if excess <= 0:
                break
            victims.append(file)
            excess -= file.size
        # Nothing is deleted for an entry that will not fit even then.
        if excess > 0 or not all(self._evict(file.path) for file in victims):
            return None
        return len(victims)

    def _evict(self, path: Path) -> bool:
        with self._lock:  # so that nobody leases it in between
            if path in self._leases:
                return False
            path.unlink(missing_ok=True)
            self._formats.pop(path, None)
            return True

    def _sweep(self) -> None:
        """Remove what killed writers left. Whoever holds the lock is the only writer."""
        for path in filter(Path.is_file, self._scan(_TEMPORARY)):
            path.unlink(missing_ok=True)

    def _files(self) -> Iterator[_File]:
        paths = self._scan(ENTRY_NAME)
        for gone in set(self._formats).difference(paths):
            self._formats.pop(gone, None)
        for path in paths:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if self._is_ours(path):
                yield _File(path, status.st_size, status.st_mtime_ns)

    def _scan(self, names: re.Pattern[str]) -> list[Path]:
        try:
            folders = [
                f for f in self._root.iterdir() if FOLDER_NAME.fullmatch(f.name) and f.is_dir()
            ]
            return [p for f in folders for p in f.iterdir() if names.fullmatch(p.name)]
        except FileNotFoundError:
            return []

    def _is_ours(self, path: Path) -> bool:
        """Whether a file is an entry of this version; a damaged one is, so that it can go."""
        try:
            status = path.stat()
            if not S_ISREG(status.st_mode):
                return False
            known = self._formats.get(path)
            if known is not None and known[:2] == (status.st_ino, status.st_size):
                return known[2]
            ours = file_header(path, f"'{path}'").get("format") == ENTRY_FORMAT
        except OSError:
            return False
        except CheckpointError:
            ours = True
        self._formats[path] = (status.st_ino, status.st_size, ours)
        return ours

    def _stamp(self, path: Path) -> None:
        # The kernel's own stamps are milliseconds coarse, and two uses must not look alike.
        with self._lock:
            self._clock = max(self._clock + 1, time.time_ns())
            stamp = self._clock
        os.utime(path, ns=(stamp, stamp))
