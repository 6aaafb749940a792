"""Projections that are packed when a drafter is loaded, and drafters that are stored packed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import pytest
from rotated_target import drafts_of, pair_of
from scripted import drain, request, solo, target
from tiny_models import VOCABULARY

from specdec import VerifyGroup
from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec.errors import CheckpointError, OptionError
from specdec.plugins import LoadRequest
from specdec_dflash.loading import OPTIONS, load_drafter, provider_of
from specdec_dflash.method import Drafting
from specdec_dflash.model import BlockModel
from specdec_dflash.packagings import read_config
from specdec_dflash.tiny import random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from specdec.drafting import ProjectedProvider
    from specdec.targets import MlxLmTarget

LAYERS: Final = 2
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_target_layers": 2,
}
OWN: Final[dict[str, Any]] = {"mask_token_id": 63, "target_layer_ids": [0, 1], "block_size": 6}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "dflash": {**SIZES, "architectures": ["DFlashDraftModel"], "dflash_config": OWN},
    "dflash2": {
        **SIZES,
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {
            **OWN,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 64,  # so that it could be packed
            "selector_top_k": 6,
        },
    },
    "deepspec": {
        **SIZES,
        **OWN,
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 64,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
PROJECTIONS: Final = {
    "fc",
    *(
        f"layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in (
            *(f"self_attn.{each}_proj" for each in "qkvo"),
            *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
        )
    ),
}
PACKED: Final = {
    "dflash": PROJECTIONS,
    "dflash2": PROJECTIONS,
    "deepspec": PROJECTIONS
    | {"embed_tokens", "lm_head", "markov_head.markov_w1", "markov_head.markov_w2"},
}


@pytest.fixture(scope="module")
def folders() -> Iterator[Mapping[str, Path]]:
    """A release of each kind, in float32."""
    with TemporaryDirectory() as root:
        yield {kind: written(Path(root) / kind, CONFIGS[kind], stored(kind)) for kind in CONFIGS}


def written(folder: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    folder.mkdir()
    bare = ("predecessor_codebook", "successor_codebook")
    named = {
        name.removesuffix(".weight") if name.split(".")[-2] in bare else name: array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), named)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def network(kind: str) -> BlockModel:
    own = kind == "deepspec"
    with without_drawing():
        return BlockModel(read_config("it", CONFIGS[kind]), own_embedding=own, own_head=own)


@cache
def stored(kind: str) -> dict[str, mx.array]:
    return random_weights(network(kind), 0)


def load(folder: Path, on: MlxLmTarget | None = None, **options: Any) -> ProjectedProvider:
    given = {"probe": False, **options}
    kind = folder.name.partition("-")[0]
    draft = load_drafter(LoadRequest(kind=kind, path=folder, target=on or target(), options=given))
    provider: Any = draft.provider
    loaded: ProjectedProvider = provider
    return loaded


def held(provider: ProjectedProvider, on: MlxLmTarget | None = None) -> dict[str, mx.array]:
    """The arrays that a drafter computes with."""
    method: Any = provider.grouped.method_for(on or target())
    return parameters_of(method._model)


def assert_same_arrays(found: Mapping[str, mx.array], wanted: Mapping[str, mx.array]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array).item(), name


def packed(kind: str, bits: int, group: int) -> dict[str, mx.array]:
    """The release as mlx packs it."""
    arrays = dict(stored(kind))
    for path in PACKED[kind]:
        parts = mx.quantize(arrays[f"{path}.weight"], group, bits)
        arrays |= dict(
            zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), parts, strict=True)
        )
    return arrays


def unpacked(kind: str, bits: int, group: int) -> ProjectedProvider:
    """A drafter whose weights are what the packed ones say, each a float of its own."""
    model, arrays = network(kind), dict(stored(kind))
    for path in PACKED[kind]:
        parts = mx.quantize(arrays[f"{path}.weight"], group, bits)
        arrays[f"{path}.weight"] = mx.dequantize(*parts, group, bits)
    load_module("it", model, arrays)
    return provider_of("it", read_config("it", CONFIGS[kind]), model, Drafting(), None)


# What is packed, and how.


def test_dflash2_packs_its_projections_in_4_bits_and_keeps_the_rest(
    folders: Mapping[str, Path],
) -> None:
    arrays = held(load(folders["dflash2"]))
    assert_same_arrays(arrays, packed("dflash2", 4, 64))
    whole = {name for name in arrays if f"{name.rpartition('.')[0]}.scales" not in arrays}
    for part in ("attention_conv", "mlp_conv", "norm", "codebook", "hidden_projection"):
        assert any(part in name for name in whole), part


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("options", "bits", "group"),
    [({"bits": 4}, 4, 64), ({"bits": 8, "group_size": 32}, 8, 32), ({"bits": 3}, 3, 64)],
)
def test_every_kind_is_packed_as_asked(
    kind: str, options: dict[str, Any], bits: int, group: int, folders: Mapping[str, Path]
) -> None:
    assert_same_arrays(held(load(folders[kind], **options)), packed(kind, bits, group))


def test_a_group_size_alone_changes_the_default(folders: Mapping[str, Path]) -> None:
    assert_same_arrays(held(load(folders["dflash2"], group_size=32)), packed("dflash2", 4, 32))
    with pytest.raises(OptionError, match="group_size is 32 without bits"):
        load(folders["dflash"], group_size=32)


@pytest.mark.parametrize(
    ("kind", "options"), [("dflash2", {"bits": 0}), ("dflash", {}), ("deepspec", {})]
)
def test_where_no_bits_are_meant_the_stored_arrays_are_used(
    kind: str, options: dict[str, Any], folders: Mapping[str, Path]
) -> None:
    assert_same_arrays(held(load(folders[kind], **options)), stored(kind))


@pytest.mark.parametrize("value", [1, -4, True, "4", 4.0])
def test_bits_that_mlx_has_not_are_refused_in_one_line(
    value: Any, folders: Mapping[str, Path]
) -> None:
    with pytest.raises(OptionError, match=f"bits is {value!r}; give one of") as caught:
        load(folders["dflash2"], bits=value)
    assert "\n" not in str(caught.value)
    assert {"bits", "group_size"} <= set(OPTIONS)


# What it drafts.


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_packed_drafter_drafts_what_its_packed_weights_say(
    kind: str, bits: int, folders: Mapping[str, Path]
) -> None:
    found = drafts_of(target(), load(folders[kind], bits=bits, block="short"))
    wanted = drafts_of(target(), unpacked(kind, bits, 64))
    assert found.difference(wanted) <= 1e-4
    assert found.tokens == wanted.tokens
    plain = drafts_of(target(), load(folders[kind], bits=0))
    assert found.difference(plain) > 1e-3


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_packed_drafter_changes_no_token(kind: str, folders: Mapping[str, Path]) -> None:
    prompt = (7, 1, 52, 20, 9)
    group = VerifyGroup(target(), load(folders[kind], bits=4), drafter=kind)
    [row] = group.admit([request(prompt, max_tokens=20, num_draft_tokens=4)])
    drain(group)
    group.close()
    assert row.emitted == solo(prompt)[:20]
    assert (row.stats.draft_errors, row.stats.drafter) == (0, kind)
    assert sum(row.stats.drafted_per_position) > 0


# What is kept of it.


def test_rows_of_one_width_are_not_taken_for_those_of_another(
    folders: Mapping[str, Path],
) -> None:
    asked: list[dict[str, Any]] = [{}, {"bits": 0}, {"bits": 8}, {"group_size": 32}, {"bits": 3}]
    providers = [load(folders["dflash2"], **options) for options in asked]
    names = [provider.grouped.checkpoint_namespace for provider in providers]
    assert len(set(names)) == len(names)
    assert load(folders["dflash2"], bits=4).grouped.checkpoint_namespace == names[0]
    taps = mx.zeros((1, 2, 128))
    group = providers[0].grouped.open_prefill(target=target(), checkpoints=[None])
    group.prefill(mx.array([[1, 2]]), taps)
    kept = group.capture(0)
    providers[0].grouped.open_prefill(target=target(), checkpoints=[kept]).close()
    for other in providers[1:]:
        with pytest.raises(CheckpointError):
            other.grouped.open_prefill(target=target(), checkpoints=[kept])


def test_packed_weights_are_counted_as_they_are(folders: Mapping[str, Path]) -> None:
    wide, narrow = load(folders["dflash2"], bits=0), load(folders["dflash2"])
    assert wide.weight_bytes == sum(array.nbytes for array in stored("dflash2").values())
    assert narrow.weight_bytes == sum(array.nbytes for array in packed("dflash2", 4, 64).values())
    assert narrow.weight_bytes < wide.weight_bytes / 2


# Stored packed.


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("bits", [8, 2])
def test_what_is_stored_packed_is_used_as_it_is(
    kind: str, bits: int, tmp_path: Path, folders: Mapping[str, Path]
) -> None:
    folder = written(tmp_path / f"{kind}-packed", CONFIGS[kind], packed(kind, bits, 32))
    same = load(folders[kind], bits=bits, group_size=32)
    asked: list[dict[str, Any]] = [{}, {"bits": 0}]
    for options in asked:
        found = load(folder, **options)
        assert_same_arrays(held(found), packed(kind, bits, 32))
        assert found.grouped.checkpoint_namespace == same.grouped.checkpoint_namespace
    assert drafts_of(target(), found).difference(drafts_of(target(), same)) == 0.0


def test_what_is_stored_packed_in_part_is_not_packed_further(tmp_path: Path) -> None:
    arrays, part = dict(stored("dflash2")), packed("dflash2", 4, 64)
    names = [name for name in part if name.startswith("layers.1.")]
    arrays |= {name: part[name] for name in names}
    folder = written(tmp_path / "dflash2-part", CONFIGS["dflash2"], arrays)
    assert_same_arrays(held(load(folder)), arrays)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"bits": 4}, "bits is 4, but"), ({"group_size": 32}, "group_size is 32, but")],
)
def test_another_packing_of_what_is_stored_packed_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "dflash2-packed", CONFIGS["dflash2"], packed("dflash2", 8, 64))
    with pytest.raises(OptionError, match=f"{says} .* is stored packed already") as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)


# On a rotated target.


def test_taps_are_folded_before_they_are_packed(folders: Mapping[str, Path]) -> None:
    both = pair_of("qwen3", tie_word_embeddings=False)
    provider = load(folders["dflash2"], both.rotated)
    weight = stored("dflash2")["fc.weight"]
    turned = [weight[:, at : at + 64] @ both.basis.rotation for at in (0, 64)]
    parts = mx.quantize(mx.concatenate(turned, axis=1), 64, 4)
    wanted = packed("dflash2", 4, 64)
    wanted |= dict(zip(("fc.weight", "fc.scales", "fc.biases"), parts, strict=True))
    found = held(provider, both.rotated)
    assert mx.allclose(found.pop("fc.scales"), wanted.pop("fc.scales"), atol=1e-5).item()
    assert mx.allclose(found.pop("fc.biases"), wanted.pop("fc.biases"), atol=1e-5).item()
    same: Any = mx.mean(found.pop("fc.weight") == wanted.pop("fc.weight")).item()
    assert same > 0.99
    assert_same_arrays(found, wanted)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_stored_packed_drafts_the_same_on_a_rotated_target(
    kind: str, tmp_path: Path
) -> None:
    both = pair_of("qwen3", tie_word_embeddings=False)
    folder = written(tmp_path / f"{kind}-packed", CONFIGS[kind], packed(kind, 4, 64))
    found = drafts_of(both.rotated, load(folder, both.rotated))
    wanted = drafts_of(both.original, load(folder, both.original))
    assert found.difference(wanted) <= 1e-4
    assert found.tokens == wanted.tokens
