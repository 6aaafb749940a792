"""One row's place in its grammar. Only emitted tokens move it; drafts are looked at.

The engine is llguidance (https://github.com/guidance-ai/llguidance). Its matchers are broken for
good by a token that does not fit and by a limit that is passed, even where only a draft led there.
So tokens are validated before they are consumed, and a broken matcher is made anew from the emitted
tokens: a draft can then cost time, and never a row.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from specdec.errors import ConstraintError, OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from specdec.grammar.marker import Marker
    from specdec.grammar.vocabulary import Bits, Vocabulary

__all__ = ["GrammarRow", "compile_grammar"]

# A quoted line of the grammar, or the caret under it: no part of a message of one line.
_QUOTED = re.compile(r"^\s*(\d+ \|.*|\^+|<non-verbose/>)$")


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=1)


def limits() -> LLParserLimits:
    """The engine's own limits, without the grammar and its state in messages."""
    return LLParserLimits(verbose_errors=False)


def _tidy(message: str) -> str:
    return one_line(
        "\n".join(line for line in message.splitlines() if not _QUOTED.match(line)).rstrip(" ;.")
    )


def _fill(matcher: LLMatcher, draft: list[int], words: int) -> Bits:
    """What may follow now and behind each draft; zeros behind the first that does not fit."""
    bits = np.zeros((len(draft) + 1, words), dtype=np.int32)
    if draft:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), [(matcher, 0, draft)], bits)
    else:
        fill_next_token_bitmask(matcher, bits)
    return bits


def _has(bits: Bits, place: int, token: int) -> bool:
    return bool(bits[place, token >> 5] >> (token & 31) & 1)


def _source(kind: str, text: str, whitespace: bool) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_json_schema(text, {"whitespace_flexible": whitespace})


