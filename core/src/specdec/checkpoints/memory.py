"""Prefix cache entries in memory: strictly least recently used, never above the limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from specdec.checkpoints.index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx

__all__ = ["Key", "MemoryStore", "Stored"]


class Key(NamedTuple):
    """What an entry is found by.

    Attributes:
        namespace: the identity of everything that the state depends on.
        tokens: the prefix, as :func:`specdec.checkpoints.index.token_bytes` gives it.
    """

    namespace: str
    tokens: bytes


@frozen(eq=False)
class Stored:
    """An encoded entry whose arrays are evaluated; nobody assigns into them.

    Attributes:
        arrays: by the names of the entry's layout.
        header: the metadata that goes with them.
    """

    arrays: Mapping[str, mx.array]
    header: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, the tokens among them."""
        return sum(array.nbytes for array in self.arrays.values())


class MemoryStore:
    """Entries in the order of their use. Not thread-safe: its owner locks.

    Args:
        max_bytes: the limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Stored] = OrderedDict()
        self._indices: dict[str, PrefixIndex] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Stored:
        """An entry, which is then the most recently used.

        Raises:
            KeyError: no such entry.
        """
        self._entries.move_to_end(key)
        return self._entries[key]

    def add(self, key: Key, stored: Stored) -> int | None:
        """Add an entry as the most recently used, making room first.

        Returns:
            How many others had to go; ``None`` where the entry alone is above the limit.
        """
        if key in self._entries:
            self._entries.move_to_end(key)
            return 0
        size, evicted = stored.nbytes, 0
        if size > self._max_bytes:
            return None
        while self.nbytes + size > self._max_bytes:
            self._remove(next(iter(self._entries)))
            evicted += 1
        self._entries[key] = stored
        self.nbytes += size
        self._indices.setdefault(key.namespace, PrefixIndex()).add(key.tokens)
        return evicted

    def longest_prefix(self, namespace: str, prompt: bytes) -> Key | None:
        """The longest entry that the prompt begins with."""
        index = self._indices.get(namespace)
        found = None if index is None else index.longest_prefix(prompt)
        return None if found is None else Key(namespace, found)

    def common_prefix(self, namespace: str, prompt: bytes) -> int:
        """Tokens that the prompt shares with the entry that begins most like it."""
        index = self._indices.get(namespace)
        return 0 if index is None else index.common_prefix(prompt)

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._indices.clear()
        self.nbytes = 0

    def _remove(self, key: Key) -> None:
        self.nbytes -= self._entries.pop(key).nbytes
        index = self._indices[key.namespace]
        index.discard(key.tokens)
        if not index:
            del self._indices[key.namespace]
