"""The gated delta rule over a whole window in one CUDA kernel.

mlx-lm has the rule as a kernel on a Mac and as a loop of small kernels on CUDA. Here one warp takes
a row of a head's state ``[Dv, Dk]``, holds it in registers and walks over the positions (Yang et
al. 2024, "Gated Delta Networks", arXiv 2412.06464, eq. 10): with a decay g, a rate beta, key k,
query q and value v a row s of the state is read, mended and read again::

    s = g s;  s = s + beta (v - s.k) k;  y = s.q

Rounding is written out operation by operation, and a row's sums come in one order whatever the
batch and the number of positions are. So a position has the same bits in a window of any width, in
a prompt's chunk and in any batch.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from specdec.targets.recurrent.update import DeltaWindow

__all__ = ["kernel_source", "run_kernel", "takes"]

_LANES, _ROWS = 32, 4  # a warp has a row of the state, a block has so many rows
_WIDEST = 512  # keys; a lane holds a 32nd of a row of the state, of the key and of the query
_FLOATS = (mx.float32, mx.bfloat16, mx.float16)

_INPUTS = ("queries", "keys", "values", "decay", "rate", "before", "mask")

_SOURCE = """
    constexpr int PER_LANE = (KEY_SIZE + 31) / 32;
    const int lane = threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int value_heads = values_shape[2];
    const int rows = values_shape[3];
    if (row >= rows) {
      return;  // a whole warp
    }
    const int64_t batch = blockIdx.x / value_heads;
    const int64_t head = blockIdx.x % value_heads;
    const int64_t key_head = head / (value_heads / keys_shape[2]);
    const int length = keys_shape[1];

    float state[PER_LANE];
    auto from = before + batch * before_strides[0] + head * before_strides[1]
        + row * before_strides[2];
    for (int i = 0; i < PER_LANE; ++i) {
      const int at = lane + 32 * i;
      state[i] = at < KEY_SIZE ? static_cast<float>(from[at * before_strides[3]]) : 0.0f;
    }

    auto query_at = queries + batch * queries_strides[0] + key_head * queries_strides[2];
    auto key_at = keys + batch * keys_strides[0] + key_head * keys_strides[2];
    auto value_at = values + batch * values_strides[0] + head * values_strides[2]
        + row * values_strides[3];
    auto decay_at = decay + batch * decay_strides[0] + head * decay_strides[2];
    auto rate_at = rate + batch * rate_strides[0] + head * rate_strides[2];
    auto output_at = outputs + (batch * length * value_heads + head) * rows + row;
    auto state_at = states + (static_cast<int64_t>(blockIdx.x) * rows + row) * KEY_SIZE;
    const int64_t state_step = static_cast<int64_t>(gridDim.x) * rows * KEY_SIZE;

    for (int t = 0; t < length; ++t) {
      float key[PER_LANE], query[PER_LANE], next[PER_LANE];
      const float value = static_cast<float>(*value_at);
      const float beta = static_cast<float>(*rate_at);
      float read = 0.0f;
      for (int i = 0; i < PER_LANE; ++i) {
        const int at = lane + 32 * i;
        const bool inside = at < KEY_SIZE;
        key[i] = inside ? static_cast<float>(key_at[at * keys_strides[3]]) : 0.0f;
        query[i] = inside ? static_cast<float>(query_at[at * queries_strides[3]]) : 0.0f;
        DECAY
        next[i] = __fmul_rn(state[i], kept);
        read = __fmaf_rn(next[i], key[i], read);
      }
      for (int step = 16; step > 0; step /= 2) {
        read = __fadd_rn(read, __shfl_xor_sync(0xffffffffu, read, step));
      }
      const float change = __fmul_rn(__fsub_rn(value, read), beta);
      float result = 0.0f;
      for (int i = 0; i < PER_LANE; ++i) {
        next[i] = __fmaf_rn(key[i], change, next[i]);
        result = __fmaf_rn(next[i], query[i], result);
      }
      for (int step = 16; step > 0; step /= 2) {
        result = __fadd_rn(result, __shfl_xor_sync(0xffffffffu, result, step));
      }
      if (lane == 0) {
        *output_at = static_cast<OUTPUT>(result);
      }
      const bool taken = TAKEN;
      for (int i = 0; i < PER_LANE; ++i) {
        const int at = lane + 32 * i;
        state[i] = taken ? next[i] : state[i];
        if ((EVERY || t + 1 == length) && at < KEY_SIZE) {
          state_at[at] = state[i];
        }
      }
      query_at += queries_strides[1];
      key_at += keys_strides[1];
      value_at += values_strides[1];
      decay_at += decay_strides[1];
      rate_at += rate_strides[1];
      output_at += static_cast<int64_t>(value_heads) * rows;
      state_at += EVERY ? state_step : 0;
    }
