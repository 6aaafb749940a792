"""Folders of every kind of drafter and of whole models, and registries of some of the plugins.

Weights that nobody reads are zeros. Each folder has a tokenizer, also where releases have none, so
that nothing is told from that alone.
"""

from __future__ import annotations

import json
import math
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from attrs import frozen
from block_synthetic import CASES
from deepspec_synthetic import write_release
from dspark_synthetic import write_dspark
from mtp_synthetic import split_release, write_glm, write_qwen3_5

import specdec_assistant.plugin
import specdec_dflash.plugin
import specdec_mtp.plugin
import specdec_ngram.plugin
import specdec_two_model.plugin
from specdec.plugins import Registry, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

__all__ = [
    "FOLDERS",
    "LLAMA",
    "PLUGINS",
    "Folder",
    "edit_config",
    "registry_of",
    "write_folder",
    "write_tensors",
]

PLUGINS: Final[Mapping[str, Any]] = {
    "specdec-assistant": specdec_assistant.plugin,
    "specdec-dflash": specdec_dflash.plugin,
    "specdec-mtp": specdec_mtp.plugin,
    "specdec-ngram": specdec_ngram.plugin,
    "specdec-two-model": specdec_two_model.plugin,
}
"""The plugins' modules, as their entry points name them."""

Shapes = dict[str, tuple[int, ...]]


@frozen
class _Distribution:
    name: str
    version: str = "0.1.0"


@frozen
class _Entry:
    name: str
    dist: _Distribution
    module: object

    def load(self) -> object:
        return self.module


def registry_of(packages: Iterable[str]) -> Registry:
    """A registry where these packages are installed, in this order."""
    entries = [
        _Entry(name.removeprefix("specdec-"), _Distribution(name), PLUGINS[name])
        for name in packages
    ]
    with mock.patch.object(metadata, "entry_points", return_value=entries):
        return Registry(scan(strict=True))


def write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros in float32."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)


