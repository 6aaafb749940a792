"""What a drafter borrows of its target's rows is what mlx-lm's own caches of each row alone hold.

A scripted drafter reads the donors in every round. Beside it mlx-lm reads the row's prompt, and
then one token after the other, into caches of its own.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from adversary import text_alone
from architectures import build
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from row_oracle import Full, RowPrograms, Window, numbers
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    ScriptedRows,
    drain,
    request,
)
from tiny_models import build_model

from specdec import VerifyGroup
from specdec.contract import AssistantDonors, RowCheckpoint
from specdec.errors import ContractError, RoundOpenError, TargetLacksError
from specdec.plugins import DeclaresNativeDraft
from specdec.state import CacheOptions, NativeState, read_donors
from specdec.state.rings import Ring
from specdec.targets import MlxLmTarget
from specdec.testing.target import TinyTarget
from specdec.verify.donors import Lending, view_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scripted import Text

    from specdec import Row
    from specdec.contract import TargetView

COUNT = 24
PROMPTS = ((5, 9, 2), (3, 17, 40, 8, 8, 21, 60, 1, 33), tuple((7 * i + 3) % 64 for i in range(30)))
MOVES: tuple[list[Any], ...] = (
    [RIGHT] * 4,
    [RIGHT, WRONG],
    [WRONG],
    [RIGHT, RIGHT, RIGHT, WRONG],
    [],
    [RIGHT],
)
PLAIN = CacheOptions()
RING = 8 + 32  # places of the rings of these models: after so many positions they begin anew

Pair = tuple[Any, Any]


@frozen(eq=False)
class Held:
    """Donors of one row, as numpy arrays ``[heads, n, D]``."""

    sliding: Pair | None
    full: Pair | None


# The oracle.


@cache
def model(name: str) -> Any:
    if name == "wide heads":  # as the quantization of keys asks
        return build_model("qwen3", num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    return build(name)


@cache
def bound(name: str) -> MlxLmTarget:
    return MlxLmTarget(model(name))


@cache
def written(name: str, prompt: tuple[int, ...], options: CacheOptions = PLAIN) -> Text:
    """The prompt, and what mlx-lm writes after it."""
    asked: dict[str, Any] = {}
    if options.max_kv_size is not None:
        asked["max_kv_size"] = options.max_kv_size
    if options.kv_bits is not None:
        asked |= {
            "kv_bits": options.kv_bits,
            "kv_group_size": options.kv_group_size,
            "quantized_kv_start": options.quantized_kv_start,
        }
    return text_alone(model(name), prompt, COUNT, **asked)


@cache
def alone(name: str, prompt: tuple[int, ...], options: CacheOptions = PLAIN) -> dict[int, Held]:
    """What mlx-lm's caches of the row hold after so many tokens."""
    whole, start = written(name, prompt, options).whole, len(prompt) - 1
    caches = make_prompt_cache(model(name), options.max_kv_size)
    after = {0: Held(None, None)}
    for begin, end in [(0, start), *((at, at + 1) for at in range(start, len(whole) - 1))]:
        if begin < end:
            model(name)(mx.array([whole[begin:end]]), cache=caches)
            maybe_quantize_kv_cache(
                caches, options.quantized_kv_start, options.kv_group_size, options.kv_bits
            )
            after[end] = Held(_last(caches, _windowed), _last(caches, _whole))
    return after


def _last(caches: Sequence[Any], read: Callable[[Any], Pair | None]) -> Pair | None:
    flat = [part for each in caches for part in getattr(each, "caches", [each])]
    found = [pair for pair in map(read, flat) if pair is not None]
    return found[-1] if found else None


def _windowed(held: Any) -> Pair | None:
    if not isinstance(held, RotatingKVCache):
        return None
    count = min(held.offset, held.max_size - held.keep)
    ordered = (held._temporal_order(array) for array in (held.keys, held.values))
    keys, values = (np.array(array[0, :, array.shape[2] - count :]) for array in ordered)
    return keys, values


def _whole(held: Any) -> Pair | None:
    if isinstance(held, QuantizedKVCache):
        packing: dict[str, Any] = {"group_size": held.group_size, "bits": held.bits}
        unpack = partial(mx.dequantize, **packing)
        keys, values = (
            np.array(unpack(*(part[..., : held.offset, :] for part in side))[0])
            for side in (held.keys, held.values)
        )
        return keys, values
    if isinstance(held, KVCache):
        keys, values = (np.array(a[0, :, : held.offset]) for a in (held.keys, held.values))
        return keys, values
    return None


