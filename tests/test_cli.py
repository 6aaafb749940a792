"""The ``specdec`` command: what it prints, and one line for a mistake."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

import specdec_demo
from specdec.cli import main
from specdec.cli.bench import read_prompts
from specdec.cli.options import drafter_options
from specdec.errors import OptionError
from specdec.plugins import default_registry
from specdec_demo import path as demo_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"
FIELDS = {
    "text": str,
    "tokens": list,
    "finish_reason": str,
    "prompt_tokens": int,
    "cached_tokens": int,
    "drafter": str,
    "reason": type(None),
    "num_draft_tokens": int,
    "rounds": int,
    "target_forwards": int,
    "drafted": int,
    "accepted": int,
    "emitted": int,
    "accepted_per_position": list,
    "tokens_per_forward": float,
    "tokens_per_second": float,
    "peak_memory": float,
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:  # argparse's own way out
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    status, out, err = run(capsys, *argv, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_generate_prints_one_object_with_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys, "generate", "--drafter", "ngram", "--prompt", PROMPT, "--max-tokens", "24"
    )
    assert {name: type(found[name]) for name in FIELDS} == FIELDS
    assert found["emitted"] == len(found["tokens"]) == 24
    assert found["accepted"] == sum(found["accepted_per_position"]) > 0
    assert found["target_forwards"] == found["rounds"] < 24
    assert found["tokens_per_forward"] == 24 / found["target_forwards"]


def test_the_text_is_the_same_with_and_without_a_drafter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("generate", "--prompt", PROMPT, "--max-tokens", "24", "--temp", "0.7", "--seed", "3")
    plain = as_json(capsys, *options)
    drafted = as_json(capsys, *options, "--drafter", "ngram", "--num-draft-tokens", "3")
    assert plain["text"] == drafted["text"]
    assert (plain["drafter"], plain["reason"]) == (None, "no drafter was asked for")
    assert drafted["num_draft_tokens"] == 3
    other = as_json(capsys, *options[:-1], "4")
    assert other["text"] != plain["text"], "another seed gives another text"


def test_generate_streams_the_text_and_then_says_what_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("generate", "--prompt", PROMPT, "--max-tokens", "12", "--drafter", "ngram")
    fixed = (*options, "--num-draft-tokens", "3")
    expected = as_json(capsys, *fixed)
    status, out, err = run(capsys, *fixed)
    text, _, summary = out.partition(f"\n{'=' * 10}\n")
    assert (status, err) == (0, "")
    assert text == expected["text"]
    assert summary.splitlines()[0] == "drafter: ngram, 3 drafts a round"
    assert f"tokens: 12 in {expected['target_forwards']} forwards" in summary
    assert "by position 100%" in summary


def test_without_a_number_the_summary_says_what_rounds_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("generate", "--prompt", PROMPT, "--max-tokens", "12", "--drafter", "ngram")
    found = as_json(capsys, *options)
    assert found["adaptive"] is True
    assert sum(found["widths"].values()) >= found["rounds"]
    _, out, _ = run(capsys, *options)
    summary = out.partition(f"\n{'=' * 10}\n")[2].splitlines()
    assert summary[0] == "drafter: ngram, up to 15 drafts a round"
    assert summary[1].startswith("drafts asked for: ")
    most = as_json(capsys, *options, "--num-draft-tokens", "2", "--adaptive")
    assert (most["adaptive"], most["num_draft_tokens"]) == (True, 2)
    assert set(map(int, most["widths"])) <= {0, 1, 2}
    assert most["text"] == found["text"]


def test_no_drafts_asked_for_runs_plain_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--drafter", "ngram", "--num-draft-tokens", "0", "--max-tokens", "3")
    found = as_json(capsys, "generate", "--prompt", "x", *options)
    assert (found["drafter"], found["reason"]) == (None, "num_draft_tokens is 0")
    assert found["drafted"] == 0


def test_a_hybrid_target_drafts_and_writes_the_same_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("generate", "--model", "demo-qwen3_5", "--prompt", PROMPT, "--max-tokens", "16")
    plain = as_json(capsys, *options)
    found = as_json(capsys, *options, "--drafter", "ngram", "--num-draft-tokens", "3")
    assert (found["drafter"], found["reason"]) == ("ngram", None)
    assert found["tokens"] == plain["tokens"]
    assert 0 < found["accepted"] <= found["drafted"]
    assert found["target_forwards"] < plain["target_forwards"] == 16


def test_a_prompt_comes_from_a_file_or_from_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    from_file = as_json(capsys, "generate", "--prompt-file", str(file), "--max-tokens", "4")
    piped = subprocess.run(
        [sys.executable, "-m", "specdec", "generate", "--prompt-file", "-", "--max-tokens", "4"],
        input=PROMPT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert piped.stdout.startswith(from_file["text"] + "\n==")
    assert piped.stderr == "", "no progress in a pipe"


def test_a_chat_prompt_goes_through_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    raw = as_json(capsys, "generate", "--prompt", "Hello", "--max-tokens", "2")
    chat = as_json(capsys, "generate", "--prompt", "Hello", "--max-tokens", "2", "--chat")
    assert chat["prompt_tokens"] > raw["prompt_tokens"]


MISTAKES = [
    (("--drafter", "nope"), "no installed plugin has the kind 'nope'; installed: "),
    (("--drafter", "./nope"), "drafter ./nope does not exist"),
    (("--drafter", str(demo_path().parent)), "no kind recognises"),
    (("--model", "nope"), "model nope is neither a folder nor a bundled model"),
    (("--model", str(demo_path().parent)), "has no config.json"),
    (("--temp", "-1"), "temp is -1.0"),
    (("--temp", "nan"), "temp is nan"),
    (("--temp", "warm"), "invalid float value: 'warm'"),
    (("--top-p", "1.5"), "top_p is 1.5"),
    (("--top-k", "-2"), "top_k is -2"),
    (("--num-draft-tokens", "-1"), "--num-draft-tokens is -1"),
    (("--max-tokens", "0"), "--max-tokens is 0"),
    (("--max-tokens", "-5"), "--max-tokens is -5"),
    (("--prompt-file", "x"), "not allowed with argument --prompt"),
    (("--drafter", "ngram", "--option", "max_ngram"), "write it as NAME=VALUE"),
    (("--drafter", "ngram", "--option", "max_ngram=0"), "max_ngram"),
    (("--drafter", "ngram", "--option", "colour=1"), "colour"),
    (("--colour",), "unrecognized arguments: --colour"),
    (("--two\nlines",), "unrecognized arguments: --two lines"),
    (("--drafter", "ngram", "--option", "num_draft_tokens=3"), "num_draft_tokens is no setting"),
    (("--drafter", "ngram", "--option", "kind=5"), "kind is no setting"),
    (("--num-draft-tokens", "3"), "need a --drafter"),
    (("--option", "max_ngram=3"), "need a --drafter"),
    (("--drafter", "ngram,"), "drafter 'ngram,' has an empty name"),
    (("--drafter", "ngram,ngram"), "drafter 'ngram,ngram' has one drafter twice"),
    (("--drafter", "ngram,auto"), "auto cannot stand in a chain"),
    (("--drafter", "none,ngram"), "none cannot stand in a chain"),
    (("--drafter", "ngram,nope"), "no installed plugin has the kind 'nope'"),
    (("--drafter", "ngram,./nope"), "drafter ./nope does not exist"),
    (("--drafter", "ngram,mtp"), "neither declares nor holds an mtp head"),
    (("--drafter", "ngram,native"), "the model declares no drafter of its own; name one"),
    (("--drafter", "ngram,mtp", "--option", "max_ngram=3"), "begin it with one of ngram., mtp."),
    (("--drafter", "ngram,mtp", "--option", "dflash.x=3"), "its members are ngram, mtp"),
    (("--drafter", "auto", "--option", "max_ngram=3"), "drafter auto has no options"),
    (("--drafter", ""), "drafter '' is empty; give a kind or a folder"),
    (("--drafter", "ngram", "--option", "max_ngram=" + "[" * 9_000), "max_ngram is '[["),
    (("--drafter", f"demo,{demo_path()}"), "has one drafter twice"),
]


@pytest.mark.parametrize(
    ("options", "message"), MISTAKES, ids=[" ".join(o)[:80] for o, _ in MISTAKES]
)
def test_a_mistake_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, "generate", "--prompt", "hello", *options)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets a distribution be as if it were not installed."""
    found = metadata.entry_points

    def hide(name: str) -> None:
        def others(**group: Any) -> list[Any]:
            every: Any = found(**group)
            return [each for each in every if each.dist.name != name]

        monkeypatch.setattr(metadata, "entry_points", others)
        default_registry.cache_clear()

    yield hide
    monkeypatch.undo()
    default_registry.cache_clear()


