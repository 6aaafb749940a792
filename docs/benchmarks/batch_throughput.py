"""Aggregate tokens per second of batches, beside mlx-lm's own batch generator in the same run.

For each batch size, in turn and interleaved: mlx-lm's ``BatchGenerator``, ours plain, ours with a
drafter. All requests are inserted at once; as many decode at a time as the batch size says. Tokens
per second are generated tokens over the wall time of the whole run, prompts included, and over the
time without the prompts. Prints medians, ratios to mlx-lm, and how many texts are mlx-lm's own.

    python docs/benchmarks/batch_throughput.py --batches 1,4,8 --requests 16 --tokens 48
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import define, field
from mlx_lm.generate import BatchGenerator as MlxLmBatchGenerator
from mlx_lm.models import qwen3

from specdec import BatchGenerator, load_drafter, load_model
from specdec.cli.bench import read_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    Texts = dict[int, list[int]]


@define
class Times:
    """Tokens per second of one way to run, over the repeats."""

    whole: list[float] = field(factory=list)
    decoding: list[float] = field(factory=list)
    texts: Texts = field(factory=dict)
    tokens_per_round: float = 1.0


def run(generator: Any, prompts: Sequence[list[int]], times: Times) -> None:
    """One run to the end; every request's tokens are kept."""
    mx.synchronize()
    start = time.perf_counter()
    with generator.stats() as stats:
        uids = generator.insert(prompts)
        texts: Texts = {uid: [] for uid in uids}
        left = set(uids)
        while left:
            for response in generator.next_generated():
                texts[response.uid].append(response.token)
                if response.finish_reason is not None:
                    left.discard(response.uid)
    count = sum(map(len, texts.values()))
    wall = time.perf_counter() - start
    times.whole.append(count / wall)
    times.decoding.append(count / (wall - stats.prompt_time))
    times.texts = {uid - uids[0]: text for uid, text in texts.items()}
    rounds = getattr(stats, "rounds", 0)
    if rounds:
        times.tokens_per_round = stats.emitted / rounds


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-qwen3")
    parser.add_argument("--prompts", default="demo", help="a bundled prompt file: demo, demo-copy")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--num-draft-tokens", type=int)
    parser.add_argument(
        "--layers", type=int, help="random weights of the Qwen3-8B shape, with so many layers"
    )
    return parser.parse_args()


def random_model(layers: int) -> Any:
    """A Qwen3-8B shape in bfloat16 with random weights."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def main() -> None:
    """Time each way and print the table."""
    asked = arguments()
    model, tokenizer = load_model(asked.model)
    if asked.layers:
        model = random_model(asked.layers)
    prompts = [tokenizer.encode(text) for text in read_prompts(asked.prompts, asked.requests)]
    stops = [[token] for token in tokenizer.eos_token_ids]
    drafter = load_drafter(asked.drafter, model, tokenizer, num_draft_tokens=asked.num_draft_tokens)
    ways = ("mlx-lm", "plain", asked.drafter)
    for batch in map(int, asked.batches.split(",")):
        times = {way: Times() for way in ways}
        for repeat in range(asked.repeats + 1):
            for way in ways:
                options: dict[str, Any] = {
                    "max_tokens": asked.tokens,
                    "stop_tokens": stops,
                    "completion_batch_size": batch,
                    "prefill_batch_size": min(batch, 8),
                }
                if way == "mlx-lm":
                    generator: Any = MlxLmBatchGenerator(model, **options)
                else:
                    generator = BatchGenerator(
                        model, drafter=drafter if way == asked.drafter else None, **options
                    )
                run(generator, prompts, times[way])
                generator.close()
                if repeat == 0:  # shapes are compiled and buffers are made
                    times[way] = Times()
        base = times["mlx-lm"]
        for way in ways:
            mine = times[way]
            ratios = [a / b for a, b in zip(mine.decoding, base.decoding, strict=True)]
            same = sum(text == base.texts[uid] for uid, text in mine.texts.items())
            print(
                f"batch {batch:2d}  {way:8s} {statistics.median(mine.whole):7.1f} tokens/s with "
                f"prompts, {statistics.median(mine.decoding):7.1f} without; "
                f"{statistics.median(ratios):.2f} of mlx-lm ({min(ratios):.2f}-{max(ratios):.2f}); "
                f"{mine.tokens_per_round:.2f} tokens per round and row; "
                f"{same} of {len(base.texts)} texts as mlx-lm's",
                flush=True,
            )


if __name__ == "__main__":
    main()
