"""The module behind the entry point: it names the kind. The drafter is imported by ``load``."""

from __future__ import annotations

from typing import Final

from specdec.errors import OptionError
from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = ["DEFAULT_WIDTH", "load", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

DEFAULT_WIDTH: Final = 4
"""Drafts a round where the user names no number."""


def load(request: LoadRequest) -> LoadedDraft:
    """Make the drafter.

    Args:
        request: its options may hold ``memory``.

    Raises:
        OptionError: an option that the drafter does not have, or a value that makes no sense.
    """
    unknown = sorted(set(request.options) - {"memory"})
    if unknown:
        names = ", ".join(unknown)
        raise OptionError(f"echo has no option {names}; its option is memory")
    # Imported here: `specdec plugins` lists the kind on machines without MLX.
    from specdec_echo.provider import EchoProvider

    width = DEFAULT_WIDTH if request.num_draft_tokens is None else request.num_draft_tokens
    provider = EchoProvider(**request.options)
    return LoadedDraft(provider=provider, num_draft_tokens=width)


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The one kind of this plugin. It has no files, so it is chosen by name."""
    return [
        DraftKind(
            name="echo",
            load=load,
            artifact=False,
            default_width=DEFAULT_WIDTH,
            summary="repeats what followed the last token before",
        )
    ]
