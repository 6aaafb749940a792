"""The verify groups of one generator: one for each kind of rows, and one for each suspect.

Rows of any width, seed, acceptance rule, processors and grammar decode together. Rows whose caches
cannot be rolled back decode one position at a time, in a group of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specdec.batch.entry import Entry
    from specdec.verify import VerifyGroup

__all__ = ["Groups"]


@define(eq=False)
class Groups:
    """Opens groups where they are needed.

    Attributes:
        open_group: opens an empty one.
    """

    open_group: Callable[[], VerifyGroup]
    _shared: dict[bool, VerifyGroup] = field(factory=dict)
    _own: list[VerifyGroup] = field(factory=list)

    def __iter__(self) -> Iterator[VerifyGroup]:
        """All of them, as they are now."""
        return iter([*self._shared.values(), *self._own])

    def of(self, entry: Entry) -> VerifyGroup:
        """The group that an entry is to read for."""
        if entry.suspect:
            self._own.append(self.open_group())
            return self._own[-1]
        can_roll_back = entry.apart is None
        if can_roll_back not in self._shared:
            self._shared[can_roll_back] = self.open_group()
        return self._shared[can_roll_back]

    def forget(self, group: VerifyGroup) -> None:
        """Let a group go that failed."""
        self._shared = {kind: held for kind, held in self._shared.items() if held is not group}
        self._own = [held for held in self._own if held is not group]

    def sweep(self, in_use: Callable[[VerifyGroup], bool]) -> None:
        """Close the groups of suspects that have left."""
        for group in [held for held in self._own if not in_use(held)]:
            self.forget(group)
            group.close()
