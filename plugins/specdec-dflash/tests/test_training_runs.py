"""Runs of the training command: seeds, breaks, mistakes; and what text, taps and masks become."""

from __future__ import annotations

import signal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from block_training import MASK, arguments, letters_tokenizer, write_target, write_text
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import VOCABULARY, build_model, random_state, tiny_model

from specdec import load_model
from specdec.drafting.modules import parameters_of
from specdec.errors import ArtifactError, OptionError, TargetLacksError
from specdec_dflash import train as command
from specdec_dflash.training import (
    Teacher,
    TextWindows,
    Trainer,
    TrainSettings,
    describe,
    load_state,
    read_texts,
    read_tokens,
    save_state,
)
from specdec_dflash.training.teacher import find_mask_token, spread_taps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "counting")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "runs")


# Runs.


def trainer_of(
    target: Path,
    text: Path,
    seed: int = 0,
    steps: int = 6,
    labels: str = "target",
    loaded: Any = None,
) -> Trainer:
    model, tokenizer = loaded or load_model(str(target))
    teacher = Teacher(model, tokenizer)
    settings = TrainSettings(
        layers=1, block=4, length=32, batch=2, blocks=8, seed=seed, steps=steps, labels=labels
    )
    windows = TextWindows(read_tokens(text, tokenizer, VOCABULARY), 32, seed)
    return Trainer(teacher, windows, describe(teacher, settings, (0, 2), MASK), settings)


def same(one: Trainer, other: Trainer) -> bool:
    mine, others = parameters_of(one.model), parameters_of(other.model)
    return all(mx.array_equal(mine[name], others[name]).item() for name in mine)


def test_a_seed_gives_the_same_drafter_and_leaves_mlxs_random_numbers_alone(
    target: Path, text: Path
) -> None:
    loaded = load_model(str(target))
    before = random_state()
    one, two, other = (trainer_of(target, text, seed, loaded=loaded) for seed in (0, 0, 1))
    for trainer in (one, two, other):
        trainer.train_step()
        trainer.train_step()
    assert same(one, two)
    assert not same(one, other)
    assert random_state() == before


def test_a_run_that_is_resumed_ends_where_one_without_a_break_does(
    target: Path, text: Path, tmp_path: Path
) -> None:
    whole, begun = trainer_of(target, text), trainer_of(target, text)
    for _ in range(4):
        whole.train_step()
    begun.train_step()
    begun.train_step()
    save_state(tmp_path, *begun.state())
    resumed = trainer_of(target, text)
    assert not same(resumed, begun)
    resumed.restore(*load_state(tmp_path))
    assert resumed.step == 2
    assert resumed.seconds == begun.seconds > 0
    resumed.train_step()
    resumed.train_step()
    assert same(resumed, whole)


def test_the_texts_own_tokens_are_other_labels(target: Path, text: Path) -> None:
    one, other = trainer_of(target, text), trainer_of(target, text, labels="text")
    losses = [trainer.train_step()[0].item() for trainer in (one, other)]
    assert losses[0] != losses[1]
    assert not same(one, other)


