"""A damaged drafter is refused in one line, whatever is wrong with it; or it loads and drafts."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import pytest
from attrs import frozen
from block_synthetic import CASES, LAYERS, target_model
from deepspec_synthetic import write_qwen, write_release, write_speculators
from dspark_synthetic import edited, stored, write_dspark
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from specdec.errors import ArtifactError, OptionError, SpecdecError
from specdec.plugins import LoadRequest
from specdec.targets import MlxLmTarget
from specdec_dflash import dspark_loading, loading
from specdec_dflash.packagings import kind_of, read_config
from specdec_dflash.probe import probe_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from specdec.plugins import LoadedDraft

HUGE: Final = 10**400


@cache
def target(layers: int = LAYERS) -> MlxLmTarget:
    return MlxLmTarget(
        target_model() if layers == LAYERS else tiny_model("qwen3", num_hidden_layers=layers)
    )


def load(folder: Path, **options: Any) -> LoadedDraft:
    if (folder / "dspark.json").exists():
        request = LoadRequest(kind="dspark", target=target(2), path=folder, options=options)
        return dspark_loading.load_drafter(request)
    kind = kind_of(json.loads((folder / "config.json").read_text())) or "dflash"
    return loading.load_drafter(
        LoadRequest(kind=kind, target=target(), path=folder, options=options)
    )


def refused(folder: Path, error: type[SpecdecError] = ArtifactError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def namespace(loaded: LoadedDraft) -> str:
    grouped: Any = loaded.provider
    return str(grouped.grouped.checkpoint_namespace)


# Any single key, of any packaging.


@frozen
class Sound:
    """A drafter that loads.

    Attributes:
        file: its config.
        says: what that holds.
    """

    file: Path
    says: dict[str, Any]


_YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA: Final = {"rope_type": "llama3", "factor": 4.0}
_NUMBERS: Final = (
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "partial_rotary_factor", "rope_theta"),
)
_OTHERS: Final = (
    *("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "swa_window_size"),
    *("is_causal", "speculators_model_type", "confidence_thresholds", "dflash_config"),
    *("num_target_layers", "attention_bias", "final_logit_softcapping", "draft_vocab_size"),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sound]:
    folder = tmp_path_factory.mktemp("sound")
    made = [CASES[name].write(folder / name) for name in ("plain", "second-wide")]
    made.append(write_qwen(folder / "yarn", rope_theta=None, rope_parameters=_YARN))
    made.append(write_qwen(folder / "llama", rope_theta=None, rope_parameters=_LLAMA))
    for name in ("gemma", "lfm2 bonus", "speculators dspark listed", "speculators dflash2"):
        made.append(write_release(name, folder / name.replace(" ", "-")))
    made.append(write_dspark(folder / "sequential", seq_head="rnn", sts=[0.1] * 4))
    files = [next(each.glob("*[gk].json")) for each in made]
    return {file.parent.name: Sound(file, json.loads(file.read_text())) for file in files}


def places(level: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config, with those that it could have besides."""
    more = _OTHERS if not at else _NUMBERS if "rope_type" in level else ()
    for key in dict.fromkeys((*level, *more)):
        yield (*at, key)
        if isinstance(level.get(key), dict):
            yield from places(level[key], (*at, key))


junk = st.one_of(
    st.sampled_from([HUGE, -HUGE, 10**9, 10**18, 2**31 - 1, 2**31, 1e308, -1e308, 1e-320]),
    st.sampled_from([float("nan"), float("inf"), "x\ny", "yarn", "llama3", "full_attention"]),
    st.integers(-2, 9),
    st.sampled_from([0.0, 0.3, -1.5, True, False]),
    st.recursive(
        st.none() | st.integers(-1, 2) | st.just(HUGE) | st.text(max_size=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("a"), inner),
        max_leaves=4,
    ),
)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), value=junk)
def test_whatever_one_key_says_a_drafter_loads_or_is_refused_in_one_line(
    sound: dict[str, Sound], data: st.DataObject, value: Any
) -> None:
    name = data.draw(st.sampled_from(sorted(sound)))
    drafter = sound[name]
    *at, key = data.draw(st.sampled_from(list(places(drafter.says))))
    changed = deepcopy(drafter.says)
    level = changed
    for step in at:
        level = level[step]
    level[key] = value
    drafter.file.write_text(json.dumps(changed))
    said, most = "", 1
    try:
        most = load(drafter.file.parent).max_draft_tokens or 0
    except SpecdecError as error:
        said = str(error)
    finally:
        drafter.file.write_text(json.dumps(drafter.says))
    assert "\n" not in said
    assert len(said) < 1000
    assert 1 <= most <= 1024


