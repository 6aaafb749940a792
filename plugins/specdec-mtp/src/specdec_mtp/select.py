"""Which token a head drafts: the row's own draw, an argmax, or a draw over listed ids.

Shapes: B rows, H hidden size, V vocabulary, N listed ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
from attrs import frozen

from specdec.contract import Greedy, Listed
from specdec.errors import TargetLacksError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import RecurrentMtp, RowSampling, VocabularySubset

__all__ = ["Choice", "Choose", "bind_selection"]


@frozen(eq=False)
class Choice:
    """One drafted token per row.

    Attributes:
        ids: ``[B]`` over the whole vocabulary.
        logq: ``[B, V or N]`` log-probabilities they were drawn from; ``None`` where nobody asks.
    """

    ids: mx.array
    logq: mx.array | None = None


Choose: TypeAlias = "Callable[[mx.array, Sequence[int]], Choice]"
"""Hidden states ``[B, 1, H]`` after the head's norm, and each row's step, to a choice."""


def bind_selection(
    port: RecurrentMtp, sampling: RowSampling, subset: VocabularySubset | None
) -> Choose:
    """How a group chooses tokens, decided once by the requests that open it.

    Args:
        port: the target's vocabulary head.
        sampling: the rows' draws.
        subset: the head over the draft vocabulary, if there is one.

    Raises:
        TargetLacksError: ids are listed, and the target's head cannot be cut to them.
    """
    selection = sampling.selection
    if isinstance(selection, Listed):
        return _listed(subset, sampling, selection)
    if isinstance(selection, Greedy):
        return _greedy(port, sampling)
    return _sampled(port, sampling)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _greedy(port: RecurrentMtp, sampling: RowSampling) -> Choose:
    def choose(hidden: mx.array, steps: Sequence[int]) -> Choice:
        # Rows that draw otherwise may have joined since; only then somebody asks for more.
        logits = port.logits(hidden)[:, 0]
        if sampling.rejecting:
            logprobs = _log_softmax(logits)
            ids = sampling.sample(logprobs, steps)
            return Choice(ids, sampling.log_distribution(logprobs, steps))
        return Choice(mx.argmax(logits, axis=-1))

    return choose


def _sampled(port: RecurrentMtp, sampling: RowSampling) -> Choose:
    def choose(hidden: mx.array, steps: Sequence[int]) -> Choice:
        logprobs = _log_softmax(port.logits(hidden)[:, 0])
        ids = sampling.sample(logprobs, steps)
        declared = sampling.log_distribution(logprobs, steps) if sampling.rejecting else None
        return Choice(ids, declared)

    return choose


def _listed(subset: VocabularySubset | None, sampling: RowSampling, selection: Listed) -> Choose:
    if subset is None or tuple(subset.ids) != selection.ids:
        raise TargetLacksError("recurrent_mtp with a head that can be cut", "a draft vocabulary")

    def choose(hidden: mx.array, steps: Sequence[int]) -> Choice:
        logits = subset.project(hidden)[:, 0]
        ids = selection.sample(logits, steps)
        declared = selection.log_distribution(logits, steps) if sampling.rejecting else None
        return Choice(ids, declared)

    return choose
