"""What a drafter has not read while it rested: read at once when it is asked again.

A drafter at rest costs a plain round nothing but two references. Tokens and hidden states stay on
the device, where the windows left them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST", "Backlog"]

MOST: Final = 256
"""Positions that wait at most: hidden states take memory."""


_PIECES: Final = 16  # small arrays that are held at a time: each takes a block of its own


@define(eq=False)
class Backlog:
    """Positions of plain windows, for all rows of a verify group.

    Attributes:
        ragged: whether a row has kept fewer of the last window than others: nothing may follow.
    """

    ragged: bool = False
    _tokens: list[mx.array] = field(factory=list)
    _contexts: list[mx.array] = field(factory=list)
    _kept: list[int] = field(factory=list)
    _count: int = 0
    _last: int = 0  # positions of the last window

    def __len__(self) -> int:
        return self._count

    def add(self, tokens: mx.array, context: mx.array | None, kept: Sequence[int]) -> None:
        """A plain window was committed.

        Args:
            tokens: ``[B, W]`` ids, the window's own.
            context: ``[B, W, ·]`` hidden states there, or ``None``.
            kept: B ints, how many positions each row keeps; the first ones.
        """
        assert not self.ragged, "a row has not kept what it would go on behind"
        self._last = last = max(kept)
        whole = tokens.shape[1] == last
        self._tokens.append(tokens if whole else tokens[:, :last])
        if context is not None:
            self._contexts.append(context if whole else context[:, :last])
        self._count += last
        self._keep(kept)
        if len(self._tokens) > _PIECES:
            self._tokens = [mx.concatenate(self._tokens, axis=1)]
            if self._contexts:
                self._contexts = [mx.concatenate(self._contexts, axis=1)]
            mx.async_eval(*self._tokens, *self._contexts)  # type: ignore[no-untyped-call]

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if not self._tokens or list(keep) == list(range(len(self._kept))):
            return
        if not keep:
            self.clear()
            return
        index = mx.array(list(keep), mx.int32)
        self._tokens = [mx.take(each, index, axis=0) for each in self._tokens]
        self._contexts = [mx.take(each, index, axis=0) for each in self._contexts]
        self._keep([self._kept[row] for row in keep])
        if not any(self._kept):
            self._drop_last()

    def _drop_last(self) -> None:
        """Whoever kept of the last window has left."""
        self._count -= self._last
        if not self._count:
            self.clear()
            return
        for pieces in filter(None, (self._tokens, self._contexts)):
            whole = mx.concatenate(pieces, axis=1)
            pieces[:] = [whole[:, : self._count]]
        self._last = 0
        self.ragged = False

    def _keep(self, kept: Sequence[int]) -> None:
        self._kept = list(kept)
        self.ragged = any(count < self._last for count in self._kept)

    def take(self) -> tuple[mx.array, mx.array | None, list[int]]:
        """All of it: ``[B, L]`` ids, ``[B, L, ·]`` hidden states or ``None``, B lengths."""
        tokens = mx.concatenate(self._tokens, axis=1)
        context = mx.concatenate(self._contexts, axis=1) if self._contexts else None
        lengths = [self._count - self._last + kept for kept in self._kept]
        self.clear()
        return tokens, context, lengths

    def clear(self) -> None:
        """Nothing waits."""
        self._tokens, self._contexts, self._kept = [], [], []
        self._count = self._last = 0
        self.ragged = False
