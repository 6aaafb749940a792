"""A head's tensors have one set of names and the stored values, whatever they were called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import architectures
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import glm4_moe
from mtp_files import (
    demo_config,
    demo_folder,
    demo_head,
    next_token_head,
    prefixed,
    published_layer,
    split_release,
    write,
    write_fp8,
)

from specdec.errors import ArtifactError
from specdec_mtp.find import HeadKind, find_head
from specdec_mtp.tensors import read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NEXT_TOKEN_TYPES = ["glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]


def assert_same(found: Mapping[str, mx.array], wanted: Mapping[str, mx.array]) -> None:
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape), name
        assert mx.array_equal(found[name], weight), name


def read_shards(folder: Path, head: dict[str, mx.array]) -> dict[str, mx.array]:
    """What is read of a head among a target's tensors."""
    write(folder, {"model.safetensors": prefixed(head, "mtp.")}, demo_config())
    return read_tensors(find_head(folder, HeadKind.MTP))


def moe_head() -> dict[str, mx.array]:
    """A random head with experts: mlx-lm's layer, and the demo's parts around it."""
    layer: Any = architectures.build("qwen3_5_moe").layers[-1]
    around = {name: w for name, w in demo_head().items() if not name.startswith("layers.")}
    return {**around, **prefixed(dict(tree_flatten(layer.parameters())), "layers.0.")}


def unstacked(head: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts one by one, as Qwen3-Next's releases have them."""
    layer = {k.removeprefix("layers.0."): w for k, w in head.items() if k.startswith("layers.0.")}
    rest = {name: w for name, w in head.items() if not name.startswith("layers.0.")}
    return {**rest, **prefixed(published_layer(layer), "layers.0.")}


def fused(head: Mapping[str, mx.array], separator: str = "") -> dict[str, mx.array]:
    """Gate and up projections in one tensor, as Qwen3.5's releases have them."""
    stored = {name: w for name, w in head.items() if ".switch_mlp." not in name}
    experts = "layers.0.mlp.switch_mlp."
    for suffix in ("weight", "scales", "biases"):
        if f"{experts}gate_proj.{suffix}" not in head:
            continue
        tail = separator + suffix if separator else ""
        both = [head[f"{experts}{name}_proj.{suffix}"] for name in ("gate", "up")]
        stored[f"layers.0.mlp.experts.gate_up_proj{tail}"] = mx.concatenate(both, axis=1)
        stored[f"layers.0.mlp.experts.down_proj{tail}"] = head[f"{experts}down_proj.{suffix}"]
    return stored


def quantized(head: Mapping[str, mx.array]) -> dict[str, mx.array]:
    stored = {}
    for name, weight in head.items():
        if weight.ndim < 2 or weight.shape[-1] % 32:
            stored[name] = weight
            continue
        for suffix, part in zip(
            ("weight", "scales", "biases"), mx.quantize(weight, group_size=32, bits=4), strict=True
        ):
            stored[f"{name.removesuffix('weight')}{suffix}"] = part
    return stored


def test_a_whole_release_gives_its_head_as_it_is_stored() -> None:
    assert_same(read_tensors(find_head(demo_folder(), HeadKind.MTP)), demo_head())


def test_a_split_release_gives_the_same_names(tmp_path: Path) -> None:
    found = read_tensors(find_head(split_release(tmp_path, demo_head()), HeadKind.MTP))
    assert_same(found, demo_head())


@pytest.mark.parametrize("stored_as", [fused, unstacked, dict])
@pytest.mark.parametrize("packed", [False, True])
def test_experts_are_stacked_as_the_library_has_them(
    tmp_path: Path, stored_as: Any, packed: bool
) -> None:
    head = quantized(moe_head()) if packed else moe_head()
    if packed and stored_as is fused:
        for separator in "._":
            assert_same(read_shards(tmp_path, fused(head, separator)), head)
        return
    stored = stored_as(head)
    assert packed or stored_as is dict or set(stored) != set(head)
    assert_same(read_shards(tmp_path, stored), head)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    stored = unstacked(moe_head())
    del stored["layers.0.mlp.experts.2.up_proj.weight"]
    with pytest.raises(ArtifactError, match=r"lacks expert 2 of .*switch_mlp\.up_proj\.weight"):
        read_shards(tmp_path, stored)


def test_names_that_no_head_has_are_an_error_that_names_them(tmp_path: Path) -> None:
    odd = {"embed_tokens.weight": mx.ones((2, 2)), "layers.0.mlp.w1.weight": mx.ones((2, 2))}
    with pytest.raises(ArtifactError, match=r"embed_tokens\.weight, layers\.0\.mlp\.w1\.weight"):
        read_shards(tmp_path, {**demo_head(), **odd})


def test_rotary_buffers_are_dropped(tmp_path: Path) -> None:
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": mx.ones((4,))}
    assert_same(read_shards(tmp_path, {**demo_head(), **buffer}), demo_head())


@pytest.mark.parametrize("lost", ["norm.weight", "pre_fc_norm_hidden.weight"])
def test_a_head_that_lacks_a_part_is_an_error(tmp_path: Path, lost: str) -> None:
    head = {name: w for name, w in demo_head().items() if name != lost}
    with pytest.raises(ArtifactError, match=f"lacks {lost}"):
        read_shards(tmp_path, head)


def test_nothing_else_of_the_files_is_read(tmp_path: Path) -> None:
    head = demo_head()
    size = sum(weight.nbytes for weight in head.values())
    others = {"model.a.weight": mx.zeros((20 * size,), dtype=mx.uint8)}
    write(tmp_path, {"model.safetensors": {**others, **prefixed(head, "mtp.")}}, demo_config())
    del others, head
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = read_tensors(find_head(tmp_path, HeadKind.MTP))
    assert len(found) == 15
    assert size <= mx.get_active_memory() - before < 1.1 * size
    assert mx.get_peak_memory() - before < 2 * size


def test_a_file_that_is_gone_or_empty_when_it_is_read_is_named(tmp_path: Path) -> None:
    files = find_head(split_release(tmp_path), HeadKind.MTP)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"model\.safetensors cannot be read"):
        read_tensors(files)
    file.unlink()
    with pytest.raises(ArtifactError, match=r"model\.safetensors cannot be read"):
        read_tensors(files)


