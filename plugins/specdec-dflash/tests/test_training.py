"""Training a DFlash drafter: it learns, and what it learns on is what it later drafts with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from block_training import MASK, arguments, write_target, write_text
from tiny_models import HYBRID, VOCABULARY, WINDOWED, tiny_model

from specdec import load_drafter, load_model, stream_generate
from specdec.drafting import ContextRows
from specdec.drafting.modules import load_module
from specdec.drafting.probe import FLOOR, used_reading
from specdec.errors import ArtifactError
from specdec_dflash import train as command
from specdec_dflash.method import BlockDrafting, Drafting
from specdec_dflash.model import BlockModel
from specdec_dflash.packagings import read_config
from specdec_dflash.tiny import random_weights
from specdec_dflash.training import (
    Reading,
    Teacher,
    TextWindows,
    Trainer,
    TrainSettings,
    agreement_of,
    describe,
    save_drafter,
)
from specdec_dflash.training.blocks import Blocks, block_hidden, draw_blocks, lesson

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "counting")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "runs")


@pytest.fixture(scope="module")
def trained(
    target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A drafter as the command writes it, and the lines that the command printed."""
    out = tmp_path_factory.mktemp("out") / "drafter"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *said, **_: lines.append(" ".join(map(str, said))))
        asked = arguments(target, text, out, "--steps", str(STEPS), "--report-every", "10")
        assert command.main(asked) == 0
    return out, lines


def loss_and_agreement(line: str) -> tuple[float, list[int]]:
    _, _, told = line.partition("loss ")
    loss, _, shares = told.partition(", agrees ")
    return float(loss), [int(share) for share in shares.partition(" (")[0].replace("%", "").split()]


def test_the_loss_falls_and_the_drafter_comes_to_agree_in_every_slot(
    trained: tuple[Path, list[str]],
) -> None:
    _, lines = trained
    told = [loss_and_agreement(line) for line in lines if line.startswith("step ")]
    assert len(told) == STEPS // 10
    first, last = told[0], told[-1]
    assert last[0] < 0.6 * first[0]
    assert len(last[1]) == 3
    assert all(late > early + 20 for early, late in zip(first[1], last[1], strict=True))
    assert last[1][0] > 60


def generated(
    model: Any, tokenizer: Any, prompt: list[int], drafter: Any
) -> tuple[list[int], float]:
    found = list(
        stream_generate(
            model, tokenizer, prompt, max_tokens=24, drafter=drafter, num_draft_tokens=3
        )
    )
    stats = found[-1].stats
    assert stats is not None
    assert stats.draft_errors == stats.invalid_drafts == 0
    return [each.token for each in found], len(found) / stats.target_forwards


PROMPTS = ([5, 6, 7, 40, 41, 42, 43], [60, 61, 62, 9, 30], [20])


def test_the_written_folder_loads_under_the_probe_drafts_and_changes_no_token(
    target: Path, trained: tuple[Path, list[str]]
) -> None:
    model, tokenizer = load_model(str(target))
    rates = []
    with load_drafter(trained[0], model, tokenizer) as drafter:
        assert drafter.kind == "dflash"
        assert drafter.max_draft_tokens == 3
        for prompt in PROMPTS:
            tokens, rate = generated(model, tokenizer, prompt, drafter)
            alone = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=24)
            assert tokens == [each.token for each in alone]
            rates.append(rate)
    assert sum(rates) / len(rates) > 1.6


def test_the_command_tells_how_far_the_drafter_agrees_as_loading_finds_it(
    target: Path, trained: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Any] = []

    def spied(what: str, probe: Any, wanted: Any, *more: Any, **options: Any) -> Any:
        probes.append((probe, wanted))
        return used_reading(what, probe, wanted, *more, **options)

    monkeypatch.setattr("specdec_dflash.probe.used_reading", spied)
    model, tokenizer = load_model(str(target))
    load_drafter(trained[0], model, tokenizer).close()
    [(probe, wanted)] = probes
    share = probe.agreement[wanted]
    assert share > FLOOR
    says = f"expects {share:.0%} of {probe.positions} tokens of a short text that the target"
    told = [line for line in trained[1] if says in line]
    assert told == [f"saved after {STEPS} steps; the drafter {says} expects"]


