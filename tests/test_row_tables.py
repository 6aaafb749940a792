"""Operations by number of rows: what is declared, what is measured, and that padding tells nothing.

On a CPU nothing is measured; a fake clock and counts that are given stand in for a GPU here.
"""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec
import specdec.targets.mlx_lm as mlx_lm_target
from specdec import SamplingOptions
from specdec.contract import RowTable
from specdec.drafting import Chooser, head_of, padding
from specdec.drafting.padding import MOST, PaddedRows, RowCounts, cheapest_rows, counts_of
from specdec.errors import OptionError
from specdec.sampling import RowSamplers
from specdec_mtp.select import HeadChooser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROWS = st.integers(1, 40)


class Stairs:
    """An operation whose time is told by the number of its rows, and the clock that it moves."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.now, self.calls = seconds, 0.0, list[int]()

    def __call__(self, x: mx.array) -> mx.array:
        self.calls.append(x.shape[0])
        self.now += self.seconds(x.shape[0])
        return x + 1

    def clock(self) -> float:
        return self.now

    def cheapest(self, rows: int, **options: Any) -> int:
        return cheapest_rows(self, mx.zeros((1, 1, 4)), rows, clock=self.clock, **options)


def double(x: mx.array) -> mx.array:
    return x * 2


def named(calls: list[str], name: str) -> Callable[..., mx.array]:
    def operation(x: mx.array, *rest: Any, **options: Any) -> mx.array:
        calls.append(name)
        assert (rest, options) == ((3,), {"by": 4})
        return x

    return operation


# RowTable


@given(declared=st.sets(ROWS), rows=ROWS)
def test_a_declared_operation_is_called_for_its_rows_and_no_others(
    declared: set[int], rows: int
) -> None:
    calls: list[str] = []
    table = RowTable(named(calls, "default"), {n: named(calls, str(n)) for n in declared})
    expected = str(rows) if rows in declared else "default"
    x = mx.zeros((rows, 2))
    assert table.at(rows)(x, 3, by=4) is x
    assert table(x, 3, by=4) is x
    assert calls == [expected, expected]


@given(declared=st.sets(ROWS), rows=ROWS)
def test_what_is_made_of_a_table_is_made_of_each_operation_once(
    declared: set[int], rows: int
) -> None:
    made: list[object] = []

    def change(operation: Callable[[int], int]) -> Callable[[int], int]:
        made.append(operation)
        return lambda x: -operation(x)

    def plus(n: int) -> Callable[[int], int]:
        return lambda x: x + n

    table = RowTable(plus(0), {n: plus(n) for n in declared})
    mapped = table.map(change)
    assert made == [*table.declared.values(), table.default]
    assert mapped.at(rows)(100) == -table.at(rows)(100)
    assert set(mapped.declared) == declared


def test_a_callable_is_a_table_that_declares_nothing_and_a_table_is_itself() -> None:
    table = RowTable.of(double)
    assert (table.default, dict(table.declared)) == (double, {})
    assert RowTable.of(table) is table


def test_a_table_keeps_what_it_was_made_with() -> None:
    given_: dict[int, Any] = {1: double}
    table = RowTable(double, given_)
    given_[2] = None
    assert set(table.declared) == {1}
    with pytest.raises(TypeError):
        table.declared[3] = double  # type: ignore[index]
    with pytest.raises(AttributeError):
        table.default = abs  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    ("default", "declared", "said"),
    [
        (None, {}, "the default operation is None; give a callable"),
        (double, {0: double}, "0 is no number of rows; give whole numbers of 1 or more"),
        (double, {-2: double}, "-2 is no number of rows; give whole numbers of 1 or more"),
        (double, {True: double}, "True is no number of rows; give whole numbers of 1 or more"),
        (double, {1.0: double}, "1.0 is no number of rows; give whole numbers of 1 or more"),
        (double, {"2": double}, "'2' is no number of rows; give whole numbers of 1 or more"),
        (double, {2: 7}, "the operation for 2 rows is 7; give a callable"),
        (
            double,
            5,
            "the declared operations are 5; give a mapping of numbers of rows to callables",
        ),
    ],
)
def test_a_table_that_cannot_work_is_refused_in_one_line(
    default: Any, declared: Any, said: str
) -> None:
    with pytest.raises(OptionError) as refused:
        RowTable(default, declared)
    assert str(refused.value) == f"row table: {said}"


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, None])
def test_there_is_no_operation_for_no_rows(rows: Any) -> None:
    with pytest.raises(OptionError) as refused:
        RowTable(double).at(rows)
    assert str(refused.value) == f"row table: asked for {rows!r} rows; ask for 1 or more"


# Measuring


@pytest.mark.parametrize(
    ("rows", "cheapest"), [(1, 1), (2, 2), (3, 8), (5, 8), (8, 8), (9, 9), (11, 32), (31, 32)]
)
def test_the_cheapest_number_of_rows_is_found_on_a_staircase(rows: int, cheapest: int) -> None:
    """As on an H200: steps down at 8 and at 32."""
    times = {1: 1.0, 2: 1.3, 8: 1.5, 9: 1.7, 32: 1.8}
    stairs = Stairs(lambda n: times.get(n, 2.0) * 1e-4)
    assert stairs.cheapest(rows) == cheapest


def test_a_wider_one_must_save_a_twentieth() -> None:
    for saved, expected in ((0.04, 5), (0.06, 8)):
        times = {8: 1e-4 * (1 - saved)}
        assert Stairs(lambda n, times=times: times.get(n, 1e-4)).cheapest(5) == expected  # type: ignore[misc]


def test_the_first_calls_do_not_count_and_one_slow_call_changes_nothing() -> None:
    seen: dict[int, int] = {}

    def seconds(rows: int) -> float:
        seen[rows] = seen.get(rows, 0) + 1
        if rows == 4:
            return 1.0 if seen[rows] in (1, 4) else 1e-4  # loading a kernel; somebody else's work
        return 2e-4

    assert Stairs(seconds).cheapest(3) == 4


def test_numbers_of_rows_take_turns() -> None:
    stairs = Stairs(lambda n: 1e-4)
    assert stairs.cheapest(3) == 3
    counts = [3, 4, 8, 16, 32]
    assert stairs.calls[:10] == sorted(counts * 2)  # a first call of each, and a look
    turns = [stairs.calls[at : at + 5] for at in range(10, len(stairs.calls), 5)]
    assert len(turns) >= 5
    assert turns == [counts[turn % 5 :] + counts[: turn % 5] for turn in range(len(turns))]


@given(rows=ROWS, most=st.integers(1, 64))
def test_only_rounder_numbers_within_the_limit_are_tried(rows: int, most: int) -> None:
    tried = padding.candidates(rows, most)
    assert tried[0] == rows
    assert tried == sorted(set(tried))
    assert all(rows < count <= most and count % 2 == 0 for count in tried[1:])
    assert len(tried) <= 6


@settings(max_examples=30)
@given(rows=st.integers(1, 31), once=st.floats(1e-5, 0.1), budget=st.floats(0.001, 0.1))
def test_measuring_keeps_to_its_time(rows: int, once: float, budget: float) -> None:
    stairs = Stairs(lambda n: once)
    assert stairs.cheapest(rows, budget=budget) == rows
    assert stairs.now <= budget + 10 * once  # first calls, and a turn that has begun


def test_a_number_of_rows_that_is_far_too_dear_is_looked_at_once() -> None:
    stairs = Stairs(lambda n: 1e-4 * (1 if n == 3 else n))
    assert stairs.cheapest(3) == 3
    assert sorted(stairs.calls) == sorted([3, 4, 8, 16, 32] * 2)
    assert stairs.now < padding.BUDGET


def test_a_median_that_is_chance_is_not_believed() -> None:
    seen: dict[int, int] = {}

    def seconds(rows: int) -> float:  # a busy machine: either is cheaper in some turns
        seen[rows] = seen.get(rows, 0) + 1
        return 1e-4 * (1 + ((seen[rows] * 7 + (0 if rows == 5 else 2)) % 3))

    stairs = Stairs(seconds)
    assert stairs.cheapest(5) == 5


def test_an_operation_that_takes_longer_than_the_time_is_left_as_it_is() -> None:
    stairs = Stairs(lambda n: 1.0 if n == 3 else 0.1)
    assert stairs.cheapest(3) == 3
    assert set(stairs.calls) == {3}


# Padding


def counts(table: Mapping[int, int]) -> RowCounts:
    return RowCounts(measures=lambda: True, find=lambda _op, _like, rows: table.get(rows, rows))


@settings(max_examples=40)
@given(data=st.data(), rows=st.integers(1, 9), axes=st.sampled_from([1, 2]))
def test_padding_changes_no_value(data: st.DataObject, rows: int, axes: int) -> None:
    count = data.draw(st.integers(rows, 16))
    columns = data.draw(st.sampled_from([n for n in (1, 2, 3) if rows % n == 0]))
    weight = mx.random.normal((8, 12), key=mx.random.key(1))
    x = mx.random.normal((rows, 8), key=mx.random.key(rows))
    x = x.reshape(rows // columns, columns, 8) if axes == 2 else x
    given_: list[tuple[int, ...]] = []

    def head(h: mx.array) -> mx.array:
        given_.append(tuple(h.shape))
        return h @ weight

    padded = PaddedRows(head, counts({rows: count}), axes=axes)(x)
    assert given_ == [
        tuple(x.shape) if count == rows else (count, 8) if axes == 1 else (count, 1, 8)
    ]
    assert padded.shape == (*x.shape[:-1], 12)
    assert mx.allclose(padded, x @ weight, atol=1e-5).item()


def test_the_demo_models_head_gives_a_row_the_same_bits_however_it_is_padded(
    demo: tuple[Any, Any],
) -> None:
    port: Any = specdec.bind_target(demo[0]).hidden_taps
    hidden = mx.random.normal((3, 1, port.hidden_size), key=mx.random.key(0))
    hidden = hidden.astype(port.embed(mx.zeros((1, 1), mx.int32)).dtype)
    alone = port.logits(hidden)
    for count in (4, 8):
        padded = PaddedRows(port.logits, counts({3: count}), axes=2)
        assert mx.array_equal(padded(hidden), alone).item()
    assert not mx.array_equal(alone[0], alone[1]).item()


@pytest.mark.skipif(padding.on_gpu(), reason="tells what a CPU does")
def test_on_a_cpu_nothing_is_measured_and_the_input_is_passed_as_it_is() -> None:
    before, x, seen = padding.measured(), mx.ones((3, 2, 4)), list[mx.array]()

    def head(h: mx.array) -> mx.array:
        seen.append(h)
        return h

    for _ in range(2):
        head_of(head, head)(x)
    assert [h is x for h in seen] == [True, True]
    assert padding.measured() == before


def test_each_shape_is_measured_once_and_said_so_in_all_threads() -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    started = threading.Barrier(8)

    def find(_operation: object, like: mx.array, rows: int) -> int:
        asked.append((rows, tuple(like.shape[1:])))
        threading.Event().wait(0.02)
        return rows + 1

    held = RowCounts(measures=lambda: True, find=find)
    before, found = padding.measured(), list[int]()

    def use() -> None:
        started.wait()
        found.extend(held.at(double, mx.zeros((2, 1, 4)), rows) for rows in (2, 3))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == [(2, (1, 4)), (3, (1, 4))]
    assert sorted(found) == [3] * 8 + [4] * 8
    assert 0.04 <= padding.measured() - before < 1
    held.at(double, mx.zeros((2, 1, 5)), 2)
    held.at(double, mx.zeros((2, 1, 5), mx.float16), 2)
    assert len(asked) == 4, "another shape and another type are others"
    assert held.at(double, mx.zeros((MOST, 1, 4)), MOST) == MOST
    assert len(asked) == 4


def test_an_operation_that_cannot_take_more_rows_is_left_as_it_is() -> None:
    calls: list[int] = []

    def head(x: mx.array) -> mx.array:
        calls.append(x.shape[0])
        if x.shape[0] > 3:
            raise RuntimeError("out of memory")
        return x

    padded = PaddedRows(head, RowCounts(measures=lambda: True))
    x = mx.ones((3, 4))
    assert padded(x) is x
    assert max(calls) > 3, "it was tried"
    calls.clear()
    assert padded(x) is x
    assert calls == [3], "and is not tried again"


def test_what_was_measured_is_remembered_as_long_as_its_owner_lives() -> None:
    class Owner:
        pass

    class Slotted:
        __slots__ = ()

    owner, other = Owner(), Owner()
    assert counts_of(owner) is counts_of(owner)
    assert counts_of(owner) is not counts_of(other)
    place, held = id(owner), len(padding._counts)
    del owner
    gc.collect()
    assert place not in padding._counts
    assert len(padding._counts) == held - 1
    assert counts_of(Slotted()) is not None


# Who uses it


class Port:
    """A target's port whose head is a table; what it was asked for is noted."""

    def __init__(self, declared: tuple[int, ...]) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.logits = RowTable(self._form("default"), {n: self._form(str(n)) for n in declared})

    def _form(self, name: str) -> Callable[[mx.array], mx.array]:
        def head(hidden: mx.array) -> mx.array:
            self.calls.append((name, tuple(hidden.shape)))
            return hidden @ mx.eye(4)

        return head


