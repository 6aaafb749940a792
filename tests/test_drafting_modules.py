"""A drafter's weights: read, packed as they are stored, and refused where they do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from tiny_models import random_state

from specdec.drafting.modules import (
    Packing,
    load_module,
    packing_of,
    parameters_of,
    quantize_module,
    read_stored,
    without_drawing,
)
from specdec.errors import ArtifactError, OptionError, SpecdecError
from specdec.plugins.headers import read_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, mx.array]


class Block(Module):
    """Weights of 128 and 64 columns, a router, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.up = Linear(128, 64, bias=False)
        self.inner = {"gate": Linear(64, 32), "down": Linear(64, 128, bias=False)}
        self.norm = RMSNorm(64)


def drawn(seed: int) -> Tensors:
    """Weights of a :class:`Block`, by name."""
    shapes = parameters_of(Block())
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    return {
        name: mx.random.normal(array.shape, key=key)
        for (name, array), key in zip(sorted(shapes.items()), keys, strict=True)
    }


def refused(error: type[SpecdecError], ask: Callable[[], Any]) -> str:
    """The message of what ``ask`` raises, which has to be one line."""
    with pytest.raises(error) as caught:
        ask()
    said = str(caught.value)
    assert "\n" not in said
    return said


def same(found: Tensors, wanted: Tensors) -> bool:
    return set(found) == set(wanted) and all(
        found[name].dtype == array.dtype and mx.array_equal(found[name], array).item()
        for name, array in wanted.items()
    )


# Options.


def test_options_say_how_a_drafter_is_packed() -> None:
    assert packing_of({}) is None
    assert packing_of({"bits": None, "group_size": None}) is None
    assert packing_of({"bits": 4}) == Packing(4, 64)
    assert packing_of({"bits": 8, "group_size": 32}) == Packing(8, 32)
    usual = Packing(6, 128)
    assert packing_of({}, usual) == usual
    assert packing_of({"bits": 0}, usual) is None
    assert packing_of({"bits": 0}) is None
    assert packing_of({"bits": 2}, usual) == Packing(2, 64)
    assert packing_of({"group_size": 32}, usual) == Packing(6, 32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group_size": 64}, "group_size is 64 without bits; give bits=4, or neither"),
        ({"bits": "4"}, "bits is '4'; give one of 2, 3, 4, 5, 6, 8"),
        ({"bits": 7}, "bits is 7; give one of"),
        ({"bits": 4.0}, "bits is 4.0; give one of"),
        ({"bits": 0.0}, "bits is 0.0; give one of"),
        ({"bits": True}, "bits is True; give one of"),
        ({"bits": False}, "bits is False; give one of"),
        ({"bits": 0, "group_size": 64}, "bits is 0; give one of"),
        ({"bits": 4, "group_size": 48}, "group_size is 48; give one of 32, 64, 128"),
        ({"bits": 4, "group_size": "a\nb"}, "group_size is 'a"),
    ],
    ids=str,
)
def test_a_packing_that_makes_no_sense_is_named(options: dict[str, Any], said: str) -> None:
    assert refused(OptionError, lambda: packing_of(options)).startswith(said)


# Reading.


def test_tensors_are_read_from_their_files_under_the_names_they_get(tmp_path: Path) -> None:
    held = {"a": mx.arange(6).reshape(2, 3), "b": mx.ones((2,), mx.bfloat16)}
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    mx.save_safetensors(str(files[0]), {"long.a": held["a"], "unread": mx.zeros((3,))})
    mx.save_safetensors(str(files[1]), {"long.b": held["b"], "long.a": mx.zeros((1,))})
    stored = {
        name: read_header(file).tensors[f"long.{name}"]
        for name, file in zip("ab", files, strict=True)
    }
    assert same(read_stored(stored), held)
    assert read_stored({}) == {}
    files[1].write_bytes(b"no tensors at all")
    said = refused(ArtifactError, lambda: read_stored(stored))
    assert said.startswith(f"{files[1]} cannot be read")
    assert said.endswith("download it again")


def test_weights_are_given_to_their_module_and_no_random_number_is_drawn() -> None:
    wanted, module = drawn(1), Block()
    module.train()
    mx.random.seed(5)
    before = random_state()
    with without_drawing():
        Block()
        assert random_state() != before, "modules draw"
    assert random_state() == before
    load_module("the thing", module, wanted)
    assert same(parameters_of(module), wanted)
    assert not module.training
    assert random_state() == before


