"""Row forms beside each other in one state: quantized, chunked, listed, joined, and one's own.

The other side is mlx-lm's own class fed one position after the other, or a rule over positions.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from row_oracle import (
    Bits,
    Folding,
    Full,
    RowPrograms,
    Window,
    go_on_in_mlx_lm,
    grid,
    numbers,
    visible,
)

from specdec.errors import (
    NoOpenRoundError,
    OptionError,
    RollbackError,
    RoundOpenError,
    RowIndexError,
)
from specdec.state import (
    Format,
    KvQuantization,
    NativeState,
    RaggedState,
    RecurrentRows,
    Together,
    forms,
    register_row_form,
    row_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from specdec.state.positions import RowPositions


@pytest.fixture(autouse=True, scope="module")
def _without_plans() -> Iterator[None]:
    with mock.patch("specdec.state.positions.plans_by_shape", return_value=False):
        yield


# Kinds of layers.


@frozen
class Chunked:
    """Every query sees its own chunk; the mask is Llama 4's code's."""

    chunk_size: int

    def cache(self) -> ChunkedKVCache:
        return ChunkedKVCache(self.chunk_size)

    def mask(self, cache: Any, width: int, as_array: bool) -> Any:
        cache.maybe_trim_front()
        end = cache.offset + width
        keys, queries = np.arange(cache.start_position, end), np.arange(cache.offset, end)[:, None]
        same = keys // self.chunk_size == queries // self.chunk_size
        return mx.array(same & (keys <= queries))

    def sees(self, length: int, width: int) -> Bits:
        query, position = grid(length, width)
        seen: Bits = (position <= query) & (position // self.chunk_size == query // self.chunk_size)
        return seen


@frozen
class Recurrent:
    """A sum that wraps around, with its states kept, and the last three tags, which run again."""

    def cache(self) -> ArraysCache:
        return ArraysCache(2)

    def run(self, cache: Any, tags: Sequence[Sequence[int]]) -> None:
        """Update the arrays as a model's code does, recorded as ``targets/recurrence.py`` does."""
        window = mx.array(np.array(tags, np.int32))
        state = mx.zeros(len(tags), mx.int32) if cache[0] is None else cache[0]
        steps = []
        for place in range(window.shape[1]):
            state = (state * 31 + window[:, place]) % 65_521
            steps.append(state)
        cache[0] = state
        last = _LastThree(window)
        if isinstance(cache, RecurrentRows) and cache.recording:
            cache.add_steps(0, steps)
            cache.add_replay(last)
        last(cache, None, window.shape[1])

    def check(self, cache: Any, place: int, row: Sequence[int]) -> None:
        """Compare a row's arrays with its tags."""
        total = 0
        for tag in row:
            total = (total * 31 + tag) % 65_521
        held = [None if array is None else np.array(array)[place].tolist() for array in cache.cache]
        assert held == ([total, [0, 0, 0, *row][-3:]] if row else [None, None]), "recurrent state"


@frozen(eq=False)
class _LastThree:
    window: mx.array
    slots: frozenset[int] = frozenset({1})

    def __call__(self, cache: ArraysCache, rows: Sequence[int] | None, kept: int) -> None:
        window = self.window if rows is None else self.window[mx.array(list(rows))]
        before = cache[1] if cache[1] is not None else mx.zeros((window.shape[0], 3), mx.int32)
        cache[1] = mx.concatenate([before, window[:, :kept]], axis=1)[:, -3:]


def plain(*layers: Any) -> RowPrograms:
    return RowPrograms(layers, lambda: [layer.cache() for layer in layers])


def listed(*layers: Any) -> RowPrograms:
    """A list of two caches, beside full attention."""
    full = Full()
    return RowPrograms(
        [*layers, full], lambda: [CacheList(*(each.cache() for each in layers)), full.cache()]
    )


MIXTURES: dict[str, RowPrograms] = {
    "concatenated": plain(Full(ConcatenateKVCache), Full(), Full(ConcatenateKVCache, 7)),
    "chunked": plain(Chunked(16), Full(), Chunked(5)),
    "list of attention": listed(Full(), Full(window_size=6)),
    "list of recurrent and attention": listed(Recurrent(), Full()),
    "list of recurrent and window": listed(Recurrent(), Window(9, 4)),
    "list of windows": listed(Window(7), Window(11, 4)),
    "everything": plain(Recurrent(), Window(8), Chunked(6), Full(ConcatenateKVCache), Full()),
}


