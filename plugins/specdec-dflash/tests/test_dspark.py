"""Drafters of ``dspark.json``: what they draft, where they stop, and what is refused."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, field
from dspark_synthetic import edited, rewritten, stored, write_dspark, write_parrot
from mlx_lm.generate import generate_step
from oracles.dspark_plain import PlainDspark
from tiny_models import VOCABULARY, tiny_model

from specdec import VerifyGroup
from specdec.contract import ContextKind, Sampled
from specdec.drafting.probe import TEXT
from specdec.errors import ArtifactError, OptionError, SpecdecDrafterWarning, TargetLacksError
from specdec.plugins import Artifact, LoadRequest, default_registry
from specdec.sampling import SamplingOptions
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget
from specdec.testing import TinyTarget
from specdec.verify import Request
from specdec_dflash.dspark_config import read_dspark
from specdec_dflash.dspark_loading import load_drafter, stored_embedding
from specdec_dflash.files import read_files
from specdec_dflash.probe import probe_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from oracles.dspark_plain import PlainDraft

    from specdec.drafting import ProjectedRows
    from specdec.plugins import LoadedDraft
    from specdec_dflash.dspark_config import DsparkConfig
    from specdec_dflash.dspark_model import DsparkDrafting

PROMPTS = (
    [5],
    [(11 * n + 5) % VOCABULARY for n in range(9)],
    [(29 * n + 2) % 61 for n in range(23)],
)
GAMMA = 4
CASES: dict[str, dict[str, Any]] = {
    "markov": {},
    "named markov": {"seq_head": "markov", "heads": 4, "taps": (2, 0, 1)},
    "rnn": {"seq_head": "rnn"},
    "calibrated": {"sts": (0.0, 0.55, 0.5, 0.6)},
    "rnn calibrated": {"seq_head": "rnn", "sts": (0.0, 0.5, 0.45, 0.6), "variant": "dflash"},
    "older": {"variant": "dflash", "parts": False},
    "older, all parts": {"variant": "dflash", "taps": (1,)},
    "one column": {"gamma": 1},
}


@cache
def target(name: str = "qwen3") -> MlxLmTarget:
    return MlxLmTarget(tiny_model(name))


def load(folder: Path, bound: Any = None, **options: Any) -> LoadedDraft:
    # A random drafter agrees with nothing, which is no news here.
    options = {"probe": False, **options}
    width = options.pop("width", None)
    request = LoadRequest(
        kind="dspark",
        path=folder,
        target=bound or target(),
        num_draft_tokens=width,
        options=options,
    )
    return load_drafter(request)


def plain(folder: Path, name: str = "qwen3") -> PlainDspark:
    model = target(name).model
    table = np.array(model.model.embed_tokens.weight, dtype=np.float64)
    head = np.array(model.lm_head.weight, dtype=np.float64) if "lm_head" in model else table
    return PlainDspark.of(folder, lambda token: table[token], lambda hidden: head @ hidden)


def tapped(tokens: Sequence[int], taps: Sequence[int], name: str = "qwen3") -> mx.array:
    state = target(name).new_state()
    state.begin_round(len(tokens), reading=True)
    window = target(name).forward(mx.array([list(tokens)]), state, ContextKind.TAPS, tuple(taps))
    assert window.context is not None
    return window.context


@define
class Seen:
    """Draws of greedy rows, which keep the log-probabilities that they were shown."""

    seen: list[mx.array]
    selection: Sampled = field(factory=Sampled)
    rejecting: bool = False

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        self.seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("no row is judged by rejection")


@define(eq=False)
class Rows:
    """A group whose rounds the test decides, beside the plain reference."""

    rows: ProjectedRows
    texts: list[list[int]]
    seen: list[mx.array]
    taps: tuple[int, ...]
    window: list[list[int]]

    @classmethod
    def of(cls, loaded: LoadedDraft, prompts: Sequence[Sequence[int]]) -> Rows:
        provider: Any = loaded.provider
        taps = provider.grouped.target_tap_layers(target())
        read = []
        for prompt in prompts:
            group = provider.grouped.open_prefill(target=target(), checkpoints=[None])
            hidden = tapped(prompt, taps)
            for start in range(0, len(prompt), 7):  # in chunks
                ids = mx.array([list(prompt[start : start + 7])], mx.int32)
                group.prefill(ids, hidden[:, start : start + 7])
            read.append(group.capture(0))
            group.close()
        seen: list[mx.array] = []
        rows = provider.grouped.open(target=target(), sampling=Seen(seen), checkpoints=read)
        return cls(rows, [list(prompt) for prompt in prompts], seen, taps, [])

    def draft(self, pending: Sequence[int], depth: int) -> list[list[int]]:
        self.seen.clear()
        count = len(pending)
        drafts = self.rows.draft(pending, [depth] * count, [0] * count)
        assert isinstance(drafts, list)
        self.window = [[first, *draft] for first, draft in zip(pending, drafts, strict=True)]
        return drafts

    def commit(self, accepted: Sequence[int]) -> None:
        width = max(map(len, self.window))
        contexts = []
        for text, window in zip(self.texts, self.window, strict=True):
            own = tapped([*text, *window], self.taps)[:, len(text) :]
            contexts.append(mx.pad(own, [(0, 0), (0, width - len(window)), (0, 0)]))
        self.rows.commit(accepted, mx.concatenate(contexts))
        for text, window, count in zip(self.texts, self.window, accepted, strict=True):
            text.extend(window[: 1 + count])


def expected(reference: PlainDspark, text: Sequence[int], pending: int) -> PlainDraft:
    taps = np.array(tapped(text, reference.config["tapLayers"])[0], dtype=np.float64)
    return reference.draft(taps, pending)


def log_softmax(logits: Any) -> Any:
    raised = logits - logits.max(axis=-1, keepdims=True)
    return raised - np.log(np.exp(raised).sum(axis=-1, keepdims=True))


def check_round(rows: Rows, reference: PlainDspark, pending: Sequence[int]) -> list[int]:
    """Draft, compare with the reference, and say how many drafts each row proposed."""
    sts = reference.config.get("sts")
    thresholds = None if sts is None else sts["thresholds"]
    gamma = reference.config["gamma"]
    drafts = rows.draft(pending, gamma)
    shown = [np.array(step, dtype=np.float64) for step in rows.seen]
    assert len(shown) == gamma
    for row, (text, first) in enumerate(zip(rows.texts, pending, strict=True)):
        told = expected(reference, text, first)
        assert drafts[row] == told.proposed(gamma, thresholds)
        for slot in range(gamma):
            error = np.abs(shown[slot][row] - log_softmax(told.logits[slot])).max()
            assert error < 1e-4
    return [len(draft) for draft in drafts]


@pytest.mark.parametrize("case", CASES)
def test_a_row_and_three_ragged_rows_draft_as_the_plain_reference_over_rounds(
    case: str, tmp_path: Path
) -> None:
    folder = write_dspark(tmp_path, **CASES[case])
    reference, loaded = plain(folder), load(folder)
    one = Rows.of(loaded, PROMPTS[1:2])
    three = Rows.of(loaded, PROMPTS)
    proposed = []
    for turn in range(3):
        counts = check_round(one, reference, [7 + turn])
        one.commit([min(turn, counts[0])])
        counts = check_round(three, reference, [1 + turn, 40 - turn, 3])
        proposed += counts
        three.commit(
            [min(wanted, count) for wanted, count in zip((turn, 3, 0), counts, strict=True)]
        )
    cut = CASES[case].get("gamma", GAMMA)
    if "sts" in CASES[case]:
        assert 1 <= min(proposed) < max(proposed), "the thresholds cut some rows, and not all alike"
    else:
        assert set(proposed) == {cut}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"nHeads": 4}, "heads"),
        ({"eps": 0.1}, "norms"),
        ({"tapLayers": [2, 0]}, "taps in another order"),
    ],
)
def test_the_reference_tells_another_reading_apart(
    changes: dict[str, Any], parts: str, tmp_path: Path
) -> None:
    """Else the test above could pass whatever is computed."""
    folder = write_dspark(tmp_path)
    reference = plain(folder)
    rows = Rows.of(load(edited(folder, **changes)), PROMPTS[1:2])
    with pytest.raises(AssertionError):
        check_round(rows, reference, [7])


@pytest.mark.parametrize(
    "name", ["mask_emb", "block_pos", "bb.1.k", "rnn.bH", "rnn.wH", "ctx_norm"]
)
def test_every_part_changes_what_is_drafted(name: str, tmp_path: Path) -> None:
    folder = write_dspark(tmp_path, seq_head="rnn")
    reference = plain(folder)
    changed = rewritten(folder, **{name.replace(".", "__"): 0.5 * stored(folder)[name] + 0.2})
    with pytest.raises(AssertionError):
        check_round(Rows.of(load(changed), PROMPTS[1:2]), reference, [7])


def test_the_last_tap_is_what_the_target_s_final_norm_gives(tmp_path: Path) -> None:
    model = target().model
    tokens = PROMPTS[1]
    normed = tapped(tokens, (2,))
    assert mx.array_equal(normed, model.model.norm(tapped(tokens, (1,))))
    folder = write_dspark(tmp_path, taps=(2,))
    reference = plain(folder)
    rows = Rows.of(load(folder), [tokens])
    check_round(rows, reference, [3])
    reference.config["tapLayers"] = [1]  # the same layer before the norm
    rows = Rows.of(load(folder), [tokens])
    with pytest.raises(AssertionError):
        check_round(rows, reference, [3])


def test_fewer_drafts_are_the_first_ones_of_the_whole_block(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    whole = Rows.of(load(folder), PROMPTS).draft([1, 2, 3], GAMMA)
    for depth in (1, 2, 3):
        rows = Rows.of(load(folder), PROMPTS)
        assert rows.draft([1, 2, 3], depth) == [draft[:depth] for draft in whole]


def test_columns_that_pad_a_window_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels are chosen by shape, all windows of a group have one width."""
    folder = write_dspark(tmp_path)
    reference, rows = plain(folder), Rows.of(load(folder), PROMPTS)
    monkeypatch.setattr(RaggedState, "window_width", lambda state, needed, most: needed + 2)
    check_round(rows, reference, [1, 2, 3])
    rows.commit([1, 4, 0])
    check_round(rows, reference, [4, 5, 6])


