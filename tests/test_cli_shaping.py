"""``specdec generate``: ends, penalties, grammars, acceptance and log-probabilities."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_logits_processors

from specdec import load_model
from specdec.cli import main

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    status, out, err = run(capsys, "generate", *argv, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def plain(max_tokens: int, **options: float) -> str:
    model, tokenizer = load_model("demo")
    processors = make_logits_processors(**options)
    return "".join(
        response.text
        for response in stream_generate(
            model, tokenizer, PROMPT, max_tokens, logits_processors=processors
        )
    )


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_a_penalty_is_mlx_lm_s(capsys: pytest.CaptureFixture[str], name: str, drafter: str) -> None:
    found = generated(
        capsys,
        *("--prompt", PROMPT, "--max-tokens", "24", "--drafter", drafter),
        *(f"--{name}-penalty", "1.5"),
    )
    assert found["text"] == plain(24, **{f"{name}_penalty": 1.5}) != plain(24)


def test_the_text_ends_before_the_first_stop(capsys: pytest.CaptureFixture[str]) -> None:
    whole = plain(32)
    first, second = whole[5:8], whole[14:17]
    cut = min(whole.index(first), whole.index(second))
    options = ("--prompt", PROMPT, "--max-tokens", "32", "--drafter", "ngram")
    found = generated(capsys, *options, "--stop", second, "--stop", first)
    assert (found["text"], found["finish_reason"]) == (whole[:cut], "stop")
    later = generated(capsys, *options, "--stop", second, "--stop", first, "--min-tokens", "32")
    assert later["emitted"] == 32


def test_a_schema_from_a_file_is_obeyed_and_its_forced_tokens_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    options = ("--prompt", "Data: ", "--max-tokens", "32", "--json-schema", str(file))
    found = generated(capsys, *options)
    assert set(json.loads(found["text"])) == {"n"}
    assert found["forced"] > 0
    assert found["finish_reason"] == "stop"
    status, out, _ = run(capsys, "generate", *options)
    assert status == 0
    assert f"forced by the grammar: {found['forced']}" in out


def test_a_regex_and_a_lark_grammar_are_obeyed_also_behind_a_marker(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "digits.lark"
    file.write_text("start: /[0-9]{4}/")
    options = ("--prompt", "Data: ", "--max-tokens", "32", "--drafter", "ngram")
    assert re.fullmatch(r"[ab]{5}", generated(capsys, *options, "--regex", "[ab]{5}")["text"])
    assert re.fullmatch(r"[0-9]{4}", generated(capsys, *options, "--lark", str(file))["text"])
    free = generated(capsys, *options, "--lark", str(file), "--grammar-after", "never said so")
    assert free["text"] == generated(capsys, *options)["text"]


def test_log_probabilities_come_with_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    found = generated(
        capsys, "--prompt", PROMPT, "--max-tokens", "8", "--drafter", "ngram", "--logprobs", "2"
    )
    assert len(found["logprobs"]) == 8
    for token, report in zip(found["tokens"], found["logprobs"], strict=True):
        assert report["top"][0] == [token, report["logprob"]]
        assert report["rank"] == 1
        assert -math.inf < report["top"][1][1] <= report["logprob"] <= 0


def test_rejection_sampling_repeats_itself_for_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", PROMPT, "--max-tokens", "24", "--temp", "0.3", "--seed", "5")
    drafted = (*options, "--drafter", "ngram", "--acceptance", "rejection")
    found = generated(capsys, *drafted)
    assert found["text"] == generated(capsys, *drafted)["text"]
    assert found["accepted"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-tokens", "-1"], "--min-tokens is -1; give 0 or more"),
        (["--min-tokens", "300"], "min_tokens is 300, but max_tokens is 256"),
        (["--logprobs", "3"], "--logprobs shows nothing without --json; give both"),
        (["--logprobs", "-3", "--json"], "--logprobs is -3; give 0 or more"),
        (["--stop", ""], "--stop is empty; give some text"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0; give a number"),
        (["--grammar-after", "x"], "--grammar-after needs a grammar"),
        (["--json-schema", "nowhere.json"], "file nowhere.json cannot be read"),
        (["--regex", "(["], "the regex cannot be used"),
    ],
)
def test_a_mistake_gets_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    status, out, err = run(capsys, "generate", "--prompt", "x", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"specdec: {said}")
    assert err.count("\n") == 1


def test_a_schema_file_that_is_no_json_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    file.write_text("{")
    status, _, err = run(capsys, "generate", "--prompt", "x", "--json-schema", str(file))
    assert status == 2
    assert err.startswith(f"specdec: file {file} is no JSON")
    assert err.count("\n") == 1
