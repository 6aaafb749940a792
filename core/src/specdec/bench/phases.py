"""What a round is spent on, and how fast rounds could be: a pass of its own, apart from the timing.

The executor's collaborators are wrapped from outside for the length of a block. Each phase ends
with the evaluation of what it made, so that the next begins with an idle device; that takes away
what overlaps in a normal run, whose code and speed are not touched. What rounds take here is not
learned from.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field, frozen

from specdec.cost.times import RoundTimes
from specdec.verify.flight import Flight
from specdec.verify.lane import DraftLane
from specdec.verify.live import LiveRows
from specdec.verify.verifier import Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Phases", "Recorder", "recording", "summed"]


@frozen
class Phases:
    """Seconds of some rounds by what they were spent on.

    Attributes:
        rounds: windows of the target, each over all rows.
        tokens: what all rows emitted in them.
        draft: seconds of the drafter.
        verify: of the target's windows, the draw and the read included.
        rollback: of dropping what was not accepted.
        host: of everything else on the host: accepting, delivering, text, bookkeeping.
    """

    rounds: int
    tokens: int
    draft: float
    verify: float
    rollback: float
    host: float

    def per_round(self, seconds: float) -> float:
        """Milliseconds per round."""
        return 1000 * seconds / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """E: tokens of all rows per round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def bound(self) -> float:
        """E / (v + d + o) in tokens per second: rounds without any host work between them."""
        needed = self.verify + self.draft + self.rollback
        return self.tokens / needed if needed else 0.0

    @property
    def serial(self) -> float:
        """Tokens per second of the pass itself: the host's part included, nothing overlapped."""
        spent = self.verify + self.draft + self.rollback + self.host
        return self.tokens / spent if spent else 0.0

    def share(self, speed: float) -> float:
        """Which share of the bound a speed is; above 1 where rounds overlap.

        Args:
            speed: tokens per second.
        """
        return speed / self.bound if self.bound else 0.0

    def as_dict(self) -> dict[str, float]:
        """The figures, for JSON; times in milliseconds per round."""
        return {
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "draft_ms": self.per_round(self.draft),
            "verify_ms": self.per_round(self.verify),
            "rollback_ms": self.per_round(self.rollback),
            "host_ms": self.per_round(self.host),
            "bound": self.bound,
            "serial": self.serial,
        }


@define
class Recorder:
    """Adds up the time of phases; one that runs inside another is not counted twice.

    Attributes:
        clock: tells seconds.
        spent: seconds by phase.
        rounds: windows that were begun.
    """

    clock: Callable[[], float] = time.perf_counter
    spent: dict[str, float] = field(factory=dict)
    rounds: int = 0
    _open: list[str] = field(factory=list)
    _since: float = 0.0

    def reset(self) -> None:
        """Begin anew; no phase is open."""
        self.spent, self.rounds = {}, 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time, but for phases inside it, as one of ``name``."""
        self._turn_over()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn_over()
            self._open.pop()

    def _turn_over(self) -> None:
        now = self.clock()
        if self._open:
            name = self._open[-1]
            self.spent[name] = self.spent.get(name, 0.0) + now - self._since
        self._since = now

    def phases(self, seconds: float, tokens: int) -> Phases:
        """What was counted.

        Args:
            seconds: of all rounds; what no phase has is the host's.
            tokens: emitted in them.
        """
        parts = {name: self.spent.get(name, 0.0) for name in ("draft", "verify", "rollback")}
        host = max(0.0, seconds - sum(parts.values()))
        return Phases(self.rounds, tokens, **parts, host=host)


def summed(passes: Sequence[Phases]) -> Phases:
    """Several passes as one."""
    return Phases(
        rounds=sum(each.rounds for each in passes),
        tokens=sum(each.tokens for each in passes),
        draft=sum(each.draft for each in passes),
        verify=sum(each.verify for each in passes),
        rollback=sum(each.rollback for each in passes),
        host=sum(each.host for each in passes),
    )


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While the block runs, every verify group of the process tells the recorder of its phases."""

    def wrap(owner: Any, verb: str, phase: str, made: Callable[[Any, Any], list[mx.array]]) -> Any:
        original = getattr(owner, verb)

        @wraps(original)
        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            with recorder.phase(phase):
                result = original(self, *args, **kwargs)
                mx.eval(made(self, result))
                mx.synchronize()
            if verb == "launch":
                recorder.rounds += 1
            return result

        setattr(owner, verb, timed)
        return owner, verb, original

    wrapped: list[tuple[Any, str, Any]] = []
    learn = RoundTimes.observe
    try:
        # Rounds take longer here, which nobody is to learn from.
        RoundTimes.observe = _unheard  # type: ignore[method-assign]
        for owner, verb, phase, made in _WRAPPED:
            wrapped.append(wrap(owner, verb, phase, made))
        yield
    finally:
        RoundTimes.observe = learn  # type: ignore[method-assign]
        for owner, verb, original in reversed(wrapped):
            setattr(owner, verb, original)


def _unheard(*_round: Any, **_options: Any) -> Any:
    """In place of learning from a round: it was no new one."""
    return False


def _nothing(_owner: Any, _result: Any) -> list[mx.array]:
    return []


def _drafts(_lane: Any, proposed: Any) -> list[mx.array]:
    """What a proposal left on the device."""
    device, held = proposed.device, []
    if device is not None:
        held = [device.tokens, device.lengths, device.logq]
    return [array for array in (*held, proposed.logq) if array is not None]


def _window(_verifier: Any, flight: Any) -> list[mx.array]:
    """What a window's forward and draw left there, the drafter's hidden states included."""
    context = [] if flight.context is None else [flight.context]
    return [*flight.arrays, *context]


def _caches(live: Any, _result: Any) -> list[mx.array]:
    """The target's rows, which a rollback may have left to compute."""
    held: list[mx.array] = [] if live.state is None else live.state.arrays()
    return held


_WRAPPED: tuple[tuple[Any, str, str, Callable[[Any, Any], list[mx.array]]], ...] = (
    (DraftLane, "bring_in", "draft", _nothing),
    (DraftLane, "catch_up", "draft", _nothing),
    (DraftLane, "propose", "draft", _drafts),
    (DraftLane, "commit", "draft", _nothing),
    (Verifier, "launch", "verify", _window),
    (Flight, "land", "verify", _nothing),
    (LiveRows, "commit", "rollback", _caches),
    (LiveRows, "commit_plain", "rollback", _caches),
)
