"""From a request to a provider: read the drafter, check that it is this target's, try it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx

from specdec.checkpoints import weights_identity
from specdec.contract import require_port
from specdec.drafting import ProjectedGroups, ProjectedProvider
from specdec.drafting.modules import (
    Packing,
    load_module,
    packing_of,
    parameters_of,
    quantize_module,
    without_drawing,
)
from specdec.errors import ArtifactError, OptionError
from specdec.plugins import LoadedDraft
from specdec.plugins.config_keys import shown
from specdec_dflash.basis import Binding, basis_of
from specdec_dflash.confidence import is_measure, read_thresholds, thresholds_for
from specdec_dflash.config import config_digest
from specdec_dflash.files import read_files
from specdec_dflash.method import BlockDrafting, Drafting
from specdec_dflash.model import BlockModel, folded
from specdec_dflash.options import as_asked, check_slots, drafts_a_round, flag, known_options
from specdec_dflash.packagings import DEEPSPEC, DFLASH2, kind_of, read_config
from specdec_dflash.pairing import check_pairing
from specdec_dflash.probe import agreed
from specdec_dflash.tensors import check_stored, read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.contract import HiddenTaps, TargetView
    from specdec.plugins import LoadRequest
    from specdec_dflash.config import BlockConfig
    from specdec_dflash.files import DrafterFiles
    from specdec_dflash.tensors import DrafterTensors

__all__ = ["CALIBRATED", "OPTIONS", "SCHEMA", "load_drafter", "provider_of"]

SCHEMA: Final = "block-context-v1"
"""Persistent name of the layout of a row's arrays."""

OPTIONS: Final = (
    "bits",
    "group_size",
    "block",
    "confidence",
    "tap_shift",
    "from_anchor",
    "probe",
)
"""Names that ``LoadRequest.options`` may hold."""

CALIBRATED: Final = "confidence_thresholds"
"""Key of the config under which thresholds of a calibration stand, one for each draft."""

DFLASH2_PACKING: Final = Packing(4, 64)
"""What a DFlash 2 drafter of 16 bits is quantized to where no option says otherwise."""

_WHOLE: Final = ("confidence_head", "conv.", "candidate_selector")  # small, or read by the entry


def load_drafter(request: LoadRequest) -> LoadedDraft:
    """Load the drafter that a request names.

    Args:
        request: its options may hold

            - ``bits`` and ``group_size``: quantize a drafter that is stored in 16 bits; ``bits=0``
              keeps a DFlash 2 drafter as it is, which gets 4 otherwise;
            - ``block``: ``"short"``, as many columns as the drafts need, or ``"whole"``, those of
              training; by default whole for ``deepspec``, whose drafters saw no other, else short;
            - ``confidence``: where the config has no calibrated thresholds, drafts end before a
              slot whose confidence is lower; 0 to 1, and false or 0 is off even where it has;
            - ``tap_shift``: -1, 0 or 1, added to the tapped layers;
            - ``from_anchor``: whether the first column drafts;
            - ``probe``: ``False`` does not try the drafter on a short text.

    Raises:
        ArtifactError: it cannot be read, or is not this target's.
        OptionError: an option that it does not have, or a value that makes no sense.
        TargetLacksError: the target cannot be tapped.

    Warns:
        SpecdecDrafterWarning: the drafter agrees far better under another reading.
    """
    options = known_options(request, OPTIONS)
    target = request.target
    port: HiddenTaps = require_port(target, "hidden_taps", f"the {request.kind} drafter")
    files = _files(request)
    what = f"the {request.kind} drafter {files.path.name}"
    config = read_config(what, files.config)
    check_pairing(what, config, port, target.vocab_size)
    config = as_asked(config, options, port.layer_count)
    check_slots(what, config, "block_size")
    packing = packing_of(options, DFLASH2_PACKING if request.kind == DFLASH2 else None)
    drafting = _drafting(request, config, _calibrated(what, files, config, options))
    tensors = read_tensors(files, config)
    check_stored(what, files, config)
    model = _built(what, config, tensors)
    ids = None if tensors.ids is None else mx.array(list(tensors.ids), mx.int32)

    basis = basis_of(target, what)

    def make(config: BlockConfig) -> BlockDrafting:
        tried = model if basis is None else folded(model, basis, config.taps)
        return BlockDrafting(config, tried, port, drafting, ids=ids, basis=basis)

    if flag(options, "probe", default=True):
        fixed = [name for name in ("tap_shift", "from_anchor") if options.get(name) is not None]
        config = agreed(request, what, config, make, fixed)
    binding = _binding(files.path.name, config, model)
    binding.turn(target)  # before it is quantized: packing it twice would cost precision
    if any(name.endswith(".scales") for name in tensors.weights):
        _check_packed(what, options)
    elif packing is not None:
        quantize_module(
            what, binding.model, packing, lambda path: not any(k in path for k in _WHOLE)
        )
    provider = provider_of(files.path.name, config, binding, drafting, tensors.ids)
    provider.grouped.method_for(target)
    return LoadedDraft(provider, drafts_a_round(request, config.longest), config.longest)


