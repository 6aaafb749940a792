"""A backend that reads keys further than there are changes no token, of any kind of model.

MLX's CUDA backend has such a shape policy (``state/kernels.py``); here it is put on the CPU, where
equality is exact. Some models count their keys; they must never be given more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from adversary import Adversary, text_alone
from architectures import build

from specdec import Request, SamplingOptions, VerifyGroup
from specdec.targets import MlxLmTarget
from specdec.targets.fit import fit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = ((3, 9, 1, 7, 2, 8, 5), (4, 4, 2, 9, 9, 1, 3, 6, 8, 2, 5, 7, 1), (11, 2) * 15)
TOKENS = 24


@pytest.fixture
def planned() -> Iterator[None]:
    """The shape policy of a backend that plans attention by shape."""
    with (
        mock.patch("specdec.state.positions.plans_by_shape", return_value=True),
        mock.patch("specdec.targets.fit.plans_by_shape", return_value=True),
    ):
        yield


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    "name", ["afm7", "minimax_m3_vl", "gemma3_text", "gpt_oss", "llama4", "qwen3_5", "deepseek_v32"]
)
def test_keys_that_are_read_too_far_change_no_token(name: str) -> None:
    model: Any = build(name)  # not tried yet
    texts = [text_alone(model, prompt, TOKENS) for prompt in PROMPTS]
    drafter = Adversary(texts, 64)
    target = MlxLmTarget(model)
    assert target.no_speculation_reason is None
    group = VerifyGroup(target, drafter.provider, drafter="adversary")
    rows = group.admit(
        [
            Request(
                prompt=prompt,
                sampling=SamplingOptions(),
                max_tokens=TOKENS,
                num_draft_tokens=4,
            )
            for prompt in PROMPTS
        ]
    )
    while any(row.finish is None for row in rows):
        with group.round() as verified:
            verified.deliver_all()
    assert [row.emitted for row in rows] == [text.output for text in texts]
    assert all(row.stats.accepted for row in rows)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("name", "counts"), [("afm7", True), ("gemma2", False)])
def test_a_model_that_counts_its_keys_is_known(name: str, counts: bool) -> None:
    assert fit_of(build(name), 64).exact_keys is counts
