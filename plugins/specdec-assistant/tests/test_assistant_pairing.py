"""An assistant is held to its target, rows to their drafter, and options to what they mean."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from assistant_folders import load, named, refused, rewritten
from assistant_lender import Lender, Sampling, row_of
from assistant_synthetic import BACKBONE, CASES, VOCABULARY
from assistant_targets import bound, write_random
from attrs import evolve

from specdec.contract import AssistantDonors
from specdec.errors import (
    ArtifactError,
    CheckpointError,
    ClosedError,
    ContractError,
    OptionError,
    SpecdecError,
    TargetLacksError,
)
from specdec.plugins import Artifact, LoadRequest
from specdec.testing import TinyTarget
from specdec_assistant import loading
from specdec_assistant.loading import load_assistant
from specdec_assistant.plugin import DEFAULT_WIDTH, detects
from specdec_assistant.tiny import FULL, SLIDING, tiny_assistant

if TYPE_CHECKING:
    from pathlib import Path


# The target.


def test_a_target_without_the_port_is_refused_before_a_file_is_looked_at(tmp_path: Path) -> None:
    said = refused(TargetLacksError, tmp_path / "nowhere", TinyTarget(lacks=["assistant_rows"]))
    assert "assistant_rows" in said


def test_what_a_gemmas_settings_tell_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    config, _ = write_random(tmp_path / "of-gemma4", "gemma4")
    load(tmp_path / "of-gemma4", bound("gemma4"))
    said = refused(TargetLacksError, tmp_path / "of-gemma4", bound("gemma4 of full layers"))
    assert "sliding_attention" in said
    said = refused(ArtifactError, tmp_path / "of-gemma4", bound("gemma3"))
    assert "head_dim or global_head_dim is 32, but the target has 16 in its full_att" in said
    config["text_config"] |= {"num_attention_heads": 3}
    (tmp_path / "of-gemma4" / "config.json").write_text(json.dumps(config))
    said = refused(ArtifactError, tmp_path / "of-gemma4", bound("gemma4"))
    assert "num_attention_heads is 3, but the target has 2 heads of keys" in said


@pytest.mark.parametrize("lends", [{"full"}, {"sliding"}, set[str]()])
def test_a_target_that_lends_too_little_is_refused_when_it_is_loaded(
    lends: set[str], tmp_path: Path
) -> None:
    folder = CASES["whole"].write(tmp_path)
    load(folder, Lender())
    said = refused(TargetLacksError, folder, Lender(lends=frozenset(lends)))
    missing = "sliding_attention" if "full" in lends else "full_attention"
    assert f"K/V of a {missing} layer" in said


def kv(heads: int, size: int, length: int = 3) -> tuple[mx.array, mx.array]:
    return mx.ones((1, heads, length, size)), mx.ones((1, heads, length, size))


@pytest.mark.parametrize(
    ("donors", "error", "said"),
    [
        (
            AssistantDonors(kv(2, 16), kv(1, 30), (3,)),
            ArtifactError,
            "is 32, but the target has 30",
        ),
        (AssistantDonors(kv(3, 16), kv(1, 32), (3,)), ArtifactError, "is 4, but the target has 3"),
        (AssistantDonors(None, kv(1, 32), (3,)), TargetLacksError, "sliding_attention"),
        (AssistantDonors(kv(2, 16), None, (3,)), TargetLacksError, "full_attention"),
        (AssistantDonors(kv(2, 16), kv(1, 32), (4,)), ContractError, "[3] tokens"),
        (
            AssistantDonors((kv(2, 16)[0], kv(2, 12)[1]), kv(1, 32), (3,)),
            ArtifactError,
            "head_dim is 16, but the target has 12 in values",
        ),
    ],
)
def test_what_only_a_round_shows_is_refused_there_and_no_round_is_open(
    donors: AssistantDonors, error: type[SpecdecError], said: str, tmp_path: Path
) -> None:
    target: Any = Lender(donors=donors)
    grouped: Any = load(CASES["whole"].write(tmp_path), target).provider.grouped
    row = row_of(grouped, 3, mx.ones((1, 1, BACKBONE)))
    group = grouped.open(target=target, sampling=Sampling(), checkpoints=[row])
    with pytest.raises(error) as caught:
        group.draft([1], [2], [0])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    target.donors = AssistantDonors(kv(2, 16), kv(1, 32), (3,))
    assert len(group.draft([1], [2], [0])[0]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "assistant-2"},
        {"arrays": {"hidden": mx.ones((1, 1, BACKBONE + 1))}},
        {"arrays": {"hidden": mx.ones((1, BACKBONE))}},
        {"arrays": {"hidden": mx.ones((1, 1, BACKBONE), mx.int32)}},
        {"arrays": {}},
        {"metadata": {"tokens": 4}},
        {"metadata": {}},
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    target: Any = Lender()
    grouped: Any = load(CASES["whole"].write(tmp_path), target).provider.grouped
    good = row_of(grouped, 3, mx.ones((1, 1, BACKBONE)))
    grouped.open(target=target, sampling=Sampling(), checkpoints=[good]).close()
    bad = evolve(good, attachment=evolve(good.attachment, **change))
    with pytest.raises(CheckpointError):
        grouped.open(target=target, sampling=Sampling(), checkpoints=[bad])
    with pytest.raises(CheckpointError):
        grouped.open(
            target=target, sampling=Sampling(), checkpoints=[evolve(good, namespace="other")]
        )
    with pytest.raises(CheckpointError, match="cold row"):
        grouped.open(target=target, sampling=Sampling(), checkpoints=[None])


# Options.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position": "constant"}, "no option position; its options are positions,"),
        ({"positions": "moving"}, "positions is 'moving'; give constant or advancing"),
        ({"positions": 1}, "positions is 1"),
        ({"attention_scale": 0.25}, "attention_scale is 0.25; give config or head_dim"),
        ({"bits": 7}, "bits is 7"),
        ({"group_size": 32}, "group_size is 32 without bits"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refused(OptionError, CASES["whole"].write(tmp_path), **options)


@pytest.mark.parametrize("case", ["whole", "sparse"])
def test_packed_weights_stay_packed_and_plain_ones_are_packed_as_asked(
    case: str, tmp_path: Path
) -> None:
    folder = CASES[case].write(tmp_path)
    plain, packed = load(folder), load(folder, bits=8, group_size=32)
    one, other = (each.provider for each in (plain, packed))
    assert other.weight_bytes < one.weight_bytes
    assert one.grouped.checkpoint_namespace != other.grouped.checkpoint_namespace
    models: Any = [each.grouped for each in (one, other)]
    whole, small = (each._own.model for each in models)
    normed = mx.random.normal((2, 32), key=mx.random.key(1))
    told = [model.score(normed, VOCABULARY) for model in (whole, small)]
    if told[0][1] is not None:
        assert mx.array_equal(told[0][1], told[1][1]).item(), "centroids are kept whole"
    assert mx.allclose(told[0][0], told[1][0], rtol=0.0, atol=0.3).item()

    def pack(held: dict[str, mx.array]) -> None:
        for name in [n for n in held if n.endswith("_proj.weight") or "embed_tokens" in n]:
            weight = held.pop(name)
            if weight.shape[-1] % 32:
                held[name] = weight
                continue
            path = name.removesuffix(".weight")
            parts = mx.quantize(weight, group_size=32, bits=8)
            held |= {
                f"{path}.{part}": array
                for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
            }

    stored = load(rewritten(folder, pack))
    grouped: Any = stored.provider.grouped
    again = grouped._own.model.score(normed, VOCABULARY)
    assert mx.array_equal(again[0], told[1][0]).item()
    assert "packed already" in refused(OptionError, folder, bits=4, group_size=32)


def test_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sized = CASES["whole"].write(tmp_path / "a"), tmp_path / "b"
    CASES["whole"].write(sized, block_size=6)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert [load(each).num_draft_tokens for each in (plain, sized)] == [2, 2]
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert [load(each).num_draft_tokens for each in (plain, sized)] == [DEFAULT_WIDTH, 5]
    target: Any = Lender()
    request = LoadRequest(kind="assistant", target=target, path=plain, num_draft_tokens=7)
    assert load_assistant(request).num_draft_tokens == 7
    assert loading.CPU_WIDTH == 2


def test_gemma_assistants_are_recognised_and_others_are_not(tmp_path: Path) -> None:
    for number, (kind, wanted) in enumerate(
        {
            "gemma4_assistant": True,
            "gemma4_unified_assistant": True,
            "muse_glimmer_assistant": False,
            "gemma4_text": False,
        }.items()
    ):
        folder = named(tmp_path / str(number), kind)
        assert detects(Artifact(folder)) == wanted, kind
    load(tmp_path / "1")


def test_a_drafter_that_is_closed_opens_nothing() -> None:
    provider = tiny_assistant(layers=(FULL, SLIDING))
    assert provider.grouped.row_bytes(TinyTarget(), 10_000) == 32 * 4
    provider.close()
    with pytest.raises(ClosedError):
        provider.grouped.open_prefill(target=TinyTarget(), checkpoints=[None])
