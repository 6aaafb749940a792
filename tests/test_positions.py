"""Row lengths follow a list of ints, and a mask shows each query exactly its row's positions."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError
from specdec.state.kernels import key_reach
from specdec.state.positions import RowPositions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.state.positions import Mask


def positions_of(lengths: Sequence[int] = (), *, plans: bool = False) -> RowPositions:
    """Row positions on a backend that does or does not build attention plans by key shape."""
    with mock.patch("specdec.state.positions.plans_by_shape", return_value=plans):
        return RowPositions(lengths)


def shown(mask: Mask, rows: int, width: int, keys: int) -> list[list[list[bool]]]:
    """A mask as ``[rows][width][keys]`` booleans, by what each of its forms means to MLX."""
    if isinstance(mask, mx.array):
        if mask.dtype != mx.bool_:  # added to the scores: nothing, or all there is
            assert mx.all((mask == 0) | (mask == -mx.inf)).item()
            mask = mask == 0
        full = mx.broadcast_to(mask if mask.ndim == 4 else mask[None, None], (rows, 1, width, keys))
        listed: list[list[list[bool]]] = full[:, 0].tolist()  # type: ignore[assignment]
        return listed
    if mask is None:
        return [[[True] * keys] * width] * rows
    # "causal": the last query sees every key, each one before it a key less.
    return [[[k <= keys - width + q for k in range(keys)] for q in range(width)]] * rows


def wanted(lengths: list[int], width: int, window: int | None, keys: int) -> list[list[list[bool]]]:
    """The same by brute force: query q of a row stands at its length + q."""
    return [
        [
            [
                key <= length + query and (window is None or length + query - key < window)
                for key in range(keys)
            ]
            for query in range(width)
        ]
        for length in lengths
    ]


def offsets(offset: int | mx.array, rows: int) -> list[int]:
    if isinstance(offset, int):
        return [offset] * rows
    assert offset.dtype == mx.int32
    values: list[int] = offset.tolist()  # type: ignore[assignment]
    return values


lengths_of_rows = st.lists(st.integers(0, 3) | st.integers(0, 20), min_size=1, max_size=5)


@given(st.data())
def test_lengths_follow_a_list_through_any_rounds_and_replacements(data: st.DataObject) -> None:
    model = data.draw(lengths_of_rows)
    plans = data.draw(st.booleans(), label="plans")
    positions = positions_of(model, plans=plans)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans(), label="replace"):
            model = data.draw(lengths_of_rows)
            positions.replace(model)
        # Whether somebody looks between rounds must not matter.
        if data.draw(st.booleans(), label="look"):
            assert offsets(positions.end, len(model)) == model
            assert positions.write_index().size == 0
        width = data.draw(st.integers(1, 6))
        positions.begin(width)
        assert positions.width == width
        assert positions.lengths == tuple(model)
        assert positions.limit == max(model) + width
        assert positions.reach == (key_reach(positions.limit, width) if plans else positions.limit)
        assert positions.uniform == (len(set(model)) == 1)
        assert isinstance(positions.start, int) == positions.uniform
        assert isinstance(positions.end, int) == positions.uniform
        assert offsets(positions.start, len(model)) == model
        assert offsets(positions.end, len(model)) == [length + width for length in model]
        assert positions.write_index().tolist() == [
            [[[length + i] for i in range(width)]] for length in model
        ]
        kept = data.draw(
            st.none() | st.lists(st.integers(0, width), min_size=len(model), max_size=len(model))
        )
        positions.finish(kept)
        grown = [width] * len(model) if kept is None else kept
        model = [length + grew for length, grew in zip(model, grown, strict=True)]
        assert positions.width == 0
        assert positions.lengths == tuple(model)


@settings(max_examples=400)
@given(
    lengths_of_rows,
    st.integers(1, 6),
    st.none() | st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, mx.float32, mx.bfloat16]),
    st.booleans(),
)
def test_a_mask_shows_each_query_exactly_its_rows_positions(
    lengths: list[int],
    width: int,
    window: int | None,
    as_array: bool,
    dtype: mx.Dtype | None,
    plans: bool,
) -> None:
    positions = positions_of(lengths, plans=plans)
    mask = positions.mask(width, window, as_array, dtype)
    again = positions.mask(width, window, as_array, dtype)
    positions.begin(width)
    keys = positions.reach
    assert shown(mask, len(lengths), width, keys) == wanted(lengths, width, window, keys)
    assert again is mask, "made once per window for all layers"
    assert positions.mask(width, window, as_array, dtype) is mask
    if as_array and width > 1:
        assert isinstance(mask, mx.array)
    if isinstance(mask, mx.array):
        additive = plans and width > 1 and not as_array and dtype is not None
        assert mask.dtype == (dtype if additive else mx.bool_)


def test_layers_of_different_windows_get_a_mask_each() -> None:
    positions = positions_of([9, 5])
    for window in (None, 3, 6, 3, None):
        mask = positions.mask(2, window, False, None)
        assert shown(mask, 2, 2, 11) == wanted([9, 5], 2, window, 11)


def test_layers_of_different_types_get_a_mask_each() -> None:
    positions = positions_of([9, 5], plans=True)
    for dtype in (mx.bfloat16, mx.float32, None, mx.bfloat16):
        mask = positions.mask(2, None, False, dtype)
        assert isinstance(mask, mx.array)
        assert mask.dtype == (dtype or mx.bool_)
        assert shown(mask, 2, 2, 256) == wanted([9, 5], 2, None, 256)


def test_a_mask_is_right_again_after_the_rows_moved() -> None:
    positions = positions_of([2, 5])
    positions.mask(2, None, False, None)
    positions.begin(2)
    positions.finish([1, 2])
    assert shown(positions.mask(2, None, False, None), 2, 2, 9) == wanted([3, 7], 2, None, 9)
    positions.replace([7, 0])
    assert shown(positions.mask(2, None, False, None), 2, 2, 9) == wanted([7, 0], 2, None, 9)


@given(st.integers(1, 100_000), st.integers(1, 100))
@example(3, 2)
def test_keys_are_read_a_little_further_only_where_a_plan_would_be_built(
    limit: int, width: int
) -> None:
    reach = key_reach(limit, width)
    assert reach >= limit
    if width == 1 or width > 64 or width == limit:
        assert reach == limit
    else:
        assert reach % 256 == 0
        assert reach - limit < max(256, limit / 8)
    positions = positions_of([limit, limit - 1])
    positions.begin(width)
    assert positions.reach == limit + width, "and nowhere else"


def test_a_row_that_grows_to_any_length_meets_few_shapes() -> None:
    assert len({key_reach(n, 5) for n in range(6, 1024)}) == 4
    assert len({key_reach(n, 5) for n in range(6, 2**17)}) <= 16 * 6 + 1
    needs = [(needed, most) for most in range(1, 9) for needed in range(1, most + 1)]
    for needed, most in needs:
        assert positions_of([7]).window_width(needed, most) == needed
        planned = positions_of([7], plans=True).window_width(needed, most)
        assert planned == (1 if needed == 1 else most)


def test_the_shortest_ragged_rows_can_be_masked_where_plans_are_built() -> None:
    mask = positions_of([0, 1], plans=True).mask(2, None, False, mx.float32)
    assert shown(mask, 2, 2, 256) == wanted([0, 1], 2, None, 256)


def test_equal_rows_get_the_masks_that_mlx_needs_no_array_for() -> None:
    positions = positions_of([4, 4])
    assert positions.mask(3, None, False, None) == "causal"
    assert positions.mask(1, None, False, None) is None
    assert positions.mask(1, None, True, None) is None
    ragged = positions_of([4, 3]).mask(1, None, False, None)
    assert isinstance(ragged, mx.array)
    assert ragged.shape == (2, 1, 1, 5)


def test_no_rows_have_no_positions() -> None:
    positions = positions_of()
    assert positions.lengths == ()
    assert positions.start == 0
    positions.begin(3)
    assert positions.limit == 3
    positions.finish([])
    assert positions.lengths == ()


@pytest.mark.parametrize("kept", [[0, 4], [-1, 0], [3], [1, 1, 1], []])
def test_a_count_outside_the_window_is_refused_and_changes_nothing(kept: list[int]) -> None:
    positions = positions_of([5, 7])
    positions.begin(3)
    with pytest.raises(RollbackError, match="3 positions over 2 rows") as raised:
        positions.finish(kept)
    assert "\n" not in str(raised.value)
    assert positions.width == 3
    assert positions.lengths == (5, 7)
    positions.finish([0, 3])
    assert positions.lengths == (5, 10)


@pytest.mark.parametrize("kept", [[3, 2], [0, 0], [0, 3], [4, 3], [3]])
def test_a_prompts_chunk_is_kept_whole(kept: list[int]) -> None:
    positions = positions_of([5, 7])
    positions.begin(3, reading=True)
    assert positions.reading
    for refuse in (positions.check, positions.finish):
        with pytest.raises(RollbackError) as raised:
            refuse(kept)
        assert "\n" not in str(raised.value)
    assert (positions.width, positions.lengths) == (3, (5, 7))
    positions.check([3, 3])
    positions.check(None)
    assert (positions.width, positions.lengths) == (3, (5, 7)), "only looked at"
    positions.finish([3, 3])
    assert positions.lengths == (8, 10)
    positions.begin(3)
    assert not positions.reading
    positions.finish([1, 0])
    assert positions.lengths == (9, 10)


def test_what_all_layers_need_is_made_once_while_the_rows_stand_still() -> None:
    positions = positions_of([5, 7])
    made: list[str] = []

    def make(name: str) -> Callable[[], list[str]]:
        def named() -> list[str]:
            made.append(name)
            return [name]

        return named

    first = positions.once("places", make("a"))
    assert positions.once("places", make("b")) is first == ["a"]
    assert positions.once(("places", 3), make("c")) == ["c"]
    positions.begin(2)
    assert positions.once("places", make("d")) is first, "it may be asked for before the window"
    positions.finish([0, 0])
    moves: list[Callable[[], None]] = [
        lambda: positions.replace([7, 5]),
        lambda: positions.begin(1),
    ]
    for move in moves:
        assert positions.once("places", make("e")) is not first
        move()
    positions.finish([1, 0])
    assert positions.once("places", make("f")) == ["f"]
    assert made == ["a", "c", "e", "e", "f"]


def test_a_round_cannot_be_begun_twice() -> None:
    positions = positions_of([5])
    positions.begin(3)
    with pytest.raises(RoundOpenError):
        positions.begin(1)
    assert positions.width == 3


@pytest.mark.parametrize("finish", [lambda p: p.finish(None), lambda p: p.finish([0])])
def test_a_round_that_was_not_begun_cannot_end(finish: Callable[[RowPositions], None]) -> None:
    positions = positions_of([5])
    with pytest.raises(NoOpenRoundError):
        finish(positions)
    assert positions.lengths == (5,)


@pytest.mark.parametrize("width", [0, -1])
def test_a_window_has_at_least_one_position(width: int) -> None:
    positions = RowPositions([3])
    with pytest.raises(RollbackError, match=f"a round of {width} positions"):
        positions.begin(width)
    assert positions.width == 0
