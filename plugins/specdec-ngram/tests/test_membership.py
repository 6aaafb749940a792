"""Rows that join, leave, are captured and are restored; each invariant as a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve, field, frozen

from specdec.contract import (
    Attachment,
    Greedy,
    RowCheckpoint,
    append,
)
from specdec.errors import (
    CheckpointError,
    RowIndexError,
)
from specdec_ngram.attachment import SCHEMA
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec_ngram.rows import NgramRows

VOCAB = 16
ABCD = [1, 2, 3, 4, 1]  # after a pending 2, the row drafts 3, 4, 1, ...


@frozen
class BareTarget:
    """A target without any port."""

    vocab_size: int = VOCAB
    identity: object = None
    hidden_taps: None = None
    recurrent_mtp: None = None
    assistant_rows: None = None
    residual_basis: None = None
    draft_projections: None = None

    def can_tap(self, layers: Any) -> bool:
        return False


@frozen
class NoDraws:
    """The draws of rows that never draw."""

    selection: Greedy = field(factory=Greedy)

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise NotImplementedError


PROVIDER = NgramProvider(max_ngram=3, min_ngram=1)


def ids(*rows: Sequence[int]) -> mx.array:
    return mx.array([list(row) for row in rows], dtype=mx.int32)


def prefill_group(count: int = 1, provider: NgramProvider = PROVIDER) -> NgramRows:
    return provider.grouped.open_prefill(target=BareTarget(), checkpoints=[None] * count)


def row(tokens: Sequence[int], provider: NgramProvider = PROVIDER) -> RowCheckpoint:
    group = prefill_group(provider=provider)
    if tokens:
        group.prefill(ids(tokens), None)
    return group.capture(0)


def open_group(*rows: Sequence[int], provider: NgramProvider = PROVIDER) -> NgramRows:
    checkpoints = [row(tokens, provider) for tokens in rows]
    return provider.grouped.open(target=BareTarget(), sampling=NoDraws(), checkpoints=checkpoints)


def contents(group: NgramRows) -> list[list[int]]:
    captured = [group.capture(i) for i in range(group.row_count)]
    found: list[Any] = [one.attachment.arrays["tokens"].tolist() for one in captured]
    return found


# Membership


def test_a_drained_group_stays_usable() -> None:
    group = open_group(ABCD, [5])
    group.filter_rows([])
    assert group.row_count == 0
    assert group.draft([], [], []) == []
    group.commit([], None)
    append(group, [row(ABCD)])
    assert group.draft([2], [2], [0]) == [[3, 4]]


def test_nothing_is_visible_before_a_change_is_committed() -> None:
    group = open_group([5])
    change = group.prepare_append([row(ABCD)])
    assert contents(group) == [[5]]
    change.commit()
    assert contents(group) == [[5], ABCD]


def test_a_change_takes_effect_once_and_discarding_it_later_is_harmless() -> None:
    group = open_group([5])
    change = group.prepare_append([row(ABCD)])
    change.commit()
    change.commit()
    change.discard()
    assert contents(group) == [[5], ABCD]


def test_a_discarded_change_leaves_no_trace() -> None:
    group = open_group([5])
    change = group.prepare_append([row(ABCD)])
    change.discard()
    change.discard()
    change.commit()
    assert contents(group) == [[5]]


def test_a_change_outlives_a_filter_and_joins_at_the_end() -> None:
    group = open_group([5], [6])
    change = group.prepare_append([row([7]), row([8])])
    group.filter_rows([1])
    change.commit()
    assert contents(group) == [[6], [7], [8]]


def test_a_change_committed_inside_a_round_takes_no_part_in_it() -> None:
    group = open_group(ABCD)
    change = group.prepare_append([row([7])])
    group.draft([2], [2], [0])
    change.commit()
    group.commit([1], None)
    assert contents(group) == [[*ABCD, 2, 3], [7]]


def test_a_change_committed_after_close_opens_nothing() -> None:
    group = open_group([5])
    change = group.prepare_append([row([7])])
    group.close()
    change.commit()
    assert group.row_count == 0


def test_appending_no_rows_changes_nothing() -> None:
    group = open_group([5])
    group.prepare_append([]).commit()
    append(group, [])
    assert contents(group) == [[5]]


def test_filter_rows_selects_and_reorders_exactly() -> None:
    group = open_group([1], [2], [3], [4])
    group.filter_rows([3, 0, 2])
    assert contents(group) == [[4], [1], [3]]


@pytest.mark.parametrize("keep", [[0, 0], [-1], [2], [0, 5], ["0"], [0.0]])
def test_rows_that_do_not_exist_or_come_twice_are_refused(keep: list[Any]) -> None:
    group = open_group([1], [2])
    with pytest.raises(RowIndexError):
        group.filter_rows(keep)
    assert contents(group) == [[1], [2]]


@pytest.mark.parametrize("number", [-1, 2, "0"])
def test_a_row_that_does_not_exist_is_not_captured(number: Any) -> None:
    with pytest.raises(RowIndexError):
        open_group([1], [2]).capture(number)


# Checkpoints


def test_a_capture_is_independent_of_all_that_follows() -> None:
    group = open_group(ABCD)
    kept = group.capture(0)
    group.draft([2], [3], [0])
    group.commit([3], None)
    group.consume(ids([9, 9]), None, [2])
    group.filter_rows([])
    group.close()
    assert kept.processed_tokens == len(ABCD)
    assert kept.attachment.arrays["tokens"].tolist() == ABCD


def test_a_restored_row_is_independent_of_its_checkpoint() -> None:
    kept = row(ABCD)
    group = open_group()
    append(group, [kept])
    kept.attachment.arrays["tokens"][0] = 9
    assert contents(group) == [ABCD]


def test_a_restored_row_drafts_what_the_captured_one_drafts() -> None:
    group = open_group(ABCD)
    other = open_group()
    append(other, [group.capture(0)])
    assert other.draft([2], [4], [0]) == group.draft([2], [4], [0]) == [[3, 4, 1, 2]]


@pytest.mark.parametrize("tokens", [[], [3], ABCD])
def test_a_row_survives_the_trip_through_safetensors(tokens: list[int], tmp_path: Path) -> None:
    kept = row(tokens)
    mx.save_safetensors(str(tmp_path / "row.safetensors"), dict(kept.attachment.arrays))
    arrays = mx.load(str(tmp_path / "row.safetensors"))
    assert isinstance(arrays, dict)
    group = open_group()
    append(group, [evolve(kept, attachment=evolve(kept.attachment, arrays=arrays))])
    assert contents(group) == [tokens]


def test_a_row_that_has_read_nothing_is_captured_and_decodes() -> None:
    kept = row([])
    assert kept.processed_tokens == 0
    group = open_group()
    append(group, [kept])
    assert group.draft([4], [3], [0]) == [[]]
    group.commit([0], None)
    assert group.draft([4], [3], [1]) == [[4, 4, 4]]


def poisoned() -> dict[str, RowCheckpoint]:
    good = row(ABCD)
    tokens = good.attachment.arrays["tokens"]

    def attached(**changes: Any) -> RowCheckpoint:
        return evolve(good, attachment=evolve(good.attachment, **changes))

    return {
        "namespace": evolve(good, namespace="ngram-history-v1:max9:min1"),
        "schema": attached(schema="ngram-history-v0"),
        "no arrays": attached(arrays={}),
        "another array": attached(arrays={"tokens": tokens, "more": tokens}),
        "truncated": attached(arrays={"tokens": tokens[:-1]}),
        "dtype": attached(arrays={"tokens": tokens.astype(mx.int64)}),
        "floats": attached(arrays={"tokens": tokens.astype(mx.float32)}),
        "shape": attached(arrays={"tokens": tokens[None]}),
        "count": evolve(good, processed_tokens=len(ABCD) + 1),
        "metadata": attached(metadata={"processed_tokens": 1}),
        "no metadata": attached(metadata={}),
        "negative id": attached(arrays={"tokens": mx.array([1, 2, -1, 4, 1], dtype=mx.int32)}),
        "foreign id": attached(arrays={"tokens": mx.array([1, 2, VOCAB, 4, 1], dtype=mx.int32)}),
    }


@pytest.mark.parametrize("fault", poisoned())
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(fault: str) -> None:
    bad = poisoned()[fault]
    for group in (open_group([5]), prefill_group()):
        before = contents(group)
        with pytest.raises(CheckpointError) as raised:
            group.prepare_append([row([7]), bad])
        assert "\n" not in str(raised.value)
        assert contents(group) == before
    with pytest.raises(CheckpointError):
        PROVIDER.grouped.open_prefill(target=BareTarget(), checkpoints=[bad])


def test_a_decode_group_refuses_a_cold_row() -> None:
    group = open_group([5])
    with pytest.raises(CheckpointError):
        group.prepare_append([row([7]), None])
    assert contents(group) == [[5]]


def test_a_checkpoint_of_other_settings_is_refused() -> None:
    other = row(ABCD, NgramProvider(max_ngram=2, min_ngram=1))
    with pytest.raises(CheckpointError, match="max2:min1"):
        append(open_group(), [other])


def test_a_checkpoint_names_its_schema_and_counts() -> None:
    kept = row(ABCD)
    assert kept.namespace == "ngram-history-v1:max3:min1"
    assert isinstance(kept.attachment, Attachment)
    assert kept.attachment.schema == SCHEMA == "ngram-history-v1"
    assert kept.attachment.metadata == {"processed_tokens": 5}
    assert kept.attachment.arrays["tokens"].dtype == mx.int32
