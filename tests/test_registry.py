"""A drafter is chosen by name, by exactly one detector, or by the one fallback; never by order."""

from __future__ import annotations

import sys
import tempfile
import types
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import (
    AmbiguousArtifactError,
    ArtifactError,
    KindConflictError,
    SpecdecError,
    SpecdecPluginWarning,
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@frozen
class FakeDistribution:
    name: str
    version: str = "1.0"


@frozen
class Plugin:
    """An entry point of a distribution ``specdec-<name>`` that offers the given kinds."""

    name: str
    kinds: Sequence[DraftKind] = ()
    bind: Any = None
    api: int = 1
    dist: FakeDistribution = field()

    @dist.default
    def _distribution(self) -> FakeDistribution:
        return FakeDistribution(f"specdec-{self.name}")

    def load(self) -> object:
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = self.api
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: list(self.kinds))
        if self.bind is not None:
            vars(module)["specdec_bind_target"] = hookimpl(self.bind)
        return module


def registry(*plugins: Plugin) -> Registry:
    with mock.patch.object(metadata, "entry_points", return_value=plugins):
        return Registry(scan(strict=False))


@pytest.fixture(autouse=True, scope="module")
def _no_settings() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
            patch.delenv(variable, raising=False)
        yield


def never_loaded(request: LoadRequest) -> LoadedDraft:
    raise AssertionError("choosing a kind must not load it")


def says_yes(artifact: Artifact) -> bool:
    return True


def says_no(artifact: Artifact) -> bool:
    return False


def fails(artifact: Artifact) -> bool:
    raise KeyError("block_size")


def exits(artifact: Artifact) -> bool:
    sys.exit(2)


def kind(name: str, **fields: Any) -> DraftKind:
    return DraftKind(name=name, load=never_loaded, **fields)


def offers(name: str, **fields: Any) -> Plugin:
    return Plugin(name, [kind(name, **fields)])


def test_an_explicit_kind_is_taken_without_detection(tmp_path: Path) -> None:
    found = registry(offers("ngram"), offers("mtp", detect=fails))
    assert found.select(kind="ngram").name == "ngram"
    assert found.select(tmp_path, kind="mtp").name == "mtp"
    assert found.owner("mtp").distribution == "specdec-mtp"


def test_the_kinds_are_sorted_and_cannot_be_changed() -> None:
    found = registry(Plugin("acme", [kind("ngram")]), offers("dflash"))
    assert list(found.kinds) == ["dflash", "ngram"]
    with pytest.raises(TypeError):
        found.kinds["mine"] = kind("mine")  # type: ignore[index]
    with pytest.raises(AttributeError):
        found.kinds = {}  # type: ignore[misc]


def test_the_only_match_is_taken(tmp_path: Path) -> None:
    found = registry(
        offers("mtp", detect=says_yes),
        offers("dflash", detect=says_no),
        offers("ngram"),
        offers("two-model", fallback=True),
    )
    for artifact in (tmp_path, str(tmp_path), Artifact(tmp_path)):
        assert found.select(artifact).name == "mtp"


def test_two_matches_are_an_error_that_names_both(tmp_path: Path) -> None:
    found = registry(offers("mtp", detect=says_yes), offers("dflash", detect=says_yes))
    with pytest.raises(AmbiguousArtifactError) as caught:
        found.select(tmp_path)
    text = str(caught.value)
    assert "'dflash' (specdec-dflash 1.0) and 'mtp' (specdec-mtp 1.0)" in text
    assert "choose one with kind= in Python, or leave a plugin out" in text


def test_what_no_detector_recognises_goes_to_the_fallback(tmp_path: Path) -> None:
    found = registry(offers("mtp", detect=says_no), offers("two-model", fallback=True))
    assert found.select(tmp_path).name == "two-model"


def test_two_fallbacks_are_ambiguous(tmp_path: Path) -> None:
    found = registry(offers("two-model", fallback=True), offers("acme", fallback=True))
    with pytest.raises(AmbiguousArtifactError, match=r"'acme' .* and 'two-model' "):
        found.select(tmp_path)


def test_a_fallback_with_a_detector_is_asked_last_and_may_refuse(tmp_path: Path) -> None:
    willing = offers("two-model", fallback=True, detect=says_yes)
    assert registry(willing).select(tmp_path).name == "two-model"
    assert registry(willing, offers("mtp", detect=says_yes)).select(tmp_path).name == "mtp"
    refusing = offers("acme", fallback=True, detect=says_no)
    assert registry(willing, refusing).select(tmp_path).name == "two-model"
    with pytest.raises(UnrecognizedArtifactError, match=r"acme \(specdec-acme 1\.0\) no"):
        registry(refusing).select(tmp_path)


def test_an_unrecognized_artifact_says_what_was_looked_at(tmp_path: Path) -> None:
    found = registry(offers("mtp", detect=says_no), offers("ngram"))
    with pytest.raises(UnrecognizedArtifactError) as caught:
        found.select(tmp_path)
    text = str(caught.value)
    assert f"no kind recognises {tmp_path}; config.json is missing" in text
    assert "detectors asked: mtp (specdec-mtp 1.0) no" in text
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnrecognizedArtifactError, match=r"config\.json is no JSON object"):
        found.select(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "acme"}')
    with pytest.raises(UnrecognizedArtifactError, match="has model_type 'acme'"):
        found.select(tmp_path)


