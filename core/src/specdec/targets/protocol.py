"""What the executor drives: a target that a drafter can view, and that runs windows over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from specdec.contract import ContextKind, TargetView

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.state import CacheOptions, RowState

__all__ = ["Target", "Window"]


class Window(Protocol):
    """What one forward over ``[B, W]`` tokens gave; lazy until it is evaluated."""

    @property
    def logits(self) -> mx.array:
        """``[B, W, V]``. The head costs nothing where nobody evaluates it."""

    @property
    def context(self) -> mx.array | None:
        """``[B, W, ·]`` of the kind that was asked for, or ``None``."""


class Target(TargetView, Protocol):
    """A bound model. ``specdec_bind_target`` may return one for runtimes other than mlx-lm."""

    @property
    def no_speculation_reason(self) -> str | None:
        """Why this target decodes one position at a time, if it does."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Types of the adapter layers that the model runs under now; empty without an adapter.

        Looked up at each call, since adapters may be put into a bound model and taken out of it.
        Cheap enough to ask per request.
        """

    def new_state(self, options: CacheOptions = ..., /) -> RowState:
        """The state of one cold row.

        Args:
            options: how it is cached, if not as the model's own caches are.

        Raises:
            OptionError: the target cannot be cached so.
        """

    def row_bytes(self, tokens: int, options: CacheOptions = ..., /) -> int:
        """Bytes that the caches of one row take at most at so many positions.

        From shapes alone: nothing is allocated. Cheap enough to ask per request.
        """

    def state_identity(self, options: CacheOptions = ..., /) -> str:
        """Names all that a row's state depends on besides its tokens.

        The weights, adapters included, the kinds of cache and the backend: state that was stored
        under one identity is never restored under another. Cheap enough to ask per request; it
        changes when the weights do.
        """

    def state_of(self, caches: Sequence[Any], options: CacheOptions = ..., /) -> RowState:
        """The state of one row that continues the caller's caches.

        Raises:
            OptionError: the caches do not fit this target.
        """

    def forward(
        self,
        tokens: mx.array,
        state: RowState,
        context: ContextKind = ContextKind.NONE,
        taps: Sequence[int] = (),
    ) -> Window:
        """Run the window ``[B, W]`` that was begun on ``state``."""
