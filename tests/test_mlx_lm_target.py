"""An mlx-lm model is looked into from outside: what is read is right, and nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from architectures import build
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from tiny_models import (
    ATTENTION,
    HYBRID,
    VOCABULARY,
    WINDOWED,
    alone,
    build_model,
    logits_check,
    random_state,
    tiny_model,
)

import specdec_demo
from specdec.contract import ContextKind, require_port
from specdec.errors import (
    OptionError,
    RollbackError,
    TargetLacksError,
    UnsupportedModelError,
)
from specdec.state import NativeState, RaggedState, RowState, Together
from specdec.targets import MlxLmTarget, fit
from specdec.targets.intercept import find_backbone

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = [5, 61, 8, 33, 2, 2, 47, 19, 30, 11]
OTHER = [9, 9, 41, 3, 26, 50, 7, 7, 1, 16]

NAMES = ["demo-qwen3", "demo-qwen3_5", *ATTENTION, "gemma2", WINDOWED, HYBRID]


def model_of(name: str) -> Any:
    return load_model(specdec_demo.path(name))[0] if name.startswith("demo") else tiny_model(name)


@pytest.fixture(scope="module", params=NAMES)
def target(request: pytest.FixtureRequest) -> MlxLmTarget:
    return MlxLmTarget(model_of(request.param))


@pytest.fixture(params=["demo-qwen3", "demo-qwen3_5", "gemma", "cohere", "gemma2", HYBRID])
def some_target(request: pytest.FixtureRequest) -> MlxLmTarget:
    return MlxLmTarget(model_of(request.param))


def backbone_of(model: Any) -> Any:
    """The module that holds embedding, layers and final norm."""
    return model.model if hasattr(model, "model") else model.language_model.model


def run(
    target: MlxLmTarget,
    windows: list[list[list[int]]],
    context: ContextKind = ContextKind.NONE,
    taps: tuple[int, ...] = (),
    state: RowState | None = None,
) -> list[tuple[mx.array, Any]]:
    """Logits and context of windows that follow each other; every row takes part in each."""
    if state is None:
        state = target.new_state()
        if len(windows[0]) > 1:
            state.prepare_append([target.new_state() for _ in windows[0][1:]]).commit()
    read = []
    for window in windows:
        state.begin_round(len(window[0]))
        got = target.forward(mx.array(window), state, context, taps)
        state.commit_round()
        mx.eval(got.logits, *([] if got.context is None else [got.context]), state.arrays())
        read.append((got.logits, got.context))
    return read


WINDOWS = [[TEXT[:4]], [TEXT[4:5]], [TEXT[5:8]], [TEXT[8:9]]]
TWO_ROWS = [[TEXT[:4], OTHER[:4]], [TEXT[4:5], OTHER[4:5]], [TEXT[5:7], OTHER[5:7]]]


def shape_of(model: Any) -> list[tuple[str, int]]:
    """Every module of a model by name and identity, which a wrapper would change."""
    return [(name, id(module)) for name, module in model.named_modules()]


# What is read.


@pytest.mark.parametrize(
    ("context", "taps"),
    [
        (ContextKind.PRE_NORM, ()),
        (ContextKind.POST_NORM, ()),
        (ContextKind.TAPS, (0, 2, 1)),
    ],
)
def test_looking_changes_no_bit_of_the_logits(
    target: MlxLmTarget, context: ContextKind, taps: tuple[int, ...]
) -> None:
    port = target.hidden_taps
    assert port is not None
    assert target.can_tap(taps)
    before = shape_of(target.model)
    for windows in (WINDOWS, TWO_ROWS):
        plain = run(target, windows)
        looked = run(target, windows, context, taps)
        for (logits, nothing), (same, hidden), window in zip(plain, looked, windows, strict=True):
            assert nothing is None
            assert hidden is not None
            assert mx.array_equal(logits, same).item()
            size = max(1, len(taps)) * port.hidden_size
            assert hidden.shape == (len(window), len(window[0]), size)
    assert shape_of(target.model) == before


def layers_by_hand(target: MlxLmTarget, windows: list[list[list[int]]]) -> Iterator[list[mx.array]]:
    """The residual stream after each layer, then the final norm, by calling them one by one."""
    inner = target.model.model
    state = target.new_state()
    caches = state.row_caches[0][0]
    for window in windows:
        state.begin_round(len(window[0]))
        hidden = inner.embed_tokens(mx.array(window))
        mask = create_attention_mask(hidden, caches[0])
        stream = []
        for layer, cache in zip(inner.layers, caches, strict=True):
            hidden = layer(hidden, mask, cache)
            stream.append(hidden)
        state.commit_round()
        yield [*stream, inner.norm(hidden)]


@pytest.mark.parametrize("name", ["demo-qwen3", "qwen3"])
def test_a_tap_is_the_residual_stream_after_its_layer(name: str) -> None:
    target = MlxLmTarget(model_of(name))
    port = target.hidden_taps
    assert port is not None
    last = port.layer_count
    assert last == len(target.model.model.layers)
    every = tuple(range(last + 1))
    assert target.can_tap(every)
    want = list(layers_by_hand(target, WINDOWS))
    tapped = run(target, WINDOWS, ContextKind.TAPS, every)
    pre = run(target, WINDOWS, ContextKind.PRE_NORM)
    post = run(target, WINDOWS, ContextKind.POST_NORM)
    turned = run(target, WINDOWS, ContextKind.TAPS, (last, 0))
    for i, stream in enumerate(want):
        assert mx.array_equal(tapped[i][1], mx.concatenate(stream, -1)).item()
        assert mx.array_equal(pre[i][1], stream[-2]).item()
        assert mx.array_equal(post[i][1], stream[-1]).item()
        assert mx.array_equal(turned[i][1], mx.concatenate([stream[-1], stream[0]], -1)).item()


def test_rows_are_tapped_each_in_its_place(some_target: MlxLmTarget) -> None:
    both = run(some_target, TWO_ROWS, ContextKind.TAPS, (0, 1))
    for row in (0, 1):
        alone = run(some_target, [[w[row]] for w in TWO_ROWS], ContextKind.TAPS, (0, 1))
        for (_, joint), (_, single) in zip(both, alone, strict=True):
            assert joint is not None
            assert mx.allclose(joint[row], single[0], rtol=1e-2, atol=1e-2).item()
        assert not mx.allclose(both[0][1][0], both[0][1][1], rtol=1e-2, atol=1e-2).item()


def test_the_final_norm_leads_from_pre_to_post(target: MlxLmTarget) -> None:
    inner = backbone_of(target.model)
    norm = inner["embedding_norm" if "embedding_norm" in inner else "norm"]
    pre = run(target, WINDOWS, ContextKind.PRE_NORM)
    post = run(target, WINDOWS, ContextKind.POST_NORM)
    for (_, before), (_, after) in zip(pre, post, strict=True):
        assert mx.array_equal(norm(before), after).item()


def test_the_head_over_the_final_hidden_gives_the_models_own_logits(target: MlxLmTarget) -> None:
    port = target.recurrent_mtp
    assert port is not None
    before = shape_of(target.model)
    for windows in (WINDOWS, TWO_ROWS):
        for logits, hidden in run(target, windows, ContextKind.POST_NORM):
            assert hidden is not None
            assert mx.array_equal(port.logits(hidden), logits).item()
    assert shape_of(target.model) == before


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 300.0}),
        ("cohere", {"logit_scale": 2.0}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
def test_caps_and_scales_of_the_head_are_part_of_it(name: str, changes: dict[str, Any]) -> None:
    # The same weights with another cap or scale: the port's logits must differ as the model's do.
    one, two = MlxLmTarget(tiny_model(name)), MlxLmTarget(build_model(name, **changes))
    ((_, hidden),) = run(one, [[TEXT]], ContextKind.POST_NORM)
    assert hidden is not None
    ports = one.hidden_taps, two.hidden_taps
    assert ports[0] is not None
    assert ports[1] is not None
    assert not mx.allclose(ports[0].logits(hidden), ports[1].logits(hidden), rtol=0.01).item()


def test_hidden_of_a_drafter_goes_through_the_head_too(some_target: MlxLmTarget) -> None:
    port = some_target.hidden_taps
    assert port is not None
    ((_, hidden),) = run(some_target, [[TEXT]], ContextKind.POST_NORM)
    assert hidden is not None
    turned = port.logits(hidden[:, ::-1])[:, ::-1]
    assert mx.allclose(turned, port.logits(hidden), rtol=1e-2, atol=1e-2).item()
    assert port.logits(hidden[:, :1]).shape == (1, 1, some_target.vocab_size)
    assert port.logits(mx.concatenate([hidden, hidden])).shape[:2] == (2, len(TEXT))


SCALES = {"gemma": 8.0, "gemma2": 8.0, WINDOWED: 8.0, "granite": 3.0}
"""By what a tiny model multiplies its embeddings: sqrt(64), or what its config says."""


def test_embeddings_are_scaled_as_the_model_scales_its_own_input(
    request: pytest.FixtureRequest, target: MlxLmTarget
) -> None:
    name = request.node.callspec.params["target"]
    port = target.hidden_taps
    assert port is not None
    tokens = mx.array([TEXT[:5], OTHER[:5]])
    table = backbone_of(target.model).embed_tokens
    got = port.embed(tokens)
    assert got.shape == (2, 5, port.hidden_size)
    assert mx.allclose(got, table(tokens) * SCALES.get(name, 1.0), rtol=1e-6).item()
    # It is indeed what the first layer gets.
    first = target.model.layers[0]
    seen = []
    inner = backbone_of(target.model)

    class Spy(Module):
        def __getattr__(self, key: str) -> Any:
            return getattr(first, key)

        def __call__(self, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
            seen.append(hidden)
            return first(hidden, *args, **kwargs)

    inner.layers[0] = Spy()  # type: ignore[no-untyped-call]
    try:
        target.model(tokens)
    finally:
        inner.layers[0] = first
    assert mx.array_equal(seen[0], got).item()


def test_both_hidden_ports_say_the_same_and_the_others_are_missing(target: MlxLmTarget) -> None:
    for port in (target.hidden_taps, target.recurrent_mtp):
        assert port is not None
        assert port.layer_count == len(target.model.layers)
        assert port.hidden_size == backbone_of(target.model).embed_tokens.weight.shape[1]
    assert target.identity is target.model
    assert target.vocab_size == backbone_of(target.model).embed_tokens.weight.shape[0]
    donors = target.assistant_rows
    assert donors is not None
    assert donors.hidden_size == backbone_of(target.model).embed_tokens.weight.shape[1]
    for port_name in ("residual_basis", "draft_projections"):
        with pytest.raises(TargetLacksError, match=port_name):
            require_port(target, port_name)


def test_layers_that_are_not_there_cannot_be_tapped() -> None:
    target = MlxLmTarget(tiny_model("qwen3"))
    assert target.can_tap(())
    assert target.can_tap((0, 1, 2))
    assert target.can_tap((2,))
    assert not target.can_tap((3,))
    assert not target.can_tap((-1,))
    assert not target.can_tap((0, 0))


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_a_quantized_head_is_named_and_an_unquantized_one_is_not(name: str) -> None:
    model = build_model(name)
    assert require_port(MlxLmTarget(model), "recurrent_mtp").vocabulary_head is None
    quantize(model, group_size=32, bits=4)
    target = MlxLmTarget(model)
    port = require_port(target, "recurrent_mtp")
    head = port.vocabulary_head
    assert head is (model.lm_head if name == "qwen3" else model.model.embed_tokens)
    assert head.bits == 4
    for logits, hidden in run(target, WINDOWS, ContextKind.POST_NORM):
        assert mx.array_equal(port.logits(hidden), logits).item()


# Nothing stays behind.


def test_binding_and_using_a_model_leaves_it_as_it_was(some_target: MlxLmTarget) -> None:
    model = some_target.model
    inner = backbone_of(model)
    before, layers, held = shape_of(model), inner.layers, list(inner.layers)
    again = MlxLmTarget(model)
    port = again.hidden_taps
    assert port is not None
    port.embed(mx.array([TEXT]))
    ((_, hidden),) = run(again, [[TEXT]], ContextKind.POST_NORM)
    assert hidden is not None
    port.logits(hidden)
    run(again, WINDOWS, ContextKind.TAPS, (0, 1))
    assert shape_of(model) == before
    assert inner.layers is layers
    assert all(a is b for a, b in zip(inner.layers, held, strict=True))
    assert all(type(layer).__module__.startswith("mlx_lm.") for layer in inner.layers)


class Broken(Exception):
    pass


class BreaksAt(KVCache):  # type: ignore[misc]
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        raise Broken


@pytest.mark.parametrize(
    ("context", "taps"),
    [(ContextKind.TAPS, (0, 2)), (ContextKind.PRE_NORM, ()), (ContextKind.POST_NORM, ())],
)
def test_a_failure_inside_the_model_leaves_it_as_it_was(
    context: ContextKind, taps: tuple[int, ...]
) -> None:
    target = MlxLmTarget(tiny_model("qwen3"))
    before = shape_of(target.model)
    state = NativeState([KVCache(), BreaksAt()], "it breaks")
    state.begin_round(2)
    with pytest.raises(Broken):
        target.forward(mx.array([TEXT[:2]]), state, context, taps)
    ragged = target.new_state()
    ragged.begin_round(3)
    with pytest.raises(RollbackError):
        target.forward(mx.array([TEXT[:2]]), ragged, context, taps)
    assert shape_of(target.model) == before


def test_a_failure_in_the_head_or_before_the_first_layer_leaves_the_model_as_it_was() -> None:
    target = MlxLmTarget(tiny_model("qwen3"))
    before = shape_of(target.model)
    port = target.hidden_taps
    assert port is not None
    with pytest.raises(ValueError, match=r"matmul|addmm|shape"):
        port.logits(mx.zeros((1, 2, 63)))
    with pytest.raises(ValueError, match=r"integral|integer|dtype|type"):
        port.embed(mx.array([[0.5]]))
    assert shape_of(target.model) == before


# Models of another shape.


class Layer(Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(width, out)

    def __call__(self, hidden: mx.array, cache: Any = None) -> Any:
        if cache is not None:
            cache.update_and_fetch(*[hidden[:, None]] * 2)
        return self.linear(hidden)


class Inner(Module):
    def __init__(self, *sizes: int, name: str = "layers") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = Embedding(VOCABULARY, sizes[0])
        self.name = name
        self[name] = [Layer(a, b) for a, b in itertools.pairwise(sizes)]
        self.out = Linear(sizes[-1], sizes[0])

    def __call__(self, ids: mx.array, cache: Any = None) -> Any:
        hidden = self.embed_tokens(ids)
        for i, layer in enumerate(self[self.name]):
            hidden = layer(hidden, None if cache is None else cache[i])
        return self.out(hidden)


class Outer(Module):
    """A model as mlx-lm builds them, around an inner one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = inner

    @property
    def layers(self) -> Any:
        return self.model[self.model.name]

    def __call__(self, ids: mx.array, cache: Any = None) -> Any:
        return self.model.embed_tokens.as_linear(self.model(ids, cache))


