"""Checks of what a group's verbs are given; to be made before anything changes.

Shapes: B rows, L tokens, F features of a hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import cast

import mlx.core as mx

from specdec.errors import ContractError, RowIndexError, one_line

__all__ = [
    "check_features",
    "check_ids",
    "check_no_context",
    "check_token_array",
    "kept_rows",
    "outside",
    "row_ints",
    "row_number",
    "row_reasons",
    "row_tokens",
]


def check_no_context(verb: str, context: mx.array | None) -> None:
    """Check that there is no context.

    Raises:
        ContractError: there is one.
    """
    if context is not None:
        raise ContractError(f"{verb}: got a context, but this group declares ContextKind.NONE")


def check_features(
    verb: str, context: mx.array | None, row_count: int, width: int, features: int
) -> mx.array:
    """The hidden states that a group was promised.

    Args:
        verb: names the caller in messages.
        context: ``[B, at least width, F]``, borrowed.
        row_count: B.
        width: positions that are needed.
        features: F.

    Raises:
        ContractError: none, or of another shape.
    """
    if context is None:
        raise ContractError(f"{verb}: there is no context, but this group declares one")
    shape = tuple(context.shape)
    if len(shape) != 3 or shape[::2] != (row_count, features) or shape[1] < width:
        raise ContractError(
            f"{verb}: the context has shape {shape}; pass [{row_count}, {width}, {features}]"
        )
    return context


def row_ints(what: str, values: Sequence[int], highest: Sequence[int | None]) -> list[int]:
    """One int of 0 or more for each row.

    Args:
        what: names the values in messages.
        values: B ints.
        highest: B upper limits, themselves allowed; ``None`` is no limit.

    Raises:
        ContractError: not B values, or one that is no int or outside its limits.
    """
    if len(values) != len(highest):
        raise ContractError(f"{what}: got {len(values)} numbers for {len(highest)} rows")
    checked = []
    for row, (value, high) in enumerate(zip(values, highest, strict=True)):
        try:
            number = index(value)
        except TypeError:
            raise ContractError(f"{what}: row {row} has {value!r}; pass a whole number") from None
        if number < 0 or (high is not None and number > high):
            limit = "0 or more" if high is None else f"0 to {high}"
            raise ContractError(f"{what}: row {row} has {number}; it must be {limit}")
        checked.append(number)
    return checked


def row_number(verb: str, row: int, row_count: int) -> int:
    """The number of a row that the group has.

    Args:
        verb: names the caller in messages.
        row: 0 to ``row_count - 1``.
        row_count: B.

    Raises:
        RowIndexError: there is no such row.
    """
    try:
        number = index(row)
    except TypeError:
        raise RowIndexError(verb, row, row_count) from None
    if not 0 <= number < row_count:
        raise RowIndexError(verb, number, row_count)
    return number


def kept_rows(verb: str, keep: Sequence[int], row_count: int) -> list[int]:
    """Numbers of rows that the group has, each once.

    Args:
        verb: names the caller in messages.
        keep: row numbers in any order.
        row_count: B.

    Raises:
        RowIndexError: one is out of range, or given twice.
    """
    rows = [row_number(verb, row, row_count) for row in keep]
    if len(set(rows)) < len(rows):
        raise RowIndexError(f"{verb}, a row twice", rows, row_count)
    return rows


def row_tokens(verb: str, tokens: mx.array, row_count: int) -> list[list[int]]:
    """Each row's ids on the host.

    Args:
        verb: names the caller in messages.
        tokens: integer ids ``[B, L]``, borrowed.
        row_count: B.

    Raises:
        ContractError: another shape, or no integers.
    """
    check_token_array(verb, tokens, row_count)
    return cast("list[list[int]]", tokens.tolist())


def check_token_array(verb: str, tokens: mx.array, row_count: int) -> None:
    """Check ids that stay on the device.

    Args:
        verb: names the caller in messages.
        tokens: integer ids ``[B, L]``, borrowed.
        row_count: B.

    Raises:
        ContractError: another shape, or no integers.
    """
    shape = tuple(tokens.shape)
    if len(shape) != 2 or shape[0] != row_count:
        raise ContractError(f"{verb}: tokens have shape {shape}; pass [{row_count}, L]")
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise ContractError(f"{verb}: tokens are {tokens.dtype}; pass integers")


def check_ids(verb: str, chunks: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Check that all ids are in the vocabulary.

    Args:
        verb: names the caller in messages.
        chunks: B rows of ids.
        vocab_size: ids below it are tokens.

    Raises:
        ContractError: names the row and the id that is not.
    """
    for row, chunk in enumerate(chunks):
        wrong = outside(chunk, vocab_size)
        if wrong is not None:
            raise ContractError(
                f"{verb}: row {row} has the id {wrong}; ids are 0 to {vocab_size - 1}"
            )


def outside(tokens: Sequence[int], vocab_size: int) -> int | None:
    """An id that the vocabulary does not have, or ``None``.

    Args:
        tokens: ids; may be empty.
        vocab_size: ids below it are tokens.
    """
    for extreme in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= extreme < vocab_size:
            return extreme
    return None


def row_reasons(said: object, rows: int, what: str = "stood_down") -> list[str | None]:
    """Why a drafter drafts no more for some of its rows, or what it remarks of them; checked.

    Args:
        said: the group's ``stood_down``, or ``remarks``.
        rows: rows that were drafted for.
        what: which of the two.

    Raises:
        ContractError: it is no list of one text or ``None`` for each row.
    """
    if not isinstance(said, Sequence) or isinstance(said, str):
        raise ContractError(f"{what} gave {one_line(repr(said))}; give a list, one per row")
    if len(said) != rows:
        entries = "entry" if len(said) == 1 else "entries"
        raise ContractError(f"{what} gave {len(said)} {entries} for {rows} rows")
    for place, reason in enumerate(said):
        if reason is not None and not isinstance(reason, str):
            shown = one_line(repr(reason))
            raise ContractError(f"{what} gave {shown} for row {place}; give a reason, or None")
    return list(said)
