"""When a row ends by what it emitted: stop sequences of ids, stop strings, and a floor under both.

One automaton serves ids and characters. It reads each symbol once and costs the same for every
number and length of patterns. Besides what was completed it tells how much of the input may still
become a pattern, and that is the text which must not be shown yet.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from attrs import Factory, define, field, frozen

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from typing import SupportsIndex

    from specdec.verify.text import RowText

__all__ = [
    "Matcher",
    "PatternMatcher",
    "Patterns",
    "RowEnds",
    "StopRule",
    "StopSequences",
    "stop_rule",
    "stop_strings_of",
]

S = TypeVar("S", bound="Hashable")


class Matcher(Protocol):
    """One stream's place among stop sequences; mlx-lm's ``StopSequences.Matcher`` is one."""

    def advance(self, token: int, /) -> bool:
        """Read one token; true if it completes a sequence."""


class StopRule(Protocol):
    """Stop sequences as the executor takes them; mlx-lm's ``StopSequences`` are some."""

    def matcher(self) -> Matcher:
        """A fresh matcher, for one row."""


@define(eq=False)
class _Node(Generic[S]):
    """A beginning of a pattern.

    Attributes:
        depth: its length.
        fail: the longest other beginning that it ends with; ``None`` for the root.
        children: the beginnings one symbol longer.
        matched: length of the longest pattern that it ends with; 0 for none.
        open: length of the longest unfinished beginning that it ends with.
    """

    depth: int = 0
    fail: _Node[S] | None = None
    children: dict[S, _Node[S]] = field(factory=dict)
    matched: int = 0
    open: int = 0

    def after(self, symbol: S) -> _Node[S]:
        """Where one more symbol leads."""
        node = self
        while symbol not in node.children:
            if node.fail is None:
                return node
            node = node.fail
        return node.children[symbol]


class Patterns(Generic[S]):
    """The automaton of Aho and Corasick (1975, doi 10.1145/360825.360855) over some patterns.

    Args:
        patterns: none of them empty; the same one twice does no harm.
    """

    def __init__(self, patterns: Iterable[Sequence[S]]) -> None:
        self._root: _Node[S] = _Node()
        for pattern in patterns:
            node = self._root
            for symbol in pattern:
                node = node.children.setdefault(symbol, _Node(node.depth + 1))
            node.matched = node.depth
        self._link()

    def _link(self) -> None:
        """Breadth first: a node's ``fail`` is nearer to the root than the node, so it is ready."""
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            queue.extend(node.children.values())
            for symbol, child in node.children.items():
                child.fail = self._root if node.fail is None else node.fail.after(symbol)
            if node.fail is not None:
                node.matched = node.matched or node.fail.matched
                node.open = node.depth if node.children else node.fail.open

    def matcher(self) -> PatternMatcher[S]:
        """A fresh place at the start."""
        return PatternMatcher(self._root)


@define(eq=False)
class PatternMatcher(Generic[S]):
    """One stream's place in an automaton; a shallow copy goes its own way."""

    _node: _Node[S]

    def advance(self, symbol: S, /) -> bool:
        """Read one symbol; true if it completes a pattern."""
        self._node = self._node.after(symbol)
        return self._node.matched > 0

    @property
    def matched(self) -> int:
        """Length of the longest pattern that the last symbol completed; 0 for none."""
        return self._node.matched

    @property
    def open(self) -> int:
        """How many of the last symbols are the beginning of a longer pattern."""
        return self._node.open


def _sequences(value: object) -> tuple[tuple[int, ...], ...]:
    shown = f"stop_sequences is {one_line(repr(value))}"
    hint = "give sequences of token ids, such as [[13, 198]]"
    if isinstance(value, str | bytes):
        raise OptionError(f"{shown}; {hint}, or the text as a stop string")
    try:
        return tuple(tuple(map(_id, each)) for each in cast("Any", value))
    except TypeError:
        raise OptionError(f"{shown}; {hint}") from None


def _id(value: object) -> int:
    token = operator.index(cast("SupportsIndex", value))
    if token < 0:
        raise OptionError(f"stop_sequences has {token}; token ids are 0 or more")
    return token


