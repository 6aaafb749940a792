"""The host's side of a row: what it has emitted, what it may still emit, and how it draws."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import define, field

from specdec.errors import OptionError, one_line
from specdec.sampling.masks import MinTokens
from specdec.sampling.processors import Processors
from specdec.verify.ends import RowEnds
from specdec.verify.stats import GenerationStats
from specdec.verify.text import RowText

if TYPE_CHECKING:
    from specdec.contract import TokenConstraint
    from specdec.verify.emission import FinishReason
    from specdec.verify.prefix import PrefixBinding
    from specdec.verify.request import Request

__all__ = ["Row"]


@define(eq=False)
class Row:
    """The host's side of one row. Between rounds, ``pending`` is emitted but not yet read.

    Attributes:
        request: what was asked.
        seed: the resolved seed.
        tokens: the prompt and every content token emitted.
        processors: what changes its logits before a draw.
        constraint: what it may emit, if that is restricted.
        ends: tells where its output ends, and its text.
        width: the most drafts per round now; 0 where the row stands down.
        paced: the most drafts of the next round where a pace says, at most ``width``.
        room: positions that its next window can keep at most, where its state has a limit.
        ahead: tokens behind ``tokens`` that are accepted and committed, and not delivered yet.
        overran: whether its state went on with such tokens, and it ended before they were
            delivered; there is nothing then that it could leave behind.
        processed: how many of ``tokens`` (and the end token) the target has read; what it read of
            tokens that are not delivered counts once they are.
        end_token: the end token that ended the row.
        finish: why it ended; ``None`` while it runs.
        error: what a consumer, a sampler, a processor, a constraint or a stop rule raised, if that
            ended the row.
        stats: its counters.
        faults: rounds in which the drafter's proposal for this row was no valid draft.
        prefix: its place in a prefix cache, bound when it was admitted; or ``None``.
        admitted: when, as ``time.perf_counter`` tells it.
    """

    request: Request
    seed: int
    tokens: list[int]
    processors: Processors
    constraint: TokenConstraint | None = None
    ends: RowEnds | None = None
    width: int = 0
    paced: int | None = None
    room: int | None = None
    ahead: deque[int] = field(factory=deque)
    overran: bool = False
    processed: int = 0
    end_token: int | None = None
    finish: FinishReason | None = None
    error: Exception | None = None
    stats: GenerationStats = field(factory=GenerationStats)
    faults: int = 0
    prefix: PrefixBinding | None = None
    admitted: float = 0.0
    _device_tokens: mx.array | None = None

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> Self:
        """A row that has emitted nothing.

        Args:
            request: what is asked.
            vocab_size: the target's.

        Raises:
            OptionError: an id that the target does not have, or a processor that is none.
        """
        for name, ids in (("the prompt", request.prompt), ("the history", request.history)):
            wrong = [
                token
                for token in (min(ids, default=0), max(ids, default=0))
                if not 0 <= token < vocab_size
            ]
            if wrong:
                raise OptionError(
                    f"{name} has {wrong[0]}; this model's ids are 0 to {vocab_size - 1}"
                )
        chain = list(request.processors)
        ends_early = sorted(token for token in request.end_tokens if token < vocab_size)
        if request.min_tokens and ends_early:
            chain.append(MinTokens(request.min_tokens, ends_early))
        request.sampling.check_vocabulary(vocab_size)
        processors = Processors(chain)
        processors.check_vocabulary(vocab_size)
        return cls(
            request=request,
            seed=request.sampling.resolved_seed(),
            tokens=list(request.prompt),
            processors=processors,
            constraint=_begun(request),
            ends=_ends_of(request),
        )

    def begin_again(self) -> None:
        """Set what watches the output to what was emitted, for a row that is read again.

        A walk that was interrupted has shown it tokens that were never delivered.
        """
        self.ahead.clear()
        self.overran = False
        self._device_tokens = None  # may hold some that were never delivered either
        self.constraint, self.ends = _begun(self.request), _ends_of(self.request)
        for token in self.emitted:
            self._watched(token)

    def ends_with(self, token: int) -> bool:
        """Show a content token to all that watches the output, in order; whether it ends the row.

        Raises:
            ConstraintError: the row's constraint does not allow it; or what the request's own code
                raises.
        """
        # Every rule sees every token, so none is skipped where another ends the row.
        stop, stops = self._watched(token), self.request.stops
        stop |= stops is not None and bool(stops(token))
        return stop

    def _watched(self, token: int) -> bool:
        stop = self.constraint is not None and bool(self.constraint.advance(token))
        stop |= self.ends is not None and self.ends.advance(token)
        return stop

    def emit(self, token: int) -> None:
        """Count a content token as delivered."""
        if self.ahead:
            self.ahead.popleft()
        self.tokens.append(token)

    @property
    def known(self) -> list[int]:
        """The prompt and every content token accepted, delivered or not."""
        return [*self.tokens, *self.ahead]

    @property
    def pending(self) -> int:
        """The token that heads the next window."""
        return self.ahead[-1] if self.ahead else self.tokens[-1]

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
        """Content tokens emitted so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def drawn(self) -> int:
        """Samples drawn so far that were accepted, delivered or not: the step of the next draw."""
        return self.steps + len(self.ahead)

    @property
    def budget(self) -> int | None:
        """Content tokens that may still be accepted; ``None`` for no limit."""
        limit = self.request.max_tokens
        return None if limit < 0 else limit - self.drawn

    @property
    def asked_width(self) -> int:
        """Drafts that the next round is to have at most."""
        return self.width if self.paced is None else min(self.width, self.paced)

    @property
    def depth(self) -> int:
        """Drafts that the next round may have: the last token of a budget is never drafted."""
        return self.within_budget(self.asked_width)

    def within_budget(self, drafts: int) -> int:
        """At most so many drafts, none for the last token of the budget, and none out of room."""
        budget = self.budget
        if self.room is not None:
            drafts = min(drafts, self.room - 1)
        return drafts if budget is None else max(0, min(drafts, budget - 1))

    @property
    def unread(self) -> int:
        """Tokens of the output that the target has not read: the last one, or none."""
        return len(self.tokens) + (self.end_token is not None) - self.processed

    @property
    def unread_tokens(self) -> tuple[int, ...]:
        """Those tokens, an end token last."""
        ends = () if self.end_token is None else (self.end_token,)
        return (*self.tokens[self.processed :], *ends)[: self.unread]

    @property
    def shaped(self) -> bool:
        """Whether something changes its logits before the draw."""
        return bool(self.processors) or self.constraint is not None

    @property
    def positional(self) -> bool:
        """Whether code of the request's own must run once per emitted token, in order."""
        return self.processors.positional or self.request.sampling.sampler is not None

    @property
    def leaves_state(self) -> bool:
        """Whether somebody is shown its state, or given it, when it ends."""
        asked = self.request
        shown = asked.publish is not None or self.prefix is not None or asked.cache is not None
        return shown and not self.overran

    @property
    def text(self) -> str:
        """The text of what it emitted, stop strings cut off; empty without a detokenizer."""
        if self.ends is None:
            return ""
        shown = [self.ends.text_of(index) for index in range(self.steps)]
        return "".join(shown) + self.ends.flush(self.steps)

    def history(self) -> mx.array:
        """``[n]`` every token up to the pending one, on the device: what processors look at."""
        before = self.request.history
        held = self._device_tokens
        if held is None:
            fresh = [*before, *self.known]
        else:
            done = held.shape[0] - len(before)
            seen = max(0, done - len(self.tokens))  # of those that are not delivered yet
            fresh = [*self.tokens[done:], *islice(self.ahead, seen, None)]
        if fresh:
            ids = mx.array(fresh, mx.int32)
            self._device_tokens = held = ids if held is None else mx.concatenate([held, ids])
        assert held is not None
        return held

    def end(self, finish: FinishReason, error: Exception | None = None) -> None:
        """End the row, once."""
        if self.finish is None:
            self.finish, self.error = finish, error


def _ends_of(request: Request) -> RowEnds | None:
    """What tells where a new row's output ends; ``None`` where nothing but its length does."""
    tokenizer, text = request.tokenizer, None
    if tokenizer is not None:
        text = RowText(lambda: tokenizer.detokenizer, request.stop_strings, decode=tokenizer.decode)
    elif not request.has_stop_sequences:
        return None
    return RowEnds(request.stop_sequences, text, request.min_tokens)


def _begun(request: Request) -> TokenConstraint | None:
    """The constraint of a new row.

    Raises:
        OptionError: the request's callable makes something else.
    """
    if request.constraint is None:
        return None
    made = request.constraint()
    missing = [verb for verb in ("masks", "advance", "propose") if not hasattr(made, verb)]
    if missing:
        raise OptionError(
            f"the constraint's callable made {one_line(repr(made))}, which has no "
            f"{' and no '.join(missing)}; make a TokenConstraint"
        )
    return made
