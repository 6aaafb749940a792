"""specdec: speculative decoding for MLX, with drafters as plugins.

``import specdec`` does not import MLX; what touches it is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.batch import BatchGenerator
    from specdec.check import ModelReport, check_model
    from specdec.checkpoints import PrefixCache
    from specdec.drafters import LoadedDrafter, bind_target, load_draft_model, load_drafter
    from specdec.generation import GenerationResponse, generate, stream_generate
    from specdec.models import load_model
    from specdec.sampling import SamplingOptions
    from specdec.state import CacheOptions
    from specdec.verify import Emission, GenerationStats, Request, Round, Row, VerifyGroup

__all__ = [
    "BatchGenerator",
    "CacheOptions",
    "Emission",
    "GenerationResponse",
    "GenerationStats",
    "LoadedDrafter",
    "ModelReport",
    "PrefixCache",
    "Request",
    "Round",
    "Row",
    "SamplingOptions",
    "VerifyGroup",
    "__version__",
    "bind_target",
    "check_model",
    "generate",
    "load_draft_model",
    "load_drafter",
    "load_model",
    "stream_generate",
]

__version__ = "0.1.0"

_HOMES = {
    "BatchGenerator": "specdec.batch",
    "CacheOptions": "specdec.state",
    "Emission": "specdec.verify",
    "GenerationResponse": "specdec.generation",
    "GenerationStats": "specdec.verify",
    "LoadedDrafter": "specdec.drafters",
    "ModelReport": "specdec.check",
    "PrefixCache": "specdec.checkpoints",
    "Request": "specdec.verify",
    "Round": "specdec.verify",
    "Row": "specdec.verify",
    "SamplingOptions": "specdec.sampling",
    "VerifyGroup": "specdec.verify",
    "bind_target": "specdec.drafters",
    "check_model": "specdec.check",
    "generate": "specdec.generation",
    "load_draft_model": "specdec.drafters",
    "load_drafter": "specdec.drafters",
    "load_model": "specdec.models",
    "stream_generate": "specdec.generation",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'specdec' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
