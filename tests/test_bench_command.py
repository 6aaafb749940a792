"""``specdec bench``: what is run, what comes out, and what is refused in a line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from scripted import tiny_tokenizer
from tiny_models import VOCABULARY, tiny_model

from specdec import bench
from specdec.bench.prompt_sets import special_ids
from specdec.cli import main
from specdec.cli.bench_inputs import BUILT_IN, prompt_sets, widths
from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Bench = Callable[..., tuple[int, str, str]]

WORDS = ("w1 w2 w3 w4 w1 w2 w3", "w5 w6 w5 w6 w5", "w9 w8 w7")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command on a tiny model."""
    loaded = (tiny_model("qwen3"), tiny_tokenizer())
    monkeypatch.setattr("specdec.models.load_model", lambda *_, **__: loaded)

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            status = main(["bench", *argv])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def words(tmp_path: Path) -> str:
    file = tmp_path / "words.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in WORDS))
    return str(file)


def test_every_run_is_compared_with_plain_decoding(run: Bench, words: str) -> None:
    status, out, _ = run("--prompts", words, "--max-tokens", "8", "--widths", "2,default", "--json")
    found = json.loads(out)
    names = [(r["name"], r["width"], r["adaptive"]) for r in found["results"]]
    assert status == 0
    assert names == [
        ("plain", None, False),
        ("ngram", None, True),
        ("ngram", 2, False),
        ("ngram", 3, False),
    ]
    assert (found["prompts"], found["max_tokens"]) == (3, 8)
    assert found["machine"]["mlx"]
    plain, *drafted = found["results"]
    assert plain["ratios"] == [1, 1, 1]
    for result in drafted:
        assert (result["same"], result["differing"], result["error"]) == (3, 0, None)
        low, high = result["quartiles"]
        assert low <= result["ratio"] <= high
        assert result["prompt_set"] == "words.jsonl"
        assert result["phases"]["verify_ms"] > 0
        assert 0 < result["time_to_first_token"] < 60
        assert result["peak_memory"] > 0


def test_mlx_lm_comes_first_where_it_is_asked_for(run: Bench, words: str) -> None:
    asked = ("--prompts", words, "--max-tokens", "4", "--drafter", "none", "--phases", "0")
    status, out, err = run(*asked, "--compare", "mlx-lm", "--batch", "1,2")
    lines = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert [line[0] for line in lines if line] == [
        *("words.jsonl,", "RUN", "mlx-lm", "plain"),
        *("words.jsonl,", "RUN", "mlx-lm", "plain"),
    ]
    assert lines[1][4] == "/MLX-LM"
    assert lines[3][-1] == "3/3"
    status, out, err = run(*asked, "--temp", "0.5", "--top-k", "100000")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["RUN", "plain"]


