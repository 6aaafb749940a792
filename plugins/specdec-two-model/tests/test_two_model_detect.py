"""A folder is a draft model if a whole language model of mlx-lm is in it, and nothing else is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import architectures
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, _get_classes
from subset_folders import LLAMA, edit_config, write_folder, write_tensors

from specdec.plugins import Artifact
from specdec.plugins.models import find_model
from specdec_two_model import detect
from specdec_two_model.detect import is_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TYPES = [name for name in architectures.CONFIGS if name not in architectures.CANNOT_BE_BUILT]

TRUNK = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.1.self_attn.q_proj.weight": (32, 32),
}


def said(folder: Path) -> bool:
    return is_model(Artifact(folder))


def model(folder: Path, shapes: Mapping[str, tuple[int, ...]] = TRUNK, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    return write_folder(folder, config, dict(shapes))


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The parameters of mlx-lm's own model of this type; none is drawn."""
    held = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **deepcopy(architectures.CONFIGS[name])}
    parameters: Any = tree_flatten(held.Model(held.ModelArgs.from_dict(config)).parameters())
    return {path: weight.shape for path, weight in parameters}


def test_a_model_of_every_type_of_mlx_lm_is_one(tmp_path: Path) -> None:
    assert len(TYPES) > 100
    for name in TYPES:
        config = {"model_type": name, **architectures.CONFIGS[name]}
        folder = write_folder(tmp_path / name, config, shapes_of(name))
        assert said(folder), name
        edit_config(folder, architectures=["AcmeForCausalLM"])
        assert said(folder), name
        (folder / "tokenizer.json").unlink()
        assert not said(folder), name


@pytest.mark.parametrize("name", ["demo-qwen3", "demo-qwen3-draft", "demo-qwen3_5"])
def test_the_trained_models_are_ones(name: str) -> None:
    folder = find_model(name)
    assert folder is not None
    assert said(folder)


@pytest.mark.parametrize(
    ("embedding", "layer"),
    [
        ("wte.weight", "h.0.ln_1.weight"),
        ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt_neox.embed_in.weight", "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"),
        ("backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.mlp.up.weight"),
        ("language_model.model.embed_tokens.weight", "language_model.model.layers.0.mlp.up.weight"),
        ("model.tok_embeddings.weight", "model.layers.0.attention.wqkv.weight"),
        ("transformer.embd.wte.weight", "transformer.h.0.mixer.Wqkv.weight"),
    ],
)
def test_names_of_published_releases_are_known(embedding: str, layer: str, tmp_path: Path) -> None:
    assert said(model(tmp_path, {embedding: (64, 32), layer: (32, 32)}))


@pytest.mark.parametrize("missing", list(TRUNK)[:2])
def test_without_embedding_or_first_layer_it_is_a_part(missing: str, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in TRUNK.items() if name != missing}
    assert said(model(tmp_path / "whole"))
    assert not said(model(tmp_path / "part", shapes))
    norm = {"model.embedding_norm.weight": (32,)}
    assert not said(model(tmp_path / "with a norm", {**shapes, **norm}))


@pytest.mark.parametrize(
    "part",
    [
        "fc.weight",
        "model.fc.weight",
        "hidden_norm.weight",
        "midlayer.self_attn.q_proj.weight",
        "model.eh_proj.weight",
        "pre_fc_norm_hidden.weight",
        "d2t",
        "pre_projection.weight",
        "masked_embedding.centroids.weight",
        "markov_head.markov_w1.weight",
        "candidate_selector.predecessor_codebook",
    ],
)
def test_a_tensor_that_only_drafters_have_tells(part: str, tmp_path: Path) -> None:
    assert not said(model(tmp_path / "drafter", {**TRUNK, part: (32,)}))
    inside = f"model.layers.0.mlp.{part.removeprefix('model.')}"
    assert said(model(tmp_path / "inside", {**TRUNK, inside: (32,)}))


