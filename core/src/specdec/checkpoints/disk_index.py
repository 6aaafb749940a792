"""What is known of the entries in a folder that several processes write to."""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from typing import TYPE_CHECKING

from attrs import define, field

from specdec.checkpoints.entry import key_of
from specdec.checkpoints.index import WIDTH, PrefixIndex
from specdec.checkpoints.memory import Key
from specdec.checkpoints.tensors import FOREIGN, SUFFIX, file_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from threading import RLock

    _Signature = tuple[int, int, int]

__all__ = ["ENTRY_NAME", "FOLDER_NAME", "DiskIndex"]

FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
ENTRY_NAME = re.compile(r"[0-9]+-[0-9a-f]{32}\.safetensors")


@define(eq=False)
class _Folder:
    """What is known of one namespace's folder.

    Attributes:
        tokens: of each file that was read, its tokens.
        unusable: of each file that could not be used, how it looked then.
        index: all the tokens.
    """

    tokens: dict[str, bytes] = field(factory=dict)
    unusable: dict[str, _Signature] = field(factory=dict)
    index: PrefixIndex = field(factory=PrefixIndex)


class DiskIndex:
    """The tokens of all files, each file read once. Thread-safe.

    Args:
        root: the folder of this version.
        lock: guards what is known; not held while files are read.
        note: told of files that could not be used.
    """

    def __init__(self, root: Path, lock: RLock, note: Callable[[object], None]) -> None:
        self._root = root
        self._lock = lock
        self._note = note
        self._folders: dict[str, _Folder] = {}

    def path(self, key: Key) -> Path:
        """Where an entry's file is, or would be."""
        digest = blake2b(key.tokens, digest_size=16).hexdigest()
        return self._place(key.namespace) / f"{len(key.tokens) // WIDTH}-{digest}{SUFFIX}"

    def refresh(self, namespace: str) -> None:
        """See what was written or removed since the last time, by whichever process."""
        place = self._place(namespace)
        names: set[str] = set()
        try:
            with os.scandir(place) as found:
                names = {item.name for item in found if _is_entry(item)}
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(error)
        with self._lock:
            folder = self._known(namespace)
            for name in folder.tokens.keys() - names:
                folder.index.discard(folder.tokens.pop(name))
            for name in folder.unusable.keys() - names:
                del folder.unusable[name]
            new = {name: folder.unusable.get(name) for name in names - folder.tokens.keys()}
            self._tidy(namespace)
        for name, unusable in new.items():
            if unusable is None or unusable != _signature(place / name):
                self._read(namespace, place / name)

    def longest_prefix(self, namespace: str, prompt: bytes) -> Key | None:
        """The longest entry that the prompt begins with, as of the last refresh."""
        with self._lock:
            found = self._known(namespace).index.longest_prefix(prompt)
        return None if found is None else Key(namespace, found)

    def common_prefix(self, namespace: str, prompt: bytes) -> int:
        """Tokens that the prompt shares with the entry that begins most like it."""
        with self._lock:
            return self._known(namespace).index.common_prefix(prompt)

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return self.path(key).name in self._known(key.namespace).tokens

    def learn(self, key: Key) -> None:
        """A file of this entry is there and whole."""
        with self._lock:
            name = self.path(key).name
            folder = self._folders.setdefault(key.namespace, _Folder())
            folder.unusable.pop(name, None)
            folder.tokens[name] = key.tokens
            folder.index.add(key.tokens)

    def forget(self, key: Key) -> bool:
        """Leave a file out that could not be used, until it changes; whether it is still there."""
        path = self.path(key)
        with self._lock:
            folder = self._known(key.namespace)
            if folder.tokens.pop(path.name, None) is not None:
                folder.index.discard(key.tokens)
        return self._shun(key.namespace, path)

    def _read(self, namespace: str, path: Path) -> None:
        try:
            arrays, header = file_of(path, f"'{path}'")
            key = Key(*key_of(arrays, header, f"'{path}'"))
        except FOREIGN as error:  # MLX reads only now: a file may have been cut since its check
            if self._shun(namespace, path):
                self._note(error)
            return
        # Both hashes may collide, or a file may have been renamed: what it says itself counts.
        if key.namespace == namespace and self.path(key) == path:
            self.learn(key)
        elif self._shun(namespace, path):
            self._note(f"'{path}' is another entry than its name says; it is left out")

    def _shun(self, namespace: str, path: Path) -> bool:
        signature = _signature(path)
        with self._lock:
            folder = self._folders.setdefault(namespace, _Folder())
            if signature is None:
                folder.unusable.pop(path.name, None)
            else:
                folder.unusable[path.name] = signature
            self._tidy(namespace)
        return signature is not None

    def _known(self, namespace: str) -> _Folder:
        """What is known, or an empty folder that is not kept. The caller locks."""
        return self._folders.get(namespace) or _Folder()

    def _tidy(self, namespace: str) -> None:
        folder = self._known(namespace)
        if not folder.tokens and not folder.unusable:
            self._folders.pop(namespace, None)

    def _place(self, namespace: str) -> Path:
        return self._root / blake2b(namespace.encode(), digest_size=16).hexdigest()


def _is_entry(item: os.DirEntry[str]) -> bool:
    return ENTRY_NAME.fullmatch(item.name) is not None and item.is_file()


def _signature(path: Path) -> _Signature | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
