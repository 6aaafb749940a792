"""Taps that are off by one and the wrong column of a block are heard when a drafter is loaded."""

from __future__ import annotations

import json
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from demo_texts import DemoTexts

from specdec import load_drafter
from specdec.errors import ArtifactError, OptionError, SpecdecDrafterWarning
from specdec.plugins.models import find_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = DemoTexts("demo-qwen3", "demo-qwen3-dflash")
TAPS = (1, 3, 4)


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The demo's drafter with another config."""
    found = find_model("demo-qwen3-dflash")
    assert found is not None
    shutil.copytree(found, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shifted(folder: Path, by: int) -> Path:
    def change(config: dict[str, Any]) -> None:
        config["dflash_config"]["target_layer_ids"] = [tap + by for tap in TAPS]

    return changed(folder, change)


def from_first_column(folder: Path) -> Path:
    def change(config: dict[str, Any]) -> None:
        config["dflash_config"] |= {"projector_type": "dspark", "sample_from_anchor": True}

    return changed(folder, change)


def test_a_sound_drafter_is_loaded_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load_drafter("demo-qwen3-dflash", *BLOCK.demo()) as loaded:
            assert loaded.provider.grouped.target_tap_layers(loaded.target) == TAPS  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", [-1, 1])
def test_taps_that_are_off_by_one_are_put_right(by: int, tmp_path: Path) -> None:
    folder = shifted(tmp_path / "d", by)
    says = f"with tap_shift={-by} and from_anchor=false; the latter is used"
    with pytest.warns(SpecdecDrafterWarning, match=says):
        loaded = load_drafter(folder, *BLOCK.demo())
    with loaded:
        assert loaded.provider.grouped.target_tap_layers(loaded.target) == TAPS  # type: ignore[attr-defined]
        found = BLOCK.drafted(BLOCK.prompts()[2], loaded, 3)
    assert found.tokens == BLOCK.greedy(BLOCK.prompts()[2])
    assert found.stats == BLOCK.drafted(BLOCK.prompts()[2], BLOCK.load(), 3).stats


def test_what_an_option_says_is_kept_and_what_would_fit_is_told(tmp_path: Path) -> None:
    folder = shifted(tmp_path / "d", 1)
    with (
        pytest.warns(
            SpecdecDrafterWarning,
            match=r"with tap_shift=0 .* with tap_shift=-1 .*; the former is used, as asked",
        ),
        load_drafter(folder, *BLOCK.demo(), tap_shift=0) as loaded,
    ):
        assert loaded.provider.grouped.target_tap_layers(loaded.target) == (2, 4, 5)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with load_drafter(folder, *BLOCK.demo(), tap_shift=-1) as loaded:
            assert loaded.provider.grouped.target_tap_layers(loaded.target) == TAPS  # type: ignore[attr-defined]


def test_the_wrong_column_is_put_right(tmp_path: Path) -> None:
    folder = from_first_column(tmp_path / "d")
    with (
        pytest.warns(SpecdecDrafterWarning, match="from_anchor=false; the latter is used"),
        load_drafter(folder, *BLOCK.demo(), block="short") as loaded,
    ):
        found = BLOCK.drafted(BLOCK.prompts()[2], loaded, 3)
    assert found.stats.accepted_per_position == (
        BLOCK.drafted(BLOCK.prompts()[2], BLOCK.load(), 3).stats.accepted_per_position
    )
    with pytest.warns(SpecdecDrafterWarning, match="as asked"):
        wrong = load_drafter(folder, *BLOCK.demo(), block="short", from_anchor=True)
    with wrong:
        worse = BLOCK.drafted(BLOCK.prompts()[2], wrong, 3)
    assert worse.tokens == found.tokens
    assert worse.stats.target_forwards > 1.4 * found.stats.target_forwards


def test_another_models_drafter_is_refused_unless_nobody_looks(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = changed(tmp_path / "d", lambda _: None)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    drawn = {name: mx.random.normal(w.shape, key=mx.random.key(1)) for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), drawn)
    with pytest.raises(
        ArtifactError, match="it is another model's, or hardly trained; give the one of this"
    ):
        load_drafter(folder, *BLOCK.demo())
    with load_drafter(folder, *BLOCK.demo(), probe=False) as loaded:
        found = BLOCK.drafted(BLOCK.prompts()[1], loaded, 2, max_tokens=6)
    assert found.tokens == BLOCK.greedy(BLOCK.prompts()[1])[:6]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tap_shift": 2}, "tap_shift is 2; give -1, 0 or 1"),
        ({"tap_shift": True}, "tap_shift is True"),
        ({"from_anchor": "yes"}, "from_anchor is 'yes'; give true or false"),
        ({"block": "long"}, "block is 'long'; give short or whole"),
        ({"probe": 1}, "probe is 1"),
        ({"confidence": 0.5}, "this drafter has no confidence head"),
        ({"confidence": 2}, "confidence is 2; give a number of 0 to 1"),
        ({"bits": 7}, "bits is 7; give one of"),
        ({"group_size": 64}, "group_size is 64 without bits"),
        ({"width": 3}, "dflash has no option width; its options are"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        load_drafter("demo-qwen3-dflash", *BLOCK.demo(), **options)