@define(eq=False)
class Mixture:
    """A state over mixed forms, and the tags of its rows."""

    programs: RowPrograms
    together: Together
    state: RaggedState
    rows: list[list[int]]

    @classmethod
    def of(cls, programs: RowPrograms, together: Together, *chunks: Sequence[int]) -> Mixture:
        mixture = cls(programs, together, RaggedState(programs.make(), together=together), [[]])
        mixture.leave([])
        for each in chunks:
            mixture.join(each)
        return mixture

    def join(self, chunks: Sequence[int], caches: list[Any] | None = None, row: Any = ()) -> None:
        caches = self.programs.make() if caches is None else caches
        state, row = RaggedState(caches, together=self.together), list(row)
        for width in chunks:
            row = self.programs.read(state, row, width)
        self.state.prepare_append([state]).commit()
        self.rows.append(row)

    def leave(self, keep: Sequence[int]) -> None:
        self.state.filter_rows(keep)
        self.rows = [self.rows[row] for row in keep]

    def round(self, width: int, kept: Sequence[int]) -> None:
        self.rows = self.programs.round(self.state, self.rows, width, kept)

    def take_back(self, counts: Sequence[int]) -> None:
        self.state.take_back(counts)
        pairs = zip(self.rows, counts, strict=True)
        self.rows = [row[: len(row) - count] for row, count in pairs]

    def come_back(self, widths: Sequence[int]) -> None:
        """The first row goes on in mlx-lm's classes and joins again as the last."""
        caches, row = self.state.extract_row(0), self.rows[0]
        for width in widths:
            [new] = self.programs.tags(1, width)
            row = go_on_in_mlx_lm(self.programs.layers, caches, row, new)
        self.leave(range(1, len(self.rows)))
        self.join([], caches, row)

    def check(self) -> None:
        assert self.state.lengths == tuple(map(len, self.rows))
        for number, row in enumerate(self.rows):
            [new] = self.programs.tags(1, 1 + number)
            go_on_in_mlx_lm(self.programs.layers, self.state.extract_row(number), row, new)


VERBS = ("round", "round", "round", "single", "join", "leave", "come back")
chunk_lists = st.lists(st.integers(1, 20) | st.just(300), max_size=2)


@pytest.mark.parametrize("kind", MIXTURES)
@settings(max_examples=12)
@given(st.data())
def test_mixed_forms_show_each_row_what_it_sees_alone(kind: str, data: st.DataObject) -> None:
    together = data.draw(st.sampled_from(Together), label="together")
    starts = data.draw(st.lists(chunk_lists, min_size=1, max_size=3), label="rows")
    mixture = Mixture.of(MIXTURES[kind], together, *starts)
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        count = len(mixture.rows)
        counts = partial(st.lists, min_size=count, max_size=count)
        verb = data.draw(st.sampled_from(VERBS), label="verb")
        if verb == "join" and count < 4:
            mixture.join(data.draw(chunk_lists, label="chunks"))
        elif verb == "leave" and count > 1:
            mixture.leave(data.draw(st.permutations(range(count)), label="order")[: count - 1])
        elif verb == "come back":
            mixture.come_back(data.draw(st.lists(st.sampled_from([1, 4]), max_size=3), label="on"))
        elif verb == "single":
            mixture.round(1, [1] * count)
            mixture.take_back(data.draw(counts(st.integers(0, 1)), label="taken back"))
        else:
            width = data.draw(st.integers(1, 9) | st.just(40), label="width")
            mixture.round(width, data.draw(counts(st.integers(0, width)), label="kept"))
        mixture.check()


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_position_of_one_row_is_taken_back_and_of_its_neighbour_not(kind: str) -> None:
    mixture = Mixture.of(MIXTURES[kind], Together.ANY, [], [9], [300])
    for counts in ([1, 0, 1], [0, 1, 0], [1, 1, 1]):
        mixture.round(1, [1, 1, 1])
        mixture.take_back(counts)
        mixture.check()
        mixture.round(5, [2, 0, 5])
    mixture.check()


