"""Rows of any cache form beside plain lists: what does each query of a window see?

Every position that a test appends is a number of its own, a tag, written into the keys and values
of each layer. Whatever a layer returns and whatever mask it gives, the tags that a query sees are
read back from them and compared with a rule over positions, or with mlx-lm's own cache.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from mlx_lm.models.cache import KVCache, RotatingKVCache

from specdec.state import RaggedState, Together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "Folding",
    "Full",
    "Layer",
    "RowPrograms",
    "Window",
    "go_on_in_mlx_lm",
    "grid",
    "in_mlx_lm",
    "leaves",
    "numbers",
    "seen_tags",
    "visible",
]

Bits = np.ndarray[Any, np.dtype[np.bool_]]
"""``[W, n]``: whether a query sees a position."""

HEADS, KEY, VALUE = 2, 2, 1
_SPAN = 8  # numbers of one position in one layer
_LAYERS = 8


def numbers(tags: Sequence[Sequence[int]], layer: int) -> tuple[mx.array, mx.array]:
    """Keys and values ``[B, HEADS, W, .]`` of positions with these tags, exact in float32."""
    base = (np.array(tags, np.int64) * _LAYERS + layer) * _SPAN
    block = base[:, None, :, None] + _within()
    assert block.max(initial=0) < 1 << 24
    block = block.astype(np.float32)
    return mx.array(block[..., :KEY]), mx.array(block[..., KEY:])


def _within() -> Any:
    heads = np.arange(HEADS)[:, None, None] * (KEY + VALUE)
    return heads + np.arange(KEY + VALUE)[None, None, :]


def tags_of(keys: mx.array, values: mx.array, layer: int) -> tuple[Any, Bits]:
    """Tags ``[B, K]`` of what a layer returned, and which of them are whole and this layer's."""
    block = np.concatenate([np.array(keys), np.array(values)], axis=-1).astype(np.int64)
    base = block[:, :1, :, :1]
    whole = (block == base + _within()).all(axis=(1, 3))
    number = base[:, 0, :, 0] // _SPAN
    return number // _LAYERS, whole & (number % _LAYERS == layer)


def visible(mask: Any, rows: int, width: int, keys: int) -> Bits:
    """A mask as ``[B, W, K]`` booleans.

    Args:
        mask: ``None``, ``"causal"``, or an array of any shape that broadcasts to ``[B, H, W, K]``,
            of booleans, or of 0 and ``-inf``.
        rows: B.
        width: W.
        keys: K.
    """
    shape = (rows, width, keys)
    if mask is None:
        return np.ones(shape, np.bool_)
    if isinstance(mask, str):
        assert mask == "causal"
        causal = np.arange(keys)[None] <= np.arange(width)[:, None] + (keys - width)
        return np.broadcast_to(causal, shape)
    if mask.dtype != mx.bool_:
        array = np.array(mask.astype(mx.float32))
        assert np.isin(array, [0.0, -np.inf]).all()
        bits = array == 0
    else:
        bits = np.array(mask)
    return np.broadcast_to(bits, (rows, 1, width, keys))[:, 0]


def seen_tags(
    got: tuple[mx.array, mx.array],
    mask: Any,
    *,
    layer: int,
    row: Sequence[int],
    place: int,
    width: int,
) -> Bits:
    """Which of a row's positions each query sees, ``[W, n]``; nothing else may be seen.

    Args:
        got: what the layer returned.
        mask: the mask that it gave.
        layer: its number.
        row: the row's tags, the window's included.
        place: the row's number in ``got``.
        width: W.
    """
    rows, _, keys, _ = got[0].shape
    shown = visible(mask, rows, width, keys)[place]
    tags, whole = (each[place] for each in tags_of(*got, layer))
    position = {tag: number for number, tag in enumerate(row)}
    found = np.zeros((width, len(row)), np.int64)
    for key in np.flatnonzero(shown.any(axis=0)):
        assert whole[key], f"layer {layer}: a query sees what nobody appended"
        assert int(tags[key]) in position, f"layer {layer}: a query sees another row, or a draft"
        found[:, position[int(tags[key])]] += shown[:, key]
    assert found.max(initial=0) <= 1, f"layer {layer}: a query sees a position twice"
    return found > 0


