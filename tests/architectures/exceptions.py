"""Model types that do not speculate, or cannot run where a test runs, by name and with the reason.

What is said here is tested as well, so an entry goes when its reason does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CANNOT_RUN", "PLAIN", "CannotRun"]


@frozen
class CannotRun:
    """A model type that mlx-lm itself cannot run here.

    Attributes:
        error: what its code raises.
        words: part of the message; empty where there is none.
        reason: in plain words.
    """

    error: type[BaseException]
    words: str
    reason: str


PLAIN: Mapping[str, str] = {
    "deepseek_v41": "no row form for cache type LayerCache",
    "phi3small": "gives other logits for a window than for its positions one by one",
}
"""Types that decode one position a round: what their statistics say."""

_METAL = CannotRun(RuntimeError, "No Metal back-end", "its code is a Metal kernel")
_OLMO = CannotRun(SystemExit, "", "its module ends the process where ai2-olmo is missing")

CANNOT_RUN: Mapping[str, CannotRun] = {
    **({} if mx.metal.is_available() else {"bitnet": _METAL, "muse_spark": _METAL}),
    **({} if find_spec("hf_olmo") else {"olmo": _OLMO}),
}
"""Types that cannot run on this host."""
