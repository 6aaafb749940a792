"""The plugin module behind the entry point: names the kind, and imports the drafter when loaded."""

from __future__ import annotations

from typing import Final

from specdec.errors import OptionError
from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = ["DEFAULT_WIDTH", "OPTIONS", "load", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

DEFAULT_WIDTH: Final = 4
"""Drafts a round where the user names no number."""

OPTIONS: Final = ("max_ngram", "min_ngram")
"""Names that ``LoadRequest.options`` may hold."""


def load(request: LoadRequest) -> LoadedDraft:
    """Make the drafter.

    Args:
        request: its options may hold ``max_ngram`` and ``min_ngram``, the longest and the shortest
            n-gram that is looked up.

    Raises:
        OptionError: an option that the drafter does not have, or a value that makes no sense.
    """
    unknown = sorted(str(name) for name in request.options if name not in OPTIONS)
    if unknown:
        raise OptionError(
            f"ngram has no option {', '.join(unknown)}; its options are {' and '.join(OPTIONS)}"
        )
    from specdec_ngram.provider import NgramProvider

    width = DEFAULT_WIDTH if request.num_draft_tokens is None else request.num_draft_tokens
    return LoadedDraft(provider=NgramProvider(**request.options), num_draft_tokens=width)


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The one kind of this plugin; it has no artifact, so it is chosen by name."""
    return [
        DraftKind(
            name="ngram",
            load=load,
            artifact=False,
            default_width=DEFAULT_WIDTH,
            summary="copies what followed the last tokens earlier in the text; no weights",
        )
    ]
