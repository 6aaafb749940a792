"""Where each row stands: one set of lengths that every layer of a target shares.

Rows are left-aligned: row ``b`` holds positions ``0 .. length[b] - 1``, and the open window of
width W is written at ``length[b] .. length[b] + W - 1``. Rolling back means not moving a length
on, so it costs nothing that grows with the context. While all rows have one length, offsets are
plain ints and the mask is MLX's own ``"causal"``; else offsets are an array and the mask is made
once per window for all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError
from specdec.state.kernels import key_reach, plans_by_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mask", "RowPositions"]

Mask = mx.array | Literal["causal"] | None


class RowPositions:
    """Lengths of B rows, and the window that is open on them.

    Attributes:
        width: positions of the open window; 0 between rounds.
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
        "_masks",
        "_plans",
        "_start",
        "limit",
        "reach",
        "uniform",
        "width",
    )

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self.width = 0
        self._plans = plans_by_shape()
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
        self._masks: dict[tuple[int, int | None, mx.Dtype | None], mx.array] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row, B ints."""
        return tuple(self._lengths)

    def _reach(self, width: int) -> int:
        limit = self._longest + width
        return key_reach(limit, width) if self._plans else limit

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` positions.

        Args:
            needed: 1 + the longest draft of this round.
            most: 1 + the longest draft of any round; ``needed`` or more.
        """
        return most if self._plans and needed > 1 else needed

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

    def begin(self, width: int) -> None:
        """Open a window of ``width`` positions.

        Raises:
            RoundOpenError: one is open.
            RollbackError: no positions at all.
        """
        if self.width:
            raise RoundOpenError("begin_round")
        if width < 1:
            raise RollbackError(f"a round of {width} positions was begun; give 1 or more")
        self.width = width
        self.limit, self.reach = self._longest + width, self._reach(width)
        self._end = self._index = None  # they depend on the width

    def finish(self, kept: Sequence[int] | None) -> None:
        """Close the window; row b keeps its first ``kept[b]`` positions, or all of them.

        Raises:
            NoOpenRoundError: no window is open.
            RollbackError: a count outside ``0 .. width``; nothing changed.
        """
        width = self.width
        if not width:
            raise NoOpenRoundError("rollback")
        if kept is None:
            lengths = [length + width for length in self._lengths]
        elif len(kept) == 1 == len(self._lengths) and 0 <= kept[0] <= width:
            lengths = [self._lengths[0] + kept[0]]
        else:
            if len(kept) != len(self._lengths) or any(not 0 <= k <= width for k in kept):
                raise RollbackError(
                    f"a round of {width} positions over {len(self._lengths)} rows cannot keep "
                    f"{list(kept)}; give one count of 0 to {width} per row"
                )
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
            if not as_array and self._reach(width) == self._longest + width:
                return "causal"
        kind = dtype if self._plans and not as_array and width > 1 else None
        key = (width, window_size, kind)
        if key not in self._masks:
            mask = self._make_mask(width, window_size)
            self._masks[key] = mask if kind is None else mx.where(mask, 0.0, -mx.inf).astype(kind)
        return self._masks[key]

    def _make_mask(self, width: int, window_size: int | None) -> mx.array:
        start = self.start
        keys = mx.arange(self._reach(width), dtype=mx.int32)
        queries = mx.arange(width, dtype=mx.int32)
        if isinstance(start, int):
            rows = (queries + start)[:, None]
        else:
            rows = (start[:, None] + queries)[:, None, :, None]
        mask = keys <= rows
        if window_size is not None:
            mask = mask & (keys > rows - window_size)
        return mask