# The drafter that looks.


@frozen(eq=False)
class Look:
    """What was read in a round, and the tokens that each row of the draft group has read."""

    rows: list[tuple[int, ...]]
    donors: AssistantDonors  # its arrays are numpy's

    def of(self, place: int) -> Held:
        """One row's donors, without what is behind them."""
        length = self.donors.positions[place]

        def cut(pair: Any) -> Pair | None:
            return (
                None if pair is None else (pair[0][place, :, :length], pair[1][place, :, :length])
            )

        return Held(cut(self.donors.sliding), cut(self.donors.full))


class Borrowing(ScriptedProvider):
    """Reads the donors whenever it is asked for drafts, and keeps copies."""

    def __init__(self, plan: Any, **options: Any) -> None:
        super().__init__(plan, rows=BorrowingRows, **options)
        self.looks: list[Look] = []
        self.view: TargetView | None = None

    def open(self, *, target: TargetView, **options: Any) -> ScriptedRows:
        self.view = target
        return super().open(target=target, **options)

    def look(self, rows: ScriptedRows) -> None:
        donors = self.read()
        copies = [
            None if pair is None else tuple(np.array(a) for a in pair)
            for pair in (donors.sliding, donors.full)
        ]
        kept = AssistantDonors(sliding=copies[0], full=copies[1], positions=donors.positions)  # type: ignore[arg-type]
        self.looks.append(Look([tuple(row.tokens) for row in rows.rows], kept))

    def read(self) -> AssistantDonors:
        assert self.view is not None
        port = self.view.assistant_rows
        assert port is not None
        return port.read_donors()


class BorrowingRows(ScriptedRows):
    provider: Borrowing

    def draft(self, *asked: Any) -> list[Any]:
        self.provider.look(self)
        return super().draft(*asked)

    def preview(self, *asked: Any) -> mx.array | None:
        self.provider.look(self)
        return None


def differs(got: Pair | None, want: Pair | None, margin: float) -> bool:
    """Whether a donor is another one than mlx-lm's, which may have a column too many nowhere."""
    if got is None or want is None:
        return got is not want
    return any(
        a.shape != b.shape or not np.all(np.abs(a - b) <= margin)
        for a, b in zip(got, want, strict=True)
    )


def faults_of(
    name: str, provider: Borrowing, asked: Sequence[tuple[Text, CacheOptions]], margin: float
) -> list[str]:
    """Where what a drafter saw is not what mlx-lm holds."""
    faults = []
    for number, look in enumerate(provider.looks):
        assert look.donors.positions == tuple(map(len, look.rows))
        for place, tokens in enumerate(look.rows):
            text, options = next(each for each in asked if tokens[:2] == each[0].prompt[:2])
            assert text.whole[: len(tokens)] == tokens
            got, want = look.of(place), alone(name, text.prompt, options)[len(tokens)]
            faults += [
                f"look {number}, row {place} of {len(tokens)} tokens: {kind}"
                for kind in ("sliding", "full")
                if differs(getattr(got, kind), getattr(want, kind), margin)
            ]
    return faults


def scripted(asked: Sequence[tuple[Text, CacheOptions]], **options: Any) -> Borrowing:
    """A drafter whose rows are accepted to another length each, in every round."""
    moves = [MOVES[turn:] + MOVES[:turn] for turn in range(len(asked))]
    return Borrowing(Script([text for text, _ in asked], moves), **options)


def of(prompt: Sequence[int], options: CacheOptions = PLAIN, width: int = 4) -> Any:
    return request(prompt, max_tokens=COUNT, num_draft_tokens=width, cache_options=options)


def check(provider: Borrowing, rows: Sequence[Row], texts: Sequence[Text]) -> None:
    """Nothing went wrong, and the text is the target's."""
    assert provider.complaints == []
    for row, text in zip(rows, texts, strict=True):
        assert row.emitted == text.output
        assert (row.stats.draft_errors, row.stats.last_draft_error) == (0, None)


# Sums over a ring's places run in another order than mlx-lm's, so behind windowed layers the keys
# of the next one differ in their last bits.
MODELS = {
    "gemma3_text": 1e-3,
    "gemma4_text": 1e-3,  # the last two layers have no caches of their own
    "llama": 1e-3,
    "baichuan_m1": 1e-3,  # lists of a recurrent cache and a window
    "qwen3": 0.0,
    "falcon_h1": 0.0,  # lists of a recurrent cache and keys
}


