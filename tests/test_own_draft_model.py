"""A draft model of one's own: what the kit says of how it is built, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from specdec import bind_target
from specdec.drafting import DraftModelProvider
from specdec.drafting.modules import without_drawing
from specdec.errors import OptionError
from specdec.testing import DraftRowContract

if TYPE_CHECKING:
    from specdec.contract import DraftProvider

CHECK = "random_state_is_left_alone"
SIZES = llama.ModelArgs(
    model_type="llama",
    hidden_size=16,
    num_hidden_layers=1,
    intermediate_size=16,
    num_attention_heads=1,
    rms_norm_eps=1e-5,
    vocab_size=8,
)


def built() -> Any:
    mx.random.seed(3)
    return llama.Model(SIZES)


@cache
def built_once() -> Any:
    return built()


def built_without_drawing() -> Any:
    with without_drawing():
        return built()


class Own(DraftRowContract):
    build = staticmethod(built)

    def make_provider(self) -> DraftProvider:
        return DraftModelProvider("own", bind_target(self.build()), weight_bytes=0)


class Once(Own):
    build = staticmethod(built_once)


class Undrawn(Own):
    build = staticmethod(built_without_drawing)


def test_a_model_that_is_built_for_each_provider_draws() -> None:
    with pytest.raises(AssertionError, match=r"build it once, .* or in `with specdec\.drafting\."):
        Own().run_check(CHECK)


@pytest.mark.parametrize("kit", [Once, Undrawn], ids=lambda kit: kit.__name__)
def test_a_model_that_is_built_once_or_without_drawing_does_not(kit: type[Own]) -> None:
    kit().run_check(CHECK)
    kit().run_check("namespace_is_stable")  # and both are the same at each call


@pytest.mark.parametrize("pair", [False, True], ids=["model", "what load gives"])
def test_a_model_that_is_not_bound_is_refused_in_one_line(pair: bool) -> None:
    raw: Any = (built_once(), None) if pair else built_once()
    with pytest.raises(OptionError, match=r"give specdec\.bind_target\(draft_model\)$") as error:
        DraftModelProvider("own", raw, weight_bytes=0)
    assert str(error.value).startswith(f"model is a {type(raw).__name__} that is not bound")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "12"])
def test_a_limit_that_makes_no_sense_is_refused_in_one_line(limit: Any) -> None:
    target = bind_target(built_once())
    with pytest.raises(OptionError) as error:
        DraftModelProvider("own", target, weight_bytes=0, limit=limit)
    assert str(error.value) == (
        f"limit is {limit!r}; give a positive whole number, or None for no limit"
    )
    assert DraftModelProvider("own", target, weight_bytes=0, limit=1).grouped.model is target
