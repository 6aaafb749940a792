"""From a request to a provider of the kind ``dspark``: read it, check it, try it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import mlx.core as mx
from attrs import evolve
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from specdec.checkpoints import weights_identity
from specdec.contract import require_port
from specdec.drafting import ProjectedGroups, ProjectedProvider
from specdec.drafting.modules import (
    load_module,
    packing_of,
    parameters_of,
    quantize_module,
    read_stored,
    without_drawing,
)
from specdec.errors import ArtifactError
from specdec.plugins import LoadedDraft
from specdec_dflash.basis import Binding, basis_of
from specdec_dflash.confidence import is_measure, thresholds_for
from specdec_dflash.config import config_digest
from specdec_dflash.dspark_config import CONFIG_NAME, check_tensors, read_dspark
from specdec_dflash.dspark_model import DsparkDrafting, DsparkModel, module_weights, turned
from specdec_dflash.files import read_files
from specdec_dflash.options import as_asked, check_slots, drafts_a_round, flag, known_options
from specdec_dflash.pairing import refused
from specdec_dflash.probe import agreed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import HiddenTaps, TargetView
    from specdec.plugins import LoadRequest
    from specdec_dflash.dspark_config import DsparkConfig
    from specdec_dflash.files import DrafterFiles

__all__ = [
    "OPTIONS",
    "SCHEMA",
    "dspark_provider",
    "load_drafter",
    "stored_embedding",
]

SCHEMA: Final = "dspark-context-v1"
"""Persistent name of the layout of a row's arrays."""

OPTIONS: Final = ("bits", "group_size", "confidence", "tap_shift", "from_anchor", "probe")
"""Names that ``LoadRequest.options`` may hold."""


def load_drafter(request: LoadRequest) -> LoadedDraft:
    """Load the drafter that a request names.

    Args:
        request: its options may hold

            - ``bits`` and ``group_size``: quantize its matrices, which are stored in 32 bits;
            - ``confidence``: where the file has no calibrated thresholds, drafts end before a slot
              whose confidence is lower, 0 to 1; false or 0 drafts whole blocks even where it has;
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
    port: HiddenTaps = require_port(target, "hidden_taps", "the dspark drafter")
    if request.path is None:
        raise ArtifactError("drafter dspark needs its folder; give its path instead of its kind")
    files = read_files(request.path, CONFIG_NAME)
    what = f"the dspark drafter {files.path.name}"
    config = read_dspark(files, calibrated=not is_measure(options.get("confidence")))
    check_tensors(files, config)
    check_dspark_pairing(what, config, port, target.vocab_size)
    packing = packing_of(options)
    thresholds = thresholds_for(
        options.get("confidence"), config.thresholds, config.gamma, has_head=config.confidence
    )
    config = as_asked(config, options, port.layer_count)
    check_slots(what, config, "gamma")
    model = _built(what, files, config)
    embed, basis = stored_embedding(target), basis_of(target, what)

    def make(config: DsparkConfig) -> DsparkDrafting:
        tried = model if basis is None else turned(model, basis, config.taps)
        return DsparkDrafting(config, tried, port, embed, basis=basis)

    if flag(options, "probe", default=True):
        fixed = [name for name in ("tap_shift", "from_anchor") if options.get(name) is not None]
        config = agreed(request, what, config, make, fixed)
    binding = _binding(files.path.name, config, model)
    binding.turn(target)  # before it is quantized: packing it twice would cost precision
    if packing is not None:
        quantize_module(what, binding.model, packing, lambda path: not path.startswith("conf"))
    provider = dspark_provider(files.path.name, config, binding, thresholds)
    provider.grouped.method_for(target)
    return LoadedDraft(provider, drafts_a_round(request, config.longest), config.longest)


def dspark_provider(
    name: str,
    config: DsparkConfig,
    model: DsparkModel | Binding[DsparkModel],
    thresholds: tuple[float, ...] | None = None,
) -> ProjectedProvider:
    """A drafter that has its weights, as a provider.

    Args:
        name: of the drafter.
        config: of it.
        model: its network; or what it is bound to, perhaps a target's basis already.
        thresholds: per slot the confidence that a draft needs, or ``None`` for all drafts.
    """
    binding = model if isinstance(model, Binding) else _binding(name, config, model)

    def bind(target: TargetView) -> DsparkDrafting:
        port: HiddenTaps = require_port(target, "hidden_taps", name)
        check_dspark_pairing(name, config, port, target.vocab_size)
        binding.bind(target)
        return DsparkDrafting(
            config,
            binding.model,
            port,
            stored_embedding(target),
            thresholds=thresholds,
            basis=binding.basis,
        )

    digest = config_digest(evolve(config, thresholds=None))  # no row stores anything of them
    grouped = ProjectedGroups(
        name=name,
        schema=SCHEMA,
        namespace=lambda: f"{weights_identity(binding.model)}:{digest}",
        tap_layers=config.taps,
        bind=bind,
    )
    weight_bytes = sum(array.nbytes for array in parameters_of(binding.model).values())
    return ProjectedProvider(name, weight_bytes, grouped)


def _binding(name: str, config: DsparkConfig, model: DsparkModel) -> Binding[DsparkModel]:
    return Binding(name, model, lambda own, basis: turned(own, basis, config.taps))


def check_dspark_pairing(
    what: str, config: DsparkConfig, port: HiddenTaps, vocab_size: int
) -> None:
    """Check sizes that drafter and target must share.

    Args:
        what: names the drafter in messages.
        config: of the drafter.
        port: the target's.
        vocab_size: V of the target.

    Raises:
        ArtifactError: they differ; names the key and both values.
    """
    if config.hidden_size != port.hidden_size:
        raise refused(what, "hiddenSize", config.hidden_size, port.hidden_size)
    if config.vocab_size != vocab_size:
        raise refused(what, "vocabSize", config.vocab_size, vocab_size)
    if max(config.taps) > port.layer_count:
        taps = ", ".join(map(str, config.taps))
        layers = f"layers 0 to {port.layer_count - 1}, and {port.layer_count} after its norm"
        raise refused(what, "tapLayers", f"[{taps}]", layers)


def stored_embedding(target: TargetView) -> Callable[[mx.array], mx.array]:
    """The target's embedding as it is stored, without the scale of the target's own input.

    A port gives it as the target's first layer is given it; for most models that is the same.

    Args:
        target: the bound target, which has the port ``hidden_taps``.

    Returns:
        ``[B, L, H]`` of ids ``[B, L]``; the port's own where the target is no module with exactly
        one embedding of its vocabulary and hidden size.
    """
    port: HiddenTaps = require_port(target, "hidden_taps", "the dspark drafter")
    model: Any = target.identity
    walk = getattr(model, "named_modules", None)
    parts: Sequence[tuple[str, Any]] = [] if walk is None else walk()
    found = [part for _, part in parts if isinstance(part, Embedding | QuantizedEmbedding)]
    sizes = target.vocab_size, port.hidden_size
    fits = [part for part in found if _sizes(part) == sizes]
    if len(fits) == 1:
        return cast("Callable[[mx.array], mx.array]", fits[0])
    return port.embed


def _sizes(part: Any) -> tuple[int, int]:
    return part.weight.shape[0], part(mx.zeros((1,), mx.int32)).shape[-1]  # never evaluated


def _built(what: str, files: DrafterFiles, config: DsparkConfig) -> DsparkModel:
    wanted = {name: files.tensors[name] for name in config.shapes()}
    with without_drawing():
        model = DsparkModel(config)
    load_module(what, model, module_weights(read_stored(wanted)))
    return model
