"""Identities: the same for the same content, another after any change, and read only once."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_models import build_model

from specdec.checkpoints import artifact_identity, identity, weights, weights_identity
from specdec.checkpoints.fingerprint import fingerprints
from specdec.errors import ArtifactError
from specdec.testing.target import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    monkeypatch.setattr(identity, "_digests", {})
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content was read."""
    seen: list[str] = []

    def counting(file: Any, name: str) -> Any:
        seen.append(Path(file.name).name)
        return hashlib.file_digest(file, name)

    monkeypatch.setattr(identity, "file_digest", counting)
    return seen


def another_process() -> None:
    identity._digests.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x"}')
    for name in ("model-1.safetensors", "model-2.safetensors"):
        mx.save_safetensors(str(folder / name), {name: mx.arange(1000.0)})
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "README.md").write_text("not part of it")
    return folder


def change_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


# Artifacts.


def test_where_a_folder_is_does_not_matter_and_what_it_holds_does(
    folder: Path, tmp_path: Path
) -> None:
    first = artifact_identity(folder)
    assert len(bytes.fromhex(first)) == 32
    moved = folder.rename(tmp_path / "renamed")
    assert artifact_identity(str(moved)) == first
    copied = shutil.copytree(moved, tmp_path / "copy")
    assert artifact_identity(copied) == first
    (copied / "README.md").write_text("still no part of it")
    assert artifact_identity(copied) == first
    (copied / "model-1.safetensors").rename(copied / "model-0.safetensors")
    assert artifact_identity(copied) != first


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors", "model-2.safetensors"])
def test_one_byte_matters_though_size_and_time_are_put_back(folder: Path, name: str) -> None:
    path = folder / name
    before = path.stat()
    first = artifact_identity(folder)
    change_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert artifact_identity(folder) != first
    change_a_byte(path)
    assert artifact_identity(folder) == first


def test_a_file_that_comes_or_goes_matters(folder: Path) -> None:
    first = artifact_identity(folder)
    extra = folder / "adapters.safetensors"
    shutil.copy(folder / "model-1.safetensors", extra)
    assert artifact_identity(folder) != first
    extra.unlink()
    assert artifact_identity(folder) == first


def test_a_file_counts_with_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "one.gguf", tmp_path / "two.gguf"
    one.write_bytes(b"weights")
    two.write_bytes(b"weights")
    assert artifact_identity(one) == artifact_identity(two)
    change_a_byte(two)
    assert artifact_identity(one) != artifact_identity(two)


def test_content_is_read_once_also_by_another_process(folder: Path, reads: list[str]) -> None:
    first = artifact_identity(folder)
    assert sorted(reads) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]
    reads.clear()
    assert artifact_identity(folder) == first
    another_process()
    assert artifact_identity(folder) == first
    assert not reads
    change_a_byte(folder / "config.json")
    assert artifact_identity(folder) != first
    assert reads == ["config.json"]


def test_a_link_is_its_target(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    first = artifact_identity(folder)
    linked = tmp_path / "linked"  # as in the cache of the hub
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    reads.clear()
    assert artifact_identity(linked) == first
    assert not reads


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": "specdec-file-digest-1"}',
        b"\xff\xfe",
        b'{"format": "specdec-file-digest-1", "file": [1], "sha256": "00"}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_note_is_ignored(
    folder: Path, own_cache: Path, reads: list[str], content: bytes
) -> None:
    first = artifact_identity(folder)
    notes = [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(notes) == 4
    for path in notes:
        path.write_bytes(content)
    another_process()
    reads.clear()
    assert artifact_identity(folder) == first
    assert len(reads) == 4


def test_a_note_with_a_wrong_digest_is_not_hex_and_ignored(folder: Path, own_cache: Path) -> None:
    first = artifact_identity(folder)
    for path in own_cache.rglob("*.json"):
        note = json.loads(path.read_text())
        for wrong in (3, None, "x" * 64, "00"):
            path.write_text(json.dumps(note | {"sha256": wrong}))
            another_process()
            assert artifact_identity(folder) == first


def test_a_cache_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = artifact_identity(folder)
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", Path("/proc/specdec"), Path("/dev/null/x")):
        monkeypatch.setenv("SPECDEC_CACHE_DIR", str(place))
        another_process()
        assert artifact_identity(folder) == first


def test_without_the_variable_it_is_the_users_cache_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "user" / name)
    artifact_identity(folder)
    assert list((tmp_path / "user" / "specdec").rglob("*.json"))


