"""What cannot be loaded is refused in one line: what it is, what it has, and the way out."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_model
from mtp_demo import demo
from mtp_files import demo_folder, demo_head, prefixed, split_release, write
from mtp_folders import edited, linked, without_head
from mtp_synthetic import split_release as split_off
from mtp_synthetic import write_qwen3_5

from specdec import load_drafter
from specdec.cli import main
from specdec.errors import (
    ArtifactError,
    OptionError,
    SpecdecError,
    TargetLacksError,
    UnrecognizedArtifactError,
)
from specdec.plugins import LoadRequest
from specdec.targets import MlxLmTarget
from specdec_mtp.plugin import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, mx.array]


def refused(error: type[SpecdecError], ask: Callable[[], Any]) -> str:
    """The message of what ``ask`` raises, which has to be one line."""
    with pytest.raises(error) as caught:
        ask()
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 1000
    return said


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 3}, "mtp has no option depth; its options are hidden, chain, feed, history"),
        ({"zeta": 1, "alpha": 2}, "mtp has no option alpha, zeta; its options are"),
        ({"hidden": "post"}, "hidden is 'post'; give post_norm or pre_norm"),
        ({"hidden": "taps"}, "hidden is 'taps'; give post_norm or pre_norm"),
        ({"hidden": ["pre_norm"]}, "hidden is ['pre_norm']; give post_norm or pre_norm"),
        ({"chain": "false"}, "chain is 'false'; give true or own"),
        ({"chain": True}, "chain is True; give true or own"),
        ({"feed": "norm"}, "feed is 'norm'; give normed or raw"),
        ({"history": 0}, "history is 0; give prompt or own"),
        ({"history": {}}, "history is {}; give prompt or own"),
        ({"norm_shift": "true"}, "norm_shift is 'true'; give true or false"),
        ({"norm_shift": 1}, "norm_shift is 1; give true or false"),
        ({"norm_shift": "a\nb"}, "norm_shift is "),
        ({"group_size": 64}, "group_size is 64 without bits; give bits=4, or neither"),
        ({"bits": "4"}, "bits is '4'; give one of"),
        ({"bits": 4.0}, "bits is 4.0; give one of"),
        ({"bits": True}, "bits is True; give one of"),
        ({"bits": 4, "group_size": "64"}, "group_size is '64'; give one of"),
        ({"bits": 7}, "bits is 7; give one of 2, 3, 4"),
        ({"bits": 0, "group_size": 64}, "bits is 0"),
        ({"bits": 0.0}, "bits is 0.0"),
        ({"bits": False}, "bits is False"),
        ({"bits": -4}, "bits is -4"),
        ({"bits": 10**30}, f"bits is {10**30}"),
        ({"bits": 4, "group_size": 0}, "group_size is 0"),
        ({"bits": 4, "group_size": 48}, "group_size is 48; give one of 32, 64, 128"),
        ({"bits": 4, "group_size": 100_000}, "group_size is 100000; give one of"),
        ({"bits": 4, "group_size": -64}, "group_size is -64; give one of"),
        ({"probe": "no"}, "probe is 'no'; give"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0; give 1 or more"),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_named(options: dict[str, Any], message: str) -> None:
    said = refused(OptionError, lambda: load_drafter("mtp", *demo(), **{"probe": False, **options}))
    assert message in said


# Targets.


def test_without_a_known_folder_the_way_out_is_said() -> None:
    model, _ = demo()
    said = refused(ArtifactError, lambda: load_drafter("mtp", model))
    assert said.startswith("drafter mtp: where the model was loaded from is not known")
    assert said.endswith("or the head's folder")
    said = refused(ArtifactError, lambda: load_drafter("native", model))
    assert said.endswith("or a drafter's folder")
    load_drafter(demo_folder(), model, probe=False).close()


def test_a_target_of_another_size_is_refused(tmp_path: Path) -> None:
    small = write_qwen3_5(tmp_path / "whole")
    model, _ = load_model(small)
    text = "has hidden_size 384, but the target has 64; give the one of this target"
    for split in (False, True):
        folder = split_release(tmp_path / "split") if split else demo_folder()
        said = refused(ArtifactError, partial(load_drafter, folder, model))
        assert text in said
        assert said.endswith("; a whole model drafts as the kind two-model") != split


def test_a_head_whose_tensors_do_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    model, _ = load_model(write_qwen3_5(tmp_path / "whole"))
    folder = split_release(tmp_path / "split")
    edited(folder, lambda config: config["text_config"].update(hidden_size=64))
    said = refused(SpecdecError, lambda: load_drafter(folder, model))
    assert "of the mtp head has shape" in said
    assert "give the one of this target" in said
    assert "64" in said
    assert "384" in said


def test_a_target_without_embedding_and_head_to_share_is_refused() -> None:
    class Closed(MlxLmTarget):
        @property
        def recurrent_mtp(self) -> Any:
            return None

    model, _ = demo()
    target = Closed(model, demo_folder())
    asked = LoadRequest(kind="mtp", target=target)
    said = refused(TargetLacksError, lambda: load(asked))
    assert "recurrent_mtp" in said
    assert "the mtp head" in said


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    # The same sizes, other weights: only the probe can tell.
    config = json.loads((demo_folder() / "config.json").read_text())
    keys = iter(mx.random.split(mx.random.key(1), 40))
    drawn = {
        name: weight
        if weight.ndim == 1
        else (mx.random.normal(weight.shape, key=next(keys)) * 0.05).astype(weight.dtype)
        for name, weight in demo_head().items()
    }
    folder = write(tmp_path, {"model.safetensors": prefixed(drawn, "mtp.")}, config)
    said = refused(ArtifactError, lambda: load_drafter(folder, *demo(), kind="mtp"))
    assert "it is another model's" in said
    assert "probe=false" in said
    load_drafter(folder, *demo(), kind="mtp", probe=False).close()


# Tensors.


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: mx.zeros(shape)})


def _packed(groups: int) -> Callable[[Tensors], object]:
    """4 bits with scales of floats and no offsets: 64 to a group are no format, 32 are mxfp4's."""
    packed = {"fc.weight": mx.zeros((64, 16), mx.uint32), "fc.scales": mx.zeros((64, groups))}
    return lambda tensors: tensors.update(packed)