@pytest.mark.parametrize("name", MODELS)
def test_donors_are_what_mlx_lm_holds_of_each_row(name: str) -> None:
    asked = [(written(name, prompt), PLAIN) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    rows = group.admit([of(prompt) for prompt in PROMPTS])
    drain(group)
    check(provider, rows, [text for text, _ in asked])
    assert faults_of(name, provider, asked, MODELS[name]) == []
    lengths = {length for look in provider.looks for length in look.donors.positions}
    assert min(lengths) < 8 < RING + 8 < max(lengths)  # before a window is full, after it wraps
    assert any(len(set(look.donors.positions)) == 3 for look in provider.looks)


def test_the_margin_of_windowed_models_tells_neighbours_apart() -> None:
    for name in ("gemma3_text", "gemma4_text"):
        held = alone(name, PROMPTS[2])[50]
        for pair in (held.sliding, held.full):
            for side in pair or ():
                assert np.abs(side[:, 1:] - side[:, :-1]).max(axis=(0, 2)).min() > 10 * MODELS[name]


TRUE_LAST = Ring.last


@pytest.mark.parametrize(
    "fault",
    [
        lambda ring, lengths, columns: slice(0, columns),  # as the ring lies
        lambda ring, lengths, columns: TRUE_LAST(ring, [n - 1 for n in lengths], columns),
        lambda ring, lengths, columns: TRUE_LAST(ring, [max(lengths)] * len(lengths), columns),
    ],
)
def test_donors_out_of_place_are_seen(fault: Callable[..., Any]) -> None:
    name = "gemma3_text"
    asked = [(written(name, prompt), PLAIN) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    group.admit([of(prompt) for prompt in PROMPTS])
    with mock.patch.object(Ring, "last", fault):
        drain(group)
    assert provider.looks
    faults = faults_of(name, provider, asked, MODELS[name])
    assert faults
    assert all("sliding" in each for each in faults)


@pytest.mark.parametrize(
    "options",
    [
        CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0),
        CacheOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=20),
        CacheOptions(max_kv_size=12),
    ],
    ids=["quantized", "quantized later", "of limited size"],
)
def test_donors_of_rows_with_cache_options_are_what_mlx_lm_holds(options: CacheOptions) -> None:
    name = "wide heads"
    asked = [(written(name, prompt, options), options) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    rows = group.admit([of(prompt, options) for prompt in PROMPTS])
    drain(group)
    check(provider, rows, [text for text, _ in asked])
    margin = 0.0 if options.max_kv_size is None else 1e-3
    assert faults_of(name, provider, asked, margin) == []
    seen = [
        (look.donors.sliding is not None, look.donors.full is not None) for look in provider.looks
    ]
    assert set(seen) == {(options.max_kv_size is not None, options.max_kv_size is None)}


def test_rows_that_are_quantized_and_rows_that_are_not_are_seen_in_order() -> None:
    name = "wide heads"
    quantized = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=16)
    each = (quantized, PLAIN, quantized)
    asked = [(written(name, p, o), o) for p, o in zip(PROMPTS, each, strict=True)]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    rows = group.admit([of(prompt, options) for prompt, options in zip(PROMPTS, each, strict=True)])
    drain(group)
    check(provider, rows, [text for text, _ in asked])
    assert faults_of(name, provider, asked, 0.0) == []


def test_the_last_window_and_the_last_full_layer_need_all_rows_to_have_them() -> None:
    name = "wide heads"
    limited = CacheOptions(max_kv_size=12)
    provider = Borrowing(
        Script.always([written(name, PROMPTS[0]), written(name, PROMPTS[1], limited)], [RIGHT])
    )
    group = VerifyGroup(bound(name), provider)
    rows = group.admit([of(PROMPTS[0]), of(PROMPTS[1], limited)])
    drain(group)
    assert provider.looks == []
    for row, options, prompt in zip(rows, (PLAIN, limited), PROMPTS, strict=False):
        assert row.emitted == written(name, prompt, options).output
        assert "assistant_rows" in str(row.stats.last_draft_error)


# Rows that are no members, join, and leave.


