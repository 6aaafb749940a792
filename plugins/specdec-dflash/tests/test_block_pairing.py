"""A drafter that is no block drafter, or another target's, is refused when it is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from block_synthetic import CASES, LAYERS, target_model
from tiny_models import VOCABULARY, build_model

from specdec import load_drafter
from specdec.errors import SpecdecError, UnrecognizedArtifactError

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = CASES["plain"], CASES["second"]


def loading(folder: Path, model: Any = None, **asked: Any) -> str:
    """What loading a folder is refused with."""
    with pytest.raises(SpecdecError) as caught:
        load_drafter(str(folder), target_model() if model is None else model, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", ["plain", "second"])
@pytest.mark.parametrize(
    ("key", "value", "target"),
    [
        ("hidden_size", 32, "64"),
        ("vocab_size", 70, str(VOCABULARY)),
        ("num_target_layers", 5, f"{LAYERS} layers"),
        ("target_layer_ids", [0, LAYERS + 1], f"layers 0 to {LAYERS}"),
        ("mask_token_id", VOCABULARY, f"ids 0 to {VOCABULARY - 1}"),
    ],
)
def test_another_targets_drafter_is_refused_with_both_values(
    case: str, key: str, value: Any, target: str, tmp_path: Path
) -> None:
    message = loading(CASES[case].write(tmp_path, **{key: value}))
    assert f"{key} is {value}, but the target has {target}; give the drafter of this" in message


def test_the_targets_own_layers_decide(tmp_path: Path) -> None:
    message = loading(FIRST.write(tmp_path), build_model("qwen3", 3))  # of two layers
    assert f"num_target_layers is {LAYERS}, but the target has 2 layers" in message


def test_a_layer_twice_and_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    message = loading(FIRST.write(tmp_path / "a", target_layer_ids=[1, 1]))
    assert "target_layer_ids is [1, 1], with a layer twice" in message
    message = loading(FIRST.write(tmp_path / "b", num_key_value_heads=3))
    assert "num_attention_heads is 4, which num_key_value_heads 3 does not divide" in message


def test_the_kind_is_known_from_the_files_alone(tmp_path: Path) -> None:
    for case in ("plain", "inside", "second", "second-wide"):
        release = CASES[case]
        for named in (True, False):
            folder = release.write(tmp_path / f"{case} {named}")
            if not named:
                config = {**release.config, "architectures": None}
                (folder / "config.json").write_text(json.dumps(config))
            with load_drafter(str(folder), target_model()) as loaded:
                assert loaded.kind == release.kind


def test_another_kind_than_the_files_is_refused(tmp_path: Path) -> None:
    first, second = FIRST.write(tmp_path / "a"), SECOND.write(tmp_path / "b")
    assert "is of kind dflash, not dflash2; name the kind dflash" in loading(first, kind="dflash2")
    assert "is of kind dflash2, not dflash; name the kind dflash2" in loading(second, kind="dflash")
    (first / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert "is no block drafter's, not dflash" in loading(first, kind="dflash")
    with pytest.raises(UnrecognizedArtifactError):
        load_drafter(str(first), target_model())


# Tensors.


def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(tmp_path: Path) -> None:
    name = "layers.1.self_attn.k_proj.weight"
    folder = FIRST.write(tmp_path)
    file = str(folder / "model.safetensors")
    whole: Any = mx.load(file)
    for wrong in (
        {key: value for key, value in whole.items() if key != name},
        {**whole, name: mx.zeros((3, 64))},
        {**whole, "layers.1.self_attn.attention_sink_bias": mx.zeros(4)},
    ):
        mx.save_safetensors(file, wrong)
        message = loading(folder)
        assert "layers.1.self_attn." in message
        assert ("sink" in message) == ("layers.1.self_attn.attention_sink_bias" in wrong)
    mx.save_safetensors(file, {**whole, f"model.{name}": whole[name]})
    assert f"has the tensor {name} twice" in loading(folder)
    mx.save_safetensors(file, whole)
    load_drafter(str(folder), target_model()).close()


def test_a_config_of_other_convolutions_than_the_tensors_is_refused(tmp_path: Path) -> None:
    message = loading(SECOND.write(tmp_path, conv_kernel_size=3))
    assert "attention_conv" in message
