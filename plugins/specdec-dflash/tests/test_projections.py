"""Projections of a drafter that its target's operations compute."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from mlx.nn.layers.quantized import QuantizedLinear
from rotated_target import Drafts, OfferingTarget, drafts_of, pair_of
from scripted import Fault, drain, request, solo, target
from tiny_models import VOCABULARY, tiny_model

from specdec import VerifyGroup
from specdec.drafting.modules import (
    Packing,
    load_module,
    parameters_of,
    quantize_module,
    without_drawing,
)
from specdec.errors import ContractError
from specdec_dflash.config import Convolutions, Markov, Selector
from specdec_dflash.loading import provider_of
from specdec_dflash.method import Drafting
from specdec_dflash.model import BlockModel
from specdec_dflash.tiny import TINY, random_weights, tiny_block

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlx.nn.layers.linear import Linear

    from specdec import Row

    Operation = Callable[[mx.array, Any], mx.array]

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "vocab_size": VOCABULARY,
    "mask_token": 63,
    "target_layers": None,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "dflash": {},
    "dflash2": {"convolutions": Convolutions(2, 16), "selector": Selector(8, 6)},
    "deepspec": {
        "markov": Markov(8, "rnn"),
        "confidence": True,
        "from_anchor": True,
        "own_head": True,
    },
}
NAMES: Final = {
    "dflash": {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "dflash2": {"kernel_projection", "hidden_projection"},
    "deepspec": {"lm_head", "markov_w2", "joint_proj"},
}
PROMPT = (7, 1, 52, 20, 9)


def block(kind: str = "dflash") -> Any:
    return tiny_block(**SIZES, **KINDS[kind])


def model_of() -> BlockModel:
    """The network of ``block()``."""
    with without_drawing():
        model = BlockModel(evolve(TINY, **SIZES), own_embedding=False, own_head=False)
    load_module("it", model, random_weights(model, 0))
    return model


def provider_with(model: BlockModel) -> Any:
    return provider_of("it", evolve(TINY, **SIZES), model, Drafting(), None)


def offering(offered: Mapping[str, Any]) -> OfferingTarget:
    return OfferingTarget(tiny_model("qwen3"), offered=offered)


@cache
def plain(kind: str) -> Drafts:
    return drafts_of(target(), block(kind))


class Counting:
    """Does what the projection does, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def named(self, name: str) -> Operation:
        def operation(x: mx.array, linear: Any) -> mx.array:
            self.calls[name] += 1
            made: mx.array = linear(x)
            return made

        return operation


