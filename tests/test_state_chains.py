"""Chains of windows of one position that are taken back, row by row, for every kind of cache.

The other side is a lone row that read the tokens that were kept, and nothing else: every logit of
what follows and every tensor of every layer is the same, to the bit on a CPU. Of sliding windows,
what each query sees is told by a rule over positions as well.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from row_oracle import Full, RowPrograms, Window, go_on_in_mlx_lm
from tiny_models import build_model

from specdec.errors import RollbackError, RoundOpenError
from specdec.state import CacheOptions, NativeState, RaggedState, RecurrentRows
from specdec.state.windows import WindowRows
from specdec.targets.mlx_lm import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LONGEST = 33  # of rows with sliding windows
QUANTIZED = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=9)


@pytest.fixture(autouse=True, scope="module")
def _chunks_are_trimmed_often() -> Iterator[None]:
    with mock.patch("specdec.state.chunked._STEP", 3):
        yield


# Models of every kind of cache.

MODELS: dict[str, Callable[[], Any]] = {
    "attention": lambda: build_model("qwen3"),
    "window": lambda: build_model("gemma3_text", sliding_window=9),
    "quantized": lambda: build_model("qwen3", head_dim=32),
    "short convolution": lambda: build_model("lfm2"),
    "mamba": lambda: build("mamba"),
    "mamba and attention": lambda: build("falcon_h1"),
    "gated delta": lambda: build("qwen3_5"),
    "recurrent and window": lambda: build("recurrent_gemma"),
    "chunked": lambda: build("llama4"),
    "list": lambda: build("baichuan_m1"),
}
WITHOUT_LIMIT = sorted(set(MODELS) - {"window", "recurrent and window", "list"})


@cache
def target(kind: str) -> MlxLmTarget:
    return MlxLmTarget(MODELS[kind]())


def same(got: mx.array, want: mx.array) -> None:
    """Equal bits on a CPU; elsewhere a batch may round otherwise than a row."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if mx.default_device().type == mx.cpu:
        assert mx.array_equal(got, want).item(), "other bits"
    else:
        assert mx.allclose(got, want, rtol=1e-3, atol=1e-3).item()


def tensors(caches: Sequence[Any]) -> list[mx.array | None]:
    """What mlx-lm's caches hold, of a window what its next query can see."""
    found: list[mx.array | None] = []
    for held in caches:
        if isinstance(held, CacheList):
            found += tensors(held.caches)
        elif isinstance(held, ArraysCache):
            found += held.cache
        elif held.keys is None:
            found += [None, None]
        elif isinstance(held, RotatingKVCache):
            ordered = [held._temporal_order(each) for each in (held.keys, held.values)]
            found += [each[..., -(held.max_size - 1) :, :] for each in ordered]
        elif isinstance(held.keys, tuple):
            found += [each[..., : held.offset, :] for each in (*held.keys, *held.values)]
        else:
            first = getattr(held, "start_position", 0)
            seen = held.offset % getattr(held, "chunk_size", held.offset + 1)
            ends = held.offset - first - seen, held.offset - first
            found += [each[..., ends[0] : ends[1], :] for each in (held.keys, held.values)]
    return found


