"""One row's accept walk, with everything of its request that looks at emitted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.errors import ConstraintError, OptionError
from specdec.verify.accept import Acceptance, accept_tokens
from specdec.verify.draws import WRONG_ID
from specdec.verify.positional import PositionByPosition
from specdec.verify.round import RowOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import mlx.core as mx

    from specdec.verify.logprobs import HostLogprobs
    from specdec.verify.row import Row

__all__ = ["raising", "walk_row"]


def walk_row(
    row: Row,
    draft: Sequence[int],
    samples: Iterable[int],
    *,
    forced: int,
    logprobs: mx.array,
    index: int,
    reports: HostLogprobs | None,
) -> RowOutcome:
    """What a row takes from its window; the tokens before its own code raised.

    Args:
        row: the row.
        draft: its drafts, d of them.
        samples: the target's own token at each position.
        forced: drafts that its constraint forced, the first ones.
        logprobs: ``[B, W, V]`` of the window.
        index: its place in ``logprobs`` and ``reports``.
        reports: log-probabilities to report, or ``None``.
    """
    request = row.request
    watched = row.ends is not None or request.stops is not None or row.shaped or row.positional
    if not watched and isinstance(samples, list):
        # The common case: nothing of the request's own runs in the walk.
        acceptance = accept_tokens(draft, samples, end_tokens=request.end_tokens, budget=row.budget)
        return RowOutcome(acceptance, len(draft), forced, logprobs, index, reports)
    passed: list[int] = []

    def stops(token: int) -> bool:
        stop = row.ends_with(token)
        passed.append(token)
        return stop

    error = None
    try:
        acceptance = accept_tokens(
            draft,
            _drawable(samples),
            end_tokens=request.end_tokens,
            budget=row.budget,
            stops=stops,
        )
    except Exception as raised:
        # Each token that was passed was an accepted draft, or the walk would have ended there.
        error, acceptance = raised, Acceptance(len(passed), tuple(passed))
    if isinstance(samples, PositionByPosition) and samples.drawn:
        logprobs, index, reports = samples.logprobs, 0, samples.reports
    drafted = len(draft) if error is None else len(passed)
    return RowOutcome(acceptance, drafted, min(forced, drafted), logprobs, index, reports, error)


def raising(error: Exception) -> Iterator[int]:
    """Samples of a row whose own code has raised already."""
    raise error
    yield 0


def _drawable(samples: Iterable[int]) -> Iterator[int]:
    for sample in samples:
        if sample == WRONG_ID:
            raise OptionError(
                "the sampler returned an id that the model does not have; return one of its "
                "vocabulary"
            )
        if sample < 0:
            raise ConstraintError(
                "no token is left to draw: processors and constraint exclude all of them; "
                "loosen one of them"
            )
        yield sample
