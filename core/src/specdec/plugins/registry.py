"""Choosing a drafter: by name, by artifact, or the one that the target itself carries.

There are no priorities: exactly one kind must fit, or the error says how to name one.
"""

from __future__ import annotations

import difflib
import functools
import reprlib
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from attrs import field, frozen

from specdec.errors import (
    AmbiguousArtifactError,
    KindConflictError,
    SpecdecError,
    SpecdecPluginWarning,
    UnknownKindError,
    UnrecognizedArtifactError,
)
from specdec.plugins.kinds import Artifact, DeclaresNativeDraft
from specdec.plugins.known import KNOWN_PLUGINS, kind_named_in
from specdec.plugins.models import model_names
from specdec.plugins.scan import PluginReport, describe, scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from specdec.contract import TargetView
    from specdec.plugins.kinds import DraftKind
    from specdec.plugins.scan import Conflict, Origin

__all__ = ["Answer", "Detection", "Registry", "default_registry"]

Answer: TypeAlias = Literal["yes", "no", "failed"]


@frozen(kw_only=True, eq=False)
class Detection:
    """What one kind's detector says about an artifact.

    Attributes:
        kind: the kind.
        origin: the plugin that offers it.
        answer: ``yes``, ``no``, or ``failed``, which is not a ``no``.
        error: what the detector raised, if it failed.
    """

    kind: DraftKind
    origin: Origin
    answer: Answer
    error: BaseException | None = None

    @property
    def message(self) -> str:
        """The answer in one line, with the error if it failed."""
        return self.answer if self.error is None else f"failed: {describe(self.error)}"


