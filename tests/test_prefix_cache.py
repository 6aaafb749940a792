"""The prefix cache against a plain model of itself, and what may go wrong around it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_caches

from specdec.checkpoints import PrefixCache, PrefixEntry, disk, to_bytes
from specdec.checkpoints.entry import decode, encode
from specdec.checkpoints.index import PrefixIndex, token_bytes, tokens_of
from specdec.checkpoints.memory import Key
from specdec.checkpoints.seal import sealed
from specdec.checkpoints.tensors import size_bound
from specdec.contract import Attachment, RowCheckpoint
from specdec.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

PLENTY = 1 << 30


def kv(value: float, positions: int = 3) -> list[Any]:
    """One row of one cache that holds ``value`` everywhere; it tells no place."""
    cache = mlx_caches.ArraysCache(2)
    cache[0] = mx.full((1, 2, positions, 4), value)
    cache[1] = cache[0] + 0.5
    return [cache]


def read(count: int, value: float = 1.0) -> list[Any]:
    """One row of one KVCache that has read so many tokens."""
    cache = mlx_caches.KVCache()
    cache.update_and_fetch(mx.full((1, 2, count, 4), value), mx.full((1, 2, count, 4), value))
    return [cache]


def drafted(value: float) -> RowCheckpoint:
    arrays = {"hidden": mx.full((2, 3), value).T, "none": mx.zeros((0,), mx.int32)}
    attachment = Attachment(schema="s", arrays=arrays, metadata={"value": value})
    return RowCheckpoint(namespace="drafter", processed_tokens=3, attachment=attachment)


def value_of(caches: Sequence[Any]) -> float:
    (cache,) = caches
    keys, values = cache[0], cache[1]
    value = keys.reshape(-1)[0].item()
    assert mx.all(keys == value).item()
    assert mx.all(values == value + 0.5).item()
    return float(value)


def spoil(caches: Sequence[Any]) -> None:
    """What a generation does with caches: assign into them and replace parts."""
    for cache in caches:
        cache[0][:] = -1
        cache[1][..., 0, :] = -2
        mx.eval(cache.state)
        cache[0] = mx.zeros((1, 2, 1, 4))


def taken(cache: PrefixCache, namespace: str, prompt: Sequence[int], longest: int = 99) -> Any:
    """``(tokens, value, source)`` of a hit that is released at once, or ``None``."""
    hit = cache.take(namespace, prompt, longest=longest)
    if hit is None:
        return None
    with hit:
        return hit.tokens, value_of(hit.caches), hit.source


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.safetensors") if path.is_file())


def alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return max(n for n in range(min(len(a), len(b)) + 1) if list(a[:n]) == list(b[:n]))


def sealed_parts(entry: PrefixEntry, namespace: str) -> tuple[Any, dict[str, str]]:
    """What is written of an entry."""
    arrays, header = encode(entry, namespace)
    return arrays, sealed(arrays, header)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
NAMESPACES = st.sampled_from(["a", "b"])


def length_of(key: Any) -> int:
    return len(key[1])


def holds_any_entry(machine: Any) -> bool:
    return bool(machine.memory or machine.disk)


def holds_some(machine: Any) -> bool:
    return bool(machine.held)


def holds_none(machine: Any) -> bool:
    return not machine.held


class Against(RuleBasedStateMachine):
    """Every answer and every limit, against dicts in the order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.memory: OrderedDict[Any, tuple[int, float]] = OrderedDict()
        self.disk: OrderedDict[Any, tuple[int, float, int]] = OrderedDict()
        self.held: list[tuple[Any, Any, tuple[int, float]]] = []
        self.count = 0.0

    @initialize(
        most=st.integers(300, 1500),
        on_disk=st.integers(2500, 8000),
        puts=st.lists(st.tuples(NAMESPACES, TOKENS, st.integers(1, 5)), min_size=4, max_size=12),
    )
    def start(self, most: int, on_disk: int, puts: list[tuple[str, list[int], int]]) -> None:
        self.most, self.on_disk = most, on_disk
        self.open()
        other = self.directory / "v2" / "x.safetensors"
        strange = self.path(("a", (7,))).with_name("2-" + "0" * 32 + ".safetensors")
        self.strange = {other: b"of another version", strange: to_bytes(drafted(1.0))}
        for path, content in self.strange.items():
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
        for namespace, tokens, positions in puts:
            self.put(namespace, tokens, positions, False)

    def open(self) -> None:
        self.cache = PrefixCache(self.most, self.directory, max_disk_bytes=self.on_disk)

    def path(self, key: Any) -> Path:
        assert self.cache._disk is not None
        return self.cache._disk.index.path(Key(key[0], token_bytes(key[1])))

    def remember(self, key: Any, size: int, value: float) -> None:
        if key in self.memory:
            self.memory.move_to_end(key)
        elif size <= self.most:
            while sum(s for s, _ in self.memory.values()) + size > self.most:
                self.memory.popitem(last=False)
            self.memory[key] = size, value

    def write(self, key: Any, bound: int, value: float, nbytes: int) -> None:
        if key in self.disk:
            self.disk.move_to_end(key)
            return
        excess = sum(size for size, *_ in self.disk.values()) + bound - self.on_disk
        leased, victims = {key for key, *_ in self.held}, []
        for other, (size, *_) in self.disk.items():
            if excess > 0 and other not in leased:
                victims.append(other)
                excess -= size
        if bound <= self.on_disk and excess <= 0:
            for victim in victims:
                del self.disk[victim]
            self.disk[key] = self.path(key).stat().st_size, value, nbytes
            assert self.disk[key][0] <= bound

    @rule(namespace=NAMESPACES, tokens=TOKENS, positions=st.integers(1, 9), both=st.booleans())
    def put(self, namespace: str, tokens: list[int], positions: int, both: bool) -> None:
        self.count += 1
        key, caches = (namespace, tuple(tokens)), kv(self.count, positions)
        checkpoint = drafted(self.count) if both else None
        entry = PrefixEntry(tokens, caches, checkpoint)
        size, known = entry.nbytes, key in self.memory
        bound = size_bound(*sealed_parts(entry, namespace))
        assert self.cache.put(namespace, tokens, caches, checkpoint) == (known or size <= self.most)
        self.cache.flush()
        if not known and size > self.most:
            return
        self.remember(key, size, self.count)
        if known:
            if key in self.disk:
                self.disk.move_to_end(key)
        else:
            self.write(key, bound, self.count, size)

    @precondition(holds_any_entry)
    @rule(which=st.integers(0, 99), more=TOKENS, shorter=st.integers(0, 1), hold=st.booleans())
    def take_known(self, which: int, more: list[int], shorter: int, hold: bool) -> None:
        keys = sorted({*self.memory, *self.disk})
        namespace, tokens = keys[which % len(keys)]
        self.take(namespace, [*tokens, *more], len(tokens) - shorter, hold)

    @rule(
        namespace=NAMESPACES,
        prompt=st.lists(st.integers(0, 1), max_size=6),
        longest=st.integers(0, 6),
        hold=st.booleans(),
    )
    def take(self, namespace: str, prompt: list[int], longest: int, hold: bool) -> None:
        def fits(key: Any) -> bool:
            name, tokens = key
            return (
                name == namespace
                and len(tokens) <= longest
                and tuple(prompt[: len(tokens)]) == tokens
            )

        near = max(filter(fits, self.memory), key=length_of, default=None)
        far = max(filter(fits, self.disk), key=length_of, default=None)
        hit = self.cache.take(namespace, prompt, longest=longest)
        if near is None and far is None:
            assert hit is None
            return
        assert hit is not None
        from_disk = near is None or (far is not None and length_of(far) > length_of(near))
        key = far if from_disk else near
        assert key is not None
        if from_disk:
            _, value, size = self.disk[key]
        else:
            size, value = self.memory[key]
        assert (hit.tokens, hit.source) == (length_of(key), "disk" if from_disk else "memory")
        assert value_of(hit.caches) == value
        if hit.checkpoint is not None:
            assert hit.checkpoint.attachment.metadata == {"value": value}
            assert hit.checkpoint.attachment.arrays["hidden"].tolist() == [[value] * 2] * 3
        spoil(hit.caches)
        if not from_disk:
            self.memory.move_to_end(key)
        if key in self.disk:
            self.disk.move_to_end(key)
        self.held.append((key, hit, (size, value)))
        if not hold:
            self.release(len(self.held) - 1)

    @precondition(holds_some)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        key, hit, (size, value) = self.held.pop(which % len(self.held))
        hit.release()
        hit.release()
        if hit.source == "disk":
            self.remember(key, size, value)

    @rule(namespace=NAMESPACES, prompt=st.lists(st.integers(0, 1), max_size=6))
    def branch(self, namespace: str, prompt: list[int]) -> None:
        keys = [*self.memory, *self.disk]
        expected = max((alike(t, prompt) for name, t in keys if name == namespace), default=0)
        assert self.cache.branch(namespace, prompt) == expected

    @rule()
    def restart(self) -> None:
        self.cache.close()
        for _, hit, _ in self.held:
            hit.release()
        self.held.clear()
        self.memory.clear()
        self.open()

    @rule()
    def another_process_removes_one(self) -> None:
        if self.disk:
            key, _ = self.disk.popitem(last=False)
            self.path(key).unlink()

    @precondition(holds_none)
    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.memory.clear()
        self.disk.clear()

    @invariant()
    def limits_and_sizes(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == len(self.memory)
        assert self.cache.nbytes == sum(size for size, _ in self.memory.values()) <= self.most
        assert self.cache.disk_bytes == sum(size for size, *_ in self.disk.values()) <= self.on_disk
        assert set(files_of(self.directory)) == {*map(self.path, self.disk), *self.strange}
        assert all(path.read_bytes() == content for path, content in self.strange.items())
        assert self.cache.stats.disk_errors <= 1  # the file of another format, noted once

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
        shutil.rmtree(self.directory)


Against.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
TestAgainstAModel = Against.TestCase


# Entries.


def stored(caches: Sequence[Any]) -> tuple[Any, Any]:
    """All that is kept of caches, in a form that can be compared."""
    arrays, header = encode(PrefixEntry([1], caches), "ns")
    return {name: (str(a.dtype), a.tolist()) for name, a in arrays.items()}, header


def leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in cast("list[tuple[str, mx.array]]", tree_flatten(tree))]


