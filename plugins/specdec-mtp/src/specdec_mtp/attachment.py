"""A row of a head as a checkpoint, and back.

Arrays: ``0.keys``, ``0.values`` (and ``1.*`` where a layer keeps two caches) ``[1, heads, n, D]``
of the n positions that the head has read; ``hidden`` ``[u + 1, H]``, the target's hidden states
that it has not read. Metadata: ``tokens`` that the row has processed, ``history`` n, and
``unread``, the u tokens that followed all of those hidden states but the last, which waits for the
pending token.

Shapes: H hidden size, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec.contract import Attachment, RowCheckpoint
from specdec.drafting.row_arrays import (
    cache_arrays,
    check_arrays,
    check_identity,
    expected_shapes,
    fill_caches,
    leaves,
)
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["HeadRow", "RowLayout", "restore", "store"]


@frozen(eq=False)
class HeadRow:
    """One row between rounds.

    Attributes:
        tokens: that the row has processed.
        caches: mlx-lm's caches of what the head has read.
        unread: tokens that it has not read, u of them.
        hidden: ``[1, u + 1, H]`` hidden states before each of them and before the pending token;
            ``None`` for a row that has read nothing.
    """

    tokens: int
    caches: Sequence[Any]
    unread: tuple[int, ...]
    hidden: mx.array | None


@frozen(eq=False)
class RowLayout:
    """What the arrays of a head's rows look like.

    Attributes:
        schema: name of the layout.
        arrays: per leaf cache the shape and type of keys and values at one position
            ``[1, heads, 1, D]``.
        hidden_size: H.
        reads_all: whether the head reads every position of the text.
    """

    schema: str
    arrays: Mapping[str, tuple[tuple[int, ...], mx.Dtype]]
    hidden_size: int
    reads_all: bool


def store(row: HeadRow, namespace: str, layout: RowLayout) -> RowCheckpoint:
    """A checkpoint that shares nothing with the row's group.

    Args:
        row: its caches are the checkpoint's from now on.
        namespace: of the provider.
        layout: of its rows.
    """
    arrays: dict[str, mx.array] = {}
    history = 0
    if row.hidden is not None:
        arrays["hidden"] = mx.contiguous(row.hidden[0])
        history = leaves(row.caches)[0].offset
        arrays |= cache_arrays(row.caches)
        mx.eval(arrays)
    metadata: dict[str, str | int | float | bool] = {
        "tokens": row.tokens,
        "history": history,
        "unread": " ".join(map(str, row.unread)),
    }
    return RowCheckpoint(
        namespace=namespace,
        processed_tokens=row.tokens,
        attachment=Attachment(schema=layout.schema, arrays=arrays, metadata=metadata),
    )


def restore(
    checkpoint: RowCheckpoint, namespace: str, layout: RowLayout, caches: Sequence[Any]
) -> HeadRow:
    """The row of a checkpoint, in array objects of its own.

    Args:
        checkpoint: borrowed.
        namespace: of the provider.
        layout: of its rows.
        caches: empty ones, to be filled.

    Raises:
        CheckpointError: of another drafter, another schema, or arrays that do not fit.
    """
    attachment = check_identity(checkpoint, namespace, layout.schema)
    tokens = checkpoint.processed_tokens
    history, unread = _counts(checkpoint, layout)
    wanted = expected_shapes(caches, layout.arrays, history)
    if tokens:
        wanted["hidden"] = ((len(unread) + 1, layout.hidden_size), None)
    check_arrays(attachment.arrays, wanted)
    if not tokens:
        return HeadRow(0, caches, (), None)
    fill_caches(caches, attachment.arrays, history)
    return HeadRow(tokens, caches, unread, mx.array(attachment.arrays["hidden"])[None])


def _counts(checkpoint: RowCheckpoint, layout: RowLayout) -> tuple[int, tuple[int, ...]]:
    """Positions that the head has read, and the tokens that it has not."""
    metadata, tokens = checkpoint.attachment.metadata, checkpoint.processed_tokens
    history, text = metadata.get("history"), metadata.get("unread")
    if metadata.get("tokens") != tokens or not isinstance(history, int) or history < 0:
        raise CheckpointError(
            f"the checkpoint is of {tokens} tokens, but its state says {metadata.get('tokens')!r} "
            f"with a history of {history!r}; read the text again"
        )
    parts = text.split() if isinstance(text, str) else ["none"]
    if not all(part.isdecimal() for part in parts):
        raise CheckpointError(f"the checkpoint's unread tokens are {text!r}; read the text again")
    expected = max(0, tokens - 1 - len(parts))
    short = history != expected if layout.reads_all else history > expected
    if short or len(parts) > max(0, tokens - 1):
        raise CheckpointError(
            f"the checkpoint of {tokens} tokens has a history of {history} and {len(parts)} unread "
            "tokens, which do not belong together; read the text again"
        )
    return history, tuple(map(int, parts))
