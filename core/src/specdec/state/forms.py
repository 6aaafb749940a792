"""Choosing the state for a target's caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.state.attention import AttentionRows
from specdec.state.native import NativeState
from specdec.state.ragged import RaggedState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state.rows import RowState

__all__ = ["row_state", "types_without_row_form"]


def types_without_row_form(caches: Sequence[Any]) -> list[str]:
    """Names of the cache types that have no row form, each once, in order."""
    names = [type(c).__name__ for c in caches if type(c) is not AttentionRows.cache_type]
    return list(dict.fromkeys(names))


def row_state(caches: Sequence[Any]) -> RowState:
    """The state of one row that lives in ``caches``.

    Args:
        caches: one row's mlx-lm caches, one per layer.

    Returns:
        Ragged rows if every type has a row form, else native ones that carry the reason.
    """
    missing = types_without_row_form(caches)
    if missing:
        return NativeState(caches, f"no row form for cache type {', '.join(missing)} yet")
    return RaggedState(caches)
