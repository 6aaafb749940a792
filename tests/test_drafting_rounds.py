"""What may be asked of a group when, and which drafts a round remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Proposal
from specdec.drafting.rounds import Asked, Drafted, Rounds
from specdec.errors import ClosedError, ContractError, NoOpenRoundError, RoundOpenError
from specdec.testing.driven import resolved

if TYPE_CHECKING:
    from collections.abc import Callable

V = 9
TOKENS = mx.array([[1, 2, 3], [4, 5, 6]], mx.int32)
BOTH = Asked([7, 8], [3, 3], [0, 5])


def flat(array: mx.array) -> list[int]:
    held: Any = array.reshape(-1).tolist()
    return list(held)


def lists(array: mx.array | None) -> Any:
    return None if array is None else array.tolist()


# When.


def test_verbs_between_rounds_are_refused_inside_one_and_named() -> None:
    rounds = Rounds(V)
    rounds.between("capture")
    rounds.open_host(BOTH, Drafted(TOKENS))
    with pytest.raises(RoundOpenError, match=r"capture\(\) .* inside a round"):
        rounds.between("capture")
    with pytest.raises(RoundOpenError, match=r"preview\(\)"):
        rounds.asked("preview", 2, [1, 1], [1, 1], [0, 0])
    rounds.check_open("materialize")  # allowed inside
    rounds.accepted([0, 0])
    with pytest.raises(RoundOpenError):
        rounds.between("capture")
    rounds.end()
    rounds.between("capture")


def test_a_commit_needs_a_round_whose_drafts_are_known() -> None:
    rounds = Rounds(V)
    with pytest.raises(NoOpenRoundError, match="without an open round"):
        rounds.accepted([0, 0])
    proposal = rounds.open_device(BOTH, Drafted(TOKENS))
    with pytest.raises(NoOpenRoundError, match="resolve"):
        rounds.accepted([0, 0])
    proposal.resolve(flat(proposal.tokens))
    assert rounds.accepted([1, 3]) == ([[1, 2, 3], [4, 5, 6]], [1, 3])
    rounds.end()
    with pytest.raises(NoOpenRoundError, match="without an open round"):
        rounds.accepted([0, 0])


@pytest.mark.parametrize("inside", [False, True])
def test_a_closed_group_refuses_every_verb(inside: bool) -> None:
    rounds = Rounds(V)
    if inside:
        rounds.open_host(BOTH, Drafted(TOKENS))
    assert not rounds.closed
    rounds.close()
    rounds.close()
    assert rounds.closed
    verbs: list[Callable[[], Any]] = [
        lambda: rounds.between("verb"),
        lambda: rounds.check_open("verb"),
        lambda: rounds.asked("verb", 1, [0], [0], [0]),
        lambda: rounds.accepted([0, 0]),
    ]
    for verb in verbs:
        with pytest.raises(ClosedError, match=r"(verb|commit)\(\) .* closed group"):
            verb()


# What is asked.


def test_what_is_asked_comes_as_ints_of_each_row() -> None:
    asked = Rounds(V).asked("draft", 2, np.array([8, 0]), [np.int64(2), 4], (0, 10**12))  # type: ignore[arg-type, list-item]  # ints of numpy's
    assert asked == Asked([8, 0], [2, 4], [0, 10**12])
    assert [type(each) for each in asked.pending + asked.depths] == [int] * 4
    assert asked.deepest == 4
    assert Rounds(V).asked("draft", 0, [], [], []).deepest == 0


@pytest.mark.parametrize(
    ("pending", "depths", "steps", "said"),
    [
        ([1], [1, 1], [0, 0], "pending: got 1 numbers for 2 rows"),
        ([1, 1], [1, 1, 1], [0, 0], "depths: got 3 numbers for 2 rows"),
        ([1, 1], [1, 1], [], "steps: got 0 numbers for 2 rows"),
        ([1, V], [1, 1], [0, 0], f"pending: row 1 has {V}; it must be 0 to {V - 1}"),
        ([-1, 1], [1, 1], [0, 0], "pending: row 0 has -1"),
        ([1, 1], [1, -1], [0, 0], "depths: row 1 has -1; it must be 0 or more"),
        ([1, 1], [1, 1], [0, 0.5], "steps: row 1 has 0.5; pass a whole number"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_row_and_opens_nothing(
    pending: Any, depths: Any, steps: Any, said: str
) -> None:
    rounds = Rounds(V)
    with pytest.raises(ContractError) as caught:
        rounds.asked("draft", 2, pending, depths, steps)
    assert said in str(caught.value)
    rounds.between("draft")


@pytest.mark.parametrize("accepted", [[4, 0], [0], [0, -1], [0, 0, 0], [0, 1.0]])
def test_a_bad_count_leaves_the_round_open(accepted: Any) -> None:
    rounds = Rounds(V)
    rounds.open_host(BOTH, Drafted(TOKENS))
    with pytest.raises(ContractError, match="commit: accepted"):
        rounds.accepted(accepted)
    assert rounds.accepted([3, 0])[1] == [3, 0]


def test_more_than_a_row_was_asked_for_cannot_be_accepted() -> None:
    rounds = Rounds(V)
    rounds.open_host(Asked([7, 8], [3, 1], [0, 0]), Drafted(TOKENS))
    with pytest.raises(ContractError, match="row 1 has 2; it must be 0 to 1"):
        rounds.accepted([0, 2])


# What is remembered.


def test_host_drafts_are_plain_lists_and_a_proposal_where_they_are_declared() -> None:
    rounds = Rounds(V)
    told = rounds.open_host(BOTH, Drafted(TOKENS))
    assert told == [[1, 2, 3], [4, 5, 6]]
    rounds.end()
    logq = mx.zeros((2, 3, V))
    declared = rounds.open_host(BOTH, Drafted(TOKENS, logq=logq))
    assert isinstance(declared, Proposal)
    assert declared.tokens == told
    assert declared.logq is logq
    rounds.end()
    assert rounds.open_host(Asked([7, 8], [0, 0], [0, 0]), None) == [[], []]
    assert rounds.accepted([0, 0]) == ([[], []], [0, 0])


@pytest.mark.parametrize("on_device", [False, True])
def test_what_a_caller_does_to_its_drafts_changes_no_round(on_device: bool) -> None:
    rounds = Rounds(V)
    told: Any
    if on_device:
        proposal = rounds.open_device(BOTH, Drafted(TOKENS))
        told = proposal.resolve(flat(proposal.tokens))
    else:
        told = rounds.open_host(BOTH, Drafted(TOKENS))
    told[0].append(8)
    told[1].clear()
    assert rounds.accepted([3, 3])[0] == [[1, 2, 3], [4, 5, 6]]


def test_lengths_are_said_only_where_rows_differ_from_the_width() -> None:
    def lengths(depths: list[int], own: mx.array | None = None) -> Any:
        asked = Asked([0, 0], depths, [0, 0])
        return lists(Rounds(V).open_device(asked, Drafted(TOKENS, own)).lengths)

    assert lengths([3, 3]) is None
    assert lengths([9, 3]) is None, "a drafter may stop before the depth"
    assert lengths([1, 3]) == [1, 3]
    assert lengths([3, 3], mx.array([2, 0], mx.uint32)) == [2, 0]
    assert lengths([1, 9], mx.array([2, 3], mx.uint32)) == [1, 3]


@given(data=st.data())
def test_both_doors_remember_each_rows_drafts_up_to_its_depth_and_what_the_drafter_cut(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 4), label="rows")
    width = data.draw(st.integers(1, 4), label="width")

    def ints(high: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, high), min_size=count, max_size=count))

    tokens = [[(7 * row + 3 * at) % V for at in range(width)] for row in range(count)]
    depths, cut = ints(width + 1), data.draw(st.none() | st.just(ints(width)))
    expected = [
        row[: min(depth, width if cut is None else cut[place])]
        for place, (row, depth) in enumerate(zip(tokens, depths, strict=True))
    ]
    asked = Asked([0] * count, depths, [0] * count)
    drafted = Drafted(mx.array(tokens, mx.int32), None if cut is None else mx.array(cut, mx.int32))
    most = list(map(len, expected))
    host, device = Rounds(V), Rounds(V)
    assert host.open_host(asked, drafted) == expected
    assert host.accepted(most) == (expected, most)
    proposal = device.open_device(asked, drafted)
    # As the kit does it: what is remembered has to be the ids cut by the lengths.
    assert resolved(proposal, count) == list(map(tuple, expected))
    assert device.accepted(most) == (expected, most)
