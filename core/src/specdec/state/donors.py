"""What a drafter without a cache of its own borrows of the rows: keys and values of two layers.

The last layer that sees a window, and the last one that sees everything. They are views where the
rows lie as they are wanted, and whoever reads them lets go of them within the round: what is held
cannot be written in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx
from attrs import frozen

from specdec.contract import AssistantDonors
from specdec.errors import RoundOpenError, TargetLacksError
from specdec.state.attention import AttentionRows
from specdec.state.batch import RowBatch
from specdec.state.composite import ListRows
from specdec.state.quantized import QuantizedRows
from specdec.state.ragged import RaggedState
from specdec.state.windows import WindowRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import AssistantRows
    from specdec.state.rows import RowState

    LiveRows = Callable[[], tuple[RowState, Sequence[int] | None]]
    Pair = tuple[mx.array, mx.array]

__all__ = ["LendsRows", "kinds_lent", "read_donors"]

_PORT = "assistant_rows"


@runtime_checkable
class LendsRows(Protocol):
    """An ``assistant_rows`` port that can be made one of the rows of a group."""

    def of_group(self, live: LiveRows, /) -> AssistantRows:
        """The port over the rows that ``live`` gives.

        Args:
            live: gives a state and the rows of it that the drafter serves, in its order (``None``
                for all), or raises ``ContractError`` where no rows are to be read now.
        """


@frozen(eq=False)
class _Part:
    """Rows of one batch: its donors, their numbers there, and their places in what is returned."""

    sliding: Any | None
    full: Any | None
    rows: Sequence[int] | None
    places: Sequence[int]


def kinds_lent(state: RowState) -> frozenset[str]:
    """The donors that every row of this state has: ``"sliding"``, ``"full"``, both or neither."""
    return _kinds(_parts(state, range(state.row_count)))


def _kinds(parts: Sequence[_Part]) -> frozenset[str]:
    kinds = ("sliding", "full") if parts else ()
    return frozenset(kind for kind in kinds if all(getattr(p, kind) is not None for p in parts))


def read_donors(state: RowState, rows: Sequence[int] | None = None) -> AssistantDonors:
    """Keys and values to borrow of rows between rounds. Nothing is read back, and no row changes.

    Args:
        state: the rows.
        rows: their numbers, in the order that is wanted; ``None`` for all.

    Returns:
        The donors. A layer that some of the rows lack is missing, as is all of rows that have read
        nothing. With first positions that are kept, the window has as many fewer.

    Raises:
        RoundOpenError: a round is open.
        TargetLacksError: there is no layer that all rows have.
    """
    if state.open_width:
        raise RoundOpenError("read_donors")
    lengths = state.lengths
    wanted = range(state.row_count) if rows is None else rows
    parts = _parts(state, wanted)
    kinds = _kinds(parts)
    if not kinds:
        raise TargetLacksError(_PORT)
    positions = tuple(lengths[row] for row in wanted)
    longest = max(positions)
    sliding = full = None
    if "sliding" in kinds:
        held = min(longest, *(part.sliding.donated for part in parts if part.sliding is not None))
        sliding = _together([(part, part.sliding) for part in parts], held)
    if "full" in kinds:
        full = _together([(part, part.full) for part in parts], longest)
    return AssistantDonors(sliding=sliding, full=full, positions=positions)


def _parts(state: RowState, wanted: Sequence[int]) -> list[_Part]:
    """The batches that hold the rows that are wanted; none of a state without row forms."""
    if not isinstance(state, RaggedState):
        return []
    place = {row: number for number, row in enumerate(wanted)}
    parts = []
    for batch, rows in state.batches:
        own = [number for number, row in enumerate(rows) if row in place]
        if own:
            layers = [_attention(layer) for layer in _as_read_next(batch).caches]
            part = _Part(
                sliding=next((a for a in reversed(layers) if isinstance(a, WindowRows)), None),
                full=next((a for a in reversed(layers) if isinstance(a, _UNBOUNDED)), None),
                rows=None if len(own) == len(rows) else own,
                places=[place[rows[number]] for number in own],
            )
            parts.append(part)
    return parts


_UNBOUNDED = (AttentionRows, QuantizedRows)


def _as_read_next(batch: RowBatch) -> RowBatch:
    """The batch, quantized where the next window will find it so; the live one stays as it is."""
    if not batch.is_due:
        return batch
    quantized = RowBatch.of([(batch, range(batch.row_count))])
    quantized.quantize_if_due()
    return quantized


def _attention(layer: Any) -> Any | None:
    """The attention of a layer: of a list its first, for behind it an indexer may have its own."""
    if isinstance(layer, ListRows):
        return next((a for part in layer.caches if (a := _attention(part)) is not None), None)
    return layer if isinstance(layer, (*_UNBOUNDED, WindowRows)) else None


def _together(layers: Sequence[tuple[_Part, Any]], columns: int) -> Pair | None:
    """One donor of all batches, in the order that is wanted; ``None`` where nothing is held."""
    parts = [(part, layer.donor(columns, part.rows)) for part, layer in layers]
    like = next((pair for _, pair in parts if pair is not None), None)
    if like is None or not columns:
        return None
    order = [place for part, _ in parts for place in part.places]
    keys, values = (
        _stacked([(len(part.places), pair and pair[side]) for part, pair in parts], like[side])
        for side in (0, 1)
    )
    if order == sorted(order):
        return keys, values
    index = mx.array(sorted(range(len(order)), key=order.__getitem__), mx.int32)
    return mx.take(keys, index, axis=0), mx.take(values, index, axis=0)


def _stacked(parts: Sequence[tuple[int, mx.array | None]], like: mx.array) -> mx.array:
    """Rows of several batches, right-padded to the longest."""
    if len(parts) == 1:
        return like
    columns = max(array.shape[2] for _, array in parts if array is not None)
    padded = []
    for count, array in parts:
        if array is None:  # its rows have read nothing
            padded.append(mx.zeros((count, like.shape[1], columns, like.shape[3]), like.dtype))
            continue
        missing = columns - array.shape[2]
        padded.append(mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array)
    return mx.concatenate(padded, axis=0)
