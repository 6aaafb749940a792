"""How many drafts a round should have: the most expected tokens per millisecond.

A window gives each row one token, and each of its drafts with the chance that it and all before it
are accepted. All rows of a batch are padded to one width, so what a width costs is told by the
batch, and positions behind a row's last worthwhile draft are no dearer empty than filled: what the
best of them bring decides how wide the window is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Choice", "choose"]


@frozen
class Choice:
    """What a round is to be.

    Attributes:
        depth: drafts to ask for, of rows that may have so many; 0 for a plain round.
        expected: tokens of all rows together.
        time: milliseconds of the round.
    """

    depth: int
    expected: float
    time: float

    @property
    def speed(self) -> float:
        """Expected tokens per millisecond."""
        return self.expected / self.time


def choose(
    surviving: Sequence[Sequence[float]],
    depths: Iterable[int],
    time: Callable[[int], float],
    *,
    kept: int | None = None,
    margin: float = 0.0,
) -> Choice:
    """The depth that gives the most tokens per millisecond.

    Args:
        surviving: per row, for each draft that it may have, the chance that it is accepted.
        depths: those to choose from; 0 is a plain round.
        time: milliseconds of a round that asks for so many drafts.
        kept: the depth that is kept where no other is better by ``margin``.
        margin: as a share of its speed.
    """
    best: Choice | None = None
    top = 0.0
    for depth in depths:
        gained = sum(sum(chances[:depth]) for chances in surviving)
        round_ = Choice(depth, len(surviving) + gained, time(depth))
        worth = round_.speed * (1 + margin) if depth == kept else round_.speed
        if best is None or worth > top:
            best, top = round_, worth
    assert best is not None, "there is no depth to choose from"
    return best
