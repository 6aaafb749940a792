"""Constrained rows give the text of a plain loop over mlx-lm, whoever drafts for them.

The loop here feeds mlx-lm's model one token at a time, and makes the grammar engine's matcher anew
from the emitted tokens before each of them. Nothing of the executor or of ``specdec.grammar`` runs
in it, but the vocabulary's end tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, evolve, field
from drafters.recurrent import RecurrentProvider
from drafters.tapped import TappedProvider
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import (
    RIGHT,
    WRONG,
    Ending,
    Fault,
    Script,
    ScriptedDeviceRows,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    ending_of,
    on_device,
    solo,
    target,
)
from tiny_models import VOCABULARY, OwnCache, build_model, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import Request, Row, SamplingOptions, VerifyGroup, stream_generate
from specdec.contract import ContextKind, PrefillMode, Proposal
from specdec.errors import ConstraintError, GroupFailedError
from specdec.grammar import Grammar
from specdec.sampling import BannedTokens
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import TokenConstraint


# A tokenizer of 64 ids, as wide as the tiny models: JSON's signs, letters, some longer pieces.


def _letters() -> Any:
    pieces = [*'{}[]":,.-', "Ġ", *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
    joins = ['" :', '{ "', '" ,', "g e", "n a", "m e", "na me", "t r", "u e", "tr ue"]
    joins += ["1 2", "1 0", "o k", "r e", "a ge"]
    merges = [(pair.split()[0], pair.split()[1]) for pair in joins]
    vocab = {piece: place for place, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    made = fast(tokenizer_object=inner, eos_token="<end>")
    made.add_special_tokens({"additional_special_tokens": ["<stop>", "<think>"]})
    return made


LETTERS = _letters()
END, STOP, THINK = (int(LETTERS.get_vocab()[name]) for name in ("<end>", "<stop>", "<think>"))
ENDS = frozenset({END, STOP})
assert len(LETTERS) == VOCABULARY

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "ok": {"enum": ["true", "one", "two"]},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
PATTERN = "(name|age):[a-f]{2,9}-[0-9]{3,5}(true|12)+"
LARK = """
start: "[" item ("," item)~2..5 "]"
item: "name" NUMBER | "true" | "{\\"ok\\":" NUMBER "}"
NUMBER: /[0-9]{1,3}/
"""
DISTINCT = (3, 14, 15)  # the target writes four different tokens behind it, and no end
PROMPTS = ((7,), (1, 2, 3), (5, 9, 40, 3, 22, 17), tuple(range(20, 31)), (33, 8, 33, 8))
SAMPLINGS: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, 7))
GRAMMARS = ("json", "regex", "lark", "after")
BUDGET = 40


def text(tokens: Sequence[int]) -> str:
    return str(LETTERS.decode(list(tokens), skip_special_tokens=False))


def ids(what: str) -> list[int]:
    return [int(token) for token in LETTERS.encode(what, add_special_tokens=False)]


def marker_of(prompt: tuple[int, ...], temp: float, seed: int | None) -> tuple[int, ...]:
    """What the target alone writes third, or last before an end: the grammar begins behind it."""
    written = solo(prompt, temp, seed)
    first_end = next((at for at, token in enumerate(written) if token in ENDS), len(written))
    return (written[min(2, first_end - 1)],)


def grammar_of(kind: str, prompt: tuple[int, ...], temp: float, seed: int | None) -> Grammar:
    if kind == "after":
        return Grammar.json_schema(PERSON, after=marker_of(prompt, temp, seed))
    made = {
        "json": Grammar.json_schema(PERSON),
        "regex": Grammar.regex(PATTERN),
        "lark": Grammar.lark(LARK),
    }
    return made[kind]


def bound_of(kind: str, prompt: tuple[int, ...], temp: float = 0.0, seed: int | None = None) -> Any:
    return grammar_of(kind, prompt, temp, seed).bind(LETTERS, VOCABULARY, ENDS)


# The oracle.

ENGINE = from_tokenizer(LETTERS, n_vocab=VOCABULARY, eos_token=[END])


@cache
def _source(kind: str) -> LLMatcher:
    source = {
        "json": LLMatcher.grammar_from_json_schema(
            json.dumps(PERSON), {"whitespace_flexible": False}
        ),
        "regex": LLMatcher.grammar_from_regex(PATTERN),
        "lark": LLMatcher.grammar_from_lark(LARK),
    }
    return LLMatcher(ENGINE, source[{"after": "json"}.get(kind, kind)], log_level=0)


def engine_allows(kind: str, marker: Sequence[int], emitted: Sequence[int]) -> set[int] | None:
    """The ids that may follow, by a matcher that is made anew; ``None``: all of them."""
    if kind == "after":
        found = [at for at, token in enumerate(emitted) if token == marker[0]]
        if not found:
            return None
        emitted = emitted[found[0] + 1 :]
    matcher = _source(kind).deep_copy()
    assert matcher.try_consume_tokens(list(emitted)) == len(emitted)
    if matcher.is_stopped():
        return set(ENDS)
    bits = np.zeros((1, (VOCABULARY + 31) // 32), dtype=np.int32)
    fill_next_token_bitmask(matcher, bits)
    assert not matcher.is_error()
    allowed = {t for t in range(VOCABULARY) if bits[0, t >> 5] >> (t & 31) & 1}
    return (allowed - {END}) | (ENDS if END in allowed else set())


def plain_loop(
    prompt: Sequence[int],
    allows: Callable[[tuple[int, ...]], set[int] | None],
    done: Callable[[tuple[int, ...]], bool],
    *,
    budget: int,
    ends: frozenset[int] = ENDS,
) -> Ending:
    """mlx-lm's model, one token at a time; nothing may follow where ``done`` says so."""
    model = tiny_model("qwen3")
    emitted: tuple[int, ...] = ()
    caches = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([list(prompt[:-1])]), cache=caches)
    last = prompt[-1]
    while True:
        logits = model(mx.array([[last]]), cache=caches)[0, -1]
        allowed = allows(emitted)
        if allowed is not None:
            assert allowed
            mask = mx.array([token in allowed for token in range(VOCABULARY)])
            logits = mx.where(mask, logits, -mx.inf)
        last = int(np.argmax(np.array(logits)))
        if last in ends:
            return Ending(emitted, last, "stop")
        emitted = (*emitted, last)
        if done(emitted):
            return Ending(emitted, None, "stop")
        if len(emitted) == budget:
            return Ending(emitted, None, "length")


@cache
def alone(
    kind: str, prompt: tuple[int, ...], temp: float, seed: int | None, budget: int = BUDGET
) -> Ending:
    """What a row must give: the plain loop's text, or our own plain run's where it is seeded."""
    marker = marker_of(prompt, temp, seed)

    def allows(emitted: tuple[int, ...]) -> set[int] | None:
        return engine_allows(kind, marker, emitted)

    def done(emitted: tuple[int, ...]) -> bool:
        allowed = allows(emitted)
        return allowed is not None and allowed <= ENDS

    if temp == 0:
        return plain_loop(prompt, allows, done, budget=budget)
    group = VerifyGroup(target())
    asked = request(prompt, bound_of(kind, prompt, temp, seed), temp, seed, num_forced_tokens=0)
    [row] = group.admit([asked])
    drain(group)
    assert row.stats.forced == 0
    for place, token in enumerate(row.emitted):
        allowed = allows(row.emitted[:place])
        assert allowed is None or token in allowed
    return ending_of(row)


def request(
    prompt: Sequence[int],
    constraint: Any,
    temp: float = 0.0,
    seed: int | None = None,
    *,
    acceptance: Any = "match",
    **options: Any,
) -> Request:
    options = {"max_tokens": BUDGET, "end_tokens": ENDS, **options}
    sampling = SamplingOptions(temp=temp, seed=seed, acceptance=acceptance)
    return Request(prompt=tuple(prompt), sampling=sampling, constraint=constraint, **options)


