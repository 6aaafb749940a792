"""A drafter that knows what the target will write, and does all it can to make it write more.

It replays the target's own text with errors at places of its choice, drafts nothing, too much, or
what is no token, and every row of a group something else in every round. Whatever it does, the text
must stay the target's. What it really did is in ``played``, so that a test can show that it did.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from scripted import RIGHT, WRONG, OnDevice, ScriptedProvider, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripted import Cells

__all__ = ["WIDEST", "Adversary", "alone", "planted", "text_alone"]

WIDEST = 8
"""The most drafts of a round that the adversary makes use of."""

_TOO_MANY_AT, _NO_TOKEN_AT = 2, 4  # rounds of a row; the third invalid draft would end its drafting
_NO_TOKENS = (-1, 1 << 31, 0.5, None)


def alone(model: Any, prompt: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
    """``count`` tokens of mlx-lm alone, greedy, in its own caches.

    Args:
        model: an mlx-lm model.
        prompt: token ids.
        count: tokens to write.
        options: of mlx-lm's ``generate_step``.
    """
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count, **options)
    return tuple(token for token, _ in steps)


def text_alone(model: Any, prompt: Sequence[int], count: int, **options: Any) -> Text:
    """A prompt with what mlx-lm alone writes after it."""
    return Text(tuple(prompt), alone(model, prompt, count, **options))


def planted(depth: int, error: int | None) -> Cells:
    """A draft of the target's own tokens with one error, if any: see ``scripted.Script``."""
    return [WRONG if place == error else RIGHT for place in range(depth)]


class Adversary:
    """Proposes for each row of a group what harms it most, from the text that it will have.

    What a row is offered on the host depends on the seed, its text and its own round alone, not on
    the rows beside it.

    Args:
        texts: of all requests, told apart by their tokens.
        vocabulary: ids of the target.
        seed: of what it does.
        faults: whether it also drafts what is no valid draft, twice a row.
    """

    def __init__(
        self, texts: Sequence[Text], vocabulary: int, *, seed: int = 0, faults: bool = True
    ) -> None:
        self._texts = list(texts)
        self._vocabulary = vocabulary
        self._seed = seed
        self._faults = faults
        self._rounds: Counter[int] = Counter()
        self.played: Counter[str] = Counter()
        self.complaints: list[str] = []

    @property
    def provider(self) -> ScriptedProvider:
        """A new drafter that leaves its drafts on the host."""
        return self._given(ScriptedProvider(self))

    @property
    def device_provider(self) -> ScriptedProvider:
        """A new drafter that leaves them on the device where it can."""
        return self._given(ScriptedProvider(self, device=self.on_device))

    def __call__(self, tokens: tuple[int, ...], depth: int, step: int) -> Any:
        """A proposal on the host."""
        return self._proposal(tokens, depth, step, faults=self._faults)

    def on_device(
        self, texts: list[tuple[int, ...]], depths: list[int], steps: list[int]
    ) -> OnDevice | None:
        """A proposal on the device, without faults; every fourth is left to the host."""
        self.played["asked for the device"] += 1
        if self.played["asked for the device"] % 4 == 0:
            return None
        known = zip(texts, depths, steps, strict=True)
        rows = [self._proposal(*each, faults=False) for each in known]
        width = max(map(len, rows))
        if not width:
            return None
        self.played["on the device"] += 1
        padded = [[*row, *[1] * (width - len(row))] for row in rows]
        return OnDevice(padded, [len(row) for row in rows])

    # Inside.

    def _proposal(self, tokens: tuple[int, ...], depth: int, step: int, *, faults: bool) -> Any:
        index = self._find(tokens, step)
        if index is None or not depth:
            return []
        number = self._rounds[index]
        self._rounds[index] += 1
        drawn = random.Random(f"{self._seed} {index} {number}")
        ahead = self._ahead(index, tokens, depth)
        if faults and number == _TOO_MANY_AT:
            self.played["too many"] += 1
            return [*ahead, *ahead, 0]
        if faults and number == _NO_TOKEN_AT:
            self.played["no token"] += 1
            place, no_token = drawn.randrange(depth), drawn.choice([*_NO_TOKENS, self._vocabulary])
            return [*ahead[:place], no_token, *ahead[place + 1 :]]
        return self._ragged(drawn, ahead)

    def _ragged(self, drawn: random.Random, ahead: list[int]) -> list[int]:
        mood = drawn.choices(("mute", "liar", "right", "one error"), (1, 1, 2, 5))[0]
        self.played[mood] += 1
        if mood == "mute":
            return []
        draft = ahead[: drawn.randint(1, min(len(ahead), WIDEST))]
        if mood == "liar":
            return [self._other(token, drawn) for token in draft]
        if mood == "one error":
            place = drawn.randrange(len(draft))
            draft[place] = self._other(draft[place], drawn)
        return draft

    def _other(self, token: int, drawn: random.Random) -> int:
        return (token + drawn.randrange(1, 60)) % min(self._vocabulary, 64)

    def _ahead(self, index: int, tokens: tuple[int, ...], depth: int) -> list[int]:
        """What the target writes next, and where the text is not known any further anything."""
        known = self._texts[index].whole[len(tokens) : len(tokens) + depth]
        return [*known, *[0] * (depth - len(known))]

    def _find(self, tokens: tuple[int, ...], step: int) -> int | None:
        for index, text in enumerate(self._texts):
            if len(tokens) - len(text.prompt) == step and text.whole[: len(tokens)] == tokens:
                return index
        self.complaints.append(f"no request has the text {tokens} at step {step}")
        return None

    def _given(self, provider: ScriptedProvider) -> ScriptedProvider:
        provider.complaints = self.complaints
        return provider
