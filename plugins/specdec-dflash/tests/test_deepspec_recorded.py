"""What mlx-vlm drafts with the same files and the same hidden states, as it was recorded.

``tests/oracles/record_mlx_vlm_dspark.py`` made the recording and says what is in it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from deepspec_driven import Watched, loaded, log_softmax, plain
from deepspec_synthetic import HIDDEN, target_model, write_gemma, write_qwen

from specdec.targets import MlxLmTarget

DATA = Path(__file__).parent / "data/mlx_vlm_dspark.json"
MARGIN = 1e-4
WRITERS = {"qwen": write_qwen, "gemma": write_gemma}
CASES: dict[str, Any] = {case["name"]: case for case in json.loads(DATA.read_text())["cases"]}
QWEN = [name for name, case in CASES.items() if case["family"] == "qwen"]
GEMMA = [name for name, case in CASES.items() if case["family"] == "gemma"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The releases that were recorded."""
    root = tmp_path_factory.mktemp("recorded")
    return {
        name: WRITERS[case["family"]](root / name, **case["options"])
        for name, case in CASES.items()
    }


@cache
def hidden(name: str) -> Any:
    """``[L, 2 H]`` float32 of all positions that a case reads."""
    case = CASES[name]
    count = sum(each["read"] for each in case["rounds"])
    return np.random.default_rng(case["seed"]).standard_normal((count, 2 * HIDDEN))


def drafted(name: str, folder: Path) -> list[tuple[list[int], Any]]:
    """Our drafts of every round, and the log-probabilities ``[d, V]`` they were the best of."""
    rounds = CASES[name]["rounds"]
    provider: Any = loaded(folder, (target := MlxLmTarget(target_model()))).provider
    states = mx.array(hidden(name).astype(np.float32))[None]
    at = rounds[0]["read"]
    group = provider.grouped.open_prefill(target=target, checkpoints=[None])
    group.prefill(mx.zeros((1, at), mx.int32), states[:, :at])
    watched = Watched()
    read = [group.capture(0)]
    rows = provider.grouped.open(target=target, sampling=watched, checkpoints=read)
    found = []
    for number, each in enumerate(rounds):
        depth = len(each["drafts"])
        watched.seen.clear()
        [draft] = rows.draft([each["pending"]], [depth], [0])
        found.append((draft, np.array(mx.concatenate(watched.seen)).astype(np.float64)))
        if number + 1 < len(rounds):
            count = rounds[number + 1]["read"]
            window = mx.pad(states[:, at : at + count], [(0, 0), (0, 1 + depth - count), (0, 0)])
            rows.commit([count - 1], window)
            at += count
    return found


@pytest.mark.parametrize("name", QWEN)
def test_drafts_and_logits_are_mlx_vlms(name: str, folders: dict[str, Path]) -> None:
    for (draft, logprobs), each in zip(
        drafted(name, folders[name]), CASES[name]["rounds"], strict=True
    ):
        assert draft == each["drafts"]
        assert np.abs(logprobs - log_softmax(np.array(each["logits"]))).max() < MARGIN


@pytest.mark.parametrize("name", CASES)
def test_the_plain_computation_is_mlx_vlms(name: str, folders: dict[str, Path]) -> None:
    oracle = plain(folders[name])
    oracle.network.value_norm = False  # see below
    at = 0
    for each in CASES[name]["rounds"]:
        at += each["read"]
        states = hidden(name)[:at].astype(np.float32).astype(np.float64)
        block = oracle.draft(states, each["pending"], len(each["drafts"]))
        assert block.tokens == each["drafts"]
        assert np.abs(block.logits - each["logits"]).max() < MARGIN
        if each["confidence"] is not None:
            assert block.confidence is not None
            assert np.abs(block.confidence - each["confidence"]).max() < 1e-5


@pytest.mark.parametrize("name", GEMMA)
def test_a_gemma_drafters_values_are_normalised_as_deepspec_does_and_mlx_vlm_does_not(
    name: str, folders: dict[str, Path]
) -> None:
    oracle, at = plain(folders[name]), 0
    for (draft, logprobs), each in zip(
        drafted(name, folders[name]), CASES[name]["rounds"], strict=True
    ):
        at += each["read"]
        states = hidden(name)[:at].astype(np.float32).astype(np.float64)
        block = oracle.draft(states, each["pending"], len(each["drafts"]))
        assert draft == block.tokens
        assert np.abs(logprobs - log_softmax(block.logits)).max() < MARGIN
        assert np.abs(block.logits[0] - each["logits"][0]).max() > 0.1
