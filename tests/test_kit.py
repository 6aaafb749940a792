"""The conformance kit as a drafter's author meets it: collection, expected failures, profiles."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, ClassVar, cast

import mlx.core as mx
import pytest
from hypothesis import Phase
from scripted import ScriptedProvider

from specdec.contract import Attachment, ContextKind, RowCheckpoint, require_port
from specdec.errors import OptionError, TargetLacksError
from specdec.testing import CHECKS, DraftRowContract, PluginContract, TinyTarget
from specdec.testing.profiles import PROFILES, active_effort
from specdec.testing.target import PORTS
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from pathlib import Path

    from specdec.contract import DraftProvider

AUTHOR = """
from specdec.contract import Swap
from specdec.testing import DraftRowContract, PluginContract
from specdec_ngram.provider import NgramProvider
from specdec_ngram.rows import NgramRows


class Forgetful(NgramProvider):
    '''Its namespace forgets the settings.'''

    @property
    def grouped(self):
        return Groups(super().grouped)


class Groups:
    supports_adapters = True
    checkpoint_namespace = "ngram"

    def __init__(self, inner):
        self.inner = inner

    def open(self, **options):
        rows = self.inner.open(**options)
        rows._namespace = "ngram"
        return rows

    def open_prefill(self, **options):
        rows = self.inner.open_prefill(**options)
        rows._namespace = "ngram"
        return rows


class Made(DraftRowContract):
    vocab_size = 4

    def make_provider(self):
        return NgramProvider()

    def make_other_provider(self):
        return NgramProvider(max_ngram=7)


class TestGood(Made):
    pass


class TestWithoutHistory(Made):
    state_is_history = False


class TestForgetful(Made):
    def make_provider(self):
        return Forgetful()

    def make_other_provider(self):
        return Forgetful(max_ngram=7)


class TestForgetfulAsExpected(TestForgetful):
    expected_failures = {"namespace_tells_artifacts_apart": "settings are not in it yet"}


class TestStale(Made):
    expected_failures = {"namespace_tells_artifacts_apart": "was fixed long ago"}


class TestUnfinished(DraftRowContract):
    pass


class TestPlugin(PluginContract):
    distribution = "specdec-ngram"


class TestNoPlugin(PluginContract):
    distribution = "specdec-of-nobody"