@runtime_checkable
class Folding(Protocol):
    """A kind of cache that no query looks into: its arrays are made of all tags before."""

    def cache(self) -> Any:
        """A fresh one of mlx-lm's."""

    def run(self, cache: Any, tags: Sequence[Sequence[int]], /) -> None:
        """Update the arrays by a window ``[B][W]``, as a model's code does, and record it."""

    def check(self, cache: Any, place: int, row: Sequence[int], /) -> None:
        """Compare the arrays of the row at a place with its tags."""


class Layer(Protocol):
    """A kind of cache, and what its queries are to see."""

    def cache(self) -> Any:
        """A fresh one of mlx-lm's."""

    def mask(self, cache: Any, width: int, as_array: bool, /) -> Any:
        """The mask that a model's code has for a window that it is about to append."""

    def sees(self, length: int, width: int, /) -> Bits:
        """Which of the positions each of the last ``width`` of ``length`` sees."""


@frozen
class Full:
    """Every query sees all before it."""

    make: Callable[[], Any] = KVCache
    window_size: int | None = None

    def cache(self) -> Any:
        return self.make()

    def mask(self, cache: Any, width: int, as_array: bool) -> Any:
        return cache.make_mask(width, return_array=as_array, window_size=self.window_size)

    def sees(self, length: int, width: int) -> Bits:
        query, position = grid(length, width)
        near = position > query - (self.window_size or length + 1)
        seen: Bits = (position <= query) & near
        return seen


@frozen
class Window:
    """Every query sees the first positions of all and the last ones."""

    max_size: int
    keep: int = 0
    window_size: int | None = None

    def cache(self) -> RotatingKVCache:
        return RotatingKVCache(self.max_size, self.keep)

    def mask(self, cache: Any, width: int, as_array: bool) -> Any:
        return cache.make_mask(width, return_array=as_array, window_size=self.window_size)

    def sees(self, length: int, width: int) -> Bits:
        query, position = grid(length, width)
        last = min(self.window_size or self.max_size, self.max_size) - self.keep
        seen: Bits = (position <= query) & ((position > query - last) | (position < self.keep))
        return seen


