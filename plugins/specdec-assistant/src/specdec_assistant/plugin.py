"""The plugin module behind the entry point: names the kind, and imports networks when loaded."""

from __future__ import annotations

from typing import Final

from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = [
    "ASSISTANT",
    "BUNDLED_AT",
    "DEFAULT_WIDTH",
    "MODEL_TYPES",
    "load",
    "specdec_api",
    "specdec_draft_kinds",
]

specdec_api: Final = 1

ASSISTANT: Final = "assistant"

BUNDLED_AT: Final = "assistant"
"""Sub-folder of a target's, where an assistant comes along."""

DEFAULT_WIDTH: Final = 3
"""Drafts a round where neither the user nor the release names a number."""

MODEL_TYPES: Final = ("gemma4_assistant", "gemma4_unified_assistant")
"""Of releases; other families' assistants have other networks, so they are not taken for these."""


def load(request: LoadRequest) -> LoadedDraft:
    """Load an assistant.

    Args:
        request: see ``specdec_assistant.loading`` for the options.

    Raises:
        ArtifactError: it cannot be read, or is not this target's.
        OptionError: an option that it does not have, or a value that makes no sense.
        TargetLacksError: the target has no keys and values to lend.
    """
    from specdec_assistant.loading import load_assistant

    return load_assistant(request)


def detects(artifact: Artifact) -> bool:
    """Whether a folder's config is of an assistant of Gemma's."""
    config = artifact.config
    return config is not None and config.get("model_type") in MODEL_TYPES


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The one kind of this plugin."""
    return [
        DraftKind(
            name=ASSISTANT,
            load=load,
            detect=detects,
            bundled_at=BUNDLED_AT,
            default_width=DEFAULT_WIDTH,
            summary="Gemma assistant that borrows the target's keys and values",
        )
    ]