# What is watched.


@define(eq=False)
class Watched:
    """A constraint, and the tokens that it was advanced by."""

    inner: TokenConstraint
    taken: list[int] = field(factory=list)
    looked: int = 0

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        self.looked += 1
        return self.inner.masks(draft)

    def advance(self, token: int, /) -> bool:
        stop = self.inner.advance(token)
        self.taken.append(token)
        return stop

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        return self.inner.propose(max_tokens)


class Watch:
    """Checks a group after every round: cache lengths, and where each constraint stands."""

    def __init__(self, group: VerifyGroup) -> None:
        self.group = group

    def __call__(self) -> None:
        live = self.group._live
        # A window that was begun early, of rows without a constraint, may be kept already.
        early = int(live.flight is not None and live.flight.settled)
        lengths = tuple(len(row.tokens) - 1 + early for row in self.group.rows)
        if self.group.rows:
            assert live.state is not None
            assert live.state.lengths == lengths
        for row in self.group.rows:
            assert row.processed == len(row.tokens) - 1 + early
            if isinstance(row.constraint, Watched):
                assert tuple(row.constraint.taken) == row.emitted


def watched(bound: Callable[[], TokenConstraint]) -> Callable[[], Watched]:
    return lambda: Watched(bound())


# Drafters that take tokens from outside.


class ConsumingRows(ScriptedRows):
    """Scripted rows with ``consume``; the provider may be told to fail there."""

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        self._enter("consume")
        if not self.decodes:
            self._complain("consume() of a prefill group")
        read: Any = tokens.tolist()
        if len(read) != self.row_count or len(lengths) != self.row_count:
            self._complain(f"consume of {len(read)} rows, {lengths}, for {self.row_count}")
        self._check_context("consume", context, tokens.shape)
        for index, (row, size) in enumerate(zip(self.rows, lengths, strict=True)):
            if not all(0 <= token < VOCABULARY for token in read[index]):
                self._complain(f"consume() of ids that do not exist: {read[index]}")
            row.tokens.extend(read[index][:size])
            if context is not None and size:
                row.contexts.append(context[index, :size])


class ConsumingDeviceRows(ConsumingRows, ScriptedDeviceRows):
    """The same, for drafts that stay on the device where they may."""


KINDS = (
    "none",
    "ngram",
    "host",
    "host, consumes",
    "device",
    "device, consumes",
    "whole prompt, consumes",
    "taps",
    "taps, consumes",
    "post-norm, consumes",
    "tapped",
    "recurrent",
)
CONSUMES = {kind for kind in KINDS if "consumes" in kind} | {"none", "ngram", "tapped"}
MOVES: list[list[Any]] = [
    [[RIGHT] * 3],
    [[RIGHT, WRONG], [WRONG], [RIGHT] * 4],
    [[], [RIGHT, RIGHT, WRONG, RIGHT]],
    [[RIGHT] * 5, [64, 1], [RIGHT, -1], [RIGHT]],
]


def provider_of(kind: str, texts: Sequence[Text], moves: Any = None) -> Any:
    plan = Script(texts, moves or [MOVES[at % len(MOVES)] for at in range(len(texts))])
    rows = ConsumingRows if "consumes" in kind else ScriptedRows
    full: dict[str, Any] = {"rows": rows, "mode": PrefillMode.FULL}
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "ngram": lambda: NgramProvider(min_ngram=1),
        "host": lambda: ScriptedProvider(plan, rows=rows),
        "device": lambda: ScriptedProvider(
            plan,
            device=on_device(plan, lengths=True),
            rows=ConsumingDeviceRows if "consumes" in kind else ScriptedDeviceRows,
        ),
        "whole prompt": lambda: ScriptedProvider(plan, **full),
        "taps": lambda: ScriptedProvider(plan, rows=rows, context=ContextKind.TAPS, taps=(0, 1)),
        "post-norm": lambda: ScriptedProvider(plan, **full, context=ContextKind.POST_NORM),
        "tapped": lambda: TappedProvider.tiny(hidden_size=64),
        "recurrent": lambda: RecurrentProvider.tiny(hidden_size=64),
    }
    return made[kind.split(",", maxsplit=1)[0]]()


def as_text(prompt: tuple[int, ...], ending: Ending) -> Text:
    return Text(prompt, ending.tokens + (() if ending.end_token is None else (ending.end_token,)))


# Every drafter, every grammar.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_constrained_row_gives_the_plain_loops_text_with_every_drafter(
    kind: str, grammar: str
) -> None:
    for temp, seed in SAMPLINGS:
        forced = drafted = 0
        for prompt in (PROMPTS[1], PROMPTS[3]):
            want = alone(grammar, prompt, temp, seed)
            provider = provider_of(kind, [as_text(prompt, want)], [MOVES[1]])
            group = VerifyGroup(target(), provider, prefill_step_size=4)
            seen: list[Any] = []
            bound = watched(bound_of(grammar, prompt, temp, seed))
            asked = request(
                prompt,
                bound,
                temp,
                seed,
                num_draft_tokens=4,
                publish=lambda *it, into=seen: into.append(it),
            )
            [row] = group.admit([asked])
            drain(group, Watch(group))
            assert ending_of(row) == want
            forced += row.stats.forced
            drafted += row.stats.drafted
            assert row.stats.draft_errors == 0
            check_checkpoint(kind, row, seen)
            check_scripted(provider)
        assert (forced > 0) is (kind in CONSUMES)  # each of the grammars forces something
        assert kind == "none" or drafted > 0


def check_scripted(provider: Any) -> None:
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []


def check_checkpoint(kind: str, row: Row, seen: list[Any]) -> None:
    """The drafter has read what the target has, and with the right hidden states."""
    [(same, _, checkpoint)] = seen
    assert same is row
    if kind == "none":
        assert checkpoint is None
        return
    assert checkpoint.processed_tokens == row.processed
    arrays = checkpoint.attachment.arrays
    if "tokens" not in arrays or checkpoint.namespace != "scripted":
        return
    assert tuple(arrays["tokens"].tolist()) == row.read
    contexts = [arrays[f"context{number}"] for number in range(len(arrays) - 1)]
    if not contexts:
        return
    kept = mx.concatenate(contexts, axis=0)
    wanted, taps = (ContextKind.TAPS, (0, 1)) if "taps" in kind else (ContextKind.POST_NORM, ())
    state = target().new_state()
    state.begin_round(len(row.read))
    whole = target().forward(mx.array([list(row.read)]), state, wanted, taps).context
    assert whole is not None
    assert kept.shape == whole[0].shape
    assert mx.allclose(kept, whole[0], rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_rows_that_arrive_and_depart_keep_the_plain_loops_text(kind: str, grammar: str) -> None:
    cases = [
        (0, PROMPTS[1], 0, grammar, BUDGET, None),
        (0, PROMPTS[2], 1, grammar, 9, None),  # departs in the middle of its text
        (0, PROMPTS[4], 0, None, 25, None),  # nothing restricts this one
        (2, PROMPTS[3], 1, grammar, BUDGET, None),
        (3, PROMPTS[0], 0, grammar, BUDGET, 5),  # its consumer goes
        (5, PROMPTS[2], 0, "json", 23, None),
    ]
    texts = []
    for _, prompt, sampling, name, _, _ in cases:
        temp, seed = SAMPLINGS[sampling]
        if name is None:
            texts.append(Text(prompt, solo(prompt, temp, seed)))
        else:
            texts.append(as_text(prompt, alone(name, prompt, temp, seed)))
    provider = provider_of(kind, texts)
    group = VerifyGroup(target(), provider, prefill_step_size=4)
    rows: list[Row] = []
    check = Watch(group)
    for turn in count():
        for at, prompt, sampling, name, budget, gone in cases:
            if at != turn:
                continue
            temp, seed = SAMPLINGS[sampling]
            bound = None if name is None else watched(bound_of(name, prompt, temp, seed))
            tokens: list[int] = []

            def consumer(
                emission: Any, tokens: list[int] = tokens, gone: int | None = gone
            ) -> bool:
                tokens.append(emission.token)
                return len(tokens) != gone

            ends = ENDS if name is not None else frozenset()
            asked = request(prompt, bound, temp, seed, max_tokens=budget, end_tokens=ends)
            rows += group.admit([evolve(asked, num_draft_tokens=4, consumer=consumer)])
        if not group.rows and turn > 5:
            break
        with group.round() as done:
            done.deliver_all()
        check()
        assert turn < 200
    for row, (_, prompt, sampling, name, budget, gone) in zip(rows, cases, strict=True):
        temp, seed = SAMPLINGS[sampling]
        if name is None:
            assert ending_of(row) == Ending(solo(prompt, temp, seed)[:budget], None, "length")
            continue
        if gone is not None:
            whole = alone(name, prompt, temp, seed)
            assert ending_of(row) == Ending(whole.tokens[:gone], None, "cancelled")
        else:
            assert ending_of(row) == shortened(alone(name, prompt, temp, seed), budget)
        assert isinstance(row.constraint, Watched)
        assert row.stats.draft_errors == 0
    check_scripted(provider)


def shortened(whole: Ending, budget: int) -> Ending:
    """The same text under a smaller budget; an end wins over the budget."""
    if len(whole.tokens) < budget or (len(whole.tokens) == budget and whole.finish == "stop"):
        return whole
    return Ending(whole.tokens[:budget], None, "length")


def test_without_its_grammar_a_row_writes_something_else() -> None:
    for prompt in PROMPTS[1:4]:
        assert solo(prompt)[:5] != alone("json", prompt, 0.0, None).tokens[:5]
        value = json.loads(text(alone("json", prompt, 0.0, None).tokens))
        assert value.keys() == {"name", "age", "ok"}


def test_drafts_that_are_all_cut_leave_a_drafter_the_context_that_it_may_count_on() -> None:
    # The window is then narrower than 1 + the longest draft.
    prompt = PROMPTS[1]
    want = alone("json", prompt, 0.0, None)
    widths = []

    class Widths(ScriptedRows):
        def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
            assert context is not None
            assert self.round is not None
            widths.append((context.shape[1], max(map(len, self.round.drafts))))
            super().commit(accepted, context)

    provider = ScriptedProvider(
        Script.always([as_text(prompt, want)], [THINK] * 4),
        rows=Widths,
        context=ContextKind.TAPS,
        taps=(0, 1),
    )
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(prompt, bound_of("json", prompt), num_draft_tokens=4)])
    drain(group)
    assert ending_of(row) == want
    assert row.stats.draft_errors == 0
    assert max(drafted for _, drafted in widths) == 4
    assert all(width >= 1 + drafted for width, drafted in widths)


# Drafts that the grammar does not allow (F1), and a grammar that begins inside a burst (F3).

DIGITS = Grammar.regex("[0-9]+").bind(LETTERS, VOCABULARY, ENDS)
A, ONE, TWO = ids("a")[0], ids("1")[0], ids("2")[0]


@pytest.mark.parametrize(
    "move",
    [
        [A, RIGHT, RIGHT],
        [RIGHT, A, RIGHT],
        [RIGHT, RIGHT, A],
        [RIGHT, RIGHT, A, RIGHT, RIGHT],
        [A, A, A, A],
        [THINK, RIGHT],
        [RIGHT, 64],
        [RIGHT, RIGHT, -1],
    ],
)
@pytest.mark.parametrize("kind", ["host", "device, consumes"])
def test_a_draft_outside_the_grammar_costs_its_row_nothing(move: list[Any], kind: str) -> None:
    prompt, other = PROMPTS[2], PROMPTS[1]

    def allows(emitted: tuple[int, ...]) -> set[int]:
        digits = {t for t in range(VOCABULARY) if text([t]).isdigit()}
        return digits | ENDS if emitted else digits

    want = plain_loop(prompt, allows, lambda _: False, budget=20)
    free = solo(other)[:20]
    texts = [as_text(prompt, want), Text(other, solo(other))]
    provider = provider_of(kind, texts, [[move], [[RIGHT] * 4]])
    group = VerifyGroup(target(), provider)
    row, beside = group.admit(
        [
            request(prompt, watched(DIGITS), num_draft_tokens=5, max_tokens=20),
            request(other, None, num_draft_tokens=4, max_tokens=20, end_tokens=()),
        ]
    )
    drain(group, Watch(group))
    assert ending_of(row) == want
    assert ending_of(beside) == Ending(free, None, "length")
    assert beside.stats.acceptance_rate == 1
    assert beside.stats.reason is None
    assert provider.complaints == []


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("behind", [[THINK, THINK], [RIGHT, THINK], [RIGHT, RIGHT], []])
@pytest.mark.parametrize("kind", ["none", "host, consumes", "taps, consumes", "post-norm"])
def test_a_marker_restricts_what_follows_it_in_the_same_burst(
    place: int, behind: list[Any], kind: str
) -> None:
    """The marker is drafted as the ``place``-th draft, or comes as the bonus behind ``place``."""
    prompt = DISTINCT
    marker = solo(prompt)[place : place + 1]
    bound = Grammar.json_schema(PERSON, after=marker).bind(LETTERS, VOCABULARY, ENDS)

    def allows(emitted: tuple[int, ...]) -> set[int] | None:
        return engine_allows("after", marker, emitted)

    def done(emitted: tuple[int, ...]) -> bool:
        allowed = allows(emitted)
        return allowed is not None and allowed <= ENDS

    want = plain_loop(prompt, allows, done, budget=BUDGET)
    assert want.tokens.index(marker[0]) == place
    assert text(want.tokens[place + 1 :]).startswith('{"name":"')
    known = as_text(prompt, want)
    for first in ([RIGHT] * (place + 1) + behind, [RIGHT] * place):
        provider = provider_of(kind, [known])
        complaints: list[str] = []
        if provider is not None:

            def plan(
                tokens: Any, depth: int, step: int, first: Any = first, said: Any = complaints
            ) -> Any:
                # A prompt that is read whole brings the first token before anything is drafted.
                script = Script.always([known], first[step:] if step <= 1 else [RIGHT, WRONG])
                script.complaints = said
                return script(tokens, depth, step)

            provider.plan = plan
        group = VerifyGroup(target(), provider)
        [row] = group.admit([request(prompt, watched(bound), num_draft_tokens=8)])
        drain(group, Watch(group))
        assert ending_of(row) == want
        assert complaints == []
        check_scripted(provider)


def test_a_marker_that_is_drafted_and_rejected_restricts_nothing() -> None:
    prompt, written = PROMPTS[2], solo(PROMPTS[2])
    marker = next(t for t in range(VOCABULARY) if t not in written[:20] and t not in ENDS)
    bound = Grammar.json_schema(PERSON, after=[marker]).bind(LETTERS, VOCABULARY, ENDS)
    for move in ([marker], [RIGHT, marker, *ids('{"name')], [RIGHT, RIGHT, marker]):
        provider = provider_of("host, consumes", [Text(prompt, written)], [[move]])
        group = VerifyGroup(target(), provider)
        asked = request(prompt, bound, num_draft_tokens=5, max_tokens=20, end_tokens=())
        [row] = group.admit([asked])
        drain(group)
        assert row.emitted == written[:20]
        assert row.stats.forced == 0
        assert provider.complaints == []


# Ends inside a burst. A row of fixed text forces everything: its burst is one forced run.

FIXED = '{"name":"abcde","age":12,"ok":true}'
FIXED_IDS = tuple(ids(FIXED))
BESIDE = PROMPTS[1]


def fixed() -> Any:
    """A grammar that allows one text alone."""
    pattern = "".join("\\" + char if char in '{}"' else char for char in FIXED)
    return Grammar.regex(pattern).bind(LETTERS, VOCABULARY, ENDS)


