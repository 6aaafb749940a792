"""The plain float64 heads of ``mtp_reference`` against mlx-vlm's recording and mlx-lm's layers."""

from __future__ import annotations

import importlib
import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_attention_mask
from mtp_reference import decoder_layer, nextn_step, read_tensors
from mtp_synthetic import GLM_TYPES, split_release, write_glm, write_qwen3_5, write_qwen3_next
from oracles.plain import Release

from specdec.plugins.models import find_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mtp_reference import Pair, Vectors

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for path in sorted(DATA.glob("mlx_vlm_*.json"))
    for case in json.loads(path.read_text())["cases"]
}
PLACES = [(name, place) for name, case in CASES.items() for place in range(len(case["prompts"]))]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": lambda folder: write_qwen3_5(folder, experts=4, tie=False),
    "qwen3_5 yarn": partial(write_qwen3_5, rope=YARN),
    "qwen3_5 linear": partial(write_qwen3_5, rope={"rope_type": "linear", "factor": 4.0}),
    "qwen3_next": write_qwen3_next,
    **{name: partial(write_glm, model_type=name) for name in GLM_TYPES},
}


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp-reference")


@cache
def release(name: str, scratch: Path) -> Release:
    if name == "demo-qwen3_5":
        demo = find_model(name)
        assert demo is not None
        return Release.of(demo)
    if name in CASES:
        write = write_glm if name in GLM_TYPES else write_qwen3_5
        return Release.of(write(scratch / name, **CASES[name]["written_with"]))
    return Release.of(WRITERS[name](scratch / name))


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def assert_logits(told: Sequence[Mapping[str, Any]], found: Vectors) -> None:
    """Every figure of the recording, within 1e-4."""
    for entry, logits in zip(told, found, strict=True):
        if "all" in entry:
            assert_close(logits, entry["all"])
            continue
        assert_close(logits[entry["ids"]], entry["values"])
        assert np.sort(logits)[-len(entry["ids"]) - 1] <= min(entry["values"]) + 1e-4
        assert_close(logits.mean(), entry["mean"])
        assert_close(np.abs(logits).max(), entry["largest"])


def first_round(own: Release, told: Mapping[str, Any]) -> list[Pair]:
    return own.pairs([*told["prompt"], told["first"]])


def second_round(own: Release, told: Mapping[str, Any], *, kept: bool) -> list[Pair]:
    """The pairs after one accepted draft; mlx-vlm itself keeps that draft's entry as drafted."""
    accepted = told["drafts"][: told["accepted"]]
    pairs = own.pairs([*told["prompt"], told["first"], *accepted, told["pending"]])
    if kept:
        first = first_round(own, told)
        pairs[len(first)] = (own.embed(accepted[0]), own.step(first)[-1])
    return pairs


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_the_plain_head_drafts_what_mlx_vlm_drafts_with_its_logits(
    name: str, place: int, scratch: Path
) -> None:
    own, told = release(name, scratch), CASES[name]["prompts"][place]
    tokens, logits = own.drafts(first_round(own, told))
    assert tokens == told["drafts"]
    assert_logits(told["logits"], logits)


@pytest.mark.parametrize("how", ["kept", "reread"])
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_the_round_after_a_partial_acceptance_is_mlx_vlms_under_both_conventions(
    name: str, place: int, how: str, scratch: Path
) -> None:
    own, told = release(name, scratch), CASES[name]["prompts"][place]
    tokens, logits = own.drafts(second_round(own, told, kept=how == "kept"))
    assert tokens == told["next"][how]["drafts"]
    assert_logits(told["next"][how]["logits"], logits)