@pytest.mark.parametrize(
    ("detector", "text"),
    [
        (fails, "failed: KeyError: 'block_size'"),
        (exits, "failed: it called sys.exit(2)"),
        (lambda artifact: None, "failed: TypeError: detect returned NoneType, not a bool"),
        (lambda artifact: "yes", "failed: TypeError: detect returned str, not a bool"),
    ],
)
def test_a_detector_that_fails_is_reported_as_failed(
    detector: Any, text: str, tmp_path: Path
) -> None:
    found = registry(offers("mtp", detect=detector), offers("dflash", detect=says_no))
    assert [(a.kind.name, a.answer, a.message) for a in found.detect(tmp_path)] == [
        ("dflash", "no", "no"),
        ("mtp", "failed", text),
    ]
    with pytest.raises(UnrecognizedArtifactError) as caught:
        found.select(tmp_path)
    assert f"mtp (specdec-mtp 1.0) {text}" in str(caught.value)


def test_a_failed_detector_does_not_stop_the_one_that_matches(tmp_path: Path) -> None:
    found = registry(offers("acme", detect=fails), offers("mtp", detect=says_yes))
    assert found.select(tmp_path).name == "mtp"


def test_no_fallback_is_guessed_while_a_detector_has_failed(tmp_path: Path) -> None:
    found = registry(offers("acme", detect=fails), offers("two-model", fallback=True))
    with pytest.raises(UnrecognizedArtifactError, match="acme"):
        found.select(tmp_path)


def test_a_detector_sees_files_and_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dflash"}')
    (tmp_path / "model.safetensors").write_bytes(b"")

    def detect(artifact: Artifact) -> bool:
        config = artifact.config or {}
        return artifact.has("model.safetensors") and config.get("model_type") == "dflash"

    found = registry(offers("dflash", detect=detect))
    assert [a.answer for a in found.detect(tmp_path)] == ["yes"]


def test_a_missing_artifact_is_an_error_even_with_a_fallback(tmp_path: Path) -> None:
    found = registry(offers("two-model", fallback=True))
    with pytest.raises(ArtifactError, match="no file or folder"):
        found.select(tmp_path / "missing")


def test_a_contested_kind_is_an_error_that_names_both_and_the_way_out(tmp_path: Path) -> None:
    one = Plugin("one", [kind("dup", detect=says_yes), kind("mine")])
    found = registry(one, Plugin("two", [kind("dup", detect=says_yes)]))
    assert list(found.kinds) == ["mine"]
    assert found.select(kind="mine").name == "mine"
    for choose in ({"kind": "dup"}, {"artifact": tmp_path}):
        with pytest.raises(KindConflictError) as caught:
            found.select(**choose)
        assert "specdec-one 1.0 and specdec-two 1.0" in str(caught.value)
        assert "SPECDEC_DISABLE_PLUGINS=specdec-one or specdec-two" in str(caught.value)


def test_an_artifact_of_a_contested_kind_does_not_fall_to_the_fallback(tmp_path: Path) -> None:
    contested = [Plugin(name, [kind("dup", detect=says_yes)]) for name in ("one", "two")]
    with pytest.raises(KindConflictError):
        registry(*contested, offers("two-model", fallback=True)).select(tmp_path)


def test_disabling_one_owner_settles_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "specdec-two")
    found = registry(Plugin("one", [kind("dup")]), Plugin("two", [kind("dup")]))
    assert found.owner("dup").distribution == "specdec-one"


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("assistant", "specdec-assistant"),
        ("deepspec", "specdec-dflash"),
        ("dflash", "specdec-dflash"),
        ("dflash2", "specdec-dflash"),
        ("dspark", "specdec-dflash"),
        ("mtp", "specdec-mtp"),
        ("two-model", "specdec-two-model"),
    ],
)
def test_a_known_kind_that_is_not_installed_says_what_to_install(name: str, package: str) -> None:
    with pytest.raises(UnknownKindError) as caught:
        registry(offers("ngram")).select(kind=name)
    text = str(caught.value)
    assert text.startswith(f"no installed plugin has the kind '{name}'; installed: ngram; ")
    assert text.endswith(f"pip install {package}")


def test_an_unknown_kind_lists_the_installed_and_the_close_ones() -> None:
    found = registry(offers("ngram"), offers("two-model"))
    with pytest.raises(UnknownKindError) as caught:
        found.select(kind="n-gram")
    assert "installed: ngram, two-model; did you mean 'ngram'?" in str(caught.value)
    with pytest.raises(UnknownKindError, match=r"'mtp' \(pip install specdec-mtp\)\?"):
        found.select(kind="mpt")
    with pytest.raises(UnknownKindError, match="installed: none"):
        registry().select(kind="zzz")


