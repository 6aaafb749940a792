"""Rows of sliding windows: each query sees what the rule says, whatever was rolled back before it.

Rings of several sizes, with and without kept first positions, beside full attention in one state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import RotatingKVCache
from row_oracle import (
    HEADS,
    KEY,
    VALUE,
    Full,
    RowPrograms,
    Window,
    go_on_in_mlx_lm,
    in_mlx_lm,
    leaves,
)

from specdec.errors import RollbackError
from specdec.state import RaggedState, RowBatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

SLACK = 32  # what a row's ring may have besides its window
POSITION = HEADS * (KEY + VALUE) * 4  # bytes


def backend(*, plans: bool) -> AbstractContextManager[object]:
    """A backend that does or does not build attention plans by key shape (state/kernels.py)."""
    return mock.patch("specdec.state.positions.plans_by_shape", return_value=plans)


@pytest.fixture(autouse=True, scope="module")
def _without_plans() -> Iterator[None]:
    with backend(plans=False):
        yield


def programs(*layers: Window | Full) -> RowPrograms:
    return RowPrograms(layers, lambda: [layer.cache() for layer in layers])


def windows(keep: int, most: int = 40) -> st.SearchStrategy[Window]:
    sizes = st.integers(5, most)
    if keep:
        return st.builds(Window, sizes, st.just(keep))
    narrower = sizes.flatmap(
        lambda size: st.builds(
            Window, st.just(size), window_size=st.none() | st.just(size) | st.integers(1, size)
        )
    )
    return st.builds(Window, sizes) | narrower


layer_lists = st.tuples(windows(0), windows(4), st.builds(Full, window_size=st.none() | st.just(9)))
short = st.integers(1, 9)
widths = st.sampled_from([1, 1, 2, 3, 5, 8]) | st.integers(1, 60)


class Rows:
    """A state, its rows as lists of tags, and what left it."""

    def __init__(self, programs: RowPrograms, data: st.DataObject) -> None:
        self.programs, self.data = programs, data
        self.state = programs.cold()
        self.rows: list[list[int]] = [[]]

    def draw(self, strategy: st.SearchStrategy[Any], label: str) -> Any:
        return self.data.draw(strategy, label=label)

    def counts(self, most: int, label: str) -> list[int]:
        count = len(self.rows)
        found: list[int] = self.draw(
            st.lists(st.integers(0, most), min_size=count, max_size=count), label
        )
        return found

    def round(self) -> None:
        width = self.draw(widths, "width")
        kept = self.counts(width, "kept")
        as_array = self.draw(st.booleans(), "mask as array")
        self.rows = self.programs.round(self.state, self.rows, width, kept, as_array=as_array)

    def single(self) -> None:
        """A window of one position that all keep, and some give back."""
        everyone = [1] * len(self.rows)
        self.rows = self.programs.round(self.state, self.rows, 1, everyone)
        counts = self.counts(1, "taken back")
        self.state.take_back(counts)
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    def take_in(self, caches: Sequence[Any], row: list[int]) -> None:
        """A row that lives in mlx-lm's caches joins, perhaps after some chunks more."""
        state = RaggedState(caches)
        assert state.lengths == (len(row),)
        for width in self.draw(st.lists(st.integers(1, 50), max_size=2), "chunks"):
            row = self.programs.read(state, row, width)
        self.state.prepare_append([state]).commit()
        self.rows.append(row)

    def join(self) -> None:
        if len(self.rows) < 4:
            self.take_in(*self.in_mlx_lm(self.programs.make(), []))

    def in_mlx_lm(self, caches: list[Any], row: list[int]) -> tuple[list[Any], list[int]]:
        """mlx-lm's own code goes on with a row, and perhaps trims it."""
        steps = st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), max_size=8)
        for width in self.draw(steps, "widths in mlx-lm"):
            [new] = self.programs.tags(1, width)
            row = go_on_in_mlx_lm(self.programs.layers, caches, row, new)
        if row and all(cache.is_trimmable() for cache in caches):
            count = self.draw(st.integers(0, len(row)), "trimmed")
            assert {cache.trim(count) for cache in caches} == {count}
            row = row[: len(row) - count]
        return caches, row

    def filter(self) -> None:
        order = self.draw(st.permutations(range(len(self.rows))), "order")
        keep = order[: self.draw(st.integers(1, len(order)), "rows")]
        self.state.filter_rows(keep)
        self.rows = [self.rows[row] for row in keep]

    def come_back(self) -> None:
        """A row leaves, goes on in mlx-lm's classes, and joins again."""
        number = self.draw(st.integers(0, len(self.rows) - 1), "row")
        row = self.rows[number]
        mine = self.programs.make()
        if self.draw(st.booleans(), "written back"):
            self.state.write_back(number, mine)
        else:
            mine = self.state.extract_row(number)
        caches, row = self.in_mlx_lm(mine, row)
        others = [other for other in range(len(self.rows)) if other != number]
        if others:
            self.state.filter_rows(others)
            self.rows = [self.rows[other] for other in others]
            self.take_in(caches, row)
        else:
            self.state, self.rows = RaggedState(caches), [row]

    def check(self) -> None:
        assert self.state.lengths == tuple(map(len, self.rows))
        for number, row in enumerate(self.rows):
            width = 1 + number % 2 * 3
            [new] = self.programs.tags(1, width)
            go_on_in_mlx_lm(self.programs.layers, self.state.extract_row(number), row, new)
        for caches, chosen in self.state.row_caches:
            for layer, cache in zip(self.programs.layers, leaves(caches), strict=True):
                if isinstance(layer, Window):
                    bytes_held = sum(array.nbytes for array in cache.arrays())
                    assert bytes_held <= len(chosen) * (layer.max_size + SLACK) * POSITION


