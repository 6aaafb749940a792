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
from mlx_lm.models.cache import CacheList

from specdec.contract import Attachment, RowCheckpoint
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


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches that hold keys, those of lists one by one."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


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
        for number, cache in enumerate(leaves(row.caches)):
            history = cache.offset
            if history:
                arrays[f"{number}.keys"] = mx.contiguous(cache.keys[..., :history, :])
                arrays[f"{number}.values"] = mx.contiguous(cache.values[..., :history, :])
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
    attachment, tokens = checkpoint.attachment, checkpoint.processed_tokens
    if checkpoint.namespace != namespace:
        raise CheckpointError(
            f"the checkpoint is of {checkpoint.namespace}, not of {namespace}; read the text again"
        )
    if attachment.schema != layout.schema:
        raise CheckpointError(
            f"the checkpoint has the schema {attachment.schema}, not {layout.schema}; "
            "read the text again"
        )
    history, unread = _counts(checkpoint, layout)
    _check_arrays(attachment.arrays, layout, tokens, history, len(unread))
    if not tokens:
        return HeadRow(0, caches, (), None)
    if history:
        for number, cache in enumerate(leaves(caches)):
            # New objects: what decodes on assigns into its arrays.
            cache.keys = mx.array(attachment.arrays[f"{number}.keys"])
            cache.values = mx.array(attachment.arrays[f"{number}.values"])
            cache.offset = history
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


def _check_arrays(
    held: Mapping[str, mx.array], layout: RowLayout, tokens: int, history: int, unread: int
) -> None:
    wanted: dict[str, tuple[tuple[int, ...], mx.Dtype | None]] = {}
    if tokens:
        wanted["hidden"] = ((unread + 1, layout.hidden_size), None)
    if history:
        for name, (one, kind) in layout.arrays.items():
            wanted[name] = ((*one[:2], history, one[3]), kind)
    if set(held) != set(wanted):
        raise CheckpointError(
            f"the checkpoint has the arrays {', '.join(sorted(held)) or 'none'}, not "
            f"{', '.join(sorted(wanted)) or 'none'}; read the text again"
        )
    for name, (shape, dtype) in wanted.items():
        array = held[name]
        if tuple(array.shape) != shape or (dtype is not None and array.dtype != dtype):
            raise CheckpointError(
                f"the checkpoint's {name} is {array.dtype} {tuple(array.shape)}, not "
                f"{dtype or 'a hidden state'} {shape}; read the text again"
            )
        if dtype is None and not mx.issubdtype(array.dtype, mx.floating):
            raise CheckpointError(f"the checkpoint's {name} is {array.dtype}; read the text again")
