"""From a request to a provider: read the assistant, and check that it is this target's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from specdec.contract import require_port
from specdec.drafting.modules import load_module, packing_of, quantize_module, without_drawing
from specdec.errors import ArtifactError, OptionError
from specdec.plugins import LoadedDraft
from specdec.plugins.config_keys import shown
from specdec_assistant.config import check_centroids, read_config
from specdec_assistant.model import AssistantModel
from specdec_assistant.pairing import check_pairing
from specdec_assistant.plugin import BUNDLED_AT, DEFAULT_WIDTH
from specdec_assistant.provider import Assistant, AssistantProvider, Positions
from specdec_assistant.tensors import (
    CENTROIDS,
    check_sizes,
    read_files,
    read_ordering,
    read_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from specdec.contract import AssistantRows
    from specdec.plugins import LoadRequest
    from specdec_assistant.config import AssistantConfig
    from specdec_assistant.tensors import AssistantFiles

__all__ = ["OPTIONS", "load_assistant"]

OPTIONS: Final = ("positions", "attention_scale", "bits", "group_size")
"""Names that ``LoadRequest.options`` may hold."""

CPU_WIDTH: Final = 2
"""Drafts a round on a CPU where nobody names a number: positions cost nearly what steps do."""

_SCALES: Final = ("config", "head_dim")


def load_assistant(request: LoadRequest) -> LoadedDraft:
    """Load the assistant that a request names.

    Args:
        request: without a path, the assistant that came along with the target. Its options may
            hold

            - ``positions``: ``"constant"``, every step of a round at the last position in the
              target's K/V (as transformers does it), or ``"advancing"``, each a position further;
            - ``attention_scale``: ``"config"``, 1 unless the config has a
              ``query_pre_attn_scalar``, or ``"head_dim"``, one over the root of a head's features;
            - ``bits`` and ``group_size``: quantize an assistant that is stored in 16 bits.

    Raises:
        ArtifactError: it cannot be read, or is not this target's.
        OptionError: an option that it does not have, or a value that makes no sense.
        TargetLacksError: the target has no keys and values to lend.
    """
    options = request.options
    unknown = sorted(str(name) for name in options if name not in OPTIONS)
    if unknown:
        raise OptionError(
            f"{request.kind} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(OPTIONS)}"
        )
    positions = Positions(_one_of(options, "positions", list(Positions)))
    by_head = _one_of(options, "attention_scale", _SCALES) == "head_dim"
    packing = packing_of(options)
    target = request.target
    port: AssistantRows = require_port(target, "assistant_rows", f"the {request.kind} drafter")
    files = read_files(_folder_of(request))
    what = f"the {request.kind} drafter {files.path.name}"
    config = read_config(what, files.config)
    check_pairing(what, config, port, target)
    model, packed = _built(what, files, config, by_head=by_head)
    if packing is not None:
        if packed:
            raise OptionError(
                f"bits is {packing.bits}, but {what} is stored packed already; leave that out"
            )
        quantize_module(what, model, packing, lambda path: "centroids" not in path)
    provider = AssistantProvider(
        Assistant(name=files.path.name, config=config, model=model, positions=positions)
    )
    return LoadedDraft(provider, request.num_draft_tokens or _usual_width(config))


def _folder_of(request: LoadRequest) -> Path:
    """The assistant's folder: the one that is named, or the one inside the target's."""
    if request.path is not None:
        return request.path
    target = request.target.folder
    within = None if target is None else target / BUNDLED_AT
    if within is None or not (within / "config.json").is_file():
        none = "" if within is None else f", and there is none at {within}"
        raise ArtifactError(
            f"drafter {request.kind} needs its folder{none}; give its path instead of its kind"
        )
    return within


def _built(
    what: str, files: AssistantFiles, config: AssistantConfig, *, by_head: bool
) -> tuple[AssistantModel, bool]:
    """The network with its weights, and whether some are packed."""
    check_sizes(what, files, config)
    ordering = None
    if CENTROIDS in files.tensors:
        check_centroids(what, config, files.tensors[CENTROIDS].shape)
        ordering = read_ordering(what, files, config.vocab_size)
    weights = read_tensors(files, config)
    with without_drawing():
        model = AssistantModel(config, ordering)
    load_module(what, model, weights)
    if by_head:
        for layer in model.layers:
            layer.self_attn.scale = layer.self_attn.head_dim**-0.5
    return model, any(name.endswith(".scales") for name in weights)


def _usual_width(config: AssistantConfig) -> int:
    if mx.default_device() == mx.Device(mx.cpu):
        return CPU_WIDTH
    return config.block_size - 1 if config.block_size is not None else DEFAULT_WIDTH


def _one_of(options: Mapping[str, Any], name: str, known: Sequence[str]) -> str:
    """An option that is one of a few words; the first where nobody gives one.

    Raises:
        OptionError: it is something else.
    """
    given = options.get(name)
    if given is None:
        return known[0]
    if not isinstance(given, str) or given not in known:
        raise OptionError(f"{name} is {shown(given)}; give {' or '.join(known)}")
    return given
