"""``auto`` takes what the model brings along, in one order, whatever is installed first."""

from __future__ import annotations

import json
import types
import warnings
from functools import partial
from importlib import metadata
from itertools import combinations
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import define, field, frozen
from scripted import ScriptedProvider
from tiny_models import tiny_model

from specdec import load_drafter, load_model
from specdec.errors import (
    AdapterError,
    ArtifactError,
    ContractError,
    OptionError,
    PluginError,
    SpecdecDrafterWarning,
    TargetLacksError,
    UnsupportedModelError,
)
from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, Registry, hookimpl, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@frozen
class Distribution:
    name: str
    version: str = "1.0"


@frozen
class Plugin:
    """An entry point that is not installed."""

    name: str
    kind: Callable[[], DraftKind]
    dist: Distribution

    def load(self) -> object:
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = 1
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: [self.kind()])
        return module


@define
class Shelf:
    """Plugins as they might be installed; remembers what was loaded, and how.

    A file ``<kind>.head`` stands for the tensors of a head or a drafter.
    """

    installed: Sequence[str] = ()
    log: list[tuple[str, str, Path | None]] = field(factory=list)
    fails: dict[str, Exception] = field(factory=dict)
    detector: Exception | None = None

    def kind(self, name: str) -> DraftKind:
        def load(request: LoadRequest) -> LoadedDraft:
            return self._made("load", request)

        def create(request: LoadRequest) -> LoadedDraft:
            return self._made("create", request)

        def detect(artifact: Artifact) -> bool:
            if self.detector is not None:
                raise self.detector
            return artifact.has(f"{name}.head") or artifact.has(f"{name}/{name}.head")

        if name == "ngram":
            return DraftKind(name=name, load=load, artifact=False)
        if name in ("mtp", "nextn"):
            bundled = "mtp" if name == "mtp" else None
            return DraftKind(name=name, load=load, create=create, detect=detect, bundled_at=bundled)
        if name == "assistant":
            return DraftKind(name=name, load=load, detect=detect, bundled_at="assistant")
        return DraftKind(name=name, load=load, detect=lambda _: True, fallback=True)

    def _made(self, verb: str, request: LoadRequest) -> LoadedDraft:
        self.log.append((request.kind, verb, request.path))
        if request.kind in self.fails:
            raise self.fails[request.kind]
        folder = request.path or request.target.folder
        if request.kind in ("mtp", "nextn"):
            assert folder is not None
            file = f"{request.kind}.head"
            if not (folder / file).exists() and not (folder / request.kind / file).exists():
                raise ArtifactError("it declares a head, but no tensors are there")
        return LoadedDraft(ScriptedProvider(), request.num_draft_tokens or 3)

    def registry(self, reverse: bool = False) -> Registry:
        entries = [
            Plugin(name, partial(self.kind, name), Distribution(f"specdec-{name}"))
            for name in self.installed
        ]
        found = entries[::-1] if reverse else entries
        with mock.patch.object(metadata, "entry_points", return_value=found):
            return Registry(scan(strict=True))


ALL = ("ngram", "mtp", "nextn", "assistant", "two-model")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf(ALL)
    registry = made.registry()
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: registry)
    return made


def folder_of(root: Path, *files: str, declares: bool = False, kind: str = "qwen3_5") -> Path:
    """A model's folder, with heads among its own files and in folders of their own."""
    config = {"model_type": kind, **({"mtp_num_hidden_layers": 1} if declares else {})}
    (root / "config.json").write_text(json.dumps(config))
    for file in files:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).touch()
    return root


def auto(folder: Path | None, **options: Any) -> Any:
    tokenizer = types.SimpleNamespace(name_or_path=None if folder is None else str(folder))
    return load_drafter("auto", tiny_model("qwen3"), tokenizer, **options)


CASES: list[tuple[tuple[str, ...], bool, tuple[str, str, str | None]]] = [
    ((), False, ("ngram", "load", None)),
    (("mtp.head",), True, ("mtp", "create", None)),
    (("mtp.head",), False, ("mtp", "create", None)),
    (("mtp/mtp.head",), True, ("mtp", "create", None)),
    (("mtp/mtp.head",), False, ("mtp", "load", "mtp")),
    (("assistant/assistant.head",), False, ("assistant", "load", "assistant")),
    (("assistant/assistant.head", "mtp/mtp.head"), False, ("assistant", "load", "assistant")),
    (("assistant/assistant.head", "mtp.head"), True, ("mtp", "create", None)),
    (("assistant/assistant.head", "mtp.head"), False, ("assistant", "load", "assistant")),
    (("nextn.head", "mtp.head"), False, ("mtp", "create", None)),
    (("nextn.head",), False, ("nextn", "create", None)),
    (("assistant/other",), False, ("ngram", "load", None)),
    (("mtp",), False, ("ngram", "load", None)),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("files", "declares", "wanted"), CASES)