def eight_bit(size: int, other: int) -> tuple[mx.array, mx.array, mx.array]:
    """Bytes of 8-bit floats, scales for blocks of 128 by 128, and their product in plain code."""
    values = mx.random.randint(0, 0x7E, (size, other), key=mx.random.key(size)).astype(mx.uint8)
    scales = mx.random.uniform(0.5, 2.0, (-(-size // 128), -(-other // 128)), key=mx.random.key(1))
    wide = mx.repeat(mx.repeat(scales, 128, axis=0), 128, axis=1)[:size, :other]
    rows: Any = values.tolist()
    product = mx.array([[e4m3(byte) for byte in row] for row in rows]) * wide
    return values, scales, product.astype(mx.bfloat16)


def e4m3(byte: int) -> float:
    """A positive 8-bit float: 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return float(mantissa / 8 * 2.0**-6)
    return float((1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_eight_bit_floats_are_scaled_block_by_block(tmp_path: Path) -> None:
    head = demo_head()
    name = "layers.0.self_attn.k_proj.weight"
    values, scales, product = eight_bit(130, 300)
    stored = {**head, name: values, f"{name}_scale_inv": scales}
    write(tmp_path, {}, demo_config())
    write_fp8(tmp_path / "model.safetensors", prefixed(stored, "mtp."))
    assert_same(read_tensors(find_head(tmp_path, HeadKind.MTP)), {**head, name: product})


@pytest.mark.parametrize("scales", [None, (1,), (2, 2)])
def test_eight_bit_floats_without_scales_of_that_form_are_named(
    tmp_path: Path, scales: tuple[int, ...] | None
) -> None:
    name = "layers.0.self_attn.k_proj.weight"
    stored = {**demo_head(), name: mx.zeros((128, 384), dtype=mx.uint8)}
    if scales is not None:
        stored[f"{name}_scale_inv"] = mx.ones(scales)
    write(tmp_path, {}, demo_config())
    write_fp8(tmp_path / "model.safetensors", prefixed(stored, "mtp."))
    with pytest.raises(ArtifactError, match=r"mtp\.layers\.0\.self_attn\.k_proj\.weight.*F8_E4M3"):
        read_tensors(find_head(tmp_path, HeadKind.MTP))


def behind_a_trunk(stored: dict[str, mx.array], layers: int) -> dict[str, mx.array]:
    return {
        "model.layers.0.input_layernorm.weight": mx.ones((64,)),
        **prefixed(stored, f"model.layers.{layers}."),
    }


@pytest.mark.parametrize("model_type", NEXT_TOKEN_TYPES)
def test_a_next_token_layer_has_the_names_of_the_librarys_layer(
    tmp_path: Path, model_type: str
) -> None:
    wanted, stored, config = next_token_head(model_type)
    files = {"model.safetensors": behind_a_trunk(stored, config["num_hidden_layers"])}
    write(tmp_path, files, config)
    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN))
    assert_same(found, wanted)
    layer: Any = architectures.build(model_type).layers[-1]
    inner = {k.removeprefix("layers.0."): w for k, w in found.items() if k.startswith("layers.0.")}
    layer.load_weights(list(inner.items()), strict=True)


def test_layer_61_of_a_deepseek_is_read_though_the_library_drops_it(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("deepseek_v3")
    config["num_hidden_layers"] = 61
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 61)}, config)
    assert_same(read_tensors(find_head(tmp_path, HeadKind.NEXTN)), wanted)


def test_a_router_bias_keeps_its_type(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("glm4_moe_lite")
    bias = "e_score_correction_bias"
    low = {n: w if bias in n else w.astype(mx.bfloat16) for n, w in stored.items()}
    write(tmp_path, {"model.safetensors": behind_a_trunk(low, 3)}, config)
    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN))
    kept = f"layers.0.mlp.gate.{bias}"
    assert found[kept].dtype == mx.float32
    assert mx.array_equal(found[kept], wanted[kept])
    assert {w.dtype for name, w in found.items() if name != kept} == {mx.bfloat16}


def test_copies_of_embedding_and_head_may_be_absent(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("glm4_moe")
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del stored[name]
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN))
    assert set(wanted) - set(found) == {"embed_tokens.weight", "head.weight"}


def test_a_split_next_token_layer_that_is_converted_already_is_read_as_it_is(
    tmp_path: Path,
) -> None:
    wanted, _, text = next_token_head("glm_moe_dsa")
    bare = {name.removeprefix("layers.0."): w for name, w in wanted.items()}
    bare["shared_head_norm.weight"] = bare.pop("norm.weight")
    del bare["embed_tokens.weight"], bare["head.weight"], wanted["embed_tokens.weight"]
    del wanted["head.weight"]
    config = {"model_type": "glm_moe_dsa_mtp", "text_config": text}
    write(tmp_path, {"model.safetensors": prefixed(bare, "mtp.")}, config, mlx=True)
    assert_same(read_tensors(find_head(tmp_path, HeadKind.NEXTN)), wanted)


def test_quantized_experts_of_a_next_token_layer_are_stacked(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("glm4_moe")
    write(tmp_path, {"model.safetensors": behind_a_trunk(quantized(stored), 3)}, config)
    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN))
    assert_same(found, quantized(wanted))


def test_eight_bit_floats_of_a_next_token_layer_are_the_librarys_work(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("deepseek_v3")
    values, scales, product = eight_bit(64, 64)
    stored["self_attn.o_proj.weight"] = values
    stored["self_attn.o_proj.weight_scale_inv"] = scales
    write(tmp_path, {}, config)
    write_fp8(tmp_path / "model.safetensors", behind_a_trunk(stored, 3))
    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN))
    assert_same(found, {**wanted, "layers.0.self_attn.o_proj.weight": product})


def test_a_next_token_layer_without_one_of_its_experts_is_an_error(tmp_path: Path) -> None:
    _, stored, config = next_token_head("glm4_moe")
    del stored["mlp.experts.3.up_proj.weight"]
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    with pytest.raises(ArtifactError, match=r"glm4_moe .*experts\.3\.up_proj"):
        read_tensors(find_head(tmp_path, HeadKind.NEXTN))


def test_names_of_other_forms_of_next_token_layers_are_an_error(tmp_path: Path) -> None:
    _, stored, config = next_token_head("glm4_moe")
    stored["mtp_gate.weight"] = mx.ones((2, 2))
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    with pytest.raises(ArtifactError, match=r"has layers\.0\.mtp_gate\.weight"):
        read_tensors(find_head(tmp_path, HeadKind.NEXTN))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "unheard_of"}, "model type 'unheard_of', which mlx-lm does not know"),
        ({"hidden_size": None, "model_type": "glm4_moe"}, "is not that of a glm4_moe"),
    ],
)
def test_a_config_that_mlx_lm_cannot_use_is_named(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    _, stored, config = next_token_head("glm4_moe")
    config = {k: v for k, v in {**config, **change}.items() if v is not None}
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    with pytest.raises(ArtifactError, match=says):
        read_tensors(find_head(tmp_path, HeadKind.NEXTN))


def test_the_model_type_of_a_split_release_names_the_targets(tmp_path: Path) -> None:
    wanted, stored, config = next_token_head("glm4_moe_lite")
    config["model_type"] = "glm4_moe_lite_mtp"
    write(tmp_path, {"model.safetensors": stored}, config, mlx=True)
    assert_same(read_tensors(find_head(tmp_path, HeadKind.NEXTN)), wanted)


def test_the_library_is_asked_for_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, stored, config = next_token_head("glm4_moe")
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    asked = []
    library = glm4_moe.Model.sanitize

    def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
        asked.append(self.args.num_hidden_layers)
        return library(self, weights)

    monkeypatch.setattr(glm4_moe.Model, "sanitize", sanitize)
    assert_same(read_tensors(find_head(tmp_path, HeadKind.NEXTN)), wanted)
    assert asked == [1]


def test_another_sanitize_may_be_given(tmp_path: Path) -> None:
    _, stored, config = next_token_head("glm4_moe")
    write(tmp_path, {"model.safetensors": behind_a_trunk(stored, 3)}, config)
    seen: list[str] = []

    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        seen.extend(weights)
        return {name: w for name, w in weights.items() if ".mlp." not in name}

    found = read_tensors(find_head(tmp_path, HeadKind.NEXTN), sanitize=sanitize)
    assert set(seen) == {f"model.layers.0.{name}" for name in stored}
    assert "layers.0.self_attn.q_proj.weight" in found
    assert not any(".mlp." in name for name in found)