def test_a_head_is_called_as_declared_else_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port(declared=(2,))
    monkeypatch.setattr("specdec.drafting.choose.counts_of", lambda _owner: counts({2: 8, 3: 4}))
    head = head_of(port.logits, port)
    for rows in (1, 2, 3):
        hidden = mx.random.normal((rows, 1, 4), key=mx.random.key(rows))
        assert mx.array_equal(head(hidden), hidden).item()
    assert port.calls == [("default", (1, 1, 4)), ("2", (2, 1, 4)), ("default", (4, 1, 4))]


def samplers(rows: int) -> RowSamplers:
    made = RowSamplers()
    made.prepare_append([(SamplingOptions(), 0)] * rows).commit()
    return made


def test_an_mtp_head_scores_through_the_targets_table() -> None:
    port = Port(declared=(1,))
    for rows in (1, 2):
        choose = HeadChooser(port, samplers(rows), 4, None)  # type: ignore[arg-type]
        hidden = mx.eye(4)[:rows][:, None]
        assert choose(hidden, [0] * rows).ids.tolist() == list(range(rows))
    assert port.calls == [("1", (1, 1, 4)), ("default", (2, 1, 4))]
    assert Chooser(samplers(1), 4)(mx.eye(4)[2:3], [0]).ids.tolist() == [2]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return specdec.load_model("demo-qwen3")