def beside(**options: Any) -> Request:
    """A row next to the one that ends, with forced tokens of its own."""
    return request(BESIDE, watched(bound_of("json", BESIDE)), num_draft_tokens=4, **options)


def fixed_row(
    kind: str, *, expects: Sequence[int] = FIXED_IDS, **options: Any
) -> tuple[Row, Row, Any]:
    """A row that can only write ``FIXED``, and one beside it, run to their ends."""
    prompt = PROMPTS[2]
    other = alone("json", BESIDE, 0.0, None)
    texts = [Text(prompt, tuple(expects)), as_text(BESIDE, other)]
    provider = provider_of(kind, texts, [[[RIGHT] * 4], MOVES[1]])
    group = VerifyGroup(target(), provider)
    options = {"num_draft_tokens": 4, **options}
    row, next_to = group.admit([request(prompt, watched(fixed()), **options), beside()])
    drain(group, Watch(group))
    assert ending_of(next_to) == other
    check_scripted(provider)
    return row, next_to, provider


BURSTS = ("none", "ngram", "host, consumes", "taps, consumes", "taps", "whole prompt, consumes")


@pytest.mark.parametrize("kind", BURSTS)
def test_a_grammar_that_is_complete_inside_a_burst_ends_its_row_there(kind: str) -> None:
    tokens: list[tuple[int, str | None, bool]] = []
    caches = make_prompt_cache(tiny_model("qwen3"))
    row, _, _ = fixed_row(
        kind,
        cache=caches,
        num_forced_tokens=64,
        consumer=lambda e: tokens.append((e.token, e.finish, e.content)),
    )
    assert ending_of(row) == Ending(FIXED_IDS, None, "stop")
    assert tokens[-1] == (FIXED_IDS[-1], "stop", True)
    assert [token for token, _, _ in tokens] == list(FIXED_IDS)
    check_cache(caches, [*PROMPTS[2], *FIXED_IDS])
    if kind == "none":
        assert row.stats.rounds == 1
        assert row.stats.forced == len(FIXED_IDS)


def check_cache(caches: Any, tokens: Sequence[int]) -> None:
    """A caller's cache covers these tokens: mlx-lm goes on from it as from its own."""
    model = tiny_model("qwen3")
    assert caches[0].offset == len(tokens)
    own = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=own)
    last = mx.array([[1]])
    for _ in range(4):
        theirs, ours = model(last, cache=own)[0, -1], model(last, cache=caches)[0, -1]
        assert mx.allclose(theirs, ours, rtol=1e-3, atol=1e-3).item()
        last = mx.argmax(theirs)[None, None]


@pytest.mark.parametrize("kind", BURSTS)
@pytest.mark.parametrize("end", [END, STOP])
def test_an_end_token_inside_a_burst_is_no_content_and_wins(kind: str, end: int) -> None:
    """The text may end after one, two or three letters; the end is made certain by a ban."""
    prompt = PROMPTS[2]
    bound = Grammar.regex("name:(a|ab|abcdef)").bind(LETTERS, VOCABULARY, ENDS)
    banned = BannedTokens([ids("b")[0], *(ENDS - {end})])
    expects = (*ids("name:a"), end)
    other = alone("json", BESIDE, 0.0, None)
    texts = [Text(prompt, (*expects, 0, 0, 0)), as_text(BESIDE, other)]
    provider = provider_of(kind, texts, [[[RIGHT] * 6], MOVES[1]])
    group = VerifyGroup(target(), provider)
    for budget in (len(expects) - 1, 30):  # an end wins over the budget
        caches = make_prompt_cache(tiny_model("qwen3"))
        row, next_to = group.admit(
            [
                request(
                    prompt,
                    watched(bound),
                    processors=[banned],
                    num_draft_tokens=6,
                    cache=caches,
                    max_tokens=budget,
                ),
                beside(),
            ]
        )
        drain(group, Watch(group))
        if budget == 30:
            assert ending_of(row) == Ending(expects[:-1], end, "stop")
        else:
            assert row.emitted == expects[:-1]
        check_cache(caches, row.read)
        assert row.read == (*prompt, *row.emitted, *([end] if row.end_token is not None else []))
        assert ending_of(next_to) == other
        assert row.stats.emitted == len(expects) - 1
    check_scripted(provider)


@pytest.mark.parametrize("kind", BURSTS)
@pytest.mark.parametrize("forced", [3, 64])
def test_a_budget_a_cancel_and_a_consumer_end_a_row_inside_a_forced_run(
    kind: str, forced: int
) -> None:
    for budget in (1, 7):
        caches = make_prompt_cache(tiny_model("qwen3"))
        row, _, _ = fixed_row(kind, cache=caches, max_tokens=budget, num_forced_tokens=forced)
        assert ending_of(row) == Ending(FIXED_IDS[:budget], None, "length")
        check_cache(caches, [*PROMPTS[2], *FIXED_IDS[:budget]])
    for gone in (1, 6):
        for how in ("cancelled", "stopped", "error"):
            caches = make_prompt_cache(tiny_model("qwen3"))
            handed: list[int] = []

            def consumer(
                emission: Any, how: str = how, gone: int = gone, handed: list[int] = handed
            ) -> bool:
                handed.append(emission.token)
                if how == "error" and len(handed) == gone:
                    raise Fault("the consumer is gone")
                return how != "stopped" or len(handed) < gone

            def cancelled(how: str = how, gone: int = gone, handed: list[int] = handed) -> bool:
                return how == "cancelled" and len(handed) >= gone

            row, _, _ = fixed_row(
                kind,
                cache=caches,
                consumer=consumer,
                cancelled=cancelled,
                num_forced_tokens=forced,
            )
            finish = "error" if how == "error" else "cancelled"
            assert ending_of(row) == Ending(FIXED_IDS[:gone], None, finish)
            assert tuple(handed) == FIXED_IDS[:gone]
            assert isinstance(row.error, Fault) is (how == "error")
            check_cache(caches, [*PROMPTS[2], *FIXED_IDS[:gone]])


@pytest.mark.parametrize("kind", BURSTS)
def test_a_stop_string_ends_a_row_inside_a_forced_run(kind: str) -> None:
    caches = make_prompt_cache(tiny_model("qwen3"))
    shown: list[str] = []
    row, _, _ = fixed_row(
        kind,
        cache=caches,
        stop_strings=("age",),
        tokenizer=TokenizerWrapper(LETTERS, eos_token_ids=ENDS),
        consumer=lambda e: shown.append(e.text),
        num_forced_tokens=64,
    )
    place = FIXED_IDS.index(ids("age")[0]) + 1
    assert ending_of(row) == Ending(FIXED_IDS[:place], None, "stop")
    assert "".join(shown) == FIXED[: FIXED.index("age")]
    check_cache(caches, [*PROMPTS[2], *FIXED_IDS[:place]])


def test_a_cache_that_is_given_back_continues_in_a_second_constrained_request() -> None:
    model, prompt = tiny_model("qwen3"), PROMPTS[2]
    caches = make_prompt_cache(model)
    group = VerifyGroup(target(), NgramProvider(min_ngram=1))
    for turn in range(2):
        read = caches[0].offset
        asked = request(prompt, watched(bound_of("json", prompt)), cache=caches, num_draft_tokens=3)
        [row] = group.admit([asked])
        drain(group)
        if turn == 0:
            assert ending_of(row) == alone("json", prompt, 0.0, None)
        assert json.loads(text(row.emitted)).keys() == {"name", "age", "ok"}
        assert caches[0].offset == read + len(row.read)


# Constraints that fail.


