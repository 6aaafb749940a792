"""How many drafts a round should have: the most expected tokens per millisecond.

A window of W positions gives each row one token, and each of its drafts with the chance that it and
all before it are accepted. All rows of a batch are padded to one width, so what a width costs is
told by the batch, and what it brings by the rows that have drafts worth verifying there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Choice", "choose"]


@frozen
class Choice:
    """The depths of a round.

    Attributes:
        depths: B ints, drafts to ask for.
        width: positions of the window.
        expected: tokens of all rows together.
        time: milliseconds of the round.
    """

    depths: tuple[int, ...]
    width: int
    expected: float
    time: float

    @property
    def speed(self) -> float:
        """Expected tokens per millisecond."""
        return self.expected / self.time


def choose(
    surviving: Sequence[Sequence[float]],
    *,
    verify: Callable[[int], tuple[int, float]],
    draft: Callable[[int], float],
    rest: float,
    plain: float,
) -> Choice:
    """The depths that give the most tokens per millisecond; none where plain decoding does.

    Args:
        surviving: per row, for each draft that it may have, the chance that it is accepted.
        verify: of the positions that are needed, the width to give the window and its time.
        draft: milliseconds of a draft as deep as this.
        rest: milliseconds of a round besides, where there are drafts.
        plain: milliseconds of a round without drafts.
    """
    rows = len(surviving)
    best = Choice((0,) * rows, 1, float(rows), plain)
    for depth in range(1, max(map(len, surviving), default=0) + 1):
        width, time = verify(1 + depth)
        gained = sum(sum(chances[:depth]) for chances in surviving)
        round_ = Choice(
            tuple(min(depth, len(chances)) for chances in surviving),
            width,
            rows + gained,
            time + draft(depth) + rest,
        )
        if round_.speed > best.speed:
            best = round_
    return best
