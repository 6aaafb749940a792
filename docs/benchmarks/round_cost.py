"""What a verify round costs over the bare forward of its window.

Builds a target, fills its rows with random context, and times in turn: mlx-lm's own forward over
``[B, W]`` tokens on its own cache, and a whole round (draft, window, forward, draw, host read,
accept, deliver, commit) of the same width, with a drafter that proposes fixed tokens, on the host
and on the device, with rows of one length and with ragged rows. Prints medians and ratios.

    python docs/benchmarks/round_cost.py --shape demo --batch 1 --widths 1,4,8 --context 512
    python docs/benchmarks/round_cost.py --shape qwen3-8b --batch 8 --widths 1,4,8 --context 512
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from specdec import Request, SamplingOptions, VerifyGroup
from specdec.contract import (
    Attachment,
    ContextKind,
    DeviceProposal,
    PrefillMode,
    RowCheckpoint,
    Swap,
)
from specdec.models import load_model
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import PendingChange

SHAPES = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}


class FixedRows:
    """Proposes the same tokens whatever was read; costs nothing itself."""

    namespace = "fixed"
    tap_layers: tuple[int, ...] = ()
    context = ContextKind.NONE
    prefill_mode = PrefillMode.TAIL_SPLIT

    def __init__(self, rows: int, *, on_device: bool, silent: bool) -> None:
        self.row_count = rows
        self.on_device = on_device
        self.silent = silent

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None]) -> PendingChange:
        def grow() -> None:
            self.row_count += len(checkpoints)

        return Swap(grow)

    def filter_rows(self, keep: Sequence[int]) -> None:
        self.row_count = len(keep)

    def capture(self, row: int) -> RowCheckpoint:
        return RowCheckpoint(
            namespace="fixed", processed_tokens=row * 0, attachment=Attachment(schema="fixed-v1")
        )

    def close(self) -> None: ...

    def prefill(self, tokens: mx.array, context: mx.array | None) -> None: ...

    def materialize(self) -> None: ...

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> list[list[int]]:
        return [[1] * (0 if self.silent else depth) for depth in depths]

    def draft_device(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int]
    ) -> DeviceProposal | None:
        if not self.on_device:
            return None
        depth = max(depths)
        return DeviceProposal(
            mx.ones((len(pending), depth), mx.uint32),
            lambda flat: [list(flat[i : i + depth]) for i in range(0, len(flat), depth)],
        )

    def commit(self, accepted: Sequence[int], context: mx.array | None) -> None: ...


class FixedProvider:
    """Provider and factory of :class:`FixedRows`."""

    id = "fixed"
    weight_bytes = 0
    checkpoint_namespace = "fixed"
    supports_adapters = True

    def __init__(self, *, on_device: bool, silent: bool) -> None:
        self.on_device = on_device
        self.silent = silent

    @property
    def grouped(self) -> FixedProvider:
        return self

    def _rows(self, count: int) -> FixedRows:
        return FixedRows(count, on_device=self.on_device, silent=self.silent)

    def open_prefill(self, *, target: Any, checkpoints: Sequence[Any]) -> FixedRows:
        return self._rows(len(checkpoints))

    def open(
        self, *, target: Any, sampling: Any, checkpoints: Sequence[Any], constraints: Any = None
    ) -> FixedRows:
        return self._rows(len(checkpoints))

    def close(self) -> None: ...


def build(shape: str, dtype: mx.Dtype) -> Any:
    """A model of a shape with random weights, or the demo model."""
    if shape == "demo":
        model, _ = load_model("demo")
    else:
        args = {
            "model_type": "qwen3",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            **SHAPES[shape],
        }
        model = qwen3.Model(qwen3.ModelArgs.from_dict(args))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def prompt(length: int, row: int, vocab: int) -> tuple[int, ...]:
    """Some ids; never the ones that the fixed drafter proposes."""
    return tuple(2 + (17 * i + 31 * row) % (vocab - 2) for i in range(length))


def bare(model: Any, batch: int, width: int, context: int, vocab: int) -> Callable[[], float]:
    """One forward of the window on mlx-lm's own cache, evaluated."""
    cache = make_prompt_cache(model)
    for start in range(0, context, 2048):
        ids = [prompt(context, row, vocab)[start : start + 2048] for row in range(batch)]
        model(mx.array(ids), cache=cache)
        mx.eval([c.state for c in cache])
    window = mx.array([prompt(width, row, vocab) for row in range(batch)])

    def run() -> float:
        start = time.perf_counter()
        mx.eval(model(window, cache=cache))
        elapsed = time.perf_counter() - start
        for c in cache:
            c.trim(width)
        return elapsed

    return run


def whole(
    target: MlxLmTarget, batch: int, width: int, context: int, *, device: bool, ragged: bool
) -> Callable[[], float]:
    """One round of the executor at that width."""
    # At width 1 the drafter proposes nothing: depth 0, with the drafter kept in step.
    provider = FixedProvider(on_device=device, silent=width == 1)
    group = VerifyGroup(target, provider, drafter="fixed")
    lengths = [context - 7 * row * ragged for row in range(batch)]
    requests = [
        Request(
            prompt=prompt(length + 1, row, target.vocab_size),
            sampling=SamplingOptions(),
            max_tokens=-1,
            num_draft_tokens=max(1, width - 1),
        )
        for row, length in enumerate(lengths)
    ]
    for request in requests:
        group.admit([request])

    def run() -> float:
        start = time.perf_counter()
        with group.round() as verified:
            verified.deliver_all()
        return time.perf_counter() - start

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="demo", choices=("demo", *SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--widths", default="1,4,8")
    parser.add_argument("--context", default="512")
    parser.add_argument("--repeat", type=int, default=30)
    args = parser.parse_args()
    model = build(args.shape, getattr(mx, args.dtype))
    target = MlxLmTarget(model)
    for context in map(int, args.context.split(",")):
        for batch in map(int, args.batch.split(",")):
            for width in map(int, args.widths.split(",")):
                measure(model, target, batch=batch, width=width, context=context, n=args.repeat)


def measure(
    model: Any, target: MlxLmTarget, *, batch: int, width: int, context: int, n: int
) -> None:
    """Time one cell: bare forward and rounds, in turn."""
    runs = {"bare": bare(model, batch, width, context, target.vocab_size)}
    kinds = [("host", False, False)]
    if width > 1:
        kinds.append(("device", True, False))
    if batch > 1:
        kinds.append(("ragged", False, True))
    for name, device, ragged in kinds:
        runs[name] = whole(target, batch, width, context, device=device, ragged=ragged)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(n + 3):
        for name, run in runs.items():
            elapsed = run()
            if turn >= 3:
                times[name].append(elapsed)
    base = statistics.median(times["bare"])
    row: dict[str, Any] = {"context": context, "batch": batch, "width": width}
    row["bare_ms"] = round(base * 1e3, 3)
    for name in list(runs)[1:]:
        pairs = [t / b for t, b in zip(times[name], times["bare"], strict=True)]
        row[f"{name}_ms"] = round(statistics.median(times[name]) * 1e3, 3)
        row[f"{name}_ratio"] = round(statistics.median(pairs), 3)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
