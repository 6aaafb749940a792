"""Checkpoints and attachments as safetensors, and back.

The header's metadata carries ``format`` (a name with a version), ``schema`` and ``metadata`` (the
flat map as JSON), and of a row checkpoint ``namespace`` and ``processed_tokens``. The arrays keep
their names. What does not fit is refused in one line; nothing is pickled.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.checkpoints.tensors import file_of, pack, refusal, replace, unpack
from specdec.contract import Attachment, RowCheckpoint
from specdec.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ATTACHMENT_FORMAT",
    "CHECKPOINT_FORMAT",
    "attachment_from_bytes",
    "checkpoint_from_bytes",
    "load_attachment",
    "load_checkpoint",
    "restore_checkpoint",
    "save",
    "split",
    "to_bytes",
]

CHECKPOINT_FORMAT = "specdec-row-checkpoint-1"
ATTACHMENT_FORMAT = "specdec-attachment-1"

_RESERVED = "__metadata__"
_MAKE_AGAIN = "make the checkpoint again"


def to_bytes(value: RowCheckpoint | Attachment) -> bytes:
    """A checkpoint or an attachment as the bytes of a safetensors file.

    Raises:
        CheckpointError: metadata that is not flat, a name or a dtype that cannot be stored.
    """
    return pack(*split(value))


def checkpoint_from_bytes(data: bytes) -> RowCheckpoint:
    """The row checkpoint that :func:`to_bytes` gave these bytes for; its arrays are copies.

    Raises:
        CheckpointError: bytes of anything else, or damaged ones.
    """
    return restore_checkpoint(*unpack(_bytes(data), "the bytes"), "the bytes")


def attachment_from_bytes(data: bytes) -> Attachment:
    """The attachment that :func:`to_bytes` gave these bytes for; its arrays are copies.

    Raises:
        CheckpointError: bytes of anything else, or damaged ones.
    """
    return _restore_attachment(*unpack(_bytes(data), "the bytes"), "the bytes")


def save(value: RowCheckpoint | Attachment, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint or an attachment to a file.

    The file appears whole or not at all: it is written beside ``path``, put on the disk, and
    renamed.

    Raises:
        CheckpointError: a value that cannot be stored, or a file that cannot be written.
    """
    replace(_path(path), *split(value))


def load_checkpoint(path: str | os.PathLike[str]) -> RowCheckpoint:
    """The row checkpoint in a file.

    The arrays are lazy: the file stays open and is read when they are evaluated. MLX's streams
    belong to threads, so evaluate them in the thread that loaded them.

    Raises:
        CheckpointError: a file that is missing, damaged, or holds anything else.
    """
    where = f"'{path}'"
    return restore_checkpoint(*file_of(_path(path), where), where)


def load_attachment(path: str | os.PathLike[str]) -> Attachment:
    """The attachment in a file; lazy, as in :func:`load_checkpoint`.

    Raises:
        CheckpointError: a file that is missing, damaged, or holds anything else.
    """
    where = f"'{path}'"
    return _restore_attachment(*file_of(_path(path), where), where)


