"""Building a verify window, submitting it, and reading what came back.

Draft, forward, head and draw are one graph: nothing is read between them. A plain window can be
built on the samples of the window before it while those are still computing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.sampling import RowSamplers
from specdec.sampling.rows import normalize
from specdec.verify.accept import Acceptance, accept_tokens
from specdec.verify.flight import Flight, host_read, pack, window_tokens
from specdec.verify.members import pick
from specdec.verify.proposals import Drafts, cut_device
from specdec.verify.round import RowOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from specdec.state import RowState
    from specdec.targets import Target
    from specdec.verify.flight import Landed
    from specdec.verify.lane import DraftLane
    from specdec.verify.request import Row

__all__ = ["Verifier"]


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
    ) -> Flight:
        """Draft, build the window and submit it; a round is open on ``state`` afterwards.

        Args:
            rows: the host rows.
            state: the target's rows, between rounds.
            lane: the drafter, or ``None`` for a plain window.
            after: a plain window that is not read yet; this one is built on its samples.
        """
        proposed = Drafts([()] * len(rows), [0] * len(rows))
        if after is not None:
            # Its samples are emitted, if at all, before anything of this window is.
            steps = [row.steps + 1 for row in rows]
            tokens = after.samples
        else:
            steps = [row.steps for row in rows]
            vocab = self._target.vocab_size
            most = 1 + max(row.width for row in rows)  # before a row stands down in this round
            if lane is not None:
                proposed = lane.propose(rows, vocab, on_device=self._samplers.stateless)
            tokens = window_tokens(
                [row.pending for row in rows],
                proposed.rows,
                None if proposed.device is None else proposed.device.tokens,
                vocab=vocab,
                width=state.window_width(1 + max(map(len, proposed.rows)), most),
            )
        state.begin_round(tokens.shape[1])
        if lane is not None and lane.is_open:
            window = self._target.forward(tokens, state, lane.context, lane.taps)
        else:
            window = self._target.forward(tokens, state)
        logprobs = normalize(window.logits)
        samples = self._samplers.draw(logprobs, steps)
        errors: dict[int, Exception] = {}
        if not self._samplers.stateless and samples.shape[1] == 1:
            samples = self._call_samplers(logprobs, samples, errors)
        device = proposed.device
        flight = Flight(
            samples,
            logprobs,
            window.context,
            proposed.rows,
            proposed.depths,
            device,
            packed=samples if device is None else pack(samples, device),
            places=proposed.places,
            errors=errors,
        )
        mx.async_eval(flight.packed)  # type: ignore[no-untyped-call]  # untyped in MLX's stubs
        return flight

    def land(
        self, rows: Sequence[Row], flight: Flight, lane: DraftLane | None
    ) -> list[RowOutcome | None]:
        """Read a window (the round's one host read) and walk every row of it.

        Returns:
            One outcome per row; ``None`` for rows that joined since it was launched, which are
            the last ones.
        """
        landed = flight.land()
        drafts, logprobs = flight.drafts, flight.logprobs
        if flight.device is not None:
            drafts = self._resolve(rows[: flight.row_count], flight, landed, lane)
        outcomes: list[RowOutcome | None] = [None] * len(rows)
        for index, row_samples in enumerate(landed.samples):
            draft = drafts[index]
            count = len(draft) + 1
            samples: Iterable[int] = row_samples[:count]
            if not self._samplers.stateless:
                sampler = self._samplers.callable_of(index)
                if index in flight.errors:
                    samples = _raising(flight.errors[index])
                elif sampler is not None and flight.width > 1:
                    samples = _one_by_one(sampler, logprobs[index], count)
            outcomes[index] = _walk(rows[index], draft, samples, logprobs, index)
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
        logprobs = normalize(mx.concatenate([each for each in logits if each is not None], axis=0))
        alone = RowSamplers()
        drawn = [(rows[index].request.sampling, rows[index].seed) for index in fresh]
        alone.prepare_append(drawn).commit()
        read = host_read(alone.draw(logprobs, [rows[index].steps for index in fresh]))
        outcomes: list[RowOutcome | None] = [None] * len(rows)
        for place, index in enumerate(fresh):
            samples: Iterable[int] = read[place]
            sampler = alone.callable_of(place)
            if sampler is not None:
                samples = _one_by_one(sampler, logprobs[place], 1)
            outcomes[index] = _walk(rows[index], (), samples, logprobs, place)
        return outcomes

    def _resolve(
        self, rows: Sequence[Row], flight: Flight, landed: Landed, lane: DraftLane | None
    ) -> list[list[int]]:
        """Device drafts, now on the host, cut to what is valid."""
        assert flight.device is not None
        assert landed.device is not None
        places = flight.places
        read = pick(landed.device, places)
        lengths = None if landed.lengths is None else pick(landed.lengths, places)
        cut = (pick(flight.depths, places), self._target.vocab_size)
        try:
            resolved = flight.device.resolve([token for row in read for token in row])
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

    def _call_samplers(
        self, logprobs: mx.array, samples: mx.array, errors: dict[int, Exception]
    ) -> mx.array:
        """Put the draws of rows with a callable into a window of one position."""
        columns = [samples[index : index + 1] for index in range(samples.shape[0])]
        for index in range(len(columns)):
            sampler = self._samplers.callable_of(index)
            if sampler is None:
                continue
            try:
                ids = sampler(logprobs[index])
                columns[index] = ids.reshape(1, 1).astype(samples.dtype)
            except Exception as error:
                errors[index] = error
        return columns[0] if len(columns) == 1 else mx.concatenate(columns, axis=0)


def _one_by_one(
    sampler: Callable[[mx.array], mx.array], logprobs: mx.array, count: int
) -> Iterator[int]:
    """A callable's draws over ``[W, V]``, each made only when the walk reaches its position."""
    for position in range(count):
        yield int(host_read(sampler(logprobs[position][None]).reshape(1))[0])


def _raising(error: Exception) -> Iterator[int]:
    """Samples of a row whose sampler has raised already."""
    raise error
    yield 0


def _walk(
    row: Row, draft: Sequence[int], samples: Iterable[int], logprobs: mx.array, index: int
) -> RowOutcome:
    """What a row takes from its window; the tokens before its own sampler or stop rule raised."""
    request = row.request
    if request.stops is None and isinstance(samples, list):
        # The common case: nothing of the request's own runs in the walk.
        acceptance = accept_tokens(draft, samples, end_tokens=request.end_tokens, budget=row.budget)
        return RowOutcome(acceptance, len(draft), logprobs, index)
    passed: list[int] = []

    def stops(token: int) -> bool:
        stop = request.stops is not None and request.stops(token)
        passed.append(token)
        return stop

    try:
        acceptance = accept_tokens(
            draft, samples, end_tokens=request.end_tokens, budget=row.budget, stops=stops
        )
    except Exception as error:
        # Each token that was passed was an accepted draft, or the walk would have ended there.
        kept = Acceptance(len(passed), tuple(passed))
        return RowOutcome(kept, len(passed), logprobs, index, error)
    return RowOutcome(acceptance, len(draft), logprobs, index)
