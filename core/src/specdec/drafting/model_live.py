"""The live rows of a draft model: what it has read of each text, and the windows it runs.

A chain of d drafts takes d forwards: the first reads the pending token, each other one the draft
before. The last draft is never read. Where all were accepted it is therefore *unread*: it is part
of the text, and goes in front of the next pending token.

Rows whose text has outgrown the model's context have ended: they hold no caches and take part in
no window, and their neighbours go on.

Shapes: B rows, A of them not ended, L positions, W positions of a window, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import evolve, frozen

from specdec.contract import Swap
from specdec.drafting.model_attachment import ModelRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting.model_attachment import RowShapes
    from specdec.state import RowState
    from specdec.targets import Target

__all__ = ["BEYOND", "LiveModelRows", "ModelSettings"]

BEYOND: Final = 32
"""Positions that a row goes along with its neighbours at most, behind those that it may keep."""

_WHOLE = 2048  # positions that are read at once


@frozen(kw_only=True, eq=False)
class ModelSettings:
    """A draft model, and how its rows are told from others.

    Attributes:
        model: bound as a target.
        namespace: the provider's ``checkpoint_namespace``.
        shapes: of its rows.
        limit: positions that a row has at most, or ``None``. A model with a table of positions
            must have :data:`BEYOND` more.
    """

    model: Target
    namespace: str
    shapes: RowShapes
    limit: int | None


class LiveModelRows:
    """B rows of a draft model.

    Args:
        settings: the model.
        vocab_size: V of the target.

    Attributes:
        rows: B of them, on the host.
    """

    def __init__(self, settings: ModelSettings, vocab_size: int) -> None:
        self._settings = settings
        self._model = settings.model
        self._vocab_size = vocab_size
        self._state: RowState | None = None
        self._ahead = 0  # windows of the open chain
        self.rows: list[ModelRow] = []

    # Membership.

    def prepare_append(self, joining: Sequence[tuple[ModelRow, RowState | None]]) -> Swap:
        """Build these rows behind the live ones, which stay as they are."""
        states = [state for _, state in joining if state is not None]
        state = states.pop(0) if self._state is None and states else self._state
        change = state.prepare_append(states) if state is not None and states else Swap(_nothing)

        def join() -> None:
            change.commit()
            self._state = state
            self.rows = [*self.rows, *(row for row, _ in joining)]

        return Swap(join, change.discard)

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        places = self.places
        self._retain([places[row] for row in keep if row in places])
        self.rows = [self.rows[row] for row in keep]

    def end(self, ending: Sequence[int]) -> None:
        """Let the caches of these rows go: their texts are too long."""
        if ending:
            places = self.places
            self._retain([place for row, place in places.items() if row not in ending])
            for row in ending:
                self.rows[row] = ModelRow(self.rows[row].tokens, ended=True)

    def caches(self, row: int) -> list[object]:
        """Copies of a row's mlx-lm caches, evaluated; none where it holds nothing."""
        if self.rows[row].ended or not self.rows[row].read:
            return []
        return self._live.extract_row(self.places[row])

    @property
    def places(self) -> dict[int, int]:
        """Of each row that has not ended, its place in the state, in order."""
        live = [number for number, row in enumerate(self.rows) if not row.ended]
        return {row: place for place, row in enumerate(live)}

    def _retain(self, keep: list[int]) -> None:
        if self._state is None:
            return
        if keep:
            self._state.filter_rows(keep)
        else:
            self._state = None

    @property
    def _live(self) -> RowState:
        assert self._state is not None, "there are no rows"
        return self._state

    def arrays(self) -> list[mx.array]:
        """Every buffer, to be evaluated."""
        return [] if self._state is None else self._state.arrays()

    @property
    def longest_chain(self) -> int:
        """Windows that a chain may have at most now."""
        most = None if self._state is None else self._state.longest_chain
        return BEYOND - 1 if most is None else min(most, BEYOND - 1)

    def left(self, row: int) -> int | None:
        """Tokens that a row may still read, or ``None`` for any number."""
        held, limit = self.rows[row], self._settings.limit
        if held.ended:
            return 0
        return None if limit is None else max(limit - held.tokens, 0)

    # Reading.

    def read_chunk(self, tokens: mx.array) -> None:
        """Read ids ``[A, L]`` of a prompt, all of them in every row; evaluated.

        A history that is read again comes in one piece, however long it is.
        """
        self._catch_up()
        state = self._live
        for begin in range(0, tokens.shape[1], _WHOLE):
            ids = tokens[:, begin : begin + _WHOLE]
            state.begin_round(ids.shape[1], reading=len(self.places) == 1)  # a chunk is of one row
            self._model.forward(self._known(ids), state)
            state.commit_round()
            mx.eval(state.arrays())
        for row in self.places:
            self.rows[row] = ModelRow(self.rows[row].tokens + tokens.shape[1])

    def _catch_up(self) -> None:
        """Read what is unread alone."""
        unread = [self.rows[row].unread for row in self.places]
        if any(token is not None for token in unread):
            state = self._live
            state.begin_round(1)
            ids = mx.array([[token or 0] for token in unread], mx.int32)
            self._model.forward(self._known(ids), state)
            state.rollback([int(token is not None) for token in unread])
            for row in self.places:
                self.rows[row] = evolve(self.rows[row], unread=None)

    def follow(self, tokens: mx.array, counts: Sequence[int]) -> None:
        """Read ids that somebody else chose, behind what is unread.

        Args:
            tokens: ``[A, L]``.
            counts: A ints, tokens of each row; nothing is read in a row that has none.
        """
        rows, state = list(self.places), self._live
        wanted = [
            count and count + (self.rows[row].unread is not None)
            for row, count in zip(rows, counts, strict=True)
        ]
        most, begin = max(wanted), 0
        ids = self._behind_unread(tokens, most)
        held, limit = max(self.rows[row].read for row in rows), self._settings.limit
        while begin < most:
            # Padding must not leave a table of positions either.
            room = _WHOLE if limit is None else max(limit - held - begin, BEYOND)
            width = min(most - begin, room, _WHOLE)
            state.begin_round(width)
            self._model.forward(ids[:, begin : begin + width], state)
            state.rollback([min(max(count - begin, 0), width) for count in wanted])
            begin += width
            if begin < most:
                mx.eval(state.arrays())
        for row, count in zip(rows, counts, strict=True):
            if count:
                self.rows[row] = ModelRow(self.rows[row].tokens + count)
        self.submit()

    def submit(self) -> None:
        """Compute what was read while the host goes on: no graph may grow from round to round."""
        mx.async_eval(*self.arrays())  # type: ignore[no-untyped-call]  # untyped in MLX

    # A round.

    def first(self, pending: Sequence[int], *, keep: bool = True) -> mx.array:
        """Read what is unread, and the pending tokens.

        Args:
            pending: A ids.
            keep: whether the rows remember it.

        Returns:
            Logits ``[A, V]`` behind the pending tokens.
        """
        state, rows = self._live, list(self.places)
        needed = [1 + (self.rows[row].unread is not None) for row in rows]
        width = state.window_width(max(needed), 2)
        ids = self._behind_unread(mx.array([[token] for token in pending], mx.int32), width)
        state.begin_round(width)
        logits = self._model.forward(ids, state).logits
        state.rollback(needed if keep else [0] * len(rows))
        self._ahead = 0
        if len(set(needed)) == 1:
            return self._fitted(logits[:, needed[0] - 1])
        last = mx.array([count - 1 for count in needed], mx.int32)[:, None, None]
        return self._fitted(mx.take_along_axis(logits, last, axis=1)[:, 0])

    def ahead(self, ids: mx.array) -> mx.array:
        """Read one drafted token in each row: ids ``[A]`` on the device, logits ``[A, V]``."""
        state = self._live
        if not self._ahead:
            state.begin_chain()
        state.begin_round(1)
        logits = self._model.forward(self._known(ids[:, None]), state).logits
        state.commit_round()
        self._ahead += 1
        return self._fitted(logits[:, 0])

    def settle(self, drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """Keep of the chain what was accepted.

        Args:
            drafts: what each of B rows proposed.
            accepted: B ints.
        """
        rows, read = list(self.places), self._ahead
        if read:
            self._live.take_back([read - min(accepted[row], read) for row in rows])
        self._ahead = 0
        for row, held in enumerate(self.rows):
            count = accepted[row]
            unread = drafts[row][count - 1] if count > read and not held.ended else None
            self.rows[row] = ModelRow(held.tokens + 1 + count, unread, held.ended)

    def _behind_unread(self, tokens: mx.array, width: int) -> mx.array:
        """Ids ``[A, W]``: each row's unread token, if any, and then its own; padded or cut."""
        unread = [self.rows[row].unread for row in self.places]
        length = tokens.shape[1]
        if all(token is None for token in unread) and width <= length:
            return self._known(tokens[:, :width])
        shift = mx.array([[int(token is not None)] for token in unread], mx.int32)
        index = mx.arange(width, dtype=mx.int32)[None] - shift
        inside = mx.minimum(mx.maximum(index, 0), length - 1)
        own = mx.take_along_axis(tokens, inside, axis=1)
        first = mx.array([[token or 0] for token in unread], tokens.dtype)
        return self._known(mx.where(index < 0, first, own))

    def _known(self, ids: mx.array) -> mx.array:
        """Ids that the model has; another one costs acceptance, whichever is read for it."""
        if self._model.vocab_size >= self._vocab_size:
            return ids
        return mx.where(ids < self._model.vocab_size, ids, mx.zeros_like(ids))

    def _fitted(self, logits: mx.array) -> mx.array:
        """Logits over the target's ids: cut, or without a chance for what the model lacks."""
        own, wanted = logits.shape[-1], self._vocab_size
        if own >= wanted:
            return logits[..., :wanted]
        lacking = mx.full((*logits.shape[:-1], wanted - own), -mx.inf, logits.dtype)
        return mx.concatenate([logits, lacking], axis=-1)


def _nothing() -> None:
    """No state changes."""
