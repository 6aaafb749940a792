"""Tokens from outside, previews, and readings: nothing that is emitted tells that they were there.

The oracle is mlx-lm's own model and caches, token by token, with one draw per step.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from drafters.recurrent import RecurrentProvider
from drafters.tapped import TappedProvider
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedProvider,
    ScriptedRows,
    drain,
    load_scripted,
    request,
    solo,
    target,
    text_of,
    tiny_tokenizer,
)
from tiny_models import HYBRID, VOCABULARY, WINDOWED, OwnCache, build_model, tiny_model

from specdec import Request, SamplingOptions, VerifyGroup
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import (
    ClosedError,
    ConstraintError,
    ContractError,
    GroupFailedError,
    OptionError,
    RoundOpenError,
)
from specdec.sampling import RowSamplers
from specdec.sampling.rows import normalize
from specdec.targets import MlxLmTarget
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.verify.row import Row

PROMPTS = ((5, 9, 2, 40, 9, 2), (17, 3, 17, 3, 17), (33,), (8, 60, 1, 8, 60))
GIVEN = (7, 7, 30, 9, 2, 41, 7, 30, 9)
"""Tokens that the target would not write."""


# The oracle.


def number(array: mx.array) -> int:
    """One id."""
    value: Any = array.item()
    return int(value)


@cache
def goes_on(
    prompt: tuple[int, ...],
    given: tuple[int, ...],
    count: int,
    temp: float = 0.0,
    seed: int = 0,
    architecture: str = "qwen3",
) -> tuple[int, ...]:
    """``count`` tokens behind a prompt and tokens that were given, each drawn at its own step."""
    model, text = tiny_model(architecture), [*prompt, *given]
    caches = make_prompt_cache(model)
    rows = RowSamplers()
    rows.prepare_append([(SamplingOptions(temp=temp), seed)]).commit()
    for token in text[:-1]:
        model(mx.array([[token]]), cache=caches)
    emitted: list[int] = []
    for _ in range(count):
        logits = model(mx.array([[(text + emitted)[-1]]]), cache=caches)
        step = len(given) + len(emitted)
        emitted.append(number(rows.draw(normalize(logits), [step])))
    return tuple(emitted)


def test_the_oracle_is_the_target_alone() -> None:
    for prompt in PROMPTS:
        assert goes_on(prompt, (), 20) == solo(prompt)[:20]
        assert goes_on(prompt, (), 20, 0.8, 4) == solo(prompt, 0.8, 4)[:20]
        assert goes_on(prompt, GIVEN, 20) != goes_on(prompt, (), 20)


# Drafters.


class WithVerbs(ScriptedRows):
    """Rows that can preview and consume."""

    def preview(self, pending: Any, depths: Any, steps: Any, /) -> mx.array | None:
        self._enter("preview")
        texts = self._texts(pending)
        plan = self.provider.plan
        drafts = [list(plan(*each)) for each in zip(texts, depths, steps, strict=True)]
        width = min(map(len, drafts))
        return mx.array([draft[:width] for draft in drafts], mx.int32) if width else None

    def consume(
        self, tokens: mx.array, context: mx.array | None, lengths: Sequence[int], /
    ) -> None:
        self._enter("consume")
        self._check_context("consume", context, tokens.shape)
        chunks: Any = tokens.tolist()
        for index, (row, chunk, count) in enumerate(zip(self.rows, chunks, lengths, strict=True)):
            row.tokens.extend(chunk[:count])
            if context is not None:
                row.contexts.append(context[index, :count])


@cache
def best(tokens: tuple[int, ...]) -> int:
    """The target's most probable token behind a text."""
    return number(mx.argmax(tiny_model("qwen3")(mx.array([tokens]))[0, -1]))


def guess(tokens: tuple[int, ...], depth: int, _step: int) -> list[int]:
    """A draft that depends on the whole text, and is the target's own now and then."""
    first = best(tokens)
    second = (best((*tokens, first)) + sum(tokens) % 2) % VOCABULARY
    return [first, second, (first + sum(tokens)) % VOCABULARY][:depth]


def scripted(verbs: bool, context: ContextKind = ContextKind.NONE) -> ScriptedProvider:
    rows = WithVerbs if verbs else ScriptedRows
    return ScriptedProvider(guess, rows=rows, context=context)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "ngram": lambda: NgramProvider(max_ngram=2, min_ngram=1),
    "verbs": lambda: scripted(verbs=True),
    "no verbs": lambda: scripted(verbs=False),
    "hidden, verbs": lambda: scripted(verbs=True, context=ContextKind.POST_NORM),
    "hidden, no verbs": lambda: scripted(verbs=False, context=ContextKind.POST_NORM),
    "tapped": lambda: TappedProvider.tiny(hidden_size=64),
    "recurrent": lambda: RecurrentProvider.tiny(hidden_size=64),
}
PREVIEWS = ("ngram", "verbs", "hidden, verbs", "tapped")
STAND_DOWN = ("hidden, no verbs", "recurrent")


