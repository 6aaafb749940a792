"""Processors see each position's own tokens, and the vectorised ones give mlx-lm's very bits.

The oracle is mlx-lm's own processor, called once per position with that position's tokens on a
fresh copy of that position's logits.
"""

from __future__ import annotations

import functools
import io
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_lm import sample_utils

from specdec.errors import ContractError, OptionError
from specdec.sampling import (
    AllowedTokens,
    BannedTokens,
    FrequencyPenalty,
    LogitBias,
    MinTokens,
    PresencePenalty,
    Processors,
    RepetitionPenalty,
    WindowProcessor,
    WindowView,
    make_logits_processors,
    stateless,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@frozen(eq=False)
class Window:
    """One row's window: ``[n + W]`` tokens and ``[W, V]`` logits."""

    tokens: list[int]
    logits: mx.array
    emitted: int = 0

    @property
    def width(self) -> int:
        return int(self.logits.shape[0])

    @property
    def view(self) -> WindowView:
        return WindowView(mx.array(self.tokens, mx.uint32), self.width, self.emitted)

    def before(self, position: int) -> list[int]:
        """What the logits at a position follow, by the plain rule."""
        history = self.tokens[: len(self.tokens) - self.width]
        window = self.tokens[len(self.tokens) - self.width :]
        return history + window[: position + 1]

    def alone(self, position: int) -> Window:
        """The same position as a window of width 1."""
        return Window(
            self.before(position), self.logits[position : position + 1], self.emitted + position
        )


@st.composite
def windows(draw: st.DrawFn) -> Window:
    vocab = draw(st.integers(2, 30), label="V")
    width = draw(st.integers(1, 6), label="W")
    history = draw(st.integers(0, 45), label="n")
    # Few different ids: most contexts have duplicates, and most windows repeat the history.
    few = draw(st.integers(1, vocab), label="ids in use")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="numbers"))
    tokens = rng.integers(0, few, size=history + width)
    logits = rng.normal(size=(width, vocab)) * draw(st.sampled_from([0.5, 8.0, 300.0]))
    odd = rng.random(logits.shape)
    logits = np.where(odd < 0.1, -0.0, np.where(odd < 0.2, 0.0, logits))
    logits = np.where(odd > 0.95, -np.inf, logits)
    array = mx.array(logits.astype(np.float32)).astype(draw(st.sampled_from(DTYPES), label="dtype"))
    return Window(host(tokens), array, draw(st.integers(0, 8), label="emitted"))


contexts = st.integers(1, 60) | st.sampled_from([1, 2, 20])
factors = st.sampled_from([0.5, 1.0, 1.3, 2, 7.7]) | st.floats(0.01, 50)
amounts = st.sampled_from([-2, -2.0, 0.1, 0.5, 1.3, 2]) | st.floats(-50, 50)


def host(array: Any) -> Any:
    """An array's values: ``tolist`` as mypy can bear it."""
    return array.tolist()


def bits(array: mx.array) -> list[list[int]]:
    """The array as integers: tells -0.0 from 0.0, and rounding from equality."""
    kind = mx.uint32 if array.dtype == mx.float32 else mx.uint16
    whole: list[list[int]] = host(array.view(kind))
    return whole


def same(got: mx.array, want: mx.array) -> None:
    assert got.dtype == want.dtype
    assert bits(got) == bits(want)


def by_mlx_lm(window: Window, processors: Sequence[Callable[..., mx.array]]) -> mx.array:
    rows = []
    for position in range(window.width):
        row = mx.array(window.logits[position : position + 1])
        for processor in processors:
            row = processor(mx.array(window.before(position)), row)
        rows.append(row)
    return mx.concatenate(rows, axis=0)


def by_hand(window: Window, change: Callable[[int, int, float], float]) -> list[list[float]]:
    """A plain loop over positions and ids: ``change(position, id, logit)``."""
    return [
        [change(position, token, logit) for token, logit in enumerate(row)]
        for position, row in enumerate(host(window.logits))
    ]


# --- the same bits as mlx-lm ------------------------------------------------------------------

PENALTIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], st.SearchStrategy[float]]] = {
    "repetition": (RepetitionPenalty, sample_utils.make_repetition_penalty, factors),
    "presence": (PresencePenalty, sample_utils.make_presence_penalty, amounts),
    "frequency": (FrequencyPenalty, sample_utils.make_frequency_penalty, amounts),
}


@pytest.mark.parametrize("name", PENALTIES)
@settings(max_examples=250)
@given(data=st.data(), window=windows(), context=contexts)
def test_a_penalty_over_a_window_has_the_bits_of_mlx_lms_at_each_position(
    name: str, data: st.DataObject, window: Window, context: int
) -> None:
    ours, theirs, penalties = PENALTIES[name]
    penalty = data.draw(penalties)
    got = Processors([ours(penalty, context)]).apply(window.view, window.logits)
    same(got, by_mlx_lm(window, [theirs(penalty, context)]))


def biases_of(vocab: int) -> st.SearchStrategy[dict[int, float]]:
    numbers = st.floats(-200, 200, width=32) | st.integers(-5, 5) | st.just(-math.inf)
    return st.dictionaries(st.integers(0, vocab - 1), numbers, min_size=1)


@settings(max_examples=250)
@given(data=st.data(), window=windows())
def test_a_bias_over_a_window_has_the_bits_of_mlx_lms_at_each_position(
    data: st.DataObject, window: Window
) -> None:
    bias = data.draw(biases_of(window.logits.shape[1]))
    got = Processors([LogitBias(bias)]).apply(window.view, window.logits)
    same(got, by_mlx_lm(window, sample_utils.make_logits_processors(bias)))


@settings(max_examples=200)
@given(data=st.data(), window=windows())
def test_the_whole_chain_has_the_bits_of_mlx_lms_whole_chain(
    data: st.DataObject, window: Window
) -> None:
    options: dict[str, Any] = {
        "logit_bias": data.draw(st.none() | biases_of(window.logits.shape[1])),
        "repetition_penalty": data.draw(st.none() | factors),
        "repetition_context_size": data.draw(contexts),
        "presence_penalty": data.draw(st.none() | st.just(0.0) | amounts),
        "presence_context_size": data.draw(contexts),
        "frequency_penalty": data.draw(st.none() | st.just(0) | amounts),
        "frequency_context_size": data.draw(contexts),
    }
    theirs = sample_utils.make_logits_processors(**options)
    ours = make_logits_processors(**options)
    assert len(ours) == len(theirs)
    want = by_mlx_lm(window, theirs)
    same(Processors(ours).apply(window.view, window.logits), want)
    # mlx-lm's own closures in our chain, and both in turns.
    same(Processors(theirs).apply(window.view, window.logits), want)
    turns = [(ours, theirs)[k % 2][k] for k in range(len(ours))]
    same(Processors(turns).apply(window.view, window.logits), want)


def test_frequency_rounds_at_each_occurrence_and_repetition_counts_a_token_once() -> None:
    # Controls: a product instead of repeated subtraction, or a factor per occurrence, would show.
    logits = mx.full((2, 4), 100.0, mx.bfloat16)
    window = Window([1] * 20, logits)
    often = Processors([FrequencyPenalty(0.3)]).apply(window.view, logits)
    assert often[1, 1].item() != (logits[1, 1] - 20 * 0.3).item()
    assert host(often[0]) != host(often[1])  # 19 occurrences are not 20
    once = Processors([RepetitionPenalty(2.0)]).apply(window.view, logits)
    assert host(once) == [[100, 50, 100, 100]] * 2


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    logits = mx.array([[4.0, -4.0, 4.0, -4.0]])
    window = Window([0, 1], logits)
    got = Processors([RepetitionPenalty(0.5)]).apply(window.view, logits)
    assert host(got) == [[8.0, -2.0, 4.0, -4.0]]


