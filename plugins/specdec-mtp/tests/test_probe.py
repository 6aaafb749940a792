"""A head is tried when it is loaded: the right reading agrees with the target, others do not."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

import specdec
from specdec.contract import ContextKind
from specdec.drafting.modules import parameters_of
from specdec.drafting.probe import probe_tokens
from specdec.errors import ArtifactError, SpecdecDrafterWarning
from specdec.plugins.models import find_model
from specdec_mtp.norms import NORM_NAMES, shifted
from specdec_mtp.probe import How, probe_head

if TYPE_CHECKING:
    from pathlib import Path

RIGHT = How(ContextKind.POST_NORM, "once")


@cache
def demo() -> tuple[Any, Any]:
    return specdec.load_model("demo-qwen3_5")


def demo_tensors() -> dict[str, mx.array]:
    folder = find_model("demo-qwen3_5")
    assert folder is not None
    held: Any = mx.load(str(folder / "model.safetensors"))
    return {name: array for name, array in held.items() if name.startswith("mtp.")}


def split(folder: Path, tensors: dict[str, mx.array], metadata: dict[str, str] | None) -> Path:
    """A release of the head alone, with these tensors."""
    folder.mkdir()
    source = find_model("demo-qwen3_5")
    assert source is not None
    text = (source / "config.json").read_text().replace('"qwen3_5"', '"qwen3_5_mtp"', 1)
    (folder / "config.json").write_text(text)
    named = {name.removeprefix("mtp."): array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named, metadata)
    return folder


def load(path: Path | str, **options: Any) -> tuple[specdec.LoadedDrafter, list[str]]:
    model, tokenizer = demo()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpecdecDrafterWarning)
        loaded = specdec.load_drafter(path, model, tokenizer, kind="mtp", **options)
    return loaded, [str(w.message) for w in caught if w.category is SpecdecDrafterWarning]


def norms_of(loaded: specdec.LoadedDrafter) -> dict[str, mx.array]:
    provider: Any = loaded.provider
    return {name: parameters_of(provider.module)[name] for name in NORM_NAMES}


def reading_of(loaded: specdec.LoadedDrafter) -> Any:
    grouped: Any = loaded.provider.grouped
    return grouped.reading


def test_the_right_reading_agrees_most_and_the_head_is_left_as_it_was() -> None:
    model, tokenizer = demo()
    loaded = specdec.load_drafter("mtp", model, tokenizer)
    provider: Any = loaded.provider
    before = norms_of(loaded)
    stored = shifted(before, -1.0)
    norms = {"never": stored, "once": before, "twice": shifted(before, 1.0)}
    tokens = probe_tokens(tokenizer, 8192)
    assert tokens is not None
    assert len(tokens) > 60
    probe = probe_head(loaded.target, provider.module, tokens, norms)
    assert probe is not None
    assert len(probe.agreement) == 6
    assert probe.best == RIGHT
    assert probe.agreement[RIGHT] > 0.6
    assert all(
        probe.agreement[RIGHT] - share > 0.1
        for how, share in probe.agreement.items()
        if how != RIGHT
    )
    after = norms_of(loaded)
    assert all(mx.array_equal(after[name], before[name]).item() for name in NORM_NAMES)


def test_a_sound_head_is_loaded_without_a_word() -> None:
    loaded, said = load("mtp")
    assert said == []
    assert reading_of(loaded).context is ContextKind.POST_NORM


@pytest.mark.parametrize(("by", "file_says"), [(0.0, "shifted"), (1.0, "raw")])
def test_a_file_that_lies_about_its_norms_is_read_as_it_agrees(
    tmp_path: Path, by: float, file_says: str
) -> None:
    names = {f"mtp.{name}" for name in NORM_NAMES}
    tensors = {
        name: array + by if name in names else array for name, array in demo_tensors().items()
    }
    told = {"format": "mlx"} if file_says == "shifted" else None
    path = split(tmp_path / "head", tensors, told)
    right, _ = load("mtp")
    loaded, said = load(path)
    want, got = norms_of(right), norms_of(loaded)
    assert all(mx.array_equal(got[name], want[name]).item() for name in NORM_NAMES)
    if said:
        assert "the latter is used" in said[0]
    forced, complaint = load(path, norm_shift=by != 0.0)
    assert not mx.array_equal(norms_of(forced)["norm.weight"], want["norm.weight"]).item()
    assert len(complaint) == 1
    assert "as asked" in complaint[0]
    assert str(RIGHT) in complaint[0]


def test_a_file_that_is_at_odds_with_itself_is_read_as_it_agrees(tmp_path: Path) -> None:
    tensors = demo_tensors()
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{name}.weight"] = tensors[f"mtp.{name}.weight"] + 1.0
    loaded, _ = load(split(tmp_path / "head", tensors, {"format": "mlx"}))
    right, _ = load("mtp")
    want, got = norms_of(right), norms_of(loaded)
    assert all(mx.array_equal(got[name], want[name]).item() for name in NORM_NAMES)


def test_options_are_kept_and_what_would_fit_is_said() -> None:
    loaded, said = load("mtp", hidden="pre_norm")
    assert reading_of(loaded).context is ContextKind.PRE_NORM
    assert len(said) == 1
    assert str(RIGHT) in said[0]
    assert "\n" not in said[0]


def test_another_model_s_head_is_refused_unless_nobody_looks(tmp_path: Path) -> None:
    keys = mx.random.split(mx.random.key(3), 15)
    strange = {
        name: array if array.ndim == 1 else mx.random.normal(array.shape, key=key) * 0.05
        for (name, array), key in zip(sorted(demo_tensors().items()), keys, strict=True)
    }
    path = split(tmp_path / "head", strange, None)
    with pytest.raises(ArtifactError, match=r"expects \d%") as raised:
        load(path)
    assert "probe=false" in str(raised.value)
    assert "\n" not in str(raised.value)
    loaded, said = load(path, probe=False)
    assert said == []
    loaded.close()


def test_without_a_tokenizer_of_the_target_s_ids_nothing_is_tried() -> None:
    assert probe_tokens(None, 100) is None
    _, tokenizer = demo()
    assert probe_tokens(tokenizer, 10) is None

    class Short:
        def encode(self, text: str) -> list[int]:
            return [1, 2, 3]

    class Broken:
        def encode(self, text: str) -> list[int]:
            raise ValueError(text)

    assert probe_tokens(Short(), 100) is None
    assert probe_tokens(Broken(), 100) is None