def split(value: RowCheckpoint | Attachment) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A value's arrays and the header metadata that goes with them.

    Raises:
        CheckpointError: a part of a type that cannot be stored.
    """
    if isinstance(value, RowCheckpoint):
        count = value.processed_tokens
        if type(count) is not int:
            raise CheckpointError(f"processed_tokens is {count!r}; it must be an int")
        arrays, header = split(value.attachment)
        own = {"namespace": value.namespace, "processed_tokens": str(count)}
        header = {**header, **own, "format": CHECKPOINT_FORMAT}
    elif isinstance(value, Attachment):
        arrays = {_name(name): _array(name, array) for name, array in value.arrays.items()}
        header = {
            "format": ATTACHMENT_FORMAT,
            "schema": value.schema,
            "metadata": _flat_json(value.metadata),
        }
    else:
        raise CheckpointError(
            f"a {type(value).__name__} is no checkpoint; give a RowCheckpoint or an Attachment"
        )
    for name in ("schema", "namespace"):
        if name in header:
            _text(f"the checkpoint's {name}", header[name])
    return arrays, header


def restore_checkpoint(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> RowCheckpoint:
    """A row checkpoint from the parts that :func:`split` gave.

    Args:
        arrays: its arrays, used as they are.
        header: the metadata.
        where: what the error calls them.

    Raises:
        CheckpointError: another format or version, or a missing or wrong part.
    """
    _check_format(header, CHECKPOINT_FORMAT, where)
    count = _part(header, "processed_tokens", where)
    if not (count.isascii() and count.isdecimal() and len(count) <= 18):
        raise refusal(where, f"processed_tokens is {count!r}, no number", _MAKE_AGAIN)
    return RowCheckpoint(
        namespace=_part(header, "namespace", where),
        processed_tokens=int(count),
        attachment=_attachment(arrays, header, where),
    )


def _restore_attachment(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> Attachment:
    _check_format(header, ATTACHMENT_FORMAT, where)
    return _attachment(arrays, header, where)


def _attachment(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> Attachment:
    if "" in arrays:
        raise refusal(where, "an array has no name", _MAKE_AGAIN)
    return Attachment(
        schema=_part(header, "schema", where),
        arrays=dict(arrays),
        metadata=_flat_map(_part(header, "metadata", where), where),
    )


def _check_format(header: Mapping[str, str], expected: str, where: str) -> None:
    found = header.get("format")
    if found != expected:
        what = "it names no format" if found is None else f"its format is {found!r}"
        raise refusal(where, what, f"this version of specdec reads {expected!r} here")


def _part(header: Mapping[str, str], name: str, where: str) -> str:
    value = header.get(name)
    if not value:
        raise refusal(where, f"its header has no {name}", _MAKE_AGAIN)
    return value


def _flat_json(metadata: Mapping[str, str | int | float | bool]) -> str:
    for key, value in metadata.items():
        if type(key) is not str:
            raise CheckpointError(f"the metadata key {key!r} is no string; use strings")
        if type(value) not in (str, int, float, bool):
            kind = type(value).__name__
            raise CheckpointError(
                one_line(
                    f"the metadata {key!r} is a {kind}; a flat str, int, float or bool can be kept"
                )
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"the metadata {key!r} is {value}; store a finite number")
    try:
        return json.dumps(dict(metadata))
    except ValueError as error:  # an int of thousands of digits
        raise CheckpointError(f"the metadata cannot be kept: {one_line(error)}") from error


def _flat_map(text: str, where: str) -> dict[str, str | int | float | bool]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no finite number")

    try:
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise refusal(where, f"its metadata is no JSON ({one_line(error)})", _MAKE_AGAIN) from error
    if not isinstance(found, dict):
        raise refusal(where, "its metadata is no map", _MAKE_AGAIN)
    for key, value in found.items():
        if type(value) not in (str, int, float, bool) or value in (math.inf, -math.inf):
            raise refusal(where, f"its metadata {key!r} is no flat finite value", _MAKE_AGAIN)
    return found


def _name(name: object) -> str:
    if not isinstance(name, str) or not name or name == _RESERVED:
        raise CheckpointError(
            f"an array cannot be named {name!r}; any other non-empty string will do"
        )
    return _text("an array's name", name)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(one_line(f"{what} is {value!r}; it must be a string"))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(one_line(f"{what} is {value!r}, which UTF-8 lacks; rename it")) from (
            None
        )
    return value


def _array(name: object, array: object) -> mx.array:
    if not isinstance(array, mx.array):
        kind = type(array).__name__
        raise CheckpointError(f"the array {name!r} is a {kind}; give an mx.array")
    return array


def _bytes(data: object) -> bytes:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise CheckpointError(f"a {type(data).__name__} holds no checkpoint; give bytes")
    return bytes(data)


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"a path cannot be a {type(path).__name__}; give a string or a Path")
    return Path(path)
