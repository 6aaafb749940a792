"""How sure a drafter is of each slot, and what is proposed of a block because of it.

Shapes: B rows, d drafts, H hidden size, r rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from specdec.errors import ArtifactError, OptionError, one_line
from specdec.plugins.config_keys import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "MEASURE",
    "ConfidenceHead",
    "confident_lengths",
    "heard",
    "is_measure",
    "read_thresholds",
    "thresholds_for",
]

MEASURE: Final = "measure"
"""Value of the option ``confidence`` under which all is computed, and nothing is cut."""

_ears: list[tuple[ConfidenceHead, list[mx.array]]] = []


@contextmanager
def heard(head: ConfidenceHead) -> Iterator[list[mx.array]]:
    """Collect the confidences of every draft that one drafter makes meanwhile.

    They are computed only where drafts are cut by them, or the option ``confidence`` is
    :data:`MEASURE`. Nothing is read from the device here.

    Args:
        head: the very one that the drafter is bound with, see ``BlockDrafting.confidence_head``.

    Yields:
        Arrays ``[B, d]``, one a draft, the oldest first. It grows; empty it as you like.
    """
    ear: list[mx.array] = []
    _ears.append((head, ear))
    try:
        yield ear
    finally:
        _ears[:] = [other for other in _ears if other[1] is not ear]


class ConfidenceHead(Module):
    """The probability that a slot's token is accepted, from its hidden state.

    Args:
        features: of the hidden state, and of the embedded token before it where it looks at that.
    """

    def __init__(self, features: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in MLX
        self.proj = Linear(features, 1)

    def __call__(self, features: mx.array) -> mx.array:
        """``[B, d]`` float32 in 0 to 1 of ``[B, d, features]``."""
        told = mx.sigmoid(self.proj(features)[..., 0].astype(mx.float32))
        for head, ear in _ears:
            if head is self:
                ear.append(told)
        return told


def confident_lengths(confidence: mx.array, thresholds: Sequence[float]) -> mx.array:
    """How many of a block's first drafts are proposed: those before the first doubtful one.

    Args:
        confidence: ``[B, d]``.
        thresholds: one per slot; a slot below its own is doubtful.

    Returns:
        ``[B]`` int32.
    """
    sure = confidence >= mx.array(list(thresholds[: confidence.shape[1]]), mx.float32)
    return mx.cumprod(sure.astype(mx.int32), axis=1).sum(axis=1)


def read_thresholds(where: str, key: str, found: object, slots: int) -> tuple[float, ...]:
    """The thresholds of a calibration.

    Args:
        where: names the config in messages.
        key: that it has them under.
        found: what is there.
        slots: how many there must be.

    Raises:
        ArtifactError: they are no numbers of 0 to 1, or not so many.
    """
    if (
        not isinstance(found, list | tuple)
        or len(found) != slots
        or not all(_is_probability(each) for each in found)
    ):
        raise ArtifactError(
            f"{where}: {key} is {one_line(repr(found))}; it must be {slots} numbers of 0 to 1, one "
            "for each draft of a block"
        )
    return tuple(map(float, found))


def is_measure(asked: object) -> bool:
    """Whether the option ``confidence`` is :data:`MEASURE`: stored thresholds do not matter."""
    return isinstance(asked, str) and asked == MEASURE


def thresholds_for(
    asked: object, stored: Sequence[float] | None, slots: int, *, has_head: bool
) -> tuple[float, ...] | None:
    """Where a block's drafts end.

    Args:
        asked: the option ``confidence``: ``False`` or 0 cuts nothing; a number of 0 to 1 holds for
            every slot of a drafter that was not calibrated; :data:`MEASURE`; or ``None``.
        stored: thresholds of the drafter's own calibration.
        slots: of a block.
        has_head: whether the drafter tells how sure it is.

    Returns:
        One per slot, or ``None`` where confidence is not asked.

    Raises:
        OptionError: it makes no sense, or the drafter has no such head.
    """
    if asked is None:
        return None if stored is None else tuple(stored)
    if asked is False or (_is_probability(asked) and asked == 0):
        return None
    if not is_measure(asked) and not _is_probability(asked):
        raise OptionError(
            f"confidence is {shown(asked)}; give a number of 0 to 1, or false for none"
        )
    if not has_head:
        raise OptionError(
            f"confidence is {asked}, but this drafter has no confidence head; leave it out"
        )
    if is_measure(asked):
        return (0.0,) * slots
    assert isinstance(asked, int | float)
    return (float(asked),) * slots if stored is None else tuple(stored)


def _is_probability(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= 1  # type: ignore[operator]  # a number
