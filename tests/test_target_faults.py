"""Faults of targets and their state that a review has found, one by one."""

from __future__ import annotations

import gc
import itertools
import random
import types
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from adversary import alone, planted, text_alone
from architectures import build
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from row_oracle import Full, RowPrograms
from scripted import Script, ScriptedProvider, drain, request
from tiny_models import VOCABULARY, build_model

from specdec import VerifyGroup
from specdec.check import check_model
from specdec.errors import GroupFailedError, OptionError, UnsupportedModelError
from specdec.state import CacheOptions, RaggedState, Together
from specdec.state.batch import layers_of
from specdec.state.recurrent import RecurrentRows
from specdec.targets import MlxLmTarget, fit
from specdec.targets.fit import fit_of
from specdec.targets.recurrent.calls import RecordedCall
from specdec.targets.recurrent.units import Unit, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT = tuple((7 * place + 3) % 60 for place in range(11))

# Layers that somebody replaces after the model was bound.


@pytest.mark.parametrize("bind", ["the old binding", "a new binding"])
@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_layers_that_were_replaced_after_a_model_was_bound_are_rolled_back(
    name: str, bind: str
) -> None:
    model, other = build(name, 0), build(name, 1)
    bound = MlxLmTarget(model)
    before = alone(model, PROMPT, 24)
    for place, layer in enumerate(other.layers):
        model.layers[place] = layer
    if bind == "a new binding":
        bound = MlxLmTarget(model)
    text = text_alone(model, PROMPT, 24)
    assert text.output != before, "other layers write another text"
    provider = ScriptedProvider(Script([text], [[planted(4, 2), planted(2, 1), planted(4, None)]]))
    group = VerifyGroup(bound, provider)
    [row] = group.admit([request(PROMPT, max_tokens=24, num_draft_tokens=4)])
    drain(group)
    assert row.emitted == text.output
    assert 0 < row.stats.accepted < row.stats.drafted
    assert provider.complaints == []


# Rows whose keys are quantized on the way.

READ = 3  # prompt tokens that are read as a chunk
QUANTIZED = build_model("qwen3", head_dim=32)


@pytest.fixture(scope="module")
def quantized() -> MlxLmTarget:
    return MlxLmTarget(QUANTIZED)


def logits_alone(tokens: Sequence[int], start: int) -> mx.array:
    """Logits ``[positions, V]`` of mlx-lm, which quantizes its caches where they are due."""
    caches, logits = make_prompt_cache(QUANTIZED), []
    for first, end in ((0, READ), *itertools.pairwise(range(READ, len(tokens) + 1))):
        logits.append(QUANTIZED(mx.array([tokens[first:end]]), cache=caches)[0])
        maybe_quantize_kv_cache(caches, start, 32, 2)
    return mx.concatenate(logits)


