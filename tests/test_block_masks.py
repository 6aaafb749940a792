"""A drafter's block sees exactly its row's context and itself, however both lie in memory.

The reference is the definition: column c of row b stands at position ``length[b] + c``. Of the
context it sees what is less than a window before it, of the block the row's own columns, or those
up to itself where it is causal. What a column sees is read off the attention itself: keys are
zero, so all that is seen weighs the same, and a position's value is a one at its own place.

Shapes: B rows, W columns, P positions that are told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting.context import BlockContext, ContextLayer, ContextRows
from specdec.state.positions import RowPositions
from specdec.state.rings import SLACK, Ring
from specdec.state.windows import WindowRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

HEADS, QUERY_HEADS, SIZE = 2, 4, 8
IN_PLACE = SLACK + 1  # the widest window that a ring takes before it is known what is kept


@frozen
class Case:
    """Rows and a block on them.

    Attributes:
        layers: the window and whether the block is causal, per layer.
        pieces: counts per row that are appended, B ints each.
        columns: B ints.
        before: columns of a block that was opened and dropped before, of every row; 0 for none.
        plans: whether keys are read further than there are, as on CUDA.
    """

    layers: tuple[tuple[int | None, bool], ...]
    pieces: tuple[tuple[int, ...], ...]
    columns: tuple[int, ...]
    before: int = 0
    plans: bool = False

    @property
    def lengths(self) -> list[int]:
        return [sum(counts) for counts in zip(*self.pieces, strict=True)]

    @property
    def context_layers(self) -> list[ContextLayer]:
        return [ContextLayer(window) for window, _ in self.layers]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Texts up to three rings long, alike or not, read in short pieces and long ones."""
    windows = draw(st.lists(st.none() | st.integers(4, 24), min_size=1, max_size=3))
    rows = draw(st.integers(1, 3))
    longest = 3 * (max((w for w in windows if w), default=8) + SLACK)
    together = draw(st.booleans())
    targets = [draw(st.integers(0, longest))] * rows
    if not together:
        targets = [draw(st.integers(0, longest)) for _ in range(rows)]
    pieces, left = [], targets
    while any(left):
        most = draw(st.sampled_from([7, IN_PLACE, IN_PLACE + 8, longest]))
        pieces.append(tuple(min(most, each) for each in left))
        left = [each - took for each, took in zip(left, pieces[-1], strict=True)]
    width = st.integers(1, 12) | st.integers(IN_PLACE - 1, IN_PLACE + 7)
    columns = [draw(width)] * rows
    if not draw(st.booleans()):
        columns = [draw(width) for _ in range(rows)]
    return Case(
        layers=tuple((window, draw(st.booleans())) for window in windows),
        pieces=tuple(pieces) or ((0,) * rows,),
        columns=tuple(columns),
        before=draw(st.sampled_from([0, 0, 3, IN_PLACE + 5])),
        plans=draw(st.booleans()),
    )


def visible(case: Case, layer: int, row: int, column: int) -> set[int]:
    """Positions that a column sees, by the definition."""
    window, causal = case.layers[layer]
    length = case.lengths[row]
    own = length + column
    context = {p for p in range(length) if window is None or own - p < window}
    last = column if causal else case.columns[row] - 1
    return context | {length + other for other in range(last + 1)}


def built(
    case: Case, pair: Callable[[int, Sequence[int], int], tuple[mx.array, mx.array]]
) -> ContextRows:
    """The case's context; ``pair(layer, starts, width)`` gives keys and values of positions."""
    rows = len(case.columns)
    context = ContextRows.of(case.context_layers, rows)
    numbers = range(len(case.layers))
    starts = [0] * rows
    for counts in case.pieces:
        if any(counts):
            context.append([pair(layer, starts, max(counts)) for layer in numbers], counts)
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
    if case.before:
        with context.block([case.before] * rows) as block:
            for layer in numbers:
                new = pair(layer, [9] * rows, block.width)
                shape = (rows, HEADS, block.width, new[0].shape[3])
                mx.eval(block.attend(layer, mx.ones(shape), *new, scale=1.0))
    assert context.lengths == tuple(starts) == tuple(case.lengths)
    return context


