"""Membership in two phases: build everything, then swap everything.

A change is prepared without touching the live group. Only when every part is prepared are all of
them committed, and a commit is a swap of attributes that cannot fail.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, Self

from specdec.errors import RowIndexError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from specdec.contract.checkpoint import RowCheckpoint

__all__ = ["PendingChange", "Swap", "append", "check_keep", "commit_all"]


class PendingChange(Protocol):
    """One prepared membership change; nothing of it is visible before ``commit``.

    Whoever prepared it commits or discards it before anything else is asked of the group.
    """

    def commit(self) -> None:
        """Make the change visible. A swap only; takes effect once and cannot fail.

        After the group was closed it does nothing.
        """

    def discard(self) -> None:
        """Drop what was prepared. Harmless after ``commit`` and when called again."""


class Swap:
    """A :class:`PendingChange` made of one function that swaps attributes.

    As a context manager, leaving without ``commit`` discards.

    Args:
        apply: swaps the prepared state in; must not be able to fail.
        drop: releases what was prepared when the change is discarded.
    """

    def __init__(self, apply: Callable[[], None], drop: Callable[[], None] | None = None) -> None:
        self._apply: Callable[[], None] | None = apply
        self._drop = drop

    def commit(self) -> None:
        """Swap the prepared state in, once."""
        apply, self._apply, self._drop = self._apply, None, None
        if apply is not None:
            apply()

    def discard(self) -> None:
        """Drop the prepared state; harmless after ``commit``."""
        drop, self._apply, self._drop = self._drop, None, None
        if drop is not None:
            drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


class _Appendable(Protocol):
    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> PendingChange: ...


def commit_all(prepare: Iterable[Callable[[], PendingChange]]) -> None:
    """Prepare every change, then commit all of them; if one fails to prepare, discard all.

    Args:
        prepare: functions that each build one change without touching live state.

    Raises:
        Exception: whatever a ``prepare`` raised, after every prepared change was discarded.
    """
    prepared: list[PendingChange] = []
    try:
        for build in prepare:
            prepared.append(build())
    except BaseException:
        for change in prepared:
            with suppress(Exception):  # the others are discarded too, and the cause is raised
                change.discard()
        raise
    for change in prepared:
        change.commit()


def append(group: _Appendable, checkpoints: Sequence[RowCheckpoint | None]) -> None:
    """Add rows to one group: ``prepare_append`` and ``commit``. No rows: nothing changes.

    Args:
        group: a draft group, or anything with ``prepare_append``.
        checkpoints: one per new row; ``None`` is a cold row (prefill groups only).
    """
    if checkpoints:
        commit_all([lambda: group.prepare_append(checkpoints)])


def check_keep(keep: Sequence[int], row_count: int, verb: str = "filter_rows") -> None:
    """Refuse a ``keep`` list that does not name existing rows, each at most once.

    Args:
        keep: old row indices in their new order.
        row_count: rows the group has.
        verb: the verb that was called, for the message.

    Raises:
        RowIndexError: an index twice, negative or out of range.
    """
    if len(set(keep)) != len(keep) or any(not 0 <= row < row_count for row in keep):
        raise RowIndexError(verb, list(keep), row_count)