# --- masks ------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), window=windows())
def test_allowed_and_banned_tokens_are_what_a_plain_loop_leaves(
    data: st.DataObject, window: Window
) -> None:
    ids = data.draw(st.lists(st.integers(0, window.logits.shape[1] - 1), min_size=1))
    allowed = Processors([AllowedTokens(ids)]).apply(window.view, window.logits)
    assert allowed.dtype == window.logits.dtype
    assert host(allowed) == by_hand(window, lambda _p, t, x: x if t in ids else -math.inf)
    if len(set(ids)) < window.logits.shape[1]:
        banned = Processors([BannedTokens(ids)]).apply(window.view, window.logits)
        assert banned.dtype == window.logits.dtype
        assert host(banned) == by_hand(window, lambda _p, t, x: -math.inf if t in ids else x)


@pytest.mark.parametrize("emitted", range(4))
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("ends", [[3], [0, 6], []])
def test_min_tokens_bans_the_end_exactly_while_too_few_tokens_are_emitted(
    emitted: int, width: int, ends: list[int]
) -> None:
    logits = mx.arange(width * 7, dtype=mx.float32).reshape(width, 7)
    window = Window([1] * (width + 3), logits, emitted)
    for count in range(emitted + width + 3):
        got = Processors([MinTokens(count, ends)]).apply(window.view, logits)
        want = [list(row) for row in host(logits)]
        content = emitted
        for row in want:  # a text that is drawn token by token
            for token in ends:
                if content < count:
                    row[token] = -math.inf
            content += 1
        assert host(got) == want, count


# --- what a processor sees --------------------------------------------------------------------


@settings(max_examples=100)
@given(windows())
def test_a_stateless_callable_sees_exactly_each_positions_own_tokens(window: Window) -> None:
    seen: list[tuple[mx.array, mx.array]] = []

    @stateless
    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens, logits))
        return logits + 1

    out = Processors([record, record]).apply(window.view, window.logits)
    assert len(seen) == 2 * window.width
    for position, (tokens, logits) in enumerate(seen[: window.width]):
        assert host(tokens) == window.before(position)
        same(logits, window.logits[position : position + 1])
    assert [host(t) for t, _ in seen[window.width :]] == [host(t) for t, _ in seen[: window.width]]
    same(out, window.logits + 1 + 1)


@given(windows())
def test_a_window_processor_is_shown_the_same_tokens_by_at_and_by_context(window: Window) -> None:
    view = window.view
    for size in (1, 3, len(window.tokens), 99):
        ids, real = view.context(size)
        for position in range(window.width):
            before = window.before(position)
            assert host(view.at(position)) == before
            row = host(ids[position])
            marks = [True] * len(row) if real is None else host(real[position])
            latest_first = [token for token, mark in zip(row, marks, strict=True) if mark]
            assert latest_first == before[::-1][:size]
            assert set(row) == set(latest_first)


def everything(vocab: int) -> list[Any]:
    """A chain with each built-in and both kinds of mlx-lm-like callables."""
    return [
        *make_logits_processors({0: 0.5, vocab - 1: -1.0}, 1.3, 7, 0.4, 5, 0.3, 30),
        *sample_utils.make_logits_processors({1: 0.5}, 0.7, 6, 0.2, 9, 0.1, 40),
        stateless(lambda tokens, logits: logits - tokens[-1].astype(logits.dtype) / 8),
        MinTokens(4, [1]),
        BannedTokens([0]) if vocab > 2 else AllowedTokens([0, 1]),
    ]


@settings(max_examples=100)
@given(windows())
def test_a_window_is_its_positions_one_by_one(window: Window) -> None:
    chain = Processors(everything(window.logits.shape[1]))
    assert not chain.positional
    ones = [window.alone(position) for position in range(window.width)]
    want = mx.concatenate([chain.apply(one.view, one.logits) for one in ones], axis=0)
    same(chain.apply(window.view, window.logits), want)


@settings(max_examples=100)
@given(data=st.data(), window=windows())
def test_later_drafts_never_reach_earlier_positions(data: st.DataObject, window: Window) -> None:
    vocab = window.logits.shape[1]
    place = data.draw(st.integers(0, window.width - 1))
    other = list(window.tokens)
    index = len(other) - window.width + place
    other[index] = (other[index] + data.draw(st.integers(1, vocab - 1))) % vocab
    changed = Window(other, window.logits, window.emitted)
    chain = Processors(everything(vocab))
    first, second = (chain.apply(each.view, each.logits) for each in (window, changed))
    same(first[:place], second[:place])


