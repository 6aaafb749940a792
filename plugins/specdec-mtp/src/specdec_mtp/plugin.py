"""The plugin module behind the entry point: names the kinds, and imports the heads when loaded."""

from __future__ import annotations

from typing import Final

from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl

__all__ = ["GPU_WIDTHS", "MTP", "NEXTN", "detects", "load", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

MTP: Final = "mtp"
"""Heads with tensors of their own, ``mtp.*``: Qwen3.5, 3.6, 3.8 and Next."""

NEXTN: Final = "nextn"
"""The layer behind the target's last: GLM and DeepSeek."""

GPU_WIDTHS: Final = {MTP: 2, NEXTN: 1}
"""Drafts a round on a GPU, where neither the user nor the release names a number."""


def load(request: LoadRequest) -> LoadedDraft:
    """Load a head, from a folder of its own or from its target's.

    Args:
        request: see ``specdec_mtp.loading`` for the options.

    Raises:
        ArtifactError: there is no head, or it does not fit the target.
        OptionError: an option that a head does not have, or a value that makes no sense.
        TargetLacksError: the target has no embedding and vocabulary head to share.
    """
    from specdec_mtp.loading import load_head

    return load_head(request)


def detects(kind: str, artifact: Artifact) -> bool:
    """Whether a folder holds a head of this kind; looks at names of tensors, never at weights."""
    from specdec_mtp.find import HeadKind, has_head

    return has_head(artifact.path, HeadKind(kind))


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The two kinds of head."""
    return [
        DraftKind(
            name=MTP,
            load=load,
            detect=lambda artifact: detects(MTP, artifact),
            create=load,
            bundled_at="mtp",
            default_width=GPU_WIDTHS[MTP],
            summary="multi-token-prediction head of Qwen3.5, 3.6, 3.8 and Next",
        ),
        DraftKind(
            name=NEXTN,
            load=load,
            detect=lambda artifact: detects(NEXTN, artifact),
            create=load,
            default_width=GPU_WIDTHS[NEXTN],
            summary="next-token layer of GLM and DeepSeek",
        ),
    ]
