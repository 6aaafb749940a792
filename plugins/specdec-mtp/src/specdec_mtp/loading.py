"""From a request to a provider: find the head, read it, build it, say how it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import evolve

from specdec.contract import ContextKind, require_port
from specdec.drafting.modules import packing_of
from specdec.errors import ArtifactError, OptionError, one_line
from specdec.plugins import LoadedDraft
from specdec_mtp.agreement import Wanted, agreed
from specdec_mtp.build import build_head, quantize_head
from specdec_mtp.find import HeadKind, Layout, find_head
from specdec_mtp.layers import family_of, layer_args
from specdec_mtp.live import Chain
from specdec_mtp.norms import norm_evidence, shifted
from specdec_mtp.plugin import GPU_WIDTHS
from specdec_mtp.probe import How
from specdec_mtp.provider import HeadProvider, Reading
from specdec_mtp.tensors import read_tensors
from specdec_mtp.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.contract import RecurrentMtp
    from specdec.plugins import LoadRequest
    from specdec_mtp.find import HeadFiles
    from specdec_mtp.norms import NormEvidence

__all__ = ["DEFAULTS", "OPTIONS", "load_head"]

DEFAULTS: Final = {
    HeadKind.MTP: Reading(),
    HeadKind.NEXTN: Reading(feeds_raw=True, reads_prompt=False),
}
"""How heads are read where no option says otherwise."""

OPTIONS: Final = (
    "hidden",
    "chain",
    "feed",
    "history",
    "norm_shift",
    "bits",
    "group_size",
    "draft_vocab",
    "probe",
)
"""Names that ``LoadRequest.options`` may hold."""


_TABLES: Final = ("embed_tokens.", "shared_head.head.", "head.")
_MOST: Final = 16  # drafts a round that a release may ask for


def load_head(request: LoadRequest) -> LoadedDraft:
    """Load the head that a request names, or its target carries.

    Args:
        request: its options may hold

            - ``hidden``: ``"post_norm"`` or ``"pre_norm"``, the target's hidden states;
            - ``chain``: ``"true"`` or ``"own"``, see :class:`~specdec_mtp.live.Chain`;
            - ``feed``: ``"normed"`` or ``"raw"``, which output the next step goes on from;
            - ``history``: ``"prompt"`` or ``"own"``, whether the head reads the prompt;
            - ``norm_shift``: ``True`` or ``False``, whether norm weights are stored less 1;
            - ``bits`` and ``group_size``: quantize a head that is stored in 16 bits;
            - ``draft_vocab``: ids to draft over, or a file of them, or ``False``;
            - ``probe``: ``False`` does not try the head on a short text.

    Raises:
        ArtifactError: there is no head, or it does not fit the target.
        OptionError: an option that a head does not have, or a value that makes no sense.
        TargetLacksError: the target has no embedding and vocabulary head to share.

    Warns:
        SpecdecDrafterWarning: the head agrees far better under another reading.
    """
    kind, options = HeadKind(request.kind), request.options
    reading = _reading(kind, options)
    packing = packing_of(options)
    port: RecurrentMtp = require_port(request.target, "recurrent_mtp", f"the {kind} head")
    files = find_head(_folder(request), kind)
    _check_size(files, port)
    folders = (files.path, request.path, request.target.folder)
    ids = read_vocabulary(options.get("draft_vocab"), folders, request.target.vocab_size)
    family = family_of(kind, files.config)
    stored = read_tensors(_without_tables(files))
    evidence = norm_evidence(files, stored)
    shift = _shift(evidence, options)
    tensors = shifted(stored, 1.0) if shift else stored
    args = layer_args(family, files.config, port.args)
    module = build_head(kind, tensors, args, family)
    if _probes(options):
        how = How(reading.context, "once" if shift else "never")
        fixed = [option for option in ("hidden", "norm_shift") if options.get(option) is not None]
        wanted = Wanted(how=how, fixed=fixed, evidence=evidence)
        reading = evolve(reading, context=agreed(request, kind, module, stored, wanted).context)
    if packing is not None:
        quantize_head(kind, module, packing)
    name = (request.path or files.path).name
    provider = HeadProvider(name, kind, module, args.hidden_size, reading=reading, ids=ids)
    if ids is not None and provider.grouped.draft_vocabulary(request.target) is None:
        raise OptionError(
            f"draft_vocab lists {len(ids)} ids, but this target's vocabulary head cannot be cut to "
            "them; give draft_vocab=false"
        )
    return LoadedDraft(provider, request.num_draft_tokens or _width(kind, files))


def _check_size(files: HeadFiles, port: RecurrentMtp) -> None:
    size = files.config.get("hidden_size")
    if isinstance(size, int) and size != port.hidden_size:
        # What is no split release may be a whole model, whose head is for that model alone.
        whole = (
            "" if files.layout is Layout.SPLIT else "; a whole model drafts as the kind two-model"
        )
        raise ArtifactError(
            f"the {files.kind} head in {files.path} has hidden_size {size}, but the target has "
            f"{port.hidden_size}; give the one of this target{whole}"
        )


def _without_tables(files: HeadFiles) -> HeadFiles:
    """Leave a head's own embedding and vocabulary head aside: they are copies of the target's."""
    kept = {name: stored for name, stored in files.tensors.items() if not name.startswith(_TABLES)}
    return evolve(files, tensors=kept)


def _folder(request: LoadRequest) -> Path:
    folder = request.path or request.target.folder
    if folder is None:
        raise ArtifactError(
            f"drafter {request.kind}: where the model was loaded from is not known, or is there no "
            "more; give the tokenizer that was loaded with it, or the head's folder"
        )
    return folder


def _reading(kind: HeadKind, options: Mapping[str, Any]) -> Reading:
    unknown = sorted(str(name) for name in options if name not in OPTIONS)
    if unknown:
        raise OptionError(
            f"{kind} has no option {', '.join(unknown)}; its options are {', '.join(OPTIONS)}"
        )
    reading = DEFAULTS[kind]
    choices: dict[str, dict[str, dict[str, Any]]] = {
        "hidden": {
            each.value: {"context": each} for each in (ContextKind.POST_NORM, ContextKind.PRE_NORM)
        },
        "chain": {each.value: {"chain": each} for each in Chain},
        "feed": {"normed": {"feeds_raw": False}, "raw": {"feeds_raw": True}},
        "history": {"prompt": {"reads_prompt": True}, "own": {"reads_prompt": False}},
    }
    for name, values in choices.items():
        given = options.get(name)
        if given is None:
            continue
        if not isinstance(given, str) or given not in values:
            raise OptionError(f"{name} is {one_line(repr(given))}; give {' or '.join(values)}")
        reading = evolve(reading, **values[given])
    return reading


def _shift(evidence: NormEvidence, options: Mapping[str, Any]) -> bool:
    given = options.get("norm_shift")
    return evidence.shift if given is None else _flag("norm_shift", given)


def _probes(options: Mapping[str, Any]) -> bool:
    given = options.get("probe")
    return True if given is None else _flag("probe", given)


def _flag(name: str, given: object) -> bool:
    if not isinstance(given, bool):
        raise OptionError(f"{name} is {one_line(repr(given))}; give true or false, or leave it out")
    return given


def _width(kind: HeadKind, files: HeadFiles) -> int:
    """Drafts a round where nobody asks for a number.

    On a GPU what a split release says, whose block counts the pending token too. On a CPU a
    window's positions cost nearly what steps do, so one.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return 1
    block = files.outer.get("block_size")
    if isinstance(block, int) and not isinstance(block, bool) and 2 <= block <= 1 + _MOST:
        return block - 1
    return GPU_WIDTHS[kind]