@define(eq=False)
class Failing:
    """A constraint that raises in one verb, at the ``at``-th call."""

    inner: TokenConstraint
    verb: str
    at: int
    calls: dict[str, int] = field(factory=dict)

    def _strike(self, verb: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if verb == self.verb and self.calls[verb] >= self.at:
            raise Fault(verb)

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        self._strike("masks")
        return self.inner.masks(draft)

    def advance(self, token: int, /) -> bool:
        self._strike("advance")
        return self.inner.advance(token)

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        self._strike("propose")
        return self.inner.propose(max_tokens)


@pytest.mark.parametrize("kind", [*BURSTS, "recurrent"])
@pytest.mark.parametrize("verb", ["masks", "advance", "propose"])
def test_a_constraint_that_raises_ends_its_row_alone(kind: str, verb: str) -> None:
    prompt = PROMPTS[2]
    whole, other = alone("json", prompt, 0.0, None), alone("json", BESIDE, 0.0, None)
    for at in (1, 3):
        provider = provider_of(kind, [as_text(prompt, whole), as_text(BESIDE, other)])
        group = VerifyGroup(target(), provider)
        inner = bound_of("json", prompt)

        def failing(inner: Any = inner, at: int = at) -> Failing:
            return Failing(inner(), verb, at)

        first = beside()
        rows = group.admit([first, request(prompt, failing, num_draft_tokens=4), beside()])
        drain(group, Watch(group))
        made = rows[1].constraint
        assert isinstance(made, Failing)
        if made.calls.get(verb, 0) < at:  # it was never asked so often
            assert at > 1 or verb == "propose"
            assert verb != "advance"
            assert ending_of(rows[1]) == whole
        else:
            assert rows[1].finish == "error"
            assert isinstance(rows[1].error, Fault)
            assert rows[1].emitted == whole.tokens[: rows[1].steps]
            assert verb != "advance" or rows[1].steps == at - 1
        for row in (rows[0], rows[2]):
            assert ending_of(row) == other
            assert row.stats.draft_errors == 0
        check_scripted(provider)


def nonsense(which: str) -> Callable[[], TokenConstraint]:
    """Constraints whose answers are of no use."""

    class Nonsense:
        def masks(self, draft: Sequence[int], /) -> Any:
            said: dict[str, Any] = {
                "nothing": None,
                "no array": ("mask", 0),
                "a wrong width": (mx.ones((1 + len(draft), 7), dtype=mx.bool_), len(draft)),
                "allows nothing": (mx.zeros((1, VOCABULARY), dtype=mx.bool_), 0),
                "no count": (mx.ones((1 + len(draft), VOCABULARY), dtype=mx.bool_), "all"),
            }
            return said[which]

        def advance(self, _token: int, /) -> bool:
            return False

        def propose(self, _max_tokens: int, /) -> Sequence[int]:
            return ()

    return Nonsense


@pytest.mark.parametrize(
    "which", ["nothing", "no array", "a wrong width", "allows nothing", "no count"]
)
@pytest.mark.parametrize("kind", ["none", "host, consumes", "recurrent"])
def test_a_constraint_that_answers_nonsense_ends_its_row_alone(which: str, kind: str) -> None:
    prompt, other = PROMPTS[2], alone("json", BESIDE, 0.0, None)
    texts = [Text(prompt, solo(prompt)), as_text(BESIDE, other)]
    group = VerifyGroup(target(), provider_of(kind, texts))
    rows = group.admit([request(prompt, nonsense(which), num_draft_tokens=3), beside()])
    drain(group, Watch(group))
    assert rows[0].finish == "error"
    assert rows[0].emitted == ()
    assert ending_of(rows[1]) == other


@pytest.mark.parametrize("kind", ["none", "ngram", "host, consumes", "taps, consumes"])
@pytest.mark.parametrize("how", ["window", "position by position"])
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_processors_that_exclude_all_that_the_grammar_allows_end_their_row_alone(
    kind: str, how: str, acceptance: str
) -> None:
    prompt = PROMPTS[2]
    closing = [t for t in range(VOCABULARY) if "4" in text([t]) or "5" in text([t])]
    bound = Grammar.regex("name:abc,ok:[45]").bind(LETTERS, VOCABULARY, ENDS)
    expects = tuple(ids("name:abc,ok:"))

    def ban(_tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, mx.array(closing)] = -mx.inf
        return logits

    processors: list[Any] = [BannedTokens(closing) if how == "window" else ban]
    other = alone("json", BESIDE, 0.0, None)
    texts = [Text(prompt, (*expects, closing[0], 0)), as_text(BESIDE, other)]
    provider = provider_of(kind, texts, [[[RIGHT] * 4], MOVES[1]])
    group = VerifyGroup(target(), provider)
    temp, seed = (1.0, 3) if acceptance == "rejection" else (0.0, None)
    row, next_to = group.admit(
        [
            request(
                prompt,
                watched(bound),
                temp,
                seed,
                acceptance=acceptance,
                processors=processors,
                num_draft_tokens=4,
            ),
            beside(),
        ]
    )
    drain(group, Watch(group))
    assert row.finish == "error"
    assert isinstance(row.error, ConstraintError)
    assert "\n" not in str(row.error)
    assert row.emitted == expects
    assert ending_of(next_to) == other
    check_scripted(provider)


# A third party's constraint whose proposals are not certain.


@define(eq=False)
class Guessing:
    """A grammar's row that proposes what it likes."""

    inner: TokenConstraint
    guess: Callable[[int, Sequence[int]], Sequence[Any]]
    taken: list[int] = field(factory=list)

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        return self.inner.masks(draft)

    def advance(self, token: int, /) -> bool:
        stop = self.inner.advance(token)
        self.taken.append(token)
        return stop

    def propose(self, max_tokens: int, /) -> Sequence[Any]:
        return self.guess(max_tokens, self.inner.propose(max_tokens))


GUESSES: dict[str, Callable[[int, Sequence[int]], Sequence[Any]]] = {
    "wrong": lambda _n, _f: [A, A, A],
    "right, then wrong": lambda _n, forced: [*forced, A, THINK],
    "the second is wrong": lambda _n, forced: [*forced[:1], THINK, *forced[2:]],
    "an end": lambda _n, forced: [*forced, END, A],
    "too many": lambda n, forced: [*forced, *([ONE] * (n + 9))],
    "ids that do not exist": lambda _n, forced: [*forced, 64, 1],
    "negative ids": lambda _n, forced: [*forced[:1], -1, 1],
    "huge ids": lambda _n, _f: [10**12],
    "no whole numbers": lambda _n, forced: [*forced, 1.5, 2],
    "no ids": lambda _n, _f: ["a", None],
    "NumPy's ids": lambda _n, forced: list(np.array([*forced, A], dtype=np.int64)),
}


@pytest.mark.parametrize("guess", sorted(GUESSES))
@pytest.mark.parametrize("kind", [k for k in KINDS if k in CONSUMES])
def test_a_proposal_that_is_wrong_changes_no_token_and_the_drafter_comes_back(
    guess: str, kind: str
) -> None:
    for temp, seed in SAMPLINGS:
        prompt = PROMPTS[2]
        want, other = alone("json", prompt, temp, seed), alone("json", BESIDE, 0.0, None)
        inner = bound_of("json", prompt)
        provider = provider_of(kind, [as_text(prompt, want), as_text(BESIDE, other)])
        if isinstance(provider, ScriptedProvider):
            known = provider.plan

            def plan(tokens: Any, depth: int, step: int, known: Any = known) -> Any:
                texts = known.texts
                if not any(each.whole[: len(tokens)] == tokens for each in texts):
                    return [1] * depth  # behind a wrong guess
                return known(tokens, depth, step)

            provider.plan = plan
        group = VerifyGroup(target(), provider)

        def guessing(inner: Any = inner) -> Guessing:
            return Guessing(inner(), GUESSES[guess])

        row, next_to = group.admit(
            [request(prompt, guessing, temp, seed, num_draft_tokens=3), beside()]
        )
        drain(group, Watch(group))
        assert ending_of(row) == want
        assert ending_of(next_to) == other
        for each in (row, next_to):
            assert each.stats.draft_errors == 0
            assert each.stats.invalid_drafts == 0
            assert each.stats.reason is None or kind == "none" or "whole" in kind
        check_scripted(provider)


def test_after_a_wrong_proposal_the_drafter_drafts_again_in_the_next_round() -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    rounds: list[int] = []

    def guess(_max_tokens: int, forced: Sequence[int]) -> Sequence[int]:
        rounds.append(len(rounds))
        return [A, A] if rounds[-1] == 1 else []

    inner = bound_of("json", prompt)
    provider = provider_of("host, consumes", [as_text(prompt, want)], [[[RIGHT, WRONG]]])
    known = provider.plan
    provider.plan = lambda tokens, depth, step: (
        [] if tokens[-2:] == (A, A) else known(tokens, depth, step)
    )
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(prompt, lambda: Guessing(inner(), guess), num_draft_tokens=2)])
    per_round = []
    while group.rows:
        before = row.stats.accepted
        with group.round() as done:
            done.deliver_all()
        per_round.append(row.stats.accepted - before)
    assert ending_of(row) == want
    assert per_round[:4] == [1, 0, 1, 1]
    assert provider.complaints == []
    # Once when it joined, once when its history was read again.
    assert provider.calls["open_prefill"] == 2


