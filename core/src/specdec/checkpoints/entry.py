"""A prefix cache entry: one row's state at an exact prefix, as arrays and text, and back.

A row's mlx-lm caches are stored as their class names and their ``state`` trees. Nothing is
pickled, and a name from a file leads only to the cache classes of ``mlx_lm.models.cache``.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from attrs import field, frozen
from mlx_lm.models import cache as mlx_caches

from specdec.checkpoints.index import token_bytes, tokens_of
from specdec.checkpoints.layout import restore_checkpoint, split
from specdec.checkpoints.tensors import refusal, settled
from specdec.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.contract import RowCheckpoint

__all__ = [
    "ENTRY_FORMAT",
    "PrefixEntry",
    "decode",
    "decode_state",
    "encode",
    "key_of",
]

ENTRY_FORMAT = "specdec-prefix-entry-2"

_TOKENS = "tokens"
_CACHE = "cache."
_CHECKPOINT = "checkpoint."
_MAKE_AGAIN = "it is left out"


def _ids(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(tokens)


@frozen(eq=False)
class PrefixEntry:
    """One row's state after an exact prefix.

    Attributes:
        tokens: the prefix; every one of them was read.
        caches: one row of mlx-lm caches that nobody else uses.
        checkpoint: the drafter's state at the same place, if there is a drafter.
    """

    tokens: tuple[int, ...] = field(converter=_ids)
    caches: Sequence[Any]
    checkpoint: RowCheckpoint | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are stored, of caches and checkpoint, and of the tokens.

        Raises:
            CheckpointError: a cache or a checkpoint that cannot be stored.
        """
        return sum(array.nbytes for array in encode(self, "size")[0].values())