def test_a_model_whose_layers_differ_in_size_has_no_hidden_ports_but_runs() -> None:
    usual = MlxLmTarget(Outer(Inner(8, 8, 8)))
    assert usual.hidden_taps is not None
    target = MlxLmTarget(Outer(Inner(8, 16, 8)))
    assert target.hidden_taps is None
    assert target.recurrent_mtp is None
    assert target.can_tap(())
    assert not target.can_tap((0,))
    ((logits, _),) = run(target, [[TEXT]])
    assert logits.shape == (1, len(TEXT), VOCABULARY)
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        require_port(target, "hidden_taps")


def test_a_model_without_the_usual_layers_lacks_the_ports_but_runs() -> None:
    model = Outer(Inner(8, 8, 8, name="blocks"))
    assert find_backbone(model) is None
    target = MlxLmTarget(model)
    assert target.hidden_taps is None
    assert not target.can_tap((0,))
    ((logits, context),) = run(target, [[TEXT]])
    assert context is None
    assert mx.array_equal(logits, model(mx.array([TEXT]))).item()
    for kind in (ContextKind.PRE_NORM, ContextKind.POST_NORM, ContextKind.TAPS):
        state = target.new_state()
        state.begin_round(2)
        with pytest.raises(TargetLacksError, match="hidden_taps"):
            target.forward(mx.array([TEXT[:2]]), state, kind, (0,))


