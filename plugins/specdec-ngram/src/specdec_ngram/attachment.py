"""A row's history as an attachment, and back.

Schema ``ngram-history-v1``: the array ``tokens``, int32 ``[n]``, and n in the metadata as
``processed_tokens``. The index is not stored: it follows from the tokens.
"""

from __future__ import annotations

from typing import Final, cast

import mlx.core as mx

from specdec.contract import Attachment, RowCheckpoint
from specdec.drafting import outside
from specdec.errors import CheckpointError

__all__ = ["SCHEMA", "restore", "store"]

SCHEMA: Final = "ngram-history-v1"
"""Persistent name of the layout."""


def store(tokens: tuple[int, ...], namespace: str) -> RowCheckpoint:
    """A checkpoint of a row that has read these tokens.

    Args:
        tokens: n ids, oldest first; copied.
        namespace: the provider's ``checkpoint_namespace``.
    """
    return RowCheckpoint(
        namespace=namespace,
        processed_tokens=len(tokens),
        attachment=Attachment(
            schema=SCHEMA,
            arrays={"tokens": mx.array(tokens, dtype=mx.int32)},
            metadata={"processed_tokens": len(tokens)},
        ),
    )


def restore(checkpoint: RowCheckpoint, namespace: str, vocab_size: int) -> list[int]:
    """The tokens of a checkpoint, copied to the host.

    Args:
        checkpoint: borrowed.
        namespace: the provider's ``checkpoint_namespace``.
        vocab_size: ids below it are tokens.

    Raises:
        CheckpointError: wrong namespace, schema, type, shape or count, or an id that the target
            does not have.
    """
    attachment = checkpoint.attachment
    if checkpoint.namespace != namespace:
        raise CheckpointError(
            f"the checkpoint belongs to '{checkpoint.namespace}', but this group is '{namespace}'"
        )
    if attachment.schema != SCHEMA:
        raise CheckpointError(
            f"the checkpoint has the schema '{attachment.schema}'; this drafter reads '{SCHEMA}'"
        )
    _check_layout(attachment, checkpoint.processed_tokens)
    tokens = cast("list[int]", attachment.arrays["tokens"].tolist())
    wrong = outside(tokens, vocab_size)
    if wrong is not None:
        raise CheckpointError(
            f"the checkpoint has the id {wrong}, but this target's ids are 0 to {vocab_size - 1}; "
            "restore it under the target it was made with"
        )
    return tokens


def _check_layout(attachment: Attachment, count: int) -> None:
    if set(attachment.arrays) != {"tokens"}:
        raise CheckpointError(
            f"the checkpoint has the arrays {sorted(attachment.arrays)}; it needs 'tokens' alone"
        )
    stored = attachment.arrays["tokens"]
    if stored.dtype != mx.int32 or tuple(stored.shape) != (count,):
        raise CheckpointError(
            f"the checkpoint's tokens are {stored.dtype} {tuple(stored.shape)}; "
            f"{count} processed tokens need int32 ({count},)"
        )
    noted = attachment.metadata.get("processed_tokens")
    if noted != count:
        raise CheckpointError(
            f"the checkpoint's metadata says processed_tokens {noted!r}, but the row has {count}"
        )
