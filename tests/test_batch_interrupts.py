"""Interrupts, odd samplers and caller's caches: what a hostile reading of batches found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scripted import solo, target, tiny_tokenizer
from tiny_models import VOCABULARY, tiny_model

from specdec import BatchGenerator, Request, SamplingOptions, VerifyGroup, load_drafter
from specdec.errors import ContractError, OptionError
from specdec.verify.lane import FORGIVEN_AFTER, MAX_FAILURES, DraftLane
from specdec.verify.live import LiveRows

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = tiny_model("qwen3")
FIRST, SECOND = (1, 2, 3, 1, 2, 3, 1, 2), (4, 5, 4, 5, 4, 5)


def finish(batch: BatchGenerator, patience: int = 3) -> dict[int, tuple[list[Any], Any, Any]]:
    """Run to the end; an interrupt is caught and the run goes on."""
    told: dict[int, tuple[list[Any], Any, Any]] = {}
    while batch.has_work:
        try:
            answers = batch.next()[1]
        except KeyboardInterrupt:
            patience -= 1
            assert patience
            continue
        for answer in answers:
            tokens, _, _ = told.setdefault(answer.uid, ([], None, None))
            if answer.token is not None:
                tokens.append(answer.token)
            if answer.finish_reason is not None:
                told[answer.uid] = (tokens, answer.finish_reason, answer.error)
    return told


def once(call: Any, when: Any = lambda *_: True) -> Any:
    """A method that is interrupted the first time that something holds."""
    left = [True]

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        if left[0] and when(self):
            left[0] = False
            raise KeyboardInterrupt
        return call(self, *args, **options)

    return interrupted


def test_an_interrupt_while_a_row_ends_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = once(LiveRows.retire, lambda live: any(row.finish for row in live.rows))
    monkeypatch.setattr(LiveRows, "retire", ends)
    with BatchGenerator(MODEL, stop_tokens=()) as batch:
        first, second = batch.insert([list(FIRST), list(SECOND)], max_tokens=[2, 9])
        told = finish(batch)
    assert told[first] == (list(solo(FIRST)[:2]), "length", None)
    assert told[second] == (list(solo(SECOND)[:9]), "length", None)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_an_interrupt_in_the_walk_changes_no_text_and_no_end(at: int, drafter: str | None) -> None:
    """The first row was walked before the second one's code was interrupted."""
    tokenizer, calls = tiny_tokenizer(), [0]
    text = solo(FIRST)[:8]
    stop = tokenizer.decode(list(text[4:5])).strip()

    def interrupts(_tokens: mx.array, logits: mx.array) -> mx.array:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return logits

    def run(second: Sequence[Any]) -> tuple[list[Any], Any, str]:
        with BatchGenerator(MODEL, tokenizer, drafter=drafter, stop_tokens=()) as batch:
            first, _ = batch.insert(
                [list(FIRST), list(SECOND)],
                max_tokens=[8, 8],
                stop=[[stop], None],
                logits_processors=[[], list(second)],
            )
            tokens, reason, shown = [], None, ""
            while batch.has_work:
                try:
                    answers = batch.next()[1]
                except KeyboardInterrupt:
                    continue
                for answer in answers:
                    if answer.uid == first:
                        tokens.append(answer.token)
                        shown += answer.text
                        reason = answer.finish_reason or reason
        return tokens, reason, shown

    undisturbed = run([])
    assert run([interrupts]) == undisturbed
    assert calls[0] >= at


@pytest.mark.parametrize("drawn", [-1, -2, VOCABULARY, 9999, 2**31 - 1])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_an_id_that_does_not_exist_ends_its_row_alone(drawn: int, drafter: str | None) -> None:
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=6, stop_tokens=()) as batch:
        wrong, right = batch.insert(
            [list(FIRST), list(SECOND)], samplers=[lambda _: mx.array([drawn]), None]
        )
        told = finish(batch)
    assert told[right] == (list(solo(SECOND)[:6]), "length", None)
    assert told[wrong][:2] == ([], "error")
    assert "returned an id that the model does not have" in str(told[wrong][2])


@pytest.mark.parametrize("drawn", [3, None, [1], mx.array([1.0]), mx.array([1, 2])])
def test_a_sampler_that_returns_no_id_ends_its_row_alone(drawn: Any) -> None:
    with BatchGenerator(MODEL, max_tokens=4, stop_tokens=()) as batch:
        wrong, right = batch.insert([list(FIRST), list(SECOND)], samplers=[lambda _: drawn, None])
        told = finish(batch)
    assert told[right][0] == list(solo(SECOND)[:4])
    assert told[wrong][:2] == ([], "error")
    assert "return one id" in str(told[wrong][2])


def test_a_sampler_with_state_is_called_once_per_token_with_and_without_a_drafter() -> None:
    def run(drafter: str | None) -> tuple[list[list[Any]], int]:
        calls = [0]

        def counts(logprobs: mx.array) -> mx.array:
            calls[0] += 1
            return (mx.argmax(logprobs, axis=-1) + calls[0] % 2) % VOCABULARY

        texts = []
        for prompt in (FIRST, SECOND):
            with BatchGenerator(MODEL, drafter=drafter, max_tokens=5, stop_tokens=()) as batch:
                [uid] = batch.insert([list(prompt)], samplers=[counts])
                texts.append(finish(batch)[uid][0])
        return texts, calls[0]

    assert run(None) == run("ngram")
    assert run(None)[1] == 10


