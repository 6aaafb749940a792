"""``dflash`` and ``dflash2`` draft what the public implementation drafts, with the same logits.

The figures are recorded from the ``dflash`` package's MLX model (tests/oracles/record_dflash.py
says how, and what each of them is). Where that package does not do what its own model does in
PyTorch, a float64 model written from the description decides.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, field
from block_synthetic import CASES, MASK, PROMPTS, plan, target_model
from block_zlab_reference import PlainBlocks

from specdec.contract import ContextKind, Greedy
from specdec.plugins import LoadRequest
from specdec.targets import MlxLmTarget
from specdec_dflash.loading import load_drafter
from specdec_dflash.method import BlockDrafting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting import ProjectedRows

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-4
FIGURES = 3  # of a recorded draft; ids come first


@cache
def recorded(package: str) -> Any:
    return json.loads((DATA / f"{package}.json").read_text())["cases"]


@cache
def target() -> MlxLmTarget:
    return MlxLmTarget(target_model())


@define
class Sampling:
    """Greedy rows."""

    selection: Greedy = field(factory=Greedy)
    rejecting: bool = False

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("a greedy draft is an argmax")

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("nobody is judged by rejection")


def taps_of(text: Sequence[int], layers: Sequence[int]) -> mx.array:
    """The target's ``[1, n, m·H]`` at every position of a text."""
    return _taps_of(tuple(text), tuple(layers))


@cache
def _taps_of(text: tuple[int, ...], layers: tuple[int, ...]) -> mx.array:
    state = target().new_state()
    state.begin_round(len(text), reading=True)
    window = target().forward(mx.array([list(text)]), state, ContextKind.TAPS, layers)
    assert window.context is not None
    mx.eval(window.context)
    return window.context


@define
class Group:
    """Rows whose rounds a test decides; the target reads each whole text anew."""

    rows: ProjectedRows
    texts: list[list[int]]
    seen: list[mx.array]
    window: list[list[int]] = field(factory=list)

    @classmethod
    def of(
        cls,
        folder: Path,
        kind: str,
        prompts: Sequence[Sequence[int]],
        monkeypatch: pytest.MonkeyPatch,
        step: int = 512,
    ) -> Group:
        request = LoadRequest(
            kind=kind, target=target(), path=folder, options={"probe": False, "bits": 0}
        )
        grouped: Any = load_drafter(request).provider.grouped
        read = []
        for prompt in prompts:
            group = grouped.open_prefill(target=target(), checkpoints=[None])
            hidden = taps_of(prompt, group.tap_layers)
            for start in range(0, len(prompt), step):
                ids = mx.array([list(prompt[start : start + step])], mx.int32)
                group.prefill(ids, hidden[:, start : start + step])
            read.append(group.capture(0))
        rows = grouped.open(target=target(), sampling=Sampling(), checkpoints=read)
        seen: list[mx.array] = []
        plain = BlockDrafting._logits

        def watched(drafting: BlockDrafting, hidden: mx.array) -> mx.array:
            seen.append(plain(drafting, hidden))
            return seen[-1]

        monkeypatch.setattr(BlockDrafting, "_logits", watched)
        return cls(rows, [list(prompt) for prompt in prompts], seen)

    def draft(
        self, pending: Sequence[int], depths: Sequence[int]
    ) -> tuple[list[list[int]], list[Any]]:
        """Each row's drafts and their logits ``[d, V]``."""
        self.seen.clear()
        drafts: Any = self.rows.draft(pending, depths, [0] * len(pending))
        self.window = [[first, *draft] for first, draft in zip(pending, drafts, strict=True)]
        [logits] = self.seen
        told = [np.array(logits[row, :depth]) for row, depth in enumerate(depths)]
        return drafts, told

    def commit(self, accepted: Sequence[int]) -> None:
        """Take so many of each row's drafts as accepted."""
        width = max(map(len, self.window))
        contexts = []
        for text, window in zip(self.texts, self.window, strict=True):
            own = taps_of([*text, *window], self.rows.tap_layers)[:, len(text) :]
            contexts.append(mx.pad(own, [(0, 0), (0, width - len(window)), (0, 0)]))
        self.rows.commit(accepted, mx.concatenate(contexts))
        for text, window, count in zip(self.texts, self.window, accepted, strict=True):
            text.extend(window[: 1 + count])


def figures(logits: Any, ids: Sequence[int]) -> Any:
    """A draft's logits as the record has them, at its largest ids."""
    wave = np.cos(np.arange(len(logits))) @ logits.astype(np.float64)
    return np.array([*logits[list(ids)], logits.mean(), np.abs(logits).max(), wave])


def difference(logits: Any, told: Sequence[Sequence[float]]) -> float:
    """How far a block's logits are from the record, at most."""
    assert len(logits) == len(told)
    return max(
        float(np.abs(figures(own, [int(n) for n in each[:FIGURES]]) - each[FIGURES:]).max())
        for own, each in zip(logits, told, strict=True)
    )


def furthest(group: Group, runs: Sequence[Any]) -> float:
    """Go through the recorded rounds; how far logits were at most. Drafts have to be the same."""
    furthest = 0.0
    for rounds in zip(*(run["rounds"] for run in runs), strict=True):
        depths = [each["depth"] for each in rounds]
        drafts, logits = group.draft([each["pending"] for each in rounds], depths)
        for own, said, each in zip(drafts, logits, rounds, strict=True):
            assert own == each["drafts"]
            furthest = max(furthest, difference(said, each["logits"]))
        group.commit([each["accepted"] for each in rounds])
    return furthest