def encode(entry: PrefixEntry, namespace: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """An entry as named arrays and header metadata.

    The arrays are contiguous copies of what is in use: positions that a cache holds in reserve are
    cut off. They are lazy; evaluate them.

    Args:
        entry: borrowed.
        namespace: what the entry is stored under.

    Raises:
        CheckpointError: a cache class or a state that cannot be stored.
    """
    arrays: dict[str, mx.array] = {}

    def keep(array: mx.array) -> int:
        number = len(arrays)
        arrays[f"{_CACHE}{number}"] = settled(array)
        return number

    caches = [_describe_cache(cache, keep) for cache in entry.caches]
    header = {"format": ENTRY_FORMAT, "namespace": namespace, "caches": json.dumps(caches)}
    if entry.checkpoint is not None:
        own, checkpoint = split(entry.checkpoint)
        header["checkpoint"] = json.dumps(checkpoint)
        arrays |= {f"{_CHECKPOINT}{name}": settled(a) for name, a in own.items()}
    arrays[_TOKENS] = mx.array(entry.tokens, mx.int64)
    return arrays, header


def decode(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> tuple[str, PrefixEntry]:
    """The namespace and the entry that :func:`encode` gave these for.

    Raises:
        CheckpointError: another format or version, or a missing or wrong part.
    """
    namespace, tokens = key_of(arrays, header, where)
    caches, checkpoint = decode_state(arrays, header, where)
    return namespace, PrefixEntry(tokens_of(tokens), caches, checkpoint)


def key_of(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> tuple[str, bytes]:
    """The namespace and the tokens, as bytes, of an encoded entry; reads no other array.

    Raises:
        CheckpointError: another format or version, or a missing or wrong part.
    """
    found = header.get("format")
    if found != ENTRY_FORMAT:
        raise refusal(where, f"its format is {found!r}, not {ENTRY_FORMAT!r}", _MAKE_AGAIN)
    tokens = arrays.get(_TOKENS)
    if tokens is None or tokens.dtype != mx.int64 or tokens.ndim != 1:
        raise refusal(where, "it has no list of tokens", _MAKE_AGAIN)
    return header.get("namespace", ""), token_bytes(cast("list[int]", tokens.tolist()))


def decode_state(
    arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str
) -> tuple[list[Any], RowCheckpoint | None]:
    """Caches and checkpoint of an encoded entry, of array objects of their own, evaluated.

    An MLX array can be assigned into, which changes the object and whatever names it. A new object
    shares the buffer until one of the two is written, and then MLX copies. (``mx.array(a)`` would
    copy at once.)

    Raises:
        CheckpointError: a missing or wrong part, or a class that is no cache of mlx-lm.
    """
    made: list[mx.array] = []

    def own(name: str) -> mx.array:
        made.append(settled(arrays[name]))
        return made[-1]

    def fetch(number: object) -> mx.array:
        return own(f"{_CACHE}{number}")

    try:
        caches = [_restore_cache(item, fetch) for item in _list(json.loads(header["caches"]))]
        checkpoint = None
        if "checkpoint" in header:
            names = [name for name in arrays if name.startswith(_CHECKPOINT)]
            parts = {name.removeprefix(_CHECKPOINT): own(name) for name in names}
            checkpoint = restore_checkpoint(parts, json.loads(header["checkpoint"]), where)
        mx.eval(made)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise refusal(where, error, _MAKE_AGAIN) from error
    return caches, checkpoint


# Caches as JSON: {"class", "state"} or, for a CacheList, {"class", "caches"}. In a state tree an
# array is {"array": number}, a tuple {"tuple": [...]}, a list {"list": [...]}.


def _describe_cache(cache: Any, keep: Callable[[mx.array], int]) -> dict[str, Any]:
    name = type(cache).__name__
    if _class_of(name) is not type(cache):
        raise CheckpointError(
            f"a cache of the class {name} cannot be stored; "
            "only the one-row classes of mlx_lm.models.cache can"
        )
    if isinstance(cache, mlx_caches.CacheList):
        return {"class": name, "caches": [_describe_cache(part, keep) for part in cache.caches]}
    return {"class": name, "state": _describe(_in_use(cache), keep)}


def _restore_cache(item: Mapping[str, Any], fetch: Callable[[object], mx.array]) -> Any:
    name = item["class"]
    kind = _class_of(name)
    if kind is None:
        raise CheckpointError(f"{one_line(repr(name))} is no cache class of mlx-lm; {_MAKE_AGAIN}")
    if issubclass(kind, mlx_caches.CacheList):
        # Not from_state: it would look the class names of its parts up among all globals.
        return kind(*(_restore_cache(part, fetch) for part in _list(item["caches"])))
    state = _restore(item["state"], fetch)
    if kind is mlx_caches.ConcatenateKVCache and state[0] is None:
        return kind()  # from_state takes an offset from the keys, and there are none
    return kind.from_state(state)


def _class_of(name: object) -> Any:
    """The cache class of mlx-lm with this name, or ``None``; batches of rows are none."""
    if not isinstance(name, str) or name.startswith(("_", "Batch")):
        return None
    kind = vars(mlx_caches).get(name)
    if not isinstance(kind, type) or kind.__module__ != mlx_caches.__name__:
        return None
    return kind if issubclass(kind, mlx_caches._BaseCache) else None


def _in_use(cache: Any) -> Any:
    """A cache's state without the positions that it holds in reserve."""
    state = cache.state
    length = None
    if isinstance(cache, mlx_caches.ChunkedKVCache):
        length = cache.offset - cache.start_position
    elif isinstance(cache, mlx_caches.RotatingKVCache):
        # Once the ring has wrapped, all of it is in use.
        length = cache.offset if cache.offset == cache._idx else None
    elif isinstance(
        cache,
        mlx_caches.KVCache | mlx_caches.QuantizedKVCache | mlx_caches.ConcatenateKVCache,
    ):
        length = cache.offset
    if length is None:
        return state
    keys, values, *rest = state
    return (_cut(keys, length), _cut(values, length), *rest)


def _cut(node: Any, length: int) -> Any:
    if isinstance(node, mx.array):
        return node[..., :length, :] if node.shape[-2] > length else node
    if isinstance(node, list | tuple):
        return type(node)(_cut(part, length) for part in node)
    return node


def _describe(node: Any, keep: Callable[[mx.array], int]) -> Any:
    if isinstance(node, mx.array):
        return {"array": keep(node)}
    if type(node) in (tuple, list):
        return {type(node).__name__: [_describe(part, keep) for part in node]}
    if node is None or type(node) in (bool, int, str):
        return node
    if type(node) is float and math.isfinite(node):
        return node
    raise CheckpointError(
        one_line(f"a cache's state holds {node!r}, which cannot be stored; leave this cache out")
    )


def _restore(node: Any, fetch: Callable[[object], mx.array]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "array":
        return fetch(value)
    parts = [_restore(part, fetch) for part in _list(value)]
    return {"tuple": tuple, "list": list}[kind](parts)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value
