"""The caches an ended row leaves to its caller, completed only where somebody asks for them.

What a row leaves covers all but its last token, as that was emitted without being read. mlx-lm's
batch generator leaves caches that cover every token, so the missing one is read on first access.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

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

    def cut(
        self, request: Request, caches: list[Any], covered: Sequence[int], tokens: Sequence[int]
    ) -> list[Any]:
        """Caches that cover exactly these tokens, made from some that cover fewer or more.

        A group that has gone on ahead has read tokens that are not answered yet. Where caches
        cannot give them back, all tokens are read again.

        Args:
            request: whose they are.
            caches: they may be changed.
            covered: the request's tokens that they cover, a beginning of ``tokens`` or the reverse.
            tokens: the request's tokens.
        """
        beyond = len(covered) - len(tokens)
        quantizes = request.cache_options.kv_bits is not None  # it may have done so since
        if beyond > 0 and not quantizes and can_trim_prompt_cache(caches):
            trim_prompt_cache(caches, beyond)
        elif beyond > 0:
            caches, covered = self.fresh(request), ()
        self.read(request, caches, tokens[len(covered) :])
        return caches

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
