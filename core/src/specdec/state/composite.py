"""Several caches of one layer: the row form of ``CacheList``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_lm.models.cache import CacheList

from specdec.state.cache_rows import shortest

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import mlx.core as mx

    from specdec.state.cache_rows import CacheRows
    from specdec.state.positions import RowPositions

__all__ = ["ListRows"]


class ListRows:
    """The rows of each part; every verb goes to all of them.

    Args:
        parts: the row form of each cache of the list.
    """

    __slots__ = ("caches",)

    def __init__(self, parts: Sequence[CacheRows]) -> None:
        self.caches: tuple[Any, ...] = tuple(parts)

    def __getitem__(self, index: int) -> Any:
        """A part, as the model's code asks for it."""
        return self.caches[index]

    def size(self) -> int:
        """Positions of the longest row."""
        return max(int(part.size()) for part in self.caches)

    def empty(self) -> bool:
        """Whether nothing was ever appended."""
        return bool(self.caches[0].empty())

    # Rounds and rows; see CacheRows.

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[ListRows, Sequence[int]]], positions: RowPositions
    ) -> ListRows:
        """A new layer of the rows that are listed with each part."""
        columns = zip(*(layer.caches for layer, _ in parts), strict=True)
        rows = [chosen for _, chosen in parts]
        return cls([type(c[0]).merged(list(zip(c, rows, strict=True)), positions) for c in columns])

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> ListRows:
        """One row that takes over the caches of a list."""
        from specdec.state.forms import adopt  # which holds this form too

        return cls([adopt(part, positions) for part in cache.caches])

    def key(self, row: int) -> Hashable:
        """Rows whose parts can share buffers."""
        return tuple(part.key(row) for part in self.caches)

    @property
    def split(self) -> bool:
        """Whether a part is split."""
        return any(part.split for part in self.caches)

    @property
    def rewinds(self) -> bool:
        """Whether all parts do."""
        return all(part.rewinds for part in self.caches)

    @property
    def longest_chain(self) -> int | None:
        """That of the part that has the shortest."""
        return shortest(part.longest_chain for part in self.caches)

    def begin_chain(self) -> None:
        """Every part keeps what it needs."""
        for part in self.caches:
            part.begin_chain()

    def end_chain(self) -> None:
        """Every part forgets it."""
        for part in self.caches:
            part.end_chain()

    def begin(self) -> None:
        """A window was begun on ``positions``."""
        for part in self.caches:
            part.begin()

    def check(self, kept: Sequence[int] | None) -> None:
        """Check every part."""
        for part in self.caches:
            part.check(kept)

    def finish(self, kept: Sequence[int] | None) -> None:
        """Keep the same of every part."""
        for part in self.caches:
            part.finish(kept)

    def take_back(self, counts: Sequence[int]) -> None:
        """Take it back from every part."""
        for part in self.caches:
            part.take_back(counts)

    def extract(self, row: int, *, share: bool = False) -> CacheList:
        """One row as an mlx-lm cache."""
        return CacheList(*(part.extract(row, share=share) for part in self.caches))

    def arrays(self) -> list[mx.array]:
        """The arrays of all parts, to be evaluated."""
        return [array for part in self.caches for array in part.arrays()]

    def bytes_at(self, positions: int) -> int:
        """Bytes of a row's share of all parts."""
        return sum(part.bytes_at(positions) for part in self.caches)