@pytest.mark.parametrize("outside", [0, 1, 2])
def test_rows_outside_of_the_draft_group_are_left_out(outside: int) -> None:
    name = "gemma3_text"
    asked = [(written(name, prompt), PLAIN) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    widths = [0 if place == outside else 4 for place in range(3)]
    rows = group.admit([of(p, width=w) for p, w in zip(PROMPTS, widths, strict=True)])
    drain(group)
    check(provider, rows, [text for text, _ in asked])
    assert len(provider.looks[0].rows) == 2
    seen = {tokens[:2] for look in provider.looks for tokens in look.rows}
    assert seen == {p[:2] for place, p in enumerate(PROMPTS) if place != outside}
    assert faults_of(name, provider, asked, MODELS[name]) == []


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_rows_that_join_and_leave_are_followed(data: st.DataObject) -> None:
    name = "llama"
    asked = [(written(name, prompt), PLAIN) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    waiting = data.draw(st.permutations(PROMPTS), label="order")
    group.admit([of(waiting.pop(), width=data.draw(st.sampled_from([0, 4]), label="width"))])
    for _ in range(data.draw(st.integers(8, 16), label="rounds")):
        if not group.rows:
            break
        with group.round() as done:  # the next plain window may have been begun in it
            done.deliver_all()
        step = data.draw(st.sampled_from(["go on", "go on", "join", "leave"]), label="step")
        if step == "join" and waiting:
            group.admit([of(waiting.pop())])
        if step == "leave" and len(group.rows) > 1:
            group.remove([data.draw(st.sampled_from(group.rows), label="who")])
    group.close()
    assert provider.complaints == []
    assert faults_of(name, provider, asked, MODELS[name]) == []


def test_a_preview_sees_what_the_next_draft_sees() -> None:
    name = "gemma3_text"
    asked = [(written(name, prompt), PLAIN) for prompt in PROMPTS]
    provider = scripted(asked)
    group = VerifyGroup(bound(name), provider)
    rows = group.admit([of(prompt) for prompt in PROMPTS])
    looks = 0
    for _ in range(6):
        assert group.preview() is None
        with group.round() as done:
            done.deliver_all()
        before, after = provider.looks[looks:]
        assert before.rows == after.rows
        for kind in ("sliding", "full"):
            assert np.array_equal(getattr(before.donors, kind), getattr(after.donors, kind))
        looks += 2
    assert all(row.stats.draft_errors == 0 for row in rows)
    assert faults_of(name, provider, asked, MODELS[name]) == []


def test_a_row_that_has_read_nothing_has_no_donors() -> None:
    name = "gemma3_text"
    prompt = PROMPTS[0][:1]
    text = written(name, prompt)
    provider = Borrowing(Script.always([text], [RIGHT, WRONG]))
    group = VerifyGroup(bound(name), provider)
    [row] = group.admit([of(prompt)])
    drain(group)
    check(provider, [row], [text])
    first, second = provider.looks[:2]
    assert (first.donors.sliding, first.donors.full, first.donors.positions) == (None, None, (0,))
    assert second.donors.positions == (2,)
    assert second.donors.full is not None


# Where there are none.


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ContractError) as raised:
        call()
    return str(raised.value)


class Curious(Borrowing):
    """Asks for donors where there are none, and says what it was told."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.told: dict[str, str] = {}

    def open_prefill(self, *, target: TargetView, **options: Any) -> ScriptedRows:
        port = target.assistant_rows
        assert port is not None
        self.told["open_prefill"] = refusal(port.read_donors)
        return super().open_prefill(target=target, **options)

    def open(self, *, target: TargetView, **options: Any) -> ScriptedRows:
        self.view = target
        self.told["open"] = refusal(self.read)
        return super().open(target=target, **options)

    def restore(self, checkpoint: RowCheckpoint | None, decodes: bool) -> Any:
        if decodes:
            self.told["join"] = refusal(self.read)
        return super().restore(checkpoint, decodes)


def test_there_are_donors_inside_of_a_draft_alone() -> None:
    name = "qwen3"
    texts = [written(name, prompt) for prompt in PROMPTS[:2]]
    provider = Curious(Script.always(texts, [RIGHT, WRONG]))
    group = VerifyGroup(bound(name), provider)
    group.admit([of(PROMPTS[0])])
    with group.round() as done:
        done.deliver_all()
        told_inside = refusal(provider.read)
    group.admit([of(PROMPTS[1])])
    drain(group)
    assert set(provider.told) == {"open_prefill", "open", "join"}
    assert "a group that was opened" in told_inside
    assert all("a group that was opened" in each for each in provider.told.values())
    assert provider.looks
    assert provider.complaints == []


def test_a_round_must_not_be_open() -> None:
    target = bound("qwen3")
    state = target.new_state()
    state.begin_round(3, reading=True)
    with pytest.raises(RoundOpenError, match="read_donors"):
        read_donors(state)


def test_state_without_attention_keys_has_no_donors() -> None:
    for name in ("mamba", "phi3small"):
        target = MlxLmTarget(build(name))
        assert target.assistant_rows is None
        with pytest.raises(TargetLacksError, match="assistant_rows"):
            read_donors(target.new_state())
    native = NativeState(make_prompt_cache(model("qwen3")), "a reason")
    with pytest.raises(TargetLacksError, match="assistant_rows"):
        read_donors(native)
    assert MlxLmTarget(build("gemma3n")).assistant_rows is None  # it has no usual layers
    assert MlxLmTarget(build("llama4")).assistant_rows is not None  # one layer in four


def test_chunked_attention_is_no_donor() -> None:
    target = bound("llama4")
    state = target.new_state()
    state.begin_round(5, reading=True)
    target.forward(mx.array([[1, 2, 3, 4, 5]]), state)
    state.commit_round()
    donors = read_donors(state)
    kinds = [type(each).__name__ for each in make_prompt_cache(target.model)]
    assert "ChunkedKVCache" in kinds
    caches = make_prompt_cache(target.model)
    target.model(mx.array([[1, 2, 3, 4, 5]]), cache=caches)
    assert donors.sliding is None
    want = _last([each for each in caches if type(each) is KVCache], _whole)
    assert donors.full is not None
    assert want is not None
    assert np.array_equal(np.array(donors.full[0][0]), want[0])


# The view of the target.


def test_a_group_sees_the_target_itself_but_for_its_rows() -> None:
    target = bound("gemma3_text")
    view = view_for(target, Lending())
    assert view.identity is target.identity
    assert view.hidden_taps is target.hidden_taps
    assert (view.vocab_size, view.folder, view.can_tap((0, 1))) == (64, None, True)
    assert view.assistant_rows is not target.assistant_rows
    assert isinstance(view, DeclaresNativeDraft)
    assert isinstance(view, MlxLmTarget)


WINDOWED, WHOLE = frozenset({"sliding"}), frozenset({"full"})


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3", WINDOWED | WHOLE),
        ("gemma4_text", WINDOWED | WHOLE),
        ("gemma2", WHOLE),  # its windows are masks over whole caches
        ("falcon_h1", WHOLE),
        ("baichuan_m1", WINDOWED | WHOLE),
    ],
)
def test_a_port_says_at_load_what_rows_lend_in_a_round(name: str, kinds: frozenset[str]) -> None:
    target = bound(name)
    view = view_for(target, Lending())
    for port in (target.assistant_rows, view.assistant_rows):
        assert port is not None
        assert port.lends == kinds
    state = target.new_state()
    state.begin_round(3, reading=True)
    target.forward(mx.array([[1, 2, 3]]), state)
    state.commit_round()
    donors = read_donors(state)
    told = {"sliding": donors.sliding, "full": donors.full}
    assert {kind for kind, pair in told.items() if pair is not None} == kinds


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4", "qwen3"])
def test_the_port_embeds_as_the_model_does(name: str) -> None:
    ids = mx.array([[1, 2, 3], [60, 0, 2]])
    target = MlxLmTarget(model(name))
    port = view_for(target, Lending()).assistant_rows
    assert port is not None
    assert port.hidden_size == 64
    inner = model(name).language_model if name == "gemma4" else model(name)
    scale = 1.0 if name == "qwen3" else 8.0  # sqrt(64)
    want = inner.model.embed_tokens(ids) * scale
    assert mx.allclose(port.embed(ids), want, rtol=1e-6).item()


class OfItsOwn(TinyTarget):
    """A target that finds its rows' donors without being told of a group."""

    assistant_rows = object()


def test_a_target_with_donors_of_its_own_keeps_them() -> None:
    target: Any = OfItsOwn()
    assert view_for(target, Lending()) is target
    lacking = TinyTarget(lacks=["assistant_rows"])
    assert view_for(lacking, Lending()) is lacking


# In place.


def test_keys_are_written_in_place_while_a_drafter_reads_them() -> None:
    name = "qwen3"
    text = written(name, PROMPTS[2])

    def places(keep: bool) -> set[int]:
        provider = Borrowing(Script.always([text], [RIGHT, WRONG]))
        held: list[Any] = []
        group = VerifyGroup(bound(name), provider)
        group.admit([of(PROMPTS[2])])
        found = set()
        if keep:
            look = provider.look
            provider.look = lambda rows: (look(rows), held.append(provider.read()))  # type: ignore[method-assign,func-returns-value,assignment]
        for _ in range(6):
            with group.round() as done:
                done.deliver_all()
            state = group._live.state
            assert state is not None
            mx.eval(state.arrays())
            keys = np.asarray(state.arrays()[-2])
            found.add(keys.__array_interface__["data"][0])
            del keys
        assert len(provider.looks) == 6
        return found

    assert len(places(keep=False)) == 1
    assert len(places(keep=True)) > 1


# Any rows, over numbers that tell position, row and layer.

LAYERS = st.tuples(
    st.builds(Window, st.integers(5, 12)),
    st.builds(Full),
    st.builds(Window, st.integers(5, 40), st.sampled_from([0, 0, 4])),
)


class Machine:
    """Rows of tags that are read, rolled back, joined and dropped; the last ones are looked at."""

    def __init__(self, layers: Sequence[Any], data: st.DataObject) -> None:
        self.layers, self.data = layers, data
        self.programs = RowPrograms(layers, lambda: [layer.cache() for layer in layers])
        self.state = self.programs.cold()
        self.rows: list[list[int]] = [[]]

    def draw(self, strategy: st.SearchStrategy[Any], label: str) -> Any:
        return self.data.draw(strategy, label=label)

    def round(self) -> None:
        width = self.draw(st.sampled_from([1, 1, 2, 5, 8, 32, 50]), "width")
        new = self.programs.tags(len(self.rows), width)
        self.state.begin_round(width)
        self.programs.append(self.state, new)
        kept = [self.draw(st.integers(0, width), "kept") for _ in self.rows]
        self.state.rollback(kept)
        self.rows = [[*was, *own[:n]] for was, own, n in zip(self.rows, new, kept, strict=True)]

    def join(self) -> None:
        state = self.programs.cold()
        width = self.draw(st.integers(0, 60), "prompt")
        [new] = self.programs.tags(1, width)
        if width:
            state.begin_round(width, reading=True)
            self.programs.append(state, [new])
            state.commit_round()
        self.state.prepare_append([state]).commit()
        self.rows.append(new)

    def filter(self) -> None:
        order = self.draw(st.permutations(range(len(self.rows))), "order")
        keep = order[: self.draw(st.integers(1, len(order)), "rows")]
        self.state.filter_rows(keep)
        self.rows = [self.rows[row] for row in keep]

    def look(self) -> None:
        members = self.draw(st.permutations(range(len(self.rows))), "members")
        members = members[: self.draw(st.integers(1, len(members)), "how many")]
        everyone = self.draw(st.booleans(), "all")
        chosen = list(range(len(self.rows))) if everyone else members
        donors = read_donors(self.state, None if everyone else members)
        rows = [self.rows[row] for row in chosen]
        assert donors.positions == tuple(map(len, rows))
        longest = max(donors.positions)
        window = self.layers[2].max_size - self.layers[2].keep
        if not longest:
            assert (donors.sliding, donors.full) == (None, None)
            return
        self.compare(donors.sliding, rows, 2, min(longest, window))
        self.compare(donors.full, rows, 1, longest)

    def compare(self, pair: Any, rows: list[list[int]], layer: int, columns: int) -> None:
        assert pair is not None
        got = [np.array(array) for array in pair]
        assert got[0].shape[:3] == (len(rows), 2, columns)
        for place, row in enumerate(rows):
            last = row[-columns:]
            if last:
                want = numbers([last], layer)
                for array, right in zip(got, want, strict=True):
                    assert np.array_equal(array[place, :, : len(last)], np.array(right[0]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_donors_of_any_rows_are_their_last_positions_in_order(data: st.DataObject) -> None:
    machine = Machine(data.draw(LAYERS, label="layers"), data)
    for _ in range(data.draw(st.integers(1, 10), label="steps")):
        full = len(machine.rows) > 3
        verbs = [machine.round, machine.round, machine.filter, *([] if full else [machine.join])]
        data.draw(st.sampled_from(verbs), label="verb")()
        machine.look()
