"""What a block drafter can do wrong is said where it happens, and costs drafts, not tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from scripted import drain, request
from test_block_example import shown
from tiny_models import build_model

from specdec import VerifyGroup
from specdec.contract import Greedy, Sampled
from specdec.drafting import BlockChoices, BlockDraft, Chooser, ProjectedGroups, ProjectedProvider
from specdec.errors import ContractError, TargetLacksError
from specdec.targets import MlxLmTarget
from specdec.testing.target import TinyTarget
from specdec_dflash.tiny import tiny_block

if TYPE_CHECKING:
    from collections.abc import Sequence


def changed(**members: Any) -> ProjectedProvider:
    """The page's drafter with other members."""
    own = shown()
    given = own["provider"]()
    method = type("Changed", (own["Glance"],), members)
    weights = given.grouped.method_for(TinyTarget(8)).weights
    grouped = ProjectedGroups(
        name="changed",
        schema="changed-v1",
        namespace=lambda: "0",
        tap_layers=(1,),
        bind=lambda target: method(target.hidden_taps, weights),
    )
    return ProjectedProvider("changed", 0, grouped)


def too_wide(
    self: Any, _context: Any, pending: mx.array, depth: int, _choices: Any, /
) -> BlockDraft:
    del self
    return BlockDraft(mx.zeros((pending.shape[0], depth + 1), mx.int32))


def without_attention(
    self: Any, _context: Any, pending: mx.array, depth: int, _choices: Any, /
) -> BlockDraft:
    del self
    return BlockDraft(mx.zeros((pending.shape[0], depth), mx.int32))


def narrow(
    self: Any, context: Any, pending: mx.array, depth: int, choices: BlockChoices, /
) -> BlockDraft:
    """As if a block never were wider than the drafts of the round."""
    masks = mx.zeros((pending.shape[0], depth - 1), pending.dtype)
    x = self.port.embed(mx.concatenate([pending[:, None], masks], axis=1))
    [(keys, values)] = self.project(x, context.positions)
    context.attend(0, keys, keys, values, scale=1.0)
    return BlockDraft(choices.every(self.port.logits(x)))


WRONG = {
    "attends to nothing": (without_attention, "layer 0 is declared, but the block did not attend"),
    "is too narrow": (narrow, r"a block has context\.width columns"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_draft_that_cannot_be_is_said_and_the_text_is_the_targets(what: str) -> None:
    method, says = WRONG[what]
    target = TinyTarget(8)
    alone = [int(t) for t, _ in generate_step(mx.array([1, 2, 3]), target.model, max_tokens=8)]
    # Rows that ask for more drafts than their neighbours widen the block.
    given = changed(draft_device=method, columns=lambda _self, depth, /: depth + 1)
    group = VerifyGroup(target, given, drafter="changed")
    [row] = group.admit([request([1, 2, 3], max_tokens=8, num_draft_tokens=3)])
    drain(group)
    assert list(row.emitted) == alone
    assert row.stats.draft_errors > 0
    assert row.stats.last_draft_error is not None
    assert re.search(says, row.stats.last_draft_error)


def test_a_draft_of_another_shape_is_named() -> None:
    def draft(self: Any, context: Any, *rest: Any) -> BlockDraft:
        shown()["Glance"].draft_device(self, context, *rest)
        return too_wide(self, context, *rest)

    target = TinyTarget(8)
    group = VerifyGroup(target, changed(draft_device=draft), drafter="changed")
    [row] = group.admit([request([1, 2, 3], max_tokens=6, num_draft_tokens=3)])
    drain(group)
    assert "drafted tokens of shape (1, 4); draft [1, 1 to 3]" in str(row.stats.last_draft_error)


def test_features_that_the_taps_do_not_have_are_refused_when_it_is_bound() -> None:
    def begin(self: Any, port: Any, weights: Any) -> None:
        self.port, self.weights, self.features = port, weights, 2 * port.hidden_size

    given = changed(__init__=begin)
    with pytest.raises(TargetLacksError, match=r"64 features \(its 1 taps have 32\)"):
        given.grouped.open_prefill(target=TinyTarget(8), checkpoints=[None])


def test_taps_that_the_target_does_not_have_are_named() -> None:
    with pytest.raises(TargetLacksError, match=r"layers 0, 5 \(it has 2\)"):
        tiny_block(taps=(0, 5)).grouped.open_prefill(target=TinyTarget(8), checkpoints=[None])


class Draws:
    """A row's draws; the most probable id."""

    rejecting = False

    def __init__(self, selection: Greedy | Sampled) -> None:
        self.selection = selection

    def sample(self, logprobs: mx.array, _steps: Sequence[int]) -> mx.array:
        return mx.argmax(logprobs, axis=-1)

    def log_distribution(self, logprobs: mx.array, _steps: Sequence[int]) -> mx.array:
        return logprobs


@pytest.mark.parametrize("selection", [Greedy(), Sampled()], ids=["greedy", "sampled"])
def test_logits_of_some_ids_need_the_ids(selection: Greedy | Sampled) -> None:
    choices = BlockChoices(Chooser(Draws(selection), 8), [0, 0])
    scores = mx.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    says = "the logits are of 3 ids, but there are 8; pass the ids that were scored"
    with pytest.raises(ContractError, match=says):
        choices.next(scores)
    with pytest.raises(ContractError, match=says):
        choices.every(scores[:, None])
    with pytest.raises(ContractError, match="the logits are of 3 ids, but there are 2"):
        choices.next(scores, mx.array([1, 2]))
    assert choices.next(scores, mx.array([1, 4, 6])).tolist() == [4, 6]


@pytest.mark.parametrize("own", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_a_target_whose_layers_compute_in_another_type_is_drafted_for(own: mx.Dtype) -> None:
    """Norms in 32 bits make the residual stream of a 16-bit model one of 32."""
    model = build_model("qwen3")
    model.set_dtype(own)
    for layer in model.layers:
        layer.input_layernorm.weight = layer.input_layernorm.weight.astype(mx.float32)
    target = MlxLmTarget(model)
    provider = tiny_block(dtype=own, hidden_size=64, vocab_size=64, mask_token=3, windows=(None, 5))
    alone = [int(t) for t, _ in generate_step(mx.array([5, 9, 3]), model, max_tokens=12)]
    group = VerifyGroup(target, provider, drafter="tiny")
    [row] = group.admit([request([5, 9, 3], max_tokens=12, num_draft_tokens=3)])
    drain(group)
    assert list(row.emitted) == alone
    assert (row.stats.draft_errors, row.stats.reason) == (0, None)
    assert row.stats.drafted > 10