def test_a_kind_that_is_not_installed_is_named_with_its_package(
    capsys: pytest.CaptureFixture[str], without: Callable[[str], None]
) -> None:
    without("specdec-assistant")
    for drafter in ("assistant", "ngram,assistant"):
        status, out, err = run(capsys, "generate", "--prompt", "hello", "--drafter", drafter)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert "pip install specdec-assistant" in err


def test_a_warning_that_was_made_an_error_gets_one_line(
    capsys: pytest.CaptureFixture[str], without: Callable[[str], None]
) -> None:
    without("specdec-mtp")
    asked = ("generate", "--model", "demo-qwen3_5", "--prompt", "hello", "--max-tokens", "2")
    for action, wanted in (("error", 2), ("always", 0)):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            status, out, err = run(capsys, *asked, "--drafter", "auto")
        assert (status, bool(out), len(err.splitlines())) == (wanted, wanted == 0, 1)
        assert "drafter auto: the head that the model declares (mtp) is passed over" in err
        assert "pip install specdec-mtp" in err


def test_auto_and_chains_are_drafters_of_every_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("generate", "--prompt", PROMPT, "--max-tokens", "8")
    assert as_json(capsys, *asked, "--drafter", "auto")["drafter"] == "ngram"
    both = ("--model", "demo-qwen3_5", "--drafter", "ngram,mtp")
    option = ("--option", "ngram.max_ngram=3", "--num-draft-tokens", "2")
    found = as_json(capsys, *asked, *both, *option)
    assert (found["drafter"], found["num_draft_tokens"]) == ("ngram,mtp", 2)
    assert found["drafted"] > 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": PROMPT}) + "\n")
    timed = as_json(capsys, "bench", *both, "--prompts", str(prompts), "--max-tokens", "4")
    assert [(each["name"], each["same"]) for each in timed["results"]] == [
        ("plain", None),
        ("ngram,mtp", 1),
    ]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_missing_file_and_an_empty_prompt_get_one_line(
    capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path
) -> None:
    option = {"generate": "--prompt-file", "bench": "--prompts"}[command]
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    empty = tmp_path / "empty"
    empty.write_text("")
    for name in ("/does/not/exist", str(binary), str(empty)):
        status, out, err = run(capsys, command, option, name)
        assert (status, out, len(err.splitlines())) == (2, "", 1)


