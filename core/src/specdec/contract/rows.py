"""Draft groups: the rows that read prompts, draft, commit, join and leave.

The life of a group, and when each verb may be called::

    open ─► between rounds ─┬─ prepare_append ────────┐
                            ├─ filter_rows(keep)      ├─► between rounds
                            ├─ capture(row)           │
                            ├─ preview(...)           │
                            ├─ consume(...)          ─┘
                            └─ draft | draft_device ─► (the target verifies) ─► commit ─► between

Shapes: B rows, L tokens read, W = 1 + the longest draft, H hidden size, m tapped layers, V
vocabulary. Token and context arrays are borrowed and hold only new positions. Row order is the
same in the draft group, in the target's rows and in the host's rows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from specdec.contract.changes import PendingChange
    from specdec.contract.checkpoint import RowCheckpoint

__all__ = [
    "ContextKind",
    "DeviceProposal",
    "DraftPrefillGroup",
    "DraftRowGroup",
    "DraftRows",
    "PrefillMode",
    "Proposal",
    "SupportsConsume",
    "SupportsDeviceDraft",
    "SupportsLookup",
    "SupportsPreview",
    "SupportsRemarks",
    "SupportsStandDown",
]


class PrefillMode(StrEnum):
    """How target and drafter share the prompt.

    ``TAIL_SPLIT``: both read ``prompt[:-1]``; the last prompt token is the first pending one.
    ``FULL``: the target reads the whole prompt; its first sample is the first pending token.
    """

    TAIL_SPLIT = "tail_split"
    FULL = "full"


class ContextKind(StrEnum):
    """Which hidden states of the target a group is given with each chunk and each commit."""

    NONE = "none"
    PRE_NORM = "pre_norm"
    POST_NORM = "post_norm"
    TAPS = "taps"


@frozen(eq=False)
class Proposal:
    """Drafts on the host, with the distribution they were drawn from.

    Attributes:
        tokens: B lists of 0..depth ids.
        logq: ``[B, d, V or N]`` log-probabilities the drafts were drawn from; ``None`` means
            that each draft was certain (one-hot).
    """

    tokens: Sequence[Sequence[int]]
    logq: mx.array | None = None


@frozen(eq=False)
class DeviceProposal:
    """Drafts that stay on the device until the round's one host read.

    Attributes:
        tokens: integer ids ``[B, d]``, d at most the largest depth asked.
        resolve: called once, before ``commit``, with the row-major host copy of ``tokens``
            (B·d ints); returns B lists, the drafts as the group remembers them.
        lengths: ``[B]`` ints on the device that cut each row, or ``None`` for d in every row.
        logq: as in :class:`Proposal`.
    """

    tokens: mx.array
    resolve: Callable[[Sequence[int]], Sequence[Sequence[int]]]
    lengths: mx.array | None = None
    logq: mx.array | None = None


class _Membership(Protocol):
    """What both kinds of group share: identity, membership and persistence."""

    @property
    def namespace(self) -> str:
        """The provider's ``checkpoint_namespace``."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Tapped layers in declared order; empty if the group taps nothing."""

    @property
    def context(self) -> ContextKind:
        """The hidden states the group wants; ``TAPS`` if and only if ``tap_layers`` is set."""

    @property
    def row_count(self) -> int:
        """Rows now in the group, B."""

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> PendingChange:
        """Build all that new rows need, without touching the live rows. Between rounds.

        Args:
            checkpoints: one per new row, borrowed. They never change, so their arrays may be kept;
                assign into none of them. ``None`` is a cold row, in prefill groups only.

        Raises:
            CheckpointError: wrong namespace, schema, shape or alignment; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """

    def filter_rows(self, keep: Sequence[int], /) -> None:
        """Retire and reorder rows: ``keep`` lists old indices in their new order.

        ``[]`` drains the group, which keeps its bound selection for rows that join later.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """

    def capture(self, row: int, /) -> RowCheckpoint:
        """The row's state, independent of the group's storage. Between rounds.

        A row that has read nothing gives an empty checkpoint with ``processed_tokens`` 0.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """

    def close(self) -> None:
        """Release everything. At any time, any number of times."""


class DraftPrefillGroup(_Membership, Protocol):
    """Reads prompts with the target; drafts nothing."""

    @property
    def prefill_mode(self) -> PrefillMode:
        """How target and drafter share the prompt."""

    def prefill(self, tokens: mx.array, context: mx.array | None, /) -> None:
        """Read the chunk that the target has just read: each position once, in order.

        Args:
            tokens: ``[B, L]`` ids, borrowed; equal L in all rows.
            context: ``[B, L, H]`` or ``[B, L, m·H]`` of the declared kind, borrowed; ``None``
                for ``ContextKind.NONE``.

        Raises:
            ContractError: a wrong shape, or a context that was not declared; nothing changed.
            ClosedError: after ``close``.
        """

    def materialize(self) -> None:
        """Evaluate what was restored and is still lazy; only then may its lease on a file go."""


