"""A 64-bit fingerprint of arrays, computed where they are.

Each 8-byte word is mixed with a key of its column, the words of a row are added up, each row's sum
is mixed with a key of its row, and these are added up: multiply and xor-shift in 64-bit integers,
the steps of splitmix64's finaliser (Steele, Lea and Flood 2014). The mix is a bijection of the word
for each place, so one changed word always changes its row's sum; words or rows that trade places
meet other keys. Integer sums do not depend on their order, so every backend gives the same number.
"""

from __future__ import annotations

from array import array as host_array
from functools import cache, partial
from hashlib import shake_256
from typing import TYPE_CHECKING, cast

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["fingerprints"]

_WORD = 8
_COLUMNS = 1 << 15
# A chunk's intermediate results: small enough for a CPU's cache, large enough for a GPU's launches.
_CHUNK_BYTES = {mx.DeviceType.cpu: 4 << 20, mx.DeviceType.gpu: 256 << 20}


def fingerprints(arrays: Sequence[mx.array]) -> list[int]:
    """One number per array, over its bits in row-major order; not over its shape or dtype.

    About one pass over the arrays on their device; only the numbers come to the host.

    Args:
        arrays: of any shape, dtype and layout.
    """
    results: list[mx.array] = []
    waiting = 0
    for array in arrays:
        results.append(_fingerprint(array))
        waiting += array.nbytes
        if waiting >= _chunk_bytes():  # many small arrays are one evaluation
            mx.eval(results)
            waiting = 0
    return cast("list[int]", mx.stack(results).tolist()) if results else []


def _chunk_bytes() -> int:
    return _CHUNK_BYTES[mx.default_device().type]


def _fingerprint(array: mx.array) -> mx.array:
    if not array.size:
        return mx.zeros((), mx.uint64)
    if array.dtype != mx.float64:
        return _row_mix(mx.concatenate(_rows(array)))
    with mx.stream(mx.cpu):  # it exists on the CPU alone
        total = _row_mix(mx.concatenate(_rows(array)))
        mx.eval(total)
    return total


def _rows(array: mx.array) -> list[mx.array]:
    """Sums of the rows, chunk by chunk, so that temporary arrays stay small."""
    flat = array.reshape(-1)
    whole = flat.size - flat.size % (_WORD // min(_WORD, flat.itemsize))
    words = flat[:whole].view(mx.uint64)
    full = words.size - words.size % _COLUMNS
    body = words[:full].reshape(-1, _COLUMNS)
    step = max(1, _chunk_bytes() // (_COLUMNS * _WORD))
    sums = []
    for start in range(0, body.shape[0], step):
        sums.append(_column_mix(body[start : start + step], _keys()))
        if body.shape[0] > step:
            mx.eval(sums[-1])
    # What does not fill a row: the words that are left, and the bytes that fill no word.
    rest = flat[whole:]
    spare = mx.zeros((_WORD // flat.itemsize - rest.size,), rest.dtype) if rest.size else rest
    last = mx.concatenate([words[full:], mx.concatenate([rest, spare]).view(mx.uint64)])
    if last.size:
        # Not compiled: there would be a kernel for each length.
        sums.append(_add_up(last[None], _keys()[: last.size]))
    return sums


@cache
def _keys() -> mx.array:
    """``[_COLUMNS]`` odd uint64 keys."""
    numbers = host_array("I", shake_256(b"specdec weights 1").digest(_COLUMNS * _WORD))
    keys = mx.array(memoryview(numbers)).view(mx.uint64) | mx.array(1, mx.uint64)  # type: ignore[arg-type]
    mx.eval(keys)
    return keys


def _add_up(words: mx.array, keys: mx.array) -> mx.array:
    mixed = (words ^ (words >> 32)) * keys
    return mx.sum(mixed ^ (mixed >> 29), axis=-1)


_column_mix: Callable[[mx.array, mx.array], mx.array] = partial(mx.compile, shapeless=True)(_add_up)


def _row_mix(sums: mx.array) -> mx.array:
    # Counters through the finaliser: rows may be many, so their keys are not kept.
    keys = mx.arange(1, sums.size + 1, dtype=mx.uint64) * mx.array(0x1E3779B97F4A7C15, mx.uint64)
    keys = (keys ^ (keys >> 30)) * mx.array(0x3F58476D1CE4E5B9, mx.uint64)
    keys = (keys ^ (keys >> 27)) * mx.array(0x14D049BB133111EB, mx.uint64)
    return _add_up(sums, (keys ^ (keys >> 31)) | mx.array(1, mx.uint64))
