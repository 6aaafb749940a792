"""What a stored row looks like, and what is refused; the kit holds the rest (test_contract)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve

from specdec.contract import Attachment, RowCheckpoint, append
from specdec.errors import CheckpointError, RowIndexError
from specdec.sampling import RowSamplers
from specdec.testing import TinyTarget
from specdec.testing.target import PORTS
from specdec_ngram.attachment import SCHEMA
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        PROVIDER.grouped.open_prefill(target=TARGET, checkpoints=[bad])


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