def block(positions: int, width: int = 64) -> mx.array:
    return mx.random.normal((1, 2, positions, width), key=mx.random.key(positions))


def filled(cache: Any, *widths: int) -> Any:
    for width in widths:
        cache.update_and_fetch(block(width), block(width) + 1)
    return cache


def recurrent() -> Any:
    cache = mlx_caches.ArraysCache(3)
    cache[0], cache[2] = block(2), mx.array([1, 2], mx.int32)
    cache.lengths = mx.array([4])
    return cache


KINDS: dict[str, Any] = {
    "empty": mlx_caches.KVCache,
    "plain": lambda: filled(mlx_caches.KVCache(), 3),
    "long": lambda: filled(mlx_caches.KVCache(), 300, 1),
    "concatenating": lambda: filled(mlx_caches.ConcatenateKVCache(), 3),
    "concatenating, empty": mlx_caches.ConcatenateKVCache,
    "rotating, empty": lambda: mlx_caches.RotatingKVCache(8),
    "rotating, filling": lambda: filled(mlx_caches.RotatingKVCache(600, keep=2), 1, 1, 1),
    "rotating, prefilled": lambda: filled(mlx_caches.RotatingKVCache(8, keep=2), 6),
    "rotating, full": lambda: filled(mlx_caches.RotatingKVCache(8), 4, 4),
    "rotating, wrapped": lambda: filled(mlx_caches.RotatingKVCache(8, keep=2), 6, *[1] * 7),
    "rotating, long prompt": lambda: filled(mlx_caches.RotatingKVCache(8), 20),
    "quantized": lambda: filled(mlx_caches.QuantizedKVCache(group_size=32, bits=4), 5),
    "quantized, empty": mlx_caches.QuantizedKVCache,
    "recurrent": recurrent,
    "chunked": lambda: filled(mlx_caches.ChunkedKVCache(8), 3),
    "chunked, moved": lambda: moved(filled(mlx_caches.ChunkedKVCache(8), 12)),
    "list": lambda: mlx_caches.CacheList(
        filled(mlx_caches.KVCache(), 2),
        recurrent(),
        mlx_caches.CacheList(filled(mlx_caches.RotatingKVCache(8), 2)),
    ),
}


