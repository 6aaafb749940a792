"""A chain's row as one attachment, and back: its members' own, side by side.

Schema ``chain-1``: the arrays and the metadata of member i under ``i.`` and their names, and its
schema as ``i:schema``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.contract import Attachment, RowCheckpoint
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeVar

    import mlx.core as mx

    Value = TypeVar("Value")

__all__ = ["SCHEMA", "join", "namespace_of", "split"]

SCHEMA: Final = "chain-1"
"""Persistent name of the layout."""


def namespace_of(namespaces: Sequence[str]) -> str:
    """The namespace of a chain of members with these; their order counts."""
    told = [each.replace("%", "%25").replace("+", "%2B") for each in namespaces]
    return f"{SCHEMA}:{'+'.join(told)}"


def join(checkpoints: Sequence[RowCheckpoint], namespace: str) -> RowCheckpoint:
    """One checkpoint of all members' of a row.

    Args:
        checkpoints: one per member, in order; their arrays are not copied.
        namespace: the chain's.

    Raises:
        CheckpointError: they are of different numbers of tokens.
    """
    counts = {each.processed_tokens for each in checkpoints}
    if len(counts) != 1:
        raise CheckpointError(
            f"the members have processed {[each.processed_tokens for each in checkpoints]} tokens "
            "of one row; they must have processed the same"
        )
    arrays: dict[str, mx.array] = {}
    metadata: dict[str, str | int | float | bool] = {}
    for number, each in enumerate(checkpoints):
        attachment = each.attachment
        metadata[f"{number}:schema"] = attachment.schema
        arrays |= {f"{number}.{name}": array for name, array in attachment.arrays.items()}
        metadata |= {f"{number}.{name}": value for name, value in attachment.metadata.items()}
    return RowCheckpoint(
        namespace=namespace,
        processed_tokens=counts.pop(),
        attachment=Attachment(schema=SCHEMA, arrays=arrays, metadata=metadata),
    )


def split(
    checkpoints: Sequence[RowCheckpoint | None], namespace: str, namespaces: Sequence[str]
) -> list[list[RowCheckpoint | None]]:
    """Each member's part of each row's checkpoint: one list per member.

    Args:
        checkpoints: the chain's, one per row, borrowed; ``None`` is a cold row.
        namespace: the chain's.
        namespaces: the members', in order.

    Raises:
        CheckpointError: one is of another chain, of another layout, or has what no member left.
    """
    rows = [
        [None] * len(namespaces) if each is None else _parts(each, namespace, namespaces)
        for each in checkpoints
    ]
    return [[row[member] for row in rows] for member in range(len(namespaces))]


def _parts(
    checkpoint: RowCheckpoint, namespace: str, namespaces: Sequence[str]
) -> list[RowCheckpoint | None]:
    attachment = checkpoint.attachment
    if checkpoint.namespace != namespace:
        raise CheckpointError(
            f"the checkpoint is of {checkpoint.namespace}, not of {namespace}; read the text again"
        )
    if attachment.schema != SCHEMA:
        raise CheckpointError(
            f"the checkpoint has the schema {attachment.schema}, not {SCHEMA}; read the text again"
        )
    schemas = [attachment.metadata.get(f"{i}:schema") for i in range(len(namespaces))]
    own = {f"{i}:schema" for i in range(len(namespaces))}
    others = {name: value for name, value in attachment.metadata.items() if name not in own}
    arrays = _by_member(attachment.arrays, len(namespaces))
    metadata = _by_member(others, len(namespaces))
    parts: list[RowCheckpoint | None] = []
    for number, (schema, own_namespace) in enumerate(zip(schemas, namespaces, strict=True)):
        if not isinstance(schema, str):
            raise CheckpointError(
                f"the checkpoint says nothing of the chain's member {number}; read the text again"
            )
        parts.append(
            RowCheckpoint(
                namespace=own_namespace,
                processed_tokens=checkpoint.processed_tokens,
                attachment=Attachment(
                    schema=schema, arrays=arrays[number], metadata=metadata[number]
                ),
            )
        )
    return parts


def _by_member(entries: Mapping[str, Value], count: int) -> list[dict[str, Value]]:
    """Entries by the number in front of their names."""
    found: list[dict[str, Value]] = [{} for _ in range(count)]
    numbers = {str(number): number for number in range(count)}
    for name, value in entries.items():
        number, dot, rest = name.partition(".")
        if not dot or number not in numbers:
            raise CheckpointError(
                f"the checkpoint has {name}, which no member of the chain left; read the text again"
            )
        found[numbers[number]][rest] = value
    return found