def test_caches_that_are_given_are_the_callers_to_go_on_with() -> None:
    cache, other = make_prompt_cache(MODEL), make_prompt_cache(MODEL)
    for each in (cache, other):
        MODEL(mx.array([[9, 8, 7]]), cache=each)
    texts = []
    for held, goes_on in ((cache, False), (other, True)):
        with BatchGenerator(MODEL, max_tokens=6, stop_tokens=()) as batch:
            [uid] = batch.insert([[1, 2]], caches=[held], all_tokens=[[9, 8, 7]])
            if goes_on:
                mx.eval(MODEL(mx.array([[3, 3]]), cache=held))
            texts.append(finish(batch)[uid][0])
    assert texts[0] == texts[1] == list(solo((9, 8, 7, 1, 2))[:6])


def test_tokens_that_empty_caches_do_not_hold_are_refused() -> None:
    with BatchGenerator(MODEL) as batch, pytest.raises(OptionError, match="the caches hold 0"):
        batch.insert([[1, 2]], caches=[make_prompt_cache(MODEL)], all_tokens=[[1, 2, 3]])


def test_what_was_delivered_counts_though_the_commit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, left = LiveRows.commit, [1]

    def fails(self: Any, *args: Any) -> None:
        if left and self.rows[0].steps > 2:
            left.pop()
            raise RuntimeError("commit")
        commit(self, *args)

    monkeypatch.setattr(LiveRows, "commit", fails)
    drafter = load_drafter("ngram", MODEL)
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=8, stop_tokens=()) as batch:
        with batch.stats() as stats:
            [uid] = batch.insert([list(FIRST)])
            told = finish(batch)
        assert told[uid] == (list(solo(FIRST)[:8]), "length", None)
        assert stats.emitted == stats.generation_tokens == 8
    assert left == []


def test_only_the_first_segment_gets_special_tokens() -> None:
    with BatchGenerator(MODEL, tiny_tokenizer(5, begin="w1"), max_tokens=1) as batch:
        [uid] = batch.insert_segments([["w3 w4", "w5"]])
        assert batch._engine._book.entries[uid].row.request.prompt == (1, 3, 4, 5)
        with pytest.raises(OptionError, match="give a list of segments"):
            batch.insert_segments(["w3"])


def test_numbers_of_numpy_are_numbers() -> None:
    three, five = cast("Any", np.int64(3)), cast("Any", np.int32(5))
    with BatchGenerator(MODEL, stop_tokens=()) as batch:
        uids = batch.insert([list(FIRST)] * 2, max_tokens=three, seeds=[five, None])
        told = finish(batch)
    assert [told[uid][0] for uid in uids] == [list(solo(FIRST)[:3])] * 2
    with BatchGenerator(MODEL) as batch:
        for wrong in ({1, 2}, {1: 2}):
            with pytest.raises(OptionError, match="give a list, one per prompt"):
                batch.insert([[1], [2]], seeds=wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="max_tokens is True"):
            batch.insert([[1]], max_tokens=[True])


def test_one_cache_and_one_reading_serve_one_row() -> None:
    cache = make_prompt_cache(MODEL)
    asked = Request(prompt=(1, 2), sampling=SamplingOptions(), cache=cache)
    group = VerifyGroup(target())
    with pytest.raises(OptionError, match="one prompt_cache was given to two requests"):
        group.admit([asked, asked])
    reading = group.read(Request(prompt=(1, 2), sampling=SamplingOptions(), max_tokens=3))
    while not reading.done:
        reading.step()
    with pytest.raises(ContractError, match="a reading twice"):
        group.join([reading, reading])
    [row] = group.join([reading])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert row.emitted == solo((1, 2))[:3]


def test_a_drafters_rare_exceptions_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rounds = load_drafter("ngram", MODEL), [0]
    propose = DraftLane.propose

    def rarely(self: Any, *args: Any, **options: Any) -> Any:
        rounds[0] += 1
        if rounds[0] % (2 * FORGIVEN_AFTER) == 0:
            self.fail(RuntimeError("now and then"))
        return propose(self, *args, **options)

    monkeypatch.setattr(DraftLane, "propose", rarely)
    errors = drafted = 0
    with BatchGenerator(MODEL, drafter=drafter, stop_tokens=()) as batch:
        while errors <= MAX_FAILURES:
            [uid] = batch.insert([list(FIRST)], max_tokens=400)
            del uid
            while batch.has_work:
                for answer in batch.next()[1]:
                    if answer.finish_reason is not None and answer.stats is not None:
                        errors += answer.stats.draft_errors
                        drafted, reason = answer.stats.drafted, answer.stats.reason
            assert rounds[0] < 10_000
    assert drafted > 0
    assert reason is None
