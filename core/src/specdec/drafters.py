"""Loading a drafter for a model: by kind, by folder, or by the name of a bundled one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

import mlx.core as mx

from specdec.contract import Greedy, PrefillMode, validate_provider
from specdec.errors import AdapterError, ArtifactError, OptionError
from specdec.models import download, is_hub_id
from specdec.plugins import Artifact, DeclaresNativeDraft, LoadRequest, default_registry
from specdec.plugins.models import find_model
from specdec.targets import MlxLmTarget
from specdec.verify.lane import DraftLane

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

    from specdec.contract import DraftProvider, Selection
    from specdec.plugins import DraftKind, LoadedDraft
    from specdec.targets import Target

__all__ = [
    "NATIVE",
    "LoadedDrafter",
    "bind_target",
    "check_adapters",
    "check_drafter",
    "load_drafter",
]

NATIVE: Final = "native"
"""In place of a kind: the head that the model's own checkpoint declares."""


def bind_target(model: Any, tokenizer: Any = None) -> Target:
    """Bind a model: through a plugin that knows it, else as an mlx-lm model.

    Args:
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second. It knows the folder that both were loaded from, where
            a drafter may have come along.

    Raises:
        UnsupportedModelError: the model cannot be driven from outside.
    """
    view = default_registry().bind_target(model, tokenizer)
    return MlxLmTarget(model, _folder(tokenizer)) if view is None else cast("Target", view)


