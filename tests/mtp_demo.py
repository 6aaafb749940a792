"""The demo model with its trained head; see ``demo_texts``."""

from __future__ import annotations

from functools import cache

from demo_texts import SEEDED, DemoTexts, Output, draws

__all__ = ["SEEDED", "Output", "demo", "drafted", "draws", "greedy", "head", "prompts", "seeded"]

_TEXTS = DemoTexts("demo-qwen3_5", "mtp")

demo, prompts, drafted, greedy = _TEXTS.demo, _TEXTS.prompts, _TEXTS.drafted, _TEXTS.greedy
head = _TEXTS.load


@cache
def seeded(prompt: tuple[int, ...], seed: int, count: int = 24) -> tuple[int, ...]:
    """The target's own tokens at :data:`SEEDED`."""
    return _TEXTS.seeded(prompt, seed, count)