"""

_DECAY_OF_HEAD = "const float kept = static_cast<float>(*decay_at);"
_DECAY_OF_KEY = (
    "const float kept = inside ? static_cast<float>(decay_at[at * decay_strides[3]]) : 0.0f;"
)
_TAKEN_WHERE = "mask[batch * mask_strides[0] + t * mask_strides[1]]"


def takes(window: DeltaWindow) -> bool:
    """Whether the kernel is made for such arrays; see ``DeltaWindow`` for their shapes.

    Keys may be 1 to 512 wide: a lane holds every 32nd number of a row, and wider rows would no
    longer stay in its registers. The state is float32, as mlx-lm makes it, the mask of booleans,
    the rest float32, bfloat16 or float16.
    """
    q, k, v, g, state = window.q, window.k, window.v, window.g, window.state
    if state is None or any(a.ndim != 4 for a in (q, k, v, state)) or 0 in v.shape:
        return False
    (rows, width, heads, size), keys = v.shape, k.shape[3]
    typed = all(a.dtype in _FLOATS for a in (q, k, v, g, window.beta))
    shaped = (
        (*k.shape[:2], heads % k.shape[2]) == (rows, width, 0)
        and q.shape == k.shape
        and g.shape == (rows, width, heads, keys)[: g.ndim]
        and g.ndim in (3, 4)
        and window.beta.shape == (rows, width, heads)
        and state.shape == (rows, heads, size, keys)
    )
    mask = window.mask
    masked = mask is None or (mask.shape == (rows, width) and mask.dtype == mx.bool_)
    return typed and shaped and masked and state.dtype == mx.float32 and keys <= _WIDEST


def run_kernel(window: DeltaWindow, *, every: bool) -> tuple[mx.array, mx.array]:
    """Run the kernel on arrays that it takes; see ``DeltaUpdate``.

    Args:
        window: the operands.
        every: whether the state after every position is wanted.
    """
    v, g, state = window.v, window.g, window.state
    assert state is not None
    given = (window.q, window.k, v, g, window.beta, state, window.mask)
    inputs = [each for each in given if each is not None]
    rows, width, heads, size = v.shape
    template: list[tuple[str, Any]] = [("KEY_SIZE", state.shape[3]), ("EVERY", every)]
    template.append(("OUTPUT", window.q.dtype))
    # MLX keeps compiled kernels by name and template alone, so all types must be in there.
    template += [(f"TYPE_{i}", a.dtype) for i, a in enumerate(inputs)]
    outputs, states = _kernel(per_key=g.ndim == 4, masked=window.mask is not None)(
        inputs=inputs,
        template=template,
        grid=(_LANES * rows * heads, size, 1),
        threadgroup=(_LANES, _ROWS, 1),
        output_shapes=[v.shape, (width if every else 1, *state.shape)],
        output_dtypes=[window.q.dtype, mx.float32],
    )
    return outputs, states


@cache
def _kernel(*, per_key: bool, masked: bool) -> Any:
    source = kernel_source(per_key=per_key, masked=masked)
    # MLX keeps compiled kernels on disk under their names: another source needs another name.
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"specdec_gated_delta_{digest}",
        input_names=_INPUTS if masked else _INPUTS[:-1],
        output_names=["outputs", "states"],
        source=source,
        ensure_row_contiguous=False,
    )


def kernel_source(*, per_key: bool, masked: bool) -> str:
    """The body of the kernel.

    Args:
        per_key: whether each key decays by itself.
        masked: whether there is a mask.
    """
    source = _SOURCE.replace("DECAY", _DECAY_OF_KEY if per_key else _DECAY_OF_HEAD)
    return source.replace("TAKEN", _TAKEN_WHERE if masked else "true")
