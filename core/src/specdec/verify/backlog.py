"""What a drafter has not read while it rested: read at once when it is asked again.

A drafter at rest costs a plain round nothing but two references. Tokens and hidden states stay on
the device, where the windows left them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["MOST", "Backlog"]

MOST: Final = 256
"""Positions that wait at most: hidden states take memory."""

_PIECES: Final = 16  # small arrays that are held at a time: each takes a block of its own


@define(eq=False)
class Backlog:
    """Positions of plain windows, for all rows of a verify group.

    Attributes:
        ragged: whether a row has not kept the last of them: nothing may follow.
    """

    ragged: bool = False
    _tokens: list[mx.array] = field(factory=list)
    _contexts: list[mx.array] = field(factory=list)
    _kept: list[int] = field(factory=list)
    _count: int = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tokens: mx.array, context: mx.array | None, kept: Sequence[int]) -> None:
        """A plain window was committed.

        Args:
            tokens: ``[B, W]`` ids, of which the first is the window's own.
            context: ``[B, W, ·]`` hidden states there, or ``None``.
            kept: B ints, 1 where the row keeps the position, else 0.
        """
        assert not self.ragged, "a row has not kept what it would go on behind"
        padded = tokens.shape[1] > 1
        self._tokens.append(tokens[:, :1] if padded else tokens)
        if context is not None:
            self._contexts.append(context[:, :1] if padded else context)
        self._count += 1
        self._kept = list(kept)
        self.ragged = 0 in self._kept
        if len(self._contexts) > _PIECES:
            self._tokens = [mx.concatenate(self._tokens, axis=1)]
            self._contexts = [mx.concatenate(self._contexts, axis=1)]
            mx.async_eval(*self._tokens, *self._contexts)  # type: ignore[no-untyped-call]  # MLX

    def continues(self, rows: int) -> bool:
        """Whether the next position of so many rows can stand behind what waits."""
        return not self._tokens or (not self.ragged and len(self._kept) == rows)

    def widen(self, rows: int) -> None:
        """Rows have joined behind the others; nothing waits for them."""
        new = rows - len(self._kept)
        if self._tokens and new > 0:
            assert self._count == 1, "what waits was not read before rows joined"
            self._tokens = [mx.pad(each, [(0, new), (0, 0)]) for each in self._tokens]
            self._contexts = [mx.pad(each, [(0, new), (0, 0), (0, 0)]) for each in self._contexts]
            self._kept += [0] * new
            self.ragged = True

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.widen(1 + max(keep, default=-1))
        if not self._tokens or list(keep) == list(range(len(self._kept))):
            return
        if not keep:
            self.clear()
            return
        index = mx.array(list(keep), mx.int32)
        self._tokens = [mx.take(each, index, axis=0) for each in self._tokens]
        self._contexts = [mx.take(each, index, axis=0) for each in self._contexts]
        self._kept = [self._kept[row] for row in keep]
        self.ragged = 0 in self._kept

    def shorten(self, counts: Sequence[int]) -> None:
        """Rows give back their last position: B ints, 0 or 1."""
        self.widen(len(counts))
        if self._tokens:
            self._kept = [max(0, kept - n) for kept, n in zip(self._kept, counts, strict=True)]
            self.ragged = 0 in self._kept

    def take(self, hold: Collection[int] = ()) -> tuple[mx.array, mx.array | None, list[int]]:
        """What waits: ``[B, L]`` ids, ``[B, L, ·]`` hidden states or ``None``, B lengths.

        Args:
            hold: rows whose last position waits on, as it may have to be given back.
        """
        tokens = mx.concatenate(self._tokens, axis=1)
        context = mx.concatenate(self._contexts, axis=1) if self._contexts else None
        held = [kept if row in hold else 0 for row, kept in enumerate(self._kept)]
        before = self._count - 1
        lengths = [before + kept - on for kept, on in zip(self._kept, held, strict=True)]
        if any(held):
            self._tokens = [tokens[:, -1:]]
            self._contexts = [] if context is None else [context[:, -1:]]
            self._count, self._kept, self.ragged = 1, held, 0 in held
        else:
            self.clear()
        return tokens, context, lengths

    def waits(self, row: int) -> int:
        """Positions of a row that wait, where at most one does."""
        return self._kept[row] if self._tokens else 0

    def clear(self) -> None:
        """Nothing waits."""
        self._tokens, self._contexts, self._kept = [], [], []
        self._count, self.ragged = 0, False
