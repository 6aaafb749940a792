"""Options that every kind of block drafter has, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import mlx.core as mx

from specdec.errors import ArtifactError, OptionError
from specdec.plugins.config_keys import shown
from specdec_dflash.probe import Readable, read_as

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.plugins import LoadRequest

__all__ = ["as_asked", "check_slots", "drafts_a_round", "flag", "known_options"]

CPU_WIDTH: Final = 2
"""Drafts a round on a CPU where nobody names a number: positions cost nearly what steps do."""

C = TypeVar("C", bound=Readable)


def known_options(request: LoadRequest, known: Sequence[str]) -> Mapping[str, Any]:
    """The request's options.

    Args:
        request: its kind is named in messages.
        known: names that it may have.

    Raises:
        OptionError: another one.
    """
    unknown = sorted(str(name) for name in request.options if name not in known)
    if unknown:
        raise OptionError(
            f"{request.kind} has no option {', '.join(unknown)}; its options are {', '.join(known)}"
        )
    return request.options


def drafts_a_round(request: LoadRequest, longest: int) -> int:
    """The most drafts a round: what was asked for, and never more than a block was trained for.

    Args:
        request: may name a number.
        longest: drafts of a block.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    usual = CPU_WIDTH if on_cpu else longest
    return min(request.num_draft_tokens or usual, longest)


def flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """An option that is true or false.

    Raises:
        OptionError: it is something else.
    """
    given = options.get(name)
    if given is None:
        return default
    if not isinstance(given, bool):
        raise OptionError(f"{name} is {shown(given)}; give true or false, or leave it out")
    return given


def as_asked(config: C, options: Mapping[str, Any], layer_count: int) -> C:
    """A drafter's config, read as ``tap_shift`` and ``from_anchor`` say.

    Args:
        config: as the files say.
        options: by name.
        layer_count: of the target.

    Raises:
        OptionError: a value that makes no sense, or taps that leave the target.
    """
    shift, taps = options.get("tap_shift"), config.taps
    if shift is not None:
        if type(shift) is not int or shift not in (-1, 0, 1):
            raise OptionError(f"tap_shift is {shown(shift)}; give -1, 0 or 1")
        taps = tuple(tap + shift for tap in taps)
        if min(taps) < 0:
            raise OptionError(f"tap_shift is {shift}, but the first tap is layer 0; give 0 or 1")
        if max(taps) > layer_count:
            raise OptionError(
                f"tap_shift is {shift}, but the last tap is layer {max(taps) - shift}, and the "
                f"target has layers 0 to {layer_count}; give -1 or 0"
            )
    from_anchor = flag(options, "from_anchor", default=config.from_anchor)
    return read_as(config, taps, from_anchor=from_anchor)


def check_slots(what: str, config: Readable, key: str) -> None:
    """Check that a block drafts at all, read as options say.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        key: of its config, that the number of columns stands under.

    Raises:
        ArtifactError: its only column is not to draft.
    """
    if config.longest < 1:
        raise ArtifactError(
            f"{what}: {key} is 1, so there is no second column; give no from_anchor"
        )