@pytest.mark.parametrize("start", range(10, 15))
def test_extraction_where_a_row_is_quantized_leaves_the_row_as_it_was(
    start: int, quantized: MlxLmTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CacheOptions(kv_bits=2, kv_group_size=32, quantized_kv_start=start)
    group = VerifyGroup(quantized)
    [row] = group.admit([request((5, 9, 40, 3), max_tokens=60, cache_options=options)])
    for _ in range(8):
        with group.round() as done:
            done.deliver_all()
    caches, read = group.extract(row)
    due = len(read) >= start
    assert [type(cache) for cache in caches] == [QuantizedKVCache if due else KVCache] * 2
    assert len(read) == 12, "the third place is where it is quantized"
    logits = []
    forward = quantized.forward

    def heard(*args: Any) -> Any:
        window = forward(*args)
        logits.append(window.logits[0])
        return window

    monkeypatch.setattr(quantized, "forward", heard)
    group.consume([[7, 8]])
    tokens = row.tokens[:-1]  # the last one is not read yet
    assert row.tokens[-2:] == [7, 8]
    got = mx.concatenate(logits)
    want = logits_alone(tokens, start)[len(tokens) - len(got) :]
    assert mx.allclose(got, want, rtol=0, atol=1e-3).item()
    # And that would be seen: a position that is read with other keys gives other logits.
    other = logits_alone(tokens, 0)[len(tokens) - len(got) :]
    assert not mx.allclose(got, other, rtol=0, atol=0.1).item()


@pytest.mark.parametrize(
    "options",
    [
        CacheOptions(max_kv_size=17),
        CacheOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=0),
        CacheOptions(kv_bits=2, kv_group_size=32, quantized_kv_start=24),  # of about 37 tokens
    ],
    ids=["max_kv_size", "kv_bits", "kv_bits from a place in what is read again"],
)
def test_a_row_that_is_read_again_after_a_failure_goes_on_with_its_text(
    options: CacheOptions, quantized: MlxLmTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(1)
    prompts = [tuple(drawn.randrange(VOCABULARY) for _ in range(12)) for _ in range(20)]
    group = VerifyGroup(quantized)
    asked = [request(prompt, max_tokens=48, cache_options=options) for prompt in prompts]
    rows = group.admit(asked)
    for _ in range(25):
        with group.round() as done:
            done.deliver_all()

    def broken(*_: Any) -> None:
        raise RuntimeError("the model failed")

    with monkeypatch.context() as patch:
        patch.setattr(quantized, "forward", broken)
        with pytest.raises(GroupFailedError):
            drain(group)
    assert all(20 < len(row.emitted) < 30 for row in rows)
    again = VerifyGroup(quantized)
    readings = [again.read(row) for row in rows]
    for reading in readings:
        while not reading.done:
            reading.step()
    again.join(readings)
    drain(again)
    kept = asdict(options)
    for row, prompt in zip(rows, prompts, strict=True):
        want = alone(QUANTIZED, prompt, 48, **kept)
        assert row.emitted == want


# Rows of a model that takes rows of equal length alone.


class Equal:
    """Rows of plain attention; every window is checked against plain lists."""

    def __init__(self, *lengths: int) -> None:
        self.programs = RowPrograms([Full()], lambda: [KVCache()], Together.EQUAL)
        self.state, *others = [self.programs.cold() for _ in lengths]
        self.rows = [
            self.programs.read(state, [], length)
            for state, length in zip([self.state, *others], lengths, strict=True)
        ]
        if others:
            self.state.prepare_append(others).commit()

    def round(self, width: int, kept: Sequence[int]) -> None:
        self.rows = self.programs.round(self.state, self.rows, width, kept)

    @property
    def spread(self) -> list[list[int]]:
        return [list(rows) for _, rows in self.state.batches]


def test_rows_that_agree_by_chance_after_a_wide_window_stay_in_their_batches() -> None:
    rows = Equal(4, 6)
    batches = [batch for batch, _ in rows.state.batches]
    rows.round(4, [4, 2])
    assert rows.state.lengths == (8, 8)
    assert [batch for batch, _ in rows.state.batches] == batches
    rows.round(3, [3, 1])
    rows.round(3, [1, 3])
    assert [batch for batch, _ in rows.state.batches] == batches, "nothing was copied"
    rows.round(1, [1, 1])
    assert rows.spread == [[0, 1]], "they go on alike now"
    rows.round(3, [2, 2])
    assert rows.spread == [[0, 1]]
    rows.round(3, [2, 1])
    assert rows.spread == [[0], [1]]


def test_rows_that_agree_by_chance_move_together_when_a_row_joins() -> None:
    rows, other = Equal(4, 6), Equal(5)
    rows.round(4, [4, 2])
    assert rows.spread == [[0], [1]]
    rows.state.prepare_append([other.state]).commit()
    rows.rows += other.rows
    assert rows.spread == [[0, 1], [2]]
    rows.round(4, [2, 2, 3])
    assert rows.spread == [[0, 1], [2]]
    assert rows.state.lengths == (10, 10, 8)


def test_rows_of_every_batch_part_when_their_lengths_do() -> None:
    rows = Equal(4, 6, 6)
    assert rows.spread == [[0], [1, 2]]
    rows.round(4, [3, 0, 2])
    assert rows.spread == [[0], [1], [2]]
    rows.round(1, [1, 1, 1])
    assert rows.spread == [[0], [1], [2]]


@settings(max_examples=40)
@given(data=st.data())
def test_batches_hold_rows_of_one_length_and_meet_in_windows_of_one(data: st.DataObject) -> None:
    rows = Equal(*data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    for width in data.draw(st.lists(st.sampled_from([1, 2, 3]), max_size=6)):
        before = dict(zip(map(tuple, rows.spread), rows.state.batches, strict=True))
        count = len(rows.rows)
        kept = data.draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
        rows.round(width, kept)
        spread, lengths = rows.spread, rows.state.lengths
        assert sorted(row for batch in spread for row in batch) == list(range(count))
        held = [{lengths[row] for row in batch} for batch in spread]
        assert all(len(each) == 1 for each in held)
        if width == 1:
            assert len(held) == len({*lengths}), "rows of one length are together"
            continue
        for batch, (held_before, _) in before.items():
            ends = {lengths[row] for row in batch}
            parts = [each for each in spread if {*each} & {*batch}]
            assert len(parts) == len(ends), "a batch parts into as many as there are lengths"
            assert {row for part in parts for row in part} == {*batch}, "and takes nobody in"
            if len(ends) == 1:
                assert any(now is held_before for now, _ in rows.state.batches)


def test_a_state_without_rows_takes_no_bytes() -> None:
    rows = Equal(4, 6)
    assert rows.state.bytes_at(100) > 0
    rows.state.filter_rows([])
    assert rows.state.row_count == 0
    assert rows.state.bytes_at(100) == 0


# What is no option.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"),
            ([], [4], [64], {}, 4.0, 64.0, True, False, "64", float("nan")),
        ),
        ("kv_group_size", None),
        ("quantized_kv_start", None),
    ],
)
def test_cache_options_take_whole_numbers_alone(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(OptionError, match=f"{name} is ") as caught:
        CacheOptions(**options)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)
    whole: dict[str, Any] = {"max_kv_size": 64, "kv_bits": 4, "kv_group_size": 64}
    assert CacheOptions(**whole).kv_bits == 4


