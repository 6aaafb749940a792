"""Context rows hold exactly what was appended to each row, whatever happened in between.

The model keeps a Python list of vectors per row and layer. Layers of a window hold their last
positions alone, and a block leaves nothing behind.

Shapes: B rows, L positions, W columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import CacheList, KVCache

from specdec.contract import Attachment, RowCheckpoint
from specdec.drafting.context import ContextLayer, ContextRows
from specdec.drafting.row_arrays import (
    cache_arrays,
    check_arrays,
    check_identity,
    expected_shapes,
    fill_caches,
)
from specdec.errors import CheckpointError, ContractError, OptionError, RollbackError
from specdec.state.buffers import room_for
from specdec.state.rings import SLACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

WINDOWS: Final = (None, 6, None, 17)
LAYERS: Final = tuple(ContextLayer(window) for window in WINDOWS)
HEADS, KEY, VALUE = 2, 8, 4
NAMES: Final = [f"{number}.{name}" for number in range(4) for name in ("keys", "values")]
LAYOUT: Final = {
    name: ((1, HEADS, 1, KEY if "keys" in name else VALUE), mx.float32) for name in NAMES
}
LONG = SLACK + 9  # a piece that a ring does not take in place


class Text:
    """What one row has read, ``[positions, heads, D]`` by the name of the array."""

    def __init__(self, held: dict[str, Floats] | None = None) -> None:
        sizes = {name: shape[3] for name, (shape, _) in LAYOUT.items()}
        empty = {name: np.zeros((0, HEADS, size), np.float32) for name, size in sizes.items()}
        self.held = held or empty

    def __len__(self) -> int:
        return len(self.held["0.keys"])

    def and_then(self, more: dict[str, Floats]) -> Text:
        return Text({name: np.concatenate([self.held[name], more[name]]) for name in NAMES})

    def arrays(self) -> dict[str, Floats]:
        """As a checkpoint has them."""
        told = {}
        for name, vectors in self.held.items():
            window = WINDOWS[int(name[0])]
            last = vectors if window is None else vectors[-window:]
            if len(last):
                told[name] = last.swapaxes(0, 1)[None]
        return told

    def column(self, layer: int, column: int, query: Floats, own: dict[str, Floats]) -> Floats:
        """What a column of a block ``own`` gives, ``[heads, D']``."""
        window, start = WINDOWS[layer], 0
        if window is not None:
            start = max(0, len(self) + column - window + 1)
        keys, values = (
            np.concatenate([self.held[name][start:], own[name]]).astype(np.float64)
            for name in (f"{layer}.keys", f"{layer}.values")
        )
        scores = np.einsum("phd,hd->hp", keys, query)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(np.einsum("hp,phd->hd", weights, values) / weights.sum(axis=1)[:, None])


def drawn(generator: np.random.Generator, positions: int) -> dict[str, Floats]:
    return {
        name: generator.normal(size=(positions, HEADS, shape[3])).astype(np.float32)
        for name, (shape, _) in LAYOUT.items()
    }


def stacked(news: Sequence[dict[str, Floats]]) -> list[tuple[mx.array, mx.array]]:
    """Per layer what rows bring, right-padded with what nobody may see."""
    width = max(len(new["0.keys"]) for new in news)

    def of(name: str) -> mx.array:
        padding = [(0, 0), (0, 0)]
        rows = [
            np.pad(new[name], [(0, width - len(new[name])), *padding], constant_values=99.0)
            for new in news
        ]
        return mx.array(np.stack(rows).swapaxes(1, 2))

    return [(of(f"{number}.keys"), of(f"{number}.values")) for number in range(len(LAYERS))]


def restored(arrays: dict[str, Any], positions: int) -> list[Any]:
    caches = [layer.cache() for layer in LAYERS]
    check_arrays(arrays, expected_shapes(caches, LAYOUT, positions))
    fill_caches(caches, arrays, positions)
    return caches


def blocked(context: ContextRows, columns: Sequence[int], seed: int) -> list[Any]:
    """Attend a block of every row once; its outputs, and what it was made of."""
    generator = np.random.default_rng(seed)
    queries = generator.normal(size=(len(columns), HEADS, max(columns), KEY)).astype(np.float32)
    own = [drawn(generator, max(columns)) for _ in columns]
    with context.block(columns) as block:
        assert block.width == max(columns)
        found = [
            block.attend(number, mx.array(queries), keys, values, scale=1.0)
            for number, (keys, values) in enumerate(stacked(own))
        ]
        mx.eval(found)
    return [queries, own, [np.array(each) for each in found]]


def filled(lengths: Sequence[int], seed: int = 0) -> tuple[ContextRows, list[Text]]:
    generator = np.random.default_rng(seed)
    context = ContextRows.of(LAYERS, len(lengths))
    news = [drawn(generator, length) for length in lengths]
    if any(lengths):
        context.append(stacked(news), lengths)
    return context, [Text().and_then(new) for new in news]


class Rows(RuleBasedStateMachine):
    @initialize(
        lengths=st.lists(st.integers(0, 70), min_size=1, max_size=3), seed=st.integers(0, 9)
    )
    def start(self, lengths: list[int], seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.context, self.texts = filled(lengths, seed)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), most=st.sampled_from([1, 5, 5, LONG]))
    def append(self, data: st.DataObject, most: int) -> None:
        counts = [data.draw(st.integers(0, most)) for _ in self.texts]
        if not any(counts):
            counts[0] = most
        # Wider than what is kept, as a verify window is.
        news = [drawn(self.generator, count) for count in counts]
        wide = [drawn(self.generator, max(counts) + 1) for _ in counts]
        padded = [
            {name: np.concatenate([new[name], other[name][len(new[name]) :]]) for name in NAMES}
            for new, other in zip(news, wide, strict=True)
        ]
        self.context.append(stacked(padded), counts)
        self.texts = [text.and_then(new) for text, new in zip(self.texts, news, strict=True)]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.texts))))
        keep = order[: data.draw(st.integers(0 if len(order) > 2 else 1, len(order)))]
        self.context.filter_rows(keep)
        self.texts = [self.texts[row] for row in keep]

    @rule(data=st.data(), dropped=st.booleans())
    def join(self, data: st.DataObject, dropped: bool) -> None:
        """Cold rows and rows stored before; perhaps it is found out that they cannot join."""
        texts, caches = [], []
        for cold in data.draw(st.lists(st.booleans(), min_size=1, max_size=2)):
            if self.texts and not cold:
                row = data.draw(st.integers(0, len(self.texts) - 1))
                texts.append(self.texts[row])
                stored = cache_arrays(self.context.extract(row))
                caches.append(restored(stored, len(self.texts[row])))
            else:
                texts.append(Text())
                caches.append(self.context.empty_caches())
        change = self.context.prepare_append(caches)
        if dropped or len(self.texts) + len(texts) > 5:
            change.discard()
        else:
            change.commit()
            self.texts = [*self.texts, *texts]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), most=st.sampled_from([1, 4, 9, LONG]), seed=st.integers(0, 99))
    def block(self, data: st.DataObject, most: int, seed: int) -> None:
        columns = [data.draw(st.integers(1, most)) for _ in self.texts]
        queries, own, found = blocked(self.context, columns, seed)
        _, _, again = blocked(self.context, columns, seed)
        for layer, (first, second) in enumerate(zip(found, again, strict=True)):
            for row, count in enumerate(columns):
                assert np.array_equal(first[row, :, :count], second[row, :, :count])
                mine = {name: array[:count] for name, array in own[row].items()}
                for column in {0, count - 1}:
                    expected = self.texts[row].column(layer, column, queries[row, :, column], mine)
                    np.testing.assert_allclose(first[row, :, column], expected, atol=1e-4)

    def teardown(self) -> None:
        if not hasattr(self, "texts"):
            return
        assert self.context.lengths == tuple(map(len, self.texts))
        for row, text in enumerate(self.texts):
            found = cache_arrays(self.context.extract(row))
            expected = text.arrays()
            assert set(found) == set(expected)
            for name, array in expected.items():
                assert tuple(found[name].shape) == array.shape
                last = seen_later(name)
                assert np.array_equal(last(np.array(found[name])), last(array)), (row, name)