@pytest.mark.parametrize(("together", "batches"), [("ANY", 1), ("EQUAL", 2), ("ALONE", 3)])
def test_rows_are_spread_as_the_model_can_take_them(together: str, batches: int) -> None:
    mixture = Mixture.of(plain(Full(), Window(6)), Together[together], [4], [7], [4])
    assert len(mixture.state.row_caches) == batches
    assert sorted(row for _, rows in mixture.state.row_caches for row in rows) == [0, 1, 2]
    mixture.round(3, [3, 0, 3])  # all have seven now, by chance
    assert len(mixture.state.row_caches) == batches
    mixture.round(1, [1, 1, 1])  # and now they go on alike
    assert len(mixture.state.row_caches) == (3 if together == "ALONE" else 1)
    mixture.check()


def test_rows_share_a_chunked_layer_only_while_their_lengths_are_equal() -> None:
    mixture = Mixture.of(plain(Chunked(5)), Together.ANY, [6], [6], [2])
    assert [rows for _, rows in mixture.state.row_caches] == [[0, 1], [2]]
    mixture.round(4, [0, 4, 4])
    assert [rows for _, rows in mixture.state.row_caches] == [[0, 2], [1]]
    mixture.check()


@pytest.mark.parametrize("chunk_size", [5, 7, 9, 16])
def test_a_chunked_layer_drops_nothing_that_is_still_seen(chunk_size: int) -> None:
    mixture = Mixture.of(plain(Chunked(chunk_size)), Together.ANY, [250], [130, 130, 250])
    for number in range(20):
        mixture.round(4, [1 + number % 3, 2])
        mixture.round(1, [1, 1])
        mixture.take_back([1, number % 2])
        mixture.round(3, [0, 0])  # what is seen is checked
    assert min(mixture.state.lengths) > 280
    mixture.check()


def test_chunked_layers_drop_what_nobody_sees() -> None:
    each = plain(Chunked(8))
    state, row = each.cold(), each.tags(1, 0)[0]
    for _ in range(150):
        new = each.tags(1, 20)
        state.begin_round(20)
        for caches, _ in state.row_caches:
            caches[0].maybe_trim_front()
        each.append(state, new)
        state.rollback([13])
        row = [*row, *new[0][:13]]
    assert len(row) == 1950
    position = 2 * 3 * 4  # bytes of keys and values of two heads
    assert state.nbytes <= 3 * 256 * position
    each.round(state, [row], 5, [3])


@pytest.mark.parametrize("kind", MIXTURES)
def test_another_count_than_was_kept_would_be_noticed(kind: str) -> None:
    mixture = Mixture.of(MIXTURES[kind], Together.ANY, [20], [6])
    new = mixture.programs.window(mixture.state, mixture.rows, 4)
    mixture.state.rollback([2, 3])
    mixture.rows = [[*row, *own[:2]] for row, own in zip(mixture.rows, new, strict=True)]
    with pytest.raises(AssertionError, match=r"layer|recurrent"):
        mixture.programs.window(mixture.state, mixture.rows, 3)


# Quantized keys and values.

HEADS, SIZE, POSITIONS = 2, 32, 300
_Arrays = tuple[mx.array, ...]


@cache
def contents(layer: int) -> tuple[mx.array, mx.array]:
    """Keys and values ``[1, HEADS, POSITIONS, SIZE]`` that the positions of rows are taken from."""
    keys = mx.random.split(mx.random.key(layer))
    drawn = [mx.random.normal((1, HEADS, POSITIONS, SIZE), key=key) for key in keys]
    return drawn[0], drawn[1]


@cache
def packed(layer: int, bits: int) -> list[Any]:
    """The same in mlx-lm's own quantized cache, which was fed one position after the other."""
    own = QuantizedKVCache(group_size=SIZE, bits=bits)
    for place in range(POSITIONS):
        own.update_and_fetch(*(array[:, :, place : place + 1] for array in contents(layer)))
    return [np.array(array) for array in (*own.keys, *own.values)]


def arrays_of(got: Any) -> list[mx.array]:
    """Keys and values, or the six arrays of packed ones."""
    return [array for part in got for array in (part if isinstance(part, tuple) else [part])]


def check_bits(got: Any, place: int, row: Sequence[int], layer: int, bits: int | None) -> None:
    """Compare a row's share of what a layer holds with what mlx-lm holds of these positions."""
    arrays = arrays_of(got)
    assert len(arrays) == (2 if bits is None else 6)
    want = [np.array(a) for a in contents(layer)] if bits is None else packed(layer, bits)
    for ours, theirs in zip(arrays, want, strict=True):
        held = np.array(ours)[place, :, : len(row)]
        assert held.dtype == theirs.dtype
        assert np.array_equal(held, theirs[0][:, list(row)]), f"layer {layer}"


