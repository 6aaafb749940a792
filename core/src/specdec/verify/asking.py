"""What a draft group is asked in a round: proposals, what was accepted, tokens from outside.

Here a drafter's exceptions pass through; the lane around it (``verify/lane.py``) holds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from attrs import evolve

from specdec.contract import (
    ContextKind,
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsLookup,
    SupportsPreview,
    SupportsRemarks,
)
from specdec.drafting.checks import row_reasons
from specdec.errors import ContractError, one_line
from specdec.verify.donors import Lending, view_for
from specdec.verify.drafts import Asked, Drafts
from specdec.verify.members import pick
from specdec.verify.proposals import check_device, check_host, check_logq, check_lookup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from specdec.contract import DraftRowGroup, GroupedDraftProvider, TargetView
    from specdec.state import RowState
    from specdec.verify.members import Members
    from specdec.verify.row import Row

__all__ = ["DraftRounds"]


class DraftRounds:
    """The rounds of a draft group's members.

    Args:
        members: the group and its rows.
        grouped: the drafter's factory of groups.
        target: the bound target.
        ids: the ids that the drafter says it selects over, if it lists some.

    Attributes:
        view: the target for the draft group that is opened.
    """

    def __init__(
        self,
        members: Members,
        grouped: GroupedDraftProvider,
        target: TargetView,
        ids: Sequence[int] | None = None,
    ) -> None:
        self._members = members
        self._grouped = grouped
        self._target = target
        self._lending = Lending()
        self.view = view_for(target, self._lending)
        self._listed = None if ids is None else mx.array(list(ids), mx.int32)
        self._ahead: dict[int, Sequence[int]] = {}  # forced tokens of the open round, by row
        self._longest = 0  # what was proposed in it, before constraints cut drafts

    def takes_tokens(self, place: int) -> bool:
        """Whether the drafter can follow where somebody else chooses a row's tokens."""
        members = self._members
        return place not in members.rows or members.offers(SupportsConsume)

    def lending(
        self, state: RowState, places: Sequence[int] | None
    ) -> AbstractContextManager[None]:
        """While the block runs, the draft group may borrow of its members' target rows.

        Args:
            state: rows of the verify group, between rounds.
            places: the members' rows; ``None`` for all.
        """
        return self._lending.of(state, places)

    def propose(
        self,
        rows: Sequence[Row],
        group: DraftRowGroup,
        *,
        context: ContextKind,
        on_device: bool,
        forced: Mapping[int, Sequence[int]],
        rejecting: bool,
    ) -> tuple[Drafts, Sequence[str | None]]:
        """Open a round.

        Args:
            rows: the host rows, in group order.
            group: the draft group; it has members.
            context: the hidden states that it reads.
            on_device: whether drafts may stay on the device.
            forced: by row, ids of the target that stand in front of its drafts.
            rejecting: whether a row asks from which distribution the drafts were drawn.

        Returns:
            The drafts, forced ones included, and per member what was wrong with its own.

        Raises:
            ContractError: a proposal that is none.
        """
        members, vocab = self._members, self._target.vocab_size
        places = members.places(len(rows))
        asked = Asked.of(members.rows, forced, behind=context is ContextKind.NONE)
        self._longest = 0
        self._ahead = {place: forced[place] for place in members.rows if place in forced}
        if self._ahead and context is ContextKind.NONE:
            members.consume(
                {row: [rows[row].pending, *ids[:-1]] for row, ids in self._ahead.items()}, None
            )
        if on_device and max(asked.depths) > 0 and members.offers(SupportsDeviceDraft):
            device = cast("SupportsDeviceDraft", group).draft_device(*asked.lists())
            if device is not None:
                fault = check_device(device, asked.depths)
                if fault is not None:
                    raise ContractError(fault)
                self._note_remarks(group)
                # The device drafts while the host builds the window that verifies it.
                mx.async_eval(device.tokens)  # type: ignore[no-untyped-call]  # untyped in MLX
                logq = self._logq(device, device.tokens.shape[1]) if rejecting else None
                drafts = Drafts.of(asked.depths, places, len(rows), device=device, logq=logq)
                return drafts, ()
        # Reading a proposal runs the drafter's code as well, so it may raise as well.
        proposal = group.draft(*asked.lists())
        mine, faults = check_host(proposal, asked.depths, vocab)
        self._note_remarks(group)
        self._longest = max(map(len, mine))
        bad = {b for b, f in enumerate(faults) if f and len(mine[b]) < asked.depths[b]}
        # What is no id was drawn as well, from a distribution that counts.
        drawn = max(len(draft) + (b in bad) for b, draft in enumerate(mine))
        logq = self._logq(proposal, drawn) if rejecting else None
        drafts = Drafts.of(asked.depths, places, len(rows), mine, logq=logq)
        refused = frozenset(pick(list(members.rows), sorted(bad)))
        return evolve(drafts, refused=refused).behind(forced, vocab), faults

    def _note_remarks(self, group: DraftRowGroup) -> None:
        """Say in the statistics what the drafter says of rows that it drafts for."""
        if not self._members.offers(SupportsRemarks):
            return
        remarks = cast("SupportsRemarks", group).remarks
        rows = self._members.rows.values()
        for row, said in zip(rows, row_reasons(remarks, len(rows), "remarks"), strict=True):
            if row.width:
                row.stats.reason = None if said is None else one_line(said)

    def _logq(self, proposal: object, depth: int) -> mx.array | None:
        logq = getattr(proposal, "logq", None)
        if logq is None or depth == 0:
            return None
        return check_logq(
            logq,
            rows=len(self._members.rows),
            depth=depth,
            vocab_size=self._target.vocab_size,
            listed=self._listed,
        )

    def commit(self, accepted: Sequence[int], context: mx.array | None) -> None:
        """End the round.

        Args:
            accepted: B ints, those of rows outside the draft group and forced drafts included.
            context: ``[B, W, ·]`` of the window, or ``None``.
        """
        members, ahead = self._members, self._ahead
        self._ahead = {}
        if context is None:
            own = [count - len(ahead.get(row, ())) for row, count in enumerate(accepted)]
            members.commit([max(0, count) for count in own], None)
            # They have read what was forced, and was not emitted after all.
            members.remove([row for row in ahead if own[row] < 0])
            return
        own = [0 if row in ahead else count for row, count in enumerate(accepted)]
        # Where constraints cut every long draft, the window is narrower than what was drafted.
        missing = max(0, 1 + self._longest - context.shape[1])
        members.commit(own, mx.pad(context, [(0, 0), (0, missing), (0, 0)]) if missing else context)
        members.consume({row: ids[: accepted[row]] for row, ids in ahead.items()}, context[:, 1:])

    def look_up(self, depth: int) -> list[tuple[Row, int, list[int]]]:
        """What the members' drafts would be, of rows that want some: see ``DraftLane.look_up``.

        Args:
            depth: drafts to ask for at most.

        Raises:
            ContractError: what was given is not one list per row.
        """
        group, rows = self._members.group, list(self._members.rows.values())
        if group is None:
            return []
        depths = [min(depth, row.width) for row in rows]
        said = cast("SupportsLookup", group).look_up([row.pending for row in rows], depths)
        drafts = check_lookup(said, depths, self._target.vocab_size)
        return [each for each in zip(rows, depths, drafts, strict=True) if each[1]]

    def preview(self, count: int) -> list[list[int]] | None:
        """What the members' drafts would be now; ``None`` where the drafter cannot say.

        Args:
            count: rows of the verify group, B.

        Returns:
            B lists, empty for rows that are no members.
        """
        group, members = self._members.group, self._members.rows
        if not members or not isinstance(group, SupportsPreview):
            return None
        asked = Asked.of(members, {}, behind=True)
        seen = group.preview(*asked.lists())
        if seen is None:
            return None
        shown: Any = seen.tolist()
        mine = [ids[:depth] for ids, depth in zip(shown, asked.depths, strict=True)]
        cut, _ = check_host(mine, asked.depths, self._target.vocab_size)
        drafts: list[list[int]] = [[] for _ in range(count)]
        for place, draft in zip(members, cut, strict=True):
            drafts[place] = draft
        return drafts
