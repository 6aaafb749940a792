"""What one row has read, what may follow it, and how it is stored. The method is here.

A ``History`` is a value. It is never changed, only replaced, and only by tokens that were really
read. So a rejected draft leaves no trace, and a captured history stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import mlx.core as mx

from specdec.contract import Attachment, RowCheckpoint
from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SCHEMA", "History", "restore"]

SCHEMA: Final = "echo-tokens-v1"
"""Name of the stored layout. A later layout gets a new name."""


@dataclass(frozen=True)
class History:
    """The tokens that one row has read.

    Attributes:
        tokens: the last of them, oldest first.
        count: how many it has read in all.
    """

    tokens: tuple[int, ...] = ()
    count: int = 0

    def read(self, tokens: Sequence[int], memory: int) -> History:
        """The history after more tokens, of which the last ``memory`` are kept."""
        return History((*self.tokens, *tokens)[-memory:], self.count + len(tokens))

    def draft(self, pending: int, depth: int) -> list[int]:
        """What may follow ``pending``: what followed it when it was last read, copied on.

        Args:
            pending: the token after the history.
            depth: how many ids are wanted.

        Returns:
            ``depth`` ids; none if ``pending`` is not among the tokens.
        """
        places = [place for place, token in enumerate(self.tokens) if token == pending]
        if not places:
            return []
        text = [*self.tokens, pending]
        first = places[-1] + 1
        for place in range(first, first + depth):
            text.append(text[place])  # a long copy goes on with what it has copied
        return text[len(self.tokens) + 1 :]

    def store(self, namespace: str) -> RowCheckpoint:
        """The history as a checkpoint, with an array of its own."""
        return RowCheckpoint(
            namespace=namespace,
            processed_tokens=self.count,
            attachment=Attachment(
                schema=SCHEMA,
                arrays={"tokens": mx.array(self.tokens, dtype=mx.int32)},
                metadata={"count": self.count},
            ),
        )


def restore(checkpoint: RowCheckpoint, namespace: str, memory: int) -> History:
    """The history that a checkpoint holds.

    Args:
        checkpoint: borrowed; nothing of it is kept.
        namespace: of the group that the row joins.
        memory: how many tokens a row of the group keeps.

    Raises:
        CheckpointError: another namespace or layout, or a part of it is missing.
    """
    stored = checkpoint.attachment
    if (checkpoint.namespace, stored.schema) != (namespace, SCHEMA):
        raise CheckpointError(
            f"the checkpoint is of '{checkpoint.namespace}' in the layout '{stored.schema}'; "
            f"this group takes '{namespace}' in the layout '{SCHEMA}'"
        )
    count = checkpoint.processed_tokens
    tokens = stored.arrays.get("tokens", mx.array(0))
    right = tokens.dtype == mx.int32 and tokens.shape == (min(count, memory),)
    if not right or stored.metadata.get("count") != count:
        raise CheckpointError(f"the checkpoint does not hold the state of {count} tokens")
    return History(tuple(cast("list[int]", tokens.tolist())), count)
