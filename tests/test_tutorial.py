"""What the tutorial and the contract reference say is so: quotations, commands, names."""

from __future__ import annotations

import argparse
import ast
import json
import pkgutil
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import mlx.core as mx
import pytest
from attrs import frozen
from tiny_models import random_state

from specdec import contract, testing
from specdec.chain import ChainMember, ChainProvider
from specdec.cli.main import build_parser
from specdec.cli.options import drafter_options
from specdec.testing import CHECKS, DraftRowContract, PluginContract
from specdec.testing.profiles import PROFILES
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.contract import DraftProvider

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "write-a-drafter.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "contract.md").read_text(encoding="utf-8")
EXAMPLE = DOCS / "examples" / "specdec-echo"

KIT_NAMES = {*CHECKS, "row_machine"}
PLUGIN_NAMES = {
    name.removeprefix("test_") for name in vars(PluginContract) if name.startswith("test_")
}


@frozen
class Block:
    """A fenced block: its language, the file that it claims to be from, and its text."""

    language: str
    path: str
    text: str


def blocks(page: str) -> list[Block]:
    found = re.findall(r"^```(\w*) ?(\S*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found]


QUOTED = [block for block in blocks(TUTORIAL) if block.path]
OWN = [block for block in blocks(TUTORIAL) + blocks(REFERENCE) if not block.path]


# Code.


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.path)
def test_what_is_quoted_from_the_package_is_in_it(block: Block) -> None:
    assert block.text in (EXAMPLE / block.path).read_text(encoding="utf-8"), (
        f"this is not in {EXAMPLE / block.path}:\n{block.text}"
    )


def test_every_source_of_the_package_is_quoted() -> None:
    sources = {path.relative_to(EXAMPLE).as_posix() for path in EXAMPLE.glob("src/*/[!_]*.py")}
    assert sources | {"pyproject.toml", "tests/test_contract.py"} == {b.path for b in QUOTED}


def test_all_other_code_can_be_read() -> None:
    for block in OWN:
        if block.language == "python":
            ast.parse(textwrap.dedent(block.text))
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            assert block.language in ("sh", ""), block


# Commands.


def commands(page: str) -> Iterator[list[str]]:
    for block in blocks(page):
        if block.language == "sh":
            yield from map(shlex.split, block.text.splitlines())


def check_specdec(words: Sequence[str]) -> None:
    arguments = build_parser().parse_args(words)
    drafter = getattr(arguments, "drafter", [])
    assert set([drafter] if isinstance(drafter, str) else drafter) <= {"echo"}


def check_pip(words: Sequence[str]) -> None:
    assert words[0] in ("install", "wheel")
    for word in words:
        if word.startswith("/path/to/specdec/"):
            name, _, extras = word.removesuffix("]").partition("[")
            project = ROOT / name.removeprefix("/path/to/specdec/") / "pyproject.toml"
            offered = tomllib.loads(project.read_text())["project"].get("optional-dependencies", {})
            assert set(extras.split(",") if extras else []) <= set(offered)
        elif word.startswith(".["):
            project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
            assert word[2:-1] in project["optional-dependencies"]


def check_pytest(words: Sequence[str]) -> None:
    options = iter(words)
    for word in options:
        if word == "-k":
            assert next(options) in KIT_NAMES
        else:
            assert word in ("-x", "--tb=short")


def test_the_commands_are_real() -> None:
    seen = set()
    for found in commands(TUTORIAL):
        words = found
        if words[0].startswith("SPECDEC_PROFILE="):
            assert words[0].partition("=")[2] in PROFILES
            words = words[1:]
        seen.add(words[0])
        match words:
            case ["specdec", *rest]:
                check_specdec(rest)
            case ["pip", *rest]:
                check_pip(rest)
            case ["python", "-m", "pytest", *rest]:
                check_pytest(rest)
            case ["cd", folder]:
                assert folder == EXAMPLE.name
            case [".", ".venv/bin/activate"] | ["python3", "-m", "venv", ".venv"]:
                pass
            case _:
                raise AssertionError(f"what is {shlex.join(words)}?")
    assert {"specdec", "pip", "python", "cd"} <= seen


def test_the_readme_of_the_package_has_real_commands() -> None:
    for words in commands((EXAMPLE / "README.md").read_text(encoding="utf-8")):
        if words[0] == "specdec":
            check_specdec(words[1:])


def test_a_mistyped_command_would_be_noticed() -> None:
    with pytest.raises(SystemExit):
        check_specdec(["generate", "--drafters", "echo", "--prompt", "one"])
    assert isinstance(build_parser(), argparse.ArgumentParser)


