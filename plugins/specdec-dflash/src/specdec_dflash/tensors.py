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
    from collections.abc import Iterator

    from specdec_dflash.config import BlockConfig
    from specdec_dflash.files import DrafterFiles

__all__ = ["DrafterTensors", "check_stored", "read_tensors"]

_IGNORED: Final = re.compile(r"t2d|verifier_(norm|lm_head)\..+|(.+\.)?rotary_emb\..+")
_CODEBOOKS: Final = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
_DRAFT_IDS: Final = "d2t"
_BITS: Final = (2, 3, 4, 5, 6, 8)  # of packed weights


@frozen(eq=False)
class DrafterTensors:
    """What was read.

    Attributes:
        weights: by the names of the modules' parameters.
        ids: what the drafter's own head scores, ascending; ``None`` for the whole vocabulary.
    """

    weights: dict[str, mx.array]
    ids: tuple[int, ...] | None


def check_stored(what: str, files: DrafterFiles, config: BlockConfig) -> None:
    """Check sizes that the config names against the tensors, before anything of them is made.

    Args:
        what: names the drafter in messages.
        files: of the drafter; no weight is read.
        config: of the drafter.

    Raises:
        ArtifactError: a tensor is missing or has another shape; names it.
    """
    stored = files.tensors
    for name, shape in _wanted(config):
        bare = name.removesuffix(".weight")
        found = stored.get(name) or (stored.get(bare) if bare in _CODEBOOKS else None)
        if found is None:
            raise ArtifactError(f"{what} has no {name}; give a complete one of this target")
        if found.shape == shape:
            continue
        packed = f"{bare}.scales" in stored and found.shape[:-1] == shape[:-1]
        if not packed or found.shape[-1] * 32 not in [bits * shape[-1] for bits in _BITS]:
            raise ArtifactError(
                f"the {name} of {what} has shape {found.shape}, but its config and target need "
                f"{shape}; give the one of this target"
            )


def _wanted(config: BlockConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors that tell every size of a config but the target's own."""
    size, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    scored = config.draft_vocab or config.vocab_size
    yield "fc.weight", (size, len(config.taps) * size)
    for number in range(config.layers):
        at = f"layers.{number}"
        yield f"{at}.self_attn.q_proj.weight", (config.heads * head, size)
        yield f"{at}.self_attn.k_proj.weight", (config.kv_heads * head, size)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.mlp.gate_proj.weight", (inner, size)
        if config.convolutions is not None:
            kernel, groups = config.convolutions.kernel_size, size // config.convolutions.group_size
            for part in ("attention_conv", "mlp_conv"):
                yield f"{at}.{part}.base_kernel", (2, kernel, size)
                yield f"{at}.{part}.kernel_projection.weight", (2 * kernel * groups, size)
    for name in _CODEBOOKS if config.selector is not None else ():
        assert config.selector is not None
        yield f"{name}.weight", (config.vocab_size, config.selector.rank)
    if config.markov is not None:
        yield "markov_head.markov_w1.weight", (config.vocab_size, config.markov.rank)
        yield "markov_head.markov_w2.weight", (scored, config.markov.rank)


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