def moved(cache: Any) -> Any:
    cache.maybe_trim_front()
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_every_cache_class_goes_on_as_if_never_stored(
    kind: str, source: str, tmp_path: Path
) -> None:
    original = KINDS[kind]()
    with PrefixCache(PLENTY, tmp_path) as cache:
        tokens = [1] * (getattr(original, "offset", 2) or 2)
        assert cache.put("ns", tokens, [KINDS[kind]()], None)
        if source == "disk":
            cache.flush()
            cache._memory.clear()
        hit = cache.take("ns", [*tokens, 3], longest=len(tokens))
        assert hit is not None
        assert hit.source == source
        (restored,) = hit.caches
        assert type(restored) is type(original)
        assert stored([restored]) == stored([original])
        if hasattr(original, "update_and_fetch"):
            for width in (1, 1, 3, 1):
                found = restored.update_and_fetch(block(width), block(width))
                expected = original.update_and_fetch(block(width), block(width))
                pairs = zip(leaves(found), leaves(expected), strict=True)
                assert all(mx.array_equal(a, b).item() for a, b in pairs)
                assert restored.offset == original.offset
        hit.release()


@pytest.mark.parametrize("kind", ["plain", "long", "quantized", "chunked", "rotating, filling"])
def test_reserve_is_not_stored(kind: str) -> None:
    cache = KINDS[kind]()
    used = sum(array.nbytes for array in leaves(cache.keys_and_values()))
    assert PrefixEntry([1], [cache]).nbytes == used + 8


def test_an_entry_survives_encoding() -> None:
    entry = PrefixEntry((1, 2, 2**40), kv(1.0), drafted(2.0))
    namespace, found = decode(*encode(entry, "ns \u00e9"), "it")
    assert (namespace, found.tokens) == ("ns \u00e9", (1, 2, 2**40))
    assert value_of(found.caches) == 1.0
    assert found.checkpoint is not None
    assert found.checkpoint.namespace == "drafter"
    assert found.nbytes == entry.nbytes


@pytest.mark.parametrize(
    "caches",
    [
        "[",
        "{}",
        "[3]",
        '[{"class": "KVCache"}]',
        '[{"class": "KVCache", "state": {"tuple": [1]}}]',
        '[{"class": "KVCache", "state": {"array": 99}}]',
        '[{"class": "KVCache", "state": {"set": []}}]',
        '[{"class": "KVCache", "state": {"tuple": [], "list": []}}]',
        '[{"class": "make_prompt_cache", "state": null}]',
        '[{"class": "_BaseCache", "state": null}]',
        '[{"class": "BatchKVCache", "state": null}]',
        '[{"class": "Any", "state": null}]',
        '[{"class": "nn", "state": null}]',
        '[{"class": "LRUPromptCache", "state": null}]',
        '[{"class": ["KVCache"], "state": null}]',
        '[{"class": "CacheList", "caches": [{"class": "os.system", "state": "x"}]}]',
        "[" * 100_000,
    ],
)
def test_only_caches_of_mlx_lm_come_out_of_a_file(caches: str) -> None:
    arrays, header = encode(PrefixEntry([1], kv(1.0)), "ns")
    with pytest.raises(CheckpointError) as caught:
        decode(arrays, header | {"caches": caches}, "it")
    assert len(str(caught.value).splitlines()) == 1


