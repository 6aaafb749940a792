"""Whatever is drafted, each row gets the target's own text, and its state is exact."""

from __future__ import annotations

import ast
import itertools
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from scripted import (
    RIGHT,
    WRONG,
    OnDevice,
    Script,
    ScriptedProvider,
    Text,
    drain,
    ending_of,
    expected,
    on_device,
    request,
    solo,
    target,
    text_of,
)
from tiny_models import VOCABULARY, tiny_model

import specdec.sampling.rows
import specdec.state
import specdec.targets
import specdec.verify
from specdec import Request, Row, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import ClosedError, OptionError, RoundOpenError, TargetLacksError
from specdec.state import RaggedState
from specdec.verify import flight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), tuple(range(20, 31)))
SAMPLINGS = ((0.0, None), (0.0, None), (1.0, 7), (0.7, 8))
BIG = 2**31 - 1

CELLS = st.sampled_from([RIGHT] * 6 + [WRONG])
# What a drafter must not propose; no host id may look like it, no device id may be no number.
INVALID_IDS = (-1, VOCABULARY, BIG)
GARBAGE = (*INVALID_IDS, 1.5, None, "x", [3])


def moves(invalid: Sequence[Any]) -> st.SearchStrategy[list[Any]]:
    """Proposals of one row: right, wrong at a place, partly right, empty, too long, garbage."""
    right = st.integers(0, 8).map(lambda n: [RIGHT] * n)
    wrong = st.tuples(st.integers(0, 5), st.integers(0, 4)).map(
        lambda at: [*[RIGHT] * at[0], WRONG, *[RIGHT] * at[1]]
    )
    mixed = st.lists(CELLS, max_size=7)
    odd = st.tuples(st.integers(0, 4), st.sampled_from(invalid)).map(
        lambda at: [*[RIGHT] * at[0], at[1], RIGHT]
    )
    return st.one_of(right, wrong, mixed, odd)


@frozen
class Asked:
    """One row of an example: its text, and how its request is limited."""

    text: Text
    temp: float
    seed: int | None
    width: int
    max_tokens: int
    end_tokens: frozenset[int]
    moves: list[Any]

    def request(self, **options: Any) -> Request:
        return request(
            self.text.prompt,
            temp=self.temp,
            seed=self.seed,
            max_tokens=self.max_tokens,
            end_tokens=self.end_tokens,
            num_draft_tokens=self.width,
            **options,
        )


@st.composite
def askings(draw: st.DrawFn, invalid: Sequence[Any]) -> list[Asked]:
    """1 to 4 ragged requests; end tokens are such as the target really writes."""
    count = draw(st.integers(1, 4))
    prompts = draw(st.permutations(PROMPTS))[:count]
    asked = []
    for prompt in prompts:
        temp, seed = draw(st.sampled_from(SAMPLINGS))
        text = text_of(prompt, temp, seed)
        ends = st.lists(st.sampled_from(text.output[:12]), max_size=2)
        asked.append(
            Asked(
                text,
                temp,
                seed,
                draw(st.integers(1, 6)),
                draw(st.integers(1, 14)),
                frozenset(draw(ends)) if draw(st.booleans()) else frozenset(),
                draw(st.lists(moves(invalid), min_size=1, max_size=5)),
            )
        )
    return asked


