"""What a safetensors file says of itself is read without a weight, and junk is named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ArtifactError
from specdec.plugins.headers import INDEX, Stored, read_header, read_index, read_object

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"a.weight": mx.ones((2, 3), mx.bfloat16), "b": mx.zeros((), mx.uint32)}


def saved(folder: Path, metadata: dict[str, str] | None = None) -> Path:
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), TENSORS, metadata)
    return file


def raw(folder: Path, header: bytes, data: bytes = b"") -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return file


def refused(file: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_header(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_shapes_and_types_are_those_of_the_file(tmp_path: Path) -> None:
    file = saved(tmp_path)
    assert read_header(file).tensors == {
        "a.weight": Stored(file, "a.weight", (2, 3), "BF16"),
        "b": Stored(file, "b", (), "U32"),
    }


@pytest.mark.parametrize(
    ("metadata", "told"), [({"format": "mlx"}, True), ({"format": "pt"}, False)]
)
def test_a_file_says_whether_mlx_wrote_it(
    metadata: dict[str, str], told: bool, tmp_path: Path
) -> None:
    assert read_header(saved(tmp_path, metadata)).from_mlx is told
    assert not read_header(raw(tmp_path, b"{}")).from_mlx
    assert not read_header(raw(tmp_path, b'{"__metadata__": null}')).from_mlx


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    said = refused(tmp_path / "model.safetensors")
    assert said == f"{tmp_path / 'model.safetensors'} does not exist; download it"


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, cut: int) -> None:
    file = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:cut])
    said = refused(file)
    assert said.startswith(f"{file} is no readable safetensors file")
    assert said.endswith("download it again")


def test_what_lacks_of_a_cut_file_is_counted(tmp_path: Path) -> None:
    file = saved(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert f"it has {len(whole) - 3} bytes and should have {len(whole)}" in refused(file)


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        '{"a": 1}',
        '{"a": {"shape": [1], "dtype": "F32"}}',
        '{"a": {"shape": "x", "dtype": "F32", "data_offsets": [0, 0]}}',
        '{"a": {"shape": [Infinity], "dtype": "F32", "data_offsets": [0, 0]}}',
        '{"a": {"shape": [1], "dtype": "F32", "data_offsets": [0, Infinity]}}',
        '{"__metadata__": [1]}',
        "[" * 100_000,
    ],
    ids=lambda header: header[:24],
)
def test_a_header_of_another_form_is_named(tmp_path: Path, header: str) -> None:
    assert "is no readable safetensors file" in refused(raw(tmp_path, header.encode()))


@given(junk=st.binary(max_size=64))
def test_no_content_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    for content in (junk, len(junk).to_bytes(8, "little") + junk):
        file = folder / "x.safetensors"
        file.write_bytes(content)
        try:
            found = read_header(file)
        except ArtifactError:
            continue
        assert found.tensors == {}, "an empty object is a header"


def test_an_index_says_which_tensor_is_in_which_file(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    where = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert read_index(tmp_path) == where


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "\udcff"]
)
def test_an_index_that_cannot_be_used_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ArtifactError, match=r"model\.safetensors\.index\.json .*download it again"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"1", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_object_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_object(file)
    file.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        read_object(file)
    assert str(caught.value).startswith(str(file))
    file.write_text('{"a": [1]}')
    found: Any = read_object(file)
    assert found == {"a": [1]}


def test_headers_are_read_without_mlx(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['numpy'] = None\n"
        "from pathlib import Path\n"
        "from specdec.plugins.headers import read_header\n"
        f"print(len(read_header(Path({json.dumps(str(saved(tmp_path)))})).tensors))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"2\n"), ran.stderr.decode()
