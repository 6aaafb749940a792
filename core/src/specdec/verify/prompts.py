"""The drafter's side of reading prompts, behind the same wall as its rounds.

What a drafter raises over a prompt counts against the row of that prompt, whatever other prompts
are read at the same time.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define, field

from specdec.contract import ContextKind, DeclaresTaps, PrefillMode, RowCheckpoint
from specdec.errors import ContractError, TargetLacksError, one_line
from specdec.verify.stats import log

if TYPE_CHECKING:
    import mlx.core as mx

    from specdec.contract import DraftPrefillGroup, GroupedDraftProvider, TargetView
    from specdec.verify.row import Row

__all__ = ["DraftPrompt", "DraftPrompts"]


class DraftPrompts:
    """What a drafter needs to read prompts, and new prefill groups of one row each.

    Args:
        grouped: the drafter's factory of groups.
        name: its kind, for the statistics.
        target: the bound target.

    Attributes:
        name: the drafter's kind.
        taps: the layers that the drafter reads.
        context: the hidden states that it reads, as far as it has said.
        given_up: whether no prompt is shown to it any more.

    Raises:
        TargetLacksError: the drafter taps layers that the target cannot capture.
    """

    def __init__(self, grouped: GroupedDraftProvider, name: str, target: TargetView) -> None:
        self._grouped = grouped
        self._target = target
        self._mode: PrefillMode | None = None  # how it reads prompts, once it has said so
        self.name = name
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

    def open(self) -> DraftPrompt:
        """Begin a prompt with a cold row; nothing is open after a failure."""
        prompt = DraftPrompt(self)
        if not self.given_up:
            try:
                prompt.group = self._group(None)
            except Exception as error:
                prompt.raised.append(error)
        return prompt

    def restore(self, checkpoint: RowCheckpoint) -> DraftPrompt | None:
        """Begin a prompt with a restored row, which needs what it was restored from no more.

        Returns:
            The prompt; ``None`` where the drafter will not have the checkpoint, which is no fault
            of its own: the prompt can be read instead.
        """
        if self.given_up:
            return None
        prompt = DraftPrompt(self)
        try:
            prompt.group = group = self._group(checkpoint)
            group.materialize()
        except BaseException as error:
            prompt.close()
            if not isinstance(error, Exception):
                raise
            log.debug("a drafter did not take a stored row", exc_info=error)
            return None
        return prompt

    def _group(self, checkpoint: RowCheckpoint | None) -> DraftPrefillGroup:
        group = self._grouped.open_prefill(target=self._target, checkpoints=[checkpoint])
        try:
            self._learn(group)
        except BaseException:
            with suppress(Exception):
                group.close()
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


@define(eq=False)
class DraftPrompt:
    """The draft side of one prompt that is read, and what the drafter raised over it.

    Attributes:
        prompts: what the drafter needs.
        group: its prefill group of one row; ``None`` once it is handed over, or failed.
        raised: what it raised.
    """

    prompts: DraftPrompts
    group: DraftPrefillGroup | None = None
    raised: list[Exception] = field(factory=list)

    @property
    def whole(self) -> bool:
        """Whether the last token of the prompt is read with the prompt."""
        return self.group is not None and self.group.prefill_mode == PrefillMode.FULL

    def read(self, tokens: mx.array, context: mx.array | None) -> None:
        """Read the chunk that the target has read; after a failure the group is closed."""
        if self.group is None:
            return
        try:
            self.group.prefill(tokens, context)
        except Exception as error:
            self.raised.append(error)
            self.close()

    def snapshot(self) -> RowCheckpoint | None:
        """The row that was read so far; after a failure the group is closed."""
        if self.group is None:
            return None
        try:
            checkpoint = self.group.capture(0)
            if not isinstance(checkpoint, RowCheckpoint):
                raise ContractError(f"capture() returned {type(checkpoint).__name__}")
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise  # an interrupt: nobody else knows of the group any more
            self.raised.append(error)
            return None
        return checkpoint

    def hand_over(self) -> RowCheckpoint | None:
        """The row of a prompt that was read; the group is closed."""
        checkpoint = self.snapshot()
        self.close()
        return checkpoint

    def close(self) -> None:
        """Close the group. Raising here is counted, but leaves nothing to give up."""
        group, self.group = self.group, None
        if group is None:
            return
        try:
            group.close()
        except Exception as error:
            self.raised.append(error)

    def answer_for(self, row: Row, checkpoint: RowCheckpoint | None) -> None:
        """Count what was raised against the row of the prompt.

        Args:
            row: the row of the prompt.
            checkpoint: what came of it; the row stays outside where it is ``None``.
        """
        raised, self.raised = self.raised, []
        for error in raised:
            row.stats.count_draft_error(error)
        if raised and checkpoint is None:
            row.stats.reason = f"drafter {self.prompts.name} failed: {one_line(raised[0])}"
