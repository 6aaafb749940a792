"""Rows of attention K/V: each row is what it would be alone, whatever its neighbours do."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model
from tiny_models import ATTENTION, VOCABULARY, alone, logits_check, tiny_model
from tokenizers import Tokenizer

import specdec_demo
from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError, RowIndexError
from specdec.state import NativeState, RaggedState, row_state, types_without_row_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from specdec.state import RowState

LAYERS, HEADS, KEY, VALUE = 2, 2, 3, 1
NUMBERS = itertools.count()
"""Every value that any test appends is a number of its own, exact in float32."""

Entry = tuple[tuple[float, ...], ...]
"""One position as numbers, first by layer: keys of each head, then values."""


def fresh(rows: int, width: int) -> tuple[list[tuple[mx.array, mx.array]], list[list[Entry]]]:
    """New keys and values of a window per layer, and the same as ``[row][position]`` entries."""
    windows, parts = [], []
    for _ in range(LAYERS):
        count = rows * HEADS * width * (KEY + VALUE)
        block = np.fromiter(itertools.islice(NUMBERS, count), np.float32, count) % 2**24
        block = block.reshape(rows, HEADS, width, KEY + VALUE)
        windows.append((mx.array(block[..., :KEY]), mx.array(block[..., KEY:])))
        parts.append(block)
    return windows, entries(parts)


def entries(layers: Sequence[np.ndarray[Any, Any]]) -> list[list[Entry]]:
    rows, _, width, _ = layers[0].shape
    return [
        [tuple(tuple(layer[b, :, i].ravel().tolist()) for layer in layers) for i in range(width)]
        for b in range(rows)
    ]


def held(pairs: Sequence[tuple[mx.array | None, mx.array | None]]) -> list[list[Entry]]:
    """Keys and values of every layer as ``[row][position]`` entries."""
    layers = []
    for keys, values in pairs:
        assert keys is not None
        assert values is not None
        layers.append(np.concatenate([np.array(keys), np.array(values)], axis=-1))
    return entries(layers)


def of_cache(caches: Sequence[KVCache], length: int) -> list[Entry]:
    assert [c.offset for c in caches] == [length] * len(caches)
    if length == 0:
        return []
    return held([(c.keys[..., :length, :], c.values[..., :length, :]) for c in caches])[0]


def layers(state: RowState) -> list[Any]:
    """What a model is given for the rows of a state that are one batch, as rows of K/V always are.

    Asked anew after every verb that changes the rows: they may be in another batch then.
    """
    ((caches, rows),) = state.row_caches
    assert list(rows) == list(range(state.row_count))
    return caches


def check_rows(state: RaggedState, rows: list[list[Entry]]) -> None:
    assert state.row_count == len(rows)
    assert state.lengths == tuple(map(len, rows))
    assert state.open_width == 0
    if not rows:
        assert list(state.row_caches) == []
        assert state.arrays() == []
        return
    longest = max(map(len, rows))
    assert [layer.size() for layer in layers(state)] == [longest] * LAYERS
    if longest:
        found = held([layer.state for layer in layers(state)])
        assert [row[: len(want)] for row, want in zip(found, rows, strict=True)] == rows


def run_window(
    state: RaggedState, rows: list[list[Entry]], width: int, kept: Sequence[int] | None
) -> list[list[Entry]]:
    """One round as a model runs it, checked on the way; returns the rows afterwards."""
    windows, added = fresh(len(rows), width)
    lengths = [len(row) for row in rows]
    state.begin_round(width)
    assert state.open_width == width
    for layer in layers(state):
        assert mx.array(layer.offset).tolist() == (
            lengths[0] if len(set(lengths)) == 1 else lengths
        )
    mask = layers(state)[0].make_mask(width, return_array=True)
    seen = []
    for layer, (keys, values) in zip(layers(state), windows, strict=True):
        seen.append(layer.update_and_fetch(keys, values))
        after = [length + width for length in lengths]
        assert mx.array(layer.offset).tolist() == (after[0] if len(set(after)) == 1 else after)
    found = held(seen)
    reach = mask.shape[-1] if isinstance(mask, mx.array) else max(lengths) + width
    for row, was, new in zip(found, rows, added, strict=True):
        assert len(row) == reach
        assert row[: len(was) + width] == was + new
    state.commit_round() if kept is None else state.rollback(kept)
    grown = [width] * len(rows) if kept is None else kept
    return [was + new[:k] for was, new, k in zip(rows, added, grown, strict=True)]


def backend(*, plans: bool) -> AbstractContextManager[object]:
    """A backend that does or does not build attention plans by key shape (state/kernels.py)."""
    return mock.patch("specdec.state.positions.plans_by_shape", return_value=plans)


@pytest.fixture(autouse=True, scope="module")
def _without_plans() -> Iterator[None]:
    with backend(plans=False):
        yield


def cold() -> RaggedState:
    return RaggedState([KVCache() for _ in range(LAYERS)])


def joined(states: Sequence[RaggedState]) -> RaggedState:
    states[0].prepare_append(states[1:]).commit()
    return states[0]


def ragged(*lengths: int) -> tuple[RaggedState, list[list[Entry]]]:
    """A state of rows of these lengths."""
    states, rows = [], []
    for length in lengths:
        state = cold()
        rows += run_window(state, [[]], length, None) if length else [[]]
        states.append(state)
    return joined(states), rows


widths = st.sampled_from([1, 2, 3, 5, 5, 5, 60, 130, 255, 256, 257, 300])


@settings(max_examples=300)
@given(st.data())
def test_every_row_equals_a_list_of_its_own_through_any_program(data: st.DataObject) -> None:
    with backend(plans=data.draw(st.booleans(), label="plans")):
        run_program(data)


def run_program(data: st.DataObject) -> None:
    state, rows = ragged(*data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    independent: list[tuple[list[KVCache], list[Entry]]] = []
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        count = len(rows)
        verb = data.draw(
            st.sampled_from(["window", "window", "window", "filter", "join", "extract", "write"])
        )
        if verb == "window" and count:
            width = data.draw(widths, label="width")
            counts = st.lists(st.integers(0, width), min_size=count, max_size=count)
            rows = run_window(state, rows, width, data.draw(st.none() | counts, label="kept"))
        elif verb == "filter":
            order = data.draw(st.permutations(range(count)))
            keep = order[: data.draw(st.integers(0, count))]
            state.filter_rows(keep)
            rows = [rows[k] for k in keep]
        elif verb == "join":
            others, more = [], []
            for _ in range(data.draw(st.integers(0, 2), label="states")):
                other, its = ragged(
                    *data.draw(st.lists(widths | st.just(0), min_size=1, max_size=2))
                )
                if data.draw(st.integers(0, 4), label="drained") == 0:
                    other.filter_rows([])
                    its = []
                others.append(other)
                more += its
            change = state.prepare_append(others)
            check_rows(state, rows)
            if data.draw(st.booleans(), label="commit"):
                change.commit()
                rows = rows + more
            else:
                change.discard()
            change.commit()
            change.discard()
        elif verb == "extract" and count:
            row = data.draw(st.integers(0, count - 1), label="row")
            independent.append((state.extract_row(row), rows[row]))
        elif verb == "write" and count:
            # The caller goes on with mlx-lm's own code, and may come back.
            row = data.draw(st.integers(0, count - 1), label="row")
            mine = [KVCache() for _ in range(LAYERS)]
            state.write_back(row, mine)
            assert of_cache(mine, len(rows[row])) == rows[row]
            windows, added = fresh(1, data.draw(widths, label="native width"))
            for cache, (keys, values) in zip(mine, windows, strict=True):
                cache.update_and_fetch(keys, values)
            moved = rows[row] + added[0]
            assert of_cache(mine, len(moved)) == moved
            if count == 1:
                state, rows = RaggedState(mine), [moved]
            else:
                independent.append((mine, moved))
        check_rows(state, rows)
    for caches, was in independent:
        assert of_cache(caches, len(was)) == was


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
)
def test_the_mask_a_model_asks_for_covers_what_it_then_gets(
    lengths: list[int], width: int, window: int, plans: bool
) -> None:
    with backend(plans=plans):
        state, rows = ragged(*lengths)
    state.begin_round(width)
    layer = layers(state)[0]
    mask = layer.make_mask(width, return_array=True, window_size=window)
    assert isinstance(mask, mx.array)
    windows, added = fresh(len(rows), width)
    keys, _ = layer.update_and_fetch(*windows[0])
    shape = (len(rows), 1, width, keys.shape[2])
    visible = np.array(mx.broadcast_to(mask if mask.ndim == 4 else mask[None, None], shape)[:, 0])
    found = np.array(keys)
    for row, (was, new) in enumerate(zip(rows, added, strict=True)):
        for query in range(width):
            own = (was + new)[: len(was) + query + 1][-window:]
            seen = [found[row, :, k, :] for k, shows in enumerate(visible[row][query]) if shows]
            assert len(seen) == len(own)
            for got, entry in zip(seen, own, strict=True):
                want = np.array(entry[0]).reshape(HEADS, KEY + VALUE)[:, :KEY]
                assert got.tolist() == want.tolist()


def test_a_cold_state_holds_nothing() -> None:
    state = cold()
    assert state.arrays() == []
    assert state.nbytes == 0
    assert state.can_roll_back
    assert state.reason is None
    for layer in layers(state):
        assert layer.empty()
        assert layer.offset == 0
        assert layer.state == (None, None)
    state.begin_round(2)
    layers(state)[0].update_and_fetch(*fresh(1, 2)[0][0])
    assert not layers(state)[0].empty()
    assert state.nbytes == layers(state)[0].nbytes == 256 * HEADS * (KEY + VALUE) * 4


def test_a_row_without_positions_goes_back_as_a_cold_cache() -> None:
    state, _ = ragged(4, 0)
    mine = [KVCache() for _ in range(LAYERS)]
    state.write_back(1, mine)
    for cache in (*mine, *state.extract_row(1)):
        assert cache.offset == 0
        assert cache.empty()


@pytest.mark.parametrize("plans", [False, True])
def test_a_buffer_of_an_exact_length_grows_before_it_is_read_further(plans: bool) -> None:
    with backend(plans=plans):
        state, rows = ragged(300, 270)
        taken = [RaggedState(state.extract_row(row)) for row in (0, 1)]
        joint = joined(taken)
        assert layers(joint)[0].keys.shape[2] == 300
        joint.filter_rows([1])
        check_rows(joint, run_window(joint, rows[1:], 5, [3]))


@pytest.mark.parametrize("again", [[], [0], [2]])
def test_a_drained_state_takes_rows_again(again: list[int]) -> None:
    state, _ = ragged(3, 4)
    state.filter_rows([])
    check_rows(state, [])
    ends: list[Callable[[], None]] = [state.commit_round, lambda: state.rollback([])]
    for end in ends:  # an empty round is a round
        state.begin_round(2)
        assert state.open_width == 2
        end()
        check_rows(state, [])
    others = [ragged(n) for n in again]
    state.prepare_append([other for other, _ in others]).commit()
    rows = [row for _, its in others for row in its]
    check_rows(state, rows)
    if rows:
        check_rows(state, run_window(state, rows, 3, [1]))


def test_two_drained_states_make_a_drained_state() -> None:
    state, _ = ragged(3)
    other, _ = ragged(4)
    state.filter_rows([])
    other.filter_rows([])
    state.prepare_append([other]).commit()
    check_rows(state, [])


# Errors.


def snapshot(state: RaggedState) -> tuple[object, ...]:
    return (state.lengths, state.open_width, *map(id, state.arrays()))


@pytest.mark.parametrize("kept", [[0, 4, 0], [-1, 0, 0], [1, 1], [1, 1, 1, 1]])
def test_a_rollback_outside_the_window_is_refused_and_changes_nothing(kept: list[int]) -> None:
    state, rows = ragged(3, 5, 2)
    state.begin_round(3)
    windows, added = fresh(3, 3)
    for layer, window in zip(layers(state), windows, strict=True):
        layer.update_and_fetch(*window)
    before = snapshot(state)
    with pytest.raises(RollbackError):
        state.rollback(kept)
    assert snapshot(state) == before
    state.rollback([0, 3, 1])
    check_rows(state, [rows[0], rows[1] + added[1], rows[2] + added[2][:1]])


def test_verbs_between_rounds_are_refused_inside_one() -> None:
    state, _ = ragged(3, 5)
    other, _ = ragged(1)
    state.begin_round(2)
    before = snapshot(state)
    verbs: list[Callable[[], object]] = [
        lambda: state.begin_round(1),
        lambda: state.filter_rows([0]),
        lambda: state.filter_rows([0, 1]),
        lambda: state.prepare_append([other]),
        lambda: other.prepare_append([state]),
        lambda: state.extract_row(0),
        lambda: state.write_back(0, [KVCache(), KVCache()]),
    ]
    for verb in verbs:
        with pytest.raises(RoundOpenError):
            verb()
        assert snapshot(state) == before


def test_the_only_row_is_not_handed_over_inside_a_round() -> None:
    state, _ = ragged(3)
    mine = [KVCache(), KVCache()]
    state.begin_round(2)
    with pytest.raises(RoundOpenError):
        state.write_back(0, mine)
    assert all(cache.empty() for cache in mine)


def test_a_round_that_was_not_begun_cannot_end() -> None:
    state, _ = ragged(3, 5)
    for verb in (state.commit_round, lambda: state.rollback([0, 0])):
        with pytest.raises(NoOpenRoundError):
            verb()
    assert state.lengths == (3, 5)


@pytest.mark.parametrize("keep", [[0, 0], [-1], [3], [0, 1, 2, 3]])
def test_a_filter_of_rows_that_are_not_there_is_refused_and_changes_nothing(
    keep: list[int],
) -> None:
    state, rows = ragged(3, 5, 2)
    before = snapshot(state)
    with pytest.raises(RowIndexError):
        state.filter_rows(keep)
    assert snapshot(state) == before
    check_rows(state, rows)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_cannot_be_taken_out(row: int) -> None:
    state, _ = ragged(3, 5)
    for verb in (state.extract_row, lambda r: state.write_back(r, [KVCache(), KVCache()])):
        with pytest.raises(RowIndexError):
            verb(row)


@pytest.mark.parametrize("row", [-1, 1])
def test_a_row_beside_the_only_one_cannot_be_taken_out(row: int) -> None:
    state, _ = ragged(3)
    with pytest.raises(RowIndexError):
        state.write_back(row, [KVCache(), KVCache()])


def test_a_window_other_than_the_one_begun_is_refused() -> None:
    state, rows = ragged(3, 5)
    with pytest.raises(RollbackError, match="begin_round"):
        layers(state)[0].update_and_fetch(*fresh(2, 1)[0][0])  # none was begun
    state.begin_round(2)
    with pytest.raises(RollbackError, match="window of 3 positions"):
        layers(state)[0].update_and_fetch(*fresh(2, 3)[0][0])
    windows, added = fresh(2, 2)
    for layer, window in zip(layers(state), windows, strict=True):
        layer.update_and_fetch(*window)
    with pytest.raises(RollbackError, match="window of 2 positions"):
        layers(state)[0].update_and_fetch(*windows[0])  # twice
    state.commit_round()
    check_rows(state, [rows[0] + added[0], rows[1] + added[1]])


def test_a_round_that_failed_in_the_middle_of_the_layers_leaves_no_trace() -> None:
    state, rows = ragged(3, 5)
    state.begin_round(2)
    layers(state)[0].update_and_fetch(*fresh(2, 2)[0][0])
    state.rollback([0, 0])
    check_rows(state, rows)
    check_rows(state, run_window(state, rows, 3, [3, 1]))


# What it costs.


@pytest.mark.parametrize("lengths", [(300,), (300, 300), (300, 7)])
def test_a_rollback_touches_no_array(lengths: tuple[int, ...]) -> None:
    state, rows = ragged(*lengths)
    state.begin_round(3)
    for layer, window in zip(layers(state), fresh(len(rows), 3)[0], strict=True):
        layer.update_and_fetch(*window)
    before = [(layer.keys, layer.values) for layer in layers(state)]
    state.rollback([1] * len(rows))
    for layer, (keys, values) in zip(layers(state), before, strict=True):
        assert layer.keys is keys
        assert layer.values is values


LONG = 60_000
SCALE = 32  # features per head: a row's keys take 7.5 MB


def long_rows(lengths: Sequence[int]) -> RaggedState:
    states = []
    for length in lengths:
        state = RaggedState([KVCache()])
        state.begin_round(length)
        zeros = mx.zeros((1, 1, length, SCALE))
        layers(state)[0].update_and_fetch(zeros, zeros)
        state.commit_round()
        states.append(state)
    state = joined(states)
    mx.eval(state.arrays())
    return state


def peak_of_a_window(state: RaggedState) -> int:
    """Bytes that are newly taken while one window is appended, read, and rolled back."""
    ones = mx.ones((state.row_count, 1, 4, SCALE))
    mx.eval(ones)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    state.begin_round(4)
    keys, values = layers(state)[0].update_and_fetch(ones, ones)
    mx.eval(state.arrays(), keys[..., -1:, :].sum(), values[..., -1:, :].sum())
    state.rollback([2] * state.row_count)
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("lengths", [(LONG,), (LONG, LONG), (LONG, LONG // 2)])
def test_an_append_copies_nothing_unless_somebody_holds_a_view(lengths: tuple[int, ...]) -> None:
    state = long_rows(lengths)
    one_buffer = state.nbytes // 2
    assert one_buffer >= LONG * SCALE * 4
    for _ in range(3):
        assert peak_of_a_window(state) < 100_000
    view, _ = layers(state)[0].state  # the measure can see a copy
    mx.eval(view)
    assert peak_of_a_window(state) >= one_buffer


def test_growth_leaves_headroom_so_that_copies_stay_rare() -> None:
    state = long_rows((2000, 1999))
    sizes = set()
    ones = mx.ones((2, 1, 20, SCALE))
    for _ in range(80):
        state.begin_round(20)
        layers(state)[0].update_and_fetch(ones, ones)
        state.rollback([19, 15])
        mx.eval(state.arrays())
        sizes.add(layers(state)[0].keys.shape[2])
    assert state.lengths == (2000 + 80 * 19, 1999 + 80 * 15)
    assert len(sizes) <= 5  # 2000 to 3520 positions: 2048, then by an eighth or more
    assert max(sizes) <= 3540 * 9 / 8 + 256


def test_an_extracted_row_does_not_keep_the_whole_buffer() -> None:
    state = long_rows((LONG, 300))
    before = mx.get_active_memory()
    kept = state.extract_row(1)
    assert mx.get_active_memory() - before < 300_000
    mx.eval(kept[0].keys, kept[0].values)
    assert kept[0].keys.shape == (1, 1, 300, SCALE)
    assert peak_of_a_window(state) < 100_000, "a held row must not stop writes in place"


def test_an_extracted_row_that_fills_its_buffer_does_not_change_with_it() -> None:
    state = RaggedState([KVCache()])
    state.begin_round(256)
    ones = mx.ones((1, 1, 256, 2))
    layers(state)[0].update_and_fetch(ones, ones)
    state.commit_round()
    kept = state.extract_row(0)  # one head and a full buffer: the slice is the buffer
    layers(state)[0].keys[..., :, :] = 7.0
    mx.eval(layers(state)[0].keys)
    assert kept[0].keys.tolist() == ones.tolist()


@pytest.mark.parametrize("plans", [False, True])
def test_windows_get_one_width_and_a_mask_to_add_only_where_a_plan_would_be_built(
    plans: bool,
) -> None:
    with backend(plans=plans):
        state, _ = ragged(3, 5)
    widths = [state.window_width(needed, 4) for needed in (1, 2, 3, 4)]
    assert widths == ([1, 4, 4, 4] if plans else [1, 2, 3, 4])
    mask = layers(state)[0].make_mask(4)
    assert isinstance(mask, mx.array)
    assert mask.dtype == (layers(state)[0].keys.dtype if plans else mx.bool_)


# Which caches have a row form.


class Special(KVCache):  # type: ignore[misc]
    """Has no row form: what a subclass changes is not known."""


class OwnRing(RotatingKVCache):  # type: ignore[misc]
    """Another."""


def test_a_type_without_a_row_form_is_named() -> None:
    plain = [KVCache(), KVCache()]
    assert types_without_row_form(plain) == []
    assert isinstance(row_state(plain), RaggedState)
    mixed = [OwnRing(16), KVCache(), Special(), OwnRing(8), QuantizedKVCache()]
    assert types_without_row_form(mixed) == ["OwnRing", "Special"]
    state = row_state(mixed)
    assert isinstance(state, NativeState)
    assert state.reason is not None
    assert "OwnRing, Special" in state.reason
    assert "\n" not in state.reason


def test_a_subclass_of_the_attention_cache_has_no_row_form_of_its_own() -> None:
    assert types_without_row_form([Special()]) == ["Special"]


def test_a_type_without_a_row_form_is_found_inside_of_lists() -> None:
    deep = CacheList(ArraysCache(1), CacheList(KVCache(), Special()))
    assert types_without_row_form([deep, Special(), OwnRing(8)]) == ["Special", "OwnRing"]
    assert isinstance(row_state([deep]), NativeState)


@pytest.mark.parametrize(
    "cache",
    [
        KVCache(),
        ConcatenateKVCache(),
        RotatingKVCache(16, keep=2),
        QuantizedKVCache(),
        ArraysCache(2),
        ChunkedKVCache(8),
        CacheList(KVCache(), ArraysCache(1)),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_every_cache_type_of_mlx_lm_has_a_row_form(cache: Any) -> None:
    assert types_without_row_form([cache]) == []
    state = row_state([cache])
    assert isinstance(state, RaggedState)
    assert state.can_roll_back
    assert type(state.extract_row(0)[0]) is type(cache)


# Whole models, run as mlx-lm wrote them.


def speculate(
    model: Any,
    texts: Sequence[Sequence[int]],
    chunks: Sequence[int],
    rounds: Sequence[tuple[int, Sequence[int]]],
) -> Iterator[tuple[int, int, mx.array]]:
    """Rows that read their text in rounds of (width, kept per row), drafts beyond ``kept`` wrong.

    Yields:
        Row, position and logits of everything that was kept.
    """
    states, done = [], []
    for row, (text, chunk) in enumerate(zip(texts, chunks, strict=True)):
        state = row_state(make_prompt_cache(model))
        assert isinstance(state, RaggedState)
        if chunk:
            state.begin_round(chunk)
            logits = model(mx.array([text[:chunk]]), cache=layers(state))
            state.commit_round()
            yield from ((row, i, logits[0, i]) for i in range(chunk))
        states.append(state)
        done.append(chunk)
    state = joined(states)
    for width, kept in rounds:
        windows = []
        for text, start, keep in zip(texts, done, kept, strict=True):
            wrong = [(token + 1) % VOCABULARY for token in text[start + keep : start + width]]
            windows.append([*text[start : start + keep], *wrong])
        state.begin_round(width)
        logits = model(mx.array(windows), cache=layers(state))
        mx.eval(logits)
        state.rollback(kept)
        for row, keep in enumerate(kept):
            yield from ((row, done[row] + i, logits[row, i]) for i in range(keep))
        done = [start + keep for start, keep in zip(done, kept, strict=True)]


TEXTS = [
    [(a * i * i + b * i + c) % VOCABULARY for i in range(40)]
    for a, b, c in ((3, 7, 1), (5, 1, 40), (1, 9, 13))
]
ROUNDS = [
    (1, (1, 1, 1)),
    (5, (0, 3, 5)),
    (3, (2, 0, 1)),
    (1, (1, 1, 0)),
    (4, (4, 1, 2)),
    (2, (0, 2, 1)),
    (5, (5, 5, 5)),
    (2, (1, 1, 2)),
]


@pytest.mark.parametrize(
    ("architecture", "plans"), [*((name, False) for name in ATTENTION), ("qwen3", True)]
)
def test_ragged_rows_give_each_row_the_logits_it_gets_alone(architecture: str, plans: bool) -> None:
    model = tiny_model(architecture)
    same = logits_check(model)
    with backend(plans=plans):
        compare_with_alone(model, same)


def compare_with_alone(model: Any, same: Callable[[mx.array, mx.array], None]) -> None:
    for count, chunks in ((1, (4,)), (2, (0, 6)), (3, (5, 1, 9)), (3, (4, 4, 4))):
        want = [alone(model, text) for text in TEXTS[:count]]
        rounds = [(width, kept[:count]) for width, kept in ROUNDS]
        compared = 0
        for row, position, logits in speculate(model, TEXTS[:count], chunks, rounds):
            same(logits, want[row][position])
            compared += 1
        assert compared == sum(chunks) + sum(sum(kept) for _, kept in rounds)


def test_the_demo_model_gives_ragged_rows_the_logits_they_get_alone() -> None:
    folder = specdec_demo.path()
    model, _ = load_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with specdec_demo.prompts().open() as lines:
        texts = [tokenizer.encode(json.loads(next(lines))["text"]).ids[:36] for _ in range(2)]
    assert all(len(text) == 36 for text in texts)
    want = [alone(model, text) for text in texts]
    assert want[0].dtype == mx.bfloat16
    same = logits_check(model)
    rounds = [(width, kept[:2]) for width, kept in ROUNDS]
    for row, position, logits in speculate(model, texts, (11, 3), rounds):
        same(logits, want[row][position])


def test_a_row_that_left_goes_on_in_mlx_lm_as_if_it_had_never_been_here() -> None:
    model = tiny_model("llama")
    want = alone(model, TEXTS[0])
    same = logits_check(model)
    state, other = (row_state(make_prompt_cache(model)) for _ in range(2))
    for each, text in ((state, TEXTS[0]), (other, TEXTS[1][:3])):
        each.begin_round(len(text[:10]))
        model(mx.array([text[:10]]), cache=layers(each))
        each.commit_round()
    other.prepare_append([state]).commit()
    other.begin_round(4)
    model(mx.array([[1] * 4, TEXTS[0][10:14]]), cache=layers(other))
    other.rollback([0, 3])
    caches = make_prompt_cache(model)
    other.write_back(1, caches)
    for position in range(13, 20):
        logits = model(mx.array([[TEXTS[0][position]]]), cache=caches)
        same(logits[0, 0], want[position])