def ask(prompt: Sequence[int], **options: Any) -> Request:
    return request(prompt, **{"num_draft_tokens": 3, "max_tokens": 40, **options})


def play(group: VerifyGroup) -> None:
    with group.round() as done:
        done.deliver_all()


def play_on(group: VerifyGroup) -> None:
    """Two rounds: a window may have been begun before the first of them."""
    play(group)
    play(group)


def picture(group: VerifyGroup) -> Any:
    """Everything of a group that a refused verb must leave alone."""
    live = group._live
    assert live.state is not None
    lane = live.drafting.lane
    return (
        [
            (list(row.tokens), row.processed, row.finish, row.width, row.text, row.stats.as_dict())
            for row in group.rows
        ],
        live.state.lengths,
        live.state.open_width,
        live.flight is None,
        sorted(live.firsts),
        None if lane is None else (lane.is_open, lane.failures, list(lane._members.rows)),
        group.preview() if lane is not None and not live.firsts else None,
    )


def clean(provider: Any) -> None:
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []


# Previews.


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("kind", PREVIEWS)
def test_a_preview_is_the_next_round_s_draft_and_changes_nothing(kind: str, temp: float) -> None:
    def decode(looks: int) -> tuple[list[Row], list[Any]]:
        provider = DRAFTERS[kind]()
        group = VerifyGroup(target(), provider)
        rows = group.admit([ask(p, temp=temp, seed=i) for i, p in enumerate(PROMPTS[:1])])
        seen = []
        while group.rows:
            shown = [group.preview() for _ in range(looks)]
            assert all(each == shown[0] for each in shown)
            before = [len(row.tokens) for row in rows]
            drafted = rows[0].stats.drafted
            play(group)
            if looks:
                [draft] = shown[0] or [[]]
                new = rows[0].tokens[before[0] :]
                kept = 0
                while kept < min(len(new), len(draft)) and new[kept] == draft[kept]:
                    kept += 1
                seen.append((draft, new, rows[0].stats.drafted - drafted))
                assert rows[0].finish or len(new) == kept + 1  # accepted just as far as it fits
                assert rows[0].finish or rows[0].stats.drafted - drafted == len(draft)
        clean(provider)
        return rows, seen

    looked, seen = decode(3)
    [untouched], _ = decode(0)
    assert looked[0].emitted == untouched.emitted == goes_on(PROMPTS[0], (), 40, temp, 0)
    assert looked[0].stats == untouched.stats
    assert sum(len(draft) for draft, *_ in seen) > 20


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["verbs", "hidden, verbs", "tapped"])
def test_a_preview_of_several_rows_is_of_those_that_have_the_drafter(
    kind: str, temp: float
) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [
            ask(p, num_draft_tokens=0 if i == 1 else 3, temp=temp, seed=i, max_tokens=20)
            for i, p in enumerate(PROMPTS)
        ]
    )
    while all(row.finish is None for row in rows):
        depths = [0 if i == 1 else min(3, 19 - row.steps) for i, row in enumerate(rows)]
        shortest = min(depths[0], *depths[2:])  # some cut all rows to that
        shown = group.preview() or [[] for _ in rows]
        for draft, depth in zip(shown, depths, strict=True):
            assert len(draft) in ({depth} if kind == "tapped" else {min(depth, shortest)})
        places = [(row.steps, row.stats.drafted) for row in rows]
        play(group)
        for i, (place, drafted) in enumerate(places):
            row, new = rows[i], rows[i].emitted[place:]
            kept = min(len(new) - 1, len(shown[i]))
            assert list(new[:kept]) == shown[i][:kept]
            assert row.finish or row.stats.drafted - drafted == depths[i]
            assert row.finish or kept == len(shown[i]) or new[kept] != shown[i][kept]
    drain(group)
    for i, row in enumerate(rows):
        assert row.emitted == goes_on(PROMPTS[i], (), 20, temp, i)
        assert row.stats.draft_errors == 0
    clean(provider)


@pytest.mark.parametrize("kind", ["verbs", "hidden, verbs", "tapped"])
def test_previews_of_several_rows_stand_in_the_rows_places(kind: str) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider)
    admitted = group.admit(
        [ask(p, num_draft_tokens=0 if i == 1 else 3) for i, p in enumerate(PROMPTS)]
    )
    for _ in range(4):
        shown = group.preview()
        assert shown is not None
        assert shown[1] == []
        for row, draft in zip(admitted, shown, strict=True):
            alone = VerifyGroup(target(), DRAFTERS[kind]())
            [same] = alone.admit([ask(row.tokens, num_draft_tokens=row.width)])
            assert (alone.preview() or [[]])[0] == draft
            assert same.steps == 0
        play(group)
    clean(provider)


def test_nobody_tells_where_no_drafter_can() -> None:
    for kind in ("none", "no verbs", "recurrent"):
        group = VerifyGroup(target(), DRAFTERS[kind]())
        group.admit([ask(PROMPTS[0])])
        assert group.preview() is None
        play(group)
        assert group.preview() is None
    provider = scripted(verbs=True)
    group = VerifyGroup(target(), provider)
    assert group.preview() is None
    [row] = group.admit([ask(PROMPTS[0], num_draft_tokens=0)])
    assert group.preview() is None  # the drafter rests
    play(group)
    group.admit([ask(PROMPTS[1])])
    play(group)
    assert group.preview() == [[], guess(tuple(group.rows[1].tokens), 3, 0)]
    assert row.stats.draft_errors == 0
    clean(provider)