def test_the_first_steps_time_is_told_before_any_progress(trained: tuple[Path, list[str]]) -> None:
    [place] = [n for n, line in enumerate(trained[1]) if line.startswith("the first step took ")]
    [first, *_] = [n for n, line in enumerate(trained[1]) if line.startswith("step ")]
    assert place < first
    assert f"at that pace {STEPS} steps take " in trained[1][place]


def test_a_drafter_that_was_not_trained_is_refused_by_the_probe_and_drafts_nothing_of_use(
    target: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(str(target))
    teacher = Teacher(model, tokenizer)
    settings = TrainSettings(layers=1, block=5, length=64, steps=1)
    config = describe(teacher, settings, (0, 1), MASK)
    trainer = Trainer(teacher, TextWindows(mx.zeros((64,), mx.int32), 64, 0), config, settings)
    save_drafter(tmp_path / "raw", config, trainer.model)
    found = agreement_of(teacher, config, trainer.model)
    assert found is not None
    assert found.is_refused
    assert "loading refuses less than 10%; train on, or load with probe=false" in str(found)
    with pytest.raises(ArtifactError, match="probe=false"):
        load_drafter(tmp_path / "raw", model, tokenizer)
    with load_drafter(tmp_path / "raw", model, tokenizer, probe=False) as drafter:
        rates = [generated(model, tokenizer, prompt, drafter)[1] for prompt in PROMPTS]
    assert sum(rates) / len(rates) < 1.2


def test_the_folder_is_z_labs_layout_in_bfloat16(trained: tuple[Path, list[str]]) -> None:
    out, _ = trained
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["num_target_layers"] == 2
    assert config["dflash_config"] == {
        "mask_token_id": MASK,
        "target_layer_ids": [0, 1],
        "block_size": 4,
    }
    weights: Any = mx.load(str(out / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    attention = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    attention += ["self_attn.q_norm", "self_attn.k_norm"]
    mlp = [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    norms = ["input_layernorm", "post_attention_layernorm"]
    layer = {f"layers.0.{name}.weight" for name in [*attention, *mlp, *norms]}
    assert set(weights) == {"fc.weight", "hidden_norm.weight", "norm.weight"} | layer


def test_a_folder_that_is_in_use_is_not_overwritten_and_another_drafter_not_resumed(
    target: Path, text: Path, trained: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = trained
    before = (out / "model.safetensors").read_bytes()
    assert command.main(arguments(target, text, out)) == 2
    assert "--resume" in capsys.readouterr().err
    assert command.main(arguments(target, text, out, "--resume", "--block", "5")) == 2
    assert "block_size 4, but now it is 5" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before


# What is trained is what drafts.


def drafter_on(
    teacher: Teacher, *, layers: int, block: int, seed: int = 0
) -> tuple[Any, BlockModel]:
    settings = TrainSettings(layers=layers, block=block, length=block + 1, steps=1)
    config = read_config("the test's", describe(teacher, settings, (0, 1, 2), MASK))
    model = BlockModel(config, own_embedding=False, own_head=False)
    load_module("the test's", model, random_weights(model, seed))
    return config, model


def drafted_hidden(
    method: BlockDrafting, taps: mx.array, ids: Sequence[int], anchor: int, columns: int
) -> mx.array:
    """A block's hidden states as generation gets them: one row, its context read before."""
    rows = ContextRows.of(method.layers, 1)
    rows.append(method.project(taps[:, :anchor], 0), [anchor])
    with rows.block([columns]) as block:
        return method.hidden(block, mx.array([ids[anchor]], mx.int32))[0, : columns - 1]


def apart(one: mx.array, other: mx.array) -> float:
    most: Any = mx.abs(one - other).max().item()
    return float(most)


def test_the_forward_of_training_is_the_forward_of_drafting() -> None:
    teacher = Teacher(tiny_model("qwen3"))
    config, model = drafter_on(teacher, layers=2, block=6)
    ids = mx.random.randint(0, VOCABULARY, (3, 40), key=mx.random.key(1))
    reading = teacher.read(ids, config.taps)
    blocks = Blocks(
        mx.array([[1, 9, 34], [20, 21, 22], [3, 3, 30]], mx.int32),
        mx.array([[6, 6, 6], [2, 3, 6], [5, 2, 4]], mx.int32),
        6,
    )
    given = lesson(reading, blocks, teacher.port, MASK, 6.0)
    found = block_hidden(model, given.taps, given.embedded, blocks).reshape(3, 3, 5, -1)
    method = BlockDrafting(config, model, teacher.port, Drafting())
    texts: Any = ids.tolist()
    anchors: Any = blocks.anchors.tolist()
    sizes: Any = blocks.sizes.tolist()
    for window in range(3):
        for number in range(3):
            anchor, columns = anchors[window][number], sizes[window][number]
            taps = reading.taps[window : window + 1]
            want = drafted_hidden(method, taps, texts[window], anchor, columns)
            got = found[window, number, : columns - 1]
            assert apart(got, want) < 1e-4
            # The comparison tells one anchor from the next.
            other = drafted_hidden(method, taps, texts[window], anchor + 1, columns)
            assert apart(got, other) > 1e-2


@pytest.mark.parametrize("architecture", ["qwen3", WINDOWED, HYBRID])
def test_windows_read_together_are_read_as_alone(architecture: str) -> None:
    teacher = Teacher(tiny_model(architecture))
    ids = mx.random.randint(0, VOCABULARY, (3, 20), key=mx.random.key(2))
    together = teacher.read(ids, (0, 2))
    for row in range(3):
        alone = teacher.read(ids[row : row + 1], (0, 2))
        assert apart(together.taps[row], alone.taps[0]) < 1e-4
        assert apart(together.logits[row], tiny_model(architecture)(ids)[row]) < 1e-4


def test_a_lesson_holds_what_plain_loops_say() -> None:
    draw = np.random.default_rng(0)
    rows, length, width, count = 2, 24, 5, 30
    teacher = Teacher(tiny_model("qwen3"))
    ids = draw.integers(0, 3, (rows, length))
    logits = draw.normal(size=(rows, length, 3))  # of 3 tokens, so that the text is often right
    taps = mx.zeros((rows, length, 1))
    reading = Reading(mx.array(ids, mx.int32), taps, mx.array(logits, mx.float32))
    blocks = draw_blocks((rows, count), length, width, mx.random.key(3))
    given = lesson(reading, blocks, teacher.port, MASK, 2.0)
    anchors, sizes = np.array(blocks.anchors), np.array(blocks.sizes)
    assert anchors.min() >= 1
    assert anchors.max() <= length - width
    assert set(sizes.ravel()) == {2, 3, 4, 5}
    at = 0
    for row in range(rows):
        for anchor, size in zip(anchors[row], sizes[row], strict=True):
            reached = True
            for slot in range(1, width):
                says = logits[row, anchor + slot - 1]
                assert given.expected[at, slot - 1].item() == says.argmax()
                assert given.text[at, slot - 1].item() == ids[row, anchor + slot]
                np.testing.assert_allclose(np.array(given.logits[at, slot - 1]), says, atol=1e-6)
                used, on = float(slot < size), float(reached and slot < size)
                assert given.on_path[at, slot - 1].item() == on
                weight = np.exp(-(slot - 1) / 2.0) * (0.2 * used + 0.8 * on)
                assert given.weights[at, slot - 1].item() == pytest.approx(weight, abs=1e-6)
                reached = reached and bool(says.argmax() == ids[row, anchor + slot])
            first = [int(ids[row, anchor]), *[MASK] * (width - 1)]
            embedded = teacher.port.embed(mx.array([first], mx.int32))[0]
            assert mx.array_equal(given.embedded[at], embedded)
            at += 1