def exact(x: mx.array, linear: Any) -> mx.array:
    """``linear(x)`` in float64."""
    made = np.array(x, np.float64) @ np.array(linear.weight, np.float64).T
    if "bias" in linear:
        made = made + np.array(linear.bias, np.float64)
    return mx.array(made.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_every_projection_that_is_offered_is_called_and_no_other(kind: str) -> None:
    counting, names = Counting(), NAMES["dflash"] | NAMES[kind]
    offered = {name: counting.named(name) for name in (*names, "unknown", "embed_tokens", "norm")}
    found = drafts_of(offering(offered), block(kind))
    assert found.difference(plain(kind)) == 0.0
    assert set(counting.calls) == names
    # Three prompts of one row, two rounds of drafts and commits, and a graph that tells shapes.
    assert counting.calls["fc"] == 3 + 2 + 1
    assert counting.calls["q_proj"] == 2 * 2, "two layers in two rounds"
    assert counting.calls["k_proj"] == 2 * (2 + counting.calls["fc"]), "of blocks and of context"


def test_one_operation_alone_serves_its_own_projections() -> None:
    counting = Counting()
    found = drafts_of(offering({"down_proj": counting.named("down_proj")}), block())
    assert found.difference(plain("dflash")) == 0.0
    assert counting.calls == {"down_proj": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_of_other_precision_gives_the_same_drafts(kind: str) -> None:
    names = NAMES["dflash"] | NAMES[kind]
    found = drafts_of(offering(dict.fromkeys(names, exact)), block(kind))
    assert 0.0 < found.difference(plain(kind)) <= 1e-4
    assert found.tokens == plain(kind).tokens


@pytest.mark.parametrize("name", sorted(NAMES["dflash"]))
def test_what_an_operation_returns_is_what_is_used(name: str) -> None:
    wrong = {name: lambda x, linear: linear(x) * 1.1 + 0.1}
    assert drafts_of(offering(wrong), block()).difference(plain("dflash")) > 1e-2


def test_an_operation_is_given_the_packed_projection_as_it_is() -> None:
    seen = []

    def operation(x: mx.array, linear: Any) -> mx.array:
        seen.append(linear)
        assert (x.ndim, x.shape[-1], x.dtype) == (3, 64, mx.float32)
        return mx.quantized_matmul(
            x, linear.weight, linear.scales, linear.biases, True, linear.group_size, linear.bits
        )

    model = model_of()
    quantize_module("it", model, Packing(4, 32), lambda path: path.endswith("gate_proj"))
    want = drafts_of(target(), provider_with(model))
    assert want.difference(plain("dflash")) > 1e-3, "it is packed"
    found = drafts_of(offering({"gate_proj": operation, "up_proj": exact}), provider_with(model))
    assert found.difference(want) <= 1e-4
    assert seen
    assert all(isinstance(linear, QuantizedLinear) for linear in seen)


def test_a_rotated_targets_operation_is_given_the_folded_projection() -> None:
    both = pair_of("qwen3", tie_word_embeddings=False)
    seen: list[Linear] = []

    def operation(x: mx.array, linear: Any) -> mx.array:
        seen.append(linear)
        return exact(x, linear)

    provider = block()
    rotated = OfferingTarget(both.rotated.model, both.basis, {"fc": operation})
    found = drafts_of(rotated, provider)
    assert found.difference(drafts_of(both.original, block())) <= 1e-4
    given = parameters_of(model_of())["fc.weight"]
    turned = [given[:, at : at + 64] @ both.basis.rotation for at in (0, 64)]
    assert mx.allclose(seen[0].weight, mx.concatenate(turned, 1), atol=1e-5, rtol=0).item()


# Bound once.


def test_the_network_and_its_names_stay_as_they_are() -> None:
    model = model_of()
    given, provider = parameters_of(model), provider_with(model)
    namespace = provider_with(model_of()).grouped.checkpoint_namespace
    assert drafts_of(offering({"q_proj": exact}), provider).tokens == plain("dflash").tokens
    kept = parameters_of(model)
    assert kept.keys() == given.keys()
    assert all(array is given[name] for name, array in kept.items())
    assert provider.grouped.checkpoint_namespace == namespace
    assert drafts_of(target(), provider_with(model)).difference(plain("dflash")) == 0.0


def test_other_operations_are_refused_later_and_the_first_ones_go_on() -> None:
    counting, provider = Counting(), block()
    offered = {"fc": counting.named("fc"), "q_proj": counting.named("q_proj")}
    first = offering(offered)
    drafts_of(first, provider)
    # The same operations of another model are the same.
    other_model = pair_of("qwen3", seed=2, tie_word_embeddings=False).original.model
    drafts_of(OfferingTarget(other_model, offered=dict(offered)), provider)
    for other in (None, {}, {"fc": offered["fc"]}, {**offered, "q_proj": exact}):
        model = pair_of("qwen3", seed=3, tie_word_embeddings=False).original.model
        with pytest.raises(ContractError, match="other draft_projections; load it again") as caught:
            drafts_of(OfferingTarget(model, offered=other), provider)
        assert "\n" not in str(caught.value)
    before = counting.calls["q_proj"]
    assert drafts_of(first, provider).difference(plain("dflash")) == 0.0
    assert counting.calls["q_proj"] == before + 4


def test_none_and_an_empty_offer_are_one() -> None:
    provider = block()
    drafts_of(target(), provider)
    model = pair_of("qwen3", seed=2, tie_word_embeddings=False).original.model
    drafts_of(OfferingTarget(model, offered={}), provider)


def test_what_cannot_be_called_is_refused_in_one_line() -> None:
    provider = block()
    with pytest.raises(ContractError, match="'exact' for q_proj; offer something that can be"):
        drafts_of(offering({"q_proj": "exact"}), provider)
    assert drafts_of(target(), provider).difference(plain("dflash")) == 0.0


# A fault costs the drafting alone.


def served(bound: OfferingTarget, provider: Any) -> Row:
    group = VerifyGroup(bound, provider, drafter="dflash")
    [row] = group.admit([request(PROMPT, max_tokens=20, num_draft_tokens=3)])
    drain(group)
    group.close()
    assert row.emitted == solo(PROMPT)[:20]
    return row


class Failing:
    """Breaks from one call on, or at that call alone."""

    def __init__(self, call: int, how: str, *, once: bool) -> None:
        self.call, self.how, self.once, self.calls = call, how, once, 0

    def __call__(self, x: mx.array, linear: Any) -> mx.array:
        self.calls += 1
        made: mx.array = linear(x)
        if self.calls < self.call or (self.once and self.calls > self.call):
            return made
        if self.how == "raises":
            raise Fault("a kernel that is not there")
        if self.how == "shape":
            return made[..., :-1]
        if self.how == "type":
            return None  # type: ignore[return-value]
        return mx.full(made.shape, mx.nan)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "Fault: a kernel that is not there"),
        ("shape", "operation q_proj returned (1, 4, 31); it must return an array of shape"),
        ("type", "operation q_proj returned NoneType"),
        ("nan", None),
    ],
)
def test_an_operation_that_fails_changes_no_token(how: str, says: str | None, once: bool) -> None:
    failing = Failing(3, how, once=once)
    row = served(offering({"q_proj": failing}), block())
    assert failing.calls >= 3
    if says is None:
        assert row.stats.draft_errors == 0, "numbers are not looked at"
    else:
        assert row.stats.draft_errors >= 1
        assert says in str(row.stats.last_draft_error)


def test_an_operation_that_fails_over_a_prompt_changes_no_token() -> None:
    row = served(offering({"fc": Failing(2, "raises", once=False)}), block())
    assert row.stats.draft_errors >= 1
    assert "Fault" in str(row.stats.last_draft_error)
