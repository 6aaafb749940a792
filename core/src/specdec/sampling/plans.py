"""What follows from rows' options when they join or leave: who is drawn together, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import mlx.core as mx
from attrs import frozen

from specdec.contract import Greedy, Sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import Selection
    from specdec.sampling.options import DrawKey, SamplingOptions

__all__ = ["Drafting", "Plan"]


@frozen(eq=False)
class Plan:
    """Rows grouped by equal keys; made at membership changes, not in rounds.

    Attributes:
        groups: keys (``None`` for greedy rows), each with its rows' numbers ``[b]`` on the device,
            or with ``None`` where one group holds all rows in order.
        inverse: ``[B]`` where each row stands when the groups follow each other; ``None`` where
            there is one group.
    """

    groups: tuple[tuple[DrawKey | None, mx.array | None], ...]
    inverse: mx.array | None = None

    @classmethod
    def of(cls, keys: Sequence[DrawKey | None]) -> Self:
        """Group rows.

        Args:
            keys: one per row; no rows make one greedy group.
        """
        rows_of: dict[DrawKey | None, list[int]] = {}
        for row, key in enumerate(keys):
            rows_of.setdefault(key, []).append(row)
        if len(rows_of) <= 1:
            return cls(((next(iter(rows_of), None), None),))
        groups = tuple((key, mx.array(rows, mx.int32)) for key, rows in rows_of.items())
        order = [row for rows in rows_of.values() for row in rows]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return cls(groups, mx.array(inverse, mx.int32))

    @property
    def greedy(self) -> bool:
        """Whether every row is greedy."""
        return len(self.groups) == 1 and self.groups[0][0] is None

    def in_order(self, parts: Sequence[mx.array]) -> mx.array:
        """What each group gave, with the rows put back where they stand.

        Args:
            parts: ``[b, ...]`` per group.

        Returns:
            ``[B, ...]``.
        """
        if self.inverse is None:
            return parts[0]
        return mx.concatenate(list(parts), axis=0)[self.inverse]


@frozen
class Drafting:
    """What all rows have in common as their drafts are seen.

    Attributes:
        greedy: whether every row drafts by argmax.
        listable: whether every row drafts the same on part of the vocabulary: without any filter.
        rejecting: whether a row judges its drafts by rejection sampling.
    """

    greedy: bool
    listable: bool
    rejecting: bool

    @classmethod
    def of(cls, options: Sequence[SamplingOptions]) -> Self:
        """Of some rows' options."""
        keys = [each.draft_key for each in options]
        return cls(
            greedy=all(key is None for key in keys),
            listable=all(key is None or key == key.bare for key in keys),
            rejecting=any(each.acceptance == "rejection" for each in options),
        )

    @property
    def selection(self) -> Selection:
        """Greedy if every row's drafts are, else each row's own draw."""
        return Greedy() if self.greedy else Sampled()
