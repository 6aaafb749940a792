"""What a block drafter costs beside its target: random weights of a Qwen3-8B shape.

For each context length and batch size, interleaved: a plain step of the target, a verify window,
the draft alone, and a whole round (project what was accepted, draft, verify, roll back) in one
evaluation. A round less its verify window is what the drafter adds. Drafts of random weights are
rejected, so this is what a round costs and not what it gives.

    python docs/benchmarks/block_cost.py --contexts 1024,4096,16384 --batches 1,8
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve
from batch_throughput import random_model
from mlx.nn.layers.quantized import quantize
from mtp_cost import Draws, rows_of

from specdec.contract import ContextKind
from specdec.drafting.modules import parameters_of, without_drawing
from specdec.targets import MlxLmTarget
from specdec_dflash.config import BlockConfig, Rope, Style
from specdec_dflash.loading import provider_of
from specdec_dflash.method import Drafting
from specdec_dflash.model import BlockModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.drafting import ProjectedProvider

_CHUNK = 2048

PUBLISHED = BlockConfig(
    style=Style.QWEN,
    hidden_size=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    eps=1e-6,
    rope=Rope(1e6, max_positions=40960),
    windows=(None,) * 5,
    causal=(False,) * 5,
    block_size=16,
    from_anchor=False,
    mask_token=151669,
    taps=(1, 9, 17, 25, 33),
    target_layers=36,
)
"""The sizes of a published drafter of Qwen3-8B."""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--contexts", default="1024,4096,16384")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--accepted", type=int, default=4)
    parser.add_argument("--window", type=int, help="of every layer of the drafter")
    parser.add_argument("--bits", type=int, default=0, help="of the target")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--draft-only",
        action="store_true",
        help="the drafter's share of a round beside its bare attention, without the target",
    )
    return parser.parse_args()


def drafter_of(asked: argparse.Namespace) -> ProjectedProvider:
    """A drafter with random weights in bfloat16."""
    taps = [round(1 + at * (asked.layers - 4) / 4) for at in range(5)]
    config = evolve(PUBLISHED, taps=taps, target_layers=asked.layers)
    if asked.window:
        config = evolve(config, windows=(asked.window,) * 5)
    with without_drawing():
        model: Any = BlockModel(config, own_embedding=False, own_head=False)
    model.set_dtype(mx.bfloat16)
    model.eval()
    mx.eval(parameters_of(model))
    return provider_of("block-cost", config, model, Drafting(), None)


def prefilled(provider: ProjectedProvider, target: MlxLmTarget, batch: int, context: int) -> Any:
    """Rows of the drafter that have read so many positions of random hidden states."""
    features = len(PUBLISHED.taps) * PUBLISHED.hidden_size
    group = provider.grouped.open_prefill(target=target, checkpoints=[None])
    for start in range(0, context, _CHUNK):
        count = min(_CHUNK, context - start)
        hidden = mx.random.normal((1, count, features)).astype(mx.bfloat16)
        group.prefill(mx.zeros((1, count), mx.int32), hidden)
    row = group.capture(0)
    sampling: Any = Draws(None)
    return provider.grouped.open(target=target, sampling=sampling, checkpoints=[row] * batch)


def states(target: MlxLmTarget, batch: int, context: int) -> Any:
    """Rows of the target that have read so many positions."""
    state = rows_of(target, mx.zeros((batch, min(context, _CHUNK)), mx.int32))
    for start in range(_CHUNK, context, _CHUNK):
        count = min(_CHUNK, context - start)
        state.begin_round(count)
        target.forward(mx.zeros((batch, count), mx.int32), state)
        state.commit_round()
        mx.eval(state.arrays())
    return state


def timed(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 3):
        for name, call in calls.items():
            mx.synchronize()
            start = time.perf_counter()
            call()
            mx.synchronize()
            if repeat >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def measure(
    asked: argparse.Namespace,
    target: MlxLmTarget,
    provider: ProjectedProvider,
    sizes: Sequence[int],
) -> None:
    """One batch size at one context length."""
    batch, context = sizes
    depth, kept = asked.depth, 1 + asked.accepted
    group, state = prefilled(provider, target, batch, context), states(target, batch, context)
    taps = provider.grouped.target_tap_layers(target)
    pending, depths, steps = [1] * batch, [depth] * batch, [0] * batch
    zeros = mx.zeros((batch, 1 + depth, 5 * PUBLISHED.hidden_size), mx.bfloat16)
    window = mx.ones((batch, 1 + depth), mx.int32)

    def verify(tokens: mx.array) -> Any:
        state.begin_round(tokens.shape[1])
        return target.forward(tokens, state, ContextKind.TAPS, taps)

    def plain() -> None:
        state.begin_round(1)
        mx.eval(mx.argmax(target.forward(window[:, :1], state).logits, axis=-1))
        state.rollback([0] * batch)

    def window_alone() -> None:
        done = verify(window)
        mx.eval(mx.argmax(done.logits, axis=-1), done.context)
        state.rollback([0] * batch)

    def draft_alone() -> None:
        proposal = group.draft_device(pending, depths, steps)
        mx.eval(proposal.tokens)
        proposal.resolve([0] * (batch * depth))
        group.commit([0] * batch, zeros)

    def whole_round() -> None:
        proposal = group.draft_device(pending, depths, steps)
        done = verify(mx.concatenate([window[:, :1], proposal.tokens], axis=1))
        ids = mx.concatenate([proposal.tokens, mx.argmax(done.logits, axis=-1)], axis=1)
        ids.tolist()
        proposal.resolve([0] * (batch * depth))
        state.rollback([kept] * batch)
        group.commit([asked.accepted] * batch, done.context)

    found = timed(
        {
            "plain step": plain,
            f"window of {1 + depth}": window_alone,
            "draft": draft_alone,
            "round": whole_round,
        },
        asked.repeats,
    )
    group.close()
    report(f"batch {batch} context {context}", found)


def report(where: str, found: dict[str, float]) -> None:
    """One line of what :func:`measure` timed."""
    step, verified, drafted, whole = found.values()
    print(
        f"{where}: "
        + ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
        + f"; draft / window {drafted / verified:.2f}, round less window {whole - verified:.2f} ms"
        + f" ({(whole - verified) / step:.2f} plain steps)",
        flush=True,
    )


def measure_draft(
    asked: argparse.Namespace,
    target: MlxLmTarget,
    provider: ProjectedProvider,
    sizes: Sequence[int],
) -> None:
    """The drafter's share of a round, and attention of its shape over a context of that length."""
    batch, context = sizes
    depth, features = asked.depth, 5 * PUBLISHED.hidden_size
    group = prefilled(provider, target, batch, context)
    hidden = mx.random.normal((batch, 1 + depth, features)).astype(mx.bfloat16)
    heads, size = PUBLISHED.heads, PUBLISHED.head_dim
    keys = mx.random.normal((batch, PUBLISHED.kv_heads, context, size)).astype(mx.bfloat16)
    queries = mx.random.normal((batch, heads, 1 + depth, size)).astype(mx.bfloat16)
    mx.eval(hidden, keys, queries)

    def share() -> None:
        proposal = group.draft_device([1] * batch, [depth] * batch, [0] * batch)
        mx.eval(proposal.tokens)
        proposal.resolve([0] * (batch * depth))
        group.commit([asked.accepted] * batch, hidden)

    def attention() -> None:
        attend = mx.fast.scaled_dot_product_attention
        mx.eval([attend(queries, keys, keys, scale=1.0) for _ in PUBLISHED.windows])

    found = timed({"share of a round": share, "attention alone": attention}, asked.repeats)
    words = ", ".join(f"{name} {value:.2f} ms" for name, value in found.items())
    print(f"batch {batch} context {context}: {words}", flush=True)
    group.close()


def main() -> None:
    """Build, time and print."""
    asked = arguments()
    model = random_model(asked.layers)
    if asked.bits:
        quantize(model, 64, asked.bits)
    mx.eval(model.parameters())
    target = MlxLmTarget(model)
    provider = drafter_of(asked)
    for batch in map(int, asked.batches.split(",")):
        for context in map(int, asked.contexts.split(",")):
            how = measure_draft if asked.draft_only else measure
            how(asked, target, provider, (batch, context))


if __name__ == "__main__":
    main()