def test_a_cache_of_ones_own_is_refused_and_counted() -> None:
    class KVCache(mlx_caches.KVCache):  # type: ignore[misc]
        pass

    batch = mlx_caches.BatchKVCache([0, 0])
    strange = mlx_caches.ArraysCache(1)
    strange[0] = object()
    with PrefixCache(PLENTY) as cache:
        for wrong in (KVCache(), object(), batch, strange):
            assert not cache.put("ns", [1], [wrong], None)
        assert cache.stats.refused == 4
        assert cache.stats.last_error
        assert len(cache) == 0


# The order of token sequences.


@given(st.lists(TOKENS), st.lists(st.integers(0, 2), max_size=8))
def test_the_index_answers_as_a_search_through_all(
    stored: list[list[int]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    for tokens in stored + stored:
        index.add(token_bytes(tokens))
    assert len(index) == len({tuple(tokens) for tokens in stored})
    fitting = [tokens for tokens in stored if prompt[: len(tokens)] == tokens]
    found = index.longest_prefix(token_bytes(prompt))
    assert (found and list(tokens_of(found))) == max(fitting, key=len, default=None)
    common = max((alike(t, prompt) for t in stored), default=0)
    assert index.common_prefix(token_bytes(prompt)) == common
    for tokens in stored + stored:
        index.discard(token_bytes(tokens))
    assert len(index) == 0


# Using it.


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_what_is_done_to_a_hit_does_not_reach_the_next(source: str, tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        cache.put("ns", [1], kv(7.0), drafted(7.0))
        cache.flush()
        if source == "disk":
            cache._memory.clear()
        first = cache.take("ns", [1], longest=1)
        second = cache.take("ns", [1], longest=1)
        assert first is not None
        assert second is not None
        assert first.checkpoint is not None
        spoil(first.caches)
        first.checkpoint.attachment.arrays["hidden"][:] = -1
        first.release()
        spoil(first.caches)
        for hit in (second, cache.take("ns", [1], longest=1)):
            assert hit is not None
            assert value_of(hit.caches) == 7.0
            assert hit.checkpoint is not None
            assert hit.checkpoint.attachment.arrays["hidden"].tolist() == [[7.0, 7.0]] * 3
            hit.release()


def test_a_hit_may_be_used_in_another_thread(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        cache.put("ns", [1], kv(7.0), drafted(7.0))
    with PrefixCache(PLENTY, tmp_path) as cache, ThreadPoolExecutor(1) as other:
        hit = other.submit(cache.take, "ns", [1], longest=1).result()
        assert hit is not None
        assert value_of(hit.caches) == 7.0
        other.submit(hit.release).result()
        assert len(cache) == 1


def test_memory_alone_needs_no_directory() -> None:
    with PrefixCache(PLENTY) as cache:
        assert cache.put("ns", [1, 2], kv(1.0), None)
        assert taken(cache, "ns", [1, 2, 3]) == (2, 1.0, "memory")
        assert taken(cache, "other", [1, 2, 3]) is None
        assert cache.branch("ns", [1, 5]) == 1
        assert cache.disk_bytes == 0
        cache.flush()
        cache.clear()
        assert len(cache) == cache.nbytes == 0


def test_no_tokens_are_no_entry() -> None:
    with PrefixCache(PLENTY) as cache:
        assert not cache.put("ns", [], kv(1.0), None)
        assert cache.take("ns", [], longest=5) is None


def test_a_closed_cache_keeps_and_finds_nothing(tmp_path: Path) -> None:
    cache = PrefixCache(PLENTY, tmp_path)
    cache.put("ns", [1], kv(1.0), None)
    hit = cache.take("ns", [1], longest=1)
    assert hit is not None
    cache.close()
    cache.close()
    hit.release()
    assert len(files_of(tmp_path)) == 1  # what waited was written
    assert not cache.put("ns", [2], kv(1.0), None)
    assert cache.take("ns", [1], longest=1) is None
    cache.flush()
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((0,), {}),
        ((-1,), {}),
        ((1.5,), {}),
        ((True,), {}),
        (("1GB",), {}),
        ((10, "x"), {"max_disk_bytes": 0}),
        ((10,), {"max_disk_bytes": 10}),
        ((10, __file__), {}),
        ((10, ""), {}),
        ((10, "~nosuchuser/x"), {}),
        ((10, "a" * 300), {}),
        ((10, "nul\0"), {}),
        ((10, b"bytes"), {}),
    ],
)
def test_senseless_options_are_refused(arguments: Any, options: Any) -> None:
    with pytest.raises(OptionError) as caught:
        PrefixCache(*arguments, **options)
    assert len(str(caught.value).splitlines()) == 1


def test_senseless_keys_are_refused() -> None:
    with PrefixCache(PLENTY) as cache:
        for namespace in ("", 3, None, "\ud800", "n" * 65537):
            with pytest.raises(OptionError):
                cache.put(namespace, [1], kv(1.0), None)  # type: ignore[arg-type]
            with pytest.raises(OptionError):
                cache.take(namespace, [1], longest=1)  # type: ignore[arg-type]
        for tokens in (["a"], [1.5], [2**70], 3, None, b"12345678", "ab", {1: 2}, {1}, [None]):
            with pytest.raises(OptionError):
                cache.put("ns", tokens, kv(1.0), None)  # type: ignore[arg-type]
            with pytest.raises(OptionError):
                cache.branch("ns", tokens)  # type: ignore[arg-type]
        with pytest.raises(OptionError):
            cache.take("ns", [1], longest="all")  # type: ignore[arg-type]
        for row in ((None, None), (3, None), (kv(1.0), "x")):
            with pytest.raises(OptionError):
                cache.put("ns", [1], *row)
        assert cache.put("ns", (token for token in [1, 2]), kv(1.0))  # type: ignore[arg-type]
        assert taken(cache, "ns", [1, 2]) == (2, 1.0, "memory")


def test_threads_at_once(tmp_path: Path) -> None:
    size = PrefixEntry((1, 2, 3), kv(1.0)).nbytes
    with PrefixCache(6 * size, tmp_path, max_disk_bytes=12_000) as cache:

        def work(seed: int) -> int:
            found = 0
            for step in range(60):
                key = (seed * 7 + step * 5) % 12
                cache.put("ns", [key, 1, 2], kv(float(key)), None)
                hit = cache.take("ns", [(key * 3) % 12, 1, 2, 3], longest=3)
                if hit is not None:
                    with hit:
                        assert value_of(hit.caches) == (key * 3) % 12
                        spoil(hit.caches)
                    found += 1
                assert cache.nbytes <= 6 * size
                assert cache.disk_bytes <= 12_000
            return found

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) > 0
        cache.flush()
        assert cache.stats.disk_errors == 0
        assert not cache._disk._leases  # type: ignore[union-attr]


# The folder.


ROOM = size_bound(*sealed_parts(PrefixEntry([1, 2, 3], kv(1.0)), "ns"))
"""What the writing of one entry of three tokens asks for; its file is a little smaller."""


def test_a_leased_file_is_not_evicted(tmp_path: Path) -> None:
    room = 2 * ROOM
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=room) as cache:
        for key in (1, 2):
            cache.put("ns", [key, 0, 0], kv(float(key)), None)
        cache.flush()
        hit = cache.take("ns", [1, 0, 0], longest=3)
        again = cache.take("ns", [2, 0, 0], longest=3)
        cache.put("ns", [3, 0, 0], kv(3.0), None)
        cache.flush()
        assert (cache.stats.written, cache.stats.skipped) == (2, 1)  # both are in use
        assert hit is not None
        hit.release()
        cache.put("ns", [4, 0, 0], kv(4.0), None)
        cache.flush()
        assert (cache.stats.written, cache.stats.disk_evicted) == (3, 1)
        cache._memory.clear()
        assert taken(cache, "ns", [1, 0, 0]) is None
        assert taken(cache, "ns", [2, 0, 0]) == (3, 2.0, "disk")
        del again  # dropped, not released
        gc.collect()
        cache.put("ns", [5, 0, 0], kv(5.0), None)
        cache.branch("ns", [1])
        assert not cache._disk._leases  # type: ignore[union-attr]


