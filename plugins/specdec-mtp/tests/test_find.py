"""Heads are found in every published layout by their names, and the wrong places are named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mtp_files import (
    demo_config,
    demo_folder,
    demo_head,
    next_token_head,
    prefixed,
    split_release,
    write,
)

from specdec.errors import ArtifactError
from specdec_mtp.find import HeadKind, Layout, declared_layers, find_head, has_head

if TYPE_CHECKING:
    from pathlib import Path

HEAD_NAMES = set(demo_head())
SMALL = {"fc.weight": mx.ones((2, 4)), "norm.weight": mx.ones((2,))}
RAW_TRUNK = {"model.language_model.layers.0.linear_attn.conv1d.weight": mx.ones((6, 1, 4))}
MLX_TRUNK = {"language_model.model.layers.0.linear_attn.conv1d.weight": mx.ones((6, 4, 1))}


def test_a_whole_release_gives_its_head_and_says_that_its_trunk_is_raw() -> None:
    found = find_head(demo_folder(), HeadKind.MTP)
    assert set(found.tensors) == HEAD_NAMES
    assert (found.layout, found.raw_trunk, found.from_mlx) == (Layout.PREFIXED, True, False)
    fc = found.tensors["fc.weight"]
    assert (fc.name, fc.shape, fc.dtype) == ("mtp.fc.weight", (384, 768), "BF16")
    assert fc.file == demo_folder() / "model.safetensors"
    assert found.config["hidden_size"] == 384
    assert found.outer == demo_config()


def test_the_text_config_wins_over_the_outer_one_and_keeps_its_other_entries() -> None:
    found = find_head(demo_folder(), HeadKind.MTP)
    assert found.config["model_type"] == "qwen3_5_text"
    assert found.config["torch_dtype"] == "bfloat16"


def test_a_split_release_has_bare_names(tmp_path: Path) -> None:
    found = find_head(split_release(tmp_path), HeadKind.MTP)
    assert set(found.tensors) == HEAD_NAMES
    assert (found.layout, found.raw_trunk, found.from_mlx) == (Layout.SPLIT, None, True)
    assert found.outer["block_size"] == 3


def test_a_split_release_may_keep_the_prefix(tmp_path: Path) -> None:
    split_release(tmp_path, prefixed(demo_head(), "mtp."), mlx=False)
    found = find_head(tmp_path, HeadKind.MTP)
    assert set(found.tensors) == HEAD_NAMES
    assert (found.layout, found.from_mlx) == (Layout.PREFIXED, False)


@pytest.mark.parametrize(
    "prefix",
    [
        "mtp.",
        "model.mtp.",
        "language_model.mtp.",
        "model.language_model.mtp.",
        "language_model.model.mtp.",
    ],
)
def test_every_published_prefix_is_known(tmp_path: Path, prefix: str) -> None:
    write(tmp_path, {"model.safetensors": {**prefixed(SMALL, prefix), **MLX_TRUNK}}, {}, mlx=True)
    found = find_head(tmp_path, HeadKind.MTP)
    assert set(found.tensors) == set(SMALL)
    assert (found.layout, found.raw_trunk, found.from_mlx) == (Layout.PREFIXED, False, True)


def test_a_companion_release_wins_over_the_shards_and_brings_its_own_config(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"model.safetensors": prefixed(SMALL, "mtp.")}, {"quantization": {"bits": 4}})
    split_release(tmp_path / "mtp")
    found = find_head(tmp_path, HeadKind.MTP)
    assert found.path == tmp_path / "mtp"
    assert set(found.tensors) == HEAD_NAMES
    assert found.outer["block_size"] == 3
    assert "quantization" not in found.outer


def test_a_companion_folder_may_hold_weights_only(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": RAW_TRUNK}, demo_config())
    write(tmp_path / "mtp", {"weights.safetensors": SMALL}, mlx=True)
    found = find_head(tmp_path, HeadKind.MTP)
    assert found.tensors["fc.weight"].file == tmp_path / "mtp" / "weights.safetensors"
    assert found.outer == demo_config()
    assert found.raw_trunk is None, "a file of its own tells nothing by the trunk beside it"


def test_an_empty_companion_folder_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": prefixed(SMALL, "mtp.")}, demo_config())
    (tmp_path / "mtp").mkdir()
    assert find_head(tmp_path, HeadKind.MTP).path == tmp_path


@pytest.mark.parametrize("name", ["mtp.safetensors", "model-mtp.safetensors"])
def test_sidecar_files_win_over_the_shards(tmp_path: Path, name: str) -> None:
    files = {"model.safetensors": {**prefixed(SMALL, "mtp."), **MLX_TRUNK}}
    write(tmp_path, files, demo_config(), index=True)
    write(tmp_path, {name: prefixed(SMALL, "mtp.")})
    found = find_head(tmp_path, HeadKind.MTP)
    assert found.path == tmp_path / name
    assert (found.layout, found.raw_trunk) == (Layout.PREFIXED, None)


def test_a_shard_that_the_index_names_is_no_sidecar(tmp_path: Path) -> None:
    files = {"model-1.safetensors": RAW_TRUNK, "mtp.safetensors": prefixed(SMALL, "mtp.")}
    write(tmp_path, files, demo_config(), index=True)
    found = find_head(tmp_path, HeadKind.MTP)
    assert (found.path, found.raw_trunk) == (tmp_path, True)


def test_the_config_may_name_the_sidecar(tmp_path: Path) -> None:
    config = {**demo_config(), "mlx_lm_extra_tensors": {"mtp_file": "parts/head.safetensors"}}
    write(tmp_path, {"mtp.safetensors": SMALL}, config)
    with pytest.raises(ArtifactError, match=r"parts/head\.safetensors.*does not exist"):
        find_head(tmp_path, HeadKind.MTP)
    write(tmp_path / "parts", {"head.safetensors": SMALL})
    assert find_head(tmp_path, HeadKind.MTP).path == tmp_path / "parts" / "head.safetensors"


def test_only_the_shard_with_the_head_has_to_be_readable(tmp_path: Path) -> None:
    files = {
        "model-1.safetensors": {"model.embed_tokens.weight": mx.ones((2, 2)), **RAW_TRUNK},
        "model-2.safetensors": {"model.norm.weight": mx.ones((2,)), **prefixed(SMALL, "mtp.")},
    }
    write(tmp_path, files, demo_config(), index=True)
    assert find_head(tmp_path, HeadKind.MTP).raw_trunk is True
    (tmp_path / "model-1.safetensors").write_bytes(b"garbage, and short")
    found = find_head(tmp_path, HeadKind.MTP)
    assert set(found.tensors) == set(SMALL)
    assert found.raw_trunk is None
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ArtifactError, match=r"model-1\.safetensors is no readable"):
        find_head(tmp_path, HeadKind.MTP)


def test_a_head_may_be_spread_over_shards(tmp_path: Path) -> None:
    names = iter(prefixed(SMALL, "mtp.").items())
    files = {f"model-{number}.safetensors": dict([pair]) for number, pair in enumerate(names)}
    write(tmp_path, files, demo_config(), index=True)
    with_index = find_head(tmp_path, HeadKind.MTP)
    assert {stored.file.name for stored in with_index.tensors.values()} == set(files)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert find_head(tmp_path, HeadKind.MTP).tensors == with_index.tensors


def test_mlx_wrote_a_head_if_it_wrote_all_files_of_it(tmp_path: Path) -> None:
    first, second = (dict([pair]) for pair in prefixed(SMALL, "mtp.").items())
    write(tmp_path, {"model-1.safetensors": first, "model-2.safetensors": second}, mlx=True)
    write(tmp_path, {"model-3.safetensors": RAW_TRUNK}, demo_config())
    assert find_head(tmp_path, HeadKind.MTP).from_mlx
    write(tmp_path, {"model-2.safetensors": second})
    assert not find_head(tmp_path, HeadKind.MTP).from_mlx


def test_a_shard_that_is_missing_or_lacks_its_tensor_is_named(tmp_path: Path) -> None:
    files = {"model-1.safetensors": RAW_TRUNK, "model-2.safetensors": prefixed(SMALL, "mtp.")}
    write(tmp_path, files, demo_config(), index=True)
    mx.save_safetensors(str(tmp_path / "model-2.safetensors"), {"mtp.fc.weight": mx.ones((2, 4))})
    with pytest.raises(ArtifactError, match=r"model-2\.safetensors lacks mtp\.norm\.weight"):
        find_head(tmp_path, HeadKind.MTP)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"model-2\.safetensors does not exist"):
        find_head(tmp_path, HeadKind.MTP)
    assert not has_head(tmp_path, HeadKind.MTP)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}"])
def test_an_unusable_index_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"model.safetensors": prefixed(SMALL, "mtp.")}, demo_config())
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"model\.safetensors\.index\.json"):
        find_head(tmp_path, HeadKind.MTP)


@pytest.mark.parametrize("where", ["config", "text_config"])
def test_a_declaration_without_tensors_is_an_error_that_says_so(tmp_path: Path, where: str) -> None:
    declared = {"mtp_num_hidden_layers": 1}
    config = declared if where == "config" else {"text_config": declared}
    write(tmp_path, {"model.safetensors": MLX_TRUNK}, config, mlx=True)
    with pytest.raises(ArtifactError, match=r"declares a prediction layer.*no tensors.*split"):
        find_head(tmp_path, HeadKind.MTP)
    assert not has_head(tmp_path, HeadKind.MTP)


def test_a_checkpoint_without_any_of_it_says_that(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": MLX_TRUNK}, {"model_type": "qwen3"})
    with pytest.raises(ArtifactError, match="neither declares nor holds an mtp head"):
        find_head(tmp_path, HeadKind.MTP)


def test_heads_of_several_layers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": prefixed(SMALL, "mtp.")}, {"mtp_num_hidden_layers": 2})
    with pytest.raises(ArtifactError, match=r"2 prediction layers.*not supported"):
        find_head(tmp_path, HeadKind.MTP)
    several = {**SMALL, "layers.1.input_layernorm.weight": mx.ones((2,))}
    write(tmp_path, {"model.safetensors": prefixed(several, "mtp.")}, {})
    with pytest.raises(ArtifactError, match=r"layers\.1\.input_layernorm\.weight.*not supported"):
        find_head(tmp_path, HeadKind.MTP)


def test_a_second_next_token_layer_is_refused(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3}
    layers = {f"model.layers.{number}.eh_proj.weight": mx.ones((2, 4)) for number in (3, 4)}
    write(tmp_path, {"model.safetensors": layers}, config)
    with pytest.raises(ArtifactError, match=r"layers\.1\.eh_proj\.weight.*not supported"):
        find_head(tmp_path, HeadKind.NEXTN)


def test_a_folder_that_is_missing_or_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nowhere does not exist"):
        find_head(tmp_path / "nowhere", HeadKind.MTP)
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="file is a file; give the folder"):
        find_head(tmp_path / "file", HeadKind.MTP)
    assert not has_head(tmp_path / "nowhere", HeadKind.MTP)


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, cut: int) -> None:
    file = split_release(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ArtifactError, match=r"model\.safetensors is no readable"):
        find_head(tmp_path, HeadKind.MTP)
    assert has_head(tmp_path, HeadKind.MTP), "loading says what is wrong with it"


@given(junk=st.binary(max_size=64))
def test_no_content_of_a_file_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    for content in (junk, len(junk).to_bytes(8, "little") + junk):
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_bytes(junk)
        with pytest.raises(ArtifactError):
            find_head(folder, HeadKind.MTP)
        assert not has_head(folder, HeadKind.MTP)


@pytest.mark.parametrize("header", ["[]", '{"a": 1}', '{"a": {"shape": [1], "dtype": "F32"}}'])
def test_a_header_of_another_form_is_refused(tmp_path: Path, header: str) -> None:
    raw = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(ArtifactError, match="no readable safetensors file"):
        find_head(tmp_path, HeadKind.MTP)


@pytest.mark.parametrize(
    "root", ["model.", "language_model.model.", "model.language_model.", "language_model."]
)
def test_a_next_token_layer_stands_behind_the_layers_of_the_target(
    tmp_path: Path, root: str
) -> None:
    stored = {"eh_proj.weight": mx.ones((2, 4)), "self_attn.o_proj.weight": mx.ones((2, 2))}
    trunk = {f"{root}layers.{n}.self_attn.o_proj.weight": mx.ones((2, 2)) for n in (0, 4, 46)}
    trunk[f"{root}layers.1.linear_attn.conv1d.weight"] = mx.ones((6, 1, 4))
    files = {"model.safetensors": {**trunk, **prefixed(stored, f"{root}layers.47.")}}
    write(tmp_path, files, {"text_config": {"num_hidden_layers": 47}}, index=True)
    found = find_head(tmp_path, HeadKind.NEXTN)
    assert set(found.tensors) == set(stored)
    assert (found.layout, found.raw_trunk) == (Layout.NEXTN, None)
    assert not has_head(tmp_path, HeadKind.MTP)


def flat(stored: dict[str, mx.array]) -> dict[str, mx.array]:
    """A next-token layer as mlx-vlm splits it off a GLM-4.7-Flash."""
    renamed = {"shared_head.norm": "model.shared_head_norm", "shared_head.head": "lm_head"}
    around = {"embed_tokens": "model.embed_tokens", "eh_proj": "model.eh_proj"}
    around |= {"enorm": "model.enorm", "hnorm": "model.hnorm", **renamed}
    names = {name: name.rpartition(".")[0] for name in stored}
    return {
        f"{around[part]}.weight" if part in around else f"model.mtp_block.{name}": stored[name]
        for name, part in names.items()
    }


def test_flat_names_of_a_split_next_token_layer_are_undone(tmp_path: Path) -> None:
    _, stored, text = next_token_head("glm4_moe_lite")
    config = {"model_type": "glm4_moe_lite_mtp", "block_size": 2, "text_config": text}
    write(tmp_path, {"model.safetensors": flat(stored)}, config, mlx=True)
    found = find_head(tmp_path, HeadKind.NEXTN)
    assert set(found.tensors) == set(stored)
    assert "shared_head.head.weight" in found.tensors
    assert found.layout is Layout.SPLIT


def test_a_split_next_token_layer_may_have_the_prefix_mtp(tmp_path: Path) -> None:
    _, stored, text = next_token_head("glm_moe_dsa")
    names = {name.replace("shared_head.norm", "shared_head_norm"): w for name, w in stored.items()}
    config = {"model_type": "glm_moe_dsa_mtp", "text_config": text}
    write(tmp_path, {"model.safetensors": prefixed(names, "mtp.")}, config, mlx=True)
    assert set(find_head(tmp_path, HeadKind.NEXTN).tensors) == set(stored)


def test_the_packaging_of_speculators_is_renamed_and_copies_of_the_target_are_left(
    tmp_path: Path,
) -> None:
    around = {
        "fc": "input_proj",
        "norm": "final_layernorm",
        "pre_fc_norm_hidden": "hidden_layernorm",
        "pre_fc_norm_embedding": "token_layernorm",
    }
    packed = {"embed_tokens.weight": mx.ones((4, 2)), "lm_head.weight": mx.ones((4, 2))}
    for name, weight in demo_head().items():
        part, _, suffix = name.rpartition(".")
        inner = f"{around[part]}.{suffix}" if part in around else name.removeprefix("layers.0.")
        packed[f"mtp_layers.0.{inner}"] = weight
    text = demo_config()["text_config"]
    config = {"speculators_model_type": "mtp", "transformer_layer_config": text}
    write(tmp_path, {"model.safetensors": packed}, config)
    found = find_head(tmp_path, HeadKind.MTP)
    assert {name: stored.name for name, stored in found.tensors.items()}["fc.weight"] == (
        "mtp_layers.0.input_proj.weight"
    )
    assert set(found.tensors) == HEAD_NAMES
    assert found.config["hidden_size"] == 384
    for second in ("input_layernorm", "final_layernorm"):
        more = {**packed, f"mtp_layers.1.{second}.weight": mx.ones((2,))}
        write(tmp_path, {"model.safetensors": more})
        with pytest.raises(ArtifactError, match=rf"layers\.1\.{second}.*not supported"):
            find_head(tmp_path, HeadKind.MTP)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, 0),
        ({"mtp_num_hidden_layers": 1}, 1),
        ({"num_nextn_predict_layers": 3}, 3),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, 1),
        ({"mtp_num_hidden_layers": None, "text_config": None}, 0),
        ({"mtp_num_hidden_layers": "1"}, 0),
        ({"mtp_num_hidden_layers": 0, "text_config": {"num_nextn_predict_layers": 2}}, 2),
    ],
)
def test_declared_layers_are_counted_wherever_they_stand(
    config: dict[str, Any], layers: int
) -> None:
    assert declared_layers(config) == layers


def test_detection_tells_the_kinds_apart(tmp_path: Path) -> None:
    split_release(tmp_path)
    assert has_head(tmp_path, HeadKind.MTP)
    assert not has_head(tmp_path, HeadKind.NEXTN)


def test_finding_a_head_needs_no_mlx() -> None:
    script = (
        "import sys\n"
        "sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['numpy'] = None\n"
        "from pathlib import Path\n"
        "from specdec_mtp.find import HeadKind, find_head\n"
        f"print(len(find_head(Path({json.dumps(str(demo_folder()))}), HeadKind.MTP).tensors))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"15\n"), ran.stderr.decode()