def test_a_preview_that_raises_costs_the_drafts_and_no_token() -> None:
    class Raises(WithVerbs):
        def preview(self, *_: Any) -> Any:
            raise Fault("preview")

    provider = ScriptedProvider(guess, rows=Raises)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([ask(PROMPTS[0])])
    for _ in range(3):
        assert group.preview() is None
        play(group)
    drain(group)
    assert row.emitted == goes_on(PROMPTS[0], (), 40)
    assert row.stats.draft_errors == 3
    assert provider.left_open == []


# Consuming.


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_after_consuming_a_row_goes_on_as_if_it_had_written_the_tokens(
    kind: str, rounds: int, temp: float
) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider, prefill_step_size=4)
    rows = group.admit([ask(p, temp=temp, seed=i) for i, p in enumerate(PROMPTS)])
    if kind == "recurrent":
        play(group)  # its prompts come with a first token
    for _ in range(rounds):
        play(group)
    written = [row.emitted for row in rows]
    given = [GIVEN, (), (50,), (*GIVEN, *GIVEN, 3)]
    forwards = [row.stats.target_forwards for row in rows]
    group.consume(given)
    for row, wrote, ids, before in zip(rows, written, given, forwards, strict=True):
        assert row.emitted == (*wrote, *ids)
        assert row.stats.consumed == len(ids)
        assert row.stats.emitted == len(wrote)
        assert row.stats.target_forwards == before  # it gave no token
        assert row.unread == 1
    drafted = [row.stats.drafted for row in rows]
    assert group._live.state is not None
    assert group._live.state.lengths == tuple(row.processed for row in rows)
    drain(group)
    for i, (row, wrote, ids) in enumerate(zip(rows, written, given, strict=True)):
        count = 40 - len(wrote) - len(ids)
        want = goes_on(PROMPTS[i], (*wrote, *ids), count, temp, i)
        assert row.emitted == (*wrote, *ids, *want)
        assert row.finish == "length"
        assert row.stats.consumed + row.stats.emitted == 40
        assert row.stats.draft_errors == 0
        if ids and kind in STAND_DOWN:
            assert row.width == 0
            assert "cannot take tokens" in (row.stats.reason or "")
            assert row.stats.drafted == drafted[i]
        elif kind not in ("none", "ngram"):
            assert row.stats.reason is None
            assert row.stats.drafted > drafted[i] + 5
    clean(provider)


@pytest.mark.parametrize("kind", ["ngram", "verbs", "no verbs", "hidden, verbs", "tapped"])
def test_after_consuming_drafts_are_those_of_a_row_that_read_all_of_it(kind: str) -> None:
    def accepted(group: VerifyGroup, row: Row) -> tuple[int, ...]:
        rounds = []
        while group.rows:
            before = len(row.tokens)
            play(group)
            rounds.append(len(row.tokens) - before)
        return tuple(rounds)

    for prompt in PROMPTS:
        group = VerifyGroup(target(), DRAFTERS[kind](), prefill_step_size=4)
        [row] = group.admit([ask(prompt)])
        group.consume([GIVEN])
        cold = VerifyGroup(target(), DRAFTERS[kind]())
        [other] = cold.admit([ask((*prompt, *GIVEN), max_tokens=40 - len(GIVEN))])
        assert group.preview() == cold.preview()
        assert accepted(group, row) == accepted(cold, other)
        assert row.emitted == (*GIVEN, *other.emitted)
        assert row.stats.drafted == other.stats.drafted


@pytest.mark.parametrize("settled_by", ["nothing", "join", "extract", "remove"])
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_window_that_was_begun_early_is_taken_back(settled_by: str, temp: float) -> None:
    group = VerifyGroup(target())
    rows = group.admit([ask(p, temp=temp, seed=i) for i, p in enumerate(PROMPTS[:3])])
    for _ in range(3):
        play(group)
    assert group._live.flight is not None
    if settled_by == "join":
        rows += group.admit([ask(PROMPTS[3], temp=temp, seed=3)])
    elif settled_by == "extract":
        group.extract(rows[1])
    elif settled_by == "remove":
        group.remove([rows.pop(1)])
    written = [row.emitted for row in rows]
    given = [(GIVEN, (), (50,), (3, 4))[i] for i in range(len(rows))]
    group.consume(given)
    assert group._live.state is not None
    assert group._live.state.lengths == tuple(len(row.tokens) - 1 for row in rows)
    drain(group)
    for row, wrote, ids in zip(rows, written, given, strict=True):
        count = 40 - len(wrote) - len(ids)
        want = goes_on(row.request.prompt, (*wrote, *ids), count, temp, row.seed)
        assert row.emitted == (*wrote, *ids, *want)


