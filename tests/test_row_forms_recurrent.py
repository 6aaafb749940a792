"""Recurrent rows of real modules: after every round each row is what mlx-lm alone would be.

The other side is mlx-lm with its own caches, one row at a time, fed the kept tokens one by one.
Every tensor of every layer is compared after every round, and the logits of what was kept.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from specdec.errors import RollbackError
from specdec.state import RaggedState, RecurrentRows, row_state
from specdec.targets.mlx_lm import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BITWISE = 1 << 10  # more tensors than any model here has

# Tensors up to the first layer whose attention rounds otherwise for one query than for several
# (latent attention, or a ring whose places mlx-lm fills in another order); what follows is close.
EXACT = {
    "qwen3_5": BITWISE,
    "kimi_linear": 6,
    "mamba": BITWISE,
    "mamba2": BITWISE,
    "rwkv7": BITWISE,
    "lfm2": BITWISE,
    "recurrent_gemma": 6,
    "jamba": BITWISE,
    "falcon_h1": BITWISE,
    "longcat_flash_ngram": 3,
    "baichuan_m1": 4,
    "bailing_hybrid": 3,
    "plamo2": BITWISE,
    "olmo_hybrid": BITWISE,
}
GATED_DELTA = ("qwen3_5", "kimi_linear", "olmo_hybrid")
CLOSE = 1e-4

Tensor = np.ndarray[Any, Any] | None


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(build(name))


def tensors(caches: Sequence[Any]) -> list[Tensor]:
    """Everything that mlx-lm's caches hold, as it counts for what follows."""
    found: list[Any] = []
    for held in caches:
        if isinstance(held, CacheList):
            found += tensors(held.caches)
        elif isinstance(held, ArraysCache):
            found += held.cache
        elif held.keys is None:
            found += [None, None]
        elif isinstance(held, RotatingKVCache):
            found += [window(held, array) for array in (held.keys, held.values)]
        else:
            found += [array[..., : held.offset, :] for array in (held.keys, held.values)]
    return [None if array is None else np.array(array) for array in found]


def window(held: RotatingKVCache, array: mx.array) -> mx.array:
    """The positions that the next query can see, in order."""
    ordered, keep = held._temporal_order(array), held.keep
    behind = ordered[..., keep:, :][..., -(held.max_size - keep) :, :]
    return mx.concatenate([ordered[..., :keep, :], behind], axis=2)


def check_same(got: Sequence[Tensor], want: Sequence[Tensor], exact: int) -> None:
    assert len(got) == len(want)
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours is None or theirs is None:
            assert ours is theirs, f"tensor {number} is there on one side alone"
            continue
        assert ours.shape == theirs.shape, f"tensor {number}"
        assert ours.dtype == theirs.dtype, f"tensor {number}"
        if number < exact:
            assert np.array_equal(ours, theirs), f"tensor {number} has other bits"
        else:
            off = np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max())
            assert off <= CLOSE, f"tensor {number} is off by {off:.1e}"


@define(eq=False)
class Twin:
    """The same row in mlx-lm alone."""

    caches: list[Any]
    length: int = 0
    before: list[Any] | None = None


