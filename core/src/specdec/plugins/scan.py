"""Finding plugins: every entry point is loaded in a ``try`` of its own.

A plugin that is broken, disabled or in conflict is a value in the report, and never takes another
one down. The result depends on what is installed, not on the order it was installed in.
"""

from __future__ import annotations

import os
import re
import reprlib
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from attrs import field, frozen
from pluggy import PluginManager, PluginValidationError

from specdec.errors import BrokenPluginError, KindConflictError, PluginError, SpecdecError
from specdec.plugins import hooks
from specdec.plugins.kinds import validated_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specdec.plugins.kinds import DraftKind

__all__ = [
    "ALLOW_VARIABLE",
    "DISABLE_VARIABLE",
    "ENTRY_POINT_GROUP",
    "STRICT_VARIABLE",
    "Broken",
    "Conflict",
    "Disabled",
    "LoadedPlugin",
    "Origin",
    "PluginReport",
    "Stage",
    "describe",
    "is_strict",
    "scan",
]

ENTRY_POINT_GROUP: Final = "specdec.providers"
ALLOW_VARIABLE: Final = "SPECDEC_PLUGINS"
DISABLE_VARIABLE: Final = "SPECDEC_DISABLE_PLUGINS"
STRICT_VARIABLE: Final = "SPECDEC_STRICT_PLUGINS"

Stage: TypeAlias = Literal["import", "api", "register", "kinds"]


@frozen
class Origin:
    """Where a plugin comes from.

    Attributes:
        distribution: what was installed, such as ``specdec-ngram``.
        version: its version.
        name: the entry point's name.
    """

    distribution: str
    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@frozen(kw_only=True, eq=False)
class LoadedPlugin:
    """A plugin that works.

    Attributes:
        origin: where it comes from.
        api: the plugin API it was written for.
        kinds: what it offers, by name; some may be contested by another plugin.
        manager: asks this plugin's hooks, and nobody else's.
    """

    origin: Origin
    api: int
    kinds: tuple[DraftKind, ...]
    manager: PluginManager = field(repr=False)


@frozen(kw_only=True, eq=False)
class Broken:
    """A plugin that cannot be used.

    Attributes:
        origin: where it comes from.
        stage: how far it came: ``import``, ``api``, ``register`` or ``kinds``.
        error: what was raised.
        api: the plugin API it asks for, if it came to say so.
    """

    origin: Origin
    stage: Stage
    error: BaseException
    api: object = None

    @property
    def message(self) -> str:
        """What went wrong, in one line."""
        return f"broken ({self.stage}): {describe(self.error)}"


@frozen
class Disabled:
    """A plugin that the environment variable ``variable`` keeps from being imported."""

    origin: Origin
    variable: str


@frozen
class Conflict:
    """A kind's name that more than one plugin registers; none of its owners gets it."""

    name: str
    owners: tuple[Origin, ...]

    @property
    def message(self) -> str:
        """Who collides and how to settle it, in one line."""
        names = [owner.distribution for owner in self.owners]
        if len(set(names)) < len(names):
            names = [owner.name for owner in self.owners]
        return (
            f"kind '{self.name}' is registered by {' and '.join(map(str, self.owners))}; "
            f"disable one with {DISABLE_VARIABLE}={' or '.join(names)}"
        )


@frozen(eq=False)
class PluginReport:
    """What a scan found, in an order of its own: by distribution, then by entry point.

    Attributes:
        loaded: the plugins that work.
        broken: those that do not.
        disabled: those that were not looked at.
        conflicts: kinds that nobody gets.
    """

    loaded: tuple[LoadedPlugin, ...] = ()
    broken: tuple[Broken, ...] = ()
    disabled: tuple[Disabled, ...] = ()
    conflicts: tuple[Conflict, ...] = ()


