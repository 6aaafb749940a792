"""The drafters of a chain, and how one reading of the target serves all of them.

Drafters ask for hidden states of one kind: before the final norm, after it, or of tapped layers.
Where they differ the chain taps every layer that any of them needs, and hands each its own; the
states around the final norm are taps too.

Shapes: B rows, L positions, H hidden size, u layers of the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import ContextKind, DeclaresTaps, PrefillMode, require_port
from specdec.drafting import checks
from specdec.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DraftProvider, HiddenTaps, TargetView

__all__ = ["ChainMember", "Shared", "shared_by"]


@frozen(eq=False)
class ChainMember:
    """A drafter that stands in a chain.

    Attributes:
        name: its kind, for messages.
        provider: the drafter.
        width: the most drafts a round that it was loaded for.
    """

    name: str
    provider: DraftProvider
    width: int


@frozen
class _Wanted:
    """What one drafter reads of the target."""

    context: ContextKind
    taps: tuple[int, ...]
    mode: PrefillMode


@frozen
class Shared:
    """What the chain reads of the target, and which part of it is each member's.

    Attributes:
        mode: how prompts are read.
        context: the hidden states that the chain declares.
        taps: its layers, u of them, where that is ``TAPS``.
        features: of one position of its context; ``None`` where the target does not say.
        parts: per member the places of its layers among ``taps``; ``()`` for all there is, and
            ``None`` for a member that reads tokens alone.
        hidden_size: H, where a member's part is cut out.
    """

    mode: PrefillMode
    context: ContextKind
    taps: tuple[int, ...]
    features: int | None
    parts: tuple[tuple[int, ...] | None, ...]
    hidden_size: int

    def check(self, verb: str, context: mx.array | None, row_count: int, width: int) -> None:
        """Check the hidden states that the chain was promised, before any member is given them.

        Args:
            verb: names the caller in messages.
            context: ``[B, at least width, features]``.
            row_count: B.
            width: positions that are needed.

        Raises:
            ContractError: none, or of another shape; or some where none are declared.
        """
        if self.context is ContextKind.NONE:
            checks.check_no_context(verb, context)
            return
        features = self.features
        if features is None:
            features = context.shape[-1] if context is not None and context.ndim else 0
        checks.check_features(verb, context, row_count, width, features)

    def part(self, member: int, context: mx.array | None) -> mx.array | None:
        """A member's own hidden states.

        Args:
            member: its number.
            context: ``[B, L, u·H]`` of the chain, or ``None``.
        """
        places = self.parts[member]
        if places is None or context is None:
            return None
        if not places:
            return context
        size = self.hidden_size
        cut = [context[..., place * size : (place + 1) * size] for place in places]
        return cut[0] if len(cut) == 1 else mx.concatenate(cut, axis=-1)


def shared_by(members: Sequence[ChainMember], target: TargetView) -> Shared:
    """Find one reading of a target for all members.

    Args:
        members: each is asked with a prefill group of one cold row, which is closed again.
        target: the bound target.

    Raises:
        TargetLacksError: the members read different hidden states, and the target has no layers
            to tap. What a member raises passes through.
        ContractError: a member's group taps other layers than its provider declares.
    """
    wanted = [_asked_of(member, target) for member in members]
    reading = [each for each in wanted if each.context is not ContextKind.NONE]
    full = any(each.mode is PrefillMode.FULL for each in wanted)
    mode = PrefillMode.FULL if full else PrefillMode.TAIL_SPLIT
    alike = {(each.context, each.taps) for each in reading}
    if len(alike) <= 1:
        context, taps = next(iter(alike), (ContextKind.NONE, ()))
        whole = tuple(None if each.context is ContextKind.NONE else () for each in wanted)
        return Shared(mode, context, taps, _features(target, context, taps), whole, 0)
    names = " and ".join(m.name for m, w in zip(members, wanted, strict=True) if w in reading)
    port: HiddenTaps = require_port(target, "hidden_taps", f"a chain of {names}")
    own = [_layers(each, port.layer_count) for each in wanted]
    union = tuple(sorted({layer for layers in own if layers for layer in layers}))
    parts = tuple(
        None if layers is None else tuple(union.index(layer) for layer in layers) for layers in own
    )
    parts = tuple(() if part == tuple(range(len(union))) else part for part in parts)
    features = len(union) * port.hidden_size
    return Shared(mode, ContextKind.TAPS, union, features, parts, port.hidden_size)


def _asked_of(member: ChainMember, target: TargetView) -> _Wanted:
    grouped = member.provider.grouped
    declared: tuple[int, ...] = ()
    if isinstance(grouped, DeclaresTaps):
        declared = tuple(grouped.target_tap_layers(target))
    group = grouped.open_prefill(target=target, checkpoints=[None])
    try:
        context, taps = ContextKind(group.context), tuple(group.tap_layers)
        wanted = _Wanted(context, taps, PrefillMode(group.prefill_mode))
    finally:
        group.close()
    if taps != declared or (context is ContextKind.TAPS) != bool(taps):
        raise ContractError(
            f"drafter {member.name}: its group taps {list(taps)} as {context}, but its provider "
            f"declares {list(declared)}"
        )
    return wanted


def _layers(wanted: _Wanted, layer_count: int) -> tuple[int, ...] | None:
    """The layers whose taps are a member's hidden states; ``None`` if it reads none."""
    if wanted.context is ContextKind.NONE:
        return None
    if wanted.context is ContextKind.TAPS:
        return wanted.taps
    return (layer_count - (wanted.context is ContextKind.PRE_NORM),)


def _features(target: TargetView, context: ContextKind, taps: tuple[int, ...]) -> int | None:
    """Features of one position of a context, from any port that tells H."""
    if context is ContextKind.NONE:
        return None
    port = target.hidden_taps or target.recurrent_mtp or target.assistant_rows
    if port is None:
        return None
    return port.hidden_size * (len(taps) if context is ContextKind.TAPS else 1)