def test_a_head_among_a_models_tensors_does_not_hide_the_model(tmp_path: Path) -> None:
    head = {"mtp.fc.weight": (32, 64), "mtp.layers.0.mlp.up_proj.weight": (32, 32)}
    assert said(model(tmp_path / "whole", {**TRUNK, **head}))
    last = {f"model.layers.2.{name}.weight": (32, 64) for name in ("eh_proj", "mlp.experts.0.up")}
    assert said(model(tmp_path / "next", {**TRUNK, **last}))
    alone = {**head, "mtp.embed_tokens.weight": (64, 32)}
    assert not said(model(tmp_path / "head", alone))
    alone = {**last, "model.layers.2.embed_tokens.weight": (64, 32)}
    assert not said(model(tmp_path / "last layer", alone))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_5_mtp"},
        {"model_type": "gemma4_assistant"},
        {"model_type": "eagle"},
        {"model_type": "medusa"},
        {"model_type": None},
        {"model_type": 3},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["Eagle3Speculator"]},
        {"architectures": ["DFlashDraftModel"]},
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["DeepSeekMTPModel"]},
        {"architectures": ["Gemma4AssistantForCausalLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        {"architectures": ["BertLMHeadModel"], "model_type": "bert"},
        {"architectures": None, "model_type": "siglip_vision_model"},
        {"architectures": None, "model_type": "../models/llama"},
        {"dflash_config": {}},
        {"speculators_config": {}},
        {"num_target_layers": 36},
        {"draft_vocab_size": 32000},
        {"backbone_hidden_size": 2560},
    ],
)
def test_a_config_of_something_else_tells(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not said(model(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": None},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [None, 3]},
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
        {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"},
        {"architectures": None, "model_type": "mistral"},
        {"architectures": ["AcmeForCausalLM"], "model_type": "acme"},
        {"dflash_config": None},
    ],
)
def test_a_config_of_a_model_is_not_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert said(model(tmp_path, **changes))


def test_a_model_that_embeds_texts_is_none(tmp_path: Path) -> None:
    (model(tmp_path) / "modules.json").write_text("[]")
    assert not said(tmp_path)


@pytest.mark.parametrize(
    "file", ["tokenizer.model", "tekken.json", "qwen.tiktoken", "rwkv_vocab_v20230424.txt"]
)
def test_a_tokenizer_of_any_make_counts(file: str, tmp_path: Path) -> None:
    (model(tmp_path) / "tokenizer.json").rename(tmp_path / file)
    assert said(tmp_path)
    (tmp_path / file).rename(tmp_path / "requirements.txt")
    assert not said(tmp_path)


def test_weights_of_other_formats_are_none(tmp_path: Path) -> None:
    model(tmp_path)
    for name in ("model.gguf", "pytorch_model.bin", "adapters.safetensors"):
        files = list(tmp_path.glob("*model*.*"))
        next(file for file in files if file.suffix != ".json").rename(tmp_path / name)
        assert not said(tmp_path)
        (tmp_path / name).rename(tmp_path / "model.old")


def test_a_damaged_or_partial_model_counts_so_that_loading_says_so(tmp_path: Path) -> None:
    folder = model(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert said(folder)
    file.write_bytes(b"<html>")
    assert said(folder)
    file.unlink()
    write_tensors(folder / "model-00002-of-00002.safetensors", {"model.norm.weight": (32,)})
    assert not said(folder)
    files = {"model.norm.weight": 2, "model.embed_tokens.weight": 1}
    named = {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    assert said(folder)
    index.write_text("[]")
    assert said(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert not said(folder)  # nothing but names


@pytest.mark.parametrize("name", [None, "file"])
def test_what_is_no_folder_of_a_model_is_none(name: str | None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    assert not said(tmp_path if name is None else tmp_path / name)
    assert not said(tmp_path / "missing")


def test_types_are_known_as_mlx_lm_knows_them() -> None:
    folder = detect._mlx_lm()
    assert folder is not None
    assert detect._renamed(folder) == MODEL_REMAPPING
    for name in (*TYPES, *MODEL_REMAPPING, "bert", "qwen3_5_mtp", "acme"):
        try:
            _get_classes({"model_type": name})
        except ValueError:
            assert not detect._is_known(name), name
        else:
            assert detect._is_known(name), name


def test_every_type_counts_as_known_where_mlx_lm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not detect._is_known("acme")
    assert detect._renamed(tmp_path) == {}
    (tmp_path / "utils.py").write_text("MODEL_REMAPPING = dict(")
    monkeypatch.setattr(detect, "_mlx_lm", lambda: None)
    assert detect._is_known("acme")


def test_looking_for_the_types_imports_nothing(tmp_path: Path) -> None:
    folder = model(tmp_path, architectures=None, model_type="mistral")
    code = """
import sys
from specdec.plugins import Artifact
from specdec_two_model.detect import is_model

assert is_model(Artifact(sys.argv[1]))
print([name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm", "transformers")])
"""
    asked = [sys.executable, "-c", code, str(folder)]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == "[]\n"
