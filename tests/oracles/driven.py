"""Rows of a head, driven without an executor: what they drafted and from which logits.

Hidden states come from ``MlxLmTarget.forward`` over each row's whole text, so no target state is
carried from round to round, and any number of drafts can be taken as accepted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import define, evolve, field, frozen
from mtp_reference import chain, nextn_step

from specdec.contract import ContextKind, Sampled
from specdec.plugins import LoadRequest
from specdec_mtp.plugin import load
from specdec_mtp.rows import HeadRows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest
    from mtp_reference import Pair, Vectors
    from oracles.plain import Release

    from specdec.targets import MlxLmTarget
    from specdec_mtp.provider import HeadProvider

__all__ = [
    "Driven",
    "RoundLog",
    "RoundOfRow",
    "Watched",
    "head_of",
    "hidden_states",
    "log_softmax",
    "redrafted",
    "tokenizer",
]


@define
class Watched:
    """The draws of greedy rows, which keep what they were shown: ``[B, V]`` a step."""

    selection: Sampled = field(factory=Sampled)
    rejecting: bool = False
    seen: list[mx.array] = field(factory=list)

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """The largest of each row."""
        assert len(steps) == logprobs.shape[0]
        self.seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Nobody may ask: no row is judged by rejection."""
        raise AssertionError((logprobs.shape, steps))


def tokenizer(folder: Path) -> Any:
    """As much of a tokenizer as tells the folder that it was loaded from."""
    return SimpleNamespace(name_or_path=str(folder))


def head_of(
    target: MlxLmTarget, kind: str, path: Path | None = None, **options: Any
) -> HeadProvider:
    """The head of a folder, or the target's own, in float32 and never opened before."""
    # A random head agrees with nothing, which is no news here.
    options = {"probe": False, **options}
    loaded = load(LoadRequest(kind=kind, target=target, path=path, options=options))
    provider: Any = loaded.provider
    provider.module.set_dtype(mx.float32)
    head: HeadProvider = provider
    return head


def hidden_states(target: MlxLmTarget, tokens: Sequence[int], kind: ContextKind) -> mx.array:
    """The target's ``[1, n, H]`` at every position of a text."""
    state = target.new_state()
    state.begin_round(len(tokens), reading=True)
    found = target.forward(mx.array([list(tokens)]), state, kind).context
    assert found is not None
    return found


def log_softmax(logits: Vectors) -> Vectors:
    """``[..., V]``, which takes a row's common part away."""
    raised = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(raised - np.log(np.exp(raised).sum(axis=-1, keepdims=True)))


@frozen
class Drafted:
    """One row's draft.

    Attributes:
        tokens: d ids.
        logprobs: ``[d, V]`` that each was the largest of.
    """

    tokens: list[int]
    logprobs: Vectors = field(repr=False)


@define(eq=False)
class Driven:
    """A group of rows whose rounds a test decides.

    Attributes:
        texts: each row's tokens that the target has read.
    """

    target: MlxLmTarget
    rows: HeadRows
    texts: list[list[int]]
    watched: Watched
    _window: list[list[int]] = field(factory=list)

    @classmethod
    def of(
        cls,
        target: MlxLmTarget,
        provider: HeadProvider,
        prompts: Sequence[Sequence[int]],
        step: int = 2048,
    ) -> Driven:
        """Rows that have read their prompts one by one, and decode together."""
        read = []
        for prompt in prompts:
            group = provider.grouped.open_prefill(target=target, checkpoints=[None])
            hidden = hidden_states(target, prompt, group.context)
            for start in range(0, len(prompt), step):
                ids = mx.array([list(prompt[start : start + step])], mx.int32)
                group.prefill(ids, hidden[:, start : start + step])
            read.append(group.capture(0))
            group.close()
        watched = Watched()
        rows = provider.grouped.open(target=target, sampling=watched, checkpoints=read)
        return cls(target, rows, [list(prompt) for prompt in prompts], watched)

    def draft(self, pending: Sequence[int], depths: Sequence[int] | int) -> list[Drafted]:
        """Open a round: each row's drafts, with what they were drawn from."""
        if isinstance(depths, int):
            depths = [depths] * len(pending)
        self.watched.seen.clear()
        drafts = self.rows.draft(pending, depths, [0] * len(pending))
        assert isinstance(drafts, list), "nobody declares a distribution"
        self._window = [[first, *draft] for first, draft in zip(pending, drafts, strict=True)]
        seen = [np.array(each, dtype=np.float64) for each in self.watched.seen]
        return [
            Drafted(draft, np.array([step[row] for step in seen[: len(draft)]]))
            for row, draft in enumerate(drafts)
        ]

    def commit(self, accepted: Sequence[int]) -> None:
        """Take so many of each row's drafts as accepted, whatever the target would have said."""
        width = max(map(len, self._window))
        contexts = []
        for text, window in zip(self.texts, self._window, strict=True):
            hidden = hidden_states(self.target, [*text, *window], self.rows.context)
            own = hidden[:, len(text) :]
            contexts.append(mx.pad(own, [(0, 0), (0, width - len(window)), (0, 0)]))
        self.rows.commit(accepted, mx.concatenate(contexts))
        for text, window, count in zip(self.texts, self._window, accepted, strict=True):
            text.extend(window[: 1 + count])


