"""``specdec check``: what it says of a model, and that it notices what is wrong with one."""

from __future__ import annotations

import json
import types
from collections import Counter
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from architectures.exceptions import PLAIN
from attrs import asdict, evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from scripted import ScriptedProvider
from tiny_models import alone, build_model, tiny_model

from specdec.check import DrafterFit, Flip, ModelReport, WidthReport, check_model
from specdec.cli import main
from specdec.contract import require_port
from specdec.errors import OptionError
from specdec.plugins import DraftKind, LoadedDraft, Registry, hookimpl, scan
from specdec.state import RaggedState
from specdec.state.positions import RowPositions
from specdec.state.recurrent import RecurrentRows
from specdec.targets import MlxLmTarget
from specdec_demo import path as demo_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specdec.plugins import LoadRequest

READ, COMPARED = 16, 46  # positions of the text: what is read first, and what is compared
WIDTHS = (1, 2, 3, 5, 9)
FIELDS = {
    "model_type": str,
    "vocab_size": int,
    "caches": dict,
    "reason": type(None),
    "together": str,
    "recurrent": dict,
    "ports": dict,
    "drafters": list,
    "widths": list,
    "rollback": dict,
    "exact": bool,
    "sound": bool,
    "tie_margin": float,
}


class Letters:
    """A tokenizer of single letters, in 64 ids; remembers what it gave."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def encode(self, text: str) -> list[int]:
        self.given = [ord(letter) % 64 for letter in text]
        return self.given


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(("check", *argv))
    out, err = capsys.readouterr()
    return status, out, err


@contextmanager
def loaded(model: Any, tokenizer: Any = None) -> Iterator[None]:
    """Let the command load this model, whatever name it is given."""
    pair = model, Letters() if tokenizer is None else tokenizer
    with mock.patch("specdec.models.load_model", return_value=pair):
        yield


def strict(text: str) -> dict[str, Any]:
    """JSON of the standard: no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def checked(
    capsys: pytest.CaptureFixture[str], model: Any, *options: str
) -> tuple[int, dict[str, Any], list[str]]:
    """Status, object and lines of the command."""
    reports: list[ModelReport] = []

    def once(*args: Any, **kwargs: Any) -> ModelReport:
        if not reports:
            reports.append(check_model(*args, **kwargs))
        return reports[0]

    with loaded(model), mock.patch("specdec.check.check_model", once):
        status, out, err = run(capsys, "a-model", "--json", *options)
        again, lines, _ = run(capsys, "a-model", *options)
    assert (again, err) == (status, "")
    return status, strict(out), lines.splitlines()


def widths_alone(model: Any, ids: Sequence[int]) -> dict[int, float]:
    """The largest difference of mlx-lm's own logits in windows, through its own caches."""
    logits = {}
    for width in WIDTHS:
        caches, rows = make_prompt_cache(model), []
        model(mx.array([ids[:READ]]), cache=caches)
        for start in range(READ, READ + COMPARED, width):
            window = ids[start : min(start + width, READ + COMPARED)]
            rows.append(model(mx.array([window]), cache=caches)[0])
        logits[width] = mx.concatenate(rows)
    want = np.array(logits[1])
    return {width: float(np.abs(np.array(logits[width]) - want).max()) for width in WIDTHS}


# What it says.


def test_a_bundled_model_is_said_to_be_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "demo", "--drafter", "ngram", "--json")
    found = strict(out)
    assert (status, err) == (0, "")
    assert {name: type(found[name]) for name in found} == FIELDS
    assert (found["model_type"], found["vocab_size"]) == ("qwen3", 8192)
    assert found["caches"] == {"KVCache": 6}
    assert found["together"] == "rows of any length"
    assert found["ports"] == {
        "hidden_taps": "6 layers of 384",
        "recurrent_mtp": "hidden 384, plain head",
        "assistant_rows": "hidden 384",
        "residual_basis": None,
    }
    assert found["drafters"] == [{"kind": "ngram", "fits": True, "message": ""}]
    assert [way["name"] for way in found["widths"]] == [f"width {width}" for width in WIDTHS]
    assert found["rollback"]["name"] == "rolled back"
    assert found["sound"]


def test_a_head_that_a_checkpoint_declares_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "demo-qwen3_5", "--json")
    assert status == 0
    assert {"kind": "mtp", "fits": True, "message": ""} in strict(out)["drafters"]


