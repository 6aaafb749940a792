"""Row checkpoints: a draft row's whole state at one committed position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import mlx.core as mx
    from attrs import Attribute

__all__ = ["Attachment", "RowCheckpoint"]


def _nonempty(_instance: object, attribute: Attribute[str], value: str) -> None:
    if not value:
        raise CheckpointError(f"a checkpoint's {attribute.name} is empty; name it")


def _nonnegative(_instance: object, attribute: Attribute[int], value: int) -> None:
    if value < 0:
        raise CheckpointError(f"a checkpoint's {attribute.name} is {value}; it must be 0 or more")


@frozen(kw_only=True, eq=False)
class Attachment:
    """A drafter's state for one exact prefix; never trimmed, stored with safetensors.

    Attributes:
        schema: persistent name of the layout. Code may change; what a name means may not.
        arrays: named arrays, independent of any live storage.
        metadata: a flat map of string to string, number or bool.
    """

    schema: str = field(validator=_nonempty)
    arrays: Mapping[str, mx.array] = field(factory=dict)
    metadata: Mapping[str, str | int | float | bool] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class RowCheckpoint:
    """Immutable, self-contained state of one draft row. It lives as long as someone holds it.

    Attributes:
        namespace: identity of the drafter that made it (its artifact and settings). A group
            refuses a checkpoint of another namespace.
        processed_tokens: tokens of the row that the drafter has read, the same that the target
            has read. 0 for a row that has read nothing yet.
        attachment: the state itself.
    """

    namespace: str = field(validator=_nonempty)
    processed_tokens: int = field(validator=_nonnegative)
    attachment: Attachment
