"""Named arrays and a flat string map as safetensors, in memory and in files.

Everything is validated by the safetensors library before MLX sees it: MLX's own reader accepts
overlaps, gaps and trailing bytes. Files are written by MLX, straight from its buffers and without
Python's lock; what it cannot say (float64) goes through the library.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from safetensors import SafetensorError, TensorSpec, deserialize, safe_open, serialize

from specdec.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = [
    "FOREIGN",
    "SUFFIX",
    "file_header",
    "file_of",
    "pack",
    "refusal",
    "replace",
    "settled",
    "size_bound",
    "sync_folder",
    "unpack",
    "write",
]

SUFFIX = ".safetensors"  # mx.save_safetensors appends it to any other name

_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "U64": mx.uint64,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_NAMES = {dtype: str(dtype).rpartition(".")[2] for dtype in _DTYPES.values()}
_LARGEST_AXIS = 2**31 - 1  # MLX counts an axis in 32 bits

# What a reader or writer may raise on bad input; all of it becomes a CheckpointError.
FOREIGN = (SafetensorError, OSError, RuntimeError, ValueError, TypeError, OverflowError)


def refusal(where: str, what: object, way_out: str) -> CheckpointError:
    """A one-line error: the file or bytes, what is wrong with them, and what to do."""
    return CheckpointError(one_line(f"{where} cannot be used: {one_line(what)}; {way_out}"))


def pack(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> bytes:
    """Arrays and metadata as the bytes of a safetensors file.

    Args:
        arrays: named arrays of any shape and layout; evaluated here.
        metadata: text by name.

    Raises:
        CheckpointError: a dtype or a name that cannot be stored.
    """
    try:
        ready = {name: settled(array) for name, array in arrays.items()}
        mx.eval(list(ready.values()))
        views = {name: memoryview(cast("Any", array)) for name, array in ready.items()}
        specs = {name: _spec(ready[name], view) for name, view in views.items()}
        return serialize(specs, dict(metadata))
    except FOREIGN as error:
        raise refusal("the arrays", error, "store arrays of dtypes that safetensors has") from error


def unpack(data: bytes, where: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays, evaluated copies, and metadata of a safetensors file's bytes.

    Args:
        data: the whole file.
        where: what the error calls them.

    Raises:
        CheckpointError: not exactly one valid safetensors file.
    """
    try:
        found: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
        _check_axes((name, item["dtype"], item["shape"]) for name, item in found)
        arrays = {name: _restored(item) for name, item in found}
        mx.eval(list(arrays.values()))
    except FOREIGN as error:
        raise refusal(where, error, "make the checkpoint again") from error
    return arrays, metadata


def write(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file in place, check it, and put it on the disk.

    Args:
        path: where; must end in ``.safetensors``.
        arrays: named arrays. Evaluated and contiguous ones may come from any thread.
        metadata: text by name; not empty.

    Raises:
        CheckpointError: a dtype or a name that cannot be stored, or an incomplete file.
        OSError: the file system's refusal, where it gives one.
    """
    if any(array.dtype == mx.float64 for array in arrays.values()):
        path.write_bytes(pack(arrays, metadata))
    else:
        try:
            mx.save_safetensors(str(path), dict(arrays), dict(metadata))
        except (RuntimeError, ValueError, TypeError) as error:
            raise refusal(f"'{path}'", error, "check the folder and the arrays") from error
    try:
        # MLX raises on a full disk. All the same, what gets a name has to be whole: a file is whole
        # where its header, its offsets and its size agree.
        with safe_open(path, "mlx"):
            pass
    except SafetensorError as error:
        raise refusal(f"'{path}'", f"incomplete ({error})", "make room on the disk") from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def replace(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write a file so that its name shows the old content or all of the new, never a part.

    Raises:
        CheckpointError: it could not be written; the old file, if any, is as it was.
    """
    try:
        temporary = path.with_name(f".specdec-{secrets.token_hex(8)}{SUFFIX}")
        try:
            write(temporary, arrays, metadata)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise refusal(f"'{path}'", error, "choose a folder that can be written") from error


def size_bound(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> int:
    """Bytes that a file of these takes at the most: the data is exact, the header is rounded up."""
    total = sum(array.nbytes for array in arrays.values())
    header: dict[str, Any] = {
        name: {"dtype": "XXXX", "shape": list(array.shape), "data_offsets": [total, total]}
        for name, array in arrays.items()
    }
    # Escapes and spaces that the writers leave out make this longer than any of theirs.
    return total + len(json.dumps({**header, "__metadata__": dict(metadata)})) + 16


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def file_header(path: Path, where: str) -> dict[str, str]:
    """The metadata of a file, after its header, offsets and size were checked.

    Raises:
        CheckpointError: missing, unreadable, or not exactly one valid safetensors file.
    """
    return _inspect(path, where)[0]


def file_of(path: Path, where: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's arrays and metadata.

    The arrays are lazy: the file stays open and is read when they are evaluated. MLX's streams
    belong to threads, so that has to happen in the thread that called.

    Raises:
        CheckpointError: missing, unreadable, or not exactly one valid safetensors file.
    """
    metadata, dtypes = _inspect(path, where)
    if "F64" in dtypes:
        try:
            return unpack(path.read_bytes(), where)
        except OSError as error:
            raise refusal(where, error, "give a file that can be read") from error
    try:
        arrays = mx.load(str(path), format="safetensors")
    except FOREIGN as error:
        raise refusal(where, error, "make the checkpoint again") from error
    return cast("dict[str, mx.array]", arrays), metadata


def _inspect(path: Path, where: str) -> tuple[dict[str, str], set[str]]:
    try:
        # Without this, a pipe would block and a folder would be reported as a missing device.
        if not path.is_file():
            what = "it is no file" if path.exists() else "there is no such file"
            raise refusal(where, what, "give the path of a stored checkpoint")
        with safe_open(path, "mlx") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
            found = [(name, part.get_dtype(), part.get_shape()) for name, part in slices]
            metadata = dict(file.metadata() or {})
        _check_axes(found)
    except FOREIGN as error:
        if isinstance(error, CheckpointError):
            raise
        way_out = "make the checkpoint again" if isinstance(error, SafetensorError) else "check it"
        raise refusal(where, error, way_out) from error
    return metadata, {dtype for _, dtype, _ in found}


def _check_axes(found: Iterable[tuple[str, str, list[int]]]) -> None:
    for name, dtype, shape in found:
        if dtype not in _DTYPES:
            raise ValueError(f"the array {name!r} has the dtype {dtype}, which MLX lacks")
        if any(axis > _LARGEST_AXIS for axis in shape):
            raise ValueError(f"the array {name!r} has the shape {shape}, which MLX cannot hold")


def settled(array: mx.array) -> mx.array:
    """``array`` in one contiguous run of memory."""
    if array.dtype == mx.float64:  # exists on the CPU alone
        return mx.contiguous(array, stream=mx.cpu)
    return mx.contiguous(array)


def _spec(array: mx.array, view: memoryview) -> TensorSpec:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if array.size else 0
    return TensorSpec(
        dtype=_NAMES[array.dtype], shape=list(array.shape), data_ptr=address, data_len=array.nbytes
    )


def _restored(item: Mapping[str, Any]) -> mx.array:
    dtype, shape = _DTYPES[item["dtype"]], item["shape"]
    if not item["data"]:
        return mx.zeros(shape, dtype, stream=mx.cpu)
    data = mx.array(cast("Any", memoryview(item["data"])))
    return mx.reshape(mx.view(data, dtype, stream=mx.cpu), shape, stream=mx.cpu)