# Confidence.


def proposals(folder: Path, **options: Any) -> list[int]:
    rows = Rows.of(load(folder, **options), PROMPTS)
    return [len(draft) for draft in rows.draft([1, 2, 3], GAMMA)]


def test_an_override_cuts_where_there_are_no_calibrated_thresholds(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    reference = plain(folder)
    told = [
        expected(reference, text, first) for text, first in zip(PROMPTS, (1, 2, 3), strict=True)
    ]
    for least in (0.3, 0.5, 0.7, 1):
        cut = [len(each.proposed(GAMMA, [least] * GAMMA)) for each in told]
        assert proposals(folder, confidence=least) == cut
    assert proposals(folder, confidence=1) == [1, 1, 1], "the first slot is always kept"
    for off in (None, False, 0, 0.0, "measure"):
        assert proposals(folder, confidence=off) == [GAMMA] * 3


def test_calibrated_thresholds_go_before_an_override_and_can_be_switched_off(
    tmp_path: Path,
) -> None:
    folder = write_dspark(tmp_path, sts=(0.0, 0.0, 1.0, 0.0))
    assert proposals(folder) == proposals(folder, confidence=0.3) == [2, 2, 2]
    assert proposals(folder, confidence=False) == proposals(folder, confidence=0) == [GAMMA] * 3
    assert proposals(folder, confidence="measure") == [GAMMA] * 3


@pytest.mark.parametrize("value", [-0.1, 1.5, True, "high", [0.5], float("nan")])
def test_a_confidence_that_is_no_share_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"confidence is .*0 to 1"):
        load(write_dspark(tmp_path), confidence=value)