def test_every_drafter_of_the_property_loads_as_it_is(sound: dict[str, Sound]) -> None:
    """Else it would say little."""
    for drafter in sound.values():
        load(drafter.file.parent)


# Sizes are compared with the files before anything is made of them.


@pytest.mark.parametrize(
    ("kind", "key", "value", "tensor"),
    [
        ("plain", "num_attention_heads", 10**9, "q_proj.weight"),
        ("plain", "head_dim", 10**9, "q_proj.weight"),
        ("plain", "num_attention_heads", 8, "q_proj.weight"),
        ("plain", "num_key_value_heads", 4, "k_proj.weight"),
        ("plain", "intermediate_size", 10**9, "gate_proj.weight"),
        ("plain", "num_hidden_layers", 1000, "layers.3."),
        ("second", "conv_kernel_size", 10**9, "base_kernel"),
        ("second", "selector_rank", 2**31 - 1, "predecessor_codebook"),
        ("qwen", "markov_rank", 2**31 - 1, "markov_w1.weight"),
    ],
)
def test_a_size_that_the_tensors_have_not_is_named_with_its_tensor(
    kind: str, key: str, value: int, tensor: str, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    if kind == "qwen":
        write_qwen(folder)
    else:
        CASES[kind].write(folder)
    file = folder / "config.json"
    says = json.loads(file.read_text())
    (says["dflash_config"] if key in says.get("dflash_config", {}) else says)[key] = value
    file.write_text(json.dumps(says))
    said = refused(folder)
    assert tensor in said
    assert "but its config and target need" in said or "has no layers.3" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", most) for most in (1025, 10**9)),
        *(("intermediate_size", most) for most in (2**31, 10**18, HUGE)),
        *(("block_size", most) for most in (1025, 10**9, HUGE)),
        *((key, HUGE) for key in ("rms_norm_eps", "rope_theta", "mask_token_id", "head_dim")),
    ],
)
def test_a_number_that_nothing_can_have_is_named(key: str, value: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {key: value}
    said = refused(CASES["plain"].write(tmp_path / "d", **changes))
    assert f"{key} is {str(value)[:100]}" in said


@pytest.mark.parametrize("key", ["gamma", "nLayers"])
def test_a_dspark_of_too_many_columns_or_layers_is_refused(key: str, tmp_path: Path) -> None:
    folder = edited(write_dspark(tmp_path), **{key: 10**9})
    assert f"{key} is 1000000000; it must be a whole number of 1024 at most" in refused(folder)
    write_dspark(tmp_path)
    assert "eps is 0; it must be a number above 0" in refused(edited(tmp_path, eps=0))


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (_LLAMA | {"low_freq_factor": "x"}, "low_freq_factor is 'x'"),
        (_LLAMA | {"low_freq_factor": 4}, "low_freq_factor is 4"),
        (_LLAMA | {"high_freq_factor": 0}, "high_freq_factor is 0"),
        (_LLAMA | {"original_max_position_embeddings": -1}, "original_max_position_embeddings is"),
        (_YARN | {"beta_fast": []}, "beta_fast is []"),
        (_YARN | {"beta_slow": 1e308}, "beta_slow is 1e+308"),
        (_YARN | {"mscale": "x"}, "mscale is 'x'"),
        (_YARN | {"mscale_all_dim": -1}, "mscale_all_dim is -1"),
        (_YARN | {"mscale": float("nan")}, "mscale is nan"),
        (_YARN | {"rope_theta": 1}, "rope_theta is 1"),
        (_YARN | {"beta_slow": 1e-320}, "makes no rotary positions for"),
        ({"rope_type": "linear"}, "has no factor"),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 2},
            "partial_rotary_factor is 2",
        ),
    ],
)
def test_rotary_positions_that_make_no_sense_are_named(
    rope: dict[str, Any], said: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"rope_theta": None, "rope_parameters": rope, "factor": 2.0}
    assert said in refused(write_qwen(tmp_path / "d", **changes))


def test_null_among_rotary_numbers_is_what_is_left_out(tmp_path: Path) -> None:
    spoken = {**_YARN, "mscale": None, "beta_fast": None}
    read = [
        read_config("it", {**CASES["plain"].config, "block_size": 6, "rope_parameters": each}).rope
        for each in (_YARN, spoken)
    ]
    assert read[0] == read[1]


# Options.


