"""Checkpoints with prediction heads in every published layout, written small for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import architectures
import mlx.core as mx
from mlx.utils import tree_flatten

from specdec.plugins.models import find_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "NORMS",
    "demo_config",
    "demo_folder",
    "demo_head",
    "next_token_head",
    "prefixed",
    "published_layer",
    "split_release",
    "write",
    "write_fp8",
]

NORMS = (
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
    "norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
)

Tensors = dict[str, mx.array]


def demo_folder() -> Path:
    """The whole release of the demo model, its head among the target's tensors."""
    folder = find_model("demo-qwen3_5")
    assert folder is not None
    return folder


def demo_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((demo_folder() / "config.json").read_text())
    return found


def demo_head() -> Tensors:
    """The demo head's tensors as they are stored (norm weights minus one), without prefix."""
    stored = mx.load(str(demo_folder() / "model.safetensors"))
    assert isinstance(stored, dict)
    return {k.removeprefix("mtp."): v for k, v in stored.items() if k.startswith("mtp.")}


def prefixed(tensors: Mapping[str, mx.array], prefix: str) -> Tensors:
    return {prefix + name: weight for name, weight in tensors.items()}


def write(
    folder: Path,
    files: Mapping[str, Tensors],
    config: Mapping[str, Any] | None = None,
    *,
    index: bool = False,
    mlx: bool = False,
) -> Path:
    """A folder of safetensors files, with a config and an index where asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        metadata = {"format": "mlx" if mlx else "pt"}
        mx.save_safetensors(str(folder / name), tensors, metadata=metadata)
    if index:
        where = {name: file for file, tensors in files.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def split_release(folder: Path, tensors: Tensors | None = None, *, mlx: bool = True) -> Path:
    """The demo's head as mlx-vlm splits it off: bare names, norm weights as scales."""
    if tensors is None:
        tensors = {k: w + 1.0 if k in NORMS else w for k, w in demo_head().items()}
    config = {
        "model_type": "qwen3_5_mtp",
        "block_size": 3,
        "text_config": demo_config()["text_config"],
    }
    return write(folder, {"model.safetensors": tensors}, config, mlx=mlx)


def next_token_head(model_type: str) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """A random next-token layer of this type.

    Returns:
        The names and values that mlx-lm's layer has, with those around it; the same as a release
        has it behind the prefix; the config.
    """
    model = architectures.build(model_type)
    config = {"model_type": model_type, **architectures.CONFIGS[model_type]}
    config["num_nextn_predict_layers"] = 1
    layer: Tensors = dict(tree_flatten(model.layers[-1].parameters()))
    hidden, words = config["hidden_size"], config["vocab_size"]
    keys = mx.random.split(mx.random.key(3), 6)
    shapes = {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "norm": (hidden,),
        "embed_tokens": (words, hidden),
        "head": (words, hidden),
    }
    around = {
        f"{name}.weight": mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    published = {"norm": "shared_head.norm", "head": "shared_head.head"}
    stored = published_layer(layer)
    for name, weight in around.items():
        part = name.removesuffix(".weight")
        stored[f"{published.get(part, part)}.weight"] = weight
    return {**around, **prefixed(layer, "layers.0.")}, stored, config


def published_layer(layer: Tensors) -> Tensors:
    """mlx-lm's layer undone: experts one by one, the latent projections joined per head."""
    stored: Tensors = {}
    for name, weight in layer.items():
        if ".switch_mlp." in name:
            before, after = name.split(".switch_mlp.")
            for number in range(weight.shape[0]):
                stored[f"{before}.experts.{number}.{after}"] = weight[number]
        elif name == "self_attn.embed_q.weight":
            values = layer["self_attn.unembed_out.weight"]
            joined = mx.concatenate([weight.swapaxes(-1, -2), values], axis=1)
            stored["self_attn.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif name != "self_attn.unembed_out.weight":
            stored[name] = weight
    return stored


def write_fp8(file: Path, tensors: Mapping[str, mx.array]) -> None:
    """A file whose bytes ("uint8") are declared to be 8-bit floats, which MLX does not write."""
    mx.save_safetensors(str(file), dict(tensors), metadata={"format": "pt"})
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    for entry in entries.values():
        if entry.get("dtype") == "U8":
            entry["dtype"] = "F8_E4M3"
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
