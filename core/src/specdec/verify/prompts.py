"""The drafter's side of reading prompts, behind the same wall as its rounds.

What a drafter raises over a prompt counts against the row of that prompt, which is not there yet:
it is remembered until the row is, and then counted (``answer_for``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.contract import ContextKind, DeclaresTaps, PrefillMode, RowCheckpoint
from specdec.errors import ContractError, TargetLacksError, one_line
from specdec.verify.stats import log

if TYPE_CHECKING:
    import mlx.core as mx

    from specdec.contract import DraftPrefillGroup, GroupedDraftProvider, TargetView
    from specdec.verify.request import Row

__all__ = ["DraftPrompts"]


class DraftPrompts:
    """Prefill groups of one row each, and what the drafter raises over them.

    Args:
        grouped: the drafter's factory of groups.
        name: its kind, for the statistics.
        target: the bound target.

    Attributes:
        taps: the layers that the drafter reads.
        context: the hidden states that it reads, as far as it has said.
        given_up: whether no prompt is shown to it any more.

    Raises:
        TargetLacksError: the drafter taps layers that the target cannot capture.
    """

    def __init__(self, grouped: GroupedDraftProvider, name: str, target: TargetView) -> None:
        self._grouped = grouped
        self._name = name
        self._target = target
        self._raised: list[Exception] = []  # over the prompt that is read
        self._mode: PrefillMode | None = None  # how it reads prompts, once it has said so
        self.given_up = False
        self.taps: tuple[int, ...] = ()
        if isinstance(grouped, DeclaresTaps):
            self.taps = tuple(grouped.target_tap_layers(target))
            if not target.can_tap(self.taps):
                raise TargetLacksError(f"hidden_taps{list(self.taps)}", name)
        self.context = ContextKind.TAPS if self.taps else ContextKind.NONE

    @property
    def namespace(self) -> str | None:
        """What a draft row is stored under; ``None`` where the drafter does not say."""
        try:
            name = self._grouped.checkpoint_namespace
        except Exception:
            return None
        return name if isinstance(name, str) and name else None

    @property
    def need_tokens_alone(self) -> bool:
        """Whether a prompt can be read again without the target, as far as the drafter has said."""
        return self.context is ContextKind.NONE and self._mode is not PrefillMode.FULL

    def forget(self) -> None:
        """Forget what was raised over prompts whose rows never came to be."""
        self._raised = []

    def open(self) -> DraftPrefillGroup | None:
        """A prefill group of one cold row; ``None`` after a failure."""
        if self.given_up:
            return None
        try:
            return self._group(None)
        except Exception as error:
            self._raised.append(error)
            return None

    def restore(self, checkpoint: RowCheckpoint) -> DraftPrefillGroup | None:
        """A prefill group of one restored row, which needs what it was restored from no more.

        Returns:
            The group; ``None`` where the drafter will not have the checkpoint, which is no fault of
            its own: the prompt can be read instead.
        """
        if self.given_up:
            return None
        try:
            group = self._group(checkpoint)
            try:
                group.materialize()
            except BaseException:
                self.shut(group)
                raise
        except Exception as error:
            log.debug("a drafter did not take a stored row", exc_info=error)
            return None
        return group

    def read(self, group: DraftPrefillGroup, tokens: mx.array, context: mx.array | None) -> bool:
        """Give a prefill group the chunk that the target has read.

        Returns:
            Whether it took it; after a failure the group is closed.
        """
        try:
            group.prefill(tokens, context)
        except Exception as error:
            self._raised.append(error)
            self.shut(group)
            return False
        return True

    def snapshot(self, group: DraftPrefillGroup) -> RowCheckpoint | None:
        """The row that a prefill group has read so far; after a failure the group is closed."""
        try:
            checkpoint = group.capture(0)
            if not isinstance(checkpoint, RowCheckpoint):
                raise ContractError(f"capture() returned {type(checkpoint).__name__}")
        except BaseException as error:
            self.shut(group)
            if not isinstance(error, Exception):
                raise  # an interrupt: nobody else knows of the group any more
            self._raised.append(error)
            return None
        return checkpoint

    def hand_over(self, group: DraftPrefillGroup) -> RowCheckpoint | None:
        """The row of a prompt that was read; the group is closed."""
        checkpoint = self.snapshot(group)
        if checkpoint is not None:
            self.shut(group)
        return checkpoint

    def shut(self, group: DraftPrefillGroup) -> None:
        """Close a prefill group. Raising here is counted, but leaves nothing to give up."""
        try:
            group.close()
        except Exception as error:
            self._raised.append(error)

    def answer_for(self, row: Row, checkpoint: RowCheckpoint | None) -> None:
        """Count what was raised while a prompt was read, now that its row is known.

        Args:
            row: the row of the prompt.
            checkpoint: what came of it; the row stays outside where it is ``None``.
        """
        raised = self._raised
        self.forget()
        for error in raised:
            row.stats.count_draft_error(error)
        if raised and checkpoint is None:
            row.stats.reason = f"drafter {self._name} failed: {one_line(raised[0])}"

    def _group(self, checkpoint: RowCheckpoint | None) -> DraftPrefillGroup:
        group = self._grouped.open_prefill(target=self._target, checkpoints=[checkpoint])
        try:
            self._learn(group)
        except BaseException:
            self.shut(group)
            raise
        return group

    def _learn(self, group: DraftPrefillGroup) -> None:
        mode = PrefillMode(group.prefill_mode)
        context, tapped = ContextKind(group.context), tuple(group.tap_layers)
        if tapped != self.taps or (context is ContextKind.TAPS) != bool(tapped):
            raise ContractError(
                f"the group taps {list(tapped)} as {context}, but its provider declares "
                f"{list(self.taps)}"
            )
        self.context, self._mode = context, mode
