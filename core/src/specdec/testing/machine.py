"""Any legal sequence of verbs on one group, against rows that are driven alone.

The model is each row's log. After every draft the machine asks a lone row, driven through that
log, for the same draft; so batch size, membership, order, checkpoints and rollbacks are all held
by one comparison, and the printed program is a complete reproducer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from specdec.checkpoints.layout import checkpoint_from_bytes, to_bytes
from specdec.contract import SupportsConsume, SupportsDeviceDraft, SupportsPreview
from specdec.errors import CheckpointError, NoOpenRoundError
from specdec.sampling import SamplingOptions
from specdec.testing import strategies
from specdec.testing.driven import DrivenGroup, DrivenRow, Kept
from specdec.testing.expect import must_raise
from specdec.testing.harness import frozen_copy

if TYPE_CHECKING:
    from specdec.testing.kit import Kit

__all__ = ["row_machine"]

_MOST_KEPT = 6


def row_machine(kit: Kit) -> type[RuleBasedStateMachine]:
    """The machine of one drafter.

    Args:
        kit: the drafter on its target.
    """
    prompt = strategies.prompts(kit)
    ids = strategies.row_ids(kit)
    depths = strategies.row_ints(kit, kit.max_depth)
    place = st.integers(0, kit.max_rows - 1)
    chunk = st.lists(st.integers(0, kit.vocab_size - 1), max_size=3)
    chunks = st.lists(chunk, min_size=kit.max_rows, max_size=kit.max_rows)

    class RowMachine(RuleBasedStateMachine):
        rows: DrivenGroup

        def __init__(self) -> None:
            super().__init__()
            self.kept: list[tuple[Kept, Any]] = []
            self.joined = 0

        # What may be done when.

        def between(self) -> bool:
            return self.rows.round is None

        def has_place(self) -> bool:
            return self.between() and len(self.rows.rows) < kit.max_rows

        def has_rows(self) -> bool:
            return self.between() and bool(self.rows.rows)

        def fresh(self, tokens: tuple[int, ...], cut: int = 0) -> Kept:
            self.joined += 1
            return kit.cold(tokens, cut=cut, row=DrivenRow(options=self.options, seed=self.joined))

        # Rules.

        @initialize(sampled=st.booleans(), first=prompt, second=prompt)
        def start(self, sampled: bool, first: tuple[int, ...], second: tuple[int, ...]) -> None:
            self.options = SamplingOptions(temp=0.9) if sampled else SamplingOptions()
            self.rows = kit.open([self.fresh(first), self.fresh(second)][: kit.max_rows])

        @precondition(has_place)
        @rule(tokens=prompt, cut=st.integers(0, 9))
        def join_cold(self, tokens: tuple[int, ...], cut: int) -> None:
            self.rows.join([self.fresh(tokens, cut)])

        @precondition(lambda self: self.has_place() and self.kept)
        @rule(which=st.integers(0, _MOST_KEPT - 1), stored=st.booleans())
        def join_restored(self, which: int, stored: bool) -> None:
            held, _ = self.kept[which % len(self.kept)]
            if stored:
                held = evolve(held, checkpoint=checkpoint_from_bytes(to_bytes(held.checkpoint)))
            self.rows.join([held])

        @precondition(between)
        @rule(tokens=prompt, twice=st.booleans())
        def prepare_then_discard(self, tokens: tuple[int, ...], twice: bool) -> None:
            change = self.rows.prepare([self.fresh(tokens)])
            change.discard()
            if twice:
                change.discard()
                change.commit()

        @precondition(between)
        @rule(tokens=prompt)
        def join_poisoned(self, tokens: tuple[int, ...]) -> None:
            good = self.fresh(tokens)
            bad = evolve(good.checkpoint, namespace="another drafter's")
            must_raise(
                CheckpointError,
                lambda: self.rows.group.prepare_append([good.checkpoint, bad]),
                "prepare_append() of a checkpoint of another namespace",
            )

        @precondition(between)
        @rule(order=strategies.orders(kit))
        def filter_rows(self, order: tuple[int, ...]) -> None:
            self.rows.filter([row for row in order if row < len(self.rows.rows)])

        @precondition(lambda self: self.has_rows() and len(self.kept) < _MOST_KEPT)
        @rule(which=place)
        def capture(self, which: int) -> None:
            held = self.rows.capture(which % len(self.rows.rows))
            self.kept.append((held, frozen_copy(held.checkpoint)))

        @precondition(has_rows)
        @rule()
        def reopen(self) -> None:
            held = [self.rows.capture(row) for row in range(len(self.rows.rows))]
            self.rows.close()
            self.rows = kit.open(held)

        @precondition(lambda self: self.has_rows() and isinstance(self.rows.group, SupportsConsume))
        @rule(given=chunks)
        def consume(self, given: list[list[int]]) -> None:
            self.rows.consume([list(each) for each in given[: len(self.rows.rows)]])

        @precondition(has_rows)
        @rule(pending=ids, asked=depths, preview=st.booleans(), on_device=st.booleans())
        def draft(
            self,
            pending: tuple[int, ...],
            asked: tuple[int, ...],
            preview: bool,
            on_device: bool,
        ) -> None:
            group: Any = self.rows.group
            size = len(self.rows.rows)
            if preview and isinstance(group, SupportsPreview):
                seen = group.preview(*self.rows.asked(pending, asked))
                if seen is not None:
                    mx.eval(seen)
            on_device &= isinstance(group, SupportsDeviceDraft)
            drafts = self.rows.draft(pending, asked, on_device=on_device)
            assert len(drafts) == size
            for row, head, depth, draft in zip(
                self.rows.rows, pending, asked, drafts, strict=False
            ):
                assert len(draft) <= depth
                assert all(0 <= token < kit.vocab_size for token in draft)
                alone = kit.next_of(row, head, depth)
                assert draft == alone, (
                    f"in the group {list(draft)} was drafted, alone {list(alone)}; log {row.log}"
                )
                if kit.history:
                    cold = kit.next_of_cold(row, head, depth)
                    assert draft == cold, (
                        f"in the group {list(draft)} was drafted, by a cold row of the same tokens "
                        f"{list(cold)}; log {row.log}"
                    )

        @precondition(lambda self: not self.between())
        @rule(accepted=depths)
        def commit(self, accepted: tuple[int, ...]) -> None:
            self.rows.commit(accepted)

        @precondition(has_rows)
        @rule()
        def commit_without_a_round(self) -> None:
            size = len(self.rows.rows)
            context = kit.context([row.tokens for row in self.rows.rows], [(0,)] * size, 1)
            must_raise(
                NoOpenRoundError,
                lambda: self.rows.group.commit([0] * size, context),
                "commit() without a round",
            )

        # What always holds.

        @invariant()
        def the_group_has_the_rows_of_the_model(self) -> None:
            if not hasattr(self, "rows"):
                return
            assert self.rows.group.row_count == len(self.rows.rows)
            if self.between() and self.rows.rows:
                held = self.rows.group.capture(0)
                assert held.processed_tokens == len(self.rows.rows[0].tokens)

        @invariant()
        def captures_never_change(self) -> None:
            for held, before in self.kept:
                assert kit.same_state(held.checkpoint, before), "a captured checkpoint changed"

        def teardown(self) -> None:
            if hasattr(self, "rows"):
                self.rows.close()

    return RowMachine