def test_a_drafter_that_reads_prompts_whole_says_why_it_does_not_come_back() -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    provider = provider_of("whole prompt, consumes", [as_text(prompt, want)], [[[RIGHT]]])
    provider.plan = lambda _tokens, _depth, _step: []
    inner = bound_of("json", prompt)
    group = VerifyGroup(target(), provider)
    [row] = group.admit(
        [request(prompt, lambda: Guessing(inner(), GUESSES["wrong"]), num_draft_tokens=2)]
    )
    drain(group)
    assert ending_of(row) == want
    assert row.stats.reason is not None
    assert "None" not in row.stats.reason


# Any constraint, any drafter, any history of joins and leaves.


def _chance(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


@cache
def tiny_allows(world: int, emitted: tuple[int, ...]) -> frozenset[int]:
    """What a random constraint allows behind a beginning: often one id, sometimes an end."""
    many = _chance(world, "many", emitted) % 8
    size = 1 if many < 4 else many
    allowed = {_chance(world, emitted, place) % VOCABULARY for place in range(size)} - ENDS
    if _chance(world, "end", emitted) % 16 == 0:
        allowed |= ENDS
    return frozenset(allowed or {A})


@cache
def tiny_done(world: int, emitted: tuple[int, ...]) -> bool:
    return _chance(world, "done", emitted) % 30 == 0


@define(eq=False)
class Tiny:
    """A random constraint: a function of what was emitted, and nothing else.

    Attributes:
        lies: how often, out of 8, what it proposes is wrong.
    """

    world: int
    lies: int
    taken: tuple[int, ...] = ()

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array, int]:
        known, rows = self.taken, []
        for place in range(len(draft) + 1):
            allowed = tiny_allows(self.world, known)
            rows.append([token in allowed for token in range(VOCABULARY)])
            if place == len(draft) or draft[place] not in allowed:
                break
            known = (*known, draft[place])
        return mx.array(rows), len(rows) - 1

    def advance(self, token: int, /) -> bool:
        if token not in tiny_allows(self.world, self.taken):
            raise ConstraintError(f"{token} is not allowed behind {self.taken}")
        self.taken = (*self.taken, token)
        return tiny_done(self.world, self.taken)

    def propose(self, max_tokens: int, /) -> list[int]:
        known = self.taken
        forced: list[int] = []
        while len(forced) < max_tokens:
            allowed = tiny_allows(self.world, known)
            lie = _chance(self.world, "lie", known) % 8 < self.lies
            if len(allowed) > 1 and not lie:
                break
            token = _chance(self.world, "guess", known) % (VOCABULARY + 4) if lie else min(allowed)
            forced.append(token)
            known = (*known, token)
            if tiny_done(self.world, known):
                break
        return forced


@cache
def tiny_alone(world: int, prompt: tuple[int, ...], temp: float, budget: int) -> Ending:
    """The plain loop; our own plain run without forced drafts where it is seeded."""
    if temp == 0:
        return plain_loop(
            prompt,
            lambda emitted: set(tiny_allows(world, emitted)),
            lambda emitted: tiny_done(world, emitted),
            budget=budget,
        )
    group = VerifyGroup(target())
    asked = request(prompt, lambda: Tiny(world, 0), temp, 5, num_forced_tokens=0, max_tokens=budget)
    [row] = group.admit([asked])
    drain(group)
    for place, token in enumerate(row.emitted):
        assert token in tiny_allows(world, row.emitted[:place])
    return ending_of(row)


JOINS = st.lists(
    st.tuples(
        st.integers(0, 3),  # rounds before this one joins
        st.sampled_from(PROMPTS[:4]),
        st.sampled_from([*range(6), None]),  # the constraint
        st.sampled_from([0, 0, 1, 4]),  # its lies
        st.sampled_from([0.0, 0.0, 1.0]),
        st.sampled_from([16, 16, 12, 9, 5, 2, 1]),  # budget
        st.sampled_from([4, 3, 2, 1, 0]),  # width
        st.sampled_from([16, 16, 2, 1, 0]),  # forced tokens a round
        st.sampled_from([None, None, None, 1, 3]),  # tokens after which the consumer goes
    ),
    min_size=2,
    max_size=4,
)
VERBS = ("consume", "draft", "commit", "filter_rows", "prepare_append", "join")
FAULTS = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 6)), max_size=2)
ADVERSARIES = ("none", "ngram", "host", "host, consumes", "device, consumes", "taps, consumes")


@settings(max_examples=250, deadline=None)
@given(joins=JOINS, kind=st.sampled_from(ADVERSARIES), faults=st.just([]) | FAULTS)
@example(
    joins=[(0, PROMPTS[1], 0, 4, 0.0, 12, 4, 16, None), (1, PROMPTS[2], 1, 4, 1.0, 12, 3, 2, 3)],
    kind="host, consumes",
    faults=[("consume", 1), ("filter_rows", 1)],
)
def test_any_constraint_gives_the_plain_loops_text_whoever_joins_leaves_lies_and_fails(
    joins: list[tuple[int, tuple[int, ...], int | None, int, float, int, int, int, int | None]],
    kind: str,
    faults: list[tuple[str, int]],
) -> None:
    wants = []
    for _, prompt, world, _, temp, budget, _, _, gone in joins:
        if world is None:
            seed = 5 if temp else None
            whole = Ending(solo(prompt, temp, seed)[:budget], None, "length")
        else:
            whole = tiny_alone(world, prompt, temp, budget)
        if gone is not None and gone < len(whole.tokens):
            whole = Ending(whole.tokens[:gone], None, "cancelled")
        elif gone == len(whole.tokens) and whole.end_token is not None:
            whole = Ending(whole.tokens, None, "cancelled")
        wants.append(whole)
    provider = provider_of(kind, [])
    if isinstance(provider, ScriptedProvider):

        def plan(tokens: tuple[int, ...], depth: int, _step: int) -> list[int]:
            # What some text goes on with, wherever its beginning stands; now and then spoilt.
            known = [
                (*prompt, *want.tokens) for (_, prompt, *_), want in zip(joins, wants, strict=True)
            ]
            follows = [each[len(tokens) :] for each in known if each[: len(tokens)] == tokens]
            draft = [*follows[0], END, A][:depth] if follows else [A] * depth
            if draft and _chance("spoil", tokens) % 3 == 0:
                draft[_chance("place", tokens) % len(draft)] = _chance(tokens) % VOCABULARY
            return draft

        provider.plan = plan
        provider.device = None
        provider.faults = {verb: [n for v, n in faults if v == verb] for verb, _ in faults}
    group = VerifyGroup(target(), provider, prefill_step_size=4)
    rows: list[Row] = []
    check = Watch(group)
    waiting = list(joins)
    after = 0
    for turn in count():
        while waiting and (after >= waiting[0][0] or not group.rows):
            _, prompt, world, lies, temp, budget, width, forced, gone = waiting.pop(0)
            after = 0
            handed: list[int] = []

            def consumer(e: Any, handed: list[int] = handed, gone: int | None = gone) -> bool:
                handed.append(e.token)
                return len(handed) != gone

            def constraint(world: Any = world, lies: int = lies) -> Watched:
                return Watched(Tiny(world, lies))

            rows += group.admit(
                [
                    request(
                        prompt,
                        None if world is None else constraint,
                        temp,
                        5 if temp else None,
                        max_tokens=budget,
                        end_tokens=frozenset() if world is None else ENDS,
                        num_draft_tokens=width,
                        num_forced_tokens=forced,
                        consumer=consumer,
                    )
                ]
            )
        if not group.rows:
            break
        with group.round() as done:
            done.deliver_all()
        check()
        after += 1
        assert turn < 300
    for row, want, (*_, gone) in zip(rows, wants, joins, strict=True):
        ended = ending_of(row)
        assert ended.tokens == want.tokens
        if gone is None or gone > len(want.tokens) + 1:
            assert ended == want
        assert row.error is None
        check_counts(row)
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []


