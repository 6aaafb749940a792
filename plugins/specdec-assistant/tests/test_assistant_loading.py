"""An assistant that is damaged is refused in one line that names what is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import pytest
from assistant_folders import load, named, refused, rewritten
from assistant_synthetic import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ArtifactError
from specdec_assistant.config import LayerKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROPES = "rope_parameters"


# Configs.


def for_both(**rope: Any) -> dict[str, Any]:
    """The same rotary positions for both kinds of layer."""
    return {kind.value: dict(rope) for kind in LayerKind}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("backbone_hidden_size", 23, "backbone_hidden_size is 23, but the target has 24"),
        ("backbone_hidden_size", None, "has no backbone_hidden_size"),
        ("backbone_hidden_size", "24", "backbone_hidden_size is '24'"),
        ("tie_word_embeddings", 1, "tie_word_embeddings is 1"),
        ("tie_word_embeddings", False, "has no lm_head.weight"),
        ("block_size", 1, "block_size is 1; it must be a whole number of 2 or more"),
        ("text_config", [], "text_config is []; it must be a mapping"),
        ("num_centroids", 16, "num_centroids is 16, but masked_embedding.centroids.weight has"),
        ("centroid_intermediate_top_k", 9, "centroid_intermediate_top_k is 9, but num_centroids"),
    ],
)
def test_a_wrong_value_of_a_config_is_named(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    assert said in refused(ArtifactError, CASES["sparse"].write(tmp_path, **{key: value}))


def test_another_familys_assistant_is_refused(tmp_path: Path) -> None:
    said = refused(ArtifactError, named(tmp_path, "gemma5_assistant"))
    assert "model_type is 'gemma5_assistant'; it must be gemma4_assistant or" in said


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "gemma3_text", "text_config.model_type is 'gemma3_text'"),
        ("hidden_size", 40, "pre_projection.weight of the assistant drafter"),
        ("hidden_size", True, "hidden_size is True"),
        ("num_attention_heads", 3, "(48, 32)"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("intermediate_size", 50, "mlp.gate_proj.weight"),
        ("vocab_size", 50, "embed_tokens.weight"),
        ("vocab_size", 10**40, "vocab_size is"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("layer_types", None, "has no text_config.layer_types"),
        ("layer_types", ["full_attention", "linear"], "text_config.layer_types is"),
        ("num_hidden_layers", 5, "num_hidden_layers is 5; it must be 4"),
        ("num_kv_shared_layers", 2, "num_kv_shared_layers is 2; it must be 0 or 4"),
        ("head_dim", 15, "head_dim is 15; it must be an even number"),
        ("global_head_dim", 16, "layers.3.self_attn.q_proj.weight"),
        ("sliding_window", None, "has no text_config.sliding_window"),
        ("hidden_activation", "silu", "hidden_activation is 'silu'"),
        ("enable_moe_block", True, "enable_moe_block is True"),
        ("use_double_wide_mlp", True, "use_double_wide_mlp is True"),
        ("hidden_size_per_layer_input", 8, "hidden_size_per_layer_input is 8"),
        (ROPES, None, "has no text_config.rope_parameters"),
        (ROPES, {"full_attention": {"rope_theta": 1e4}}, f"no text_config.{ROPES}.sliding"),
        (
            ROPES,
            for_both(rope_theta=1e4, rope_type="yarn"),
            f"text_config.{ROPES}.full_attention.rope_type is 'yarn'",
        ),
        (
            ROPES,
            for_both(rope_theta=1e4, rope_type="proportional", partial_rotary_factor=2),
            "partial_rotary_factor is 2",
        ),
        (ROPES, for_both(rope_type="default"), "has no text_config.rope_p"),
    ],
)
def test_a_wrong_value_of_a_text_config_is_named(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    assert said in refused(ArtifactError, CASES["sparse"].write(tmp_path, **{key: value}))


# Tensors.


@pytest.mark.parametrize(
    "name",
    [
        "pre_projection.weight",
        "post_projection.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.layer_scalar",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "masked_embedding.token_ordering",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    said = refused(ArtifactError, CASES["sparse"].write(tmp_path, drop=name))
    assert name.removeprefix("model.") in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.layers.1.mlp.down_proj.weight", mx.zeros((32, 47)), "(32, 47)"),
        ("model.layers.1.layer_scalar", mx.zeros((2,)), "(2,)"),
        ("model.norm.weight", mx.zeros((32,), mx.int32), "no floating point type"),
        ("masked_embedding.centroids.weight", mx.zeros((8, 31)), "(8, 31)"),
        ("masked_embedding.token_ordering", mx.zeros((48,), mx.int64), "each id below 48 once"),
        ("masked_embedding.token_ordering", mx.arange(40), "(40,)"),
        ("masked_embedding.token_ordering", mx.zeros((48,)), "is F32"),
        ("model.layers.0.self_attn.k_proj.weight", mx.zeros((4, 4)), "k_proj"),
        ("pre_projection.weight", mx.zeros((32, 24)), "(32, 48)"),
        ("norm.weight", mx.zeros((32,)), "the tensor norm.weight twice"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, value: mx.array, said: str, tmp_path: Path) -> None:
    folder = rewritten(CASES["sparse"].write(tmp_path), lambda held: held.__setitem__(name, value))
    assert said in refused(ArtifactError, folder)


def test_what_is_no_assistants_folder_is_refused(tmp_path: Path) -> None:
    assert "needs its folder; give its path instead of its kind" in refused(ArtifactError, None)
    assert "does not exist" in refused(ArtifactError, tmp_path / "nowhere")
    assert "config.json" in refused(ArtifactError, tmp_path)
    folder = CASES["whole"].write(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    assert "download it again" in refused(ArtifactError, folder)
    file.unlink()
    assert "no safetensors files" in refused(ArtifactError, folder)


# Any key, any value.

_NUMBERS: Final = (10**400, -1, 0, 1, 2, 3, 2**31, 1e308, 1e-320, 0.5, float("nan"), float("inf"))
junk = st.one_of(
    st.sampled_from([*_NUMBERS, True, False, None, "x\ny", "default", "full_attention"]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 1, []]), max_size=5),
    st.dictionaries(st.sampled_from(["rope_theta", "full_attention", "a"]), st.just(1.0)),
)


def places(level: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config, with some that it could have besides."""
    for key in dict.fromkeys((*level, "block_size", "query_pre_attn_scalar", "factor")):
        yield (*at, key)
        if isinstance(level.get(key), dict):
            yield from places(level[key], (*at, key))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES["sparse"].write(tmp_path_factory.mktemp("sound"))


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(at=st.sampled_from(list(places(CASES["sparse"].config))), value=junk)
def test_whatever_one_key_says_an_assistant_loads_or_is_refused_in_one_line(
    sound: Path, at: tuple[str, ...], value: Any
) -> None:
    config = CASES["sparse"].config
    level = config
    for step in at[:-1]:
        level = level[step]
    level[at[-1]] = value
    (sound / "config.json").write_text(json.dumps(config))
    said = ""
    try:
        assert load(sound).num_draft_tokens >= 1
    except ArtifactError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
