"""Noise is a fixed function of (seed, step, id), uniform, and unrelated between neighbours."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import random_state

from specdec.sampling.noise import Stream, gumbel, seed_words, uniform, uniform_bits

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
Floats = npt.NDArray[np.float64]


def mixed(x: int) -> int:
    """One round of lowbias32, as C. Wellons published it."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def bits_of(seed: int, step: int, token: int, stream: int = 0) -> int:
    """The documented hash in Python's own integers."""
    key = mixed((seed & MASK) + GOLDEN & MASK)
    key = mixed(key ^ (seed >> 32 & MASK))
    key = mixed(key ^ (step * GOLDEN & MASK))
    if stream:
        key = mixed(mixed(key ^ (stream * GOLDEN & MASK)) + stream & MASK)
    return mixed(mixed(key ^ (token * GOLDEN & MASK)) + token & MASK)


def words(*seeds: int) -> mx.array:
    return mx.array([seed_words(seed) for seed in seeds], mx.uint32)


def steps_of(*rows: list[int]) -> mx.array:
    return mx.array(list(rows), mx.uint32)


def draw(function: Any, seed: int, step: int, ids: mx.array, stream: int = 0) -> npt.NDArray[Any]:
    """``[N]`` values of one row at one step."""
    return np.array(function(words(seed), steps_of([step]), ids, stream=stream)[0, 0])


def uniforms(values: npt.NDArray[Any]) -> Floats:
    """Gumbel noise back to uniform numbers, by its distribution function."""
    result: Floats = np.exp(-np.exp(-values.astype(np.float64)))
    return result


SEEDS = [0, 1, -1, -(2**40) - 7, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]


@pytest.mark.parametrize(
    ("seed", "step", "token", "bits"),
    [
        # Written down once; a change of the hash changes every seeded text that was ever made.
        (0, 0, 0, 0x0EAA7511),
        (0, 0, 1, 0x17B95FEC),
        (1, 0, 0, 0x8A927DA3),
        (0, 1, 0, 0x620D7559),
        (42, 7, 151_935, 0xAFCE3618),
        (-1, 3, 500, 0x2D481B90),
        (2**63 + 11, 2**20, 12_345, 0x8D251029),
    ],
)
def test_the_bits_of_these_counters_never_change(
    seed: int, step: int, token: int, bits: int
) -> None:
    assert draw(uniform_bits, seed, step, mx.array([token])).tolist() == [bits]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(0, 0, 0)
@example(2**64 - 1, 2**32 - 1, 2**32 - 1)
def test_bits_equal_the_documented_hash(seed: int, step: int, token: int) -> None:
    ids = mx.array([token, 0, 77], mx.uint32)
    got = draw(uniform_bits, seed, step, ids)
    assert got.dtype == np.uint32
    assert got.tolist() == [bits_of(seed, step, i) for i in (token, 0, 77)]


@pytest.mark.parametrize(("stream", "bits"), [(1, 0xE9B3E1C3), (2, 0xAB2A59AB), (3, 0xA2551695)])
def test_the_bits_of_these_streams_never_change(stream: int, bits: int) -> None:
    assert draw(uniform_bits, 42, 7, mx.array([151_935]), stream).tolist() == [bits]
    assert bits_of(42, 7, 151_935, stream) == bits


@given(st.sampled_from(Stream), st.integers(0, 2**64 - 1))
def test_each_position_of_a_stream_has_the_documented_hash(stream: Stream, seed: int) -> None:
    seeds, steps = words(seed, 7), steps_of([4, 5, 6], [0, 1, 2**32 - 1])
    ids = mx.array([0, 5, 2**32 - 1], mx.uint32)
    got = uniform_bits(seeds, steps, ids, stream=stream)
    noise = gumbel(seeds, steps, ids, stream=stream)
    for r, i in np.ndindex(2, 3):
        step = int(steps[r, i].item())  # type: ignore[arg-type]
        want = [bits_of((seed, 7)[r], step, token, stream) for token in (0, 5, 2**32 - 1)]
        assert got[r, i].tolist() == want
        alone = draw(gumbel, (seed, 7)[r], step, ids, stream)
        assert np.array(noise[r, i]).tolist() == alone.tolist()


