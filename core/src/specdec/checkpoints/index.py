"""Token sequences in order, for the questions that prefixes ask.

Sequences are kept as bytes, eight per token, in one sorted list: comparisons then run in C, and the
sequences that share the most with a prompt are its neighbours.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WIDTH", "PrefixIndex", "token_bytes", "tokens_of"]

WIDTH = 8
"""Bytes per token."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, :data:`WIDTH` each.

    Raises:
        OptionError: something that is no sequence of token ids.
    """
    try:
        # Bytes would be taken for the memory of ids; mappings and sets have no order.
        if isinstance(tokens, bytes | bytearray | memoryview | str | Mapping | Set):
            raise TypeError(f"of the type {type(tokens).__name__}")
        return array("q", tokens).tobytes()
    except Exception as error:  # an odd sequence may raise anything
        raise OptionError(f"the tokens are no token ids ({one_line(error)}); give ints") from error


def tokens_of(data: bytes) -> tuple[int, ...]:
    """The token ids that :func:`token_bytes` gave these bytes for."""
    return tuple(array("q", data))


class PrefixIndex:
    """A set of token sequences."""

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, tokens: bytes) -> None:
        """Add a sequence; nothing happens if it is there."""
        place = bisect_left(self._sorted, tokens)
        if place == len(self._sorted) or self._sorted[place] != tokens:
            self._sorted.insert(place, tokens)

    def discard(self, tokens: bytes) -> None:
        """Remove a sequence, if it is there."""
        place = bisect_left(self._sorted, tokens)
        if place < len(self._sorted) and self._sorted[place] == tokens:
            del self._sorted[place]

    def longest_prefix(self, prompt: bytes) -> bytes | None:
        """The longest sequence that ``prompt`` begins with.

        Any such sequence sorts at or below the prompt, and whatever sorts between the two begins
        with it as well. So the neighbour below either is the answer, or the answer is a prefix of
        what it shares with the prompt.
        """
        while True:
            place = bisect_right(self._sorted, prompt)
            if not place:
                return None
            below = self._sorted[place - 1]
            if prompt.startswith(below):
                return below
            prompt = prompt[: _common(below, prompt)]

    def common_prefix(self, prompt: bytes) -> int:
        """Tokens that ``prompt`` shares with the sequence that begins most like it."""
        place = bisect_left(self._sorted, prompt)
        around = self._sorted[max(0, place - 1) : place + 1]
        return max((_common(other, prompt) // WIDTH for other in around), default=0)


def _common(a: bytes, b: bytes) -> int:
    """Bytes that two strings begin alike; halving lets C do the comparing."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