def test_an_unknown_kind_of_a_broken_or_disabled_plugin_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = registry(Plugin("mtp", [kind("mtp")], api=0))
    with pytest.raises(UnknownKindError) as caught:
        found.select(kind="mtp")
    assert "specdec-mtp 1.0 is broken (api): wants API 0" in str(caught.value)
    assert "pip install" not in str(caught.value)
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "dflash")
    with pytest.raises(UnknownKindError, match="is disabled by SPECDEC_DISABLE_PLUGINS"):
        registry(offers("dflash")).select(kind="dflash")


@frozen
class NativeTarget:
    native_draft: str | None


def test_without_artifact_and_kind_the_head_of_the_target_is_taken() -> None:
    def create(target: object) -> Any:
        raise AssertionError("choosing a kind must not create its provider")

    found = registry(offers("mtp", create=create), offers("ngram"))
    target: Any = NativeTarget("mtp")
    assert found.select(target=target).name == "mtp"
    assert found.select(kind="ngram", target=target).name == "ngram"


def test_a_target_without_a_head_leaves_nothing_to_choose_by() -> None:
    found = registry(offers("ngram"))
    ways = r"; name one \(ngram\) or give a drafter's folder$"
    with pytest.raises(UnrecognizedArtifactError, match=f"nothing to choose a drafter by{ways}"):
        found.select()
    for target in (NativeTarget(None), object()):
        with pytest.raises(
            UnrecognizedArtifactError, match=f"the model declares no drafter of its own{ways}"
        ):
            found.select(target=target)  # type: ignore[arg-type]
    with pytest.raises(UnrecognizedArtifactError, match=r"of its own; give a drafter's folder$"):
        registry().select(target=target)  # type: ignore[arg-type]


def test_the_head_of_a_target_needs_a_kind_that_can_make_it() -> None:
    target: Any = NativeTarget("mtp")
    with pytest.raises(UnknownKindError, match="pip install specdec-mtp"):
        registry(offers("ngram")).select(target=target)
    with pytest.raises(UnknownKindError, match=r"specdec-mtp 1\.0 cannot make one"):
        registry(offers("mtp")).select(target=target)


def test_the_first_plugin_that_knows_a_model_binds_it() -> None:
    view = object()
    found = registry(
        Plugin("zeta", bind=lambda model: object()),
        Plugin("acme", bind=lambda model, tokenizer: view if model == "mine" else None),
        offers("ngram"),
    )
    assert found.bind_target("mine", None) is view
    assert found.bind_target("other", None) is not view
    assert registry(offers("ngram")).bind_target("mine") is None


def test_a_binder_that_fails_is_passed_over_unless_it_refuses_on_purpose() -> None:
    view = object()

    def careless(model: object) -> object:
        raise AttributeError("layers")

    def knowing(model: object) -> object:
        raise UnsupportedModelError("acme models cannot be driven from outside")

    found = registry(Plugin("acme", bind=careless), Plugin("zeta", bind=lambda model: view))
    with pytest.warns(SpecdecPluginWarning, match=r"specdec-acme 1\.0 failed"):
        assert found.bind_target("mine") is view
    with pytest.raises(UnsupportedModelError):
        registry(Plugin("acme", bind=knowing)).bind_target("mine")


ANSWERS = {"yes": says_yes, "no": says_no, "failed": fails, "by name": None}


@given(
    detectors=st.lists(st.sampled_from(sorted(ANSWERS)), max_size=4),
    fallbacks=st.integers(0, 2),
    contested=st.booleans(),
    data=st.data(),
)
def test_the_order_of_registration_never_matters(
    detectors: list[str], fallbacks: int, contested: bool, data: st.DataObject
) -> None:
    plugins = [
        offers(f"kind{i}", detect=ANSWERS[answer], artifact=True)
        for i, answer in enumerate(detectors)
    ]
    plugins += [offers(f"fallback{i}", fallback=True) for i in range(fallbacks)]
    if contested:
        plugins.append(Plugin("other", [kind("kind0", detect=says_yes)]))
    shuffled = data.draw(st.permutations(plugins))

    def outcome(found: Registry, artifact: Path) -> object:
        answers = [(a.kind.name, a.origin, a.message) for a in found.detect(artifact)]
        try:
            return answers, found.select(artifact).name
        except SpecdecError as error:
            return answers, type(error), str(error)

    with tempfile.TemporaryDirectory() as folder:
        expected = outcome(registry(*plugins), Path(folder))
        assert outcome(registry(*shuffled), Path(folder)) == expected


def test_names_of_bundled_drafters_are_meant_where_they_are_near_and_else_their_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(name: str, *bundled: str) -> str:
        monkeypatch.setattr("specdec.plugins.registry.model_names", lambda: bundled)
        with pytest.raises(UnknownKindError) as caught:
            registry(offers("ngram")).select(kind=name)
        return str(caught.value)

    demo = "; bundled drafters come with specdec-demo (pip install specdec-demo)"
    assert said("demo-qwen3-draft").endswith(f"; installed: ngram{demo}")
    assert demo not in said("ngrm"), "that is another mistake"
    near = said("demo-qwen3-drft", "demo", "demo-qwen3-draft")
    assert near.endswith("; did you mean 'demo-qwen3-draft'?")
    assert said("weather", "demo").endswith("; installed: ngram")