def test_stream_0_is_the_noise_without_a_stream() -> None:
    arguments = (words(*SEEDS[:3]), steps_of([0, 1], [5, 6], [9, 10]), mx.arange(300))
    for stream in (0, Stream.DRAW):
        for function in (uniform_bits, gumbel):
            plain = function(*arguments)
            assert mx.array_equal(function(*arguments, stream=stream), plain).item()


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 300, 2**32 - 2, 2**32 - 1])
def test_uniform_numbers_are_never_0_and_never_1(bits: int) -> None:
    step = step_with(bits, seed=99)
    got = uniform(words(99), steps_of([step]), Stream.DRAW)
    assert got.shape == (1, 1)
    assert got.dtype == mx.float32
    value: float = got.item()  # type: ignore[assignment]
    assert 2**-33 <= value <= 1 - 2**-24
    assert value == pytest.approx((bits + 0.5) / 2**32, abs=2**-24)


@pytest.mark.parametrize("stream", Stream)
def test_uniform_numbers_are_uniform_and_follow_from_seed_step_and_stream(stream: Stream) -> None:
    steps = mx.arange(SAMPLE)[None]
    u = np.array(uniform(words(11), steps, stream)[0]).astype(np.float64)
    assert kolmogorov(u) < 1.95
    assert u[:3].tolist() == pytest.approx(
        [(bits_of(11, step, 0, stream) + 0.5) / 2**32 for step in range(3)], rel=1e-6
    )
    both = np.array(uniform(words(3, 11), mx.array([[0, 1], [0, 1]]), stream))
    assert both[1].tolist() == u[:2].astype(np.float32).tolist()


@pytest.mark.parametrize("axis", ["ids", "steps"])
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_two_streams_share_nothing(one: int, other: int, axis: str) -> None:
    many = mx.arange(SAMPLE)
    first, second = (
        draw(uniform_bits, 11, 5, many, stream)
        if axis == "ids"
        else np.array(uniform_bits(words(11), many[None], mx.array([0]), stream=stream)[0, :, 0])
        for stream in (one, other)
    )
    flipped = np.bitwise_count(first ^ second)
    assert abs(flipped.mean() - 16) < Z * math.sqrt(8 / SAMPLE)
    assert abs(flipped.var() - 8) < 0.1
    u, v = first / 2**32 - 0.5, second / 2**32 - 0.5
    assert abs((u * v).mean() * 12) < Z / math.sqrt(SAMPLE)
    for shift in (1, 2, 3):
        assert abs((u[shift:] * v[:-shift]).mean() * 12) < Z / math.sqrt(SAMPLE)
        assert abs((v[shift:] * u[:-shift]).mean() * 12) < Z / math.sqrt(SAMPLE)


def test_the_same_bits_come_compiled_and_not() -> None:
    arguments = (words(*SEEDS[:3]), steps_of([0, 1], [5, 6], [9, 10]), mx.arange(300))
    compiled_bits, compiled = uniform_bits(*arguments), gumbel(*arguments)
    mx.eval(compiled_bits, compiled)
    again = mx.compile(uniform_bits)(*arguments)
    mx.disable_compile()
    try:
        plain_bits, plain = uniform_bits(*arguments), gumbel(*arguments)
        mx.eval(plain_bits, plain)
    finally:
        mx.enable_compile()
    assert mx.array_equal(compiled_bits, plain_bits).item()
    assert mx.array_equal(compiled_bits, again).item()
    # What follows the bits is floating point, which a compiler may fuse.
    assert mx.allclose(compiled, plain, rtol=1e-5, atol=1e-6).item()


def test_a_seed_of_any_size_and_sign_gives_two_words() -> None:
    assert seed_words(0) == (0, 0)
    assert seed_words(-1) == (MASK, MASK)
    assert seed_words(2**32) == (0, 1)
    assert seed_words(0x0123456789ABCDEF) == (0x89ABCDEF, 0x01234567)
    assert seed_words(-(2**63)) == (0, 2**31)
    assert (
        len({draw(uniform_bits, seed, 0, mx.arange(4)).tobytes() for seed in SEEDS})
        == len(SEEDS) - 1
    ), "-1 and 2**64 - 1 are the same 64 bits, and no others are"


