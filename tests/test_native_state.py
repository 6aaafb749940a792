"""Rows in mlx-lm's own caches: one position at a time, and one begun too early leaves no trace.

A target's rows are native where its code or one of its cache types does not allow row forms. The
caches are then of any type: mlx-lm's own, of which a position can be taken back, and others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from architectures import build
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
from tiny_models import HYBRID, WINDOWED, alone, logits_check, tiny_model

import specdec_demo
from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError, RowIndexError
from specdec.state import NativeState, row_state
from specdec.targets import MlxLmTarget

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


REASON = "this model of the tests decodes natively"


def native(model: Any) -> NativeState:
    """A cold row in the model's own caches, as of a model whose code allows no windows."""
    return NativeState(make_prompt_cache(model), REASON)


class OwnAttention(KVCache):  # type: ignore[misc]
    """Somebody's own cache type, which has no row form."""


class OwnRing(RotatingKVCache):  # type: ignore[misc]
    """Another, which assigns into what it holds."""


class OwnArrays(ArraysCache):  # type: ignore[misc]
    """Another, with recurrent state."""


OWN_TYPES: dict[str, dict[type[Any], Callable[[Any], Any]]] = {
    "qwen3": {KVCache: lambda _: OwnAttention()},
    WINDOWED: {RotatingKVCache: lambda ring: OwnRing(ring.max_size, ring.keep)},
    HYBRID: {ArraysCache: lambda arrays: OwnArrays(len(arrays.cache))},
}
"""Models, and what stands in for a type of their caches."""


def own_caches(name: str) -> list[Any]:
    made = make_prompt_cache(tiny_model(name))
    caches = [OWN_TYPES[name].get(type(cache), lambda same: same)(cache) for cache in made]
    assert any(type(cache).__name__.startswith("Own") for cache in caches)
    return caches


def caches_of(state: NativeState, row: int) -> list[Any]:
    caches, rows = state.row_caches[row]
    assert list(rows) == [row], "a row is a batch of its own"
    return caches


def forward(model: Any, state: NativeState, tokens: Sequence[Sequence[int]]) -> list[mx.array]:
    """One window per row; logits ``[W, V]`` per row."""
    assert len(state.row_caches) == len(tokens)
    logits = [
        model(mx.array([window]), cache=caches_of(state, row))[0]
        for row, window in enumerate(tokens)
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
    assert state.reason == REASON
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
            assert contents(caches_of(state, 0)) == contents(clean)


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
        ([OwnAttention()], False),
        ([KVCache(), OwnArrays(1)], False),
        ([CacheList(KVCache(), OwnRing(16))], False),
        ([object()], False),
    ],
)
def test_a_state_says_whether_a_window_can_be_dropped(caches: list[Any], able: bool) -> None:
    assert NativeState(caches, "no reason").can_roll_back is able


@pytest.mark.parametrize("name", OWN_TYPES)
def test_a_type_of_which_nothing_is_known_refuses_to_drop_what_it_has_read(name: str) -> None:
    # A ring may have overwritten what it would have to take back; of others it is not known.
    model = tiny_model(name)
    want = alone(model, TEXT)
    caches = own_caches(name)
    state = row_state(caches)
    assert isinstance(state, NativeState)
    assert not state.can_roll_back
    assert state.reason is not None
    missing = {type(cache).__name__ for cache in caches if type(cache).__name__.startswith("Own")}
    assert {part for part in ("OwnAttention", "OwnRing", "OwnArrays") if part in state.reason} == (
        missing
    )
    for i, token in enumerate(TEXT):
        state.begin_round(1)
        logits = forward(model, state, [[token]])
        with pytest.raises(RollbackError, match="Own"):
            state.rollback([0])
        assert state.open_width == 1
        state.commit_round()
        assert mx.array_equal(logits[0][0], want[i]).item()
        with pytest.raises(RollbackError, match="Own"):
            state.take_back([1])
    assert state.lengths == (len(TEXT),)
    assert caches_of(state, 0) == caches, "the caller sees them move"


@pytest.mark.parametrize("name", OWN_TYPES)
def test_rows_of_any_type_read_chunks_join_and_leave(name: str) -> None:
    model = tiny_model(name)
    texts = TEXT, OTHER
    want = [alone(model, text) for text in texts]
    same = logits_check(model)
    states = []
    for text, chunk in zip(texts, (3, 1), strict=True):
        state = row_state(own_caches(name))
        assert isinstance(state, NativeState)
        state.begin_round(chunk, reading=True)
        forward(model, state, [text[:chunk]])
        state.commit_round()
        states.append(state)
    first, second = states
    first.prepare_append([second]).commit()
    for _ in range(4):
        first.begin_round(1)
        at = first.lengths
        logits = forward(model, first, [[text[n]] for text, n in zip(texts, at, strict=True)])
        first.commit_round()
        for row in (0, 1):
            same(logits[row][0], want[row][at[row]])
    kept = first.extract_row(0)
    assert [type(cache) for cache in kept] == [type(cache) for cache in own_caches(name)]
    first.filter_rows([1])
    assert first.lengths == (5,)
    first.begin_round(1)
    same(forward(model, first, [[OTHER[5]]])[0][0], want[1][5])
    first.commit_round()
    same(model(mx.array([[TEXT[7]]]), cache=kept)[0, 0], want[0][7])


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


