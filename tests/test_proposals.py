"""Nothing that is no valid draft reaches the target, and what was wrong is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import DeviceProposal, Proposal
from specdec.verify.flight import window_tokens
from specdec.verify.proposals import check_device, check_host, cut_device

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 64
BIG = 2**31 - 1

# Anything that a confused drafter might return as one id.
ITEMS = st.one_of(
    st.integers(0, VOCAB - 1),
    st.sampled_from([-1, VOCAB, BIG, 2**40, -(2**63), 1.0, float("nan"), None, "7", b"7", [7], ()]),
    st.integers(0, VOCAB - 1).map(np.int32),
    st.integers(-2, VOCAB + 2).map(np.int64),
    st.booleans(),
)


def is_valid(item: object) -> bool:
    return isinstance(item, int | np.integer) and 0 <= int(item) < VOCAB


def valid_start(row: Sequence[object], depth: int) -> list[int]:
    kept = list(row)[:depth]
    bad = next((i for i, item in enumerate(kept) if not is_valid(item)), len(kept))
    return [int(item) for item in kept[:bad] if isinstance(item, int | np.integer)]


@settings(max_examples=1000, deadline=None)
@given(rows=st.lists(st.tuples(st.lists(ITEMS, max_size=6), st.integers(0, 5)), max_size=4))
def test_each_row_keeps_its_valid_start_and_only_a_wrong_row_is_blamed(
    rows: list[tuple[list[Any], int]],
) -> None:
    proposal = [row for row, _ in rows]
    depths = [depth for _, depth in rows]
    for said in (proposal, tuple(map(tuple, proposal)), Proposal(proposal)):
        drafts, faults = check_host(said, depths, VOCAB)
        assert drafts == [valid_start(row, depth) for row, depth in rows]
        assert all(type(token) is int for draft in drafts for token in draft)
        for (row, _), draft, fault in zip(rows, drafts, faults, strict=True):
            assert (fault is None) == (len(draft) == len(row))


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        (1.0, "a draft is 1.0; ids are whole numbers"),
        (None, "a draft is None; ids are whole numbers"),
        ("7", "a draft is '7'; ids are whole numbers"),
        (-1, "a draft is -1; ids are 0 to 63"),
        (VOCAB, "a draft is 64; ids are 0 to 63"),
        (BIG, "a draft is 2147483647; ids are 0 to 63"),
    ],
)
def test_the_fault_names_the_item_and_what_would_be_right(item: object, fault: str) -> None:
    assert check_host([[3, item, 4]], [4], VOCAB) == ([[3]], [fault])


def test_the_ids_of_other_number_types_are_taken_at_their_value() -> None:
    drafts, faults = check_host([[np.int64(5), np.uint8(6), True, False]], [4], VOCAB)
    assert (drafts, faults) == ([[5, 6, 1, 0]], [None])


def test_more_drafts_than_were_asked_for_are_cut() -> None:
    drafts, faults = check_host([[1, 2, 3], [4]], [2, 0], VOCAB)
    assert drafts == [[1, 2], []]
    assert faults == [
        "3 drafts were proposed where at most 2 were asked for",
        "1 drafts were proposed where at most 0 were asked for",
    ]


@pytest.mark.parametrize(
    ("proposal", "said"),
    [
        (None, "NoneType"),
        (7, "int"),
        ("77", "str"),
        ([], "0"),
        ([[1]], "1"),
        ([[1], [2], [3]], "3"),
        (np.array([[1], [2]]), "ndarray"),
        (mx.array([[1], [2]]), "array"),
        ({0: [1], 1: [2]}, "dict"),
    ],
)
def test_a_proposal_that_is_not_one_list_a_row_is_dropped_and_blames_all(
    proposal: object, said: str
) -> None:
    drafts, faults = check_host(proposal, [3, 3], VOCAB)
    assert drafts == [[], []]
    assert faults == [f"draft() returned {said} where 2 lists were asked for"] * 2


@pytest.mark.parametrize("row", [None, 5, "12", {1, 2}, np.array([1, 2])])
def test_a_row_that_is_no_list_blames_that_row_alone(row: object) -> None:
    drafts, faults = check_host([[1, 2], row], [3, 3], VOCAB)
    assert drafts == [[1, 2], []]
    assert faults[0] is None
    assert faults[1] == (f"draft() returned {type(row).__name__} where a list of ids was asked for")


def nothing(_ids: Sequence[int]) -> Sequence[Sequence[int]]:
    return []


def proposed(tokens: Any, lengths: Any = None) -> DeviceProposal:
    return DeviceProposal(tokens=tokens, resolve=nothing, lengths=lengths)


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_device_ids_of_every_whole_number_type_are_taken(dtype: mx.Dtype) -> None:
    assert check_device(proposed(mx.zeros((2, 3), dtype)), [3, 1]) is None
    assert check_device(proposed(mx.zeros((2, 1), dtype), mx.zeros((2,), dtype)), [3, 1]) is None


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (mx.zeros((2, 3)), "tokens of mlx.core.float32"),
        (mx.zeros((2, 3), mx.bfloat16), "tokens of mlx.core.bfloat16"),
        (mx.zeros((2, 3), mx.bool_), "tokens of mlx.core.bool"),
        (np.zeros((2, 3), np.float64), "tokens of float64"),
        (np.zeros((2, 3), np.int32), "tokens of int32"),
        ([[1, 2], [3, 4]], "tokens of <class 'list'>"),
        (None, "tokens of <class 'NoneType'>"),
        (mx.zeros((3, 2), mx.int32), "tokens of shape (3, 2), not (2, 1..3)"),
        (mx.zeros((2, 4), mx.int32), "tokens of shape (2, 4), not (2, 1..3)"),
        (mx.zeros((2, 0), mx.int32), "tokens of shape (2, 0), not (2, 1..3)"),
        (mx.zeros((2,), mx.int32), "tokens of shape (2,), not (2, 1..3)"),
        (mx.zeros((2, 3, 1), mx.int32), "tokens of shape (2, 3, 1), not (2, 1..3)"),
    ],
)
def test_device_ids_of_a_wrong_type_or_shape_are_named(tokens: Any, said: str) -> None:
    fault = check_device(proposed(tokens), [3, 1])
    assert fault == f"draft_device() returned {said}"


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (mx.zeros((2,)), "lengths that are no integers"),
        (mx.zeros((2,), mx.bool_), "lengths that are no integers"),
        ([1, 2], "lengths that are no integers"),
        (np.zeros((2,), np.int32), "lengths that are no integers"),
        (mx.zeros((3,), mx.int32), "lengths of shape (3,), not (2,)"),
        (mx.zeros((2, 1), mx.int32), "lengths of shape (2, 1), not (2,)"),
        (mx.array(2), "lengths of shape (), not (2,)"),
    ],
)
def test_device_lengths_of_a_wrong_type_or_shape_are_named(lengths: Any, said: str) -> None:
    fault = check_device(proposed(mx.zeros((2, 3), mx.int32), lengths), [3, 1])
    assert fault == f"draft_device() returned {said}"


DEVICE_IDS = st.sampled_from([0, 1, 2, 3, -1, VOCAB, BIG, 2**32 + 5])


@settings(max_examples=1000, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 4))
def test_device_drafts_are_the_valid_start_that_both_copies_share(
    data: st.DataObject, rows: int, width: int
) -> None:
    def some(values: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
        row = st.lists(values, min_size=width, max_size=width)
        return st.lists(row, min_size=rows, max_size=rows)

    read = data.draw(some(DEVICE_IDS))
    depths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    lengths = data.draw(
        st.none() | st.lists(st.integers(-2, width + 2), min_size=rows, max_size=rows)
    )
    told: Any = data.draw(st.just(read) | some(DEVICE_IDS) | st.sampled_from([None, [], "no"]))

    drafts, faults = cut_device(read, lengths, told, depths, VOCAB)

    said = told if isinstance(told, list) and len(told) == rows else [[]] * rows
    for i in range(rows):
        cut = min(depths[i], width if lengths is None else max(0, min(lengths[i], width)))
        valid = valid_start(read[i], cut)
        agreed = valid_start(said[i], width)
        same = next(
            (at for at, (a, b) in enumerate(zip(valid, agreed, strict=False)) if a != b),
            min(len(valid), len(agreed)),
        )
        assert drafts[i] == valid[:same]
        if len(valid) < cut:
            assert faults[i] is not None
        if same == cut and said[i] == read[i] and all(map(is_valid, read[i])):
            assert faults[i] is None
        if same < min(len(valid), len(agreed)):
            assert faults[i] is not None


def test_a_drafter_that_remembers_other_ids_than_it_proposed_is_named() -> None:
    drafts, faults = cut_device([[1, 2, 3]], None, [[1, 9, 3]], [3], VOCAB)
    assert (drafts, faults) == ([[1]], ["resolve() returned other ids than tokens holds"])


def test_a_drafter_may_remember_fewer_ids_than_it_proposed() -> None:
    assert cut_device([[1, 2, 3]], None, [[1, 2]], [3], VOCAB) == ([[1, 2]], [None])


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_a_wrong_device_id_is_brought_into_range_before_the_target_reads_it(
    dtype: mx.Dtype,
) -> None:
    ids = [5, VOCAB, BIG] if dtype in (mx.int32, mx.uint32) else [5, VOCAB, 2**32 + 5]
    device = mx.array([ids], dtype)
    window: Any = window_tokens([1], [[]], device, vocab=VOCAB, width=4).tolist()
    assert window[0][:3] == [1, 5, VOCAB - 1]
    assert all(0 <= token < VOCAB for token in window[0])


@pytest.mark.parametrize("width", [3, 4, 7])
def test_a_window_is_padded_with_valid_ids_to_the_width_that_is_asked(width: int) -> None:
    window: Any = window_tokens([7, 8, 9], [[1, 2], [], [3]], None, vocab=VOCAB, width=width)
    assert window.shape == (3, width)
    assert window[:, :3].tolist() == [[7, 1, 2], [8, 8, 8], [9, 3, 9]]
    assert window[:, 3:].tolist() == [[7] * (width - 3), [8] * (width - 3), [9] * (width - 3)]


def test_a_window_without_drafts_is_the_pending_tokens() -> None:
    plain: Any = window_tokens([7, 8], [[], []], None, vocab=VOCAB, width=1).tolist()
    assert plain == [[7], [8]]
