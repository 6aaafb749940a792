"""One round's outcome: accepted but neither delivered nor committed yet.

A round is a value. It is delivered to the rows' consumers first, token by token, and only what was
delivered is then committed to target and drafter, when the ``with`` block is left on any way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from attrs import frozen

from specdec.verify.emission import Emission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import mlx.core as mx

    from specdec.verify.accept import Acceptance
    from specdec.verify.emission import FinishReason
    from specdec.verify.logprobs import HostLogprobs
    from specdec.verify.row import Row

__all__ = ["Round", "RowOutcome"]


@frozen(eq=False)
class RowOutcome:
    """What one row takes from a round.

    Attributes:
        acceptance: the walk's result.
        drafted: ids that were verified for it, those included that its constraint forced.
        forced: how many of them were forced; the first ones.
        logprobs: ``[B, W, V]`` of the window it came from.
        index: its place in ``logprobs``.
        reports: log-probabilities to report, or ``None``.
        error: what the request's own code raised after these tokens; the row ends with it.
    """

    acceptance: Acceptance
    drafted: int
    forced: int
    logprobs: mx.array
    index: int
    reports: HostLogprobs | None = None
    error: Exception | None = None

    @property
    def ends(self) -> bool:
        """Whether the row ends with these tokens."""
        return self.acceptance.ending is not None or self.error is not None

    @property
    def kept(self) -> int:
        """Drafts that the row keeps if all is delivered; an end token that was drafted counts."""
        whole = self.acceptance
        return self.kept_of(len(whole.tokens), ended=whole.end_token is not None)

    def kept_of(self, delivered: int, *, ended: bool) -> int:
        """Drafts that the row keeps of those that it delivered.

        Args:
            delivered: content tokens.
            ended: whether the end token was delivered too.
        """
        accepted = self.acceptance.accepted
        return accepted if ended else min(accepted, delivered)

    def emission(
        self, row: Row, token: int, position: int, finish: FinishReason | None, *, content: bool
    ) -> Emission:
        """One token of the row, drawn at a position of its window and counted as emitted."""
        text, ends, asked = "", row.ends, row.request.logprobs
        if ends is not None:
            text = ends.text_of(row.steps - 1) if content else ""
            if finish is not None:
                text += ends.flush(row.steps)
        reported = None
        if self.reports is not None and asked is not None:
            reported = self.reports.at(self.index, position, asked)
        return Emission(
            token,
            position < self.acceptance.accepted,
            content,
            finish,
            text,
            reported,
            self.logprobs,
            self.index,
            position,
        )


class Round:
    """Deliver every row's tokens inside the ``with`` block; leaving it commits them.

    A row that is not delivered to its end, because the block was left by an exception or its
    consumer stopped, ends there, and its state covers exactly what was delivered.

    Args:
        rows: the group's rows, in order.
        outcomes: one per row; ``None`` for a row that this round gives nothing.
        settle: commits what was delivered; called once, when the block is left.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        outcomes: Sequence[RowOutcome | None],
        settle: Callable[[Round], None],
    ) -> None:
        self.rows = tuple(rows)
        self.outcomes = tuple(outcomes)
        self.delivered = [0] * len(rows)
        self._settle = settle

    def deliver(self, index: int) -> Iterator[Emission]:
        """Hand out one row's tokens in order; each counts as delivered once it is handed out.

        Asked again, it goes on behind what was handed out.

        Args:
            index: the row's place in ``rows``.

        Yields:
            Its emissions. An end token comes last, with ``content`` false.
        """
        row, outcome = self.rows[index], self.outcomes[index]
        if outcome is None or row.finish is not None:
            return
        acceptance = outcome.acceptance
        end_token, cancelled = acceptance.end_token, row.request.cancelled
        last = len(acceptance.tokens) - 1
        while (position := self.delivered[index]) <= last:
            if cancelled is not None and cancelled():
                row.end("cancelled")
                return
            token = acceptance.tokens[position]
            if row.stats.time_to_first_token is None:
                row.stats.time_to_first_token = time.perf_counter() - row.admitted
            row.emit(token)
            self.delivered[index] = position + 1
            finish = acceptance.ending if position == last and end_token is None else None
            if finish is not None:
                row.end(finish)
            yield outcome.emission(row, token, position, finish, content=True)
            if row.finish is not None:
                return
        if end_token is not None:
            if cancelled is not None and cancelled():
                row.end("cancelled")
                return
            row.end_token = end_token
            row.end("stop")
            yield outcome.emission(row, end_token, last + 1, "stop", content=False)
        elif outcome.error is not None:
            row.end("error", outcome.error)

    def deliver_all(self) -> None:
        """Hand every row's tokens to its request's consumer.

        A consumer that returns ``False`` stops its row; one that raises ends its row alone.
        """
        for index, row in enumerate(self.rows):
            consumer = row.request.consumer
            try:
                for emission in self.deliver(index):
                    if consumer is not None and consumer(emission) is False:
                        row.end("cancelled")
                        break
            except Exception as error:
                row.finish, row.error = "error", error

    def kept(self, index: int) -> int:
        """Drafts that the row keeps: those it delivered, and an end token that was drafted."""
        outcome = self.outcomes[index]
        if outcome is None:
            return 0
        ended = self.rows[index].end_token is not None
        return outcome.kept_of(self.delivered[index], ended=ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for index, (row, outcome) in enumerate(zip(self.rows, self.outcomes, strict=True)):
            if outcome is None:
                continue
            # What was not handed out cannot be taken back into the window: the row ends here.
            if self.delivered[index] < len(outcome.acceptance.tokens) or outcome.ends:
                row.end("cancelled")
        self._settle(self)
