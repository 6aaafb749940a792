"""Loading a drafter for a model: by kind, by folder, by the name of a bundled one, or a chain.

What is loaded is tried here (``specdec.pairing``); several in a row are a chain
(``specdec.chained``), and ``"auto"`` takes what the model brings along (``specdec.automatic``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from attrs import frozen

from specdec.automatic import AUTO, load_automatic
from specdec.chained import Found, check_members, load_chain, members_of
from specdec.errors import ArtifactError, OptionError, UnknownKindError
from specdec.models import download, is_hub_id
from specdec.pairing import (
    LoadedDrafter,
    check_adapters,
    check_adaptive,
    check_number,
    tried,
)
from specdec.plugins import Artifact, DeclaresNativeDraft, LoadRequest, default_registry
from specdec.plugins.known import missing_for
from specdec.plugins.models import find_model
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from specdec.plugins import DraftKind
    from specdec.targets import Target

__all__ = [
    "NATIVE",
    "Drafter",
    "LoadedDrafter",
    "bind_target",
    "check_adapters",
    "check_adaptive",
    "check_drafter",
    "load_draft_model",
    "load_drafter",
]

NATIVE: Final = "native"
"""In place of a kind: the head that the model's own checkpoint declares."""

Drafter: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""What names a drafter, or a chain of them."""

_DRAFT_MODEL: Final = "two-model"


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


def load_drafter(
    drafter: Drafter,
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
            drafter's folder, the name of a bundled one, or a hub id (``"org/name"``). ``"auto"``
            takes what the model brings along, else n-gram. Several, in a sequence or with commas
            between them (``"ngram,mtp"``), are a chain: the first that proposes wins a round.
        model: what ``mlx_lm.load`` returned first.
        tokenizer: what it returned second.
        kind: the kind to load a folder as; detected where it is not given.
        num_draft_tokens: the most drafts a round; the kind's own number where it is not given.
        options: settings of the kind, such as ``max_ngram``; of a chain's members by their names,
            ``**{"ngram.max_ngram": 4}``.

    Raises:
        UnknownKindError: no installed plugin has the kind; lists those that are.
        UnrecognizedArtifactError: no plugin knows the folder.
        AmbiguousArtifactError: several claim it.
        ArtifactError: there is nothing at the path.
        TargetLacksError: the model lacks what the drafter reads of it.
        AdapterError: the model runs under an adapter, which the drafter does not support.
        OptionError: a number or an option that makes no sense, or what is no chain.

    Warns:
        SpecdecDrafterWarning: ``"auto"`` passed something over that the model brings along.
    """
    check_number(num_draft_tokens)
    chosen, path = check_drafter(drafter, kind, options)
    target = bind_target(model, tokenizer)
    pairing = _Pairing(target, tokenizer, num_draft_tokens)
    loaded = _loaded(pairing, drafter, chosen, path, kind, options)
    loaded.adaptive = num_draft_tokens is None
    return loaded


def _loaded(  # noqa: PLR0917  # what load_drafter was given
    pairing: _Pairing,
    drafter: Drafter,
    chosen: DraftKind | None,
    path: Path | None,
    kind: str | None,
    options: Mapping[str, Any],
) -> LoadedDrafter:
    target, tokenizer = pairing.target, pairing.tokenizer
    if drafter == AUTO and kind is None:
        return load_automatic(default_registry(), target, pairing.brought_along)
    names = members_of(drafter) if kind is None else None
    if names is not None:
        found = [pairing.find(name) for name in names]
        return load_chain(found, pairing.load, target, options)
    if chosen is None:
        return pairing.brought_along(_native(target, tokenizer), None, options)
    return pairing.make(chosen, path, options)


