"""Constraints of sets, the texts that they leave of the target's, and drafters of such texts."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define
from scripted import RIGHT, WRONG, Script, ScriptedProvider, ScriptedRows, Text
from tiny_models import VOCABULARY, tiny_model

from specdec.errors import ConstraintError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "EVERY",
    "PROMPT",
    "Following",
    "Steps",
    "constrained",
    "drafting",
    "form",
    "parity",
    "plain",
    "within",
]

PROMPT = (5, 9, 40, 3, 22, 17)
EVERY = frozenset(range(VOCABULARY))
EVEN = frozenset(range(0, VOCABULARY, 2))


@define
class Steps:
    """A constraint of sets: which ids may be the nth emitted."""

    allowed: Callable[[int], frozenset[int]]
    count: int = 0

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array, int]:
        rows = [[token in self.allowed(self.count) for token in range(VOCABULARY)]]
        for place, token in enumerate(draft):
            if token not in self.allowed(self.count + place):
                break
            later = self.allowed(self.count + place + 1)
            rows.append([each in later for each in range(VOCABULARY)])
        return mx.array(rows), len(rows) - 1

    def advance(self, token: int, /) -> bool:
        if token not in self.allowed(self.count):
            raise ConstraintError(f"{token} is not allowed")
        self.count += 1
        return False

    def propose(self, max_tokens: int, /) -> list[int]:
        forced: list[int] = []
        while len(forced) < max_tokens and len(self.allowed(self.count + len(forced))) == 1:
            forced += self.allowed(self.count + len(forced))
        return forced


def parity(step: int) -> frozenset[int]:
    return EVEN if step % 2 else EVERY - EVEN


def form(step: int) -> frozenset[int]:
    """Three of five tokens are forced."""
    return frozenset({(7 * step) % VOCABULARY}) if step % 5 > 1 else EVERY


def plain(prompt: Sequence[int], count: int, shape: Any) -> tuple[int, ...]:
    """mlx-lm's model over the whole text, for each token anew; logits are shaped in between."""
    tokens = list(prompt)
    for step in range(count):
        logits = tiny_model("qwen3")(mx.array([tokens]))[:, -1]
        best: Any = mx.argmax(shape(tokens, logits, step)).item()
        tokens.append(best)
    return tuple(tokens[len(prompt) :])


def within(logits: mx.array, allowed: frozenset[int]) -> mx.array:
    return mx.where(mx.array([t in allowed for t in range(VOCABULARY)]), logits, -mx.inf)


@cache
def constrained(allowed: Callable[[int], frozenset[int]], count: int = 24) -> Text:
    return Text(PROMPT, plain(PROMPT, count, lambda _, logits, n: within(logits, allowed(n))))


def drafting(text: Text, rows: type[ScriptedRows] | None = None) -> ScriptedProvider:
    moves = [[RIGHT] * 4, [RIGHT, WRONG, RIGHT], [], [RIGHT] * 2, [WRONG, RIGHT]]
    return ScriptedProvider(Script([text], [moves]), rows=rows)


class Following(ScriptedRows):
    """Rows that take tokens which they did not draft."""

    def consume(self, tokens: mx.array, _context: Any, lengths: Sequence[int], /) -> None:
        self._enter("consume")
        read: Any = tokens.tolist()
        for row, chunk, length in zip(self.rows, read, lengths, strict=True):
            row.tokens.extend(chunk[:length])