def grid(length: int, width: int) -> tuple[Any, Any]:
    """Positions of the last ``width`` of ``length`` queries ``[W, 1]``, and of all keys."""
    return np.arange(length - width, length)[:, None], np.arange(length)[None]


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches of every layer, those inside of lists too."""
    return [leaf for each in caches for leaf in (getattr(each, "caches", None) or [each])]


def window_of(
    layer: Layer, cache: Any, tags: Sequence[Sequence[int]], *, number: int, as_array: bool = False
) -> tuple[tuple[mx.array, mx.array], Any]:
    """Append a window as a model does: what the layer returns, and the mask."""
    mask = layer.mask(cache, len(tags[0]), as_array)
    return cache.update_and_fetch(*numbers(tags, number)), mask


def in_mlx_lm(layer: Layer, row: Sequence[int], width: int, number: int) -> Bits:
    """What the last positions of a row see in mlx-lm, read as one chunk after the others."""
    cache, before = layer.cache(), row[: len(row) - width]
    if before:
        cache.update_and_fetch(*numbers([before], number))
    got, mask = window_of(layer, cache, [row[len(before) :]], number=number)
    return seen_tags(got, mask, layer=number, row=row, place=0, width=width)


def go_on_in_mlx_lm(
    layers: Sequence[Layer | Folding],
    caches: Sequence[Any],
    row: Sequence[int],
    new: Sequence[int],
) -> list[int]:
    """Let mlx-lm's own classes go on with a row's caches; checked, returns the longer row."""
    longer, width = [*row, *new], len(new)
    for number, (layer, cache) in enumerate(zip(layers, leaves(caches), strict=True)):
        assert type(cache) is type(layer.cache())
        if isinstance(layer, Folding):
            layer.check(cache, 0, row)
            layer.run(cache, [new])
            continue
        assert cache.offset == len(row)
        got, mask = window_of(layer, cache, [new], number=number)
        found = seen_tags(got, mask, layer=number, row=longer, place=0, width=width)
        want = in_mlx_lm(layer, longer, width, number)
        assert np.array_equal(found, want), f"layer {number} goes on with other positions"
        if width == 1:
            assert np.array_equal(want, layer.sees(len(longer), 1))
    return longer


@frozen(eq=False)
class RowPrograms:
    """Makes states over these layers and runs windows on them."""

    layers: Sequence[Layer | Folding]
    make: Callable[[], list[Any]]
    together: Together = Together.ANY
    _tags: Iterator[int] = field(factory=lambda: itertools.count(1))

    def tags(self, rows: int, width: int) -> list[list[int]]:
        """Tags that no other position has."""
        return [list(itertools.islice(self._tags, width)) for _ in range(rows)]

    def cold(self) -> RaggedState:
        """One row that has read nothing."""
        return RaggedState(self.make(), together=self.together)

    def window(
        self,
        state: RaggedState,
        rows: list[list[int]],
        width: int,
        *,
        reading: bool = False,
        as_array: bool = False,
    ) -> list[list[int]]:
        """Run a window, checked, and leave it open; returns its tags."""
        new = self.tags(len(rows), width)
        state.begin_round(width, reading=reading)
        for caches, chosen in state.row_caches:
            own = [new[row] for row in chosen]
            wholes = [[*rows[row], *new[row]] for row in chosen]
            for number, (layer, cache) in enumerate(zip(self.layers, leaves(caches), strict=True)):
                if isinstance(layer, Folding):
                    layer.run(cache, own)
                    for place, whole in enumerate(wholes):
                        layer.check(cache, place, whole)
                    continue
                got, mask = window_of(layer, cache, own, number=number, as_array=as_array)
                for again, first in zip(cache.keys_and_values(), got, strict=True):
                    assert np.array_equal(np.array(again), np.array(first))
                for place, whole in enumerate(wholes):
                    found = seen_tags(got, mask, layer=number, row=whole, place=place, width=width)
                    chunk = in_mlx_lm(layer, whole, width, number) if reading else None
                    want = layer.sees(len(whole), width) if chunk is None else chunk
                    assert np.array_equal(found, want), f"layer {number}, row {chosen[place]}"
        return new

    def append(self, state: RaggedState, new: Sequence[Sequence[int]]) -> None:
        """Append the open window without a look at what is seen."""
        for caches, chosen in state.row_caches:
            own = [new[row] for row in chosen]
            for number, (layer, cache) in enumerate(zip(self.layers, leaves(caches), strict=True)):
                if isinstance(layer, Folding):
                    layer.run(cache, own)
                else:
                    cache.update_and_fetch(*numbers(own, number))

    def round(
        self,
        state: RaggedState,
        rows: list[list[int]],
        width: int,
        kept: Sequence[int],
        *,
        as_array: bool = False,
    ) -> list[list[int]]:
        """A round; returns the rows afterwards."""
        new = self.window(state, rows, width, as_array=as_array)
        state.rollback(kept)
        after = [[*was, *own[:n]] for was, own, n in zip(rows, new, kept, strict=True)]
        assert state.lengths == tuple(map(len, after))
        return after

    def read(self, state: RaggedState, row: list[int], width: int) -> list[int]:
        """A prompt's chunk."""
        [new] = self.window(state, [row], width, reading=True)
        state.commit_round()
        return [*row, *new]
