"""The parts of a batch generator put together: what its verbs do once their arguments are read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.batch.admission import Admission
from specdec.batch.book import Book
from specdec.batch.groups import Groups
from specdec.batch.leftovers import Reader
from specdec.batch.memory import MemoryPlan
from specdec.batch.prompts import Prompts
from specdec.batch.rounds import Rounds
from specdec.drafters import LoadedDrafter, load_drafter
from specdec.errors import GroupFailedError, OptionError
from specdec.verify import VerifyGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from specdec.batch.counters import Counters
    from specdec.batch.entry import Entry
    from specdec.batch.responses import BatchResponse, PromptResponse
    from specdec.batch.settings import Settings
    from specdec.drafters import Drafter
    from specdec.targets import Target

__all__ = ["Engine", "load"]


class Engine:
    """Requests of one model, and the groups that serve them.

    Args:
        target: the bound model.
        drafter: drafts, or ``None``.
        settings: limits and defaults.
        stream: where everything is computed.
    """

    def __init__(
        self, target: Target, drafter: LoadedDrafter | None, settings: Settings, stream: Any
    ) -> None:
        provider = None if drafter is None else drafter.provider
        step_size = settings.prefill_step_size

        def open_group() -> VerifyGroup:
            return VerifyGroup(
                target,
                provider,
                drafter=None if drafter is None else drafter.kind,
                reason="no drafter was asked for" if drafter is None else None,
                prefill_step_size=step_size,
                stream=stream,
                pace=None if drafter is None else drafter.pace(),
            )

        memory = MemoryPlan(target, settings.memory_limit, provider, settings.cache_options)
        self._stream = stream
        self._next_uid = 0
        self._reader = Reader(target, step_size, stream)
        self._admission = Admission(target, drafter, settings, memory, self._reader)
        self._book = book = Book(Groups(open_group), memory, stream)
        self._rounds = Rounds(book)
        self._prompts = Prompts(
            book, step_size, settings.prefill_batch_size, settings.completion_batch_size
        )

    @property
    def counters(self) -> Counters:
        """Everything counted so far."""
        return self._book.counters

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or answers were not returned yet."""
        return bool(self._book.entries or self._book.answers or self._book.progress)

    def held_bytes(self) -> int:
        """Bytes of all caches now; of rows that decode, what their lengths may take."""
        held = 0
        for entry in self._book.entries.values():
            if entry.reading is not None:
                held += sum(array.nbytes for array in entry.reading.state.arrays())
            elif entry.group is None:
                held += sum(cache.nbytes for cache in entry.row.request.continue_from or ())
        for group in self._book.groups:
            lengths = [len(r.tokens) + len(r.request.history) for r in group.rows]
            longest = max(lengths, default=0)
            held += len(lengths) * self._book.memory.row_bytes(longest)
        return held

    def insert(self, segments: Sequence[Sequence[Any]], options: Mapping[str, Any]) -> list[int]:
        """Add requests, all or none.

        Args:
            segments: of each prompt.
            options: by name, ``None`` or one entry per prompt.
        """
        entries = self._admission.entries(segments, self._next_uid, options)
        self._next_uid += len(entries)
        self._book.add(entries)
        return [entry.uid for entry in entries]

    def step(self) -> tuple[list[PromptResponse], list[BatchResponse]]:
        """One round of each group, then one budget of prompt tokens."""
        book = self._book
        self._rounds.run()
        self._prompts.run()
        self._close_unused()
        told, book.progress = book.progress, []
        answers, book.answers = book.answers, []
        return told, answers

    def extract(self, uids: Iterable[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of caches with the tokens that they cover, of those requests that are known."""
        return {entry.uid: self._extract(entry) for entry in self._known(uids)}

    def _extract(self, entry: Entry) -> tuple[list[Any], list[int]]:
        row, reading, group = entry.row, entry.reading, entry.group
        before = list(row.request.history)
        if reading is not None:
            with mx.stream(self._stream):
                return reading.state.extract_row(0), [*before, *row.tokens[: entry.read]]
        if group is not None:
            try:
                caches, covered = group.extract(row)
            except GroupFailedError as error:
                self._book.recover(group, error)  # it waits now
            else:
                caches = self._reader.cut(row.request, caches, covered, row.tokens)
                return caches, [*before, *row.tokens]
        return self._reader.fresh(row.request), before

    def drop(self, uids: Iterable[int]) -> None:
        """End requests without an answer, of those that are known."""
        self._book.drop(self._known(uids))
        self._close_unused()

    def close(self) -> None:
        """End everything."""
        book = self._book
        book.drop(list(book.entries.values()))
        book.answers, book.progress = [], []
        for group in book.groups:
            with suppress(GroupFailedError):  # its rows have gone, so nobody misses anything
                group.close()

    def _known(self, uids: Iterable[int]) -> list[Entry]:
        entries = self._book.entries
        return [entries[uid] for uid in dict.fromkeys(uids) if uid in entries]

    def _close_unused(self) -> None:
        used = {id(entry.group) for entry in self._book.active}
        self._book.groups.sweep(lambda group: id(group) in used)


def load(
    drafter: Drafter | LoadedDrafter | None, model: Any, settings: Settings
) -> LoadedDrafter | None:
    """The drafter of a generator.

    Args:
        drafter: a kind, a folder, ``"auto"``, a chain, one that is loaded, or ``None``.
        model: what it drafts for.
        settings: the generator's.

    Raises:
        OptionError: it was loaded for another model.
        SpecdecError: it cannot be loaded for this one.
    """
    if drafter is None:
        return None
    if isinstance(drafter, LoadedDrafter):
        if drafter.target.identity is not model:
            raise OptionError(
                f"drafter {drafter.kind} was loaded for another model; "
                "call load_drafter(..., model) for this one"
            )
        return drafter
    width = settings.num_draft_tokens or None
    return load_drafter(drafter, model, settings.tokenizer, num_draft_tokens=width)
