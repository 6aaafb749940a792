"""Assistants draft what transformers' and mlx-vlm's draft, and what a float64 computation says.

Figures are recorded (tests/oracles/record_assistant.py says how). Where a package sees another part
of the window than the config says, the plain computation shows which.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from assistant_lender import Lender, chains
from assistant_synthetic import CASES, LENGTHS, STEPS, VOCABULARY, WINDOW, embedding
from oracles.assistant_plain import PlainAssistant

from specdec.plugins import LoadRequest
from specdec_assistant.loading import load_assistant

DATA = Path(__file__).parent / "data"
TOLERANCE = 5e-5


@cache
def recorded(package: str) -> dict[str, Any]:
    with np.load(DATA / f"{package}.npz") as found:
        return dict(found)


def told(package: str, case: str, length: int, layout: str = "held") -> tuple[Any, Any, Any]:
    """Tokens, logits and chained hidden states as a package has them."""
    tokens, logits, hidden = (
        recorded(package)[f"{case}.{length}.{layout}.{name}"]
        for name in ("tokens", "logits", "hidden")
    )
    return tokens.tolist(), logits, hidden


@cache
def plain(case: str, length: int, **how: Any) -> tuple[Any, Any, Any]:
    """The same in float64."""
    release = CASES[case]
    network = PlainAssistant.of(release.config, release.draws().tensors, **how)
    loan = release.loan(length)
    table = embedding().astype(np.float64)
    chain: tuple[Any, Any, Any] = network.draft(
        loan.kv, loan.hidden.astype(np.float64), table[loan.pending], table, STEPS
    )
    return chain


def difference(one: Any, other: Any) -> float:
    """How far two chains are from each other, at most; infinite where other ids were scored."""
    assert one[0] == other[0], f"drafted {one[0]}, not {other[0]}"
    furthest = 0.0
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        if (np.isinf(mine) != np.isinf(theirs)).any():
            return np.inf
        shared = ~np.isinf(mine)
        furthest = max(furthest, float(np.abs(mine[shared] - theirs[shared]).max()))
    return furthest


@pytest.mark.parametrize("columns", [None, WINDOW, WINDOW + 3])
@pytest.mark.parametrize("case", CASES)
def test_rows_of_different_length_draft_together_what_transformers_drafts_for_each(
    case: str, columns: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES[case].write(tmp_path)
    found = chains(folder, case, LENGTHS, monkeypatch, columns)
    for number, length in enumerate(LENGTHS):
        assert difference(found.row(number), told("transformers", case, length)) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_one_row_drafts_what_a_plain_float64_computation_drafts(
    case: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES[case].write(tmp_path)
    found = chains(folder, case, [length], monkeypatch)
    assert difference(found.row(0), plain(case, length)) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", ["whole", "sparse", "untied"])
def test_one_row_drafts_what_mlx_vlm_drafts(
    case: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES[case].write(tmp_path)
    found = chains(folder, case, [length], monkeypatch, WINDOW)
    assert difference(found.row(0), told("mlx_vlm", case, length)) < TOLERANCE


@pytest.mark.parametrize("case", ["whole", "sparse"])
def test_steps_may_advance(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CASES[case].write(tmp_path)
    found = chains(folder, case, LENGTHS, monkeypatch, positions="advancing")
    for number, length in enumerate(LENGTHS):
        assert difference(found.row(number), plain(case, length, advancing=True)) < TOLERANCE
        constant = told("transformers", case, length)
        first = [
            (chain[0][:1], *(each[:1] for each in chain[1:]))
            for chain in (found.row(number), constant)
        ]
        assert difference(*first) < TOLERANCE, "the first step stands where it always does"
        moved = np.abs(found.hidden[number][1] - constant[2][1]).max()
        assert (moved > 100 * TOLERANCE) == (length > 1), "over one key no position matters"


# Where the packages differ from their configs.


@pytest.mark.parametrize("case", ["whole", "sparse"])
def test_transformers_sees_one_position_more_where_it_is_given_more_than_a_window(
    case: str,
) -> None:
    wider = told("transformers", case, LENGTHS[2], "other")
    assert difference(wider, plain(case, LENGTHS[2], window=WINDOW + 1)) < TOLERANCE
    assert np.abs(wider[2] - plain(case, LENGTHS[2])[2]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["whole", "sparse"])
def test_mlx_vlm_sees_one_position_less_of_a_ring_that_is_full(case: str) -> None:
    narrower = told("mlx_vlm", case, LENGTHS[2], "other")
    assert difference(narrower, plain(case, LENGTHS[2], window=WINDOW - 1)) < TOLERANCE
    assert np.abs(narrower[2] - plain(case, LENGTHS[2])[2]).max() > 100 * TOLERANCE


# What else of a release is read.


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("whole", {"sliding_window": WINDOW + 1}),
        ("whole", {"sliding_window": WINDOW - 1}),
        ("whole", {"rms_norm_eps": 1e-2}),
        ("whole", {"query_pre_attn_scalar": 4.0}),
        ("sparse", {"centroid_intermediate_top_k": 2}),
        ("untied", {"tie_word_embeddings": True}),
    ],
)
def test_the_record_tells_each_setting(
    case: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = CASES[case]
    folder = release.write(tmp_path, **change)
    if "query_pre_attn_scalar" in change:
        folder = release.write(tmp_path, text_config={**release.config["text_config"], **change})
    found = chains(folder, case, LENGTHS, monkeypatch)
    same = []
    for number, length in enumerate(LENGTHS):
        own, theirs = found.row(number), told("transformers", case, length)
        same.append(own[0] == theirs[0] and difference(own, theirs) < 10 * TOLERANCE)
    assert not all(same)


@pytest.mark.parametrize(("given", "power"), [("config", 0.0), ("head_dim", -0.5)])
def test_products_of_queries_and_keys_are_scaled_as_asked(
    given: str, power: float, tmp_path: Path
) -> None:
    target: Any = Lender()
    folder = CASES["whole"].write(tmp_path)
    request = LoadRequest(
        kind="assistant", target=target, path=folder, options={"attention_scale": given}
    )
    provider: Any = load_assistant(request).provider
    for layer, size in zip(provider.grouped._own.model.layers, (16, 16, 16, 32), strict=True):
        assert layer.self_attn.scale == pytest.approx(size**power)


def test_a_config_that_declares_centroids_without_their_tensors_has_a_whole_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES["whole"].write(tmp_path, use_ordered_embeddings=True)
    found = chains(folder, "whole", LENGTHS, monkeypatch)
    assert difference(found.row(2), told("transformers", "whole", LENGTHS[2])) < TOLERANCE
    assert not np.isinf(found.logits).any()


def test_centroids_are_used_where_the_config_denies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CASES["sparse"].write(tmp_path, use_ordered_embeddings=False)
    found = chains(folder, "sparse", LENGTHS, monkeypatch)
    assert difference(found.row(2), told("transformers", "sparse", LENGTHS[2])) < TOLERANCE
    assert np.isinf(found.logits).mean() == 1 - 3 / 8


@pytest.mark.parametrize("case", ["whole", "sparse"])
@pytest.mark.parametrize("vocab_size", [VOCABULARY - 9, VOCABULARY + 16])
def test_ids_of_one_vocabulary_alone_are_cut_or_impossible(
    case: str, vocab_size: int, tmp_path: Path
) -> None:
    release = CASES[case]
    folder = release.write(tmp_path)
    target: Any = Lender(vocab_size=vocab_size)
    request = LoadRequest(kind="assistant", target=target, path=folder)
    provider: Any = load_assistant(request).provider
    model = provider.grouped._own.model
    normed = mx.random.normal((3, 32), key=mx.random.key(4))
    logits, ids = model.score(normed, vocab_size)
    own, own_ids = model.score(normed, VOCABULARY)
    if own_ids is not None:
        own = mx.put_along_axis(mx.full((3, VOCABULARY), -mx.inf), own_ids, own, axis=-1)
    if ids is not None:
        assert mx.all(ids[:, 1:] > ids[:, :-1]).item(), "no id twice, and ties to the lowest"
        logits = mx.put_along_axis(mx.full((3, vocab_size), -mx.inf), ids, logits, axis=-1)
    assert logits.shape == (3, vocab_size)
    both = min(vocab_size, VOCABULARY)
    assert mx.array_equal(logits[:, :both], own[:, :both]).item()
    assert mx.all(mx.isinf(logits[:, both:])).item()