def describe(error: BaseException) -> str:
    """An error of somebody else's code in one line."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({reprlib.repr(error.code)})"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a plugin's own exception class may be broken too
        text = ""
    if isinstance(error, SpecdecError) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def is_strict() -> bool:
    """Whether ``SPECDEC_STRICT_PLUGINS`` asks that any fault of a plugin be raised."""
    return os.environ.get(STRICT_VARIABLE, "").strip().lower() not in (
        "",
        "0",
        "false",
        "no",
        "off",
    )


def scan(strict: bool | None = None) -> PluginReport:
    """Look at every installed plugin; imports no MLX.

    Args:
        strict: raise if anything is broken or in conflict; ``None``: as the environment variable
            ``SPECDEC_STRICT_PLUGINS`` says.

    Raises:
        BrokenPluginError: in strict mode; the plugin's own error is its cause.
    """
    found = [(_origin(entry), entry) for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)]
    loaded: list[LoadedPlugin] = []
    broken: list[Broken] = []
    disabled: list[Disabled] = []
    for origin, entry in sorted(found, key=lambda pair: (pair[0].distribution, pair[0].name)):
        variable = _disabled_by(origin)
        if variable is not None:
            disabled.append(Disabled(origin, variable))
            continue
        outcome = _load(origin, entry)
        if isinstance(outcome, Broken):
            broken.append(outcome)
        else:
            loaded.append(outcome)
    report = PluginReport(tuple(loaded), tuple(broken), tuple(disabled), _conflicts(loaded))
    if is_strict() if strict is None else strict:
        _raise_faults(report)
    return report


def _origin(entry: metadata.EntryPoint) -> Origin:
    try:
        distribution = entry.dist
        found = (distribution.name, distribution.version) if distribution else (None, None)
    except Exception:  # damaged metadata is no reason to lose the other plugins
        found = (None, None)
    return Origin(found[0] or "unknown", found[1] or "unknown", entry.name)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _disabled_by(origin: Origin) -> str | None:
    """The variable that disables a plugin, named by its entry point or its distribution."""
    names = {_normalised(origin.name), _normalised(origin.distribution)}
    if names & set(map(_normalised, os.environ.get(DISABLE_VARIABLE, "").split(","))):
        return DISABLE_VARIABLE
    allowed = os.environ.get(ALLOW_VARIABLE)
    if allowed is not None and not names & set(map(_normalised, allowed.split(","))):
        return ALLOW_VARIABLE
    return None


def _load(origin: Origin, entry: metadata.EntryPoint) -> LoadedPlugin | Broken:
    stage: Stage = "import"
    api: Any = None
    try:
        module = entry.load()
        stage = "api"
        api = getattr(module, "specdec_api", None)
        hooks.check_api(api, origin.distribution)
        stage = "register"
        manager = _register(origin, module)
        stage = "kinds"
        kinds = _ask_kinds(manager)
    except (Exception, SystemExit) as error:  # some packages exit when they are imported
        return Broken(origin=origin, stage=stage, error=error, api=api)
    return LoadedPlugin(origin=origin, api=api, kinds=kinds, manager=manager)


def _register(origin: Origin, module: object) -> PluginManager:
    manager = hooks.make_manager()
    manager.register(module, name=f"{origin.distribution}:{origin.name}")
    callers = manager.get_hookcallers(module) or []
    if not callers:
        raise PluginError("it implements no hook; decorate one with specdec.plugins.hookimpl")
    try:
        manager.check_pending()
    except PluginValidationError as error:
        unknown = ", ".join(caller.name for caller in callers if not caller.has_spec())
        raise PluginError(
            f"it implements {unknown}, which is no hook of specdec; "
            "the hooks are specdec_draft_kinds and specdec_bind_target"
        ) from error
    return manager


def _ask_kinds(manager: PluginManager) -> tuple[DraftKind, ...]:
    caller = manager.hook.specdec_draft_kinds
    results = caller()
    if not results and any(
        not (impl.wrapper or impl.hookwrapper) for impl in caller.get_hookimpls()
    ):
        results = [None]  # pluggy drops it, but it is a forgotten return
    return validated_kinds(results)


def _conflicts(loaded: Iterable[LoadedPlugin]) -> tuple[Conflict, ...]:
    owners: dict[str, list[Origin]] = {}
    for plugin in loaded:
        for kind in plugin.kinds:
            owners.setdefault(kind.name, []).append(plugin.origin)
    return tuple(
        Conflict(name, tuple(owners[name])) for name in sorted(owners) if len(owners[name]) > 1
    )


def _raise_faults(report: PluginReport) -> None:
    texts = [f"{broken.origin} is {broken.message}" for broken in report.broken]
    texts += [conflict.message for conflict in report.conflicts]
    if not texts:
        return
    errors = [broken.error for broken in report.broken]
    errors += [KindConflictError(conflict.message) for conflict in report.conflicts]
    cause = errors[0] if len(errors) == 1 else BaseExceptionGroup("faults of plugins", errors)
    raise BrokenPluginError(f"{'; '.join(texts)} ({STRICT_VARIABLE} is set)") from cause