class QuantizedProgram:
    """Rows of two attention layers around a window, with lists of what they hold."""

    def __init__(self, bits: int, start: int | None, seed: int) -> None:
        self.bits, self.start = bits, start
        self.random = np.random.default_rng(seed)
        self.state = self.adopted(self.fresh())
        self.state.filter_rows([])
        self.rows: list[list[int]] = []

    def fresh(self) -> list[Any]:
        if self.start is None:  # quantized from the beginning, as a caller's own
            make: Callable[[], Any] = partial(QuantizedKVCache, SIZE, self.bits)
        else:
            make = KVCache
        return [make(), RotatingKVCache(12), make()]

    def adopted(self, caches: list[Any]) -> RaggedState:
        if self.start is None:
            return RaggedState(caches)
        return RaggedState(caches, quantization=KvQuantization(Format(SIZE, self.bits), self.start))

    def drawn(self, rows: int, width: int) -> list[list[int]]:
        found: list[list[int]] = self.random.integers(0, POSITIONS, (rows, width)).tolist()
        return found

    def is_quantized(self, length: int) -> bool:
        """Whether mlx-lm, which looks after each position, has quantized a row so long."""
        return self.start is None or (length > 0 and length >= self.start)

    def window(self, state: RaggedState, rows: list[list[int]], new: list[list[int]]) -> list[bool]:
        """Append a window as a model does; tells which rows saw quantized keys."""
        saw = [False] * len(rows)
        for caches, chosen in state.row_caches:
            for layer, held in enumerate(caches):
                index = mx.array([new[row] for row in chosen])
                window = [a[0][:, index].swapaxes(0, 1) for a in contents(layer)]
                mask = held.make_mask(index.shape[1])
                got = held.update_and_fetch(*window)
                if layer == 1:
                    assert isinstance(got[0], mx.array)
                    continue
                quantized = isinstance(got[0], tuple)
                reach = arrays_of(got)[0].shape[2]
                shown = visible(mask, len(chosen), index.shape[1], reach)
                for place, row in enumerate(chosen):
                    whole = [*rows[row], *new[row]]
                    check_bits(got, place, whole, layer, self.bits if quantized else None)
                    queries, _ = grid(len(whole), index.shape[1])
                    causal = np.arange(reach)[None] <= queries
                    assert np.array_equal(shown[place], causal)
                    saw[row] = quantized
        return saw

    def read(self, state: RaggedState, row: list[int], width: int) -> list[int]:
        [new] = self.drawn(1, width)
        state.begin_round(width, reading=True)
        assert self.window(state, [row], [new]) == [self.is_quantized(len(row))]
        state.commit_round()
        return [*row, *new]

    def join(self, chunks: Sequence[int]) -> None:
        state, row = self.adopted(self.fresh()), list[int]()
        for width in chunks:
            row = self.read(state, row, width)
        self.state.prepare_append([state]).commit()
        self.rows.append(row)

    def round(self, width: int, kept: Sequence[int]) -> None:
        """A round whose rows keep what their room lets them."""
        rooms = [self.state.room(row) for row in range(len(self.rows))]
        kept = [min(n, width if r is None else r) for n, r in zip(kept, rooms, strict=True)]
        new = self.drawn(len(self.rows), width)
        self.state.begin_round(width)
        saw = self.window(self.state, self.rows, new)
        self.state.rollback(kept)
        for row, count, quantized in zip(self.rows, kept, saw, strict=True):
            # What was kept must have seen what it sees one by one.
            seen = [self.is_quantized(len(row) + place) for place in range(count)]
            assert seen == [quantized] * count
        self.rows = [[*row, *own[:n]] for row, own, n in zip(self.rows, new, kept, strict=True)]

    def take_back(self, counts: Sequence[int]) -> None:
        self.state.take_back(counts)
        pairs = zip(self.rows, counts, strict=True)
        self.rows = [row[: len(row) - count] for row, count in pairs]

    def check(self) -> None:
        assert self.state.lengths == tuple(map(len, self.rows))
        for number, row in enumerate(self.rows):
            caches = self.state.extract_row(number)
            for layer in (0, 2):
                own, quantized = caches[layer], self.is_quantized(len(row))
                assert own.offset == len(row)
                assert type(own) is (QuantizedKVCache if quantized else KVCache)
                [[more]] = self.drawn(1, 1)
                step = [a[:, :, more : more + 1] for a in contents(layer)]
                got = own.update_and_fetch(*step)  # mlx-lm's own code goes on
                check_bits(got, 0, [*row, more], layer, self.bits if quantized else None)
            assert isinstance(caches[1], RotatingKVCache)


