"""What the reference drafters are given, checked before anything changes.

Shapes: B rows, L tokens, F features of a context.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from specdec.errors import CheckpointError, ContractError, RowIndexError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import RowCheckpoint

__all__ = ["check_arrays", "check_context", "fingerprint", "one_each", "row_of", "token_rows"]


def one_each(what: str, values: Sequence[int], highest: Sequence[int]) -> list[int]:
    """One int for each row, each 0 to its own ``highest``."""
    if len(values) != len(highest):
        raise ContractError(f"{what}: got {len(values)} for {len(highest)} rows; pass one a row")
    for row, (value, most) in enumerate(zip(values, highest, strict=True)):
        if not 0 <= value <= most:
            raise ContractError(f"{what}: row {row} has {value}; it must be 0 to {most}")
    return [int(value) for value in values]


def row_of(verb: str, row: int, row_count: int) -> int:
    """A row that the group has."""
    if not 0 <= row < row_count:
        raise RowIndexError(verb, row, row_count)
    return row


def token_rows(verb: str, tokens: mx.array, row_count: int, vocab_size: int) -> list[list[int]]:
    """Ids ``[B, L]`` on the host."""
    if tokens.ndim != 2 or tokens.shape[0] != row_count:
        raise ContractError(f"{verb}: tokens have shape {tokens.shape}; pass [{row_count}, L]")
    rows: Any = tokens.tolist()
    if any(not 0 <= token < vocab_size for row in rows for token in row):
        raise ContractError(f"{verb}: an id is outside 0 to {vocab_size - 1}")
    return list(rows)


def check_context(
    verb: str, context: mx.array | None, row_count: int, width: int, features: int
) -> mx.array:
    """A context ``[B, at least width, F]``."""
    if context is None:
        raise ContractError(f"{verb}: there is no context; this group declares one")
    wanted = (row_count, features)
    if context.ndim != 3 or context.shape[::2] != wanted or context.shape[1] < width:
        raise ContractError(
            f"{verb}: the context is {context.shape}; pass [{row_count}, {width}, {features}]"
        )
    return context


def check_arrays(checkpoint: RowCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the named float32 arrays, of these shapes."""
    held = checkpoint.attachment.arrays
    found = {name: (array.dtype, tuple(array.shape)) for name, array in held.items()}
    wanted = {name: (mx.float32, shape) for name, shape in shapes.items()}
    if found != wanted:
        raise CheckpointError(f"the checkpoint has the arrays {found}, not {wanted}")


def fingerprint(weights: Mapping[str, mx.array]) -> str:
    """The same for the same weights, and for no others."""
    digest = hashlib.sha256()
    for name, array in sorted(weights.items()):
        digest.update(f"{name}:{array.dtype}:{array.shape};".encode())
        digest.update(bytes(memoryview(cast("Any", array))))
    return digest.hexdigest()[:16]
