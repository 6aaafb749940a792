"""Configurations of the model types Klear and afm7 to gemma4_text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS: Mapping[str, Mapping[str, Any]] = {}
