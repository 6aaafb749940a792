"""Thresholds from a run: the pure rule, what a run collects, and the command."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from deepspec_driven import loaded
from deepspec_synthetic import target_model, write_qwen
from dspark_synthetic import write_dspark, write_parrot
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from tiny_models import VOCABULARY, tiny_model

import specdec_dflash.calibrate as command
from specdec import LoadedDrafter, Request, SamplingOptions, VerifyGroup
from specdec import load_drafter as load_any
from specdec.errors import ArtifactError, OptionError
from specdec.plugins import LoadRequest
from specdec.targets import MlxLmTarget
from specdec_dflash.calibration import _head_of, calibrate, collect, store
from specdec_dflash.confidence import heard
from specdec_dflash.dspark_loading import load_drafter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec import GenerationStats

PROMPTS = [[(7 * n + start) % VOCABULARY for n in range(5)] for start in (1, 20, 33)]
COUNT = 24
EVEN = [token for token in range(VOCABULARY) if token % 2 == 0]

pairs_of_a_slot = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0]), st.booleans()), max_size=12
)


def brute_force(pairs: Sequence[tuple[float, bool]], target: float, least: int) -> float:
    """The rule as it is written, threshold by threshold from the smallest one."""
    if len(pairs) < least:
        return 0.0
    for threshold in sorted({confidence for confidence, _ in pairs}):
        kept = [accepted for confidence, accepted in pairs if confidence >= threshold]
        if (sum(kept) + 1) / (len(kept) + 2) >= target:
            return threshold
    return 1.0


@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(pairs_of_a_slot, max_size=4),
    target=st.sampled_from([0.05, 0.3, 0.5, 0.6, 0.75, 0.9, 1.0]),
    least=st.integers(1, 8),
)
def test_thresholds_are_those_of_the_rule_read_literally(
    pairs: list[list[tuple[float, bool]]], target: float, least: int
) -> None:
    expected = [brute_force(slot, target, least) for slot in pairs]
    assert calibrate(pairs, target, least) == (*(0.0 for _ in pairs[:1]), *expected[1:])


@settings(max_examples=100, deadline=None)
@given(pairs=pairs_of_a_slot, target=st.sampled_from([0.3, 0.5, 0.75]))
def test_the_order_of_drafts_and_confidences_that_are_no_numbers_do_not_matter(
    pairs: list[tuple[float, bool]], target: float
) -> None:
    found = calibrate([[], pairs], target, 1)
    assert calibrate([[], [*reversed(pairs), (float("nan"), True)]], target, 1) == found


def test_the_first_slot_scarce_slots_and_hopeless_slots() -> None:
    never, always = [(0.9, False)] * 60, [(0.2, True)] * 60
    assert calibrate([never, always, never, always[:49]], 0.8) == (0.0, 0.2, 1.0, 0.0)
    mixed = [(0.3, False)] * 50 + [(0.6, True)] * 50
    assert calibrate([[], mixed], 0.9)[1] == 0.6
    assert calibrate([[], mixed], 0.5)[1] == 0.3
    assert calibrate([[], [(0.9, True)] * 2], 0.8, 1)[1] == 1.0, "two drafts prove little"
    assert calibrate([], 0.8) == ()


@pytest.mark.parametrize("target", [0, -1, 1.5, "much", float("nan")])
def test_a_target_that_is_no_share_is_refused(target: Any) -> None:
    with pytest.raises(OptionError, match=r"target is .*; give a share"):
        calibrate([], target)
    with pytest.raises(OptionError, match="least_samples is 0"):
        calibrate([], 0.5, 0)


# A run.


def bound() -> MlxLmTarget:
    return MlxLmTarget(tiny_model("qwen3"))


def load(folder: Path, **options: Any) -> LoadedDrafter:
    request = LoadRequest(
        kind="dspark", path=folder, target=bound(), options={"probe": False, **options}
    )
    return LoadedDrafter("dspark", load_drafter(request), request.target)  # type: ignore[arg-type]  # mlx-lm's


@cache
def texts() -> list[list[int]]:
    """mlx-lm's greedy texts, prompts included."""
    found = []
    for prompt in PROMPTS:
        drawn = generate_step(mx.array(prompt), tiny_model("qwen3"), max_tokens=COUNT)
        found.append([*prompt, *(int(token) for token, _ in drawn)])
    return found


