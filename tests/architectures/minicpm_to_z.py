"""Configurations of the model types minicpm to youtu_llm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS: Mapping[str, Mapping[str, Any]] = {}