BITS = st.sampled_from([2, 3, 4, 6, 8])


@settings(max_examples=60)
@given(st.data())
def test_quantized_rows_hold_the_bits_of_mlx_lm_fed_one_by_one(data: st.DataObject) -> None:
    start = data.draw(st.none() | st.integers(0, 40), label="start")
    bits = data.draw(BITS, label="bits")
    program = QuantizedProgram(bits, start, data.draw(st.integers(0, 1 << 20), label="seed"))
    chunks = st.lists(st.integers(1, 20), max_size=2)
    program.join(data.draw(chunks, label="chunks"))
    for _ in range(data.draw(st.integers(1, 8), label="steps")):
        count = len(program.rows)
        verb = data.draw(st.sampled_from(["round"] * 4 + ["join", "leave", "back", "single"]))
        counts = partial(st.lists, min_size=count, max_size=count)
        if verb == "join" and count < 3:
            program.join(data.draw(chunks, label="chunks"))
        elif verb == "leave" and count > 1:
            keep = data.draw(st.permutations(range(count)), label="order")[: count - 1]
            program.state.filter_rows(keep)
            program.rows = [program.rows[row] for row in keep]
        elif verb == "back":
            again = program.adopted(program.state.extract_row(0))
            program.state.filter_rows(range(1, count))
            program.state.prepare_append([again]).commit()
            program.rows.append(program.rows.pop(0))
        elif verb == "single":
            program.round(1, [1] * count)
            program.take_back(data.draw(counts(st.integers(0, 1)), label="taken back"))
        else:
            width = data.draw(st.integers(1, 12), label="width")
            program.round(width, data.draw(counts(st.integers(0, width)), label="kept"))
        program.check()


@pytest.mark.parametrize("start", [0, 1, 5, 9])
def test_a_window_keeps_no_position_across_the_place_where_its_row_is_quantized(start: int) -> None:
    program = QuantizedProgram(4, start, seed=0)
    for chunks in ([], [1], [4]):
        program.join(chunks)
    for row in range(3):
        length, room = program.state.lengths[row], program.state.room(row)
        assert room == (None if program.is_quantized(length) else max(start, 1) - length)
    program.round(12, [12, 12, 12])
    program.check()
    assert all(map(program.is_quantized, program.state.lengths))
    assert [program.state.room(row) for row in range(3)] == [None] * 3
    program.round(12, [5, 0, 12])
    program.check()


def test_a_position_is_taken_back_from_before_the_place_where_rows_are_quantized() -> None:
    program = QuantizedProgram(4, 9, seed=0)
    program.join([5])
    program.join([3])
    program.round(1, [1, 1])
    program.take_back([1, 0])
    program.check()
    program.round(7, [3, 5])
    program.check()


@pytest.mark.parametrize("other", [3, 9])
def test_a_row_that_gives_back_the_position_that_made_it_quantized_is_plain_again(
    other: int,
) -> None:
    program = QuantizedProgram(4, 6, seed=0)
    program.join([5])
    program.join([other])
    program.round(1, [1, 1])
    program.take_back([1, 0])
    program.check()
    program.round(3, [3, 3])  # the position once more, which sees plain keys
    program.check()


def test_a_caller_s_cache_becomes_a_quantized_one_in_his_list_alone() -> None:
    program = QuantizedProgram(8, 3, seed=0)
    program.join([5])
    with pytest.raises(RollbackError, match="KVCache has become a QuantizedKVCache"):
        program.state.write_back(0, tuple(program.fresh()[:1] * 3))
    mine = program.fresh()
    window = mine[1]
    program.state.write_back(0, mine)
    assert [type(own) for own in mine] == [QuantizedKVCache, RotatingKVCache, QuantizedKVCache]
    assert mine[1] is window
    check_bits(mine[0].keys_and_values(), 0, program.rows[0], 0, 8)


def test_a_position_with_other_bits_would_be_noticed() -> None:
    program = QuantizedProgram(4, None, seed=0)
    program.join([6])
    program.check()
    program.rows[0][2] = (program.rows[0][2] + 1) % POSITIONS
    with pytest.raises(AssertionError, match="layer 0"):
        program.check()


