"""What ``BatchGenerator.next`` answers, with mlx-lm's field names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, frozen

if TYPE_CHECKING:
    import mlx.core as mx

    from specdec.batch.entry import Entry
    from specdec.verify import Emission, FinishReason, GenerationStats, TokenLogprobs

__all__ = ["BatchResponse", "PromptResponse"]


@frozen
class PromptResponse:
    """How far a prompt is read.

    Attributes:
        uid: the request.
        progress: ``(prompt tokens read, prompt tokens)``.
        end_of_segment: whether this step reached the end of a segment, or went past it.
        end_of_prompt: whether the row decodes from now on.
    """

    uid: int
    progress: tuple[int, int]
    end_of_segment: bool
    end_of_prompt: bool


@define(eq=False)
class BatchResponse:
    """One token of a request, or its end where that comes without a token.

    Attributes:
        uid: the request.
        token: the token's id; ``None`` on the response of a row that ended with an error.
        finish_reason: ``"stop"``, ``"length"``, ``"error"`` or ``"cancelled"`` on the last
            response, else ``None``.
        from_draft: whether the token was drafted, or forced by a grammar.
        content: false for an end token, and where there is no token.
        text: what of the text became certain with it; empty without a tokenizer.
        token_logprobs: log-probabilities, where the request asks for them.
        error: what ended the row, where the reason is ``"error"``.
    """

    uid: int
    token: int | None
    finish_reason: FinishReason | None
    from_draft: bool
    content: bool
    text: str
    token_logprobs: TokenLogprobs | None
    error: Exception | None
    _emission: Emission | None
    _entry: Entry

    @classmethod
    def of(cls, entry: Entry, emission: Emission) -> BatchResponse:
        """The response with one emitted token."""
        return cls(
            entry.uid,
            emission.token,
            emission.finish,
            emission.from_draft,
            emission.content,
            emission.text,
            emission.token_logprobs,
            None,
            emission,
            entry,
        )

    @classmethod
    def end(cls, entry: Entry) -> BatchResponse:
        """The last response of a row that ended without a token."""
        row = entry.row
        text = "" if row.ends is None else row.ends.flush(row.steps)
        return cls(entry.uid, None, row.finish, False, False, text, None, row.error, None, entry)

    @property
    def logprobs(self) -> mx.array | None:
        """``[V]`` log-probabilities at temperature 1, after processors, before filters."""
        return None if self._emission is None else self._emission.logprobs

    @property
    def stats(self) -> GenerationStats | None:
        """The request's counters; on the last response alone."""
        return self._entry.row.stats if self.finish_reason is not None else None

    @property
    def all_tokens(self) -> list[int] | None:
        """``all_tokens``, prompt and output as in mlx-lm; on the last response alone."""
        if self.finish_reason is None:
            return None
        return self._entry.leftover.all_tokens(self._entry.row)

    @property
    def prompt_cache(self) -> list[Any] | None:
        """mlx-lm caches that cover ``all_tokens``; on the last response alone.

        The last token is read when this is first asked for, which is one forward.
        ``None`` after an error, and with ``return_prompt_caches=False``.
        """
        if self.finish_reason is None or self.finish_reason == "error":
            return None
        return self._entry.leftover.prompt_cache(self._entry.row)
