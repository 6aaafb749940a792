"""The prefix cache: rows' states by the exact prefix that they have read.

Entries live in memory under a strict limit, and as files in a folder that processes share. What
goes wrong with the folder costs hits and is counted; it never reaches a request. Where a snapshot
would pay is where prompts were seen to part (:meth:`PrefixCache.branch`), the admission rule of
Marconi (Pan et al. 2024, arXiv 2411.19379).
"""

from __future__ import annotations

import time
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self

import mlx.core as mx

from specdec.checkpoints import arguments, disk
from specdec.checkpoints.disk import DiskStore
from specdec.checkpoints.entry import PrefixEntry, decode_state, encode
from specdec.checkpoints.hit import Leases, PrefixHit
from specdec.checkpoints.index import WIDTH, token_bytes, tokens_of
from specdec.checkpoints.memory import Key, MemoryStore, Stored
from specdec.checkpoints.seal import check_offsets
from specdec.checkpoints.tally import PrefixCacheStats, Tally
from specdec.checkpoints.writer import Writer
from specdec.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint

    _State = tuple[list[Any], RowCheckpoint | None]
    _Found = tuple[Stored, _State]

__all__ = ["PrefixCache"]


class PrefixCache:
    """States of rows by namespace and exact prefix. Thread-safe.

    Args:
        max_bytes: limit of the entries in memory, and of those that wait to be written.
        directory: where entries are kept across processes; ``None`` for memory alone.
        max_disk_bytes: limit of the files; ``max_bytes`` if not given.

    Raises:
        OptionError: a limit that is no positive number, or a directory that cannot be one.
    """

    def __init__(
        self,
        max_bytes: int,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_disk_bytes: int | None = None,
    ) -> None:
        arguments.check_limit("max_bytes", max_bytes)
        if max_disk_bytes is not None:
            arguments.check_limit("max_disk_bytes", max_disk_bytes)
            if directory is None:
                raise OptionError("max_disk_bytes is given without a directory; give both")
        self._max_bytes = max_bytes
        self._lock = RLock()
        self._tally = Tally(self._lock)
        self._memory = MemoryStore(max_bytes)
        self._disk: DiskStore | None = None
        self._writer: Writer | None = None
        if directory is not None:
            limit = max_bytes if max_disk_bytes is None else max_disk_bytes
            folder, note = arguments.folder_of(directory), self._tally.disk_error
            self._disk = DiskStore(folder, limit, self._lock, note)
            self._writer = Writer(self._disk, max_bytes, self._lock, self._tally)
        self._closed = False
        self._clears = 0
        self._leases = Leases(self._disk, self._lock)

    def __len__(self) -> int:
        with self._lock:
            return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries in memory."""
        with self._lock:
            return self._memory.nbytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files, whoever wrote them; 0 without a directory."""
        return 0 if self._disk is None else self._disk.nbytes

    @property
    def stats(self) -> PrefixCacheStats:
        """What happened so far."""
        return self._tally.stats

    def take(self, namespace: str, prompt: Sequence[int], *, longest: int) -> PrefixHit | None:
        """The longest stored entry that the prompt begins with.

        Args:
            namespace: what it was put under.
            prompt: token ids.
            longest: the most tokens that the entry may have; a prompt whose last token has to be
                read gives its length less one.

        Returns:
            The hit, to be released when its state has been taken over; ``None`` without one.

        Raises:
            OptionError: a prompt that is no sequence of token ids.
        """
        ids = token_bytes(prompt)[: WIDTH * arguments.count_of(longest)]
        self._look_at(namespace)
        while True:
            with self._lock:
                key, source = self._find(namespace, ids)
                if key is None or self._closed:
                    self._tally.count(misses=1)
                    return None
                self._leases.begin(key)
                stored, clears = self._memory.get(key) if source == "memory" else None, self._clears
            try:
                found = self._load(key) if stored is None else (stored, _state(stored))
                if found is not None:
                    return self._hit(key, found, source, clears)
            except BaseException:  # an interrupt, too, ends the lease
                self._leases.end(key)
                raise
            self._leases.end(key)

    def branch(self, namespace: str, prompt: Sequence[int]) -> int:
        """Tokens that the prompt shares with the stored entry that begins most like it.

        Prompts were seen to part there, so a snapshot at that place pays with the next one.

        Raises:
            OptionError: a prompt that is no sequence of token ids.
        """
        ids = token_bytes(prompt)
        self._look_at(namespace)
        with self._lock:
            common = self._memory.common_prefix(namespace, ids)
            if self._disk is not None:
                common = max(common, self._disk.index.common_prefix(namespace, ids))
            return common

    def put(
        self,
        namespace: str,
        tokens: Sequence[int],
        caches: Sequence[Any],
        checkpoint: RowCheckpoint | None = None,
    ) -> bool:
        """Keep a row's state after an exact prefix.

        It is in memory when this returns, and on the disk some time later. A key that is there
        already is only marked as used.

        Args:
            namespace: identity of everything that the state depends on.
            tokens: the prefix, every token of which was read.
            caches: one row of mlx-lm caches; do not use them afterwards.
            checkpoint: the drafter's state at the same place.

        Returns:
            Whether it is kept. It is not where it is larger than the limit, has no tokens, or has a
            cache of a class that cannot be stored; the statistics say why.

        Raises:
            OptionError: a namespace or tokens that cannot be a key, or what is no row of caches.
        """
        arguments.check_row(caches, checkpoint)
        key = Key(arguments.namespace_of(namespace), token_bytes(tokens))
        if self._closed or not key.tokens:
            return False
        if self._is_known(key):
            return True
        stored = self._encoded(PrefixEntry(tokens_of(key.tokens), caches, checkpoint), namespace)
        if stored is None:
            return False
        with self._lock:  # so that nobody closes in between
            if self._closed:
                return False
            self._remember(key, stored)
            if self._writer is not None:
                self._writer.add(key, stored)
        return True

    def flush(self) -> None:
        """Wait until everything that was put is on the disk or was given up."""
        if self._writer is not None:
            self._writer.flush()

    def clear(self) -> None:
        """Drop every entry, in memory and on the disk; files that are leased stay."""
        deadline = time.monotonic() + disk.LOCK_SECONDS
        self.flush()
        with self._lock:
            self._clears += 1
            self._memory.clear()
        if self._disk is not None:
            self._leases.end_dropped()
            self._disk.clear(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Write what waits, then find and keep nothing more; may be called again."""
        with self._lock:
            self._closed = True
        if self._writer is not None:
            self._writer.close()
        with self._lock:
            self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Taking.

    def _look_at(self, namespace: str) -> None:
        arguments.namespace_of(namespace)
        self._leases.end_dropped()
        if self._disk is not None:
            self._disk.index.refresh(namespace)

    def _find(self, namespace: str, ids: bytes) -> tuple[Key | None, Literal["memory", "disk"]]:
        near = self._memory.longest_prefix(namespace, ids)
        far = None if self._disk is None else self._disk.index.longest_prefix(namespace, ids)
        if far is not None and (near is None or len(far.tokens) > len(near.tokens)):
            return far, "disk"
        return near, "memory"

    def _load(self, key: Key) -> _Found | None:
        assert self._disk is not None
        try:
            stored = self._disk.load(key)
            state = _state(stored)
            check_offsets(state[0], len(key.tokens) // WIDTH, f"'{self._disk.index.path(key)}'")
            return stored, state
        except CheckpointError as error:
            if self._disk.index.forget(key):  # else another process has evicted it
                self._tally.disk_error(error)
            return None

    def _hit(
        self, key: Key, found: _Found, source: Literal["memory", "disk"], clears: int
    ) -> PrefixHit:
        if self._disk is not None:
            self._disk.touch(key)
        self._tally.count(hits=1, disk_hits=int(source == "disk"))

        def release() -> None:
            self._leases.end(key)
            with self._lock:
                if source == "disk" and not self._closed and clears == self._clears:
                    self._remember(key, found[0])

        dropped = partial(self._leases.dropped.append, key)
        return PrefixHit(len(key.tokens) // WIDTH, found[1], source, release, dropped)

    # Keeping.

    def _is_known(self, key: Key) -> bool:
        """Whether an entry is in memory; it then counts as used."""
        with self._lock:
            if key not in self._memory:
                return False
            self._memory.get(key)
        if self._disk is not None:
            self._disk.touch(key)
        return True

    def _encoded(self, entry: PrefixEntry, namespace: str) -> Stored | None:
        try:
            check_offsets(entry.caches, len(entry.tokens), "the row")
            stored = Stored(*encode(entry, namespace))
            if stored.nbytes > self._max_bytes:
                what = f"an entry of {stored.nbytes} bytes is above max_bytes {self._max_bytes}"
                raise CheckpointError(f"{what}; raise it or leave the entry out")
            mx.eval(list(stored.arrays.values()))
        except (CheckpointError, RuntimeError, ValueError) as error:
            self._tally.refuse(error)
            return None
        return stored

    def _remember(self, key: Key, stored: Stored) -> None:
        with self._lock:
            known = key in self._memory
            evicted = self._memory.add(key, stored)
            if evicted is not None and not known:
                self._tally.count(stored=1, evicted=evicted)


def _state(stored: Stored) -> _State:
    return decode_state(stored.arrays, stored.header, "the entry")
