"""Where a drafter's greedy text leaves mlx-lm's on this host, and how near the tie was.

On a CPU the two never part. On a GPU the kernel depends on the width of the window, so two tokens
within rounding of each other may change places. For each prompt this finds the first token that
differs and asks the model, one token at a time, how far apart the two candidates are there.

    python docs/benchmarks/tie_margin.py --limit 50 --max-tokens 200
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

import specdec
from specdec.cli.bench import read_prompts
from specdec.models import load_model


def candidates(model: Any, tokens: list[int], first: int, other: int) -> tuple[float, float]:
    """Logits of two candidates after ``tokens``, from windows of one position."""
    cache = make_prompt_cache(model)
    if len(tokens) > 1:
        model(mx.array([tokens[:-1]]), cache=cache)
    logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1].astype(mx.float32)
    return float(logits[first].item()), float(logits[other].item())


def main() -> None:
    """Compare, and print one line per divergence and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", default="demo")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    prompts = read_prompts(args.prompts, args.limit)
    drafter = specdec.load_drafter(args.drafter, model, tokenizer)
    steps, parted, total = [], 0, 0
    for number, prompt in enumerate(prompts):
        limit = args.max_tokens
        theirs = [r.token for r in mlx_lm.stream_generate(model, tokenizer, prompt, limit)]
        ours = [
            r.token
            for r in specdec.stream_generate(model, tokenizer, prompt, limit, drafter=drafter)
        ]
        same = next(
            (i for i, pair in enumerate(zip(theirs, ours, strict=False)) if len({*pair}) > 1), None
        )
        total += len(theirs) if same is None else same
        if same is None:
            continue
        parted += 1
        before = [*tokenizer.encode(prompt), *theirs[:same]]
        a, b = candidates(model, before, theirs[same], ours[same])
        # One unit in the last place of a bfloat16 of this size.
        unit = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b), 1e-30))) - 7)
        steps.append(abs(a - b) / unit)
        row = {"prompt": number, "token": same, "gap": abs(a - b), "bfloat16_units": steps[-1]}
        print(json.dumps(row), flush=True)
    worst = max(steps, default=0.0)
    print(
        f"{parted} of {len(prompts)} texts part, {total} equal tokens before; "
        f"largest gap {worst:.1f} bfloat16 units"
    )


if __name__ == "__main__":
    main()