# Stand-ins.


class Interrupted(list[Any]):
    """Modules; each number in ``at`` is a write that is interrupted, before or after it is done."""

    def __init__(self, modules: Sequence[Any], at: Sequence[int], *, done: bool) -> None:
        super().__init__(modules)
        self.at, self.done, self.writes = at, done, 0

    def __setitem__(self, place: Any, value: Any) -> None:
        self.writes += 1
        if self.writes not in self.at:
            super().__setitem__(place, value)
            return
        if self.done:
            super().__setitem__(place, value)
        raise KeyboardInterrupt


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("at", [*([n] for n in range(1, 7)), [4, 5], [4, 5, 6, 7], [6, 7]])
def test_an_interrupt_while_stand_ins_are_put_back_leaves_none_in_the_model(
    at: list[int], done: bool
) -> None:
    modules = [types.SimpleNamespace(name=name) for name in "abc"]
    holder = Interrupted(modules, at, done=done)
    places = [(Unit(holder, n, module), f"for {n}") for n, module in enumerate(modules)]
    with pytest.raises(KeyboardInterrupt), replaced(places):
        assert list(holder) == ["for 0", "for 1", "for 2"]
    assert list(holder) == modules
    assert holder.writes >= max(at)


def test_an_error_inside_is_not_hidden_and_what_somebody_else_put_there_stays() -> None:
    holder = ["mine", "a"]
    places = [(Unit(holder, 0, "theirs"), "stand-in"), (Unit(holder, 1, "a"), "stand-in")]
    seen = []

    def fail() -> None:
        with replaced(places):
            seen.extend(holder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == ["mine", "stand-in"]
    assert holder == ["mine", "a"]


# Models that cannot be driven, and models that change.


class Uncallable(Module):
    def __call__(self, *_: Any, **__: Any) -> mx.array:
        raise RuntimeError("[metal] no such kernel:\nline 2")


def test_a_model_that_cannot_be_called_is_refused_in_one_line() -> None:
    model = Uncallable()  # type: ignore[no-untyped-call]  # mlx's own
    for bind in (MlxLmTarget, lambda each: check_model(each, None)):
        with pytest.raises(UnsupportedModelError, match="calling the model raised") as caught:
            bind(model)
        assert "no such kernel" in str(caught.value)
        assert "\n" not in str(caught.value)


class OneLength(Module):
    """Attention whose code takes the offset of a cache for one number."""

    def __init__(self, inner: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # mlx's own
        self.inner = inner

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if cache is not None and not isinstance(cache.offset, int):
            raise TypeError("an offset is a number")
        return self.inner(x, mask, cache)


def test_a_model_whose_modules_were_replaced_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[Any] = []
    real = fit._try

    def heard(*args: Any) -> Any:
        tries.append(args)
        return real(*args)

    monkeypatch.setattr(fit, "_try", heard)
    model = build_model("qwen3")
    own = [layer.self_attn for layer in model.layers]
    assert MlxLmTarget(model).together is Together.ANY
    assert MlxLmTarget(model).together is Together.ANY
    assert len(tries) == 1, "once, however often it is bound"
    for layer, attention in zip(model.layers, own, strict=True):
        layer.self_attn = OneLength(attention)
    assert fit_of(model, VOCABULARY).together is Together.EQUAL
    assert MlxLmTarget(model).together is Together.EQUAL
    assert len(tries) == 2
    for layer, attention in zip(model.layers, own, strict=True):
        layer.self_attn = attention
    assert MlxLmTarget(model).together is Together.ANY
    assert len(tries) == 3


# What is held between rounds.


def arrays_of(thing: Any, known: set[int]) -> Iterator[mx.array]:
    """Every array that something leads to, but for ``known`` things."""
    if id(thing) in known or isinstance(thing, type | types.ModuleType | types.FunctionType):
        return
    known.add(id(thing))
    if isinstance(thing, mx.array):
        yield thing
        return
    for part in gc.get_referents(thing):
        yield from arrays_of(part, known)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "rwkv7", "mamba2", "mamba"])
