"""What a machine was measured at is remembered for that machine and model, and never believed."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import target
from tiny_models import build_model, tiny_model

from specdec.cost import Costs, CostStore, Kept, Kind, Measured, Point, identity_of
from specdec.cost import costs as costs_module
from specdec.cost import store as store_module

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LAYERS: Any = nn  # its stubs lack names
KEPT = Kept(
    {Point(1, 1, 512): 1.5, Point(8, 4, 512): 2.5},
    {1: 1.25, 8: 2.0},
    {"ngram": {Kind(1, 3, 4): 3.5, Kind(1, 0, 1): 1.5}},
)

# The store.

TIMES = st.floats(1e-6, 1e9)
COUNTS = st.integers(0, 1 << 40)


@given(
    st.dictionaries(st.builds(Point, COUNTS, COUNTS, COUNTS), TIMES),
    st.dictionaries(COUNTS, TIMES),
    st.dictionaries(st.text(), st.dictionaries(st.builds(Kind, COUNTS, COUNTS, COUNTS), TIMES)),
    st.text(),
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    windows: dict[Point, float],
    plain: dict[int, float],
    rounds: dict[str, dict[Kind, float]],
    identity: str,
) -> None:
    folder = tmp_path_factory.mktemp("costs")
    kept = Kept(windows, plain, rounds)
    CostStore(folder).write(identity, kept)
    assert CostStore(folder).read(identity) == kept
    assert CostStore(folder).read(identity + "x") == Kept()
    assert len(list(folder.iterdir())) == 1


def test_a_file_of_another_identity_is_not_read(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    store.write("this", KEPT)
    store._file("this").rename(store._file("that"))
    assert store.read("that") == Kept()


def test_two_processes_add_to_each_other_and_the_last_measurement_counts(tmp_path: Path) -> None:
    one, other = CostStore(tmp_path), CostStore(tmp_path)
    assert one.read("m") == other.read("m") == Kept()
    one.write("m", KEPT)
    drafted = {"ngram": {Kind(1, 3, 4): 7.0, Kind(2, 1, 2): 8.0}, "mtp": {Kind(1, 1, 2): 9.0}}
    other.write("m", Kept({Point(1, 1, 512): 1.75, Point(2, 1, 512): 6.0}, {2: 5.0}, drafted))
    assert one.read("m") == Kept(
        {Point(1, 1, 512): 1.75, Point(2, 1, 512): 6.0, Point(8, 4, 512): 2.5},
        {1: 1.25, 2: 5.0, 8: 2.0},
        {
            "ngram": {Kind(1, 0, 1): 1.5, Kind(1, 3, 4): 7.0, Kind(2, 1, 2): 8.0},
            "mtp": {Kind(1, 1, 2): 9.0},
        },
    )


def test_what_is_forgotten_is_gone_and_nothing_else(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    store.forget("m")
    store.write("m", KEPT)
    store.write("n", KEPT)
    store.forget("m")
    assert store.read("m") == Kept()
    assert store.read("n") == KEPT


# Nothing of it is a time of rounds: wrong types, wrong counts, wrong numbers, in every place.
_ODD: tuple[Any, ...] = (None, 3, "x", [], {}, [[]], [1], [[1, 2, 3]], {"x": 1}, "1111")
_NUMBERS: tuple[Any, ...] = (None, "1", "a", 1.5, -1, True, [], {}, 10**400)
_TIMES: tuple[Any, ...] = (None, "x", 0, -1.0, float("nan"), float("inf"), 10**400, [], {})


def hostile() -> list[Any]:
    right: dict[str, Any] = {"layout": 1, "identity": "m", "windows": [], "plain": [], "rounds": {}}
    said: list[Any] = [None, 3, "x", [], {}, [right], True]
    said += [{k: v for k, v in right.items() if k != name} for name in right]
    layouts: tuple[Any, ...] = (0, 2, None, "1", [])
    said += [{**right, "layout": layout} for layout in layouts]
    for name in ("windows", "plain", "rounds"):
        said += [{**right, name: odd} for odd in _ODD if odd not in ([], {})]
    entries = [(wrong, 1.0) for wrong in _NUMBERS] + [(1, wrong) for wrong in _TIMES]
    for count, took in entries:
        said.append({**right, "plain": [[1, 1.0], [count, took]]})
        said.append({**right, "windows": [[1, 1, 512, 1.0], [count, 1, 512, took]]})
        said.append({**right, "windows": [[1, 1, 512, 1.0], [1, 1, count, took]]})
        said.append({**right, "rounds": {"ngram": [[1, 1, 2, 1.0], [1, count, 2, took]]}})
    said += [{**right, "rounds": {"ngram": odd}} for odd in (None, 3, [1], [[1, 2]], "abcd")]
    return said


def test_what_is_no_file_of_times_counts_as_nothing_and_is_replaced(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    store.write("m", KEPT)
    file = store._file("m")
    whole = file.read_bytes()
    contents = [whole[:end] for end in range(len(whole))]
    contents += [json.dumps(said).encode() for said in hostile()]
    contents += [b"\xff\xfe", b"\0" * 99, b"[" * 200_000, b'{"a":' * 200_000, b"1" * 9999]
    for content in contents:
        file.write_bytes(content)
        assert store.read("m") == Kept(), content[:99]
    for content in contents[:: len(contents) // 9]:
        file.write_bytes(content)
        store.write("m", KEPT)
        assert store.read("m") == KEPT


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CostStore(tmp_path / "file" / "costs")
    store.write("m", KEPT)
    store.forget("m")
    assert store.read("m") == Kept()
    blocked = CostStore(tmp_path / "blocked")
    blocked._file("m").mkdir(parents=True)
    blocked.write("m", KEPT)
    blocked.forget("m")
    assert blocked.read("m") == Kept()
    assert [each.name for each in (tmp_path / "blocked").iterdir()] == [blocked._file("m").name]


# Identities.


def test_equal_models_have_one_identity_and_others_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_model("qwen3", 1)
    quantized, coarse = build_model("qwen3"), build_model("qwen3")
    LAYERS.quantize(quantized, group_size=32, bits=4)
    LAYERS.quantize(coarse, group_size=32, bits=8)
    half = build_model("qwen3")
    half.set_dtype(mx.bfloat16)
    deeper = build_model("qwen3", num_hidden_layers=3)
    wider = build_model("qwen3", intermediate_size=128)
    models = [whole, quantized, coarse, half, deeper, wider, build_model("llama")]
    names = [identity_of(each) for each in models]
    assert len(set(names)) == len(models)
    assert identity_of(tiny_model("qwen3")) == names[0]  # other weights take the same
    monkeypatch.setattr(store_module, "version", lambda _: "another")
    assert identity_of(whole) != names[0]


def test_models_of_one_shape_and_another_code_differ() -> None:
    kinds = [type("M", (LAYERS.Linear,), {"__module__": name}) for name in ("a", "b", "a")]
    first, second, again = (identity_of(kind(2, 2)) for kind in kinds)
    assert first != second
    assert first == again


def test_what_has_no_parameters_has_no_identity() -> None:
    assert identity_of(None) is None
    assert identity_of(object()) is None


# Costs: who measures, and when.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes that were measured, each a millisecond a position."""
    sizes: list[int] = []

    def measure(_: object, batch: int, context: int, *, widths: Sequence[int], **__: Any) -> Any:
        sizes.append(batch)
        return Measured({Point(batch, width, context): batch * width for width in widths}, batch)

    monkeypatch.setattr(costs_module, "measure", measure)
    return sizes