def seen_later(name: str) -> Callable[[Floats], Floats]:
    """The positions of an array that a later query may see.

    The oldest of a full window is stored as mlx-lm does, but a dropped window of the widest kind
    that a ring takes in place may have been written over it.
    """
    window = WINDOWS[int(name[0])]
    return lambda array: array if window is None else array[:, :, -(window - 1) :]


def test_rows_hold_what_each_was_given_through_any_changes() -> None:
    run_state_machine_as_test(Rows, settings=settings(max_examples=80, stateful_step_count=12))


# What a row is stored as.


def test_a_stored_row_shares_nothing_with_the_rows_or_with_those_that_are_made_of_it() -> None:
    context, texts = filled([9, 40])
    stored = cache_arrays(context.extract(1))
    mx.eval(stored)
    others = ContextRows(LAYERS)
    others.prepare_append([restored(stored, 40) for _ in range(2)]).commit()
    more = drawn(np.random.default_rng(5), 3)
    for rows in (context, others):
        rows.append(stacked([more, more]), [3, 3])
        mx.eval(rows.arrays())
    for name, array in texts[1].arrays().items():
        assert np.array_equal(np.array(stored[name]), array)
        assert np.array_equal(
            np.array(cache_arrays(others.extract(1))[name]), texts[1].and_then(more).arrays()[name]
        )