def test_a_draft_does_reach_its_own_and_later_positions() -> None:
    # Control of the test above: the chain depends on the drafts at all.
    logits = mx.random.normal((4, 9), key=mx.random.key(1))
    first, second = (
        Processors(everything(9)).apply(Window(tokens, logits).view, logits)
        for tokens in ([2, 3, 4, 5, 6], [2, 3, 4, 7, 6])
    )
    differs = [not mx.array_equal(a, b).item() for a, b in zip(first, second, strict=True)]
    assert differs == [False, False, True, True]


def test_a_position_outside_the_window_is_refused() -> None:
    view = WindowView(mx.arange(5), 2, 0)
    for position in (-1, 2):
        with pytest.raises(ContractError, match=f"position {position}; the window has 0 to 1"):
            view.at(position)
    for tokens, width in ((mx.arange(2), 3), (mx.arange(2), 0), (mx.zeros((1, 2), mx.int32), 1)):
        with pytest.raises(ContractError, match="a window of width"):
            WindowView(tokens, width, 0)


# --- nobody else's arrays, nothing evaluated --------------------------------------------------


@stateless
def scribble(tokens: mx.array, logits: mx.array) -> mx.array:
    tokens[:] = 0
    logits[:, :] = 7
    return logits


class Scribbler:
    def process_window(self, view: WindowView, logits: mx.array) -> mx.array:
        logits[:, 0] = 7
        logits *= 2
        return logits


ASSIGNING: dict[str, Callable[[], Any]] = {
    "mlx-lm's repetition": lambda: sample_utils.make_repetition_penalty(1.3),
    "mlx-lm's presence": lambda: sample_utils.make_presence_penalty(1.3),
    "mlx-lm's frequency": lambda: sample_utils.make_frequency_penalty(1.3),
    "mlx-lm's bias": lambda: sample_utils.make_logits_processors({1: 2.0})[0],
    "a stateless function": lambda: scribble,
    "a window processor": Scribbler,
    "a stateful one": lambda: wrapped(scribble),
}


@pytest.mark.parametrize("name", ASSIGNING)
@pytest.mark.parametrize("width", [1, 3])
def test_a_processor_that_assigns_changes_nobody_elses_array(name: str, width: int) -> None:
    chain = Processors([ASSIGNING[name]()])
    width = 1 if chain.positional else width
    window = Window([0, 1, 2, 0, 1][: width + 2], mx.ones((width, 4)))
    view, alias = window.view, window.logits[:]
    out = chain.apply(view, window.logits)
    assert host(out) != host(window.logits)
    assert host(window.logits) == host(alias) == [[1.0] * 4] * width
    assert host(view.tokens) == window.tokens


def test_mlx_lms_processor_does_assign_into_what_it_is_given() -> None:
    # Control of the test above.
    logits = mx.ones((1, 4))
    sample_utils.make_repetition_penalty(2.0)(mx.array([1]), logits)
    assert host(logits) == [[1.0, 0.5, 1.0, 1.0]]