def attended(
    case: Case, context: ContextRows, see: Callable[[BlockContext, int], mx.array]
) -> list[Floats]:
    """What each layer of the block gives, ``[B, heads, W, D']``."""
    with context.block(case.columns) as block:
        assert block.width >= max(case.columns)
        found = [see(block, layer) for layer in range(len(case.layers))]
    assert context.lengths == tuple(case.lengths)
    return [np.array(each).astype(np.float64) for each in found]


def planned(case: Case) -> mock._patch[mock.MagicMock]:
    """The shape policy of a backend that plans attention by shape, or none."""
    return mock.patch("specdec.state.positions.plans_by_shape", return_value=case.plans)


def assert_each_column_sees_what_is_defined(case: Case) -> None:
    places = max(case.lengths) + max(IN_PLACE + 7, *case.columns)

    def pair(layer: int, starts: Sequence[int], width: int) -> tuple[mx.array, mx.array]:
        at = np.array(starts)[:, None] + np.arange(width)
        values = np.eye(places + width, places)[at][:, None]
        shape = (len(starts), 1, width, 4)
        return mx.zeros(shape), mx.array(values.astype(np.float32)) + 0.0 * layer

    def see(block: BlockContext, layer: int) -> mx.array:
        keys, values = pair(layer, case.lengths, block.width)
        return block.attend(
            layer, mx.zeros(keys.shape), keys, values, scale=1.0, causal=case.layers[layer][1]
        )

    with planned(case):
        found = attended(case, built(case, pair), see)
    for layer, weights in enumerate(found):
        for row, columns in enumerate(case.columns):
            for column in range(columns):
                seen = visible(case, layer, row, column)
                expected = np.zeros(places)
                expected[sorted(seen)] = 1 / len(seen)
                np.testing.assert_allclose(
                    weights[row, 0, column], expected, atol=1e-5, err_msg=f"{layer, row, column}"
                )


@settings(max_examples=120)
@given(cases())
def test_each_column_sees_its_rows_context_and_its_block_and_nothing_else(case: Case) -> None:
    assert_each_column_sees_what_is_defined(case)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 24])
