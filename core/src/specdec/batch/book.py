"""Which request is where: waiting, reading its prompt, or decoding; and what is to be answered.

Answers are kept here until ``next`` returns them, so an interrupt between a round and its answers
loses none. A request leaves only through ``end`` or ``drop``; whatever fails before, it goes back
to those that wait, in front, with every token that it has emitted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from specdec.batch.counters import Counters
from specdec.batch.responses import BatchResponse, PromptResponse
from specdec.errors import GroupFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specdec.batch.entry import Entry
    from specdec.batch.groups import Groups
    from specdec.batch.memory import MemoryPlan
    from specdec.verify import FinishReason, Row, VerifyGroup

__all__ = ["Book"]


@define(eq=False)
class Book:
    """The requests of one generator.

    Attributes:
        groups: where they decode.
        memory: what fits.
        stream: where they compute.
        entries: all that have not ended, by number.
        waiting: those that wait, in the order in which they are served.
        reading: those that read, the one that has waited longest for a chunk first.
        answers: generation responses that ``next`` has not returned yet.
        progress: prompt responses, likewise.
        counters: everything so far.
    """

    groups: Groups
    memory: MemoryPlan
    stream: Any
    entries: dict[int, Entry] = field(factory=dict)
    waiting: deque[Entry] = field(factory=deque)
    reading: list[Entry] = field(factory=list)
    answers: list[BatchResponse] = field(factory=list)
    progress: list[PromptResponse] = field(factory=list)
    counters: Counters = field(factory=Counters)
    _of_row: dict[Row, Entry] = field(factory=dict)

    def add(self, entries: Iterable[Entry]) -> None:
        """Take new requests; they wait behind the others."""
        for entry in entries:
            self.entries[entry.uid] = entry
            self._of_row[entry.row] = entry
            self.waiting.append(entry)

    def has(self, row: Row) -> bool:
        """Whether a row's request has not been let go."""
        return row in self._of_row

    def of_row(self, row: Row) -> Entry:
        """The request of a row."""
        return self._of_row[row]

    @property
    def active(self) -> list[Entry]:
        """Requests that read or decode."""
        return [entry for entry in self.entries.values() if entry.group is not None]

    @property
    def decodes(self) -> bool:
        """Whether any row decodes."""
        return any(entry.decodes for entry in self.entries.values())

    def tell(self, entry: Entry, read: int, *, end_of_segment: bool, joined: bool) -> None:
        """Answer how far a prompt is read; of a row that has emitted before, nobody asks again."""
        total = len(entry.row.request.prompt)
        if entry.row.steps == 0:
            self.progress.append(PromptResponse(entry.uid, (read, total), end_of_segment, joined))

    # Ends.

    def end(
        self, entry: Entry, finish: FinishReason | None = None, error: Exception | None = None
    ) -> None:
        """Let a request go that has ended, or ends now; its last answer is made if it is not."""
        if finish is not None:
            entry.row.end(finish, error)
        self._forget(entry)
        entry.wait()  # its answers may be kept for long, and are to keep no group
        if not entry.answered:
            entry.answered = True
            self.answers.append(BatchResponse.end(entry))

    def drop(self, entries: Sequence[Entry]) -> None:
        """Let requests go, wherever they are, without an answer and without their caches."""
        for entry in entries:
            self._forget(entry)
            if entry.decodes:
                entry.row.request = evolve(entry.row.request, publish=None)
        for group in list(self.groups):
            rows = [entry.row for entry in entries if entry.decodes and entry.group is group]
            if rows:
                try:
                    group.remove(rows)
                except GroupFailedError as error:
                    self.recover(group, error)
        for entry in entries:
            entry.wait()

    def _forget(self, entry: Entry) -> None:
        self.entries.pop(entry.uid, None)
        self._of_row.pop(entry.row, None)
        self.reading = [each for each in self.reading if each is not entry]
        if entry in self.waiting:
            self.waiting.remove(entry)

    # Failures.

    def put_back(self, entries: Sequence[Entry], error: Exception | None) -> None:
        """Let requests wait again, in front and in this order, or end those that failed too often.

        Args:
            entries: leave their groups; what was read for them is read again.
            error: why.
        """
        self.reading = [each for each in self.reading if each not in entries]
        again = []
        for entry in entries:
            entry.wait()
            if entry.gives_up and error is not None:
                self.end(entry, "error", error)
            else:
                again.append(entry)
        self.waiting.extendleft(reversed(again))

    def recover(self, group: VerifyGroup, error: GroupFailedError) -> None:
        """Let the requests of a group that failed be read into another one.

        A row that decoded there may be the cause. If its group fails again before it has emitted
        another token, it gets a group of its own; if that fails too, it ends with the error.

        Args:
            group: it is invalid, its rows' tokens are not.
            error: how it failed.
        """
        self.groups.forget(group)
        members = [entry for entry in self.entries.values() if entry.group is group]
        for entry in members:
            entry.failures += entry.decodes
        cause = error.__cause__
        self.put_back(members, cause if isinstance(cause, Exception) else error)