def reads(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits + int(host(tokens)[-1])


def applied(chain: list[Any]) -> mx.array:
    """Apply a chain where MLX refuses every evaluation: while a function is traced."""

    def run(tokens: mx.array, logits: mx.array) -> mx.array:
        return Processors(chain).apply(WindowView(tokens, 3, 0), logits)

    return mx.compile(run)(mx.array([3, 1, 4, 1, 5]), mx.zeros((3, 9)))


def test_nothing_is_read_or_evaluated_while_a_chain_is_applied() -> None:
    assert applied(everything(9)).shape == (3, 9)
    with pytest.raises(ValueError, match="eval"):  # control
        applied([stateless(reads)])


@pytest.mark.parametrize("context", [2, 50])
def test_the_graph_of_the_built_ins_does_not_grow_with_the_window(context: int) -> None:
    def lines(width: int, extra: list[Any]) -> int:
        penalties = make_logits_processors({1: 2.0}, 1.3, context, 0.5, context, 0.5, context)
        chain = [*penalties, AllowedTokens([1, 2]), BannedTokens([1]), MinTokens(99, [2]), *extra]
        window = Window([1] * (width + 20), mx.zeros((width, 5)))
        text = io.StringIO()
        mx.export_to_dot(text, Processors(chain).apply(window.view, window.logits))
        return text.getvalue().count("\n")

    assert lines(2, []) == lines(9, [])
    per_position = [sample_utils.make_presence_penalty(1.0)]
    assert lines(2, per_position) < lines(9, per_position)  # control


# --- which callables hold no state ------------------------------------------------------------


class Module(nn.Module):  # type: ignore[misc, name-defined]
    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits


class Slots:
    __slots__ = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    def method(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits


class Marked:
    def method(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits


class Derived(Marked):
    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return logits


for _declared in (Marked, Marked.method):
    stateless(_declared)  # type: ignore[arg-type]


def plain() -> Callable[[mx.array, mx.array], mx.array]:
    return lambda tokens, logits: logits


def wrapped(inner: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(inner)
    def outer(tokens: mx.array, logits: mx.array) -> mx.array:
        return inner(tokens, logits)

    return outer


DECLARED: dict[str, Callable[[], Any]] = {
    "a function": lambda: stateless(plain()),
    "a module": lambda: stateless(Module()),
    "an object without attributes": lambda: stateless(Slots()),
    "a bound method": lambda: stateless(Slots().method),
    "a method declared in its class": lambda: Marked().method,
    "an instance of a declared class": Marked,
    "a partial": lambda: stateless(functools.partial(plain())),
    "declared twice": lambda: stateless(stateless(plain())),
    **{name: make for name, make in ASSIGNING.items() if name.startswith("mlx-lm")},
}

UNDECLARED: dict[str, Callable[[], Any]] = {
    "a function": plain,
    "a module": Module,
    "an object": Slots,
    "an instance of a class derived from a declared one": Derived,
    # functools.wraps copies the declaration's attribute and mlx-lm's module name.
    "a wrapper of a stateless function": lambda: wrapped(stateless(plain())),
    "a wrapper of mlx-lm's": lambda: wrapped(sample_utils.make_presence_penalty(1.0)),
    "a partial of a stateless function": lambda: functools.partial(stateless(plain())),
}


@pytest.mark.parametrize("name", DECLARED)
def test_a_declared_callable_is_applied_to_a_whole_window(name: str) -> None:
    chain = Processors([LogitBias({1: 1.0}), DECLARED[name]()])
    assert not chain.positional
    assert chain.apply(WindowView(mx.arange(6), 4, 0), mx.zeros((4, 9))).shape == (4, 9)


@pytest.mark.parametrize("name", UNDECLARED)
def test_any_other_callable_makes_the_chain_positional(name: str) -> None:
    chain = Processors([LogitBias({1: 1.0}), UNDECLARED[name]()])
    assert chain.positional
    with pytest.raises(ContractError, match=r"may hold state and was given a window of width 2"):
        chain.apply(WindowView(mx.arange(6), 2, 0), mx.zeros((2, 9)))
    assert chain.apply(WindowView(mx.arange(6), 1, 0), mx.zeros((1, 9))).shape == (1, 9)


def test_stateless_returns_the_function_itself_where_it_can() -> None:
    function, module, slots = plain(), Module(), Slots()
    assert stateless(function) is function
    assert stateless(module) is module
    assert stateless(slots) is not slots
    assert not module.parameters()  # the mark is no parameter
    with pytest.raises(OptionError, match="stateless was given 3; give a callable"):
        stateless(3)  # type: ignore[arg-type]


def test_a_stateful_callable_gets_each_call_in_order_with_the_rest_of_the_chain() -> None:
    calls: list[list[int]] = []

    def counting(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(host(tokens))
        return logits + len(calls)

    chain = Processors([LogitBias({0: 1.0}), counting, LogitBias({1: 1.0})])
    window = Window([5, 6, 7, 8], mx.zeros((3, 2)))
    ones = [window.alone(position) for position in range(3)]
    got = [host(chain.apply(one.view, one.logits)) for one in ones]
    assert got == [[[2.0, 2.0]], [[3.0, 3.0]], [[4.0, 4.0]]]
    assert calls == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]


def test_an_empty_chain_is_false_and_changes_nothing() -> None:
    logits = mx.ones((2, 3))
    assert not Processors([])
    assert not Processors(()).positional
    assert Processors([]).apply(WindowView(mx.arange(4), 2, 0), logits) is logits
    assert Processors([LogitBias({})])
    for idle in (LogitBias({}), BannedTokens([]), MinTokens(0, [1]), MinTokens(5, [])):
        got = Processors([idle]).apply(WindowView(mx.arange(4), 2, 0), logits)
        assert host(got) == host(logits)


# --- refusals ---------------------------------------------------------------------------------


def broken(result: Any) -> Any:
    def processor(tokens: mx.array, logits: mx.array) -> Any:
        return result

    return stateless(processor)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (mx.zeros((4,)), r"returned shape \[4\]; return the shape it was given, \[1, 4\]"),
        (mx.zeros((1, 5)), r"returned shape \[1, 5\]"),
        (mx.zeros((2, 4)), r"returned shape \[2, 4\]"),
        (None, r"returned NoneType; return an array of shape \[1, 4\]"),
    ],
)
def test_a_result_of_the_wrong_shape_names_the_processor(result: Any, says: str) -> None:
    class Window2:
        def process_window(self, view: WindowView, logits: mx.array) -> Any:
            return result

    for width in (1, 3):
        view, logits = WindowView(mx.arange(5), width, 0), mx.zeros((width, 4))
        name = r"logits processor broken\.<locals>\.processor "
        with pytest.raises(OptionError, match=name + says) as caught:
            Processors([broken(result)]).apply(view, logits)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="Window2 returned"):
        Processors([Window2()]).apply(view, logits)


def test_a_declared_callable_keeps_to_one_dtype_within_a_window() -> None:
    @stateless
    def late(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.astype(mx.float32) if tokens.size > 3 else logits

    logits = mx.zeros((2, 4), mx.bfloat16)
    with pytest.raises(OptionError, match=r"late returned mlx\.core\.bfloat16 and mlx\.core\.fl"):
        Processors([late]).apply(WindowView(mx.arange(4), 2, 0), logits)
    out = Processors([late]).apply(WindowView(mx.arange(6), 2, 0), logits)
    assert out.dtype == mx.float32  # as mlx-lm has it: what a processor returns goes on


@pytest.mark.parametrize("member", [3, None, "text", SimpleNamespace(process_window=3)])
def test_a_member_that_is_no_processor_is_refused(member: Any) -> None:
    with pytest.raises(OptionError, match="is neither callable nor a WindowProcessor"):
        Processors([LogitBias({1: 1.0}), member])


def test_classes_and_things_that_are_no_list_are_refused() -> None:
    for member in (LogitBias, Slots, Marked):
        with pytest.raises(OptionError, match=rf"{member.__qualname__} is a class; give an insta"):
            Processors([member])
    with pytest.raises(OptionError, match=r"logits_processors is .*; give a list"):
        Processors(plain())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "member", [LogitBias({}), RepetitionPenalty(1.3), AllowedTokens([1]), MinTokens(1, [1])]
)
def test_built_ins_are_window_processors(member: object) -> None:
    assert isinstance(member, WindowProcessor)
    assert not isinstance(plain(), WindowProcessor)  # control


BAD_NUMBERS: list[Any] = [True, "1", None, math.nan, math.inf, 1e39, 10**400, mx.array(1.0)]
BAD_SIZES: list[Any] = [0, -1, True, 2.0, "5", None, math.nan]
BAD_IDS: list[Any] = [-1, 1.0, True, "1", None, 2**31, math.nan]


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 0, 0.0, -1.3, -math.inf, 1e-30, 1e30])
def test_a_repetition_penalty_without_sense_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"repetition_penalty is .*; give a number from"):
        RepetitionPenalty(value)
    if value is not None:
        with pytest.raises(OptionError, match=r"or 1\.0 or None to leave it out"):
            make_logits_processors(repetition_penalty=value)