def test_a_row_that_consumed_nothing_keeps_its_drafter() -> None:
    provider = DRAFTERS["hidden, no verbs"]()
    group = VerifyGroup(target(), provider)
    rows = group.admit([ask(p) for p in PROMPTS[:3]])
    group.consume([(), GIVEN, ()])
    drain(group)
    assert [row.width for row in rows] == [3, 0, 3]
    assert rows[0].stats.reason is rows[2].stats.reason is None
    assert rows[0].stats.accepted > 0
    clean(provider)


def ends(kind: str) -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    options: dict[str, dict[str, Any]] = {
        "budget": {"max_tokens": 5},
        "sequence": {"stop_sequences": [[2, 41]]},
        "string": {"stop_strings": "w2 w41", "tokenizer": tokenizer},
        "rule": {"stops": lambda token: token == 41},
        "grammar": {"constraint": lambda: Only(complete_at=6)},
    }
    return options[kind]


class Only:
    """A constraint that allows anything, up to a number of tokens.

    Args:
        complete_at: with so many tokens the output is complete.
        forbids: a token that it never allows.
        breaks_at: the token with which it cannot go on.
    """

    def __init__(self, complete_at: int = 99, *, forbids: int = -1, breaks_at: int = 99) -> None:
        self.seen: list[int] = []
        self.complete_at, self.forbids, self.breaks_at = complete_at, forbids, breaks_at

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array | None, int]:
        ids = mx.arange(VOCABULARY)
        rows, count = [], 0
        for place in range(len(draft) + 1):
            complete = len(self.seen) + place >= self.complete_at
            rows.append(ids == 63 if complete else ids != self.forbids)
            if place == len(draft) or complete or draft[place] == self.forbids:
                break
            count += 1
        return mx.stack(rows), count

    def advance(self, token: int, /) -> bool:
        if token == self.forbids or len(self.seen) + 1 == self.breaks_at:
            raise ConstraintError(f"{token} cannot follow")
        self.seen.append(token)
        return len(self.seen) >= self.complete_at

    def propose(self, _max_tokens: int, /) -> Sequence[int]:
        return ()


@pytest.mark.parametrize("drafter", ["none", "verbs", "hidden, no verbs"])
@pytest.mark.parametrize("kind", ["budget", "sequence", "string", "rule", "grammar"])
def test_a_row_that_ends_inside_leaves_out_what_follows(kind: str, drafter: str) -> None:
    caches = make_prompt_cache(tiny_model("qwen3"))
    published: list[Any] = []
    provider = DRAFTERS[drafter]()
    group = VerifyGroup(target(), provider, prefill_step_size=3)
    row, other = group.admit(
        [
            ask(
                PROMPTS[0],
                end_tokens=(63,),
                cache=caches,
                publish=lambda *shown: published.append(shown),
                **ends(kind),
            ),
            ask(PROMPTS[1]),
        ]
    )
    given = GIVEN[:5] if kind == "budget" else GIVEN
    taken = 5 if kind == "budget" else 6
    group.consume([given, (4, 4)])
    assert group.rows == [other]
    assert row.finish == ("length" if kind == "budget" else "stop")
    assert row.emitted == GIVEN[:taken]
    assert row.stats.consumed == taken
    assert row.read == (*PROMPTS[0], *GIVEN[:taken])
    assert {c.offset for c in caches} == {len(PROMPTS[0]) + taken}
    # What the caller goes on from is what mlx-lm itself makes of these tokens.
    text = (*PROMPTS[0], *GIVEN[:taken])
    logits = tiny_model("qwen3")(mx.array([[11]]), cache=caches)[0, -1]
    assert number(mx.argmax(logits)) == goes_on((*text, 11), (), 1)[0]
    # The last token is not read before the row leaves; a checkpoint covers what was.
    [(shown, kept, _)] = published
    assert shown is row
    assert {c.offset for c in kept} == {len(PROMPTS[0]) + taken - 1}
    if kind == "string":
        assert row.text == "w7 w7 w30 w9 "
    drain(group)
    assert other.emitted == (4, 4, *goes_on(PROMPTS[1], (4, 4), 38))
    clean(provider)


def test_a_rule_of_the_request_that_raises_ends_its_row_alone() -> None:
    class Raises:
        def matcher(self) -> Raises:
            return self

        def advance(self, token: int) -> bool:
            if token == 30:
                raise Fault("sequence")
            return False

    def stops(token: int) -> bool:
        if token == 30:
            raise Fault("rule")
        return False

    broken: list[dict[str, Any]] = [
        {"stops": stops},
        {"stop_sequences": Raises()},
        {"constraint": lambda: Only(breaks_at=3)},
    ]
    for options in broken:
        provider = scripted(verbs=True)
        group = VerifyGroup(target(), provider)
        row, other = group.admit([ask(PROMPTS[0], **options), ask(PROMPTS[1])])
        group.consume([GIVEN, (4,)])
        assert row.finish == "error"
        assert isinstance(row.error, Fault | ConstraintError)
        assert row.emitted == GIVEN[:2]
        assert row.processed == len(PROMPTS[0]) + 1
        assert group.rows == [other]
        drain(group)
        assert other.emitted == (4, *goes_on(PROMPTS[1], (4,), 39))
        clean(provider)


