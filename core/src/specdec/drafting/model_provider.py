"""A draft model as a provider: its weights, and the row groups over a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.drafting.choose import Chooser
from specdec.drafting.model_attachment import SCHEMA, RowShapes
from specdec.drafting.model_live import ModelSettings
from specdec.drafting.model_rows import DraftModelRows
from specdec.errors import ClosedError, OptionError, UnsupportedModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, RowConstraints, RowSampling, TargetView
    from specdec.targets import Target

__all__ = ["DraftModelGroups", "DraftModelProvider"]


class DraftModelGroups:
    """Makes groups of one draft model's rows.

    Args:
        model: bound as a target of its own.
        limit: positions that a row has at most, or ``None``.

    Raises:
        OptionError: the model is not bound, or the limit is no positive whole number.
        UnsupportedModelError: the model's state cannot be rolled back.
    """

    # Rows follow from tokens alone, whatever weights chose them.
    supports_adapters = True

    def __init__(self, model: Target, limit: int | None) -> None:
        _check_arguments(model, limit)
        if model.no_speculation_reason is not None:
            raise UnsupportedModelError(
                f"the model cannot draft: {model.no_speculation_reason}; give another one"
            )
        self._held: Target | None = model
        self._limit = limit
        self._shapes = RowShapes.of(model)

    @property
    def model(self) -> Target:
        """The draft model.

        Raises:
            ClosedError: it was let go.
        """
        if self._held is None:
            raise ClosedError("open")
        return self._held

    @property
    def checkpoint_namespace(self) -> str:
        """The layout's name, the model's weights and caches, what computes, and the limit."""
        limit = "whole" if self._limit is None else str(self._limit)
        return f"{SCHEMA}:{self.model.state_identity()}; {limit}"

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """Bytes that one row's caches take at so many tokens at most."""
        del target
        return self.model.row_bytes(tokens if self._limit is None else min(tokens, self._limit))

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> DraftModelRows:
        """A group that reads prompts.

        Args:
            target: the bound target; nothing but the size of its vocabulary is looked at.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, None)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002  what is forced is the core's
    ) -> DraftModelRows:
        """A group that decodes.

        Args:
            target: the bound target; nothing but the size of its vocabulary is looked at.
            sampling: the rows' draws.
            checkpoints: one per row, borrowed.
            constraints: not used.

        Raises:
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, Chooser(sampling, target.vocab_size))

    def _open(
        self,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint | None],
        choose: Chooser | None,
    ) -> DraftModelRows:
        settings = ModelSettings(
            model=self.model,
            namespace=self.checkpoint_namespace,
            shapes=self._shapes,
            limit=self._limit,
        )
        rows = DraftModelRows(settings, target.vocab_size, choose)
        rows.prepare_append(checkpoints).commit()
        return rows

    def release(self) -> None:
        """Let the model go; groups that are open keep it until they are closed."""
        self._held = None


class DraftModelProvider:
    """A draft model as a drafter.

    Args:
        name: for people.
        model: the draft model, bound as a target of its own (``specdec.bind_target``).
        weight_bytes: of the model, or 0 where somebody else owns it.
        limit: positions that a row has at most, or ``None``. A model with a table of positions
            must have ``BEYOND`` more: rows go along with their neighbours.

    Raises:
        OptionError: the model is not bound, or the limit is no positive whole number.
        UnsupportedModelError: the model's state cannot be rolled back.
    """

    def __init__(
        self, name: str, model: Target, *, weight_bytes: int, limit: int | None = None
    ) -> None:
        self._name = name
        self._weight_bytes = weight_bytes
        self._grouped = DraftModelGroups(model, limit)

    @property
    def id(self) -> str:
        """What the model was loaded from."""
        return self._name

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights."""
        return self._weight_bytes

    @property
    def grouped(self) -> DraftModelGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Let the model go."""
        self._grouped.release()


def _check_arguments(model: object, limit: object) -> None:
    if not (hasattr(model, "no_speculation_reason") and hasattr(model, "new_state")):
        raise OptionError(
            f"model is a {type(model).__name__} that is not bound; "
            "give specdec.bind_target(draft_model)"
        )
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        shown = one_line(repr(limit))
        raise OptionError(f"limit is {shown}; give a positive whole number, or None for no limit")