@pytest.mark.parametrize("kind", ["bfloat16", "4 bits"])
def test_targets_of_few_bits_are_learnt_from_and_stay_as_they_are(kind: str) -> None:
    model = build_model("qwen3")
    if kind == "4 bits":
        quantize(model, 32, 4)
    else:
        model.set_dtype(mx.bfloat16)
    before = {name: mx.array(array) for name, array in parameters_of(model).items()}
    teacher = Teacher(model)
    settings = TrainSettings(layers=1, block=4, length=16, batch=2, blocks=4, steps=30, lr=0.05)
    windows = TextWindows(mx.random.randint(0, VOCABULARY, (32,), key=mx.random.key(4)), 16, 0)
    trainer = Trainer(teacher, windows, describe(teacher, settings, (0, 1), MASK), settings)
    losses: list[Any] = [trainer.train_step()[0].item() for _ in range(30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    after = parameters_of(model)
    assert all(mx.array_equal(after[name], array).item() for name, array in before.items())


def test_ctrl_c_saves_after_the_step_and_the_command_goes_on_from_there(
    target: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    asked = arguments(target, text, out, "--steps", "5", "--report-every", "1")
    report = command._report

    def interrupting(progress: Any) -> None:
        report(progress)
        if progress.step == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command, "_report", interrupting)
    assert command.main(asked) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "--resume" in capsys.readouterr().out
    _, notes = load_state(out)
    assert notes["step"] == "3"
    monkeypatch.setattr(command, "_report", report)
    assert command.main([*asked, "--resume"]) == 0
    assert "done after 5 steps" in capsys.readouterr().out
    assert load_state(out)[1]["step"] == "5"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--taps", "0,9"], "taps is 0,9"),
        (["--taps", "a"], "--taps is a"),
        (["--taps", "1,1"], "taps is 1,1"),
        (["--block", "1"], "block is 1"),
        (["--length", "4"], "length is 4"),
        (["--steps", "0"], "steps is 0"),
        (["--minutes", "nan"], "minutes is nan"),
        (["--lr", "-1"], "lr is -1.0"),
        (["--seed", str(2**32)], "seed is 4294967296; give a whole number of 0 to 4294967295"),
        (["--seed", "-1"], "seed is -1"),
        (["--layers", str(10**13)], "layers is 10000000000000; give a whole number of 1 to 256"),
        (["--block", str(10**13)], "block is 1"),
        (["--batch", str(10**13)], "batch is 1"),
        (["--length", str(10**13)], "length is 1"),
        (["--blocks", str(10**13)], "blocks is 1"),
        (["--steps", str(2**32)], "steps is 4294967296"),
        (["--batch", "4096", "--blocks", "65536"], "together more than a step can hold"),
        (["--save-every", "nan"], "--save-every is nan; give minutes"),
        (["--save-every", "-1"], "--save-every is -1.0; give minutes"),
        (["--report-every", "0"], "--report-every is 0; give 1 or more"),
        (["--labels", "both"], "labels is 'both'"),
        (["--mask-token", "64"], "mask_token is 64"),
        (["--length", "99999"], "fewer than one window"),
        (["--text", "/nowhere"], "/nowhere"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--resume"], "config.json"),
        (["--out", "/proc/nowhere/out"], "/proc/nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    target: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    says: str,
) -> None:
    out = tmp_path / "out"
    assert command.main(arguments(target, text, out, *more)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said
    assert "Error" not in said
    assert not out.exists()


# Text, taps and masks.


def test_texts_of_every_kind_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three", "id": 1}\n')
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "sub" / "c.py").write_text("four")
    (tmp_path / "sub" / "d.txt").write_bytes(b"f\xffve")
    (tmp_path / "e.bin").write_text("nothing")
    assert list(read_texts(tmp_path)) == ["one", "two", "three", "four", "f\ufffdve"]
    tokens: Any = read_tokens(tmp_path, letters_tokenizer(), VOCABULARY).tolist()
    assert tokens.count(0) == 5  # each text is followed by the end of one
    with pytest.raises(ArtifactError, match="the target's own tokenizer"):
        read_tokens(tmp_path, letters_tokenizer(), 20)
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"texts": "three"}\n')
    with pytest.raises(ArtifactError, match=r"b\.jsonl: line 2 "):
        list(read_texts(tmp_path))
    with pytest.raises(ArtifactError, match=r"no \.txt, \.md, \.py, \.jsonl files"):
        list(read_texts(_made(tmp_path / "empty")))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("size", [7, 13, 14, 70, 75])
def test_an_epochs_windows_do_not_overlap_and_follow_from_step_and_seed(size: int) -> None:
    windows = TextWindows(mx.arange(size), 7, seed=3)
    count = max(size // 7 - 1, 1)
    for epoch in range(2):
        found: Any = [
            windows.batch(step, 1)[0].tolist() for step in range(epoch * count, (epoch + 1) * count)
        ]
        assert all(later == each + 1 for window in found for each, later in pairwise(window))
        starts = sorted(window[0] for window in found)
        assert all(later == each + 7 for each, later in pairwise(starts))
        assert starts[-1] + 7 <= size
    assert (
        windows.batch(5, 3).tolist() == TextWindows(mx.arange(size), 7, seed=3).batch(5, 3).tolist()
    )
    with pytest.raises(ArtifactError, match="fewer than one window of 7"):
        TextWindows(mx.arange(6), 7, seed=0)


def test_taps_are_spread_as_published_drafters_have_them() -> None:
    assert spread_taps(36) == (1, 9, 17, 25, 33)  # Qwen3-8B
    assert spread_taps(32) == (1, 8, 15, 22, 29)  # Qwen3.5-4B
    assert spread_taps(6) == (1, 2, 3, 4)
    assert [spread_taps(layers) for layers in (1, 2, 3)] == [(0,), (0,), (1,)]
    for layers in range(1, 100):
        assert sorted(set(spread_taps(layers))) == list(spread_taps(layers))


def test_a_mask_token_is_given_or_the_tokenizers_or_behind_its_tokens() -> None:
    tokenizer = letters_tokenizer()
    assert find_mask_token(tokenizer, VOCABULARY, 7) == 7
    assert find_mask_token(tokenizer, VOCABULARY, None) == MASK

    class Plain:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1}

    assert find_mask_token(Plain(), 4, None) == 2
    with pytest.raises(OptionError, match="give mask_token"):
        find_mask_token(Plain(), 2, None)


def test_a_target_that_cannot_be_tapped_is_refused() -> None:
    model: Any = tiny_model("qwen3")

    class Hidden(Module):  # its layers cannot be found
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
            self.inner = model.model
            self.lm_head = model.lm_head

        def make_cache(self) -> Any:
            return make_prompt_cache(model)

        def __call__(self, ids: mx.array, cache: Any = None) -> Any:
            return self.lm_head(self.inner(ids, cache))

    with pytest.raises(TargetLacksError, match="hidden_taps"):
        Teacher(Hidden())
