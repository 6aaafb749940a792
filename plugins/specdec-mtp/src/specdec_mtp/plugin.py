"""The plugin module behind the entry point: names the kinds, and imports the heads when loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl

if TYPE_CHECKING:
    from specdec.contract import TargetView

__all__ = ["MTP", "NEXTN", "create", "detects", "load", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

MTP: Final = "mtp"
"""Heads with tensors of their own, ``mtp.*``: Qwen3.5, 3.6, 3.8 and Next."""

NEXTN: Final = "nextn"
"""The layer behind the target's last: GLM and DeepSeek."""

_WIDTH: Final = {MTP: 2, NEXTN: 1}


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


def create(kind: str, target: TargetView) -> LoadedDraft:
    """The head that a target declares as its own.

    Args:
        kind: ``"mtp"`` or ``"nextn"``.
        target: knows the folder that it was loaded from.

    Raises:
        ArtifactError: its folder is not known, or holds no head.
    """
    return load(LoadRequest(kind=kind, target=target))


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
            create=lambda target: create(MTP, target),
            bundled_at="mtp",
            default_width=_WIDTH[MTP],
            summary="multi-token-prediction head of Qwen3.5, 3.6, 3.8 and Next",
        ),
        DraftKind(
            name=NEXTN,
            load=load,
            detect=lambda artifact: detects(NEXTN, artifact),
            create=lambda target: create(NEXTN, target),
            default_width=_WIDTH[NEXTN],
            summary="next-token layer of GLM and DeepSeek",
        ),
    ]
