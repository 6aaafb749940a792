"""A thousand rounds of requests that come, go, are cancelled, and lose their target and drafter.

Run as a program it does the same on the bundled demo model, and prints the figures::

    python tests/test_batch_endurance.py --model demo-qwen3 --rounds 1000
"""

from __future__ import annotations

import argparse
import gc
import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import define, field
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from tiny_models import VOCABULARY, build_model, tiny_model

from specdec import BatchGenerator, LoadedDrafter, SamplingOptions, load_drafter
from specdec.sampling import make_logits_processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.batch import BatchResponse

REQUESTS = 64
BATCH = 8


class Unlucky(RuntimeError):
    """What the target and the drafter raise now and then."""


@define
class Asked:
    """One request, and what it must give if nobody stops it."""

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any]
    got: list[int] = field(factory=list)
    finish: str | None = None
    cancelled: bool = False


@define
class Report:
    """What a run came to."""

    rounds: int = 0
    requests: int = 0
    ended: int = 0
    cancelled: int = 0
    errors: int = 0
    failed_rounds: int = 0
    lost: int = 0
    wrong: int = 0
    accepted: int = 0
    before: int = 0
    after: int = 0


class Luck:
    """Breaks forwards and drafts now and then, as long as it is told to."""

    def __init__(self, chance: random.Random, patch: pytest.MonkeyPatch, loaded: Any) -> None:
        self.chance, self.failures, self.on = chance, 0, True
        forward = type(loaded.target).forward

        def sometimes(*args: Any, **options: Any) -> Any:
            if self.on and self.chance.random() < 0.01:
                self.failures += 1
                raise Unlucky("the target")
            return forward(*args, **options)

        patch.setattr(type(loaded.target), "forward", sometimes)
        grouped = type(loaded.provider.grouped)
        opened = grouped.open

        def open_group(*args: Any, **options: Any) -> Any:
            group = opened(*args, **options)
            draft = group.draft

            def drafts(*asked: Any) -> Any:
                if self.on and self.chance.random() < 0.01:
                    raise Unlucky("the drafter")
                return draft(*asked)

            group.draft = drafts
            return group

        patch.setattr(grouped, "open", open_group)


def ask(chance: random.Random, vocabulary: int) -> Asked:
    """A request of some kind; prompts repeat themselves, so that n-gram drafts."""
    phrase = [chance.randrange(vocabulary) for _ in range(chance.randint(1, 12))]
    prompt = (phrase * 5)[: chance.randint(1, 50)]
    options: dict[str, Any] = {"num_draft_tokens": chance.choice([0, 1, 3, None])}
    if chance.random() < 0.4:
        seed = chance.randrange(1000)
        options["sampling"] = SamplingOptions(temp=0.8, top_p=0.95, seed=seed)
    if chance.random() < 0.3:
        options["logits_processors"] = make_logits_processors(repetition_penalty=1.2)
    return Asked(prompt, chance.randint(1, 60), options)


def alone(model: Any, asked: Asked) -> list[int]:
    """The request's tokens by itself: mlx-lm's if greedy, else our own plain run."""
    sampling = asked.options.get("sampling")
    processors = asked.options.get("logits_processors")
    if sampling is None:
        theirs = mlx_lm_processors(repetition_penalty=1.2) if processors else None
        steps = generate_step(
            mx.array(asked.prompt), model, max_tokens=asked.max_tokens, logits_processors=theirs
        )
        return [token for token, _ in steps]
    generator = BatchGenerator(model, stop_tokens=())
    [uid] = insert(generator, [asked], num_draft_tokens=[0])
    known = {uid: Asked(asked.prompt, asked.max_tokens, {})}
    while generator.has_work:
        take(known, generator.next()[1])
    generator.close()
    return known[uid].got


def insert(generator: BatchGenerator, asked: Sequence[Asked], **options: Any) -> list[int]:
    """Insert requests with their options."""
    each = [one.options for one in asked]
    return generator.insert(
        [one.prompt for one in asked],
        max_tokens=[one.max_tokens for one in asked],
        logits_processors=[one.get("logits_processors") for one in each],
        **{
            "sampling": [one.get("sampling") for one in each],
            "num_draft_tokens": [one["num_draft_tokens"] for one in each],
            **options,
        },
    )


