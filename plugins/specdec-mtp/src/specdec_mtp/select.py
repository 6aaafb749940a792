"""Which token a head drafts: its hidden states are scored with the target's vocabulary head.

Shapes: B rows, H hidden size, V vocabulary, N listed ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.drafting.choose import Chooser, head_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RecurrentMtp, RowSampling, VocabularySubset
    from specdec.drafting.choose import Choice

__all__ = ["HeadChooser"]


class HeadChooser:
    """How the rows of a group score and choose.

    Args:
        port: the target's vocabulary head.
        sampling: the rows' draws.
        vocab_size: V.
        subset: the head over the draft vocabulary, if there is one.
    """

    def __init__(
        self,
        port: RecurrentMtp,
        sampling: RowSampling,
        vocab_size: int,
        subset: VocabularySubset | None,
    ) -> None:
        self._score = head_of(port.logits, port)
        self._project = None if subset is None else head_of(subset.project, subset)
        self._ids = None if subset is None else mx.array(list(subset.ids), mx.int32)
        self._choose = Chooser(sampling, vocab_size, self._ids)

    def __call__(self, hidden: mx.array, steps: Sequence[int]) -> Choice:
        """A token per row.

        Args:
            hidden: ``[B, 1, H]`` after the head's norm.
            steps: B ints, samples drawn before the drafted position.
        """
        if self._project is not None and self._choose.lists:
            return self._choose(self._project(hidden)[:, 0], steps, self._ids)
        return self._choose(self._score(hidden)[:, 0], steps)
