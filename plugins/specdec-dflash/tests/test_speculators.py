"""What the keys of speculators and of DeepSpec's releases say, and what is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from deepspec_driven import loaded
from deepspec_files import edited, proposal, retensored
from deepspec_synthetic import (
    DRAFT_IDS,
    RELEASES,
    VOCABULARY,
    target_model,
    write_gemma,
    write_lfm2,
    write_qwen,
    write_release,
    write_speculators,
)
from demo_texts import DemoTexts
from scripted import tiny_tokenizer

from specdec import load_drafter
from specdec.errors import ArtifactError, UnrecognizedArtifactError
from specdec.plugins import default_registry
from specdec.targets import MlxLmTarget
from specdec_dflash.files import read_files
from specdec_dflash.packagings import kind_of, read_config

if TYPE_CHECKING:
    from pathlib import Path

    from specdec_dflash.config import BlockConfig

BLOCK = DemoTexts("demo-qwen3", "demo-qwen3-dflash")


def read(folder: Path) -> BlockConfig:
    return read_config("the drafter", read_files(folder).config)


# What its keys say.


@pytest.mark.parametrize("kind", ["dspark", "dflash", "dflash2"])
def test_numbers_of_hidden_states_are_one_more_than_layers(kind: str, tmp_path: Path) -> None:
    assert read(write_speculators(tmp_path / "one", kind)).taps == (0, 2)
    numbers = [2, 1, 4]
    folder = write_speculators(tmp_path / "two", kind, aux_hidden_state_layer_ids=numbers)
    assert read(folder).taps == (1, 0, 3), "in the order of the release"


@pytest.mark.parametrize(
    ("changes", "from_anchor"),
    [
        ({"speculators_config": proposal(5), "sample_from_anchor": None}, True),
        ({"speculators_config": proposal(4), "sample_from_anchor": None}, False),
        ({"speculators_config": None, "sample_from_anchor": True}, True),
        ({"speculators_config": None, "sample_from_anchor": False}, False),
        ({"speculators_config": proposal(3), "sample_from_anchor": True}, True),
        ({"speculators_config": None, "sample_from_anchor": None}, False),
    ],
)
def test_the_first_slot_follows_the_number_of_drafts_then_the_flag(
    changes: dict[str, Any], from_anchor: bool, tmp_path: Path
) -> None:
    config = read(edited(write_speculators(tmp_path / "one", "dspark"), **changes))
    assert (config.from_anchor, config.longest) == (from_anchor, 5 if from_anchor else 4)


def test_windows_are_causal_unless_the_packaging_says_otherwise(tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
    }
    for kind, free, causal in (
        ("dspark", None, True),
        ("dflash", None, True),
        ("dflash2", None, False),
        ("dflash", True, False),
        ("dflash2", False, True),
    ):
        folder = write_speculators(tmp_path / f"{kind}{free}", kind, **window)
        config = read(edited(folder, sliding_window_non_causal=free, is_causal=not causal))
        assert config.windows == (6, None)
        assert config.causal == (causal, False), "full attention goes both ways"


def test_heads_are_there_unless_the_packaging_says_otherwise(tmp_path: Path) -> None:
    # These are the defaults of speculators' own config class.
    names = ("enable_confidence_head", "confidence_head_with_markov", "markov_head_type")
    without = dict.fromkeys(names)
    config = read(edited(write_speculators(tmp_path / "one", "dspark"), **without))
    assert (config.confidence, config.confidence_of_markov) == (True, True)
    assert config.markov is not None
    assert (config.markov.rank, config.markov.kind) == (8, "vanilla")


def test_draft_ids_are_the_targets_by_offsets(tmp_path: Path) -> None:
    target = MlxLmTarget(target_model())
    for kind in ("dspark", "dflash"):
        folder = write_speculators(tmp_path / kind, kind, draft_ids=DRAFT_IDS)
        provider: Any = loaded(folder, target).provider
        assert provider.grouped.draft_vocabulary(target) == DRAFT_IDS
        whole: Any = loaded(write_speculators(tmp_path / f"{kind} whole", kind), target).provider
        assert whole.grouped.draft_vocabulary(target) is None


def test_a_published_lfm2_head_drafts_as_many_as_its_block_has(tmp_path: Path) -> None:
    config = read(write_lfm2(tmp_path / "one"))
    assert (config.from_anchor, config.longest, config.rope.traditional) == (True, 5, True)
    assert config.confidence_of_markov, "no published one says it, and all have it"
    assert read(edited(tmp_path / "one", rope_is_neox_style=None)).rope.traditional
    bonus = read(edited(tmp_path / "one", dspark_bonus_anchor=True))
    assert (bonus.from_anchor, bonus.longest, bonus.block_size) == (False, 4, 5)


# What is refused.


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        loaded(folder, MlxLmTarget(target_model()), **options)
    return str(caught.value)


def test_draft_vocabularies_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    def release(name: str, **changes: Any) -> Path:
        return write_speculators(tmp_path / name, "dspark", draft_ids=DRAFT_IDS, **changes)

    offsets = mx.array([each - at for at, each in enumerate(DRAFT_IDS)], mx.int64)
    falling = mx.array([62 - 2 * at for at in range(len(DRAFT_IDS))], mx.int64)
    twice = mx.where(mx.arange(len(DRAFT_IDS)) == 3, offsets - 3, offsets)
    for name, found, named in (
        ("none", None, "there is no tensor d2t"),
        ("falling", falling, "d2t does not map to ascending ids below 64"),
        ("twice", twice, "d2t does not map to ascending ids below 64"),
        ("beyond", offsets + 3, "d2t does not map to ascending ids below 64"),
        ("before", offsets - 2, "d2t does not map to ascending ids below 64"),
        ("short", offsets[:-1], "d2t has the shape (20,), but draft_vocab_size is 21"),
    ):
        assert named in refusal(retensored(release(name), d2t=found))
    assert "d2t has the shape (21,), but draft_vocab_size is 20" in refusal(
        edited(release("counted"), draft_vocab_size=20)
    )
    assert "there is no lm_head.weight" in refusal(
        retensored(release("headless"), lm_head__weight=None)
    )


def test_tensors_of_other_shapes_are_refused(tmp_path: Path) -> None:
    def release(name: str) -> Path:
        return write_speculators(tmp_path / name, "dspark", draft_ids=DRAFT_IDS)

    small, whole = mx.zeros((len(DRAFT_IDS), 8)), mx.zeros((VOCABULARY, 8))
    told = refusal(retensored(release("w1"), markov_head__markov_w1__weight=small))
    assert "markov_head.markov_w1.weight" in told
    assert "(21, 8)" in told
    assert "(64, 8)" in told, "the token before is one of the target's"
    told = refusal(retensored(release("w2"), markov_head__markov_w2__weight=whole))
    assert "markov_head.markov_w2.weight" in told
    told = refusal(retensored(release("head"), lm_head__weight=mx.zeros((VOCABULARY, 64))))
    assert "lm_head.weight" in told
    told = refusal(retensored(release("fc"), fc__weight=mx.zeros((64, 64))))
    assert "fc.weight" in told


def test_keys_that_cannot_be_followed_are_refused_by_name(tmp_path: Path) -> None:
    taps = {"aux_hidden_state_layer_ids": [0, 2]}
    for number, (kind, changes, named) in enumerate(
        (
            ("dspark", taps, "aux_hidden_state_layer_ids is [0, 2]"),
            ("dflash", {"transformer_layer_config": None}, "no transformer_layer_config"),
            ("dflash", {"mask_token_id": None}, "no mask_token_id"),
            ("dflash", {"block_size": 1, "speculators_config": None}, "block_size is 1"),
            ("dspark", {"markov_head_type": "deep"}, "markov_head_type is 'deep'"),
            ("dflash2", {"draft_vocab_size": 21}, "draft_vocab_size is 21"),
        )
    ):
        changes_of: Any = changes
        folder = edited(write_speculators(tmp_path / str(number), kind), **changes_of)
        assert named in refusal(folder)


@pytest.mark.parametrize(
    ("write", "changes", "named"),
    [
        (write_qwen, {"attention_sink_bias": True}, "attention_sink_bias is True"),
        (write_qwen, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (write_qwen, {"target_layer_ids": [-1, 2]}, "target_layer_ids is [-1, 2]"),
        (write_qwen, {"target_layer_ids": [0, 9]}, "target_layer_ids is [0, 9]"),
        (write_qwen, {"num_target_layers": 5}, "num_target_layers is 5"),
        (write_qwen, {"block_size": 1, "dspark_bonus_anchor": True}, "block_size is 1"),
        (write_qwen, {"rope_parameters": {"rope_type": "odd"}}, "rope_type is 'odd'"),
        (write_qwen, {"rope_parameters": {"rope_type": "yarn"}}, "no factor"),
        (write_gemma, {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        (write_gemma, {"enable_moe_block": True}, "enable_moe_block is True"),
        (write_gemma, {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8"),
        (write_gemma, {"layer_types": ["sliding_attention"] * 2}, "layer_types is "),
    ],
)
def test_deepspec_keys_that_cannot_be_followed_are_refused_by_name(
    write: Any, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert named in refusal(edited(write(tmp_path / "one"), **changes))


# Which files are what.


def test_a_release_is_known_by_its_files(tmp_path: Path) -> None:
    for name in ("qwen", "gemma", "lfm2", *list(RELEASES)[-6:]):
        folder = write_release(name, tmp_path / name)
        own = name.split()[1] if name.startswith("speculators") else "dspark"
        kind = "deepspec" if own == "dspark" else own
        assert default_registry().select(folder).name == kind
    with load_drafter(folder, target_model(), tiny_tokenizer(), probe=False) as drafter:
        assert (drafter.kind, drafter.max_draft_tokens) == ("dflash2", 4)


def test_other_speculators_are_nobodys(tmp_path: Path) -> None:
    folder = edited(write_speculators(tmp_path / "one", "dflash"), speculators_model_type="eagle3")
    assert kind_of(read_files(folder).config) is None
    with pytest.raises(UnrecognizedArtifactError):
        load_drafter(folder, target_model(), tiny_tokenizer())


def test_a_config_that_only_names_its_projector_is_deepspecs(tmp_path: Path) -> None:
    folder = write_lfm2(tmp_path / "one", architectures=["DSparkDraftModel"])
    config = json.loads((folder / "config.json").read_text())
    own = {**config["dflash_config"], "projector_type": "dspark"}
    assert kind_of(config) == "dflash", "it has taps and no more"
    assert kind_of({**config, "dflash_config": own}) == "deepspec"