class Watched:
    """A group whose invariants are looked at after each round."""

    def __init__(self, asked: Sequence[Asked], provider: ScriptedProvider, step: int) -> None:
        self.asked = list(asked)
        self.provider = provider
        self.group = VerifyGroup(target(), provider, drafter="scripted", prefill_step_size=step)
        self.published: list[Row] = []
        self.rows = self.group.admit([each.request(publish=self._published) for each in asked])
        self.before = self.lengths()
        self.seen = 0

    def lengths(self) -> dict[int, int]:
        state = self.group._live.state
        assert state is not None
        return {id(row): length for row, length in zip(self.group.rows, state.lengths, strict=True)}

    def _published(self, row: Row, caches: list[Any], checkpoint: Any) -> None:
        self.published.append(row)
        assert {cache.offset for cache in caches} == {row.processed}
        if checkpoint is not None:
            assert checkpoint.processed_tokens == row.processed
            written = [*row.tokens, row.end_token][: row.processed]
            assert checkpoint.attachment.arrays["tokens"].tolist() == written

    def check(self) -> None:
        lengths = self.lengths()
        drafter = [g for g in self.provider.groups if g.decodes and not g.closed]
        latest = self.provider.rounds[self.seen :]
        self.seen = len(self.provider.rounds)
        early = self.group._live.flight
        for row in self.group.rows:
            # I1: everything before the pending token is in the cache; a plain window that was
            # begun early and kept at a retirement has read that one too.
            ahead = early is not None and early.settled
            assert lengths[id(row)] == row.processed == len(row.tokens) - 1 + ahead
        if drafter:
            # I2: the draft rows have read the same, in the same order.
            assert [r.tokens for r in drafter[0].rows] == [r.tokens[:-1] for r in self.group.rows]
            # I4: each row grew by what it accepted and one. A round that only hands out what
            # came with the prompts asks no drafter, and nothing grows.
            grown = [0] * len(self.before)
            if latest:
                [told] = latest
                assert told.accepted is not None
                grown = [1 + accepted for accepted in told.accepted]
            for row, growth in zip(self._order(), grown, strict=True):
                assert row.processed - self.before[id(row)] == growth
        self.before = lengths

    def _order(self) -> list[Row]:
        """The rows of the round that has just ended, as they stood in it."""
        named = {id(row): row for row in self.rows}
        return [named[key] for key in self.before]

    def run(self) -> None:
        drain(self.group, self.check)
        for row, asked in zip(self.rows, self.asked, strict=True):
            assert ending_of(row) == expected(asked.text.output, asked.end_tokens, asked.max_tokens)
            assert row.stats.emitted == len(row.emitted)
            assert row.stats.accepted <= row.stats.drafted
        assert sorted(map(id, self.published)) == sorted(map(id, self.rows))
        assert self.provider.complaints == []
        self.group.close()
        assert self.provider.left_open == []


def script(asked: Sequence[Asked]) -> Script:
    texts = [each.text for each in asked]
    return Script(texts, [each.moves for each in asked], polite=False)


READERS = st.sampled_from(
    [
        (PrefillMode.TAIL_SPLIT, ContextKind.NONE, ()),
        (PrefillMode.TAIL_SPLIT, ContextKind.NONE, ()),
        (PrefillMode.TAIL_SPLIT, ContextKind.TAPS, (0, 1)),
        (PrefillMode.FULL, ContextKind.NONE, ()),
        (PrefillMode.FULL, ContextKind.PRE_NORM, ()),
    ]
)
STEPS = st.sampled_from([1, 2, 4, 64])


@settings(max_examples=400, deadline=None)
@given(asked=askings(GARBAGE), reader=READERS, step=STEPS)
def test_host_drafts_never_change_a_token_and_state_stays_exact(
    asked: list[Asked], reader: tuple[PrefillMode, ContextKind, tuple[int, ...]], step: int
) -> None:
    plan = script(asked)
    mode, context, taps = reader
    provider = ScriptedProvider(plan, mode=mode, context=context, taps=taps)
    Watched(asked, provider, step).run()
    assert plan.complaints == []
    assert provider.calls["open_prefill"] == len(asked)


