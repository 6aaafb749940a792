"""A head is loaded from wherever it was published, through every door that specdec has.

Wherever it comes from it is the same head, so its namespace, which is made from its weights, has
to be the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from mtp_demo import demo, greedy, head, prompts
from mtp_files import demo_folder, demo_head, prefixed, split_release
from mtp_folders import without_head
from mtp_synthetic import GLM_TYPES, write_glm, write_qwen3_5, write_qwen3_next
from mtp_synthetic import split_release as split_off

from specdec import bind_target, load_drafter, stream_generate
from specdec.cli import main
from specdec.drafting.modules import parameters_of
from specdec.plugins import default_registry

if TYPE_CHECKING:
    from pathlib import Path

    from specdec import LoadedDrafter


def namespace(loaded: LoadedDrafter) -> str:
    found: str = loaded.provider.grouped.checkpoint_namespace
    return found


def state() -> list[int]:
    key: Any = mx.random.state
    words: list[int] = key[0].tolist()
    return words


USUAL = 1 if mx.default_device() == mx.Device(mx.cpu) else 2


# Doors.


def test_a_gpu_drafts_as_many_as_a_release_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert load_drafter("mtp", model, tokenizer, probe=False).num_draft_tokens == 2
    assert load_drafter("mtp", model, tokenizer, num_draft_tokens=5).num_draft_tokens == 5


def test_a_release_carries_its_own_head_and_native_names_it() -> None:
    model, tokenizer = demo()
    native = load_drafter("native", model, tokenizer, num_draft_tokens=3)
    assert (native.kind, native.num_draft_tokens) == ("mtp", 3)
    assert namespace(native) == namespace(head())
    chosen = default_registry().select(target=bind_target(model, tokenizer))
    assert (chosen.name, chosen.default_width) == ("mtp", 2)
    assert head().num_draft_tokens == USUAL
    assert load_drafter("native", model, tokenizer).num_draft_tokens == USUAL
    by_path = load_drafter(demo_folder(), model, probe=False)
    assert (by_path.kind, namespace(by_path)) == ("mtp", namespace(head()))
    found = stream_generate(model, tokenizer, prompts()[2], max_tokens=8, drafter="native")
    assert tuple(each.token for each in found) == greedy(prompts()[2])[:8]
    own = load_drafter("native", model, tokenizer, chain="own")
    assert namespace(own) == namespace(head(chain="own")) != namespace(head())


def test_a_split_release_a_companion_and_a_sidecar_are_the_same_head(tmp_path: Path) -> None:
    folder = without_head(tmp_path / "target")
    model, tokenizer = mlx_lm.load(str(folder))
    split = load_drafter(split_release(tmp_path / "split"), model, tokenizer)
    assert (split.kind, split.num_draft_tokens) == ("mtp", USUAL)
    sidecar = folder / "mtp.safetensors"
    mx.save_safetensors(str(sidecar), prefixed(demo_head(), "mtp."), metadata={"format": "pt"})
    beside = load_drafter("mtp", model, tokenizer)
    sidecar.unlink()
    split_release(folder / "mtp")
    companion = load_drafter("native", model, tokenizer)
    names = {namespace(each) for each in (split, beside, companion)}
    assert names == {namespace(head())}
    for loaded in (split, beside, companion):
        found = stream_generate(model, tokenizer, prompts()[2], max_tokens=6, drafter=loaded)
        assert tuple(each.token for each in found) == greedy(prompts()[2])[:6]
        loaded.close()


@pytest.mark.parametrize("model_type", GLM_TYPES)
def test_next_token_layers_load_from_their_release_by_kind(model_type: str, tmp_path: Path) -> None:
    model, _ = load_model(write_glm(tmp_path, model_type))
    loaded = load_drafter(tmp_path, model, kind="nextn", probe=False)
    assert (loaded.kind, loaded.num_draft_tokens) == ("nextn", 1)
    again = load_drafter(tmp_path, model, probe=False)
    assert (again.kind, namespace(again)) == ("nextn", namespace(loaded))


# The command.


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_lists_detects_and_drafts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = run(capsys, "plugins")
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert (status, err) == (0, "")
    assert lines["mtp"][1] == lines["nextn"][1] == "specdec-mtp"
    assert lines["mtp"][-1] == lines["nextn"][-1] == "ok"
    split = split_release(tmp_path / "split")
    for folder in (demo_folder(), split):
        status, out, err = run(capsys, "detect", str(folder))
        assert (status, err) == (0, "")
        assert "choice: mtp, by" in out
    asked = ("generate", "--model", "demo-qwen3_5", "--prompt", "import numpy", "--max-tokens", "8")
    texts = []
    for drafter in ("none", "mtp", "native", str(split)):
        extra = () if drafter == "none" else ("--drafter", drafter, "--num-draft-tokens", "1")
        status, out, err = run(capsys, *asked, "--json", *extra)
        assert (status, err) == (0, "")
        found = json.loads(out)
        texts.append(found["tokens"])
        assert found["drafter"] == (None if drafter == "none" else "mtp")
        assert (found["accepted"] > 0) == (drafter != "none")
    assert all(text == texts[0] for text in texts)


# What loading leaves, and what it counts.


def test_loading_leaves_everybodys_random_numbers_alone() -> None:
    demo()  # mlx-lm draws while it loads
    for seed in (0, 7, 2**40 + 3):
        mx.random.seed(seed)
        mx.random.normal((3,))
        before = state()
        load_drafter("mtp", *demo()).close()
        assert state() == before
        load_drafter("mtp", *demo(), bits=4, group_size=32, probe=False).close()
        assert state() == before, "of a head that is quantized"
    mx.random.seed(8)
    assert state() != before, "the seed is seen here"


def test_a_namespace_follows_weights_and_settings_alone() -> None:
    names = {namespace(head())}
    assert namespace(load_drafter("mtp", *demo(), probe=False)) in names
    assert namespace(load_drafter("mtp", *demo(), probe=False, bits=0)) in names
    assert namespace(load_drafter("mtp", *demo(), hidden="post_norm", num_draft_tokens=4)) in names
    settings: tuple[dict[str, Any], ...] = (
        {"hidden": "pre_norm"},
        {"chain": "own"},
        {"feed": "raw"},
        {"history": "own"},
        {"norm_shift": False},
        {"bits": 4},
        {"bits": 8},
        {"bits": 4, "group_size": 32},
    )
    names |= {namespace(head(**each)) for each in settings}
    assert len(names) == 1 + len(settings)


def test_weights_are_counted_and_let_go() -> None:
    loaded = load_drafter("mtp", *demo(), probe=False)
    stored = sum(weight.nbytes for weight in demo_head().values())
    assert loaded.provider.weight_bytes == stored
    provider: Any = loaded.provider
    assert provider.module is not None
    loaded.close()
    loaded.close()
    assert provider.module is None


def test_forced_norm_readings_differ_by_the_one(tmp_path: Path) -> None:
    model, _ = load_model(write_qwen3_5(tmp_path / "full"))
    folder = split_off(tmp_path / "full", tmp_path / "split")
    held: dict[object, Any] = {}
    for shift in (None, True, False):
        loaded = load_drafter(folder, model, norm_shift=shift, probe=False)
        provider: Any = loaded.provider
        held[shift] = parameters_of(provider.module)["norm.weight"]
    assert mx.array_equal(held[None], held[False]).item(), "a split release is finished"
    assert mx.allclose(held[True], held[False] + 1.0).item()


# Packed heads.


def packed(folder: Path, packing: dict[str, dict[str, Any]], model: Any) -> dict[str, mx.array]:
    """A split release with modules packed as ``packing`` says by suffix, and its tensors."""
    loaded = load_drafter(folder, model, kind="mtp", probe=False)
    module: Any = loaded.provider
    module = module.module
    by_name = {k: v for k, v in packing.items() if k}

    def how(path: str, each: Any) -> bool | dict[str, Any]:
        if not hasattr(each, "to_quantized") or path.endswith("gate"):
            return False
        return next((v for k, v in by_name.items() if path.endswith(k)), packing[""])

    quantize(module, class_predicate=how)
    tensors = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    return tensors


PACKINGS: dict[str, dict[str, dict[str, Any]]] = {
    "4 bits of 32": {"": {"group_size": 32, "bits": 4}},
    "5, 8 and 3 bits": {
        "": {"group_size": 32, "bits": 5},
        "k_proj": {"group_size": 64, "bits": 8},
        "fc": {"group_size": 128, "bits": 3},
    },
    "mxfp4": {"": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
    "mxfp8 and nvfp4": {
        "": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        "o_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    },
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("release", ["dense", "experts", "next"])
def test_a_packed_head_loads_as_it_is_packed(release: str, name: str, tmp_path: Path) -> None:
    if release == "next":
        full = write_qwen3_next(tmp_path / "full")
    else:
        full = write_qwen3_5(tmp_path / "full", experts=4 if release == "experts" else 0)
    model, _ = load_model(full)
    folder = split_off(full, tmp_path / "split")
    plain = load_drafter(folder, model, kind="mtp", probe=False)
    packing = PACKINGS[name]
    tensors = packed(folder, packing, model)
    before = state()
    loaded = load_drafter(folder, model, kind="mtp", probe=False)
    assert state() == before, "the random numbers are somebody else's"
    provider: Any = loaded.provider
    assert loaded.provider.weight_bytes == sum(each.nbytes for each in tensors.values())
    assert loaded.provider.weight_bytes < plain.provider.weight_bytes
    joint = provider.module.fc
    wanted = packing.get("fc", packing[""])
    assert isinstance(joint, QuantizedLinear)
    assert (joint.bits, joint.group_size) == (wanted["bits"], wanted["group_size"])
    assert joint.mode == wanted.get("mode", "affine")
    for key, weight in parameters_of(provider.module).items():
        assert mx.array_equal(weight, tensors[key]).item(), key
