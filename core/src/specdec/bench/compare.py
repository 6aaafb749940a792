"""Plain decoding and every drafter on the same prompts, compared turn by turn.

Machines drift, so the runs of a turn follow each other in rotating order, and ratios are taken per
turn before the median is. Turns that only warm up are thrown away.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from specdec.bench.entrants import DEFAULT, Entrant, load_entrants
from specdec.bench.no_text import text_or_none
from specdec.bench.phases import Recorder, recording, summed
from specdec.bench.turns import Setting
from specdec.errors import OptionError, one_line
from specdec.requests import encode_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.bench.entrants import Width
    from specdec.bench.figures import Result
    from specdec.bench.simulated import Simulated
    from specdec.bench.turns import Turn
    from specdec.drafters import LoadedDrafter

    Prompts = Sequence[str | Sequence[int]]

__all__ = ["compare"]

_REHEARSALS = 3  # of a simulated drafter, until it has seen the text that its windows give


def compare(
    model: Any,
    tokenizer: Any,
    prompts: Prompts | Mapping[str, Prompts],
    *,
    drafters: Sequence[str | LoadedDrafter] = (),
    widths: Sequence[Width] = (None,),
    batches: Sequence[int] = (1,),
    simulate: Sequence[Simulated] = (),
    with_mlx_lm: bool = False,
    options: Mapping[str, Any] | None = None,
    max_tokens: int = 64,
    sampling: Mapping[str, Any] | None = None,
    warmup: int = 1,
    phase_turns: int = 4,
    show_progress: bool = False,
    told: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Time plain decoding and each drafter at each width, on every prompt set and batch size.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second; ``None`` where all prompts are ids.
        prompts: texts or ids; or several sets of them by name.
        drafters: kinds, folders, ``"auto"``, chains (``"ngram,mtp"``), or loaded drafters, which
            stay open.
        widths: drafts a round; ``None`` lets specdec choose them round by round, ``"default"`` is
            each drafter's own number.
        batches: prompts that are decoded at the same time; a turn is a group of so many, and where
            they run out, the first ones come again.
        simulate: drafters to simulate besides.
        with_mlx_lm: whether mlx-lm's own plain decoding is timed as well.
        options: settings of the drafters' kinds; see :func:`specdec.bench.options_for`.
        max_tokens: tokens per prompt.
        sampling: keywords of :func:`specdec.stream_generate`; greedy by default.
        warmup: turns per set and batch size that are thrown away. On CUDA a shape that comes for
            the first time costs far more, so take several.
        phase_turns: turns that are run once more for what their rounds are spent on; 0 for none.
        show_progress: whether to draw a progress bar on standard error.
        told: called with each result once all of it is there.

    Returns:
        For each set and batch size: mlx-lm's result where it was asked for, plain decoding's, then
        the drafters'. A drafter that fails has its ``error`` there.

    Raises:
        OptionError: numbers that make no sense, or texts without a tokenizer.
        SpecdecError: none of the drafters can be loaded for this model, or the model fails without
            one.
    """
    tokenizer = text_or_none(tokenizer)
    sets = _sets(prompts, tokenizer)
    _check(batches, widths, warmup, phase_turns, max_tokens)
    setting = Setting(model, tokenizer, max_tokens, sampling or {})
    entrants = load_entrants(
        setting, drafters, widths, simulate, options=options or {}, with_mlx_lm=with_mlx_lm
    )
    results: list[Result] = []
    with entrants, _Bar(show_progress) as bar:
        for name, ids in sets.items():
            for batch in batches:
                contest = Contest.of(setting, entrants.all, name, ids, batch)
                contest.run(warmup, phase_turns, bar)
                results += contest.results
                for result in contest.results if told is not None else ():
                    told(result)  # type: ignore[misc]  # it is not None here
    return results


def _sets(prompts: Prompts | Mapping[str, Prompts], tokenizer: Any) -> dict[str, list[list[int]]]:
    named = prompts if isinstance(prompts, Mapping) else {"prompts": prompts}
    sets = {}
    for name, each in named.items():
        ids = [list(encode_prompt(prompt, tokenizer)) for prompt in each]
        if not ids or not all(ids):
            what = "is empty" if not ids else "has an empty prompt"
            raise OptionError(f"prompt set {name} {what}; give prompts of one token or more")
        sets[name] = ids
    return sets


def _check(
    batches: Sequence[int],
    widths: Sequence[Width],
    warmup: int,
    phase_turns: int,
    max_tokens: int,
) -> None:
    for name, values, least in (
        ("batches", batches, 1),
        ("widths", [width for width in widths if width not in {None, DEFAULT}], 1),
        ("warmup", [warmup], 0),
        ("phase_turns", [phase_turns], 0),
        ("max_tokens", [max_tokens], 2),
    ):
        wrong = [each for each in values if not isinstance(each, int) or each < least]
        if wrong:
            raise OptionError(f"{name} has {one_line(repr(wrong[0]))}; give {least} or more")


