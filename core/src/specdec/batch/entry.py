"""One request inside a batch generator, from ``insert`` to its last response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from specdec.batch.leftovers import Leftover
    from specdec.verify import Row, VerifyGroup
    from specdec.verify.prefill import Reading

__all__ = ["MAX_FAILURES", "Entry"]

MAX_FAILURES = 3
"""Times a row's group may fail without a token in between before the row ends with the error."""

_ALONE_AFTER = 2
_MAX_READ_FAILURES = 2


@define(eq=False)
class Entry:
    """A request that waits (no group), reads its prompt (a reading), or decodes.

    Attributes:
        uid: its number.
        row: the host's side; made when the request was checked.
        leftover: its caches, once it has ended.
        apart: why its row decodes one position at a time, if it does.
        positions: target positions that it has at the end, history included; of a request without
            a limit those of its prompt.
        window: the most positions of one of its windows.
        segments: numbers of prompt tokens at which its segments end.
        group: the group that it reads for or decodes in; ``None`` while it waits.
        reading: its prompt, while it is read.
        failures: times its group failed since it emitted last.
        read_failures: times that reading its prompt failed.
        answered: whether its last response is made.
    """

    uid: int
    row: Row
    leftover: Leftover
    apart: str | None
    positions: int
    window: int
    segments: tuple[int, ...]
    group: VerifyGroup | None = None
    reading: Reading | None = None
    failures: int = 0
    read_failures: int = 0
    answered: bool = field(default=False)

    @property
    def decodes(self) -> bool:
        """Whether its row is in a group."""
        return self.group is not None and self.reading is None

    @property
    def suspect(self) -> bool:
        """Whether it is to decode in a group of its own, so that it fails alone."""
        return self.failures >= _ALONE_AFTER

    @property
    def gives_up(self) -> bool:
        """Whether it is not to be tried again."""
        return self.failures >= MAX_FAILURES or self.read_failures >= _MAX_READ_FAILURES

    @property
    def read(self) -> int:
        """How many of the row's tokens are read, while its prompt is read."""
        reading = self.reading
        if reading is None:
            return 0
        return self.row.processed if reading.done else len(self.row.tokens) - reading.left

    def wait(self) -> None:
        """Leave whatever group it is in; what it has read is given up, what it emitted is not."""
        reading, self.reading, self.group = self.reading, None, None
        if reading is not None:
            reading.close()
