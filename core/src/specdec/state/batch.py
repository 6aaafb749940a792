"""Rows that go through the model in one call: all layers, and where each row stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen
from mlx_lm.models.cache import CacheList

from specdec.errors import RollbackError
from specdec.state.attention import AttentionRows
from specdec.state.cache_rows import shortest
from specdec.state.composite import ListRows
from specdec.state.forms import adopt
from specdec.state.positions import RowPositions
from specdec.state.quantized import Format, QuantizedRows
from specdec.state.recurrent import RecurrentRows

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import mlx.core as mx

__all__ = ["KvQuantization", "RowBatch", "put_into"]


@frozen
class KvQuantization:
    """When and how a row's attention K/V is quantized.

    Attributes:
        format: group size and bits.
        start: a row is quantized once it has so many positions.
    """

    format: Format
    start: int


class RowBatch:
    """Rows whose caches share buffers.

    Args:
        caches: one row's mlx-lm caches, of types that have a row form. Their arrays are taken over
            without a copy.
        quantization: what becomes of its attention layers.
        exact_keys: whether the model must never be given more keys than there are positions.

    Attributes:
        positions: where the rows stand.
        caches: what the model is given, one per entry of mlx-lm's own list.
    """

    __slots__ = ("caches", "positions", "quantization")

    def __init__(
        self,
        caches: Sequence[Any],
        quantization: KvQuantization | None = None,
        *,
        exact_keys: bool = False,
    ) -> None:
        self.positions = RowPositions([_length(caches)], exact_keys=exact_keys)
        self.caches: list[Any] = [adopt(cache, self.positions) for cache in caches]
        self.quantization = quantization

    @classmethod
    def of(cls, parts: Sequence[tuple[RowBatch, Sequence[int]]]) -> RowBatch:
        """A new batch of the rows that are listed with each part; the parts stay as they are."""
        batch = cls.__new__(cls)
        lengths = [part.positions.lengths[row] for part, rows in parts for row in rows]
        batch.positions = RowPositions(lengths, exact_keys=not parts[0][0].positions.plans)
        rows = [chosen for _, chosen in parts]
        columns = zip(*(part.caches for part, _ in parts), strict=True)
        batch.caches = [
            type(c[0]).merged(list(zip(c, rows, strict=True)), batch.positions) for c in columns
        ]
        batch.quantization = parts[0][0].quantization
        return batch

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self.positions.lengths)

    @property
    def recurrent(self) -> bool:
        """Whether a layer's state is all that it has of the positions before it."""
        return next(iter(layers_of(self.caches, RecurrentRows)), None) is not None

    @property
    def records(self) -> bool:
        """Whether a layer needs to be recorded, for part of the open window to be dropped later."""
        return any(layer.recording for layer in layers_of(self.caches, RecurrentRows))

    def key(self, row: int) -> Hashable:
        """Rows whose keys are equal can be one batch."""
        due = self._due(self.positions.lengths[row])
        return due, self.quantization, tuple(layer.key(row) for layer in self.caches)

    @property
    def split(self) -> bool:
        """Whether the keys of the rows have come to differ."""
        if self.quantization is not None and len(set(map(self._due, self.positions.lengths))) > 1:
            return True
        return any(layer.split for layer in self.caches)

    def begin(self, width: int, *, reading: bool) -> None:
        """Open a window on every row."""
        self.positions.begin(width, reading=reading)
        for layer in self.caches:
            layer.begin()

    def check(self, kept: Sequence[int] | None) -> None:
        """Check that the window can be closed so; nothing changes."""
        self.positions.check(kept)
        for layer in self.caches:
            layer.check(kept)

    def finish(self, kept: Sequence[int] | None) -> None:
        """Close the window; row b keeps its first ``kept[b]`` positions, or all of them."""
        self.check(kept)
        for layer in self.caches:
            layer.finish(kept)
        self.positions.finish(kept)

    @property
    def longest_chain(self) -> int | None:
        """Windows of one position that a chain has at most; ``None`` for no limit."""
        return shortest(layer.longest_chain for layer in self.caches)

    def begin_chain(self) -> None:
        """From here on windows of one position can all be taken back."""
        for layer in self.caches:
            layer.begin_chain()

    def end_chain(self) -> None:
        """Only the last window can be taken back now."""
        for layer in self.caches:
            layer.end_chain()

    def take_back(self, counts: Sequence[int]) -> None:
        """Let row b be what it was before its last ``counts[b]`` positions."""
        for layer in self.caches:
            layer.take_back(counts)
        lengths = zip(self.positions.lengths, counts, strict=True)
        self.positions.replace([length - count for length, count in lengths])

    @property
    def rewinds(self) -> bool:
        """Whether any number of positions can be taken back, not the last one alone."""
        return all(layer.rewinds for layer in self.caches)

    def room(self, row: int) -> int | None:
        """Positions that a window on this row can keep at most, if there is a limit.

        A window that crossed the place where a row is quantized would show its first queries what
        its last ones must not see, or the other way round.
        """
        if self.quantization is None or self.is_quantized:
            return None
        # The first position is never read quantized: there is nothing to quantize before it.
        start, length = max(self.quantization.start, 1), self.positions.lengths[row]
        return start - length if length < start else None

    @property
    def is_quantized(self) -> bool:
        """Whether no attention layer is left to quantize."""
        return not any(map(_is_quantizable, self.caches))

    def quantize_if_due(self) -> None:
        """Quantize the attention layers, where the rows have come that far; all rows alike."""
        if self.is_due:
            assert self.quantization is not None
            packing = self.quantization.format
            self.caches = [self._quantized(layer, packing) for layer in self.caches]

    @property
    def is_due(self) -> bool:
        """Whether the rows are to be quantized now."""
        return self.row_count > 0 and self._due(self.positions.lengths[0])

    def _due(self, length: int) -> bool:
        wanted = self.quantization
        return wanted is not None and 0 < length >= wanted.start and not self.is_quantized

    def _quantized(self, layer: Any, packing: Format) -> Any:
        if _is_quantizable(layer):
            return QuantizedRows.of(layer, self.positions, packing)
        return layer

    def extract(self, row: int, *, share: bool = False) -> list[Any]:
        """One row as mlx-lm caches."""
        return [layer.extract(row, share=share) for layer in self.caches]

    def arrays(self) -> list[mx.array]:
        """Every array, to be evaluated."""
        return [array for layer in self.caches for array in layer.arrays()]