def test_processes_at_once_agree(folder: Path, own_cache: Path) -> None:
    program = (
        "import sys; from specdec.checkpoints import artifact_identity as a; print(a(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate()[0].strip() for process in running}
    assert answers == {artifact_identity(folder)}
    assert not [path for path in own_cache.rglob("*") if path.suffix == ".tmp"]


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "README.md").write_text("no weights")
    hollow = tmp_path / "hollow.safetensors"
    hollow.touch()
    dangling = tmp_path / "dangling"
    dangling.mkdir()
    (dangling / "model.safetensors").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "missing", empty, hollow, dangling, "a\0b", "/dev/zero"):
        with pytest.raises(ArtifactError) as caught:
            artifact_identity(path)
        assert len(str(caught.value).splitlines()) == 1


# Fingerprints.


def prints(*arrays: mx.array) -> list[int]:
    return fingerprints(arrays)


@pytest.mark.parametrize("size", [1, 3, 4, 7, 1000, 1 << 16, (1 << 17) + 5, 3 * (1 << 20) + 1])
def test_one_changed_element_changes_the_fingerprint(size: int) -> None:
    array = mx.random.normal((size,), key=mx.random.key(0)).astype(mx.bfloat16)
    (first,) = prints(array)
    for place in {0, 1, size // 2, size - 1}:
        if place < size:
            changed = mx.array(array)
            changed[place] = -changed[place]
            assert prints(changed) != [first]
            changed[place] = array[place]
            assert prints(changed) == [first]


def rolled(array: mx.array, by: int, axis: int) -> mx.array:
    return mx.roll(array, by, axis)


def test_what_trades_places_changes_the_fingerprint() -> None:
    square = mx.random.normal((300, 300), key=mx.random.key(1))
    wide = mx.random.normal((8, 1 << 15), key=mx.random.key(2)).astype(mx.float32)

    def swapped(array: mx.array, a: Any, b: Any) -> mx.array:
        changed = mx.array(array)
        changed[a], changed[b] = array[b], array[a]
        return changed

    signs = mx.array(square)  # differences in the topmost bit alone are the weak ones of a product
    signs[0, 1], signs[200, 1] = -signs[0, 1], -signs[200, 1]
    variants = [
        square,
        square.T,
        signs,
        swapped(square, (0, 0), (0, 1)),
        swapped(square, (0, 1), (250, 3)),
        swapped(square, 0, 1),
        swapped(square, 17, 299),
        rolled(square, 1, 0),
        rolled(square, 1, 1),
    ]
    assert len(set(prints(*variants))) == len(variants)
    rows = [wide, swapped(wide, 0, 1), swapped(wide, 3, 7), rolled(wide, 2, 1), wide[::-1]]
    assert len(set(prints(*rows))) == len(rows)


def test_zeros_of_different_length_differ() -> None:
    # Shapes are hashed beside the fingerprints; these differ on their own.
    sizes = [1, 2, 100, 1 << 15, 1 << 16, 1 << 18]
    assert prints(mx.zeros((0,))) == [0]
    assert len(set(prints(*(mx.ones((size,), mx.uint64) for size in sizes)))) == len(sizes)


def test_layout_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    array = mx.random.normal((5, 1 << 18), key=mx.random.key(3))
    first = prints(array)
    assert prints(mx.contiguous(array.T).T) == first
    monkeypatch.setattr(
        "specdec.checkpoints.fingerprint._CHUNK_BYTES",
        {mx.DeviceType.cpu: 1 << 19, mx.DeviceType.gpu: 1 << 19},
    )
    assert prints(array) == first


def test_every_dtype_has_one() -> None:
    kinds = [mx.bool_, mx.uint8, mx.int16, mx.float16, mx.int64, mx.complex64]
    assert len(set(prints(*(mx.arange(11).astype(kind) for kind in kinds)))) == len(kinds)
    assert prints() == []
    with mx.stream(mx.cpu):
        prints(mx.ones((3, 3), mx.float64))


def test_the_fingerprint_of_a_known_array_stays() -> None:
    # Namespaces on disks contain it: another number makes every stored entry useless.
    array = mx.arange(100_003, dtype=mx.uint32)
    assert prints(array) == [10317541548173866162]


# Models.


def test_equal_models_are_equal_and_others_are_not() -> None:
    model = build_model("qwen3", 0)
    first = weights_identity(model)
    assert len(bytes.fromhex(first)) == 32
    assert weights_identity(build_model("qwen3", 0)) == first
    assert weights_identity(build_model("qwen3", 1)) != first
    assert weights_identity(build_model("qwen2", 0)) != first


def set_element(model: Module) -> None:
    weight = model.layers[0].mlp.up_proj.weight
    changed = mx.array(weight)
    changed[3, 5] = changed[3, 5] + 1
    model.layers[0].mlp.up_proj.weight = changed


def swap_rows(model: Module) -> None:
    weight = model.layers[1].mlp.down_proj.weight
    order = mx.array([1, 0, *range(2, weight.shape[0])])
    model.layers[1].mlp.down_proj.weight = weight[order]


def transpose(model: Module) -> None:
    model.layers[0].self_attn.q_proj.weight = model.layers[0].self_attn.q_proj.weight.T


def swap_layers(model: Module) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def change_dtype(model: Module) -> None:
    model.set_dtype(mx.float16)


def change_scalar(model: Module) -> None:
    model.layers[0].self_attn.scale *= 2


def change_scalar_type(model: Module) -> None:
    model.layers[0].self_attn.scale = True


def quantize(model: Module) -> None:
    import mlx.nn as nn

    nn.quantize(model, group_size=32, bits=4)  # type: ignore[attr-defined]


def adapt(model: Module) -> None:
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 4.0, "dropout": 0.0})