@settings(max_examples=300, deadline=None)
@given(
    asked=askings(INVALID_IDS),
    on_host=st.lists(st.booleans(), min_size=1, max_size=4),
    lengths=st.booleans(),
    dtype=st.sampled_from([mx.int32, mx.int64]),
    step=STEPS,
)
def test_device_drafts_never_change_a_token_and_state_stays_exact(
    asked: list[Asked], on_host: list[bool], lengths: bool, dtype: mx.Dtype, step: int
) -> None:
    plan = script(asked)
    device = on_device(plan, lengths=lengths, dtype=dtype)
    turns = itertools.cycle(on_host)

    def sometimes(
        texts: list[tuple[int, ...]], depths: list[int], steps: list[int]
    ) -> OnDevice | None:
        return None if next(turns) else device(texts, depths, steps)

    provider = ScriptedProvider(plan, device=sometimes)
    Watched(asked, provider, step).run()
    assert plan.complaints == []
    # Each round is opened once: on the device, or by draft() after draft_device() gave nothing.
    assert sum(not told.on_device for told in provider.rounds) == provider.calls["draft"]
    assert sum(told.on_device for told in provider.rounds) == provider.calls["resolve"]
    if all(on_host):
        assert provider.calls["resolve"] == 0


@settings(max_examples=60, deadline=None)
@given(asked=askings(GARBAGE), reader=READERS)
def test_windows_that_are_wider_than_the_drafts_change_no_token(
    asked: list[Asked], reader: tuple[PrefillMode, ContextKind, tuple[int, ...]]
) -> None:
    """Some backends take few window shapes; then a window has padding behind every draft."""
    plan = script(asked)
    mode, context, taps = reader
    provider = ScriptedProvider(plan, mode=mode, context=context, taps=taps)
    with mock.patch.object(
        RaggedState, "window_width", lambda _state, needed, most: most if needed > 1 else needed
    ):
        Watched(asked, provider, 4).run()
    assert plan.complaints == []
    for told in provider.rounds:
        if told.context is not None:
            assert told.context.shape[1] == 1 or told.context.shape[1] > max(map(len, told.drafts))


def test_a_row_that_stands_down_in_a_round_still_counts_for_its_width() -> None:
    text, short = text_of(PROMPTS[1]), text_of(PROMPTS[2])
    plan = Script([text, short], [[[RIGHT, RIGHT, -1]], [[RIGHT]]])
    group = VerifyGroup(target(), ScriptedProvider(plan))
    asked = [(text, 5), (short, 1)]
    rows = group.admit(
        [request(each.prompt, max_tokens=16, num_draft_tokens=width) for each, width in asked]
    )
    asks: list[tuple[int, int]] = []

    def most_or_one(_state: RaggedState, needed: int, most: int) -> int:
        asks.append((needed, most))
        return most if needed > 1 else needed

    with mock.patch.object(RaggedState, "window_width", most_or_one):
        drain(group)
    assert [row.emitted for row in rows] == [each.output[:16] for each, _ in asked]
    assert rows[0].width == 0
    assert asks[:3] == [(3, 6)] * 3
    assert set(asks[3:]) <= {(2, 2), (1, 2), (1, 1)}


# One host read a round.


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the arrays that the executor waits for."""
    seen: list[tuple[int, ...]] = []
    wait = flight.host_read

    def counted(array: mx.array) -> Any:
        seen.append(array.shape)
        return wait(array)

    monkeypatch.setattr(flight, "host_read", counted)
    return seen


@pytest.fixture
def evals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of ``mx.eval`` and ``mx.synchronize``."""
    seen: list[str] = []
    for name in ("eval", "synchronize"):
        wait = getattr(mx, name)

        def counted(*args: Any, _name: str = name, _wait: Callable[..., Any] = wait) -> Any:
            seen.append(_name)
            return _wait(*args)

        monkeypatch.setattr(mx, name, counted)
    return seen


TEXTS = [text_of(prompt) for prompt in PROMPTS[1:]]
MOVES = [[[RIGHT] * 4], [[RIGHT, WRONG, RIGHT]], [[WRONG], [RIGHT] * 3, []]]


def drafters() -> dict[str, ScriptedProvider | None]:
    plan = Script(TEXTS, MOVES)
    return {
        "plain": None,
        "host": ScriptedProvider(plan),
        "host with context": ScriptedProvider(plan, context=ContextKind.POST_NORM),
        "device": ScriptedProvider(plan, device=on_device(plan, lengths=False)),
        "device with lengths": ScriptedProvider(plan, device=on_device(plan, lengths=True)),
    }


