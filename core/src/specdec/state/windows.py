"""Sliding-window K/V of several rows: the row form of ``RotatingKVCache``.

Memory is bounded by the window and the slack of one round per row, and speculation goes on before,
across and after the wrap (see ``rings.py``). A prompt's chunk sees what mlx-lm shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from specdec.errors import RollbackError
from specdec.state.attention import check_window, merged_buffers
from specdec.state.buffers import Buffers, of_rows, room_for
from specdec.state.cache_rows import OnlyLengthsTell
from specdec.state.rings import SLACK, Ring

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from specdec.state.positions import Mask, RowPositions

__all__ = ["WindowRows"]


class WindowRows(OnlyLengthsTell):
    """One layer's keys and values ``[B, heads, at most max_size + slack, D]``, in a ring.

    Args:
        positions: the lengths that all layers of the target share.
        max_size: positions that a query sees, its own included.
        keep: positions at the beginning that are never dropped.
    """

    __slots__ = ("_appended", "_buffers", "_own", "_positions", "_ring")

    def __init__(self, positions: RowPositions, max_size: int, keep: int) -> None:
        self._positions = positions
        self._ring = Ring(positions, max_size, keep)
        self._appended = False
        self._buffers = Buffers()
        # A window that is not written in place, until it is known what is kept of it.
        self._own: list[mx.array] | None = None

    # What an mlx-lm model calls.

    @property
    def max_size(self) -> int:
        """Positions that a query sees."""
        return self._ring.max_size

    @property
    def keep(self) -> int:
        """Positions at the beginning that every query sees."""
        return self._ring.keep

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or ``[B]`` where rows differ."""
        return self._positions.end if self._appended else self._positions.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the window's keys and values ``[B, heads, W, D]``; returns all that it may see.

        Raises:
            RollbackError: the window is not the one that was begun.
        """
        positions, ring, new = self._positions, self._ring, (keys, values)
        check_window(positions, keys.shape[2], appended=self._appended)
        self._appended = True
        if not ring.in_place:
            self._own = list(new)
            return self.keys_and_values()
        self._buffers.reserve(ring.reach, new, ring.size)
        start, width = positions.start, positions.width
        if not isinstance(start, int):
            self._buffers.scatter(ring.write_index(), new)
        elif (place := ring.place(start)) + width <= ring.size:
            self._buffers.write(place, new)
        else:
            until = ring.size - place
            self._buffers.write(place, [array[..., :until, :] for array in new])
            self._buffers.write(ring.keep, [array[..., until:, :] for array in new])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the open window sees, its own positions included, once more."""
        if self._own is None:
            seen = self._buffers.first(self._ring.reach)
        else:
            seen = self._chunk(self._own) if self._positions.reading else self._wide(self._own)
        return seen[0], seen[1]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask for the window that is about to be appended (mlx-lm's signature)."""
        ring = self._ring
        if ring.in_place:
            dtype = self._buffers.held[0].dtype if self._buffers.held else None
            return ring.mask(N, window_size, return_array, dtype)
        if not self._positions.reading:
            return ring.wide_mask(N, window_size)
        # mlx-lm counts a chunk's distances over what the cache holds, kept positions included.
        before = min(ring.max_size - 1, self._length)
        size = window_size or ring.max_size
        if before + N <= size and not return_array:
            return "causal"
        mask: mx.array = create_causal_mask(N, before, window_size=size)
        return mask

    def block_mask(self, columns: Sequence[int], *, causal: bool = False) -> Mask:
        """As :meth:`AttentionRows.block_mask`; of what a row holds, the window's size is seen."""
        dtype = self._buffers.held[0].dtype if self._buffers.held else None
        return self._ring.block_mask(columns, causal=causal, dtype=dtype)

    def size(self) -> int:
        """Positions of the longest row that are held at most."""
        return min(self._positions.limit, self._ring.max_size)

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return not self._buffers.held and self._own is None

    # Rounds and rows; see CacheRows.

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> WindowRows:
        """One row that takes over what an mlx-lm cache holds, put in its places."""
        rows = cls(positions, cache.max_size, cache.keep)
        if cache.keys is not None and cache.offset:  # mlx-lm's trim leaves the arrays
            held = [cache._temporal_order(array) for array in (cache.keys, cache.values)]
            rows._store(held, cache.offset, kept=cache.keep)
        return rows

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[WindowRows, Sequence[int]]], positions: RowPositions
    ) -> WindowRows:
        """A new layer of the rows that are listed with each part."""
        ring = parts[0][0]._ring
        layer = cls(positions, ring.max_size, ring.keep)
        layer._buffers = merged_buffers(parts)
        return layer

    def key(self, row: int) -> Hashable:
        """Rows of one window size share a buffer."""
        del row
        return self._ring.max_size, self._ring.keep

    @property
    def longest_chain(self) -> int:
        """As many as a window that is written in place has positions; see ``rings.py``."""
        return SLACK + 1

    def begin(self) -> None:
        """A window was begun on ``positions``."""
        self._own = None

    def finish(self, kept: Sequence[int] | None) -> None:
        """Of a window in place only the lengths tell; of another, what is kept is written now."""
        own, self._own, self._appended = self._own, None, False
        if own is None:
            return
        positions = self._positions
        if positions.reading:
            before = self._length
            self._store(own, before + positions.width, kept=0)
        elif kept is None or any(kept):
            self._write(own, kept if kept is not None else [positions.width] * own[0].shape[0])

    def extract(self, row: int, *, share: bool = False) -> RotatingKVCache:
        """One row as an mlx-lm cache, its positions in order."""
        del share  # it never lies in a ring as mlx-lm's does
        ring, length = self._ring, self._positions.lengths[row]
        cache = RotatingKVCache(ring.max_size, ring.keep)
        if length and self._buffers.held:
            kept = min(ring.keep, length)
            first = max(kept, length - (ring.max_size - ring.keep))
            places = ring.places(_run(kept, first, length))
            cache.keys, cache.values = (
                mx.take(array[row : row + 1], places, axis=2) for array in self._buffers.held
            )
            cache.offset, cache._idx = length, kept + length - first
        return cache

    @property
    def donated(self) -> int:
        """Positions in a run that are held of a row of any length: the window but for ``keep``."""
        return self._ring.max_size - self._ring.keep

    def donor(self, columns: int, rows: Sequence[int] | None) -> tuple[mx.array, mx.array] | None:
        """As :meth:`AttentionRows.donor`, of each row's last positions in temporal order.

        Args:
            columns: positions, at most ``donated``; of a row with fewer all of them.
            rows: one or more numbers of rows; ``None`` for all.
        """
        if not self._buffers.held:
            return None
        lengths = self._positions.lengths
        held = Buffers(of_rows(self._buffers.held, rows))
        places = self._ring.last(lengths if rows is None else [lengths[r] for r in rows], columns)
        if isinstance(places, slice):
            keys, values = (array[..., places, :] for array in held.held)
        else:
            keys, values = held.gathered(places)
        return keys, values

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated."""
        return list(self._buffers.held)

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row's share of the buffers."""
        return self._buffers.position_bytes * min(room_for(positions), self._ring.size)

    @property
    def _length(self) -> int:
        lengths = self._positions.lengths
        if len(lengths) != 1:
            raise RollbackError(f"a prompt's chunk was read by {len(lengths)} rows; read one")
        return lengths[0]

    def _chunk(self, new: Sequence[mx.array]) -> list[mx.array]:
        """What a prompt's chunk sees, as mlx-lm lays it out."""
        ring, length = self._ring, self._length
        if not length:
            return list(new)

        def order() -> mx.array:
            kept = min(ring.keep, length)
            return ring.places(_run(kept, max(kept, length - ring.seen), length))

        index = self._positions.once(("ring chunk", ring.size, ring.keep), order)
        return [
            mx.concatenate([mx.take(array, index, axis=2), own], axis=2)
            for array, own in zip(self._buffers.held, new, strict=True)
        ]

    def _wide(self, new: Sequence[mx.array]) -> list[mx.array]:
        """What a wide window sees that may be rolled back; see ``Ring.wide_mask``."""
        ring = self._ring
        self._buffers.reserve(1, new, ring.size)
        places = ring.places(mx.maximum(ring.earlier(), 0))
        places = mx.minimum(places, self._buffers.capacity - 1)  # hidden where it is cut
        return [
            mx.concatenate([earlier, own], axis=2)
            for earlier, own in zip(self._buffers.gathered(places), new, strict=True)
        ]

    def _store(self, last: Sequence[mx.array], length: int, *, kept: int) -> None:
        """Put one row's newest positions in their places.

        Args:
            last: ``[1, heads, n, D]``; the first ``kept`` of them are the first positions of all,
                the others the last ones before ``length``.
            length: the row's new length.
            kept: see ``last``.
        """
        ring, count = self._ring, last[0].shape[2]
        kept = min(kept, count)
        behind = count - kept

        def order() -> tuple[mx.array, mx.array]:
            at = _run(kept, length - behind, length)
            newest = mx.arange(count) >= count - (ring.size - ring.keep)
            chosen: Any = (newest | (at < ring.keep)).tolist()
            source = mx.array([i for i, wanted in enumerate(chosen) if wanted], mx.int32)
            return ring.places(at[source])[None, None, :, None], source

        key = ("ring store", ring.size, ring.keep, count, kept, length)
        index, source = self._positions.once(key, order)
        self._buffers.reserve(min(length, ring.size), last, ring.size)
        self._buffers.scatter(index, [mx.take(array, source, axis=2) for array in last])

    def _write(self, own: Sequence[mx.array], kept: Sequence[int]) -> None:
        """Put what each row keeps of a wide window in its places."""
        ring, positions = self._ring, self._positions
        longest = max(length + count for length, count in zip(positions.lengths, kept, strict=True))
        self._buffers.reserve(min(longest, ring.size), own, ring.size)
        capacity = self._buffers.capacity

        def order() -> tuple[mx.array, mx.array]:
            counts = mx.array(list(kept), mx.int32)[:, None]
            # As many of every row as any keeps, from its last one back, and the first ones of all.
            most = min(max(kept), ring.size - ring.keep)
            first = mx.broadcast_to(
                mx.arange(min(ring.keep, own[0].shape[2]), dtype=mx.int32),
                (len(kept), min(ring.keep, own[0].shape[2])),
            )
            last = counts - most + mx.arange(most, dtype=mx.int32)
            chosen = mx.concatenate([first, last], axis=1)
            at = mx.array(positions.lengths, mx.int32)[:, None] + chosen
            wanted = (chosen >= 0) & (chosen < counts)
            wanted = wanted & ((mx.arange(chosen.shape[1]) >= first.shape[1]) | (at < ring.keep))
            # What is not wanted goes behind the ring, where it is cut off again.
            places = mx.where(wanted, ring.places(mx.maximum(at, 0)), capacity)
            return places[:, None, :, None], mx.maximum(chosen, 0)[:, None, :, None]

        key = ("ring keeps", ring.size, ring.keep, tuple(kept), capacity)
        places, source = positions.once(key, order)
        wider = Buffers([mx.pad(a, [(0, 0), (0, 0), (0, 1), (0, 0)]) for a in self._buffers.held])
        wider.scatter(places, Buffers(own).gathered(source))
        self._buffers = Buffers([mx.contiguous(a) for a in wider.first(capacity)])


def _run(kept: int, start: int, end: int) -> mx.array:
    """The first positions and then a run of others, ``[n]``."""
    first, rest = mx.arange(kept, dtype=mx.int32), mx.arange(start, end, dtype=mx.int32)
    return mx.concatenate([first, rest])
