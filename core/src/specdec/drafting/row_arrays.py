"""One row's caches as the arrays of a checkpoint, and back.

Arrays ``{n}.keys`` and ``{n}.values`` of cache n, each ``[1, heads, positions held, D]`` in
temporal order. A cache of a sliding window holds its last positions alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache

from specdec.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import Attachment, RowCheckpoint

__all__ = [
    "cache_arrays",
    "check_arrays",
    "check_identity",
    "expected_shapes",
    "fill_caches",
    "leaves",
]


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches that hold keys, those of lists one by one."""
    found: list[Any] = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def cache_arrays(caches: Sequence[Any]) -> dict[str, mx.array]:
    """What one row's caches hold, in memory of its own once it is evaluated.

    Args:
        caches: mlx-lm's, as a state extracts them.
    """
    arrays: dict[str, mx.array] = {}
    for number, cache in enumerate(leaves(caches)):
        held = _held(cache, cache.offset)
        if held:
            arrays[f"{number}.keys"] = mx.contiguous(cache.keys[..., :held, :])
            arrays[f"{number}.values"] = mx.contiguous(cache.values[..., :held, :])
    return arrays


def fill_caches(caches: Sequence[Any], arrays: Mapping[str, mx.array], positions: int) -> None:
    """Let empty caches hold what one row's did.

    Args:
        caches: empty ones.
        arrays: as :func:`cache_arrays` gave them, checked; they are not written to.
        positions: of the row.
    """
    if not positions:
        return
    for number, cache in enumerate(leaves(caches)):
        # New objects: what decodes on assigns into its arrays.
        cache.keys = mx.array(arrays[f"{number}.keys"])
        cache.values = mx.array(arrays[f"{number}.values"])
        cache.offset = positions
        if isinstance(cache, RotatingKVCache):
            cache._idx = cache.keys.shape[2]


def expected_shapes(
    caches: Sequence[Any], layout: Mapping[str, tuple[tuple[int, ...], mx.Dtype]], positions: int
) -> dict[str, tuple[tuple[int, ...], mx.Dtype | None]]:
    """The arrays that a checkpoint of so many positions has.

    Args:
        caches: empty ones, of the row's kinds.
        layout: by name, the shape ``[1, heads, 1, D]`` and type of one position.
        positions: of the row.
    """
    wanted: dict[str, tuple[tuple[int, ...], mx.Dtype | None]] = {}
    for number, cache in enumerate(leaves(caches)):
        held = _held(cache, positions)
        if held:
            for name in (f"{number}.keys", f"{number}.values"):
                one, kind = layout[name]
                wanted[name] = ((*one[:2], held, one[3]), kind)
    return wanted


def _held(cache: Any, positions: int) -> int:
    """Positions that a cache holds of so many."""
    most = cache.max_size if isinstance(cache, RotatingKVCache) else positions
    return min(positions, most)


def check_identity(checkpoint: RowCheckpoint, namespace: str, schema: str) -> Attachment:
    """The attachment of a checkpoint that this drafter made.

    Raises:
        CheckpointError: it is of another drafter, or of another layout.
    """
    attachment = checkpoint.attachment
    if checkpoint.namespace != namespace:
        raise CheckpointError(
            f"the checkpoint is of {checkpoint.namespace}, not of {namespace}; read the text again"
        )
    if attachment.schema != schema:
        raise CheckpointError(
            f"the checkpoint has the schema {attachment.schema}, not {schema}; read the text again"
        )
    return attachment


def check_arrays(
    held: Mapping[str, mx.array],
    wanted: Mapping[str, tuple[tuple[int, ...], mx.Dtype | None]],
) -> None:
    """Check a checkpoint's arrays.

    Args:
        held: them.
        wanted: shape and type by name; ``None`` is any floating type.

    Raises:
        CheckpointError: others, or of another shape or type.
    """
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
                f"{dtype or 'a floating type'} {shape}; read the text again"
            )
        if dtype is None and not mx.issubdtype(array.dtype, mx.floating):
            raise CheckpointError(f"the checkpoint's {name} is {array.dtype}; read the text again")
