"""A chain's rows: every verb of a draft group, spread over the groups of its members.

What is asked is checked for the chain as a whole, before any member sees it, so that a refused call
changes none of them. Rounds are in :mod:`specdec.chain.rounds`.

Shapes: B rows, L positions, W = 1 + the longest draft, d drafts.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec.chain.attachment import join, split
from specdec.chain.rounds import ChainRounds
from specdec.contract import Swap, check_keep
from specdec.drafting import checks
from specdec.errors import CheckpointError, blamed_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import mlx.core as mx

    from specdec.chain.members import Shared
    from specdec.chain.rounds import OpenMember
    from specdec.contract import (
        ContextKind,
        DeviceProposal,
        PrefillMode,
        Proposal,
        RowCheckpoint,
        RowSampling,
    )

__all__ = ["ChainRows", "call_all"]


class ChainRows:
    """A group of rows that reads prompts or decodes, as its members' groups do.

    Args:
        namespace: the provider's ``checkpoint_namespace``.
        shared: what the members read of the target.
        members: in the order in which they are asked.
        vocab_size: V.
        sampling: the rows' draws; ``None`` in a prefill group.
    """

    def __init__(
        self,
        *,
        namespace: str,
        shared: Shared,
        members: Sequence[OpenMember],
        vocab_size: int,
        sampling: RowSampling | None,
    ) -> None:
        self._namespace = namespace
        self._shared = shared
        self._members = tuple(members)
        self._decodes = sampling is not None
        self._rounds = ChainRounds(self._members, shared, vocab_size, sampling)

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""
        return self._namespace

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Every layer that a member reads."""
        return self._shared.taps

    @property
    def context(self) -> ContextKind:
        """The hidden states that serve all members."""
        return self._shared.context

    @property
    def prefill_mode(self) -> PrefillMode:
        """Whole prompts where any member needs them."""
        return self._shared.mode

    @property
    def row_count(self) -> int:
        """B."""
        return self._rounds.row_count

    @property
    def stood_down(self) -> list[str | None]:
        """Why rows draft nothing from now on: those that every member has stood down for."""
        whole = len(self._members)
        return ["; ".join(why) if len(why) == whole else None for why in self._whys(": ")]

    @property
    def remarks(self) -> list[str | None]:
        """Which members have stood down for rows that the others draft for."""
        return ["; ".join(why) or None for why in self._whys(" stood down: ")]

    def _whys(self, between: str) -> list[list[str]]:
        """Per row what the members say that have stood down for it, behind their names."""
        said = [[(each.name, why) for why in each.stood_down] for each in self._members]
        return [
            [f"{name}{between}{why}" for name, why in row if why is not None]
            for row in zip(*said, strict=True)
        ]

    # Membership.

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
        """Build the joining rows of every member; see the contract."""
        self._rounds.between("prepare_append")
        own = self._apart(checkpoints)
        prepared: list[Any] = []
        try:
            for each, joining in zip(self._members, own, strict=True):
                prepared.append(each.call("prepare_append", joining))
        except BaseException:
            with suppress(Exception):  # the cause is raised
                call_all([change.discard for change in prepared])
            raise

        def commit() -> None:
            if not self._rounds.closed:
                for each, change in zip(self._members, prepared, strict=True):
                    with blamed_on(each.name):
                        change.commit()

        return Swap(commit, lambda: call_all([change.discard for change in prepared]))

    def _apart(self, checkpoints: Sequence[RowCheckpoint | None]) -> list[Any]:
        if self._decodes and None in checkpoints:
            raise CheckpointError("a cold row cannot decode; read its prompt first")
        names = [each.group.namespace for each in self._members]
        return split(checkpoints, self._namespace, names)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Keep rows of every member, in the order that is asked for; see the contract."""
        self._rounds.between("filter_rows")
        check_keep(keep, self.row_count)
        for each in self._members:
            each.call("filter_rows", list(keep))

    def capture(self, row: int, /) -> RowCheckpoint:
        """All members' state of a row; see the contract."""
        self._rounds.between("capture")
        place = checks.row_number("capture", row, self.row_count)
        return join([each.call("capture", place) for each in self._members], self._namespace)

    def close(self) -> None:
        """Close every member's group, also where one of them raises."""
        self._rounds.close()
        call_all([partial(each.call, "close") for each in self._members])

    # Reading.

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Every member reads a chunk of every row's prompt; see the contract."""
        self._rounds.between("prefill")
        checks.check_token_array("prefill", tokens, self.row_count)
        self._shared.check("prefill", context, self.row_count, tokens.shape[1])
        for number, each in enumerate(self._members):
            each.call("prefill", tokens, self._shared.part(number, context))

    def materialize(self) -> None:
        """Evaluate what members restored or read."""
        self._rounds.check_open("materialize")
        for each in self._members:
            each.call("materialize")

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Every member reads tokens that somebody else chose; see the contract.

        Args:
            tokens: ``[B, L]`` ids, right-padded.
            context: ``[B, L, ·]``.
            lengths: B ints, tokens of each row.
        """
        self._rounds.between("consume")
        checks.check_token_array("consume", tokens, self.row_count)
        counts = checks.row_ints("consume: lengths", lengths, [tokens.shape[1]] * self.row_count)
        self._shared.check("consume", context, self.row_count, max(counts, default=0))
        for number, each in enumerate(self._members):
            each.call("consume", tokens, self._shared.part(number, context), counts)

    # Rounds.

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[list[Any]] | Proposal:
        """Open a round and propose on the host; see the contract."""
        return self._rounds.draft(pending, depths, steps)

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """Open a round whose last member's drafts stay on the device; see the contract."""
        return self._rounds.draft_device(pending, depths, steps)

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """Ids ``[B, d]`` that a draft would begin with; changes nothing."""
        return self._rounds.preview(pending, depths, steps)

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: every member reads what was kept, its own drafts or another's.

        Args:
            accepted: B ints.
            context: ``[B, at least 1 + the longest draft, ·]`` of the verify window.
        """
        self._rounds.commit(accepted, context)


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of them, then raise what the first of them that raised did."""
    raised: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            raised.append(error)
    if raised:
        raise raised[0]
