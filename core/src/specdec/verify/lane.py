"""One draft group behind a wall: whatever a drafter does, the round goes on.

Exceptions of the drafter never leave this module. After one, the group is closed; a drafter that
needs no hidden states is opened again from the rows' token histories, a few times, and then the
rows go on without it, with the reason in their statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import (
    ContextKind,
    DeclaresTaps,
    PrefillMode,
    RowCheckpoint,
    SupportsDeviceDraft,
    Swap,
)
from specdec.errors import ContractError, TargetLacksError, one_line
from specdec.verify.proposals import check_device, check_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import (
        DeviceProposal,
        DraftPrefillGroup,
        DraftProvider,
        DraftRowGroup,
        PendingChange,
        RowSampling,
        TargetView,
    )
    from specdec.verify.request import Row

__all__ = ["MAX_FAILURES", "MAX_FAULTS", "DraftLane", "Drafts"]

MAX_FAILURES = 3  # exceptions after which a group's rows go on without the drafter
MAX_FAULTS = 3  # rounds with an invalid proposal after which a row goes on without it


@frozen(eq=False)
class Drafts:
    """One round's proposals: checked ids on the host, or a proposal still on the device."""

    rows: Sequence[Sequence[int]]
    device: DeviceProposal | None = None


class DraftLane:
    """The draft side of one verify group.

    Args:
        provider: the drafter; outlives the lane.
        name: its kind, for the statistics.
        target: the bound target.

    Raises:
        TargetLacksError: the drafter taps layers that the target cannot capture.
    """

    def __init__(self, provider: DraftProvider, name: str, target: TargetView) -> None:
        self.name = name
        self._grouped = provider.grouped
        self._target = target
        self._rows: DraftRowGroup | None = None
        self.failures = 0
        self.last_error: str | None = None
        self.taps: tuple[int, ...] = ()
        if isinstance(self._grouped, DeclaresTaps):
            self.taps = tuple(self._grouped.target_tap_layers(target))
            if not target.can_tap(self.taps):
                raise TargetLacksError(f"hidden_taps{list(self.taps)}", name)
        self.context = ContextKind.TAPS if self.taps else ContextKind.NONE

    @property
    def is_open(self) -> bool:
        """Whether there is a group that drafts."""
        return self._rows is not None

    @property
    def reason(self) -> str:
        """Why there is none and there will be none."""
        if self.last_error is None:
            return f"drafter {self.name} cannot join rows that decode without it"
        return f"drafter {self.name} failed: {self.last_error}"

    # Prompts.

    def open_prefill(self) -> DraftPrefillGroup | None:
        """A prefill group of one cold row; ``None`` after a failure."""
        if self.failures >= MAX_FAILURES:
            return None
        try:
            group = self._grouped.open_prefill(target=self._target, checkpoints=[None])
        except Exception as error:
            self.fail(error)
            return None
        try:
            self._learn(group)
        except Exception as error:
            self.fail(error)
            self.shut(group)
            return None
        return group

    def read(self, group: DraftPrefillGroup, tokens: mx.array, context: mx.array | None) -> bool:
        """Give a prefill group the chunk that the target has read.

        Returns:
            Whether it took it; after a failure the group is closed.
        """
        try:
            group.prefill(tokens, context)
        except Exception as error:
            self.fail(error)
            self.shut(group)
            return False
        return True

    def checkpoint(self, group: DraftPrefillGroup) -> RowCheckpoint | None:
        """Hand a read prompt over: capture its row and close the group."""
        checkpoint = None
        try:
            checkpoint = group.capture(0)
            if not isinstance(checkpoint, RowCheckpoint):
                raise ContractError(f"capture() returned {type(checkpoint).__name__}")
        except Exception as error:
            checkpoint = None
            self.fail(error)
        self.shut(group)
        return checkpoint

    def shut(self, group: DraftPrefillGroup | DraftRowGroup) -> None:
        """Close a group. Raising here is counted, but leaves nothing to give up."""
        try:
            group.close()
        except Exception as error:
            self._note(error)

    # Membership.

    def prepare_append(
        self, checkpoints: Sequence[RowCheckpoint | None], sampling: RowSampling, live: int
    ) -> PendingChange:
        """Rows that join the group; the first ones open it.

        Args:
            checkpoints: one per new row; ``None`` where its prompt could not be read.
            sampling: the group's samplers; they hold the new rows by the time of ``commit``.
            live: rows that already decode.
        """
        ready = [c for c in checkpoints if c is not None]
        try:
            if len(ready) < len(checkpoints) or (live and self._rows is None):
                return Swap(self._drop)
            if self._rows is not None:
                change = self._rows.prepare_append(ready)
                commit, discard = change.commit, change.discard
                return Swap(lambda: self._guard(commit), lambda: self._guard(discard))
            opened = self._grouped.open(
                target=self._target, sampling=sampling, checkpoints=ready, constraints=None
            )
        except Exception as error:
            self.fail(error)
            return Swap(self._drop)
        return Swap(lambda: self._take(opened), lambda: self.shut(opened))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Retire and reorder rows."""
        if self._rows is None:
            return
        try:
            self._rows.filter_rows(list(keep))
        except Exception as error:
            self.fail(error)

    def capture(self, row: int) -> RowCheckpoint | None:
        """A row's checkpoint between rounds; ``None`` without a group or after a failure."""
        if self._rows is None:
            return None
        try:
            return self._rows.capture(row)
        except Exception as error:
            self.fail(error)
            return None

    def reopen(self, rows: Sequence[Row], sampling: RowSampling) -> bool:
        """After a failure: read the rows' histories again, if the drafter needs tokens alone.

        Returns:
            Whether a group is open again.
        """
        if self.failures >= MAX_FAILURES or self.context is not ContextKind.NONE or not rows:
            return False
        checkpoints: list[RowCheckpoint] = []
        for row in rows:
            group = self.open_prefill()
            if group is None:
                return False
            if group.prefill_mode != PrefillMode.TAIL_SPLIT:
                self.shut(group)
                return False
            history = row.tokens[:-1]
            if history and not self.read(group, mx.array([history], mx.int32), None):
                return False
            checkpoint = self.checkpoint(group)
            if checkpoint is None:
                return False
            checkpoints.append(checkpoint)
        change = self.prepare_append(checkpoints, sampling, live=0)
        change.commit()
        return self.is_open

    # Rounds.

    def propose(
        self, rows: Sequence[Row], depths: Sequence[int], vocab_size: int, *, on_device: bool
    ) -> Drafts:
        """Open a round; what comes back is valid, and empty where nothing was.

        Args:
            rows: the host rows, in group order.
            depths: B ints, the most each row may propose.
            vocab_size: ids must be below it.
            on_device: whether drafts may stay on the device: every row's draw is stateless.
        """
        nothing = Drafts([[] for _ in rows])
        group = self._rows
        if group is None:
            return nothing

        def asked() -> tuple[list[int], list[int], list[int]]:
            # New lists for each call: a drafter that writes into them changes nothing here.
            return [row.pending for row in rows], list(depths), [row.steps for row in rows]

        try:
            if on_device and max(depths) > 0 and isinstance(group, SupportsDeviceDraft):
                device = group.draft_device(*asked())
                if device is not None:
                    fault = check_device(device, depths)
                    if fault is not None:
                        raise ContractError(fault)
                    return Drafts(nothing.rows, device)
            # Reading a proposal runs the drafter's code as well, so it may raise as well.
            drafts, faults = check_host(group.draft(*asked()), depths, vocab_size)
        except Exception as error:
            self.fail(error)
            return nothing
        self.blame(rows, faults)
        return Drafts(drafts)

    def commit(self, accepted: Sequence[int], context: mx.array | None) -> None:
        """End the round that ``propose`` opened."""
        if self._rows is None:
            return
        try:
            self._rows.commit(list(accepted), context)
        except Exception as error:
            self.fail(error)

    def blame(self, rows: Sequence[Row], faults: Sequence[str | None]) -> None:
        """Count invalid proposals; a row stands down after :data:`MAX_FAULTS` of them."""
        for row, fault in zip(rows, faults, strict=True):
            if fault is None:
                continue
            row.faults += 1
            row.stats.invalid_drafts += 1
            row.stats.last_draft_error = fault
            if row.faults >= MAX_FAULTS and row.width:
                row.width = 0
                row.stats.reason = f"drafter {self.name} stood down: {fault}"

    def fail(self, error: Exception) -> None:
        """Note an exception of the drafter and close its group."""
        self._drop()
        self._note(error)

    def close(self) -> None:
        """Close the group; the provider stays."""
        self._drop()

    def _take(self, group: DraftRowGroup) -> None:
        self._rows = group

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.fail(error)

    def _drop(self) -> None:
        group, self._rows = self._rows, None
        if group is not None:
            self.shut(group)

    def _note(self, error: Exception) -> None:
        self.failures += 1
        self.last_error = one_line(error)

    def _learn(self, group: DraftPrefillGroup) -> None:
        PrefillMode(group.prefill_mode)  # raises where it is none
        context, taps = ContextKind(group.context), tuple(group.tap_layers)
        if taps != self.taps or (context is ContextKind.TAPS) != bool(taps):
            raise ContractError(
                f"the group taps {list(taps)} as {context}, but its provider declares "
                f"{list(self.taps)}"
            )
        self.context = context
