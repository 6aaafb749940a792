"""What a drafter may read of its target: read-only ports, each of which may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from specdec.errors import TargetLacksError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import mlx.core as mx

    from specdec.contract.sampling import VocabularySubset

__all__ = [
    "AssistantDonors",
    "AssistantRows",
    "HiddenTaps",
    "RecurrentMtp",
    "ResidualBasis",
    "TargetView",
    "require_port",
]


class HiddenTaps(Protocol):
    """The target's hidden layers, its embedding and its head."""

    @property
    def layer_count(self) -> int:
        """Number of layers.

        Tap ``i`` below it is the residual stream after layer ``i``; tap ``layer_count`` is the
        hidden after the final norm.
        """

    @property
    def hidden_size(self) -> int:
        """Features of one tapped layer, H."""

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings ``[B, L, H]`` of ids ``[B, L]``, scaled as the target's own input is."""

    def logits(self, hidden: mx.array, /) -> mx.array:
        """The target's head over ``[B, L, H]`` after the final norm: ``[B, L, V]``.

        May be a ``RowTable``: forms of the head that the target declares for some numbers of rows.
        """


class RecurrentMtp(Protocol):
    """What a multi-token-prediction head shares with its target."""

    @property
    def hidden_size(self) -> int:
        """Features of the final hidden, H."""

    @property
    def layer_count(self) -> int:
        """Number of the target's layers."""

    @property
    def args(self) -> Any | None:
        """What the target's layers were made with (mlx-lm's ``ModelArgs``), rope scaling included.

        ``None`` where that is not known.
        """

    @property
    def vocabulary_head(self) -> Any | None:
        """The quantized module behind the head, if the head is quantized; else ``None``."""

    def subset(self, ids: Sequence[int]) -> VocabularySubset | None:
        """The head over some ids alone; ``None`` where the model's head cannot be cut.

        Args:
            ids: ascending, each below V. Their rows of the head are copied, packed as they are.
        """

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings ``[B, L, H]`` of ids ``[B, L]``, scaled as the target's own input is."""

    def logits(self, hidden: mx.array, /) -> mx.array:
        """The target's head over ``[B, L, H]`` after the final norm: ``[B, L, V]``.

        May be a ``RowTable``: forms of the head that the target declares for some numbers of rows.
        """


@frozen(eq=False)
class AssistantDonors:
    """One snapshot of the target's last sliding and last full attention K/V, for a whole round.

    Rows are left-aligned and right-padded: row b holds its last ``min(positions[b], L)`` positions
    in the first columns, in temporal order. What is behind them is anything, and must be masked.

    Attributes:
        sliding: keys and values ``[B, heads, L, D]`` of the last layer that sees a window; L is
            the window at most. ``None`` where there is none.
        full: keys and values ``[B, heads, L, D]`` of the last layer that sees everything, with an
            L of its own. ``None`` where there is none. Both are ``None`` while no row has read
            anything.
        positions: B ints, the tokens each row's target has read.
    """

    sliding: tuple[mx.array, mx.array] | None
    full: tuple[mx.array, mx.array] | None
    positions: tuple[int, ...]


class AssistantRows(Protocol):
    """What a K/V-borrowing drafter reads of the target."""

    @property
    def hidden_size(self) -> int:
        """Features of the final hidden, H."""

    @property
    def lends(self) -> frozenset[str]:
        """Which donors there are: ``"sliding"``, ``"full"`` or both.

        Known before there are rows, for caches as the model makes them; a row whose request asks
        for others may lack one. In a group's view it may be read at any time.
        """

    def embed(self, ids: mx.array) -> mx.array:
        """Embeddings ``[B, L, H]`` of ids ``[B, L]``, scaled as the target scales them."""

    def read_donors(self) -> AssistantDonors:
        """The donors of the group's own rows, between rounds; read again after every commit.

        To be called inside ``draft``, ``draft_device`` or ``preview`` of a group that was opened
        with this view, and not kept: a snapshot that is held stops in-place writes to the cache.

        Raises:
            ContractError: the view is not of a group that decodes.
            TargetLacksError: the rows' caches hold no attention keys.
        """


@frozen(eq=False)
class ResidualBasis:
    """The rotation that is folded into a target's residual stream.

    Attributes:
        rotation: ``[H, H]``; a stored hidden ``h`` is ``h_original @ rotation``.
        scale: ``[H]`` of the final norm that was folded into the head, or ``None``. Where it is,
            the hidden after the final norm is ``(h_original / scale) @ rotation``.
    """

    rotation: mx.array
    scale: mx.array | None = None


class TargetView(Protocol):
    """Read-only ports over the bound target and its live caches; lives with the target."""

    @property
    def identity(self) -> object:
        """Opaque: a provider that borrows weights of one exact target compares it by ``is``."""

    @property
    def vocab_size(self) -> int:
        """Ids below it are valid input of the target, V."""

    @property
    def folder(self) -> Path | None:
        """Where the target's checkpoint is, if that is known: some drafters come along there."""

    @property
    def hidden_taps(self) -> HiddenTaps | None:
        """Tapped layers, embedding and head."""

    @property
    def recurrent_mtp(self) -> RecurrentMtp | None:
        """Embedding and head for a head that continues the final hidden."""

    @property
    def assistant_rows(self) -> AssistantRows | None:
        """K/V donors."""

    @property
    def residual_basis(self) -> ResidualBasis | None:
        """The rotation of the residual stream, if any."""

    @property
    def draft_projections(self) -> Mapping[str, Callable[..., mx.array]] | None:
        """Operations the target offers for a drafter's own projections, such as faster kernels.

        The key is the last part of a projection's path: ``"q_proj"``, ``"gate_proj"``, ``"fc"``.
        ``operation(x, linear)`` is given the input ``[..., in]`` and the drafter's own ``Linear``
        or ``QuantizedLinear``, and returns what ``linear(x)`` returns, up to rounding; it may be a
        ``RowTable``. A drafter that takes them does so before its first draft, and keeps to them.
        """

    def can_tap(self, layers: Sequence[int]) -> bool:
        """Whether a forward of this target can capture exactly these layers."""


def require_port(target: TargetView, port: str, needed_by: str = "this drafter") -> Any:
    """The named port of a target.

    Args:
        target: the bound target.
        port: attribute name of the port, such as ``"hidden_taps"``.
        needed_by: who asks, for the message.

    Raises:
        TargetLacksError: the target does not have it. Call this before allocating anything.
    """
    found = getattr(target, port, None)
    if found is None:
        raise TargetLacksError(port, needed_by)
    return found
