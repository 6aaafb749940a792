"""The state of B rows of different length, rolled back one by one.

Usually all rows are one batch: they share buffers and go through the model in one call. Rows that
cannot (see :class:`Together` and the keys of :class:`~specdec.state.RowBatch`) are in batches of
their own, and move when that changes. Whoever uses the state sees rows alone.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import Swap, check_keep
from specdec.errors import NoOpenRoundError, RollbackError, RoundOpenError, RowIndexError
from specdec.state.batch import RowBatch, put_into
from specdec.state.cache_rows import shortest
from specdec.state.chains import Chain
from specdec.state.forms import types_without_row_form
from specdec.state.native import NativeState

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from specdec.contract import PendingChange
    from specdec.state.batch import KvQuantization
    from specdec.state.rows import RowState

__all__ = ["RaggedState", "Together", "row_state"]

_Place = tuple[RowBatch, int]
"""A row: the batch it is in, and its number there."""


class Together(Enum):
    """Which rows a model's code can take in one call."""

    ANY = "rows of any length"
    EQUAL = "rows of equal length"
    ALONE = "one row"


class RaggedState:
    """Rows of one target.

    Verbs come in this order: ``begin_round(width)``, one forward of that width over the caches of
    every batch, ``commit_round()`` or ``rollback(kept)``.

    Args:
        caches: one row's mlx-lm caches, all of a type that has a row form. Their arrays are
            taken over without a copy; do not use them until ``write_back``.
        together: which rows the model can take in one call.
        quantization: when the row's attention K/V is quantized, if it is to be.
        exact_keys: whether the model must never be given more keys than there are positions.
    """

    can_roll_back = True
    reason: str | None = None

    def __init__(
        self,
        caches: Sequence[Any],
        *,
        together: Together = Together.ANY,
        quantization: KvQuantization | None = None,
        exact_keys: bool = False,
    ) -> None:
        self._together = together
        self._width = 0
        # Per row, whether its last window was of one position, which it kept.
        self._single = [False]
        self._chain: Chain | None = None
        batch = RowBatch(caches, quantization, exact_keys=exact_keys)
        self._places: list[_Place] = [(batch, 0)]
        self._batches: list[tuple[RowBatch, list[int]]] = [(batch, [0])]

    @property
    def batches(self) -> Sequence[tuple[RowBatch, Sequence[int]]]:
        """What goes through the model in one call, each with the numbers of its rows."""
        return self._batches

    @property
    def row_caches(self) -> Sequence[tuple[list[Any], Sequence[int]]]:
        """Caches to run the model with, each list with the numbers of its rows."""
        return [(batch.caches, rows) for batch, rows in self._batches]

    @property
    def records(self) -> bool:
        """Whether a forward of the open window is to be recorded (``targets/recurrent``)."""
        return any(batch.records for batch, _ in self._batches)

    @property
    def recurrent(self) -> bool:
        """Whether positions of a window are dropped by computing what is left of it again."""
        return any(batch.recurrent for batch, _ in self._batches)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row."""
        if len(self._batches) == 1:
            return self._batches[0][0].positions.lengths
        return tuple(batch.positions.lengths[row] for batch, row in self._places)

    @property
    def open_width(self) -> int:
        """Positions of the open window; 0 between rounds."""
        return self._width

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Every buffer, to be evaluated after a prefill chunk."""
        return [array for batch, _ in self._batches for array in batch.arrays()]

    def bytes_at(self, positions: int) -> int:
        """Bytes of one row at so many positions at most; known once something was appended."""
        if not self._batches:
            return 0
        return sum(layer.bytes_at(positions) for layer in self._batches[0][0].caches)

    def window_width(self, needed: int, most: int) -> int:
        """The width to give a window that needs ``needed`` of at most ``most`` positions."""
        return max((b.positions.window_width(needed, most) for b, _ in self._batches), default=1)

    def room(self, row: int) -> int | None:
        """Positions that a window on this row can keep at most, if there is a limit."""
        batch, own = self._places[row]
        return batch.room(own)

    # Rounds.

    def begin_round(self, width: int, *, reading: bool = False) -> None:
        """Open a window of ``width`` positions on every row. O(1).

        Args:
            width: W.
            reading: whether it is a prompt's chunk, which is kept whole.

        Raises:
            RoundOpenError: a round is open.
            RollbackError: no positions at all.
        """
        if self._width:
            raise RoundOpenError("begin_round")
        if width < 1:
            raise RollbackError(f"a round of {width} positions was begun; give 1 or more")
        if self._chain is not None and (width > 1 or self._chain.is_full):
            self._end_chain()
        self._quantize_due()
        for batch, _ in self._batches:
            batch.begin(width, reading=reading)
        self._width = width

    def commit_round(self) -> None:
        """Keep the whole window in every row.

        Raises:
            NoOpenRoundError: no round is open.
        """
        if not self._width:
            raise NoOpenRoundError("commit_round")
        for batch, _ in self._batches:
            batch.finish(None)
        self._close([self._width] * self.row_count)

    def rollback(self, kept: Sequence[int]) -> None:
        """Keep the first ``kept[b]`` positions of the window in row b. O(1) in the context.

        Raises:
            NoOpenRoundError: no round is open.
            RollbackError: a count outside ``0 .. width``, or a row that cannot keep exactly that.
        """
        if not self._width:
            raise NoOpenRoundError("rollback")
        if len(kept) != self.row_count:
            raise RollbackError(
                f"{self.row_count} rows cannot keep {list(kept)}; give one count per row"
            )
        shares = [[kept[row] for row in rows] for _, rows in self._batches]
        for (batch, _), share in zip(self._batches, shares, strict=True):
            batch.check(share)
        for (batch, _), share in zip(self._batches, shares, strict=True):
            batch.finish(share)
        self._close(kept)

    def _close(self, kept: Sequence[int]) -> None:
        """The window was closed in every batch."""
        width, self._width = self._width, 0
        self._single = [width == count == 1 for count in kept]
        if self._chain is not None:
            self._chain.add(kept)
        self._regroup(apart=width > 1)

    # Chains of windows that are taken back, row by row.

    @property
    def longest_chain(self) -> int | None:
        """Windows that a chain has at most; ``None`` for no limit."""
        return shortest(batch.longest_chain for batch, _ in self._batches)

    def begin_chain(self) -> None:
        """From here on windows of one position can all be taken back, between rounds.

        A chain ends with ``take_back``, with a wider window, with one window more than
        ``longest_chain``, and with any change of the rows; a second one begins anew. Until then
        recurrent layers keep what they were before each of its windows, by reference, and nothing
        is dropped that a row may come to see again.

        Raises:
            RoundOpenError: a round is open.
        """
        self._between_rounds("begin_chain")
        for batch, _ in self._batches:
            batch.begin_chain()
        self._chain = Chain([0] * self.row_count, self.longest_chain)

    def take_back(self, counts: Sequence[int]) -> None:
        """Let row b be what it was before its last ``counts[b]`` positions.

        In a chain (``begin_chain``): what a row kept since it began. Else attention keys go back
        any number; for other caches the last window must have been of one position, and nothing
        may have been begun since.

        Raises:
            RoundOpenError: a round is open.
            RollbackError: a row cannot; nothing changed.
        """
        self._between_rounds("take_back")
        most = [self._retractable(row) for row in range(self.row_count)]
        if len(counts) != len(most) or any(
            not 0 <= count <= limit for count, limit in zip(counts, most, strict=True)
        ):
            raise RollbackError(
                f"rows cannot take back {list(counts)} positions; give one count per row, of at "
                f"most {most}"
            )
        chain = self._chain
        older = {} if chain is None else chain.unquantized(counts)
        for batch, rows in self._batches:
            batch.take_back([0 if row in older else counts[row] for row in rows])
        self._single = [False] * self.row_count
        for row, place in older.items():
            self._places[row] = place
        self._end_chain()
        if older:
            self._swap(_grouped(self._places, self._together))
        self._regroup(apart=chain is not None)

    def _retractable(self, row: int) -> int:
        """Positions that a row can take back at most."""
        if self._chain is not None:
            return self._chain.kept[row]
        batch, own = self._places[row]
        return batch.positions.lengths[own] if batch.rewinds else int(self._single[row])

    def _end_chain(self) -> None:
        """What the rows were before the last window is forgotten."""
        if self._chain is not None:
            self._chain = None
            for batch in {id(batch): batch for batch, _ in self._places}.values():
                batch.end_chain()

    # Membership.

    def prepare_append(self, rows: Sequence[RaggedState]) -> PendingChange:
        """Build this state's rows followed by those of ``rows``; the live rows stay as they are.

        Args:
            rows: states to take rows from, in order; they are not used afterwards.

        Raises:
            RoundOpenError: a round is open here or in one of ``rows``.
        """
        for state in (self, *rows):
            state._between_rounds("prepare_append")
        built = _grouped([place for s in (self, *rows) for place in s._places], self._together)
        single = [each for state in (self, *rows) for each in state._single]
        chain = next((s._chain for s in (self, *rows) if s._chain is not None), None)

        def join() -> None:
            self._swap(built)
            self._single, self._chain = single, chain
            self._end_chain()

        return Swap(join)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows: ``keep`` lists old indices.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
            RoundOpenError: a round is open.
        """
        self._between_rounds("filter_rows")
        check_keep(keep, self.row_count)
        if list(keep) != list(range(self.row_count)):
            self._swap(_grouped([self._places[k] for k in keep], self._together))
            self._single = [self._single[k] for k in keep]
            self._end_chain()

    def extract_row(self, row: int) -> list[Any]:
        """One row as mlx-lm caches that share nothing with this state.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: a round is open.
        """
        self._between_rounds("extract_row")
        if not 0 <= row < self.row_count:
            raise RowIndexError("extract_row", row, self.row_count)
        batch, own = self._places[row]
        if batch.is_due:  # the live row may have to take its last position back
            batch, own = RowBatch.of([(batch, [own])]), 0
            batch.quantize_if_due()
        caches = batch.extract(own)
        mx.eval([cache.state for cache in caches])
        return caches

    def write_back(self, row: int, caches: Sequence[Any]) -> None:
        """Put one row into mlx-lm caches that the caller owns.

        The only row of a state hands its buffers over without a copy and is spent afterwards. A
        cache that has become one of another type, such as a quantized one, is replaced in the
        caller's list, as mlx-lm does.

        Raises:
            RowIndexError: no such row.
            RoundOpenError: a round is open.
            RollbackError: a cache of another type, and no list to replace it in.
        """
        self._between_rounds("write_back")
        if not 0 <= row < self.row_count:
            raise RowIndexError("write_back", row, self.row_count)
        alone = self.row_count == 1
        if alone:  # it is spent afterwards
            self._quantize_due()
        batch, own = self._places[row]
        put_into(batch.extract(own, share=True) if alone else self.extract_row(row), caches)

    # How rows are spread over batches.

    def _regroup(self, *, apart: bool) -> None:
        """Spread the rows anew where their keys have come to differ, or to agree.

        Lengths that agree by chance after a wider window part again in the next round, and each
        move copies what the rows hold; rows that decode plainly stay as they are together. Chains
        are as wider windows are.

        Args:
            apart: whether the window was wider, or the end of a chain.
        """
        apart = self._together is Together.EQUAL and (apart or self._chain is not None)
        may_join = len(self._batches) > 1 and not apart
        if len(self._places) > 1 and (may_join or self._split()):
            self._swap(_grouped(self._places, self._together, apart=apart))

    def _quantize_due(self) -> None:
        """Quantize rows that are long enough now, before anybody looks at them."""
        if not any(batch.is_due for batch, _ in self._batches):
            return
        if self._chain is not None:
            chain = self._chain
            self._swap([(chain.quantizes(b, r) if b.is_due else b, r) for b, r in self._batches])
        for batch, _ in self._batches:
            batch.quantize_if_due()
        if len(self._batches) > 1:
            self._swap(_grouped(self._places, self._together))

    def _split(self) -> bool:
        equal = self._together is Together.EQUAL
        return any(
            batch.split or (equal and not batch.positions.uniform) for batch, _ in self._batches
        )

    def _swap(self, batches: list[tuple[RowBatch, list[int]]]) -> None:
        places: dict[int, _Place] = {}
        for batch, rows in batches:
            places |= {row: (batch, own) for own, row in enumerate(rows)}
        self._batches = batches
        self._places = [places[row] for row in range(len(places))]

    def _between_rounds(self, verb: str) -> None:
        if self._width:
            raise RoundOpenError(verb)


def row_state(
    caches: Sequence[Any],
    *,
    together: Together = Together.ANY,
    quantization: KvQuantization | None = None,
    exact_keys: bool = False,
) -> RowState:
    """The state of one row that lives in ``caches``.

    Args:
        caches: one row's mlx-lm caches, one per layer.
        together: which rows the model can take in one call.
        quantization: when the row's attention K/V is quantized, if it is to be.
        exact_keys: whether the model must never be given more keys than there are positions.

    Returns:
        Ragged rows if every type has a row form, else native ones that carry the reason.
    """
    missing = types_without_row_form(caches)
    if missing:
        return NativeState(caches, f"no row form for cache type {', '.join(missing)}")
    return RaggedState(caches, together=together, quantization=quantization, exact_keys=exact_keys)


def _key(batch: RowBatch, row: int, together: Together) -> Hashable:
    if together is Together.ANY:
        return batch.key(row)
    if together is Together.EQUAL:
        return batch.positions.lengths[row], batch.key(row)
    return id(batch), row


def _grouped(
    places: Sequence[_Place], together: Together, *, apart: bool = False
) -> list[tuple[RowBatch, list[int]]]:
    """Batches of the rows at these places, in this order; those that stay whole are the same.

    Args:
        places: the rows.
        together: which rows the model takes in one call.
        apart: whether rows of different batches stay so.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, (batch, own) in enumerate(places):
        key = (_key(batch, own, together), id(batch) if apart else None)
        groups.setdefault(key, []).append(row)
    built = []
    for rows in groups.values():
        parts = list(_runs([places[row] for row in rows]))
        batch, own_rows = parts[0]
        if len(parts) > 1 or own_rows != list(range(batch.row_count)):
            batch = RowBatch.of(parts)
        built.append((batch, rows))
    return built


def _runs(places: Sequence[_Place]) -> Iterator[tuple[RowBatch, list[int]]]:
    """Rows that follow each other in one batch, together."""
    run: list[int] = []
    for place, (batch, own) in enumerate(places):
        run.append(own)
        if place + 1 == len(places) or places[place + 1][0] is not batch:
            yield batch, run
            run = []