@frozen
class Contest:
    """All runs on one prompt set at one batch size.

    Attributes:
        setting: model, tokenizer, options.
        entrants: who runs.
        results: theirs, in the same order.
        groups: the prompts of each turn.
    """

    setting: Setting
    entrants: Sequence[Entrant]
    results: list[Result]
    groups: list[list[list[int]]]

    @classmethod
    def of(
        cls,
        setting: Setting,
        entrants: Sequence[Entrant],
        name: str,
        prompts: Sequence[list[int]],
        batch: int,
    ) -> Contest:
        """A contest that has not begun."""
        count = -(-len(prompts) // batch)
        groups = [
            [prompts[(turn * batch + row) % len(prompts)] for row in range(batch)]
            for turn in range(count)
        ]
        results = [entrant.result(name, batch) for entrant in entrants]
        return cls(setting, entrants, results, groups)

    def run(self, warmup: int, phase_turns: int, bar: _Bar) -> None:
        """Run it all, and judge."""
        first = self.results[0]
        bar.begin(f"{first.prompt_set}, batch {first.batch}", warmup + len(self.groups))
        for turn in range(-warmup, len(self.groups)):
            group = self.groups[turn % len(self.groups)]
            self._rehearse(group)
            for place in range(len(self.entrants)):
                at = (place + turn) % len(self.entrants)
                ran = self._once(at, group)
                if ran is None or turn < 0:
                    continue
                self.results[at].turns.append(ran)
                if turn < phase_turns and not self.entrants[at].way.mlx_lm:
                    self._look(at, group, ran)
            bar.step()
        self.judge()

    def _once(self, at: int, group: list[list[int]]) -> Turn | None:
        """One turn of one run; a drafter that fails ends its own run alone."""
        entrant, result = self.entrants[at], self.results[at]
        if result.error is not None:
            return None
        try:
            return entrant.way.run(self.setting, group)
        except Exception as error:
            if entrant.way.drafter is None:
                raise
            result.error = one_line(error)
            return None

    def _rehearse(self, group: list[list[int]]) -> None:
        """Let simulated drafters learn what the target writes, plainly and in their windows."""
        simulated = [at for at, entrant in enumerate(self.entrants) if entrant.texts is not None]
        if not simulated:
            return
        plain = next(at for at, entrant in enumerate(self.entrants) if entrant.is_plain)
        self._learn(simulated[0], group, self._once(plain, group))
        for at in simulated:
            for _ in range(_REHEARSALS):
                if not self._learn(at, group, self._once(at, group)):
                    break

    def _learn(self, at: int, group: list[list[int]], turn: Turn | None) -> bool:
        texts = self.entrants[at].texts
        if turn is None or texts is None:
            return False
        # Every text is learned, whatever became of those before it.
        return sum(texts.learn(ids, text) for ids, text in zip(group, turn.tokens, strict=True)) > 0

    def _look(self, at: int, group: list[list[int]], timed: Turn) -> None:
        """What the rounds of a turn are spent on, in another run of it right behind the timed one.

        Args:
            at: which run.
            group: its prompts.
            timed: the turn that the bound is for.
        """
        recorder, result = Recorder(), self.results[at]
        with recording(recorder):
            turn = self.entrants[at].way.run(self.setting, group, recorder.reset)
        phases = recorder.phases(turn.seconds, turn.counted)
        result.shares.append(phases.share(timed.speed))
        result.phases = phases if result.phases is None else summed([result.phases, phases])

    def judge(self) -> None:
        """Ratios, and whether the tokens are the reference's."""
        plain = next(at for at, entrant in enumerate(self.entrants) if entrant.is_plain)
        greedy = self.setting.greedy
        reference = 0 if greedy else plain  # mlx-lm stands first where it runs
        for at, result in enumerate(self.results):
            result.ratios = _ratios(result, self.results[plain])
            if self.entrants[0].way.mlx_lm:
                result.over_mlx_lm = _ratios(result, self.results[0])
            if at > reference and result.error is None:
                pairs = zip(result.tokens, self.results[reference].tokens, strict=True)
                equal = [ours == theirs for ours, theirs in pairs]
                result.same, result.differing = sum(equal), len(equal) - sum(equal)


def _ratios(result: Result, base: Result) -> list[float]:
    """Per turn that was run, how much faster it was."""
    return [ours.speed / theirs.speed for ours, theirs in zip(result.turns, base.turns)]  # noqa: B905


@define
class _Bar:
    """A progress bar on standard error, or none."""

    show: bool
    _progress: Any = field(default=None)
    _task: Any = field(default=None)

    def __enter__(self) -> _Bar:
        if self.show:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(file=sys.stderr), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, steps: int) -> None:
        """Show another bar."""
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=steps)

    def step(self) -> None:
        """One step of it is done."""
        if self._progress is not None:
            self._progress.advance(self._task)