@pytest.mark.parametrize("wrong", ["pre-norm hidden", "norms as stored", "shifted twice", "order"])
@pytest.mark.parametrize("name", CASES)
def test_another_reading_of_the_head_is_told_from_mlx_vlms(
    name: str, wrong: str, scratch: Path
) -> None:
    own, told = release(name, scratch), CASES[name]["prompts"][-1]
    tensors, pairs = dict(own.tensors), first_round(own, told)
    if wrong == "pre-norm hidden":
        pairs = own.pairs([*told["prompt"], told["first"]], normed=False)
    elif wrong == "order":
        joined = next(
            name for name in tensors if name.endswith(("mtp.fc.weight", "eh_proj.weight"))
        )
        halves = np.split(tensors[joined], 2, axis=-1)
        tensors[joined] = np.concatenate(halves[::-1], axis=-1)
    else:  # of GLM: 1 added to, or taken from, norms that are stored as they are used
        by = -1.0 if wrong == "norms as stored" else 1.0
        tensors |= {name: v + by for name, v in tensors.items() if v.ndim == 1 and "norm" in name}
    logits = own.score(evolve(own, tensors=tensors).step(pairs)[-1])
    with pytest.raises(AssertionError):
        assert_logits(told["logits"][:1], logits[None])


@pytest.mark.parametrize("place", range(4))
def test_glms_chain_of_outputs_before_their_norm_is_not_mlx_vlms(place: int, scratch: Path) -> None:
    own, told = release("glm_moe_dsa", scratch), CASES["glm_moe_dsa"]["prompts"][place]
    pairs = first_round(own, told)
    before, after = nextn_step(own.tensors, own.config, pairs)
    for fed_on, same in ((after, True), (before, False)):
        output = own.step([*pairs, (own.embed(told["drafts"][0]), fed_on[-1])])
        found = own.score(output[-1])
        assert np.allclose(found, told["logits"][1]["all"], rtol=0, atol=1e-4) is same


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_mlx_vlms_target_and_loop_write_mlx_lms_greedy_text(
    name: str, place: int, scratch: Path
) -> None:
    own, told = release(name, scratch), CASES[name]["prompts"][place]
    prompt, text = told["prompt"], told["free_run"]["tokens"]
    assert own.greedy([*prompt, *text[:-1]])[len(prompt) - 1 :] == text
    assert own.greedy([*prompt, *told["window"]])[len(prompt) :] == told["greedy"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_tiny_release_loads_and_its_texts_and_drafts_vary(name: str, scratch: Path) -> None:
    own = release(name, scratch)
    prompt = [3, 17, 42, 8]
    steps = generate_step(mx.array(prompt), own.model, max_tokens=24)
    text = [int(token) for token, _ in steps]
    assert len(set(text)) >= 10
    drafts = [own.drafts(own.pairs([*prompt, *text[:cut]]))[0] for cut in (1, 4, 9)]
    assert all(len(set(tokens)) > 1 for tokens in drafts)
    assert len({tuple(tokens) for tokens in drafts}) == 3


def one_layer(own: Release) -> Any:
    """mlx-lm's decoder layer with the weights of the next-token layer, put in by its sanitize."""
    module = importlib.import_module(f"mlx_lm.models.{own.config['model_type']}")
    config = {**own.config, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    model = module.Model(module.ModelArgs.from_dict(config))
    at = f"model.layers.{own.config['num_hidden_layers']}."
    layer = {k.replace(at, "model.layers.0."): v for k, v in own.tensors.items() if at in k}
    weights = model.sanitize({k: mx.array(v, dtype=mx.float32) for k, v in layer.items()})
    model.load_weights([(k, v) for k, v in weights.items()], strict=False)
    return model


@pytest.mark.parametrize("name", GLM_TYPES)
def test_the_plain_next_token_layer_is_mlx_lms_decoder_layer(name: str, scratch: Path) -> None:
    own = release(name, scratch)
    model = one_layer(own)
    x = np.random.default_rng(0).standard_normal((30, own.config["hidden_size"]))
    states = mx.array(x, dtype=mx.float32)[None]
    caches = model.make_cache() if hasattr(model, "make_cache") else [None]
    mask = create_attention_mask(states, None, return_array=True)
    expected = np.array(model.layers[0](states, mask, caches[0])[0])
    at = f"model.layers.{own.config['num_hidden_layers']}."
    found = decoder_layer(
        {k.removeprefix(at): v for k, v in own.tensors.items() if at in k}, own.config, x
    )
    assert_close(found, expected)
    assert np.abs(found - x).max() > 0.1  # the layer does something


def full_attention_layer(own: Release) -> Any:
    """mlx-lm's decoder layer of this release's kind, and the configuration it was made with."""
    text = {**own.config.get("text_config", own.config), "full_attention_interval": 1}
    if own.config["model_type"] == "qwen3_next":
        module = importlib.import_module("mlx_lm.models.qwen3_next")
        return module.Qwen3NextDecoderLayer(module.ModelArgs.from_dict(text), 0)
    module = importlib.import_module("mlx_lm.models.qwen3_5")
    return module.DecoderLayer(module.TextModelArgs.from_dict(text), 0)


@pytest.mark.parametrize("name", [name for name in WRITERS if name.startswith("qwen")])
def test_a_qwen_head_is_mlx_lms_full_attention_layer_between_its_norms(
    name: str, scratch: Path
) -> None:
    own = release(name, scratch)
    split = split_release(own.folder, scratch / f"{name}-mtp")
    w = {key: mx.array(v, dtype=mx.float32) for key, v in read_tensors(split).items()}
    layer, at = full_attention_layer(own), "layers.0."
    layer.load_weights([(k.removeprefix(at), v) for k, v in w.items() if k.startswith(at)])
    pairs = own.pairs([(7 * place + 3) % 96 for place in range(40)])
    columns = zip(*pairs, strict=True)
    embedding, hidden = (mx.array(np.stack(each), dtype=mx.float32) for each in columns)
    both = [
        mx.fast.rms_norm(embedding, w["pre_fc_norm_embedding.weight"], 1e-6),
        mx.fast.rms_norm(hidden, w["pre_fc_norm_hidden.weight"], 1e-6),
    ]
    out = layer(mx.concatenate(both, axis=-1)[None] @ w["fc.weight"].T, mask="causal")
    expected = mx.fast.rms_norm(out, w["norm.weight"], 1e-6)[0]
    assert_close(own.step(pairs), np.array(expected))


@pytest.mark.parametrize("name", ["qwen3_5 yarn", "qwen3_5 linear"])
def test_a_scaled_rope_moves_the_heads_output(name: str, scratch: Path) -> None:
    own, plain = release(name, scratch), release("qwen3_5", scratch)
    pairs = own.pairs([(7 * place + 3) % 96 for place in range(40)])
    assert np.abs(own.step(pairs) - plain.step(pairs)).max() > 0.05


def test_a_release_is_written_the_same_twice_and_another_seed_is_another(tmp_path: Path) -> None:
    one, again, other = (
        write_qwen3_5(tmp_path / name, seed=seed) / "model.safetensors"
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert one.read_bytes() == again.read_bytes() != other.read_bytes()


def test_a_split_release_holds_the_head_with_norms_as_they_are_used(scratch: Path) -> None:
    own = release("qwen3_5_moe", scratch)
    split = read_tensors(split_release(own.folder, scratch / "moe-mtp"))
    at = "mtp.layers.0.mlp.experts"
    gate, up = np.split(own.tensors[f"{at}.gate_up_proj"], 2, axis=1)
    np.testing.assert_array_equal(split["layers.0.mlp.switch_mlp.gate_proj.weight"], gate)
    np.testing.assert_array_equal(split["layers.0.mlp.switch_mlp.up_proj.weight"], up)
    norms = [name for name, value in split.items() if value.ndim == 1]
    assert len(norms) == 7
    for name in norms:
        np.testing.assert_allclose(split[name], own.tensors[f"mtp.{name}"] + 1, atol=1e-6)
