"""From a request to a provider: load the draft model, check that it fits, bind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from attrs import frozen
from mlx_lm.utils import load_model, load_tokenizer

from specdec.drafting import DraftModelProvider
from specdec.drafting.modules import packing_of, parameters_of, quantize_module, without_drawing
from specdec.errors import ArtifactError, OptionError, UnsupportedModelError, one_line
from specdec.plugins import Artifact, LoadedDraft
from specdec.targets import MlxLmTarget
from specdec_two_model.limits import context_limit
from specdec_two_model.tokenizers import check_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from specdec.drafting.modules import Packing
    from specdec.plugins import LoadRequest

__all__ = ["CPU_WIDTH", "GPU_WIDTH", "OPTIONS", "load_draft_model"]

OPTIONS: Final = (
    "model",
    "tokenizer",
    "check_tokenizer",
    "max_context",
    "bits",
    "group_size",
)
"""Names that ``LoadRequest.options`` may hold."""

_OBJECTS: Final = ("model", "tokenizer")  # load_drafter's own arguments: no option of its callers

CPU_WIDTH: Final = 2
"""Drafts a round on a CPU where nobody names a number: positions cost nearly what steps do."""

GPU_WIDTH: Final = 3
"""Drafts a round on a GPU: a wider window costs the target little, but each draft is a forward of
the draft model, and each one more is accepted less often."""


@frozen(eq=False)
class _Found:
    """A draft model as it was given.

    Attributes:
        what: names it in messages.
        name: for people.
        model: mlx-lm's.
        tokenizer: the model's own, or ``None``.
        config: ``config.json``, or the arguments that the model was made with.
        folder: where it was loaded from, if it was.
    """

    what: str
    name: str
    model: Any
    tokenizer: Any | None
    config: Mapping[str, Any]
    folder: Path | None


def load_draft_model(request: LoadRequest) -> LoadedDraft:
    """Load the draft model that a request names.

    Args:
        request: its ``path`` is a folder, as mlx-lm loads them. Its options may hold

            - ``model``: a model that is loaded already, in place of a path; its ``tokenizer`` is
              compared where it is given;
            - ``check_tokenizer``: ``False`` does not compare the tokenizers;
            - ``max_context``: tokens of a text that the model reads at most, in place of what its
              config says;
            - ``bits`` and ``group_size``: quantize a model that is stored in 16 or 32 bits.

    Raises:
        ArtifactError: there is no model of mlx-lm, it cannot draft, or its tokenizer is another.
        OptionError: an option that the kind does not have, or a value that makes no sense.
    """
    options = _known_options(request)
    packing = packing_of(options)
    found = _given(request, packing) if options.get("model") is not None else _loaded(request)
    _compare_tokenizers(request, found)
    if packing is not None:
        _quantize(found, packing)
    limit = context_limit(found.what, found.model, found.config, options.get("max_context"))
    owned = found.model is request.target.identity
    weights = {} if owned else parameters_of(found.model)
    try:
        provider = DraftModelProvider(
            found.name,
            MlxLmTarget(found.model, found.folder),
            weight_bytes=sum(array.nbytes for array in weights.values()),
            limit=limit,
        )
    except UnsupportedModelError as error:
        raise ArtifactError(f"{found.what} cannot draft ({error})") from error
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return LoadedDraft(provider, request.num_draft_tokens or (CPU_WIDTH if on_cpu else GPU_WIDTH))


def _known_options(request: LoadRequest) -> Mapping[str, Any]:
    unknown = sorted(str(name) for name in request.options if name not in OPTIONS)
    if unknown:
        raise OptionError(
            f"{request.kind} has no option {', '.join(unknown)}; its options are "
            f"{', '.join(name for name in OPTIONS if name not in _OBJECTS)}"
        )
    check = request.options.get("check_tokenizer")
    if check is not None and not isinstance(check, bool):
        raise OptionError(f"check_tokenizer is {one_line(repr(check))}; give true or false")
    return request.options


def _given(request: LoadRequest, packing: Packing | None) -> _Found:
    """The model that the request brings."""
    model = request.options["model"]
    if request.path is not None:
        raise OptionError(f"there are a model and the folder {request.path}; give one of the two")
    has_caches = hasattr(model, "make_cache") or hasattr(model, "layers")
    if isinstance(model, type) or not (callable(model) and hasattr(model, "named_modules")):
        has_caches = False
    if not has_caches:
        raise OptionError(
            f"model is a {type(model).__name__}; give what mlx_lm.load returned first, or a path"
        )
    if packing is not None:
        raise OptionError(
            "bits would change a model that you hold; quantize it yourself, or give its folder"
        )
    name = f"a {type(model).__module__.rpartition('.')[2]} model"
    return _Found(
        what=f"the draft model ({name})",
        name=name,
        model=model,
        tokenizer=request.options.get("tokenizer"),
        config=dict(vars(model.args)) if hasattr(model, "args") else {},
        folder=None,
    )


def _loaded(request: LoadRequest) -> _Found:
    """The model in the request's folder, as mlx-lm loads it."""
    folder = request.path
    if folder is None:
        raise ArtifactError(
            f"drafter {request.kind} needs its folder; give its path instead of its kind (a loaded "
            "model is given as draft_model)"
        )
    if request.options.get("tokenizer") is not None:
        raise OptionError("tokenizer goes with model=...; a folder brings its own")
    artifact = Artifact(folder)
    artifact.require_readable()
    what = f"the draft model {folder}"
    if artifact.config is None:
        raise ArtifactError(f"{what} has no config.json that can be read; give a whole model")
    try:
        with without_drawing():
            model, config = load_model(folder)
    except Exception as error:
        raise ArtifactError(
            f"{what} cannot be loaded ({one_line(error)}); give a folder as mlx-lm loads"
        ) from error
    tokenizer = None
    if request.options.get("check_tokenizer") is not False:
        try:
            tokenizer = load_tokenizer(folder)
        except Exception as error:
            raise ArtifactError(
                f"the tokenizer of {what} cannot be loaded ({one_line(error)}); give a whole "
                "model, or the option check_tokenizer=False"
            ) from error
    return _Found(what, folder.name, model, tokenizer, config, folder)


def _compare_tokenizers(request: LoadRequest, found: _Found) -> None:
    asked = request.options.get("check_tokenizer")
    if asked is False or found.model is request.target.identity:
        return
    if found.tokenizer is None:  # a model without one was given, as mlx-lm's draft models are
        if asked:
            raise OptionError("check_tokenizer is true, but there is none; give tokenizer=...")
        return
    if request.tokenizer is None:
        raise OptionError(
            "there is no tokenizer of the target to compare with; pass it to load_drafter, or "
            "give the option check_tokenizer=False"
        )
    check_tokenizers(found.what, request.tokenizer, found.tokenizer)


def _quantize(found: _Found, packing: Packing) -> None:
    parts = dict(found.model.named_modules())
    if any(hasattr(part, "scales") for part in parts.values()):
        raise OptionError(
            f"bits is {packing.bits}, but {found.what} is stored packed already; leave that out"
        )
    allowed = getattr(found.model, "quant_predicate", None)  # of mlx-lm: gates of experts stay
    quantize_module(
        found.what,
        found.model,
        packing,
        lambda path: allowed is None or bool(allowed(path, parts[path])),
    )