def test_a_lease_makes_another_file_go(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=2 * ROOM) as cache:
        for key in (1, 2):
            cache.put("ns", [key, 0, 0], kv(float(key)), None)
        cache.flush()
        hit = cache.take("ns", [1, 0, 0], longest=3)
        assert hit is not None
        assert taken(cache, "ns", [2, 0, 0]) is not None  # used after the one that is leased
        cache.put("ns", [3, 0, 0], kv(3.0), None)
        cache.flush()
        cache._memory.clear()
        found = [taken(cache, "ns", [key, 0, 0]) is not None for key in (1, 2, 3)]
        assert found == [True, False, True]
        hit.release()


def test_prompts_part_from_memory_and_disk_alike(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        cache.put("ns", [1, 2, 3, 4], kv(1.0), None)
        cache.flush()
        cache._memory.clear()
        cache.put("ns", [1, 9], kv(1.0), None)
        assert cache.branch("ns", [1, 2, 3, 7]) == 3
        assert cache.branch("ns", [1, 9, 9]) == 2
        assert cache.branch("ns", []) == 0


def test_an_entry_too_big_for_the_folder_lives_in_memory(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=1000) as cache:
        assert cache.put("ns", [1], kv(1.0, 500), None)
        cache.flush()
        assert not files_of(tmp_path)
        assert cache.stats.skipped == 1
        assert taken(cache, "ns", [1]) == (1, 1.0, "memory")


def test_what_waits_to_be_written_is_bounded(tmp_path: Path) -> None:
    size = PrefixEntry([1], kv(1.0)).nbytes
    with PrefixCache(3 * size, tmp_path, max_disk_bytes=PLENTY) as cache:
        (tmp_path / "v1").mkdir()
        with FileLock(tmp_path / "v1" / "lock"):
            for key in range(5):
                assert cache.put("ns", [key], kv(1.0), None)
        cache.flush()
        assert cache.stats.skipped == 2
        assert len(files_of(tmp_path)) == 3


def test_a_lock_that_is_never_free_costs_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0.05)
    (tmp_path / "v1").mkdir()
    with FileLock(tmp_path / "v1" / "lock"), PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.put("ns", [1], kv(1.0), None)
        cache.flush()
        assert cache.stats.disk_errors == 1
        assert len(cache.stats.last_error.splitlines()) == 1
        cache.clear()
        assert cache.stats.disk_errors == 2
    assert not files_of(tmp_path)


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    """The file of the entry 1, 2, 3 of the namespace ``ns``."""
    with PrefixCache(PLENTY, tmp_path) as cache:
        cache.put("ns", [1, 2, 3], kv(1.0), drafted(1.0))
    (path,) = files_of(tmp_path)
    return path