def redrafted(
    own: Release, pairs: Sequence[Pair], depth: int, *, raw: bool = False
) -> tuple[list[int], Vectors]:
    """The float64 head's drafts after ``pairs``, and their logits ``[d, V]``.

    Args:
        own: the release.
        pairs: what the head has read.
        depth: d.
        raw: whether a step goes on from the output before the head's norm (next-token layers).
    """
    if not raw:
        return own.drafts(pairs, depth)

    def step(known: Sequence[Pair]) -> tuple[Vectors, Vectors]:
        before, after = nextn_step(own.tensors, own.config, known)
        return after, before

    return chain(step, embed=own.embed, score=own.score, pairs=pairs, depth=depth)


@frozen
class RoundOfRow:
    """What one row did in one round."""

    pending: int
    drafts: list[int]
    accepted: int


@define(eq=False)
class RoundLog:
    """Rounds of each row that a group was opened with, whatever place it has later.

    Attributes:
        rounds: by the row's place when its group was opened; for one group at a time.
    """

    rounds: dict[int, list[RoundOfRow]] = field(factory=dict)
    _order: list[int] | None = None
    _pending: list[int] = field(factory=list)
    _drafts: list[list[int]] = field(factory=list)

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch) -> RoundLog:
        """A log of every head's rows."""
        log = cls()
        drafting, on_device = HeadRows.draft, HeadRows.draft_device
        committing, filtering = HeadRows.commit, HeadRows.filter_rows

        def draft(rows: HeadRows, pending: Sequence[int], *asked: Any) -> Any:
            found: Any = drafting(rows, pending, *asked)
            log.opened(rows, pending, found)
            return found

        def draft_device(rows: HeadRows, pending: Sequence[int], *asked: Any) -> Any:
            found = on_device(rows, pending, *asked)
            if found is None:
                return None

            def resolve(read: Sequence[int]) -> Any:
                drafts: Any = found.resolve(read)
                log.opened(rows, pending, drafts)
                return drafts

            return evolve(found, resolve=resolve)

        def commit(rows: HeadRows, accepted: Sequence[int], context: Any) -> None:
            log.closed(accepted)
            committing(rows, accepted, context)

        def filter_rows(rows: HeadRows, keep: Sequence[int]) -> None:
            log.kept(keep)
            filtering(rows, keep)

        for each in (draft, draft_device, commit, filter_rows):
            monkeypatch.setattr(HeadRows, each.__name__, each)
        return log

    def opened(
        self, rows: HeadRows, pending: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> None:
        """A round has begun."""
        if self._order is None:
            self._order = list(range(rows.row_count))
        self._pending, self._drafts = list(pending), [list(draft) for draft in drafts]

    def closed(self, accepted: Sequence[int]) -> None:
        """It has ended."""
        assert self._order is not None
        told = zip(self._order, self._pending, self._drafts, accepted, strict=True)
        for row, pending, drafts, count in told:
            self.rounds.setdefault(row, []).append(RoundOfRow(pending, drafts, count))

    def kept(self, keep: Sequence[int]) -> None:
        """Rows have left, or changed places."""
        if self._order is not None:
            self._order = [self._order[row] for row in keep]