@pytest.mark.parametrize(
    "change",
    [
        set_element,
        swap_rows,
        transpose,
        swap_layers,
        change_dtype,
        change_scalar,
        change_scalar_type,
        quantize,
        adapt,
    ],
)
def test_a_model_that_changed_has_another_identity(change: Callable[[Module], None]) -> None:
    model = build_model("qwen3", 0)
    first = weights_identity(model)
    change(model)
    assert weights_identity(model) != first


def test_an_adapter_counts_with_its_scale_and_weights() -> None:
    model = build_model("qwen3", 0)
    adapt(model)
    first = weights_identity(model)
    assert weights_identity(model) == first
    lora = next(m for _, m in model.named_modules() if type(m).__name__ == "LoRALinear")
    lora.scale = 5.0
    second = weights_identity(model)
    lora.lora_b = lora.lora_b + 1
    assert len({first, second, weights_identity(model)}) == 3


def test_a_model_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3", 0)
    first = weights_identity(model)
    monkeypatch.setattr(weights, "fingerprints", lambda _: pytest.fail("hashed again"))
    assert weights_identity(model) == first
    attention = model.layers[0].self_attn
    attention.scale = float(str(attention.scale))  # equal, but another object
    attention.q_proj.weight = attention.q_proj.weight
    assert weights_identity(model) == first
    assert weights_identity(model) == first


def test_nothing_is_kept_alive() -> None:
    model = build_model("qwen3", 0)
    weights_identity(model)
    known = len(weights._known)
    weight = weakref.ref(model.layers[0].mlp.up_proj.weight)
    model.layers[0].mlp.up_proj.weight = mx.zeros((96, 64))
    gc.collect()
    assert weight() is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(weights._known) == known - 1


def test_tied_modules_and_private_arrays() -> None:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.a = Linear(8, 8, bias=False)
            self.b = self.a
            self._parent = self
            self._hidden = mx.zeros((3,))

    model = Tied()
    first = weights_identity(model)
    model._hidden = mx.ones((3,))
    assert weights_identity(model) != first


# What is no parameter and computes all the same.


class Float(float):
    pass