def test_a_row_that_has_read_nothing_is_stored_without_arrays() -> None:
    context, _ = filled([3, 0])
    assert cache_arrays(context.extract(1)) == {}
    assert expected_shapes(context.empty_caches(), LAYOUT, 0) == {}
    assert cache_arrays(restored({}, 0)) == {}
    assert set(expected_shapes(context.empty_caches(), LAYOUT, 40)) == set(NAMES)


def test_a_windows_arrays_are_as_long_as_the_window_at_most() -> None:
    for length in (1, 5, 6, 7, 17, 18, 90):
        shapes = expected_shapes([layer.cache() for layer in LAYERS], LAYOUT, length)
        held = [shapes[f"{number}.keys"][0][2] for number in range(4)]
        assert held == [length, min(length, 6), length, min(length, 17)]
        context, _ = filled([length])
        found = cache_arrays(context.extract(0))
        assert {name: tuple(array.shape) for name, array in found.items()} == {
            name: shape for name, (shape, _) in shapes.items()
        }


def test_caches_in_lists_are_counted_one_by_one() -> None:
    first, second = KVCache(), KVCache()
    layers = [KVCache(), CacheList(first, second)]
    for number, cache in enumerate((layers[0], first, second)):
        cache.update_and_fetch(mx.full((1, 1, 2, 3), number), mx.full((1, 1, 2, 3), -number))
    found = cache_arrays(layers)
    assert [array[0, 0, 0, 0].item() for array in found.values()] == [0, 0, 1, -1, 2, -2]
    assert list(found) == NAMES[:6]
    again = [KVCache(), CacheList(KVCache(), KVCache())]
    fill_caches(again, found, 2)
    assert again[1].caches[1].offset == 2
    assert mx.array_equal(again[1].caches[1].keys, found["2.keys"])


def test_other_arrays_are_refused_by_name() -> None:
    context, _ = filled([9])
    good = cache_arrays(context.extract(0))
    wanted = expected_shapes(context.empty_caches(), LAYOUT, 9)
    check_arrays(good, wanted)
    less = {name: array for name, array in good.items() if name != "1.keys"}
    refused: list[tuple[dict[str, mx.array], str]] = [
        (less, "has the arrays 0.keys, 0.values, 1.values, 2"),
        ({}, "has the arrays none, not 0.keys"),
        ({**good, "4.keys": good["0.keys"]}, "3.values, 4.keys, not"),
        ({**good, "0.keys": good["0.keys"][:, :, 1:]}, "0.keys is .*8, 8.*, not .*9, 8"),
        ({**good, "1.values": good["1.values"][:, :1]}, "1.values is .*1, 1, 6, 4.*, not .*2, 6"),
        ({**good, "2.values": good["2.values"].astype(mx.float16)}, "2.values is .*float16"),
        ({**good, "3.keys": good["3.values"]}, "3.keys is"),
    ]
    for arrays, said in refused:
        with pytest.raises(CheckpointError, match=said) as caught:
            check_arrays(arrays, wanted)
        assert "\n" not in str(caught.value)
        assert "read the text again" in str(caught.value)
    any_type: dict[str, Any] = {name: (shape, None) for name, (shape, _) in wanted.items()}
    check_arrays({name: array.astype(mx.bfloat16) for name, array in good.items()}, any_type)
    with pytest.raises(CheckpointError, match=r"0.keys is .*int32"):
        check_arrays({**good, "0.keys": good["0.keys"].astype(mx.int32)}, any_type)