@pytest.mark.parametrize("name", ["qwen3", HYBRID])
def test_a_position_is_taken_back_from_the_rows_that_it_was_begun_for_too_early(name: str) -> None:
    model = tiny_model(name)
    texts = TEXT, OTHER, TEXT[::-1]
    want = [alone(model, text) for text in texts]
    state = native(model)
    state.prepare_append([native(model) for _ in texts[1:]]).commit()
    rows = [0, 1, 2]
    for counts, keep in (
        ([0, 1, 0], [0, 1, 2]),
        ([1, 0, 1], [2, 0, 1]),  # rows have changed places since
        ([0, 0, 0], [0, 1, 2]),
        ([1, 0], [2, 0]),  # a row has left since
        ([1, 1], [0, 1]),
        ([0, 1], [1, 0]),
    ):
        before = state.lengths
        state.begin_round(1)
        windows = [[texts[row][n]] for row, n in zip(rows, before, strict=True)]
        logits = forward(model, state, windows)
        state.commit_round()
        for row, n, got in zip(rows, before, logits, strict=True):
            assert mx.array_equal(got[0], want[row][n]).item()
        state.filter_rows(keep)
        rows = [rows[k] for k in keep]
        state.take_back(counts)
        grown = [before[k] + 1 for k in keep]
        assert state.lengths == tuple(n - c for n, c in zip(grown, counts, strict=True))
    state.begin_round(1)
    at = state.lengths
    assert len(set(at)) == len(at) == 2
    logits = forward(model, state, [[texts[row][n]] for row, n in zip(rows, at, strict=True)])
    for row, n, got in zip(rows, at, logits, strict=True):
        assert mx.array_equal(got[0], want[row][n]).item()


def test_only_the_position_of_the_last_window_can_be_taken_back() -> None:
    state = NativeState([KVCache()], "because of the test")
    state.take_back([0])  # nothing is asked
    with pytest.raises(RollbackError, match="because of the test"):
        state.take_back([1])
    state.begin_round(1)
    with pytest.raises(RoundOpenError):
        state.take_back([1])
    state.commit_round()
    state.take_back([1])
    assert state.lengths == (0,)
    with pytest.raises(RollbackError):
        state.take_back([1])
    state.begin_round(2)
    state.commit_round()
    with pytest.raises(RollbackError):
        state.take_back([1])
    assert state.lengths == (2,)


def test_native_rows_have_no_limit_and_are_not_recorded() -> None:
    state = NativeState([KVCache(), OwnRing(4)], REASON)
    assert state.room(0) is None
    state.begin_round(3)
    assert state.records is False


def test_the_bytes_of_a_row_are_those_of_its_caches() -> None:
    caches: list[list[Any]] = [[OwnAttention(), OwnArrays(1)] for _ in range(2)]
    state, other = (NativeState(each, REASON) for each in caches)
    assert state.bytes_at(7) == 0
    for attention, arrays in caches:
        attention_window(attention, 1.0)
        arrays[0] = mx.ones((1, 10))
    want = 2 * 256 * 64 * 4 + 10 * 4  # mlx-lm's own step of 256 positions
    assert state.bytes_at(7) == want
    state.prepare_append([other]).commit()
    assert state.bytes_at(7) == want


# Targets whose rows are native.


@pytest.mark.parametrize(
    ("name", "why", "able"),
    [("deepseek_v41", "LayerCache", False), ("phi3small", "positions one by one", True)],
)
def test_a_model_of_mlx_lm_without_row_forms_decodes_as_it_does_alone(
    name: str, why: str, able: bool
) -> None:
    model = build(name)
    target = MlxLmTarget(model)
    texts = [[token % target.vocab_size for token in text] for text in (TEXT, OTHER)]
    want = [alone(model, text) for text in texts]
    state, other = target.new_state(), target.new_state()
    assert isinstance(state, NativeState)
    assert isinstance(other, NativeState)
    assert state.reason == target.no_speculation_reason
    assert why in str(state.reason)
    assert state.can_roll_back is able
    state.prepare_append([other]).commit()
    for step in range(8):
        if able and step % 2:
            state.begin_round(1)
            target.forward(mx.array([[1], [2]]), state)
            state.rollback([0, 0])
        state.begin_round(1)
        logits = target.forward(mx.array([[text[step]] for text in texts]), state).logits
        state.commit_round()
        for row in (0, 1):
            assert mx.array_equal(logits[row, 0], want[row][step]).item()
    assert state.lengths == (8, 8)


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
    for row, caches in enumerate((lists[2], lists[0])):
        held = caches_of(a, row)
        assert list(map(id, held)) == list(map(id, caches))
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
    before = [id(caches_of(state, row)[0]) for row in (0, 1)]
    with pytest.raises(RowIndexError):
        state.filter_rows(keep)
    assert [id(caches_of(state, row)[0]) for row in (0, 1)] == before


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
    assert before == contents(caches_of(state, 0))
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
    for cache in (c for caches, _ in state.row_caches for c in caches):
        want += [cache.keys, cache.values] if isinstance(cache, KVCache) else cache.cache
    assert {id(a) for a in state.arrays()} == {id(a) for a in want if a is not None}
    assert len(state.arrays()) == len(want)


def test_a_native_row_is_given_back_to_its_own_caches_only() -> None:
    caches = [KVCache()]
    state = NativeState(caches, "a reason")
    state.write_back(0, caches)
    with pytest.raises(RollbackError, match="its own caches"):
        state.write_back(0, [KVCache()])
