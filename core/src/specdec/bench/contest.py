"""All runs on one prompt set at one batch size: their turns, in rotating order, and who was faster.

Machines drift, so the runs of a turn follow each other, in another order each time, and ratios are
taken per turn before the median is. Turns that only warm up are thrown away.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import field, frozen

from specdec.bench.phases import Recorder, recording, summed
from specdec.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.bench.entrants import Entrant
    from specdec.bench.figures import Result
    from specdec.bench.progress import Bar
    from specdec.bench.turns import Setting, Turn

__all__ = ["Contest"]

_GROUPS = 4  # of prompts at least, so that there is a spread
_REHEARSALS = 3  # of a simulated drafter, until it has seen the text that its windows give


@frozen
class Contest:
    """All runs on one prompt set at one batch size.

    Attributes:
        setting: model, tokenizer, options.
        entrants: who runs.
        results: theirs, in the same order.
        groups: the prompts of each turn.
        rehearse: whether simulated drafters see the texts of their own windows first.
        rehearsed: the groups for which they did.
    """

    setting: Setting
    entrants: Sequence[Entrant]
    results: list[Result]
    groups: list[list[list[int]]]
    rehearse: bool = True
    rehearsed: set[int] = field(factory=set)

    @classmethod
    def of(
        cls,
        setting: Setting,
        entrants: Sequence[Entrant],
        name: str,
        prompts: Sequence[list[int]],
        *,
        batch: int,
        turns: int | None = None,
        rehearse: bool = True,
    ) -> Contest:
        """A contest that has not begun; ``turns`` is the least number of groups."""
        least = turns or (_GROUPS if batch > 1 else 1)
        count = max(least, -(-len(prompts) // batch))
        groups = [
            [prompts[(turn * batch + row) % len(prompts)] for row in range(batch)]
            for turn in range(count)
        ]
        results = [entrant.result(name, batch) for entrant in entrants]
        return cls(setting, entrants, results, groups, rehearse)

    def run(self, warmup: int, phase_turns: int, bar: Bar, until: float | None = None) -> None:
        """Run it all, and judge.

        Args:
            warmup: turns to throw away.
            phase_turns: turns to look into afterwards.
            bar: shows how far it is.
            until: no turn but the first begins later, as ``time.perf_counter`` tells it.
        """
        first = self.results[0]
        bar.begin(f"{first.prompt_set}, batch {first.batch}", warmup + len(self.groups))
        for turn in range(-warmup, len(self.groups)):
            if turn > 0 and until is not None and time.perf_counter() > until:
                break
            group = self.groups[turn % len(self.groups)]
            self._rehearse(turn % len(self.groups))
            for place in range(len(self.entrants)):
                at = (place + turn) % len(self.entrants)
                ran = self._once(at, group)
                if ran is not None and turn >= 0:
                    self.results[at].turns.append(ran)
            bar.step()
        # What is learned from rounds that are looked into must not steer those that are timed.
        for turn in range(phase_turns):
            if turn > 0 and until is not None and time.perf_counter() > until:
                break
            self._look_at(turn)
        self.judge()

    def _once(
        self, at: int, group: list[list[int]], began: Callable[[], None] | None = None
    ) -> Turn | None:
        """One turn of one run; whoever fails ends his own run alone, but for plain decoding."""
        entrant, result = self.entrants[at], self.results[at]
        if result.error is not None:
            return None
        try:
            return entrant.way.run(self.setting, group, began)
        except Exception as error:
            if entrant.is_plain:
                raise
            result.error = one_line(error)
            return None

    def _rehearse(self, turn: int) -> None:
        """Let simulated drafters learn what the target writes, plainly and in their windows."""
        simulated = [at for at, entrant in enumerate(self.entrants) if entrant.texts is not None]
        if not simulated or turn in self.rehearsed:
            return
        self.rehearsed.add(turn)
        group = self.groups[turn]
        plain = next(at for at, entrant in enumerate(self.entrants) if entrant.is_plain)
        self._learn(simulated[0], group, self._once(plain, group))
        for at in simulated if self.rehearse else ():
            for _ in range(_REHEARSALS):
                if not self._learn(at, group, self._once(at, group)):
                    break

    def _learn(self, at: int, group: list[list[int]], turn: Turn | None) -> bool:
        texts = self.entrants[at].texts
        if turn is None or texts is None:
            return False
        # Every text is learned, whatever became of those before it.
        return sum(texts.learn(ids, text) for ids, text in zip(group, turn.tokens, strict=True)) > 0

    def _look_at(self, turn: int) -> None:
        """What the rounds of a turn are spent on, in another run of it."""
        for at, result in enumerate(self.results):
            if self.entrants[at].way.mlx_lm or turn >= len(result.turns):
                continue
            recorder = Recorder()
            with recording(recorder):
                ran = self._once(at, self.groups[turn], recorder.reset)
            if ran is not None:
                phases = recorder.phases(ran.seconds, ran.counted)
                result.shares.append(phases.share(result.turns[turn].speed))
                result.phases = summed([*([result.phases] if result.phases else []), phases])

    def judge(self) -> None:
        """Ratios, and whether the tokens are the reference's."""
        plain = next(at for at, entrant in enumerate(self.entrants) if entrant.is_plain)
        beside = self.entrants[0].way.mlx_lm and self.results[0].error is None
        reference = 0 if beside and self.setting.greedy else plain
        for at, result in enumerate(self.results):
            result.ratios = _ratios(result, self.results[plain])
            if beside:
                result.over_mlx_lm = _ratios(result, self.results[0])
            if at > reference and result.error is None:
                pairs = zip(result.tokens, self.results[reference].tokens, strict=True)
                equal = [ours == theirs for ours, theirs in pairs]
                result.same, result.differing = sum(equal), len(equal) - sum(equal)


def _ratios(result: Result, base: Result) -> list[float]:
    """Per turn that was run, how much faster it was."""
    return [ours.speed / theirs.speed for ours, theirs in zip(result.turns, base.turns)]  # noqa: B905