def test_a_damaged_file_is_a_miss_and_written_again(one_file: Path, tmp_path: Path) -> None:
    whole = one_file.read_bytes()
    arrays, header = encode(PrefixEntry([1, 2, 3], kv(1.0)), "ns")
    mx.save_safetensors(str(tmp_path / "x"), arrays, header | {"caches": "?"})
    nonsense = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").unlink()
    for content in (whole[:-1], whole[:50], b"", whole + b"x", b"no safetensors", nonsense):
        one_file.write_bytes(content)
        with PrefixCache(PLENTY, tmp_path) as cache:
            assert taken(cache, "ns", [1, 2, 3]) is None
            assert taken(cache, "ns", [1, 2, 3]) is None
            assert cache.stats.disk_errors == 1  # noted once
            assert cache.stats.last_error.count(one_file.name) or "entry" in cache.stats.last_error
            assert one_file.read_bytes() == content
            if content is not nonsense:
                cache.put("ns", [1, 2, 3], kv(2.0), None)
                cache.flush()
                cache._memory.clear()
                assert taken(cache, "ns", [1, 2, 3]) == (3, 2.0, "disk")


def test_a_shorter_entry_stands_in_for_a_damaged_one(one_file: Path, tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.branch("ns", [1, 2, 3]) == 3
        cache.put("ns", [1, 2], kv(2.0), None)
        one_file.write_bytes(one_file.read_bytes()[:-1])  # after it was indexed
        assert taken(cache, "ns", [1, 2, 3]) == (2, 2.0, "memory")
        assert cache.stats.disk_errors == 1


def test_a_file_that_became_another_entry_is_a_miss(one_file: Path, tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.branch("ns", [1, 2, 3]) == 3
        one_file.unlink()
        mx.save_safetensors(str(one_file), *encode(PrefixEntry([4, 5, 6], kv(9.0)), "ns"))
        assert taken(cache, "ns", [1, 2, 3]) is None
        assert taken(cache, "ns", [4, 5, 6]) is None
        assert cache.stats.disk_errors == 1


def test_other_formats_and_names_are_ignored_and_stay(one_file: Path, tmp_path: Path) -> None:
    arrays, header = encode(PrefixEntry([1, 2, 3], kv(9.0)), "ns")
    newer = one_file.with_suffix(".new.safetensors")
    mx.save_safetensors(str(newer), arrays, header | {"format": "specdec-prefix-entry-3"})
    newer.replace(one_file)
    renamed = one_file.with_name("4-" + "0" * 32 + ".safetensors")
    mx.save_safetensors(str(renamed), *encode(PrefixEntry([1, 2, 3, 4], kv(9.0)), "ns"))
    content = one_file.read_bytes()
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=5000) as cache:
        assert taken(cache, "ns", [1, 2, 3, 4]) is None
        for key in range(20):
            cache.put("ns", [1, 2, 3] if not key else [key], kv(1.0), None)
        cache.flush()
        assert cache.stats.disk_evicted
        assert one_file.read_bytes() == content
        cache.clear()
    assert files_of(tmp_path) == [one_file]


def test_a_namespace_is_compared_in_full(
    one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.checkpoints.disk_index import DiskIndex

    monkeypatch.setattr(DiskIndex, "_place", lambda self, _: one_file.parent)  # all collide
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert taken(cache, "other", [1, 2, 3]) is None
        assert cache.branch("other", [1, 2, 3]) == 0
        assert taken(cache, "ns", [1, 2, 3]) == (3, 1.0, "disk")


def test_what_killed_writers_left_is_removed(one_file: Path, tmp_path: Path) -> None:
    left = [one_file.with_name(f".{'0' * 15}{n}.tmp.safetensors") for n in range(2)]
    for path in left:
        path.write_bytes(b"half of")
    mine = one_file.with_name("notes.txt")
    mine.write_text("not ours")
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert taken(cache, "ns", [1, 2, 3]) == (3, 1.0, "disk")
        cache.put("other", [1], kv(2.0), None)
    assert not any(path.exists() for path in left)
    assert mine.exists()


def test_a_folder_that_vanishes_costs_hits_alone(one_file: Path, tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert taken(cache, "ns", [1, 2, 3]) == (3, 1.0, "disk")
        shutil.rmtree(tmp_path / "v1")
        assert taken(cache, "ns", [1, 2, 3]) == (3, 1.0, "memory")
        assert cache.put("ns", [5], kv(2.0), None)
        cache.flush()
        assert cache.stats.written == 1  # it is made again
        shutil.rmtree(tmp_path / "v1")
        (tmp_path / "v1").write_text("in the way")
        assert cache.put("ns", [6], kv(3.0), None)
        cache.flush()
        assert cache.stats.disk_errors
        assert taken(cache, "ns", [6]) == (1, 3.0, "memory")
        assert cache.branch("ns", [6]) == 1
        assert cache.disk_bytes == 0
        cache.clear()


def test_a_full_disk_costs_the_file_alone(tmp_path: Path) -> None:
    program = f"""
        import resource, sys
        import mlx.core as mx
        from mlx_lm.models.cache import KVCache
        from specdec.checkpoints import PrefixCache
        def row(n):
            cache = KVCache()
            cache.update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))
            return [cache]
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
        with PrefixCache(1 << 30, {str(tmp_path)!r}) as cache:
            assert cache.put("ns", [1] * 500, row(500), None)
            assert cache.put("ns", [2] * 5, row(5), None)
            cache.flush()
            stats = cache.stats
            print(stats.disk_errors, stats.written, len(stats.last_error.splitlines()))
            print(cache.take("ns", [1] * 500, longest=500).source)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "1", "1", "memory"], done.stderr
    (path,) = files_of(tmp_path)
    assert path.name.startswith("5-")


def test_a_file_that_comes_out_incomplete_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = mx.save_safetensors

    def cut(path: str, *rest: Any) -> None:
        save(path, *rest)
        os.truncate(path, os.path.getsize(path) - 1)

    monkeypatch.setattr(mx, "save_safetensors", cut)
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.put("ns", [1], kv(1.0), None)
        cache.flush()
        assert cache.stats.disk_errors == 1
        assert "incomplete" in cache.stats.last_error
        assert not files_of(tmp_path)


def test_recency_is_the_files_time(tmp_path: Path) -> None:
    room = 3 * ROOM
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=room) as cache:
        for key in (1, 2, 3):
            cache.put("ns", [key, 0, 0], kv(float(key)), None)
        cache.flush()
        taken(cache, "ns", [1, 0, 0])  # from memory: its file counts as used all the same
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=room) as cache:
        taken(cache, "ns", [2, 0, 0])
        cache.put("ns", [4, 0, 0], kv(4.0), None)
        cache.flush()
        cache._memory.clear()
        assert [taken(cache, "ns", [k, 0, 0]) is not None for k in (1, 2, 3, 4)] == [
            True,
            True,
            False,
            True,
        ]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    program = f"""
        import sys
        import mlx.core as mx
        from mlx_lm.models.cache import ArraysCache
        from specdec.checkpoints import PrefixCache
        me = int(sys.argv[1])
        with PrefixCache(1 << 30, {str(tmp_path)!r}, max_disk_bytes=20_000) as cache:
            for n in range(40):
                row = ArraysCache(2)
                row[0], row[1] = mx.full((1, 2, 3, 4), n), mx.full((1, 2, 3, 4), n + 0.5)
                assert cache.put("ns", [n, me if n % 2 else 0], [row], None)
                cache.flush()
                assert cache.disk_bytes <= 20_000, cache.disk_bytes
            print(cache.stats.disk_errors)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=20_000) as cache:
        assert taken(cache, "ns", [0, 0]) is None
        running = [
            subprocess.Popen([*command, str(me)], stdout=subprocess.PIPE, text=True)
            for me in (1, 2)
        ]
        deadline, found = time.monotonic() + 60, None
        while found is None and time.monotonic() < deadline:
            found = taken(cache, "ns", [0, 0])  # seen while the others are writing
        assert [process.communicate()[0].strip() for process in running] == ["0", "0"]
        assert found == (2, 0.0, "disk")
        assert cache.disk_bytes <= 20_000
        newest = taken(cache, "ns", [38, 0])
        assert newest == (2, 38.0, "disk")
        assert cache.stats.disk_errors == 0


def test_nothing_is_read_or_written_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.checkpoints import disk_index

    cache = PrefixCache(PLENTY, tmp_path)
    free = []

    def ask() -> None:
        got = cache._lock.acquire(blocking=False)
        free.append(got)
        if got:
            cache._lock.release()

    def watched(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            other = threading.Thread(target=ask)
            other.start()
            other.join()
            return function(*arguments)

        return call

    for module, name in [(disk, "write"), (disk, "file_of"), (disk_index, "file_of")]:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    cache.put("ns", [1], kv(1.0), None)
    cache.flush()
    cache._memory.clear()
    assert taken(cache, "ns", [1]) == (1, 1.0, "disk")
    cache.close()
    with PrefixCache(PLENTY, tmp_path) as fresh:
        cache._lock = fresh._lock
        assert taken(fresh, "ns", [1]) == (1, 1.0, "disk")
    assert free == [True] * 4


def test_a_folder_that_may_not_be_entered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Path, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", closed)
    with pytest.raises(OptionError, match="Permission denied"):
        PrefixCache(10, "/closed/x")


# What a file says must be what was stored.


@pytest.mark.parametrize("name", ["cache.0", "cache.1", "tokens", "checkpoint.hidden"])
def test_one_flipped_bit_is_a_miss_and_counted(name: str, one_file: Path, tmp_path: Path) -> None:
    content = bytearray(one_file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + json.loads(content[8:start])[name]["data_offsets"][1] - 3] ^= 1
    one_file.write_bytes(content)
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert taken(cache, "ns", [1, 2, 3]) is None
        assert cache.stats.disk_errors == 1


def test_a_header_that_changed_is_damage(one_file: Path, tmp_path: Path) -> None:
    arrays, header = encode(PrefixEntry([1, 2, 3], read(3)), "ns")
    whole = sealed(arrays, header)
    for wrong in (header, whole | {"caches": whole["caches"].replace("3", "2")}):
        mx.save_safetensors(str(one_file), arrays, wrong)
        with PrefixCache(PLENTY, tmp_path) as cache:
            assert taken(cache, "ns", [1, 2, 3]) is None
            assert "damaged" in cache.stats.last_error
    assert whole["caches"].replace("3", "2") != whole["caches"]


def test_caches_at_another_place_are_refused(one_file: Path, tmp_path: Path) -> None:
    rows = [read(2), [mlx_caches.CacheList(*kv(1.0), *read(4))]]
    with PrefixCache(PLENTY, tmp_path) as cache:
        for row in rows:
            assert not cache.put("ns", [5, 6, 7], row)
            assert "tokens, not 3" in cache.stats.last_error
        assert cache.put("ns", [5, 6, 7], [*read(3), mlx_caches.KVCache()])
    arrays, header = encode(PrefixEntry([1, 2, 3], read(2)), "ns")
    mx.save_safetensors(str(one_file), arrays, sealed(arrays, header))
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.take("ns", [1, 2, 3], longest=3) is None
        assert "has read 2 tokens, not 3" in cache.stats.last_error


@pytest.mark.parametrize("error", [RuntimeError("cut"), OSError("gone")])
def test_a_file_that_fails_after_its_check_is_a_miss(
    error: Exception, one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.checkpoints import disk_index

    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(disk_index, "key_of", failing)
    with PrefixCache(PLENTY, tmp_path) as cache:
        assert cache.take("ns", [1, 2, 3], longest=3) is None
        assert cache.branch("ns", [1, 2, 3]) == 0
        assert cache.stats.disk_errors == 1


def test_one_wait_for_the_lock_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0.5)
    (tmp_path / "v1").mkdir()
    cache = PrefixCache(PLENTY, tmp_path)
    with FileLock(tmp_path / "v1" / "lock"):
        begun = time.monotonic()
        for key in range(8):
            cache.put("ns", [key], kv(1.0), None)
        cache.flush()
        cache.close()
        assert time.monotonic() - begun < 1.5
    assert (cache.stats.disk_errors, cache.stats.skipped, cache.stats.written) == (1, 7, 0)
    assert "lock" in cache.stats.last_error


def test_a_folder_named_like_an_entry_is_left_alone(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path, max_disk_bytes=3 * ROOM) as cache:
        cache.put("ns", [1], kv(1.0), None)
        cache.flush()
        (path,) = files_of(tmp_path)
        folders = [
            path.with_name("9-" + "0" * 32 + ".safetensors"),
            path.with_name("." + "0" * 16 + ".tmp.safetensors"),
            cache._disk.index.path(Key("ns", token_bytes([7]))),  # type: ignore[union-attr]
        ]
        for folder in folders:
            folder.mkdir()
        size = cache.disk_bytes
        assert size == path.stat().st_size
        for key in range(2, 9):
            cache.put("ns", [key], kv(1.0), None)
        cache.flush()
        assert cache.stats.written == 7
        assert (cache.stats.skipped, cache.stats.disk_errors) == (1, 0)
        cache.clear()
        assert all(folder.is_dir() for folder in folders)


def test_nothing_is_kept_of_what_is_gone(tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        for number in range(20):
            cache.take(f"ns {number}", [1, 2, 3], longest=3)
        assert cache._disk is not None
        assert not cache._disk.index._folders
        cache.put("ns", [1], kv(1.0), None)
        cache.flush()
        assert cache.disk_bytes
        assert len(cache._disk._formats) == len(cache._disk.index._folders) == 1
        shutil.rmtree(tmp_path / "v1")
        assert cache.disk_bytes == cache.branch("ns", [9]) == 0
        assert not cache._disk._formats
        assert not cache._disk.index._folders


# What overlaps.


def test_a_put_that_overlaps_close_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(PLENTY)
    encoded = cache._encoded

    def slow(*arguments: Any) -> Any:
        found = encoded(*arguments)
        cache.close()
        return found

    monkeypatch.setattr(cache, "_encoded", slow)
    assert not cache.put("ns", [1], kv(1.0), None)
    assert len(cache) == cache.nbytes == 0


def test_what_was_cleared_does_not_come_back(one_file: Path, tmp_path: Path) -> None:
    with PrefixCache(PLENTY, tmp_path) as cache:
        hit = cache.take("ns", [1, 2, 3], longest=3)
        assert hit is not None
        cache.clear()
        hit.release()
        assert len(cache) == 0
        assert one_file.exists()  # it was in use


def test_an_interrupt_ends_the_lease(
    one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.checkpoints import prefix

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    with PrefixCache(PLENTY, tmp_path) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(prefix, "_state", interrupted)
            with pytest.raises(KeyboardInterrupt):
                cache.take("ns", [1, 2, 3], longest=3)
        assert cache._disk is not None
        assert not cache._disk._leases


def test_the_last_error_says_why_nothing_is_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("in the way")
    small = PrefixCache(PLENTY, tmp_path / "small", max_disk_bytes=100)
    tight, blocked = PrefixCache(100, tmp_path / "tight"), PrefixCache(PLENTY, tmp_path)
    for cache, word in ((small, "max_disk_bytes"), (tight, "max_bytes"), (blocked, "directory")):
        cache.put("ns", [1], kv(1.0), None)
        cache.close()
        assert word in cache.stats.last_error
        assert len(cache.stats.last_error.splitlines()) == 1
        assert cache.stats.written == 0
