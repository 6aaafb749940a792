"""State after rejected drafts is the state of a target that never saw them.

Cases B1, B2, B4, B6, B8 and B12 of the known ways to get this wrong, through the executor. After
every round what each row's caches hold is compared with what mlx-lm's hold, fed the kept tokens
alone, not only the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from adversary import planted
from kept_state import PROMPTS, difference, model, play, states_alone, sweep, target, text

from specdec.errors import RollbackError
from specdec.state import CacheOptions, RaggedState
from specdec.state.recurrent import RecurrentRows
from specdec.state.windows import WindowRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scripted import Cells

# B1, B4: recurrent state, alone and beside attention, in lists too.


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["attention", "convolution", "qwen3_5"])
def test_layers_hold_nothing_of_rejected_drafts(name: str, depth: int) -> None:
    sweep(name, depth)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv7", "kimi_linear", "falcon_h1", "gear"])
def test_other_recurrent_layers_hold_nothing_of_rejected_drafts(name: str) -> None:
    play(name, [planted(4, place) for place in (0, 2, 3)])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_convolution_of_four_is_rolled_back_to_each_of_its_places(place: int) -> None:
    """Its state is as long as the draft: every slot of it comes from another side."""
    [conv] = [layer for layer in model("convolution").layers if not layer.is_attention_layer]
    assert conv.conv.L_cache == 4
    play("convolution", [planted(3, place)] * 3)


@pytest.mark.parametrize("name", ["convolution", "qwen3_5", "mamba"])
def test_recurrent_state_that_keeps_rejected_drafts_would_be_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the comparison: a trim that does nothing."""
    monkeypatch.setattr(RecurrentRows, "finish", lambda self, kept: None)
    with pytest.raises(AssertionError):
        play(name, [planted(3, 0)])


def test_recurrent_state_that_nobody_recorded_is_refused_not_kept() -> None:
    bound = target("convolution")
    state = bound.new_state()
    state.begin_round(3)
    [(caches, _)] = state.row_caches
    bound.model(mx.array([[1, 2, 3]]), cache=caches)
    with pytest.raises(RollbackError, match="recorded"):
        state.rollback([2])


# B2, B8: sliding windows, before, across and after the wrap.


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_windows_are_rolled_back_before_across_and_after_the_wrap(depth: int) -> None:
    sweep("windows", depth, count=40)


@pytest.mark.parametrize("place", [None, 0, 20, 39])
def test_windows_are_rolled_back_from_a_draft_longer_than_they_are(place: int | None) -> None:
    play("windows", [planted(40, place)] * 3, count=60)


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_a_rotating_cache_of_the_callers_size_keeps_its_first_positions(depth: int) -> None:
    """Its first four positions stay; see ``max_kv_size``."""
    sweep("attention", depth, options=[CacheOptions(max_kv_size=12)] * 3)


@pytest.mark.parametrize("kept", [[5], [-1], [1, 1]])
@pytest.mark.parametrize("name", ["windows", "attention", "convolution"])
def test_a_rollback_that_cannot_keep_what_was_asked_raises(name: str, kept: list[int]) -> None:
    bound = target(name)
    state = bound.new_state()
    state.begin_round(4)
    bound.forward(mx.array([[1, 2, 3, 4]]), state)
    with pytest.raises(RollbackError):
        state.rollback(kept)