def compile_grammar(kind: str, text: str, *, whitespace: bool, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the beginning of the grammar, which rows copy.

    Args:
        kind: ``json_schema``, ``regex`` or ``lark``.
        text: the grammar.
        whitespace: JSON may have whitespace between its parts.
        vocabulary: what the grammar is spelled with.

    Raises:
        OptionError: the grammar is wrong, or allows nothing that the vocabulary can spell.
    """
    name = {"json_schema": "JSON schema", "lark": "Lark grammar"}.get(kind, kind)
    try:
        source = _source(kind, text, whitespace)
    except ValueError as error:
        raise OptionError(f"the {name} cannot be used: {_tidy(str(error))}") from error
    # As validate_grammar, which would compile the grammar a second time.
    matcher = LLMatcher(vocabulary.engine, source, log_level=0, limits=limits())
    if matcher.is_error():
        raise OptionError(f"the {name} cannot be used: {_tidy(matcher.get_error())}")
    bits = _fill(matcher, [], vocabulary.words)
    dead_end = matcher.is_error() and matcher.get_error().startswith("NoExtension")
    if matcher.is_error() and not dead_end:
        raise OptionError(f"the {name} cannot be used: {_tidy(matcher.get_error())}")
    if dead_end or not (bits & vocabulary.text).any():
        raise OptionError(
            f"the {name} {one_line(text)[:80]!r} allows no text that this vocabulary can spell"
        )
    return matcher


@define(eq=False)
class GrammarRow:
    """The ``TokenConstraint`` of one row.

    Attributes:
        active: the grammar has begun.
    """

    _vocabulary: Vocabulary
    _template: LLMatcher
    _marker: Marker | None
    _matched: int = field(default=0, init=False)
    _emitted: list[int] = field(factory=list, init=False)
    _matcher: LLMatcher = field(init=False)
    active: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._matcher = self._template.deep_copy()
        self.active = self._marker is None

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        """Which ids may follow now, and behind each drafted token. Changes no state.

        Where text is forced, exactly one id is allowed, though other ids may begin that text.

        Args:
            draft: the row's drafts; any ints.

        Returns:
            The allowed ids, bool ``[n + 1, V]``, or ``None`` while the grammar has not begun at
            any of these positions; and ``n``, how many of the drafts are allowed.

        Raises:
            ConstraintError: no id can follow, or a limit of the engine is passed.
        """
        known = self._vocabulary.readable(draft)
        free = self._free_positions(known)
        if free is None:
            return None, len(known)
        bits, allowed = self._restricted(known[free:])
        if free:
            everything = np.full((free, self._vocabulary.words), -1, dtype=np.int32)
            bits = np.concatenate([everything, bits])
        return self._vocabulary.on_device(bits), free + allowed

    def advance(self, token: int, /) -> bool:
        """Read an emitted content token.

        A token is taken wherever its text fits, also where the masks prefer another spelling.

        Returns:
            True where the output is complete with it: nothing but an end may follow.

        Raises:
            ConstraintError: the token is not allowed, or a limit of the engine is passed; the
                state is unchanged.
        """
        if not 0 <= token < self._vocabulary.size:
            raise self._refusal(token)
        if self._marker is not None and not self.active:
            self._matched = self._marker.step(self._matched, token)
            self.active = self._matched == len(self._marker.tokens)
            return False
        fits = _has(self._vocabulary.text[None], 0, token)
        fits = fits and self._matcher.validate_tokens([token]) == 1
        self._go_on()
        if not fits:
            raise self._refusal(token)
        self._matcher.consume_token(token)
        self._go_on()
        self._emitted.append(token)
        return self._matcher.is_stopped()

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        """Ids that are forced next, at most ``max_tokens``; changes no state."""
        if not self.active or max_tokens < 1:
            return ()
        forced = self._matcher.compute_ff_tokens()
        if self._mend() is not None:
            return ()
        return tuple(self._vocabulary.readable(forced)[:max_tokens])

    def _free_positions(self, draft: list[int]) -> int | None:
        """How many positions come before the grammar begins; ``None``: all of them."""
        if self.active or self._marker is None:
            return 0
        return self._marker.found_at(self._matched, draft)

    def _restricted(self, draft: list[int]) -> tuple[Bits, int]:
        """As ``masks``, from where the grammar has begun."""
        ends = self._vocabulary.end_tokens
        content = next((i for i, token in enumerate(draft) if token in ends), len(draft))
        bits = self._look(draft[:content])
        allowed = 0
        # The engine takes any spelling of a text; the mask decides. A draft behind which nothing
        # can follow is left to be drawn, so that the row meets its dead end as without a drafter.
        while (
            allowed + 1 < len(bits)
            and _has(bits, allowed, draft[allowed])
            and bits[allowed + 1].any()
        ):
            allowed += 1
        bits = bits[: allowed + 1]
        if allowed == content < len(draft) and _has(bits, allowed, draft[content]):
            bits = np.concatenate([bits, self._vocabulary.ends[None]])
            allowed += 1
        return bits, allowed

    def _look(self, draft: list[int]) -> Bits:
        bits = _fill(self._matcher, draft, self._vocabulary.words)
        if draft and self._mend() is not None:
            # Only the drafts may have led to a limit: what follows now is asked for alone.
            bits = _fill(self._matcher, [], self._vocabulary.words)
        self._go_on()
        self._vocabulary.restrict(bits)
        if not bits[0].any():
            raise ConstraintError(
                f"the row's grammar cannot go on behind {len(self._emitted)} tokens: no id of the "
                "vocabulary can follow"
            )
        return bits

    def _go_on(self) -> None:
        failure = self._mend()
        if failure is not None:
            raise ConstraintError(
                f"the row's grammar cannot go on behind {len(self._emitted)} tokens: {failure}"
            )

    def _mend(self) -> str | None:
        """Why the matcher broke, after it was made anew; ``None``: it is whole."""
        if not self._matcher.is_error():
            return None
        failure = _tidy(self._matcher.get_error()) or self._matcher.stop_reason()
        self._matcher = self._template.deep_copy()
        self._matcher.try_consume_tokens(self._emitted)
        return failure

    def _refusal(self, token: int) -> ConstraintError:
        return ConstraintError(
            f"token {token} is not allowed by the row's grammar behind {len(self._emitted)} "
            "tokens; emit only ids that masks() allows"
        )