@pytest.mark.parametrize("kind", list(drafters()))
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_round_waits_for_the_device_once(
    kind: str, temp: float, reads: list[tuple[int, ...]], evals: list[str]
) -> None:
    provider = drafters()[kind]
    group = VerifyGroup(target(), provider)
    group.admit(
        [
            request(text.prompt, temp=temp, seed=5, max_tokens=14, num_draft_tokens=4)
            for text in TEXTS
        ]
    )
    reads.clear()
    evals.clear()
    rounds = 0
    while group.rows:
        before = len(reads)
        with group.round() as done:
            assert len(reads) == before + 1
            done.deliver_all()
        assert len(reads) == before + 1
        rounds += 1
    assert len(reads) == rounds
    assert evals == []
    if provider is not None and temp == 0:
        assert {told.on_device for told in provider.rounds if max(told.depths)} >= {
            kind.startswith("device")
        }


WAITS = {"item", "tolist", "eval", "synchronize"}


def waits(path: Path) -> Iterator[tuple[str, str, str]]:
    """Where a file makes the host wait for the device: file, innermost function, call."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(child, child.name)
                continue
            if isinstance(child, ast.Attribute) and child.attr in WAITS:
                yield path.name, function, child.attr
            yield from walk(child, function)

    yield from walk(ast.parse(path.read_text()), "")


def test_nothing_else_in_the_executor_waits_for_the_device() -> None:
    assert specdec.verify.__file__ is not None
    files = sorted(Path(specdec.verify.__file__).parent.glob("*.py"))
    files.append(Path(specdec.sampling.rows.__file__))
    assert specdec.state.__file__ is not None
    files += sorted(Path(specdec.state.__file__).parent.glob("*.py"))
    files += sorted(Path(specdec.targets.__path__[0]).glob("**/*.py"))
    assert len(files) > 10
    assert {wait for path in files for wait in waits(path)} == {
        ("flight.py", "host_read", "tolist"),
        ("flight.py", "host_reads", "eval"),
        ("prefill.py", "_window", "eval"),
        ("prefill.py", "_restored", "eval"),  # a row from the prefix cache, when it is admitted
        ("handover.py", "give_back", "eval"),
        ("external.py", "read_external", "eval"),
        ("cuda.py", "_fault_of", "eval"),  # a kernel that is tried, once for each kind of input
        ("cuda.py", "_distance", "item"),
        ("external.py", "_refused", "tolist"),  # tokens from outside that a constraint refuses
        ("asking.py", "preview", "tolist"),  # a preview, which somebody asked for
        ("ragged.py", "extract_row", "eval"),  # a copy of a row, between rounds
        ("windows.py", "order", "tolist"),  # places of a prompt's chunk, once per chunk
        ("fit.py", "_differ", "item"),  # a model is tried, once
        ("recorder.py", "_keeps_bits", "item"),
        ("convolutions.py", "_is_slice", "item"),
        ("vocabulary.py", "__init__", "eval"),  # a copy of some rows of a head, once a target
    }


# Drafters that read the target's hidden states.

KINDS: list[tuple[ContextKind, tuple[int, ...]]] = [
    (ContextKind.PRE_NORM, ()),
    (ContextKind.POST_NORM, ()),
    (ContextKind.TAPS, (1,)),
    (ContextKind.TAPS, (2, 0)),
]
LONG = tuple((11 * place + 5) % VOCABULARY for place in range(13))


class ByHand:
    """The tiny model's layers, run one by one over mlx-lm's own caches."""

    def __init__(self, kind: ContextKind, taps: tuple[int, ...]) -> None:
        self.model: Any = tiny_model("qwen3").model
        self.caches = [KVCache() for _ in self.model.layers]
        last = len(self.model.layers)
        named = {ContextKind.PRE_NORM: (last - 1,), ContextKind.POST_NORM: (last,)}
        self.taps = named.get(kind, taps)

    def read(self, tokens: Sequence[int]) -> mx.array:
        hidden = self.model.embed_tokens(mx.array([list(tokens)]))
        mask = create_attention_mask(hidden, self.caches[0])
        outputs = []
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            hidden = layer(hidden, mask, cache)
            outputs.append(hidden)
        outputs.append(self.model.norm(hidden))
        context = mx.concatenate([outputs[tap] for tap in self.taps], axis=-1)
        mx.eval(context, [cache.state for cache in self.caches])
        return context

    def trim(self, count: int) -> None:
        for cache in self.caches:
            assert cache.trim(count) == count


@pytest.mark.parametrize("mode", list(PrefillMode))
@pytest.mark.parametrize(("kind", "taps"), KINDS)
@pytest.mark.parametrize("step", [1, 3, 4, 6, 12, 13, 100])
def test_a_drafter_reads_each_prompt_position_once_with_the_targets_own_hidden_states(
    mode: PrefillMode, kind: ContextKind, taps: tuple[int, ...], step: int
) -> None:
    text = text_of(LONG)
    provider = ScriptedProvider(mode=mode, context=kind, taps=taps)
    group = VerifyGroup(target(), provider, prefill_step_size=step)
    group.admit([request(LONG, max_tokens=2, num_draft_tokens=2)])

    head, tail = LONG[:-1], LONG[-1:]
    chunks = [head[at : at + step] for at in range(0, len(head), step)]
    if mode is PrefillMode.FULL:
        chunks.append(tail)
    [reader] = [g for g in provider.groups if not g.decodes]
    assert reader.chunks == [[list(chunk)] for chunk in chunks]
    hand = ByHand(kind, taps)
    assert len(reader.rows[0].contexts) == len(chunks)
    for chunk, context in zip(chunks, reader.rows[0].contexts, strict=True):
        assert mx.array_equal(context, hand.read(chunk)[0])
    # The decoding row begins with all of it.
    [row] = provider.decoding.rows
    assert row.tokens == list(LONG if mode is PrefillMode.FULL else head)
    assert len(row.contexts) == len(chunks)
    drain(group)
    assert provider.rounds[0].pending == [text.output[0] if mode is PrefillMode.FULL else LONG[-1]]
    assert provider.complaints == []


@pytest.mark.parametrize(("kind", "taps"), KINDS)
@pytest.mark.parametrize("device", [False, True])
def test_a_commit_brings_the_windows_hidden_states(
    kind: ContextKind, taps: tuple[int, ...], device: bool
) -> None:
    text = text_of(LONG)
    plan = Script([text], [[[RIGHT] * 3, [RIGHT, WRONG], [WRONG] * 4, [], [RIGHT] * 6]])
    provider = ScriptedProvider(
        plan,
        device=on_device(plan, lengths=True) if device else None,
        mode=PrefillMode.FULL,
        context=kind,
        taps=taps,
    )
    group = VerifyGroup(target(), provider, prefill_step_size=5)
    [row] = group.admit([request(LONG, max_tokens=28, num_draft_tokens=4)])
    drain(group)
    assert row.emitted == text.output[:28]
    hand = ByHand(kind, taps)
    for at in range(0, len(LONG) - 1, 5):
        hand.read(LONG[:-1][at : at + 5])
    hand.read(LONG[-1:])
    assert len(provider.rounds) > 4
    for told in provider.rounds:
        assert told.accepted is not None
        assert told.context is not None
        window = [told.pending[0], *told.drafts[0]]
        assert mx.array_equal(told.context, hand.read(window))
        hand.trim(len(window) - 1 - told.accepted[0])
    assert provider.complaints == plan.complaints == []


def test_a_ragged_commit_is_as_wide_as_the_window_of_all_rows() -> None:
    plan = Script(TEXTS, [[[RIGHT] * 4], [[RIGHT, WRONG]], [[]]])
    provider = ScriptedProvider(plan, context=ContextKind.TAPS, taps=(0, 2))
    group = VerifyGroup(target(), provider)
    rows = group.admit([request(text.prompt, max_tokens=40, num_draft_tokens=5) for text in TEXTS])
    with group.round() as done:
        done.deliver_all()
    [told] = provider.rounds
    assert told.accepted == [4, 1, 0]
    assert told.context is not None
    assert told.context.shape == (3, 5, 2 * 64)
    for row, kept, context in zip(rows, told.accepted, told.context, strict=True):
        hand = ByHand(ContextKind.TAPS, (0, 2))
        whole = hand.read(row.tokens)[0]
        begun = len(row.request.prompt) - 1
        close = mx.allclose(context[: 1 + kept], whole[begun : begun + 1 + kept], atol=1e-4)
        assert close.item()
    group.close()


# The first token of a prompt that was read whole.


@pytest.mark.parametrize("ends", ["end token", "budget", "end token and budget", "stop rule"])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_a_token_that_comes_with_the_prompt_may_end_the_request(ends: str, temp: float) -> None:
    first = solo(PROMPTS[2], temp, 3)[0]
    provider = ScriptedProvider(mode=PrefillMode.FULL, context=ContextKind.PRE_NORM)
    group = VerifyGroup(target(), provider)
    heard = []
    [row] = group.admit(
        [
            request(
                PROMPTS[2],
                temp=temp,
                seed=3,
                max_tokens=1 if "budget" in ends else 9,
                end_tokens=frozenset([first] if "end token" in ends else []),
                stops=(lambda token: token == first) if ends == "stop rule" else None,
                num_draft_tokens=4,
                consumer=lambda emission: heard.append(
                    (emission.token, emission.content, emission.finish, emission.from_draft)
                ),
            )
        ]
    )
    assert drain(group) == 1
    content = "end token" not in ends
    finish = "length" if ends == "budget" else "stop"
    assert heard == [(first, content, finish, False)]
    assert row.emitted == ((first,) if content else ())
    assert (row.finish, row.end_token) == (finish, None if content else first)
    assert (row.stats.rounds, row.stats.target_forwards) == (0, 1)
    assert row.stats.emitted == len(row.emitted)
    assert not provider.rounds
    assert not provider.complaints
    group.close()


def test_a_token_that_comes_with_the_prompt_counts_as_a_forward_but_no_round() -> None:
    text = TEXTS[0]
    provider = ScriptedProvider(Script.always([text], [RIGHT] * 3), mode=PrefillMode.FULL)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(text.prompt, max_tokens=9, num_draft_tokens=3)])
    assert drain(group) == 3
    assert row.emitted == text.output[:9]
    stats = row.stats
    assert (stats.rounds, stats.target_forwards, stats.emitted) == (2, 3, 9)
    assert (stats.drafted, stats.accepted) == (6, 6)


# Rounds, depths and budgets.


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("wrong", [None, 0, 1, 4])
def test_an_end_token_ends_the_row_wherever_it_falls_in_a_block(
    place: int, width: int, wrong: int | None
) -> None:
    text = text_of(PROMPTS[1])
    end = text.output[place]
    assert end not in text.output[:place]
    cells = [RIGHT] * width if wrong is None else [RIGHT] * wrong + [WRONG] + [RIGHT] * width
    provider = ScriptedProvider(Script.always([text], cells[:width]))
    heard: list[Any] = []
    asked = request(
        text.prompt,
        max_tokens=20,
        end_tokens={end},
        num_draft_tokens=width,
        consumer=lambda emission: heard.append((emission.token, emission.content)),
    )
    group = VerifyGroup(target(), provider)
    [row] = group.admit([asked])
    drain(group)
    assert ending_of(row) == expected(text.output, {end}, 20)
    assert heard == [(token, True) for token in text.output[:place]] + [(end, False)]
    last = provider.rounds[-1]
    assert last.accepted is not None
    drafted = end in last.drafts[0][: last.accepted[0]]
    assert row.processed == len(row.tokens) + drafted
    assert row.stats.emitted == place


@pytest.mark.parametrize("accepting", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 9])
def test_a_budget_is_spent_exactly_and_its_last_token_is_never_drafted(
    accepting: bool, max_tokens: int
) -> None:
    width = 4
    text = text_of(PROMPTS[1])
    provider = ScriptedProvider(Script.always([text], [RIGHT if accepting else WRONG] * width))
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(text.prompt, max_tokens=max_tokens, num_draft_tokens=width)])
    drain(group)
    assert ending_of(row) == expected(text.output, (), max_tokens)
    left = max_tokens
    for told in provider.rounds:
        assert told.depths == [min(width, left - 1)]
        assert told.accepted is not None
        left -= told.accepted[0] + 1
    assert left == 0
    assert row.stats.accepted == (max_tokens - row.stats.rounds if accepting else 0)


def test_a_row_without_a_limit_runs_to_its_end_token() -> None:
    text = text_of(PROMPTS[1])
    end = text.output[7]
    provider = ScriptedProvider(Script.always([text], [RIGHT] * 3))
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(text.prompt, max_tokens=-1, end_tokens={end}, num_draft_tokens=3)])
    assert row.budget is None
    drain(group)
    assert ending_of(row) == expected(text.output, {end}, -1)


@pytest.mark.parametrize("width", [1, 4])
def test_a_drafter_that_is_always_wrong_has_nothing_accepted(width: int) -> None:
    text = text_of(PROMPTS[1])
    provider = ScriptedProvider(Script.always([text], [WRONG] * width))
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(text.prompt, max_tokens=10, num_draft_tokens=width)])
    drain(group)
    assert row.emitted == text.output[:10]
    assert row.stats.accepted == 0
    assert row.stats.drafted > 0


@pytest.mark.parametrize("place", range(8))
def test_a_stop_rule_is_told_of_each_token_once_and_ends_the_row_on_it(place: int) -> None:
    text = text_of(PROMPTS[1])
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return len(told) == place + 1

    provider = ScriptedProvider(Script.always([text], [RIGHT] * 3 + [WRONG]))
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(text.prompt, max_tokens=20, num_draft_tokens=4, stops=stops)])
    drain(group)
    assert tuple(told) == row.emitted == text.output[: place + 1]
    assert row.finish == "stop"


def test_emissions_say_what_was_drafted_and_carry_the_targets_log_probabilities() -> None:
    text = text_of(PROMPTS[1])
    end = text.output[9]
    heard: list[Any] = []
    provider = ScriptedProvider(Script.always([text], [RIGHT, RIGHT, WRONG]))
    group = VerifyGroup(target(), provider)
    group.admit(
        [
            request(
                text.prompt,
                max_tokens=20,
                end_tokens={end},
                num_draft_tokens=3,
                consumer=heard.append,
            )
        ]
    )
    drain(group)
    assert [emission.from_draft for emission in heard] == [True, True, False] * 3 + [True]
    assert [emission.finish for emission in heard] == [None] * 9 + ["stop"]
    alone = ByHand(ContextKind.POST_NORM, ()).read([*text.prompt, *text.output[:9]])
    logits = tiny_model("qwen3").lm_head(alone)[0, len(text.prompt) - 1 :]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for emission, row in zip(heard, logprobs, strict=True):
        assert mx.allclose(emission.logprobs, row, atol=1e-4).item()


# Verbs.


def test_a_round_of_no_rows_is_empty() -> None:
    group = VerifyGroup(target(), ScriptedProvider())
    assert group.admit([]) == []
    with group.round() as done:
        done.deliver_all()
    assert done.rows == ()
    group.admit([])


def test_verbs_are_refused_inside_a_round_and_after_close() -> None:
    group = VerifyGroup(target(), ScriptedProvider())
    asked = request(PROMPTS[0], max_tokens=5)
    group.admit([asked])
    with group.round() as done:
        with pytest.raises(RoundOpenError, match="admit"):
            group.admit([asked])
        with pytest.raises(RoundOpenError, match="round"):
            group.round()
        done.deliver_all()
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="admit"):
        group.admit([asked])
    with pytest.raises(ClosedError, match="round"):
        group.round()


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_group_that_is_closed_inside_a_round_keeps_what_was_delivered(
    drafting: bool, taken: int
) -> None:
    text = text_of(PROMPTS[1])
    provider = ScriptedProvider(Script.always([text], [RIGHT] * 3)) if drafting else None
    group = VerifyGroup(target(), provider)
    caches = [KVCache(), KVCache()]
    [row] = group.admit([request(text.prompt, max_tokens=9, num_draft_tokens=3, cache=caches)])
    with group.round() as done:
        got = [emission.token for emission in itertools.islice(done.deliver(0), taken)]
        group.close()
        assert list(done.deliver(0)) == []
    assert row.finish == "cancelled"
    assert tuple(got) == row.emitted == text.output[: len(got)]
    assert len(got) == (taken if drafting else min(taken, 1))
    assert {cache.offset for cache in caches} == {len(row.tokens)}
    with pytest.raises(ClosedError):
        group.round()
    if provider is not None:
        assert provider.complaints == []
        assert provider.left_open == []


@pytest.mark.parametrize("taken", range(5))
@pytest.mark.parametrize("leaving", ["quietly", "by an error"])
def test_a_row_that_is_not_delivered_to_its_end_ends_with_what_it_was_given(
    taken: int, leaving: str
) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS[1:3]]
    provider = ScriptedProvider(Script.always(texts, [RIGHT] * 3))
    published: list[tuple[int, set[int]]] = []

    def publish(row: Row, caches: list[Any], checkpoint: Any) -> None:
        published.append((checkpoint.processed_tokens, {cache.offset for cache in caches}))

    group = VerifyGroup(target(), provider)
    whole, part = group.admit(
        [request(text.prompt, max_tokens=12, num_draft_tokens=3, publish=publish) for text in texts]
    )
    with suppress(ZeroDivisionError), group.round() as done:
        list(done.deliver(0))
        got = [emission.token for emission in itertools.islice(done.deliver(1), taken)]
        if leaving == "by an error":
            raise ZeroDivisionError
    assert tuple(got) == part.emitted == texts[1].output[:taken]
    assert part.finish == ("cancelled" if taken < 4 else None)
    assert group.rows == ([whole] if taken < 4 else [whole, part])
    if taken < 4:
        assert published == [(part.processed, {part.processed})]
        assert part.processed == len(part.tokens)
    drain(group)
    assert whole.emitted == texts[0].output[:12]
    assert provider.complaints == []


def test_a_row_is_never_delivered_twice() -> None:
    text = text_of(PROMPTS[1])
    group = VerifyGroup(target(), ScriptedProvider(Script.always([text], [RIGHT] * 3)))
    [row] = group.admit([request(text.prompt, max_tokens=8, num_draft_tokens=3)])
    while row.finish is None:
        with group.round() as done:
            first = done.deliver(0)
            next(first)
            second = done.deliver(0)
            next(second)
            next(first)
            done.deliver_all()
            assert list(done.deliver(0)) == list(second) == list(first) == []
    assert row.emitted == text.output[:8]
    assert row.stats.emitted == 8


@pytest.mark.parametrize("taps", [(3,), (0, 3), (1, 1), (-1,)])
def test_a_drafter_that_taps_layers_the_target_has_not_is_refused_before_anything_is_read(
    taps: tuple[int, ...],
) -> None:
    provider = ScriptedProvider(context=ContextKind.TAPS, taps=taps)
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        VerifyGroup(target(), provider)
    assert provider.groups == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": -2},
        {"max_tokens": 2.0},
        {"num_draft_tokens": -1},
        {"num_draft_tokens": 1.0},
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        request((1, 2), **options)


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(OptionError, match="prompt is empty"):
        request(())
