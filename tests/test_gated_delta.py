"""The gated delta rule computed at once instead of in mlx-lm's loop, and what rides on it.

The CUDA kernel cannot run here: what it is given and what becomes of its states is tested with
stand-ins that compute the rule in plain arrays, one with the bits of mlx-lm's loop and one that
sums in another order, so that a call that went past it would be seen. On a CUDA machine the kernel
itself is a third.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from specdec.errors import one_line
from specdec.generation import stream_generate
from specdec.targets.mlx_lm import MlxLmTarget
from specdec.targets.recurrent import cuda, kernel
from specdec.targets.recurrent.update import DeltaWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Other backends round a window's projections otherwise than its positions'.
COMPARES_BITS = mx.default_device().type == mx.cpu
MODELS = ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid")  # scalar gates and one of keys


def plainly(window: DeltaWindow, *, every: bool, backwards: bool = False) -> tuple[Any, Any]:
    """The rule in plain arrays, position by position."""
    repeats = window.v.shape[2] // window.q.shape[2]
    q, k = (mx.repeat(each, repeats, axis=2)[:, :, :, None] for each in (window.q, window.k))
    g = window.g[..., None, None] if window.g.ndim == 3 else window.g[..., None, :]
    v, beta = window.v[..., None], window.beta[..., None, None]
    order = slice(None, None, -1) if backwards else slice(None)
    outputs, states, state = [], [], window.state
    assert state is not None
    for t in range(v.shape[1]):
        decayed = state * g[:, t]
        read = (decayed * k[:, t])[..., order].sum(axis=-1, keepdims=True)
        after = decayed + k[:, t] * ((v[:, t] - read) * beta[:, t])
        outputs.append((after * q[:, t])[..., order].sum(axis=-1))
        if window.mask is not None:
            after = mx.where(window.mask[:, t, None, None, None], after, state)
        state = after
        states.append(state)
    stacked = mx.stack(states if every else states[-1:])
    return mx.stack(outputs, axis=1).astype(window.q.dtype), stacked


def backwards(window: DeltaWindow, /, *, every: bool) -> tuple[Any, Any]:
    """The same, with its sums from the other end."""
    return plainly(window, every=every, backwards=True)


def weaker(window: DeltaWindow, /, *, every: bool) -> tuple[Any, Any]:
    """Another rule, at half the rate: what comes of it is seen on any device."""
    return plainly(evolve(window, beta=0.5 * window.beta), every=every)


UPDATES: dict[str, Any] = {"plainly": plainly, "backwards": backwards}
if (on_device := cuda.cuda_update()) is not None:
    UPDATES["kernel"] = on_device


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(build(name))


@contextmanager
def updating(bound: MlxLmTarget, update: Any) -> Iterator[None]:
    with mock.patch.object(bound.recurrence, "update", new=update):
        yield


def window_of(
    shape: Sequence[int] = (2, 5, 1, 2, 8, 3),
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    *,
    per_key: bool = False,
    masked: bool = False,
) -> DeltaWindow:
    """Operands for rows, positions, key heads, value heads and the sizes of keys and values."""
    rows, width, key_heads, heads, keys, size = shape
    draw = np.random.default_rng(seed)
    near = [draw.normal(size=(rows, width, key_heads, keys)) * keys**-0.5 for _ in range(2)]
    gate = (rows, width, heads, keys) if per_key else (rows, width, heads)
    return DeltaWindow(
        q=mx.array(near[0]).astype(dtype),
        k=mx.array(near[1]).astype(dtype),
        v=mx.array(draw.normal(size=(rows, width, heads, size))).astype(dtype),
        g=mx.array(draw.uniform(0.5, 1, gate)).astype(mx.float32),
        beta=mx.array(draw.uniform(0, 1, (rows, width, heads))).astype(dtype),
        state=mx.array(draw.normal(size=(rows, heads, size, keys))).astype(mx.float32),
        mask=mx.array(draw.random((rows, width)) < 0.6) if masked else None,
    )


def loop_of(window: DeltaWindow) -> tuple[Any, Any]:
    """mlx-lm's own."""
    names = ("q", "k", "v", "g", "beta", "state", "mask")
    output, state = gated_delta.gated_delta_ops(*(getattr(window, name) for name in names))
    return output, state


