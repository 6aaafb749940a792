"""Prompts are read between rounds, in chunks, so that rows that decode never wait for long.

One call reads at most ``step_size`` prompt tokens, whatever the number of prompts. The prompt that
has waited longest for a chunk comes first, so a short prompt waits for one chunk of each longer
one, and not for all of it. Requests begin in the order in which they came: where the next one does
not fit, those behind it wait as well, so that nobody is overtaken for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.errors import GroupFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.batch.book import Book
    from specdec.batch.entry import Entry
    from specdec.verify import VerifyGroup

__all__ = ["Prompts"]


@frozen(eq=False)
class Prompts:
    """Reads the prompts of a book's requests and lets their rows join.

    Attributes:
        book: the requests.
        step_size: prompt tokens per call at most.
        most_readings: prompts that are read at the same time at most.
        most_rows: rows that read or decode at most.
    """

    book: Book
    step_size: int
    most_readings: int
    most_rows: int

    def run(self) -> None:
        """Begin prompts, read some chunks, and let the rows of finished prompts join."""
        begun = time.perf_counter()
        self._begin_all()
        if not self.book.reading:
            return
        try:
            self._read_chunks()
            self._join_done()
        finally:
            self.book.counters.prompt_time += time.perf_counter() - begun

    # Beginning.

    def _begin_all(self) -> None:
        book = self.book
        while book.waiting:
            entry, active = book.waiting[0], book.active
            if len(book.reading) >= self.most_readings or len(active) >= self.most_rows:
                return
            if not book.memory.fits(entry, active):
                return
            book.waiting.popleft()
            self._begin(entry)

    def _begin(self, entry: Entry) -> None:
        book = self.book
        try:
            group = book.groups.of(entry)
            entry.reading = group.read(entry.row, cuts=entry.segments)
        except GroupFailedError as error:  # an interrupt has left it invalid, and nobody knew yet
            book.put_back([entry], None)
            book.recover(group, error)
        except Exception as error:
            self._failed(entry, error)
        except BaseException:
            book.put_back([entry], None)
            raise
        else:
            entry.group = group
            book.reading.append(entry)

    # Reading.

    def _read_chunks(self) -> None:
        budget, read = self.step_size, True
        while read:
            read = False
            for entry in list(self.book.reading):
                if entry.reading is None or entry.reading.done:
                    continue
                # The one that has waited longest always fits into a whole budget.
                if entry.reading.next_chunk <= budget:
                    budget -= self._step(entry)
                    read = True

    def _step(self, entry: Entry) -> int:
        """Read one chunk; a failure is the request's own."""
        book, reading = self.book, entry.reading
        assert reading is not None
        before, most = entry.read, reading.next_chunk
        try:
            with mx.stream(book.stream):
                tokens = reading.step()
        except Exception as error:
            self._failed(entry, error)
            return most
        except BaseException:
            book.put_back([entry], None)
            raise
        book.counters.prompt_tokens += tokens
        book.reading.remove(entry)
        book.reading.append(entry)
        if not reading.done:
            ends = [end for end in entry.segments if before < end <= entry.read]
            book.tell(entry, entry.read, end_of_segment=bool(ends), joined=False)
        return tokens

    def _failed(self, entry: Entry, error: Exception) -> None:
        entry.read_failures += 1
        self.book.put_back([entry], error)

    # Joining.

    def _join_done(self) -> None:
        done = [e for e in self.book.reading if e.reading is not None and e.reading.done]
        for group in list(self.book.groups):
            entries = [entry for entry in done if entry.group is group]
            if entries:
                entries.sort(key=lambda entry: entry.uid)
                self._join(group, entries)

    def _join(self, group: VerifyGroup, entries: Sequence[Entry]) -> None:
        """Let rows join; where they cannot together, each by itself."""
        book = self.book
        readings = [entry.reading for entry in entries if entry.reading is not None]
        try:
            group.join(readings)
        except GroupFailedError as error:
            for entry in entries:
                entry.reading = None  # joined, or the cause: they count as members
            book.recover(group, error)
        except Exception as error:
            if len(entries) == 1:
                self._failed(entries[0], error)
                return
            for entry in entries:
                if entry.group is group:
                    self._join(group, [entry])
        else:
            for entry in entries:
                entry.reading, entry.read_failures = None, 0
                book.reading.remove(entry)
                total = len(entry.row.request.prompt)
                book.tell(entry, total, end_of_segment=True, joined=True)
