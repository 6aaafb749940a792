"""Loading a drafter: by kind, by folder, by name; what does not fit is refused here, and closed."""

from __future__ import annotations

import json
import types
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import frozen
from scripted import RIGHT, Fault, Script, ScriptedProvider, text_of, tiny_tokenizer
from tiny_models import HYBRID, tiny_model

import specdec
from specdec import LoadedDrafter, bind_target, load_drafter, load_model, stream_generate
from specdec.contract import ContextKind
from specdec.errors import (
    AmbiguousArtifactError,
    ArtifactError,
    OptionError,
    ProviderError,
    SpecdecError,
    TargetLacksError,
    UnknownKindError,
    UnrecognizedArtifactError,
    UnsupportedModelError,
)
from specdec.plugins import (
    Artifact,
    DraftKind,
    LoadedDraft,
    LoadRequest,
    Registry,
    hookimpl,
    scan,
)
from specdec.targets import MlxLmTarget
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = (5, 9, 40, 3, 22, 17)


@frozen
class Distribution:
    name: str = "specdec-fake"
    version: str = "1.0"


@frozen
class Entry:
    """An entry point that is not installed."""

    kinds: tuple[DraftKind, ...]
    bind: Callable[..., Any] | None = None
    name: str = "fake"
    dist: Distribution = Distribution()

    def load(self) -> object:
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = 1
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: list(self.kinds))
        if self.bind is not None:
            vars(module)["specdec_bind_target"] = hookimpl(self.bind)
        return module


class Kinds:
    """Kinds that load what a test gives them; remembers the requests."""

    def __init__(self) -> None:
        self.provider: Any = ScriptedProvider()
        self.limit: int | None = None
        self.requests: list[LoadRequest] = []

    def load(self, request: LoadRequest) -> LoadedDraft:
        self.requests.append(request)
        return LoadedDraft(
            provider=self.provider,
            num_draft_tokens=request.num_draft_tokens or 5,
            max_draft_tokens=self.limit,
        )

    def detect(self, artifact: Artifact) -> bool:
        return (artifact.config or {}).get("scripted") is True

    def entry(self) -> Entry:
        return Entry(
            (
                DraftKind(name="scripted", load=self.load, artifact=False),
                DraftKind(name="scripted-folder", load=self.load, detect=self.detect),
                DraftKind(name="scripted-twin", load=self.load, detect=self._twin),
            )
        )

    def _twin(self, artifact: Artifact) -> bool:
        return (artifact.config or {}).get("twin") is True


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Kinds:
    """The scripted kinds, as if a plugin had brought them; nothing else is installed."""
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    made = Kinds()
    with mock.patch.object(metadata, "entry_points", return_value=[made.entry()]):
        registry = Registry(scan(strict=True))
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: registry)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "drafter"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"scripted": True}))
    return made


# Found.


def test_a_kind_without_files_is_loaded_by_its_name(kinds: Kinds) -> None:
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    loaded = load_drafter("scripted", model, tokenizer, temperature=3, depth="deep")
    assert isinstance(loaded, LoadedDrafter)
    assert (loaded.kind, loaded.num_draft_tokens, loaded.max_draft_tokens) == ("scripted", 5, None)
    assert loaded.provider is kinds.provider
    assert loaded.target.identity is model
    [request] = kinds.requests
    assert (request.kind, request.path, request.num_draft_tokens) == ("scripted", None, None)
    assert request.tokenizer is tokenizer
    assert request.target is loaded.target
    assert dict(request.options) == {"temperature": 3, "depth": "deep"}


@pytest.mark.parametrize("as_text", [True, False])
def test_a_folder_is_loaded_as_the_kind_that_knows_it(
    kinds: Kinds, folder: Path, as_text: bool
) -> None:
    loaded = load_drafter(str(folder) if as_text else folder, tiny_model("qwen3"))
    assert loaded.kind == "scripted-folder"
    assert kinds.requests[0].path == folder


def test_a_folder_is_loaded_as_the_kind_that_is_named(kinds: Kinds, folder: Path) -> None:
    loaded = load_drafter(folder, tiny_model("qwen3"), kind="scripted-twin")
    assert loaded.kind == kinds.requests[0].kind == "scripted-twin"