def test_the_lines_say_what_the_object_says(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("lfm2")
    status, found, lines = checked(capsys, model)
    assert status == 0
    assert lines[0] == f"model: lfm2, {found['vocab_size']} ids"
    assert lines[1] == "caches: " + ", ".join(
        f"{n} x {name}" for name, n in found["caches"].items()
    )
    assert lines[2] == "speculation: yes; in one call: rows of any length"
    [(name, how)] = found["recurrent"].items()
    assert lines[3] == f"recurrent: {name}, {how}"
    ports = [f"port {name}: {what or 'missing'}" for name, what in found["ports"].items()]
    assert lines[4:8] == ports
    end = 8 + len(found["drafters"])
    assert "drafter ngram: fits" in lines[8:end]
    assert "drafter mtp: not tried (give its folder with --drafter)" in lines[8:end]
    ways = [*found["widths"][1:], found["rollback"]]
    for line, way in zip(lines[end : end + 5], ways, strict=True):
        said = f"{way['name']}: largest difference {way['difference']:.3g}, "
        assert line.startswith(said)
        assert line.endswith("no token differs") is (way["flips"] == [])
    assert len(lines) == end + 6
    assert lines[end + 5].startswith("exact: " if found["exact"] else "not exact: ")


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_is_as_exact_as_mlx_lm_is_through_its_own_caches(name: str) -> None:
    letters, model = Letters(), tiny_model(name)
    report = check_model(model, letters)
    want = widths_alone(model, letters.given[: READ + COMPARED])
    assert [way.difference for way in report.widths] == pytest.approx(list(want.values()), abs=1e-4)
    assert report.rollback is not None
    assert report.rollback.difference <= max(2 * max(want.values()), 1e-6)
    assert report.exact is (not any(want.values()) and report.rollback.difference == 0)
    assert report.sound


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5", "rwkv7", "falcon_h1"])
def test_recurrent_modules_are_named_with_their_number_and_how(name: str) -> None:
    model = build(name)
    report = check_model(model, Letters())
    kinds = Counter(type(module).__name__ for module in model.modules())
    assert report.recurrent
    on_cpu = mx.default_device().type == mx.cpu
    for kind, how in report.recurrent.items():
        assert how.startswith(f"{kinds[kind]} modules, ")
        if name in {"mamba2", "falcon_h1"} and on_cpu:
            assert how.endswith(", run position by position")
        else:
            assert how.endswith(", else run again over what is kept")
    if name == "lfm2":
        assert "inputs of convolutions kept" in report.recurrent["ShortConv"]
    if name == "qwen3_5":
        assert "states kept where they are computed one" in report.recurrent["GatedDeltaNet"]
    assert report.sound


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "falcon_h1", "deepseek_v32", "mamba"])
def test_caches_are_counted_and_lists_named_with_their_parts(name: str) -> None:
    def named(cache: Any) -> str:
        own = type(cache).__name__
        parts = getattr(cache, "caches", None)
        return own if parts is None else f"{own}({', '.join(map(named, parts))})"

    model = build(name)
    want = Counter(map(named, make_prompt_cache(model)))
    assert any("(" in kind for kind in want) is (name in {"falcon_h1", "deepseek_v32"})
    assert check_model(model, Letters()).caches == want


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_without_speculation_says_why_and_is_read_in_one_way(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    status, found, lines = checked(capsys, build(name), "--drafter", "ngram")
    assert (status, found["rollback"], found["sound"]) == (0, None, True)
    assert found["reason"].endswith(PLAIN[name])
    assert lines[2] == f"speculation: no ({found['reason']})"
    assert [way["name"] for way in found["widths"]] == ["width 1"]
    assert not [line for line in lines if line.startswith(("width", "rolled back", "not exact"))]


def test_a_model_without_speculation_is_not_called_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, _, lines = checked(capsys, build("phi3small"))
    assert not [line for line in lines if line.startswith("exact")], "nothing was compared"


# Drafters.


@frozen
class Entry:
    """An entry point that is not installed."""

    kinds: tuple[DraftKind, ...]
    name: str = "fake"
    dist: Any = field(factory=lambda: types.SimpleNamespace(name="specdec-fake", version="1.0"))

    def load(self) -> object:
        module = types.ModuleType(self.name)
        vars(module)["specdec_api"] = 1
        vars(module)["specdec_draft_kinds"] = hookimpl(lambda: list(self.kinds))
        return module


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedProvider]:
    """Two kinds, one that reads hidden states and one that has files; what they have loaded."""
    for variable in ("SPECDEC_PLUGINS", "SPECDEC_DISABLE_PLUGINS", "SPECDEC_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    made: list[ScriptedProvider] = []

    def load(request: LoadRequest) -> LoadedDraft:
        require_port(request.target, "hidden_taps", "the tapped\ndrafter")
        made.append(ScriptedProvider())
        return LoadedDraft(provider=made[-1], num_draft_tokens=2)

    kinds = (
        DraftKind(name="tapped", load=load, artifact=False),
        DraftKind(name="of-files", load=load, detect=lambda _: False),
    )
    with mock.patch.object(metadata, "entry_points", return_value=[Entry(kinds)]):
        registry = Registry(scan(strict=True))
    for name in ("specdec.check", "specdec.drafters"):
        monkeypatch.setattr(f"{name}.default_registry", lambda: registry)
    return made


def test_every_installed_kind_is_tried_and_closed_and_those_with_files_are_not(
    capsys: pytest.CaptureFixture[str], providers: list[ScriptedProvider]
) -> None:
    status, found, lines = checked(capsys, tiny_model("qwen3"))
    assert status == 0
    assert found["drafters"] == [
        {"kind": "of-files", "fits": None, "message": "give its folder with --drafter"},
        {"kind": "tapped", "fits": True, "message": ""},
    ]
    assert "drafter of-files: not tried (give its folder with --drafter)" in lines
    assert "drafter tapped: fits" in lines
    assert [provider.closed for provider in providers] == [1]


@pytest.mark.usefixtures("providers")
def test_a_drafter_that_needs_a_missing_port_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = build("gemma3n")
    assert MlxLmTarget(model).hidden_taps is None
    status, found, lines = checked(capsys, model, "--drafter", "tapped")
    [fit] = found["drafters"]
    assert (status, fit["kind"], fit["fits"]) == (1, "tapped", False)
    assert "the target port 'hidden_taps', which this target does not have" in fit["message"]
    assert "\n" not in fit["message"]
    assert f"drafter tapped: does not fit ({fit['message']})" in lines
    status, found, _ = checked(capsys, model)
    assert (status, found["sound"]) == (0, True), "nobody asked for it"
    assert checked(capsys, tiny_model("qwen3"), "--drafter", "tapped")[0] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("demo", "--drafter", "nope"), "no installed plugin has the kind 'nope'"),
        (("demo", "--drafter", "./nope"), "drafter ./nope does not exist"),
        (("demo", "--drafter", str(demo_path().parent)), "no kind recognises"),
        (("demo", "--drafter", "ngram,"), "has an empty name"),
        (("demo", "--drafter", "ngram,nope"), "no installed plugin has the kind 'nope'"),
        (("nope",), "model nope is neither a folder nor a bundled model"),
        (("--model", "nope"), "model nope is neither a folder nor a bundled model"),
        (("demo", "--model", "nope"), "there are two models, demo and nope; give one"),
        ((), "no model is named; give a folder, a bundled model (demo) or a hub id"),
        (("a" * 300,), "long"),
    ],
)
def test_what_is_unknown_gets_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("tokenizer", [None, object(), 7])
def test_what_is_no_tokenizer_is_refused_in_one_line(tokenizer: Any) -> None:
    with pytest.raises(OptionError, match=r"the tokenizer is .*; give what mlx_lm") as caught:
        check_model(tiny_model("qwen3"), tokenizer)
    assert "\n" not in str(caught.value)
    beyond = types.SimpleNamespace(encode=lambda _: [64, 700])
    with pytest.raises(OptionError, match="no ids that the model has"):
        check_model(tiny_model("qwen3"), beyond)