"""

QUICK = "close_is_final or namespace or row_machine or cold_rows or Plugin or consumed or preview"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[str, str]]:
    """Class and test to outcome and text, of an author's file run by pytest in its own process."""
    folder: Path = tmp_path_factory.mktemp("author")
    (folder / "test_author.py").write_text(AUTHOR)
    report = folder / "report.xml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"),
            *("-k", QUICK, f"--junitxml={report}", "test_author.py"),
        ],
        cwd=folder,
        env={**os.environ, "SPECDEC_PROFILE": "quick"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        child = next(iter(case), None)
        outcome = "passed" if child is None else child.tag
        text = "" if child is None else f"{child.get('message')}\n{child.text}"
        found[case.attrib["classname"].rpartition(".")[2], case.attrib["name"]] = (outcome, text)
    return found


def test_every_check_is_a_test_of_its_own(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    mine = {name: outcome for (cls, name), (outcome, _) in outcomes.items() if cls == "TestGood"}
    assert mine.pop("test_row_machine") == "passed"
    assert {name.removeprefix("test_") for name in mine} <= set(CHECKS)
    assert set(mine.values()) == {"passed"}
    assert "test_consumed_tokens_equal_read_tokens" in mine


def test_a_check_that_asks_for_a_history_is_left_out_where_there_is_none(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    mine = {name for cls, name in outcomes if cls == "TestWithoutHistory"}
    assert "test_consumed_tokens_equal_read_tokens" not in mine
    assert "test_consumed_tokens_count_as_committed" in mine


def test_a_wrong_drafter_fails_one_small_check_with_a_sentence(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    outcome, text = outcomes["TestForgetful", "test_namespace_tells_artifacts_apart"]
    assert outcome == "failure"
    assert "put what differs into the namespace" in text
    assert outcomes["TestForgetful", "test_namespace_is_stable"][0] == "passed"


def test_an_expected_failure_must_fail(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    name = "test_namespace_tells_artifacts_apart"
    assert outcomes["TestForgetfulAsExpected", name][0] == "skipped"  # junit's word for xfail
    outcome, text = outcomes["TestStale", name]
    assert outcome == "failure"
    assert "XPASS(strict)" in text
    assert outcomes["TestStale", "test_namespace_is_stable"][0] == "passed"


def test_an_unfinished_class_says_what_it_lacks(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    outcome, text = outcomes["TestUnfinished", "test_namespace_is_stable"]
    assert outcome == "error"
    assert "TestUnfinished needs make_provider()" in text


def test_a_plugin_is_looked_at_as_installed(
    outcomes: dict[tuple[str, str], tuple[str, str]],
) -> None:
    mine = {outcome for (cls, _), (outcome, _) in outcomes.items() if cls == "TestPlugin"}
    assert mine == {"passed"}
    outcome, text = outcomes["TestNoPlugin", "test_registers_under_the_entry_point_group"]
    assert outcome == "failure"
    assert "specdec-of-nobody is not installed" in text
    assert outcomes["TestNoPlugin", "test_scans_clean"][0] == "failure"


def test_a_check_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match=r"Sly overrides test_close_is_final .* expected_failures"):
        type("Sly", (DraftRowContract,), {"test_close_is_final": lambda _self: None})
    with pytest.raises(TypeError, match="Sly overrides test_scans_clean"):
        type("Sly", (PluginContract,), {"test_scans_clean": lambda _self: None})


def test_expected_failures_name_checks() -> None:
    with pytest.raises(TypeError, match="names no check: close_is_fnial"):
        type("Typo", (DraftRowContract,), {"expected_failures": {"close_is_fnial": "?"}})


class Small(DraftRowContract):
    max_rows = 2

    def make_provider(self) -> DraftProvider:
        return NgramProvider()


def test_limits_that_leave_checks_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows of 3"):
        Small().make_kit()


def test_the_profile_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECDEC_PROFILE", raising=False)
    assert active_effort().name == "ci"
    for name, effort in PROFILES.items():
        monkeypatch.setenv("SPECDEC_PROFILE", name)
        assert active_effort() is effort
        settings = active_effort().settings(numeric=True, shrink=False)
        assert settings.max_examples == effort.numeric_examples
        assert settings.deadline is None
        assert settings.derandomize is effort.derandomized
        assert Phase.shrink not in settings.phases
    monkeypatch.setenv("SPECDEC_PROFILE", "hasty")
    with pytest.raises(ValueError, match="'hasty'; give quick, ci, deep"):
        active_effort()


# The tiny target.


def test_the_tiny_target_has_every_port_or_lacks_just_one() -> None:
    whole = TinyTarget()
    for port in PORTS:
        assert getattr(whole, port) is not None
        lacking = whole.without(port)
        assert getattr(lacking, port) is None
        assert all(getattr(lacking, other) is not None for other in PORTS if other != port)
    assert not whole.without("hidden_taps").can_tap((0,))
    assert whole.without("hidden_taps").can_tap(())


def test_the_tiny_target_is_the_same_each_time_and_draws_from_no_global_state() -> None:
    mx.random.seed(1)
    one = TinyTarget(seed=3)
    mx.random.seed(2)
    other = TinyTarget(seed=3)
    ids = (0, 1, 2, 3, 4, 5)
    for kind, taps in ((ContextKind.TAPS, (0, 1, 2)), (ContextKind.PRE_NORM, ())):
        seen = one.hidden(ids, kind, taps)
        assert mx.array_equal(seen, other.hidden(ids, kind, taps)).item()
        assert seen.shape == (1, 6, 32 * max(1, len(taps)))
        different = TinyTarget(seed=4).hidden(ids, kind, taps)
        assert not mx.array_equal(seen, different).item()


def test_the_donors_are_the_live_rows_in_temporal_order() -> None:
    target = TinyTarget()
    rows = [(*range(8), 1, 2, 3), (4, 2)]
    target.show(rows)
    donors = target.assistant_rows.read_donors()
    assert donors.positions == (11, 2)
    keys, values = donors.full
    assert keys.shape[:3] == (2, 1, 11)
    assert values.shape == keys.shape
    assert donors.sliding[0].shape[:3] == (2, 1, 8)
    target.show(rows[1:])
    alone = target.assistant_rows.read_donors().full[0]
    assert mx.array_equal(alone[0], keys[1, :, :2]).item()


def test_the_rotation_of_the_residual_stream_is_one() -> None:
    basis = TinyTarget().residual_basis
    assert basis is not None
    turned = basis.rotation @ basis.rotation.T
    assert mx.allclose(turned, mx.eye(32), atol=1e-5).item()
    assert not mx.allclose(basis.rotation, mx.eye(32), atol=1e-1).item()


def test_a_missing_port_is_named() -> None:
    target = TinyTarget().without("hidden_taps")
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        require_port(target, "hidden_taps")


def test_state_is_compared_with_a_margin_only_where_rows_do_not_keep_their_bits() -> None:
    kit = Full().make_kit()

    def row(value: float) -> RowCheckpoint:
        arrays = {"state": mx.array([value, 2.0])}
        return RowCheckpoint(
            namespace="n", processed_tokens=1, attachment=Attachment(schema="s", arrays=arrays)
        )

    for keeps_bits in (True, False):
        kit.target.__dict__["keeps_bits"] = keeps_bits
        assert kit.same_state(row(1.0), row(1.0), beside_others=True)
        assert kit.same_state(row(1.0), row(1.005), beside_others=True) is not keeps_bits
        assert not kit.same_state(row(1.0), row(1.1), beside_others=True)
        assert not kit.same_state(row(1.0), row(1.005))
    kit.close()
    assert isinstance(TinyTarget().keeps_bits, bool)


def test_taps_that_the_target_does_not_have_are_said_at_once() -> None:
    class Tapping(Full):
        def make_provider(self) -> DraftProvider:
            provider = ScriptedProvider(context=ContextKind.TAPS, taps=(0, 9))
            return cast("DraftProvider", provider)

    with pytest.raises(
        AssertionError, match=r"taps the layers \(0, 9\), but the target has layers"
    ):
        Tapping().make_kit()


class Full(DraftRowContract):
    def make_provider(self) -> DraftProvider:
        return NgramProvider()

    def make_other_provider(self) -> DraftProvider:
        return NgramProvider(max_ngram=7)


def test_every_other_drafter_is_looked_at() -> None:
    class Same(Full):
        def make_other_providers(self) -> list[DraftProvider]:
            return [NgramProvider(max_ngram=7), NgramProvider()]

    class Alike(Full):
        def make_other_providers(self) -> list[DraftProvider]:
            return [NgramProvider(max_ngram=7), NgramProvider(max_ngram=7)]

    name = "namespace_tells_artifacts_apart"
    Full().run_check(name)
    for wrong, message in ((Same, "has the same checkpoint_namespace"), (Alike, "share")):
        with pytest.raises(AssertionError, match=message):
            wrong().run_check(name)


def test_without_its_extra_the_kit_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import specdec.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'specdec-core[testing]'" in done.stderr


def test_a_history_that_is_given_back_brings_its_checks_back() -> None:
    class Without(Full):
        state_is_history = False

    class With(Without):
        state_is_history = True

    name = "test_rows_draft_as_cold_rows"
    assert getattr(Without, name) is None
    assert getattr(With, name) is getattr(DraftRowContract, name)


def test_a_check_cannot_be_overridden_by_a_mixin_either() -> None:
    class Mixin:
        def test_close_is_final(self) -> None: ...

    with pytest.raises(TypeError, match="Sly overrides test_close_is_final"):
        type("Sly", (Mixin, Full), {})


def test_a_drafter_of_long_n_grams_drafts_something() -> None:
    class Long(Full):
        def make_provider(self) -> DraftProvider:
            return NgramProvider(min_ngram=16, max_ngram=16)

    Long().run_check("draft_answers_the_last_tokens")
    Long().run_check("drafts_depend_on_the_pending_token")


def test_a_plugin_is_found_however_its_name_is_spelt() -> None:
    class Spelt(PluginContract):
        distribution = "Specdec_Ngram"

    assert [kind.name for kind in Spelt().kinds()] == ["ngram"]
    Spelt().test_is_listed_without_mlx()
    Spelt().test_kinds_without_an_artifact_load()

    class Nobody(PluginContract):
        distribution = "specdec-demo"

    for check in ("test_kinds_without_an_artifact_load", "test_kinds_say_what_they_do"):
        with pytest.raises(AssertionError, match="specdec-demo registers no kind"):
            getattr(Nobody(), check)()


def test_options_that_a_kind_needs_are_given() -> None:
    class Optioned(PluginContract):
        distribution = "specdec-ngram"
        options: ClassVar[dict[str, dict[str, object]]] = {"ngram": {"max_ngram": 0}}

    with pytest.raises(OptionError, match="max_ngram is 0"):
        Optioned().test_kinds_without_an_artifact_load()