# A form of one's own.


class TallyCache:
    """How often each of four symbols was read."""

    def __init__(self) -> None:
        self.tally = mx.zeros((1, 4), mx.int32)
        self.offset = 0

    @property
    def state(self) -> mx.array:
        return self.tally

    def add(self, symbols: mx.array) -> mx.array:
        """Tallies ``[B, W, 4]`` after each symbol ``[B, W]``."""
        after = self.tally[:, None] + mx.cumsum(one_hot(symbols), axis=1)
        self.tally, self.offset = after[:, -1], self.offset + symbols.shape[1]
        return after


def one_hot(symbols: mx.array) -> mx.array:
    return (symbols[..., None] == mx.arange(4)).astype(mx.int32)


class TallyRows:
    """The row form of ``TallyCache``."""

    def __init__(self, tally: mx.array) -> None:
        self.tally = tally
        self.window: mx.array | None = None
        self.last = tally

    split = False
    rewinds = False
    longest_chain = 1  # it knows what it was before its last window alone

    def begin_chain(self) -> None:
        """Nothing more is kept."""

    def end_chain(self) -> None:
        """Nothing more was kept."""

    def add(self, symbols: mx.array) -> mx.array:
        self.window = self.tally[:, None] + mx.cumsum(one_hot(symbols), axis=1)
        return self.window

    @classmethod
    def adopt(cls, cache: Any, positions: RowPositions) -> TallyRows:
        return cls(cache.tally)

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[TallyRows, Sequence[int]]], positions: RowPositions
    ) -> TallyRows:
        rows = cls(mx.concatenate([part.tally[mx.array(list(rows))] for part, rows in parts]))
        rows.last = mx.concatenate([part.last[mx.array(list(rows))] for part, rows in parts])
        return rows

    def key(self, row: int) -> Hashable:
        return "tally"

    def begin(self) -> None:
        self.last = self.tally

    def check(self, kept: Sequence[int] | None) -> None:
        """Any part can be kept."""

    def finish(self, kept: Sequence[int] | None) -> None:
        assert self.window is not None
        with_none = mx.concatenate([self.tally[:, None], self.window], axis=1)
        counts = [self.window.shape[1]] * len(self.tally) if kept is None else list(kept)
        self.tally = with_none[mx.arange(len(counts)), mx.array(counts)]

    def take_back(self, counts: Sequence[int]) -> None:
        self.tally = mx.where(mx.array(list(counts))[:, None] > 0, self.last, self.tally)

    def extract(self, row: int, *, share: bool = False) -> TallyCache:
        own = TallyCache()
        own.tally = mx.array(self.tally[row : row + 1])
        own.offset = int(np.array(own.tally).sum())
        return own

    def arrays(self) -> list[mx.array]:
        return [self.tally]

    def bytes_at(self, positions: int) -> int:
        return 16


@pytest.fixture
def registered() -> Iterator[None]:
    with mock.patch.dict(forms._FORMS):
        register_row_form(TallyCache, TallyRows.adopt)
        yield


def test_a_type_that_nobody_registered_decodes_plainly_and_is_named() -> None:
    state = row_state([TallyCache()])
    assert isinstance(state, NativeState)
    assert "TallyCache" in str(state.reason)


def tally_window(state: RaggedState, symbols: Any) -> Any:
    """The tallies that a window's positions have seen, from every layer alike."""
    found = np.zeros((*symbols.shape, 4), np.int64)
    for caches, rows in state.row_caches:
        for held in caches:
            if isinstance(held, TallyRows):
                found[list(rows)] = np.array(held.add(mx.array(symbols[list(rows)])))
            else:
                zeros = mx.zeros((len(rows), 1, symbols.shape[1], 1))
                held.update_and_fetch(zeros, zeros)
    return found


