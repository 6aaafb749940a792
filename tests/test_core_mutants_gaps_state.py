"""What mutants of the target's rows got away with: places of rows, of rings, of formats."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import frozen
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from row_oracle import Full, RowPrograms, Window

from specdec.errors import RollbackError
from specdec.state import RaggedState, Together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def programs(*layers: Window | Full) -> RowPrograms:
    return RowPrograms(layers, lambda: [layer.cache() for layer in layers])


@pytest.mark.parametrize("keep", [0, 4])
def test_a_lone_row_is_written_around_the_end_of_its_ring(keep: int) -> None:
    # Alone its places are plain numbers: no array of them is scattered to.
    each = programs(Window(6, keep))
    state = each.cold()
    rows: list[list[int]] = [[]]
    for width, kept in [(5, 5), (5, 3), (4, 4)] * 12:
        rows = each.round(state, rows, width, [kept])
    assert len(rows[0]) == 144


def test_rows_that_change_places_take_what_they_hold_with_them() -> None:
    each = programs(Full(), Window(6))
    state = each.cold()
    rows: list[list[int]] = [[]]
    rows = each.round(state, rows, 3, [3])
    for length in (7, 12):
        other = each.cold()
        rows.append(each.read(other, [], length))
        state.prepare_append([other]).commit()
    for order in ([1, 2, 0], [2, 1, 0], [0, 2, 1]):
        state.filter_rows(order)
        rows = [rows[row] for row in order]
        rows = each.round(state, rows, 4, [1, 0, 2])


@pytest.mark.parametrize("order", [[1, 0], [1], [0]])
def test_a_row_that_changed_its_place_can_take_back_what_it_kept_itself(order: list[int]) -> None:
    each = programs(Full(), Window(6))
    state = each.cold()
    rows = [each.read(state, [], 9), []]
    state.prepare_append([each.cold()]).commit()
    rows = each.round(state, rows, 1, [0, 1])
    state.filter_rows(order)
    rows = [rows[row] for row in order]
    counts = [int(row == 1) for row in order]  # the row that kept a position
    if 0 in order:
        with pytest.raises(RollbackError, match="take back"):
            state.take_back([1 - count for count in counts])
    state.take_back(counts)
    rows = [row[: len(row) - count] for row, count in zip(rows, counts, strict=True)]
    assert state.lengths == tuple(map(len, rows))
    each.round(state, rows, 3, [1] * len(rows))


def test_rows_that_are_quantized_otherwise_do_not_share_a_buffer() -> None:
    window = mx.ones((1, 1, 2, 64))
    states = []
    for group_size, bits in ((64, 4), (64, 8), (32, 8), (64, 4)):
        state = RaggedState([QuantizedKVCache(group_size, bits)])
        state.begin_round(2)
        state.row_caches[0][0][0].update_and_fetch(window, window)
        state.commit_round()
        states.append(state)
    states[0].prepare_append(states[1:]).commit()
    assert [list(rows) for _, rows in states[0].row_caches] == [[0, 3], [1], [2]]
    for row, (group_size, bits) in enumerate(((64, 4), (64, 8), (32, 8), (64, 4))):
        [own] = states[0].extract_row(row)
        assert (own.group_size, own.bits, own.offset) == (group_size, bits, 2)
        unpack = partial(mx.dequantize, group_size=group_size, bits=bits)
        for packed in (own.keys, own.values):
            assert mx.allclose(unpack(*packed), window, atol=0.1).item()


@pytest.mark.parametrize(
    ("make", "together"),
    [
        (KVCache, Together.EQUAL),
        (lambda: RotatingKVCache(6), Together.EQUAL),
        (lambda: ChunkedKVCache(5), Together.ANY),
    ],
    ids=["attention", "window", "chunked"],
)
def test_rows_of_one_batch_move_apart_when_their_lengths_do_and_together_again(
    make: Callable[[], Any], together: Together
) -> None:
    state, other = (RaggedState([make()], together=together) for _ in range(2))
    state.prepare_append([other]).commit()
    # Where only the model's code asks for equal lengths, equal by chance is not enough.
    by_chance = [[0, 1]] if together is Together.ANY else [[0], [1]]
    for width, kept, after in (
        (6, [6, 6], [[0, 1]]),
        (4, [0, 4], [[0], [1]]),
        (1, [1, 1], [[0], [1]]),
        (4, [4, 0], by_chance),
        (1, [1, 1], [[0, 1]]),
        (2, [1, 2], [[0], [1]]),
    ):
        lengths = state.lengths
        state.begin_round(width)
        for (layer,), rows in state.row_caches:
            assert layer.offset == lengths[rows[0]]
            window = mx.zeros((len(rows), 1, width, 2))
            layer.update_and_fetch(window, window)
        state.rollback(kept)
        assert state.lengths == tuple(n + k for n, k in zip(lengths, kept, strict=True))
        assert [list(rows) for _, rows in state.row_caches] == after


def test_a_chunk_that_does_not_end_where_a_step_does_is_held_whole() -> None:
    size = 12  # 256 is no multiple of it
    state = RaggedState([ChunkedKVCache(size)])
    for position in range(600):
        state.begin_round(2)
        [layer] = state.row_caches[0][0]
        layer.maybe_trim_front()
        window = mx.array([[position], [-1]], mx.float32)[None, None]
        keys, _ = layer.update_and_fetch(window, window)
        held = list(range(layer.start_position, position + 1))
        assert held[0] <= position // size * size
        assert keys[0, 0, :, 0].tolist() == [*held, -1]
        state.rollback([1])


@frozen(eq=False)
class Sum:
    """A recurrent update that nobody kept the states of: a running sum of ``[B, W]``."""

    window: mx.array
    slots: frozenset[int] = frozenset({0})

    def __call__(self, cache: ArraysCache, rows: Sequence[int] | None, kept: int) -> None:
        window = self.window if rows is None else self.window[mx.array(list(rows))]
        cache[0] = cache[0] + window[:, :kept].sum(axis=1)


@pytest.mark.parametrize("kept", [[2, 2, 1, 2], [0, 1, 0, 1], [3, 0, 3, 0], [1, 3, 0, 3]])
def test_rows_that_keep_as_much_as_each_other_keep_their_places(kept: list[int]) -> None:
    states = []
    for start in (1000, 2000, 3000, 4000):
        cache = ArraysCache(1)
        cache[0] = mx.array([start])
        states.append(RaggedState([cache]))
    state = states[0]
    state.prepare_append(states[1:]).commit()
    state.begin_round(3)
    [layer] = state.row_caches[0][0]
    window = mx.array([[1, 10, 100], [2, 20, 200], [3, 30, 300], [4, 40, 400]])
    update = Sum(window)
    layer.add_replay(update)
    update(layer, None, 3)
    state.rollback(kept)
    want = [
        1000 * row + row * int("0" + "1" * count)
        for row, count in zip((1, 2, 3, 4), kept, strict=True)
    ]
    got = [state.extract_row(row)[0][0].item() for row in range(4)]
    assert got == want
