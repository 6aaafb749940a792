"""What a head has not read yet, and windows of it together with what follows.

Shapes: B rows, T unread hidden states of the longest row, L new tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Plan", "Unread", "Window", "one_of_each"]


@frozen(eq=False)
class Window:
    """Pairs for one call of a head, right-padded.

    Attributes:
        tokens: ``[B, width]`` ids.
        hidden: ``[B, width, H]``, the hidden state of the position before each.
        lengths: B ints, pairs of each row.
    """

    tokens: mx.array
    hidden: mx.array
    lengths: list[int]

    @property
    def width(self) -> int:
        """Positions."""
        return int(self.tokens.shape[1])


@frozen(eq=False)
class Plan:
    """What is to be read, and what is unread behind it.

    Attributes:
        tokens: ``[B, n]`` ids.
        hidden: ``[B, n, H]``.
        lengths: B ints, pairs of each row, n at most.
        after: what is unread then.
    """

    tokens: mx.array
    hidden: mx.array
    lengths: list[int]
    after: Unread

    def window(self, start: int, end: int) -> Window:
        """The pairs from ``start`` to ``end``."""
        lengths = [min(max(length - start, 0), end - start) for length in self.lengths]
        return Window(self.tokens[:, start:end], self.hidden[:, start:end], lengths)


@frozen(eq=False)
class Unread:
    """Hidden states that a head has not read, each with the token that followed but the last.

    Attributes:
        tokens: B tuples of u ids, on the host.
        hidden: ``[B, T, H]``, u + 1 of them for each row, right-padded; ``None`` where no row has
            read anything.
        cold: rows that have read nothing, which have no hidden state at all.
    """

    tokens: Sequence[tuple[int, ...]]
    hidden: mx.array | None
    cold: frozenset[int] = frozenset()

    @property
    def longest(self) -> int:
        """The most unread tokens that a row has."""
        return max(map(len, self.tokens), default=0)

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [] if self.hidden is None else [self.hidden]

    def detached(self) -> Unread:
        """The same in memory of its own, so that a chunk's other hidden states can go."""
        hidden = None if self.hidden is None else mx.contiguous(self.hidden)
        return Unread(self.tokens, hidden, self.cold)

    def row(self, row: int) -> tuple[tuple[int, ...], mx.array | None]:
        """One row's tokens and hidden states ``[1, u + 1, H]``."""
        tokens = self.tokens[row]
        if self.hidden is None or row in self.cold:
            return (), None
        return tokens, self.hidden[row : row + 1, : 1 + len(tokens)]

    def taken(self, keep: Sequence[int]) -> Unread:
        """These rows alone, in this order."""
        hidden = self.hidden
        if hidden is not None:
            hidden = hidden[mx.array(list(keep), mx.int32)] if keep else None
        cold = frozenset(new for new, old in enumerate(keep) if old in self.cold)
        return Unread([self.tokens[row] for row in keep], hidden, cold)

    def joined(
        self, rows: Sequence[tuple[tuple[int, ...], mx.array | None]], hidden_size: int
    ) -> Unread:
        """These rows and others behind them.

        Args:
            rows: tokens and hidden states ``[1, u + 1, H]`` of each, ``None`` for a cold row.
            hidden_size: H.
        """
        had = len(self.tokens)
        tokens = [*self.tokens, *(each for each, _ in rows)]
        cold = self.cold | {had + new for new, (_, hidden) in enumerate(rows) if hidden is None}
        known = [hidden for _, hidden in rows if hidden is not None]
        example = self.hidden if self.hidden is not None else next(iter(known), None)
        if example is None:
            return Unread(tokens, None, cold)
        most = 1 + max(map(len, tokens))
        parts = [] if not had else [_padded(self._or_nothing(had, hidden_size, example), most)]
        for _, hidden in rows:
            held = mx.zeros((1, 1, hidden_size), example.dtype) if hidden is None else hidden
            parts.append(_padded(held.astype(example.dtype), most))
        return Unread(tokens, mx.concatenate(parts, axis=0), cold)

    def _or_nothing(self, rows: int, hidden_size: int, example: mx.array) -> mx.array:
        return (
            mx.zeros((rows, 1, hidden_size), example.dtype) if self.hidden is None else self.hidden
        )

    def window(self, pending: Sequence[int], width: int) -> tuple[mx.array, mx.array]:
        """All that is unread, and a token for the last hidden state of each row.

        Args:
            pending: B ids.
            width: positions to give, right-padded.

        Returns:
            Ids ``[B, width]`` and hidden states ``[B, width, H]``.
        """
        assert self.hidden is not None
        rows = [[*tokens, last] for tokens, last in zip(self.tokens, pending, strict=True)]
        ids = mx.array([row + [row[-1]] * (width - len(row)) for row in rows], mx.int32)
        return ids, _padded(self.hidden, width)

    def followed(
        self, tokens: mx.array, hidden: mx.array, counts: Sequence[int], *, everything: bool
    ) -> Plan:
        """What is to be read when the target has read more.

        A row's first new token goes with its last unread hidden state; a cold row has none, so its
        first token is read by the target alone.

        Args:
            tokens: ``[B, L]`` new ids.
            hidden: ``[B, at least L, H]`` the target's hidden states there.
            counts: B ints, new tokens of each row; a row of 0 stays as it is.
            everything: whether the new tokens are read too, and not what was unread alone.
        """
        start, ids, states = self._beside(tokens, hidden)
        pairs: list[list[tuple[int, int]]] = []  # places of a token and of the hidden before it
        rest: list[list[int]] = []  # places of the hidden states that stay unread
        left: list[tuple[int, ...]] = []
        for row, count in enumerate(counts):
            had, cold = self.tokens[row], row in self.cold
            if not count:
                pairs.append([])
                rest.append([0] if cold else list(range(1 + len(had))))
                left.append(had)
                continue
            own = [(place, place) for place in range(len(had))]
            if everything:
                own += [] if cold else [(start - 1, len(had))]
                own += [(start - 1 + new, start - 1 + new) for new in range(1, count)]
            pairs.append(own)
            rest.append([start + count - 1])
            left.append(())
        cold_still = frozenset(row for row in self.cold if not counts[row])
        return Plan(
            _gathered(ids[..., None], [[token for token, _ in own] for own in pairs])[..., 0],
            _gathered(states, [[before for _, before in own] for own in pairs]),
            list(map(len, pairs)),
            Unread(left, _gathered(states, rest), cold_still),
        )

    def _beside(self, tokens: mx.array, hidden: mx.array) -> tuple[int, mx.array, mx.array]:
        """Unread and new ones side by side: where the new hidden states begin, ids, hiddens.

        New ids begin one place before, since the last unread hidden state has no token.
        """
        length = tokens.shape[1]
        hidden = hidden[:, :length]
        if self.hidden is None:
            # A place for the hidden state that cold rows have not.
            states = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden], axis=1)
            return 1, tokens, states
        start = self.hidden.shape[1]
        padded = [[*each, *[0] * (start - 1 - len(each))] for each in self.tokens]
        known = mx.array(padded, tokens.dtype).reshape(len(self.tokens), start - 1)
        ids = mx.concatenate([known, tokens], axis=1)
        return start, ids, mx.concatenate([self.hidden.astype(hidden.dtype), hidden], axis=1)