def provider_of(
    name: str,
    config: BlockConfig,
    model: BlockModel | Binding[BlockModel],
    drafting: Drafting,
    ids: tuple[int, ...] | None,
) -> ProjectedProvider:
    """A drafter that has its weights, as a provider.

    Args:
        name: of the drafter.
        config: of it.
        model: its network; or what it is bound to, perhaps a target's basis already.
        drafting: how its blocks are used.
        ids: what its own head scores, ascending; ``None`` for the whole vocabulary.
    """
    binding = model if isinstance(model, Binding) else _binding(name, config, model)

    def bind(target: TargetView) -> BlockDrafting:
        port: HiddenTaps = require_port(target, "hidden_taps", name)
        check_pairing(name, config, port, target.vocab_size)
        binding.bind(target)
        return BlockDrafting(
            config, binding.model, port, drafting, ids=grouped.listed, basis=binding.basis
        )

    grouped = ProjectedGroups(
        name=name,
        schema=SCHEMA,
        # Nothing of ``drafting`` changes what a row has stored of its text.
        namespace=lambda: f"{weights_identity(binding.model)}:{config_digest(config)}",
        tap_layers=config.taps,
        bind=bind,
        vocabulary=ids,
    )
    weight_bytes = sum(array.nbytes for array in parameters_of(binding.model).values())
    return ProjectedProvider(name, weight_bytes, grouped)


def _binding(name: str, config: BlockConfig, model: BlockModel) -> Binding[BlockModel]:
    return Binding(name, model, lambda own, basis: folded(own, basis, config.taps))


def _files(request: LoadRequest) -> DrafterFiles:
    if request.path is None:
        raise ArtifactError(
            f"drafter {request.kind} needs its folder; give its path instead of its kind"
        )
    files = read_files(request.path)
    found = kind_of(files.config)
    if found != request.kind:
        is_one = f"is of kind {found}" if found else "is no block drafter's"
        raise ArtifactError(
            f"{files.path}: config.json {is_one}, not {request.kind}; "
            + (f"name the kind {found}" if found else "give the folder of a drafter")
        )
    return files


def _check_packed(what: str, options: Mapping[str, Any]) -> None:
    """Check that no option asks for another packing than the stored one, which stays."""
    asked = [f"{name} is {options[name]}" for name in ("bits", "group_size") if options.get(name)]
    if asked:
        raise OptionError(
            f"{' and '.join(asked)}, but {what} is stored packed already; leave that out"
        )


def _built(what: str, config: BlockConfig, tensors: DrafterTensors) -> BlockModel:
    weights = tensors.weights
    with without_drawing():
        model = BlockModel(
            config,
            own_embedding="embed_tokens.weight" in weights,
            own_head="lm_head.weight" in weights,
        )
    if tensors.ids is not None and "lm_head" not in model:
        raise ArtifactError(
            f"{what}: draft_vocab_size is {config.draft_vocab}, but there is no lm_head.weight for "
            "it; give a complete release"
        )
    load_module(what, model, weights)
    return model


def _drafting(
    request: LoadRequest, config: BlockConfig, calibrated: tuple[float, ...] | None
) -> Drafting:
    options = request.options
    usual = "whole" if request.kind == DEEPSPEC else "short"
    block = usual if options.get("block") is None else options["block"]
    if not isinstance(block, str) or block not in ("short", "whole"):
        raise OptionError(f"block is {shown(block)}; give short or whole")
    return Drafting(
        whole_block=block == "whole",
        thresholds=thresholds_for(
            options.get("confidence"), calibrated, config.block_size, has_head=config.confidence
        ),
        head_is_whole=_is_whole(config, request.target),
    )


def _calibrated(
    what: str, files: DrafterFiles, config: BlockConfig, options: Mapping[str, Any]
) -> tuple[float, ...] | None:
    """Thresholds that a calibration has left in the config, one per column at least."""
    found = files.config.get(CALIBRATED)
    if found is None or is_measure(options.get("confidence")):
        return None
    if not config.confidence:
        raise ArtifactError(
            f"{what}: config.json has {CALIBRATED}, but the drafter has no confidence head; take "
            "them out"
        )
    slots = read_config(what, files.config).longest
    found = read_thresholds(f"{what}: config.json", CALIBRATED, found, slots)
    return found + (0.0,) * (config.block_size - slots)


def _is_whole(config: BlockConfig, target: TargetView) -> bool:
    """Whether the target's head scales and caps its logits as the drafter's config asks.

    A config has the target's own settings; what the target's code does is not done again.
    """
    port = target.recurrent_mtp
    args = None if port is None else port.args
    own = getattr(args, "final_logit_softcapping", None), getattr(args, "output_multiplier", None)
    asks = config.soft_cap is not None or config.logit_scale != 1.0
    return not asks or any(own)