def check_counts(row: Row) -> None:
    """Every token was forced, drafted, or came last in its window."""
    stats = row.stats
    assert stats.emitted == row.steps
    own = stats.emitted - stats.forced - stats.accepted
    assert 0 <= own <= stats.target_forwards
    assert stats.accepted <= stats.drafted
    assert sum(stats.accepted_per_position) == stats.accepted
    assert sum(stats.drafted_per_position) == stats.drafted
    assert stats.target_forwards >= stats.rounds
    assert stats.tokens_per_forward == stats.emitted / stats.target_forwards


# Statistics.


@pytest.mark.parametrize("kind", [k for k in KINDS if k in CONSUMES])
def test_what_is_emitted_is_forced_or_accepted_or_the_targets_own_word(kind: str) -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    provider = provider_of(kind, [as_text(prompt, want)], [[[RIGHT, RIGHT, WRONG]]])
    group = VerifyGroup(target(), provider)
    drafts: list[bool] = []
    asked = request(
        prompt,
        bound_of("json", prompt),
        num_draft_tokens=3,
        consumer=lambda e: drafts.append(e.from_draft),
    )
    [row] = group.admit([asked])
    rounds = drain(group)
    assert ending_of(row) == want
    check_counts(row)
    assert sum(drafts) == row.stats.forced + row.stats.accepted
    assert row.stats.forced > 0
    assert row.stats.target_forwards == rounds
    assert row.stats.tokens_per_forward > 1.5
    if kind == "host, consumes":
        assert row.stats.accepted > 0
    if kind == "none":
        assert row.stats.drafted == row.stats.accepted == 0


def test_without_forced_tokens_nothing_is_forced_and_more_forwards_are_needed() -> None:
    prompt = PROMPTS[2]
    stats = []
    for forced in (0, 1, 3, 16):
        group = VerifyGroup(target())
        asked = request(prompt, bound_of("json", prompt), num_forced_tokens=forced)
        [row] = group.admit([asked])
        drain(group)
        assert ending_of(row) == alone("json", prompt, 0.0, None)
        check_counts(row)
        stats.append(row.stats)
    assert stats[0].forced == 0
    assert stats[0].target_forwards == stats[0].emitted
    forwards = [each.target_forwards for each in stats]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[0] > forwards[1] > forwards[2] > forwards[3]


@pytest.mark.parametrize("kind", ["none", "ngram", "host, consumes", "taps, consumes"])
def test_log_probabilities_of_forced_tokens_are_those_of_plain_decoding(kind: str) -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    reports: list[list[Any]] = []
    for provider, forced in ((None, 0), (provider_of(kind, [as_text(prompt, want)]), 16)):
        told: list[Any] = []
        group = VerifyGroup(target(), provider)
        asked = request(
            prompt,
            bound_of("json", prompt),
            logprobs=2,
            num_draft_tokens=3,
            num_forced_tokens=forced,
            consumer=lambda e, told=told: told.append((e.token, e.token_logprobs)),
        )
        group.admit([asked])
        drain(group)
        reports.append(told)
    assert [token for token, _ in reports[0]] == list(want.tokens)
    for (token, plain), (same, forced_one) in zip(*reports, strict=True):
        assert token == same
        assert forced_one.rank == plain.rank
        assert math.isclose(forced_one.logprob, plain.logprob, rel_tol=1e-3, abs_tol=1e-5)
        assert [i for i, p in forced_one.top if p > -50] == [i for i, p in plain.top if p > -50]
    assert sum(abs(plain.logprob) < 1e-6 for _, plain in reports[0]) > 5  # forced, so certain


# Rejection sampling.


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "none"])
@pytest.mark.parametrize("grammar", GRAMMARS[:3])
def test_under_rejection_every_output_is_valid_and_forced_tokens_are_emitted(
    kind: str, grammar: str
) -> None:
    prompt = PROMPTS[2]
    for seed in range(4):
        guide = alone(grammar, prompt, 1.0, seed)
        provider = provider_of(kind, [as_text(prompt, guide)])
        if isinstance(provider, ScriptedProvider):
            provider.plan = lambda tokens, depth, _step: [
                _chance(tokens, place) % VOCABULARY for place in range(depth)
            ]
            provider.device = None
        group = VerifyGroup(target(), provider)
        asked = request(
            prompt,
            watched(bound_of(grammar, prompt)),
            1.0,
            seed,
            acceptance="rejection",
            num_draft_tokens=3,
        )
        [row] = group.admit([asked])
        drain(group, Watch(group))
        assert row.error is None
        assert row.stats.draft_errors == 0
        for place, token in enumerate(row.emitted):
            allowed = engine_allows(grammar, (), row.emitted[:place])
            assert allowed is not None
            assert token in allowed
        assert (row.stats.forced > 0) is (kind in CONSUMES)
        check_counts(row)


class DrawnRows(ConsumingRows):
    """Drafts drawn from a fixed distribution that is far from the target's, and declared."""

    def draft(self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /) -> Any:
        super().draft(pending, depths, steps)
        assert self.round is not None
        deepest = max(depths, default=0)
        key = mx.random.key(_chance("drawn", tuple(self._texts(pending)), next(DRAWS)))
        logits = mx.broadcast_to(SKEWED, (len(depths), deepest, VOCABULARY))
        drawn: Any = mx.random.categorical(logits, key=key).tolist() if deepest else []
        rows = [row[:depth] for row, depth in zip(drawn, depths, strict=True)] if deepest else []
        self.round.drafts = rows or [[] for _ in depths]
        return Proposal(self.round.drafts, logits) if deepest else self.round.drafts


DRAWS = count()
LETTER_IDS = [ids(letter)[0] for letter in "abcd"]
SKEWED = mx.log(
    mx.array(
        [
            {LETTER_IDS[0]: 0.7, LETTER_IDS[1]: 0.1, LETTER_IDS[2]: 0.1, LETTER_IDS[3]: 0.05}.get(
                token, 0.05 / (VOCABULARY - 4)
            )
            for token in range(VOCABULARY)
        ]
    )
)


