"""What a training run is asked for."""

from __future__ import annotations

import math
from typing import Any, Final

from attrs import asdict, frozen

from specdec.errors import OptionError, one_line

__all__ = ["TrainSettings"]

_LABELS: Final = ("target", "text")

_BOUNDS: Final = {
    "layers": (1, 256),
    "block": (2, 1024),
    "batch": (1, 4096),
    "length": (3, 2**20),
    "blocks": (1, 2**16),
    "seed": (0, 2**32 - 1),  # seed and step share the 64 bits of a key
    "steps": (1, 2**32 - 1),
}
_CELLS: Final = 2**33  # of the mask of all blocks over their windows, a byte each

_MAY_DIFFER: Final = ("steps", "minutes")  # they only say when to stop
_DESCRIBED: Final = ("layers", "taps", "block", "mask_token")  # in the drafter's config.json


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise OptionError(
            f"{name} is {one_line(_shown(value))}; give a whole number of {least} to {most}"
        )


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return "a number of thousands of digits"


def _check_above_zero(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise OptionError(f"{name} is {one_line(repr(value))}; give a number above 0")


@frozen(kw_only=True)
class TrainSettings:
    """A training run.

    Attributes:
        layers: of the drafter.
        taps: of the target, in order; ``None`` spreads them as published drafters do.
        block: columns of a block, the anchor's included; the most drafts are one fewer.
        steps: to train for, or ``None`` where only time counts.
        minutes: to train for, or ``None`` where only steps count.
        batch: windows of text a step.
        length: tokens of a window.
        blocks: anchors a window.
        lr: of Muon, for the matrices.
        norm_lr: of AdamW, for the norms.
        decay: slots after which a slot's weight has fallen to 1/e.
        labels: ``"target"``, the target's distribution, or ``"text"``, the text's own tokens.
        mask_token: id that fills a block; ``None`` finds one.
        seed: of the first weights, the order of the text and the anchors; 0 to 2**32 - 1.
    """

    layers: int = 2
    taps: tuple[int, ...] | None = None
    block: int = 16
    steps: int | None = None
    minutes: float | None = None
    batch: int = 4
    length: int = 512
    blocks: int = 32
    lr: float = 0.02
    norm_lr: float = 3e-3
    decay: float = 6.0
    labels: str = "target"
    mask_token: int | None = None
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Check the values, and what several say together.

        Raises:
            OptionError: one makes no sense; names it.
        """
        for name, (least, most) in _BOUNDS.items():
            if name != "steps" or self.steps is not None:
                _check_count(name, getattr(self, name), least, most)
        for name in ("lr", "norm_lr", "decay", "minutes"):
            if name != "minutes" or self.minutes is not None:
                _check_above_zero(name, getattr(self, name))
        if self.steps is None and self.minutes is None:
            raise OptionError("neither steps nor minutes are given; give one of them, or both")
        if self.length <= self.block:
            raise OptionError(
                f"length is {self.length}, but a block of {self.block} needs at least "
                f"{self.block + 1} tokens; give more, or a smaller block"
            )
        columns = self.blocks * self.block
        if self.batch * columns * (self.length + columns) > _CELLS:
            raise OptionError(
                f"batch is {self.batch}, length {self.length}, blocks {self.blocks} and block "
                f"{self.block}: together more than a step can hold; give fewer blocks or windows"
            )
        if self.labels not in _LABELS:
            raise OptionError(
                f"labels is {one_line(repr(self.labels))}; give {' or '.join(_LABELS)}"
            )

    @property
    def kept(self) -> dict[str, Any]:
        """What a run that goes on must share with its beginning, besides the drafter's config."""
        free = (*_MAY_DIFFER, *_DESCRIBED)
        return {name: value for name, value in asdict(self).items() if name not in free}

    def fits(self, seconds: float, step_seconds: float) -> bool:
        """Whether a step of a length still ends within the minutes, after so many seconds."""
        return self.minutes is None or seconds + step_seconds <= 60 * self.minutes

    def fraction(self, steps: int, seconds: float) -> float:
        """How much of the run is over, 0 to 1; 1 ends it."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(steps / self.steps)
        if self.minutes is not None:
            shares.append(seconds / 60 / self.minutes)
        return min(max(shares), 1.0)
