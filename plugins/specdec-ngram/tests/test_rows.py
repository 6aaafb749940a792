"""Rows that read, draft and commit; each invariant as a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import (
    ContextKind,
    PrefillMode,
    RowCheckpoint,
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsPreview,
    append,
)
from specdec.errors import (
    ClosedError,
    ContractError,
    NoOpenRoundError,
    RoundOpenError,
)
from specdec.sampling import RowSamplers
from specdec.testing import TinyTarget
from specdec.testing.target import PORTS
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec_ngram.rows import NgramRows

VOCAB = 16
ABCD = [1, 2, 3, 4, 1]  # after a pending 2, the row drafts 3, 4, 1, ...


TARGET = TinyTarget(VOCAB, lacks=PORTS)
PROVIDER = NgramProvider(max_ngram=3, min_ngram=1)


def ids(*rows: Sequence[int]) -> mx.array:
    return mx.array([list(row) for row in rows], dtype=mx.int32)


def prefill_group(count: int = 1, provider: NgramProvider = PROVIDER) -> NgramRows:
    return provider.grouped.open_prefill(target=TARGET, checkpoints=[None] * count)


def row(tokens: Sequence[int], provider: NgramProvider = PROVIDER) -> RowCheckpoint:
    group = prefill_group(provider=provider)
    if tokens:
        group.prefill(ids(tokens), None)
    return group.capture(0)


def open_group(*rows: Sequence[int], provider: NgramProvider = PROVIDER) -> NgramRows:
    checkpoints = [row(tokens, provider) for tokens in rows]
    return provider.grouped.open(target=TARGET, sampling=RowSamplers(), checkpoints=checkpoints)


def contents(group: NgramRows) -> list[list[int]]:
    captured = [group.capture(i) for i in range(group.row_count)]
    found: list[Any] = [one.attachment.arrays["tokens"].tolist() for one in captured]
    return found


# Identity and capabilities


def test_a_group_taps_nothing_and_wants_no_context() -> None:
    group = open_group(ABCD)
    assert group.tap_layers == ()
    assert group.context is ContextKind.NONE
    assert group.prefill_mode is PrefillMode.TAIL_SPLIT
    assert group.namespace == PROVIDER.grouped.checkpoint_namespace


def test_a_group_offers_preview_and_consume_and_no_device_draft() -> None:
    group = open_group()
    assert isinstance(group, SupportsPreview)
    assert isinstance(group, SupportsConsume)
    assert not isinstance(group, SupportsDeviceDraft)


def test_a_target_without_any_port_is_enough() -> None:
    assert open_group(ABCD).draft([2], [3], [0]) == [[3, 4, 1]]


# Reading prompts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 20), st.integers(0, 3))
def test_a_prompt_in_chunks_is_a_prompt_in_one(tokens: list[int], cut: int, pending: int) -> None:
    group = prefill_group(2)
    for chunk in (tokens[:cut], tokens[cut:]):
        group.prefill(mx.array([chunk, chunk], dtype=mx.uint32).reshape(2, len(chunk)), None)
    assert contents(group) == [tokens, tokens]
    drafts = open_group(tokens).draft([pending], [5], [0])
    assert group.draft([pending] * 2, [5, 5], [0, 0]) == drafts * 2


def test_rows_of_a_prefill_group_read_their_own_tokens() -> None:
    group = prefill_group(2)
    group.prefill(ids([1, 2], [3, 4]), None)
    append(group, [None])
    group.prefill(ids([5], [6], [7]), None)
    group.materialize()
    assert contents(group) == [[1, 2, 5], [3, 4, 6], [7]]


@pytest.mark.parametrize(
    ("tokens", "context"),
    [
        (ids([1, 2]), None),
        (mx.array([1, 2], dtype=mx.int32), None),
        (mx.zeros((2, 1, 1), dtype=mx.int32), None),
        (mx.zeros((2, 1)), None),
        (ids([1], [-1]), None),
        (ids([1], [VOCAB]), None),
        (ids([1], [2**31 - 1]), None),
        (ids([1], [2]), mx.zeros((2, 1, 4))),
    ],
)
def test_a_chunk_that_does_not_fit_changes_no_row(
    tokens: mx.array, context: mx.array | None
) -> None:
    group = open_group([5], [6])
    with pytest.raises(ContractError):
        group.prefill(tokens, context)
    with pytest.raises(ContractError):
        group.consume(tokens, context, [1, 1])
    assert contents(group) == [[5], [6]]


# Rounds


def test_a_draft_has_no_more_ids_than_asked_and_rows_may_differ() -> None:
    group = open_group(ABCD, [9, 8], ABCD)
    assert group.draft([2, 7, 2], [1, 4, 3], [0, 0, 0]) == [[3], [], [3, 4, 1]]


def test_a_row_of_depth_0_still_reads_its_pending_token() -> None:
    group = open_group(ABCD)
    assert group.draft([2], [0], [0]) == [[]]
    group.commit([0], None)
    assert contents(group) == [[*ABCD, 2]]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_a_row_grows_by_its_pending_token_and_its_accepted_drafts(accepted: int) -> None:
    group = open_group(ABCD)
    group.draft([2], [3], [0])
    group.commit([accepted], None)
    assert contents(group) == [[*ABCD, 2, *[3, 4, 1][:accepted]]]
    assert group.capture(0).processed_tokens == len(ABCD) + accepted + 1


def test_a_rejected_draft_is_never_proposed_from() -> None:
    group, clean = open_group([1, 2, 3, 1]), open_group([1, 2, 3, 1])
    group.draft([2], [4], [0])
    clean.draft([2], [0], [0])
    group.commit([0], None)
    clean.commit([0], None)
    assert contents(group) == contents(clean)
    assert group.draft([3], [4], [1]) == clean.draft([3], [4], [1])


def test_steps_change_nothing() -> None:
    assert open_group(ABCD).draft([2], [3], [99]) == open_group(ABCD).draft([2], [3], [0])


def test_changing_a_returned_draft_does_not_change_what_is_committed() -> None:
    group = open_group(ABCD)
    drafts = group.draft([2], [2], [0])
    drafts[0][:] = [9, 9]
    group.commit([2], None)
    assert contents(group) == [[*ABCD, 2, 3, 4]]


@pytest.mark.parametrize("accepted", [[-1, 0], [3, 0], [0, 1], [0], [0, 0, 0], ["1", 0], [1.0, 0]])
def test_a_wrong_count_is_refused_and_the_round_stays_open(accepted: list[Any]) -> None:
    group = open_group(ABCD, [9])
    group.draft([2, 8], [2, 2], [0, 0])
    with pytest.raises(ContractError):
        group.commit(accepted, None)
    with pytest.raises(ContractError):
        group.commit([2, 0], mx.zeros((2, 3, 4)))
    group.commit([2, 0], None)
    assert contents(group) == [[*ABCD, 2, 3, 4], [9, 8]]


@pytest.mark.parametrize(
    ("pending", "depths", "steps"),
    [
        ([2], [1, 1], [0, 0]),
        ([2, 2], [1], [0, 0]),
        ([2, 2], [1, 1], [0]),
        ([2, 2], [1, -1], [0, 0]),
        ([2, 2], [1, 1.0], [0, 0]),
        ([2, -1], [1, 1], [0, 0]),
        ([2, VOCAB], [1, 1], [0, 0]),
        ([2, 2**31 - 1], [1, 1], [0, 0]),
        ([2, "2"], [1, 1], [0, 0]),
    ],
)
def test_a_draft_that_is_refused_opens_no_round(
    pending: list[Any], depths: list[Any], steps: list[int]
) -> None:
    group = open_group(ABCD, ABCD)
    for verb in (group.draft, group.preview):
        with pytest.raises(ContractError):
            verb(pending, depths, steps)
    with pytest.raises(NoOpenRoundError):
        group.commit([0, 0], None)
    assert contents(group) == [ABCD, ABCD]


def between_rounds_verbs(group: NgramRows) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("draft", lambda: group.draft([2], [2], [0])),
        ("preview", lambda: group.preview([2], [2], [0])),
        ("prepare_append", lambda: group.prepare_append([row([7])])),
        ("filter_rows", lambda: group.filter_rows([0])),
        ("capture", lambda: group.capture(0)),
        ("prefill", lambda: group.prefill(ids([7]), None)),
        ("consume", lambda: group.consume(ids([7]), None, [1])),
    ]


def test_verbs_that_belong_between_rounds_are_refused_inside_one() -> None:
    group = open_group(ABCD)
    group.draft([2], [2], [0])
    for name, call in between_rounds_verbs(group):
        with pytest.raises(RoundOpenError, match=name):
            call()
    group.commit([1], None)
    assert contents(group) == [[*ABCD, 2, 3]]


def test_a_commit_needs_a_round() -> None:
    group = open_group(ABCD)
    with pytest.raises(NoOpenRoundError):
        group.commit([0], None)
    group.draft([2], [2], [0])
    group.commit([0], None)
    with pytest.raises(NoOpenRoundError):
        group.commit([0], None)


def test_a_closed_group_refuses_every_verb_and_closes_again() -> None:
    group = open_group(ABCD)
    group.close()
    group.close()
    verbs = between_rounds_verbs(group)
    verbs += [("commit", lambda: group.commit([0], None)), ("materialize", group.materialize)]
    for name, call in verbs:
        with pytest.raises(ClosedError, match=name):
            call()
    assert group.row_count == 0


def test_a_group_closes_inside_a_round_and_its_provider_lives_on() -> None:
    group, other = open_group(ABCD), open_group(ABCD)
    group.draft([2], [2], [0])
    group.close()
    with pytest.raises(ClosedError):
        group.commit([0], None)
    assert other.draft([2], [2], [0]) == [[3, 4]]


# Preview and consume


def test_a_preview_is_the_start_of_the_draft_and_changes_nothing() -> None:
    group = open_group(ABCD, ABCD)
    before = contents(group)
    ahead = group.preview([2, 2], [4, 2], [0, 0])
    assert ahead is not None
    assert ahead.tolist() == [[3, 4], [3, 4]]
    assert contents(group) == before
    assert group.draft([2, 2], [4, 2], [0, 0]) == [[3, 4, 1, 2], [3, 4]]


def test_a_preview_is_none_where_a_row_proposes_nothing() -> None:
    assert open_group(ABCD, [9]).preview([2, 8], [4, 4], [0, 0]) is None
    assert open_group(ABCD).preview([2], [0], [0]) is None
    assert open_group().preview([], [], []) is None


def test_consumed_tokens_count_as_read_and_padding_does_not() -> None:
    group = open_group([1], [2], [3])
    group.consume(ids([5, 6, 7], [8, -1, 99], [-5, -5, -5]), None, [3, 1, 0])
    assert contents(group) == [[1, 5, 6, 7], [2, 8], [3]]


@pytest.mark.parametrize("lengths", [[1], [1, 3], [-1, 1], [1, 1, 1], [1, 1.0]])
def test_wrong_lengths_are_refused_and_change_nothing(lengths: list[Any]) -> None:
    group = open_group([5], [6])
    with pytest.raises(ContractError):
        group.consume(ids([1, 2], [3, 4]), None, lengths)
    assert contents(group) == [[5], [6]]


# Requests share nothing


def drafts_of(group: NgramRows, number: int, text: Sequence[int]) -> list[list[int]]:
    """Decode a text in one row of a group, in rounds that accept what fits it."""
    count, found, place = group.row_count, [], 0
    while place < len(text):
        pending, depths = [0] * count, [0] * count
        pending[number], depths[number] = text[place], 4
        draft = group.draft(pending, depths, [0] * count)[number]
        rest = text[place + 1 :]
        fits = 0
        while fits < min(len(draft), len(rest)) and draft[fits] == rest[fits]:
            fits += 1
        group.commit([fits if i == number else 0 for i in range(count)], None)
        found.append(draft)
        place += fits + 1
    return found


def test_a_request_leaves_nothing_behind_for_the_next() -> None:
    provider = NgramProvider(max_ngram=3, min_ngram=1)
    drafts_of(open_group([1, 2, 3, 4] * 20, provider=provider), 0, [1, 2, 3, 4, 1])
    text = [2, 9, 2, 9, 5, 2]
    after = drafts_of(open_group([8, 9], provider=provider), 0, text)
    fresh = NgramProvider(max_ngram=3, min_ngram=1)
    assert after == drafts_of(open_group([8, 9], provider=fresh), 0, text)


def test_requests_in_one_batch_do_not_see_each_other() -> None:
    text = [2, 9, 2, 9, 5, 2]
    alone = drafts_of(open_group([8, 9]), 0, text)
    assert drafts_of(open_group([1, 2, 3, 4] * 20, [8, 9]), 1, text) == alone
