"""From what a caller says to a request: prompts as ids, options checked, a grammar bound."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec.errors import OptionError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import SupportsIndex

    from specdec.contract import TokenConstraint
    from specdec.targets import Target

__all__ = ["bind_grammar", "check_ids", "encode_prompt", "token_ids", "wrapped"]


def wrapped(tokenizer: Any) -> Any:
    """The tokenizer as mlx-lm's ``TokenizerWrapper``."""
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


def encode_prompt(prompt: str | mx.array | Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """A prompt's token ids, with special tokens as mlx-lm adds them.

    Args:
        prompt: text or token ids.
        tokenizer: mlx-lm's ``TokenizerWrapper``.

    Raises:
        OptionError: neither.
    """
    if isinstance(prompt, str):
        # As mlx-lm: a template that starts with the beginning token brings it itself.
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return tuple(tokenizer.encode(prompt, add_special_tokens=special))
    return token_ids(prompt, "the prompt")


def token_ids(value: mx.array | Sequence[int], name: str) -> tuple[int, ...]:
    """Token ids as ints, whatever kind of whole numbers they are.

    Args:
        value: the ids.
        name: what they are, for the message.

    Raises:
        OptionError: something that is no whole number.
    """
    ids = value.tolist() if isinstance(value, mx.array) else value
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise OptionError(f"{name} is {one_line(repr(value))}; give text or token ids")
    numbers = []
    for each in ids:
        try:
            numbers.append(operator.index(cast("SupportsIndex", each)))
        except TypeError:
            raise OptionError(
                f"{name} has {one_line(repr(each))}; token ids are whole numbers"
            ) from None
    return tuple(numbers)


def check_ids(tokens: Iterable[int], target: Target, name: str = "the prompt") -> None:
    """Check that the target has these ids.

    Raises:
        OptionError: names the first that it has not.
    """
    for token in tokens:
        if not 0 <= token < target.vocab_size:
            raise OptionError(
                f"{name} has {token}; this model's ids are 0 to {target.vocab_size - 1}"
            )


def bind_grammar(
    grammar: Any, tokenizer: Any, target: Target, end_tokens: Iterable[int]
) -> Callable[[], TokenConstraint] | None:
    """What gives each row its constraint.

    Args:
        grammar: a :class:`specdec.grammar.Grammar`, anything else with its ``bind``, a callable
            that gives a row's :class:`~specdec.contract.TokenConstraint`, or ``None``.
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        target: the bound target.
        end_tokens: ids that end the output, which the grammar allows where it is complete.

    Raises:
        OptionError: none of these, or a grammar that does not compile.
    """
    bind = getattr(grammar, "bind", None)
    if bind is not None:
        grammar = bind(tokenizer, target.vocab_size, sorted(end_tokens))
    if grammar is not None and not callable(grammar):
        raise OptionError(
            f"grammar is {one_line(repr(grammar))}; give a specdec.grammar.Grammar, such as "
            "Grammar.regex(...), or a callable that makes a row's TokenConstraint"
        )
    return cast("Callable[[], TokenConstraint] | None", grammar)