def layers_of(caches: Sequence[Any], kind: type[Any]) -> list[Any]:
    """The layers of one row form, those inside of lists too."""
    found = []
    for layer in caches:
        if isinstance(layer, ListRows):
            found += layers_of(layer.caches, kind)
        elif isinstance(layer, kind):
            found.append(layer)
    return found


def _is_quantizable(layer: Any) -> bool:
    # As in mlx-lm, caches inside of lists and those of windows stay as they are.
    return isinstance(layer, AttentionRows) and layer.quantizable


def _length(caches: Sequence[Any]) -> int:
    """Positions of one row, where a cache tells them."""
    offsets = []
    for cache in caches:
        if hasattr(cache, "caches"):
            offsets.append(_length(cache.caches))
        elif isinstance(getattr(cache, "offset", None), int):
            offsets.append(cache.offset)
    return max(offsets, default=0)


def put_into(given: Sequence[Any], caches: Sequence[Any]) -> None:
    """Let the caller's caches be what one row was extracted as.

    Raises:
        RollbackError: a cache of another type, and no list to replace it in.
    """
    for place, (cache, new) in enumerate(zip(caches, given, strict=True)):
        if isinstance(cache, CacheList):
            put_into(new.caches, cache.caches)
        elif type(cache) is type(new):
            vars(cache).update(vars(new))
        elif isinstance(caches, list):
            caches[place] = new
        else:
            raise RollbackError(
                f"the prompt_cache's {type(cache).__name__} has become a {type(new).__name__}; "
                "give a list of caches"
            )