def load_draft_model(
    draft_model: Any, model: Any, tokenizer: Any, *, num_draft_tokens: int | None = None
) -> LoadedDrafter:
    """Take a loaded model as the drafter of another, as mlx-lm's ``draft_model`` is.

    Args:
        draft_model: what ``mlx_lm.load`` returned first for the drafter.
        model: the same for the model.
        tokenizer: the model's, which must be the drafter's, too.
        num_draft_tokens: the most drafts a round.

    Raises:
        OptionError: it is no model, or a number that makes no sense.
        SpecdecError: it cannot draft for this model, or the plugin for that is not installed.
    """
    check_number(num_draft_tokens)
    if not hasattr(draft_model, "named_modules"):
        what = type(draft_model).__name__
        raise OptionError(f"draft_model is a {what}; give what mlx_lm.load returned first")
    try:
        kind = default_registry().select(kind=_DRAFT_MODEL)
    except UnknownKindError as error:
        raise missing_for("draft_model", _DRAFT_MODEL, error) from error
    pairing = _Pairing(bind_target(model, tokenizer), tokenizer, num_draft_tokens)
    loaded = pairing.make(kind, None, {"model": draft_model})
    loaded.adaptive = num_draft_tokens is None
    return loaded


def check_drafter(
    drafter: Drafter, kind: str | None = None, options: Iterable[str] = ()
) -> tuple[DraftKind | None, Path | None]:
    """Find a drafter without loading it; imports no model.

    Args:
        drafter: as in :func:`load_drafter`.
        kind: as in :func:`load_drafter`.
        options: names of settings, of which those of chains and of ``"auto"`` are checked here.

    Returns:
        Its kind and its folder if it has one. The kind is ``None`` for what the model tells
        (``"native"``, ``"auto"``) and for chains.

    Raises:
        PluginError: as :func:`load_drafter`.
        ArtifactError: there is nothing at the path, or the kind needs one.
        OptionError: what is no chain, or options that cannot be its own.
    """
    if drafter == AUTO and kind is None:
        bare = sorted(options)
        if bare:
            raise OptionError(
                f"option {', '.join(bare)}: drafter auto has no options, as it may be any kind; "
                "name a drafter"
            )
        return None, None
    names = members_of(drafter) if kind is None else None
    if names is None:
        if not isinstance(drafter, str | os.PathLike):
            raise OptionError(f"kind={kind!r} is of one folder; leave it out for a chain")
        return _found(drafter, kind)
    members = []
    for name in names:
        chosen, path = _found(name)
        members.append(Found(name, NATIVE if chosen is None else chosen.name, path))
    known = all(each.kind != NATIVE for each in members)  # that is known once the model is
    check_members(members, options if known else ())
    return None, None


@frozen
class _Pairing:
    """A bound model that drafters are loaded for."""

    target: Target
    tokenizer: Any
    num_draft_tokens: int | None

    def find(self, name: str | os.PathLike[str]) -> Found:
        """A member of a chain, before any of them is loaded."""
        chosen, path = _found(name)
        kind = _native(self.target, self.tokenizer) if chosen is None else chosen
        return Found(name, kind.name, path, native=chosen is None)

    def load(self, found: Found, options: Mapping[str, Any]) -> LoadedDrafter:
        """Load a member of a chain."""
        kind = default_registry().select(kind=found.kind)
        return self.make(kind, found.path, options, native=found.native)

    def brought_along(
        self, kind: DraftKind, path: Path | None, options: Mapping[str, Any] | None = None
    ) -> LoadedDrafter:
        """Load what came with the model: from a folder, or from among the model's own files."""
        return self.make(kind, path, options, native=path is None and kind.create is not None)

    def make(
        self,
        kind: DraftKind,
        path: Path | None,
        options: Mapping[str, Any] | None = None,
        *,
        native: bool = False,
    ) -> LoadedDrafter:
        """Load a drafter of a kind, and try it."""
        request = LoadRequest(
            kind=kind.name,
            path=path,
            target=self.target,
            tokenizer=self.tokenizer,
            num_draft_tokens=self.num_draft_tokens,
            options=options or {},
        )
        create = kind.create if native else kind.load
        assert create is not None  # the registry has looked
        owner = str(default_registry().owner(kind.name))
        return tried(kind.name, create(request), self.target, owner)


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


def _found(
    drafter: str | os.PathLike[str], kind: str | None = None
) -> tuple[DraftKind | None, Path | None]:
    """One drafter's kind and folder; no kind for the one that the model declares."""
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
