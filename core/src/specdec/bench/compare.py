"""Plain decoding and every drafter on the same prompts, compared turn by turn.

Machines drift, so the runs of a turn follow each other in rotating order, and ratios are taken per
turn before the median is. Turns that only warm up are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specdec.bench.contest import Contest
from specdec.bench.entrants import DEFAULT, load_entrants
from specdec.bench.no_text import text_or_none
from specdec.bench.progress import Bar
from specdec.bench.turns import Setting
from specdec.errors import OptionError, one_line
from specdec.requests import encode_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.bench.entrants import Width
    from specdec.bench.figures import Result
    from specdec.bench.simulated import Simulated
    from specdec.drafters import LoadedDrafter

    Prompts = Sequence[str | Sequence[int]]

__all__ = ["compare"]


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
    turns: int | None = None,
    warmup: int = 1,
    phase_turns: int = 4,
    rehearse: bool = True,
    max_seconds: float | None = None,
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
        sampling: keywords of :func:`specdec.stream_generate`; greedy by default. The seed is 0
            where none is given.
        turns: prompts, or groups of a batch, to time at least, for which they come again; all
            prompts once where it is not given, and four groups.
        warmup: turns per set and batch size that are thrown away. On CUDA a shape that comes for
            the first time costs far more, so take several.
        phase_turns: turns that are run once more for what their rounds are spent on; 0 for none.
        rehearse: whether each simulated drafter generates every text once before it is timed. A
            window's logits may differ in the last bits from plain decoding's, which parts texts
            where two tokens are nearly tied; without it, drafts are wrong from there on.
        max_seconds: about how long all may take: sets and batch sizes share what is left, later
            turns of each are left out, and so is a set that has no time at all.
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
    _check(
        batches=(batches, 1),
        widths=([width for width in widths if width not in {None, DEFAULT}], 1),
        turns=([1 if turns is None else turns], 1),
        warmup=([warmup], 0),
        phase_turns=([phase_turns], 0),
        max_tokens=([max_tokens], 2),
    )
    seeded = {"seed": 0, **sampling} if sampling and sampling.get("temp") else sampling or {}
    setting = Setting(model, tokenizer, max_tokens, seeded)
    entrants = load_entrants(
        setting, drafters, widths, simulate, options=options or {}, with_mlx_lm=with_mlx_lm
    )
    contests = [
        Contest.of(setting, entrants.all, name, ids, batch=batch, turns=turns, rehearse=rehearse)
        for name, ids in sets.items()
        for batch in batches
    ]
    end = None if max_seconds is None else time.perf_counter() + max_seconds
    results: list[Result] = []
    with entrants, Bar(show_progress) as bar:
        for done, contest in enumerate(contests):
            until = None if end is None else _share_of(end, len(contests) - done)
            if until is not None and until <= time.perf_counter():
                break
            contest.run(warmup, phase_turns, bar, until)
            results += contest.results
            for result in contest.results if told is not None else ():
                told(result)  # type: ignore[misc]  # it is not None here
    return results


def _share_of(end: float, parts: int) -> float:
    """Until when the first of so many parts may take."""
    now = time.perf_counter()
    return now + (end - now) / parts


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


def _check(**numbers: tuple[Sequence[Any], int]) -> None:
    """Check numbers by name, each with the least that it may be."""
    for name, (values, least) in numbers.items():
        wrong = [each for each in values if not isinstance(each, int) or each < least]
        if wrong:
            raise OptionError(f"{name} has {one_line(repr(wrong[0]))}; give {least} or more")