def parrot(folder: Path) -> Path:
    """It is right where the text does not turn, and sure behind even tokens alone."""
    odds = np.full(VOCABULARY, -1.0, np.float32)
    odds[EVEN] = 2.0
    return write_parrot(folder, texts()[:2], odds)


def followed(prompt: Sequence[int], text: Sequence[int]) -> list[list[tuple[float, bool]]]:
    """The pairs of one text, from the parrot's table and the text alone."""
    after: dict[int, int] = {}
    for known in texts()[:2]:
        after.update(pairwise(known))
    pairs: list[list[tuple[float, bool]]] = [[] for _ in range(4)]
    place = len(prompt) - 1  # of the pending token
    while place + 1 < len(text):
        left = len(text) - place - 1
        drafts, last = [], text[place]
        for _ in range(min(4, left - 1)):
            drafts.append((last, after.get(last, 0)))
            last = drafts[-1][1]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted][1] == text[place + 1 + accepted]:
            accepted += 1
        for slot, (before, _) in enumerate(drafts):
            odds = 2.0 if before % 2 == 0 else -1.0
            pairs[slot].append((1 / (1 + np.exp(-odds)), slot < accepted))
        place += accepted + 1
    return pairs


def test_a_run_collects_what_was_said_and_what_came_of_it(tmp_path: Path) -> None:
    folder = parrot(tmp_path)
    drafter = load(folder, confidence="measure")
    assert drafter.width(9) == 4
    found = collect(drafter, PROMPTS, max_tokens=COUNT)
    expected: list[list[tuple[float, bool]]] = [[] for _ in range(4)]
    for prompt, text in zip(PROMPTS, texts(), strict=True):
        for slot, more in enumerate(followed(prompt, text)):
            expected[slot] += more
    assert [[accepted for _, accepted in slot] for slot in found] == [
        [accepted for _, accepted in slot] for slot in expected
    ]
    for mine, told in zip(found, expected, strict=True):
        np.testing.assert_allclose([a for a, _ in mine], [a for a, _ in told], atol=1e-6)
    assert {accepted for _, accepted in found[3]} == {True, False}


def test_drafts_behind_an_end_token_count_for_nothing(tmp_path: Path) -> None:
    drafter = load(parrot(tmp_path), confidence="measure")
    text = texts()[0]
    end = text[len(PROMPTS[0]) + 6]
    cut = collect(drafter, PROMPTS[:1], end_tokens=[end], max_tokens=COUNT)
    whole = collect(drafter, PROMPTS[:1], max_tokens=COUNT)
    assert 0 < len(cut[0]) < len(whole[0])
    for mine, full in zip(cut, whole, strict=True):
        assert mine == full[: len(mine)]


def test_nothing_is_heard_of_rounds_that_ask_for_no_confidence(tmp_path: Path) -> None:
    drafter = load(parrot(tmp_path))
    with pytest.raises(ArtifactError, match=r'told no confidence; .*confidence="measure"'):
        collect(drafter, PROMPTS[:1], max_tokens=COUNT)


def test_drafters_that_are_measured_at_once_do_not_hear_each_other(tmp_path: Path) -> None:
    one, other = (load(parrot(tmp_path / name), confidence="measure") for name in "ab")
    heads = [_head_of(each) for each in (one, other)]
    assert heads[0] is not heads[1]
    with heard(heads[0]) as first, heard(heads[1]) as second:
        pairs = collect(one, PROMPTS[:1], max_tokens=COUNT)
        assert len(first) > 1
        assert not second
        rounds = len(first)
        assert collect(other, PROMPTS[:1], max_tokens=COUNT) == pairs
        assert (len(first), len(second)) == (rounds, rounds)
    collect(one, PROMPTS[:1], max_tokens=COUNT)
    assert len(first) == rounds


def test_a_drafter_of_another_plugin_tells_no_confidence() -> None:
    drafter = load_any("ngram", tiny_model("qwen3"))
    with pytest.raises(ArtifactError, match="told no confidence"):
        collect(drafter, PROMPTS[:1])


# The command.