class Rows:
    """Rows of one state, and each of them alone, without chains."""

    def __init__(self, kind: str, lengths: Sequence[int], seed: int = 0) -> None:
        self.target = target(kind)
        self.options = QUANTIZED if kind == "quantized" else CacheOptions()
        self.random = np.random.default_rng(seed)
        self.state, self.lone = self.fresh(), [self.fresh() for _ in lengths]
        self.state.filter_rows([])
        for length, lone in zip(lengths, self.lone, strict=True):
            self.join(length, lone)

    def fresh(self) -> RaggedState:
        state = self.target.new_state(self.options)
        assert isinstance(state, RaggedState)
        return state

    def ids(self, rows: int, width: int) -> mx.array:
        drawn = self.random.integers(0, self.target.vocab_size, (rows, width))
        return mx.array(drawn.astype(np.uint32))

    def join(self, length: int, lone: RaggedState) -> None:
        """A row that has read a prompt; it is quantized before it is longer."""
        state = self.fresh()
        ids = self.ids(1, length) if length else None
        for each in (state, lone):
            if ids is not None:
                each.begin_round(length, reading=True)
                mx.eval(self.target.forward(ids, each).logits)
                each.commit_round()
        self.state.prepare_append([state]).commit()

    def run(self, ids: mx.array, kept: Sequence[int]) -> mx.array:
        """A window of the state; its logits."""
        self.state.begin_round(ids.shape[1])
        logits: mx.array = self.target.forward(ids, self.state).logits
        if all(count == ids.shape[1] for count in kept):
            self.state.commit_round()
        else:
            self.state.rollback(kept)
        return logits

    def read(self, row: int, ids: mx.array, logits: mx.array, kept: int) -> None:
        """The lone row reads a window too, and says the same."""
        lone = self.lone[row]
        lone.begin_round(ids.shape[1])
        want = self.target.forward(ids[row : row + 1], lone).logits
        lone.rollback([kept])
        same(logits[row, :kept], want[0, :kept])

    def window(self, width: int, kept: Sequence[int]) -> None:
        ids = self.ids(len(self.lone), width)
        logits = self.run(ids, kept)
        for row, count in enumerate(kept):
            if count:
                self.read(row, ids, logits, count)

    def go(self, windows: Sequence[Sequence[int]]) -> list[list[tuple[mx.array, mx.array]]]:
        """Windows of one position, each with what the rows keep of it; what each row kept."""
        read: list[list[tuple[mx.array, mx.array]]] = [[] for _ in self.lone]
        for kept in windows:
            ids = self.ids(len(kept), 1)
            logits = self.run(ids, kept)
            for row, count in enumerate(kept):
                read[row] += [(ids, logits)] * count
        return read

    def back(self, read: Sequence[Sequence[tuple[mx.array, mx.array]]], n: Sequence[int]) -> None:
        """Take positions back; what is left is what the lone rows read."""
        self.state.take_back(n)
        for row, (own, count) in enumerate(zip(read, n, strict=True)):
            for ids, logits in own[: len(own) - count]:
                self.read(row, ids, logits, 1)

    def chain(self, windows: int, counts: Sequence[int]) -> None:
        self.state.begin_chain()
        self.back(self.go([[1] * len(self.lone)] * windows), counts)

    def check(self) -> None:
        """Every tensor, and the logits of a window that nobody keeps."""
        assert self.state.lengths == tuple(each.lengths[0] for each in self.lone)
        for row, lone in enumerate(self.lone):
            got, want = tensors(self.state.extract_row(row)), tensors(lone.extract_row(0))
            assert len(got) == len(want)
            for ours, theirs in zip(got, want, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None and theirs is not None:
                    same(ours, theirs)

    def go_on(self) -> None:
        for width in (1, 2):
            self.window(width, [width] * len(self.lone))
        self.check()


LENGTHS = {  # around the places where rows are quantized, wrap, or reach the next chunk
    "quantized": [1, 5, 7, 8, 9, 12],
    "window": [0, 3, 9, 35, 41, 60],
    "recurrent and window": [0, 3, 8, 35, 60],
    "list": [0, 3, 8, 35, 60],
    "chunked": [0, 3, 6, 7, 8, 20],
}


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=8)
@given(st.data())
def test_rows_that_went_back_are_rows_that_read_the_kept_tokens_only(
    kind: str, data: st.DataObject
) -> None:
    lengths = st.sampled_from(LENGTHS.get(kind, [0, 1, 6]))
    rows = Rows(kind, data.draw(st.lists(lengths, min_size=1, max_size=3), label="rows"))
    for _ in range(data.draw(st.integers(1, 2), label="rounds")):
        room = [rows.state.room(row) for row in range(len(rows.lone))]
        for width in data.draw(st.lists(st.integers(2, 3), max_size=1), label="window before"):
            kept = [
                data.draw(st.integers(1, min(width, most or width)), label="kept") for most in room
            ]
            rows.window(width, kept)
        rows.state.begin_chain()
        each = st.lists(st.integers(0, 1), min_size=len(room), max_size=len(room))
        all_of_it = st.just([1] * len(room))
        windows = data.draw(st.lists(all_of_it | all_of_it | each, max_size=6), label="windows")
        read = rows.go(windows)
        counts = [data.draw(st.integers(0, len(own)), label="taken back") for own in read]
        rows.back(read, counts)
        rows.check()
    rows.go_on()


