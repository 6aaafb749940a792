"""Processors that take tokens away: the logits of what may not come are ``-inf``."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, SupportsIndex, cast

import mlx.core as mx
from attrs import field, frozen

from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attrs import Attribute

    from specdec.sampling.processors import WindowView

__all__ = [
    "AllowedTokens",
    "BannedTokens",
    "MinTokens",
    "check_within",
    "token_id",
    "whole_number",
]

_IDS = 2**31  # MLX's index arithmetic is int32


def token_id(value: object, what: str) -> int:
    """A value as a token id.

    Raises:
        OptionError: no whole number from 0; names the option ``what``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = -1
    if not 0 <= number < _IDS:
        raise OptionError(f"{what} has the id {value!r}; give whole numbers from 0")
    return number


def check_within(ids: Iterable[int], vocab_size: int, what: str) -> None:
    """Refuse ids at or above the vocabulary: MLX reads and writes out of bounds without a word.

    Raises:
        OptionError: names the option ``what`` and the id.
    """
    highest = max(ids, default=-1)
    if highest >= vocab_size:
        raise OptionError(f"{what} has the id {highest}; ids are 0 to {vocab_size - 1}")


def whole_number(what: str, least: int) -> Callable[[object, Attribute[int], int], None]:
    """A validator of whole numbers from ``least``."""

    def check(_instance: object, _attribute: Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{what} is {value!r}; give a whole number from {least}")

    return check


def _ids(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise OptionError(f"{what} is {values!r}; give a list of ids")
    return tuple(sorted({token_id(value, what) for value in values}))


def _allowed(values: Iterable[int]) -> tuple[int, ...]:
    return _ids(values, "allowed_token_ids")


def _banned(values: Iterable[int]) -> tuple[int, ...]:
    return _ids(values, "banned_token_ids")


def _ends(values: Iterable[int]) -> tuple[int, ...]:
    return _ids(values, "end_tokens")


def _mask(ids: mx.array, vocab_size: int) -> mx.array:
    mask = mx.zeros(vocab_size, mx.bool_)
    if ids.size:
        mask[ids] = True
    return mask


@frozen(eq=False)
class AllowedTokens:
    """Leaves only some tokens: all others get ``-inf``.

    Attributes:
        ids: the tokens to leave, at least one.

    Raises:
        OptionError: no id, or one that makes no sense; later, one that is not in the vocabulary.
    """

    ids: tuple[int, ...] = field(converter=_allowed)
    _array: mx.array = field(init=False, repr=False)

    @_array.default
    def _ids_as_array(self) -> mx.array:
        return mx.array(self.ids, mx.uint32)

    def __attrs_post_init__(self) -> None:
        if not self.ids:
            raise OptionError("allowed_token_ids is empty; give at least one id")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``OptionError`` for an id at or above the vocabulary."""
        check_within(self.ids[-1:], vocab_size, "allowed_token_ids")

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:  # noqa: ARG002
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        self.check_vocabulary(logits.shape[-1])
        return mx.where(_mask(self._array, logits.shape[-1]), logits, -mx.inf)


@frozen(eq=False)
class BannedTokens:
    """Gives some tokens ``-inf``.

    Attributes:
        ids: the tokens to ban.

    Raises:
        OptionError: an id that makes no sense; later, one that is not in the vocabulary.
    """

    ids: tuple[int, ...] = field(converter=_banned)
    _array: mx.array = field(init=False, repr=False)

    @_array.default
    def _ids_as_array(self) -> mx.array:
        return mx.array(self.ids, mx.uint32)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``OptionError`` for an id at or above the vocabulary, or if no token is left."""
        check_within(self.ids[-1:], vocab_size, "banned_token_ids")
        if len(self.ids) == vocab_size:
            raise OptionError(f"banned_token_ids has all {vocab_size} ids; leave at least one")

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:  # noqa: ARG002
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        self.check_vocabulary(logits.shape[-1])
        return mx.where(_mask(self._array, logits.shape[-1]), -mx.inf, logits)


@frozen(eq=False)
class MinTokens:
    """Gives the end tokens ``-inf`` until enough content tokens are emitted.

    Attributes:
        count: content tokens to emit before the text may end; 0 changes nothing.
        end_tokens: the ids that end a text.

    Raises:
        OptionError: a value that makes no sense; later, an id that is not in the vocabulary.
    """

    count: int = field(validator=whole_number("min_tokens", 0))
    end_tokens: tuple[int, ...] = field(converter=_ends)
    _array: mx.array = field(init=False, repr=False)

    @_array.default
    def _ids_as_array(self) -> mx.array:
        return mx.array(self.end_tokens, mx.uint32)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``OptionError`` for an id at or above the vocabulary."""
        check_within(self.end_tokens[-1:], vocab_size, "end_tokens")

    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        """``[W, V] -> [W, V]``; see :class:`~specdec.sampling.WindowProcessor`."""
        self.check_vocabulary(logits.shape[-1])
        missing = self.count - view.emitted
        if missing <= 0:
            return logits
        early = mx.arange(view.width)[:, None] < min(missing, view.width)
        return mx.where(early & _mask(self._array, logits.shape[-1]), -mx.inf, logits)
