"""The target's keys and values as a round reads them: who lends to whom, and what is hidden.

Shapes: B rows, L positions that a donor holds, D features of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.errors import ContractError, TargetLacksError
from specdec_assistant.config import LayerKind
from specdec_assistant.pairing import check_donor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import AssistantDonors
    from specdec_assistant.config import AssistantConfig

__all__ = ["Lent", "lend"]


@frozen(eq=False)
class Lent:
    """What a layer of one kind reads in a round.

    Attributes:
        keys: ``[B, kv heads, L, D]``, turned to their positions.
        values: ``[B, kv heads, L, D]``.
        mask: bool ``[B, 1, 1, L]``, true where a row may look; ``None`` where it may everywhere.
    """

    keys: mx.array
    values: mx.array
    mask: mx.array | None


def lend(
    what: str, config: AssistantConfig, donors: AssistantDonors, tokens: Sequence[int]
) -> Mapping[LayerKind, Lent]:
    """What each kind of layer reads.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        donors: of the target, between rounds.
        tokens: B ints, tokens that the drafter's rows have processed.

    Raises:
        ContractError: the donors are of other rows.
        TargetLacksError: there is no donor for a layer.
        ArtifactError: heads of another size than the drafter's.
    """
    if tuple(donors.positions) != tuple(tokens):
        raise ContractError(
            f"{what}: its rows have read {list(tokens)} tokens, but the target's K/V are of "
            f"{list(donors.positions)}; show it the group's own rows"
        )
    lent = {}
    for kind, pair in ((LayerKind.FULL, donors.full), (LayerKind.SLIDING, donors.sliding)):
        if kind not in config.layers:
            continue
        if pair is None:
            raise TargetLacksError(f"assistant_rows with K/V of a {kind} layer", what)
        check_donor(what, config, kind, pair)
        window = config.window if kind is LayerKind.SLIDING else None
        lent[kind] = Lent(*pair, _mask(donors.positions, pair[0].shape[2], window))
    return lent


def _mask(positions: Sequence[int], length: int, window: int | None) -> mx.array | None:
    """Where rows may look: at positions that they hold, and no further back than the window."""
    # A row that has read nothing drafts nothing either; it may look at one column, for no
    # softmax is over none.
    held = [min(max(count, 1), length) for count in positions]
    if min(held) == length and (window is None or length <= window):
        return None
    columns, ends = mx.arange(length), mx.array(held, mx.int32)[:, None]
    seen = columns < ends
    if window is not None:
        seen = seen & (columns >= ends - window)
    return seen[:, None, None, :]