@pytest.mark.parametrize("kind", MODELS)
def test_one_row_goes_back_to_the_start_of_the_chain_and_another_stays(kind: str) -> None:
    rows = Rows(kind, [LENGTHS.get(kind, [0, 1, 6])[n] for n in (0, 2, -1)])
    rows.window(2, [1, 2, 1])
    for counts in ([5, 0, 2], [0, 5, 5], [1, 1, 1], [0, 0, 0], [5, 5, 5]):
        rows.chain(5, counts)
        rows.check()
    rows.go_on()


def test_more_states_than_one_kernel_picks_from_go_back_as_well() -> None:
    rows = Rows("mamba", [2] * 13)
    rows.chain(12, range(13))
    rows.check()
    rows.go_on()


def test_rows_whose_lengths_come_to_agree_in_a_chain_and_part_again_are_right() -> None:
    rows = Rows("chunked", [5, 7, 7])
    for windows in ([[1, 0, 1], [1, 0, 1], [1, 1, 0]], [[0, 1, 1], [1, 1, 1]]):
        rows.state.begin_chain()
        read = rows.go(windows)
        rows.back(read, [1, 0, 2])
        rows.check()
    rows.go_on()


def test_a_row_that_went_ahead_by_more_than_a_chunk_still_holds_its_own() -> None:
    rows = Rows("chunked", [3, 6, 7, 15])
    for counts in ([9, 9, 9, 8], [9, 7, 3, 9]):
        rows.chain(9, counts)
        rows.check()
    rows.go_on()


# Sliding windows, to the last position that they see.

STARTS = (0, 2, 8, 9, 30, 40, 41, 60, 90)  # of a ring of 41 places


def rings(keep: int) -> RowPrograms:
    layers = Window(9, keep), Full(), Window(5)
    return RowPrograms(layers, lambda: [layer.cache() for layer in layers])


def started(programs: RowPrograms, starts: Sequence[int]) -> tuple[RaggedState, list[list[int]]]:
    state, rows = programs.cold(), []
    state.filter_rows([])
    for start in starts:
        joining = programs.cold()
        rows.append(programs.read(joining, [], start) if start else [])
        state.prepare_append([joining]).commit()
    return state, rows


def go_back(
    programs: RowPrograms,
    state: RaggedState,
    rows: list[list[int]],
    *,
    windows: int,
    counts: Sequence[int],
) -> list[list[int]]:
    """A chain, of which only the first and last window are looked at, to save time."""
    state.begin_chain()
    for number in range(windows):
        if number in (0, windows - 1):
            rows = programs.round(state, rows, 1, [1] * len(rows))
        else:
            new = programs.tags(len(rows), 1)
            state.begin_round(1)
            programs.append(state, new)
            state.commit_round()
            rows = [[*row, *own] for row, own in zip(rows, new, strict=True)]
    state.take_back(counts)
    return [row[: len(row) - count] for row, count in zip(rows, counts, strict=True)]


@pytest.mark.parametrize("lone", [False, True])
@pytest.mark.parametrize("keep", [0, 4])
@settings(max_examples=4)
@given(st.data())
def test_no_position_that_a_query_sees_was_overwritten_by_a_chain(
    keep: int, lone: bool, data: st.DataObject
) -> None:
    programs = rings(keep)
    starts = [data.draw(st.sampled_from(STARTS), label="start")] if lone else STARTS
    state, rows = started(programs, starts)
    for _ in range(2):
        width = data.draw(st.sampled_from([1, 2, 5, 33]), label="window before")
        most = st.integers(0, width)
        rows = programs.round(state, rows, width, [data.draw(most, label="kept") for _ in rows])
        windows = data.draw(st.just(LONGEST) | st.integers(1, LONGEST), label="windows")
        each = st.just(windows) | st.integers(0, windows)
        counts = [data.draw(each, label="taken back") for _ in rows]
        rows = go_back(programs, state, rows, windows=windows, counts=counts)
    for row, tags in enumerate(rows):
        go_on_in_mlx_lm(programs.layers, state.extract_row(row), tags, [(1 << 17) + row])
    for width in (1, 3):
        rows = programs.round(state, rows, width, [width - 1] * len(rows))


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("lone", [False, True])
def test_a_chain_of_one_window_more_would_overwrite_one(keep: int, lone: bool) -> None:
    programs = rings(keep)
    for windows in (LONGEST, LONGEST + 1):
        state, rows = started(programs, [60] if lone else [60, 41])
        counts = [windows] * len(rows)
        with mock.patch.object(WindowRows, "longest_chain", windows):
            rows = go_back(programs, state, rows, windows=windows, counts=counts)
        if windows == LONGEST:
            programs.round(state, rows, 1, [1] * len(rows))
        else:
            with pytest.raises(AssertionError, match=r"a query sees|layer 0"):
                programs.round(state, rows, 1, [1] * len(rows))