@pytest.mark.usefixtures("registered")
@settings(max_examples=25)
@given(st.data())
def test_a_form_of_one_s_own_decodes_and_rolls_back(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 1000), label="seed"))
    state, rows = RaggedState([TallyCache(), KVCache()]), [np.zeros(0, np.int64)]
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        if len(rows) < 3 and data.draw(st.booleans(), label="join"):
            state.prepare_append([RaggedState([TallyCache(), KVCache()])]).commit()
            rows.append(np.zeros(0, np.int64))
        count, width = len(rows), data.draw(st.integers(1, 5), label="width")
        symbols = random.integers(0, 4, (count, width))
        state.begin_round(width)
        seen = tally_window(state, symbols)
        counts = st.lists(st.integers(0, width), min_size=count, max_size=count)
        kept = data.draw(counts, label="kept")
        state.rollback(kept)
        for row, (was, own) in enumerate(zip(rows, symbols, strict=True)):
            for place in range(width):
                read = np.concatenate([was, own[: place + 1]])
                assert seen[row, place].tolist() == np.bincount(read, minlength=4).tolist()
        pairs = zip(rows, symbols, kept, strict=True)
        rows = [np.concatenate([was, own[:n]]) for was, own, n in pairs]
        if width == 1 and all(kept):
            state.take_back([1] + [0] * (count - 1))
            rows[0] = rows[0][:-1]
        for row, was in enumerate(rows):
            held, keys = state.extract_row(row)
            assert isinstance(held, TallyCache)
            assert held.tally.tolist() == [np.bincount(was, minlength=4).tolist()]
            assert (held.offset, keys.offset, state.lengths[row]) == (len(was),) * 3


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", [TallyCache, KVCache, CacheList])
def test_a_type_has_one_row_form(kind: type[Any]) -> None:
    held = dict(forms._FORMS)
    with pytest.raises(OptionError, match=f"{kind.__name__} has a row form already"):
        register_row_form(kind, TallyRows.adopt)
    assert held == forms._FORMS


# Mistakes, over every form at once.


def of_every_form() -> Mixture:
    """Rows in several batches, one of them cold."""
    everything = MIXTURES["everything"]
    return Mixture.of(everything, Together.ANY, [12, 3], [7], [])


def unchanged(mixture: Mixture, verb: Callable[[], object], error: type[Exception]) -> None:
    """A verb that is refused, with one line, and leaves lengths and arrays as they are."""
    state = mixture.state
    before = state.lengths, state.open_width, [id(array) for array in state.arrays()]
    with pytest.raises(error) as raised:
        verb()
    assert len(str(raised.value).splitlines()) == 1
    assert before == (state.lengths, state.open_width, [id(array) for array in state.arrays()])


def test_a_round_is_begun_once_and_ended_once() -> None:
    mixture = of_every_form()
    state = mixture.state
    unchanged(mixture, state.commit_round, NoOpenRoundError)
    unchanged(mixture, partial(state.rollback, [0, 0, 0]), NoOpenRoundError)
    for width in (0, -1):
        unchanged(mixture, partial(state.begin_round, width), RollbackError)
    new = mixture.programs.window(state, mixture.rows, 4)
    verbs: list[Callable[[], object]] = [
        partial(state.begin_round, 4),
        partial(state.begin_round, 1, reading=True),
        partial(state.take_back, [0, 0, 0]),
        partial(state.filter_rows, [0]),
        partial(state.extract_row, 0),
        partial(state.write_back, 0, mixture.programs.make()),
        partial(state.prepare_append, []),
    ]
    for verb in verbs:
        unchanged(mixture, verb, RoundOpenError)
    state.rollback([1, 4, 2])
    kept = zip(mixture.rows, new, (1, 4, 2), strict=True)
    mixture.rows = [[*row, *own[:n]] for row, own, n in kept]
    mixture.check()
    unchanged(mixture, state.commit_round, NoOpenRoundError)
    mixture.round(3, [3, 0, 1])
    mixture.check()