class DraftRows(Protocol):
    """The two verbs that every round needs."""

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> Sequence[Sequence[int]] | Proposal:
        """Open a round and propose on the host.

        Args:
            pending: B ids, each row's emitted (or last prompt) token that the target has not
                read yet. A row of depth 0 still reads it.
            depths: B ints, the most each row may propose.
            steps: B ints, samples drawn so far per row, for coupled noise.

        Returns:
            B lists of 0..depth ids; the length returned is what counts, and rows may differ.

        Raises:
            ContractError: lists that are not one entry per row; no round is opened.
            RoundOpenError: a round is open.
            ClosedError: after ``close``.
        """

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        """End the round: row i keeps its pending token and its first ``accepted[i]`` drafts.

        Args:
            accepted: B ints, 0..the length that was proposed.
            context: the verify window's hidden states ``[B, W, ·]`` of the declared kind,
                borrowed, right-padded as the window is; ``None`` for ``ContextKind.NONE``.

        Raises:
            NoOpenRoundError: no round is open.
            ContractError: a count outside its range, or of the wrong length; nothing changed.
            ClosedError: after ``close``.
        """


class DraftRowGroup(_Membership, DraftRows, Protocol):
    """Rows that decode: they draft, commit, join, leave, and are captured."""


@runtime_checkable
class SupportsDeviceDraft(Protocol):
    """Optional: proposals that stay on the device. Looked up once, when the group is bound."""

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> DeviceProposal | None:
        """As ``draft``, but the ids stay on the device; ``None``: call ``draft`` instead."""


@runtime_checkable
class SupportsLookup(Protocol):
    """Optional: drafts are looked up on the host, and asking costs the device nothing.

    A drafter whose rounds do not pay is not asked any more (``docs/never-slower.md``). One with
    this verb is listened to meanwhile: what it would have proposed is compared with the tokens
    that came, so that it comes back as soon as it is right.
    """

    def look_up(self, pending: Sequence[int], depths: Sequence[int], /) -> Sequence[Sequence[int]]:
        """What ``draft`` would propose now, on the host; changes nothing. Between rounds.

        Args:
            pending: B ids, as in ``draft``.
            depths: B ints, the most each row may propose.

        Returns:
            B lists of 0..depth ids.

        Raises:
            ContractError: as ``draft``.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """


@runtime_checkable
class SupportsPreview(Protocol):
    """Optional: what ``draft_device`` would propose, with the state unchanged."""

    def preview(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> mx.array | None:
        """The first ids ``[B, ≤ depth]`` of a draft, on the device; changes nothing."""


@runtime_checkable
class SupportsConsume(Protocol):
    """Optional: tokens that somebody else chose are taken as committed."""

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        """Read externally chosen tokens between rounds.

        Args:
            tokens: ``[B, L]`` ids, borrowed, right-padded.
            context: the target's hidden states ``[B, L, ·]`` of the declared kind, or ``None``.
            lengths: B ints, how many of its tokens each row keeps; the pending output is not
                among them.

        Raises:
            ContractError: a wrong shape, count or context; nothing changed.
            RoundOpenError: inside a round.
            ClosedError: after ``close``.
        """


@runtime_checkable
class SupportsStandDown(Protocol):
    """Optional: rows that will not be drafted for any more, such as behind a context limit.

    The executor looks after each draft of the group, on the host or on the device. A row that has a
    reason has proposed nothing in it and proposes nothing from then on, and still takes every verb;
    the reason stays until the row leaves, follows ``filter_rows``, and is said again by a restored
    row after its next draft at the latest. The executor ends drafting for that row alone, says the
    reason in its statistics, and lets it leave the group before the next round.
    """

    @property
    def stood_down(self) -> Sequence[str | None]:
        """B entries: why a row drafts nothing from now on, in a few words; ``None`` if it does."""


@runtime_checkable
class SupportsRemarks(Protocol):
    """Optional: what users should know of rows that are still drafted for.

    The executor looks after each draft of the group and says it as the reason in the row's
    statistics, until the group says something else or the row's drafting ends for another reason.
    """

    @property
    def remarks(self) -> Sequence[str | None]:
        """B entries: a few words, such as which part of the drafter has stopped, or ``None``."""
