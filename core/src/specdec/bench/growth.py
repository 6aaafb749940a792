"""How tokens per second grow with the batch and fall with the context, with a drafter and without.

All rows hold the same number of tokens before the first one is generated, and tokens are counted
only while every row decodes. Contexts are one text, repeated, each row from another place of it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from specdec.bench.entrants import load_entrants
from specdec.bench.no_text import text_or_none
from specdec.bench.progress import Bar
from specdec.bench.turns import Setting
from specdec.errors import OptionError, one_line
from specdec.requests import encode_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.bench.entrants import Width
    from specdec.drafters import LoadedDrafter

__all__ = ["GrowthPoint", "grow"]


@frozen
class GrowthPoint:
    """One run at one batch size and context.

    Attributes:
        name: ``plain``, or a drafter, with its width where that is fixed.
        batch: rows.
        context: tokens that each row holds before the first is generated.
        speed: tokens per second of all rows together; ``None`` where it failed.
        error: why it failed, in one line.
    """

    name: str
    batch: int
    context: int
    speed: float | None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return asdict(self)


def grow(
    model: Any,
    tokenizer: Any,
    text: str | Sequence[int],
    *,
    drafters: Sequence[str | LoadedDrafter] = (),
    widths: Sequence[Width] = (None,),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
    contexts: Sequence[int] = (1024, 4096, 16384),
    options: Mapping[str, Any] | None = None,
    max_tokens: int = 64,
    sampling: Mapping[str, Any] | None = None,
    repeats: int = 2,
    show_progress: bool = False,
    told: Callable[[GrowthPoint], None] | None = None,
) -> list[GrowthPoint]:
    """Time all runs at each batch size and context.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second; ``None`` where the text is ids.
        text: what the contexts are made of, as a text or as ids.
        drafters: as for :func:`specdec.bench.compare`.
        widths: likewise.
        batches: rows.
        contexts: tokens that each row holds before, 2 or more.
        options: settings of the drafters' kinds.
        max_tokens: tokens per row.
        sampling: keywords of :func:`specdec.stream_generate`; greedy by default.
        repeats: runs of each point that count, behind one that warms up; the median is kept.
        show_progress: whether to draw a progress bar on standard error.
        told: called with each point.

    Raises:
        OptionError: numbers that make no sense, or no text.
        SpecdecError: none of the drafters can be loaded, or the model fails without one.
    """
    for name, values, least in (("batches", batches, 1), ("contexts", contexts, 2)):
        wrong = [each for each in values if each < least]
        if wrong or not values:
            what = f"has {wrong[0]}" if wrong else "is empty"
            raise OptionError(f"{name} {what}; give numbers of {least} or more")
    wrapper = text_or_none(tokenizer)
    ids = list(encode_prompt(text, wrapper))
    if not ids:
        raise OptionError("the text of the contexts is empty; give some")
    setting = Setting(model, wrapper, max_tokens, sampling or {})
    entrants = load_entrants(setting, drafters, widths, options=options or {}, with_mlx_lm=False)
    points: list[GrowthPoint] = []
    with entrants, Bar(show_progress) as bar:
        bar.begin("growth", len(contexts) * len(batches))
        for context in contexts:
            for batch in batches:
                rows = [_from(ids, row * len(ids) // batch, context) for row in range(batch)]
                for point in _at(setting, entrants.all, rows, repeats):
                    points.append(point)
                    if told is not None:
                        told(point)
                bar.step()
    return points


def _from(ids: Sequence[int], begin: int, length: int) -> list[int]:
    """So many ids of a text that repeats, from a place on."""
    return [ids[(begin + at) % len(ids)] for at in range(length)]


def _at(
    setting: Setting, entrants: Sequence[Any], rows: list[list[int]], repeats: int
) -> list[GrowthPoint]:
    speeds: dict[int, list[float]] = {at: [] for at in range(len(entrants))}
    errors = {at: entrant.error for at, entrant in enumerate(entrants)}
    for turn in range(repeats + 1):
        for place in range(len(entrants)):
            at = (place + turn) % len(entrants)
            if errors[at] is not None:
                continue
            try:
                ran = entrants[at].way.run(setting, rows)
            except Exception as error:
                if entrants[at].way.drafter is None:
                    raise
                errors[at] = one_line(error)
                continue
            if turn:
                speeds[at].append(ran.in_full / ran.full)
    return [
        GrowthPoint(
            entrant.result("", 1).label,
            len(rows),
            len(rows[0]),
            statistics.median(speeds[at]) if speeds[at] and errors[at] is None else None,
            errors[at],
        )
        for at, entrant in enumerate(entrants)
    ]