# The failing check.


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DraftRowContract]]:
    """The kit for the package in the documentation, which is forgotten again afterwards."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    from specdec_echo.provider import EchoProvider

    class Rows(DraftRowContract):
        shrink = False

        def make_provider(self) -> DraftProvider:
            return EchoProvider(memory=8)

        def make_other_provider(self) -> DraftProvider:
            return EchoProvider(memory=16)

    yield Rows
    for name in [name for name in sys.modules if name.partition(".")[0] == "specdec_echo"]:
        del sys.modules[name]


def first_failure(kit: type[DraftRowContract]) -> tuple[str, str]:
    """The check at which ``pytest -x`` stops, and the first line of what it says."""
    for name in kit.check_names():
        try:
            kit().run_check(name)
        except pytest.skip.Exception:
            continue
        except AssertionError as error:
            return name, str(error).splitlines()[0]
    raise AssertionError("every check passes")


def test_the_failing_check_fails_as_it_is_shown(
    echo: type[DraftRowContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tutorial's mistake, the kit stops where the tutorial says, with its sentence."""
    from specdec_echo.rows import EchoRows

    right: Any = EchoRows.filter_rows

    def in_the_wrong_order(self: EchoRows, keep: Sequence[int], /) -> None:
        right(self, sorted(keep))

    assert "for row in sorted(keep)" in TUTORIAL
    assert "for row in keep]" in (EXAMPLE / "src/specdec_echo/rows.py").read_text()
    (shown,) = [block.text for block in blocks(TUTORIAL) if "AssertionError" in block.text]
    (sentence,) = re.findall(r"AssertionError: (.*)", shown)
    monkeypatch.setattr(EchoRows, "filter_rows", in_the_wrong_order)
    name, said = first_failure(echo)
    assert f" TestRows.test_{name} " in shown
    assert shape_of(said) == shape_of(sentence)


def shape_of(sentence: str) -> str:
    """A message without the numbers and lists that depend on the example."""
    return re.sub(r"\d+", "0", re.sub(r"\[.*?\](?=[,; ]|$)|\[.*\]$", "[]", sentence))


# Snippets that run.


def snippets(page: str, title: str) -> str:
    """The Python of one section."""
    section = sections(re.sub(r"^(# .*)$", r" \1", page, flags=re.MULTILINE))[title]
    return "\n".join(block.text for block in blocks(section) if block.language == "python")


def run(code: str, folder: Path) -> dict[str, Any]:
    """The names that code defines, run as a script of its own."""
    script = folder / "snippets.py"
    script.write_text(code, encoding="utf-8")
    return runpy.run_path(str(script))


def test_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = snippets(page, "Use it from Python")
    assert "prefix_cache=cache" in code
    found = run(code, tmp_path)
    stats = found["response"].stats
    assert stats.drafter == "ngram"
    assert stats.cached_tokens == len(found["system"]) > 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("0 ")
    assert second == f"{stats.cached_tokens} {stats.time_to_first_token}"


def test_the_servers_snippets_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "checkpoints-and-prefix-cache.md").read_text(encoding="utf-8")
    found = run(snippets(page, "In a server"), tmp_path)
    rows = found["rows"]
    assert [row.stats.cached_tokens for row in rows] == [0, len(found["system"])]
    assert all(row.emitted and row.stats.time_to_first_token > 0 for row in rows)
    assert [row.stats.reason for row in rows] == [None, None]
    assert capsys.readouterr().out.count("\n") >= len(rows)
    assert (found["none"], found["cached"]) == (0, len(found["tokens"]))
    assert found["branch"] == 2


def test_the_snippets_about_requests_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "requests.md").read_text(encoding="utf-8")
    code = "\n".join(block.text for block in blocks(page) if block.language == "python")
    found = run(code, tmp_path)
    assert found["response"].finish_reason in ("stop", "length")
    assert set(json.loads(found["text"])) == {"name", "age"}
    printed = capsys.readouterr().out
    assert printed.count("TokenLogprobs(") > 4


def test_the_snippet_about_batches_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "batches.md").read_text(encoding="utf-8")
    code = "\n".join(block.text for block in blocks(page) if block.language == "python")
    found = run(code, tmp_path)
    assert set(found["texts"]) == set(found["uids"])
    assert all(found["texts"].values())
    assert capsys.readouterr().out.count("\n") == 3


