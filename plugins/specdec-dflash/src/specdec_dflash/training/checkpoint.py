"""A drafter in training on disk: the release that others load, and what goes on from here.

The folder has z-lab's layout (https://github.com/z-lab/dflash): ``config.json`` and
``model.safetensors`` in bfloat16. ``training/`` in it holds float32 weights and the optimizer's
state; nothing but ``--resume`` reads it, and it may be deleted.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx

from specdec.drafting.modules import parameters_of
from specdec.errors import ArtifactError, OptionError, one_line
from specdec.plugins.headers import read_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from specdec_dflash.model import BlockModel
    from specdec_dflash.training.settings import TrainSettings
    from specdec_dflash.training.teacher import Teacher

__all__ = [
    "check_settings",
    "describe",
    "load_state",
    "read_described",
    "save_drafter",
    "save_state",
]

_STATE: Final = "training/state.safetensors"
_ANEW: Final = "begin anew, without resume, in another folder"


def describe(
    teacher: Teacher, settings: TrainSettings, taps: Sequence[int], mask_token: int
) -> dict[str, Any]:
    """The ``config.json`` of a drafter; its layers are made as the target's are, if it tells.

    Args:
        teacher: the target.
        settings: of the run.
        taps: of the target.
        mask_token: fills a block.
    """
    hidden, args = teacher.port.hidden_size, teacher.args
    heads = _size(args, "num_attention_heads", max(hidden // 64, 1))
    kv_heads = _size(args, "num_key_value_heads", heads)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": settings.layers,
        "intermediate_size": _size(args, "intermediate_size", 3 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % kv_heads else kv_heads,
        "head_dim": _size(args, "head_dim", max(hidden // heads // 2 * 2, 2)),
        "vocab_size": teacher.vocab_size,
        "max_position_embeddings": _size(args, "max_position_embeddings", 32768),
        "rms_norm_eps": 1e-6,
        "rope_theta": _theta(args),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"] * settings.layers,
        "block_size": settings.block,
        "num_target_layers": teacher.port.layer_count,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(taps),
            "block_size": settings.block,
        },
    }


def _size(args: Any, name: str, default: int) -> int:
    found = getattr(args, name, None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        return default  # some have a size per layer
    return found


def _theta(args: Any) -> float:
    held = getattr(args, "rope_parameters", None)
    nested = held.get("rope_theta") if isinstance(held, dict) else None
    for theta in (getattr(args, "rope_theta", None), nested):
        if isinstance(theta, int | float) and theta > 0:
            return float(theta)
    return 10000.0


def save_drafter(folder: Path, config: Mapping[str, Any], model: BlockModel) -> None:
    """Write ``config.json`` and ``model.safetensors``; each replaces the old one when it is whole.

    Args:
        folder: made where it is missing.
        config: see :func:`describe`.
        model: its network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: array.astype(mx.bfloat16) for name, array in parameters_of(model).items()}
    _write_arrays(folder / "model.safetensors", weights, {"format": "pt"})
    part = folder / "config.json.part"
    part.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    part.replace(folder / "config.json")


def save_state(folder: Path, arrays: Mapping[str, mx.array], notes: Mapping[str, str]) -> None:
    """Write what a run goes on from.

    Args:
        folder: of the drafter.
        arrays: weights and the optimizer's state, by name.
        notes: the rest.
    """
    file = folder / _STATE
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_arrays(file, arrays, notes)


def _write_arrays(file: Path, arrays: Mapping[str, mx.array], notes: Mapping[str, str]) -> None:
    part = file.with_name(f"part-{file.name}")  # MLX wants the ending
    mx.save_safetensors(str(part), dict(arrays), dict(notes))
    os.replace(part, file)


def load_state(folder: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What :func:`save_state` wrote.

    Raises:
        ArtifactError: there is nothing, or it cannot be read, or its notes make no sense.
    """
    file = folder / _STATE
    if not file.is_file():
        raise ArtifactError(f"{folder} has no {_STATE} to resume from; {_ANEW}")
    try:
        arrays, notes = cast("Any", mx.load)(str(file), return_metadata=True)
    except RuntimeError as error:
        raise ArtifactError(f"{file} cannot be read ({one_line(error)}); {_ANEW}") from error
    for name, makes_sense in _NOTES.items():
        if name not in notes or not makes_sense(notes[name]):
            says = one_line(notes[name]) if name in notes else "missing"
            raise ArtifactError(f"{file}: its {name} is {says}, so it cannot go on; {_ANEW}")
    return arrays, notes


def _is_step(text: str) -> bool:
    return text.isdecimal() and len(text) <= 10 and int(text) < 2**32


def _is_time(text: str) -> bool:
    try:
        seconds = float(text)
    except ValueError:
        return False
    return math.isfinite(seconds) and seconds >= 0


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


_NOTES: Final = {"step": _is_step, "seconds": _is_time, "settings": _is_object}


def check_settings(notes: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    """Check that a run goes on with what it was begun with.

    Args:
        notes: of :func:`load_state`.
        wanted: by name, what may not differ.

    Raises:
        OptionError: it does; names it and both values.
    """
    begun = json.loads(notes["settings"])
    for name, value in wanted.items():
        if begun.get(name) != value:
            raise OptionError(
                f"{name} is {one_line(value)}, but the run was begun with {name} "
                f"{one_line(begun.get(name))}; resume with the same, or {_ANEW}"
            )


def read_described(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Check that the drafter in a folder is the one that is to go on.

    Raises:
        ArtifactError: it has no config, or one that cannot be read.
        OptionError: another; names the key and both values.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ArtifactError(f"{folder} has no config.json to resume from; {_ANEW}")
    found = read_object(file)
    for key in sorted(wanted):
        if found.get(key) != wanted[key]:
            raise OptionError(
                f"{folder} was begun with {key} {one_line(found.get(key))}, but now it is "
                f"{one_line(wanted[key])}; resume with the same options, or {_ANEW}"
            )