@pytest.mark.parametrize("name", ["presence", "frequency"])
@pytest.mark.parametrize("value", [*BAD_NUMBERS, -math.inf])
def test_an_amount_without_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{name}_penalty is .*; give a finite number"):
        PENALTIES[name][0](value)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("size", BAD_SIZES)
def test_a_context_size_without_sense_is_refused(name: str, size: Any) -> None:
    options: dict[str, Any] = {f"{name}_penalty": 1.3, f"{name}_context_size": size}
    with pytest.raises(OptionError, match=rf"{name}_context_size is .*; give a whole number from"):
        make_logits_processors(**options)


@pytest.mark.parametrize("value", BAD_IDS)
def test_an_id_without_sense_is_refused(value: Any) -> None:
    for option, make in (
        ("logit_bias", lambda: LogitBias({3: 1.0, value: 1.0})),
        ("allowed_token_ids", lambda: AllowedTokens([3, value])),
        ("banned_token_ids", lambda: BannedTokens([3, value])),
        ("end_tokens", lambda: MinTokens(1, [3, value])),
    ):
        with pytest.raises(OptionError, match=rf"{option} has the id .*; give whole numbers"):
            make()


@pytest.mark.parametrize("value", [*BAD_NUMBERS, math.inf])
def test_a_bias_without_sense_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"logit_bias of id 3 is .*; give a finite number"):
        LogitBias({3: value})