@pytest.mark.parametrize("case", CASES)
def test_rows_of_different_length_draft_together_what_the_package_drafts_alone(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CASES[case]
    group = Group.of(release.write(tmp_path), release.kind, PROMPTS, monkeypatch)
    assert furthest(group, recorded("zlab_dflash")[case]) < TOLERANCE


@pytest.mark.parametrize("row", range(len(PROMPTS)))
@pytest.mark.parametrize("case", CASES)
def test_one_row_drafts_what_the_package_drafts(
    case: str, row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CASES[case]
    # The prompt is read in chunks that end before, in and behind a window.
    group = Group.of(release.write(tmp_path), release.kind, [PROMPTS[row]], monkeypatch, step=7)
    assert furthest(group, [recorded("zlab_dflash")[case][row]]) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_the_record_is_what_a_plain_float64_model_drafts(case: str) -> None:
    """Also where the package itself, with its rings out of order, drafts something else."""
    release, strayed = CASES[case], 0
    plain = PlainBlocks.of(release, target_model())
    taps = release.config["dflash_config"]["target_layer_ids"]
    for run in recorded("zlab_dflash")[case]:
        text = list(PROMPTS[run["prompt"]])
        for each in run["rounds"]:
            hidden = np.array(taps_of(text, taps)[0]).astype(np.float64)
            drafts, logits = plain.draft(hidden, each["pending"], each["depth"])
            assert drafts == each["drafts"]
            assert difference(logits, each["logits"]) < TOLERANCE
            if "as_is" in each:
                strayed += 1
                assert difference(logits, each["as_is"]["logits"]) > 10 * TOLERANCE
            text += [each["pending"], *drafts[: each["accepted"]]]
    slides = "sliding_attention" in release.config.get("layer_types", ())
    assert (strayed > 0) == slides


def test_the_target_chose_what_follows_what_was_accepted() -> None:
    for case, runs in recorded("zlab_dflash").items():
        for run in runs:
            assert [(e["depth"], e["accepted"]) for e in run["rounds"]] == plan(
                CASES[case], run["prompt"]
            )
            ends = [run["target"][0][0]]
            for each, chosen in zip(run["rounds"], run["target"][1:], strict=True):
                assert each["pending"] == ends[-1]
                ends.append(chosen[each["accepted"]])


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("sliding", {"sliding_window": 9}),
        ("sliding", {"sliding_window": 7}),
        ("sliding", {"is_causal": False}),
        ("narrow", {"sliding_window": 4}),
        ("mixed", {"layer_types": ["full_attention"] * 3}),
        ("mixed-causal", {"is_causal": False}),
        ("full-causal", {"is_causal": None}),
        ("plain", {"target_layer_ids": [1, 3]}),
        ("plain", {"target_layer_ids": [2, 0]}),
        ("plain", {"mask_token_id": MASK - 1}),
        ("plain", {"rope_theta": 20000.0}),
        ("plain", {"rms_norm_eps": 1e-3}),
        ("inside", {"rope_parameters": {"rope_theta": 20000.0}}),
        ("yarn", {"rope_scaling": None}),
        ("linear", {"rope_parameters": {"rope_theta": 500.0}}),
        ("scaled", {"input_embedding_scale": 1.0}),
        ("scaled", {"output_multiplier": 1.0}),
        ("scaled", {"final_logit_softcapping": 2.1}),
        ("capped", {"final_logit_softcapping": None}),
        ("second", {"is_causal": None}),
        ("second-full", {"selector_top_k": 2}),
        ("second-wide", {"sliding_window": 10}),
    ],
)
def test_the_record_tells_each_setting(
    case: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CASES[case]
    folder = release.write(tmp_path, **change)
    group = Group.of(folder, release.kind, PROMPTS, monkeypatch)
    with pytest.raises(AssertionError):
        assert furthest(group, recorded("zlab_dflash")[case]) < 10 * TOLERANCE


def test_the_selector_often_takes_another_token_than_the_best() -> None:
    for case in (name for name, release in CASES.items() if release.kind == "dflash2"):
        rounds = [each for run in recorded("zlab_dflash")[case] for each in run["rounds"]]
        moved = [
            d != said[0] for e in rounds for d, said in zip(e["drafts"], e["logits"], strict=True)
        ]
        assert sum(moved) > len(moved) / 4


# mlx-vlm.


def test_mlx_vlm_drafts_the_same_as_long_as_no_window_hides_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES["second-full"].write(tmp_path)
    group = Group.of(folder, "dflash2", PROMPTS, monkeypatch)
    assert furthest(group, recorded("mlx_vlm_dflash2")["second-full"]) < TOLERANCE


def test_mlx_vlm_does_not_mask_a_window_that_sees_its_block_both_ways() -> None:
    """It relies on the ring's size, which after a wide append holds more than the window."""
    own, public = (recorded(n)["second"] for n in ("mlx_vlm_dflash2", "zlab_dflash"))
    for row, same in ((0, True), (2, False)):  # of 1 token, and of more than the window
        ours, theirs = (np.array(runs[row]["rounds"][0]["logits"]) for runs in (own, public))
        assert (np.abs(ours - theirs).max() < TOLERANCE) == same
