"""Any legal sequence of verbs: a row in a group drafts what it drafts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import Factory, define, field, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from specdec.contract import Greedy, RowCheckpoint, append
from specdec.errors import CheckpointError, NoOpenRoundError, RoundOpenError
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec_ngram.rows import NgramRows

VOCAB = 3
MAX_ROWS = 4
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
ROW_IDS = st.lists(st.integers(0, VOCAB - 1), min_size=MAX_ROWS, max_size=MAX_ROWS)
DEPTHS = st.lists(st.integers(0, 5), min_size=MAX_ROWS, max_size=MAX_ROWS)


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


@define
class Row:
    """What a row has read, and how it came to it."""

    tokens: list[int]
    log: list[tuple[Any, ...]] = Factory(list)

    def copy(self) -> Row:
        return Row(list(self.tokens), list(self.log))


@frozen
class Open:
    """An open round of the model."""

    pending: list[int]
    depths: list[int]
    drafts: list[list[int]]


@frozen(eq=False)
class Kept:
    """A checkpoint, and the row as it was."""

    checkpoint: RowCheckpoint
    row: Row


class GroupMachine(RuleBasedStateMachine):
    provider: NgramProvider
    group: NgramRows

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.round: Open | None = None
        self.kept: list[Kept] = []

    def between(self) -> bool:
        return self.round is None

    def open_group(self, checkpoints: list[RowCheckpoint]) -> NgramRows:
        return self.provider.grouped.open(
            target=BareTarget(), sampling=NoDraws(), checkpoints=checkpoints
        )

    def prefilled(self, tokens: list[int], cut: int = 0) -> RowCheckpoint:
        """A cold row that reads these tokens in two chunks."""
        group = self.provider.grouped.open_prefill(target=BareTarget(), checkpoints=[None])
        for chunk in (tokens[:cut], tokens[cut:]):
            group.prefill(mx.array([chunk], dtype=mx.int32).reshape(1, len(chunk)), None)
        checkpoint = group.capture(0)
        group.close()
        return checkpoint

    def path_replay(self, row: Row) -> NgramRows:
        """A group of one, driven through the row's own log."""
        group = self.open_group([self.prefilled([])])
        for verb, *values in row.log:
            if verb == "read":
                group.consume(mx.array([values[0]], dtype=mx.int32), None, [len(values[0])])
            else:
                pending, depth, accepted = values
                group.draft([pending], [depth], [0])
                group.commit([accepted], None)
        return group

    @initialize(
        sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        prompts=st.lists(IDS, min_size=2, max_size=MAX_ROWS),
    )
    def start(self, sizes: tuple[int, int], prompts: list[list[int]]) -> None:
        self.provider = NgramProvider(max_ngram=max(sizes), min_ngram=min(sizes))
        self.group = self.open_group([])
        for tokens in prompts:
            self.join(tokens, len(tokens) // 2)

    @precondition(lambda self: self.between() and len(self.rows) < MAX_ROWS)
    @rule(tokens=IDS, cut=st.integers(0, 12))
    def join_cold(self, tokens: list[int], cut: int) -> None:
        self.join(tokens, cut)

    def join(self, tokens: list[int], cut: int) -> None:
        append(self.group, [self.prefilled(tokens, cut)])
        self.rows.append(Row(list(tokens), [("read", list(tokens))] if tokens else []))

    @precondition(lambda self: self.between() and len(self.rows) < MAX_ROWS and self.kept)
    @rule(which=st.integers(0, 100))
    def join_restored(self, which: int) -> None:
        kept = self.kept[which % len(self.kept)]
        append(self.group, [kept.checkpoint])
        self.rows.append(kept.row.copy())

    @precondition(between)
    @rule(tokens=IDS, twice=st.booleans())
    def prepare_then_discard(self, tokens: list[int], twice: bool) -> None:
        change = self.group.prepare_append([self.prefilled(tokens)])
        change.discard()
        if twice:
            change.discard()
            change.commit()

    @precondition(between)
    @rule(tokens=IDS)
    def join_poisoned(self, tokens: list[int]) -> None:
        good = self.prefilled(tokens)
        bad = RowCheckpoint(
            namespace="other",
            processed_tokens=good.processed_tokens,
            attachment=good.attachment,
        )
        with pytest.raises(CheckpointError):
            self.group.prepare_append([good, bad])

    @precondition(between)
    @rule(order=st.permutations(range(MAX_ROWS)), gone=st.none() | st.integers(0, MAX_ROWS))
    def filter_rows(self, order: list[int], gone: int | None) -> None:
        keep = [row for row in order if row < len(self.rows) and row != gone]
        if gone == MAX_ROWS == len(self.rows):
            keep = []
        self.group.filter_rows(keep)
        self.rows = [self.rows[row] for row in keep]

    @precondition(lambda self: self.between() and self.rows and len(self.kept) < 6)
    @rule(which=st.integers(0, MAX_ROWS - 1))
    def capture(self, which: int) -> None:
        row = which % len(self.rows)
        self.kept.append(Kept(self.group.capture(row), self.rows[row].copy()))

    @precondition(between)
    @rule(tokens=st.lists(ROW_IDS, min_size=1, max_size=4), lengths=DEPTHS)
    def consume(self, tokens: list[list[int]], lengths: list[int]) -> None:
        count = len(self.rows)
        columns = [ids[:count] for ids in tokens]
        block = mx.array(columns, dtype=mx.int32).reshape(len(columns), count).T
        lengths = [min(length, len(columns)) for length in lengths[:count]]
        self.group.consume(block, None, lengths)
        for i, row in enumerate(self.rows):
            read = [ids[i] for ids in columns[: lengths[i]]]
            row.tokens += read
            if read:
                row.log.append(("read", read))

    @precondition(between)
    @rule()
    def reopen(self) -> None:
        with pytest.raises(NoOpenRoundError):
            self.group.commit([0] * len(self.rows), None)
        checkpoints = [self.group.capture(row) for row in range(len(self.rows))]
        self.group.close()
        self.group = self.open_group(checkpoints)

    @precondition(between)
    @rule(pending=ROW_IDS, depths=DEPTHS, preview=st.booleans())
    def draft(self, pending: list[int], depths: list[int], preview: bool) -> None:
        count = len(self.rows)
        pending, depths, steps = pending[:count], depths[:count], [0] * count
        ahead = self.group.preview(pending, depths, steps) if preview else None
        drafts = self.group.draft(pending, depths, steps)
        if ahead is not None:
            width = ahead.shape[1]
            assert ahead.tolist() == [draft[:width] for draft in drafts]
        for i, row in enumerate(self.rows):
            for alone in (self.open_group([self.prefilled(row.tokens)]), self.path_replay(row)):
                assert alone.draft([pending[i]], [depths[i]], [0]) == [drafts[i]]
        self.round = Open(pending, depths, drafts)
        self.try_what_belongs_between_rounds()

    @precondition(lambda self: not self.between())
    @rule(accepted=st.lists(st.sampled_from([0, 1, 2, 9]), min_size=MAX_ROWS, max_size=MAX_ROWS))
    def commit(self, accepted: list[int]) -> None:
        assert self.round is not None
        counts = []
        for i, row in enumerate(self.rows):
            draft = self.round.drafts[i]
            counts.append(min(accepted[i], len(draft)))
            row.tokens += [self.round.pending[i], *draft[: counts[i]]]
            row.log.append(("round", self.round.pending[i], self.round.depths[i], counts[i]))
        self.group.commit(counts, None)
        self.round = None

    def try_what_belongs_between_rounds(self) -> None:
        count = len(self.rows)
        empty: list[int] = [0] * count
        block = mx.zeros((count, 1), dtype=mx.int32)
        for call in (
            lambda: self.group.draft(empty, empty, empty),
            lambda: self.group.preview(empty, empty, empty),
            lambda: self.group.prepare_append([]),
            lambda: self.group.filter_rows(range(count)),
            lambda: self.group.capture(0),
            lambda: self.group.consume(block, None, empty),
            lambda: self.group.prefill(block, None),
        ):
            with pytest.raises(RoundOpenError):
                call()

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        if not hasattr(self, "group"):
            return
        assert self.group.row_count == len(self.rows)
        if self.between():
            for i, row in enumerate(self.rows):
                checkpoint = self.group.capture(i)
                assert checkpoint.processed_tokens == len(row.tokens)
                assert checkpoint.attachment.arrays["tokens"].tolist() == row.tokens

    @invariant()
    def captures_never_change(self) -> None:
        for kept in self.kept:
            assert kept.checkpoint.attachment.arrays["tokens"].tolist() == kept.row.tokens


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