def _none_empty(_instance: object, _attribute: object, value: tuple[tuple[int, ...], ...]) -> None:
    if () in value:
        raise OptionError("stop_sequences has an empty sequence; give one token or more in each")


def _automaton(stop: StopSequences) -> Patterns[int]:
    return Patterns(stop.sequences)


@frozen
class StopSequences:
    """Sequences of token ids that end a row; its last tokens, whose text is not shown.

    Attributes:
        sequences: the sequences. They may overlap, contain each other, and repeat ids.

    Raises:
        OptionError: not sequences of ids of 0 or more, or one that is empty.
    """

    sequences: tuple[tuple[int, ...], ...] = field(
        default=(), converter=_sequences, validator=_none_empty
    )
    _patterns: Patterns[int] = field(
        init=False, eq=False, repr=False, default=Factory(_automaton, takes_self=True)
    )

    def matcher(self) -> PatternMatcher[int]:
        """A fresh matcher, for one row."""
        return self._patterns.matcher()


def stop_rule(value: object) -> StopRule:
    """What a request may give as its stop sequences.

    Args:
        value: ``None``, sequences of ids, :class:`StopSequences`, or an object with mlx-lm's
            ``matcher()``.

    Raises:
        OptionError: none of these.
    """
    if value is None:
        return StopSequences()
    if callable(getattr(value, "matcher", None)):
        return cast("StopRule", value)
    return StopSequences(value)


def stop_strings_of(value: object) -> tuple[str, ...]:
    """What a request may give as its stop strings.

    Args:
        value: ``None``, one string, or several.

    Raises:
        OptionError: something that is no string, or an empty one.
    """
    hint = "give strings of one character or more"
    if value is None:
        return ()
    try:
        strings = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    except TypeError:
        raise OptionError(f"stop_strings is {one_line(repr(value))}; {hint}") from None
    for each in strings:
        if not isinstance(each, str) or not each:
            raise OptionError(f"stop_strings has {one_line(repr(each))}; {hint}")
    return strings


class RowEnds:
    """Tells after each content token whether the row ends with it; keeps the row's text.

    The tokens of a completed stop sequence are content, as in mlx-lm, but their text is not shown.
    So text is held back while its tokens may be the beginning of a sequence. Of an mlx-lm
    ``StopSequences`` that length cannot be asked, and the text is shown.

    Of several sequences that one token completes the longest counts, and of a sequence and a stop
    string that one token completes the one whose text begins first.

    Args:
        stop_sequences: the row's; ``None`` for none.
        text: the row's text, empty as yet; ``None`` for a row without one.
        min_tokens: no sequence and no string ends the row before it has this many content tokens.
            What is completed earlier is ordinary content.

    Raises:
        OptionError: ``min_tokens`` is no whole number of 0 or more.
    """

    def __init__(
        self,
        stop_sequences: StopRule | None = None,
        text: RowText | None = None,
        min_tokens: int = 0,
    ) -> None:
        if not isinstance(min_tokens, int) or min_tokens < 0:
            raise OptionError(
                f"min_tokens is {one_line(repr(min_tokens))}; give 0 or a positive whole number"
            )
        self._matcher = None if stop_sequences is None else stop_sequences.matcher()
        self._text = text
        self._min_tokens = min_tokens
        self._count = 0

    def advance(self, token: int) -> bool:
        """Take one content token.

        Args:
            token: the row's next one; each is given once, in order.

        Returns:
            True if the row ends with it. Nothing may be given after that.
        """
        matcher = self._matcher
        completed = matcher is not None and bool(matcher.advance(token))
        self._count += 1
        may_stop = self._count >= self._min_tokens
        ends = completed and may_stop
        if self._text is None:
            return ends
        held = 0
        if isinstance(matcher, PatternMatcher):
            held = matcher.matched if ends else matcher.open
        stopped = self._text.push(token, may_stop, held=held)
        if ends:
            self._text.drop(held)
        return ends or stopped

    def text_of(self, index: int) -> str:
        """The text that comes with the ``index``-th content token."""
        return "" if self._text is None else self._text.segment(index)

    def flush(self, delivered: int) -> str:
        """The text that is left to show where the row ended after ``delivered`` content tokens."""
        return "" if self._text is None else self._text.flush(delivered)
