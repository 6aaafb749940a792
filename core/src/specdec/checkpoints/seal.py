"""Whether a prefix cache entry is what was stored, and at the place that its tokens say."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from mlx_lm.models import cache as mlx_caches

from specdec.checkpoints.fingerprint import fingerprints
from specdec.checkpoints.tensors import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import mlx.core as mx

__all__ = ["check_offsets", "check_seal", "sealed"]

_SEAL = "content"
_MAKE_AGAIN = "it is left out"

_BY_POSITION = (
    mlx_caches.KVCache,
    mlx_caches.QuantizedKVCache,
    mlx_caches.ConcatenateKVCache,
    mlx_caches.ChunkedKVCache,
    mlx_caches.RotatingKVCache,
)
"""Caches whose ``offset`` counts the tokens that were read."""


def sealed(arrays: Mapping[str, mx.array], header: Mapping[str, str]) -> dict[str, str]:
    """The header with a digest of everything: one pass over the arrays, on their device."""
    return {**header, _SEAL: _seal(arrays, header)}


def check_seal(arrays: Mapping[str, mx.array], header: Mapping[str, str], where: str) -> None:
    """Refuse what is not bit for bit what :func:`sealed` saw.

    Raises:
        CheckpointError: it is damaged.
    """
    rest = {name: text for name, text in header.items() if name != _SEAL}
    if header.get(_SEAL) != _seal(arrays, rest):
        raise refusal(where, "its content is damaged", _MAKE_AGAIN)


def _seal(arrays: Mapping[str, mx.array], header: Mapping[str, str]) -> str:
    names = sorted(arrays)
    numbers = fingerprints([arrays[name] for name in names])
    parts = [
        (name, str(arrays[name].dtype), list(arrays[name].shape), number)
        for name, number in zip(names, numbers, strict=True)
    ]
    text = repr((parts, sorted(header.items())))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def check_offsets(caches: Sequence[Any], count: int, where: str) -> None:
    """Refuse caches that have read another number of tokens, where they tell it.

    A cache that was never used tells nothing: some models leave caches out.

    Raises:
        CheckpointError: a cache at another place.
    """
    for cache in caches:
        if isinstance(cache, mlx_caches.CacheList):
            check_offsets(cache.caches, count, where)
        elif type(cache) in _BY_POSITION and cache.offset not in (0, count):
            what = f"a {type(cache).__name__} has read {cache.offset} tokens, not {count}"
            raise refusal(where, what, _MAKE_AGAIN)
