"""How much of what simulated acceptance allows is reached, at the shape of Qwen3-8B in bfloat16.

Weights are random, but what each token is followed by is certain: attention and feed-forward add
little to the residual stream, and the head's row of a token is another token's embedding. So no
two logits are nearly tied, the text is the same whatever the width of a window, and the simulated
acceptance stays what it was set to. What the products cost does not depend on the values.

Per batch and acceptance, for specdec's own choice of drafts and for fixed widths: tokens per second
of all rows, over plain; v, d, o and host in milliseconds per round; the bound E / (v + d + o) and
the share of it that was reached (docs/benchmarking.md says how each is measured).

    python docs/benchmarks/qwen3_8b_shape.py --batches 1,4,8 --acceptance 0.5,0.8,0.95 --minutes 8
    python docs/benchmarks/qwen3_8b_shape.py --tiny --tokens 16 --prompts 2 --minutes 1
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3

from specdec.bench import Simulated, compare, random_prompts
from specdec.bench.report import as_json

if TYPE_CHECKING:
    from specdec.bench import Result

_SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
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
_TINY = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}


def shaped_model(tiny: bool, bits: int | None) -> Any:
    """A model of the shape whose texts are certain.

    Args:
        tiny: whether a small one will do.
        bits: to quantize the weights to, in groups of 64; ``None`` for bfloat16.
    """
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict({**_SHAPE, **(_TINY if tiny else {})}))
    model.set_dtype(mx.bfloat16)
    vocabulary, hidden = model.model.embed_tokens.weight.shape
    embedding = mx.random.normal((vocabulary, hidden)).astype(mx.bfloat16)
    model.model.embed_tokens.weight = embedding
    # A token's row is the embedding of the one before it, so i is followed by i + 1: its logit is
    # in proportion to the hidden size H, all others' to the root of H.
    model.lm_head.weight = mx.take(embedding, mx.arange(vocabulary) - 1, axis=0) * 0.1
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0.02
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.02
    mx.eval(model.parameters())
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)  # type: ignore[attr-defined]  # MLX's stubs
        mx.eval(model.parameters())
    return model


def line(result: Result) -> str:
    """The figures of a run in a line."""
    where = f"batch {result.batch}, {result.label}"
    seen, spread = result.phases, result.quartiles
    if result.error is not None or seen is None or spread is None:
        return f"{where}: {result.error or 'nothing ran'}"
    rate = result.acceptance_rate
    widths = ", ".join(f"{width}: {n}" for width, n in result.widths.items())
    return (
        f"{where}: {result.tokens_per_second:.1f} tokens/s, over plain {result.ratio:.3f} "
        f"({spread[0]:.2f}-{spread[1]:.2f}); E {seen.tokens_per_round:.2f}, "
        f"v {seen.per_round(seen.verify):.2f} d {seen.per_round(seen.draft):.2f} "
        f"o {seen.per_round(seen.rollback):.2f} host {seen.per_round(seen.host):.2f} ms; "
        f"bound {seen.bound:.1f}, share {result.share:.3f} "
        f"({min(result.shares):.2f}-{max(result.shares):.2f})"
        + ("" if rate is None else f"; accepted {100 * rate:.0f}%")
        + (f"; rounds by drafts {widths}" if widths else "")
        + (f"; {result.differing} texts differ" if result.differing else "")
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--acceptance", default="0.5,0.8,0.95")
    parser.add_argument("--widths", default="1,3,7", help="fixed widths; none for none")
    parser.add_argument("--most", type=int, default=8, help="drafts a round at most")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it, about")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantize the weights")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--json", help="write all figures to this file")
    return parser.parse_args()


def main() -> None:
    """Run it, a line per result, and one JSON object at the end."""
    asked = arguments()
    model = shaped_model(asked.tiny, asked.bits)
    sweep = [] if asked.widths == "none" else [int(width) for width in asked.widths.split(",")]
    vocabulary = model.args.vocab_size
    prompts = random_prompts(vocabulary, count=asked.prompts, length=asked.context)
    results = compare(
        model,
        None,
        {"random": prompts},
        batches=[int(batch) for batch in asked.batches.split(",")],
        widths=[None, *sweep],
        simulate=[Simulated(float(a), drafts=asked.most) for a in asked.acceptance.split(",")],
        max_tokens=asked.tokens,
        warmup=asked.warmup,
        phase_turns=asked.prompts,
        rehearse=False,  # no two tokens are nearly tied
        max_seconds=60 * asked.minutes,
        told=lambda result: print(line(result), flush=True),
    )
    text = json.dumps(as_json(results, [], asked=vars(asked)))
    print(text)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