class Letters:
    """A tokenizer of 64 ids; the text of a prompt is its letters."""

    bos_token = None
    eos_token_id = 63
    eos_token_ids = (63,)
    chat_template = None
    clean_up_tokenization_spaces = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def apply_chat_template(self, messages: object, **kwargs: object) -> list[int]:
        raise AssertionError("nobody asked for a chat")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token + 32) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {chr(token + 32): token for token in range(VOCABULARY)}


class Long(Letters):
    """The same, of any text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a parrot whose texts are known."""
    monkeypatch.setattr(command, "load_model", lambda name: (tiny_model("qwen3"), Letters()))
    monkeypatch.setattr("specdec_dflash.dspark_loading.agreed", lambda *told: told[2])
    folder = parrot(tmp_path / "parrot")
    prompts = write_prompts(tmp_path)
    arguments = ["--model", "tiny", "--drafter", str(folder), "--prompts", str(prompts)]
    return [*arguments, "--max-tokens", str(COUNT), "--least-samples", "2"]


def test_the_command_prints_thresholds_and_stores_them_when_asked(
    command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "parrot" / "dspark.json"
    before = json.loads(file.read_text())
    assert command.main([*command_line, "--target", "0.7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    drafter = load(file.parent, confidence="measure")
    pairs = collect(drafter, PROMPTS, end_tokens=[63], max_tokens=COUNT)
    assert shown["thresholds"] == list(calibrate(pairs, 0.7, 2))
    assert any(threshold > 0 for threshold in shown["thresholds"])
    assert shown["drafted"] == list(map(len, pairs))
    assert json.loads(file.read_text()) == before, "nothing is written unless it is asked for"
    assert command.main([*command_line, "--target", "0.7", "--write"]) == 0
    told = capsys.readouterr()
    after = json.loads(file.read_text())
    sts = after["config"].pop("sts")
    assert after == before
    assert sts["thresholds"] == shown["thresholds"]
    assert str(file) in told.err
    # A second run is one of all drafts again, whatever the first has stored.
    assert command.main([*command_line, "--target", "0.7"]) == 0
    assert json.loads(capsys.readouterr().out) == shown


def write_prompts(folder: Path) -> Path:
    lines = [{"text": "".join(chr(token + 32) for token in prompt)} for prompt in PROMPTS]
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize(
    ("kind", "from_anchor"), [("dspark", True), ("deepspec", True), ("deepspec", False)]
)
@pytest.mark.parametrize("other", [False, True], ids=["as its files say", "read otherwise"])
def test_what_the_command_writes_can_be_loaded_and_cuts_where_it_should(
    kind: str, from_anchor: bool, other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3") if kind == "dspark" else target_model()
    monkeypatch.setattr(command, "load_model", lambda name: (model, Letters()))
    folder = tmp_path / "drafter"
    if kind == "dspark":
        write_dspark(folder)
    else:
        write_qwen(folder, sample_from_anchor=from_anchor)
    asked = ["--model", "tiny", "--drafter", str(folder), "--prompts", str(write_prompts(tmp_path))]
    asked += ["--max-tokens", "8", "--least-samples", "1", "--target", "1", "--write"]
    asked += ["--option", "probe=false"]
    if other:
        asked += ["--option", f"from_anchor={json.dumps(not from_anchor)}"]
    assert command.main(asked) == 0
    with load_any(folder, model, Letters(), probe=False) as drafter:
        assert drafter.num_draft_tokens == 2, "the number of a CPU; thresholds are for all slots"
        assert drafter.max_draft_tokens == {"dspark": 4, "deepspec": 5}[kind]
    # A target of 1 is never reached, so all drafts behind the first are cut.
    used: dict[str, Any] = {"probe": False, "from_anchor": from_anchor != other}
    with load_any(folder, model, Letters(), **used) as drafter:
        assert len(drafted(drafter)) == 1
    with load_any(folder, model, Letters(), confidence=False, **used) as drafter:
        assert len(drafted(drafter)) == drafter.max_draft_tokens


def test_a_drafter_that_the_probe_refuses_can_be_calibrated_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_model", lambda name: (target_model(), Long()))
    folder = write_qwen(tmp_path / "drafter")
    prompts = str(write_prompts(tmp_path))
    asked = ["--model", "tiny", "--drafter", str(folder), "--prompts", prompts, "--max-tokens", "8"]
    assert command.main(asked) == 2
    assert "probe=false" in capsys.readouterr().err
    assert command.main([*asked, "--option", "probe=false"]) == 0
    assert json.loads(capsys.readouterr().out)["thresholds"][0] == 0.0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--option", "confidence=0.5"], "--option confidence is this command's own; leave it out"),
        (["--option", "speed=1"], "has no option speed"),
        (["--target", "2"], "target is 2.0; give a share above 0"),
        (["--least-samples", "0"], "least_samples is 0; give 1 or more"),
        (["--max-tokens", "0"], "--max-tokens is 0; give 1 or more"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--drafter", "ngram"], "--drafter ngram is of kind ngram, which has no confidence"),
        (["--drafter", "./nowhere"], "drafter ./nowhere does not exist"),
        (["--drafter", "demo-qwen3-dflash"], "is of kind dflash, which has no confidence"),
    ],
)
def test_a_mistake_is_one_line(
    more: list[str], says: str, command_line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*command_line, *more]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert len(told.err.splitlines()) == 1


def test_a_drafter_without_a_confidence_head_cannot_be_calibrated(
    command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = write_dspark(tmp_path / "older", variant="dflash", parts=False)
    assert command.main([*command_line, "--drafter", str(older)]) == 2
    assert "this drafter has no confidence head" in capsys.readouterr().err


# Drafters of the kind deepspec, whose config.json gets a key.


def deepspec(folder: Path, **options: Any) -> LoadedDrafter:
    target = MlxLmTarget(target_model())
    return LoadedDrafter("deepspec", loaded(folder, target, **options), target)


def drafted(drafter: LoadedDrafter) -> list[int]:
    """Per slot, how many drafts of it were verified."""
    [_, stats] = run(drafter, PROMPTS[0])
    return list(stats.drafted_per_position)


def run(drafter: LoadedDrafter, prompt: Sequence[int]) -> tuple[list[int], GenerationStats]:
    group = VerifyGroup(drafter.target, drafter.provider, drafter=drafter.kind)
    width = drafter.width(99)
    request = Request(
        prompt=prompt, max_tokens=16, sampling=SamplingOptions(), num_draft_tokens=width
    )
    [row] = group.admit([request])
    while row.finish is None:
        with group.round() as verified:
            verified.deliver_all()
    group.close()
    assert row.stats.last_draft_error is None
    return list(row.tokens), row.stats


def test_thresholds_of_a_deepspec_drafter_stand_in_its_config_and_cut(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "drafter")
    before = json.loads((folder / "config.json").read_text())
    plain = deepspec(folder)
    width = plain.width(99)
    pairs = collect(deepspec(folder, confidence="measure"), PROMPTS[:2], max_tokens=16)
    assert len(pairs) == width >= 3
    assert len({confidence for slot in pairs for confidence, _ in slot}) > width
    assert store(folder, (0.0, 0.0, *[1.0] * (width - 2)), 0.8, 9) == folder / "config.json"
    after = json.loads((folder / "config.json").read_text())
    assert after.pop("confidence_thresholds")[:3] == [0.0, 0.0, 1.0]
    assert after == before
    calibrated = deepspec(folder)
    assert len(drafted(plain)) == width
    assert len(drafted(calibrated)) == len(drafted(deepspec(folder, confidence=0.1))) == 2
    assert len(drafted(deepspec(folder, confidence=False))) == width
    assert run(calibrated, PROMPTS[0])[0] == run(plain, PROMPTS[0])[0]


@pytest.mark.parametrize("wrong", [[0.5], "high", [2.0] * 3])
def test_thresholds_that_are_none_are_refused(wrong: object, tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "drafter", confidence_thresholds=wrong)
    with pytest.raises(ArtifactError, match=r"config\.json: confidence_thresholds is .* 0 to 1"):
        deepspec(folder)


def test_thresholds_without_a_confidence_head_are_refused(tmp_path: Path) -> None:
    without = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    folder = write_qwen(tmp_path / "drafter", confidence_thresholds=[0.0], **without)
    with pytest.raises(ArtifactError, match="but the drafter has no confidence head"):
        deepspec(folder)


def test_a_config_that_is_not_there_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json cannot be read"):
        store(tmp_path / "nowhere", (0.0,), 0.8, 1)