# How a chain ends, and what is refused.


@pytest.mark.parametrize("kind", MODELS)
def test_a_chain_is_as_long_as_its_caches_can_take_back(kind: str) -> None:
    rows = Rows(kind, [3, 6])
    longest = rows.state.longest_chain
    assert longest == (None if kind in WITHOUT_LIMIT else LONGEST)
    rows.state.begin_chain()
    rows.go([[1, 1]] * (longest or LONGEST + 3))
    assert rows.state.lengths == (3 + (longest or LONGEST + 3), 6 + (longest or LONGEST + 3))
    if longest is not None:
        rows.go([[1, 1]])  # the chain has ended
        refused(rows, [2, 0])
        rows.state.take_back([1, 1])
    else:
        rows.state.take_back([LONGEST + 3] * 2)
        rows.go_on()


def refused(rows: Rows, counts: Sequence[int]) -> None:
    """A count that is refused in one line, and changes nothing."""
    state = rows.state
    before = state.lengths, [id(each) for each in state.arrays()]
    with pytest.raises(RollbackError, match="cannot take back") as raised:
        state.take_back(counts)
    assert len(str(raised.value).splitlines()) == 1
    assert before == (state.lengths, [id(each) for each in state.arrays()])


@pytest.mark.parametrize("kind", MODELS)
def test_a_count_that_a_row_has_not_kept_is_refused_and_changes_nothing(kind: str) -> None:
    rows = Rows(kind, [3, 6, 7])
    rows.window(1, [1, 1, 1])
    rows.state.begin_chain()
    refused(rows, [1, 0, 0])  # of before the chain
    read = rows.go([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
    for counts in ([4, 0, 0], [0, 3, 0], [0, 0, 3], [0, -1, 0], [1, 1], [1, 1, 1, 1], []):
        refused(rows, counts)
    rows.back(read, [3, 1, 0])
    rows.check()
    if kind not in ("attention", "quantized"):  # whose keys go back any number again
        refused(rows, [0, 0, 1])
    rows.go_on()


def wider(rows: Rows) -> None:
    rows.run(rows.ids(2, 2), [0, 0])


def empty_with(rows: Rows) -> None:
    state = rows.fresh()
    state.filter_rows([])
    state.prepare_append([rows.state]).commit()
    rows.state = state


ENDS: dict[str, Callable[[Rows], None]] = {
    "a wider window": wider,
    "it is taken back": lambda rows: rows.state.take_back([0, 0]),
    "rows change places": lambda rows: rows.state.filter_rows([1, 0]),
    "a row leaves": lambda rows: rows.state.filter_rows([1]),
    "a row joins": lambda rows: rows.state.prepare_append([rows.fresh()]).commit(),
    "rows join an empty state": empty_with,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["mamba and attention", "window", "chunked", "list"])
def test_a_chain_ends(kind: str, end: str) -> None:
    rows = Rows(kind, [4, 4])
    rows.state.begin_chain()
    rows.go([[1, 1]] * 3)
    ENDS[end](rows)
    kept = rows.state.lengths
    refused(rows, [2] * len(kept))
    if "row" in end:  # the last window can still be taken back
        rows.state.take_back([int(length == 7) for length in kept])
        assert rows.state.lengths == tuple(6 if length == 7 else length for length in kept)
    for batch, _ in rows.state.batches:
        assert not any(chains_of(layer) for layer in batch.caches)


def chains_of(layer: Any) -> bool:
    """Whether a layer believes that a chain is open."""
    if hasattr(layer, "caches"):
        return any(map(chains_of, layer.caches))
    return getattr(layer, "_chain", None) is not None or getattr(layer, "_chaining", False)


def test_a_change_that_is_not_made_leaves_the_chain_open() -> None:
    rows = Rows("mamba and attention", [4, 5])
    rows.state.begin_chain()
    read = rows.go([[1, 1]] * 3)
    rows.state.prepare_append([rows.fresh()])
    rows.back(read, [3, 2])
    rows.check()
    rows.go_on()


def test_a_second_chain_begins_anew() -> None:
    rows = Rows("gated delta", [4, 5])
    rows.state.begin_chain()
    first = rows.go([[1, 1]] * 2)
    rows.state.begin_chain()
    second = rows.go([[1, 1]] * 2)
    refused(rows, [3, 0])
    rows.back([[*a, *b] for a, b in zip(first, second, strict=True)], [2, 1])
    rows.check()
    rows.go_on()


def test_a_chain_is_begun_and_taken_back_between_rounds() -> None:
    rows = Rows("mamba", [4])
    rows.state.begin_round(1)
    with pytest.raises(RoundOpenError):
        rows.state.begin_chain()
    rows.state.commit_round()


def test_recurrent_rows_keep_what_they_were_in_a_chain_alone() -> None:
    def held(rows: Rows, windows: int) -> int:
        rows.go([[1, 1]] * windows)
        mx.eval(rows.state.arrays())
        gc.collect()
        return mx.get_active_memory()

    rows = Rows("mamba", [4, 5])
    row_bytes = sum(each.nbytes for each in rows.state.arrays())
    at_first = held(rows, 2)
    assert held(rows, 20) - at_first < row_bytes
    rows.state.begin_chain()
    assert held(rows, 20) - at_first > 15 * row_bytes
    rows.state.take_back([3, 3])
    assert held(rows, 2) - at_first < row_bytes


# Rows of caches without a row form.


def native(kind: str) -> tuple[NativeState, Any]:
    bound = target(kind)
    made = bound.model.make_cache() if hasattr(bound.model, "make_cache") else None
    caches = made or [KVCache() for _ in bound.model.layers]
    return NativeState(caches, "of the test"), bound.model


@pytest.mark.parametrize("kind", ["attention", "short convolution", "gated delta"])
def test_native_rows_go_back_by_a_chain(kind: str) -> None:
    texts = [[3, 9, 4, 7, 5, 2, 8], [8, 1, 1, 6, 2, 9, 4]]
    state, model = native(kind)
    state.prepare_append([native(kind)[0]]).commit()
    lone = [native(kind)[0].row_caches[0][0] for _ in texts]
    for counts in ([2, 0], [0, 3], [3, 1]):
        state.begin_chain()
        before = state.lengths
        for step in range(3):
            state.begin_round(1)
            for (caches, _), text in zip(state.row_caches, texts, strict=True):
                model(mx.array([[text[step]]]), cache=caches)
            state.commit_round()
        for wrong in ([4, 0], [0, -1], [1]):
            with pytest.raises(RollbackError, match="of the test"):
                state.take_back(wrong)
        state.take_back(counts)
        kept = [3 - count for count in counts]
        assert state.lengths == tuple(n + k for n, k in zip(before, kept, strict=True))
        for row, text in enumerate(texts):
            for token in text[: kept[row]]:
                model(mx.array([[token]]), cache=lone[row])
            for ours, theirs in zip(
                tensors(state.extract_row(row)), tensors(lone[row]), strict=True
            ):
                if ours is not None and theirs is not None:
                    same(ours, theirs)
                else:
                    assert ours is theirs
        with pytest.raises(RollbackError):
            state.take_back([1, 1])


def test_native_rows_that_cannot_go_back_say_so() -> None:
    state = NativeState([RotatingKVCache(8)], "a ring assigns into its arrays")
    assert state.longest_chain == 0
    with pytest.raises(RollbackError, match="a ring assigns into its arrays"):
        state.begin_chain()


# That the checks above can fail.


def test_a_row_that_went_back_one_window_too_few_would_be_noticed() -> None:
    link_of = RecurrentRows._link_of

    def later(rows: RecurrentRows, row: int, count: int) -> int:
        return link_of(rows, row, max(count - 1, 0))

    rows = Rows("mamba", [4, 5])
    with mock.patch.object(RecurrentRows, "_link_of", later):
        rows.chain(3, [2, 0])
    with pytest.raises(AssertionError, match="other bits"):
        rows.check()
