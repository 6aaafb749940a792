"""What a training run goes on with, when it stops, and what it reads besides plain text."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from block_training import arguments, letters_tokenizer, write_target, write_text
from tiny_models import VOCABULARY

from specdec.errors import ArtifactError
from specdec_dflash import train as command
from specdec_dflash.training import TrainSettings, load_state, read_texts, read_tokens, train
from specdec_dflash.training.checkpoint import check_settings, save_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "counting")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "runs")


@pytest.fixture(scope="module")
def begun(target: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter after one step."""
    out = tmp_path_factory.mktemp("out") / "drafter"
    assert command.main(arguments(target, text, out, "--steps", "1")) == 0
    return out


# Settings of a run that goes on.


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--lr", "0.5", "lr is 0.5, but the run was begun with lr 0.05;"),
        ("--norm-lr", "0.5", "norm_lr is 0.5, but the run was begun with norm_lr 0.02;"),
        ("--seed", "7", "seed is 7, but the run was begun with seed 0;"),
        ("--labels", "text", "labels is text, but the run was begun with labels target;"),
        ("--batch", "3", "batch is 3, but the run was begun with batch 4;"),
        ("--length", "31", "length is 31, but the run was begun with length 32;"),
        ("--blocks", "15", "blocks is 15, but the run was begun with blocks 16;"),
        ("--decay", "5", "decay is 5.0, but the run was begun with decay 6.0;"),
        ("--dtype", "bfloat16", "dtype is bfloat16, but the run was begun with dtype"),
        ("--text", "other", "tokens, "),
    ],
)
def test_a_run_goes_on_with_nothing_that_it_was_not_begun_with(
    target: Path,
    text: Path,
    begun: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    says: str,
) -> None:
    if option == "--text":
        value = str(write_text(tmp_path / "other"))
        (tmp_path / "other" / "more.txt").write_text("more")
    before = load_state(begun)[1]
    asked = arguments(target, text, begun, "--steps", "2", "--resume", option, value)
    assert command.main(asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said
    assert "resume with the same, or begin anew, without resume, in another folder" in said
    assert load_state(begun)[1] == before


def test_no_setting_is_forgotten_and_when_to_stop_may_differ() -> None:
    settings = TrainSettings(steps=1)
    told = {"steps", "minutes", "layers", "taps", "block", "mask_token"}  # config.json has four
    assert set(settings.kept) | told == {field.name for field in TrainSettings.__attrs_attrs__}
    check_settings({"settings": json.dumps(settings.kept)}, TrainSettings(minutes=3.0).kept)


def test_a_run_may_end_later_than_it_was_begun_for(
    target: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command.main(arguments(target, text, out, "--steps", "1")) == 0
    more = ("--steps", "2", "--report-every", "1", "--save-every", "0", "--resume")
    assert command.main(arguments(target, text, out, *more)) == 0
    assert load_state(out)[1]["step"] == "2"
    assert "done after 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", "x"),
        ("step", "-1"),
        ("step", "1.5"),
        ("step", "9" * 5000),
        ("step", str(2**32)),
        ("seconds", None),
        ("seconds", "nan"),
        ("seconds", "-1"),
        ("seconds", "soon"),
        ("settings", None),
        ("settings", "[]"),
        ("settings", "[" * 100000),
    ],
)
def test_notes_that_make_no_sense_are_one_line_with_the_file_and_the_way_out(
    tmp_path: Path, name: str, value: str | None
) -> None:
    notes = {"step": "1", "seconds": "2.5", "settings": "{}"}
    save_state(tmp_path, {"a": mx.zeros(1)}, notes)
    assert load_state(tmp_path)[1] == notes
    wrong = {key: held for key, held in {**notes, name: value}.items() if held is not None}
    save_state(tmp_path, {"a": mx.zeros(1)}, wrong)
    with pytest.raises(ArtifactError) as caught:
        load_state(tmp_path)
    said = str(caught.value)
    assert said.count("\n") == 0
    assert len(said) < 900
    assert str(tmp_path / "training" / "state.safetensors") in said
    assert f"its {name} is " in said
    assert "begin anew, without resume, in another folder" in said


# When a run stops.


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[malloc] Unable to allocate 9 bytes.")]
)
def test_a_drafter_that_the_memory_does_not_hold_is_one_line(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:
    raised = [error]

    def full(*_: object) -> None:
        raise raised[0]

    monkeypatch.setattr(command, "_trainer", full)
    asked = arguments(tmp_path, text, tmp_path / "out")
    assert command.main(asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "give fewer --layers, --batch, --length or --blocks" in said
    raised[0] = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        command.main(asked)


@pytest.mark.parametrize(
    ("times", "steps"),
    [([10.0] * 9, 6), ([25.0, 25.0, 9.0], 2), ([70.0, 1.0], 1)],
)
def test_no_step_is_begun_that_would_not_end_within_the_minutes(
    target: Path, text: Path, monkeypatch: pytest.MonkeyPatch, times: list[float], steps: int
) -> None:
    args = command.build_parser().parse_args(
        arguments(target, text, target / "out", "--minutes", "1", "--blocks", "2")
    )
    trainer, _ = command._trainer(args, command._settings(args))
    now, left = [0.0], list(times)
    read = trainer.teacher.read

    def slow(*asked: Any) -> Any:
        now[0] += left.pop(0)
        return read(*asked)

    monkeypatch.setattr(trainer.teacher, "read", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told: list[float] = []
    train(trainer, report=lambda _: None, save=lambda: None, save_every=1e9, first=told.append)
    assert trainer.step == steps
    assert told == times[:1]
    assert trainer.seconds == sum(times[:steps])


# Text.


def test_line_ends_that_json_may_hold_end_no_line(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u0085d", "e\u2029f\x1cg", "h\nk"]
    lines = [json.dumps({"text": each}, ensure_ascii=False) for each in texts]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join([*lines, ""]).encode())
    assert list(read_texts(tmp_path)) == texts
    (tmp_path / "b.jsonl").write_text("[" * 100000)
    with pytest.raises(ArtifactError, match=r"b\.jsonl: line 1 is no JSON object"):
        list(read_texts(tmp_path))


def test_a_text_beyond_the_models_context_is_tokenized_without_a_warning(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(caplog.handler)  # transformers' own may not propagate
    told = []
    try:
        for encode in (
            lambda made: read_tokens(text, made, VOCABULARY),
            lambda made: made.encode("ab" * 600),  # it warns of what is none of ours
        ):
            made = letters_tokenizer()
            made.model_max_length = 10
            encode(made)
            told.append(any("longer than" in record.getMessage() for record in caplog.records))
    finally:
        logger.removeHandler(caplog.handler)
    assert told == [False, True]


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command.build_parser()
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    capsys.readouterr()
    given: Mapping[str, Any] = {
        action.option_strings[0]: action for action in parser._actions if action.option_strings
    }
    for name, action in given.items():
        if name not in ("-h", "--model", "--text", "--out", "--resume"):
            default = "default" if action.default is None else f"(default: {action.default})"
            assert default in (action.help or ""), name