def test_min_tokens_and_penalties_count_what_was_consumed() -> None:
    class Watches:
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            told: Any = tokens.tolist()
            self.seen.append(told)
            return logits

    group, watch = VerifyGroup(target(), scripted(verbs=True)), Watches()
    options = {"min_tokens": len(GIVEN) + 2, "stop_sequences": [[9]], "processors": [watch]}
    [row] = group.admit([ask(PROMPTS[0], **options)])
    group.consume([GIVEN])  # ends with 9, below the floor
    assert row.finish is None
    assert watch.seen == []
    play(group)
    assert watch.seen[0] == [*PROMPTS[0], *GIVEN]
    drain(group)
    whole = [*PROMPTS[0], *row.emitted]
    assert watch.seen == [whole[:end] for end in range(len(PROMPTS[0]) + len(GIVEN), len(whole))]


# What is refused.


@pytest.mark.parametrize("kind", ["none", "verbs", "tapped"])
@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([(1,)], "given 1 lists; give one per row, 3"),
        ([(), (), (), ()], "given 4 lists"),
        ([(1,), (VOCABULARY,), ()], "row 1 was given 64; this model's ids are 0 to 63"),
        ([(1,), (2, -1), ()], "row 1 was given -1"),
        ([(1,), (), (1, 2, 63)], "row 2 was given the end token 63"),
        ([(1,), (), (1,) * 40], "max_tokens leaves it 39"),
        ([(1,), (5, 6, 33), ()], "row 1 was given 33, which its constraint does not allow"),
        ([(1,), (1.5,), ()], "row 1 was given 1.5"),
        ([(1,), ("a",), ()], "row 1 was given 'a'"),
        ([(1,), (None,), ()], "row 1 was given None"),
        ([(1,), 5, ()], "row 1 was given 5"),
        ([(1,), "ab", ()], "row 1 was given"),
    ],
)
def test_tokens_that_cannot_be_change_nothing(tokens: Any, says: str, kind: str) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider)
    rows = group.admit(
        [
            ask(PROMPTS[0]),
            ask(PROMPTS[1], constraint=lambda: Only(forbids=33)),
            ask(PROMPTS[2], end_tokens=(63,)),
        ]
    )
    play(group)
    rest = 40 - rows[2].steps
    if "39" in says:
        tokens, says = [(1,), (), (1,) * (rest + 1)], f"max_tokens leaves it {rest}"
    before = picture(group)
    with pytest.raises(OptionError, match=says.replace("(", r"\(")):
        group.consume(tokens)
    assert picture(group) == before
    drain(group)
    assert rows[0].emitted == goes_on(PROMPTS[0], (), 40)
    clean(provider)


def test_nothing_is_refused_that_is_an_id() -> None:
    group = VerifyGroup(target())
    [row] = group.admit([ask(PROMPTS[0])])
    group.consume([np.array([7, 8])])  # type: ignore[list-item]
    group.consume([(np.int64(9), True)])  # type: ignore[list-item]
    assert row.emitted == (7, 8, 9, 1)
    assert all(type(token) is int for token in row.tokens)
    group.consume([()])
    drain(group)
    assert row.emitted == (7, 8, 9, 1, *goes_on(PROMPTS[0], (7, 8, 9, 1), 36))


def test_verbs_in_the_wrong_place_change_nothing() -> None:
    group = VerifyGroup(target(), DRAFTERS["recurrent"]())
    [row] = group.admit([ask(PROMPTS[0])])
    before = picture(group)
    with pytest.raises(OptionError, match=r"row 0 has a first token of its own; call round\(\)"):
        group.consume([(1,)])
    group.consume([()])
    assert picture(group) == before
    with group.round() as done:
        for verb in (group.preview, lambda: group.consume([(1,)])):
            with pytest.raises(RoundOpenError):
                verb()
        done.deliver_all()
    drain(group)
    assert row.emitted == goes_on(PROMPTS[0], (), 40)
    group.close()
    for verb in (group.preview, lambda: group.consume([])):
        with pytest.raises(ClosedError):
            verb()


@pytest.mark.parametrize(("rounds", "temp"), [(0, 0.0), (1, 0.8), (3, 0.0)])
@pytest.mark.parametrize("kind", ["none", "ngram", "hidden, no verbs", "tapped"])
@pytest.mark.parametrize("architecture", [WINDOWED, HYBRID])
def test_rows_of_windows_and_recurrent_rows_go_on_after_tokens_as_if_they_had_written_them(
    architecture: str, kind: str, rounds: int, temp: float
) -> None:
    """Windows of 16 positions turn while tokens are consumed, and rows take different counts."""
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(architecture), provider, prefill_step_size=4)
    rows = group.admit([ask(p, temp=temp, seed=i) for i, p in enumerate(PROMPTS)])
    for _ in range(rounds):
        play(group)
    wrote = [row.emitted for row in rows]
    taken: list[tuple[int, ...]] = [GIVEN, (4,), (), GIVEN[:5]]
    for _ in range(2):
        group.consume(taken)
        for place, tokens in enumerate(taken):
            wrote[place] = (*wrote[place], *tokens)
            assert rows[place].emitted == wrote[place]
        taken = taken[::-1]
    drain(group)
    for i, (row, before) in enumerate(zip(rows, wrote, strict=True)):
        more = goes_on(PROMPTS[i], before, 40 - len(before), temp, i, architecture)
        assert row.emitted == (*before, *more)
        assert row.error is None
        assert row.stats.consumed == (14, 1, 1, 14)[i]
    if kind in PREVIEWS:  # what cannot consume stands down
        assert sum(row.stats.drafted for row in rows) > 0
    clean(provider)