def reference(window: DeltaWindow) -> tuple[Any, Any]:
    """In float64, one number after the other: outputs, and the state after each position."""
    arrays = (window.q, window.k, window.v, window.g, window.beta, window.state)
    q, k, v, g, beta, state = (np.array(a.astype(mx.float32)).astype(np.float64) for a in arrays)  # type: ignore[union-attr]
    (rows, width, heads, size), share = v.shape, v.shape[2] // q.shape[2]
    outputs, states = np.zeros(v.shape), np.zeros((width, *state.shape))
    for t in range(width):
        for b, h, r in np.ndindex(rows, heads, size):
            line = state[b, h, r] * g[b, t, h]
            key, query = k[b, t, h // share], q[b, t, h // share]
            line = line + beta[b, t, h] * (v[b, t, h, r] - line @ key) * key
            outputs[b, t, h, r] = line @ query
            if window.mask is None or window.mask[b, t].item():
                state[b, h, r] = line
        states[t] = state
    return outputs, states


def same(one: Any, other: Any) -> bool:
    return bool(mx.array_equal(one, other).item())


# The rule itself.

FORMS: Any = st.fixed_dictionaries({"per_key": st.booleans(), "masked": st.booleans()})
SHAPES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 9),
    st.just(2),
    st.sampled_from([2, 4]),
    st.sampled_from([5, 32, 64]),
    st.integers(1, 5),
)


@pytest.mark.parametrize("name", UPDATES)
@settings(max_examples=8)
@given(shape=SHAPES, seed=st.integers(0, 99), form=FORMS)
def test_an_update_gives_what_float64_gives_and_the_state_after_every_position(
    name: str, shape: tuple[int, ...], seed: int, form: Any
) -> None:
    window = window_of(shape, seed, **form)
    outputs, states = UPDATES[name](window, every=True)
    wanted, all_states = reference(window)
    np.testing.assert_allclose(np.array(outputs), wanted, atol=2e-5)
    np.testing.assert_allclose(np.array(states), all_states, atol=2e-5)
    again, last = UPDATES[name](window, every=False)
    assert same(again, outputs)
    assert same(last, states[-1:])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@settings(max_examples=5)
@given(shape=SHAPES, seed=st.integers(0, 99), form=FORMS)
def test_the_plain_stand_in_has_the_bits_of_mlx_lms_loop(
    dtype: mx.Dtype, shape: tuple[int, ...], seed: int, form: Any
) -> None:
    window = window_of(shape, seed, dtype, **form)
    for got, want in zip(plainly(window, every=False), loop_of(window), strict=True):
        assert got.dtype == want.dtype
        if COMPARES_BITS:
            assert same(got.reshape(want.shape), want)


@pytest.mark.parametrize("name", UPDATES)
@settings(max_examples=5)
@given(shape=SHAPES, seed=st.integers(0, 99), form=FORMS)
def test_a_position_has_the_same_bits_in_every_window_and_batch(
    name: str, shape: tuple[int, ...], seed: int, form: Any
) -> None:
    window, update = window_of(shape, seed, **form), UPDATES[name]
    outputs, states = update(window, every=True)
    for row in range(shape[0]):
        state = window.state[row : row + 1]  # type: ignore[index]
        for t in range(shape[1]):
            part = {each: getattr(window, each) for each in ("q", "k", "v", "g", "beta", "mask")}
            cut: Any = {
                n: None if a is None else a[row : row + 1, t : t + 1] for n, a in part.items()
            }
            alone, after = update(DeltaWindow(**cut, state=state), every=False)
            assert same(alone[0, 0], outputs[row, t])
            assert same(after[0, 0], states[t, row])
            state = after[0]


# What the kernel takes, and that it is tried before it is used.