@pytest.mark.parametrize(
    "output",
    [
        lambda ids: mx.zeros((1, VOCABULARY)),
        lambda ids: mx.zeros((1, 2)),
        lambda ids: mx.zeros((2, 1, VOCABULARY)),
        lambda ids: (mx.zeros((1, 2, 4)), None),
    ],
)
def test_a_model_that_does_not_give_logits_is_refused_by_name(output: Any) -> None:
    class Odd(Outer):
        def __call__(self, ids: mx.array, cache: Any = None) -> Any:
            return output(ids)

    with pytest.raises(UnsupportedModelError, match=r"logits \[batch, length, vocabulary\]") as e:
        MlxLmTarget(Odd(Inner(8, 8, 8)))
    assert "test_mlx_lm_target" in str(e.value)
    assert "\n" not in str(e.value)


# States.


def test_each_target_gets_the_state_that_its_caches_and_its_code_allow(
    request: pytest.FixtureRequest, target: MlxLmTarget
) -> None:
    name = request.node.callspec.params["target"]
    state = target.new_state()
    assert isinstance(state, RaggedState)
    assert state.lengths == (0,)
    assert target.no_speculation_reason is None
    assert target.together is (Together.EQUAL if name == "gemma2" else Together.ANY)
    recurrent = [c for c in make_prompt_cache(target.model) if isinstance(c, ArraysCache)]
    assert len(target.recurrence.units) == len(recurrent)
    assert bool(recurrent) == (name in {"demo-qwen3_5", HYBRID})


