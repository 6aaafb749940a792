"""What a head's steps cost beside its target: random weights of a real shape.

Times, interleaved: a chain of drafts with the target's whole vocabulary head and with a part of
it; and a round (the chain, a verify window, rollback and commit) beside plain steps of the target.
Drafts of random weights are rejected, so this is what a round costs and not what it gives.

    python docs/benchmarks/mtp_cost.py --hidden 2560 --layers 8 --bits 4 --depth 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import qwen3_5

from specdec.contract import Greedy, Listed
from specdec.drafting.modules import Packing
from specdec.targets import MlxLmTarget
from specdec_mtp.build import quantize_head
from specdec_mtp.find import HeadKind
from specdec_mtp.tiny import tiny_head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import Selection


class Draws:
    """Greedy rows, over all ids or over some."""

    rejecting = False

    def __init__(self, ids: tuple[int, ...] | None) -> None:
        self._listed = None
        if ids is not None:
            index = mx.array(ids, mx.int32)
            self._listed = Listed(
                ids,
                lambda logits, _steps: index[mx.argmax(logits, axis=-1)],
                lambda logits, _steps: logits,
            )

    @property
    def selection(self) -> Selection:
        """Whatever the rows are."""
        return self._listed or Greedy()

    def sample(self, logprobs: mx.array, _steps: Sequence[int]) -> mx.array:
        """The most probable id."""
        return mx.argmax(logprobs, axis=-1)

    def log_distribution(self, logprobs: mx.array, _steps: Sequence[int]) -> mx.array:
        """Not asked for."""
        return logprobs


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def config_of(asked: argparse.Namespace) -> dict[str, Any]:
    """A text config with Qwen3.5's proportions."""
    return {
        "model_type": "qwen3_5",
        "hidden_size": asked.hidden,
        "intermediate_size": 4 * asked.hidden,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": asked.hidden // 160,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": asked.vocab,
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }


def median(times: list[float]) -> float:
    """Milliseconds."""
    return 1e3 * statistics.median(times)


def rows_of(target: MlxLmTarget, tokens: mx.array) -> Any:
    """Rows of the target that have read ``tokens`` ``[B, L]``."""
    states = []
    for row in range(tokens.shape[0]):
        state = target.new_state()
        state.begin_round(tokens.shape[1], reading=True)
        target.forward(tokens[row : row + 1], state)
        state.commit_round()
        mx.eval(state.arrays())
        states.append(state)
    first = states.pop(0)
    first.prepare_append(states).commit()
    return first


def main() -> None:
    """Build, time and print."""
    asked = arguments()
    config = config_of(asked)
    mx.random.seed(0)
    args = qwen3_5.ModelArgs(model_type="qwen3_5", text_config=dict(config))
    model = qwen3_5.Model(args)
    model.set_dtype(mx.bfloat16)
    quantize(model, 64, asked.bits)
    mx.eval(model.parameters())
    target = MlxLmTarget(model)
    listed = tuple(range(int(asked.share * asked.vocab)))
    ways: dict[str, Any] = {}
    for name, ids in (("whole", None), ("listed", listed)):
        provider = tiny_head(HeadKind.MTP, ids=ids, config=config)
        assert provider.module is not None
        provider.module.set_dtype(mx.bfloat16)
        quantize_head(HeadKind.MTP, provider.module, Packing(asked.bits))
        ways[name] = provider, Draws(ids)

    batch, tokens = asked.batch, mx.zeros((asked.batch, asked.context), mx.int32)
    hidden = mx.random.normal((batch, asked.context, asked.hidden)).astype(mx.bfloat16)
    window = mx.random.normal((batch, 1 + asked.depth, asked.hidden)).astype(mx.bfloat16)
    groups = {}
    for name, (provider, draws) in ways.items():
        prefill = provider.grouped.open_prefill(target=target, checkpoints=[None] * batch)
        prefill.prefill(tokens, hidden)
        checkpoints = [prefill.capture(row) for row in range(batch)]
        groups[name] = provider.grouped.open(target=target, sampling=draws, checkpoints=checkpoints)

    def chain(group: Any) -> None:
        steps = [0] * batch
        proposal = group.draft_device([1] * batch, [asked.depth] * batch, steps)
        mx.eval(proposal.tokens)
        proposal.resolve([0] * (batch * asked.depth))
        group.commit([0] * batch, window)

    state = rows_of(target, tokens)

    def verify(width: int) -> None:
        state.begin_round(width)
        logits = target.forward(mx.ones((batch, width), mx.int32), state).logits
        mx.eval(mx.argmax(logits, axis=-1))
        state.rollback([1] * batch)

    timed: dict[str, Callable[[], None]] = {
        f"chain of {asked.depth}, whole head": lambda: chain(groups["whole"]),
        f"chain of {asked.depth}, {asked.share:.0%} of it": lambda: chain(groups["listed"]),
        "plain step": lambda: verify(1),
        f"verify window of {1 + asked.depth}": lambda: verify(1 + asked.depth),
    }
    times: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(asked.repeats + 3):
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            if repeat >= 3:
                times[name].append(time.perf_counter() - start)
    for name, each in times.items():
        print(f"batch {batch}: {name}: {median(each):.2f} ms (fastest {1e3 * min(each):.2f})")


if __name__ == "__main__":
    main()
