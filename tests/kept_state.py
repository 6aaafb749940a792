"""What mlx-lm's caches hold after some tokens, and whether other caches hold the same.

The oracle of state tests: the model alone reads a prompt and then token after token, and what each
position left in its caches is compared with what a row of ours holds at that place. Only what a
later query can see counts, in the order of the positions.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from adversary import alone, planted
from architectures import build
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from scripted import Script, ScriptedProvider, Text, drain, request
from tiny_models import build_model

from specdec import VerifyGroup
from specdec.state import CacheOptions
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripted import Cells

    from specdec import Row

__all__ = [
    "PROMPTS",
    "contents",
    "difference",
    "model",
    "play",
    "states_alone",
    "sweep",
    "target",
    "text",
]

# One prompt within the window of 16, one beyond it, one that is wrapped before it is read.
PROMPTS = (
    (5, 9, 40, 3, 22, 17, 1, 2),
    tuple((7 * place + 3) % 64 for place in range(20)),
    tuple((11 * place + 5) % 64 for place in range(37)),
)
COUNT = 20
MARGIN = 1e-3  # of values around 1, in float32; one wrong position gives more than 0.1
AS_THE_MODEL = CacheOptions()


def states_alone(
    model: Any, tokens: Sequence[int], *, read: int, options: CacheOptions | None = None
) -> dict[int, list[mx.array]]:
    """What mlx-lm's caches hold, by the number of tokens that were read.

    Args:
        model: an mlx-lm model.
        tokens: the prompt and what was written after it.
        read: how many are read at once, as a prompt is; the others one by one.
        options: how the caches are made and quantized.
    """
    caches = make_prompt_cache(model, None if options is None else options.max_kv_size)
    held = {}
    for start, end in [(0, read), *((at, at + 1) for at in range(read, len(tokens)))]:
        mx.eval(model(mx.array([list(tokens[start:end])]), cache=caches))
        if options is not None:
            maybe_quantize_kv_cache(
                caches, options.quantized_kv_start, options.kv_group_size, options.kv_bits
            )
        held[end] = [mx.contiguous(array) for array in contents(caches)]
        mx.eval(held[end])
    return held


def contents(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of caches as far as a later query can see it, in the order of positions."""
    return [array for cache in caches for array in _contents(cache)]


def _contents(cache: Any) -> list[mx.array]:
    if isinstance(cache, CacheList):
        return contents(cache.caches)
    if isinstance(cache, ArraysCache):
        return [array for array in cache.cache if array is not None]
    if cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        # How it is held counts too: a cache that was not quantized lacks the last of these.
        return [_unpacked(cache, cache.keys), _unpacked(cache, cache.values), mx.array(cache.bits)]
    if isinstance(cache, RotatingKVCache):
        return [_newest(cache, array) for array in (cache.keys, cache.values)]
    held, seen = cache.offset, cache.offset
    if isinstance(cache, ChunkedKVCache):
        held = cache.offset - cache.start_position
        seen = min(held, cache.chunk_size)
    return [array[..., held - seen : held, :] for array in (cache.keys, cache.values)]


def _unpacked(cache: QuantizedKVCache, side: Sequence[mx.array]) -> mx.array:
    packed, scales, biases = (part[..., : cache.offset, :] for part in side)
    return mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)


def _newest(cache: RotatingKVCache, array: mx.array) -> mx.array:
    """The first positions that are kept, and the last ones of a window."""
    ordered = cache._temporal_order(array)[..., : cache.offset, :]
    kept = min(cache.keep, cache.offset)
    last = min(cache.offset, cache.max_size) - kept
    length = ordered.shape[2]
    return mx.concatenate([ordered[..., :kept, :], ordered[..., length - last :, :]], axis=2)


def difference(got: Sequence[mx.array], want: Sequence[mx.array]) -> mx.array:
    """The largest difference between arrays, not evaluated; of the shapes nothing may differ."""
    assert [array.shape for array in got] == [array.shape for array in want]
    apart = [mx.max(mx.abs(a - b)) for a, b in zip(got, want, strict=True) if a.size]
    return mx.max(mx.stack(apart))


# Rows that are compared in every round.


@cache
def model(name: str) -> Any:
    """A tiny model: windows of 16, convolutions of 4, heads of 32 that can be quantized."""
    if name == "attention":
        return build_model("qwen3", head_dim=32)
    if name == "windows":
        return build_model("gemma3_text")
    if name == "convolution":
        return build_model("lfm2")
    return build(name)


@cache
def target(name: str) -> MlxLmTarget:
    return MlxLmTarget(model(name))


def as_mlx_lm(options: CacheOptions) -> dict[str, Any]:
    return {
        "max_kv_size": options.max_kv_size,
        "kv_bits": options.kv_bits,
        "kv_group_size": options.kv_group_size,
        "quantized_kv_start": options.quantized_kv_start,
    }


@cache
def text(
    name: str, prompt: tuple[int, ...], count: int = COUNT, options: CacheOptions = AS_THE_MODEL
) -> Text:
    return Text(prompt, alone(model(name), prompt, count, **as_mlx_lm(options)))


@cache
def states(
    name: str, prompt: tuple[int, ...], count: int = COUNT, options: CacheOptions = AS_THE_MODEL
) -> dict[int, list[mx.array]]:
    whole = text(name, prompt, count, options).whole
    return states_alone(model(name), whole, read=len(prompt) - 1, options=options)


def errors(depth: int) -> list[int | None]:
    """Where a draft is wrong: nowhere, at its beginning, middle and end."""
    return [None, *sorted({0, depth // 2, depth - 1})]


def play(
    name: str,
    moves: Sequence[Cells],
    *,
    count: int = COUNT,
    options: Sequence[CacheOptions] = (AS_THE_MODEL,) * 3,
    margin: float = MARGIN,
) -> list[Row]:
    """Rows whose every draft is their move; tokens, lengths and states are compared all along."""
    asked = list(zip(PROMPTS[: len(moves)], options, strict=False))
    texts = [text(name, prompt, count, own) for prompt, own in asked]
    provider = ScriptedProvider(Script(texts, [[move] for move in moves]))
    group = VerifyGroup(target(name), provider)
    apart: list[mx.array] = []

    def compare(row: Row, caches: Sequence[Any], read: int) -> None:
        want = states(name, row.request.prompt, count, row.request.cache_options)[read]
        apart.append(difference(contents(caches), want))

    def after() -> None:
        for row in group.rows:
            caches, read = group.extract(row)
            assert len(read) == len(row.tokens) - 1
            compare(row, caches, len(read))

    rows = group.admit(
        [
            request(
                prompt,
                max_tokens=count,
                num_draft_tokens=max(map(len, moves)),
                cache_options=own,
                publish=lambda row, caches, _: compare(row, caches, row.processed),
            )
            for prompt, own in asked
        ]
    )
    drain(group, after)
    assert provider.complaints == []
    assert [row.error for row in rows] == [None] * len(rows)
    assert [row.emitted for row in rows] == [each.output for each in texts]
    assert len(apart) >= len(rows) + 1
    furthest: Any = mx.max(mx.stack(apart)).item()
    assert furthest <= margin
    for row, move in zip(rows, moves, strict=True):
        assert row.stats.reason is None
        assert (row.stats.accepted < row.stats.drafted) is ("wrong" in move)
    return rows


def sweep(name: str, depth: int, **options: Any) -> None:
    """One to three rows, each with its error at another place."""
    places = errors(depth)
    for first in range(len(places)):
        for size in (1, 2, 3):
            chosen = [places[(first + row) % len(places)] for row in range(size)]
            play(name, [planted(depth, place) for place in chosen], **options)
