"""When the model fails, no request loses a token, and the one that is the cause ends alone.

Faults are put into the target's forward: at a call, or wherever one prompt's row takes part. The
oracle of every row is what the target writes alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import RIGHT, WRONG, Fault, Script, ScriptedProvider, load_scripted, solo, text_of
from tiny_models import HYBRID, WINDOWED, OwnCache, build_model, tiny_model

from specdec import BatchGenerator, VerifyGroup, load_drafter
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.batch import BatchResponse

MODEL = tiny_model("qwen3")
PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (33, 8, 33, 8, 2), tuple(range(20, 43)))
POISON = 60
BAD = (POISON, 4, 5, 6)


@define
class Failing:
    """A model that fails at some forwards.

    Attributes:
        at: numbers of the calls that fail, first call 1.
        tokens: ids whose windows fail.
        error: what is raised.
        calls: so far.
        raised: how many of them failed.
    """

    at: frozenset[int] = frozenset()
    tokens: frozenset[int] = frozenset()
    error: type[BaseException] = Fault
    calls: int = 0
    raised: int = 0

    @contextmanager
    def put_in(self) -> Iterator[Failing]:
        forward = MlxLmTarget.forward

        def failing(target: MlxLmTarget, tokens: mx.array, *rest: Any) -> Any:
            self.calls += 1
            seen: Any = tokens.tolist()
            if self.calls in self.at or self.tokens & {id for row in seen for id in row}:
                self.raised += 1
                raise self.error("the model broke")
            return forward(target, tokens, *rest)

        with mock.patch.object(MlxLmTarget, "forward", failing):
            yield self


def finish(
    generator: BatchGenerator, interrupts: type[BaseException] | None = None
) -> dict[int, list[BatchResponse]]:
    answers: dict[int, list[BatchResponse]] = {}
    for _ in range(500):
        if not generator.has_work:
            break
        try:
            got = generator.next()[1]
        except BaseException as error:
            if interrupts is None or not isinstance(error, interrupts):
                raise
            continue
        for answer in got:
            answers.setdefault(answer.uid, []).append(answer)
    assert not generator.has_work, "the generator does not come to an end"
    return answers


def tokens_of(answers: list[BatchResponse]) -> tuple[int, ...]:
    return tuple(answer.token for answer in answers if answer.token is not None)


def provider() -> ScriptedProvider:
    texts = [text_of(prompt) for prompt in PROMPTS]
    moves = [[[RIGHT, WRONG], [RIGHT] * 4], [[RIGHT] * 3], [[WRONG]], [[], [RIGHT, RIGHT]]]
    return ScriptedProvider(Script(texts, moves))


@settings(max_examples=25)
@given(st.frozensets(st.integers(1, 30), max_size=6), st.booleans(), st.sampled_from([3, 2048]))
def test_no_token_is_lost_or_told_twice_wherever_the_model_fails(
    at: frozenset[int], drafts: bool, step_size: int
) -> None:
    drafter = load_scripted(provider()) if drafts else None
    with (
        Failing(at).put_in(),
        BatchGenerator(
            MODEL, drafter=drafter, max_tokens=14, prefill_step_size=step_size
        ) as generator,
    ):
        uids = generator.insert(PROMPTS[:2])
        generator.next()
        uids += generator.insert(PROMPTS[2:])
        answers = finish(generator)
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        got, last = tokens_of(answers[uid]), answers[uid][-1]
        if last.finish_reason == "error":
            assert isinstance(last.error, Fault)
            assert got == solo(prompt)[: len(got)]
        else:
            assert got == solo(prompt)[:14]
            assert last.prompt_cache is not None
            assert last.prompt_cache[0].offset == len(prompt) + 14


@pytest.mark.parametrize("drafts", [False, True])
def test_one_failure_ends_nobody(drafts: bool) -> None:
    drafter = load_scripted(provider()) if drafts else None
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=14) as generator:
        uids = generator.insert(PROMPTS)
        first: dict[int, list[BatchResponse]] = {}
        for _ in range(3):
            for answer in generator.next()[1]:
                first.setdefault(answer.uid, []).append(answer)
        with Failing(frozenset({1})).put_in() as failing:
            for answer in generator.next()[1]:
                first.setdefault(answer.uid, []).append(answer)
            assert failing.raised == 1
        rest = finish(generator)
        assert len(generator._engine._book.groups._own) == 0
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        whole = [*first.get(uid, []), *rest.get(uid, [])]
        assert tokens_of(whole) == solo(prompt)[:14]
        assert whole[-1].finish_reason == "length"


def test_the_culprit_alone_ends_with_its_error_and_the_others_lose_nothing() -> None:
    """A window fails whenever the poisoned row is in it; its prompt can be read."""
    with (
        Failing(tokens=frozenset({POISON})).put_in() as failing,
        BatchGenerator(MODEL, max_tokens=14) as generator,
    ):
        uids = generator.insert([PROMPTS[0], (4, 5, POISON), PROMPTS[1]])
        answers = finish(generator)
    good, bad, other = (answers[uid] for uid in uids)
    assert tokens_of(good) == solo(PROMPTS[0])[:14]
    assert tokens_of(other) == solo(PROMPTS[1])[:14]
    assert [answer.finish_reason for answer in bad] == ["error"]
    assert isinstance(bad[0].error, Fault)
    assert failing.raised == 3  # with others, with others once more, alone


def test_a_prompt_that_cannot_be_read_is_tried_once_more_and_ends_alone() -> None:
    with (
        Failing(tokens=frozenset({POISON})).put_in() as failing,
        BatchGenerator(MODEL, max_tokens=14) as generator,
    ):
        uids = generator.insert([PROMPTS[0], BAD, PROMPTS[1]])
        answers = finish(generator)
    assert failing.raised == 2
    assert [answer.finish_reason for answer in answers[uids[1]]] == ["error"]
    assert isinstance(answers[uids[1]][0].error, Fault)
    for uid, prompt in ((uids[0], PROMPTS[0]), (uids[2], PROMPTS[1])):
        assert tokens_of(answers[uid]) == solo(prompt)[:14]


def test_a_prompt_that_is_read_when_a_group_fails_is_no_suspect() -> None:
    long = tuple(range(1, 42))
    with BatchGenerator(MODEL, max_tokens=14, prefill_step_size=8) as generator:
        first, second = generator.insert([PROMPTS[0], long])
        answers = []
        for _ in range(3):
            answers += generator.next()[1]
        with Failing(frozenset({1})).put_in():
            answers += generator.next()[1]
        book = generator._engine._book
        assert (book.entries[first].failures, book.entries[second].failures) == (1, 0)
        rest = finish(generator)
    assert tokens_of([*answers, *rest[first]]) == solo(PROMPTS[0])[:14]
    assert tokens_of(rest[second]) == solo(long)[:14]


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_an_interrupt_loses_nothing_that_was_not_begun(at: int) -> None:
    with (
        Failing(frozenset({at}), error=KeyboardInterrupt).put_in() as failing,
        BatchGenerator(MODEL, drafter=load_drafter("ngram", MODEL), max_tokens=9) as generator,
    ):
        uids = generator.insert(PROMPTS)
        answers = finish(generator, KeyboardInterrupt)
    assert failing.raised == 1
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        assert tokens_of(answers[uid]) == solo(prompt)[:9]


def test_rows_that_cannot_join_together_join_one_by_one() -> None:
    prepare = RaggedState.prepare_append
    tried: list[int] = []

    def picky(self: RaggedState, rows: Any) -> Any:
        tried.append(len(rows))
        if len(rows) > 1:
            raise Fault("not so many")
        return prepare(self, rows)

    with (
        BatchGenerator(MODEL, max_tokens=9) as generator,
        mock.patch.object(RaggedState, "prepare_append", picky),
    ):
        uids = generator.insert(PROMPTS)
        answers = finish(generator)
    assert max(tried) > 1
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        assert tokens_of(answers[uid]) == solo(prompt)[:9]


def test_a_join_that_breaks_the_group_sends_everyone_back() -> None:
    broken: list[VerifyGroup] = []
    join = VerifyGroup.join

    def breaking(self: VerifyGroup, readings: Any) -> Any:
        if self.rows and not broken:
            broken.append(self)
            self._fail(Fault("between two commits"))
        return join(self, readings)

    with (
        mock.patch.object(VerifyGroup, "join", breaking),
        BatchGenerator(MODEL, max_tokens=9) as generator,
    ):
        uids = generator.insert(PROMPTS[:2])
        before = [answer for _ in range(3) for answer in generator.next()[1]]
        uids += generator.insert(PROMPTS[2:])
        rest = finish(generator)
    assert len(broken) == 1
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        whole = [*(answer for answer in before if answer.uid == uid), *rest[uid]]
        assert tokens_of(whole) == solo(prompt)[:9]


@pytest.mark.parametrize(
    ("verb", "breaks"), [("extract_cache", "extract_row"), ("remove", "filter_rows")]
)
def test_taking_and_removing_survive_a_group_that_fails(verb: str, breaks: str) -> None:
    broken: list[RaggedState] = []
    real = getattr(RaggedState, breaks)

    def once(self: RaggedState, *given: Any) -> Any:
        if not broken:
            broken.append(self)
            raise Fault("state")
        return real(self, *given)

    with BatchGenerator(MODEL, max_tokens=9) as generator:
        uids = generator.insert(PROMPTS[:2])
        before = [answer for _ in range(3) for answer in generator.next()[1]]
        with mock.patch.object(RaggedState, breaks, once):
            got = getattr(generator, verb)(uids[:1])
        assert len(broken) == 1
        rest = finish(generator)
    if verb == "extract_cache":  # it waits, and what it had read is lost with the group
        assert got[0][1] == []
        assert got[0][0][0].offset == 0
    left = uids[1:] if verb == "remove" else uids
    assert set(rest) == set(left)
    for uid in left:
        whole = [*(answer for answer in before if answer.uid == uid), *rest[uid]]
        assert tokens_of(whole) == solo(PROMPTS[uid])[:9]


def test_caches_of_a_row_whose_group_failed_at_its_end_are_read_again() -> None:
    with BatchGenerator(MODEL, max_tokens=4) as generator:
        [uid] = generator.insert([PROMPTS[0]])
        with mock.patch.object(RaggedState, "extract_row", side_effect=Fault("state")):
            answers = finish(generator)
    last = answers[uid][-1]
    assert last.finish_reason == "length"
    assert last.prompt_cache is not None
    assert last.prompt_cache[0].offset == len(last.all_tokens or []) == len(PROMPTS[0]) + 4
    probe = MODEL(mx.array([[9]]), cache=last.prompt_cache)
    assert mx.allclose(
        probe[0, -1], MODEL(mx.array([[*(last.all_tokens or []), 9]]))[0, -1], atol=1e-4
    ).item()


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("kind", [HYBRID, WINDOWED, "own"])
def test_other_caches_come_back_from_a_failure_as_well(kind: str, drafter: str | None) -> None:
    """Recurrent state, windows, and a cache type without a row form."""
    architecture = "qwen3" if kind == "own" else kind
    model = build_model(architecture)
    if kind == "own":
        model.make_cache = lambda: [OwnCache() for _ in model.layers]
    loaded = None if drafter is None else load_drafter(drafter, model, min_ngram=1)
    with BatchGenerator(model, drafter=loaded, max_tokens=9) as generator:
        uids = generator.insert(PROMPTS[:2])
        answers = [answer for _ in range(3) for answer in generator.next()[1]]
        with Failing(frozenset({1})).put_in() as failing:
            answers += generator.next()[1]
            assert failing.raised == 1
        for rest in finish(generator).values():
            answers += rest
    for uid, prompt in zip(uids, PROMPTS, strict=False):
        own = [answer for answer in answers if answer.uid == uid]
        assert tokens_of(own) == solo(prompt, architecture=architecture)[:9]


def test_a_closed_generator_closes_groups_that_failed_too() -> None:
    script = provider()
    with BatchGenerator(MODEL, drafter=load_scripted(script), max_tokens=9) as generator:
        generator.insert(PROMPTS)
        generator.next()
        generator.next()
        with Failing(frozenset({1})).put_in():
            generator.next()
        generator.next()
    assert script.left_open == []
    assert script.complaints == []


def test_a_row_that_goes_on_between_failures_never_runs_out_of_tries() -> None:
    with BatchGenerator(MODEL, max_tokens=12) as generator:
        [uid] = generator.insert([PROMPTS[0]])
        answers = [answer for _ in range(2) for answer in generator.next()[1]]
        for _ in range(5):
            with Failing(frozenset({1})).put_in() as failing:
                assert generator.next()[1] == []
                assert failing.raised == 1
            answers += generator.next()[1]
        answers += finish(generator)[uid]
    assert tokens_of(answers) == solo(PROMPTS[0])[:12]


def test_rows_that_come_back_are_served_before_requests_that_waited() -> None:
    with BatchGenerator(MODEL, max_tokens=9, completion_batch_size=2) as generator:
        generator.insert(PROMPTS[:3])
        for _ in range(3):
            generator.next()
        with Failing(frozenset({1})).put_in():
            generator.next()
        order = [answer.uid for _ in range(40) for answer in generator.next()[1]]
    assert order[:2] == [0, 1]
    assert order.index(2) > 10


def test_who_breaks_every_group_that_he_joins_ends_alone() -> None:
    join = VerifyGroup.join

    def breaking(self: VerifyGroup, readings: Any) -> Any:
        if any(reading.row.tokens[0] == POISON for reading in readings):
            self._fail(Fault("between two commits"))
        return join(self, readings)

    script = provider()
    with (
        mock.patch.object(VerifyGroup, "join", breaking),
        BatchGenerator(MODEL, drafter=load_scripted(script), max_tokens=9) as generator,
    ):
        uids = generator.insert([PROMPTS[0], BAD, PROMPTS[1]])
        answers = finish(generator)
        open_now = [group for group in script.left_open if group.decodes]
        assert len(open_now) <= 1  # those of suspects are closed when they have left
        assert len(script.groups) > 6
    assert [answer.finish_reason for answer in answers[uids[1]]] == ["error"]
    assert isinstance(answers[uids[1]][0].error, Fault)
    for uid, prompt in ((uids[0], PROMPTS[0]), (uids[2], PROMPTS[1])):
        assert tokens_of(answers[uid]) == solo(prompt)[:9]
    assert script.left_open == []
