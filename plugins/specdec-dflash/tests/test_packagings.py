"""z-lab's packaging: where each key may stand, and which values are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from block_synthetic import CASES

from specdec.errors import ArtifactError
from specdec_dflash.packagings import kind_of, read_config

if TYPE_CHECKING:
    from specdec_dflash.config import BlockConfig

FIRST, SECOND = CASES["plain"], CASES["second"]
GONE = object()


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A config, with some keys changed where they stand; GONE takes one out."""
    config = (SECOND if kind == "dflash2" else FIRST).config
    for key, value in changes.items():
        level = config["dflash_config"] if key in config["dflash_config"] else config
        level[key] = value
        if value is GONE:
            del level[key]
    return config


def read(config: dict[str, Any]) -> BlockConfig:
    assert kind_of(config) is not None
    return read_config("a drafter", config)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ArtifactError) as caught:
        read(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Where a key may stand.


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("block_size", 5, "block_size"),
        ("mask_token_id", 3, "mask_token"),
        ("target_layer_ids", [3, 1], "taps"),
        ("num_target_layers", 9, "target_layers"),
        ("input_embedding_scale", 1.5, "embedding_scale"),
        ("output_multiplier", 0.25, "logit_scale"),
        ("final_logit_softcapping", 30.0, "soft_cap"),
        ("is_causal", True, "causal"),
        ("causal", True, "causal"),
        ("dflash_query_causal", True, "causal"),
    ],
)
def test_a_key_counts_at_the_top_and_inside_and_inside_first(
    key: str, value: Any, field: str
) -> None:
    config = config_of("dflash")
    config.pop(key, None)
    config["dflash_config"].pop(key, None)
    expected = {"taps": (3, 1), "causal": (True,) * 3}.get(field, value)
    inside, top = dict(config["dflash_config"]), dict(config)
    other = {"taps": [0], "causal": False}.get(field, 7)
    assert getattr(read({**top, "dflash_config": {**inside, key: value}}), field) == expected
    assert getattr(read({**top, key: value, "dflash_config": inside}), field) == expected
    both = {**top, key: other, "dflash_config": {**inside, key: value}}
    assert getattr(read(both), field) == expected


@pytest.mark.parametrize(
    ("key", "part", "field"),
    [
        ("conv_kernel_size", "convolutions", "kernel_size"),
        ("conv_group_size", "convolutions", "group_size"),
        ("selector_rank", "selector", "rank"),
        ("selector_top_k", "selector", "top_k"),
    ],
)
def test_what_dflash_2_adds_counts_in_both_places(key: str, part: str, field: str) -> None:
    config = config_of("dflash2")
    assert getattr(getattr(read(config), part), field) == config["dflash_config"][key]
    del config["dflash_config"][key]
    config[key] = 4
    assert getattr(getattr(read(config), part), field) == 4


@pytest.mark.parametrize(
    ("entries", "theta", "scaled"),
    [
        ({"rope_theta": 5.0}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 5.0}}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}, 5.0, None),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}, "rope_theta": 6},
            6,
            None,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 6.0}, 6.0, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 6.0}, 6.0, "yarn"),
        ({"rope_scaling": None}, 10000.0, None),
    ],
)
def test_rotary_positions_are_read_from_either_key(
    entries: dict[str, Any], theta: float, scaled: str | None
) -> None:
    config = config_of("dflash", rope_theta=GONE) | entries
    rope = read(config).rope
    assert rope.theta == theta
    assert (rope.scaling or {}).get("rope_type") == scaled


def test_layers_of_a_window_are_causal_unless_the_config_says_so() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = config_of("dflash", layer_types=types, sliding_window=5)
    assert read(config).windows == (5, None, 5)
    assert read(config).causal == (True, False, True)
    assert read(config | {"is_causal": False}).causal == (False,) * 3
    assert read(config | {"is_causal": True}).causal == (True,) * 3


def test_what_may_be_absent_has_the_value_of_the_public_implementation() -> None:
    found = read(config_of("dflash", hidden_act=GONE, num_target_layers=GONE))
    assert (found.embedding_scale, found.logit_scale, found.soft_cap) == (1.0, 1.0, None)
    assert found.windows == (None,) * 3
    assert found.target_layers is None
    assert found.longest == FIRST.block_size - 1