def test_a_model_that_spreads_the_mask_over_its_heads_is_given_rows_of_equal_length() -> None:
    # gemma2 adds an axis to the scores but not to the mask: rows would read each other's mask.
    model = tiny_model("gemma2")
    target = MlxLmTarget(model)
    same = logits_check(model)
    texts = TEXT, OTHER, TEXT[::-1], OTHER[::-1]
    want = [alone(model, text) for text in texts]
    state = target.new_state()
    run(target, [[TEXT[:4]]], state=state)
    others = [target.new_state() for _ in range(3)]
    for other, text, length in zip(others, texts[1:], (2, 2, 4), strict=True):
        run(target, [[text[:length]]], state=other)
    state.prepare_append(others).commit()
    batches = []
    for kept in ([1, 1, 1, 1], [0, 2, 2, 1], [1, 1, 0, 0], [1, 0, 1, 2]):
        batches.append(sorted(list(rows) for _, rows in state.row_caches))
        assert sorted(row for rows in batches[-1] for row in rows) == [0, 1, 2, 3]
        lengths = state.lengths
        windows = [text[n : n + 2] for text, n in zip(texts, lengths, strict=True)]
        state.begin_round(2)
        window = target.forward(mx.array(windows), state, ContextKind.POST_NORM)
        state.rollback(kept)
        port = target.hidden_taps
        assert port is not None
        assert window.context is not None
        same(port.logits(window.context), window.logits)  # in the same order
        for row, (n, keep) in enumerate(zip(lengths, kept, strict=True)):
            for position in range(keep):
                same(window.logits[row, position], want[row][n + position])
    assert state.lengths == (7, 6, 6, 8)
    # By the lengths 4 2 2 4, then 5 3 3 5, 5 5 5 6 and 6 6 5 6; equal by chance is not enough.
    pairs, three, alone_all = [[0, 3], [1, 2]], [[0], [1, 2], [3]], [[0], [1], [2], [3]]
    assert batches == [pairs, pairs, three, alone_all]
    # Without a second set of key heads there is no such axis, and ragged rows are fine.
    plain = build_model("gemma2", num_key_value_heads=4)
    assert MlxLmTarget(plain).together is Together.ANY


