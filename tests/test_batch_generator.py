"""Requests come and go while others decode, and each gets what it would get alone.

Oracles: greedy rows against mlx-lm's own ``generate_step`` of that prompt alone, seeded rows
against a plain group of one row, calls and answers against mlx-lm's ``BatchGenerator``.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator as MlxLmGenerator
from mlx_lm.generate import StopSequences, generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler
from scripted import (
    RIGHT,
    WRONG,
    Fault,
    Script,
    ScriptedProvider,
    Text,
    expected,
    load_scripted,
    solo,
    text_of,
    tiny_tokenizer,
)
from tiny_models import HYBRID, VOCABULARY, WINDOWED, OwnCache, build_model, tiny_model

from specdec import BatchGenerator, LoadedDrafter, PrefixCache, SamplingOptions, load_drafter
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import AdapterError, ClosedError, OptionError, RoundOpenError
from specdec.plugins import LoadedDraft
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.batch import BatchResponse, PromptResponse

PROMPTS = (
    (1, 2, 3),
    (5, 9, 40, 3, 22, 17),
    (61,),
    (33, 8, 33, 8, 33, 8, 2),
    tuple(range(20, 43)),
)
DRAWS: tuple[tuple[float, int | None], ...] = ((0.0, None), (1.0, 7), (0.7, 8))
MOVES = ([[RIGHT] * 4], [[RIGHT, WRONG], [WRONG], [RIGHT] * 4], [[], [RIGHT, RIGHT, WRONG]])
MODEL = tiny_model("qwen3")
ROW = 2 * 2 * 2 * 16 * 4  # bytes a position: layers, keys and values, heads, head size, float32


# Driving a generator.


class Collected:
    """What a generator answered, by request."""

    def __init__(self) -> None:
        self.answers: dict[int, list[BatchResponse]] = {}
        self.prompts: list[list[PromptResponse]] = []

    def step(self, generator: BatchGenerator) -> None:
        told, answers = generator.next()
        self.prompts.append(told)
        for answer in answers:
            held = self.answers.setdefault(answer.uid, [])
            assert not held or held[-1].finish_reason is None, "an answer after the last one"
            held.append(answer)

    def tokens(self, uid: int) -> tuple[int, ...]:
        return tuple(a.token for a in self.answers.get(uid, []) if a.token is not None)

    def content(self, uid: int) -> tuple[int, ...]:
        return tuple(a.token for a in self.answers[uid] if a.content and a.token is not None)

    def last(self, uid: int) -> BatchResponse:
        answer = self.answers[uid][-1]
        assert answer.finish_reason is not None
        return answer


def finish(generator: BatchGenerator, collected: Collected | None = None) -> Collected:
    collected = collected or Collected()
    calls = 0
    while generator.has_work:
        collected.step(generator)
        calls += 1
        assert calls < 2000, "the generator does not come to an end"
    return collected


def adversary(**options: Any) -> ScriptedProvider:
    texts = [text_of(prompt, *draw) for prompt in PROMPTS for draw in DRAWS]
    moves = [MOVES[(at + at // 3) % len(MOVES)] for at in range(len(texts))]
    return ScriptedProvider(Script(texts, moves), **options)


def drafter_of(kind: str) -> tuple[LoadedDrafter | None, ScriptedProvider | None]:
    if kind == "ngram":
        return load_drafter("ngram", MODEL), None
    if kind == "adversary":
        provider = adversary()
        return load_scripted(provider), provider
    if kind == "whole prompt":  # as MTP heads read: the last token and hidden states too
        provider = adversary(mode=PrefillMode.FULL, context=ContextKind.POST_NORM)
        return load_scripted(provider), provider
    return None, None


def check_script(provider: ScriptedProvider | None) -> None:
    if provider is not None:
        assert provider.complaints == []
        assert provider.left_open == []


@frozen
class Asked:
    prompt: tuple[int, ...]
    draw: tuple[float, int | None]
    width: int | None
    budget: int

    def insert(self, generator: BatchGenerator) -> int:
        temp, seed = self.draw
        [uid] = generator.insert(
            [self.prompt],
            self.budget,
            sampling=[SamplingOptions(temp=temp)],
            seeds=[seed],
            num_draft_tokens=[self.width],
        )
        return uid

    @property
    def alone(self) -> tuple[int, ...]:
        return solo(self.prompt, *self.draw)[: self.budget]


ASKED = st.builds(
    Asked,
    st.sampled_from(PROMPTS),
    st.sampled_from(DRAWS),
    st.sampled_from([None, 0, 1, 4]),
    st.integers(1, 16),
)


# Company does not show.


@settings(max_examples=40)
@given(
    st.lists(st.one_of(ASKED, st.just("step"), st.integers(0, 9)), min_size=4, max_size=30),
    st.sampled_from(["ngram", "adversary", "whole prompt", "none"]),
    st.sampled_from([3, 8, 2048]),
    st.sampled_from([(32, 8), (2, 1), (3, 2)]),
)
def test_whoever_comes_and_goes_each_row_gets_what_it_would_get_alone(
    script: list[Any], kind: str, step_size: int, sizes: tuple[int, int]
) -> None:
    drafter, provider = drafter_of(kind)
    generator = BatchGenerator(
        MODEL,
        drafter=drafter,
        prefill_step_size=step_size,
        completion_batch_size=sizes[0],
        prefill_batch_size=sizes[1],
    )
    asked: dict[int, Asked] = {}
    removed: set[int] = set()
    collected = Collected()
    with generator.stats() as stats:
        for move in script:
            if isinstance(move, Asked):
                asked[move.insert(generator)] = move
            elif isinstance(move, int):
                if move in asked and not (
                    move in collected.answers and collected.answers[move][-1].finish_reason
                ):
                    removed.add(move)
                generator.remove([move])
            else:
                collected.step(generator)
        finish(generator, collected)
    for uid, want in asked.items():
        if uid in removed:
            got = collected.tokens(uid)
            assert got == want.alone[: len(got)]
            continue
        assert collected.tokens(uid) == want.alone
        last = collected.last(uid)
        assert last.finish_reason == "length"
        assert last.all_tokens == [*want.prompt, *want.alone]
    assert stats.emitted == sum(len(collected.tokens(uid)) for uid in asked)
    generator.close()
    check_script(provider)


@pytest.mark.parametrize("kind", ["ngram", "adversary", "whole prompt", "none"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("staggered", [False, True])
def test_identical_greedy_rows_all_write_the_same(kind: str, count: int, staggered: bool) -> None:
    drafter, provider = drafter_of(kind)
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=24) as generator:
        collected = Collected()
        uids: list[int] = []
        for _ in range(count):
            uids += generator.insert([PROMPTS[1]])
            if staggered:
                collected.step(generator)
        finish(generator, collected)
        for uid in uids:
            assert collected.tokens(uid) == solo(PROMPTS[1])[:24]
    check_script(provider)


def test_a_seeds_text_depends_on_neither_company_nor_width_nor_what_ran_before() -> None:
    drafter, provider = drafter_of("adversary")
    seeded = SamplingOptions(temp=1.0, seed=7)
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=16) as generator:
        texts = set()
        for width in (4, 1, 0):
            generator.insert(
                [PROMPTS[0], PROMPTS[1]],
                5,
                sampling=[SamplingOptions(temp=0.7), None],
                seeds=[8, None],
            )
            [uid] = generator.insert([PROMPTS[3]], sampling=[seeded], num_draft_tokens=[width])
            generator.insert([PROMPTS[4]])
            texts.add(finish(generator).tokens(uid))
    assert texts == {solo(PROMPTS[3], 1.0, 7)[:16]}
    assert texts != {solo(PROMPTS[3], 1.0, 8)[:16]}
    check_script(provider)


def test_penalties_stay_with_their_rows_whoever_has_drafts() -> None:
    chains = [
        make_logits_processors(repetition_penalty=1.5, logit_bias={3: -100.0}),
        [],
        make_logits_processors(repetition_penalty=0.7, logit_bias={51: -100.0}),
    ]
    drafter, _ = drafter_of("adversary")
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=16) as generator:
        uids = generator.insert(
            list(PROMPTS[:3]), logits_processors=chains, num_draft_tokens=[3, 0, 3]
        )
        got = finish(generator)
    for uid, prompt, chain in zip(uids, PROMPTS, chains, strict=False):
        steps = generate_step(mx.array(prompt), MODEL, max_tokens=16, logits_processors=chain)
        assert got.tokens(uid) == tuple(token for token, _ in steps)
        assert (got.tokens(uid) != solo(prompt)[:16]) is bool(chain)


def test_processors_of_the_generator_are_for_requests_that_were_given_no_list() -> None:
    ban = make_logits_processors(logit_bias={solo(PROMPTS[0])[1]: -100.0})

    def run(generator: Any) -> list[tuple[int, ...]]:
        generator.insert([list(PROMPTS[0])])
        generator.insert([list(PROMPTS[0])], logits_processors=[None])
        got: dict[int, tuple[int, ...]] = {}
        for _ in range(12):
            for answer in generator.next()[1]:
                got[answer.uid] = (*got.get(answer.uid, ()), answer.token)
        generator.close()
        return [got[uid] for uid in sorted(got)]

    want = run(MlxLmGenerator(MODEL, logits_processors=ban, max_tokens=6))
    assert run(BatchGenerator(MODEL, logits_processors=ban, max_tokens=6)) == want
    assert want[0] != want[1]


def test_rows_that_reject_at_different_places_keep_their_own_lengths() -> None:
    prompts = PROMPTS[:3]
    moves = [[[RIGHT, WRONG]], [[RIGHT, RIGHT, WRONG]], [[WRONG], [RIGHT] * 4, [RIGHT, WRONG]]]
    provider = ScriptedProvider(Script([text_of(prompt) for prompt in prompts], moves))
    with BatchGenerator(MODEL, drafter=load_scripted(provider), max_tokens=24) as generator:
        uids = generator.insert(prompts, num_draft_tokens=[2, 3, 4])
        got = finish(generator)
        for uid, prompt in zip(uids, prompts, strict=True):
            assert got.tokens(uid) == solo(prompt)[:24]
            caches = got.last(uid).prompt_cache
            assert caches is not None
            check_covers(caches, [*prompt, *solo(prompt)[:24]])
            stats = got.last(uid).stats
            assert stats is not None
            assert 0 < stats.accepted < stats.drafted
    check_script(provider)


class Pattern:
    """Ids in turn: a multiple of three, then 7."""

    def __init__(self) -> None:
        self.step = 0

    @staticmethod
    def allowed(step: int) -> list[bool]:
        return [token == 7 if step % 2 else token % 3 == 0 for token in range(VOCABULARY)]

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array, int]:
        fits = 0
        while fits < len(draft) and self.allowed(self.step + fits)[draft[fits]]:
            fits += 1
        return mx.array([self.allowed(self.step + at) for at in range(fits + 1)]), fits

    def advance(self, token: int, /) -> bool:
        assert self.allowed(self.step)[token]
        self.step += 1
        return False

    def propose(self, max_tokens: int, /) -> list[int]:
        return [7][:max_tokens] if self.step % 2 else []


@pytest.mark.parametrize("kind", ["ngram", "none"])
def test_a_grammar_is_its_rows_own_matter(kind: str) -> None:
    def masked(tokens: mx.array, logits: mx.array) -> mx.array:
        step = tokens.size - len(PROMPTS[0])
        return mx.where(mx.array(Pattern.allowed(step)), logits, -mx.inf)

    with (
        BatchGenerator(MODEL, drafter=drafter_of(kind)[0], max_tokens=15) as generator,
        generator.stats() as stats,
    ):
        uids = generator.insert([PROMPTS[0]] * 3, grammars=[None, Pattern, None])
        got = finish(generator)
    steps = generate_step(mx.array(PROMPTS[0]), MODEL, max_tokens=15, logits_processors=[masked])
    assert got.tokens(uids[1]) == tuple(token for token, _ in steps)
    assert got.tokens(uids[0]) == got.tokens(uids[2]) == solo(PROMPTS[0])[:15]
    last = got.last(uids[1]).stats
    assert last is not None
    assert stats.forced == last.forced > 0


def test_rejection_sampling_is_chosen_per_request_and_company_does_not_show() -> None:
    prompt, hot = PROMPTS[3], SamplingOptions(temp=1.0, seed=7)

    def run(company: bool) -> tuple[int, ...]:
        with BatchGenerator(MODEL, drafter=load_drafter("ngram", MODEL), max_tokens=30) as each:
            [uid] = each.insert([prompt], sampling=[hot], acceptance=["rejection"])
            [same] = each.insert([prompt], sampling=[hot])
            if company:
                each.insert([PROMPTS[1]] * 3)
            got = finish(each)
        assert got.tokens(same) == solo(prompt, 1.0, 7)[:30]
        return got.tokens(uid)

    assert run(company=False) == run(company=True) != solo(prompt, 1.0, 7)[:30]


def test_rows_whose_caches_cannot_roll_back_share_no_group_with_others() -> None:
    own = [OwnCache() for _ in MODEL.layers]
    with BatchGenerator(MODEL, drafter=load_drafter("ngram", MODEL), max_tokens=10) as generator:
        uids = generator.insert([PROMPTS[3], PROMPTS[3]], caches=[None, own])
        got = finish(generator)
    assert [got.tokens(uid) for uid in uids] == [solo(PROMPTS[3])[:10]] * 2
    reasons = [answer.stats.reason for uid in uids if (answer := got.last(uid)).stats]
    assert reasons == [None, "no row form for cache type OwnCache"]
    assert own[0].offset == 0


def scripted_for(
    model: Any, prompts: Sequence[tuple[int, ...]], count: int, **options: Any
) -> tuple[LoadedDrafter, list[Text]]:
    """A drafter that is right and wrong by turns about a model, and what mlx-lm writes."""
    texts = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=count, **options)
        texts.append(Text(prompt, tuple(token for token, _ in steps)))
    moves = [MOVES[place % len(MOVES)] for place in range(len(texts))]
    loaded = LoadedDraft(provider=ScriptedProvider(Script(texts, moves)), num_draft_tokens=4)
    return LoadedDrafter("scripted", loaded, MlxLmTarget(model)), texts


def test_a_caller_s_window_shares_a_group_with_others_and_drafts() -> None:
    rotating = [RotatingKVCache(max_size=64) for _ in MODEL.layers]
    drafter, texts = scripted_for(MODEL, PROMPTS[:3], 30)
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=30) as generator:
        uids = generator.insert(PROMPTS[:3], caches=[None, rotating, None])
        got = Collected()
        got.step(generator)
        [group] = generator._engine._book.groups
        assert len(group.rows) == 3
        finish(generator, got)
    for uid, text in zip(uids, texts, strict=True):
        last = got.last(uid)
        assert got.tokens(uid) == text.output
        assert last.stats is not None
        assert last.stats.reason is None
        assert 0 < last.stats.accepted <= last.stats.drafted
    assert rotating[0].offset == 0  # borrowed, not moved
    left = got.last(uids[1]).prompt_cache
    assert left is not None
    assert {type(cache) for cache in left} == {RotatingKVCache}
    assert {cache.offset for cache in left} == {len(PROMPTS[1]) + 30}


@pytest.mark.parametrize("architecture", [HYBRID, WINDOWED])
def test_recurrent_and_windowed_models_are_served_and_draft(architecture: str) -> None:
    model = tiny_model(architecture)
    drafter, texts = scripted_for(model, PROMPTS, 24)
    with BatchGenerator(model, drafter=drafter, max_tokens=24) as generator:
        uids = generator.insert(PROMPTS[:3])
        got = Collected()
        for _ in range(3):
            got.step(generator)
        uids += generator.insert(PROMPTS[3:])
        finish(generator, got)
    for uid, text in zip(uids, texts, strict=True):
        last = got.last(uid)
        assert got.tokens(uid) == text.output
        assert last.stats is not None
        assert last.stats.reason is None
        assert last.stats.accepted > 0
        whole = list(text.whole)
        assert last.all_tokens == whole
        assert last.prompt_cache is not None
        check_covers(last.prompt_cache, whole, model)


def test_a_model_without_row_forms_is_served_and_says_why_it_does_not_draft() -> None:
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    with BatchGenerator(model, drafter=load_drafter("ngram", model), max_tokens=8) as generator:
        uids = generator.insert(list(PROMPTS[:3]))
        got = finish(generator)
    for uid, prompt in zip(uids, PROMPTS, strict=False):
        assert got.tokens(uid) == solo(prompt)[:8]
        last = got.last(uid)
        assert last.stats is not None
        assert last.stats.reason == "no row form for cache type OwnCache"
        whole = [*prompt, *got.tokens(uid)]
        assert last.all_tokens == whole
        assert last.prompt_cache is not None
        check_covers(last.prompt_cache, whole, model)


# As mlx-lm.


def script_of_calls(generator: Any) -> dict[int, list[tuple[int, int, str | None]]]:
    answers: dict[int, list[tuple[int, int, str | None]]] = {}

    def collect(calls: int) -> None:
        for _ in range(calls):
            for each in generator.next()[1]:
                answers.setdefault(each.uid, []).append((each.uid, each.token, each.finish_reason))

    generator.insert([list(PROMPTS[0]), list(PROMPTS[1])], [9, 3])
    collect(3)
    generator.insert(
        [list(PROMPTS[2]), list(PROMPTS[4])],
        samplers=[None, greedy_sampler],
        stop_sequences=[StopSequences([solo(PROMPTS[2])[3:5]]), StopSequences([[63]])],
    )
    generator.insert_segments([[list(PROMPTS[3][:4]), list(PROMPTS[3][4:])]], [20])
    collect(2)
    generator.insert([[7, 7, 7]], [50])
    collect(70)
    assert not any(generator.next())
    generator.close()
    return answers


@pytest.mark.parametrize("kind", ["ngram", "none"])
def test_the_same_calls_give_the_tokens_and_reasons_of_mlx_lms_generator(kind: str) -> None:
    common: dict[str, Any] = {
        "max_tokens": 17,
        "stop_tokens": [[51], [24, 24]],
        "prefill_step_size": 8,
    }
    want = script_of_calls(MlxLmGenerator(MODEL, **common))
    got = script_of_calls(BatchGenerator(MODEL, drafter=drafter_of(kind)[0], **common))
    assert got == want
    assert {reasons[-1][2] for reasons in want.values()} == {"stop", "length"}


def test_an_end_token_is_answered_last_and_is_no_content() -> None:
    text = solo(PROMPTS[0])
    end = next(token for token in text[3:] if token not in text[:3])
    want = expected(text, {end}, 30)
    tokenizer = tiny_tokenizer(end)
    with BatchGenerator(MODEL, tokenizer, max_tokens=30) as generator:
        [uid] = generator.insert(["w1 w2 w3"])
        got = finish(generator)
    assert got.content(uid) == want.tokens
    last = got.last(uid)
    assert (last.token, last.finish_reason, last.content) == (end, "stop", False)
    assert "".join(a.text for a in got.answers[uid]) == tokenizer.decode(list(want.tokens))
    assert last.all_tokens == [*PROMPTS[0], *want.tokens, end]
    assert last.prompt_cache is not None
    check_covers(last.prompt_cache, last.all_tokens)


def test_stop_strings_floors_and_log_probabilities_are_each_requests_own() -> None:
    text = solo(PROMPTS[0])
    stop = f"w{text[4]}"
    tokenizer = tiny_tokenizer(text[2])
    with BatchGenerator(MODEL, tokenizer, max_tokens=12) as generator:
        uids = generator.insert(
            [PROMPTS[0]] * 3,
            stop=[stop, None, None],
            min_tokens=[4, 12, None],
            logprobs=[None, 2, None],
        )
        got = finish(generator)
    first = next(at for at in range(3, 12) if f"w{text[at]}" == stop)
    assert got.last(uids[0]).finish_reason == "stop"
    assert got.content(uids[1]) == tuple(got.tokens(uids[1]))
    assert len(got.content(uids[1])) == 12
    assert text[2] not in got.content(uids[1])
    assert got.content(uids[2]) == text[:2]
    assert first >= 3
    assert stop not in "".join(a.text for a in got.answers[uids[0]])
    for answer in got.answers[uids[1]]:
        assert answer.token_logprobs is not None
        assert len(answer.token_logprobs.top) == 2
        assert answer.token_logprobs.top[0][0] == answer.token
    steps = generate_step(mx.array(PROMPTS[0]), MODEL, max_tokens=2)
    for answer, (_, logprobs) in zip(got.answers[uids[2]], steps, strict=False):
        assert answer.logprobs is not None
        assert mx.allclose(answer.logprobs, logprobs, atol=1e-4).item()


def test_mlx_lms_sampler_is_called_once_a_token_in_order() -> None:
    calls: list[tuple[int, ...]] = []

    def second_best(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.shape)
        return mx.argsort(logprobs, axis=-1)[..., -2]

    with BatchGenerator(MODEL, drafter=load_drafter("ngram", MODEL), max_tokens=9) as generator:
        uids = generator.insert([PROMPTS[3]] * 2, samplers=[second_best, None])
        got = finish(generator)
    steps = generate_step(mx.array(PROMPTS[3]), MODEL, max_tokens=9, sampler=second_best)
    want = tuple(token for token, _ in steps)
    assert got.tokens(uids[0]) == want
    assert got.tokens(uids[1]) == solo(PROMPTS[3])[:9]
    assert set(calls) == {(1, VOCABULARY)}


# Prompts between rounds.


def test_a_long_prompt_does_not_stop_rows_that_decode() -> None:
    long = tuple(range(1, 42))
    with BatchGenerator(MODEL, max_tokens=30, prefill_step_size=8) as generator:
        [first] = generator.insert([PROMPTS[0]])
        collected = Collected()
        collected.step(generator)
        [second] = generator.insert([long])
        for chunk in range(1, 6):
            collected.step(generator)
            assert len(collected.tokens(first)) == chunk  # one round between any two chunks
        assert second not in collected.answers
        read = [told.progress for each in collected.prompts for told in each if told.uid == second]
        assert read == [(8, 41), (16, 41), (24, 41), (32, 41), (40, 41), (41, 41)]
        finish(generator, collected)
    assert collected.tokens(second) == solo(long)[:30]


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_call_never_reads_more_prompt_tokens_than_one_step_and_no_prompt_starves(
    lengths: list[int], step_size: int, at_once: int, whole: bool
) -> None:
    mode = PrefillMode.FULL if whole else PrefillMode.TAIL_SPLIT
    widths: list[int] = []
    forward = MlxLmTarget.forward

    def counted(self: MlxLmTarget, tokens: mx.array, *rest: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(self, tokens, *rest)

    prompts = [[(7 * at + n) % VOCABULARY for at in range(n)] for n in lengths]
    with (
        mock.patch.object(MlxLmTarget, "forward", counted),
        BatchGenerator(
            MODEL,
            drafter=load_scripted(ScriptedProvider(mode=mode)),
            max_tokens=1,
            prefill_step_size=step_size,
            prefill_batch_size=at_once,
        ) as generator,
    ):
        generator.insert(prompts)
        calls = read = 0
        while generator.has_work:
            widths.clear()
            with generator.stats() as stats:
                generator.next()
            windows = 0 if whole else stats.generation_steps  # of one token: the first is the last
            assert sum(widths) - windows == stats.prompt_tokens <= step_size
            read += stats.prompt_tokens
            calls += 1
            # What is left of a budget is too small for a chunk, or nobody else was there to read.
            assert calls <= 3 + 2 * (sum(lengths) // step_size + len(lengths))
        assert read == sum(lengths) - (0 if whole else len(lengths))


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    with BatchGenerator(MODEL, max_tokens=1, prefill_step_size=8) as generator:
        long, short = generator.insert([tuple(range(1, 50)), PROMPTS[0]])
        order = [answer.uid for _ in range(30) for answer in generator.next()[1]]
    assert order == [short, long]


def test_the_ends_of_segments_are_told_as_in_mlx_lm() -> None:
    segments = [[list(PROMPTS[4][:8]), list(PROMPTS[4][8:16]), list(PROMPTS[4][16:])]]

    def ends(generator: Any) -> list[tuple[Any, bool, bool]]:
        generator.insert_segments(segments, [1])
        told = [each for _ in range(8) for each in generator.next()[0]]
        generator.close()
        return [(t.progress, t.end_of_segment, t.end_of_prompt) for t in told]

    assert ends(BatchGenerator(MODEL, prefill_step_size=8)) == ends(
        MlxLmGenerator(MODEL, prefill_step_size=8)
    )


# Drafts.


def test_a_row_near_its_budget_does_not_narrow_the_others() -> None:
    texts = [text_of(PROMPTS[0]), text_of(PROMPTS[1])]
    provider = ScriptedProvider(Script.always(texts, [RIGHT] * 4))
    with BatchGenerator(MODEL, drafter=load_scripted(provider)) as generator:
        [narrow, wide] = generator.insert([PROMPTS[0], PROMPTS[1]], [1, 11])
        got = finish(generator)
    one, many = got.last(narrow).stats, got.last(wide).stats
    assert one is not None
    assert many is not None
    assert one.drafted == 0
    assert many.drafted_per_position == [2, 2, 2, 2]
    assert many.rounds == 3  # 5 + 5 + 1 tokens
    assert got.tokens(wide) == solo(PROMPTS[1])[:11]


def test_a_row_that_stands_down_does_not_narrow_the_others() -> None:
    def plan(tokens: tuple[int, ...], depth: int, step: int) -> Any:
        return [VOCABULARY + 5] if tokens[:3] == PROMPTS[0] else right(tokens, depth, step)

    right = Script.always([text_of(PROMPTS[1])], [RIGHT] * 4)
    provider = ScriptedProvider(plan)
    with BatchGenerator(MODEL, drafter=load_scripted(provider), max_tokens=30) as generator:
        bad, good = generator.insert([PROMPTS[0], PROMPTS[1]])
        got = finish(generator)
    bad_stats, good_stats = got.last(bad).stats, got.last(good).stats
    assert bad_stats is not None
    assert good_stats is not None
    assert "stood down" in str(bad_stats.reason)
    assert good_stats.rounds == 6
    assert good_stats.accepted == 24
    for uid, prompt in ((bad, PROMPTS[0]), (good, PROMPTS[1])):
        assert got.tokens(uid) == solo(prompt)[:30]


def test_without_drafts_the_drafter_is_never_asked() -> None:
    provider = adversary()
    with BatchGenerator(
        MODEL, drafter=load_scripted(provider), num_draft_tokens=0, max_tokens=12
    ) as generator:
        uids = generator.insert(list(PROMPTS))
        got = finish(generator)
        assert not provider.calls
        for uid, prompt in zip(uids, PROMPTS, strict=True):
            assert got.tokens(uid) == solo(prompt)[:12]
            stats = got.last(uid).stats
            assert stats is not None
            assert stats.reason == "num_draft_tokens is 0"
        [uid] = generator.insert([PROMPTS[1]], num_draft_tokens=[4])
        finish(generator)
        assert provider.calls["draft"] > 0  # it could have been asked


def test_the_drafter_is_asked_and_the_statistics_say_so() -> None:
    provider = adversary()
    with (
        BatchGenerator(MODEL, drafter=load_scripted(provider), max_tokens=20) as generator,
        generator.stats() as stats,
    ):
        uids = generator.insert(list(PROMPTS))
        got = finish(generator)
    rows = [answer.stats for uid in uids if (answer := got.last(uid)).stats is not None]
    assert provider.calls["draft"] > 0
    assert all(row.drafter == "scripted" and row.reason is None for row in rows)
    assert stats.accepted == sum(row.accepted for row in rows) > 0
    assert stats.drafted == sum(row.drafted for row in rows) > stats.accepted
    assert stats.rounds == sum(row.rounds for row in rows)
    assert stats.generation_tokens == stats.emitted == 20 * len(PROMPTS)
    assert stats.prompt_tokens == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert 0 < stats.generation_steps <= stats.rounds
    assert stats.wall_time >= stats.prompt_time + stats.decode_time > 0
    assert stats.generation_tps > 0
    with generator.stats() as nothing:
        pass
    assert nothing.emitted == nothing.prompt_tokens == nothing.rounds == 0


def test_a_drafter_that_raises_costs_drafts_and_no_tokens() -> None:
    provider = ScriptedProvider(adversary().plan, faults={"draft": [2], "prefill": [3]})
    with BatchGenerator(MODEL, drafter=load_scripted(provider), max_tokens=20) as generator:
        uids = generator.insert(list(PROMPTS))
        got = finish(generator)
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        assert got.tokens(uid) == solo(prompt)[:20]
    assert provider.left_open == []


# Caches.


def check_covers(caches: list[Any], tokens: Sequence[int], model: Any = MODEL) -> None:
    """The caches hold exactly these tokens: what comes next is what mlx-lm says comes next."""
    offsets = {c.offset for c in caches if isinstance(c, KVCache)}
    assert offsets == {len(tokens)}
    own = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=own)
    probe = mx.array([[9]])
    assert mx.allclose(model(probe, cache=caches), model(probe, cache=own), atol=1e-3).item()


@pytest.mark.parametrize("kind", ["ngram", "none"])
def test_a_second_turn_from_the_caches_is_one_long_prompt(kind: str) -> None:
    turn = (11, 12, 13)
    with BatchGenerator(MODEL, drafter=drafter_of(kind)[0], max_tokens=12) as generator:
        uids = generator.insert([PROMPTS[0], PROMPTS[3]])
        got = finish(generator)
        lasts = [got.last(uid) for uid in uids]
        caches = [last.prompt_cache for last in lasts]
        histories = [last.all_tokens or [] for last in lasts]
        again = generator.insert([turn, turn], caches=caches, all_tokens=histories)
        second = finish(generator)
        for uid, history, held in zip(again, histories, caches, strict=True):
            assert second.tokens(uid) == solo((*history, *turn))[:12]
            assert second.last(uid).all_tokens == [*history, *turn, *second.tokens(uid)]
            assert held is not None
            assert held[0].offset == len(history)  # borrowed, not moved
            cache = second.last(uid).prompt_cache
            assert cache is not None
            check_covers(cache, second.last(uid).all_tokens or [])
            assert second.last(uid).prompt_cache is cache


def test_processors_see_the_history_that_the_caches_hold() -> None:
    seen: list[list[int]] = []

    def record(tokens: mx.array, logits: mx.array) -> mx.array:
        held: Any = tokens.tolist()
        seen.append(held)
        return logits

    caches = make_prompt_cache(MODEL)
    MODEL(mx.array([list(PROMPTS[1])]), cache=caches)
    with BatchGenerator(MODEL, max_tokens=3) as generator:
        generator.insert(
            [[4, 5]], caches=[caches], all_tokens=[list(PROMPTS[1])], logits_processors=[[record]]
        )
        finish(generator)
    text = [*PROMPTS[1], 4, 5, *solo((*PROMPTS[1], 4, 5))]
    assert seen == [text[: len(PROMPTS[1]) + 2 + at] for at in range(3)]


def test_caches_can_be_taken_and_requests_removed_at_every_stage() -> None:
    prompt = PROMPTS[4]
    with BatchGenerator(
        MODEL, drafter=load_drafter("ngram", MODEL), prefill_step_size=8, prefill_batch_size=1
    ) as generator:
        decoding, reading, waiting = generator.insert([PROMPTS[0], prompt, prompt])
        collected = Collected()
        for _ in range(3):
            collected.step(generator)
        assert 3 * 256 * ROW >= generator.prompt_cache_nbytes >= 2 * 256 * ROW
        held = generator.extract_cache([waiting, decoding, 99, reading])
        assert set(held) == {waiting, decoding, reading}
        assert held[waiting][1] == []
        assert held[waiting][0][0].offset == 0
        assert held[reading][1] == list(prompt[:16])
        check_covers(*held[reading])
        assert held[decoding][1] == [*PROMPTS[0], *collected.tokens(decoding)]
        assert collected.tokens(decoding)
        check_covers(*held[decoding])
        collected.step(generator)  # taking changed nothing
        again = generator.remove([reading, decoding, waiting, 99], return_prompt_caches=True)
        assert set(again) == {waiting, decoding, reading}
        check_covers(*again[decoding])
        assert not generator.has_work
        assert generator.remove([reading]) == {}
        [uid] = generator.insert([PROMPTS[1]], 9)
        assert finish(generator).tokens(uid) == solo(PROMPTS[1])[:9]
    assert collected.tokens(decoding) == solo(PROMPTS[0])[: len(collected.tokens(decoding))]


def test_caches_that_are_taken_share_nothing_with_those_that_were_given() -> None:
    caches = filled()
    with BatchGenerator(MODEL) as generator:
        [uid] = generator.insert([PROMPTS[0]], caches=[caches], all_tokens=[[1, 2, 3]])
        taken, tokens = generator.extract_cache([uid])[uid]
    assert tokens == [1, 2, 3]
    check_covers(taken, tokens)
    assert [cache.offset for cache in taken] == [4, 4]
    assert [cache.offset for cache in caches] == [3, 3]


def test_no_caches_are_left_where_nobody_wants_them() -> None:
    with BatchGenerator(MODEL, max_tokens=3, return_prompt_caches=False) as generator:
        [uid] = generator.insert([PROMPTS[0]])
        last = finish(generator).last(uid)
    assert last.prompt_cache is None
    assert last.all_tokens == [*PROMPTS[0], *solo(PROMPTS[0])[:3]]


def test_a_kept_answer_keeps_no_group() -> None:
    with BatchGenerator(MODEL, max_tokens=3) as generator:
        [uid] = generator.insert([PROMPTS[0]])
        groups = []
        while generator.has_work:
            groups += [weakref.ref(group) for group in generator._engine._book.groups]
            for answer in generator.next()[1]:
                last = answer
    del generator
    gc.collect()
    assert groups
    assert all(group() is None for group in groups)
    assert last.uid == uid
    assert last.prompt_cache is not None
    check_covers(last.prompt_cache, [*PROMPTS[0], *solo(PROMPTS[0])[:3]])


def test_a_prefix_cache_serves_later_requests_from_the_ends_of_segments() -> None:
    cache = PrefixCache(10**8)
    system, texts = list(PROMPTS[4]), [[1, 2, 3], [4, 5, 6]]
    with BatchGenerator(MODEL, prefix_cache=cache, max_tokens=6) as generator:
        got = []
        for text in texts:
            [uid] = generator.insert_segments([[system, text]])
            got.append(finish(generator).last(uid))
    for text, last in zip(texts, got, strict=True):
        whole = (*system, *text)
        assert last.all_tokens == [*whole, *solo(whole)[:6]]
    assert [last.stats.cached_tokens for last in got if last.stats] == [0, len(system)]


# Errors.


def refused(call: Callable[[], Any], words: str, error: type[Exception] = OptionError) -> None:
    with pytest.raises(error, match=words):
        call()


def test_what_does_not_fit_is_named_and_nothing_is_taken() -> None:
    good = list(PROMPTS[0])
    bad: list[tuple[str, dict[str, Any]]] = [
        ("prompt 1: the prompt is empty", {"prompts": [good, []]}),
        ("prompt 1: the prompt has 64", {"prompts": [good, [64]]}),
        ("prompt 1: the prompt has 1.5", {"prompts": [good, [1.5]]}),
        ("prompt 0: the prompt is text", {"prompts": ["hello"]}),
        ("prompts is 'hello'", {"prompts": "hello"}),
        ("prompt 1: max_tokens is 0", {"max_tokens": [3, 0]}),
        ("max_tokens has 3 entries for 2", {"max_tokens": [3, 0, 1]}),
        ("seeds is 4; give a list", {"seeds": 4}),
        ("prompt 1: num_draft_tokens is -1", {"num_draft_tokens": [1, -1]}),
        (
            "prompt 0: sampling and a sampler",
            {"sampling": [SamplingOptions(), None], "samplers": [mx.argmax] * 2},
        ),
        ("prompt 1: sampler is 3", {"samplers": [None, 3]}),
        ("prompt 1: acceptance is 'maybe'", {"acceptance": [None, "maybe"]}),
        ("prompt 1: stop strings were given without", {"stop": [None, "end"]}),
        ("prompt 0: stop_sequences has an empty", {"stop_sequences": [[[]], None]}),
        ("prompt 1: min_tokens is 400", {"min_tokens": [None, 400]}),
        ("prompt 1: all_tokens has 2 tokens, but there", {"all_tokens": [[], [1, 2]]}),
        ("prompt 1: prompt_cache has 1 entries", {"caches": [None, [KVCache()]]}),
        (
            "prompt 0: all_tokens has 1 tokens, but the caches hold 3",
            {"caches": [filled(), None], "all_tokens": [[1], []]},
        ),
        ("prompt 1: snapshot_at was given without", {"snapshot_at": [None, [2]]}),
        ("prompt 1: seed is 'x'", {"seeds": [None, "x"]}),
        ("prompt 0: logprobs is -1", {"logprobs": [-1, None]}),
    ]
    with BatchGenerator(MODEL, max_tokens=5) as generator:
        for words, options in bad:
            asked = {"prompts": [good, good], **options}
            refused(lambda asked=asked: generator.insert(**asked), words)  # type: ignore[misc]
            assert not generator.has_work
        refused(lambda: generator.insert([good], oops=[1]), "oops", TypeError)  # type: ignore[call-arg]
        assert generator.insert([good]) == [0]  # no number was used up
        assert finish(generator).tokens(0) == solo(PROMPTS[0])[:5]


def filled() -> list[Any]:
    caches = make_prompt_cache(MODEL)
    MODEL(mx.array([[1, 2, 3]]), cache=caches)
    return list(caches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_kv_size": 4}, "max_kv_size is 4; give 5 or more"),
        ({"kv_bits": 7}, "kv_bits is 7; give 2, 3, 4, 5, 6 or 8"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48; give 32, 64 or 128"),
        ({"kv_bits": 8, "quantized_kv_start": -1}, "quantized_kv_start is -1; give 0 or more"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"completion_batch_size": -1}, "completion_batch_size is -1"),
        ({"prefill_batch_size": 1.5}, "prefill_batch_size is 1.5"),
        ({"memory_limit": 0}, "memory_limit is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"sampler": 3}, "sampler is 3"),
        ({"sampler": make_sampler(1.0), "sampling": SamplingOptions()}, "one or the other"),
        ({"prefix_cache": 3}, "prefix_cache is 3"),
        ({"stop_tokens": "end"}, "stop_sequences is 'end'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    refused(lambda: BatchGenerator(MODEL, **options), words)


def test_a_drafter_of_another_model_or_for_no_adapter_is_refused() -> None:
    other = load_drafter("ngram", build_model("qwen3", seed=1))
    refused(lambda: BatchGenerator(MODEL, drafter=other), "another model")
    provider = adversary()
    provider.supports_adapters = False
    loaded = load_scripted(provider)
    with BatchGenerator(MODEL, drafter=loaded) as generator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(loaded.target), "adapters", ("LoRALinear",))
        refused(lambda: generator.insert([[1]]), "LoRALinear", AdapterError)
        generator.insert([[1]], num_draft_tokens=[0])


def test_a_request_whose_own_code_raises_ends_alone() -> None:
    def late(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.shape[0] == 6:
            raise Fault("its own")
        return logits

    with BatchGenerator(MODEL, drafter=load_drafter("ngram", MODEL), max_tokens=9) as generator:
        uids = generator.insert([PROMPTS[0]] * 3, logits_processors=[None, [late], None])
        got = finish(generator)
    last = got.last(uids[1])
    assert isinstance(last.error, Fault)
    assert (last.token, last.finish_reason, last.prompt_cache) == (None, "error", None)
    assert got.tokens(uids[1]) == solo(PROMPTS[0])[:3]
    for uid in (uids[0], uids[2]):
        assert got.tokens(uid) == solo(PROMPTS[0])[:9]


def test_a_requests_own_code_cannot_pull_the_generator_from_under_a_round() -> None:
    seen: list[type[Exception]] = []

    def meddle(_tokens: mx.array, logits: mx.array) -> mx.array:
        for call in (generator.close, generator.next, lambda: generator.remove([0])):
            try:
                call()
            except RoundOpenError as error:
                seen.append(type(error))
        return logits

    with BatchGenerator(MODEL, max_tokens=2) as generator:
        [uid] = generator.insert([PROMPTS[0]], logits_processors=[[meddle]])
        assert finish(generator).tokens(uid) == solo(PROMPTS[0])[:2]
    assert seen == [RoundOpenError] * 6


def test_a_closed_generator_has_ended_everything_and_says_that_it_is_closed() -> None:
    provider = adversary()
    loaded = load_scripted(provider)
    generator = BatchGenerator(MODEL, drafter=loaded, prefill_batch_size=1, prefill_step_size=4)
    generator.insert([PROMPTS[0], PROMPTS[4], PROMPTS[1]])
    generator.next()
    generator.next()
    generator.close()
    generator.close()
    assert provider.left_open == []
    assert provider.closed == 0  # the caller's own
    assert not generator.has_work
    for call in (
        generator.next,
        lambda: generator.insert([[1]]),
        lambda: generator.remove([0]),
        lambda: generator.extract_cache([0]),
    ):
        refused(call, "closed", ClosedError)
    assert generator.next_generated() == []


def test_a_drafter_that_the_generator_loaded_is_closed_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(LoadedDrafter, "close", lambda self: closed.append(self.kind))
    generator = BatchGenerator(MODEL, drafter="ngram", max_tokens=4)
    [uid] = generator.insert([PROMPTS[3]])
    got = [answer.token for _ in range(9) for answer in generator.next_generated()]
    assert tuple(got) == solo(PROMPTS[3])[:4]
    assert uid == 0
    assert closed == []
    generator.close()
    generator.close()
    assert closed == ["ngram"]
