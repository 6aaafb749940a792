"""Does a head agree with its target, and under which reading? Tried when it is loaded.

A head that reads hidden states from before the final norm where it was trained on those after it,
or whose norm weights got their 1 twice or never, drafts badly and breaks nothing, so nobody
notices. Here the target reads a short text, the head reads its hidden states, and both say what
comes next at every position. That is one forward of the target, and one of the head per reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen
from mlx.utils import tree_unflatten

from specdec.contract import ContextKind
from specdec.drafting.modules import parameters_of
from specdec.drafting.probe import FIRST, Probe, hear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import RecurrentMtp, TargetView
    from specdec_mtp.heads import HeadModule

__all__ = ["How", "probe_head", "set_norms"]


@frozen
class How:
    """One way to read a head.

    Attributes:
        context: the target's hidden states that it is given.
        shift: how often 1 was added to its norm weights: ``"never"``, ``"once"``, ``"twice"``, or
            ``"in part"`` where a file is at odds with itself.
    """

    context: ContextKind
    shift: str

    def __str__(self) -> str:
        return f"{self.context} hidden states and 1 added to the norm weights {self.shift}"


def probe_head(
    target: TargetView,
    head: HeadModule,
    tokens: Sequence[int],
    norms: Mapping[str, Mapping[str, mx.array]],
) -> Probe[How] | None:
    """Try each reading.

    Args:
        target: the bound target.
        head: left with the norm weights that it has.
        tokens: L ids.
        norms: norm weights of the head by name, for each value of :attr:`How.shift`.

    Returns:
        What was found; ``None`` where the target cannot be run from here.
    """
    port: RecurrentMtp | None = target.recurrent_mtp
    if port is None:
        return None
    last, final = port.layer_count - 1, port.layer_count
    heard = hear(target, tokens, (last, final))
    if heard is None:
        return None
    hidden = {
        ContextKind.PRE_NORM: heard.hidden[last],
        ContextKind.POST_NORM: heard.hidden[final],
    }
    expected = mx.argmax(heard.logits, axis=-1)[0, 1:]
    embedded = port.embed(mx.array([list(tokens[1:])], mx.int32))
    before = parameters_of(head)
    agreement = {}
    try:
        for shift, weights in norms.items():
            set_norms(head, weights)
            for context in (ContextKind.POST_NORM, ContextKind.PRE_NORM):
                step = head(embedded, hidden[context][:, :-1], list(head.family.caches()))
                drafted = mx.argmax(port.logits(step.scored), axis=-1)[0]
                same: Any = mx.mean((drafted == expected)[FIRST:].astype(mx.float32)).item()
                agreement[How(context, shift)] = float(same)
    finally:
        set_norms(head, {name: before[name] for each in norms.values() for name in each})
    return Probe(agreement, len(tokens) - 1 - FIRST)


def set_norms(head: HeadModule, weights: Mapping[str, mx.array]) -> None:
    """Give a head these weights, by name."""
    if weights:
        head.update(tree_unflatten(list(weights.items())))
