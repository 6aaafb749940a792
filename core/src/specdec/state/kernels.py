"""What the backend's attention kernels ask of the shapes they are given.

MLX's CUDA backend runs windows of several queries through cuDNN, which builds a plan for every new
shape of queries and keys: about 65 ms a time (seen on an H200 with MLX 0.32.4: a round of 17 ms
took 82), and after some hundred plans in a process MLX gives up with an error. A verify window
meets a new key length every round. So there, windows have one width, keys are read up to a few
fixed lengths, and a mask hides what lies behind each row's end. It is additive and in the keys'
type, since MLX would convert booleans once per layer. Other backends read exactly what is held.
"""

from __future__ import annotations

import mlx.core as mx

__all__ = ["key_reach", "plans_by_shape"]

_SHORT_WINDOW = 64  # above, it is a prompt's chunk, whose own length is new each time anyway
_STEP = 256


def plans_by_shape() -> bool:
    """Whether the default device builds attention plans by key shape."""
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.Device(mx.gpu)


def key_reach(limit: int, width: int) -> int:
    """How many key positions a window reads where plans are built by shape.

    Args:
        limit: positions that are held, the window's included.
        width: queries per row.

    Returns:
        ``limit``, or the next of a few lengths: multiples of 256, and from 4,096 on sixteen per
        doubling, so an eighth more at most. A masked key costs time in every round (36 layers of
        a Qwen3-8B shape: about 0.4 ms per 1,000 keys), a plan once; coarser steps lose more than
        the plans they save.
    """
    if width == 1 or width > _SHORT_WINDOW or width == limit:
        return limit
    step = max(_STEP, 1 << max(limit.bit_length() - 5, 0))
    return -(-limit // step) * step
