"""A head's rows against mlx-vlm's recorded drafts and logits, to 1e-4 in float32."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_folder
from mtp_synthetic import GLM_TYPES, split_release, write_glm, write_qwen3_5
from oracles.driven import Driven, head_of, log_softmax

import specdec
from specdec.plugins.models import find_model
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oracles.driven import Drafted

    from specdec_mtp.provider import HeadProvider

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for path in sorted(DATA.glob("mlx_vlm_*.json"))
    for case in json.loads(path.read_text())["cases"]
}
QWEN = [name for name in CASES if name not in GLM_TYPES]
CHAINS = {"own": "kept", "true": "reread"}
DEPTH = 4


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp-parity")


@cache
def bound(name: str, scratch: Path) -> MlxLmTarget:
    """The target in float32, as the recording had it."""
    if name == "demo-qwen3_5":
        folder = find_model(name)
        assert folder is not None
        model: Any = specdec.load_model(name)[0]
    else:
        write = write_glm if name in GLM_TYPES else write_qwen3_5
        folder = write(scratch / name, **CASES[name]["written_with"])
        model = load_folder(folder)[0]
    model.set_dtype(mx.float32)
    return MlxLmTarget(model, folder)


@cache
def head(name: str, scratch: Path, chain: str = "true", *, split: bool = False) -> HeadProvider:
    """The head as mlx-vlm reads it, from the full release or from a split one."""
    target = bound(name, scratch)
    path = None
    if split:
        assert target.folder is not None
        path = scratch / f"{name}-mtp"
        if not path.exists():
            split_release(target.folder, path)
    if name in GLM_TYPES:
        return head_of(target, "nextn", path, chain=chain, feed="normed", history="prompt")
    return head_of(target, "mtp", path, chain=chain)


def assert_logits(told: Sequence[Mapping[str, Any]], found: Drafted) -> None:
    """Every figure of the recording within 1e-4; where it has all logits, after log-softmax."""
    assert len(told) == len(found.tokens) == DEPTH
    for entry, logprobs in zip(told, found.logprobs, strict=True):
        if "all" in entry:
            expected = log_softmax(np.array(entry["all"]))
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-4)
            continue
        # A log-softmax moves all logits by one figure, which the recorded mean tells.
        logits = logprobs - logprobs.mean() + entry["mean"]
        np.testing.assert_allclose(logits[entry["ids"]], entry["values"], rtol=0, atol=1e-4)
        assert np.sort(logits)[-len(entry["ids"]) - 1] <= min(entry["values"]) + 1e-4
        assert abs(np.abs(logits).max() - entry["largest"]) < 1e-4


def assert_is_mlx_vlms(told: Mapping[str, Any], found: Drafted) -> None:
    assert found.tokens == told["drafts"]
    assert_logits(told["logits"], found)


def both_rounds(
    target: MlxLmTarget, provider: HeadProvider, cases: Sequence[Mapping[str, Any]]
) -> tuple[list[Drafted], list[Drafted]]:
    """A round, the recorded acceptance, and the round behind it, of one group."""
    driven = Driven.of(target, provider, [told["prompt"] for told in cases])
    first = driven.draft([told["first"] for told in cases], DEPTH)
    driven.commit([told["accepted"] for told in cases])
    return first, driven.draft([told["pending"] for told in cases], DEPTH)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", CASES)
def test_a_row_alone_drafts_what_mlx_vlm_drafts_in_both_rounds(
    name: str, chain: str, scratch: Path
) -> None:
    # Three rows together, below, have the other prompts under both chains.
    for told in CASES[name]["prompts"] if chain == "true" else CASES[name]["prompts"][1:2]:
        [first], [second] = both_rounds(bound(name, scratch), head(name, scratch, chain), [told])
        assert_is_mlx_vlms(told, first)
        assert_is_mlx_vlms(told["next"][CHAINS[chain]], second)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", CASES)
def test_three_rows_of_different_lengths_draft_what_each_drafts_alone_in_mlx_vlm(
    name: str, chain: str, scratch: Path
) -> None:
    cases = CASES[name]["prompts"]
    three = [cases[2], cases[0], cases[3]]
    assert len({len(told["prompt"]) for told in three}) == 3
    rounds = both_rounds(bound(name, scratch), head(name, scratch, chain), three)
    for told, first, second in zip(three, *rounds, strict=True):
        assert_is_mlx_vlms(told, first)
        assert_is_mlx_vlms(told["next"][CHAINS[chain]], second)


@pytest.mark.parametrize("name", QWEN)
def test_a_split_release_is_read_as_the_full_one(name: str, scratch: Path) -> None:
    cases = CASES[name]["prompts"][1:]
    rounds = both_rounds(bound(name, scratch), head(name, scratch, split=True), cases)
    for told, first, second in zip(cases, *rounds, strict=True):
        assert_is_mlx_vlms(told, first)
        assert_is_mlx_vlms(told["next"]["reread"], second)


@pytest.mark.parametrize("name", CASES)
def test_the_two_chains_differ_after_an_accepted_draft(name: str, scratch: Path) -> None:
    """Else the tests above could not tell one from the other."""
    told = CASES[name]["prompts"][0]
    _, [second] = both_rounds(bound(name, scratch), head(name, scratch, "own"), [told])
    with pytest.raises(AssertionError):
        assert_logits(told["next"]["reread"]["logits"], second)


WRONG: Mapping[str, Mapping[str, Any]] = {
    "pre-norm hidden": {"hidden": "pre_norm"},
    "no prompt": {"history": "own"},
    "raw feed": {"feed": "raw"},
    "norms moved": {"norm_shift": None},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", CASES)
def test_another_reading_is_told_from_mlx_vlms(name: str, wrong: str, scratch: Path) -> None:
    target, kind = bound(name, scratch), "nextn" if name in GLM_TYPES else "mtp"
    options = {"feed": "normed", "history": "prompt", **WRONG[wrong]}
    if wrong == "norms moved":
        options["norm_shift"] = kind == "nextn"
    told = CASES[name]["prompts"][-1]
    driven = Driven.of(target, head_of(target, kind, **options), [told["prompt"]])
    [found] = driven.draft([told["first"]], DEPTH)
    with pytest.raises(AssertionError):
        assert_logits(told["logits"], found)


@pytest.mark.parametrize("name", ["demo-qwen3_5", "glm_moe_dsa"])
def test_a_prompt_in_chunks_drafts_what_mlx_vlm_drafts(name: str, scratch: Path) -> None:
    told = CASES[name]["prompts"][-1]
    for step in (1, 7, len(told["prompt"]) - 1):
        driven = Driven.of(bound(name, scratch), head(name, scratch), [told["prompt"]], step)
        assert_is_mlx_vlms(told, driven.draft([told["first"]], DEPTH)[0])


def test_a_target_in_another_type_than_its_head_is_drafted_for() -> None:
    """The head's file is in bfloat16; somebody may run the target in another type."""
    model, tokenizer = specdec.load_model("demo-qwen3_5")
    model.set_dtype(mx.float32)
    text = "def add(first, second):"
    plain = [r.token for r in specdec.stream_generate(model, tokenizer, text, max_tokens=12)]
    with specdec.load_drafter("mtp", model, tokenizer) as drafter:
        responses = list(
            specdec.stream_generate(
                model, tokenizer, text, drafter=drafter, num_draft_tokens=1, max_tokens=12
            )
        )
    stats = responses[-1].stats
    assert [response.token for response in responses] == plain
    assert stats is not None
    assert (stats.reason, stats.draft_errors, stats.last_draft_error) == (None, 0, None)
    assert stats.accepted > 2
