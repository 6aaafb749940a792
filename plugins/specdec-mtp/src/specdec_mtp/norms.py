"""Whether a head's norm weights are stored as scales, or as scales minus one.

Hugging Face's Qwen3.5 family stores the latter, MLX's converters add the one, and some tools write
files that look like either. Adding it twice or never costs nothing but acceptance, so nobody
notices. What a file says of itself (the layout of the trunk, prefixes, who wrote it) and what its
values can be are two witnesses; a load-time probe is to decide where they disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import mlx.core as mx
from attrs import frozen

from specdec_mtp.find import HeadKind, Layout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from specdec_mtp.find import HeadFiles

__all__ = ["NORM_NAMES", "NormEvidence", "norm_evidence", "shifted"]

_TOP: Final = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
_IN_LAYER: Final = (
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.0.self_attn.k_norm.weight",
)

NORM_NAMES: Final[tuple[str, ...]] = _TOP + _IN_LAYER
"""The norm weights of an ``mtp`` head, all of them stored in the same way in a sound file."""

_NEGATIVE: Final = -0.05
"""A mean below this is no finished scale: it would turn most channels round."""

_FINISHED: Final = 0.3
"""Where every mean is above this, the weights are probably finished scales."""


@frozen(kw_only=True)
class NormEvidence:
    """What is known of how a head's norm weights are stored.

    Attributes:
        shift: whether 1 is to be added to them.
        certain: whether file and values agree, or one of them says nothing.
        reasons: why, as plain clauses for messages.
        mixed: names whose values say that they alone want the 1, where the file is at odds with
            itself; empty otherwise.
    """

    shift: bool
    certain: bool
    reasons: tuple[str, ...]
    mixed: tuple[str, ...] = ()


def norm_evidence(files: HeadFiles, tensors: Mapping[str, mx.array]) -> NormEvidence:
    """Weigh what the files and the values say of a head's norm weights.

    A clearly negative mean decides against the file, because no finished scale has one; that every
    mean is well above zero does not, because some raw ones are too (means of a trained head's
    ``q_norm`` reach 0.9 before the shift).

    Args:
        files: where the head was found.
        tensors: its tensors as ``read_tensors`` gives them.
    """
    if files.kind is HeadKind.NEXTN:
        return NormEvidence(
            shift=False, certain=True, reasons=("next-token layers store norm weights as they are",)
        )
    told, why_told = _told_by_file(files)
    means = {name: _mean(tensors[name]) for name in NORM_NAMES if name in tensors}
    seen, why_seen = _seen_in_values(means)
    mixed = _mixed(means)
    if mixed:
        rest = [name for name in means if name not in mixed]
        against = f"but those of {_listed(means, rest)} are those of finished scales"
        return NormEvidence(
            shift=bool(told), certain=False, reasons=(why_told, why_seen, against), mixed=mixed
        )
    known = [reading for reading in (told, seen) if reading is not None]
    shift = seen if seen is True or told is None else told
    return NormEvidence(
        shift=bool(shift), certain=len(set(known)) == 1, reasons=(why_told, why_seen)
    )


def shifted(
    tensors: Mapping[str, mx.array], by: float, names: Collection[str] = NORM_NAMES
) -> dict[str, mx.array]:
    """The tensors with a number added to the norm weights, in their own type as mlx-lm does.

    Args:
        tensors: a head's tensors; they are not changed.
        by: what is added, usually 1.
        names: which tensors it is added to, where they are there.
    """
    return {name: w + by if name in names else w for name, w in tensors.items()}


def _told_by_file(files: HeadFiles) -> tuple[bool | None, str]:
    """Whether layout and metadata say that the weights want the 1; ``None`` if neither does."""
    if files.raw_trunk is not None:
        layout = "Hugging Face's" if files.raw_trunk else "MLX's"
        return files.raw_trunk, f"the target's convolutions beside it are in {layout} layout"
    if files.layout is Layout.PREFIXED and not files.from_mlx:
        return True, "its names have Hugging Face's prefix, and MLX did not write it"
    if files.layout is Layout.SPLIT and files.from_mlx:
        return False, "MLX wrote it, under names without prefix"
    return None, "names and metadata do not tell how norm weights are stored"


def _seen_in_values(means: Mapping[str, float]) -> tuple[bool | None, str]:
    """Whether the values want the 1; ``None`` where they could be either."""
    negative = [name for name, mean in means.items() if mean < _NEGATIVE]
    if negative:
        return True, f"the means of {_listed(means, negative)} are negative"
    if len(means) == len(NORM_NAMES) and min(means.values()) > _FINISHED:
        return False, f"all means are above {_FINISHED}"
    return None, "the means of the norm weights could be either"


def _mixed(means: Mapping[str, float]) -> tuple[str, ...]:
    """The group of norms that wants the 1, where the other group has had it.

    Such files exist: norms around the decoder layer converted, those inside it left raw
    (https://github.com/jundot/omlx/pull/1507).
    """
    for raw, finished in ((_TOP, _IN_LAYER), (_IN_LAYER, _TOP)):
        if any(means.get(name, 0.0) < _NEGATIVE for name in raw) and all(
            means.get(name, 0.0) > _FINISHED for name in finished
        ):
            return tuple(name for name in raw if name in means)
    return ()


def _mean(weight: mx.array) -> float:
    return cast("float", weight.astype(mx.float32).mean().item())


def _listed(means: Mapping[str, float], names: Collection[str]) -> str:
    return ", ".join(f"{name} ({means[name]:+.2f})" for name in names)
