"""The plugin module behind the entry point: names the kind, and imports models when loaded."""

from __future__ import annotations

from typing import Final

from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = ["TWO_MODEL", "load", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

TWO_MODEL: Final = "two-model"


def load(request: LoadRequest) -> LoadedDraft:
    """Load a draft model.

    Args:
        request: see ``specdec_two_model.loading`` for the options.

    Raises:
        ArtifactError: the folder holds no model of mlx-lm, or one that cannot draft for the target.
        OptionError: an option that the kind does not have, or a value that makes no sense.
    """
    from specdec_two_model.loading import load_draft_model

    return load_draft_model(request)


def _is_model(artifact: Artifact) -> bool:
    from specdec_two_model.detect import is_model

    return is_model(artifact)


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The one kind of this plugin, which takes the models that no other kind recognises."""
    return [
        DraftKind(
            name=TWO_MODEL,
            load=load,
            detect=_is_model,
            fallback=True,
            summary="a smaller model of the same tokenizer",
        )
    ]