class Program:
    """Rows of one model, and each of them alone."""

    def __init__(self, name: str, seed: int) -> None:
        self.target = target(name)
        # Other backends round a window otherwise than its positions.
        self.exact = EXACT[name] if mx.default_device().type == mx.cpu else 0
        self.random = np.random.default_rng(seed)
        self.state = self.cold()
        self.state.filter_rows([])
        self.twins: list[Twin] = []

    def cold(self) -> RaggedState:
        state = self.target.new_state()
        assert isinstance(state, RaggedState)
        return state

    def ids(self, rows: int, width: int) -> mx.array:
        drawn = self.random.integers(0, self.target.vocab_size, (rows, width))
        return mx.array(drawn.astype(np.uint32))

    def join(self, *chunks: int) -> None:
        """A row that has read its prompt in these chunks; none for a cold one."""
        state, twin = self.cold(), Twin(make_prompt_cache(self.target.model))
        for width in chunks:
            ids = self.ids(1, width)
            state.begin_round(width, reading=True)
            mx.eval(self.target.forward(ids, state).logits)
            state.commit_round()
            mx.eval(self.target.model(ids, cache=twin.caches))
            twin.length += width
        self.state.prepare_append([state]).commit()
        self.twins.append(twin)

    def leave(self, keep: Sequence[int]) -> None:
        self.state.filter_rows(keep)
        self.twins = [self.twins[row] for row in keep]

    def come_back(self, row: int) -> None:
        """A row leaves with its caches, goes on in mlx-lm's hands and comes back last."""
        caches, twin = self.state.extract_row(row), self.twins[row]
        self.leave([other for other in range(len(self.twins)) if other != row])
        ids = self.ids(1, 1)
        got = self.target.model(ids, cache=caches)
        check_close(got, self.target.model(ids, cache=twin.caches))
        # Recurrent state alone does not tell how many positions it has read.
        twin.length, twin.before = told(twin.caches), None
        back = self.target.state_of(caches)
        assert isinstance(back, RaggedState)
        self.state.prepare_append([back]).commit()
        self.twins.append(twin)

    def round(self, width: int, kept: Sequence[int]) -> None:
        """A window as the executor runs it."""
        ids = self.ids(len(self.twins), width)
        self.state.begin_round(width)
        logits = self.target.forward(ids, self.state).logits
        self.state.rollback(kept)
        for row, (twin, count) in enumerate(zip(self.twins, kept, strict=True)):
            twin.before = deepcopy(twin.caches) if width == count == 1 else None
            for place in range(count):
                alone = self.target.model(ids[row : row + 1, place : place + 1], cache=twin.caches)
                check_close(logits[row, place], alone[0, 0])
            twin.length += count

    def take_back(self, counts: Sequence[int]) -> None:
        """Only rows whose last window was of one position that they kept."""
        self.state.take_back(counts)
        for twin, count in zip(self.twins, counts, strict=True):
            if count:
                assert twin.before is not None
                twin.caches, twin.length = twin.before, twin.length - 1
            twin.before = None

    def check(self) -> None:
        assert self.state.lengths == tuple(twin.length for twin in self.twins)
        for row, twin in enumerate(self.twins):
            ours = self.state.extract_row(row)
            check_same(tensors(ours), tensors(twin.caches), self.exact)


def told(caches: Sequence[Any]) -> int:
    parts = [part for held in caches for part in getattr(held, "caches", [held])]
    return max((part.offset for part in parts if hasattr(part, "offset")), default=0)


def check_close(got: mx.array, want: mx.array) -> None:
    assert np.abs(np.array(got) - np.array(want)).max() <= 10 * CLOSE


VERBS = ("round", "round", "round", "single", "join", "leave", "come back")


def run_program(name: str, data: st.DataObject, steps: int) -> None:
    program = Program(name, data.draw(st.integers(0, 1 << 20), label="seed"))
    for _ in range(data.draw(st.integers(1, 3), label="rows")):
        program.join(*data.draw(st.lists(st.integers(1, 12), max_size=2), label="chunks"))
    for _ in range(steps):
        rows = len(program.twins)
        verb = data.draw(st.sampled_from(VERBS), label="verb")
        if verb == "join" and rows < 3:
            program.join(*data.draw(st.lists(st.integers(1, 12), max_size=2), label="chunks"))
        elif verb == "leave" and rows > 1:
            program.leave(data.draw(st.permutations(range(rows)), label="order")[: rows - 1])
        elif verb == "come back":
            program.come_back(0)
        elif verb == "single":
            program.round(1, [1] * rows)
            program.check()
            counts = st.lists(st.integers(0, 1), min_size=rows, max_size=rows)
            program.take_back(data.draw(counts, label="taken back"))
        else:
            width = data.draw(st.integers(1, 9) | st.just(12), label="width")
            kept = st.lists(st.integers(0, width), min_size=rows, max_size=rows)
            program.round(width, data.draw(kept, label="kept"))
        program.check()


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=5)
@given(st.data())
def test_every_row_is_what_mlx_lm_alone_is_after_every_round(
    name: str, data: st.DataObject
) -> None:
    run_program(name, data, steps=6)


@pytest.mark.parametrize("name", GATED_DELTA)
@settings(max_examples=3)
@given(st.data())
def test_a_loop_that_keeps_no_states_is_run_again_to_the_same(
    name: str, data: st.DataObject
) -> None:
    with mock.patch.object(target(name).recurrence, "keep_steps", new=False):
        run_program(name, data, steps=6)


@pytest.mark.parametrize("name", EXACT)
def test_rows_that_keep_nothing_part_or_all_and_rows_that_read_nothing_share_a_round(
    name: str,
) -> None:
    program = Program(name, seed=3)
    program.join()
    program.join(7)
    program.join(4, 1)
    for width, kept in ((4, (0, 0, 4)), (5, (0, 5, 2)), (3, (3, 0, 1)), (9, (0, 9, 4))):
        program.round(width, kept)
        program.check()
    program.round(1, [1, 1, 1])
    program.check()
    program.take_back([1, 0, 1])
    program.check()
    program.round(6, [2, 6, 0])
    program.check()