def write_folder(folder: Path, config: Mapping[str, Any] | None, shapes: Shapes) -> Path:
    """A config, a tokenizer and ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shapes:
        write_tensors(folder / "model.safetensors", shapes)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change top keys of a folder's config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}

_TRUNK: Final[Shapes] = {
    "model.embed_tokens.weight": (64, 32),
    **{
        f"model.layers.{number}.{name}": shape
        for number in range(2)
        for name, shape in {
            "input_layernorm.weight": (32,),
            "self_attn.q_proj.weight": (32, 32),
            "mlp.down_proj.weight": (32, 64),
        }.items()
    },
    "model.norm.weight": (32,),
}
_ASSISTANT: Final[Shapes] = {
    **_TRUNK,
    "pre_projection.weight": (32, 128),
    "post_projection.weight": (64, 32),
}
_ASSISTANT_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "backbone_hidden_size": 64,
    "text_config": {"model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 2},
}


def _quantized(folder: Path) -> Path:
    packed = {name: (*shape[:-1], shape[-1] // 8) for name, shape in _TRUNK.items()}
    scales = {name.replace("weight", "scales"): (64, 1) for name in packed}
    packing = {"group_size": 32, "bits": 4}
    return write_folder(folder, {**LLAMA, "quantization": packing}, {**packed, **scales})


def _sharded(folder: Path) -> Path:
    write_folder(folder, LLAMA, {})
    names = sorted(_TRUNK)
    shards = {"model-00001-of-00002": names[:3], "model-00002-of-00002": names[3:]}
    for shard, held in shards.items():
        write_tensors(folder / f"{shard}.safetensors", {name: _TRUNK[name] for name in held})
    weight_map = {name: f"{shard}.safetensors" for shard, held in shards.items() for name in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _mtp_split(folder: Path) -> Path:
    return split_release(write_qwen3_5(folder.with_name(f"{folder.name} whole")), folder)


def _mtp_sidecar(folder: Path) -> Path:
    write_qwen3_5(folder)
    shapes = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}
    (folder / "model.safetensors").unlink()
    write_tensors(folder / "model-mtp.safetensors", shapes)
    return folder


def _mtp_speculators(folder: Path) -> Path:
    config = {"speculators_model_type": "mtp", "transformer_layer_config": dict(LLAMA)}
    parts = {"input_proj": (32, 64), "final_layernorm": (32,), "self_attn.q_proj": (32, 32)}
    shapes = {f"mtp_layers.0.{name}.weight": shape for name, shape in parts.items()}
    return write_folder(folder, config, {**shapes, "embed_tokens.weight": (64, 32)})


def _with_sidecar(folder: Path) -> Path:
    write_tensors(_sharded(folder) / "mtp.safetensors", {"fc.weight": (32, 64)})
    return folder


def _with_companion(folder: Path) -> Path:
    _sharded(folder)
    _mtp_split(folder / "mtp")
    return folder


def _glm(folder: Path) -> Path:
    return edit_config(write_glm(folder, "glm4_moe"), architectures=["Glm4MoeForCausalLM"])


def _eagle1(folder: Path) -> Path:
    """The first EAGLE's heads call themselves by their target's architecture."""
    shapes = {name.removeprefix("model."): shape for name, shape in _TRUNK.items()}
    return write_folder(
        folder, {**LLAMA, "num_hidden_layers": 1}, {**shapes, "fc.weight": (32, 64)}
    )


def _eagle3(folder: Path) -> Path:
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32}
    shapes = {"fc.weight": (32, 96), "midlayer.hidden_norm.weight": (32,), "d2t": (32,)}
    return write_folder(folder, config, {**_TRUNK, **shapes})


def _eagle3_speculators(folder: Path) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": dict(LLAMA),
    }
    return write_folder(folder, config, {**_TRUNK, "fc.weight": (32, 96)})


def _adapter(folder: Path) -> Path:
    write_folder(folder, None, {})
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    write_tensors(folder / "adapter_model.safetensors", {"layers.0.q_proj.lora_A.weight": (8, 32)})
    return folder


def _gguf(folder: Path) -> Path:
    write_folder(folder, LLAMA, {})
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder


def _assistant(model_type: str) -> Callable[[Path], Path]:
    config = {**_ASSISTANT_CONFIG, "model_type": model_type}
    return lambda folder: write_folder(folder, config, _ASSISTANT)


@frozen
class Folder:
    """A folder, what it is, and what can be made of it without the plugin of that.

    Attributes:
        write: makes it.
        kind: what it is recognised as; ``None`` where no plugin can draft with it.
        whole: whether it is a whole model besides.
    """

    write: Callable[[Path], Path]
    kind: str | None
    whole: bool = False

    @property
    def package(self) -> str:
        """The package of its kind; empty where it has none."""
        packages = {"deepspec": "dflash", "dflash2": "dflash", "dspark": "dflash", "nextn": "mtp"}
        return "" if self.kind is None else f"specdec-{packages.get(self.kind, self.kind)}"

    def expected(self, packages: Collection[str]) -> str | None:
        """The kind where these packages are installed; ``None`` if it is not to be recognised."""
        if self.package in packages:
            return self.kind
        return "two-model" if self.whole and "specdec-two-model" in packages else None


def _release(name: str) -> Callable[[Path], Path]:
    return lambda folder: write_release(name, folder)


FOLDERS: Final[Mapping[str, Folder]] = {
    "mtp split": Folder(_mtp_split, "mtp"),
    "mtp sidecar": Folder(_mtp_sidecar, "mtp"),
    "mtp of speculators": Folder(_mtp_speculators, "mtp"),
    "mtp in a file of a whole model": Folder(_with_sidecar, "mtp", whole=True),
    "mtp in a whole release": Folder(write_qwen3_5, "mtp", whole=True),
    "mtp beside a whole model": Folder(_with_companion, "mtp", whole=True),
    "nextn in a whole release": Folder(_glm, "nextn", whole=True),
    "dflash": Folder(CASES["plain"].write, "dflash"),
    "dflash2": Folder(CASES["second"].write, "dflash2"),
    "dflash of speculators": Folder(_release("speculators dflash listed"), "dflash"),
    "dflash2 of speculators": Folder(_release("speculators dflash2"), "dflash2"),
    "deepspec": Folder(_release("qwen"), "deepspec"),
    "deepspec gemma": Folder(_release("gemma"), "deepspec"),
    "deepspec lfm2": Folder(_release("lfm2"), "deepspec"),
    "deepspec of speculators": Folder(_release("speculators dspark"), "deepspec"),
    "dspark": Folder(write_dspark, "dspark"),
    "assistant": Folder(_assistant("gemma4_assistant"), "assistant"),
    "assistant unified": Folder(_assistant("gemma4_unified_assistant"), "assistant"),
    "model": Folder(lambda folder: write_folder(folder, LLAMA, _TRUNK), "two-model", whole=True),
    "model quantized": Folder(_quantized, "two-model", whole=True),
    "model sharded": Folder(_sharded, "two-model", whole=True),
    "eagle": Folder(_eagle1, None),
    "eagle3": Folder(_eagle3, None),
    "eagle3 of speculators": Folder(_eagle3_speculators, None),
    "adapter": Folder(_adapter, None),
    "gguf": Folder(_gguf, None),
    "assistant of another family": Folder(_assistant("muse_glimmer_assistant"), None),
    "config alone": Folder(lambda folder: write_folder(folder, LLAMA, {}), None),
    "tokenizer alone": Folder(lambda folder: write_folder(folder, None, {}), None),
}
"""Every folder by name."""
