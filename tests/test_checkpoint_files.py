"""Checkpoints as bytes and files: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import struct
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import (
    attachment_from_bytes,
    checkpoint_from_bytes,
    load_attachment,
    load_checkpoint,
    save,
    to_bytes,
)
from specdec.contract import Attachment, RowCheckpoint
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DTYPES = [
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.float64,
    mx.complex64,
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.one_of(
    st.text(), st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)
)


@st.composite
def arrays(draw: st.DrawFn) -> mx.array:
    """An array of any dtype, shape and layout, whose bits are arbitrary."""
    dtype = draw(st.sampled_from(DTYPES))
    shape: list[int] = draw(st.lists(st.integers(0, 4), max_size=4))
    size = math.prod(shape) * dtype.size
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == mx.bool_:
        data = bytes(byte & 1 for byte in data)
    if not data:
        return mx.zeros(shape, dtype, stream=mx.cpu)
    flat = mx.array(list(data), mx.uint8)
    array = mx.reshape(mx.view(flat, dtype, stream=mx.cpu), shape, stream=mx.cpu)
    layout = draw(st.sampled_from(["plain", "transposed", "strided"]))
    if layout == "transposed":
        return mx.transpose(array, stream=mx.cpu)
    return array[::2] if layout == "strided" and shape else array


ATTACHMENTS = st.builds(
    Attachment,
    schema=TEXT.filter(bool),
    arrays=st.dictionaries(TEXT.filter(bool).filter(lambda n: n != "__metadata__"), arrays()),
    metadata=st.dictionaries(st.text(), PLAIN),
)
CHECKPOINTS = st.builds(
    RowCheckpoint,
    namespace=TEXT.filter(bool),
    processed_tokens=st.integers(0, 2**40),
    attachment=ATTACHMENTS,
)


def bits(array: mx.array) -> bytes:
    array = mx.contiguous(array, stream=mx.cpu)
    mx.eval(array)
    return bytes(memoryview(array)) if array.size else b""  # type: ignore[arg-type]


def assert_same_attachment(found: Attachment, expected: Attachment) -> None:
    assert found.schema == expected.schema
    assert dict(found.metadata) == dict(expected.metadata)
    for key, value in expected.metadata.items():
        assert type(found.metadata[key]) is type(value)
        assert str(found.metadata[key]) == str(value)  # -0.0 and 0.0 are equal
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        restored = found.arrays[name]
        assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
        assert bits(restored) == bits(array)


def assert_same(found: RowCheckpoint, expected: RowCheckpoint) -> None:
    assert found.namespace == expected.namespace
    assert found.processed_tokens == expected.processed_tokens
    assert_same_attachment(found.attachment, expected.attachment)


def a_checkpoint(**changes: Any) -> RowCheckpoint:
    attachment = Attachment(schema="s-1", arrays={"x": mx.arange(6.0)}, metadata={"n": 1})
    parts = {"namespace": "ns", "processed_tokens": 3, "attachment": attachment, **changes}
    return RowCheckpoint(**parts)


def with_metadata(**metadata: Any) -> Attachment:
    return Attachment(schema="s", metadata=metadata)


@given(CHECKPOINTS)
def test_a_checkpoint_survives_bytes(checkpoint: RowCheckpoint) -> None:
    assert_same(checkpoint_from_bytes(to_bytes(checkpoint)), checkpoint)


@given(ATTACHMENTS)
def test_an_attachment_survives_bytes(attachment: Attachment) -> None:
    assert_same_attachment(attachment_from_bytes(to_bytes(attachment)), attachment)


def test_both_survive_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("files")

    @given(CHECKPOINTS)
    def run(checkpoint: RowCheckpoint) -> None:
        path = folder / "file"  # any suffix will do
        save(checkpoint, path)
        assert_same(load_checkpoint(path), checkpoint)
        save(checkpoint.attachment, str(path))
        assert_same_attachment(load_attachment(str(path)), checkpoint.attachment)
        assert os.listdir(folder) == ["file"]

    run()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_every_dtype_survives_bytes_and_files(
    dtype: mx.Dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    array = mx.arange(math.prod(shape), stream=mx.cpu)
    array = mx.reshape(mx.view(array, mx.int32), shape, stream=mx.cpu)
    attachment = Attachment(schema="s", arrays={"a": array.astype(dtype, stream=mx.cpu)})
    save(attachment, tmp_path / "a.safetensors")
    assert_same_attachment(load_attachment(tmp_path / "a.safetensors"), attachment)
    assert_same_attachment(attachment_from_bytes(to_bytes(attachment)), attachment)


def test_restored_arrays_are_independent() -> None:
    data = to_bytes(a_checkpoint())
    first = checkpoint_from_bytes(data)
    first.attachment.arrays["x"][:] = 9
    assert checkpoint_from_bytes(data).attachment.arrays["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_file_is_replaced_whole_while_it_is_being_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(a_checkpoint(), path)
    lazy = load_checkpoint(path)
    save(a_checkpoint(attachment=Attachment(schema="other")), path)
    assert lazy.attachment.arrays["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert load_checkpoint(path).attachment.schema == "other"


# What cannot be stored.


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (with_metadata(a=math.nan), "nan"),
        (with_metadata(a=math.inf), "inf"),
        (with_metadata(a=None), "NoneType"),
        (with_metadata(a=[1]), "list"),
        (with_metadata(a={"b": 1}), "dict"),
        (with_metadata(a=b"x"), "bytes"),
        (Attachment(schema="s", metadata={1: 2}), "1"),  # type: ignore[dict-item]
        (Attachment(schema="s", metadata={"a": 10**5000}), "digits"),
        (Attachment(schema="s", arrays={"": mx.array(1)}), "''"),
        (Attachment(schema="s", arrays={"__metadata__": mx.array(1)}), "__metadata__"),
        (Attachment(schema="s", arrays={"\ud800": mx.array(1)}), "UTF-8"),
        (Attachment(schema="\ud800"), "UTF-8"),
        (Attachment(schema="s", arrays={"a": [1, 2]}), "list"),  # type: ignore[dict-item]
        (a_checkpoint(namespace=3), "namespace"),
        (a_checkpoint(processed_tokens=True), "processed_tokens"),
        (a_checkpoint(processed_tokens=1.5), "processed_tokens"),
        ("text", "str"),
    ],
)
def test_what_cannot_be_stored_is_refused(value: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        to_bytes(value)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(CheckpointError):
        save(value, tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "file", tmp_path, "a\0b", "/"):
        with pytest.raises(CheckpointError) as caught:
            save(a_checkpoint(), path)
        assert len(str(caught.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="int"):
        save(a_checkpoint(), 3)  # type: ignore[arg-type]


def test_a_full_disk_is_noticed_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(a_checkpoint(), path)
    program = f"""
        import mlx.core as mx, resource
        from specdec.checkpoints import save
        from specdec.contract import Attachment
        from specdec.errors import CheckpointError
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {resource.RLIM_INFINITY}))
        for dtype in (mx.float32, mx.float64):
            try:
                with mx.stream(mx.cpu):
                    big = mx.zeros((10_000,), dtype)
                    save(Attachment(schema="s", arrays={{"x": big}}), {str(path)!r})
            except CheckpointError as error:
                print(len(str(error).splitlines()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1"]
    assert_same(load_checkpoint(path), a_checkpoint())
    assert os.listdir(tmp_path) == ["file"]


# What cannot be read.


def tensors(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(**changes: Any) -> dict[str, Any]:
    header = {
        "format": "specdec-row-checkpoint-1",
        "namespace": "ns",
        "processed_tokens": "3",
        "schema": "s",
        "metadata": "{}",
    }
    header |= changes
    return {"__metadata__": {k: v for k, v in header.items() if v is not None}}


def tensor(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD = to_bytes(a_checkpoint())
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "text": b"this is no checkpoint at all",
    "pickle": b"\x80\x04K\x01.",
    "cut by one": GOOD[:-1],
    "cut in the header": GOOD[:40],
    "cut in the length": GOOD[:5],
    "one byte too many": GOOD + b"x",
    "two files": GOOD + GOOD,
    "a giant header": struct.pack("<Q", 2**63) + GOOD[8:],
    "header no JSON": tensors({})[:8] + b"xx",
    "no metadata": tensors({"x": tensor(0, 4)}, b"0000"),
    "another format": tensors(header_of(format="specdec-row-checkpoint-2")),
    "an attachment": to_bytes(a_checkpoint().attachment),
    "no format": tensors(header_of(format=None)),
    "no namespace": tensors(header_of(namespace=None)),
    "empty namespace": tensors(header_of(namespace="")),
    "no schema": tensors(header_of(schema=None)),
    "no count": tensors(header_of(processed_tokens=None)),
    "count no number": tensors(header_of(processed_tokens="three")),
    "count negative": tensors(header_of(processed_tokens="-1")),
    "count of digits": tensors(header_of(processed_tokens="9" * 5000)),
    "count in thai": tensors(header_of(processed_tokens="๓")),
    "no map": tensors(header_of(metadata=None)),
    "map no JSON": tensors(header_of(metadata="{")),
    "map a list": tensors(header_of(metadata="[]")),
    "map nested": tensors(header_of(metadata='{"a": {}}')),
    "map with null": tensors(header_of(metadata='{"a": null}')),
    "map with NaN": tensors(header_of(metadata='{"a": NaN}')),
    "map with overflow": tensors(header_of(metadata='{"a": 1e999}')),
    "map deep": tensors(header_of(metadata="[" * 100_000)),
    "map of digits": tensors(header_of(metadata='{"a": ' + "9" * 5000 + "}")),
    "header not text": tensors(header_of(namespace=3)),
    "overlap": tensors({**header_of(), "x": tensor(0, 4), "y": tensor(2, 6)}, b"000000"),
    "same place": tensors({**header_of(), "x": tensor(0, 4), "y": tensor(0, 4)}, b"0000"),
    "gap": tensors({**header_of(), "x": tensor(4, 8)}, b"00000000"),
    "end before begin": tensors({**header_of(), "x": tensor(4, 0)}, b"0000"),
    "size and shape differ": tensors({**header_of(), "x": tensor(0, 3)}, b"000"),
    "negative axis": tensors({**header_of(), "x": tensor(0, 4, shape=(-1,))}, b"0000"),
    "unknown dtype": tensors({**header_of(), "x": tensor(0, 4, "F99")}, b"0000"),
    "dtype that MLX lacks": tensors({**header_of(), "x": tensor(0, 1, "F8_E4M3")}, b"0"),
    "axis that MLX lacks": tensors({**header_of(), "x": tensor(0, 0, shape=(2**40, 0))}),
    "nameless array": tensors({**header_of(), "": tensor(0, 4)}, b"0000"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_anything_else_is_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the bytes") as caught:
        checkpoint_from_bytes(data)
    assert len(str(caught.value).splitlines()) == 1
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors") as caught:
        load_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1


@given(st.data())
def test_a_damaged_checkpoint_is_refused_or_read_never_anything_else(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for place in data.draw(st.lists(st.integers(0, len(GOOD) - 1), min_size=1, max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(GOOD)))
    for content in (bytes(damaged), GOOD[:cut] if cut < len(GOOD) else GOOD + b"\0"):
        with contextlib.suppress(CheckpointError):
            checkpoint_from_bytes(content)


def test_a_checkpoint_is_no_attachment() -> None:
    with pytest.raises(CheckpointError, match="specdec-attachment-1"):
        attachment_from_bytes(GOOD)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wrongs: list[tuple[Path | str, str]] = [
        (tmp_path / "missing", "no such file"),
        (tmp_path, "no file"),
        (pipe, "no file"),
        ("a\0b", "null|embedded|no such file"),
    ]
    for path, says in wrongs:
        with pytest.raises(CheckpointError, match=says) as caught:
            load_checkpoint(path)
        assert len(str(caught.value).splitlines()) == 1
    for wrong in (3, None):
        with pytest.raises(CheckpointError):
            load_checkpoint(wrong)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError):
            checkpoint_from_bytes(wrong)  # type: ignore[arg-type]


def test_arrays_at_odd_offsets_are_read_since_mlx_writes_them(tmp_path: Path) -> None:
    data = tensors({**header_of(), "b": tensor(0, 1, "U8"), "x": tensor(1, 5)}, b"\x07" + b"\0" * 4)
    (tmp_path / "odd").write_bytes(data)
    for found in (checkpoint_from_bytes(data), load_checkpoint(tmp_path / "odd")):
        assert found.attachment.arrays["b"].tolist() == [7]
        assert found.attachment.arrays["x"].tolist() == [0.0]
