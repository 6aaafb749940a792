"""Every model type of the installed mlx-lm, tiny and with random weights, for the state tests.

``build("qwen3_5")`` constructs a model from its configuration here. The configurations have every
kind of layer the type knows, windows of a few positions, and real sizes nowhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten

from architectures.a_to_gemma import CONFIGS as _A_TO_GEMMA
from architectures.glm_to_mimo import CONFIGS as _GLM_TO_MIMO
from architectures.minicpm_to_z import CONFIGS as _MINICPM_TO_Z

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CANNOT_BE_BUILT", "CONFIGS", "build", "model_types"]

CONFIGS: Mapping[str, Mapping[str, Any]] = {**_A_TO_GEMMA, **_GLM_TO_MIMO, **_MINICPM_TO_Z}

CANNOT_BE_BUILT: Mapping[str, str] = {
    "olmo": "its module ends the process where the package ai2-olmo is missing",
}
"""Model types that cannot be constructed here, and why."""


def model_types() -> list[str]:
    """Names of the modules of mlx-lm that hold a model, in order."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name in CANNOT_BE_BUILT:
            found.append(module.name)
            continue
        held = importlib.import_module(f"mlx_lm.models.{module.name}")
        if hasattr(held, "Model") and hasattr(held, "ModelArgs"):
            found.append(module.name)
    return sorted(found)


def build(name: str, seed: int = 0) -> Any:
    """A new model of this type in float32; every weight is random, so every part of it matters.

    New at each call, for tests may quantize it, load other weights or bind it.
    """
    held = importlib.import_module(f"mlx_lm.models.{name}")
    model = held.Model(held.ModelArgs.from_dict({"model_type": name, **deepcopy(CONFIGS[name])}))
    weights: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    drawn = [(path, _drawn(path, w, key)) for (path, w), key in zip(weights, keys, strict=True)]
    model.update(tree_unflatten(drawn))
    model.eval()
    mx.eval(model.parameters())
    return model


def _drawn(path: str, weight: mx.array, key: mx.array) -> mx.array:
    """Values that keep a signal alive through the layers, and routers undecided."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    noise = mx.random.normal(weight.shape, key=key)
    own = ".".join(path.split(".")[-2:])
    if own.endswith("bias"):  # its own start may be random
        return 0.1 * noise + float(own.endswith("dt_bias"))
    if "norm" in own or weight.ndim == 0:
        return weight + 0.1 * noise
    if "embed" in own:
        embedding: mx.array = noise * weight.shape[-1] ** -0.5
        return embedding
    scaled: mx.array = noise * 2.0 * weight[0].size ** -0.5
    return scaled
