"""The checks, by theme, and their order: what is simple and local comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.testing.checks import (
    checkpoints,
    draws,
    identity,
    lifecycle,
    lookup,
    losslessness,
    membership,
    optional,
    prefill,
    rounds,
    standing_down,
)
from specdec.testing.kit import Check

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CHECKS"]

_THEMES = (
    identity,
    lifecycle,
    prefill,
    rounds,
    draws,
    membership,
    checkpoints,
    optional,
    lookup,
    standing_down,
    losslessness,
)

CHECKS: Final[Mapping[str, Check]] = {
    each.name: each for theme in _THEMES for each in vars(theme).values() if isinstance(each, Check)
}
"""All checks by name, in the order they run."""