def test_a_bench_file_names_the_line_that_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n{"prompt": "b"}\n')
    status, _, err = run(capsys, "bench", "--prompts", str(file))
    assert status == 2
    assert "line 2" in err
    for options in (
        ("--widths", "1,x"),
        ("--widths", "0"),
        ("--limit", "0"),
        ("--max-tokens", "1"),
    ):
        status, out, err = run(capsys, "bench", *options)
        assert (status, out, len(err.splitlines())) == (2, "", 1)


def test_line_ends_that_json_may_hold_end_no_prompt(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\u0085d", "e\u2029f\x1cg", "h\nk"]
    lines = [json.dumps({"text": each}, ensure_ascii=False) for each in texts]
    file = tmp_path / "prompts.jsonl"
    for end in ("", "\n"):
        file.write_bytes(("\r\n".join(lines) + end).encode())
        assert read_prompts(str(file)) == texts
    file.write_text(json.dumps({"text": "a"}) + "\n" + "[" * 100000)
    with pytest.raises(OptionError, match="line 2 is no JSON object"):
        read_prompts(str(file))


def test_a_prompt_that_is_no_text_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = run(capsys, "generate", "--prompt", "\udcff")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    file = tmp_path / "prompts.jsonl"
    for text in ("", "\ud800"):
        file.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": text}) + "\n")
        status, out, err = run(capsys, "bench", "--prompts", str(file))
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert "line 2" in err


def test_bench_takes_a_top_k_beyond_the_vocabulary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": PROMPT}) + "\n")
    options = ("--prompts", str(file), "--max-tokens", "4", "--drafter", "none", "--temp", "1")
    status, _, err = run(capsys, "bench", *options, "--top-k", "100000")
    assert (status, err) == (0, "")


def test_a_terminal_without_a_character_gets_a_stand_in() -> None:
    command = [sys.executable, "-m", "specdec", "generate", "--prompt", "é ü ñ é ü ñ é ü"]
    found = subprocess.run(
        [*command, "--max-tokens", "12"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert found.stderr == b""
    assert b"==========" in found.stdout


def test_a_model_that_cannot_be_loaded_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, out, err = run(capsys, "generate", "--prompt", "x", "--model", str(tmp_path))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "cannot be loaded" in err


def test_a_reader_that_leaves_early_leaves_no_traceback() -> None:
    # The shell's own pipe: head closes it after the first line.
    command = f'{sys.executable} -m specdec generate --prompt "{PROMPT}" --max-tokens 200 | head -1'
    found = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "Traceback" not in found.stderr


def test_bundled_names_lead_to_folders_and_prompts() -> None:
    assert {demo_path(name).name for name in specdec_demo.MODELS} == set(specdec_demo.MODELS)
    assert all((demo_path(name) / "config.json").is_file() for name in specdec_demo.MODELS)
    for name in specdec_demo.PROMPTS:
        lines = specdec_demo.prompts(name).read_text(encoding="utf-8").splitlines()
        assert len(lines) >= 40
        assert all(json.loads(line)["text"] for line in lines)
    with pytest.raises(ValueError, match="there is no demo model 'x'; there are demo-qwen3"):
        demo_path("x")
    with pytest.raises(ValueError, match="there are no demo prompts 'x'"):
        specdec_demo.prompts("x")


def test_a_prefix_cache_serves_the_next_call(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(tmp_path / "cache")
    asked = ("generate", "--prompt", PROMPT, "--max-tokens", "6", "--prefix-cache", folder)
    cold, warm = (as_json(capsys, *asked, "--drafter", "ngram") for _ in range(2))
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == warm["prompt_tokens"] - 1
    assert warm["text"] == cold["text"]
    assert warm["time_to_first_token"] > 0
    status, out, err = run(capsys, *asked)
    assert (status, err) == (0, "")
    assert "first token: after" in out
    status, out, err = run(capsys, *asked)
    assert f", {warm['cached_tokens']} prompt tokens from the cache" in out


def test_what_was_not_kept_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = ("generate", "--prompt", "hi", "--max-tokens", "2", "--prefix-cache")
    small = (*asked, str(tmp_path / "cache"), "--prefix-cache-bytes", "100")
    status, _, err = run(capsys, *small)
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("prefix cache: not all was kept: ")
    assert "max_bytes 100" in err
    status, out, err = run(capsys, *asked, str(tmp_path / "file" / "below"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "cannot be used" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefix-cache", ""), "--prefix-cache is empty"),
        (("--prefix-cache-bytes", "5"), "--prefix-cache-bytes needs a --prefix-cache"),
        (("--prefix-cache", "x", "--prefix-cache-bytes", "0"), "--prefix-cache-bytes is 0; give"),
        (("--prefix-cache", "a" * 300), "long"),
        (("--prefix-cache", "~nosuchuser/x"), "~nosuchuser/x"),
    ],
)
def test_a_prefix_cache_that_makes_no_sense_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "generate", "--prompt", "hi", *options)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv",
    [
        ("new-drafter", "foo", "--directory", "a" * 300),
        ("detect", "a" * 300),
        ("generate", "--prompt", "hi", "--model", "a" * 300),
        ("generate", "--prompt", "hi", "--drafter", "./" + "a" * 300),
        ("generate", "--prompt-file", "a" * 300),
        ("bench", "--model", "demo", "--prompts", "a" * 300),
    ],
)
def test_a_name_that_no_file_can_have_gets_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_one_draft_a_round_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("generate", "--prompt", PROMPT, "--max-tokens", "2", "--drafter", "ngram")
    _, out, _ = run(capsys, *asked, "--num-draft-tokens", "1")
    assert "\ndrafter: ngram, 1 draft a round\n" in out


def test_a_member_that_stood_down_is_said_in_the_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("generate", "--prompt", PROMPT, "--max-tokens", "12", "--num-draft-tokens", "2")
    chain = ("--drafter", "ngram,demo-qwen3-draft", "--option", "two-model.max_context=20")
    _, out, _ = run(capsys, *asked, *chain)
    line = next(line for line in out.splitlines() if line.startswith("drafter: "))
    assert line.startswith("drafter: ngram,two-model, 2 drafts a round (two-model stood down: ")


def test_truth_values_are_taken_as_json_and_as_python_write_them() -> None:
    given = ["a=true", "b=True", "c=False", "d=false", "e=TRUE", "f=None"]
    found = drafter_options(argparse.Namespace(option=given))
    assert found == {"a": True, "b": True, "c": False, "d": False, "e": "TRUE", "f": "None"}


def test_a_bench_without_bundled_prompts_or_without_drafters_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
    without: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    without("specdec-ngram")
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": PROMPT}) + "\n")
    asked = ("bench", "--prompts", str(file), "--max-tokens", "2")
    status, out, err = run(capsys, *asked)
    assert (status, len(out.splitlines()), err.count("\n")) == (0, 2, 1)
    assert err.startswith("specdec: no drafter is timed: none that is installed works without")
    assert run(capsys, *asked, "--drafter", "none")[2] == "", "nobody asked for one"
    monkeypatch.setattr("specdec.plugins.models.entry_points", lambda **_: ())
    status, out, err = run(capsys, "bench", "--model", str(demo_path()), "--prompts", "demo")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "(bundled: none; pip install specdec-demo brings some)" in err
