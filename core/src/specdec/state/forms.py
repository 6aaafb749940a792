"""Which cache types have a row form, and the state for a list of caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from specdec.errors import OptionError
from specdec.state.attention import AttentionRows
from specdec.state.chunked import ChunkedRows
from specdec.state.composite import ListRows
from specdec.state.quantized import QuantizedRows
from specdec.state.recurrent import RecurrentRows
from specdec.state.windows import WindowRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.state.cache_rows import CacheRows
    from specdec.state.positions import RowPositions

__all__ = ["adopt", "register_row_form", "types_without_row_form"]

_FORMS: dict[type[Any], Callable[[Any, RowPositions], CacheRows]] = {
    KVCache: AttentionRows.adopt,
    ConcatenateKVCache: AttentionRows.adopt,
    RotatingKVCache: WindowRows.adopt,
    QuantizedKVCache: QuantizedRows.adopt,
    ArraysCache: RecurrentRows.adopt,
    ChunkedKVCache: ChunkedRows.adopt,
    CacheList: ListRows.adopt,
}


def register_row_form(
    cache_type: type[Any], adopt: Callable[[Any, RowPositions], CacheRows]
) -> None:
    """Let rows of models with this cache type decode together and speculate.

    Args:
        cache_type: the class whose instances a model's ``make_cache`` returns; subclasses are
            types of their own.
        adopt: gives a :class:`~specdec.state.CacheRows` of one row that takes over a cache's
            arrays, such as the ``adopt`` of the row form.

    Raises:
        OptionError: the type has a row form already.
    """
    if cache_type in _FORMS:
        raise OptionError(
            f"cache type {cache_type.__module__}.{cache_type.__qualname__} has a row form already; "
            "register another type"
        )
    _FORMS[cache_type] = adopt


def adopt(cache: Any, positions: RowPositions) -> CacheRows:
    """The row form of one row's cache; its type must have one."""
    return _FORMS[type(cache)](cache, positions)


def types_without_row_form(caches: Sequence[Any]) -> list[str]:
    """Names of the cache types that have no row form, each once, in order."""
    names: list[str] = []
    for cache in caches:
        if type(cache) not in _FORMS:
            names.append(type(cache).__name__)
        elif type(cache) is CacheList:
            names += types_without_row_form(cache.caches)
    return list(dict.fromkeys(names))
