"""Where each row stands: one set of lengths that every layer of a target shares.

Rows are left-aligned: row ``b`` holds positions ``0 .. length[b] - 1``, and the open window of
width W is written at ``length[b] .. length[b] + W - 1``. Rolling back means not moving a length
on, so it costs nothing that grows with the context. While all rows have one length, offsets are
plain ints and the mask is MLX's own ``"causal"``; else offsets are an array and the mask is made
once per window for all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import mlx.core as mx

from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError
from specdec.state.kernels import key_reach, plans_by_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

__all__ = ["Mask", "RowPositions", "typed"]

Mask = mx.array | Literal["causal"] | None

_T = TypeVar("_T")


def typed(mask: mx.array, dtype: mx.Dtype | None) -> mx.array:
    """A mask of booleans, or of 0 and ``-inf`` in ``dtype``."""
    return mask if dtype is None else mx.where(mask, 0.0, -mx.inf).astype(dtype)


class RowPositions:
    """Lengths of B rows, and the window that is open on them.

    Args:
        lengths: B ints.
        exact_keys: whether windows never read more keys than there are, on any backend.

    Attributes:
        width: positions of the open window; 0 between rounds.
        reading: whether the open window is a prompt's chunk, which is kept whole.
        uniform: whether all rows have the same length.
        limit: one past the last position that the open window writes, over all rows.
        reach: key positions that the window reads: ``limit``, or a little more (kernels.py).
    """

    # Read by every layer in every forward, so they are set once per window.
    __slots__ = (
        "_end",
        "_index",
        "_lengths",
        "_longest",
        "_made",
        "_start",
        "limit",
        "plans",
        "reach",
        "reading",
        "uniform",
        "width",
    )

    def __init__(self, lengths: Sequence[int] = (), *, exact_keys: bool = False) -> None:
        self.width = 0
        self.reading = False
        self.plans = plans_by_shape() and not exact_keys
        self._set(list(lengths))

    def _set(self, lengths: list[int]) -> None:
        self._lengths = lengths
        if len(lengths) == 1:
            self._longest, self.uniform = lengths[0], True
        else:
            self._longest = max(lengths, default=0)
            self.uniform = lengths.count(self._longest) == len(lengths)
        self.limit = self.reach = self._longest
        self._start: int | mx.array | None = None
        self._end: int | mx.array | None = None
        self._index: mx.array | None = None
        self._made: dict[Hashable, Any] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row, B ints."""
        return tuple(self._lengths)

    def reach_of(self, width: int) -> int:
        """Key positions that a window of this width reads."""
        limit = self._longest + width
        return key_reach(limit, width) if self.plans else limit

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` positions.

        Args:
            needed: 1 + the longest draft of this round.
            most: 1 + the longest draft of any round; ``needed`` or more.
        """
        return most if self.plans and needed > 1 else needed

    @property
    def start(self) -> int | mx.array:
        """Offset of the open window: an int, or ``[B]`` int32 where rows differ."""
        if self._start is None:
            self._start = self._longest if self.uniform else mx.array(self._lengths, mx.int32)
        return self._start

    @property
    def end(self) -> int | mx.array:
        """Offset after the open window, of the same type as ``start``."""
        if self._end is None:
            self._end = self.start + self.width
        return self._end

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, made once while the rows stand where they do.

        Args:
            key: names it, the width of the window included where it depends on it.
            make: makes it.
        """
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    def begin(self, width: int, *, reading: bool = False) -> None:
        """Open a window of ``width`` positions.

        Args:
            width: W.
            reading: whether it will be kept whole.

        Raises:
            RoundOpenError: one is open.
            RollbackError: no positions at all.
        """
        if self.width:
            raise RoundOpenError("begin_round")
        if width < 1:
            raise RollbackError(f"a round of {width} positions was begun; give 1 or more")
        self.width, self.reading = width, reading
        self.limit, self.reach = self._longest + width, self.reach_of(width)
        self._end = self._index = None  # they depend on the width

    def check(self, kept: Sequence[int] | None) -> None:
        """Check what is to be kept of the open window; ``None`` for all of it.

        Raises:
            NoOpenRoundError: no window is open.
            RollbackError: not one count of ``0 .. width`` per row, or less than all of a chunk.
        """
        width, rows = self.width, len(self._lengths)
        if not width:
            raise NoOpenRoundError("rollback")
        if kept is None:
            return
        if len(kept) != rows or any(not 0 <= k <= width for k in kept):
            raise RollbackError(
                f"a round of {width} positions over {rows} rows cannot keep "
                f"{list(kept)}; give one count of 0 to {width} per row"
            )
        if self.reading and any(k != width for k in kept):
            raise RollbackError(
                f"a prompt's chunk of {width} positions cannot keep {list(kept)}; "
                "begin a round for what may be rolled back"
            )

    def finish(self, kept: Sequence[int] | None) -> None:
        """Close the window; row b keeps its first ``kept[b]`` positions, or all of them.

        Raises:
            NoOpenRoundError: no window is open.
            RollbackError: a count outside ``0 .. width``; nothing changed.
        """
        self.check(kept)
        width = self.width
        if kept is None:
            lengths = [length + width for length in self._lengths]
        else:
            lengths = [length + k for length, k in zip(self._lengths, kept, strict=True)]
        self.width = 0
        self._set(lengths)

    def replace(self, lengths: Sequence[int]) -> None:
        """Take new rows; between rounds."""
        self._set(list(lengths))

    def write_index(self) -> mx.array:
        """Positions ``[B, 1, W, 1]`` that the open window is scattered to."""
        if self._index is None:
            start = mx.array(self._lengths, mx.int32)
            index = start[:, None] + mx.arange(self.width, dtype=mx.int32)
            self._index = index[:, None, :, None]
        return self._index

    def mask(
        self, width: int, window_size: int | None, as_array: bool, dtype: mx.Dtype | None
    ) -> Mask:
        """The attention mask of a window that is about to be appended.

        Args:
            width: queries per row, W.
            window_size: keys further back than this are hidden, if given.
            as_array: whether the caller computes with the mask himself: booleans, then.
            dtype: the keys' type, if any are held.

        Returns:
            ``None`` (nothing to hide), ``"causal"``, or an array ``[W, K]`` (equal rows) or
            ``[B, 1, W, K]``: true where a query may look, or 0 there and ``-inf`` elsewhere.
        """
        if self.uniform and window_size is None:
            if width == 1:
                return None
            if not as_array and self.reach_of(width) == self._longest + width:
                return "causal"
        kind = dtype if self.plans and not as_array and width > 1 else None
        key = (width, window_size, kind)
        return self.once(key, lambda: typed(self._make_mask(width, window_size), kind))

    def block_mask(
        self, columns: Sequence[int], *, causal: bool = False, dtype: mx.Dtype | None = None
    ) -> Mask:
        """The attention mask of an open window that is a drafter's block.

        Its positions see all that a row holds, and each other, in both directions.

        Args:
            columns: B ints, positions of each row's block; what is behind them is padding.
            causal: whether a position sees no later one of its block.
            dtype: of the keys.

        Returns:
            As :meth:`mask`; without ``causal`` its third axis may be 1.
        """
        width = self.width
        whole = all(count == width for count in columns)
        if self.uniform and whole and self.reach == self.limit:
            return "causal" if causal and width > 1 else None
        kind = dtype if self.plans else None
        key = ("block", width, tuple(columns), causal, kind)
        return self.once(key, lambda: typed(self._make_block_mask(columns, causal), kind))

    def _make_block_mask(self, columns: Sequence[int], causal: bool) -> mx.array:
        ends = self.block_ends(columns)
        keys = mx.arange(self.reach, dtype=mx.int32)
        shown = keys < ends
        return shown & (keys <= self.queries(self.width)) if causal else shown

    def block_ends(self, columns: Sequence[int]) -> mx.array:
        """One past the last position of each row's block, ``[B, 1, 1, 1]``."""
        ends = [length + count for length, count in zip(self._lengths, columns, strict=True)]
        return mx.array(ends, mx.int32)[:, None, None, None]

    def queries(self, width: int) -> mx.array:
        """Positions of a window, as ``[W, 1]`` (equal rows) or ``[B, 1, W, 1]``."""
        start = self.start
        steps = mx.arange(width, dtype=mx.int32)
        if isinstance(start, int):
            return (steps + start)[:, None]
        return (start[:, None] + steps)[:, None, :, None]

    def _make_mask(self, width: int, window_size: int | None) -> mx.array:
        keys = mx.arange(self.reach_of(width), dtype=mx.int32)
        rows = self.queries(width)
        mask = keys <= rows
        if window_size is not None:
            mask = mask & (keys > rows - window_size)
        return mask
