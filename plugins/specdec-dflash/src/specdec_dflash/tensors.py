"""A block drafter's tensors under the names of its modules' parameters."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import mlx.core as mx
from attrs import frozen

from specdec.drafting.modules import read_stored
from specdec.errors import ArtifactError

if TYPE_CHECKING:
    from specdec_dflash.config import BlockConfig
    from specdec_dflash.files import DrafterFiles

__all__ = ["DrafterTensors", "read_tensors"]

_IGNORED: Final = re.compile(r"t2d|verifier_(norm|lm_head)\..+|(.+\.)?rotary_emb\..+")
_CODEBOOKS: Final = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
_DRAFT_IDS: Final = "d2t"


@frozen(eq=False)
class DrafterTensors:
    """What was read.

    Attributes:
        weights: by the names of the modules' parameters.
        ids: what the drafter's own head scores, ascending; ``None`` for the whole vocabulary.
    """

    weights: dict[str, mx.array]
    ids: tuple[int, ...] | None


def read_tensors(files: DrafterFiles, config: BlockConfig) -> DrafterTensors:
    """Read a drafter's tensors; MLX reads a weight's bytes when it is evaluated.

    Args:
        files: where they are.
        config: of the drafter.

    Raises:
        ArtifactError: a draft vocabulary that is missing, or whose ids make no sense.
    """
    wanted = {n: stored for n, stored in files.tensors.items() if not _IGNORED.fullmatch(n)}
    weights = read_stored(wanted)
    offsets = weights.pop(_DRAFT_IDS, None)
    for name in _CODEBOOKS:
        if name in weights:
            weights[f"{name}.weight"] = weights.pop(name)
    if config.draft_vocab is None:
        return DrafterTensors(weights, None)
    if offsets is None:
        raise ArtifactError(
            f"{files.path}: draft_vocab_size is {config.draft_vocab}, but there is no tensor d2t "
            "that says which ids these are; give a complete release"
        )
    return DrafterTensors(weights, _draft_ids(files, config, offsets))


def _draft_ids(files: DrafterFiles, config: BlockConfig, offsets: mx.array) -> tuple[int, ...]:
    """Draft id i is the target's ``i + d2t[i]``."""
    count = config.draft_vocab or 0
    if offsets.shape != (count,):
        raise ArtifactError(
            f"{files.path}: d2t has the shape {tuple(offsets.shape)}, but draft_vocab_size is "
            f"{count}; give an intact release"
        )
    found = mx.arange(count) + offsets.astype(mx.int64)
    ids: list[int] = found.tolist()  # type: ignore[assignment]  # a list of ints, of one axis
    ascend = all(low < high for low, high in pairwise(ids))
    if not ascend or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ArtifactError(
            f"{files.path}: d2t does not map to ascending ids below {config.vocab_size}; give an "
            "intact release"
        )
    return tuple(ids)
