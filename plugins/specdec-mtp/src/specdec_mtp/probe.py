"""Does a head agree with its target, and under which reading? Tried when it is loaded.

A head that reads hidden states from before the final norm where it was trained on those after it,
or whose norm weights got their 1 twice or never, drafts badly and breaks nothing, so nobody
notices. Here the target reads a short text, the head reads its hidden states, and both say what
comes next at every position. That is one forward of the target, and one of the head per reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import mlx.core as mx
from attrs import frozen
from mlx.utils import tree_unflatten

from specdec.contract import ContextKind
from specdec_mtp.build import parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.contract import RecurrentMtp, TargetView
    from specdec_mtp.heads import HeadModule

__all__ = ["TEXT", "How", "Probe", "probe_head", "probe_tokens", "set_norms"]

TEXT: Final = (
    "def read_lines(path):\n"
    '    """Return the lines of a file."""\n'
    "    with open(path) as file:\n"
    "        return file.readlines()\n"
    "\n"
    "\n"
    "def write_lines(path, lines):\n"
    '    """Write the lines to a file."""\n'
    '    with open(path, "w") as file:\n'
    "        file.writelines(lines)\n"
    "\n"
    "The first function returns the lines of a file, and the second function writes the lines to "
    "a file. Both of them open the file, and both of them close the file when they are done.\n"
)
"""What is read: code and prose that any model can follow."""

_MOST = 96  # tokens that are read
_FIRST = 16  # positions before which a text could go anywhere


class _Runs(Protocol):
    """What a bound target can do besides its ports."""

    def new_state(self) -> Any: ...

    def forward(
        self, tokens: mx.array, state: Any, context: ContextKind, taps: Sequence[int]
    ) -> Any: ...


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


@frozen(eq=False)
class Probe:
    """What was found.

    Attributes:
        agreement: share of the positions at which head and target expect the same token.
        positions: how many positions were compared.
    """

    agreement: Mapping[How, float]
    positions: int

    @property
    def best(self) -> How:
        """The reading under which the head agrees most; of equals the first."""
        return max(self.agreement, key=lambda how: self.agreement[how])


def probe_tokens(tokenizer: Any, vocab_size: int) -> list[int] | None:
    """The ids of :data:`TEXT`; ``None`` where there is no tokenizer, or one of other ids.

    Args:
        tokenizer: the target's, or ``None``.
        vocab_size: V.
    """
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return None
    try:
        tokens = [int(token) for token in encode(TEXT)][:_MOST]
    except Exception:  # a tokenizer of anybody's; the probe can do without
        return None
    usable = len(tokens) > 2 * _FIRST and all(0 <= token < vocab_size for token in tokens)
    return tokens if usable else None


def probe_head(
    target: TargetView,
    head: HeadModule,
    tokens: Sequence[int],
    norms: Mapping[str, Mapping[str, mx.array]],
) -> Probe | None:
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
    layers = () if port is None else (port.layer_count - 1, port.layer_count)
    if port is None or not hasattr(target, "forward") or not target.can_tap(layers):
        return None
    ids = mx.array([list(tokens)], mx.int32)
    runs = cast("_Runs", target)
    state = runs.new_state()
    state.begin_round(len(tokens), reading=True)
    window = runs.forward(ids, state, ContextKind.TAPS, layers)
    hidden = dict(
        zip(
            (ContextKind.PRE_NORM, ContextKind.POST_NORM),
            mx.split(window.context, 2, axis=-1),
            strict=True,
        )
    )
    expected = mx.argmax(window.logits, axis=-1)[0, 1:]
    embedded = port.embed(ids[:, 1:])
    before = parameters_of(head)
    agreement = {}
    try:
        for shift, weights in norms.items():
            set_norms(head, weights)
            for context in (ContextKind.POST_NORM, ContextKind.PRE_NORM):
                step = head(embedded, hidden[context][:, :-1], list(head.family.caches()))
                drafted = mx.argmax(port.logits(step.scored), axis=-1)[0]
                same: Any = mx.mean((drafted == expected)[_FIRST:].astype(mx.float32)).item()
                agreement[How(context, shift)] = float(same)
    finally:
        set_norms(head, {name: before[name] for each in norms.values() for name in each})
    return Probe(agreement, len(tokens) - 1 - _FIRST)


def set_norms(head: HeadModule, weights: Mapping[str, mx.array]) -> None:
    """Give a head these weights, by name."""
    if weights:
        head.update(tree_unflatten(list(weights.items())))
