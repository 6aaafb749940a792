"""Projected context: per layer, the keys and values of the text, made from tapped hidden states.

What a block drafter attends to lies here, for all rows of a group: each row's positions in order,
rows of different length in one buffer, layers of a sliding window in rings. A block is written
behind the rows' ends for the length of one draft, so attention reads one array and the context is
never copied; ending the block moves no length on, which drops it.

Shapes: B rows, L positions, W columns of a block, H hidden size, D features of a key.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from attrs import field, frozen
from mlx_lm.models.cache import KVCache, RotatingKVCache

from specdec.contract import Swap
from specdec.errors import ContractError, OptionError
from specdec.state import RaggedState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attrs import Attribute

    from specdec.contract import PendingChange

__all__ = ["BlockContext", "ContextLayer", "ContextRows", "KeysAndValues"]

KeysAndValues = tuple[mx.array, mx.array]
"""Keys and values of one layer, ``[B, heads, L, D]`` each."""


def _positive(_instance: object, _attribute: Attribute[int | None], value: int | None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and (not whole or value < 1):
        raise OptionError(f"a context layer's window is {value!r}; give 1 or more, or None")


@frozen
class ContextLayer:
    """One layer of a block drafter.

    Attributes:
        window: positions that a query sees, its own included; ``None`` for all.
    """

    window: int | None = field(default=None, validator=_positive)

    def cache(self) -> Any:
        """An empty cache of mlx-lm's for one row."""
        return KVCache() if self.window is None else RotatingKVCache(self.window, keep=0)


class ContextRows:
    """The context of B rows.

    Args:
        layers: of the drafter.
    """

    def __init__(self, layers: Sequence[ContextLayer]) -> None:
        self._layers = tuple(layers)
        self._state: RaggedState | None = None
        self._widest = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions that each row has read, B ints."""
        return () if self._state is None else self._state.lengths

    def empty_caches(self) -> list[Any]:
        """mlx-lm's caches of one row that has read nothing."""
        return [layer.cache() for layer in self._layers]

    # Membership.

    def prepare_append(self, rows: Sequence[Sequence[Any]]) -> PendingChange:
        """Build these rows behind the live ones, which stay as they are.

        Args:
            rows: one row's caches each; their arrays are taken over.
        """
        if not rows:
            return Swap(lambda: None)
        states = [RaggedState(caches) for caches in rows]
        state = states.pop(0) if self._state is None else self._state
        change = state.prepare_append(states)

        def join() -> None:
            change.commit()
            self._state = state

        return Swap(join, change.discard)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if not keep:
            self._state = None
        elif self._state is not None:
            self._state.filter_rows(keep)

    def extract(self, row: int) -> list[Any]:
        """One row's caches, which share nothing with these rows."""
        return self._live.extract_row(row)

    def arrays(self) -> list[mx.array]:
        """All keys and values, to be evaluated."""
        return [] if self._state is None else self._state.arrays()

    @property
    def _live(self) -> RaggedState:
        assert self._state is not None, "there are no rows"
        return self._state

    # Reading.

    @property
    def positions(self) -> int | mx.array:
        """Where the next position of each row stands: an int, or ``[B]`` where rows differ."""
        lengths = self.lengths
        if len(set(lengths)) == 1:
            return lengths[0]
        return mx.array(lengths, mx.int32)

    def append(self, projected: Sequence[KeysAndValues], counts: Sequence[int]) -> None:
        """Put what was projected behind the rows.

        Args:
            projected: per layer, right-padded.
            counts: B ints, positions that each row keeps.
        """
        if len(projected) != len(self._layers):
            raise ContractError(
                f"project() returned {len(projected)} layers, but {len(self._layers)} are declared"
            )
        live, kept = self._live, [0] * len(counts)
        live.begin_round(projected[0][0].shape[2])
        try:
            for cache, (keys, values) in zip(self._caches(), projected, strict=True):
                cache.update_and_fetch(keys, values)
            kept = list(counts)
        finally:
            live.rollback(kept)  # a failure leaves the rows as they were

    def _caches(self) -> list[Any]:
        [(caches, _)] = self._live.row_caches  # rows of any length are one batch
        return caches

    # Drafting.

    @contextmanager
    def block(self, columns: Sequence[int]) -> Iterator[BlockContext]:
        """Open a block behind every row; nothing of it stays.

        Args:
            columns: B ints, positions of each row's block; rows may differ, and each sees its own.

        Raises:
            ContractError: a layer was not attended, or twice.
        """
        live = self._live
        needed = max(columns)
        self._widest = max(self._widest, needed)
        width = live.window_width(needed, self._widest)
        positions = self.positions
        live.begin_round(width)
        try:
            block = BlockContext(self._caches(), positions, width, tuple(columns))
            yield block
            block.check_attended()
        finally:
            live.rollback([0] * live.row_count)

    @classmethod
    def of(cls, layers: Sequence[ContextLayer], rows: int) -> Self:
        """So many rows that have read nothing."""
        context = cls(layers)
        context.prepare_append([context.empty_caches() for _ in range(rows)]).commit()
        return context


class BlockContext:
    """What one block attends to.

    Args:
        caches: the rows' layers.
        positions: see below.
        width: W.
        columns: B ints.

    Attributes:
        positions: of the block's first column: an int, or ``[B]`` where rows differ. It is what
            ``mx.fast.rope`` takes as ``offset``.
        width: columns of the block, W; those behind a row's own are padding that no other sees.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        positions: int | mx.array,
        width: int,
        columns: tuple[int, ...],
    ) -> None:
        self._caches = caches
        self._columns = columns
        self._attended: set[int] = set()
        self.positions = positions
        self.width = width

    def attend(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        causal: bool = False,
    ) -> mx.array:
        """Attention of the block over a layer's context and the block itself.

        Args:
            layer: its number; each layer is attended once in a block.
            queries: ``[B, query heads, W, D]``.
            keys: the block's, ``[B, heads, W, D]``.
            values: the block's, ``[B, heads, W, D']``.
            scale: of the scores.
            causal: whether a column sees no later one of its block.

        Returns:
            ``[B, query heads, W, D']``.

        Raises:
            ContractError: no such layer, one that was attended before, or a block of another width.
        """
        if not 0 <= layer < len(self._caches) or layer in self._attended:
            what = "twice in one block" if layer in self._attended else "but does not exist"
            raise ContractError(
                f"layer {layer} was attended {what}; attend each of {len(self._caches)} layers once"
            )
        if keys.shape[2] != self.width or queries.shape[2] != self.width:
            raise ContractError(
                f"layer {layer} got {queries.shape[2]} queries and {keys.shape[2]} keys; a block "
                f"has context.width columns, {self.width} here"
            )
        self._attended.add(layer)
        cache = self._caches[layer]
        every_key, every_value = cache.update_and_fetch(keys, values)
        mask = cache.block_mask(self._columns, causal=causal)
        attended: mx.array = mx.fast.scaled_dot_product_attention(
            queries, every_key, every_value, scale=scale, mask=mask
        )
        return attended

    def check_attended(self) -> None:
        """Check that every layer was attended.

        Raises:
            ContractError: one was not.
        """
        missing = sorted(set(range(len(self._caches))) - self._attended)
        if missing:
            raise ContractError(
                f"layer {missing[0]} is declared, but the block did not attend to it"
            )
