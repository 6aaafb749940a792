"""What it costs to drop a part of a verify window.

Two states of the same rows go through rounds of one width in turn: one keeps every window whole,
the other a part of it, ragged where there are several rows. A round is begun, forwarded, its best
tokens are read on the host, and it is ended; what a rollback leaves to the device is computed with
the state's next round and counts there. Prints medians and the ratio of both.

    python docs/benchmarks/rollback_cost.py --shape demo-qwen3_5 --batch 1 --context 512
    python docs/benchmarks/rollback_cost.py --shape qwen3-8b --batch 8 --context 1024,8192,32768
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.models import load_model
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.state import RowState

USUAL = {"rms_norm_eps": 1e-6, "max_position_embeddings": 65536, "rope_theta": 1e6}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    "gemma3-small": {
        "model_type": "gemma3_text",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "intermediate_size": 1024,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
        "sliding_window": 256,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 12288,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248320,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": False,
            **USUAL,
        },
    },
}


def build(shape: str) -> Any:
    """A model of a shape with random weights in bfloat16, or a bundled or local one."""
    if shape not in SHAPES:
        model, _ = load_model(shape)
        return model
    config = {**USUAL, **SHAPES[shape]}
    held = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = held.Model(held.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def rows_of(target: MlxLmTarget, batch: int, context: int) -> RowState:
    """Rows that have read random ids, each a little more than the one before."""
    states = []
    for row in range(batch):
        state, left = target.new_state(), context + 3 * row
        while left:
            width = min(left, 2048)
            ids = mx.random.randint(0, target.vocab_size, (1, width))
            state.begin_round(width, reading=True)
            target.forward(ids, state)
            state.commit_round()
            mx.eval(state.arrays())
            left -= width
        states.append(state)
    states[0].prepare_append(states[1:]).commit()
    mx.eval(states[0].arrays())
    return states[0]


def a_round(
    target: MlxLmTarget, state: RowState, width: int, kept: Sequence[int], *, bare: bool = False
) -> float:
    """Seconds of one round; a bare one could not be dropped in part."""
    ids = mx.random.randint(0, target.vocab_size, (state.row_count, width))
    mx.eval(ids)
    begun = time.perf_counter()
    state.begin_round(width, reading=bare)
    best = mx.argmax(target.forward(ids, state).logits, axis=-1)
    best.tolist()
    state.rollback(list(kept))
    return time.perf_counter() - begun


def measure(
    target: MlxLmTarget, *, batch: int, context: int, width: int, rounds: int
) -> dict[str, Any]:
    """Medians of rounds that keep all and of rounds that keep a part, in turn."""
    bare, whole, part = (rows_of(target, batch, context) for _ in range(3))
    kept = [1 + row % (width - 1) for row in range(batch)]
    times: dict[str, list[float]] = {"bare": [], "whole": [], "part": []}
    for _ in range(rounds + 5):
        if batch == 1:  # as a prompt's chunks are read
            times["bare"].append(a_round(target, bare, width, [width], bare=True))
        times["whole"].append(a_round(target, whole, width, [width] * batch))
        times["part"].append(a_round(target, part, width, kept))
    medians = {name: statistics.median(taken[5:] or [0.0]) for name, taken in times.items()}
    return {
        "batch": batch,
        "context": context,
        "width": width,
        "bare_ms": round(1e3 * medians["bare"], 3) or None,
        "whole_ms": round(1e3 * medians["whole"], 3),
        "part_ms": round(1e3 * medians["part"], 3),
        "ratio": round(medians["part"] / medians["whole"], 3),
    }


def numbers(text: str) -> list[int]:
    """A list of numbers, comma-separated."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Measure and print one JSON object per setting."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="demo", help=f"a model, or one of {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--context", type=numbers, default=[512])
    parser.add_argument("--width", type=numbers, default=[4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--ways", default="steps", help="steps, replay: how recurrent state is found again"
    )
    args = parser.parse_args()
    target = MlxLmTarget(build(args.shape))
    for ways in args.ways.split(","):
        target.recurrence.keep_steps = ways == "steps"
        for batch in args.batch:
            for context in args.context:
                for width in args.width:
                    found = measure(
                        target, batch=batch, context=context, width=width, rounds=args.rounds
                    )
                    print(json.dumps({"shape": args.shape, "ways": ways, **found}), flush=True)


if __name__ == "__main__":
    main()
