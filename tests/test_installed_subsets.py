"""A folder is recognised as what it is, whatever plugins are installed and in whatever order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from subset_folders import FOLDERS, PLUGINS, registry_of, write_tensors

from specdec.errors import UnrecognizedArtifactError
from specdec.plugins import Artifact

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ALL = tuple(PLUGINS)
SUBSETS = [(), *((name,) for name in ALL), *permutations(ALL, 2), ALL]


@pytest.fixture(scope="module", autouse=True)
def _no_settings() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
            patch.delenv(variable, raising=False)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    written = {}
    for name, folder in FOLDERS.items():
        written[name] = folder.write(root / name)
        (written[name] / "tokenizer.json").write_text("{}")
    return written


@pytest.mark.parametrize("packages", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_a_folder_is_taken_by_its_own_plugin_or_by_none(
    packages: tuple[str, ...], folders: dict[str, Path]
) -> None:
    registry = registry_of(packages)
    for name, folder in FOLDERS.items():
        wanted = folder.expected(packages)
        if wanted is not None:
            assert registry.select(folders[name]).name == wanted, name
            continue
        with pytest.raises(UnrecognizedArtifactError) as caught:
            registry.select(folders[name])
        said = str(caught.value)
        assert "\n" not in said
        if folder.kind is not None:
            named = said.rpartition("pip install ")[2]
            assert named == folder.package or (folder.whole and named == "specdec-two-model"), said


def test_exactly_one_detector_says_yes_and_none_fails(folders: dict[str, Path]) -> None:
    registry = registry_of(ALL)
    for name, folder in FOLDERS.items():
        answers = {a.kind.name: a.answer for a in registry.detect(folders[name])}
        assert set(answers.values()) <= {"yes", "no"}, name
        yes = {kind for kind, answer in answers.items() if answer == "yes"}
        own = set() if folder.kind is None else {folder.kind}
        assert yes == own | ({"two-model"} if folder.whole else set()), name


def test_three_or_four_plugins_choose_as_all_the_others_do(folders: dict[str, Path]) -> None:
    for count in (3, 4):
        for packages in combinations(ALL, count):
            registry = registry_of(packages)
            for name, folder in FOLDERS.items():
                wanted = folder.expected(packages)
                if wanted is not None:
                    assert registry.select(folders[name]).name == wanted, (name, packages)


def test_no_order_of_installation_changes_a_choice(folders: dict[str, Path]) -> None:
    first = registry_of(ALL)
    seen = {name: Artifact(folders[name]) for name in FOLDERS if FOLDERS[name].kind is not None}
    for packages in permutations(ALL):
        registry = registry_of(packages)
        assert list(registry.kinds) == list(first.kinds)
        assert all(registry.owner(kind) == first.owner(kind) for kind in registry.kinds)
        for name, artifact in seen.items():
            assert registry.select(artifact).name == FOLDERS[name].kind


def test_a_whole_release_with_a_head_drafts_as_a_model_where_that_is_named(
    folders: dict[str, Path],
) -> None:
    release = folders["mtp in a whole release"]
    registry = registry_of(ALL)
    assert registry.select(release).name == "mtp"
    assert registry.select(release, kind="two-model").name == "two-model"
    without = registry_of([name for name in ALL if name != "specdec-mtp"])
    assert without.select(release).name == "two-model"


def test_a_drafter_that_lost_its_own_names_is_told_by_its_tensors(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    # A config rewritten as the target's: nothing but the tensors tells what it is.
    registry = registry_of(["specdec-two-model"])
    for name in ("dflash", "deepspec", "assistant", "eagle3", "mtp split"):
        folder = tmp_path / name
        folder.mkdir()
        for file in folders[name].iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "config.json").unlink()
        source = (folders["model"] / "config.json").read_text()
        (folder / "config.json").write_text(source)
        with pytest.raises(UnrecognizedArtifactError):
            registry.select(folder)


def test_a_disabled_plugin_is_named_as_disabled(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "dflash")
    with pytest.raises(UnrecognizedArtifactError) as caught:
        registry_of(ALL).select(folders["deepspec"])
    text = "specdec-dflash 0.1.0 is disabled by SPECDEC_DISABLE_PLUGINS"
    assert str(caught.value).endswith(text)


def test_an_installed_plugin_that_says_no_is_not_to_be_installed(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnrecognizedArtifactError) as caught:
        registry_of(ALL).select(folders["assistant of another family"])
    assert "pip install" not in str(caught.value)


def test_every_folder_is_detected_without_mlx(folders: dict[str, Path]) -> None:
    code = """
import sys
for name in ("mlx", "mlx.core", "mlx_lm", "transformers", "numpy"):
    sys.modules[name] = None
from specdec.plugins import Registry, scan
registry = Registry(scan(strict=True))
for folder in sys.argv[1:]:
    print(*[a.kind.name for a in registry.detect(folder) if a.answer != "no"], sep=",")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, folders.values())],
        env={k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    registry = registry_of(ALL)
    wanted = [
        ",".join(a.kind.name for a in registry.detect(folder) if a.answer == "yes")
        for folder in folders.values()
    ]
    assert done.stdout.splitlines() == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["qwen3", "qwen3_5_mtp", "gemma4_assistant", "LlamaForCausalLM", "dflash", "mtp", "..", "\0"]
)
KEYS = (
    "architectures",
    "model_type",
    "speculators_model_type",
    "dflash_config",
    "text_config",
    "transformer_layer_config",
    "mlx_lm_extra_tensors",
    "num_hidden_layers",
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
)
VALUES = JSON | WORDS | st.lists(WORDS | JSON, max_size=3)
CONFIGS = st.dictionaries(
    st.sampled_from(KEYS), VALUES | st.dictionaries(st.sampled_from([*KEYS, "mtp_file"]), VALUES)
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": (8, 4), "model.layers.0.mlp.weight": (4, 4)}
    write_tensors(folder / "model.safetensors", shapes)
    return folder


@given(config=CONFIGS)
def test_no_detector_fails_on_any_config(config: dict[str, Any], scratch: Path) -> None:
    (scratch / "config.json").write_text(json.dumps(config))
    (scratch / "model.safetensors.index.json").unlink(missing_ok=True)
    answers = registry_of(ALL).detect(Artifact(scratch))
    assert len(answers) == 8
    assert {a.answer for a in answers} <= {"yes", "no"}, [a.message for a in answers]


@given(index=JSON | st.fixed_dictionaries({"weight_map": JSON | st.dictionaries(WORDS, WORDS)}))
def test_no_detector_fails_on_any_index(index: Any, scratch: Path) -> None:
    (scratch / "config.json").write_text('{"model_type": "llama"}')
    (scratch / "model.safetensors.index.json").write_text(json.dumps(index))
    answers = registry_of(ALL).detect(Artifact(scratch))
    assert {a.answer for a in answers} <= {"yes", "no"}, [a.message for a in answers]