# What it notices.


def one_too_many(kept: Sequence[int] | None, width: int) -> list[int] | None:
    return None if kept is None else [min(count + 1, width) for count in kept]


@pytest.mark.parametrize("name", ["mamba2", "lfm2", "llama", "gemma3_text"])
def test_a_rollback_that_keeps_one_position_too_many_is_not_sound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recurrent = name in {"mamba2", "lfm2"}
    kind: Any = RecurrentRows if recurrent else RowPositions
    model, finish = build(name), kind.finish
    status, found, _ = checked(capsys, model)
    assert (status, found["sound"]) == (0, True)

    def broken(self: Any, kept: Sequence[int] | None) -> None:
        width = self.window[1] if recurrent else self.width
        finish(self, one_too_many(kept, width))

    monkeypatch.setattr(kind, "finish", broken)
    status, found, lines = checked(capsys, model)
    assert (status, found["sound"], found["exact"]) == (1, False, False)
    assert found["rollback"]["difference"] > 1e-3
    assert lines[-1].startswith("rollback is not sound")


class Noise:
    """Adds to the logits of a target what depends on the width of the window alone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.widths: list[int] = []  # of the window that each kept position was in
        forward, rollback = MlxLmTarget.forward, RaggedState.rollback

        def noisy(target: MlxLmTarget, tokens: mx.array, state: Any, *rest: Any) -> Any:
            window = forward(target, tokens, state, *rest)
            logits = window.logits + mx.array(self.of(tokens.shape[1]))
            return evolve(window, logits=logits)

        def heard(state: RaggedState, kept: Sequence[int]) -> None:
            self.widths += [state.open_width] * kept[0]
            rollback(state, kept)

        patch.setattr(MlxLmTarget, "forward", noisy)
        patch.setattr(RaggedState, "rollback", heard)

    @staticmethod
    def of(width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        drawn = np.random.default_rng(width).normal(size=64)
        return (0 if width == 1 else 0.4) * drawn.astype(np.float32)


def test_differences_flips_and_margins_are_those_of_the_noise_that_was_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, letters = build_model("llama"), Letters()
    MlxLmTarget(model)  # what rolls back there is none of the probe's
    noise = Noise(monkeypatch)
    report = check_model(model, letters)
    ids = letters.given[: READ + COMPARED]
    want = np.array(alone(model, ids))[READ:]
    lead = np.sort(want)[:, -1] - np.sort(want)[:, -2]
    assert len(noise.widths) == COMPARED
    assert {*noise.widths} >= {2, 3, 5, 9}
    ways: dict[str, list[int]] = {f"width {w}": [] for w in WIDTHS} | {"rolled back": noise.widths}
    for width in WIDTHS:
        for start in range(0, COMPARED, width):
            held = min(width, COMPARED - start)
            ways[f"width {width}"] += [held] * held
    assert report.rollback is not None
    overcome = []
    for way in (*report.widths, report.rollback):
        added = np.stack([noise.of(width) for width in ways[way.name]])
        flipped = np.flatnonzero(np.argmax(want + added, -1) != np.argmax(want, -1))
        assert way.difference == pytest.approx(np.abs(added).max(), abs=1e-4)
        assert [flip.position for flip in way.flips] == flipped.tolist()
        assert [flip.margin for flip in way.flips] == pytest.approx(lead[flipped], abs=1e-4)
        overcome += lead[flipped].tolist()
    assert len(overcome) > 10
    assert report.tie_margin == pytest.approx(max(overcome), abs=1e-4)
    assert not report.exact
    assert report.sound, "dropping a part changes no more than the width does"
    status, found, lines = checked(capsys, model)
    assert (status, found["exact"], found["sound"]) == (0, False, True)
    assert lines[-1] == (
        f"not exact: texts may part where two tokens are within {report.tie_margin:.3g} "
        "of each other"
    )
    first = report.rollback.flips[0]
    assert lines[-2].startswith("rolled back: largest difference ")
    assert f"at {first.position} (ahead by {first.margin:.3g})" in lines[-2]


class Head(Module):
    """A head whose logits are changed ``[B, W, V]``."""

    def __init__(self, inner: Any, change: Callable[[mx.array], mx.array]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx's own
        self.inner = inner
        self.change = change

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.change(self.inner(hidden))


def with_head(change: Callable[[mx.array], mx.array]) -> Any:
    model = build_model("llama")
    model.lm_head = Head(model.lm_head, change)
    return model


def without(id_: int, logits: mx.array) -> mx.array:
    return mx.where(mx.arange(logits.shape[-1]) == id_, -mx.inf, logits)


def test_ids_that_are_never_drawn_give_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    _, plain, _ = checked(capsys, tiny_model("llama"))
    status, found, lines = checked(capsys, with_head(lambda logits: without(5, logits)))
    assert (status, found["sound"], found["exact"]) == (0, True, plain["exact"])
    assert found["rollback"]["difference"] == pytest.approx(
        plain["rollback"]["difference"], abs=1e-4
    )
    assert "nan" not in "\n".join(lines)


def test_an_id_that_only_a_wide_window_rules_out_differs_without_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def change(logits: mx.array) -> mx.array:
        return without(5, logits) if logits.shape[1] == 9 else logits

    _, found, lines = checked(capsys, with_head(change))
    assert [way["difference"] is None for way in found["widths"]] == [False] * 4 + [True]
    assert found["rollback"]["difference"] is None
    assert not found["exact"]
    assert any(line.startswith("width 9: largest difference inf") for line in lines)


def test_a_lead_without_end_is_valid_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    def change(logits: mx.array) -> mx.array:
        only = 5 + (logits.shape[1] == 5)
        return mx.where(mx.arange(64) == only, logits, -mx.inf)

    _, found, _ = checked(capsys, with_head(change))
    assert found["widths"][3]["flips"]
    assert not found["exact"]


def test_a_model_that_gives_no_numbers_is_not_called_exact() -> None:
    report = check_model(with_head(lambda logits: logits * mx.nan), Letters())
    assert not report.exact


@pytest.mark.parametrize("size", [1, 2])
def test_a_vocabulary_of_one_id_is_checked_as_any_other(
    capsys: pytest.CaptureFixture[str], size: int
) -> None:
    model = build_model("llama", vocab_size=size)
    with loaded(model, types.SimpleNamespace(encode=lambda text: [0] * len(text))):
        status, out, _ = run(capsys, "a-model", "--json")
    found = strict(out)
    assert (status, found["vocab_size"], found["sound"]) == (0, size, True)
    if size == 1:
        assert [way["flips"] for way in found["widths"]] == [[]] * len(WIDTHS)


# What a report adds up to.

ZERO = WidthReport("width 1", 0.0, ())
FLIPS = st.lists(st.floats(0, 9, width=16), max_size=3).map(
    lambda margins: tuple(Flip(place, margin) for place, margin in enumerate(margins))
)
WAYS = st.builds(WidthReport, st.just("way"), st.sampled_from([0.0, 1e-7, 0.5, 1.0, 1.25]), FLIPS)


def report_of(widths: Sequence[WidthReport], rollback: WidthReport | None) -> ModelReport:
    return ModelReport(
        model_type="made",
        vocab_size=3,
        caches={},
        reason=None,
        together="one row",
        recurrent={},
        ports={},
        drafters=(DrafterFit("ngram", True),),
        widths=(ZERO, *widths),
        rollback=rollback,
    )


@given(widths=st.lists(WAYS, max_size=3), rollback=st.none() | WAYS)
def test_a_report_adds_up(widths: list[WidthReport], rollback: WidthReport | None) -> None:
    report = report_of(widths, rollback)
    ways = widths if rollback is None else [*widths, rollback]
    assert report.exact is (sum(way.difference for way in ways) == 0)
    margins = [flip.margin for way in ways for flip in way.flips]
    assert report.tie_margin == max([0.0, *margins])
    assert asdict(report)["drafters"] == ({"kind": "ngram", "fits": True, "message": ""},)


def test_a_rollback_may_change_twice_what_the_width_does() -> None:
    wide = WidthReport("width 2", 0.5, ())
    for difference, sound in ((0.0, True), (0.5, True), (1.0, True), (1.25, False)):
        assert report_of([wide], WidthReport("rolled back", difference, ())).sound is sound
    assert report_of([], WidthReport("rolled back", 1e-7, ())).sound, "rounding alone"
    assert not report_of([], WidthReport("rolled back", 1e-5, ())).sound
    assert report_of([wide], None).sound, "nothing is dropped"


@pytest.mark.usefixtures("providers")
def test_a_head_whose_plugin_is_missing_is_named_with_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    assert all(fit["kind"] != "mtp" for fit in checked(capsys, model)[1]["drafters"])
    monkeypatch.setattr(MlxLmTarget, "native_draft", "mtp")
    status, _, lines = checked(capsys, model)
    [line] = [line for line in lines if line.startswith("drafter mtp: ")]
    assert status == 0
    assert line.startswith("drafter mtp: not tried (the model declares a head of it; ")
    assert line.endswith("pip install specdec-mtp)")
