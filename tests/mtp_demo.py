"""The demo model with its trained head; see ``demo_texts``."""

from __future__ import annotations

from functools import cache

from demo_texts import SEEDED, DemoTexts, Output, draws

__all__ = [
    "HEAD",
    "SEEDED",
    "Output",
    "demo",
    "drafted",
    "draws",
    "greedy",
    "head",
    "prompts",
    "seeded",
]

HEAD = DemoTexts("demo-qwen3_5", "mtp")

demo, prompts, drafted, greedy = HEAD.demo, HEAD.prompts, HEAD.drafted, HEAD.greedy
head = HEAD.load


@cache
def seeded(prompt: tuple[int, ...], seed: int, count: int = 24) -> tuple[int, ...]:
    """The target's own tokens at :data:`SEEDED`."""
    return HEAD.seeded(prompt, seed, count)
