"""Does a block drafter agree with its target, and under which reading? Tried when it is loaded.

Taps that are off by one and the wrong slot of a block cost acceptance and never a token, so nobody
notices. Here the target reads a short text, tapped at each layer and at its neighbours. From many
positions of it a block is drafted, and what its first and its second column expect is compared with
what the target expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import mlx.core as mx
from attrs import evolve, frozen

from specdec.drafting import ContextRows
from specdec.drafting.probe import FIRST, Probe, hear, probe_tokens, used_reading

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from specdec.contract import TargetView
    from specdec.drafting import BlockContext, ContextLayer, KeysAndValues
    from specdec.plugins import LoadRequest

__all__ = ["MARGIN", "How", "Probed", "Readable", "agreed", "probe_blocks", "read_as"]

_COLUMNS: Final = 2
_ANCHORS: Final = 80  # positions that are drafted from

MARGIN: Final = 0.1
"""How much better another reading must agree to be taken for the right one.

The demo's own drafter agrees at 0.67 of the positions, at 0.53 with taps one layer earlier and at
0.30 from the wrong column.
"""


class Readable(Protocol):
    """As much of a drafter's config (an attrs class) as a reading changes."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Tapped layers of the target."""

    @property
    def from_anchor(self) -> bool:
        """Whether the first column drafts."""

    @property
    def longest(self) -> int:
        """The most drafts of a block."""


class Probed(Protocol):
    """As much of a bound block drafter as is tried; see ``BlockDrafting``."""

    @property
    def layers(self) -> Sequence[ContextLayer]:
        """Its layers."""

    def columns(self, depth: int, /) -> int:
        """Columns of the block that drafts so many tokens."""

    def project(self, hidden: mx.array, positions: int | mx.array, /) -> Sequence[KeysAndValues]:
        """Each layer's context of tapped hidden states."""

    def hidden(
        self, context: BlockContext, pending: mx.array, first: int | None = None
    ) -> mx.array:
        """Hidden states of a block's columns from the first wanted one on."""

    def first_ids(self, hidden: mx.array, pending: mx.array) -> mx.array:
        """The ids that a first slot with these hidden states expects most."""


C = TypeVar("C", bound=Readable)


def read_as(config: C, taps: Sequence[int], *, from_anchor: bool) -> C:
    """A config that is read otherwise.

    Args:
        config: as it was.
        taps: layers of the target.
        from_anchor: whether the first column drafts.
    """
    own: Any = config
    changed: C = evolve(own, taps=taps, from_anchor=from_anchor)
    return changed


@frozen
class How:
    """One way to read a block drafter.

    Attributes:
        shift: by how much the tapped layers lie behind those that its config names, as the option
            ``tap_shift`` says.
        from_anchor: whether the first column drafts.
    """

    shift: int
    from_anchor: bool

    def __str__(self) -> str:
        return f"tap_shift={self.shift} and from_anchor={str(self.from_anchor).lower()}"


def probe_blocks(
    target: TargetView,
    config: C,
    make: Callable[[C], Probed],
    tokens: Sequence[int],
    *,
    asked: int = 0,
) -> Probe[How] | None:
    """Try each reading.

    Args:
        target: the bound target.
        config: of the drafter, its taps shifted as was asked.
        make: the drafter for a config.
        tokens: L ids.
        asked: by how much its taps are shifted already.

    Returns:
        What was found; ``None`` where the target cannot be run from here.
    """
    port = target.hidden_taps
    assert port is not None, "checked when the drafter was loaded"
    shifted = {shift: [tap + shift for tap in config.taps] for shift in (0, -1, 1)}
    layers = sorted({tap for taps in shifted.values() for tap in taps})
    heard = hear(target, tokens, [layer for layer in layers if 0 <= layer <= port.layer_count])
    if heard is None:
        return None
    step = max((len(tokens) - 1 - FIRST) // _ANCHORS, 1)
    anchors = list(range(FIRST, len(tokens) - 1, step))
    at = mx.array(anchors, mx.int32)
    expected = mx.argmax(heard.logits[0, at], axis=-1)
    pending = mx.array([tokens[anchor] for anchor in anchors], mx.int32)
    agreement = {}
    for shift, taps in shifted.items():
        if any(tap not in heard.hidden for tap in taps):
            continue
        drafting = make(read_as(config, taps, from_anchor=config.from_anchor))
        taped = mx.concatenate([heard.hidden[tap] for tap in taps], axis=-1)
        hidden = _block_hidden(drafting, taped, anchors, pending)
        for column in range(_COLUMNS):
            if read_as(config, taps, from_anchor=not column).longest < 1:
                continue  # a block of one column has no second one
            expects = drafting.first_ids(hidden[:, column : column + 1], pending)
            same: Any = mx.mean((expects == expected).astype(mx.float32)).item()
            agreement[How(asked + shift, from_anchor=not column)] = float(same)
    return Probe(agreement, len(anchors))


def _block_hidden(
    drafting: Probed, taps: mx.array, anchors: Sequence[int], pending: mx.array
) -> mx.array:
    """Hidden states ``[A, 2, H]`` of blocks at these positions of one text ``[1, L, m·H]``."""
    rows = len(anchors)
    context = ContextRows.of(drafting.layers, rows)
    projected = drafting.project(taps, 0)
    context.append(
        [
            (_for_each(keys, rows), _for_each(values, rows))  # every row reads the text's beginning
            for keys, values in projected
        ],
        anchors,
    )
    width = max(_COLUMNS, drafting.columns(1))  # more where a block is always whole
    with context.block([width] * rows) as block:
        return drafting.hidden(block, pending, first=0)[:, :_COLUMNS]


def _for_each(one: mx.array, rows: int) -> mx.array:
    return mx.broadcast_to(one, (rows, *one.shape[1:]))


def agreed(
    request: LoadRequest,
    what: str,
    config: C,
    make: Callable[[C], Probed],
    fixed: Collection[str],
) -> C:
    """Try a drafter, and say how it is to be read.

    Args:
        request: knows the target and its tokenizer.
        what: names the drafter in messages.
        config: as its files and the options say.
        make: the drafter for a config.
        fixed: names of the options that the user has given: ``"tap_shift"``, ``"from_anchor"``.

    Raises:
        ArtifactError: it agrees with the target under no reading.

    Warns:
        SpecdecDrafterWarning: another reading agrees far better. It is used, unless options say
            otherwise.
    """
    tokens = probe_tokens(request.tokenizer, request.target.vocab_size)
    if tokens is None:
        return config
    asked = request.options.get("tap_shift") or 0
    probe = probe_blocks(request.target, config, make, tokens, asked=asked)
    if probe is None:
        return config
    wanted = How(asked, config.from_anchor)
    allowed = [
        how
        for how in probe.agreement
        if not ("tap_shift" in fixed and how.shift != wanted.shift)
        and not ("from_anchor" in fixed and how.from_anchor != wanted.from_anchor)
    ]
    used = used_reading(what, probe, wanted, allowed, margin=MARGIN)
    taps = [tap + used.shift - asked for tap in config.taps]
    return read_as(config, taps, from_anchor=used.from_anchor)
