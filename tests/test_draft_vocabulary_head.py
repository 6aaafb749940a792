"""A head over part of the vocabulary gives those ids the logits that the whole head gives them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from architectures import build
from mlx.nn.layers.quantized import quantize
from tiny_models import build_model

from specdec.contract import ContextKind
from specdec.targets import MlxLmTarget

# Soft caps, scales and tied embeddings behind the head are the model's own code.
MODELS = ("qwen3", "llama", "gemma2", "cohere", "granite", "minicpm", "qwen3_5", "glm4_moe_lite")


def hidden_of(target: MlxLmTarget) -> tuple[mx.array, mx.array]:
    state = target.new_state()
    state.begin_round(4)
    window = target.forward(mx.array([[3, 1, 4, 1]], mx.int32), state, ContextKind.POST_NORM)
    assert window.context is not None
    return window.context, window.logits


def port_of(target: MlxLmTarget) -> Any:
    port = target.recurrent_mtp
    assert port is not None
    return port


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_listed_ids_get_the_logits_of_the_whole_head(name: str, bits: int | None) -> None:
    model = build(name)
    if bits is not None:
        quantize(model, group_size=32, bits=bits, class_predicate=_fits)
    target = MlxLmTarget(model)
    hidden, logits = hidden_of(target)
    assert target.vocab_size > 40
    ids = [0, 3, 4, 17, target.vocab_size - 1]
    subset = port_of(target).subset(ids)
    assert subset is not None
    assert tuple(subset.ids) == tuple(ids)
    got = subset.project(hidden)
    want = logits[..., mx.array(ids)]
    assert got.dtype == want.dtype
    assert mx.allclose(got, want, rtol=1e-5, atol=1e-5).item()
    # Nothing stays behind.
    assert mx.array_equal(port_of(target).logits(hidden), logits).item()
    # A negative control: other rows give other logits.
    other = port_of(target).subset([1, 2, 5, 16, target.vocab_size - 2]).project(hidden)
    assert not mx.allclose(other, want, rtol=1e-5, atol=1e-5).item()


def _fits(_path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_a_head_of_another_name_cannot_be_cut() -> None:
    model = build_model("qwen3")
    model.output = model.pop("lm_head")
    model.args.tie_word_embeddings = False
    port = port_of(MlxLmTarget(build_model("qwen3")))
    assert port.subset([0, 1]) is not None

    class Other(type(model)):  # type: ignore[misc]  # mlx-lm ships no types
        def __call__(self, inputs: mx.array, cache: Any = None, **_: Any) -> Any:
            return self.output(self.model(inputs, cache))

    model.__class__ = Other
    target = MlxLmTarget(model)
    assert target.recurrent_mtp is not None
    assert port_of(target).subset([0, 1]) is None