def test_a_shift_beyond_the_last_layer_is_named_with_the_layers(tmp_path: Path) -> None:
    last = CASES["plain"].write(tmp_path / "d", target_layer_ids=[0, LAYERS])
    said = refused(last, OptionError, tap_shift=1)
    says = "tap_shift is 1, but the last tap is layer 4, and the target has layers 0 to 4; give "
    assert said == f"{says}-1 or 0"
    load(last, tap_shift=0)
    folder = write_dspark(tmp_path / "s")
    assert "layers 0 to 2" in refused(folder, OptionError, tap_shift=1)


@pytest.mark.parametrize("shift", [1.0, True, mx.array(1), "1", 2, 10**5000], ids=type)
def test_a_shift_is_a_whole_number(shift: object, tmp_path: Path) -> None:
    folder = CASES["plain"].write(tmp_path / "d")
    assert refused(folder, OptionError, tap_shift=shift).endswith("give -1, 0 or 1")


@pytest.mark.parametrize("value", [HUGE, 10**5000, mx.ones((2,)), float("nan"), [1]], ids=type)
def test_a_confidence_of_any_size_or_type_is_refused(value: object, tmp_path: Path) -> None:
    for folder in (write_qwen(tmp_path / "d"), write_dspark(tmp_path / "s")):
        assert "give a number of 0 to 1" in refused(folder, OptionError, confidence=value)


def test_a_block_of_one_column_has_no_second_one(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "d", block_size=1)
    assert "block_size is 1, so there is no second" in refused(folder, from_anchor=False)
    assert load(folder).max_draft_tokens == 1
    config = read_config("it", json.loads((folder / "config.json").read_text()))
    grouped: Any = load(folder).provider
    method = grouped.grouped.method_for(target())
    found = probe_blocks(target(), config, lambda _: method, list(range(40)))
    assert found is not None
    assert {how.from_anchor for how in found.agreement} == {True}


# Packagings.


def test_a_kind_that_is_null_is_none(tmp_path: Path) -> None:
    says = {**CASES["plain"].config, "speculators_model_type": None}
    assert kind_of(says) == "dflash"
    assert read_config("it", says) == read_config("it", CASES["plain"].config)
    load(CASES["plain"].write(tmp_path / "d", speculators_model_type=None))
    write_speculators(tmp_path / "s", "dflash")


def test_a_dflash_config_that_is_no_mapping_is_refused_in_every_packaging(tmp_path: Path) -> None:
    said = refused(write_qwen(tmp_path / "d", dflash_config=[1]))
    assert "dflash_config is [1]; it must be a mapping" in said


# Calibrations.


def test_a_drafter_of_a_damaged_calibration_can_be_measured(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "d", confidence_thresholds=["x"])
    assert "confidence_thresholds" in refused(folder)
    load(folder, confidence="measure")
    folder = edited(write_dspark(tmp_path / "s", sts=[0.1] * 4), sts={"thresholds": [HUGE]})
    assert "sts.thresholds" in refused(folder)
    load(folder, confidence="measure")


def test_what_is_stored_of_a_text_outlives_a_calibration(tmp_path: Path) -> None:
    first = namespace(load(write_qwen(tmp_path / "a")))
    assert namespace(load(write_qwen(tmp_path / "b", confidence_thresholds=[0.2] * 5))) == first
    assert namespace(load(tmp_path / "a", confidence=0.5, block="short")) == first
    assert namespace(load(write_qwen(tmp_path / "c", seed=1))) != first
    plain = write_dspark(tmp_path / "d")
    spoken = [plain, write_dspark(tmp_path / "e", sts=[0.3] * 4)]
    assert len({namespace(load(folder)) for folder in spoken}) == 1


# Tensors.


@pytest.mark.parametrize(
    ("scales", "says"),
    [((96, 1000), "(96, 1000)"), ((), "()"), ((96, 3), "(96, 3)"), ((95, 2), "(95, 2)")],
    ids=str,
)
def test_scales_that_fit_no_weight_are_refused(
    scales: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    folder = CASES["plain"].write(tmp_path / "d")
    tensors: dict[str, Any] = {name: mx.array(value) for name, value in stored(folder).items()}
    at = "layers.0.mlp.gate_proj"
    for end in ("scales", "biases"):
        tensors[f"{at}.{end}"] = mx.zeros(scales)
    for weight in (tensors[f"{at}.weight"], mx.zeros((96, 8), mx.uint32)):
        tensors[f"{at}.weight"] = weight
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        said = refused(folder)
        assert f"{at}.scales has shape {says}" in said
