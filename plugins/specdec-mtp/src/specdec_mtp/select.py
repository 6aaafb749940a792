"""Which token a head drafts: an argmax, the row's own draw, or a draw over listed ids.

Shapes: B rows, H hidden size, V vocabulary, N listed ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import Greedy, Listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RecurrentMtp, RowSampling, VocabularySubset

__all__ = ["Choice", "Chooser"]


@frozen(eq=False)
class Choice:
    """One drafted token per row.

    Attributes:
        ids: ``[B]`` over the whole vocabulary.
        logq: ``[B, V or N]`` log-probabilities they were drawn from; ``None`` where nobody asks.
    """

    ids: mx.array
    logq: mx.array | None = None


class Chooser:
    """How the rows of a group choose; asked of their samplers anew at each step, as rows change.

    Args:
        port: the target's vocabulary head.
        sampling: the rows' draws.
        subset: the head over the draft vocabulary, if there is one.
    """

    def __init__(
        self, port: RecurrentMtp, sampling: RowSampling, subset: VocabularySubset | None
    ) -> None:
        self._port = port
        self._sampling = sampling
        self._subset = subset

    def __call__(self, hidden: mx.array, steps: Sequence[int]) -> Choice:
        """A token per row.

        Args:
            hidden: ``[B, 1, H]`` after the head's norm.
            steps: B ints, samples drawn before the drafted position.
        """
        selection, rejecting = self._sampling.selection, self._sampling.rejecting
        if isinstance(selection, Listed) and self._subset is not None:
            logits = self._subset.project(hidden)[:, 0]
            ids = selection.sample(logits, steps)
            return Choice(ids, selection.log_distribution(logits, steps) if rejecting else None)
        logits = self._port.logits(hidden)[:, 0]
        if isinstance(selection, Greedy) and not rejecting:
            return Choice(mx.argmax(logits, axis=-1))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        ids = self._sampling.sample(logprobs, steps)
        declared = self._sampling.log_distribution(logprobs, steps) if rejecting else None
        return Choice(ids, declared)