REFUSED: dict[str, Callable[[DeltaWindow], DeltaWindow]] = {
    "no state": lambda w: evolve(w, state=None),
    "a state in 16 bits": lambda w: evolve(w, state=w.state.astype(mx.bfloat16)),  # type: ignore[union-attr]
    "a state of other rows": lambda w: evolve(w, state=w.state[:1]),  # type: ignore[index]
    "whole numbers": lambda w: evolve(w, q=w.q.astype(mx.int32)),
    "decays of other heads": lambda w: evolve(w, g=w.g[:, :, :1]),
    "rates of every key": lambda w: evolve(w, beta=w.beta[..., None]),
    "queries of other heads": lambda w: evolve(w, q=mx.repeat(w.q, 2, axis=2)),
    "a mask of numbers": lambda w: evolve(w, mask=mx.ones((2, 5))),
    "a mask for all rows": lambda w: evolve(w, mask=mx.ones((1, 5), mx.bool_)),
    "value heads that key heads do not divide": lambda w: evolve(
        w, q=mx.repeat(w.q, 3, axis=2), k=mx.repeat(w.k, 3, axis=2)
    ),
    "no position": lambda w: window_of((2, 0, 1, 2, 8, 3)),
    "keys too wide for a lane's registers": lambda w: window_of((1, 1, 1, 1, 513, 2)),
}


@pytest.mark.parametrize("change", REFUSED)
def test_the_kernel_leaves_to_the_loop_what_it_is_not_made_for(change: str) -> None:
    window = window_of()
    assert kernel.takes(window)
    assert not kernel.takes(REFUSED[change](window))