def text_of(demo: tuple[Any, Any], loaded: Any) -> tuple[list[int], list[bool], int]:
    """Tokens, which of them were drafted, and drafts accepted."""
    model, tokenizer = demo
    responses = list(
        specdec.stream_generate(
            model,
            tokenizer,
            "The old man",
            drafter=loaded,
            num_draft_tokens=3,
            max_tokens=16,
        )
    )
    stats = responses[-1].stats
    assert stats is not None
    return [r.token for r in responses], [r.from_draft for r in responses], stats.accepted


def heads(patch: pytest.MonkeyPatch, loaded: Any, head: Any, declared: dict[int, Any]) -> None:
    """Give every target a table of heads, and let the drafter bind its target anew."""
    patch.setattr(loaded.provider.grouped, "_bound", None)
    table = property(lambda port: RowTable(lambda h: head(port, h), declared))
    patch.setattr(mlx_lm_target._HiddenPort, "logits", table)


def test_a_drafter_drafts_the_same_padded_and_declared_and_otherwise_with_another_head(
    demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = specdec.load_drafter("demo-qwen3-dflash", *demo)
    plain = text_of(demo, loaded)
    assert plain[2] > 0
    head, shapes = mlx_lm_target._HiddenPort.logits, list[tuple[int, ...]]()
    port: Any = loaded.target.hidden_taps

    def noting(port: Any, hidden: mx.array) -> mx.array:
        shapes.append(tuple(hidden.shape))
        return head(port, hidden)

    with monkeypatch.context() as patch:  # three slots as the first three of eight rows
        heads(patch, loaded, noting, {})
        patch.setattr("specdec.drafting.choose.counts_of", lambda _owner: counts({3: 8}))
        assert text_of(demo, loaded) == plain
        assert (8, 1, demo[0].args.hidden_size) in shapes
    shapes.clear()
    with monkeypatch.context() as patch:  # a wrong head is of no use, and of no harm
        heads(patch, loaded, noting, {1: lambda h: -head(port, h)})
        tokens, _, accepted = text_of(demo, loaded)
        assert tokens == plain[0]
        assert accepted == 0
        assert shapes == []