def one_of_each(places: Sequence[int], width: int) -> Callable[[mx.array], mx.array]:
    """How to take one position of each row: ``[B, width, H] -> [B, 1, H]``."""
    if width == 1:
        return lambda states: states
    if len(set(places)) == 1:
        at = places[0]
        return lambda states: states[:, at : at + 1]
    index = mx.array(list(places), mx.int32)[:, None, None]
    return lambda states: mx.take_along_axis(
        states, mx.broadcast_to(index, (len(places), 1, states.shape[2])), axis=1
    )


def _padded(states: mx.array, width: int) -> mx.array:
    """``[B, width, ·]``: right-padded, or cut of padding."""
    held = states.shape[1]
    if held == width:
        return states
    return (
        states[:, :width] if held > width else mx.pad(states, [(0, 0), (0, width - held), (0, 0)])
    )


def _gathered(states: mx.array, places: list[list[int]]) -> mx.array:
    """Row b's states at ``places[b]``, right-padded: ``[B, n, F]``."""
    most = max(map(len, places), default=0)
    first = places[0]
    begin = first[0] if first else 0
    if all(own == first for own in places) and first == list(range(begin, begin + most)):
        return states[:, begin : begin + most]
    index = mx.array([[*own, *[0] * (most - len(own))] for own in places], mx.int32)
    index = index.reshape(len(places), most)[..., None]
    return mx.take_along_axis(
        states, mx.broadcast_to(index, (len(places), most, states.shape[2])), axis=1
    )
