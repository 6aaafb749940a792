"""Building a verify window, submitting it, and reading what came back.

Draft, forward, head and draw are one graph: nothing is read between them. A plain window can be
built on the samples of the window before it while those are still computing.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve

from specdec.errors import ConstraintError
from specdec.sampling import RowSamplers
from specdec.verify.drafts import Drafts
from specdec.verify.draws import WindowPlan, draw_window
from specdec.verify.flight import Flight, host_reads, pack, window_tokens
from specdec.verify.forced import forced_drafts
from specdec.verify.members import pick
from specdec.verify.positional import PositionByPosition
from specdec.verify.proposals import cut_device
from specdec.verify.walk import raising, walk_row

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.flight import Landed
    from specdec.verify.lane import DraftLane
    from specdec.verify.round import RowOutcome
    from specdec.verify.row import Row

__all__ = ["Verifier"]

_STEP = 8  # where windows may have few widths, those with forced drafts have multiples of it


class Verifier:
    """Windows of one target, drawn by one group's samplers.

    Args:
        target: the bound target.
        samplers: the group's; in the order of its rows.
    """

    def __init__(self, target: Target, samplers: RowSamplers) -> None:
        self._target = target
        self._samplers = samplers

    def launch(
        self,
        rows: Sequence[Row],
        state: RowState,
        lane: DraftLane | None,
        after: Flight | None = None,
        *,
        rests: bool = False,
        padded: Callable[[int], int] | None = None,
    ) -> Flight:
        """Draft, build the window and submit it; a round is open on ``state`` afterwards.

        Args:
            rows: the host rows.
            state: the target's rows, between rounds.
            lane: the drafter, or ``None`` for a plain window.
            after: a plain window that is not read yet; this one is built on its samples.
            rests: whether the drafter is not asked, and reads this plain window later.
            padded: the width to give a window that needs so many positions.
        """
        errors: dict[int, Exception] = {}
        if after is not None:
            # Its samples are emitted, if at all, before anything of this window is.
            nothing = Drafts([()] * len(rows), [0] * len(rows))
            plan, proposed = _behind(rows, after), nothing
        else:
            plan, proposed = self._plan(rows, state, None if rests else lane, errors)
        needed = plan.tokens.shape[1]
        if padded is not None and (width := padded(needed)) > needed:
            plan = evolve(plan, tokens=mx.pad(plan.tokens, [(0, 0), (0, width - needed)]))
        state.begin_round(plan.tokens.shape[1])
        if lane is not None and lane.is_open:
            window = self._target.forward(plan.tokens, state, lane.context, lane.taps)
        else:
            window = self._target.forward(plan.tokens, state)
        draw = draw_window(rows, self._samplers, window.logits, plan)
        draw.errors.update(errors)
        device = proposed.device
        by_position = plan.tokens.shape[1] > 1 and any(row.positional for row in rows)
        flight = Flight(
            draw,
            window.context,
            proposed,
            packed=draw.samples if device is None else pack(draw.samples, device),
            logits=window.logits if by_position else None,
            masks=plan.masks if by_position else {},
            drafted=lane is not None and not rests,
            missed=plan.tokens if rests and lane is not None and lane.is_open else None,
        )
        mx.async_eval(*flight.arrays)  # type: ignore[no-untyped-call]  # untyped in MLX's stubs
        return flight

    def _plan(
        self,
        rows: Sequence[Row],
        state: RowState,
        lane: DraftLane | None,
        errors: dict[int, Exception],
    ) -> tuple[WindowPlan, Drafts]:
        """Drafts, and the window that verifies them; fills in what rows' constraints raised."""
        vocab = self._target.vocab_size
        masks: dict[int, mx.array | None] = {}
        constrained = any(row.constraint is not None for row in rows)
        most = 1 + max(row.width for row in rows)  # before a row stands down in this round
        forced: dict[int, list[int]] = {}
        if constrained and state.reason is None:
            forced = forced_drafts(rows, lane, errors)
        if lane is None:
            proposed = Drafts([()] * len(rows), [0] * len(rows)).behind(forced, vocab)
        else:
            proposed = lane.propose(
                rows,
                vocab,
                state=state,
                on_device=not constrained and not any(row.positional for row in rows),
                forced=forced,
                rejecting=self._samplers.rejecting,
            )
        if constrained:
            proposed = _masked(rows, proposed, masks, errors, vocab)
            forced_most = 1 + -(-max(map(len, proposed.rows)) // _STEP) * _STEP
            most = max(most, forced_most) if forced else most
        tokens = window_tokens(
            [row.pending for row in rows],
            proposed.rows,
            None if proposed.device is None else proposed.device.tokens,
            vocab=vocab,
            width=state.window_width(1 + max(map(len, proposed.rows)), most),
        )
        steps = [row.drawn for row in rows]
        drafted = proposed.drafted(vocab) if self._samplers.rejecting else None
        return WindowPlan(tokens, 1, steps, masks, drafted), proposed

    def land(
        self,
        rows: Sequence[Row],
        flight: Flight,
        lane: DraftLane | None,
        *,
        skip: Container[int] = (),
    ) -> list[RowOutcome | None]:
        """Read a window (the round's one host read) and walk every row of it.

        Args:
            rows: the host rows.
            flight: the window.
            lane: the drafter that drafted for it, if it still does.
            skip: rows that are not walked, for they take nothing of it.

        Returns:
            One outcome per row; ``None`` for those that are skipped, and for those that joined
            since it was launched, which are the last ones.
        """
        landed = flight.land()
        proposed, draw = flight.proposed, flight.draw
        drafts = proposed.rows
        if proposed.device is not None:
            drafts = self._resolve(rows[: flight.row_count], flight, landed, lane)
        outcomes: list[RowOutcome | None] = [None] * len(rows)
        for index, row_samples in enumerate(landed.samples):
            row, draft = rows[index], drafts[index]
            if index in skip:
                continue
            samples: Iterable[int] = row_samples[: len(draft) + 1]
            if index in draw.errors:
                samples = raising(draw.errors[index])
            elif flight.logits is not None and row.positional:
                samples = PositionByPosition(
                    row,
                    index,
                    self._samplers,
                    flight.logits[index],
                    flight.masks.get(index),
                    draft,
                    None if proposed.logq is None else proposed.logq[index],
                    index in proposed.refused,
                )
            outcomes[index] = walk_row(
                row,
                draft,
                samples,
                forced=proposed.forced[index] if proposed.forced else 0,
                logprobs=draw.logprobs,
                index=index,
                reports=landed.reports,
            )
        return outcomes

    def firsts(
        self, rows: Sequence[Row], logits: Sequence[mx.array | None]
    ) -> list[RowOutcome | None]:
        """The tokens that come with prompts that were read whole: one host read for all.

        Args:
            rows: the host rows.
            logits: per row ``[1, 1, V]`` after its last prompt token, nothing emitted yet; ``None``
                for the other rows.
        """
        fresh = [index for index, each in enumerate(logits) if each is not None]
        theirs = pick(rows, fresh)
        alone = RowSamplers()
        alone.prepare_append([(row.request.sampling, row.seed) for row in theirs]).commit()
        errors: dict[int, Exception] = {}
        masks: dict[int, mx.array | None] = {}
        nothing = Drafts([()] * len(fresh), [0] * len(fresh))
        _masked(theirs, nothing, masks, errors, self._target.vocab_size)
        plan = WindowPlan(
            tokens=mx.array([[row.pending] for row in theirs], mx.int32),
            known=1,
            steps=[row.drawn for row in theirs],
            masks=masks,
        )
        window = mx.concatenate([each for each in logits if each is not None], axis=0)
        draw = draw_window(theirs, alone, window, plan)
        draw.errors.update(errors)
        read, *rest = host_reads(*draw.arrays)
        reports = None if draw.reports is None else draw.reports.on_host(rest)
        outcomes: list[RowOutcome | None] = [None] * len(rows)
        for place, index in enumerate(fresh):
            samples: Iterable[int] = read[place]
            if place in draw.errors:
                samples = raising(draw.errors[place])
            outcomes[index] = walk_row(
                rows[index],
                (),
                samples,
                forced=0,
                logprobs=draw.logprobs,
                index=place,
                reports=reports,
            )
        return outcomes

    def _resolve(
        self, rows: Sequence[Row], flight: Flight, landed: Landed, lane: DraftLane | None
    ) -> list[list[int]]:
        """Device drafts, now on the host, cut to what is valid."""
        proposed = flight.proposed
        assert proposed.device is not None
        assert landed.device is not None
        places = proposed.places
        read = pick(landed.device, places)
        lengths = None if landed.lengths is None else pick(landed.lengths, places)
        cut = (pick(proposed.depths, places), self._target.vocab_size)
        try:
            resolved = proposed.device.resolve([token for row in read for token in row])
            drafts, faults = cut_device(read, lengths, resolved, *cut)
        except Exception as error:
            if lane is not None:
                lane.fail(error)
            drafts, faults = cut_device(read, lengths, read, *cut)
        if lane is not None:
            lane.blame(pick(rows, places), faults)
        if places is None:
            return drafts
        drafted = dict(zip(places, drafts, strict=True))
        return [drafted.get(index, []) for index in range(flight.row_count)]


def _behind(rows: Sequence[Row], after: Flight) -> WindowPlan:
    """A plain window on the samples of another that nobody has read."""
    tokens = after.draw.samples[:, :1]
    if any(row.shaped or row.positional for row in rows):
        tokens = mx.maximum(tokens, 0)  # a row with nothing left to draw ends anyway
    return WindowPlan(tokens, 0, [row.drawn + 1 for row in rows], {})


def _checked(mask: object, allowed: int, vocab: int) -> int:
    """The number of allowed drafts, if there is a row of the mask behind each."""
    if mask is not None:
        shape = tuple(getattr(mask, "shape", ()))
        if shape != (allowed + 1, vocab):
            raise ConstraintError(
                f"masks() gave an array of shape {list(shape)} for {allowed} allowed drafts; "
                f"give [{allowed + 1}, {vocab}]"
            )
    return allowed


def _masked(
    rows: Sequence[Row],
    proposed: Drafts,
    masks: dict[int, mx.array | None],
    errors: dict[int, Exception],
    vocab: int,
) -> Drafts:
    """The drafts that constraints allow; fills in what may follow each, or what was raised."""
    counts = {}
    for index, row in enumerate(rows):
        if row.constraint is None or index in errors:
            continue
        try:
            mask, allowed = row.constraint.masks(list(proposed.rows[index]))
            masks[index], counts[index] = mask, _checked(mask, operator.index(allowed), vocab)
        except Exception as error:
            errors[index] = error
    return proposed.cut(counts) if counts else proposed
