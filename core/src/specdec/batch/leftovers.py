"""The caches an ended row leaves to its caller, completed only where somebody asks for them.

What a row leaves covers all but its last token, as that was emitted without being read. mlx-lm's
batch generator leaves caches that cover every token, so the missing one is read on first access.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint
    from specdec.targets import Target
    from specdec.verify import Request, Row

__all__ = ["Leftover", "Reader"]


@define(eq=False)
class Reader:
    """Reads tokens into mlx-lm caches, outside of any group.

    Attributes:
        target: reads.
        step_size: tokens per chunk.
        stream: where it computes.
    """

    target: Target
    step_size: int
    stream: Any

    def fresh(self, request: Request) -> list[Any]:
        """Caches as the request found them: a copy of its own, or empty ones."""
        if request.continue_from is not None:
            return deepcopy(list(request.continue_from))
        return self.target.new_state(request.cache_options).extract_row(0)

    def read(self, request: Request, caches: list[Any], tokens: Sequence[int]) -> None:
        """Let a request's caches cover these tokens as well; they are changed."""
        with mx.stream(self.stream):
            for start in range(0, len(tokens), self.step_size):
                chunk = tokens[start : start + self.step_size]
                state = self.target.state_of(caches, request.cache_options)
                state.begin_round(len(chunk))
                self.target.forward(mx.array([list(chunk)], mx.int32), state)
                state.commit_round()
                mx.eval(state.arrays())
                state.write_back(0, caches)


@define(eq=False)
class Leftover:
    """An ended row's caches.

    Attributes:
        reader: completes them.
        wanted: whether anybody may ask for them.
    """

    reader: Reader
    wanted: bool
    _caches: list[Any] | None = None
    _covered: int = 0

    def publish(self, row: Row, caches: list[Any], _checkpoint: RowCheckpoint | None) -> None:
        """Take what the row leaves; a request's ``publish``."""
        self._caches, self._covered = caches, row.processed

    def all_tokens(self, row: Row) -> list[int]:
        """History, prompt and output, an end token included: what the caches cover."""
        return [*row.request.history, *_output(row)]

    def prompt_cache(self, row: Row) -> list[Any] | None:
        """mlx-lm caches that cover every token; the same ones each time.

        Where the group failed before the row could leave any, all tokens are read again.
        """
        if not self.wanted:
            return None
        caches, covered = self._caches, self._covered
        if caches is None:
            caches, covered = self.reader.fresh(row.request), 0
        self._caches = None  # what fails halfway must not be taken for whole
        self.reader.read(row.request, caches, _output(row)[covered:])
        self._caches, self._covered = caches, len(_output(row))
        return caches


def _output(row: Row) -> list[int]:
    return [*row.tokens, *(() if row.end_token is None else (row.end_token,))]