class Placed(Outer):
    """A model whose logits depend on the position of each token, and on nothing else before it.

    What a mistaken model would do is in ``offsets`` and ``odd``.
    """

    def __init__(self) -> None:
        super().__init__(Inner(8, 8, 8))

    def __call__(self, ids: mx.array, cache: Any = None) -> Any:
        offset = 0 if cache is None else self.offsets(cache[0].offset)
        start = mx.array(offset).reshape(-1, 1)
        places = (start + mx.arange(ids.shape[1])) * 7 % VOCABULARY
        logits = super().__call__(ids, cache) + self.model.embed_tokens.as_linear(
            self.model.embed_tokens(places)
        )
        return self.odd(logits, cache is not None and bool(mx.any(start > 0).item()))

    def offsets(self, offset: Any) -> Any:
        return offset

    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        return logits


class NeedsAnInt(Placed):
    def offsets(self, offset: Any) -> Any:
        if isinstance(offset, mx.array):
            raise TypeError("an int, please")
        return offset


class TakesTheFirst(Placed):
    def offsets(self, offset: Any) -> Any:
        return offset[0] if isinstance(offset, mx.array) else offset


class MixesRows(Placed):
    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        return logits + logits[:1]


class OneRowAlone(Placed):
    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        if logits.shape[0] > 1:
            raise ValueError("one row, please")
        return logits


