"""The port of a drafter that borrows its target's keys and values: bound to a group, or to none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from specdec.errors import ContractError
from specdec.state import read_donors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.core as mx

    from specdec.contract import AssistantDonors
    from specdec.state import RowState

__all__ = ["DonorPort"]


class _Embeds(Protocol):
    @property
    def hidden_size(self) -> int: ...

    def embed(self, ids: mx.array) -> mx.array: ...


class DonorPort:
    """``AssistantRows`` of an mlx-lm model, and what a verify group makes its own port of.

    Args:
        hidden: the model's embedding.
        lends: the donors of rows with the model's own caches, see ``AssistantRows``.
        live: gives the rows that may be read now; ``None`` for a port of no group.
    """

    def __init__(
        self,
        hidden: _Embeds,
        lends: frozenset[str],
        live: Callable[[], tuple[RowState, Sequence[int] | None]] | None = None,
    ) -> None:
        self._hidden = hidden
        self._lends = lends
        self._live = live

    @property
    def hidden_size(self) -> int:
        """Features of the final hidden, H."""
        return self._hidden.hidden_size

    @property
    def lends(self) -> frozenset[str]:
        """The donors of rows with the model's own caches."""
        return self._lends

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings ``[B, L, H]`` of ids ``[B, L]``, scaled as the model's own input is."""
        return self._hidden.embed(ids)

    def read_donors(self) -> AssistantDonors:
        """The donors of the group's own rows.

        Raises:
            ContractError: it is the port of no group, or the group does not draft now.
            TargetLacksError: the rows' caches hold no attention keys.
        """
        if self._live is None:
            raise ContractError(
                "read_donors() was called on a target with no rows; call it in draft() on the "
                "target of a group that was opened"
            )
        state, rows = self._live()
        return read_donors(state, rows)

    def of_group(self, live: Callable[[], tuple[RowState, Sequence[int] | None]], /) -> DonorPort:
        """The port over the rows that ``live`` gives."""
        return DonorPort(self._hidden, self._lends, live)
