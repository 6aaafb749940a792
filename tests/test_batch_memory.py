"""A memory limit holds, is told from shapes alone, and keeps nobody waiting for ever."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedProvider, load_scripted, solo, target
from tiny_models import HYBRID, WINDOWED, build_model, tiny_model

from specdec import BatchGenerator, load_drafter
from specdec.batch.memory import MemoryPlan
from specdec.errors import OptionError
from specdec.state import CacheOptions
from specdec.state.kernels import key_reach
from specdec.targets import MlxLmTarget

MODEL = tiny_model("qwen3")
PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), tuple(range(20, 43)))
ROW = 2 * 2 * 2 * 16 * 4  # bytes a position: layers, keys and values, heads, head size, float32


def most_held(generator: BatchGenerator) -> tuple[int, dict[int, tuple[int, ...]]]:
    """The most bytes that rows' buffers ever took between two calls, and the tokens."""
    most, tokens = 0, dict[int, tuple[int, ...]]()
    while generator.has_work:
        for answer in generator.next()[1]:
            assert answer.token is not None
            tokens[answer.uid] = (*tokens.get(answer.uid, ()), answer.token)
        most = max(most, held(generator))
    return most, tokens


def held(generator: BatchGenerator) -> int:
    """Bytes of all buffers of rows that read or decode."""
    book = generator._engine._book
    states: list[Any] = [group._live.state for group in book.groups if group.rows]
    states += [entry.reading.state for entry in book.reading if entry.reading is not None]
    return sum(array.nbytes for state in states for array in state.arrays())


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 500, 1000])
def test_the_bytes_of_a_row_are_those_of_buffers_with_their_headroom(tokens: int) -> None:
    room = -(-(tokens * 9 // 8) // 256) * 256
    assert target().row_bytes(tokens) == ROW * room


def test_where_keys_are_read_at_few_lengths_buffers_reach_as_far() -> None:
    with mock.patch("specdec.targets.sizes.plans_by_shape", return_value=True):
        got = MlxLmTarget(MODEL).row_bytes(5000)
    assert got == ROW * -(-(key_reach(5000, 5) * 9 // 8) // 256) * 256
    assert got > target().row_bytes(5000)


CACHED = {
    "qwen3": (tiny_model("qwen3"), CacheOptions()),
    WINDOWED: (tiny_model(WINDOWED), CacheOptions()),
    HYBRID: (tiny_model(HYBRID), CacheOptions()),
    "max_kv_size": (tiny_model("qwen3"), CacheOptions(max_kv_size=100)),
    "kv_bits": (
        build_model("qwen3", head_dim=32),
        CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=300),
    ),
}


@settings(max_examples=16)
@given(
    st.integers(1, 700),
    st.integers(0, 400),
    st.sampled_from(sorted(CACHED)),
    st.sampled_from([4, 64]),
)
def test_no_row_ever_takes_more_than_was_told(first: int, more: int, kind: str, wide: int) -> None:
    model, options = CACHED[kind]
    bound = MlxLmTarget(model)
    state = bound.new_state(options)
    for place, width in enumerate((first, *[wide] * (more // 64), 1)):
        state.begin_round(width, reading=place == 0)
        bound.forward(mx.ones((1, width), mx.int32), state)
        state.commit_round()
        mx.eval(state.arrays())
    whole = first + wide * (more // 64) + 1
    assert state.lengths in {(whole,), (0,)}
    taken = sum(array.nbytes for array in state.arrays())
    assert taken <= bound.row_bytes(whole, options)


def test_a_window_takes_no_more_however_long_the_row_is() -> None:
    bound, options = target(), CacheOptions(max_kv_size=100)
    assert bound.row_bytes(100_000, options) == ROW * 132  # and the slack of a round
    assert bound.row_bytes(100_000, options) < bound.row_bytes(200)


def test_telling_computes_nothing_and_asks_the_model_for_one_position_once() -> None:
    fresh, calls = MlxLmTarget(MODEL), []
    forward = MlxLmTarget.forward

    def counted(self: MlxLmTarget, *given: Any) -> Any:
        calls.append(given[0].shape[1])
        return forward(self, *given)

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with mock.patch.object(MlxLmTarget, "forward", counted):
        sizes = [fresh.row_bytes(tokens) for tokens in (100_000, 100_001, 99_990)]
        other = [fresh.row_bytes(size) for size in (1, 700)]
    assert calls == [1]
    assert set(sizes) == {ROW * -(-(100_001 * 9 // 8) // 256) * 256}
    assert other == [ROW * 256, ROW * 1024]
    assert sizes[0] > 50_000_000
    assert mx.get_peak_memory() - before < 1_000_000


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(PROMPTS), st.sampled_from([1, 9, 60, 240]), st.sampled_from([None, 0])
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_rows_never_take_more_than_the_limit_and_all_are_served(
    asked: list[tuple[tuple[int, ...], int, int | None]], rows: int
) -> None:
    limit = rows * ROW * 512
    with BatchGenerator(
        MODEL, drafter=load_drafter("ngram", MODEL), memory_limit=limit, prefill_step_size=8
    ) as generator:
        uids = generator.insert(
            [prompt for prompt, _, _ in asked],
            [budget for _, budget, _ in asked],
            num_draft_tokens=[width for _, _, width in asked],
        )
        most, tokens = most_held(generator)
    assert 0 < most <= limit
    for uid, (prompt, budget, _) in zip(uids, asked, strict=True):
        assert tokens[uid] == solo(prompt, count=300)[:budget]


def test_a_request_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    with BatchGenerator(MODEL, memory_limit=2 * ROW * 256) as generator:
        # 256 positions each while all are short; a longer row makes both rows long.
        generator.insert([PROMPTS[0], PROMPTS[1]], [12, 4])
        big, small = generator.insert([PROMPTS[2], PROMPTS[0]], [300, 2])
        order: list[int] = []
        while generator.has_work:
            for answer in generator.next()[1]:
                if answer.uid not in order:
                    order.append(answer.uid)
                if answer.uid == big:
                    assert {0, 1}.isdisjoint(uid for uid in generator._engine._book.entries)
    assert order == [0, 1, big, small]
    # Without a limit nobody waits: the order is not one that prompts give.
    with BatchGenerator(MODEL) as generator:
        generator.insert([PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]], [12, 4, 300, 2])
        generator.next()
        assert {answer.uid for answer in generator.next()[1]} == {0, 1, 2, 3}


def test_a_request_that_never_fits_is_refused_with_bytes_limit_and_way_out() -> None:
    with BatchGenerator(MODEL, memory_limit=ROW * 256) as generator:
        with pytest.raises(OptionError) as refused:
            generator.insert([PROMPTS[0], PROMPTS[2]], [4, 400])
        said = str(refused.value)
        assert said.startswith("prompt 1: ")
        for part in ("423 positions", str(ROW * 512), str(ROW * 256), "memory_limit", "max_tokens"):
            assert part in said
        assert not generator.has_work
        generator.insert([PROMPTS[0]], [4])
        with pytest.raises(OptionError, match="max_tokens is -1, so with a memory_limit"):
            generator.insert([PROMPTS[0]], -1)
        assert len(most_held(generator)[1][0]) == 4


def test_the_caches_that_a_request_continues_count_as_well() -> None:
    caches = target().new_state().extract_row(0)
    MODEL(mx.ones((1, 250), mx.int32), cache=caches)
    with (
        BatchGenerator(MODEL, memory_limit=ROW * 256) as generator,
        pytest.raises(OptionError, match="prompt 0: 263 positions"),
    ):
        generator.insert([PROMPTS[0]], [10], caches=[caches])


def test_the_drafters_weights_count_once_and_its_windows_too() -> None:
    provider = ScriptedProvider()
    provider.weight_bytes = 1000
    row = ROW * 256
    with BatchGenerator(
        MODEL, drafter=load_scripted(provider), memory_limit=2 * row + 999
    ) as generator:
        generator.insert([PROMPTS[0], PROMPTS[0]], [4, 4])
        generator.next()
        assert len(generator.next()[1]) == 1
    with BatchGenerator(
        MODEL, drafter=load_scripted(provider), memory_limit=2 * row + 1000
    ) as generator:
        generator.insert([PROMPTS[0], PROMPTS[0]], [4, 4])
        generator.next()
        assert len(generator.next()[1]) == 2
    with (
        BatchGenerator(MODEL, drafter=load_scripted(provider), memory_limit=row) as generator,
        pytest.raises(OptionError, match=f"{row} bytes and 1000 of the drafter"),
    ):
        generator.insert([PROMPTS[0]], [4])
    # 223 positions and a window of 5 still are 256 with headroom; one more is not.
    with BatchGenerator(
        MODEL, drafter=load_scripted(provider), memory_limit=row + 1000
    ) as generator:
        generator.insert([PROMPTS[0]], [220])
        with pytest.raises(OptionError):
            generator.insert([PROMPTS[0]], [221])
        generator.insert([PROMPTS[0]], [224], num_draft_tokens=[0])


def test_the_plan_counts_the_longest_row_for_every_row_of_a_group() -> None:
    with BatchGenerator(MODEL) as generator:
        generator.insert([PROMPTS[0]] * 3, [4, 900, 4])
        entries = list(generator._engine._book.waiting)
        plan = MemoryPlan(target(), None)
        longest = target().row_bytes(904)
        assert plan.rows_need(entries) == 3 * longest
        assert plan.rows_need([entries[0], entries[2]]) == 2 * target().row_bytes(8) < 2 * longest
        assert plan.rows_need([]) == 0