class Odd:
    """A config that is no dataclass, and whose ``repr`` is an address."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.inner = {"type": "llama3", "parts": [scale]}


@dataclass
class Config:
    scale: float
    more: dict[str, Any]
    part: Odd


@dataclass(frozen=True, slots=True)
class Slots:
    scale: float


class Kind(Enum):
    A = 1
    B = 2


def once(x: Any) -> Any:
    return x


def twice(x: Any) -> Any:
    return 2 * x


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "function": (lambda: once, lambda: twice),
    "core function": (lambda: mx.exp, lambda: mx.log),
    "compiled": (lambda: mx.compile(once), lambda: mx.compile(twice)),
    "partial": (lambda: partial(once, x=1), lambda: partial(once, x=2)),
    "class": (lambda: Odd, lambda: Config),
    "dtype": (lambda: mx.float16, lambda: mx.float32),
    "none": (lambda: None, lambda: 3),
    "none in a list": (lambda: [1, None, 2], lambda: [1, 2, None]),
    "tuple": (lambda: (1, (2, 3)), lambda: (1, (2, 4))),
    "keys": (lambda: {"a": 1}, lambda: {"b": 1}),
    "set": (lambda: {"a", "b"}, lambda: {"a", "c"}),
    "enum": (lambda: Kind.A, lambda: Kind.B),
    "numpy": (lambda: np.ones(3), lambda: np.zeros(3)),
    "numpy type": (lambda: np.ones(3, "int32"), lambda: np.ones(3, "uint32")),
    "numpy scalar": (lambda: np.float32(3), lambda: np.float32(4)),
    "float": (lambda: Float(1), lambda: Float(2)),
    "object": (lambda: Odd(1.0), lambda: Odd(2.0)),
    "namespace": (lambda: SimpleNamespace(a=1), lambda: SimpleNamespace(a=2)),
    "dataclass": (lambda: Config(1.0, {}, Odd(1.0)), lambda: Config(1.0, {"x": 1}, Odd(1.0))),
    "nested": (lambda: Config(1.0, {}, Odd(1.0)), lambda: Config(1.0, {}, Odd(2.0))),
    "slots": (lambda: Slots(1.0), lambda: Slots(2.0)),
    "array": (lambda: mx.zeros((2,)), lambda: mx.ones((2,))),
}


@pytest.mark.parametrize("name", ["value", "_value"])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_parameter_counts(kind: str, name: str) -> None:
    one, other = OTHERS[kind]
    model = Linear(8, 8, bias=False)
    seen = []
    for make in (one, other, one, one):
        setattr(model, name, make())
        seen.append(weights_identity(model))
    assert seen[0] == seen[2] == seen[3] != seen[1]


def test_what_changes_inside_a_config_or_a_container_is_seen() -> None:
    model = Linear(8, 8, bias=False)
    model.config, model.args, model.parts = Odd(1.0), Config(1.0, {"a": 1}, Odd(1.0)), [1, {"a": 2}]
    seen = [weights_identity(model)]
    model.config.scale = 2.0
    seen.append(weights_identity(model))
    model.args.part.scale = 3.0
    seen.append(weights_identity(model))
    model.args.more["a"] = 2
    seen.append(weights_identity(model))
    model.parts[1]["b"] = model.parts[1].pop("a")
    seen.append(weights_identity(model))
    assert len(set(seen)) == 5


def test_what_is_met_keeps_no_model_alive() -> None:
    model = Linear(8, 8, bias=False)
    model.bound, model.compiled = model.__call__, mx.compile(model.__call__)
    model.owner = SimpleNamespace(model=model)
    weights_identity(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


_OTHERS_IN_A_PROCESS = """
import test_artifact_identity as t
print(t.weights_identity(t.everything()), t.weights_identity(t.build_model("llama")))
"""


def everything() -> Module:
    model = build_model("llama", rope_scaling=LLAMA3)
    for number, (_, (one, _)) in enumerate(OTHERS.items()):
        setattr(model, f"other_{number}", one())
    return cast("Module", model)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def test_another_process_says_the_same() -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _OTHERS_IN_A_PROCESS],
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(tuple(done.stdout.split()))
    ((_, plain),) = found  # the names of what is in this file are other ones under pytest
    assert plain == weights_identity(build_model("llama"))


LATENT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def made(architecture: str, config: dict[str, Any]) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    arguments = module.ModelArgs.from_dict({"model_type": architecture, **config})
    return seeded_weights(module.Model(arguments), 0)


def test_rope_scaling_counts_where_no_attribute_tells_it() -> None:
    found = []
    for factor in (2.0, 64.0):
        model = made("youtu_llm", {**LATENT, "rope_scaling": LLAMA3})
        del model.config
        for layer in model.model.layers:
            layer.self_attn.config = None
            layer.self_attn.rope._freqs = layer.self_attn.rope._freqs * factor
        found.append(weights_identity(model))
    assert len(set(found)) == 2


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    **{
        name: partial(build_model, name)
        for name in ("qwen3", "qwen2", "llama", "gemma", "cohere", "gemma2", "granite", "phi3")
    },
    "gemma3_text": partial(build_model, "gemma3_text"),
    "lfm2": partial(build_model, "lfm2"),
    "llama3": partial(build_model, "llama", rope_scaling=LLAMA3),
    "linear": partial(build_model, "llama", rope_scaling={"type": "linear", "factor": 2.0}),
    "yarn": partial(build_model, "llama", rope_scaling=YARN),
    "longrope": partial(build_model, "llama", rope_scaling=LONG),
    "su": partial(
        build_model,
        "phi3",
        rope_scaling=LONG,
        original_max_position_embeddings=16,
    ),
    "youtu_llm": partial(made, "youtu_llm", {**LATENT, "rope_scaling": LLAMA3}),
    "deepseek_v2": partial(
        made,
        "deepseek_v2",
        {
            **LATENT,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss": partial(
        made,
        "gpt_oss",
        {
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": 16,
            "rope_theta": 10000,
            "rope_scaling": YARN,
        },
    ),
    "plamo3": partial(
        made,
        "plamo3",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 64,
            "window_size": 16,
        },
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_forward_changes_no_identity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHITECTURES[name]()
    model.eval()
    first = weights_identity(model)
    monkeypatch.setattr(weights, "fingerprints", lambda _: pytest.fail("hashed again"))
    caches = make_prompt_cache(model)
    for tokens in ([[1, 2, 3] * 8], [[4]]):
        mx.eval(model(mx.array(tokens), cache=caches))
        assert weights_identity(model) == first