def test_the_snippet_about_a_draft_model_of_ones_own_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "draft-models.md").read_text(encoding="utf-8")
    found = run(snippets(page, "A model of your own"), tmp_path)
    stats = found["response"].stats
    assert (stats.drafter, stats.reason, stats.draft_errors) == ("own", None, 0)
    assert stats.tokens_per_forward > 1.2
    own = found["provider"].grouped.model.model
    assert own is found["draft_model"], "the second argument is the draft model"
    said = f"{stats.tokens_per_forward:.2f} tokens per forward"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_the_ways_to_build_a_model_leave_the_random_state_alone(tmp_path: Path) -> None:
    page = (DOCS / "conformance-kit.md").read_text(encoding="utf-8")
    code = snippets(page, "Models that are built")
    made = "import mlx.nn as nn\ndef Model(args):\n    return nn.Linear(*args)\nargs = (3, 2)\n"
    found = run(code + made, tmp_path)
    once = found["built_once"]()
    mx.random.seed(7)
    before = random_state()
    anew = [found["built_anew"]() for _ in range(2)]
    assert found["built_once"]() is once
    assert random_state() == before
    assert all(mx.array_equal(once.weight, each.weight).item() for each in anew)


def test_the_device_draft_keeps_copies_of_its_arguments(
    echo: type[DraftRowContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_echo.rows import EchoRows

    (code,) = [block.text for block in blocks(TUTORIAL) if "def draft_device" in block.text]
    names: dict[str, Any] = {"mx": mx, "DeviceProposal": contract.DeviceProposal}
    exec(code, names)

    def lazily(_rows: EchoRows, pending: list[int], depths: list[int], _steps: object) -> mx.array:
        return mx.array([[head] * max(depths) for head in pending])

    monkeypatch.setattr(EchoRows, "_draft_lazily", lazily, raising=False)
    monkeypatch.setattr(EchoRows, "draft_device", names["draft_device"], raising=False)
    for name in (
        "arguments_are_borrowed",
        "device_drafts_have_one_shape",
        "verbs_keep_their_order",
    ):
        echo().run_check(name)


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "drafts on"])
def test_the_snippet_about_standing_down_is_what_the_kit_asks_for(
    silent: bool, echo: type[DraftRowContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_echo.history import History
    from specdec_echo.rows import EchoRows

    (code,) = [block.text for block in blocks(TUTORIAL) if "def stood_down" in block.text]
    names: dict[str, Any] = {}
    exec(code, names)
    right: Any = History.draft

    def within(self: History, pending: int, depth: int) -> list[int]:
        drafts: list[int] = right(self, pending, depth if self.count < 12 or not silent else 0)
        return drafts

    monkeypatch.setattr(EchoRows, "_limit", 12, raising=False)
    monkeypatch.setattr(EchoRows, "stood_down", names["stood_down"], raising=False)
    monkeypatch.setattr(History, "draft", within)
    if silent:
        echo().run_check("stood_down_rows_stay_down")
    else:
        with pytest.raises(AssertionError, match="its 12 positions are full"):
            echo().run_check("stood_down_rows_stay_down")


def test_the_drafter_consumes_and_stands_in_a_chain(echo: type[DraftRowContract]) -> None:
    """As it is written: nothing has to be added for a chain or for what a grammar forces."""
    from specdec_echo.provider import EchoProvider

    made = echo().make_kit()
    with made.open([made.cold((0,))]) as rows:
        assert isinstance(rows.group, contract.SupportsConsume)
    for name in CHECKS:
        if CHECKS[name].needs == "consume":
            echo().run_check(name)

    class Chain(DraftRowContract):
        settings = hypothesis.settings(max_examples=3, deadline=None, database=None)

        def make_provider(self) -> DraftProvider:
            own = ChainMember("echo", EchoProvider(memory=8), 4)
            return ChainProvider([own, ChainMember("ngram", NgramProvider(), 4)])

    for name in ("rows_draft_as_alone", "rows_draft_as_cold_rows", "greedy_text_is_the_targets"):
        Chain().run_check(name)


def test_the_tiny_target_is_what_the_pages_say() -> None:
    port = testing.TinyTarget(DraftRowContract.vocab_size).hidden_taps
    kit = (DOCS / "conformance-kit.md").read_text(encoding="utf-8")
    for page in (TUTORIAL, kit):
        assert f"`hidden_size={port.hidden_size}` and `layers={port.layer_count}`" in page
    assert f"`vocab_size` is {DraftRowContract.vocab_size}" in kit


def test_options_arrive_as_the_tutorial_says() -> None:
    given = {"memory=8": 8, "a=0.5": 0.5, "a=true": True, "a=null": None, "a=[1,2]": [1, 2]}
    for text, value in {**given, "a=word": "word"}.items():
        arguments = argparse.Namespace(option=[text])
        (arrived,) = drafter_options(arguments).values()
        assert (type(arrived), arrived) == (type(value), value)


# The reference.


def members() -> Iterator[tuple[str, str]]:
    for name in contract.__all__:
        protocol = getattr(contract, name)
        if getattr(protocol, "_is_protocol", False):
            for base in reversed(protocol.__mro__):
                if getattr(base, "_is_protocol", False) and base.__module__.startswith("specdec"):
                    for member in vars(base):
                        if not member.startswith("_"):
                            yield name, member


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def mentioned(page: str) -> set[str]:
    """Names in code spans: of a call, the name that is called."""
    without_blocks = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", without_blocks)
    return {re.split(r"[(=\[ ]", span)[0].rpartition(".")[2] for span in spans}


def dotted(page: str) -> set[str]:
    """Names that are given with their module, such as ``specdec.load_drafter``."""
    return set(re.findall(r"`(specdec(?:\.\w+)+)", page))


@pytest.mark.parametrize("page", ["contract.md", "write-a-drafter.md"])
def test_a_name_with_its_module_can_be_imported(page: str) -> None:
    for name in dotted((DOCS / page).read_text(encoding="utf-8")) - {"specdec.providers"}:
        assert pkgutil.resolve_name(name) is not None


def test_every_member_of_every_protocol_is_in_the_reference() -> None:
    found = list(members())
    assert ("DraftRowGroup", "prepare_append") in found, "the walk misses inherited members"
    assert ("TargetView", "can_tap") in found
    named = mentioned(REFERENCE)
    missing = [f"{protocol}.{member}" for protocol, member in found if member not in named]
    assert not missing, f"docs/contract.md does not name {', '.join(missing)}"
    absent = [name for name in contract.__all__ if name not in named]
    assert not absent, f"docs/contract.md does not name {', '.join(absent)}"


def test_a_section_names_the_members_of_its_protocol() -> None:
    parts = sections(REFERENCE)
    shared = parts["Both kinds of group"]
    for name in ("DraftProvider", "GroupedDraftProvider", "PendingChange"):
        own = {member for protocol, member in members() if protocol == name}
        assert own <= mentioned(parts[name])
    for name in ("DraftPrefillGroup", "DraftRowGroup"):
        own = {member for protocol, member in members() if protocol == name}
        assert own <= mentioned(parts[name] + shared)


def test_the_reference_lists_the_checks_of_the_kit_and_no_others() -> None:
    table = sections(REFERENCE)["The checks of the kit"]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    lines = [
        f"| `{name}` | {' '.join(CHECKS[name].doc.split())} | |"
        for name in CHECKS
        if name not in listed
    ]
    assert not lines, "docs/contract.md does not list:\n" + "\n".join(lines)
    assert [name for name in listed if name not in KIT_NAMES] == []
    assert len(set(listed)) == len(listed)
    for name, check in CHECKS.items():
        (note,) = re.findall(rf"^\| `{name}` \|.*\| ?(.*?) ?\|$", table, re.MULTILINE)
        assert (f"`{check.needs}`" in note) is (check.needs is not None), name
        assert ("history" in note) is check.history_only, name


@pytest.mark.parametrize("page", ["contract.md", "write-a-drafter.md"])
def test_no_check_is_named_that_does_not_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("contract", "plugins", "testing")
        for path in (ROOT / "core" / "src" / "specdec" / folder).rglob("*.py")
    )
    known = KIT_NAMES | PLUGIN_NAMES | set(re.findall(r"\w+", sources))
    names = {name for name in mentioned(text) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name)}
    names -= {name.rpartition(".")[2] for name in dotted(text)}
    names |= set(re.findall(r"-k (\w+)", text)) | set(re.findall(r"TestRows\.test_(\w+)", text))
    assert names <= known
    held = re.findall(r"^\| I\d \|.*\|(.*)\|$", text, re.MULTILINE)
    assert all(mentioned(cell) <= KIT_NAMES | {"refuse"} for cell in held)


def test_each_invariant_says_what_holds_it() -> None:
    rows = re.findall(r"^\| (I\d) \|.*\|(.*)\|$", REFERENCE, re.MULTILINE)
    assert [number for number, _ in rows] == [f"I{n}" for n in range(1, 8)]
    assert all(cell.strip() for _, cell in rows)


@pytest.mark.parametrize("page", ["contract.md", "write-a-drafter.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        assert (DOCS / path).exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (DOCS / path).read_text(), re.MULTILINE)
            assert anchor in [title.lower().replace(" ", "-") for title in titles], link


def test_the_kit_has_what_the_tutorial_tells_of_it() -> None:
    for attribute in ("state_is_history", "expected_failures", "shrink"):
        assert f"`{attribute}" in TUTORIAL or f"{attribute} =" in TUTORIAL
        assert hasattr(DraftRowContract, attribute)
    assert {"DraftRowContract", "PluginContract"} <= set(testing.__all__)
    (named,) = re.findall(r"expected_failures = (\{.*\})", TUTORIAL)
    assert set(ast.literal_eval(named)) <= KIT_NAMES