@pytest.mark.parametrize("kept", [(2, 2), (1, 3), (0, 4), (4, 4)])
def test_recurrent_rows_hold_nothing_of_a_window_between_rounds(
    name: str, kept: tuple[int, int]
) -> None:
    model = build(name)
    bound = MlxLmTarget(model)
    state, other = bound.new_state(), bound.new_state()
    for each in (state, other):
        each.begin_round(5, reading=True)
        bound.forward(mx.array([PROMPT[:5]]), each)
        each.commit_round()
    state.prepare_append([other]).commit()
    assert isinstance(state, RaggedState)
    state.begin_round(4)
    bound.forward(mx.array([PROMPT[:4], PROMPT[4:8]]), state)
    layers = [each for caches, _ in state.row_caches for each in layers_of(caches, RecurrentRows)]
    assert layers
    apart = [id(layer._positions) for layer in layers]
    told = [array for layer in layers for array in arrays_of(layer, {*apart})]
    assert sum(a.nbytes for a in told) > sum(layer.nbytes for layer in layers), "it holds more now"
    state.rollback(kept)
    mx.eval(state.arrays())
    for caches, _ in state.row_caches:
        for layer in layers_of(caches, RecurrentRows):
            held = {id(array) for array in layer.arrays()}
            assert {id(a) for a in arrays_of(layer, {id(layer._positions)})} == held
    weights = {id(model), *(id(module) for module in model.modules())}
    assert not list(arrays_of(bound.recurrence, weights)), "nor does who records"
    gc.collect()
    calls = [each for each in gc.get_objects() if type(each) is RecordedCall]
    assert not [call for call in calls if any(call.rows is layer for layer in layers)]