@frozen(eq=False)
class Registry:
    """The kinds that can be used, from one scan; it never changes.

    Attributes:
        report: what the scan found, faults included.
        kinds: the usable kinds by name, sorted; contested ones are not among them.
    """

    report: PluginReport
    _offers: tuple[tuple[DraftKind, Origin], ...] = field(init=False, repr=False)
    _contested: Mapping[str, Conflict] = field(init=False, repr=False)
    kinds: Mapping[str, DraftKind] = field(init=False)

    @_offers.default
    def _all_offers(self) -> tuple[tuple[DraftKind, Origin], ...]:
        offers = [(kind, plugin.origin) for plugin in self.report.loaded for kind in plugin.kinds]
        return tuple(sorted(offers, key=lambda offer: (offer[0].name, str(offer[1]))))

    @_contested.default
    def _all_contested(self) -> Mapping[str, Conflict]:
        return MappingProxyType({conflict.name: conflict for conflict in self.report.conflicts})

    @kinds.default
    def _usable_kinds(self) -> Mapping[str, DraftKind]:
        usable = {kind.name: kind for kind, _ in self._offers if kind.name not in self._contested}
        return MappingProxyType(usable)

    def owner(self, kind: str) -> Origin:
        """The plugin that offers a usable kind.

        Raises:
            UnknownKindError: no installed plugin has it.
            KindConflictError: several register it.
        """
        chosen = self._named(kind)
        return next(origin for offered, origin in self._offers if offered is chosen)

    def select(
        self,
        artifact: Artifact | str | PathLike[str] | None = None,
        kind: str | None = None,
        target: TargetView | None = None,
    ) -> DraftKind:
        """The kind to draft with; the order in which plugins were installed never matters.

        Args:
            artifact: the drafter's folder, whose kind is detected unless ``kind`` is given.
            kind: a kind's name; nothing is detected.
            target: without the two others, the head it declares as its own is chosen.

        Raises:
            UnknownKindError: no installed plugin has the kind.
            KindConflictError: several plugins register the kind.
            AmbiguousArtifactError: several kinds recognise the artifact.
            UnrecognizedArtifactError: none does, or there is nothing to choose by.
            ArtifactError: there is nothing at the artifact's path.
        """
        if kind is not None:
            return self._named(kind)
        if artifact is not None:
            return self._recognised(_as_artifact(artifact))
        return self._native(target)

    def detect(self, artifact: Artifact | str | PathLike[str]) -> tuple[Detection, ...]:
        """Every detector's answer, sorted by kind; contested kinds and fallbacks are asked too."""
        seen = _as_artifact(artifact)
        return tuple(
            _ask(kind, kind.detect, origin, seen)
            for kind, origin in self._offers
            if kind.detect is not None
        )

    def bind_target(self, model: Any, tokenizer: Any = None) -> TargetView | None:
        """The view of the first plugin that knows how to drive a model, or ``None``.

        Plugins are asked in the report's order. One that fails by accident is passed over.

        Raises:
            SpecdecError: a plugin knows the model, and refuses it on purpose.

        Warns:
            SpecdecPluginWarning: a plugin failed in some other way.
        """
        for plugin in self.report.loaded:
            view: TargetView | None = None
            try:
                view = plugin.manager.hook.specdec_bind_target(model=model, tokenizer=tokenizer)
            except SpecdecError:
                raise
            except Exception as error:
                text = f"{plugin.origin} failed in specdec_bind_target: {describe(error)}"
                warnings.warn(text, SpecdecPluginWarning, stacklevel=2)
            if view is not None:
                return view
        return None

    def _named(self, name: str) -> DraftKind:
        if name in self.kinds:
            return self.kinds[name]
        if name in self._contested:
            raise KindConflictError(self._contested[name].message)
        raise UnknownKindError("; ".join(self._about_unknown(name)))

    def _about_unknown(self, name: str) -> Iterable[str]:
        yield f"no installed plugin has the kind {name!r}"
        yield f"installed: {', '.join(self.kinds) or 'none'}"
        ways = self._ways_to(name)
        yield from ways
        if ways:
            return
        bundled = model_names()
        known = sorted({*self.kinds, *KNOWN_PLUGINS, *bundled})
        near = difflib.get_close_matches(name, known, n=2)
        for close in near:
            here = close in self.kinds or close in bundled
            install = "" if here else f" (pip install {KNOWN_PLUGINS[close]})"
            yield f"did you mean {close!r}{install}?"
        if not near and not bundled:
            yield "bundled drafters come with specdec-demo (pip install specdec-demo)"

    def _ways_to(self, name: str) -> list[str]:
        """What keeps a kind from being used, or what to install for it, if it is known."""
        package, report = KNOWN_PLUGINS.get(name), self.report
        faults = [(broken.origin, broken.message) for broken in report.broken]
        faults += [(off.origin, f"disabled by {off.variable}") for off in report.disabled]
        said = [
            f"{origin} is {fault}"
            for origin, fault in faults
            if name == origin.name or package == origin.distribution
        ]
        return said if said or package is None else [f"pip install {package}"]

    def _recognised(self, artifact: Artifact) -> DraftKind:
        artifact.require_exists()
        answers = self.detect(artifact)
        matches = {a.kind.name for a in answers if a.answer == "yes" and not a.kind.fallback}
        if not matches:
            failed = [answer for answer in answers if answer.answer == "failed"]
            # A detector that failed might have said yes, so a fallback would be a guess.
            matches = set() if failed else self._fallbacks(answers)
            if not matches:
                self._unrecognised(artifact, answers)
        if len(matches) > 1:
            owners = " and ".join(
                f"'{kind.name}' ({origin})" for kind, origin in self._offers if kind.name in matches
            )
            raise AmbiguousArtifactError(
                f"{artifact.path} can be of several kinds: {owners}; choose one with kind= "
                "in Python, or leave a plugin out with SPECDEC_DISABLE_PLUGINS"
            )
        return self._named(matches.pop())

    def _fallbacks(self, answers: Iterable[Detection]) -> set[str]:
        willing = {answer.kind for answer in answers if answer.answer == "yes"}
        return {
            kind.name
            for kind, _ in self._offers
            if kind.fallback and (kind.detect is None or kind in willing)
        }

    def _unrecognised(self, artifact: Artifact, answers: Iterable[Detection]) -> NoReturn:
        if artifact.config is not None:
            looked = f"config.json has model_type {reprlib.repr(artifact.config.get('model_type'))}"
        else:
            found = "no JSON object" if artifact.has("config.json") else "missing"
            looked = f"config.json is {found}"
        said = [f"{a.kind.name} ({a.origin}) {a.message}" for a in answers]
        named = kind_named_in(artifact)
        ways = [] if named is None or named in self.kinds else self._ways_to(named)
        raise UnrecognizedArtifactError(
            f"no kind recognises {artifact.path}; {looked}; "
            f"detectors asked: {', '.join(said) or 'none'}; "
            + ("; ".join(ways) or "install its plugin, or name its kind with kind= in Python")
        )

    def _native(self, target: TargetView | None) -> DraftKind:
        name = target.native_draft if isinstance(target, DeclaresNativeDraft) else None
        if name is None:
            what = "there is nothing to choose a drafter by"
            free = [kind.name for kind in self.kinds.values() if not kind.artifact]
            raise UnrecognizedArtifactError(
                (what if target is None else "the model declares no drafter of its own")
                + (f"; name one ({', '.join(free)}) or give" if free else "; give")
                + " a drafter's folder"
            )
        kind = self._named(name)
        if kind.create is None:
            raise UnknownKindError(
                f"the target declares a head of the kind '{name}', but {self.owner(name)} "
                f"cannot make one (no create); upgrade {self.owner(name).distribution}"
            )
        return kind


def _as_artifact(artifact: Artifact | str | PathLike[str]) -> Artifact:
    return artifact if isinstance(artifact, Artifact) else Artifact(artifact)


def _ask(
    kind: DraftKind, detect: Callable[[Artifact], bool], origin: Origin, artifact: Artifact
) -> Detection:
    try:
        answer = detect(artifact)
        if not isinstance(answer, bool):
            raise TypeError(f"detect returned {type(answer).__name__}, not a bool")
    except (Exception, SystemExit) as error:
        return Detection(kind=kind, origin=origin, answer="failed", error=error)
    return Detection(kind=kind, origin=origin, answer="yes" if answer else "no")


@functools.cache
def default_registry() -> Registry:
    """The registry of what is installed, scanned once; ``cache_clear()`` forgets it.

    Raises:
        BrokenPluginError: ``SPECDEC_STRICT_PLUGINS`` is set and a plugin has a fault.

    Warns:
        SpecdecPluginWarning: once for each broken plugin.
    """
    report = scan()
    for broken in report.broken:
        warnings.warn(f"{broken.origin} is {broken.message}", SpecdecPluginWarning, stacklevel=2)
    return Registry(report)