VERBS = ("round", "round", "round", "round", "single", "join", "filter", "come_back")


def run_program(data: st.DataObject) -> None:
    rows = Rows(programs(*data.draw(layer_lists, label="layers")), data)
    rows.state, rows.rows = RaggedState(rows.programs.make()), [[]]
    rows.join()
    for _ in range(data.draw(st.integers(1, 8), label="steps")):
        getattr(rows, data.draw(st.sampled_from(VERBS), label="verb"))()
        rows.check()


@pytest.mark.parametrize("plans", [False, True])
@settings(max_examples=40)
@given(st.data())
def test_every_query_sees_its_row_s_window_and_nothing_else(
    plans: bool, data: st.DataObject
) -> None:
    with backend(plans=plans):
        run_program(data)


def read_row(programs: RowPrograms, length: int) -> tuple[RaggedState, list[int]]:
    state = programs.cold()
    return state, programs.read(state, [], length) if length else []


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, 32, 33, 34, 60])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_window_is_dropped_at_every_place_of_the_ring(keep: int, width: int, plans: bool) -> None:
    size = 6
    each = programs(Window(size, keep))
    with backend(plans=plans):
        for length in (0, 3, 5, 6, 7, size + SLACK - 1, size + SLACK, size + SLACK + 1, 77):
            state, row = read_row(each, length)
            other, short_row = read_row(each, 2)
            state.prepare_append([other]).commit()
            rows = [row, short_row]
            for kept in ([0, 0], [0, width], [width // 2, 1], [width, 0]):
                rows = each.round(state, rows, width, kept)
                each.round(state, rows, 1, [0, 0])  # what is seen is checked


@pytest.mark.parametrize("singles", [0, 3, 60])
@pytest.mark.parametrize("chunk", [0, 1, 3, 12, 90])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_cache_that_mlx_lm_advanced_is_taken_over_where_it_stands(
    keep: int, chunk: int, singles: int
) -> None:
    each = programs(Window(12, keep))
    caches: list[Any] = each.make()
    row: list[int] = []
    for width in [chunk] * bool(chunk) + [1] * singles:
        [new] = each.tags(1, width)
        row = go_on_in_mlx_lm(each.layers, caches, row, new)
    state = RaggedState(caches)
    rows = each.round(state, [row], 5, [3])
    rows = each.round(state, rows, 1, [1])
    rows = each.round(state, rows, 40, [17])
    [new] = each.tags(1, 4)
    go_on_in_mlx_lm(each.layers, state.extract_row(0), rows[0], new)


@pytest.mark.parametrize("read", [1, 8])
def test_a_cache_that_mlx_lm_trimmed_to_nothing_is_a_cold_one(read: int) -> None:
    each = programs(Window(12), Window(9, 4), Full())
    caches = each.make()
    go_on_in_mlx_lm(each.layers, caches, [], each.tags(1, read)[0])
    assert {cache.trim(read) for cache in caches} == {read}
    state = RaggedState(caches)
    rows = each.round(state, [[]], 5, [3])
    each.round(state, rows, 5, [3])


# Memory.


@pytest.mark.parametrize(("size", "keep"), [(5, 4), (16, 0), (40, 4)])
def test_ten_thousand_positions_take_no_more_than_the_ring(size: int, keep: int) -> None:
    each = programs(Window(size, keep))
    state, row = read_row(each, 20)
    other, second = read_row(each, 1)
    state.prepare_append([other]).commit()
    rows, random = [row, second], np.random.default_rng(0)
    bound = (size + SLACK) * POSITION
    while len(rows[0]) < 10_000:
        width = int(random.choice([1, 7, 33, 34, 120]))
        kept = [width, int(random.integers(0, width + 1))]
        if len(rows[0]) < 300 or random.integers(0, 20) == 0:
            rows = each.round(state, rows, width, kept)
        else:
            new = each.tags(2, width)
            state.begin_round(width)
            each.append(state, new)
            state.rollback(kept)
            rows = [[*row, *own[:n]] for row, own, n in zip(rows, new, kept, strict=True)]
        assert state.nbytes <= 2 * bound
    rows = each.round(state, rows, 9, [4, 9])
    assert state.bytes_at(20_000) == bound
    assert state.bytes_at(1) <= bound
    state.filter_rows([1])
    assert state.nbytes <= bound
    assert sum(cache.nbytes for cache in state.extract_row(0)) <= size * POSITION


# Prompts.


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("chunks", [(3, 3, 3), (30, 1, 30), (7, 90, 2), (12, 12), (11, 1, 1, 25)])
def test_a_prompt_in_chunks_sees_what_mlx_lm_shows_it(keep: int, chunks: Sequence[int]) -> None:
    each = programs(Window(12, keep), Window(40, keep))
    state = each.cold()
    row: list[int] = []
    for width in chunks:
        row = each.read(state, row, width)
    each.round(state, [row], 3, [2])


def test_a_chunk_is_read_by_one_row_and_whole() -> None:
    each = programs(Window(6))
    state, row = read_row(each, 9)
    new = each.tags(1, 4)
    state.begin_round(4, reading=True)
    each.append(state, new)
    with pytest.raises(RollbackError, match="chunk of 4 positions cannot keep"):
        state.rollback([3])
    assert (state.lengths, state.open_width) == ((9,), 4)
    state.rollback([4])
    row += new[0]
    other, _ = read_row(each, 2)
    state.prepare_append([other]).commit()
    state.begin_round(2, reading=True)
    with pytest.raises(RollbackError, match="read by 2 rows"):
        each.append(state, each.tags(2, 2))


# The rule itself, and that the checks can fail.


@given(windows(0), st.integers(0, 80), st.integers(1, 60))
def test_without_kept_positions_mlx_lm_shows_a_chunk_what_the_rule_says(
    layer: Window, before: int, width: int
) -> None:
    row = list(range(1, before + width + 1))
    assert np.array_equal(in_mlx_lm(layer, row, width, 0), layer.sees(len(row), width))


@given(windows(0) | windows(4), st.integers(0, 120))
def test_mlx_lm_shows_a_single_position_what_the_rule_says(layer: Window, before: int) -> None:
    if layer.keep:
        layer = Window(layer.max_size, layer.keep)
    row = list(range(1, before + 2))
    assert np.array_equal(in_mlx_lm(layer, row, 1, 0), layer.sees(len(row), 1))


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("length", [5, 30, 90])
def test_a_wrong_count_would_be_noticed(length: int, wrong: int, width: int) -> None:
    each = programs(Window(12, 4))
    state, row = read_row(each, length)
    new = each.window(state, [row], width)
    state.rollback([2 + wrong])
    with pytest.raises(AssertionError, match="layer 0"):
        each.window(state, [[*row, *new[0][:2]]], 4)


def test_a_window_of_another_size_would_be_noticed() -> None:
    wrong = RowPrograms([Window(12)], lambda: [RotatingKVCache(13)])
    state, row = read_row(wrong, 12)
    with pytest.raises(AssertionError, match="layer 0"):
        wrong.round(state, [row], 4, [2])


def test_rows_in_each_other_s_places_would_be_noticed() -> None:
    each = programs(Window(12))
    state, row = read_row(each, 8)
    other, second = read_row(each, 8)
    state.prepare_append([other]).commit()
    with pytest.raises(AssertionError, match="another row"):
        each.round(state, [second, row], 2, [1, 1])


def test_windows_of_different_size_do_not_share_a_ring() -> None:
    narrow, wide = ([RotatingKVCache(size)] for size in (8, 12))
    keys = {RowBatch(caches).key(0) for caches in (narrow, wide, [RotatingKVCache(8, 4)])}
    assert len(keys) == 3
