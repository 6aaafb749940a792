"""What rows of sliding windows hold over a long text.

One or more rows of a model with sliding windows go through rounds of one width, each dropped in
part, long past the wrap. Prints the bytes of the window layers and MLX's active memory as it goes.

    python docs/benchmarks/window_memory.py --shape gemma3-4b --tokens 10000 --batch 1
"""

from __future__ import annotations

import argparse
import json

import mlx.core as mx
from rollback_cost import build, numbers, rows_of

from specdec.state import RaggedState
from specdec.state.windows import WindowRows
from specdec.targets import MlxLmTarget


def main() -> None:
    """Run, and print one JSON object per thousand tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", default="gemma3-4b")
    parser.add_argument("--batch", type=numbers, default=[1])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=4)
    args = parser.parse_args()
    target = MlxLmTarget(build(args.shape))
    for batch in args.batch:
        state = rows_of(target, batch, 1500)
        assert isinstance(state, RaggedState)
        start, shown = min(state.lengths), 0
        kept = [args.width - row % 2 for row in range(batch)]
        while (done := min(state.lengths) - start) < args.tokens:
            if done >= shown:
                layers = [c for caches, _ in state.row_caches for c in caches]
                windows = [c for c in layers if isinstance(c, WindowRows)]
                held = sum(array.nbytes for layer in windows for array in layer.arrays())
                found = {"windows_mb": held / 1e6, "active_mb": mx.get_active_memory() / 1e6}
                print(json.dumps({"batch": batch, "tokens": done, **found}), flush=True)
                shown += 1000
            ids = mx.random.randint(0, target.vocab_size, (batch, args.width))
            state.begin_round(args.width)
            mx.argmax(target.forward(ids, state).logits, axis=-1).tolist()
            state.rollback(kept)


if __name__ == "__main__":
    main()
