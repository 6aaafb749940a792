"""Time to the first token, cold and warm, with the texts compared token for token.

    python docs/benchmarks/prefix_cache.py --model demo --tokens 2000 --drafter ngram

Four ways, interleaved: the prompt read whole; the same prompt again (from memory, and from disk in
a cache that was opened anew); and the second turn of a chat whose first turn was generated before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import specdec
from specdec.cli.bench import read_prompts
from specdec.models import load_model


def long_prompt(tokenizer: Any, tokens: int) -> list[int]:
    """The first ``tokens`` ids of the bundled prompts, one behind the other."""
    texts = read_prompts("demo")
    ids: list[int] = []
    while len(ids) < tokens:
        for text in texts:
            ids += tokenizer.encode(text, add_special_tokens=False)
    return ids[:tokens]


def run(
    model: Any, tokenizer: Any, prompt: list[int], drafter: Any, cache: specdec.PrefixCache | None
) -> tuple[list[int], specdec.GenerationStats]:
    """One request of 32 tokens: its ids and statistics."""
    ids = []
    stats = None
    for response in specdec.stream_generate(
        model, tokenizer, prompt, max_tokens=32, drafter=drafter, prefix_cache=cache
    ):
        ids.append(response.token)
        stats = response.stats
    assert stats is not None
    return ids, stats


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    drafter = specdec.load_drafter(args.drafter, model, tokenizer)
    prompt = long_prompt(tokenizer, args.tokens)
    run(model, tokenizer, prompt[:300], drafter, None)  # warms the kernels
    seconds: dict[str, list[float]] = {}
    cached: dict[str, int] = {}

    def note(name: str, prompt: list[int], cache: specdec.PrefixCache | None) -> list[int]:
        ids, stats = run(model, tokenizer, prompt, drafter, cache)
        assert stats.time_to_first_token is not None
        seconds.setdefault(name, []).append(stats.time_to_first_token)
        cached[name] = stats.cached_tokens
        return ids

    different = 0
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            with specdec.PrefixCache(8 << 30, folder) as cache:
                first = note("cold, nothing stored yet", prompt, cache)
                turn = prompt + first + prompt[:40]
                different += note("again, from memory", prompt, cache) != first
                second = note("second turn, from memory", turn, cache)
            with specdec.PrefixCache(8 << 30, folder) as cache:
                different += note("again, from disk", prompt, cache) != first
                different += note("second turn, from memory or disk", turn, cache) != second
        different += note("cold, no cache", prompt, None) != first
        different += note("second turn, no cache", turn, None) != second
    cold = statistics.median(seconds["cold, no cache"])
    print(f"{args.tokens} prompt tokens, {args.model}, {args.drafter}; median of {args.runs} runs")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:34} {1000 * median:9.1f} ms  ({1000 * min(times):.1f}-{1000 * max(times):.1f})"
            f"  {cold / median:6.1f} x  {cached[name]} tokens cached"
        )
    print(f"texts that differ from the cold ones: {different}")


if __name__ == "__main__":
    main()