# Values that are missing or wrong.


@pytest.mark.parametrize(
    "key",
    [
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    assert f"has no {key}; give a complete release" in refused(config_of("dflash", **{key: GONE}))


@pytest.mark.parametrize("key", ["conv_kernel_size", "conv_group_size", "selector_top_k"])
def test_a_missing_key_of_dflash_2_is_named(key: str) -> None:
    assert f"has no {key}; give a complete release" in refused(config_of("dflash2", **{key: GONE}))


def test_a_window_of_no_size_is_refused() -> None:
    config = config_of("dflash", layer_types=["sliding_attention"] * 3)
    assert "has no sliding_window" in refused(config)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("block_size", 1, "a whole number of 2 or more"),
        ("block_size", "6", "a whole number of 2 or more"),
        ("block_size", True, "a whole number of 2 or more"),
        ("mask_token_id", -1, "a whole number of 0 or more"),
        ("mask_token_id", 3.0, "a whole number of 0 or more"),
        ("target_layer_ids", [], "a list of whole numbers of 0 or more"),
        ("target_layer_ids", 5, "a list of whole numbers of 0 or more"),
        ("target_layer_ids", "1,2", "a list of whole numbers of 0 or more"),
        ("target_layer_ids", [0, "2"], "a list of whole numbers of 0 or more"),
        ("target_layer_ids", [-1, 2], "layers; the embedding's output (-1) cannot be tapped"),
        ("hidden_size", 0, "a whole number of 1 or more"),
        ("num_key_value_heads", 0, "a whole number of 1 or more"),
        ("rms_norm_eps", "1e-6", "a number above 0"),
        ("rms_norm_eps", -1e-6, "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("rope_theta", 0, "a number above 0"),
        ("rope_theta", [1e4], "a number above 0"),
        ("rope_parameters", "yarn", "a mapping"),
        ("dflash_config", [3], "a mapping"),
        ("hidden_act", "gelu", "silu"),
        ("attention_bias", "no", "true or false"),
        ("is_causal", 1, "true or false"),
        ("layer_types", ["full_attention"] * 2, "for each of 3 layers"),
        ("layer_types", ["chunked_attention"] * 3, "full_attention or sliding_attention"),
        ("layer_types", "full_attention", "full_attention or sliding_attention"),
        ("input_embedding_scale", 0, "a number above 0"),
        ("output_multiplier", "2", "a number above 0"),
        ("final_logit_softcapping", "30", "a number"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(key: str, value: Any, wanted: str) -> None:
    config = config_of("dflash") | {"architectures": ["DFlashDraftModel"]}
    level = config["dflash_config"] if key in config["dflash_config"] else config
    level[key] = value
    message = refused(config)
    assert f": {key} is {value!r}; it must be " in message
    assert wanted in message


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type is 'spiral'; it must be default or mrope or linear"),
        ({"type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic'; it must be"),
        ({"rope_type": 4}, "rope_type is 4; it must be"),
        ({"rope_type": "yarn"}, "has no factor"),
        ({"rope_type": "yarn", "factor": "4"}, "factor is '4'; it must be a number above 0"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0; it must be a number above 0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'; it must be a number above 0"),
    ],
)
def test_rotary_positions_of_no_known_kind_are_refused(
    scaling: dict[str, Any], message: str
) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        assert message in refused(config_of("dflash") | {key: scaling})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("conv_group_size", 24, "a divisor of hidden_size 64"),
        ("conv_kernel_size", 0, "a whole number of 1 or more"),
        ("selector_rank", 0, "a whole number of 1 or more"),
        ("selector_top_k", "8", "a whole number of 1 or more"),
    ],
)
def test_a_wrong_value_of_dflash_2_is_named_with_its_key(key: str, value: Any, wanted: str) -> None:
    message = refused(config_of("dflash2", **{key: value}))
    assert f": {key} is {value!r}; it must be {wanted}" in message
