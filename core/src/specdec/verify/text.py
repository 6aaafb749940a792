"""A row's text, token by token: what is shown can never have to be taken back.

Text is made while a round is walked and shown later, when its tokens are delivered, perhaps only
some of them. Each token has its segment; whatever is still held back (half a character, a space,
the beginning of a stop string) is asked for once, where the row really ended.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from specdec.verify.ends import PatternMatcher, Patterns, stop_strings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Decode = Callable[[Sequence[int]], str]

__all__ = ["Detokenizer", "RowText"]

_REPLACEMENT = "\ufffd"
# What transformers' clean-up may still join to the character before it: beginnings of its patterns.
_UNCLEANED = re.compile(r" +(?:n ?'?|'[vr]?)?\Z")


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizers, as far as they are used here."""

    @property
    def last_segment(self) -> str:
        """The text that became readable since this was read last."""

    def add_token(self, token: int) -> None:
        """Take one token."""

    def finalize(self) -> None:
        """Make everything readable that waits for more tokens."""


class _Appending:
    """Text of a detokenizer that only appends: mlx-lm's for SentencePiece and byte-level BPE.

    They raise for ids that their tables do not have, and at the end for pieces that mix bytes with
    other characters. That is no reason to end a row: such text is decoded by the tokenizer.
    """

    def __init__(self, factory: Callable[[], Detokenizer], decode: Decode | None) -> None:
        self._factory = factory
        self._decode = decode
        self._detokenizer = factory()
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that one more token makes readable."""
        try:
            self._detokenizer.add_token(token)
            segment = self._detokenizer.last_segment
        except Exception:
            segment = _decoded(self._decode, [token])
            if segment:
                segment = self.rest() + segment
                self._settle()
        self._waiting.append(token)
        if segment:
            self._waiting.clear()
        return segment

    def rest(self) -> str:
        """What would come if no token followed; changes nothing."""
        # As mlx-lm copies them for each request: their state is rebound, not changed in place.
        detokenizer = copy.copy(self._detokenizer)
        try:
            detokenizer.finalize()
            return detokenizer.last_segment
        except Exception:
            return _decoded(self._decode, self._waiting)

    def _settle(self) -> None:
        """Forget what waits: it has been taken."""
        try:
            self._detokenizer.finalize()
            _ = self._detokenizer.last_segment
        except Exception:
            self._detokenizer = self._factory()


class _Windowed:
    """Text by decoding a few tokens again and again, for tokenizers that mlx-lm has no table for.

    mlx-lm's own class for them decodes from the last line break on. There decoders drop a leading
    space, so a line's indentation comes out one space short; and where a decoder takes text back
    (byte fallback turns a whole run of bytes into replacement characters while the last character
    is unfinished), text is shown twice. Here the window begins with the tokens shown last, so it
    has a left neighbour, and nothing but text that continues what was shown is taken from it.

    Bytes that never become a character cannot take back the characters in front of them.
    """

    def __init__(self, decode: Decode, *, cleans: bool) -> None:
        self._decode = decode
        self._cleans = cleans
        self._window: list[int] = []
        self._done = 0  # tokens of the window whose text is complete
        self._shown = ""  # the window's text that was released

    def add(self, token: int) -> str:
        """The text that one more token makes readable."""
        self._window.append(token)
        try:
            text = self._decode(self._window)
        except Exception:
            self._window.pop()
            return ""
        whole = not text.endswith(_REPLACEMENT)
        stable = text if whole else text.rstrip(_REPLACEMENT)
        if whole and self._cleans and (found := _UNCLEANED.search(stable)):
            whole, stable = False, stable[: found.start()]
        if stable.startswith(self._shown):
            segment = stable[len(self._shown) :]
            self._shown = stable
        elif whole:
            segment = self._alone()
            self._shown = text
        else:
            segment = ""
        if whole:
            self._move(segment)
        return segment

    def rest(self) -> str:
        """What would come if no token followed; changes nothing."""
        text = _decoded(self._decode, self._window)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._alone()

    def _alone(self) -> str:
        return _decoded(self._decode, self._window[self._done :])

    def _move(self, segment: str) -> None:
        """Begin the window with the tokens shown last, if they are a neighbour worth having."""
        word = segment.strip()
        # Clean-up joins marks to what stands before them, so a window may not begin with one.
        if word and (word[0].isalnum() or not self._cleans):
            del self._window[: self._done]
            self._shown = _decoded(self._decode, self._window)
        self._done = len(self._window)


def _decoded(decode: Decode | None, tokens: Sequence[int]) -> str:
    if decode is None or not tokens:
        return ""
    try:
        return decode(tokens)
    except Exception:
        return ""


def _stream(factory: Callable[[], Detokenizer], decode: Decode | None) -> _Appending | _Windowed:
    from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

    detokenizer: Any = factory()
    if isinstance(detokenizer, NaiveStreamingDetokenizer):
        own = detokenizer._tokenizer.decode
        return _Windowed(own, cleans=detokenizer._clean_spaces)
    return _Appending(factory, decode)


class RowText:
    """One row's incremental text, cut where a stop string ends it.

    Text is shown as soon as it is sure: not while it may be the beginning of a stop string, and not
    before the detokenizer gives it. Of the stop strings that one token's text completes, the one
    that begins first counts. So where one stop string is the beginning of another, the shorter one
    ends the row as soon as it is there, and if one token brings both, the cut is the same.

    Each token costs the same, however much text the row has.

    Args:
        detokenizer_factory: gives a fresh detokenizer at each call, such as
            ``lambda: tokenizer.detokenizer`` of mlx-lm's ``TokenizerWrapper``.
        stop_strings: what ends the row; neither they nor what follows them is ever shown.
        decode: the tokenizer's, for ids that the detokenizer fails on; without it they have no
            text.

    Raises:
        OptionError: a stop string that is no string, or an empty one.
    """

    def __init__(
        self,
        detokenizer_factory: Callable[[], Detokenizer],
        stop_strings: Iterable[str] = (),
        *,
        decode: Decode | None = None,
    ) -> None:
        self._fresh = partial(_stream, detokenizer_factory, decode)
        self._stream = self._fresh()
        self._patterns: Patterns[str] = Patterns(stop_strings_of(stop_strings))
        self._matcher = self._patterns.matcher()
        self._tokens: list[int] = []
        self._may_stop = bytearray()
        self._ends: list[int] = []  # characters readable after each token
        self._segments: list[str] = []
        self._held = ""  # readable, but not in a segment yet
        self._cut: int | None = None
        self._dropped = 0

    def push(self, token: int, may_stop: bool, *, held: int = 0) -> bool:
        """Take one content token.

        Args:
            token: the row's next one.
            may_stop: whether a stop string may end the row with this token. If not, one that is
                completed here is ordinary text; one that begins in it and ends later counts.
            held: how many of the last tokens, this one among them, must not be shown yet.

        Returns:
            True if the token's text completes a stop string. Nothing may be pushed after that.
        """
        piece = self._stream.add(token)
        before = self._ends[-1] if self._ends else 0
        start = _first_match(self._matcher, piece, before)
        stopped = may_stop and start is not None
        if stopped:
            self._cut = start
        self._tokens.append(token)
        self._may_stop.append(may_stop)
        self._ends.append(before + len(piece))
        self._held += piece
        sure = start if stopped and start is not None else self._ends[-1] - self._matcher.open
        if held:
            sure = min(sure, self._ends[-1 - held] if held < len(self._ends) else 0)
        count = max(0, sure - (self._ends[-1] - len(self._held)))
        self._segments.append(self._held[:count])
        self._held = self._held[count:]
        return stopped

    def drop(self, count: int) -> None:
        """The row ends here, and the text of its last ``count`` tokens is not shown."""
        self._dropped = count

    def segment(self, index: int) -> str:
        """The text to show with the ``index``-th content token."""
        return self._segments[index]

    def flush(self, delivered: int) -> str:
        """The text that is left to show where the row ended, in whatever way.

        Changes nothing, so it may be asked for any number of tokens.

        Args:
            delivered: content tokens that were handed out.

        Returns:
            What makes their segments the whole text of these tokens, cut at a stop string.

        Raises:
            IndexError: more tokens than the row has.
        """
        total = len(self._tokens)
        if not 0 <= delivered <= total:
            raise IndexError(f"delivered is {delivered}, but the row has {total} tokens")
        shown = sum(map(len, self._segments[:delivered]))
        ended = delivered == total
        kept = delivered - self._dropped if ended else delivered
        if kept == total:
            rest = self._stream.rest()
            readable, text = self._ends[-1] if total else 0, self._held + rest
            matcher = copy.copy(self._matcher)
        else:
            stream, matcher = self._fresh(), self._patterns.matcher()
            whole = "".join(map(stream.add, self._tokens[:kept]))
            rest = stream.rest()
            _first_match(matcher, whole, 0)
            readable, text = len(whole), (whole + rest)[shown:]
        cut = _first_match(matcher, rest, readable)
        if cut is None or not self._may_stop[kept - 1]:
            cut = shown + len(text)
        if ended and self._cut is not None:
            cut = min(cut, self._cut)
        return text[: max(0, cut - shown)]

    def text(self, delivered: int) -> str:
        """The whole text of a row that ended after ``delivered`` content tokens."""
        return "".join(self._segments[:delivered]) + self.flush(delivered)


def _first_match(matcher: PatternMatcher[str], piece: str, position: int) -> int | None:
    """Read a piece of text; where the first stop string begins that it completes."""
    starts = [
        position + index - matcher.matched
        for index, character in enumerate(piece, start=1)
        if matcher.advance(character)
    ]
    return min(starts, default=None)
