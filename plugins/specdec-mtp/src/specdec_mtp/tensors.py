"""The tensors of a head, read from where they were found and given one set of names.

Next-token layers are decoder layers of the target, so mlx-lm's own ``sanitize`` of the target's
model type makes them what its modules expect: experts, latent attention and 8-bit floats are the
library's work, done on the head's tensors alone. mlx-lm throws away heads of the Qwen family, so
their experts are arranged here.
"""

from __future__ import annotations

import importlib
import re
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx

from specdec.drafting.modules import read_stored
from specdec.errors import ArtifactError, one_line
from specdec_mtp.find import HeadKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from specdec_mtp.find import HeadFiles

    Sanitize = Callable[[dict[str, mx.array]], Mapping[str, mx.array]]

__all__ = ["read_tensors"]

_LAYER: Final = "model.layers.0."
_SCALE: Final = "weight_scale_inv"
_BLOCK: Final = 128
_SUFFIX: Final = r"\.(weight|bias|scales|biases)"
_NAMES: Final = {
    HeadKind.MTP: re.compile(
        r"(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden|layers\.0\.("
        r"input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.("
        r"gate|shared_expert_gate|((shared_expert|switch_mlp)\.)?(gate|up|down)_proj)))" + _SUFFIX
    ),
    HeadKind.NEXTN: re.compile(
        r"(enorm|hnorm|eh_proj|norm|embed_tokens|head|layers\.0\.("
        r"input_layernorm|post_attention_layernorm|(self_attn|mlp)\..+))"
        + _SUFFIX
        + r"|layers\.0\.mlp\..+\.e_score_correction_bias"
    ),
}
_NEEDED: Final = {
    HeadKind.MTP: ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    HeadKind.NEXTN: ("eh_proj", "enorm", "hnorm", "norm"),
}
_AROUND: Final = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "embed_tokens": "embed_tokens",
    "shared_head.norm": "norm",
    "shared_head.head": "head",
}
_FUSED: Final = re.compile(
    r"(.+)\.experts\.(gate_up_proj|down_proj)(?:[._](weight|scales|biases))?"
)
_EXPERT: Final = re.compile(
    r"(.+)\.experts\.(\d+)\.((?:gate|up|down)_proj\.(?:weight|bias|scales|biases))"
)


def read_tensors(files: HeadFiles, *, sanitize: Sanitize | None = None) -> dict[str, mx.array]:
    """Read a head's tensors, and nothing else of the files they are in.

    An ``mtp`` head has ``fc``, ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden`` and ``norm``; a
    ``nextn`` head ``eh_proj``, ``enorm``, ``hnorm`` and ``norm``, and where the checkpoint has
    copies of its own, ``embed_tokens`` and ``head``. Both have ``layers.0.*`` as mlx-lm's decoder
    layer of the target names its parameters, with experts stacked ([experts, out, in]). Values are
    as stored: norm weights are not shifted, types not changed, but 8-bit floats with block scales
    become bfloat16.

    Args:
        files: where the head is.
        sanitize: makes tensors named ``model.layers.0.*`` those of mlx-lm's decoder layer, for a
            ``nextn`` head; by default mlx-lm's own, of the model type in the config.

    Raises:
        ArtifactError: a tensor has a name or form that no such head has, or one is missing.
    """
    read = read_stored(files.tensors)
    stored = {name: w for name, w in read.items() if "rotary_emb.inv_freq" not in name}
    _check_blocks(files, stored)
    if files.kind is HeadKind.MTP:
        named = _experts_stacked(files, _dequantized(stored))
    else:
        named = _next_token_layer(files, stored, sanitize or _library_sanitize(files))
    _check_names(files, named)
    try:
        mx.eval(named)
    except RuntimeError as error:
        raise ArtifactError(
            f"{files.path} cannot be read ({one_line(error)}); download it again"
        ) from error
    return named


