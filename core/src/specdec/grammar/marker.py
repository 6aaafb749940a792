"""Where a grammar begins: a run of token ids, found in a stream that is read once.

The search is that of Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM Journal on
Computing 6(2), 1977): its whole state is one int, so looking ahead over a draft copies nothing.
"""

from __future__ import annotations

from attrs import field, frozen

__all__ = ["Marker"]


def _borders(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """For each beginning of the marker, the longest of its own beginnings that it ends with."""
    borders = [0] * len(tokens)
    for place in range(1, len(tokens)):
        length = borders[place - 1]
        while length and tokens[length] != tokens[place]:
            length = borders[length - 1]
        borders[place] = length + (tokens[length] == tokens[place])
    return tuple(borders)


@frozen
class Marker:
    """A run of ids to be found.

    Attributes:
        tokens: the ids, at least one.
    """

    tokens: tuple[int, ...]
    _border: tuple[int, ...] = field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_border", _borders(self.tokens))

    def step(self, matched: int, token: int) -> int:
        """How many of the marker's ids the stream ends with, once ``token`` is read too.

        Args:
            matched: the same number before the token, less than the marker's length.
            token: the id that is read.
        """
        while matched and self.tokens[matched] != token:
            matched = self._border[matched - 1]
        return matched + (self.tokens[matched] == token)

    def found_at(self, matched: int, stream: list[int]) -> int | None:
        """How much of the stream is read when the marker is complete; ``None``: it never is."""
        for place, token in enumerate(stream, start=1):
            matched = self.step(matched, token)
            if matched == len(self.tokens):
                return place
        return None
