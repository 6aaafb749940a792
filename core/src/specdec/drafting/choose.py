"""Which tokens a drafter proposes: an argmax, each row's own draw, or a draw over some ids.

Shapes: B rows, L positions, H hidden size, V vocabulary, N ids that were scored, d drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import Greedy, Listed, RowTable
from specdec.drafting.padding import PaddedRows, counts_of
from specdec.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import RowSampling

__all__ = ["BlockChoices", "Choice", "Chooser", "declared", "head_of"]


def head_of(
    operation: Callable[[mx.array], mx.array], owner: object
) -> RowTable[Callable[[mx.array], mx.array]]:
    """A head as drafters call it: by the number of rows.

    A form that was declared for just so many rows is called as it is. Any other number goes
    through the default, on a GPU padded to the number of rows that was measured to be cheapest.

    Args:
        operation: ``[B, L, H] -> [B, L, V or N]``, each position by itself; may be a ``RowTable``.
        owner: whose it is, such as a port. What was measured is remembered with it.
    """
    table = RowTable.of(operation)
    return RowTable(PaddedRows(table.default, counts_of(owner), axes=2), table.declared)


@frozen(eq=False)
class Choice:
    """One drafted token per row.

    Attributes:
        ids: ``[B]`` over the whole vocabulary.
        logq: ``[B, V or N]`` log-probabilities they were drawn from; ``None`` where nobody asks.
    """

    ids: mx.array
    logq: mx.array | None = None


def declared(choices: Sequence[Choice]) -> mx.array | None:
    """``[B, d, V or N]`` of a draft's choices, if they were asked for."""
    logq = [choice.logq for choice in choices if choice.logq is not None]
    return mx.stack(logq, axis=1) if logq and len(logq) == len(choices) else None


class Chooser:
    """How the rows of a group choose; asked of their samplers anew at each step, as rows change.

    Args:
        sampling: the rows' draws.
        vocab_size: V.
        listed: ``[N]`` the ids that the group declares as its draft vocabulary, if it does.
    """

    def __init__(
        self, sampling: RowSampling, vocab_size: int, listed: mx.array | None = None
    ) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._listed = listed

    @property
    def lists(self) -> bool:
        """Whether the rows draft over the draft vocabulary now."""
        return isinstance(self._sampling.selection, Listed)

    @property
    def greedy(self) -> bool:
        """Whether a draft is an argmax now, and nobody asks what it was drawn from."""
        sampling = self._sampling
        return isinstance(sampling.selection, Greedy) and not sampling.rejecting

    def __call__(
        self, logits: mx.array, steps: Sequence[int], ids: mx.array | None = None
    ) -> Choice:
        """A token per row.

        Args:
            logits: ``[B, V]``, or ``[B, N]`` of the ids alone.
            steps: B ints, samples drawn before the drafted position.
            ids: ``[N]`` or ``[B, N]``, which were scored; none twice in a row. The group's own
                draft vocabulary is known by its array.

        Raises:
            ContractError: another number of logits than of ids.
        """
        scored = self._vocab_size if ids is None else ids.shape[-1]
        if logits.shape[-1] != scored:
            raise ContractError(
                f"the logits are of {logits.shape[-1]} ids, but there are {scored}; pass the ids "
                "that were scored"
            )
        if self.greedy:
            return Choice(_picked(mx.argmax(logits, axis=-1), ids))
        sampling, selection = self._sampling, self._sampling.selection
        if isinstance(selection, Listed) and ids is not None and ids is self._listed:
            drawn = selection.sample(logits, steps)
            rejecting = sampling.rejecting
            return Choice(drawn, selection.log_distribution(logits, steps) if rejecting else None)
        if ids is not None:
            logits = self._everywhere(logits, ids)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = sampling.sample(logprobs, steps)
        rejecting = sampling.rejecting
        return Choice(drawn, sampling.log_distribution(logprobs, steps) if rejecting else None)

    def _everywhere(self, logits: mx.array, ids: mx.array) -> mx.array:
        """Logits ``[B, V]`` that are ``-inf`` at what was not scored."""
        every = mx.full((logits.shape[0], self._vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(every, mx.broadcast_to(ids, logits.shape), logits, axis=-1)


class BlockChoices:
    """The choices of one block, by slot.

    Args:
        choose: of the group.
        steps: B ints, samples drawn before the first draft.
    """

    def __init__(self, choose: Chooser, steps: Sequence[int]) -> None:
        self._choose = choose
        self._steps = list(steps)
        self._choices: list[Choice] = []

    def next(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """The next slot's token of each row, ``[B]``; as :class:`Chooser`."""
        at = len(self._choices)
        choice = self._choose(logits, [step + at for step in self._steps], ids)
        self._choices.append(choice)
        return choice.ids

    def every(self, logits: mx.array, ids: mx.array | None = None) -> mx.array:
        """Tokens ``[B, d]`` of slots that do not depend on each other.

        Args:
            logits: ``[B, d, V or N]``.
            ids: ``[N]``, which were scored, or ``None`` for all.
        """
        if self._choose.greedy:
            return self._choose(logits, self._steps, ids).ids
        slots = [self.next(logits[:, at], ids) for at in range(logits.shape[1])]
        return mx.stack(slots, axis=1)

    @property
    def logq(self) -> mx.array | None:
        """``[B, d, V or N]`` what the tokens were drawn from, where somebody asks."""
        return declared(self._choices)


def _picked(best: mx.array, ids: mx.array | None) -> mx.array:
    """The ids at these places."""
    if ids is None:
        return best
    if ids.ndim == 1:
        return ids[best]
    return mx.take_along_axis(ids, best[..., None], axis=-1)[..., 0]