def _folder(tokenizer: Any) -> Path | None:
    """The folder that a tokenizer was loaded from."""
    name = getattr(tokenizer, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    return Path(name) if (Path(name) / "config.json").is_file() else None


class LoadedDrafter:
    """A drafter that was loaded for one model, and fits it.

    Attributes:
        kind: its kind.
        provider: the drafter.
        target: the bound model.
        num_draft_tokens: the most drafts a round, unless a request asks for another number.
        max_draft_tokens: what no request may exceed, or ``None``.
    """

    def __init__(self, kind: str, loaded: LoadedDraft, target: Target) -> None:
        self.kind = kind
        self.provider: DraftProvider = loaded.provider
        self.target = target
        self.num_draft_tokens = loaded.num_draft_tokens
        self.max_draft_tokens = loaded.max_draft_tokens

    def width(self, asked: int | None) -> int:
        """Drafts a round for a request that asked for a number, or for none."""
        wanted = self.num_draft_tokens if asked is None else asked
        limit = self.max_draft_tokens
        return wanted if limit is None else min(wanted, limit)

    def close(self) -> None:
        """Release the drafter's weights."""
        self.provider.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load_drafter(
    drafter: str | os.PathLike[str],
    model: Any,
    tokenizer: Any = None,
    *,
    kind: str | None = None,
    num_draft_tokens: int | None = None,
    **options: Any,
) -> LoadedDrafter:
    """Load a drafter for a model, and open the pairing once, so that what does not fit fails here.

    Args:
        drafter: a kind whose drafters have no files (``"ngram"``) or come along in the model's own
            folder (``"mtp"``), ``"native"`` for the head that the model's checkpoint declares, a
            drafter's folder, the name of a bundled one, or a hub id (``"org/name"``).
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        kind: the kind to load a folder as; detected where it is not given.
        num_draft_tokens: the most drafts a round; the kind's own number where it is not given.
        options: settings of the kind, such as ``max_ngram``.

    Raises:
        UnknownKindError: no installed plugin has the kind; lists those that are.
        UnrecognizedArtifactError: no plugin knows the folder.
        AmbiguousArtifactError: several claim it.
        ArtifactError: there is nothing at the path.
        TargetLacksError: the model lacks what the drafter reads of it.
        AdapterError: the model runs under an adapter, which the drafter does not support.
        OptionError: a number or an option that makes no sense.
    """
    if num_draft_tokens is not None and (
        not isinstance(num_draft_tokens, int)
        or isinstance(num_draft_tokens, bool)
        or num_draft_tokens < 1
    ):
        raise OptionError(f"num_draft_tokens is {num_draft_tokens!r}; give 1 or more")
    chosen, path = check_drafter(drafter, kind)
    target = bind_target(model, tokenizer)
    make = _native(target, tokenizer) if chosen is None else chosen
    request = LoadRequest(
        kind=make.name,
        path=path,
        target=target,
        tokenizer=tokenizer,
        num_draft_tokens=num_draft_tokens,
        options=options,
    )
    create = make.create if chosen is None else make.load
    assert create is not None  # the registry has looked
    return _tried(make.name, create(request), target)


def _native(target: Target, tokenizer: Any) -> DraftKind:
    """The kind of the head that the target declares as its own.

    Raises:
        ArtifactError: nobody can tell, since the model's folder is not known.
        PluginError: it declares none, or no installed plugin has the kind.
    """
    declares = target.native_draft if isinstance(target, DeclaresNativeDraft) else None
    if declares is None and target.folder is None:
        name = getattr(tokenizer, "name_or_path", None)
        known = "no tokenizer was given" if tokenizer is None else f"the tokenizer is of {name!r}"
        raise ArtifactError(
            f"drafter native: where the model was loaded from is not known ({known}); give the "
            "tokenizer of the model's own folder, or a drafter's folder"
        )
    return default_registry().select(target=target)


def _tried(name: str, loaded: LoadedDraft, target: Target) -> LoadedDrafter:
    """Open the pairing once; what does not fit is let go."""
    try:
        validate_provider(loaded.provider, str(default_registry().owner(name)))
        check_adapters(loaded.provider, name, target)
        _open_once(loaded.provider, name, target)
    except BaseException:
        # What is no whole provider may still hold weights.
        getattr(loaded.provider, "close", lambda: None)()
        raise
    return LoadedDrafter(name, loaded, target)


def check_adapters(provider: DraftProvider, kind: str, target: Target) -> None:
    """Check that a drafter may draft for its target as the target is now.

    To be asked when a drafter is loaded and for each request: mlx-lm replaces layers of a live
    model, so an adapter may have come since. Allocates nothing, and costs a walk over the modules,
    or nothing where the drafter supports adapters.

    Args:
        provider: the drafter.
        kind: its kind, for the message.
        target: the target it drafts for.

    Raises:
        AdapterError: the target runs under an adapter, and the drafter does not support that.
    """
    if provider.grouped.supports_adapters:
        return
    adapters = target.adapters
    if adapters:
        raise AdapterError(kind, adapters)


def check_drafter(
    drafter: str | os.PathLike[str], kind: str | None = None
) -> tuple[DraftKind | None, Path | None]:
    """Find a drafter without loading it; imports no model.

    Args:
        drafter: as in :func:`load_drafter`.
        kind: as in :func:`load_drafter`.

    Returns:
        Its kind, or ``None`` for the one that the model declares, and its folder if it has one.

    Raises:
        PluginError: as :func:`load_drafter`.
        ArtifactError: there is nothing at the path, or the kind needs one.
    """
    if drafter == NATIVE and kind is None:
        return None, None
    registry = default_registry()
    path = _artifact(drafter, registry.kinds if kind is None else ())
    if path is not None:
        return registry.select(artifact=Artifact(path), kind=kind), path
    chosen = registry.select(kind=os.fspath(drafter))
    # What can come along with a target is looked for there, once the target is known.
    if chosen.artifact and chosen.bundled_at is None and chosen.create is None:
        raise ArtifactError(
            f"drafter {chosen.name} needs a folder; give its path instead of its kind"
        )
    return chosen, None


def _artifact(drafter: str | os.PathLike[str], kinds: Collection[str]) -> Path | None:
    """The folder that is meant, or ``None`` where a kind's name is."""
    name = os.fspath(drafter)
    if isinstance(drafter, str) and drafter in kinds:
        return None
    path = Path(name)
    if path.exists():
        return path
    bundled = find_model(name)
    if bundled is not None:
        return bundled
    if isinstance(drafter, str) and os.sep not in name and not name.startswith("."):
        return None
    if isinstance(drafter, str) and is_hub_id(name):
        return download(name)
    raise ArtifactError(
        f"drafter {name} does not exist; give a drafter's folder, a kind or a hub id"
    )


def _open_once(provider: DraftProvider, name: str, target: Target) -> None:
    """Open a prefill and a decode group of one row, and close them again.

    A drafter that shares the whole prompt decodes only behind a token, so it reads one.
    """
    DraftLane(provider, name, target)
    prefill = provider.grouped.open_prefill(target=target, checkpoints=[None])
    try:
        if prefill.prefill_mode is PrefillMode.FULL:
            token, state = mx.zeros((1, 1), mx.int32), target.new_state()
            state.begin_round(1, reading=True)
            context = target.forward(token, state, prefill.context, prefill.tap_layers).context
            prefill.prefill(token, context)
        checkpoint = prefill.capture(0)
    finally:
        prefill.close()
    rows = provider.grouped.open(target=target, sampling=_Probe(), checkpoints=[checkpoint])
    rows.close()


class _Probe:
    """Sampling of a group that is opened but never drafts."""

    @property
    def selection(self) -> Selection:
        return Greedy()

    @property
    def rejecting(self) -> bool:
        return False

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise NotImplementedError("a group that is opened on trial drafts nothing")

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise NotImplementedError("a group that is opened on trial drafts nothing")
