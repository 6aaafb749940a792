"""A bundled model, short prompts, and the texts that must come out of it.

Greedy references are mlx-lm's own ``stream_generate``, seeded ones the target alone. On the CPU the
bits of these models in bfloat16 do not depend on the width of a window, so texts have to be equal.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
from attrs import frozen
from scripted import request

import specdec_demo
from specdec import (
    BatchGenerator,
    SamplingOptions,
    VerifyGroup,
    load_drafter,
    load_model,
    stream_generate,
)
from specdec.verify import flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from specdec import GenerationStats, LoadedDrafter

__all__ = ["SEEDED", "Asked", "DemoTexts", "Output", "draws"]

SEEDED = SamplingOptions(temp=0.8, top_p=0.95)


def draws() -> dict[str, Any]:
    """:data:`SEEDED` as options of ``stream_generate``."""
    return {"temp": SEEDED.temp, "top_p": SEEDED.top_p}


@frozen
class Output:
    """What a request gave."""

    tokens: tuple[int, ...]
    text: str
    finish: str | None
    stats: GenerationStats

    @property
    def per_forward(self) -> float:
        return len(self.tokens) / self.stats.target_forwards


@cache
def _loaded(model: str) -> tuple[Any, Any]:
    found: tuple[Any, Any] = load_model(model)
    return found


@cache
def _drafter(model: str, drafter: str, options: tuple[tuple[str, Any], ...]) -> LoadedDrafter:
    return load_drafter(drafter, *_loaded(model), **dict(options))


@cache
def _greedy(model: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    found = mlx_lm.stream_generate(*_loaded(model), list(prompt), max_tokens=count)
    return tuple(each.token for each in found)


@cache
def _prompts(model: str) -> tuple[tuple[int, ...], ...]:
    _, tokenizer = _loaded(model)
    lines = map(json.loads, specdec_demo.prompts().read_text().splitlines())
    by_kind = sorted(lines, key=lambda line: str(line["kind"]))  # chat, code, prose
    kinds = [list(group)[:4] for _, group in groupby(by_kind, key=lambda line: line["kind"])]
    texts = [line["text"] for four in zip(*kinds[1:], strict=True) for line in four]
    return tuple(tuple(tokenizer.encode(text)[: 18 + at]) for at, text in enumerate(texts))


@frozen
class DemoTexts:
    """A bundled model with a drafter of its own.

    Attributes:
        model: its name.
        drafter: a kind, or the name of a bundled one.
    """

    model: str
    drafter: str

    def demo(self) -> tuple[Any, Any]:
        """The model and its tokenizer, as ``mlx_lm.load`` returns them."""
        return _loaded(self.model)

    def load(self, **options: Any) -> LoadedDrafter:
        """The drafter, tried at load where there are no options; stays open."""
        given = {"probe": False, **options} if options else {}
        return _drafter(self.model, self.drafter, tuple(sorted(given.items())))

    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """Eight beginnings of held-out texts, code and prose in turn, 18 to 25 tokens."""
        return _prompts(self.model)

    def drafted(
        self,
        prompt: tuple[int, ...],
        drafter: LoadedDrafter | None,
        depth: int | None = None,
        **options: Any,
    ) -> Output:
        """A request of its own executor; ``depth`` drafts a round."""
        asked = {"max_tokens": 24, **options}
        found = list(
            stream_generate(*self.demo(), prompt, drafter=drafter, num_draft_tokens=depth, **asked)
        )
        last = found[-1]
        assert last.stats is not None
        assert last.stats.draft_errors == last.stats.invalid_drafts == 0, (
            last.stats.last_draft_error
        )
        text = "".join(each.text for each in found)
        return Output(tuple(each.token for each in found), text, last.finish_reason, last.stats)

    def greedy(self, prompt: tuple[int, ...], count: int = 24) -> tuple[int, ...]:
        """mlx-lm's tokens."""
        return _greedy(self.model, prompt, count)

    def came_and_went(
        self, first: Sequence[Asked], later: Sequence[Asked], after: int
    ) -> dict[Asked, GenerationStats]:
        """Requests of one batch, each of which gets what it gets alone.

        Args:
            first: that begin together.
            later: that join them.
            after: steps.
        """
        found: dict[int, list[int | None]] = {}
        stats: dict[int, GenerationStats] = {}
        with BatchGenerator(*self.demo(), drafter=self.load(), prefill_step_size=16) as generator:

            def steps(count: int) -> None:
                for _ in range(count):
                    for answer in generator.next()[1]:
                        found.setdefault(answer.uid, []).append(answer.token)
                        if answer.stats is not None:
                            stats[answer.uid] = answer.stats

            asked = {each.insert(generator): each for each in first}
            steps(after)
            asked |= {each.insert(generator): each for each in later}
            steps(60)
        for uid, each in asked.items():
            assert tuple(found[uid]) == each.expected(), each
        return {each: stats[uid] for uid, each in asked.items()}

    def waits(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
        """What the host waited for while three rows of different widths decoded, and the rounds."""
        waited: list[str] = []

        def watched(owner: Any, name: str) -> None:
            wait = getattr(owner, name)

            def counted(*args: Any) -> Any:
                waited.append(name)
                return wait(*args)

            monkeypatch.setattr(owner, name, counted)

        watched(flight, "host_read")
        watched(mx, "eval")
        watched(mx, "synchronize")
        loaded = self.load()
        group = VerifyGroup(loaded.target, loaded.provider, drafter=loaded.kind)
        group.admit(
            [
                request(list(prompt), max_tokens=12, num_draft_tokens=depth)
                for prompt, depth in zip(self.prompts()[2:5], (4, 2, 7), strict=True)
            ]
        )
        waited.clear()
        rounds = 0
        while group.rows:
            with group.round() as done:
                done.deliver_all()
            rounds += 1
        return waited, rounds

    def seeded(self, prompt: tuple[int, ...], seed: int, count: int = 24) -> tuple[int, ...]:
        """The target's own tokens at :data:`SEEDED`."""
        return self.drafted(prompt, None, max_tokens=count, seed=seed, **draws()).tokens


@frozen
class Asked:
    """A request of a batch.

    Attributes:
        texts: the model it is for.
        place: of its prompt.
        budget: tokens at most.
        depth: drafts a round.
        seed: of its draws, if it draws.
    """

    texts: DemoTexts
    place: int
    budget: int
    depth: int
    seed: int | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.texts.prompts()[self.place]

    def expected(self) -> tuple[int, ...]:
        """mlx-lm's tokens, or the target's own for a seed."""
        if self.seed is None:
            return self.texts.greedy(self.prompt)[: self.budget]
        return self.texts.seeded(self.prompt, self.seed)[: self.budget]

    def insert(self, generator: BatchGenerator) -> int:
        """Ask for it; gives its number."""
        [uid] = generator.insert(
            [list(self.prompt)],
            self.budget,
            sampling=[SamplingOptions() if self.seed is None else SEEDED],
            seeds=[self.seed],
            num_draft_tokens=[self.depth],
        )
        return uid
