"""Draft providers: who owns a drafter's weights, and makes its row groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec.errors import ProviderError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract.checkpoint import RowCheckpoint
    from specdec.contract.rows import DraftPrefillGroup, DraftRowGroup
    from specdec.contract.sampling import RowConstraints, RowSampling
    from specdec.contract.target import TargetView

__all__ = [
    "DeclaresRowBytes",
    "DeclaresTaps",
    "DeclaresVocabulary",
    "DraftProvider",
    "GroupedDraftProvider",
    "validate_provider",
]


class GroupedDraftProvider(Protocol):
    """Factory of row groups for one target at a time; lives with its provider."""

    @property
    def checkpoint_namespace(self) -> str:
        """Identity that row state is stored under, stable across loads.

        It names the artifact and every setting that shapes the state, and is known without
        opening a row.
        """

    @property
    def supports_adapters(self) -> bool:
        """Whether draft state stays valid when the target runs under a LoRA adapter."""

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> DraftPrefillGroup:
        """A group that reads prompts.

        Args:
            target: the bound target.
            checkpoints: one per row; ``None`` is a cold row. Borrowed.

        Raises:
            TargetLacksError: the target lacks a port; raised before anything is allocated.
            CheckpointError: a checkpoint does not fit.
        """

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> DraftRowGroup:
        """A group that decodes.

        Args:
            target: the bound target.
            sampling: the rows' draws; its selection is bound here, once.
            checkpoints: one per row, from ``capture``. Borrowed.
            constraints: forced continuations of the rows' requests, if any.

        Raises:
            TargetLacksError: the target lacks a port; raised before anything is allocated.
            CheckpointError: a checkpoint does not fit.
        """


class DraftProvider(Protocol):
    """Owns a drafter's weights for as long as the process serves."""

    @property
    def id(self) -> str:
        """Name for people, such as the artifact's folder."""

    @property
    def weight_bytes(self) -> int:
        """Memory the drafter's own weights take; 0 if it has none or the target owns them."""

    @property
    def grouped(self) -> GroupedDraftProvider:
        """The factory of this provider's row groups."""

    def close(self) -> None:
        """Release the weights. Every group must be closed before; any number of times."""


@runtime_checkable
class DeclaresTaps(Protocol):
    """Optional, for a grouped provider whose rows read the target's hidden layers."""

    def target_tap_layers(self, target: TargetView, /) -> tuple[int, ...]:
        """The tapped layers, in order, for this target; resolved once when it is bound."""


@runtime_checkable
class DeclaresVocabulary(Protocol):
    """Optional, for a grouped provider whose rows can select over part of the vocabulary."""

    def draft_vocabulary(self, target: TargetView, /) -> tuple[int, ...] | None:
        """Ascending token ids for this target, or ``None``."""


@runtime_checkable
class DeclaresRowBytes(Protocol):
    """Optional, for a grouped provider whose rows take memory that grows with their texts."""

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """Bytes that one row takes at most once it has read so many tokens."""


_PROVIDER_MEMBERS = ("id", "weight_bytes", "grouped", "close")
_GROUPED_MEMBERS = ("checkpoint_namespace", "supports_adapters", "open_prefill", "open")


def validate_provider(provider: object, plugin: str) -> None:
    """Check that an object has every member of a provider; behaviour is the kit's to check.

    Args:
        provider: what a plugin's ``load`` returned.
        plugin: who returned it, for the message.

    Raises:
        ProviderError: names all missing members in one message.
    """
    missing = [name for name in _PROVIDER_MEMBERS if not hasattr(provider, name)]
    grouped = getattr(provider, "grouped", None)
    if "grouped" not in missing:
        missing += [f"grouped.{name}" for name in _GROUPED_MEMBERS if not hasattr(grouped, name)]
    if missing:
        raise ProviderError(plugin, missing)