def test_under_rejection_what_follows_forced_tokens_has_the_targets_distribution() -> None:
    """Chi-square, 3 degrees of freedom per position; the drafter's own draws fail it."""
    prompt, pattern = PROMPTS[2], "name:[abcd][abcd]-ok"
    bound = Grammar.regex(pattern).bind(LETTERS, VOCABULARY, ENDS)
    head = ids("name:")

    def distribution(emitted: Sequence[int]) -> list[float]:
        logits = tiny_model("qwen3")(mx.array([[*prompt, *emitted]]))[0, -1].astype(mx.float32)
        picked = logits[mx.array(LETTER_IDS)]
        return [float(p) for p in mx.softmax(picked).tolist()]  # type: ignore[union-attr, arg-type]

    first, draws = distribution(head), 1600
    second = [0.0] * 4
    for share, letter in zip(first, LETTER_IDS, strict=True):
        for place, part in enumerate(distribution([*head, letter])):
            second[place] += share * part
    provider = ScriptedProvider(rows=DrawnRows)
    group = VerifyGroup(target(), provider)
    seen = [[0] * 4, [0] * 4]
    stats = []
    for start in range(0, draws, 160):
        rows = group.admit(
            [
                request(
                    prompt, bound, 1.0, start + each, acceptance="rejection", num_draft_tokens=3
                )
                for each in range(160)
            ]
        )
        drain(group)
        for row in rows:
            assert row.emitted[: len(head)] == tuple(head)
            assert row.stats.draft_errors == 0
            for place in range(2):
                seen[place][LETTER_IDS.index(row.emitted[len(head) + place])] += 1
            stats.append(row.stats)
    assert provider.complaints == []
    assert all(each.forced >= len(head) for each in stats)
    assert 0 < sum(each.accepted for each in stats) < sum(each.drafted for each in stats)
    for counted, shares in zip(seen, (first, second), strict=True):
        chi = sum((n - draws * p) ** 2 / (draws * p) for n, p in zip(counted, shares, strict=True))
        assert chi < 16.3  # 0.1 %
        wrong = [0.7, 0.1, 0.1, 0.05]
        wrong = [p / sum(wrong) for p in wrong]
        control = sum(
            (draws * q - draws * p) ** 2 / (draws * p) for q, p in zip(wrong, shares, strict=True)
        )
        assert control > 100


# A drafter that fails, a target that fails, a target that takes one position at a time.


@pytest.mark.parametrize("verb", ["consume", "draft", "commit", "filter_rows"])
@pytest.mark.parametrize("kind", ["host, consumes", "taps, consumes"])
def test_a_drafter_that_fails_leaves_forced_tokens_as_they_are(verb: str, kind: str) -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    for calls in ((2,), range(1, 100)):
        provider = provider_of(kind, [as_text(prompt, want)])
        provider.faults = {verb: calls}
        group = VerifyGroup(target(), provider)
        rows = group.admit(
            [
                request(prompt, watched(bound_of("json", prompt)), num_draft_tokens=3),
                request(prompt, None, num_draft_tokens=3, max_tokens=2, end_tokens=()),
            ]
        )
        provider.complaints.clear()
        drain(group, Watch(group))
        assert ending_of(rows[0]) == want
        assert rows[1].emitted == solo(prompt)[:2]
        assert rows[0].stats.forced >= 5


def test_a_row_goes_on_under_its_grammar_after_its_group_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    for fails in (1, 2, 3, 4):
        provider = provider_of("host, consumes", [as_text(prompt, want)], [[[RIGHT, WRONG]]])
        group = VerifyGroup(target(), provider)
        asked = request(prompt, watched(bound_of("json", prompt)), num_draft_tokens=2)
        [row] = group.admit([asked])
        forward, calls = target().forward, count(1)

        def broken(*args: Any, forward: Any = forward, calls: Any = calls, at: int = fails) -> Any:
            if next(calls) == at:
                raise RuntimeError("out of memory")
            return forward(*args)

        with monkeypatch.context() as patch:
            patch.setattr(target(), "forward", broken)
            with pytest.raises(GroupFailedError):
                drain(group)
        assert isinstance(row.constraint, Watched)
        assert tuple(row.constraint.taken) == row.emitted
        again = VerifyGroup(target(), provider)
        reading = again.read(row)
        while not reading.done:
            reading.step()
        assert again.join([reading]) == [row]
        drain(again, Watch(again))
        assert ending_of(row) == want
        assert provider.complaints == []


def test_tokens_from_outside_move_a_constraint_too() -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    for kind in ("none", "ngram", "host, consumes", "taps, consumes"):
        provider = provider_of(kind, [as_text(prompt, want)])
        group = VerifyGroup(target(), provider)
        asked = request(prompt, watched(bound_of("json", prompt)), num_draft_tokens=3)
        [row] = group.admit([asked])
        given_ids = want.tokens[:4]
        group.consume([given_ids])
        Watch(group)()
        drain(group, Watch(group))
        assert ending_of(row) == want
        assert row.stats.consumed == len(given_ids)
        assert row.stats.emitted == len(want.tokens) - len(given_ids)
        check_scripted(provider)


def test_a_row_that_takes_one_position_at_a_time_keeps_its_grammar_and_forces_nothing() -> None:
    prompt = PROMPTS[2]
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    bound = MlxLmTarget(model)
    assert bound.no_speculation_reason == "no row form for cache type OwnCache"
    group = VerifyGroup(bound, NgramProvider())
    [row] = group.admit([request(prompt, bound_of("json", prompt), num_draft_tokens=4)])
    drain(group)
    assert row.emitted == alone("json", prompt, 0.0, None).tokens
    assert row.stats.forced == row.stats.drafted == 0
    assert row.stats.target_forwards == row.stats.emitted


@pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2"])
def test_windows_and_recurrent_rows_keep_their_grammar_and_are_forced(architecture: str) -> None:
    """The tokens are those of a row that nobody forces or drafts for, one position at a time."""
    prompt, texts = PROMPTS[2], []
    for provider, forced in ((None, 0), (None, 16), (NgramProvider(min_ngram=1), 16)):
        group = VerifyGroup(target(architecture), provider)
        asked = request(
            prompt, bound_of("json", prompt), num_draft_tokens=4, num_forced_tokens=forced
        )
        [row] = group.admit([asked])
        drain(group)
        assert json.loads(text(row.emitted)).keys() == {"name", "age", "ok"}
        assert (row.stats.forced > 0) is (forced > 0)
        assert (row.stats.target_forwards < row.stats.emitted) is (forced > 0)
        assert row.stats.reason is None or provider is None
        texts.append(row.emitted)
    assert texts[0] == texts[1] == texts[2]


def test_stream_generate_takes_a_grammar_and_streams_what_the_plain_loop_writes() -> None:
    prompt = PROMPTS[2]
    want = alone("json", prompt, 0.0, None)
    tokenizer = TokenizerWrapper(LETTERS, eos_token_ids=ENDS)
    for forced in (0, 16):
        responses = list(
            stream_generate(
                tiny_model("qwen3"),
                tokenizer,
                list(prompt),
                BUDGET,
                grammar=Grammar.json_schema(PERSON),
                num_forced_tokens=forced,
            )
        )
        assert "".join(each.text for each in responses) == text(want.tokens)
        assert responses[-1].finish_reason == "stop"
        stats = responses[-1].stats
        assert stats is not None
        assert (stats.forced > 0) is (forced > 0)


# Window shapes.


@pytest.mark.parametrize("kind", ["none", "ngram", "host, consumes"])
def test_forced_drafts_need_few_window_widths_where_each_costs_a_plan(kind: str) -> None:
    """Where a backend pays for each new shape, forced runs of every length share a few widths."""
    prompts, widths = PROMPTS[:3], set()

    def few(_state: RaggedState, needed: int, most: int) -> int:
        assert needed <= most
        width = most if needed > 1 else needed
        widths.add(width)
        return width

    want = [alone("json", prompt, 0.0, None) for prompt in prompts]
    provider = provider_of(kind, [as_text(*each) for each in zip(prompts, want, strict=True)])
    group = VerifyGroup(target(), provider)
    with mock.patch.object(RaggedState, "window_width", few):
        rows = group.admit(
            [request(each, bound_of("json", each), num_draft_tokens=4) for each in prompts]
        )
        drain(group)
    assert [ending_of(row) for row in rows] == want
    assert sum(row.stats.forced for row in rows) > 0
    assert widths <= {1, 5, 9, 17, 25}
    assert widths & {9, 17, 25}