def _check_blocks(files: HeadFiles, stored: Mapping[str, mx.array]) -> None:
    """Refuse 8-bit floats whose scales are not those of mlx-lm's rule: blocks of 128 by 128."""
    for name, where in files.tensors.items():
        if not where.dtype.startswith("F8"):
            continue
        scale = stored.get(name.removesuffix("weight") + _SCALE)
        blocks = tuple(-(-size // _BLOCK) for size in where.shape)
        if len(blocks) != 2 or scale is None or scale.shape != blocks:
            raise ArtifactError(
                f"{where.name} in {where.file} is {where.dtype} of {list(where.shape)} without "
                f"scales for blocks of {_BLOCK} by {_BLOCK}; give a bfloat16 or an MLX release"
            )


def _dequantized(stored: dict[str, mx.array]) -> dict[str, mx.array]:
    """8-bit floats with block scales as bfloat16, by mlx-lm's rule for DeepSeek-V3."""
    if not any(name.endswith(_SCALE) for name in stored):
        return stored
    from mlx_lm.models import deepseek_v3

    stand_in = SimpleNamespace(args=SimpleNamespace(num_hidden_layers=0))
    return cast("dict[str, mx.array]", deepseek_v3.Model.sanitize(stand_in, stored))


def _experts_stacked(files: HeadFiles, stored: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm's ``switch_mlp``: fused ones split in two, single ones stacked."""
    named: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, weight in stored.items():
        if fused := _FUSED.fullmatch(name):
            block, projection, part = fused.groups(default="weight")
            if projection == "down_proj":
                named[f"{block}.switch_mlp.down_proj.{part}"] = weight
                continue
            gate, up = mx.split(weight, 2, axis=-2)
            named[f"{block}.switch_mlp.gate_proj.{part}"] = mx.contiguous(gate)
            named[f"{block}.switch_mlp.up_proj.{part}"] = mx.contiguous(up)
        elif expert := _EXPERT.fullmatch(name):
            block, number, part = expert.groups()
            single.setdefault(f"{block}.switch_mlp.{part}", {})[int(number)] = weight
        else:
            named[name] = weight
    for name, experts in single.items():
        lacking = [number for number in range(max(experts)) if number not in experts]
        if lacking:
            raise ArtifactError(
                f"{files.path} lacks expert {lacking[0]} of {name}; download it again"
            )
        named[name] = mx.stack([experts[number] for number in range(len(experts))])
    return named


def _next_token_layer(
    files: HeadFiles, stored: Mapping[str, mx.array], sanitize: Sanitize
) -> dict[str, mx.array]:
    """The parts around the decoder layer by their own names, the layer's by the library's."""
    try:
        renamed = sanitize({_LAYER + name: weight for name, weight in stored.items()})
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"the next-token layer in {files.path} cannot be read as a layer of "
            f"{files.config.get('model_type')} ({one_line(error)}); give a complete release"
        ) from error
    named = {}
    for path, weight in renamed.items():
        name = path.removeprefix(_LAYER)
        part, _, suffix = name.rpartition(".")
        named[f"{_AROUND[part]}.{suffix}" if part in _AROUND else f"layers.0.{name}"] = weight
    return named


def _library_sanitize(files: HeadFiles) -> Sanitize:
    """mlx-lm's ``sanitize`` of the target's model type, as if the target had one layer."""
    from mlx_lm.utils import MODEL_REMAPPING

    given = [str(config.get("model_type", "")) for config in (files.config, files.outer)]
    types = [name.removesuffix("_mtp") for name in given]
    for model_type in dict.fromkeys([*types, *(name.removesuffix("_text") for name in types)]):
        try:
            library: Any = importlib.import_module(
                f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}"
            )
        except ImportError:
            continue
        try:
            args = library.ModelArgs.from_dict(deepcopy(dict(files.config)))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"the config of {files.path} is not that of a {model_type} ({one_line(error)}); "
                "give a folder with the target's config.json"
            ) from error
        args.num_hidden_layers = 1
        stand_in = SimpleNamespace(args=args)
        return lambda weights: library.Model.sanitize(stand_in, weights)
    raise ArtifactError(
        f"{files.path} is for model type {given[0]!r}, which mlx-lm does not know; choose another "
        "drafter (specdec plugins)"
    )


def _check_names(files: HeadFiles, named: Iterable[str]) -> None:
    """Refuse what no module takes, and a head without the parts that every head has."""
    have = set(named)
    unknown = sorted(name for name in have if not _NAMES[files.kind].fullmatch(name))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ArtifactError(
            f"{files.path} has {', '.join(unknown[:3])}{more}, which {files.kind.a_head} of "
            "one layer does not have; give another release of it"
        )
    lacking = [f"{name}.weight" for name in _NEEDED[files.kind] if f"{name}.weight" not in have]
    if lacking:
        raise ArtifactError(f"{files.path} lacks {', '.join(lacking)}; give a complete release")