def endure(
    model: Any, loaded: LoadedDrafter, vocabulary: int, rounds: int, seed: int, patch: Any
) -> Report:
    """Run waves of requests until so many rounds are over."""
    chance, report = random.Random(seed), Report()
    luck = Luck(chance, patch, loaded)
    known: dict[int, Asked] = {}
    generator = BatchGenerator(
        model,
        drafter=loaded,
        stop_tokens=(),
        completion_batch_size=BATCH,
        prefill_step_size=16,
        return_prompt_caches=False,
    )
    begun = 0
    with generator.stats() as stats:
        while stats_rounds(generator) < rounds or generator.has_work:
            if begun < REQUESTS or (stats_rounds(generator) < rounds and not generator.has_work):
                new = [ask(chance, vocabulary) for _ in range(chance.randint(0, 3))]
                known |= dict(zip(insert(generator, new), new, strict=True))
                begun += len(new)
            take(known, generator.next()[1])
            running = [uid for uid, one in known.items() if one.finish is None]
            if running and chance.random() < 0.02:
                gone = chance.choice(running)
                generator.remove([gone])
                known[gone].cancelled, known[gone].finish = True, "cancelled"
            if not report.before and stats_rounds(generator) > rounds // 10:
                report.before = in_use()
    luck.on = False
    generator.close()
    report.rounds, report.accepted = stats.generation_steps, stats.accepted
    report.requests, report.failed_rounds = len(known), luck.failures
    for one in known.values():
        expected = alone(model, one)
        report.cancelled += one.cancelled
        report.ended += one.finish == "length"
        report.lost += one.finish is None
        report.errors += one.finish == "error"
        report.wrong += one.got != (
            expected if one.finish == "length" else expected[: len(one.got)]
        )
    known.clear()
    report.after = in_use()
    return report


def stats_rounds(generator: BatchGenerator) -> int:
    """Rounds so far."""
    return generator._engine.counters.generation_steps


def take(known: dict[int, Asked], answers: Sequence[BatchResponse]) -> None:
    """Sort the answers."""
    for answer in answers:
        one = known[answer.uid]
        if answer.token is not None:
            one.got.append(answer.token)
        if answer.finish_reason is not None:
            one.finish = answer.finish_reason


def in_use() -> int:
    """Bytes that MLX holds."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_rounds_lose_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3")
    start = in_use()
    loaded = load_drafter("ngram", model)
    report = endure(model, loaded, VOCABULARY, 1000, seed, monkeypatch)
    assert report.rounds >= 1000
    assert report.requests >= REQUESTS
    assert (report.lost, report.wrong) == (0, 0), report
    assert report.ended + report.cancelled + report.errors == report.requests
    assert report.errors <= 3, "a request ends only if its target fails again and again"
    assert report.cancelled >= 5
    assert report.failed_rounds >= 5
    assert report.accepted > 100
    assert report.after <= max(start, report.before) + 4096, report


def test_a_wrong_target_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: with another model's text most requests are wrong."""
    model = build_model("qwen3", 1)
    loaded = load_drafter("ngram", tiny_model("qwen3"))
    report = endure(tiny_model("qwen3"), loaded, VOCABULARY, 20, 3, monkeypatch)
    assert report.wrong == 0
    chance = random.Random(3)
    asked = [ask(chance, VOCABULARY) for _ in range(8)]
    assert sum(alone(model, one) != alone(tiny_model("qwen3"), one) for one in asked) > 4


def main() -> None:
    """The same on a bundled model."""
    from specdec import load_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-qwen3")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    model, tokenizer = load_model(asked.model)
    start = in_use()
    loaded = load_drafter("ngram", model, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        print(start, endure(model, loaded, 8192, asked.rounds, asked.seed, patch))


if __name__ == "__main__":
    main()