@pytest.mark.parametrize(
    "kept", [[5, 0, 0], [0, 0, 5], [-1, 0, 0], [0, 0, -1], [1, 1], [1, 1, 1, 1], []]
)
@pytest.mark.parametrize("width", [4, 40])
def test_a_count_out_of_range_changes_nothing_in_any_batch(kept: list[int], width: int) -> None:
    mixture = of_every_form()
    assert len(mixture.state.row_caches) == 3
    kept = [width + 1 if count == 5 else count for count in kept]
    new = mixture.programs.window(mixture.state, mixture.rows, width)
    unchanged(mixture, partial(mixture.state.rollback, kept), RollbackError)
    mixture.state.rollback([2, 0, 3])
    pairs = zip(mixture.rows, new, (2, 0, 3), strict=True)
    mixture.rows = [[*row, *own[:n]] for row, own, n in pairs]
    mixture.check()


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("wrong", [1, 3, 50])
def test_a_window_of_another_width_is_refused_by_every_form(place: int, wrong: int) -> None:
    everything = MIXTURES["everything"]
    layer = everything.layers[place]
    if isinstance(layer, Folding):  # its arrays have no positions; the others of a model have
        layer = Full(partial(QuantizedKVCache, 32, 8))
    state = RaggedState([layer.cache()])
    window = mx.zeros((1, 2, 50, 32))
    state.begin_round(2)
    held = state.row_caches[0][0][0]
    with pytest.raises(RollbackError, match=f"window of {wrong} positions was appended") as raised:
        held.update_and_fetch(window[:, :, :wrong], window[:, :, :wrong])
    assert "begin_round" in str(raised.value)
    assert held.arrays() == []
    held.update_and_fetch(window[:, :, :2], window[:, :, :2])
    with pytest.raises(RollbackError, match="window of 2 positions"):  # twice
        held.update_and_fetch(window[:, :, :2], window[:, :, :2])
    state.rollback([1])
    assert state.lengths == (1,)


@pytest.mark.parametrize("keep", [[0, 0], [-1], [3], [0, 1, 2, 3]])
def test_rows_that_are_not_there_cannot_be_kept_or_taken(keep: list[int]) -> None:
    mixture = of_every_form()
    unchanged(mixture, partial(mixture.state.filter_rows, keep), RowIndexError)
    for row in (-1, 3):
        unchanged(mixture, partial(mixture.state.extract_row, row), RowIndexError)
        give = partial(mixture.state.write_back, row, mixture.programs.make())
        unchanged(mixture, give, RowIndexError)
    mixture.check()


REWINDING = ("concatenated", "list of attention")


@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind not in REWINDING])
def test_only_a_position_that_the_last_window_kept_can_be_taken_back(kind: str) -> None:
    mixture = Mixture.of(MIXTURES[kind], Together.ANY, [4], [6])
    mixture.round(1, [0, 1])
    for counts in ([1, 0], [1, 1], [0, 2], [0, -1], [0], [0, 1, 0]):
        unchanged(mixture, partial(mixture.state.take_back, counts), RollbackError)
    mixture.take_back([0, 1])
    mixture.check()
    unchanged(mixture, partial(mixture.state.take_back, [0, 1]), RollbackError)
    mixture.round(2, [1, 2])
    unchanged(mixture, partial(mixture.state.take_back, [1, 0]), RollbackError)
    mixture.check()


@pytest.mark.parametrize("kind", REWINDING)
@settings(max_examples=15)
@given(st.data())
def test_rows_of_attention_take_back_any_number_of_positions(
    kind: str, data: st.DataObject
) -> None:
    mixture = Mixture.of(MIXTURES[kind], Together.ANY, [4], [6], [300])
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        for width in data.draw(st.lists(st.integers(1, 5), max_size=3), label="windows"):
            mixture.round(width, [width] * 3)
        lengths = mixture.state.lengths
        for counts in ([lengths[0] + 1, 0, 0], [0, -1, 0], [0, 0], [0, 0, 0, 0]):
            unchanged(mixture, partial(mixture.state.take_back, counts), RollbackError)
        counts = [data.draw(st.integers(0, length), label="taken back") for length in lengths]
        mixture.take_back(counts)
        mixture.check()
    mixture.leave([2, 0])
    mixture.check()


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("first", ["attention", "recurrent"])
def test_a_rollback_that_one_layer_refuses_is_refused_before_another_moves(
    first: str, width: int
) -> None:
    each = plain(Window(5))
    place = 0 if first == "attention" else 1
    caches = [RotatingKVCache(5), ArraysCache(1)]
    state = RaggedState(caches if place == 0 else caches[::-1])
    row: list[int] = []
    for kept in (3, width):
        [new] = each.tags(1, kept)
        state.begin_round(kept)
        held = state.row_caches[0][0]
        held[place].update_and_fetch(*numbers([new], 0))
        held[1 - place][0] = mx.array([[kept]])  # nobody records it
        if kept == width:
            with pytest.raises(RollbackError, match="nobody recorded"):
                state.rollback([2])
            assert (state.lengths, state.open_width) == ((3,), width)
        state.commit_round()
        row += new
    window = state.extract_row(0)[place]
    go_on_in_mlx_lm(each.layers, [window], row, each.tags(1, 1)[0])
