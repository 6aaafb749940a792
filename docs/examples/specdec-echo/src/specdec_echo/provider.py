"""The drafter as a provider: what it is called, what it weighs, and the groups it opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.errors import OptionError
from specdec_echo.history import SCHEMA
from specdec_echo.rows import EchoRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, RowConstraints, RowSampling, TargetView

__all__ = ["DEFAULT_MEMORY", "EchoGroups", "EchoProvider"]

DEFAULT_MEMORY: Final = 1024
"""Tokens that a row keeps, if nothing else is asked for."""


class EchoGroups:
    """Opens groups of rows.

    Args:
        memory: how many of its last tokens a row keeps.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory

    @property
    def checkpoint_namespace(self) -> str:
        """Identity of stored rows: their layout, and the setting that shapes them."""
        return f"{SCHEMA}:memory{self._memory}"

    @property
    def supports_adapters(self) -> bool:
        """Always: a row is made of tokens, whatever weights chose them."""
        return True

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> EchoRows:
        """A group that reads prompts.

        Args:
            target: not used: no port of the target is needed.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(checkpoints, cold_rows=True)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> EchoRows:
        """A group that decodes.

        Args:
            target: not used: no port of the target is needed.
            sampling: not used: a copied token is not drawn.
            checkpoints: one per row, from ``capture``; borrowed.
            constraints: not used.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(checkpoints, cold_rows=False)

    def _open(
        self,
        checkpoints: Sequence[RowCheckpoint | None],
        *,
        cold_rows: bool,
    ) -> EchoRows:
        rows = EchoRows(self.checkpoint_namespace, self._memory, cold_rows=cold_rows)
        rows.prepare_append(checkpoints).commit()
        return rows


class EchoProvider:
    """The drafter. One object serves any number of groups.

    Args:
        memory: how many of its last tokens a row keeps, 1 or more.

    Raises:
        OptionError: a memory that makes no sense.
    """

    def __init__(self, memory: int = DEFAULT_MEMORY) -> None:
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 1:
            raise OptionError(f"memory is {memory!r}; it must be a whole number of 1 or more")
        self._grouped = EchoGroups(memory)

    @property
    def id(self) -> str:
        """Name for people."""
        return "echo"

    @property
    def weight_bytes(self) -> int:
        """0: there are no weights."""
        return 0

    @property
    def grouped(self) -> EchoGroups:
        """What opens the groups."""
        return self._grouped

    def close(self) -> None:
        """Nothing to release. May be called again."""
