"""A target as the draft group of a verify group sees it: with the group's own rows to borrow of.

A target has no rows; those that decode are in the verify group's state. They are lent to the draft
group for as long as it is asked for drafts, and at no other time.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from specdec.errors import ContractError
from specdec.state import LendsRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.contract import AssistantRows, TargetView
    from specdec.state import RowState

__all__ = ["GroupTarget", "Lending", "view_for"]


class Lending:
    """The rows that the members of a draft group may look at now, if any."""

    __slots__ = ("_lent",)

    def __init__(self) -> None:
        self._lent: tuple[RowState, Sequence[int] | None] | None = None

    @contextmanager
    def of(self, state: RowState, places: Sequence[int] | None) -> Iterator[None]:
        """Lend rows while the block runs.

        Args:
            state: rows between rounds.
            places: the members' rows, in the draft group's order; ``None`` for all.
        """
        self._lent = (state, places)
        try:
            yield
        finally:
            self._lent = None  # nobody keeps buffers alive by it

    def live(self) -> tuple[RowState, Sequence[int] | None]:
        """What is lent.

        Raises:
            ContractError: nothing is.
        """
        if self._lent is None:
            raise ContractError(
                "read_donors() was called outside of a draft; call it in draft(), draft_device() "
                "or preview() of a group that was opened"
            )
        return self._lent


class GroupTarget:
    """A target whose ``assistant_rows`` are those of a group; all else is the target's own.

    Args:
        target: the bound target.
        assistant_rows: the group's port.
    """

    def __init__(self, target: TargetView, assistant_rows: AssistantRows) -> None:
        self._target = target
        self._assistant_rows = assistant_rows

    @property
    def assistant_rows(self) -> AssistantRows:
        """The port over the group's rows."""
        return self._assistant_rows

    @property  # type: ignore[misc]  # read-only here
    def __class__(self) -> type[Any]:
        # Optional protocols of a target are looked for with isinstance().
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def view_for(target: TargetView, lending: Lending) -> TargetView:
    """The target for a draft group that may read what is lent.

    A target without such a port, or with one of its own kind, is the view itself.
    """
    port = target.assistant_rows
    if not isinstance(port, LendsRows):
        return target
    return cast("TargetView", GroupTarget(target, port.of_group(lending.live)))
