"""An assistant as a provider: it owns the network, and makes row groups over a target."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import frozen

from specdec.checkpoints import weights_identity
from specdec.contract import require_port
from specdec.drafting.choose import Chooser
from specdec.drafting.modules import parameters_of
from specdec.errors import ClosedError
from specdec_assistant.pairing import check_pairing
from specdec_assistant.rows import AssistantGroup, RowsSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import (
        AssistantRows,
        RowCheckpoint,
        RowConstraints,
        RowSampling,
        TargetView,
    )
    from specdec_assistant.config import AssistantConfig
    from specdec_assistant.model import AssistantModel

__all__ = ["SCHEMA", "Assistant", "AssistantGroups", "AssistantProvider", "Positions"]

SCHEMA: Final = "assistant-1"
"""Persistent name of the layout of a row's arrays."""


class Positions(StrEnum):
    """Where the queries of a round's steps stand.

    Attributes:
        CONSTANT: all at the last position in the target's K/V.
        ADVANCING: the first there, each further one a position ahead.
    """

    CONSTANT = "constant"
    ADVANCING = "advancing"


@frozen(kw_only=True, eq=False)
class Assistant:
    """A drafter.

    Attributes:
        name: for people and messages.
        config: of the network.
        model: the network.
        positions: where its queries stand.
    """

    name: str
    config: AssistantConfig
    model: AssistantModel
    positions: Positions = Positions.CONSTANT


class AssistantGroups:
    """Makes groups of one assistant's rows.

    Args:
        drafter: the assistant.
    """

    supports_adapters = False  # it reads the K/V of the weights it was trained with

    def __init__(self, drafter: Assistant) -> None:
        self._drafter: Assistant | None = drafter
        self._checked: object | None = None

    @cached_property
    def checkpoint_namespace(self) -> str:
        """The layout's name, the weights, and how they are used."""
        own = self._own
        config = sha256(repr(own.config).encode()).hexdigest()[:16]  # its window is no weight
        return f"{SCHEMA}:{weights_identity(own.model)}:{config}:{own.positions}"

    @property
    def _own(self) -> Assistant:
        if self._drafter is None:
            raise ClosedError("open")
        return self._drafter

    def release(self) -> None:
        """Let the weights go; groups that are open keep theirs until they are closed."""
        self._drafter = self._checked = None

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """Bytes of one row: a hidden state, however long its text is."""
        del tokens
        return self._own.config.backbone_size * _dtype_of(self._port(target)).size

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> AssistantGroup:
        """A group that reads prompts.

        Args:
            target: the bound target.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            TargetLacksError: it lends no keys and values.
            ArtifactError: it is another one than the drafter's.
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, None)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002  what is forced is the core's
    ) -> AssistantGroup:
        """A group that decodes.

        Args:
            target: the bound target, as the group's own rows see it.
            sampling: the rows' draws.
            checkpoints: one per row, borrowed.
            constraints: not used.

        Raises:
            TargetLacksError: it lends no keys and values.
            ArtifactError: it is another one than the drafter's.
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, Chooser(sampling, target.vocab_size))

    def _open(
        self,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint | None],
        choose: Chooser | None,
    ) -> AssistantGroup:
        own, port = self._own, self._port(target)
        settings = RowsSettings(
            name=own.name,
            config=own.config,
            model=own.model,
            advances=own.positions is Positions.ADVANCING,
            namespace=self.checkpoint_namespace,
            schema=SCHEMA,
            dtype=_dtype_of(port),
            vocab_size=target.vocab_size,
        )
        rows = AssistantGroup(settings, port, choose)
        rows.prepare_append(checkpoints).commit()
        return rows

    def _port(self, target: TargetView) -> AssistantRows:
        own = self._own
        # The view may be a group's own: never kept for another group.
        port: AssistantRows = require_port(target, "assistant_rows", own.name)
        if self._checked is None or self._checked is not target.identity:
            check_pairing(own.name, own.config, port, target)
            self._checked = target.identity
        return port


def _dtype_of(port: AssistantRows) -> mx.Dtype:
    return port.embed(mx.zeros((1, 1), mx.int32)).dtype


class AssistantProvider:
    """An assistant as a drafter.

    Args:
        drafter: the assistant.
    """

    def __init__(self, drafter: Assistant) -> None:
        self._name = drafter.name
        self.weight_bytes = sum(array.nbytes for array in parameters_of(drafter.model).values())
        self._grouped = AssistantGroups(drafter)

    @property
    def id(self) -> str:
        """What the drafter was loaded from."""
        return self._name

    @property
    def grouped(self) -> AssistantGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Let the weights go."""
        self._grouped.release()