def test_a_text_that_a_drafter_changed_gives_status_1(
    run: Bench, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = bench.compare.__globals__["Contest"].judge

    def spoiled(contest: Any) -> None:
        turns = contest.results[1].turns
        object.__setattr__(turns[0], "tokens", ((1, 2, 3),))
        judge(contest)

    monkeypatch.setattr("specdec.bench.contest.Contest.judge", spoiled)
    status, out, _ = run("--prompts", words, "--max-tokens", "4", "--phases", "0")
    assert status == 1
    assert "ngram (words.jsonl, batch 1): 1 texts differ from the reference's" in out


def test_a_drafter_that_does_not_fit_has_a_line_beside_one_that_does(
    run: Bench, words: str
) -> None:
    asked = ("--prompts", words, "--max-tokens", "4", "--phases", "0", "--limit", "1")
    status, out, _ = run(*asked, "--drafter", "ngram", "--drafter", "demo-qwen3-dflash")
    assert status == 0
    assert "demo-qwen3-dflash (words.jsonl, batch 1) failed: " in out
    status, out, err = run(*asked, "--drafter", "demo-qwen3-dflash")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_simulated_drafters_files_and_a_picture(run: Bench, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a.json", "a.md", "a.svg")]
    status, out, _ = run(
        *("--prompts", "random", "--limit", "2", "--max-tokens", "6", "--warmup", "0"),
        *("--simulate-acceptance", "0.5,1", "--simulate-drafts", "2"),
        *("--json", files[0], "--markdown", files[1], "--picture", files[2]),
    )
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        *("RUN", "plain", "simulated-0.5", "simulated-1")
    ]
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["results"][2]["acceptance_rate"] == 1
    assert "## random, batch 1" in (tmp_path / "a.md").read_text()
    assert len((tmp_path / "a.svg").read_bytes()) > 5_000


def test_growth_has_a_point_for_each_run_batch_and_context(run: Bench, tmp_path: Path) -> None:
    status, out, _ = run(
        *("--growth", "--batch", "1,3", "--contexts", "8,20", "--prompts", "random"),
        *("--max-tokens", "4", "--json", "--picture", str(tmp_path / "a.png")),
    )
    points = json.loads(out)["growth"]
    assert status == 0
    assert [(p["context"], p["batch"], p["name"]) for p in points] == [
        (context, batch, name)
        for context in (8, 20)
        for batch in (1, 3)
        for name in ("plain", "ngram")
    ]
    assert all(p["speed"] > 0 for p in points)
    assert (tmp_path / "a.png").stat().st_size > 5_000


MISTAKES = [
    (("--prompts", "code,nowhere"), "file nowhere cannot be read"),
    (("--prompts", "code,code"), "--prompts code,code has code twice"),
    (("--widths", "1,x"), "--widths is 1,x; give whole numbers of 1 or more"),
    (("--batch", "1,0"), "--batch is '1,0'; give whole numbers of 1 or more"),
    (("--batch", ""), "--batch is ''"),
    (("--prompts", ""), "--prompts '' has an empty name; give code, prose, "),
    (("--prompts", "code,"), "--prompts 'code,' has an empty name"),
    (("--warmup", "-1"), "--warmup is -1; give 0 or more"),
    (("--phases", "-1"), "--phases is -1; give 0 or more"),
    (("--limit", "0"), "--limit is 0; give 1 or more"),
    (("--max-tokens", "1"), "--max-tokens is 1; give 2 or more"),
    (("--contexts", "1"), "--contexts is '1'; give whole numbers of 2 or more"),
    (("--compare", "vllm"), "invalid choice: 'vllm'"),
    (("--simulate-acceptance", "1.2"), "--simulate-acceptance is '1.2'; give numbers of 0 to 1"),
    (("--simulate-acceptance", "x"), "--simulate-acceptance is 'x'"),
    (("--simulate-acceptance", "1", "--simulate-drafts", "0"), "drafts is 0; give 1 or more"),
    (("--simulate-acceptance", "1", "--simulate-cost", "-1"), "cost_ms is -1.0; give 0 or more"),
    (("--growth", "--simulate-acceptance", "1"), "--growth times real drafters"),
    (("--json", "/nowhere/a.json"), "--json /nowhere/a.json: there is no folder /nowhere"),
    (("--markdown", "/"), "--markdown / is a folder"),
    (("--picture", "a.gif"), "picture a.gif ends in no .png, .svg, .pdf"),
    (("--drafter", "nope"), "no installed plugin has the kind 'nope'"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_gets_a_line_before_a_model_is_loaded(
    run: Bench, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("specdec.models.load_model", lambda *_, **__: pytest.fail("loaded"))
    status, out, err = run(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_picture_without_matplotlib_says_how_to_get_it(
    run: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run("--picture", "a.png")
    assert status == 2
    assert 'needs matplotlib; pip install "specdec-core[bench]"' in err


def test_the_built_in_sets_are_texts_and_ids_that_any_tokenizer_takes() -> None:
    assert BUILT_IN == bench.BUILT_IN
    tokenizer = tiny_tokenizer(5)
    for name in BUILT_IN:
        prompts = bench.built_in(name, tokenizer, VOCABULARY)
        assert 8 <= len(prompts) <= 12
        assert len(set(map(str, prompts))) == len(prompts)
        assert prompts[:3] == bench.built_in(name, tokenizer, VOCABULARY, limit=3)
        if name != "random":
            assert all(isinstance(text, str) and len(text) > 20 for text in prompts)
    chat = bench.built_in("chat", tokenizer, VOCABULARY, limit=1)
    assert chat[0] == "User: How do I list the files of a folder in Python?\n\nAssistant:"
    for wrong, message in (("x", "there is no prompt set 'x'"), ("code", "give a tokenizer")):
        with pytest.raises(OptionError, match=message):
            bench.built_in(wrong, None, VOCABULARY)


def test_copy_heavy_prompts_end_in_the_beginning_of_what_stands_in_them() -> None:
    for text in bench.built_in("copy-heavy", tiny_tokenizer(), VOCABULARY):
        assert isinstance(text, str)
        end = text[-20:]
        assert text.count(end) == 3


def test_random_prompts_have_no_special_ids_and_a_seed() -> None:
    tokenizer = tiny_tokenizer(5, 7)
    assert special_ids(tokenizer) >= {5, 7}
    first = bench.built_in("random", tokenizer, 10_000, seed=1)
    assert first == bench.built_in("random", tokenizer, 10_000, seed=1)
    assert first != bench.built_in("random", tokenizer, 10_000, seed=2)
    seen = {token for prompt in first for token in prompt}
    assert seen <= set(range(VOCABULARY)) - {5, 7}, "the tokenizer knows fewer ids than the model"
    assert len(seen) > VOCABULARY // 2
    with pytest.raises(OptionError, match="of 2 ids none is left"):
        bench.random_prompts(2, without=(0, 1))


def test_prompt_sets_are_named_in_short(tmp_path: Path, words: str) -> None:
    other = tmp_path / "a,b" / "words.jsonl"
    other.parent.mkdir()
    other.write_text('{"text": "w1"}\n')
    assert list(prompt_sets(str(other), None)) == ["words.jsonl"]
    assert prompt_sets(f"random,{words}", 1) == {"random": None, "words.jsonl": [WORDS[0]]}
    second = tmp_path / "b" / "words.jsonl"
    second.parent.mkdir()
    second.write_text('{"text": "w2"}\n')
    assert list(prompt_sets(f"{words},{second}", None)) == [words, str(second)]
    assert widths("4,default,2") == [None, 4, "default", 2]


def test_a_text_needs_a_tokenizer_and_ids_do_not() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(OptionError, match="is a text, and there is no tokenizer; give ids"):
        bench.compare(model, None, ["hello"])
    for wrong, message in (({"batches": [0]}, "batches has 0"), ({"widths": [0]}, "widths has 0")):
        with pytest.raises(OptionError, match=message):
            bench.compare(model, None, [[1, 2]], **wrong)  # type: ignore[arg-type]
    empty: list[Any] = [[], [[]], {"a": []}]
    for prompts in empty:
        with pytest.raises(OptionError, match="give prompts of one token or more"):
            bench.compare(model, None, prompts)


def test_time_that_runs_out_leaves_turns_and_sets_out() -> None:
    told: list[bench.Result] = []
    found = bench.compare(
        tiny_model("qwen3"),
        None,
        {"a": [[1, 2]] * 50, "b": [[3]] * 50},
        max_tokens=4,
        warmup=0,
        phase_turns=0,
        max_seconds=1e-6,
        told=told.append,
    )
    assert [result.prompt_set for result in found] in (["a"], [])
    assert found == told
    assert all(len(result.turns) == 1 for result in found)