def test_random_numbers_are_left_alone_where_a_module_cannot_be_made() -> None:
    mx.random.seed(2**40 + 3)
    before = random_state()

    def fails() -> None:
        with without_drawing():
            Block()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert random_state() == before


PACKINGS: dict[str, dict[str, dict[str, Any]]] = {
    "4 bits of 32": {"": {"group_size": 32, "bits": 4}},
    "5, 8 and 3 bits": {
        "": {"group_size": 32, "bits": 5},
        "gate": {"group_size": 64, "bits": 8},
        "up": {"group_size": 128, "bits": 3},
    },
    "mxfp4": {"": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
    "mxfp8 and nvfp4": {
        "": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        "down": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    },
    "one part alone": {"": {}, "down": {"group_size": 32, "bits": 4}},
}


@pytest.mark.parametrize("name", PACKINGS)
def test_packed_weights_are_used_as_they_are_packed(name: str) -> None:
    packing = PACKINGS[name]

    def how(path: str, part: Any) -> bool | dict[str, Any]:
        if not hasattr(part, "to_quantized"):
            return False
        own = next((each for end, each in packing.items() if end and path.endswith(end)), None)
        return own or packing[""] or False

    packed = Block()
    load_module("the thing", packed, drawn(2))
    quantize(packed, class_predicate=how)
    stored, fresh = parameters_of(packed), Block()
    assert any(name.endswith(".scales") for name in stored)
    before = random_state()
    load_module("the thing", fresh, stored)
    assert random_state() == before
    assert same(parameters_of(fresh), stored)
    row = mx.random.normal((3, 64), key=mx.random.key(0))
    down: Any = fresh.inner["down"]
    wanted = packing.get("down", packing[""])
    assert isinstance(down, QuantizedLinear)
    assert (down.bits, down.group_size) == (wanted["bits"], wanted["group_size"])
    assert down.mode == wanted.get("mode", "affine")
    theirs: Any = packed.inner["down"]
    assert mx.array_equal(down(row), theirs(row)).item()


def _packed(rows: int, words: int, groups: int, **others: mx.array) -> Tensors:
    return {
        "up.weight": mx.zeros((rows, words), mx.uint32),
        "up.scales": mx.zeros((rows, groups)),
        **others,
    }


UNFIT: dict[str, tuple[Tensors, tuple[str, ...], str]] = {
    "none": ({}, ("up.weight",), "the thing has no up.weight; give a complete"),
    "none of many": (
        {},
        ("up.weight", "norm.weight", "inner.gate.bias", "inner.gate.weight"),
        "the thing has no inner.gate.bias, inner.gate.weight and 2 more; give",
    ),
    "one more": ({"up.bias": mx.zeros((64,))}, (), "the thing has up.bias, which"),
    "wide": (
        {"up.weight": mx.zeros((64, 136))},
        (),
        "the up.weight of the thing has shape (64, 136), but its config and target need (64, 128)",
    ),
    "long": (
        {"norm.weight": mx.zeros((65,))},
        (),
        "the norm.weight of the thing has shape (65,), but",
    ),
    "a scalar": ({"up.weight": mx.zeros(())}, (), "has shape (), but its config"),
    "no format": (_packed(64, 16, 2), (), "up.scales has shape (64, 2) without biases beside it"),
    "no groups": (_packed(64, 16, 0), (), "up.scales has shape (64, 0)"),
    "more groups than columns": (
        _packed(64, 16, 1000, **{"up.biases": mx.zeros((64, 1000))}),
        (),
        "up.weight has shape (64, 16) and up.scales has shape (64, 1000), which is no packing of",
    ),
    "groups of no size of mlx": (
        _packed(64, 16, 8, **{"up.biases": mx.zeros((64, 8))}),
        (),
        "which is no packing of mlx for 128 columns; convert them anew",
    ),
    "groups that do not come out even": (_packed(64, 16, 3), (), "up.scales has shape (64, 3)"),
    "words that do not come out even": (_packed(64, 15, 4), (), "up.weight has shape (64, 15)"),
    "no words": (
        _packed(64, 0, 4, **{"up.biases": mx.zeros((64, 4))}),
        (),
        "up.weight has shape (64, 0)",
    ),
    "scales of other rows": (
        _packed(64, 16, 4, **{"up.scales": mx.zeros((63, 4))}),
        (),
        "up.scales has shape (63, 4)",
    ),
    "a scalar of scales": (
        {"up.weight": mx.zeros((64, 16), mx.uint32), "up.scales": mx.zeros(())},
        (),
        "up.scales has shape ()",
    ),
    "a packed scalar": (
        {"up.weight": mx.zeros((), mx.uint32), "up.scales": mx.zeros((64, 4))},
        (),
        "up.weight has shape ()",
    ),
    "offsets of another shape": (
        _packed(64, 16, 4, **{"up.biases": mx.zeros((64, 2))}),
        (),
        "the up.biases of the thing has shape (64, 2)",
    ),
    "a weight of complex numbers": (
        {"up.weight": mx.zeros((64, 128), mx.complex64)},
        (),
        "the up.weight of the thing is mlx.core.complex64, which is no floating point type",
    ),
    "a weight of whole numbers": (
        {"up.weight": mx.zeros((64, 128), mx.int32)},
        (),
        "the up.weight of the thing is mlx.core.int32, which is no",
    ),
    "a norm of truths": ({"norm.weight": mx.zeros((64,), mx.bool_)}, (), "norm.weight of the"),
    "float scales of a float format": (
        _packed(64, 16, 4),
        (),
        "the up.weight of the thing is mlx.core.uint32 and its up.scales are mlx.core.float32",
    ),
    "a packed weight of floats": (
        {
            "up.weight": mx.zeros((64, 16)),
            "up.scales": mx.zeros((64, 4)),
            "up.biases": mx.zeros((64, 4)),
        },
        (),
        "the up.weight of the thing is mlx.core.float32",
    ),
    "scales of integers": (
        _packed(64, 16, 4, **{"up.biases": mx.zeros((64, 4), mx.int32)}),
        (),
        "which is no packing of mlx",
    ),
    "bits that mlx has not": (
        _packed(64, 28, 4, **{"up.biases": mx.zeros((64, 4))}),
        (),
        "the packed weights of the thing cannot be used",
    ),
}


def test_a_parameter_that_is_no_floating_point_number_may_be_none() -> None:
    module = Block()
    module.ids = mx.zeros((3,), mx.int32)
    load_module("the thing", module, {**drawn(3), "ids": mx.arange(3)})
    assert module.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_named_with_both_values(name: str) -> None:
    others, without, said = UNFIT[name]
    tensors = {**drawn(3), **others}
    for lost in without:
        tensors.pop(lost)
    assert said in refused(ArtifactError, lambda: load_module("the thing", Block(), tensors))


# Quantizing.


@pytest.mark.parametrize("packing", [Packing(4), Packing(8, 32), Packing(3, 128)])
def test_a_module_is_quantized_where_its_parts_fit(packing: Packing) -> None:
    plain, module = drawn(4), Block()
    load_module("the thing", module, plain)
    mx.random.seed(3)
    before = random_state()
    quantize_module("the thing", module, packing, fits=lambda path: not path.endswith("gate"))
    assert random_state() == before
    found = parameters_of(module)
    parts = ("up", "inner.down") if packing.group_size < 128 else ("up",)
    expected = dict(plain)
    for part in parts:
        made: Any = mx.quantize(
            plain[f"{part}.weight"], group_size=packing.group_size, bits=packing.bits
        )
        for end, array in zip(("weight", "scales", "biases"), made, strict=True):
            expected[f"{part}.{end}"] = array
    assert same(found, expected), "routers, norms and what has no whole groups stay as they are"
    load_module("the thing", Block(), found)  # as it would be stored


def test_a_packing_without_any_effect_or_format_is_refused() -> None:
    module = Block()
    load_module("the thing", module, drawn(5))
    said = refused(
        OptionError, lambda: quantize_module("the thing", module, Packing(4), lambda _: False)
    )
    assert said.startswith("group_size is 64, which divides no weight of the thing")
    said = refused(OptionError, lambda: quantize_module("the thing", module, Packing(7)))
    assert said.startswith("bits is 7 with group_size 64, which mlx cannot do")
    quantize_module("the thing", module, Packing(4))
    said = refused(OptionError, lambda: quantize_module("the thing", module, Packing(4)))
    assert "no bits where it is packed already" in said
