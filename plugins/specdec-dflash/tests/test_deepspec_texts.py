"""Texts with drafters of DeepSpec's and of speculators are the target's.

The trained block drafter of the demo model, packed anew as a speculator, shows that slots, taps and
draft ids are read as they are meant: read otherwise, each of them costs acceptance.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from architectures import build
from deepspec_files import proposal, retensored
from deepspec_synthetic import target_model, write_gemma, write_release
from demo_texts import DemoTexts
from mlx_lm.generate import generate_step
from scripted import tiny_tokenizer

from specdec import load_drafter, stream_generate
from specdec.plugins.models import find_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK = DemoTexts("demo-qwen3", "demo-qwen3-dflash")
PROMPT = (7, 3, 19, 40, 22, 5)
SEEDED: dict[str, Any] = {"temp": 0.9, "seed": 5}


def written(target: Any, folder: Path | None, **options: Any) -> tuple[Sequence[int], Any]:
    """A text, with a release's drafter or without one."""
    asked: dict[str, Any] = {"max_tokens": 16, "num_draft_tokens": 3, **options}
    if folder is None:
        found = list(stream_generate(target, tiny_tokenizer(), PROMPT, **asked))
    else:
        with load_drafter(folder, target, tiny_tokenizer(), probe=False) as drafter:
            found = list(
                stream_generate(target, tiny_tokenizer(), PROMPT, drafter=drafter, **asked)
            )
    stats = found[-1].stats
    assert stats is not None
    assert stats.draft_errors == stats.invalid_drafts == 0, stats.last_draft_error
    return [each.token for each in found], stats


@cache
def model(architecture: str) -> Any:
    """The target of the releases, or a Gemma 4 of mlx-lm's of 6 layers."""
    return target_model() if architecture == "qwen3" else build(architecture)


@cache
def greedy(architecture: str) -> list[int]:
    """mlx-lm's own tokens."""
    steps = generate_step(mx.array(PROMPT), model(architecture), max_tokens=16)
    return [token for token, _ in steps]


@cache
def seeded(architecture: str) -> list[int]:
    """The target's own tokens with :data:`SEEDED`."""
    return list(written(model(architecture), None, **SEEDED)[0])


def check_texts(architecture: str, folder: Path) -> None:
    """Greedy, seeded and by rejection, with a drafter that knows nothing of the target."""
    text, stats = written(model(architecture), folder)
    assert (stats.reason, stats.drafted > 16) == (None, True)
    assert text == greedy(architecture)
    assert written(model(architecture), folder, **SEEDED)[0] == seeded(architecture)
    rejecting = written(model(architecture), folder, acceptance="rejection", **SEEDED)
    assert rejecting[1].drafted > 16


@pytest.mark.parametrize(
    "name", ["qwen rnn", "lfm2", "speculators dspark listed", "speculators dflash2"]
)
def test_texts_with_a_random_drafter_are_the_targets(name: str, tmp_path: Path) -> None:
    check_texts("qwen3", write_release(name, tmp_path / "one"))


@pytest.mark.parametrize("own", [True, False])
def test_a_gemma_drafter_drafts_for_a_gemma_target(own: bool, tmp_path: Path) -> None:
    folder = write_gemma(
        tmp_path / "one",
        own=own,
        num_target_layers=6,
        target_layer_ids=[1, 4],
        final_logit_softcapping=30.0,
    )
    check_texts("gemma4_text", folder)


# The trained drafter of the demo model, packed otherwise.


def repacked(folder: Path, draft_ids: Sequence[int] | None = None, **changes: Any) -> Path:
    """The demo's drafter as a ``dflash`` speculator, with a head of its own for listed ids."""
    source = find_model("demo-qwen3-dflash")
    assert source is not None
    config = json.loads((source / "config.json").read_text())
    block = config.pop("dflash_config")
    folder.mkdir()
    spec = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": config,
        "draft_vocab_size": config["vocab_size"] if draft_ids is None else len(draft_ids),
        "block_size": config.pop("block_size"),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in block["target_layer_ids"]],
        "mask_token_id": block["mask_token_id"],
        "speculators_config": proposal(15),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(spec))
    shutil.copy(source / "model.safetensors", folder / "model.safetensors")
    if draft_ids is not None:
        target, _ = BLOCK.demo()
        ids = mx.array(list(draft_ids))
        offsets = ids - mx.arange(len(draft_ids))
        retensored(folder, lm_head__weight=target.model.embed_tokens.weight[ids], d2t=offsets)
    return folder


def run(folder: Path) -> Any:
    """The stats of a text, which is the target's."""
    demo = BLOCK.demo()
    prompt = BLOCK.prompts()[2]
    with load_drafter(folder, *demo, probe=False) as drafter:
        options: dict[str, Any] = {"max_tokens": 24, "num_draft_tokens": 4}
        found = list(stream_generate(*demo, prompt, drafter=drafter, **options))
    assert tuple(each.token for each in found) == BLOCK.greedy(prompt)
    return found[-1].stats


def test_a_trained_drafter_drafts_the_same_as_a_speculator(tmp_path: Path) -> None:
    own = BLOCK.drafted(BLOCK.prompts()[2], BLOCK.load(probe=False), 4).stats
    stats = run(repacked(tmp_path / "one"))
    assert stats.accepted_per_position == own.accepted_per_position
    assert stats.target_forwards == own.target_forwards
    assert stats.accepted > 8
    for name, changes in (
        ("slots", {"speculators_config": proposal(16)}),
        ("taps", {"aux_hidden_state_layer_ids": [1, 3, 4]}),
    ):
        wrong = run(repacked(tmp_path / name, **changes))
        assert wrong.accepted < stats.accepted, "what reading it otherwise costs"


def test_a_trained_drafter_with_a_vocabulary_of_its_own_drafts_its_ids(tmp_path: Path) -> None:
    said = set(BLOCK.greedy(BLOCK.prompts()[2]))
    own = BLOCK.drafted(BLOCK.prompts()[2], BLOCK.load(probe=False), 4).stats
    some, none = sorted({*said, *range(7, 8192, 9)}), sorted({*range(7, 8192, 9)} - said)
    assert run(repacked(tmp_path / "some", some)).accepted >= own.accepted
    assert run(repacked(tmp_path / "none", none)).accepted == 0
