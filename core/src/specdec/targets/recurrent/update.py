"""The gated delta rule over a window, and what computes it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from attrs import frozen

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["DeltaUpdate", "DeltaWindow"]


@frozen(eq=False)
class DeltaWindow:
    """What mlx-lm's loop over positions is given, by its names.

    Attributes:
        q: queries ``[B, T, Hk, Dk]``.
        k: keys ``[B, T, Hk, Dk]``.
        v: values ``[B, T, Hv, Dv]``; Hv is a multiple of Hk.
        g: decay ``[B, T, Hv]``, or of every key by itself ``[B, T, Hv, Dk]``.
        beta: rate ``[B, T, Hv]``.
        state: what there was before ``[B, Hv, Dv, Dk]``.
        mask: ``[B, T]``; where it is false the state stays what it was.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array | None = None
    mask: mx.array | None = None


class DeltaUpdate(Protocol):
    """Something that computes the gated delta rule over a window at once."""

    def __call__(self, window: DeltaWindow, /, *, every: bool) -> tuple[mx.array, mx.array] | None:
        """Compute a window.

        Args:
            window: its operands.
            every: whether the state after every position is wanted.

        Returns:
            ``[B, T, Hv, Dv]`` in q's type, and states ``[T, B, Hv, Dv, Dk]``, or ``[1, ...]`` with
            the last one alone; ``None`` where it does not take such arrays.
        """
