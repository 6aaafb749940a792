"""What one row may emit: the one thing that the executor asks of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

__all__ = ["TokenConstraint"]


class TokenConstraint(Protocol):
    """What one row may emit. Advanced by the row's emitted tokens alone.

    Drafts are looked at and never consumed, so a rejected draft has nothing to undo.
    """

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        """Which ids may follow now, and behind each drafted token. Changes no state.

        Args:
            draft: the row's drafts of this round; any ints.

        Returns:
            The allowed ids, bool ``[n + 1, V]``, at least one in each position, or ``None``
            where nothing is restricted at any of these positions; and ``n``, how many of the
            drafts are allowed. The draft is cut there.

        Raises:
            ConstraintError: the constraint cannot go on.
        """

    def advance(self, token: int, /) -> bool:
        """Read an emitted content token, which an end token is not.

        Returns:
            True where the output is complete with it: nothing but an end may follow.

        Raises:
            ConstraintError: the token is not allowed, or the constraint cannot go on; the state
                is unchanged.
        """

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        """Ids that are forced next, at most ``max_tokens``; changes no state. May be empty."""