def test_a_drafter_without_a_confidence_head_refuses_to_cut(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path, variant="dflash", parts=False)
    assert load(folder, confidence=0).max_draft_tokens == GAMMA
    for asked in (0.5, "measure"):
        with pytest.raises(OptionError, match=f"confidence is {asked}, .* no confidence head"):
            load(folder, confidence=asked)


# Loading.


def test_the_width_is_that_of_the_block_and_never_more(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    loaded = [load(folder), load(folder, width=3), load(folder, width=9)]
    usual = 2 if mx.default_device() == mx.Device(mx.cpu) else 4
    assert [each.num_draft_tokens for each in loaded] == [usual, 3, 4]
    assert {each.max_draft_tokens for each in loaded} == {4}
    rows = Rows.of(loaded[0], PROMPTS[:1])
    assert len(rows.draft([1], 9)[0]) == GAMMA


def test_the_kind_is_detected_by_its_file_alone(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    (folder / "model.safetensors").write_bytes(b"nothing")
    assert default_registry().select(artifact=Artifact(folder)).name == "dspark"
    (folder / "dspark.json").rename(folder / "other.json")
    assert not any(
        kind.detect is not None and kind.detect(Artifact(folder))
        for kind in default_registry().kinds.values()
    )


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no kind": ({}, {"kind": "drafter"}, "kind is 'drafter'; it must be dspark-drafter"),
    "a variant": ({}, {"variant": "dsparkle"}, "variant is 'dsparkle'; .* dspark or dflash"),
    "first version": ({}, {"variant": None}, "there is no variant: .* single context vector"),
    "gamma": ({}, {"gamma": 0}, "gamma is 0; it must be a whole number of 1 or more"),
    "no rank": ({}, {"markovRank": None}, "has no markovRank"),
    "heads": ({}, {"nHeads": 5}, "nHeads is 5; it must be a divisor of dDraft 32"),
    "taps twice": ({}, {"tapLayers": [1, 1]}, r"tapLayers is \[1, 1\]; .* named once"),
    "no taps": ({}, {"tapLayers": []}, r"tapLayers is \[\]"),
    "eps": ({}, {"eps": "small"}, "eps is 'small'; it must be a number"),
    "seqHead": ({}, {"seqHead": "gru"}, "seqHead is 'gru'; it must be markov or rnn"),
    "no rnn": ({}, {"seqHead": "rnn"}, "seqHead is 'rnn'; .* as there is no rnn.wH"),
    "an rnn": ({"seq_head": "rnn"}, {"seqHead": "markov"}, "seqHead is 'markov'; .* is rnn.wH"),
    "no parts": ({"parts": False}, {}, "variant is 'dspark'; .* there is no markov.w1"),
    "no confidence": (
        {"parts": False, "variant": "dflash"},
        {"sts": {"thresholds": [0.0] * 4, "target": 0.8}},
        "sts is .*; it must be absent, as there is no conf.w",
    ),
    "few thresholds": ({"sts": [0.0, 0.5]}, {}, r"sts.thresholds is \[0.0, 0.5\]; .* 4 numbers"),
    "odd thresholds": ({"sts": [0, 1, 2, 0]}, {}, "sts.thresholds is .*; it must be 4 numbers"),
    "a name more": ({}, {"param_names": ["W_d"]}, "param_names does not list W_c, but .* has it"),
    "width": ({}, {"dDraft": 16}, r"has shape \[128, 32\], but .* needs \[128, 16\]"),
    "a tap more": ({}, {"tapLayers": [0, 1, 2]}, r"W_c has shape \[128, 32\], .* \[192, 32\]"),
    "rank": ({}, {"markovRank": 4}, r"markov.w1 has shape \[64, 8\], .* needs \[64, 4\]"),
    "hidden size": ({}, {"hiddenSize": 32}, r"W_c has shape \[128, 32\], .* needs \[64, 32\]"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_config_that_contradicts_itself_is_refused_by_key(case: str, tmp_path: Path) -> None:
    made, changes, says = CONTRADICTIONS[case]
    with pytest.raises(ArtifactError, match=says) as caught:
        load(edited(write_dspark(tmp_path, **made), **changes))
    assert len(str(caught.value).splitlines()) == 1


def test_checkpoints_of_a_single_context_vector_are_refused(tmp_path: Path) -> None:
    one = write_dspark(tmp_path / "width", taps=(2,))
    with pytest.raises(ArtifactError, match=r"W_c is of one layer of hiddenSize 64.*train it"):
        load(edited(one, tapLayers=[0, 2]))
    old = write_dspark(tmp_path / "names", taps=(2,))
    renamed = rewritten(old, W_c=None, ctx_proj=stored(old)["W_c"])
    with pytest.raises(ArtifactError, match=r"ctx_proj in place of W_c: .*single context vector"):
        load(renamed)


def test_tensors_that_are_missing_unknown_or_of_another_reading_are_named(tmp_path: Path) -> None:
    def made(name: str, **changes: Any) -> Path:
        return rewritten(write_dspark(tmp_path / name, seq_head="rnn"), **changes)

    with pytest.raises(ArtifactError, match=r"has no tensor bb\.1\.up; "):
        load(made("missing", bb__1__up=None))
    with pytest.raises(ArtifactError, match=r"has a tensor bb\.2\.q, which dspark.json has no"):
        load(made("unknown", bb__2__q=np.zeros((32, 32))))
    # A recurrence over the joined state and token would be [2r, r].
    with pytest.raises(ArtifactError, match=r"rnn\.wH has shape \[16, 8\], .* needs \[8, 8\]"):
        load(made("joined", rnn__wH=np.zeros((16, 8))))
    load(made("without", markov__w2=None))  # the recurrent head replaces it


def test_a_wrong_pairing_names_the_key_and_both_values(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path / "fits")
    with pytest.raises(ArtifactError, match="hiddenSize is 64, but the target has 32"):
        load(folder, TinyTarget(64))
    with pytest.raises(ArtifactError, match="vocabSize is 64, but the target has 96"):
        load(folder, TinyTarget(96, hidden_size=64))
    beyond = write_dspark(tmp_path / "beyond", taps=(0, 3))
    with pytest.raises(
        ArtifactError, match=r"tapLayers is \[0, 3\], .* layers 0 to 1, and 2 after"
    ):
        load(beyond)
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        load(folder, TinyTarget(64, hidden_size=64, lacks=["hidden_taps"]))


def test_a_folder_or_an_option_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"does not exist; give the folder that holds dspark\.json"
    ):
        load(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ArtifactError, match=r"dspark\.json"):
        load(tmp_path / "bare")
    folder = write_dspark(tmp_path / "fits")
    with pytest.raises(OptionError, match="dspark has no option block; its options are bits, "):
        load(folder, block="whole")
    with pytest.raises(OptionError, match="tap_shift is -1, but the first tap is layer 0"):
        load(folder, tap_shift=-1)
    with pytest.raises(ArtifactError, match="needs its folder"):
        load_drafter(LoadRequest(kind="dspark", target=target()))


def test_a_drafter_that_is_quantized_is_smaller_and_stays_near(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    providers = [
        load(folder, **options).provider for options in ({}, {"bits": 8, "group_size": 32})
    ]
    assert providers[1].weight_bytes < 0.5 * providers[0].weight_bytes
    names = {each.grouped.checkpoint_namespace for each in providers}
    assert len(names) == 2
    rows = Rows.of(load(folder, bits=8, group_size=32), PROMPTS)
    drafts = rows.draft([1, 2, 3], GAMMA)
    assert len(rows.seen) == GAMMA
    first = np.array(rows.seen[0], dtype=np.float64)
    for row, (text, token) in enumerate(zip(PROMPTS, (1, 2, 3), strict=True)):
        told = log_softmax(expected(plain(folder), text, token).logits[0])
        assert 1e-4 < np.abs(first[row] - told).max() < 0.5
        assert len(drafts[row]) == GAMMA


def test_a_block_begins_with_the_embedding_as_it_is_stored(tmp_path: Path) -> None:
    bound = target("gemma")
    model, ids = bound.model, mx.array([[3, 9]])
    table = model.model.embed_tokens.weight
    assert mx.array_equal(stored_embedding(bound)(ids), table[ids])
    port = bound.hidden_taps
    assert port is not None
    assert mx.allclose(port.embed(ids), 8.0 * table[ids]), "gemma scales by sqrt(64)"
    folder = write_dspark(tmp_path)
    provider: Any = load(folder, bound).provider
    reading = provider.grouped.open_prefill(target=bound, checkpoints=[None])
    context = tapped(PROMPTS[1], (0, 2), "gemma")
    reading.prefill(mx.array([PROMPTS[1]], mx.int32), context)
    seen: list[mx.array] = []
    read = [reading.capture(0)]
    rows = provider.grouped.open(target=bound, sampling=Seen(seen), checkpoints=read)
    rows.draft([7], [GAMMA], [0])
    reference = plain(folder, "gemma")
    scaled = PlainDspark.of(folder, lambda token: 8.0 * reference.embed(token), reference.score)
    taps, first = np.array(context[0], dtype=np.float64), np.array(seen[0][0])
    for each, near in ((reference, True), (scaled, False)):
        told = log_softmax(each.draft(taps, 7).logits[0])
        assert bool(np.abs(first - told).max() < 1e-4) is near


# The probe.


class Letters:
    """A tokenizer of 64 ids."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]


def tried(folder: Path, **options: Any) -> LoadedDraft:
    request = LoadRequest(
        kind="dspark", path=folder, target=target(), tokenizer=Letters(), options=options
    )
    return load_drafter(request)


def followed() -> list[list[int]]:
    """What the target expects at each place of the probe's text, as texts of two tokens."""
    tokens = Letters().encode(TEXT)[:300]
    best = mx.argmax(target().model(mx.array([tokens]))[0], axis=-1)
    return [[token, int(after)] for token, after in zip(tokens, best.tolist(), strict=True)]  # type: ignore[arg-type]  # a list of ints


def test_a_drafter_that_never_agrees_is_another_model_s(tmp_path: Path) -> None:
    folder = write_dspark(tmp_path)
    with pytest.raises(ArtifactError, match=r"expects \d% of .* it is another model's"):
        tried(folder)
    assert tried(folder, probe=False).max_draft_tokens == GAMMA
    with pytest.raises(OptionError, match="probe is 3; give true or false"):
        tried(folder, probe=3)


def test_a_drafter_that_agrees_is_read_as_its_config_says(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = tried(write_parrot(tmp_path, followed()))
    provider: Any = loaded.provider
    assert provider.grouped.target_tap_layers(target()) == (0, 2)
    assert loaded.max_draft_tokens == GAMMA


def test_every_reading_within_the_target_is_tried(tmp_path: Path) -> None:
    folder = edited(write_parrot(tmp_path, followed()), tapLayers=[1, 2])
    provider: Any = load(folder).provider
    method = provider.grouped.method_for(target())
    config = read_dspark(read_files(folder, "dspark.json"))

    def make(changed: DsparkConfig) -> DsparkDrafting:
        assert changed.taps in ((1, 2), (0, 1))
        drafting: DsparkDrafting = method
        return drafting

    probe = probe_blocks(target(), config, make, Letters().encode(TEXT)[:300])
    assert probe is not None
    assert {(how.shift, how.from_anchor) for how in probe.agreement} == {
        (shift, anchor) for shift in (0, -1) for anchor in (True, False)
    }
    assert min(probe.agreement.values()) > 0.2


def from_the_second_column(folder: Path) -> Path:
    """A parrot whose first column says one token whatever comes."""
    write_parrot(folder, followed())
    tensors = stored(folder)
    head = np.array(target().model.lm_head.weight[5])
    changes = {name: 0.0 * tensors[name] for name in tensors if name[-2:] in (".o", "wn")}
    block = np.zeros_like(tensors["block_pos"])
    block[0, 0], block[1:, 1] = 1.0, 1.0
    out = np.zeros_like(tensors["out_proj"])
    out[0] = 100.0 * head / (head @ head)
    changes |= {"tok_proj": 0.0 * tensors["tok_proj"], "mask_emb": 0.0 * tensors["mask_emb"]}
    changes |= {"block_pos": block, "out_proj": out}
    return rewritten(folder, **{name.replace(".", "__"): new for name, new in changes.items()})


def test_the_wrong_slot_is_found_and_the_right_one_used(tmp_path: Path) -> None:
    folder = from_the_second_column(tmp_path)
    with pytest.warns(SpecdecDrafterWarning, match="from_anchor=false; the latter is"):
        loaded = tried(folder)
    assert loaded.max_draft_tokens == GAMMA - 1
    rows = Rows.of(loaded, PROMPTS[:1])
    assert len(rows.draft([10], GAMMA)[0]) == GAMMA - 1
    with pytest.warns(SpecdecDrafterWarning, match="the former is used, as asked"):
        kept = tried(folder, from_anchor=True)
    assert kept.max_draft_tokens == GAMMA
    assert Rows.of(kept, PROMPTS[:1]).draft([10], 1) == [[5]]


# End to end.


def run(
    prompts: Sequence[Sequence[int]], loaded: LoadedDraft | None, **asked: Any
) -> list[tuple[list[int], Any]]:
    provider = None if loaded is None else loaded.provider
    group = VerifyGroup(target(), provider, drafter="dspark", reason="plain")
    sampling = SamplingOptions(**asked)
    requests = [
        Request(prompt=prompt, max_tokens=20, sampling=sampling, num_draft_tokens=GAMMA)
        for prompt in prompts
    ]
    rows = group.admit(requests)
    while any(row.finish is None for row in rows):
        with group.round() as verified:
            verified.deliver_all()
    group.close()
    for row in rows:
        assert row.error is None
        assert row.stats.last_draft_error is None
    return [(row.tokens[len(p) :], row.stats) for row, p in zip(rows, prompts, strict=True)]


@cache
def greedy(prompt: tuple[int, ...]) -> list[int]:
    found = generate_step(mx.array(prompt), target().model, max_tokens=20)
    return [int(token) for token, _ in found]


@pytest.mark.parametrize("case", ["markov", "rnn calibrated", "older"])
def test_greedy_texts_are_mlx_lm_s_alone_and_together(case: str, tmp_path: Path) -> None:
    loaded = load(write_dspark(tmp_path, **CASES[case]))
    expects = [greedy(tuple(prompt)) for prompt in PROMPTS]
    assert [tokens for tokens, _ in run(PROMPTS, loaded)] == expects
    [(tokens, stats)] = run(PROMPTS[1:2], loaded)
    assert tokens == expects[1]
    assert stats.drafted > 0


def test_a_drafter_that_knows_the_text_takes_fewer_forwards(tmp_path: Path) -> None:
    texts = [[*prompt, *greedy(tuple(prompt))] for prompt in PROMPTS]
    loaded = load(write_parrot(tmp_path, texts))
    found = run(PROMPTS, loaded)
    assert [tokens for tokens, _ in found] == [greedy(tuple(prompt)) for prompt in PROMPTS]
    assert sum(stats.target_forwards for _, stats in found) < 0.6 * 3 * 20


@pytest.mark.parametrize("seed", [3, 4])
def test_seeded_texts_are_those_of_the_plain_run(seed: int, tmp_path: Path) -> None:
    loaded = load(write_dspark(tmp_path, sts=(0.0, 0.5, 0.4, 0.6)))
    asked = {"temp": 0.9, "top_p": 0.95, "seed": seed}
    drafted, alone = run(PROMPTS, loaded, **asked), run(PROMPTS, None, **asked)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in alone]
    assert [tokens for tokens, _ in alone] != [greedy(tuple(prompt)) for prompt in PROMPTS]
    assert all(stats.drafted > 0 for _, stats in drafted)
