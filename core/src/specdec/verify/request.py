"""Requests, and the host's side of the rows that serve them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field, frozen

from specdec.checkpoints import PrefixCache
from specdec.errors import OptionError, one_line
from specdec.verify.stats import GenerationStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import SupportsIndex

    import mlx.core as mx
    from attrs import Attribute

    from specdec.contract import RowCheckpoint
    from specdec.sampling import SamplingOptions
    from specdec.verify.prefix import PrefixBinding

__all__ = ["Emission", "FinishReason", "Request", "Row"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


@frozen(eq=False)
class Emission:
    """One token that a row emits.

    Attributes:
        token: its id.
        from_draft: whether it was drafted and accepted.
        content: false for an end token, which ends the row and is no content.
        finish: why the row ends with this token, if it does.
    """

    token: int
    from_draft: bool
    content: bool
    finish: FinishReason | None
    _logprobs: mx.array
    _row: int
    _position: int

    @property
    def logprobs(self) -> mx.array:
        """``[V]`` log-probabilities that the token was drawn from, at temperature 1."""
        logprobs = self._logprobs
        if logprobs.shape[:2] == (1, 1):  # plain decoding: a view costs less than indexing
            return logprobs.reshape(-1)
        return logprobs[self._row, self._position]


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value)


def _id_set(value: Iterable[int]) -> frozenset[int]:
    return frozenset(value)


def _prompt(
    _instance: object, _attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]
) -> None:
    if not value:
        raise OptionError("the prompt is empty; give at least one token")


def _max_tokens(_instance: object, _attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or value == 0 or value < -1:
        raise OptionError(f"max_tokens is {value!r}; give a positive number, or -1 for no limit")


def _width(_instance: object, _attribute: Attribute[int], value: int) -> None:
    if not isinstance(value, int) or value < 0:
        raise OptionError(f"num_draft_tokens is {value!r}; give 1 or more, or 0 to run plain")


def _places(value: Iterable[SupportsIndex]) -> tuple[int, ...]:
    hint = "give numbers of prompt tokens, 1 or more"
    try:
        places = tuple(value)
    except TypeError:
        raise OptionError(f"snapshot_at is {one_line(repr(value))}; {hint}") from None
    numbers = []
    for place in places:
        try:
            numbers.append(operator.index(place))
        except TypeError:
            raise OptionError(f"snapshot_at has {one_line(repr(place))}; {hint}") from None
        if numbers[-1] < 1:
            raise OptionError(f"snapshot_at has {numbers[-1]}; {hint}")
    return tuple(numbers)


def _prefix_cache(
    _instance: object, _attribute: Attribute[PrefixCache | None], value: object
) -> None:
    if value is not None and not isinstance(value, PrefixCache):
        raise OptionError(
            f"prefix_cache is {one_line(repr(value))}; give a specdec.PrefixCache(max_bytes)"
        )


@frozen(kw_only=True, eq=False)
class Request:
    """What one row is asked to do; frozen when it is admitted.

    Attributes:
        prompt: token ids, at least one.
        sampling: how it draws.
        max_tokens: content tokens to emit at most; -1 for no limit.
        end_tokens: ids that end the row and are no content.
        num_draft_tokens: the most drafts per round.
        cache: the caller's mlx-lm prompt cache, continued from and written back; or ``None``.
        prefix_cache: where the row's beginning is looked up and the row is left when it ends.
        snapshot_at: numbers of prompt tokens after which the row is left there too, such as the
            length of a system prompt that other requests share.
        consumer: told of each emission by ``Round.deliver_all``; returns ``False`` to stop.
        cancelled: looked at before each token.
        stops: told of each content token in order; true where the row ends with it. Told only of
            tokens that the target emits, so it may keep a history.
        publish: shown the ended row, its target caches and its draft checkpoint before it leaves.
            They cover the first ``row.processed`` tokens of the output and share nothing with
            live state.
        progress: told of ``(prompt tokens read, prompt tokens)``, as in mlx-lm.

    Raises:
        OptionError: a value that makes no sense; names it.
    """

    prompt: tuple[int, ...] = field(converter=_ids, validator=_prompt)
    sampling: SamplingOptions
    max_tokens: int = field(default=256, validator=_max_tokens)
    end_tokens: frozenset[int] = field(default=frozenset(), converter=_id_set)
    num_draft_tokens: int = field(default=0, validator=_width)
    cache: Sequence[Any] | None = None
    prefix_cache: PrefixCache | None = field(default=None, validator=_prefix_cache)
    snapshot_at: tuple[int, ...] = field(default=(), converter=_places)
    consumer: Callable[[Emission], bool | None] | None = None
    cancelled: Callable[[], bool] | None = None
    stops: Callable[[int], bool] | None = None
    publish: Callable[[Row, list[Any], RowCheckpoint | None], None] | None = None
    progress: Callable[[int, int], None] | None = None

    def __attrs_post_init__(self) -> None:
        if self.snapshot_at and self.prefix_cache is None:
            raise OptionError("snapshot_at was given without a prefix_cache; give one")
        for place in self.snapshot_at:
            if place > len(self.prompt):
                raise OptionError(
                    f"snapshot_at has {place}, but the prompt has {len(self.prompt)} tokens"
                )
        if self.cache is not None and self.prefix_cache is not None:
            raise OptionError(
                "a caller's prompt cache and a prefix_cache were given; give one or the other"
            )


@define(eq=False)
class Row:
    """The host's side of one row. Between rounds, ``pending`` is emitted but not yet read.

    Attributes:
        request: what was asked.
        seed: the resolved seed.
        tokens: the prompt and every content token emitted.
        width: the most drafts per round now; 0 where the row stands down.
        processed: how many of ``tokens`` (and the end token) the target has read.
        end_token: the end token that ended the row.
        finish: why it ended; ``None`` while it runs.
        error: what a consumer, a sampler or a stop rule raised, if that ended the row.
        stats: its counters.
        faults: rounds in which the drafter's proposal for this row was no valid draft.
        prefix: its place in a prefix cache, bound when it was admitted; or ``None``.
        admitted: when, as ``time.perf_counter`` tells it.
    """

    request: Request
    seed: int
    tokens: list[int]
    width: int = 0
    processed: int = 0
    end_token: int | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    stats: GenerationStats = field(factory=GenerationStats)
    faults: int = 0
    prefix: PrefixBinding | None = None
    admitted: float = 0.0

    @property
    def pending(self) -> int:
        """The token that heads the next window."""
        return self.tokens[-1]

    @property
    def emitted(self) -> tuple[int, ...]:
        """Content tokens emitted so far."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def read(self) -> tuple[int, ...]:
        """What the target has read of prompt and output, an end token included."""
        ends = () if self.end_token is None else (self.end_token,)
        return (*self.tokens, *ends)[: self.processed]

    @property
    def steps(self) -> int:
        """Samples drawn so far that were emitted: the step of the next draw."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def budget(self) -> int | None:
        """Content tokens that may still be emitted; ``None`` for no limit."""
        limit = self.request.max_tokens
        return None if limit < 0 else limit - self.steps

    @property
    def depth(self) -> int:
        """Drafts that the next round may have: the last token of a budget is never drafted."""
        budget = self.budget
        return self.width if budget is None else max(0, min(self.width, budget - 1))

    @property
    def unread(self) -> int:
        """Tokens of the output that the target has not read: the last one, or none."""
        return len(self.tokens) + (self.end_token is not None) - self.processed

    def end(self, finish: FinishReason, error: Exception | None = None) -> None:
        """End the row, once."""
        if self.finish is None:
            self.finish, self.error = finish, error