@pytest.mark.parametrize("width", [5, 12])
@pytest.mark.parametrize("name", EXACT)
def test_rows_that_have_read_nothing_keep_different_counts(name: str, width: int) -> None:
    program = Program(name, seed=4)
    for _ in range(3):
        program.join()
    program.round(width, [1, 4, width])
    program.check()


@pytest.mark.parametrize("name", EXACT)
def test_a_wide_window_is_dropped_as_a_narrow_one_is(name: str) -> None:
    program = Program(name, seed=6)
    program.join(9)
    program.join()
    program.round(130, [3, 17])
    program.check()
    program.round(130, [5, 5])
    program.check()


# Taking back across joins and leaves, as after a window that was begun early.

CHANGES: dict[str, Callable[[Program], None]] = {
    "a row joins": lambda program: program.join(6),
    "a cold row joins": lambda program: program.join(),
    "rows change places": lambda program: program.leave([1, 0]),
    "a row leaves": lambda program: program.leave([0]),
    "the other row leaves": lambda program: program.leave([1]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("chunks", [(5,), ()], ids=["warm", "cold"])
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "falcon_h1"])
def test_a_position_is_taken_back_after_rows_joined_or_left(
    name: str, chunks: tuple[int, ...], change: str
) -> None:
    program = Program(name, seed=5)
    program.join(*chunks)
    program.join(3)
    program.round(1, [1, 1])
    CHANGES[change](program)
    program.take_back([int(twin.before is not None) for twin in program.twins])
    program.check()
    program.round(4, [2] * len(program.twins))
    program.check()


@pytest.mark.parametrize("width", [1, 3])
def test_what_recurrent_rows_were_is_given_once_and_only_after_a_window_of_one(width: int) -> None:
    program = Program("mamba", seed=7)
    program.join(4)
    program.round(width, [width])
    if width == 1:
        program.take_back([1])
    with pytest.raises(RollbackError):
        program.state.take_back([1])
    program.check()


# That the checks above can fail, and what is recorded.


@pytest.mark.parametrize("name", EXACT)
def test_a_state_that_kept_the_whole_window_would_be_noticed(name: str) -> None:
    def keep_all(rows: RecurrentRows, kept: Sequence[int] | None) -> None:
        finish(rows, None)

    finish = RecurrentRows.finish
    program = Program(name, seed=1)
    program.join(5)
    program.round(4, [2])
    program.check()
    program.round(4, [4])
    with mock.patch.object(RecurrentRows, "finish", keep_all):
        program.round(4, [2])
    with pytest.raises(AssertionError, match="tensor"):
        program.check()


@pytest.mark.parametrize("name", EXACT)
def test_a_row_that_was_fed_another_token_would_be_noticed(name: str) -> None:
    program = Program(name, seed=1)
    program.join(5)
    program.check()
    twin = program.twins[0]
    for side, token in ((twin.caches, 3), (caches := program.state.extract_row(0), 4)):
        program.target.model(mx.array([[token]]), cache=side)
    with pytest.raises(AssertionError, match="tensor"):
        check_same(tensors(caches), tensors(twin.caches), 0)


@pytest.mark.parametrize("name", GATED_DELTA)
@pytest.mark.parametrize("keep", [True, False])
def test_states_between_positions_are_kept_only_where_that_is_asked(name: str, keep: bool) -> None:
    program = Program(name, seed=2)
    program.join(5)
    with (
        mock.patch.object(program.target.recurrence, "keep_steps", new=keep),
        mock.patch.object(RecurrentRows, "add_steps", autospec=True) as steps,
    ):
        program.state.begin_round(3)
        program.target.forward(program.ids(1, 3), program.state)
    program.state.rollback([0])
    assert bool(steps.call_count) is keep
    program.check()


def test_a_window_that_nobody_recorded_is_kept_whole_or_not_at_all() -> None:
    model = target("mamba").model
    for kept, error in (([0], False), ([2], True), ([4], False)):
        state = row_state(make_prompt_cache(model))
        assert isinstance(state, RaggedState)
        ids = mx.array([[5, 9, 1, 2]])
        state.begin_round(4)
        model(ids, cache=state.row_caches[0][0])
        if error:
            with pytest.raises(RollbackError, match="nobody recorded"):
                state.rollback(kept)
            assert (state.lengths, state.open_width) == ((0,), 4)
            state.rollback([4])
        else:
            state.rollback(kept)
        theirs = make_prompt_cache(model)
        if state.lengths[0]:
            model(ids, cache=theirs)
        check_same(tensors(state.extract_row(0)), tensors(theirs), BITWISE)