def test_rows_of_one_position_at_a_time_refuse_tokens() -> None:
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    bound = MlxLmTarget(model)
    group = VerifyGroup(bound)
    assert bound.no_speculation_reason == "no row form for cache type OwnCache"
    [row] = group.admit([ask(PROMPTS[0])])
    play(group)
    with pytest.raises(OptionError, match="one position at a time"):
        group.consume([(1,)])
    group.consume([()])
    drain(group)
    assert row.emitted == solo(PROMPTS[0])


# Teacher forcing.


@pytest.mark.parametrize("kind", ["ngram", "verbs", "tapped"])
def test_acceptance_along_a_given_text_is_what_the_executor_accepts_when_it_writes_it(
    kind: str, record_property: Any
) -> None:
    prompt = PROMPTS[0]
    text = goes_on(prompt, (), 40)

    def decode() -> tuple[list[int], Row]:
        group = VerifyGroup(target(), DRAFTERS[kind]())
        [row] = group.admit([ask(prompt)])
        steps = []
        while group.rows:
            before = row.steps
            play(group)
            steps.append(row.steps - before)
        return steps, row

    steps, row = decode()
    forced = VerifyGroup(target(), DRAFTERS[kind]())
    [taught] = forced.admit([ask(prompt)])
    lengths = []  # at every place of the text, how far the draft there agrees with it
    for token in text:
        [draft] = forced.preview() or [[]]
        ahead = text[taught.steps :]
        agreed = 0
        while agreed < min(len(draft), len(ahead)) and draft[agreed] == ahead[agreed]:
            agreed += 1
        lengths.append(agreed)
        forced.consume([(token,)])
    assert taught.finish == "length"
    assert taught.emitted == row.emitted == text
    place = 0
    for step in steps:
        assert step == min(lengths[place] + 1, 40 - place)
        place += step
    record_property("accepted", row.stats.accepted)
    record_property("mean length", sum(lengths) / len(lengths))
    assert sum(lengths) > 0


# Mixes of everything.

MOVES = st.one_of(
    st.just(("round",)),
    st.just(("round",)),
    st.just(("preview",)),
    st.tuples(
        st.just("consume"),
        st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), min_size=4, max_size=4),
    ),
    st.tuples(st.just("join"), st.integers(0, 3), st.sampled_from([0, 3])),
    st.tuples(st.just("remove"), st.integers(0, 3)),
    st.tuples(st.just("extract"), st.integers(0, 3)),
)


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(max_examples=8)
@given(moves=st.lists(MOVES, max_size=14), temp=st.sampled_from([0.0, 0.8]))
def test_in_any_mix_each_row_writes_what_it_would_alone(
    kind: str, moves: list[Any], temp: float
) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider, prefill_step_size=4)
    every: list[Row] = []
    wrote: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by row: tokens given, and where
    for move in [("join", 0, 3), ("join", 1, 0), *moves]:
        if move[0] == "round":
            play(group)
        elif move[0] == "preview":
            group.preview()
        elif move[0] == "join" and len(group.rows) < 4:
            asked = ask(
                PROMPTS[move[1]],
                temp=temp,
                seed=len(every),
                num_draft_tokens=move[2],
                max_tokens=24,
            )
            wrote[len(every)] = []
            every += group.admit([asked])
        elif move[0] == "remove" and len(group.rows) > move[1]:
            group.remove([group.rows[move[1]]])
        elif move[0] == "extract" and len(group.rows) > move[1]:
            caches, tokens = group.extract(group.rows[move[1]])
            assert {c.offset for c in caches} == {len(tokens)}
            held = group.rows[move[1]].tokens
            assert tokens == tuple(held[: len(tokens)])
            assert len(tokens) >= len(held) - 1
        elif move[0] == "consume":
            firsts = group._live.firsts
            given = [
                () if i in firsts else tuple(move[1][i][: row.budget])
                for i, row in enumerate(group.rows)
            ]
            for row, ids in zip(group.rows, given, strict=True):
                wrote[every.index(row)].append((ids, row.steps))
            group.consume(given)
    drain(group)
    for index, row in enumerate(every):
        done: tuple[int, ...] = ()
        for ids, place in [*wrote[index], ((), row.steps)]:
            own = place - len(done)
            done += goes_on(row.request.prompt, done, own, temp, index) if own else ()
            done += ids
        assert row.emitted == done
        assert row.stats.draft_errors == 0
        assert row.error is None
    clean(provider)


