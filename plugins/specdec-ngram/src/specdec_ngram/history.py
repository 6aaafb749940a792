"""One row's tokens and an index from every n-gram to what followed it last.

Text repeats itself: names in code, quoted passages, a list's phrases. If the last n tokens have
occurred before, what followed them then is a good guess at what follows now. That is prompt lookup
decoding (A. Saxena, 2023, "Prompt Lookup Decoding",
https://github.com/apoorvumang/prompt-lookup-decoding), close to LLMA (N. Yang et al., 2023,
"Inference with Reference: Lossless Acceleration of Large Language Models", arXiv 2304.04487).

The rule, in full:

1. The longest n-gram wins: from ``max_ngram`` down to ``min_ngram``, the first that has occurred
   before is used.
2. Of its earlier occurrences, the most recent wins. The trailing n-gram is no occurrence of
   itself, but an earlier one may overlap it.
3. What followed is copied. Where the copy comes to the end of the history, it goes on with what it
   has itself copied: the text is taken to be periodic.

So a proposal is as long as asked, or empty if nothing matches. The README has the measurements
behind the rule.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DEFAULT_MAX_NGRAM", "DEFAULT_MIN_NGRAM", "NgramHistory", "check_sizes"]

DEFAULT_MAX_NGRAM: Final = 4
"""Longest n-gram that is looked up, if nothing else is asked for."""

DEFAULT_MIN_NGRAM: Final = 2
"""Shortest n-gram that is looked up, if nothing else is asked for."""


def check_sizes(max_ngram: object, min_ngram: object) -> None:
    """Check the sizes of the n-grams.

    Args:
        max_ngram: the longest; an int of 1 or more.
        min_ngram: the shortest; an int of 1 or more, and not above the longest.

    Raises:
        OptionError: one of them makes no sense; the message names it.
    """
    for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    if isinstance(max_ngram, int) and isinstance(min_ngram, int) and min_ngram > max_ngram:
        raise OptionError(
            f"min_ngram is {min_ngram}, but max_ngram is {max_ngram}; "
            "min_ngram must not be the larger one"
        )


class NgramHistory:
    """The tokens that one row has read. Nothing is ever removed.

    A proposal and one more token cost the same after 100 and after 100,000 tokens. The index grows
    by at most ``max_ngram - min_ngram + 1`` entries with each token.

    Args:
        tokens: what the row has read so far.
        max_ngram: longest n-gram that is looked up.
        min_ngram: shortest n-gram that is looked up.

    Raises:
        OptionError: sizes that make no sense.
    """

    __slots__ = ("_followers", "_max", "_min", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int] = (),
        *,
        max_ngram: int = DEFAULT_MAX_NGRAM,
        min_ngram: int = DEFAULT_MIN_NGRAM,
    ) -> None:
        check_sizes(max_ngram, min_ngram)
        self._max = max_ngram
        self._min = min_ngram
        self._tokens: list[int] = []
        # N-gram to the place after its last occurrence. Right after the history that place is
        # empty: there the pending token will stand.
        self._followers: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of all tokens, oldest first."""
        return tuple(self._tokens)

    @property
    def index_size(self) -> int:
        """Number of different n-grams in the index."""
        return len(self._followers)

    def append(self, token: int) -> None:
        """Read one more token."""
        self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> None:
        """Read more tokens, in order.

        Args:
            tokens: ids, borrowed; may be empty.
        """
        before = len(self._tokens)
        self._tokens.extend(tokens)
        for n in range(self._min, self._max + 1):
            first = max(0, before - n + 1)
            window = self._tokens[first:]
            ngrams = zip(*(window[i:] for i in range(n)), strict=False)
            self._followers.update(zip(ngrams, count(first + n), strict=False))

    def propose(self, pending: int, max_tokens: int) -> list[int]:
        """What might follow the history and one token more; changes nothing.

        The pending token is not in the index, so the trailing n-gram, which ends with it, cannot
        find itself.

        Args:
            pending: the token after the history.
            max_tokens: how many ids are wanted.

        Returns:
            ``max_tokens`` ids; none if no trailing n-gram has occurred before.
        """
        start = self._follower(pending)
        if start is None:
            return []
        period = self._tokens[start : start + max_tokens]
        if len(period) < max_tokens:
            period.append(pending)
        return [period[i % len(period)] for i in range(max_tokens)]

    def _follower(self, pending: int) -> int | None:
        recent = max(0, len(self._tokens) + 1 - self._max)
        tail = (*self._tokens[recent:], pending)
        for n in range(min(self._max, len(tail)), self._min - 1, -1):
            start = self._followers.get(tail[-n:])
            if start is not None:
                return start
        return None