NAME = "layers.0.self_attn.k_proj.weight"
CHANGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "none of a projection": (_without(NAME), f"the mtp head has no {NAME}; give a complete one"),
    "none of a norm": (
        _without("layers.0.self_attn.q_norm.weight"),
        "has no layers.0.self_attn.q_norm.weight",
    ),
    "none of the last norm": (_without("norm.weight"), "lacks norm.weight; give a complete"),
    "one more": (_with("layers.0.extra.weight", 4), "has layers.0.extra.weight, which"),
    "a bias too many": (_with("fc.bias", 64), "has fc.bias, which"),
    "a gate too many": (_with("layers.0.mlp.gate.weight", 4, 64), "layers.0.mlp.gate.weight"),
    "a wide projection": (
        _with(NAME, 32, 72),
        f"{NAME} of the mtp head has shape (32, 72), but its",
    ),
    "a long norm": (
        _with("norm.weight", 65),
        "norm.weight of the mtp head has shape (65,), but its",
    ),
    "a flat matrix": (
        _with("fc.weight", 8192),
        "fc.weight of the mtp head has shape (8192,), but its",
    ),
    "a scalar": (_with("fc.weight"), "fc.weight of the mtp head has shape (), but its"),
    "scales of no format": (_packed(2), "fc.scales has shape (64, 2) without biases"),
    "scales of another type": (_packed(4), "fc.scales"),
    "a packed weight of floats": (
        lambda tensors: tensors.update(
            {
                "fc.weight": mx.zeros((64, 16)),
                "fc.scales": mx.zeros((64, 4)),
                "fc.biases": mx.zeros((64, 4)),
            }
        ),
        "fc.weight",
    ),
    "scales of nothing": (
        _with("fc.scales", 64, 0),
        "fc.weight has shape (64, 128) and fc.scales has shape (64, 0), which is no packing",
    ),
    "no joint weight": (_without("fc.weight"), "no tensors of an mtp head are there"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_does_not_fit_is_named(change: str, tmp_path: Path) -> None:
    model, _ = load_model(write_qwen3_5(tmp_path / "full"))
    folder = split_off(tmp_path / "full", tmp_path / "split")
    file = folder / "model.safetensors"
    tensors = mx.load(str(file))
    assert isinstance(tensors, dict)
    mx.eval(tensors)
    load_drafter(folder, model, probe=False).close()
    edit, message = CHANGES[change]
    edit(tensors)
    mx.save_safetensors(str(file), tensors, metadata={"format": "mlx"})
    said = refused(ArtifactError, lambda: load_drafter(folder, model, kind="mtp", probe=False))
    assert message in said


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    folder = split_release(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    said = refused(ArtifactError, lambda: load_drafter(folder, *demo(), kind="mtp"))
    assert f"{file} is no readable safetensors file" in said
    assert "download it again" in said


# The command.


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The line that a failing command says."""
    status = main(argv)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


def test_a_declared_head_without_tensors_is_one_line_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = without_head(tmp_path)
    model, tokenizer = mlx_lm.load(str(folder))
    way_out = f"give the folder of the split release, or put it at {folder / 'mtp'}"
    for drafter in ("mtp", "native"):
        said = refused(ArtifactError, partial(load_drafter, drafter, model, tokenizer))
        assert "declares a prediction layer in config.json" in said
        assert said.endswith(way_out)
        asked = ("generate", "--model", str(folder), "--prompt", "x", "--max-tokens", "2")
        assert way_out in command(capsys, *asked, "--drafter", drafter)


def test_a_target_that_declares_none_is_one_line_everywhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "two-model")  # which takes any whole model
    folder = without_head(tmp_path)
    edited(folder, lambda config: config["text_config"].pop("mtp_num_hidden_layers"))
    model, tokenizer = mlx_lm.load(str(folder))
    said = refused(ArtifactError, lambda: load_drafter("mtp", model, tokenizer))
    assert f"{folder} neither declares nor holds an mtp head" in said
    refused(UnrecognizedArtifactError, lambda: load_drafter("native", model, tokenizer))
    asked = ("generate", "--model", str(folder), "--prompt", "x", "--drafter")
    assert "neither declares nor holds" in command(capsys, *asked, "mtp")
    assert "declares no drafter of its own" in command(capsys, *asked, "native")
    status = main(("detect", str(folder)))
    out, err = capsys.readouterr()
    assert (status, err.count("\n")) == (2, 1)
    assert "choice" not in out
    assert "no kind recognises" in err


def test_heads_of_two_layers_are_refused(tmp_path: Path) -> None:
    folder = linked(tmp_path)
    edited(folder, lambda config: config["text_config"].update(mtp_num_hidden_layers=2))
    said = refused(ArtifactError, lambda: load_drafter(folder, *demo(), kind="mtp"))
    assert "2 prediction layers in its config" in said
