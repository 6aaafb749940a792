"""One token that a row emits, as its consumer sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Emission", "FinishReason", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@frozen
class TokenLogprobs:
    """How probable a token was: after processors and grammar, before filters and temperature.

    Attributes:
        logprob: its log-probability, as float32.
        rank: 1 + the number of tokens that were more probable.
        top: the most probable ``(id, log-probability)``, best first; as many as were asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@frozen(eq=False)
class Emission:
    """One token that a row emits.

    Attributes:
        token: its id.
        from_draft: whether it was drafted, or forced by a constraint, and accepted.
        content: false for an end token, which ends the row and is no content.
        finish: why the row ends with this token, if it does.
        text: what of the row's text became certain with it; the last emission brings the rest.
        token_logprobs: its log-probability and the best alternatives, where the request asks.
    """

    token: int
    from_draft: bool
    content: bool
    finish: FinishReason | None
    text: str
    token_logprobs: TokenLogprobs | None
    _logprobs: mx.array
    _row: int
    _position: int

    @property
    def logprobs(self) -> mx.array:
        """``[V]`` log-probabilities at temperature 1, after processors, before filters."""
        logprobs = self._logprobs
        if logprobs.shape[:2] == (1, 1):  # plain decoding: a view costs less than indexing
            return logprobs.reshape(-1)
        return logprobs[self._row, self._position]