def test_a_checkpoint_of_another_drafter_or_layout_is_refused() -> None:
    stored = RowCheckpoint(
        namespace="a:1", processed_tokens=0, attachment=Attachment(schema="a", arrays={})
    )
    assert check_identity(stored, "a:1", "a") is stored.attachment
    with pytest.raises(CheckpointError, match="is of a:1, not of a:2"):
        check_identity(stored, "a:2", "a")
    with pytest.raises(CheckpointError, match="has the schema a, not b"):
        check_identity(stored, "a:1", "b")


# Blocks.


@pytest.mark.parametrize("lengths", [(4, 4), (0, 0), (4, 30), (0, 9)])
def test_a_block_begins_where_each_row_ends(lengths: tuple[int, int]) -> None:
    context, _ = filled(lengths)
    with context.block([3, 2]) as block:
        assert block.width == 3
        expected: Any = lengths[0] if lengths[0] == lengths[1] else list(lengths)
        at = block.positions
        assert (at if isinstance(at, int) else at.tolist()) == expected
        for number, pair in enumerate(stacked([drawn(np.random.default_rng(0), 3)] * 2)):
            block.attend(number, mx.zeros((2, HEADS, 3, KEY)), *pair, scale=1.0)


# Mistakes.


@pytest.mark.parametrize("window", [0, -3, 2.5, "8", True])
def test_a_window_has_a_position_at_least(window: Any) -> None:
    with pytest.raises(OptionError, match=f"window is {window!r}; give 1 or more"):
        ContextLayer(window)


def test_another_number_of_layers_is_refused_and_appends_nothing() -> None:
    context, texts = filled([4])
    for layers in (3, 5):
        new = (stacked([drawn(np.random.default_rng(0), 2)]) * 2)[:layers]
        with pytest.raises(ContractError, match=f"returned {layers} layers, but 4 are declared"):
            context.append(new, [2])
    assert context.lengths == (4,)
    context.append(stacked([drawn(np.random.default_rng(0), 2)]), [2])
    assert context.lengths == (6,)
    assert len(texts[0]) == 4


