"""Time to the first token, cold and warm, with the texts compared token for token.

    python docs/benchmarks/prefix_cache.py --model demo --tokens 2000
    python docs/benchmarks/prefix_cache.py --shape qwen3-8b --tokens 2000

In turn: a prompt that is read whole; the same prompt again, from memory, and from the files in a
cache that was opened anew; and the second turn of a chat whose first turn was generated before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from round_cost import SHAPES, build

import specdec
from specdec.cli.bench import read_prompts
from specdec.plugins import LoadRequest, default_registry

if TYPE_CHECKING:
    from specdec.contract import DraftProvider
    from specdec.targets import Target

GIB = 1 << 30


def long_prompt(tokenizer: Any, prompts: str, tokens: int) -> tuple[int, ...]:
    """The first ``tokens`` ids of some prompts, one behind the other."""
    ids: list[int] = []
    while len(ids) < tokens:
        for text in read_prompts(prompts):
            ids += tokenizer.encode(text, add_special_tokens=False)
    return tuple(ids[:tokens])


def run(
    target: Target,
    provider: DraftProvider,
    prompt: tuple[int, ...],
    cache: specdec.PrefixCache | None,
) -> specdec.Row:
    """One request of 32 tokens."""
    group = specdec.VerifyGroup(target, provider)
    request = specdec.Request(
        prompt=prompt,
        sampling=specdec.SamplingOptions(),
        max_tokens=32,
        num_draft_tokens=4,
        prefix_cache=cache,
    )
    [row] = group.admit([request])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    group.close()
    return row


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of a real shape")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.shape:
        model = build(args.shape, mx.bfloat16)
        prompt = tuple((31 * i * i + 7 * i) % 100_000 for i in range(args.tokens))
    else:
        model, tokenizer = specdec.load_model(args.model)
        prompt = long_prompt(tokenizer, args.prompts, args.tokens)
    target = specdec.bind_target(model)
    kind = default_registry().select(kind=args.drafter)
    provider = kind.load(LoadRequest(kind=kind.name, target=target)).provider
    for _ in range(2):
        run(target, provider, prompt, None)  # warms the kernels
    seconds: dict[str, list[float]] = {}
    cached: dict[str, int] = {}
    different = 0

    def note(
        name: str, asked: tuple[int, ...], cache: specdec.PrefixCache | None
    ) -> tuple[int, ...]:
        row = run(target, provider, asked, cache)
        assert row.stats.time_to_first_token is not None
        seconds.setdefault(name, []).append(row.stats.time_to_first_token)
        cached[name] = row.stats.cached_tokens
        return row.emitted

    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            with specdec.PrefixCache(16 * GIB, folder) as cache:
                first = note("cold, and kept", prompt, cache)
                turn = (*prompt, *first, *prompt[:40])
                different += note("again, from memory", prompt, cache) != first
                second = note("second turn, from memory", turn, cache)
            with specdec.PrefixCache(16 * GIB, folder) as cache:
                different += note("again, from disk", prompt, cache) != first
                different += note("second turn again, from disk", turn, cache) != second
        different += note("cold, no cache", prompt, None) != first
        different += note("second turn, no cache", turn, None) != second
    cold = statistics.median(seconds["cold, no cache"])
    what = args.shape or args.model
    print(f"{args.tokens} prompt tokens, {what}, {args.drafter}; median of {args.runs} runs")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:30} {1000 * median:9.1f} ms  ({1000 * min(times):.1f}-{1000 * max(times):.1f})"
            f"  {cold / median:6.1f} x  {cached[name]} tokens cached"
        )
    print(f"texts that differ from the cold ones: {different} of {5 * args.runs}")


if __name__ == "__main__":
    main()
