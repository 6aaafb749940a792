"""From the logits of a window to the target's own tokens.

Processors, then constraints, then normalisation, then each row's draw, for all rows and positions
in one graph. What runs code that may hold state (a sampler callable, a processor that does not
declare otherwise) is called here where the window has one position; in wider windows it waits for
the accept walk, which asks position by position (``verify/positional.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import field, frozen

from specdec.errors import OptionError, one_line
from specdec.sampling.processors import WindowView
from specdec.sampling.rows import normalize, nothing_left
from specdec.verify.logprobs import WindowLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.sampling import RowSamplers
    from specdec.sampling.rejection import Drafted
    from specdec.verify.row import Row

__all__ = ["WRONG_ID", "Draw", "WindowPlan", "draw_window", "sampled_id", "shape_row"]

WRONG_ID = -2  # beside -1, where nothing was left to draw


@frozen(eq=False)
class Draw:
    """What a window's logits became.

    Attributes:
        samples: ``[B, W]`` the target's own tokens; -1 where nothing was left to draw,
            ``WRONG_ID`` where a sampler callable drew what does not exist.
        logprobs: ``[B, W, V]`` that they were drawn from, before filters and temperature.
        reports: log-probabilities to report, where a request asks for them.
        errors: what a row's own code raised, by row.
    """

    samples: mx.array
    logprobs: mx.array
    reports: WindowLogprobs | None = None
    errors: dict[int, Exception] = field(factory=dict)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What the host reads."""
        reports = () if self.reports is None else self.reports.arrays
        return self.samples, *reports


@frozen(eq=False)
class WindowPlan:
    """What a window is made of, as far as the draw looks at it.

    Attributes:
        tokens: ``[B, W]``.
        known: positions of the window that are in the rows' histories already: 1, or 0 where it
            was begun on samples that nobody has read.
        steps: B ints, samples drawn before its first position.
        masks: ids that a row's constraint allows, ``[n, V]`` for its first n positions.
        drafted: the drafts, for rows with the rejection rule.
    """

    tokens: mx.array
    known: int
    steps: Sequence[int]
    masks: Mapping[int, mx.array | None]
    drafted: Drafted | None = None


def draw_window(
    rows: Sequence[Row], samplers: RowSamplers, logits: mx.array, plan: WindowPlan
) -> Draw:
    """Draw every position of a window, as far as that can be done at once.

    Args:
        rows: the rows of the window.
        samplers: theirs.
        logits: ``[B, W, V]``.
        plan: the window.
    """
    errors: dict[int, Exception] = {}
    shaped = any(row.shaped for row in rows)
    if not shaped:
        logprobs = normalize(logits)
        samples = samplers.draw(logprobs, plan.steps, plan.drafted)
    else:
        parts = _shaped(rows, logits, plan, errors)
        if len({part.dtype for part in parts}) == 1:
            logits = mx.stack(parts)
            logprobs = normalize(logits)
            samples = samplers.draw(logprobs, plan.steps, plan.drafted)
            nothing = nothing_left(logits)
        else:
            # A processor may return another dtype. Joined, it would round the other rows anew.
            alone = [normalize(part) for part in parts]
            samples = mx.concatenate(
                [
                    samplers.draw_one(
                        row, each[None], plan.steps[row], drafted=_of(plan.drafted, row)
                    )
                    for row, each in enumerate(alone)
                ]
            )
            logprobs = mx.stack(alone)
            nothing = mx.stack([nothing_left(part) for part in parts])
    if not samplers.stateless and samples.shape[1] == 1:
        samples = _call_samplers(rows, logprobs, samples, errors)
    if shaped:
        samples = mx.where(nothing, -1, samples.astype(mx.int32))
    asked = [row.request.logprobs for row in rows if row.request.logprobs is not None]
    reports = WindowLogprobs.of(logprobs, samples, max(asked)) if asked else None
    return Draw(samples, logprobs, reports, errors)


def _shaped(
    rows: Sequence[Row], logits: mx.array, plan: WindowPlan, errors: dict[int, Exception]
) -> list[mx.array]:
    """Each row's logits ``[W, V]`` after its processors and constraint, as far as may be now."""
    parts = []
    for index, row in enumerate(rows):
        part = logits[index]
        view = _view(row, plan.tokens[index], plan.known, plan.steps[index])
        try:
            if view.width == 1 or not row.positional:
                part = shape_row(row, view, part, plan.masks.get(index))
        except Exception as error:
            errors[index] = error
        parts.append(part)
    return parts


def _of(drafted: Drafted | None, row: int) -> Drafted | None:
    return None if drafted is None else drafted.take(mx.array([row], mx.int32))


def shape_row(row: Row, view: WindowView, logits: mx.array, mask: mx.array | None) -> mx.array:
    """One row's logits after its processors and its constraint.

    Args:
        row: the row.
        view: the tokens before each position.
        logits: ``[W, V]``.
        mask: allowed ids ``[n, V]`` of the first n positions, n up to W; ``None`` for all.

    Returns:
        ``[W, V]``.
    """
    if row.processors:
        logits = row.processors.apply(view, logits)
    if mask is None:
        return logits
    count = min(mask.shape[0], logits.shape[0])
    masked = mx.where(mask[:count], logits[:count], -mx.inf)
    return masked if count == logits.shape[0] else mx.concatenate([masked, logits[count:]])


def sampled_id(ids: object, vocab_size: int) -> mx.array:
    """``[1, 1]`` int32: what a sampler callable drew; ``WRONG_ID`` for an id that does not exist.

    Raises:
        OptionError: not one id.
    """
    if not isinstance(ids, mx.array) or ids.size != 1 or not mx.issubdtype(ids.dtype, mx.integer):
        raise OptionError(f"the sampler returned {one_line(repr(ids))}; return one id, [1]")
    one = ids.reshape(1, 1).astype(mx.int64)
    return mx.where((one >= 0) & (one < vocab_size), one, WRONG_ID).astype(mx.int32)


def _view(row: Row, window: mx.array, known: int, emitted: int) -> WindowView:
    if not row.processors:
        return WindowView(window, window.shape[0], emitted)  # nobody looks at it
    tokens = mx.concatenate([row.history(), window[known:].astype(mx.int32)])
    # Samples of a window that nobody has read may be -1; its row ends before this one counts.
    return WindowView(mx.maximum(tokens, 0), window.shape[0], emitted)


def _call_samplers(
    rows: Sequence[Row], logprobs: mx.array, samples: mx.array, errors: dict[int, Exception]
) -> mx.array:
    """Put the draws of rows with a callable into a window of one position."""
    samples = samples.astype(mx.int32)
    columns = [samples[index : index + 1] for index in range(samples.shape[0])]
    for index, row in enumerate(rows):
        sampler = row.request.sampling.sampler
        if sampler is None or index in errors:
            continue
        try:
            columns[index] = sampled_id(sampler(logprobs[index]), logprobs.shape[-1])
        except Exception as error:
            errors[index] = error
    return columns[0] if len(columns) == 1 else mx.concatenate(columns, axis=0)