def test_other_values_without_sense_are_refused() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: AllowedTokens([]), "allowed_token_ids is empty; give at least one id"),
        (lambda: AllowedTokens("12"), "allowed_token_ids is '12'; give a list"),  # type: ignore[arg-type]
        (lambda: BannedTokens(4), "banned_token_ids is 4; give a list"),  # type: ignore[arg-type]
        (lambda: LogitBias([(1, 2.0)]), r"logit_bias is \[\(1, 2.0\)\]; give a mapping"),  # type: ignore[arg-type]
        *((lambda n=n: MinTokens(n, [1]), "min_tokens is ") for n in BAD_SIZES if n != 0),
    ]
    for make, says in cases:
        with pytest.raises(OptionError, match=says):
            make()


def test_numpy_integers_are_ids_and_duplicates_count_once() -> None:
    assert AllowedTokens(np.array([4, 2, 4])).ids == (2, 4)
    four: Any = np.int64(4)
    assert dict(LogitBias({four: 1}).biases) == {4: 1.0}


NAMING: dict[str, Callable[[int], Any]] = {
    "logit_bias": lambda token: LogitBias({0: 1.0, token: 1.0, 1: 2.0}),
    "allowed_token_ids": lambda token: AllowedTokens([token, 1]),
    "banned_token_ids": lambda token: BannedTokens([token, 1]),
    "end_tokens": lambda token: MinTokens(3, [token, 1]),
}


@pytest.mark.parametrize("option", NAMING)
@pytest.mark.parametrize("token", [8, 9, 2**31 - 1])
def test_an_id_beyond_the_vocabulary_is_refused_before_and_when_it_is_applied(
    option: str, token: int
) -> None:
    chain = Processors([plain(), NAMING[option](token)])
    says = rf"{option} has the id {token}; ids are 0 to 7"
    with pytest.raises(OptionError, match=says):
        chain.check_vocabulary(8)
    with pytest.raises(OptionError, match=says):
        chain.apply(WindowView(mx.arange(3), 1, 0), mx.zeros((1, 8)))
    # The highest id is one.
    good = Processors([stateless(plain()), NAMING[option](7)])
    good.check_vocabulary(8)
    assert good.apply(WindowView(mx.arange(3), 2, 0), mx.zeros((2, 8))).shape == (2, 8)


def test_banning_every_token_is_refused() -> None:
    Processors([BannedTokens(range(7))]).check_vocabulary(8)
    with pytest.raises(OptionError, match="banned_token_ids has all 8 ids; leave at least one"):
        Processors([BannedTokens(range(8))]).check_vocabulary(8)