def costs(store: CostStore | None = None, **options: Any) -> Costs:
    options = {"default": 4, "most": 15, "seconds": 1.0, **options}
    return Costs(target(), "ngram", store=store, **options)


def test_each_power_of_two_is_measured_once_and_remembered(
    measured: list[int], tmp_path: Path
) -> None:
    store = CostStore(tmp_path)
    first = costs(store)
    for rows in (1, 1, 3, 4, 2, 4, 5, 8):
        first.prepare(rows)
    assert measured == [1, 4, 2, 8]
    assert first.window(4, 3) == 12
    later = costs(store)
    for rows in (1, 2, 3, 7):
        later.prepare(rows)
    assert measured == [1, 4, 2, 8]
    assert later.window(4, 3) == 12
    assert later.window(4, 1) == 4
    later.prepare(9)
    assert measured == [1, 4, 2, 8, 16]
    later.forget()
    assert store.read(str(identity_of(target().identity))) == Kept()
    later.prepare(3)
    assert measured == [1, 4, 2, 8, 16, 4]


def test_nothing_is_measured_in_no_time(measured: list[int]) -> None:
    costs(seconds=0).prepare(1)
    assert measured == []


def test_rounds_are_remembered_by_drafter(tmp_path: Path) -> None:
    store = CostStore(tmp_path)
    first = costs(store)
    for _ in range(12):
        first.times.observe(1, 3, 4, 3, 20.0)
    first.keep()
    assert costs(store).times.drafted(1, 3, lambda n: n) == pytest.approx(20)
    other = Costs(target(), "mtp", default=4, most=15, store=store)
    assert not other.times.knows(1, 3)


def test_a_measuring_that_fails_is_logged_once_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(costs_module, "measure", fail)
    tried = costs()
    with caplog.at_level(logging.WARNING, "specdec"):
        tried.prepare(1)
        tried.prepare(1)
    assert ["could not be measured" in each.getMessage() for each in caplog.records] == [True]
    assert tried.window(1, 4) > 0
    assert tried.padded(1, 3) == 3


@pytest.mark.parametrize("most", [1, 3, 7, 15])
@pytest.mark.parametrize("default", [0, 1, 4, 20])
def test_depths_to_choose_from_are_those_that_may_be_asked_for(most: int, default: int) -> None:
    known = costs(default=default, most=most)
    assert known.depths == sorted(set(known.depths))
    assert known.depths[0] >= 1
    assert known.depths[-1] == most
    assert known.default in known.depths
    assert known.default == max(1, min(default, most))
