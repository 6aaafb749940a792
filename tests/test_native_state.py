"""Rows in mlx-lm's own caches: one position at a time, and one begun too early leaves no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model
from tiny_models import HYBRID, WINDOWED, alone, tiny_model

import specdec_demo
from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError, RowIndexError
from specdec.state import NativeState, row_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TEXT = [5, 61, 8, 33, 2, 2, 47, 19, 30, 11, 58, 4]
OTHER = [9, 9, 41, 3, 26, 50, 7, 7, 1, 16, 23, 60]
WRONG = 13


@pytest.fixture(scope="module", params=["demo-qwen3_5", HYBRID])
def hybrid(request: pytest.FixtureRequest) -> Any:
    """A model with recurrent or convolution state beside attention."""
    if request.param == HYBRID:
        return tiny_model(HYBRID)
    return load_model(specdec_demo.path(request.param))[0]


def native(model: Any) -> NativeState:
    state = row_state(make_prompt_cache(model))
    assert isinstance(state, NativeState)
    return state


def forward(model: Any, state: NativeState, tokens: Sequence[Sequence[int]]) -> list[mx.array]:
    """One window per row; logits ``[W, V]`` per row."""
    logits = [
        model(mx.array([window]), cache=caches)[0]
        for window, caches in zip(tokens, state.row_caches, strict=True)
    ]
    mx.eval(logits)
    return logits


def contents(caches: Sequence[Any]) -> list[list[Any]]:
    """What caches hold, as lists: state that counts, not what lies behind an offset."""
    held = []
    for cache in caches:
        if isinstance(cache, KVCache):
            arrays = [a[..., : cache.offset, :] for a in (cache.keys, cache.values) if cache.offset]
            held.append([cache.offset, *(a.tolist() for a in arrays)])
        else:
            held.append([a.tolist() for a in cache.cache if a is not None])
    return held


def test_a_window_begun_early_and_dropped_is_as_if_it_had_never_been(hybrid: Any) -> None:
    want = alone(hybrid, TEXT)
    clean = make_prompt_cache(hybrid)
    state = native(hybrid)
    assert state.can_roll_back
    assert state.reason is not None
    assert "ArraysCache" in state.reason
    for i, token in enumerate(TEXT):
        for wrong in range(i % 3):  # also twice, also before anything was read
            state.begin_round(1)
            assert state.open_width == 1
            forward(hybrid, state, [[WRONG + wrong]])
            state.rollback([0])
            assert state.lengths == (i,)
        state.begin_round(1)
        logits = forward(hybrid, state, [[token]])
        state.commit_round()
        assert state.lengths == (i + 1,)
        assert mx.array_equal(logits[0][0], want[i]).item()
        mx.eval(hybrid(mx.array([[token]]), cache=clean))
        if i == 6:
            assert contents(state.row_caches[0]) == contents(clean)


def test_rows_are_dropped_one_by_one(hybrid: Any) -> None:
    want = [alone(hybrid, text) for text in (TEXT[:6], OTHER[:6])]
    state = native(hybrid)
    state.prepare_append([native(hybrid)]).commit()
    texts, done = (TEXT, OTHER), [0, 0]
    for kept in ([1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1]):
        state.begin_round(1)
        tokens = [
            [text[at] if keep else WRONG] for text, at, keep in zip(texts, done, kept, strict=True)
        ]
        logits = forward(hybrid, state, tokens)
        state.rollback(kept)
        for row, keep in enumerate(kept):
            if keep:
                assert mx.array_equal(logits[row][0], want[row][done[row]]).item()
        done = [at + keep for at, keep in zip(done, kept, strict=True)]
        assert state.lengths == tuple(done)


def test_a_wider_window_can_be_kept_whole(hybrid: Any) -> None:
    state = native(hybrid)
    for start in (0, 5):
        state.begin_round(5)
        logits = forward(hybrid, state, [TEXT[start : start + 5]])
        state.commit_round()
    assert state.lengths == (10,)
    caches = make_prompt_cache(hybrid)
    hybrid(mx.array([TEXT[:5]]), cache=caches)
    want = hybrid(mx.array([TEXT[5:10]]), cache=caches)[0]
    assert mx.array_equal(logits[0], want).item()


@pytest.mark.parametrize("kept", [[2], [0], [4], [-1], [], [3, 3]])
def test_part_of_a_window_cannot_be_kept(kept: list[int]) -> None:
    state = NativeState([KVCache(), ArraysCache(1)], "because of the test")
    state.begin_round(3)
    with pytest.raises(RollbackError, match="because of the test") as raised:
        state.rollback(kept)
    assert "\n" not in str(raised.value)
    assert state.open_width == 3
    assert state.lengths == (0,)
    state.rollback([3])
    assert state.lengths == (3,)
    assert state.open_width == 0


@pytest.mark.parametrize("kept", [[-1], [2], [1, 1]])
def test_a_count_outside_a_window_of_one_is_refused(kept: list[int]) -> None:
    state = NativeState([ArraysCache(1)], "no reason")
    state.begin_round(1)
    with pytest.raises(RollbackError):
        state.rollback(kept)
    assert state.open_width == 1


def test_a_wide_window_cannot_be_dropped_by_what_an_early_one_left() -> None:
    state = NativeState([KVCache()], "no reason")
    state.begin_round(1)
    state.rollback([0])
    state.begin_round(2)
    with pytest.raises(RollbackError):
        state.rollback([0])
    state.commit_round()


# What can be taken back.


@pytest.mark.parametrize(
    ("caches", "able"),
    [
        ([KVCache(), ArraysCache(2)], True),
        ([QuantizedKVCache(), ArraysCache(2)], True),
        ([CacheList(KVCache(), ArraysCache(1))], True),
        ([RotatingKVCache(max_size=16)], False),
        ([KVCache(), RotatingKVCache(max_size=16)], False),
        ([CacheList(KVCache(), RotatingKVCache(max_size=16))], False),
        ([CacheList(KVCache(), CacheList(ArraysCache(1), ChunkedKVCache(8)))], False),
        ([ChunkedKVCache(8)], False),
        ([object()], False),
    ],
)
def test_a_state_says_whether_a_window_can_be_dropped(caches: list[Any], able: bool) -> None:
    assert NativeState(caches, "no reason").can_roll_back is able


def test_a_ring_refuses_to_drop_what_it_may_have_overwritten() -> None:
    model = tiny_model(WINDOWED)
    want = alone(model, TEXT)
    state = native(model)
    assert not state.can_roll_back
    assert state.reason is not None
    assert "RotatingKVCache" in state.reason
    for i, token in enumerate(TEXT):
        state.begin_round(1)
        logits = forward(model, state, [[token]])
        with pytest.raises(RollbackError, match="RotatingKVCache"):
            state.rollback([0])
        assert state.open_width == 1
        state.commit_round()
        assert mx.array_equal(logits[0][0], want[i]).item()
    assert state.lengths == (len(TEXT),)


def attention_window(cache: Any, value: float) -> None:
    keys = mx.full((1, 1, 1, 64), value)
    cache.update_and_fetch(keys, keys)


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache, lambda: CacheList(KVCache())])
def test_a_window_that_never_ran_or_half_ran_is_dropped_too(make: Callable[[], Any]) -> None:
    # The forward may fail before any layer, or between two layers.
    caches = [make(), make()]

    def parts() -> list[Any]:
        return [part for c in caches for part in (c.caches if isinstance(c, CacheList) else [c])]

    state = NativeState(caches, "no reason")
    state.begin_round(1)
    for part in parts():
        attention_window(part, 1.0)
    state.commit_round()
    for reached in (0, 1, 2):
        state.begin_round(1)
        for part in parts()[:reached]:
            attention_window(part, 2.0)
        state.rollback([0])
        assert [part.offset for part in parts()] == [1, 1]
        assert state.lengths == (1,)
    state.begin_round(1)
    for part in parts():
        attention_window(part, 3.0)
        keys = part.keys
        if isinstance(part, QuantizedKVCache):
            packed, scales, biases = part.keys
            keys = mx.dequantize(packed, scales, biases, part.group_size, part.bits)
        assert keys[0, 0, :2, 0].tolist() == pytest.approx([1.0, 3.0])


def test_recurrent_state_that_never_ran_is_the_same_object_afterwards() -> None:
    cache = ArraysCache(2)
    state = NativeState([cache], "no reason")
    first, second = mx.ones((1, 3)), mx.zeros((1, 2))
    cache[0], cache[1] = first, second
    state.begin_round(1)
    cache[0] = mx.full((1, 3), 7.0)
    state.rollback([0])
    assert cache[0] is first
    assert cache[1] is second


def test_padding_that_a_model_moves_in_place_is_taken_back() -> None:
    cache = ArraysCache(1, left_padding=[4])
    cache.prepare(lengths=[9])
    state = NativeState([cache], "no reason")
    state.begin_round(1)
    cache.advance(1)
    assert (cache.left_padding.tolist(), cache.lengths.tolist()) == ([3], [8])
    state.rollback([0])
    assert (cache.left_padding.tolist(), cache.lengths.tolist()) == ([4], [9])


def test_windows_are_given_the_width_they_need() -> None:
    state = NativeState([KVCache()], "no reason")
    assert [state.window_width(needed, 4) for needed in (1, 2, 4, 5)] == [1, 2, 4, 4]


# Membership.


def test_rows_join_leave_and_change_places_with_their_caches() -> None:
    lists = [[KVCache(), ArraysCache(1)] for _ in range(3)]
    for length, caches in enumerate(lists):
        caches[0].offset = length
    a, b, c = (NativeState(caches, "no reason") for caches in lists)
    change = a.prepare_append([b, c])
    assert a.row_count == 1
    change.commit()
    assert a.row_count == 3
    assert list(a.lengths) == [0, 1, 2]
    a.filter_rows([2, 0])
    assert list(a.lengths) == [2, 0]
    assert [row is caches for row, caches in zip(a.row_caches, (lists[2], lists[0]), strict=True)]
    assert a.row_caches[0][0] is lists[2][0]
    assert a.row_caches[1][0] is lists[0][0]
    a.prepare_append([b]).discard()
    assert a.row_count == 2
    a.filter_rows([])
    assert a.row_count == 0
    assert a.arrays() == []
    a.prepare_append([b]).commit()
    assert list(a.lengths) == [1]
    a.write_back(0, lists[1])


@pytest.mark.parametrize("keep", [[0, 0], [-1], [2]])
def test_a_filter_of_rows_that_are_not_there_changes_nothing(keep: list[int]) -> None:
    state = NativeState([KVCache()], "no reason")
    state.prepare_append([NativeState([KVCache()], "no reason")]).commit()
    before = list(map(id, state.row_caches))
    with pytest.raises(RowIndexError):
        state.filter_rows(keep)
    assert list(map(id, state.row_caches)) == before


def test_verbs_are_refused_on_the_wrong_side_of_a_round() -> None:
    state, other = (NativeState([KVCache()], "no reason") for _ in range(2))
    with pytest.raises(NoOpenRoundError):
        state.commit_round()
    with pytest.raises(NoOpenRoundError):
        state.rollback([1])
    for row in (-1, 1):
        with pytest.raises(RowIndexError):
            state.extract_row(row)
    state.begin_round(1)
    verbs: list[Callable[[], object]] = [
        lambda: state.begin_round(1),
        lambda: state.filter_rows([0]),
        lambda: state.prepare_append([other]),
        lambda: other.prepare_append([state]),
        lambda: state.extract_row(0),
    ]
    for verb in verbs:
        with pytest.raises(RoundOpenError):
            verb()
        assert state.open_width == 1
        assert state.row_count == 1


def test_an_extracted_row_goes_on_alone_and_does_not_change_with_the_live_one(
    hybrid: Any,
) -> None:
    want = alone(hybrid, TEXT[:8])
    state = native(hybrid)
    for token in TEXT[:4]:
        state.begin_round(1)
        forward(hybrid, state, [[token]])
        state.commit_round()
    kept = state.extract_row(0)
    before = contents(kept)
    assert before == contents(state.row_caches[0])
    for token in OTHER[:3]:
        state.begin_round(1)
        forward(hybrid, state, [[token]])
        state.commit_round()
    assert contents(kept) == before
    for i in range(4, 8):
        logits = hybrid(mx.array([[TEXT[i]]]), cache=kept)
        assert mx.array_equal(logits[0, 0], want[i]).item()
    assert state.lengths == (7,)


def test_all_arrays_of_all_rows_are_listed_for_evaluation(hybrid: Any) -> None:
    state = native(hybrid)
    assert state.arrays() == []
    state.prepare_append([native(hybrid)]).commit()
    state.begin_round(2)
    forward(hybrid, state, [TEXT[:2], OTHER[:2]])
    state.commit_round()
    want: list[Any] = []
    for cache in (c for row in state.row_caches for c in row):
        want += [cache.keys, cache.values] if isinstance(cache, KVCache) else cache.cache
    assert {id(a) for a in state.arrays()} == {id(a) for a in want if a is not None}
    assert len(state.arrays()) == len(want)


def test_a_native_row_is_given_back_to_its_own_caches_only() -> None:
    caches = [KVCache()]
    state = NativeState(caches, "a reason")
    state.write_back(0, caches)
    with pytest.raises(RollbackError, match="its own caches"):
        state.write_back(0, [KVCache()])
