"""One round of every group, its tokens turned into answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import frozen

from specdec.batch.counters import RowSums
from specdec.batch.responses import BatchResponse
from specdec.errors import GroupFailedError

if TYPE_CHECKING:
    from specdec.batch.book import Book
    from specdec.verify import Round, VerifyGroup

__all__ = ["Rounds"]


@frozen(eq=False)
class Rounds:
    """Runs the groups of a book.

    Attributes:
        book: the requests.
    """

    book: Book

    def run(self) -> None:
        """One round of each group that has rows."""
        counters, begun, worked = self.book.counters, time.perf_counter(), False
        try:
            for group in self.book.groups:
                if group.rows:
                    worked = True
                    self._round(group)
        finally:
            if worked:
                counters.decode_time += time.perf_counter() - begun

    def _round(self, group: VerifyGroup) -> None:
        """One round of one group; if it fails, its requests wait again."""
        book, rows = self.book, list(group.rows)
        before, failure = RowSums.of(rows), None
        try:
            with group.round(ahead=True) as verified:
                try:
                    self._answer_all(verified)
                except BaseException:
                    # What is not handed out would end its row: an interrupt waits for that.
                    self._answer_all(verified)
                    raise
        except GroupFailedError as error:
            failure = error
        finally:
            book.counters.generation_steps += failure is None
            book.counters.count_rows(before, RowSums.of(rows))
            for row in rows:
                if row.finish is not None and book.has(row):
                    book.end(book.of_row(row))
        if failure is not None:
            book.recover(group, failure)

    def _answer_all(self, verified: Round) -> None:
        for index in range(len(verified.rows)):
            self._answer(verified, index)

    def _answer(self, verified: Round, index: int) -> None:
        book = self.book
        entry = book.of_row(verified.rows[index])
        for emission in verified.deliver(index):
            book.answers.append(BatchResponse.of(entry, emission))
            book.counters.generation_tokens += 1
            entry.failures = 0
            entry.answered |= emission.finish is not None