def test_a_block_that_fails_leaves_the_rows_as_they_were() -> None:
    context, texts = filled([4, 30])

    def failing() -> None:
        with context.block([3, 2]) as block:
            first, *_ = stacked([drawn(np.random.default_rng(0), 3)] * 2)
            block.attend(0, mx.zeros((2, HEADS, 3, KEY)), *first, scale=1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert context.lengths == (4, 30)
    blocked(context, [3, 2], 0)
    for row, text in enumerate(texts):
        for name, array in cache_arrays(context.extract(row)).items():
            assert np.array_equal(np.array(array), text.arrays()[name])


WRONGLY: dict[str, tuple[list[tuple[int, int]], str]] = {
    "twice": ([(0, 2), (0, 2)], "layer 0 was attended twice in one block"),
    "one that is not there": ([(4, 2)], "layer 4 was attended but does not exist"),
    "too few columns": ([(0, 1)], "layer 0 got 1 queries and 1 keys; a block has context.width"),
    "not all": ([(0, 2), (1, 2), (3, 2)], "layer 2 is declared, but the block did not attend"),
}


@pytest.mark.parametrize("how", WRONGLY)
def test_each_layer_is_attended_once_with_the_whole_block(how: str) -> None:
    context, _ = filled([4])
    calls, says = WRONGLY[how]

    def attend() -> None:
        with context.block([2]) as block:
            for layer, width in calls:
                new = stacked([drawn(np.random.default_rng(0), width)])[0]
                block.attend(layer, mx.zeros((1, HEADS, width, KEY)), *new, scale=1.0)

    with pytest.raises(ContractError, match=says):
        attend()
    assert context.lengths == (4,)
    blocked(context, [2], 0)


def test_a_failed_append_leaves_the_rows_as_they_were() -> None:
    context, texts = filled([4])
    whole = stacked([drawn(np.random.default_rng(0), 2)])
    uneven = [whole[0], *stacked([drawn(np.random.default_rng(0), 3)])[1:]]
    with pytest.raises(RollbackError):
        context.append(uneven, [2])
    assert context.lengths == (4,)
    context.append(whole, [0])
    for name, array in cache_arrays(context.extract(0)).items():
        assert np.array_equal(np.array(array), texts[0].arrays()[name])


def test_rows_that_left_leave_nothing_for_those_that_come() -> None:
    context, _ = filled([4, 5])
    context.filter_rows([])
    assert context.lengths == ()
    assert context.arrays() == []
    context.prepare_append([]).commit()
    assert context.lengths == ()
    context.prepare_append([context.empty_caches()]).commit()
    assert context.positions == 0
    assert cache_arrays(context.extract(0)) == {}


# Memory.


def rounds(context: ContextRows, count: int, *, ragged: bool) -> list[int]:
    """Draft and commit; bytes that each round needed at its highest besides what was held."""
    rows, columns = len(context.lengths), 2
    needed = []
    for at in range(count):
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        new = stacked([drawn(np.random.default_rng(at), columns)] * rows)
        read = stacked([drawn(np.random.default_rng(at), 4)] * rows)
        counts = [1 + (at + row * ragged) % 3 for row in range(rows)]
        with context.block([columns] * rows) as block:
            queries = mx.ones((rows, HEADS, columns, KEY))
            found = [
                block.attend(number, queries, *pair, scale=1.0) for number, pair in enumerate(new)
            ]
        mx.eval(mx.depends(mx.concatenate(found), context.arrays()))
        del found
        context.append(read, counts)
        mx.eval(context.arrays())
        needed.append(mx.get_peak_memory() - held)
    return needed


@pytest.mark.parametrize("ragged", [False, True])
def test_a_round_copies_no_context_and_memory_grows_in_steps_alone(ragged: bool) -> None:
    context, _ = filled([2560 - 7 * ragged, 2560])
    rounds(context, 3, ragged=ragged)  # now there is room for those that follow
    capacity = [array.shape[2] for array in context.arrays()]
    whole = sum(array.nbytes for array in context.arrays())
    held = mx.get_active_memory()
    needed = rounds(context, 200, ragged=ragged)
    assert [array.shape[2] for array in context.arrays()] == capacity
    assert mx.get_active_memory() - held < 0.02 * whole
    largest = max(array.nbytes for array in context.arrays())
    # Scores of a block are as large as half an array here.
    assert max(needed) < 0.8 * largest, "no array is copied"


def test_the_measure_of_a_round_would_see_a_copy() -> None:
    context, _ = filled([2500, 2500])
    mx.eval(context.arrays())
    kept = [array[:] for array in context.arrays()]  # somebody else holds the buffers
    largest = max(array.nbytes for array in context.arrays())
    assert max(rounds(context, 1, ragged=False)) > largest
    del kept


def test_windows_stay_small_over_a_long_text_and_others_grow_in_steps() -> None:
    context = ContextRows.of(LAYERS, 2)
    seen = set()
    for at in range(60):
        count = (64, 3, 40)[at % 3]
        new = stacked([drawn(np.random.default_rng(at), count)] * 2)
        context.append(new, [count, count - at % 2])
        longest = max(context.lengths)
        mx.eval(context.arrays())
        capacities = [array.shape[2] for array in context.arrays()]
        assert all(room_for(longest, grown=False) <= c <= room_for(longest) for c in capacities[:2])
        assert capacities[:2] == capacities[4:6]
        assert max(capacities[2:4]) <= 6 + SLACK
        assert max(capacities[6:]) <= 17 + SLACK
        seen.add(capacities[0])
    assert longest > 2000
    assert len(seen) <= 9