def eager(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **_: Any
) -> mx.array:
    """Attention written out; it takes no mask that is not as wide as the keys."""
    k, v = (mx.repeat(array, q.shape[1] // array.shape[1], axis=1) for array in (k, v))
    scores = (q * scale) @ k.swapaxes(-1, -2)
    if isinstance(mask, str):
        assert mask == "causal"
        length, width = k.shape[2], q.shape[2]
        mask = mx.arange(length)[None] <= mx.arange(length - width, length)[:, None]
    if mask is not None:
        assert mask.shape[-2:] == scores.shape[-2:]
        hidden = mx.array(-mx.inf, scores.dtype)
        scores = mx.where(mask, scores, hidden) if mask.dtype == mx.bool_ else scores + mask
    return mx.softmax(scores, axis=-1, precise=True) @ v


@pytest.mark.parametrize("name", ["windows", "attention", "falcon_h1", "llama"])
def test_masks_are_as_wide_as_the_keys_whatever_attends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out, and fused: both give what mlx-lm gives with the same."""
    moves: list[Cells] = [planted(6, place) for place in (3, None, 0)]
    fused = [row.emitted for row in play(name, moves, count=32)]
    asked: list[Any] = []

    def attend(*args: Any, **kwargs: Any) -> mx.array:
        asked.append(kwargs.get("mask"))
        return eager(*args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    rows = play(name, moves, count=32)
    assert [row.emitted for row in rows] == fused
    assert sum(isinstance(mask, mx.array) for mask in asked) > 10


def test_windows_show_masks_as_wide_as_their_keys_at_every_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where masks are arrays; of the drafts' width, wider than the slack, and one by one."""
    make, fetch = WindowRows.make_mask, WindowRows.update_and_fetch
    shown: list[tuple[int, int]] = []
    seen: set[tuple[int, int]] = set()

    def making(self: WindowRows, N: int, *args: Any, **kwargs: Any) -> Any:
        mask = make(self, N, window_size=kwargs.get("window_size"), return_array=True)
        assert isinstance(mask, mx.array)
        shown[:] = [(mask.shape[-2], mask.shape[-1])]
        return mask

    def fetching(self: WindowRows, keys: mx.array, values: mx.array) -> Any:
        held = fetch(self, keys, values)
        assert shown == [(keys.shape[2], held[0].shape[2])]
        seen.add(shown[0])
        return held

    monkeypatch.setattr(WindowRows, "make_mask", making)
    monkeypatch.setattr(WindowRows, "update_and_fetch", fetching)
    for depth in (1, 3, 8, 31, 32, 33, 40):
        play("windows", [planted(depth, depth // 2)] * 2, count=48)
    assert {width for width, _ in seen} >= {2, 4, 9, 32, 33, 34, 41}


# B6: quantized keys and values.


def quantized(start: int, bits: int = 8) -> CacheOptions:
    return CacheOptions(kv_bits=bits, kv_group_size=32, quantized_kv_start=start)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("start", [0, 12, 25])
def test_quantized_rows_are_rolled_back_like_others(start: int, depth: int) -> None:
    """From the first position on, and from one in the middle of a block."""
    sweep("attention", depth, options=[quantized(start)] * 3, margin=0.05)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_rows_that_are_cached_differently_share_rounds(first: int) -> None:
    """Quantized at once, on the way, in a window of the caller's size, and as the model does."""
    kinds = [quantized(0), quantized(24, 4), CacheOptions(max_kv_size=12), CacheOptions()]
    chosen = [kinds[(first + place) % 4] for place in range(3)]
    play("attention", [planted(4, place) for place in (3, 0, 2)], options=chosen, margin=0.05)


def test_a_cache_that_was_not_quantized_would_be_seen() -> None:
    plain, packed = (
        states_alone(model("attention"), PROMPTS[1], read=19, options=options)[20]
        for options in (CacheOptions(), quantized(0))
    )
    with pytest.raises(AssertionError):
        difference(plain, packed)


# B12: rows of different verify length.


@pytest.mark.parametrize("name", ["attention", "convolution", "windows", "qwen3_5", "llama4"])
def test_each_row_of_a_ragged_round_keeps_its_own_count(name: str) -> None:
    moves = [planted(1, 0), planted(2, 1), planted(4, 2)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        play(name, [moves[place] for place in order])


def test_the_largest_count_for_all_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    roll_back = RaggedState.rollback

    def keep_most(self: RaggedState, kept: Sequence[int]) -> None:
        roll_back(self, [max(kept)] * len(kept))

    monkeypatch.setattr(RaggedState, "rollback", keep_most)
    with pytest.raises(AssertionError):
        play("attention", [planted(1, 0), planted(2, 1), planted(4, 3)])


# What the comparison is worth.


@pytest.mark.parametrize("name", ["attention", "windows", "convolution", "qwen3_5", "mamba"])
def test_one_other_token_far_exceeds_the_margin_of_the_comparison(name: str) -> None:
    whole = text(name, PROMPTS[0]).whole
    other = (*whole[:-1], (whole[-1] + 1) % 64)
    kept, changed = (states_alone(model(name), each, read=7)[len(whole)] for each in (whole, other))
    apart: Any = difference(kept, changed).item()
    assert apart > 0.1
