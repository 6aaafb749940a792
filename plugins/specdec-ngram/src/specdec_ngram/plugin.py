"""The plugin module behind the entry point: names the kind, and imports the drafter when loaded."""

from __future__ import annotations

from typing import Final

from specdec.errors import OptionError
from specdec.plugins import DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = [
    "CPU_WIDTH",
    "GPU_WIDTH",
    "OPTIONS",
    "default_width",
    "load",
    "specdec_api",
    "specdec_draft_kinds",
]

specdec_api: Final = 1

CPU_WIDTH: Final = 3
"""Drafts a round on a CPU, where each verified position costs about a fifth of a forward."""

GPU_WIDTH: Final = 10
"""Drafts a round on a GPU, where a window of some positions costs about the same as a wide one."""

OPTIONS: Final = ("max_ngram", "min_ngram")
"""Names that ``LoadRequest.options`` may hold."""


def default_width() -> int:
    """Drafts a round where the user names no number: by what a wider window costs here."""
    import mlx.core as mx

    return CPU_WIDTH if mx.default_device() == mx.Device(mx.cpu) else GPU_WIDTH


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

    width = default_width() if request.num_draft_tokens is None else request.num_draft_tokens
    return LoadedDraft(provider=NgramProvider(**request.options), num_draft_tokens=width)


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The one kind of this plugin; it has no artifact, so it is chosen by name."""
    return [
        DraftKind(
            name="ngram",
            load=load,
            artifact=False,
            summary="copies what followed the last tokens earlier in the text; no weights",
        )
    ]
