"""The hooks of a specdec plugin, as pluggy specifications.

pluggy works at start-up only: a round never goes through a hook. An implementation may take fewer
arguments than the specification, so a hook can grow without breaking older plugins.
"""

from __future__ import annotations

import reprlib
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

import pluggy

from specdec.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import TargetView
    from specdec.plugins.kinds import DraftKind

__all__ = [
    "API_VERSION",
    "SUPPORTED_API",
    "check_api",
    "hookimpl",
    "hookspec",
    "make_manager",
    "specdec_bind_target",
    "specdec_draft_kinds",
]

API_VERSION: Final = 1
"""The plugin API of this core; it grows only with changes that break an implementer."""

SUPPORTED_API: Final = frozenset({1})
"""Values of a plugin's ``specdec_api`` that this core still serves."""

_PROJECT: Final = "specdec"

hookspec: Final = pluggy.HookspecMarker(_PROJECT)
hookimpl: Final = pluggy.HookimplMarker(_PROJECT)


@hookspec
def specdec_draft_kinds() -> Sequence[DraftKind]:
    """The kinds of drafter that a plugin offers, as a list or tuple.

    Called while plugins are listed, so it imports neither MLX nor the drafter's own modules: only
    a kind's ``load`` does.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def specdec_bind_target(model: Any, tokenizer: Any) -> TargetView | None:
    """A view over a model that this plugin knows how to drive, or ``None`` for all others.

    Args:
        model: the loaded target model.
        tokenizer: its tokenizer, or ``None``.

    Raises:
        UnsupportedModelError: the plugin knows the model, and that it cannot be driven.
    """
    raise NotImplementedError


def make_manager() -> pluggy.PluginManager:
    """A fresh manager that knows specdec's hooks.

    Each plugin gets one of its own: what one plugin does wrong then cannot reach another.
    """
    manager = pluggy.PluginManager(_PROJECT)
    manager.add_hookspecs(sys.modules[__name__])
    return manager


def check_api(api: object, distribution: str) -> None:
    """Check the plugin API that a plugin was written for, before any of its hooks runs.

    Args:
        api: its ``specdec_api``, or ``None``.
        distribution: what was installed, for the message.

    Raises:
        PluginError: this core does not serve that API.

    Warns:
        DeprecationWarning: it does, but a later one will not.
    """
    offered = f"this core offers {' and '.join(map(str, sorted(SUPPORTED_API)))}"
    if not isinstance(api, int) or isinstance(api, bool):
        wants = "names no API" if api is None else f"wants API {reprlib.repr(api)}, not a number"
        raise PluginError(
            f"{wants}, {offered}; upgrade {distribution}, or set specdec_api in its module"
        )
    if api not in SUPPORTED_API:
        older = distribution if api < min(SUPPORTED_API) else "specdec-core"
        raise PluginError(f"wants API {api}, {offered}; upgrade {older}")
    if api < API_VERSION:
        warnings.warn(
            f"{distribution} is written for plugin API {api}, which a later specdec-core drops; "
            f"upgrade {distribution}",
            DeprecationWarning,
            stacklevel=2,
        )