def test_a_folder_in_the_working_directory_is_found_by_its_name(
    kinds: Kinds, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert load_drafter("drafter", tiny_model("qwen3")).kind == "scripted-folder"
    # A kind's name means the kind, whatever stands in the working directory.
    (folder.parent / "scripted").mkdir()
    assert load_drafter("scripted", tiny_model("qwen3")).kind == "scripted"


def test_a_bundled_drafter_is_found_by_its_name(
    kinds: Kinds, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specdec.drafters.find_model", lambda name: folder if name == "bundled" else None
    )
    loaded = load_drafter("bundled", tiny_model("qwen3"))
    assert loaded.kind == "scripted-folder"
    assert kinds.requests[0].path == folder


def test_the_number_of_drafts_is_the_kinds_own_unless_it_is_given(kinds: Kinds) -> None:
    model = tiny_model("qwen3")
    loaded = load_drafter("scripted", model, num_draft_tokens=3)
    assert kinds.requests[0].num_draft_tokens == loaded.num_draft_tokens == 3
    assert [loaded.width(asked) for asked in (None, 1, 9)] == [3, 1, 9]
    kinds.limit = 4
    loaded = load_drafter("scripted", model)
    assert [loaded.width(asked) for asked in (None, 1, 9)] == [4, 1, 4]


def test_the_installed_ngram_drafter_is_loaded_with_its_options() -> None:
    loaded = load_drafter("ngram", tiny_model("qwen3"), max_ngram=3, min_ngram=2)
    assert isinstance(loaded.provider, NgramProvider)
    assert (loaded.provider.grouped.max_ngram, loaded.provider.grouped.min_ngram) == (3, 2)
    with pytest.raises(OptionError, match="length"):
        load_drafter("ngram", tiny_model("qwen3"), length=3)


# Opened once.


def test_a_drafter_is_opened_once_when_it_is_loaded_and_all_of_it_is_closed(kinds: Kinds) -> None:
    provider = kinds.provider = ScriptedProvider(context=ContextKind.TAPS, taps=(0, 2))
    load_drafter("scripted", tiny_model("qwen3"))
    assert provider.calls == {"open_prefill": 1, "capture": 1, "open": 1, "close": 2}
    assert [group.decodes for group in provider.groups] == [False, True]
    assert provider.left_open == []
    assert provider.complaints == []
    assert provider.closed == 0


@pytest.mark.parametrize("verb", ["open_prefill", "capture", "open", "close"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_drafter_that_fails_when_it_is_opened_is_refused_and_closed(
    kinds: Kinds, verb: str, call: int
) -> None:
    provider = kinds.provider = ScriptedProvider(faults={verb: [call]})
    if call == 1 or verb == "close":
        with pytest.raises(Fault, match=f"{verb} {call}"):
            load_drafter("scripted", tiny_model("qwen3"))
        assert provider.closed == 1
    else:
        load_drafter("scripted", tiny_model("qwen3"))
        assert provider.closed == 0
    assert provider.left_open == []
    assert provider.complaints == []


@pytest.mark.parametrize("taps", [(9,), (0, 0)])
def test_a_drafter_that_reads_what_the_model_lacks_is_refused_and_closed(
    kinds: Kinds, taps: tuple[int, ...]
) -> None:
    provider = kinds.provider = ScriptedProvider(context=ContextKind.TAPS, taps=taps)
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        load_drafter("scripted", tiny_model("qwen3"))
    assert provider.closed == 1
    assert provider.groups == []


def test_an_interrupt_while_it_is_opened_closes_the_drafter(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = kinds.provider

    def interrupted(**_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(provider, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_drafter("scripted", tiny_model("qwen3"))
    assert provider.closed == 1


class Grouped:
    checkpoint_namespace = "x"

    def open(self, **_: Any) -> Any:
        raise AssertionError("an incomplete provider is not opened")


class Incomplete:
    """A provider without a name, and with half a factory."""

    weight_bytes = 0
    grouped = Grouped()

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_an_object_that_is_no_provider_is_refused_with_all_that_it_lacks(kinds: Kinds) -> None:
    kinds.provider = Incomplete()
    with pytest.raises(ProviderError) as caught:
        load_drafter("scripted", tiny_model("qwen3"))
    assert caught.value.missing == ("id", "grouped.supports_adapters", "grouped.open_prefill")
    assert "specdec-fake" in str(caught.value)
    assert kinds.provider.closed == 1
    kinds.provider = object()
    with pytest.raises(ProviderError, match="id, weight_bytes, grouped, close"):
        load_drafter("scripted", tiny_model("qwen3"))


def test_a_loaded_drafter_is_closed_by_its_block(kinds: Kinds) -> None:
    with load_drafter("scripted", tiny_model("qwen3")) as loaded:
        assert kinds.provider.closed == 0
        loaded.close()
        assert kinds.provider.closed == 1
    assert kinds.provider.closed == 2


def test_a_loaded_drafter_drafts(kinds: Kinds) -> None:
    text = text_of(PROMPT)
    kinds.provider = ScriptedProvider(Script.always([text], [RIGHT] * 5))
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    with load_drafter("scripted", model, tokenizer) as loaded:
        width = loaded.num_draft_tokens
        responses = list(
            stream_generate(
                model, tokenizer, list(PROMPT), 12, drafter=loaded, num_draft_tokens=width
            )
        )
    assert [response.token for response in responses] == list(text.output[:12])
    stats = responses[-1].stats
    assert stats is not None
    assert (stats.drafter, stats.accepted, stats.rounds) == ("scripted", 10, 2)
    assert kinds.provider.complaints == []


# Refused.


def test_an_unknown_kind_is_refused_with_the_installed_ones(kinds: Kinds) -> None:
    with pytest.raises(UnknownKindError) as caught:
        load_drafter("script", tiny_model("qwen3"))
    message = str(caught.value)
    assert "script" in message
    for name in ("scripted", "scripted-folder", "scripted-twin"):
        assert name in message
    with pytest.raises(UnknownKindError, match="scripted"):
        load_drafter(Path(__file__).parent, tiny_model("qwen3"), kind="none-such")
    assert kinds.requests == []


def test_a_kind_that_needs_files_is_refused_by_its_name_alone(kinds: Kinds) -> None:
    with pytest.raises(ArtifactError, match="scripted-folder needs a folder"):
        load_drafter("scripted-folder", tiny_model("qwen3"))
    assert kinds.requests == []


@pytest.mark.parametrize("name", ["./none", "no/such/folder", "/no/such", "none"])
@pytest.mark.parametrize("kind", [None, "scripted-folder"])
def test_a_path_that_leads_nowhere_is_refused(
    kinds: Kinds, name: str, kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecdecError) as caught:
        load_drafter(name, tiny_model("qwen3"), kind=kind)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kinds.requests == []


def test_a_path_object_is_never_taken_for_a_kind(
    kinds: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="scripted does not exist"):
        load_drafter(Path("scripted"), tiny_model("qwen3"))


def test_a_name_of_the_hub_is_fetched_once_nothing_of_that_name_is_here(
    kinds: Kinds, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text(json.dumps({"scripted": True}))
    monkeypatch.chdir(tmp_path)
    with mock.patch("huggingface_hub.snapshot_download", return_value=str(folder)) as fetched:
        load_drafter("somebody/scripted-head", tiny_model("qwen3"))
        assert fetched.call_args.args == ("somebody/scripted-head",)
        assert kinds.requests[-1].path == folder
        for name in ("../scripted", "./a/b", "a/b/c", "scripted/"):
            with pytest.raises(SpecdecError):
                load_drafter(name, tiny_model("qwen3"))
        assert fetched.call_count == 1
    told = OSError("nobody\nis there")
    with (
        mock.patch("huggingface_hub.snapshot_download", side_effect=told),
        pytest.raises(ArtifactError, match="cannot be had from the hub") as caught,
    ):
        load_drafter("somebody/scripted-head", tiny_model("qwen3"))
    assert "\n" not in str(caught.value)


def test_a_folder_that_nobody_or_more_than_one_knows_is_refused(kinds: Kinds, folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnrecognizedArtifactError):
        load_drafter(folder, tiny_model("qwen3"))
    (folder / "config.json").write_text(json.dumps({"scripted": True, "twin": True}))
    with pytest.raises(AmbiguousArtifactError):
        load_drafter(folder, tiny_model("qwen3"))
    assert kinds.requests == []


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_number_of_drafts_that_makes_no_sense_is_refused(kinds: Kinds, number: Any) -> None:
    with pytest.raises(OptionError, match="num_draft_tokens"):
        load_drafter("scripted", tiny_model("qwen3"), num_draft_tokens=number)
    assert kinds.requests == []


# Targets.


def test_a_model_is_bound_by_the_plugin_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_model("qwen3"), tiny_model(HYBRID)
    bound = MlxLmTarget(model)
    seen: list[tuple[Any, Any]] = []

    def bind(model: Any, tokenizer: Any) -> Any:
        seen.append((model, tokenizer))
        return None if model is other else bound

    with mock.patch.object(metadata, "entry_points", return_value=[Entry((), bind)]):
        registry = Registry(scan(strict=True))
    monkeypatch.setattr("specdec.drafters.default_registry", lambda: registry)
    assert bind_target(model, "tokenizer") is bound
    fallback = bind_target(other)
    assert isinstance(fallback, MlxLmTarget)
    assert fallback.identity is other
    assert seen == [(model, "tokenizer"), (other, None)]


@pytest.mark.parametrize("result", [None, 7, "text"])
def test_a_model_that_gives_no_logits_is_refused(result: Any) -> None:
    class Odd:
        layers: tuple[Any, ...] = ()

        def __call__(self, *_: Any, **__: Any) -> Any:
            return result

    with pytest.raises(UnsupportedModelError):
        bind_target(Odd())


def test_what_the_hub_says_is_cut_to_a_bearable_line() -> None:
    long = OSError("404 Client Error. " + "Please make sure you specified the correct id. " * 9)
    name = "somebody/some-model"
    for load, where in (
        (lambda: load_drafter(name, tiny_model("qwen3")), "huggingface_hub.snapshot_download"),
        (lambda: load_model(name), "mlx_lm.load"),
    ):
        with mock.patch(where, side_effect=long), pytest.raises(SpecdecError) as caught:
            load()
        said = str(caught.value)
        assert name in said
        assert "OSError: 404 Client Error." in said
        assert len(said) < 260


def test_a_loaded_model_becomes_a_drafter_from_the_front_of_the_package() -> None:
    assert "load_draft_model" in specdec.__all__
    with specdec.load_draft_model(tiny_model("qwen3", 1), tiny_model("qwen3"), None) as loaded:
        assert loaded.kind == "two-model"