@pytest.mark.parametrize("keys", [1, 32, 40, 64, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("per_key", [False, True])
def test_the_kernel_takes_every_size_and_type_that_models_have(
    keys: int, dtype: mx.Dtype, per_key: bool
) -> None:
    shape = (1, 2, 2, 4, keys, 2)
    assert kernel.takes(window_of(shape, dtype=dtype, per_key=per_key))
    assert kernel.takes(window_of(shape, dtype=dtype, per_key=per_key, masked=True))


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernels_source_reads_what_it_is_given_and_rounds_as_written(
    per_key: bool, masked: bool
) -> None:
    source = kernel.kernel_source(per_key=per_key, masked=masked)
    assert ("mask" in source) is masked
    assert ("decay_strides[3]" in source) is per_key
    assert not {"DECAY", "TAKEN"} & set(source.replace(";", " ").split())
    # A product that is added in plain operators may be fused by one compilation and not another.
    sums = [line for line in source.splitlines() if "read =" in line or "result =" in line]
    assert len(sums) == 6
    assert all("_rn(" in line or line.strip().endswith("= 0.0f;") for line in sums)


def on_a_gpu(run: Any) -> Any:
    """As on a CUDA device whose kernel is this."""
    return mock.patch.multiple(cuda, run_kernel=run, _on_gpu=lambda: True)


def test_a_kernel_that_works_is_tried_once_for_each_combination_of_types() -> None:
    update, calls = cuda.CudaUpdate(), []

    def run(window: DeltaWindow, *, every: bool) -> tuple[Any, Any]:
        calls.append((window.v.shape, every))
        return plainly(window, every=every)

    windows = [window_of(seed=1), window_of(seed=2), window_of(dtype=mx.bfloat16)]
    with on_a_gpu(run):
        for window in windows:
            done = update(window, every=False)
            assert done is not None
            assert same(done[0], plainly(window, every=False)[0])
    tried, used = ((2, 3, 2, 5), True), ((2, 5, 2, 3), False)
    assert [each for each in calls if each in (tried, used)] == [tried, used, used, tried, used]
    assert update.failures == []


def broken(window: DeltaWindow, *, every: bool) -> tuple[Any, Any]:
    raise RuntimeError("Failed to compile kernel: k.cu(3): error: expected a ;")


def wrong(window: DeltaWindow, *, every: bool) -> tuple[Any, Any]:
    outputs, states = plainly(window, every=every)
    return outputs, states + 0.1 * every


def without_a_number(window: DeltaWindow, *, every: bool) -> tuple[Any, Any]:
    outputs, states = plainly(window, every=every)
    return outputs * float("nan"), states


@pytest.mark.parametrize(
    ("run", "told"),
    [(broken, "expected a ;"), (wrong, "off mlx-lm's loop"), (without_a_number, "nan off")],
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_that_does_not_compile_or_is_wrong_is_not_used_and_said_to_be(
    run: Any, told: str, masked: bool
) -> None:
    update = cuda.CudaUpdate()
    with on_a_gpu(run):
        for every in (True, False, True):
            assert update(window_of(masked=masked), every=every) is None
    assert len(update.failures) == 1
    assert told in update.failures[0]
    bound = target("qwen3_5")
    with updating(bound, update):
        assert told in one_line(" ".join(bound.recurrence.described().values()), 1000)


def test_off_the_gpu_and_for_other_arrays_the_loop_is_used_without_a_try() -> None:
    update = cuda.CudaUpdate()
    with on_a_gpu(broken):
        assert update(window_of((1, 1, 1, 1, 513, 2)), every=False) is None
        with mock.patch.object(cuda, "_on_gpu", return_value=False):
            assert update(window_of(), every=True) is None
    assert update.failures == []


# In the target's forward: every width, prompts, and what is kept of a window.


class Rows:
    """Rows of one model in one state, and each of them in a state of its own, fed one by one."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.target = target(name)
        self.draw = np.random.default_rng(seed)
        self.state: Any = None
        self.alone: list[Any] = []

    def forward(self, state: Any, ids: mx.array, *, reading: bool = False) -> Any:
        state.begin_round(ids.shape[1], reading=reading)
        return self.target.forward(ids, state).logits

    def ids(self, rows: int, width: int) -> mx.array:
        drawn = self.draw.integers(0, self.target.vocab_size, (rows, width))
        return mx.array(drawn.astype(np.uint32))

    def join(self, length: int) -> None:
        ids, pair = self.ids(1, length), [self.target.new_state(), self.target.new_state()]
        self.forward(pair[0], ids, reading=True)
        pair[0].commit_round()
        for place in range(length):
            self.forward(pair[1], ids[:, place : place + 1])
            pair[1].commit_round()
        self.alone.append(pair[1])
        if self.state is None:
            self.state = pair[0]
        else:
            self.state.prepare_append([pair[0]]).commit()

    def round(self, width: int, kept: Sequence[int]) -> None:
        ids = self.ids(len(kept), width)
        logits = self.forward(self.state, ids)
        self.state.rollback(kept)
        for row, (state, count) in enumerate(zip(self.alone, kept, strict=True)):
            for place in range(count):
                got = self.forward(state, ids[row : row + 1, place : place + 1])
                state.commit_round()
                np.testing.assert_allclose(
                    np.array(got[0, 0]), np.array(logits[row, place]), atol=1e-3
                )

    def recurrent(self, state: Any, row: int) -> list[mx.array]:
        layers = [layer for layer in state.extract_row(row) if hasattr(layer, "cache")]
        return [array for layer in layers for array in layer.cache]

    def check(self) -> None:
        """The first recurrent layer has the bits, what follows may be rounded by attention."""
        for row, state in enumerate(self.alone):
            pairs = list(
                zip(self.recurrent(self.state, row), self.recurrent(state, 0), strict=True)
            )
            first = sum(array.ndim > 0 for array in self.recurrent(state, 0)[:2])
            for number, (got, want) in enumerate(pairs):
                if number < first and COMPARES_BITS:
                    assert same(got, want), f"array {number} of row {row} has other bits"
                np.testing.assert_allclose(np.array(got), np.array(want), atol=1e-3)


ROUNDS = ((4, (1, 4, 2)), (12, (5, 5, 5)), (12, (11, 3, 12)), (1, (1, 1, 1)), (3, (0, 2, 3)))


@pytest.mark.parametrize("keep_steps", [True, False], ids=["states kept", "run again"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", MODELS)
def test_what_ragged_rows_keep_of_windows_is_what_they_are_one_by_one(
    name: str, update: str, keep_steps: bool
) -> None:
    rows = Rows(name)
    recurrence = rows.target.recurrence
    with (
        updating(rows.target, UPDATES[update]),
        mock.patch.object(recurrence, "keep_steps", new=keep_steps),
    ):
        for length in (1, 6, 3):
            rows.join(length)
        rows.check()
        for width, kept in ROUNDS:
            rows.round(width, kept)
            rows.check()


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("update", [weaker, backwards] if COMPARES_BITS else [weaker])
def test_a_forward_that_went_past_the_update_would_be_noticed(update: Any, reading: bool) -> None:
    rows = Rows("qwen3_5")
    with updating(rows.target, update):
        rows.join(6)
        rows.check()
        ids, own = rows.ids(1, 3), rows.alone[0]
        for place in range(3):
            rows.forward(own, ids[:, place : place + 1])
            own.commit_round()
        with updating(rows.target, None):
            rows.forward(rows.state, ids, reading=reading)
            rows.state.commit_round()
    with pytest.raises(AssertionError, match=r"other bits|tolerance"):
        rows.check()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("width", "reading"), [(1, False), (4, False), (7, True), (80, False)])
def test_states_between_positions_are_asked_for_only_where_part_may_be_dropped(
    name: str, width: int, reading: bool
) -> None:
    rows, asked = Rows(name), []

    def noting(window: DeltaWindow, /, *, every: bool) -> tuple[Any, Any]:
        asked.append((window.v.shape[1], every))
        return plainly(window, every=every)

    with updating(rows.target, noting):
        state = rows.target.new_state()
        rows.forward(state, rows.ids(1, 3), reading=True)
        state.commit_round()
        asked.clear()
        rows.forward(state, rows.ids(1, width), reading=reading)
        state.commit_round()
    assert len(asked) == len(rows.target.recurrence.units)
    assert set(asked) == {(width, width == 4)}


@pytest.mark.parametrize("kept", [2, 16], ids=["in part", "whole"])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_a_state_of_a_wide_window_does_not_pin_all_the_others(kept: int, limit: int) -> None:
    rows = Rows("qwen3_5")
    with updating(rows.target, plainly), mock.patch("specdec.state.recurrent._PINNED", limit):
        rows.join(2)
        with mock.patch.object(mx, "contiguous", wraps=mx.contiguous) as copied:
            rows.round(16, [kept])
        stacked = [call for call in copied.call_args_list if call.args[0].ndim == 4]
        assert bool(stacked) is (limit == 0)
        rows.check()


# Nothing of mlx-lm's is changed, during a forward or after it.


def test_mlx_lms_functions_are_its_own_during_a_forward_also_for_other_threads() -> None:
    module = __import__("mlx_lm.models.qwen3_5", fromlist=["x"])
    scopes = [vars(gated_delta), vars(module)]
    before = [dict(scope) for scope in scopes]
    rows, calls = Rows("qwen3_5"), [0]
    seen: list[Any] = []
    other = build("qwen3_5", seed=1)

    def noting(window: DeltaWindow, /, *, every: bool) -> tuple[Any, Any]:
        if not seen:
            seen.append([dict(scope) for scope in scopes])
            thread = Thread(
                target=lambda: other(mx.array([[1, 2]]), cache=make_prompt_cache(other))
            )
            thread.start()
            thread.join()
            seen.append(calls[0])
        calls[0] += 1
        return plainly(window, every=every)

    with updating(rows.target, noting):
        rows.join(3)
    assert seen == [before, 0]
    assert [dict(scope) for scope in scopes] == before
    calls[0] = 0
    rows.target.model(mx.array([[1, 2]]), cache=make_prompt_cache(rows.target.model))
    assert calls == [0]


def test_an_update_that_raises_leaves_the_model_usable() -> None:
    rows = Rows("qwen3_5")
    with updating(rows.target, broken), pytest.raises(RuntimeError, match="expected a ;"):
        rows.join(3)
    rows.join(3)
    rows.check()
    rows.round(4, [2])
    rows.check()


# Through the whole executor.


@pytest.mark.parametrize("update", UPDATES)
def test_a_drafted_text_is_the_plain_one_under_an_update(update: str) -> None:
    import specdec

    model, tokenizer = specdec.load_model("demo-qwen3_5")[:2]
    texts = []
    found = "specdec.targets.recurrent.recorder.cuda_update"
    with mock.patch(found, return_value=UPDATES[update]):
        for drafter in (None, "ngram"):
            answers = stream_generate(
                model,
                tokenizer,
                "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n",
                max_tokens=24,
                drafter=drafter,
            )
            texts.append([answer.token for answer in answers])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 3