def test_what_the_folder_holds_decides(
    shelf: Shelf,
    tmp_path: Path,
    files: tuple[str, ...],
    declares: bool,
    wanted: tuple[str, str, str | None],
) -> None:
    folder_of(tmp_path, *files, declares=declares)
    name, verb, place = wanted
    with auto(tmp_path) as loaded:
        assert loaded.kind == name
    assert shelf.log == [(name, verb, None if place is None else tmp_path / place)]


def subsets() -> Iterator[tuple[str, ...]]:
    for size in range(len(ALL) + 1):
        yield from combinations(ALL, size)


@pytest.mark.parametrize(
    "installed", list(subsets()), ids=lambda names: "+".join(names) or "nothing"
)
def test_every_subset_of_plugins_in_either_order_takes_the_best_that_is_installed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...]
) -> None:
    shelf.installed = installed
    folder_of(tmp_path, "mtp.head", "assistant/assistant.head", declares=True)
    best = next((name for name in ("mtp", "assistant", "ngram") if name in installed), None)
    warned = None if "mtp" in installed else "pip install specdec-mtp"
    for reverse in (False, True):
        registry = shelf.registry(reverse)
        monkeypatch.setattr(
            "specdec.drafters.default_registry", partial(lambda found: found, registry)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if best is None:
                with pytest.raises(PluginError, match=r"auto: .*pip install specdec-ngram"):
                    auto(tmp_path)
            else:
                with auto(tmp_path) as loaded:
                    assert loaded.kind == best
        said = [str(each.message) for each in caught if each.category is SpecdecDrafterWarning]
        assert len(said) == (warned is not None)
        assert all(warned is not None and warned in line and "\n" not in line for line in said)


@pytest.mark.parametrize(
    "error",
    [
        ArtifactError("its file is cut short"),
        TargetLacksError("recurrent_mtp", "the mtp head"),
        AdapterError("mtp", ["layers.0"]),
        UnsupportedModelError("its layers are of a kind that is not driven"),
        OptionError("draft_vocab lists 9 ids, but this target's head cannot be cut to them"),
        ContractError("draft_vocabulary() begins (9, 3)"),
    ],
)
def test_a_head_that_does_not_load_is_passed_over_with_one_line(
    shelf: Shelf, tmp_path: Path, error: Exception
) -> None:
    shelf.fails["mtp"] = error
    folder_of(tmp_path, "mtp.head", "mtp/mtp.head", declares=True)
    with pytest.warns(SpecdecDrafterWarning) as caught, auto(tmp_path) as loaded:
        assert loaded.kind == "ngram"
    [warning] = caught
    text = str(warning.message)
    assert text.startswith("drafter auto: the head that the model declares (mtp) is passed over: ")
    assert str(error).splitlines()[0][:20] in text
    assert "\n" not in text
    assert [name for name, _, _ in shelf.log] == ["mtp", "ngram"], "it is tried once"


def test_a_declared_head_whose_tensors_are_missing_is_passed_over_for_a_companion(
    shelf: Shelf, tmp_path: Path
) -> None:
    folder_of(tmp_path, "assistant/assistant.head", declares=True)
    with (
        pytest.warns(SpecdecDrafterWarning, match="declares a head, but no tensors"),
        auto(tmp_path) as loaded,
    ):
        assert loaded.kind == "assistant"


def test_other_mistakes_of_a_drafter_are_raised(shelf: Shelf, tmp_path: Path) -> None:
    shelf.fails["mtp"] = ZeroDivisionError("a fault of the plugin")
    folder_of(tmp_path, "mtp.head", declares=True)
    with pytest.raises(ZeroDivisionError):
        auto(tmp_path)


def test_a_detector_that_fails_is_no_yes(shelf: Shelf, tmp_path: Path) -> None:
    shelf.detector = KeyError("block_size")
    folder_of(tmp_path, "assistant/assistant.head")
    with pytest.warns(SpecdecDrafterWarning) as caught, auto(tmp_path) as loaded:
        assert loaded.kind == "ngram"
    assert any("assistant failed: KeyError" in str(each.message) for each in caught)


@pytest.mark.filterwarnings("error")
def test_a_model_whose_folder_is_not_known_gets_the_copy(shelf: Shelf) -> None:
    with auto(None, num_draft_tokens=5) as loaded:
        assert (loaded.kind, loaded.num_draft_tokens) == ("ngram", 5)


def test_auto_has_no_options_but_the_number(shelf: Shelf, tmp_path: Path) -> None:
    folder_of(tmp_path)
    with pytest.raises(OptionError, match="option max_ngram: drafter auto has no options"):
        auto(tmp_path, max_ngram=3)
    with pytest.raises(OptionError, match="num_draft_tokens is 0"):
        auto(tmp_path, num_draft_tokens=0)
    assert shelf.log == []


@pytest.mark.filterwarnings("error::specdec.errors.SpecdecDrafterWarning")
def test_the_bundled_models_get_their_own_head_and_the_copy() -> None:
    with load_drafter("auto", *load_model("demo-qwen3_5")) as loaded:
        assert loaded.kind == "mtp"
    with load_drafter("auto", *load_model("demo")) as loaded:
        assert loaded.kind == "ngram"