@pytest.mark.parametrize("columns", [(1, 5, 3), (6, 6, 6), (IN_PLACE, 2, 9), (IN_PLACE + 1, 4, 1)])
def test_a_block_stands_at_every_side_of_a_rings_end(
    columns: tuple[int, ...], window: int | None, causal: bool, plans: bool
) -> None:
    size = (window or 8) + SLACK
    for end in (size - 40, size - 3, size, 2 * size - 1):
        lengths = [max(0, end - 2), max(0, end), max(0, end - 31)]
        pieces = (tuple(n // 2 for n in lengths), tuple(n - n // 2 for n in lengths))
        case = Case(((window, causal),), pieces, columns, plans=plans)
        assert_each_column_sees_what_is_defined(case)


# Equal rows need the masks that MLX makes without an array.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 24])
@pytest.mark.parametrize("plans", [False, True])
def test_equal_rows_see_the_same(window: int | None, causal: bool, plans: bool) -> None:
    for length in (0, 1, 3, 19, 24, 60):
        for width in (1, 4, 5):
            case = Case(((window, causal),), ((length,) * 2,), (width,) * 2, plans=plans)
            assert_each_column_sees_what_is_defined(case)


def mask_of(lengths: Sequence[int], columns: Sequence[int], *, causal: bool) -> object:
    positions = RowPositions(lengths)
    positions.begin(max(columns))
    ring = Ring(positions, 16, 0)
    kind: Any = {"causal": causal, "dtype": mx.float32}
    whole = positions.block_mask(columns, **kind)
    of_ring = ring.block_mask(columns, **kind)
    short = max(lengths) + max(columns) <= 16
    assert (whole is of_ring) or not short
    assert positions.block_mask(columns, **kind) is whole
    assert ring.block_mask(columns, **kind) is of_ring, "made once"
    return whole


def test_a_mask_is_an_array_only_where_something_is_hidden_from_some() -> None:
    assert mask_of([5, 5], [4, 4], causal=False) is None
    assert mask_of([5, 5], [4, 4], causal=True) == "causal"
    assert mask_of([5, 5], [1, 1], causal=True) is None
    for lengths, columns in (([5, 4], [4, 4]), ([5, 5], [4, 3]), ([30, 5], [2, 2])):
        for causal in (False, True):
            mask = mask_of(lengths, columns, causal=causal)
            assert isinstance(mask, mx.array)
            assert mask.dtype == mx.bool_


@pytest.mark.parametrize("width", [6, IN_PLACE + 3])
def test_first_positions_that_a_ring_keeps_for_good_are_seen_by_every_column(width: int) -> None:
    positions = RowPositions([50, 7])
    positions.begin(width)
    ring = Ring(positions, 12, 3)
    mask = ring.block_mask([width, 2], causal=False, dtype=None)
    assert isinstance(mask, mx.array)
    rows = WindowRows(positions, 12, 3)
    at = mx.broadcast_to(positions.write_index().astype(mx.float32), (2, 1, width, 1))
    before = [mx.zeros((2, 1, 44, 1))] * 2
    for row, length in enumerate((50, 7)):
        for position in range(length):
            for array in before:
                array[row, 0, ring.place(position), 0] = position
    rows._buffers.held = before
    held, _ = rows.update_and_fetch(at, at)
    shown = np.broadcast_to(np.array(mask), (2, 1, width, held.shape[2]))
    for row, (length, columns) in enumerate(((50, width), (7, 2))):
        for column in range(columns):
            own = length + column
            context = {p for p in range(length) if p < 3 or own - p < 12 - 3}
            seen = np.array(held)[row, 0, :, 0][shown[row, 0, column]]
            assert sorted(seen) == sorted(context | set(range(length, length + columns)))


# Against plain attention.


@settings(max_examples=40)
@given(case=cases(), seed=st.integers(0, 99))
def test_attention_is_that_over_exactly_these_keys(case: Case, seed: int) -> None:
    rows, generator = len(case.columns), np.random.default_rng(seed)
    places = max(case.lengths) + max(IN_PLACE + 7, *case.columns)
    shape = (len(case.layers), 2, rows, HEADS, places + 60, SIZE)
    everything = generator.normal(size=shape).astype(np.float32)
    queries = generator.normal(size=(rows, QUERY_HEADS, IN_PLACE + 7, SIZE)).astype(np.float32)

    def pair(layer: int, starts: Sequence[int], width: int) -> tuple[mx.array, mx.array]:
        parts = [
            [each[row, :, start : start + width] for row, start in enumerate(starts)]
            for each in everything[layer]
        ]
        return mx.array(np.stack(parts[0])), mx.array(np.stack(parts[1]))

    def see(block: BlockContext, layer: int) -> mx.array:
        asked = mx.array(queries[:, :, : block.width])
        own = pair(layer, case.lengths, block.width)
        return block.attend(layer, asked, *own, scale=0.7, causal=case.layers[layer][1])

    with planned(case):
        found = attended(case, built(case, pair), see)
    for layer, given_ in enumerate(found):
        keys, values = everything[layer].astype(np.float64)
        for row, columns in enumerate(case.columns):
            for column in {0, columns // 2, columns - 1}:
                seen = sorted(visible(case, layer, row, column))
                for head in range(QUERY_HEADS):
                    own = head * HEADS // QUERY_HEADS
                    scores = 0.7 * keys[row, own, seen] @ queries[row, head, column]
                    weights = np.exp(scores - scores.max())
                    expected = weights @ values[row, own, seen] / weights.sum()
                    np.testing.assert_allclose(given_[row, head, column], expected, atol=2e-5)
