"""Who made a state: identities of artifacts on the disk and of models in memory.

Checkpoints and prefix cache entries are only right for the very weights that made them, so their
namespaces contain one of these.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, file_digest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

import platformdirs

from specdec.checkpoints.weights import weights_identity
from specdec.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["artifact_identity", "weights_identity"]

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_CONFIG = "config.json"
_NOTE_FORMAT = "specdec-file-digest-1"
_SETTLING_NS = 20_000_000  # above the tick of any kernel's file timestamps
_TRIES = 3

# dev, inode, size, mtime_ns, ctime_ns of a file -> hex digest of its content.
_digests: dict[tuple[int, ...], str] = {}
_digests_lock = Lock()


def artifact_identity(path: str | os.PathLike[str]) -> str:
    """Identity of an artifact: 64 hex digits over what its weights and config contain.

    A folder counts with ``config.json``, ``*.safetensors`` and ``*.safetensors.index.json``, by
    name; where the folder is and what it is called does not count. A file counts with its content.

    Content is read once, in pieces: digests are remembered by a file's device, inode, size and
    times of change, in memory and in the user's cache folder (``SPECDEC_CACHE_DIR``, or the
    platform's own), where other processes find them.

    Raises:
        ArtifactError: nothing there, nothing readable, or nothing in it.
    """
    root = Path(path)
    try:
        if root.is_dir():
            files = sorted(f for f in root.iterdir() if _counts(f.name) and f.is_file())
            names = [f.name for f in files]
        elif root.is_file():
            files, names = [root], [""]
        else:  # a device would have no end
            raise ArtifactError(f"'{root}' is no file or folder; give the path of an artifact")
        sizes = [f.stat().st_size for f in files]
        if not any(sizes):
            what = "no config.json and no *.safetensors" if root.is_dir() else "no content"
            raise ArtifactError(f"'{root}' has {what}; give a complete artifact")
        digests = _file_digests(files)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            one_line(f"'{root}' cannot be read ({one_line(error)}); give an artifact's folder")
        ) from error
    return blake2b(json.dumps([names, digests]).encode(), digest_size=32).hexdigest()


def _counts(name: str) -> bool:
    return name == _CONFIG or name.endswith(_WEIGHTS)


def _file_digests(files: Sequence[Path]) -> list[str]:
    known = [_digests.get(_stamp(path)) for path in files]
    if None not in known:
        return cast("list[str]", known)
    # hashlib lets go of Python's lock, so shards are hashed side by side.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_file_digest, files))


def _file_digest(path: Path) -> str:
    """The digest of one file, from memory, from the cache folder, or from its content."""
    for _ in range(_TRIES):
        stamp = _stamp(path)
        with _digests_lock:
            known = _digests.get(stamp)
        known = known or _noted(stamp)
        if known is None:
            _let_settle(stamp)
            with path.open("rb") as file:
                known = file_digest(file, "sha256").hexdigest()
            if _stamp(path) != stamp:
                continue
            _note(stamp, known)
        with _digests_lock:
            _digests[stamp] = known
        return known
    raise OSError(f"'{path}' is being written to")


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _let_settle(stamp: tuple[int, ...]) -> None:
    # A file may change twice within one tick of the clock that stamps it. Read only after the tick
    # in which it last changed, and any later change will have another stamp.
    age = time.time_ns() - stamp[-1]
    if age < _SETTLING_NS:
        time.sleep(min(_SETTLING_NS, _SETTLING_NS - age) / 1e9)


def _note_path(stamp: tuple[int, ...]) -> Path:
    base = os.environ.get("SPECDEC_CACHE_DIR")
    folder = Path(base).expanduser() if base else platformdirs.user_cache_path("specdec")
    name = blake2b(repr(stamp).encode(), digest_size=16).hexdigest()
    return folder / "file-digests" / f"{name}.json"


def _noted(stamp: tuple[int, ...]) -> str | None:
    try:
        found = json.loads(_note_path(stamp).read_bytes())
        digest = found["sha256"]
        if found["format"] == _NOTE_FORMAT and found["file"] == list(stamp):
            return bytes.fromhex(digest).hex() if len(digest) == 64 else None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        pass  # none, or a damaged one: the file is read again
    return None


def _note(stamp: tuple[int, ...], digest: str) -> None:
    try:
        path = _note_path(stamp)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        note = {"format": _NOTE_FORMAT, "file": list(stamp), "sha256": digest}
        try:
            temporary.write_text(json.dumps(note), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError, RuntimeError):
        pass  # without a cache folder that can be written, the next process reads again
