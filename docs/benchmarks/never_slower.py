"""Whether drafts that specdec chooses by itself ever lose: to plain decoding, to fixed widths.

For each drafter and its model, each prompt set and each batch size, all in turn and interleaved:
plain decoding, the drafter as specdec runs it by itself (adaptive), and the drafter at fixed
widths. One line per result while it runs:

- adaptive over plain decoding, the median of the ratios per turn and their quartiles. Random tokens
  are the worst case, of which no drafter can learn anything.
- adaptive over the drafter's own number of drafts, and over the best width of the sweep. The best
  is chosen after the fact, by the same times, so this errs against adaptive.

    python docs/benchmarks/never_slower.py ngram=demo-qwen3 demo-qwen3-dflash=demo-qwen3 \
        demo-qwen3-draft=demo-qwen3 mtp=demo-qwen3_5 --batches 1,8 --minutes 8 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen

from specdec import bind_target, load_model
from specdec.bench import built_in, compare
from specdec.bench.report import machine
from specdec.errors import SpecdecError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.bench import Result


@frozen
class Over:
    """Ratios of one run to another on the same prompts.

    Attributes:
        median: of the ratios.
        low: their first quartile.
        high: their third quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Result, theirs: Result) -> Over | None:
        """Turn by turn; ``None`` where one of them did not run."""
        pairs = list(zip(ours.turns, theirs.turns, strict=False))
        ratios = [a.speed / b.speed for a, b in pairs]
        if not ratios:
            return None
        spread = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ()
        low, high = (spread[0], spread[2]) if spread else (ratios[0], ratios[0])
        return cls(statistics.median(ratios), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


def judged(results: Sequence[Result]) -> dict[str, Any]:
    """The figures of one drafter on one prompt set at one batch size.

    Args:
        results: plain, adaptive, the drafter's own width, the sweep.
    """
    plain, adaptive, *fixed = results
    found: dict[str, Any] = {
        "prompt_set": plain.prompt_set,
        "batch": plain.batch,
        "turns": len(plain.turns),
        "plain_tokens_per_second": plain.tokens_per_second,
        "over_plain": Over.of(adaptive, plain),
        "over_default": Over.of(adaptive, fixed[0]) if fixed else None,
        "default_width": fixed[0].width if fixed else None,
        "acceptance": adaptive.acceptance_rate,
        "widths": adaptive.widths,
        "differing": sum(result.differing for result in results),
        "error": next((result.error for result in results if result.error), None),
        "fixed_over_plain": {r.width: r.ratio for r in fixed},
    }
    ran = [result for result in fixed if result.ratio is not None]
    if ran:
        best = max(ran, key=lambda result: result.ratio or 0.0)
        found |= {"best_width": best.width, "over_best": Over.of(adaptive, best)}
    return found


def line(drafter: str, model: str, found: Mapping[str, Any]) -> str:
    """The figures in a line."""
    where = f"{drafter} on {model}, {found['prompt_set']}, batch {found['batch']}"
    if found["error"]:
        return f"{where}: failed: {found['error']}"
    rate = found["acceptance"]
    parts = [
        f"over plain {found['over_plain']}",
        f"over @{found['default_width']} (default) {found['over_default']}",
        f"over @{found.get('best_width')} (best) {found.get('over_best')}",
        "nothing accepted" if rate is None else f"accepted {100 * rate:.0f}%",
        f"{found['turns']} turns",
    ]
    if found["widths"]:
        total = sum(found["widths"].values())
        shares = [f"{width}: {100 * n / total:.0f}%" for width, n in found["widths"].items()]
        parts.append(f"rounds by drafts {', '.join(shares)}")
    if found["differing"]:
        parts.append(f"{found['differing']} texts differ")
    return f"{where}: {'; '.join(parts)}"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", metavar="DRAFTER=MODEL")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", default="random,prose,chat,code,copy-heavy")
    parser.add_argument("--limit", type=int, help="use the first prompts of each set only")
    parser.add_argument("--widths", default="1,2,4,8", help="the sweep; none for no sweep")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="of each result at least")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it, about")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def one(
    asked: argparse.Namespace, pair: tuple[str, str], prompt_set: str, batch: int, seconds: float
) -> dict[str, Any]:
    """One drafter on one prompt set at one batch size."""
    drafter, name = pair
    model, tokenizer = loaded(name, asked.dtype)
    vocabulary = bind_target(model, tokenizer).vocab_size
    sweep = [] if asked.widths == "none" else [int(width) for width in asked.widths.split(",")]
    results = compare(
        model,
        tokenizer,
        {prompt_set: built_in(prompt_set, tokenizer, vocabulary, limit=asked.limit)},
        drafters=[drafter],
        widths=[None, "default", *sweep],
        batches=[batch],
        max_tokens=asked.tokens,
        turns=asked.turns,
        warmup=asked.warmup,
        phase_turns=0,
        max_seconds=seconds,
    )
    return {"drafter": drafter, "model": name, **judged(results)}


@cache
def loaded(name: str, dtype: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    model, tokenizer = load_model(name)
    if dtype:
        model.set_dtype(getattr(mx, dtype))
    return model, tokenizer


def main() -> None:
    """Compare, a line each, and one JSON object at the end."""
    asked = arguments()
    pairs = [pair.rpartition("=")[::2] for pair in asked.pairs]
    batches = [int(batch) for batch in asked.batches.split(",")]
    for _, name in pairs:
        loaded(name, asked.dtype)
    end, everything = time.perf_counter() + 60 * asked.minutes, []
    # Random tokens of all drafters before anything else, since they are the claim.
    work = [(s, b, pair) for s in asked.prompts.split(",") for b in batches for pair in pairs]
    for done, (prompt_set, batch, pair) in enumerate(work):
        left = (end - time.perf_counter()) / (len(work) - done)
        if left <= 0:
            print(f"out of time: {len(work) - done} results are missing", flush=True)
            break
        try:
            found = one(asked, pair, prompt_set, batch, left)
        except SpecdecError as error:
            print(f"{pair[0]} on {pair[1]}: {one_line(error)}", flush=True)
            continue
        print(line(pair[0], pair[1], found), flush=True)
        everything.append(found)
    text = json.dumps(
        {"machine": machine(), "asked": vars(asked), "results": everything},
        default=lambda over: [over.median, over.low, over.high],
    )
    print(text)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