class DropsRows(Placed):
    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        return logits[:4]


class CountsItsWindow(Placed):
    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        return logits + mx.arange(VOCABULARY) % logits.shape[1] if warm else logits


class NoWindows(Placed):
    def odd(self, logits: mx.array, warm: bool) -> mx.array:
        if warm and logits.shape[1] > 1:
            raise IndexError("one position, please")
        return logits


class NoRecurrentWindows(NoWindows):
    """The same beside a recurrent layer, whose update is looked for when a model is bound."""

    def make_cache(self) -> list[Any]:
        return [KVCache(), KVCache(), ArraysCache(1)]

    def __call__(self, ids: mx.array, cache: Any = None) -> Any:
        if cache is not None:
            cache[2][0] = mx.array([[0.0]] * ids.shape[0])
        return super().__call__(ids, cache)


class OwnKind(Placed):
    class Held(KVCache):  # type: ignore[misc]
        pass

    def make_cache(self) -> list[Any]:
        return [KVCache(), self.Held()]


FOUND: dict[type[Placed], tuple[Together, str | None]] = {
    Placed: (Together.ANY, None),
    NeedsAnInt: (Together.EQUAL, None),
    TakesTheFirst: (Together.EQUAL, None),  # no error tells of it
    MixesRows: (Together.ALONE, None),  # nor here
    OneRowAlone: (Together.ALONE, None),
    DropsRows: (Together.ALONE, None),  # nor here, with two rows
    CountsItsWindow: (Together.ALONE, "other logits for a window than for its positions"),
    NoWindows: (Together.ALONE, r"cannot take windows \(IndexError\)"),
    NoRecurrentWindows: (Together.ALONE, r"cannot take windows \(IndexError\)"),
    OwnKind: (Together.ALONE, "no row form for cache type Held"),
}
"""What can go through such a model in one call, and why its rows are native where they are."""


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_what_a_model_can_take_in_one_call_is_found_by_trying(kind: type[Placed]) -> None:
    together, why = FOUND[kind]
    mx.random.seed(3)
    model = kind()
    seed = random_state()
    target = MlxLmTarget(model)
    assert random_state() == seed
    assert target.together is together
    with mock.patch.object(fit, "_try") as tried_again:
        assert MlxLmTarget(model).together is together
    assert not tried_again.called, "a model is tried once"
    state, other = target.new_state(), target.new_state()
    kind_of_state = {True: RaggedState, False: NativeState}[why is None]
    assert {type(state), type(other)} == {kind_of_state}
    assert state.reason == target.no_speculation_reason
    if why is not None:
        assert re.search(why, str(state.reason))
        assert "\n" not in str(state.reason)
    texts = TEXT, OTHER
    want = [alone(model, text) for text in texts]
    for each, text, length in zip((state, other), texts, (3, 2), strict=True):
        for token in text[:length]:
            run(target, [[[token]]], state=each)
    state.prepare_append([other]).commit()
    for step in range(3):
        ((logits, _),) = run(target, [[TEXT[3 + step :][:1], OTHER[2 + step :][:1]]], state=state)
        assert mx.allclose(logits[0, 0], want[0][3 + step], atol=1e-4).item()
        assert mx.allclose(logits[1, 0], want[1][2 + step], atol=1e-4).item()