@given(
    st.lists(st.tuples(st.integers(-9, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.lists(st.integers(0, 299), min_size=1, max_size=30, unique=True),
    st.data(),
)
def test_noise_depends_on_nothing_but_seed_step_and_id(
    rows: list[tuple[int, int]], width: int, ids: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    seeds = words(*(rows[r][0] for r in order))
    steps = steps_of(*([rows[r][1] + i for i in range(width)] for r in order))
    for function in (uniform_bits, gumbel):
        together = np.array(function(seeds, steps, mx.array(ids, mx.uint32)))
        assert together.shape == (len(rows), width, len(ids))
        for place, r in enumerate(order):
            seed, start = rows[r]
            for i in range(width):
                whole = draw(function, seed, start + i, mx.arange(300))
                assert together[place, i].tolist() == whole[ids].tolist()


def test_no_draw_touches_the_global_random_state() -> None:
    before = random_state()
    mx.eval(gumbel(words(1), steps_of([0]), mx.arange(9)))
    mx.eval(uniform_bits(words(1), steps_of([0]), mx.arange(9)))
    assert random_state() == before
    mx.random.seed(before[0][0])
    seeded = draw(gumbel, 1, 0, mx.arange(9))
    mx.random.seed(12345)
    assert draw(gumbel, 1, 0, mx.arange(9)).tolist() == seeded.tolist()


def test_noise_follows_from_the_bits() -> None:
    ids = mx.arange(4096)
    got = draw(gumbel, 7, 3, ids)
    assert got.dtype == np.float32
    u = (draw(uniform_bits, 7, 3, ids).astype(np.float64) + 0.5) / 2**32
    want = -np.log(-np.log1p(-u))
    # Where winners are, at small u, nothing is lost; near u = 1 float32 is coarse, and nobody wins.
    assert np.abs(got - want)[u < 0.9].max() < 1e-5
    assert np.abs(got - want).max() < 0.01


def test_noise_is_finite_and_uses_all_32_bits() -> None:
    values = draw(gumbel, 3, 0, mx.arange(2**20))
    assert np.isfinite(values).all()
    assert -2.9 < values.min() < -2.4
    assert 12.0 < values.max() < 22.9
    # With 24 bits, u would be a multiple of 2**-24 (give or take half of one).
    small = -np.expm1(-np.exp(-values[values > 7].astype(np.float64))) * 2**24
    assert len(small) > 500
    distance = np.abs(small - np.round(small))
    assert 0.2 < distance.mean() < 0.3, "a uniform fraction is a quarter away on average"


def unmixed(x: int) -> int:
    """What ``mixed`` turns into ``x``."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) & MASK
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) & MASK
    return x ^ x >> 16


def step_with(bits: int, seed: int) -> int:
    """The step at which token 0 gets exactly these bits."""
    key = mixed(mixed((seed & MASK) + GOLDEN & MASK) ^ (seed >> 32 & MASK))
    return (unmixed(unmixed(unmixed(bits))) ^ key) * pow(GOLDEN, -1, 2**32) & MASK


@pytest.mark.parametrize("bits", [0, 1, 2**24, 2**32 - 300, 2**32 - 129, 2**32 - 2, 2**32 - 1])
def test_noise_is_finite_at_both_ends_of_the_bits(bits: int) -> None:
    step = step_with(bits, seed=99)
    assert draw(uniform_bits, 99, step, mx.array([0])).tolist() == [bits]
    (value,) = draw(gumbel, 99, step, mx.array([0])).tolist()
    assert -2.9 < value < 22.9
    if bits < 2**31:
        assert value == pytest.approx(-math.log(-math.log1p(-(bits + 0.5) / 2**32)), abs=1e-5)
    else:
        assert value < -2.7


# Distribution. Every bound is for one fixed sample, so it holds or fails for ever; it is about
# where one sample in 1,000 would lie.

SAMPLE = 2**18
Z = 3.3


def kolmogorov(u: Floats) -> float:
    """sqrt(n) times the largest distance from the uniform distribution function."""
    ordered, n = np.sort(u), len(u)
    ranks = np.arange(n)
    distance = max((ordered - ranks / n).max(), ((ranks + 1) / n - ordered).max())
    return float(distance * math.sqrt(n))


def along(axis: str) -> Floats:
    """A large sample in which only ids, only steps, or only seeds change."""
    if axis == "ids":
        return draw(gumbel, 11, 5, mx.arange(SAMPLE)).astype(np.float64)
    if axis == "steps":
        values = gumbel(words(11), mx.arange(SAMPLE)[None], mx.array([5]))[0, :, 0]
    else:
        numbers = np.arange(SAMPLE, dtype=np.uint32)
        seeds = np.stack([numbers, np.zeros_like(numbers)], axis=1)
        if axis == "high seed words":
            seeds = seeds[:, ::-1].copy()
        values = gumbel(mx.array(seeds), mx.full((SAMPLE, 1), 5), mx.array([5]))[:, 0, 0]
    return np.array(values).astype(np.float64)


AXES = ["ids", "steps", "seeds", "high seed words"]


@pytest.mark.parametrize("axis", AXES)
def test_noise_is_gumbel_distributed_along_every_counter(axis: str) -> None:
    values = along(axis)
    deviation = math.pi / math.sqrt(6)
    assert abs(values.mean() - 0.5772156649) < Z * deviation / math.sqrt(SAMPLE)
    # The fourth central moment of the Gumbel distribution is 5.4 times its squared variance.
    spread = deviation**2 * math.sqrt(4.4 / SAMPLE)
    assert abs(values.var() - deviation**2) < Z * spread
    assert kolmogorov(uniforms(values)) < 1.95


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("distance", [1, 2, 3, 16, 256, 4096])
def test_neighbours_are_not_correlated(axis: str, distance: int) -> None:
    u = uniforms(along(axis)) - 0.5
    correlation = (u[:-distance] * u[distance:]).mean() * 12
    assert abs(correlation) < 4 / math.sqrt(SAMPLE)
    folded = np.abs(u) - 0.25  # also not in how far out they lie
    correlation = (folded[:-distance] * folded[distance:]).mean() * 48
    assert abs(correlation) < 4 / math.sqrt(SAMPLE)


@pytest.mark.parametrize("other", [(12, 5), (11, 6), (11 + 2**32, 5), (11 ^ 2**31, 5), (5, 11)])
def test_two_vocabularies_of_noise_share_nothing(other: tuple[int, int]) -> None:
    ids = mx.arange(SAMPLE)
    one, two = (draw(uniform_bits, seed, step, ids) for seed, step in ((11, 5), other))
    flipped = np.bitwise_count(one ^ two)
    # 32 fair coins per id: mean 16, deviation sqrt(8).
    assert abs(flipped.mean() - 16) < Z * math.sqrt(8 / SAMPLE)
    assert abs(flipped.var() - 8) < 0.1
    u, v = one / 2**32 - 0.5, two / 2**32 - 0.5
    assert abs((u * v).mean() * 12) < Z / math.sqrt(SAMPLE)
    # A shift by a few ids must not bring them into line either.
    for shift in (1, 2, 3):
        assert abs((u[shift:] * v[:-shift]).mean() * 12) < Z / math.sqrt(SAMPLE)


@pytest.mark.parametrize("bit", [0, 1, 7, 15, 16, 30, 31])
@pytest.mark.parametrize("counter", ["id", "step", "low", "high"])
def test_each_bit_of_each_counter_moves_about_half_of_the_bits(counter: str, bit: int) -> None:
    n = 20_000
    rng = np.random.default_rng(0)
    low, high, step, token = (rng.integers(0, 2**32, n, dtype=np.uint32) for _ in range(4))

    def bits() -> npt.NDArray[np.uint32]:
        # A hundred rows share an id: [n, 1, n] values would be too many.
        seeds, steps = mx.array(np.stack([low, high], axis=1)), mx.array(step[:, None])
        blocks = [
            uniform_bits(seeds[i : i + 100], steps[i : i + 100], mx.array(token[i : i + 1]))
            for i in range(0, n, 100)
        ]
        return np.array(mx.concatenate(blocks).flatten())

    before = bits()
    change = np.uint32(1 << bit)
    low, high, step, token = (
        array ^ change if name == counter else array
        for name, array in (("low", low), ("high", high), ("step", step), ("id", token))
    )
    flipped = np.bitwise_count(before ^ bits())
    if counter != "id":  # of these the hash is one to one
        assert flipped.min() >= 1
    assert abs(flipped.mean() - 16) < 4 * math.sqrt(8 / n)
