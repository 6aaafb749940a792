"""Finding drafters: what a plugin imports, and what finds the plugins. Imports no MLX."""

from specdec.plugins.hooks import (
    API_VERSION,
    SUPPORTED_API,
    hookimpl,
    hookspec,
    make_manager,
    specdec_bind_target,
    specdec_draft_kinds,
)
from specdec.plugins.kinds import (
    Artifact,
    DeclaresNativeDraft,
    DraftKind,
    LoadedDraft,
    LoadRequest,
)
from specdec.plugins.registry import Detection, Registry, default_registry
from specdec.plugins.scan import (
    Broken,
    Conflict,
    Disabled,
    LoadedPlugin,
    Origin,
    PluginReport,
    scan,
)

__all__ = [
    "API_VERSION",
    "SUPPORTED_API",
    "Artifact",
    "Broken",
    "Conflict",
    "DeclaresNativeDraft",
    "Detection",
    "Disabled",
    "DraftKind",
    "LoadRequest",
    "LoadedDraft",
    "LoadedPlugin",
    "Origin",
    "PluginReport",
    "Registry",
    "default_registry",
    "hookimpl",
    "hookspec",
    "make_manager",
    "scan",
    "specdec_bind_target",
    "specdec_draft_kinds",
]