# Readings.


def read_all(group: VerifyGroup, asked: Request | Row) -> Any:
    reading = group.read(asked)
    while not reading.done:
        reading.step()
    return reading


@pytest.mark.parametrize("kind", ["none", "ngram", "verbs", "hidden, no verbs", "recurrent"])
def test_a_reading_between_rounds_changes_nothing_for_the_others(kind: str) -> None:
    long = tuple((7 * i + 3) % VOCABULARY for i in range(30))

    def decode(reads: bool) -> tuple[list[Row], Row | None]:
        provider = DRAFTERS[kind]()
        group = VerifyGroup(target(), provider, prefill_step_size=4)
        rows = group.admit([ask(p, seed=i, temp=0.8) for i, p in enumerate(PROMPTS[:2])])
        late, reading = None, None
        for number in range(60):
            if reads and number == 1:
                reading = group.read(ask(long, seed=9, temp=0.8))
            if reading is not None and not reading.done:
                left = reading.left
                read = reading.step()
                # The last token may be left to be pending.
                assert left - reading.left in {read, read + reading.done}
            if reading is not None and reading.done and late is None:
                [late] = group.join([reading])
            if group.rows:
                play(group)
        clean(provider)
        return rows, late

    alone, _ = decode(reads=False)
    beside, late = decode(reads=True)
    assert late is not None
    assert late.emitted == goes_on(long, (), 40, 0.8, 9)
    for row, same in zip(beside, alone, strict=True):
        assert row.emitted == same.emitted == goes_on(row.request.prompt, (), 40, 0.8, row.seed)
        if kind != "ngram":
            assert row.stats.accepted == same.stats.accepted


def test_a_reading_that_is_not_done_cannot_join() -> None:
    group = VerifyGroup(target(), scripted(verbs=True))
    reading = group.read(ask(PROMPTS[0]))
    with pytest.raises(ContractError, match="not read"):
        group.join([reading])
    assert group.rows == []
    while not reading.done:
        reading.step()
    [row] = group.join([reading])
    drain(group)
    assert row.emitted == goes_on(PROMPTS[0], (), 40)


@pytest.mark.parametrize("verb", ["open_prefill", "prefill", "capture"])
def test_of_two_readings_at_once_a_drafter_s_fault_is_charged_to_its_own(verb: str) -> None:
    provider = ScriptedProvider(guess, rows=WithVerbs, faults={verb: [2]})
    group = VerifyGroup(target(), provider)
    first, second = group.read(ask(PROMPTS[0])), group.read(ask(PROMPTS[3]))
    while not (first.done and second.done):
        for reading in (first, second):
            if not reading.done:
                reading.step()
    rows = group.join([first, second])
    assert [row.stats.draft_errors for row in rows] == [0, 1]
    assert rows[0].stats.reason is None
    drain(group)
    for row in rows:
        assert row.emitted == goes_on(row.request.prompt, (), 40)
    assert rows[0].stats.accepted > 0
    assert rows[1].stats.accepted > 0, "its history was read again"
    group.close()
    assert provider.left_open == []


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
@pytest.mark.parametrize("kind", ["verbs", "hidden, no verbs"])
def test_a_reading_that_is_given_up_leaves_no_draft_group(kind: str, steps: int) -> None:
    provider = DRAFTERS[kind]()
    group = VerifyGroup(target(), provider, prefill_step_size=2)
    [row] = group.admit([ask(PROMPTS[1])])
    before = len(provider.left_open)
    reading = group.read(ask(PROMPTS[0]))
    for _ in range(steps):
        if not reading.done:
            reading.step()
    reading.close()
    reading.close()
    assert len(provider.left_open) == before
    drain(group)
    assert row.emitted == goes_on(PROMPTS[1], (), 40)
    group.close()
    assert provider.left_open == []


def test_a_reading_that_fails_leaves_no_draft_group() -> None:
    provider = scripted(verbs=True)
    group = VerifyGroup(target(), provider, prefill_step_size=2)

    def progress(done: int, _total: int) -> None:
        if done == 4:
            raise Fault("progress")

    reading = group.read(ask(PROMPTS[0], progress=progress))
    reading.step()
    with pytest.raises(Fault):
        reading.step()
    assert provider.left_open == []


# Rows of a group that failed.


