"""``specdec plugins`` and ``specdec detect`` show everything, in text that pipes well."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import field, frozen

from specdec.cli.listing import add_parsers, run_detect, run_plugins
from specdec.drafters import check_drafter
from specdec.errors import ArtifactError, SpecdecError, UnrecognizedArtifactError
from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl
from specdec.plugins.models import find_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@frozen
class FakeDistribution:
    name: str
    version: str = "0.1.0"


@frozen
class Plugin:
    """An entry point of a distribution ``specdec-<name>`` that offers the given kinds."""

    name: str
    kinds: Sequence[DraftKind] = ()
    api: int = 1
    error: Exception | None = None
    dist: FakeDistribution = field()

    @dist.default
    def _distribution(self) -> FakeDistribution:
        return FakeDistribution(f"specdec-{self.name}")

    def load(self) -> object:
        if self.error is not None:
            raise self.error
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = self.api
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: list(self.kinds))
        return module


def never_loaded(request: LoadRequest) -> LoadedDraft:
    raise AssertionError("a listing must not load drafters")


def kind(name: str, **fields: Any) -> DraftKind:
    return DraftKind(name=name, load=never_loaded, **fields)


def has_mtp(artifact: Artifact) -> bool:
    return artifact.has("mtp.safetensors")


def fails(artifact: Artifact) -> bool:
    raise KeyError("block_size")


MTP = Plugin("mtp", [kind("mtp", detect=has_mtp, bundled_at="mtp", default_width=3)])
NGRAM = Plugin("ngram", [kind("ngram", summary="looks the prompt up")])
DFLASH = Plugin("dflash", [kind("dflash", detect=fails)])
OLD = Plugin("old", api=0, dist=FakeDistribution("acme-drafter", "2.3.1"))
BAD = Plugin("bad", error=ImportError("no module named 'acme'"))


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mtp.safetensors").write_bytes(b"")
    return tmp_path


def run(words: str, *plugins: Plugin) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(words.split())
    with mock.patch.object(metadata, "entry_points", return_value=plugins):
        code = args.run(args)
    assert isinstance(code, int)
    return code


def test_plugins_are_listed_as_an_aligned_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plugins", NGRAM, OLD, MTP, Plugin("two-model", [kind("two", fallback=True)])) == 0
    assert capsys.readouterr().out.splitlines() == [
        "KIND   PLUGIN             VERSION  API  ARTIFACT          STATUS",
        "mtp    specdec-mtp        0.1.0    1    detects, bundled  ok",
        "ngram  specdec-ngram      0.1.0    1    none, by name     ok",
        "two    specdec-two-model  0.1.0    1    fallback          ok",
        "-      acme-drafter       2.3.1    0    -                 "
        "broken (api): wants API 0, this core offers 1; upgrade acme-drafter",
    ]


def test_disabled_contested_and_empty_plugins_are_listed_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "mtp")
    rival = Plugin("rival", [kind("ngram")])
    assert run("plugins", NGRAM, rival, MTP, Plugin("empty")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "conflict: kind 'ngram' is registered by" in line]) == 2
    assert any(line.endswith("disabled by SPECDEC_DISABLE_PLUGINS") for line in lines)
    assert any("specdec-empty" in line and line.endswith("ok, without a kind") for line in lines)


def test_an_empty_listing_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plugins") == 0
    assert "pip install specdec-ngram" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plugins", "code"),
    [
        ([NGRAM, MTP], 0),
        ([NGRAM, BAD], 1),
        ([NGRAM, Plugin("rival", [kind("ngram")])], 1),
    ],
)
def test_strict_exits_1_for_any_fault(
    plugins: list[Plugin], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("plugins", *plugins) == 0
    assert run("plugins --strict", *plugins) == code
    assert run("plugins --strict --json", *plugins) == code
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", "1")
    assert run("plugins", *plugins) == code


def test_verbose_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run("plugins", BAD)
    assert "Traceback" not in capsys.readouterr().out
    run("plugins --verbose", BAD)
    out = capsys.readouterr().out
    assert "specdec-bad 0.1.0:\nTraceback" in out
    assert out.endswith("ImportError: no module named 'acme'\n")


def test_plugins_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "dflash")
    run("plugins --json", NGRAM, MTP, OLD, DFLASH, Plugin("rival", [kind("ngram")]))
    found = json.loads(capsys.readouterr().out)
    assert (found["api"], found["supported_api"]) == (1, [1])
    assert [(k["kind"], k["plugin"], k["status"]) for k in found["kinds"]] == [
        ("mtp", "specdec-mtp", "ok"),
        ("ngram", "specdec-ngram", "conflict"),
        ("ngram", "specdec-rival", "conflict"),
    ]
    assert found["kinds"][0]["bundled_at"] == "mtp"
    assert found["kinds"][1]["summary"] == "looks the prompt up"
    (broken,) = found["broken"]
    assert (broken["plugin"], broken["stage"], broken["api"]) == ("acme-drafter", "api", 0)
    assert "traceback" not in broken
    assert [item["entry"] for item in found["disabled"]] == ["dflash"]
    assert [item["kind"] for item in found["conflicts"]] == ["ngram"]


def test_verbose_json_carries_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run("plugins --json --verbose", BAD)
    (broken,) = json.loads(capsys.readouterr().out)["broken"]
    assert broken["traceback"].startswith("Traceback")


def test_detect_prints_every_answer_and_the_choice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"detect {folder}", NGRAM, MTP, DFLASH, BAD) == 0
    assert capsys.readouterr().out.splitlines() == [
        "KIND    PLUGIN                ANSWER",
        "dflash  specdec-dflash 0.1.0  failed: KeyError: 'block_size'",
        "mtp     specdec-mtp 0.1.0     yes",
        "-       specdec-bad 0.1.0     not asked: broken (import): "
        "ImportError: no module named 'acme'",
        "choice: mtp, by specdec-mtp 0.1.0",
    ]


def test_detect_says_when_the_choice_is_the_fallback(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"detect {folder}", Plugin("two-model", [kind("two-model", fallback=True)])) == 0
    out = capsys.readouterr().out
    assert out == "choice: two-model, by specdec-two-model 0.1.0 (fallback)\n"


def test_detect_prints_the_answers_before_it_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnrecognizedArtifactError):
        run(f"detect {tmp_path}", MTP)
    assert "mtp   specdec-mtp 0.1.0  no" in capsys.readouterr().out


def test_detect_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"detect {folder} --json", MTP, DFLASH, BAD) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(folder)
    assert [(a["kind"], a["answer"]) for a in found["answers"]] == [
        ("dflash", "failed"),
        ("mtp", "yes"),
    ]
    assert [item["plugin"] for item in found["not_asked"]] == ["specdec-bad"]
    assert (found["choice"], found["error"]) == ("mtp", None)


def test_detect_as_json_carries_the_error_and_raises_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecdecError) as caught:
        run(f"detect {folder} --json", Plugin("acme", [kind("acme", detect=has_mtp)]), MTP)
    found = json.loads(capsys.readouterr().out)
    assert (found["choice"], found["error"]) == (None, str(caught.value))


def test_detect_of_nothing_readable_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / "nested").mkdir(parents=True)
    for path, text in (("missing", "there is no file or folder"), ("empty", "no readable files")):
        with pytest.raises(ArtifactError, match=text) as caught:
            run_detect(argparse.Namespace(path=str(tmp_path / path), json=False))
        assert len(str(caught.value).splitlines()) == 1
    assert capsys.readouterr().out == ""


def test_a_single_file_can_be_detected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnrecognizedArtifactError):
        run(f"detect {folder / 'mtp.safetensors'}", MTP)
    assert "no" in capsys.readouterr().out


def test_detect_knows_bundled_names_as_generating_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recognised = Plugin("dflash", [kind("dflash", detect=lambda a: "dflash_config" in a.config)])
    name = "demo-qwen3-dflash"
    assert run(f"detect {name} --json", recognised) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["choice"]) == (str(find_model(name)), "dflash")
    assert check_drafter(name)[1] == find_model(name)
    # What is at the path comes first, as there.
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(UnrecognizedArtifactError, match=f"recognises {name};"):
        run(f"detect {name}", recognised)


def test_bundled_names_are_found_without_mlx() -> None:
    code = """
import sys
for name in ("mlx", "mlx.core", "mlx_lm", "transformers", "numpy"):
    sys.modules[name] = None
from specdec.cli import main
sys.exit(main(("detect", "demo-qwen3-dflash")))
"""
    asked = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("choice: dflash, by specdec-dflash ")


def test_the_commands_work_from_a_plain_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(metadata, "entry_points", return_value=[NGRAM]):
        assert run_plugins(argparse.Namespace(json=False, strict=False, verbose=False)) == 0
    assert "ngram" in capsys.readouterr().out