def test_what_was_found_of_a_model_is_forgotten_with_it() -> None:
    # Another model may come to stand at the same address.
    model = OneRowAlone()
    MlxLmTarget(model)
    address = id(model)
    assert address in fit._known
    del model
    gc.collect()
    assert address not in fit._known


def test_a_state_continues_the_callers_caches() -> None:
    for name in ("qwen3", HYBRID, WINDOWED, "gemma2"):
        target = MlxLmTarget(tiny_model(name))
        want, _ = run(target, [[TEXT[:4]], [TEXT[4:5]]])[1]
        caches = make_prompt_cache(target.model)
        mx.eval(target.model(mx.array([TEXT[:4]]), cache=caches))
        state = target.state_of(caches)
        assert state.lengths == (4,)
        assert isinstance(state, RaggedState)
        ((logits, _),) = run(target, [[TEXT[4:5]]], state=state)
        assert mx.array_equal(logits, want).item()


def test_caches_that_do_not_fit_the_model_are_refused() -> None:
    target = MlxLmTarget(tiny_model("qwen3"))
    for count in (0, 1, 3):
        with pytest.raises(OptionError, match=f"{count} entries.* needs 2") as raised:
            target.state_of([KVCache() for _ in range(count)])
        assert "make_prompt_cache" in str(raised.value)
        assert "\n" not in str(raised.value)
    apart = [KVCache(), KVCache()]
    apart[0].offset, apart[1].offset = 3, 5
    with pytest.raises(OptionError, match=r"\[3, 5\]") as raised:
        target.state_of(apart)
    assert "trim_prompt_cache" in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_layers_that_never_write_their_cache_do_not_stand_anywhere() -> None:
    """Of a model with layers without attention, whose caches stay where they were."""
    bound = MlxLmTarget(build("nemotron-nas"))
    state = bound.new_state()
    state.begin_round(3)
    bound.forward(mx.array([[1, 2, 3]], mx.int32), state)
    state.commit_round()
    caches = state.extract_row(0)
    assert {cache.offset for cache in caches} == {0, 3}  # else this test shows nothing
    assert bound.state_of(caches).lengths == (3,)
    caches[0 if caches[0].offset else 1].trim(1)
    with pytest.raises(OptionError, match=r"different positions \(\[2, 3\]\)"):
        bound.state_of(caches)


def test_a_model_whose_kernels_this_machine_lacks_is_refused_in_one_line() -> None:
    """Experts in 16 bits, which MLX does not compute on a CPU: that is seen when it evaluates."""
    model = build("qwen3_moe")
    model.set_dtype(mx.bfloat16)
    try:
        mx.eval(model(mx.array([[1, 2, 3]])))
    except RuntimeError:
        with pytest.raises(UnsupportedModelError, match=r"it does not run on this machine$") as got:
            MlxLmTarget(model)
        assert "\n" not in str(got.value)
    else:
        assert MlxLmTarget(model).no_speculation_reason is None
