"""A short text that a target and its drafter read when the drafter is loaded.

A drafter that reads the wrong hidden states, or the right ones in the wrong place, drafts badly
and breaks nothing, so nobody notices. Where both read the same text, what they expect next can be
compared at every position, in one forward of the target.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

import mlx.core as mx
from attrs import frozen

from specdec.contract import ContextKind
from specdec.errors import ArtifactError, SpecdecDrafterWarning

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from specdec.contract import TargetView

__all__ = [
    "FIRST",
    "FLOOR",
    "MARGIN",
    "TEXT",
    "Heard",
    "Probe",
    "hear",
    "probe_tokens",
    "used_reading",
]

H = TypeVar("H")

FLOOR: Final = 0.1
"""Agreement under which a drafter is none of this target's."""

MARGIN: Final = 0.15
"""How much better another reading must agree to be taken for the right one."""

FIRST: Final = 16
"""Positions before which a text could go anywhere."""

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

_MOST: Final = 96  # tokens that are read


class _Runs(Protocol):
    """What a bound target can do besides its ports."""

    def new_state(self) -> Any: ...

    def forward(
        self, tokens: mx.array, state: Any, context: ContextKind, taps: Sequence[int]
    ) -> Any: ...


@frozen(eq=False)
class Heard:
    """What a target made of a text.

    Attributes:
        hidden: ``[1, L, H]`` of each tapped layer, by its number.
        logits: ``[1, L, V]``.
    """

    hidden: dict[int, mx.array]
    logits: mx.array


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
    usable = len(tokens) > 2 * FIRST and all(0 <= token < vocab_size for token in tokens)
    return tokens if usable else None


def hear(target: TargetView, tokens: Sequence[int], layers: Sequence[int]) -> Heard | None:
    """One forward of a target over a text.

    Args:
        target: the bound target.
        tokens: L ids.
        layers: to be tapped, each once.

    Returns:
        ``None`` where the target cannot be run from here, or not tapped so.
    """
    if not hasattr(target, "forward") or not target.can_tap(layers):
        return None
    runs = cast("_Runs", target)
    state = runs.new_state()
    state.begin_round(len(tokens), reading=True)
    window = runs.forward(
        mx.array([list(tokens)], mx.int32), state, ContextKind.TAPS, tuple(layers)
    )
    parts = mx.split(window.context, len(layers), axis=-1)
    return Heard(dict(zip(layers, parts, strict=True)), window.logits)


@frozen(eq=False)
class Probe(Generic[H]):
    """How far a drafter agrees with its target, read in one way or another.

    Attributes:
        agreement: by reading, the share of the positions at which both expect the same token.
        positions: how many positions were compared.
    """

    agreement: Mapping[H, float]
    positions: int

    @property
    def best(self) -> H:
        """The reading under which it agrees most; of equals the first."""
        return max(self.agreement, key=lambda how: self.agreement[how])


def used_reading(
    what: str, probe: Probe[H], wanted: H, allowed: Collection[H], *, margin: float = MARGIN
) -> H:
    """The wanted reading, or one that agrees far better.

    Args:
        what: names the drafter in messages.
        probe: what was found.
        wanted: how it would be read; a key of ``probe.agreement``, as the others. Its ``str`` says
            what it is.
        allowed: readings that no option of the user's forbids.
        margin: how much better another must agree.

    Raises:
        ArtifactError: it agrees with the target under no reading.

    Warns:
        SpecdecDrafterWarning: another reading agrees far better. It is used where it is allowed.
    """
    agreement, best = probe.agreement, probe.best
    if agreement[best] < FLOOR:
        raise ArtifactError(
            f"{what} expects {agreement[best]:.0%} of {probe.positions} tokens of a short text "
            "that its target expects, however it is read: it is another model's, or hardly "
            "trained; give the one of this target, or probe=false to draft with it all the same"
        )
    if agreement[best] - agreement[wanted] <= margin:
        return wanted
    better = max(allowed, key=lambda how: agreement[how])
    used = better if agreement[better] - agreement[wanted] > margin else wanted
    says = f"{what} agrees with its target at {agreement[wanted]:.0%} with {wanted}, and at "
    says += f"{agreement[best]:.0%} with {best}; "
    if used == wanted:
        says += "the former is used, as asked"
    else:
        says += "the latter is used" if used == best else f"{used} is used, as far as asked"
    warnings.warn(says, SpecdecDrafterWarning, stacklevel=2)
    return used
