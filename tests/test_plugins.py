"""Plugins are found one by one: whatever one of them does wrong, the others work."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import BrokenPluginError, OptionError, PluginError, SpecdecPluginWarning
from specdec.plugins import (
    Artifact,
    DraftKind,
    LoadedDraft,
    LoadRequest,
    PluginReport,
    default_registry,
    hookimpl,
    hooks,
    scan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@frozen
class FakeDistribution:
    name: str
    version: str = "1.0"


@frozen
class FakeEntry:
    """An entry point that is not installed; ``loads`` stands for importing its module."""

    name: str
    loads: Callable[[], object]
    dist: FakeDistribution

    def load(self) -> object:
        return self.loads()


def never_loaded(request: LoadRequest) -> LoadedDraft:
    raise AssertionError("a scan must not load drafters")


def kind(name: str, **fields: Any) -> DraftKind:
    return DraftKind(name=name, load=never_loaded, **fields)


def module(draft_kinds: Callable[..., object] | None, api: object = 1) -> types.ModuleType:
    made = types.ModuleType("fake_plugin")
    if api is not None:
        vars(made)["specdec_api"] = api
    if draft_kinds is not None:
        vars(made)["specdec_draft_kinds"] = hookimpl(draft_kinds)
    return made


def offering(*names: str) -> Callable[[], object]:
    return lambda: module(lambda: [kind(name) for name in names])


def entry(name: str, loads: Callable[[], object], dist: str | None = None) -> FakeEntry:
    return FakeEntry(name, loads, FakeDistribution(dist or f"specdec-{name}"))


@contextmanager
def installed(*entries: FakeEntry) -> Iterator[None]:
    def entry_points(*, group: str) -> Sequence[FakeEntry]:
        assert group == "specdec.providers"
        return entries

    with mock.patch.object(metadata, "entry_points", entry_points):
        yield


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


def names(report: PluginReport) -> list[str]:
    return [offered.name for plugin in report.loaded for offered in plugin.kinds]


def import_fails() -> object:
    raise ImportError("no module named\n  'acme_runtime'")


def exits() -> object:
    sys.exit(3)


def hook_exits() -> list[DraftKind]:
    sys.exit(4)


def wrong_argument() -> object:
    def draft_kinds(colour: str) -> list[DraftKind]:
        return []

    return module(draft_kinds)


def misspelt_hook() -> object:
    made = module(None)
    vars(made)["specdec_draft_kind"] = hookimpl(lambda: [kind("acme")])
    return made


def raising_hook() -> object:
    def draft_kinds() -> list[DraftKind]:
        raise RuntimeError("acme is out of paint")

    return module(draft_kinds)


def iter_nothing() -> Iterator[DraftKind]:
    yield from ()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this works")


def raises_unprintable() -> object:
    raise Unprintable


FAULTS: dict[str, tuple[Callable[[], object], str, str]] = {
    "an import that fails": (import_fails, "import", "ImportError: no module named 'acme_runtime'"),
    "an exit at import": (exits, "import", "it called sys.exit(3)"),
    "an error that cannot be printed": (raises_unprintable, "import", "Unprintable"),
    "no api": (lambda: module(lambda: [], api=None), "api", "names no API, this core offers 1"),
    "an api of text": (lambda: module(lambda: [], api="1"), "api", "wants API '1', not a number"),
    "an api of True": (lambda: module(lambda: [], api=True), "api", "wants API True, not a number"),
    "an old api": (
        lambda: module(lambda: [], api=0),
        "api",
        "wants API 0, this core offers 1; upgrade specdec-acme",
    ),
    "a new api": (
        lambda: module(lambda: [], api=2),
        "api",
        "wants API 2, this core offers 1; upgrade specdec-core",
    ),
    "an entry that is nothing": (lambda: None, "api", "names no API"),
    "no hook": (lambda: module(None), "register", "it implements no hook"),
    "a wrong hook argument": (wrong_argument, "register", "colour"),
    "a misspelt hook": (misspelt_hook, "register", "specdec_draft_kind, which is no hook"),
    "a raising hook": (raising_hook, "kinds", "RuntimeError: acme is out of paint"),
    "an exit in a hook": (lambda: module(hook_exits), "kinds", "it called sys.exit(4)"),
    "a kind without a list": (
        lambda: module(lambda: kind("acme")),
        "kinds",
        "must return a list of DraftKind, but returned DraftKind",
    ),
    "a forgotten return": (lambda: module(lambda: None), "kinds", "but returned NoneType"),
    "a generator": (lambda: module(iter_nothing), "kinds", "but returned generator"),
    "a list of names": (lambda: module(lambda: ["acme"]), "kinds", "but the list has str"),
    "a bad kind name": (offering("Acme Draft"), "kinds", "name must be lower-case letters"),
    "a kind named twice": (offering("acme", "acme"), "kinds", "'acme' twice"),
    "one bad kind of two": (offering("fine", "not_fine"), "kinds", "but is 'not_fine'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_plugin_is_reported_and_its_neighbours_work(fault: str) -> None:
    loads, stage, text = FAULTS[fault]
    with installed(
        entry("acme", loads), entry("ngram", offering("ngram")), entry("aaa", offering("aaa"))
    ):
        report = scan()
    assert names(report) == ["aaa", "ngram"]
    (broken,) = report.broken
    assert broken.origin.name == "acme"
    assert broken.stage == stage
    assert broken.message.startswith(f"broken ({stage}): ")
    assert text in broken.message
    assert len(broken.message.splitlines()) == 1


def test_all_faults_at_once_leave_the_healthy_plugin() -> None:
    faults = [entry(f"acme{i}", loads) for i, (loads, _, _) in enumerate(FAULTS.values())]
    with installed(*faults, entry("ngram", offering("ngram"))):
        report = scan()
    assert names(report) == ["ngram"]
    assert len(report.broken) == len(FAULTS)
    assert not report.conflicts


def test_an_interrupt_during_the_import_is_not_swallowed() -> None:
    def interrupted() -> object:
        raise KeyboardInterrupt

    with installed(entry("acme", interrupted)), pytest.raises(KeyboardInterrupt):
        scan()


def test_a_broken_plugin_knows_the_api_it_wants() -> None:
    with installed(entry("acme", lambda: module(lambda: [], api=7))):
        (broken,) = scan().broken
    assert broken.api == 7


def test_a_plugin_without_kinds_is_fine() -> None:
    with installed(entry("acme", lambda: module(lambda: []))):
        report = scan()
    assert [plugin.kinds for plugin in report.loaded] == [()]
    assert not report.broken


def test_an_implementation_may_take_fewer_arguments_than_the_hook() -> None:
    made = module(None)
    vars(made)["specdec_bind_target"] = hookimpl(lambda model: None)
    with installed(entry("acme", lambda: made)):
        report = scan()
    assert [plugin.origin.name for plugin in report.loaded] == ["acme"]


def test_an_older_api_that_is_still_served_warns_its_author(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "API_VERSION", 2)
    monkeypatch.setattr(hooks, "SUPPORTED_API", frozenset({1, 2}))
    with (
        installed(entry("ngram", offering("ngram"))),
        pytest.warns(DeprecationWarning, match="specdec-ngram is written for plugin API 1"),
    ):
        report = scan()
    assert names(report) == ["ngram"]


def test_a_kind_of_two_distributions_goes_to_neither() -> None:
    with installed(
        entry("acme", offering("dup", "only-acme"), "acme-drafter"),
        entry("zeta", offering("dup", "only-zeta"), "zeta-drafter"),
    ):
        report = scan()
    (conflict,) = report.conflicts
    assert conflict.name == "dup"
    assert [owner.distribution for owner in conflict.owners] == ["acme-drafter", "zeta-drafter"]
    assert "SPECDEC_DISABLE_PLUGINS=acme-drafter or zeta-drafter" in conflict.message
    assert not report.broken


def test_a_conflict_within_one_distribution_names_its_entry_points() -> None:
    with installed(entry("a", offering("dup"), "acme"), entry("b", offering("dup"), "acme")):
        (conflict,) = scan().conflicts
    assert conflict.message.endswith("SPECDEC_DISABLE_PLUGINS=a or b")


@pytest.mark.parametrize("listed", ["mtp", "specdec-mtp", "specdec_MTP", " other, mtp "])
def test_a_disabled_plugin_is_not_imported(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", listed)
    with installed(entry("mtp", import_fails), entry("ngram", offering("ngram"))):
        report = scan()
    assert names(report) == ["ngram"]
    assert not report.broken
    (disabled,) = report.disabled
    assert (disabled.origin.name, disabled.variable) == ("mtp", "SPECDEC_DISABLE_PLUGINS")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [("ngram", ["ngram"]), ("specdec-mtp,ngram", ["mtp", "ngram"]), ("", []), ("other", [])],
)
def test_the_allow_list_lets_in_what_it_names(
    allowed: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_PLUGINS", allowed)
    with installed(entry("mtp", offering("mtp")), entry("ngram", offering("ngram"))):
        report = scan()
    assert names(report) == expected
    assert {item.variable for item in report.disabled} <= {"SPECDEC_PLUGINS"}
    assert len(report.disabled) == 2 - len(expected)


def test_disabling_wins_over_allowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_PLUGINS", "ngram,mtp")
    monkeypatch.setenv("SPECDEC_DISABLE_PLUGINS", "mtp")
    with installed(entry("mtp", offering("mtp")), entry("ngram", offering("ngram"))):
        assert names(scan()) == ["ngram"]


def test_strict_mode_raises_the_fault_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", "1")
    with (
        installed(entry("acme", raising_hook), entry("ngram", offering("ngram"))),
        pytest.raises(BrokenPluginError, match="specdec-acme") as caught,
    ):
        scan()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_strict_mode_raises_a_conflict() -> None:
    with (
        installed(entry("a", offering("dup")), entry("b", offering("dup"))),
        pytest.raises(BrokenPluginError, match=r"specdec-a 1\.0 and specdec-b 1\.0"),
    ):
        scan(strict=True)


def test_strict_mode_names_every_fault() -> None:
    with (
        installed(entry("a", import_fails), entry("b", exits)),
        pytest.raises(BrokenPluginError, match=r"specdec-a .*specdec-b ") as caught,
    ):
        scan(strict=True)
    cause = caught.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert [type(error) for error in cause.exceptions] == [ImportError, SystemExit]


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_strict_mode_can_be_set_to_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", value)
    with installed(entry("acme", import_fails)):
        assert len(scan().broken) == 1


def test_strict_mode_is_quiet_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", "1")
    with installed(entry("ngram", offering("ngram"))):
        assert names(scan()) == ["ngram"]


def test_damaged_metadata_is_no_reason_to_lose_a_plugin() -> None:
    class Damaged:
        @property
        def name(self) -> str:
            raise KeyError("Name")

    damaged = FakeEntry("ngram", offering("ngram"), Damaged())  # type: ignore[arg-type]
    with installed(damaged):
        (plugin,) = scan().loaded
    assert str(plugin.origin) == "unknown unknown"


ENTRIES = (
    entry("acme", offering("dup", "acme"), "acme-drafter"),
    entry("zeta", offering("dup"), "zeta-drafter"),
    entry("ngram", offering("ngram")),
    entry("broken", raising_hook),
    entry("gone", import_fails, "acme-drafter"),
)


@given(st.permutations(ENTRIES))
def test_the_report_does_not_depend_on_the_order_of_installation(order: list[FakeEntry]) -> None:
    def summary(report: PluginReport) -> object:
        return (
            [(plugin.origin, [k.name for k in plugin.kinds]) for plugin in report.loaded],
            [(broken.origin, broken.message) for broken in report.broken],
            report.conflicts,
        )

    with installed(*ENTRIES):
        expected = summary(scan())
    with installed(*order):
        assert summary(scan()) == expected


def test_the_default_registry_warns_once_for_each_broken_plugin() -> None:
    with installed(entry("a", import_fails), entry("b", raising_hook), entry("c", offering("c"))):
        with pytest.warns(SpecdecPluginWarning) as caught:
            registry = default_registry()
        assert default_registry() is registry
    assert [str(warning.message).split()[0] for warning in caught] == ["specdec-a", "specdec-b"]
    assert list(registry.kinds) == ["c"]


def test_an_installed_distribution_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_real_drafter.py").write_text(
        textwrap.dedent(
            """
            from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, hookimpl

            specdec_api = 1

            def load(request: LoadRequest) -> LoadedDraft:
                raise NotImplementedError

            @hookimpl
            def specdec_draft_kinds():
                return [DraftKind(name="acme-real", load=load)]
            """
        )
    )
    info = tmp_path / "acme_real-2.3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-real\nVersion: 2.3.1\n")
    (info / "entry_points.txt").write_text("[specdec.providers]\nreal = acme_real_drafter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SPECDEC_PLUGINS", "acme-real")
    (plugin,) = scan().loaded
    assert str(plugin.origin) == "acme-real 2.3.1"
    assert [offered.name for offered in plugin.kinds] == ["acme-real"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "Ngram"}, "DraftKind: name must be lower-case"),
        ({"name": ""}, "name must be"),
        ({"name": "n\n"}, "name must be"),
        ({"name": None}, "name must be"),
        ({"load": "specdec_ngram"}, "load must be a function, but is 'specdec_ngram'"),
        ({"detect": True}, "detect must be a function or None"),
        ({"create": 1}, "create must be a function or None"),
        ({"fallback": "yes"}, "fallback must be True or False"),
        ({"artifact": 1}, "artifact must be True or False"),
        ({"default_width": 0}, "default_width must be 1 or more, or None, but is 0"),
        ({"default_width": True}, "default_width must be"),
        ({"bundled_at": "../mtp"}, "bundled_at must be the name of a sub-folder"),
        ({"bundled_at": ".."}, "bundled_at must be"),
        ({"summary": "two\nlines"}, "summary must be one line"),
        ({"detect": lambda artifact: True, "artifact": False}, "cannot have artifact=False"),
    ],
)
def test_a_wrong_field_of_a_kind_is_one_plain_line(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(PluginError, match=re.escape(text)) as caught:
        DraftKind(**{"name": "acme", "load": never_loaded, **fields})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "Attribute(" not in message


def test_a_kind_has_an_artifact_when_something_of_it_needs_one() -> None:
    assert not kind("a").artifact
    assert kind("a", detect=lambda artifact: True).artifact
    assert kind("a", fallback=True).artifact
    assert kind("a", bundled_at="mtp").artifact
    assert kind("a", artifact=True).artifact


def test_a_loaded_draft_proposes_at_least_one_token() -> None:
    provider: Any = object()
    assert LoadedDraft(provider, num_draft_tokens=1).num_draft_tokens == 1
    for wrong in (0, -1, True, 2.0, None):
        with pytest.raises(PluginError, match="num_draft_tokens must be 1 or more"):
            LoadedDraft(provider, num_draft_tokens=wrong)  # type: ignore[arg-type]


def test_a_load_request_is_read_only_and_refuses_a_width_below_one(tmp_path: Path) -> None:
    target: Any = object()
    options = {"bits": 4}
    request = LoadRequest(kind="mtp", path=tmp_path, target=target, options=options)
    options["bits"] = 8
    assert request.options["bits"] == 4
    assert request.path == tmp_path
    with pytest.raises(TypeError):
        request.options["bits"] = 2  # type: ignore[index]
    with pytest.raises(OptionError, match="num_draft_tokens must be 1 or more, or None"):
        LoadRequest(kind="mtp", target=target, num_draft_tokens=0)


def test_an_artifact_reads_its_config_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mtp"}')
    artifact = Artifact(tmp_path)
    assert artifact.has("config.json")
    assert not artifact.has("model.safetensors")
    first = artifact.config
    assert first == {"model_type": "mtp"}
    (tmp_path / "config.json").unlink()
    assert artifact.config is first


def test_no_detector_can_change_the_config_for_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mtp"}')
    config = Artifact(tmp_path).config
    with pytest.raises(TypeError):
        config["model_type"] = "mine"  # type: ignore[index]


@pytest.mark.parametrize("text", ["", "[]", "null", '"text"', "{", "[" * 100_000, "\x00\xff"])
def test_a_config_that_is_no_object_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert Artifact(tmp_path).config is None


def test_an_artifact_that_is_a_file_or_missing_has_nothing(tmp_path: Path) -> None:
    single = tmp_path / "draft.gguf"
    single.write_bytes(b"")
    for path in (single, tmp_path / "missing"):
        artifact = Artifact(path)
        assert not artifact.has("config.json")
        assert artifact.config is None
    assert not Artifact(tmp_path).has("\x00")