class Counts:
    """A processor that holds state: a call for every token, each with one token more."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.lengths.append(int(tokens.size))
        return logits - 2.0 * (mx.arange(VOCABULARY) == len(self.lengths) % VOCABULARY)


def failing(model: Any) -> Any:
    """A bound target whose forward can be told to fail."""

    class Failing(MlxLmTarget):
        fails = False
        fails_at = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.fails_at -= 1
            if self.fails or self.fails_at == 0:
                raise Fault("forward")
            return super().forward(*args, **kwargs)

    return Failing(model)


@pytest.mark.parametrize("kind", ["none", "verbs", "hidden, verbs"])
def test_where_the_target_fails_over_them_the_tokens_are_kept(kind: str) -> None:
    group_target, caches = failing(tiny_model("qwen3")), make_prompt_cache(tiny_model("qwen3"))
    provider = DRAFTERS[kind]()
    group = VerifyGroup(group_target, provider, prefill_step_size=4)
    rows = group.admit([ask(PROMPTS[0], cache=caches), ask(PROMPTS[1])])
    play(group)
    wrote = [row.emitted for row in rows]
    group_target.fails_at = 2  # windows of 4: the second of three
    with pytest.raises(GroupFailedError):
        group.consume([GIVEN, (4,)])
    assert [row.emitted for row in rows] == [(*wrote[0], *GIVEN), (*wrote[1], 4)]
    assert [row.finish for row in rows] == [None, None]
    assert {c.offset for c in caches} == {len(rows[0].tokens)}
    fresh = VerifyGroup(group_target, DRAFTERS[kind]())
    [row] = fresh.join([read_all(fresh, rows[1])])
    drain(fresh)
    count = 40 - len(wrote[1]) - 1
    assert row.emitted == (*wrote[1], 4, *goes_on(PROMPTS[1], (*wrote[1], 4), count))
    clean(provider)
    if isinstance(provider, ScriptedProvider):
        assert provider.left_open == []


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("kind", ["none", "ngram", "verbs", "hidden, no verbs", "tapped"])
def test_a_row_of_a_group_that_failed_goes_on_where_it_was(
    kind: str, rule: Any, rounds: int
) -> None:
    tokenizer = tiny_tokenizer()
    whole = VerifyGroup(target(), DRAFTERS[kind]())

    def asked(**more: Any) -> Request:
        return Request(
            prompt=PROMPTS[0],
            sampling=SamplingOptions(temp=0.8, seed=5, acceptance=rule),
            num_draft_tokens=3,
            max_tokens=40,
            tokenizer=tokenizer,
            constraint=lambda: Only(forbids=12),
            processors=[Counts()],
            **more,
        )

    [unbroken] = whole.admit([asked()])
    drain(whole)
    # A stop string that lies across the failure, wherever that is.
    group_target = failing(tiny_model("qwen3"))
    group = VerifyGroup(group_target, DRAFTERS[kind]())
    [row] = group.admit([asked()])
    [beside] = group.admit([ask(PROMPTS[1])])
    for _ in range(rounds):
        play(group)
    place = row.steps
    group_target.fails = True
    with pytest.raises(GroupFailedError):
        play_on(group)
    group_target.fails = False
    before, written = row.text, row.emitted
    assert len(written) >= place
    fresh = VerifyGroup(group_target, DRAFTERS[kind](), prefill_step_size=4)
    readings = [read_all(fresh, each) for each in (row, beside)]
    rows = fresh.join(readings)
    assert rows == [row, beside]
    drain(fresh)
    assert beside.emitted == goes_on(PROMPTS[1], (), 40)
    assert row.emitted[: len(written)] == written
    assert len(row.emitted) == 40
    assert 12 not in row.emitted
    assert row.text == " ".join(f"w{token}" for token in row.emitted)
    assert row.text.startswith(before)
    if rule == "match":
        assert row.emitted == unbroken.emitted
    [counts] = row.request.processors
    lengths: Any = counts.lengths  # type: ignore[union-attr]
    assert lengths == sorted(lengths)


def test_a_stop_string_and_a_stop_sequence_are_found_across_a_failure() -> None:
    text = goes_on(PROMPTS[0], (), 40)
    names = [f"w{token}" for token in text]
    for options in (
        {"stop_strings": " ".join(names[2:5]), "tokenizer": tiny_tokenizer()},
        {"stop_sequences": [text[2:5]]},
    ):
        group_target = failing(tiny_model("qwen3"))
        group = VerifyGroup(group_target)
        [row] = group.admit([ask(PROMPTS[0], num_draft_tokens=0, **options)])
        while row.steps < 4:
            play(group)
        group_target.fails = True
        with pytest.raises(GroupFailedError):
            play_on(group)
        group_target.fails = False
        assert row.steps in {4, 5}
        if row.finish is None:
            fresh = VerifyGroup(group_target)
            fresh.join([read_all(fresh, row)])
            drain(fresh)
        assert row.finish == "stop"
        assert row.emitted == text[:5]


def test_loaded_drafters_come_to_these_verbs_as_well() -> None:
    script = Script([text_of(PROMPTS[0])], [[[RIGHT, WRONG]]])
    loaded = load_scripted(ScriptedProvider(script, rows=WithVerbs, mode=PrefillMode.TAIL_SPLIT))
    group = VerifyGroup(target(), loaded.provider)
    [row] = group.admit([ask(PROMPTS[0])])
    [[first, second]] = group.preview() or [[]]
    text = goes_on(PROMPTS[0], (), 40)
    assert (first, second) == (text[0], (text[1] + 1) % VOCABULARY)
    group.consume([text[:2]])
    drain(group)
    assert row.emitted == text
    assert script.complaints == []
