"""The plugin module behind the entry point: names the kinds, and imports networks when loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specdec.plugins import Artifact, DraftKind, LoadedDraft, LoadRequest, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KINDS", "load_block", "load_dspark", "specdec_api", "specdec_draft_kinds"]

specdec_api: Final = 1

DSPARK: Final = "dspark"

KINDS: Final = {
    "dflash": "block drafter of one parallel pass (z-lab's DFlash)",
    "dflash2": "DFlash 2: with local convolutions, and a selector over the best tokens",
    "deepspec": "DeepSpec's block drafter: Markov head and confidence (Qwen3 and Gemma 4)",
}


def load_block(request: LoadRequest) -> LoadedDraft:
    """Load a drafter of the kinds ``dflash``, ``dflash2`` and ``deepspec``.

    Args:
        request: see ``specdec_dflash.loading`` for the options.

    Raises:
        ArtifactError: it cannot be read, or is not this target's.
        OptionError: an option that it does not have, or a value that makes no sense.
        TargetLacksError: the target cannot be tapped.
    """
    from specdec_dflash.loading import load_drafter

    return load_drafter(request)


def load_dspark(request: LoadRequest) -> LoadedDraft:
    """Load a drafter of the kind ``dspark``; as :func:`load_block`."""
    from specdec_dflash.dspark_loading import load_drafter

    return load_drafter(request)


def _detects(kind: str) -> Callable[[Artifact], bool]:
    def detect(artifact: Artifact) -> bool:
        from specdec_dflash.packagings import kind_of

        described = artifact.config
        return described is not None and kind_of(described) == kind

    return detect


@hookimpl
def specdec_draft_kinds() -> list[DraftKind]:
    """The four kinds of block drafter."""
    kinds = [
        DraftKind(name=name, load=load_block, detect=_detects(name), summary=summary)
        for name, summary in KINDS.items()
    ]
    dspark = DraftKind(
        name=DSPARK,
        load=load_dspark,
        detect=lambda artifact: artifact.has("dspark.json"),
        summary="block drafter with a sequential head and calibrated confidence (dspark.json)",
    )
    return [*kinds, dspark]
