"""Target models: bound from outside, through their caches and by wrapping layers for one call."""

from specdec.targets.mlx_lm import MlxLmTarget
from specdec.targets.protocol import Target, Window

__all__ = ["MlxLmTarget", "Target", "Window"]
