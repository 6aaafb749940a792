"""Adaptive requests, end to end: the tokens are plain decoding's, and statistics say what was done.

Times are what a test says: a machine where drafts never pay, one where they always do, and the
real one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from scripted import RIGHT, WRONG, Script, ScriptedProvider, load_scripted, text_of, tiny_tokenizer
from test_adaptive_in_executor import Following
from tiny_models import OwnCache, build_model, tiny_model

from specdec import BatchGenerator, LoadedDrafter, SamplingOptions, load_drafter, stream_generate
from specdec.cost import Kept, Point
from specdec.cost import costs as costs_module
from specdec.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import GenerationStats

MODEL = tiny_model("qwen3")
PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (33, 8, 33, 8))
TEXTS = [text_of(prompt) for prompt in PROMPTS]
SEEDED = [text_of(prompt, 1.0, 7) for prompt in PROMPTS]
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16)


def scripted(move: Sequence[Any] = (RIGHT,) * 3, texts: Sequence[Any] = TEXTS) -> LoadedDrafter:
    """A drafter that was loaded without a number, and can follow plain windows."""
    loaded = load_scripted(ScriptedProvider(Script.always(texts, move), rows=Following))
    loaded.adaptive = True
    return loaded


def where(loaded: LoadedDrafter, *, plain: float, window: float) -> LoadedDrafter:
    """The drafter on a machine that was measured to take so many milliseconds."""
    for batch in (1, 2, 4):
        windows = {Point(batch, width, 512): window for width in WIDTHS}
        loaded.costs._add(Kept(windows, {batch: plain}))
    return loaded


def losing(move: Sequence[Any] = (RIGHT,) * 3, texts: Sequence[Any] = TEXTS) -> LoadedDrafter:
    return where(scripted(move, texts), plain=1e-6, window=1e6)


def winning(move: Sequence[Any] = (RIGHT,) * 3, texts: Sequence[Any] = TEXTS) -> LoadedDrafter:
    loaded = where(scripted(move, texts), plain=1e6, window=1e-6)
    for rows in (1, 2, 4):
        for _ in range(4):  # or it would look what a plain round takes
            loaded.costs.times.observe(rows, 0, 1, 0, 1e6)
    return loaded


def stream(
    drafter: Any, prompt: Sequence[int], count: int = 30, **options: Any
) -> tuple[tuple[int, ...], GenerationStats]:
    tokenizer = tiny_tokenizer()
    said = list(
        stream_generate(MODEL, tokenizer, prompt, max_tokens=count, drafter=drafter, **options)
    )
    stats = said[-1].stats
    assert stats is not None
    return tuple(each.token for each in said), stats


def batch(
    drafter: Any, *, numbers: Sequence[int | None] = (None, None, None), **options: Any
) -> list[tuple[tuple[int, ...], GenerationStats]]:
    with BatchGenerator(MODEL, drafter=drafter, max_tokens=30, **options) as generator:
        uids = generator.insert(PROMPTS, num_draft_tokens=numbers)
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        stats: dict[int, Any] = {}
        while generator.has_work:
            for answer in generator.next()[1]:
                if answer.token is not None:
                    tokens[answer.uid].append(answer.token)
                stats[answer.uid] = answer.stats
    return [(tuple(tokens[uid]), stats[uid]) for uid in uids]


# Streams.


def test_where_drafts_never_pay_the_drafter_rests_all_the_time() -> None:
    tokens, stats = stream(losing(), PROMPTS[1])
    assert tokens == TEXTS[1].output[:30]
    assert stats.widths == {0: 30}
    assert stats.pauses == 1
    assert stats.adaptive
    assert stats.drafted == 0
    assert stats.target_forwards == 30


def test_where_drafts_always_pay_rounds_have_them() -> None:
    tokens, stats = stream(winning(), PROMPTS[1])
    assert tokens == TEXTS[1].output[:30]
    assert stats.pauses == 0
    assert stats.adaptive
    assert stats.num_draft_tokens == 15
    assert stats.widths[4] >= 3  # its kind's number comes first
    assert stats.widths.get(0, 0) <= 1  # the last token of a budget is never drafted
    assert sum(stats.widths.values()) == stats.rounds == stats.target_forwards < 20


@pytest.mark.parametrize("move", [[RIGHT] * 3, [RIGHT, WRONG], [WRONG], []])
@pytest.mark.parametrize("make", [losing, winning, scripted])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_tokens_are_plain_decodings_whatever_is_chosen(make: Any, move: Any, temp: float) -> None:
    texts, seed = (SEEDED, 7) if temp else (TEXTS, None)
    tokens, stats = stream(make(move, texts), PROMPTS[len(move) % 3], temp=temp, seed=seed)
    assert tokens == texts[len(move) % 3].output[:30]
    assert stats.adaptive
    assert stats.draft_errors == 0


@pytest.mark.parametrize(
    ("options", "adaptive", "most"),
    [
        ({"num_draft_tokens": 2}, False, 2),
        ({"num_draft_tokens": 2, "adaptive": True}, True, 2),
        ({"num_draft_tokens": 2, "adaptive": False}, False, 2),
        ({"adaptive": False}, False, 4),
        ({"adaptive": True}, True, 15),
        ({}, True, 15),
    ],
)
def test_who_says_a_number_gets_it(options: dict[str, Any], adaptive: bool, most: int) -> None:
    move = [RIGHT] * 15
    tokens, stats = stream(winning(move), PROMPTS[2], **options)
    assert tokens == TEXTS[2].output[:30]
    assert stats.adaptive is adaptive
    assert stats.num_draft_tokens == most
    assert max(stats.widths) <= most
    tokens, stats = stream(losing(move), PROMPTS[2], **options)
    assert tokens == TEXTS[2].output[:30]
    assert (stats.widths == {0: 30}) is adaptive
    assert stats.pauses == adaptive


def test_no_drafts_at_all_are_neither_paced_nor_measured() -> None:
    loaded = scripted([RIGHT])
    tokens, stats = stream(loaded, PROMPTS[0], num_draft_tokens=0, adaptive=True)
    assert tokens == TEXTS[0].output[:30]
    assert not stats.adaptive
    assert stats.reason == "num_draft_tokens is 0"
    assert loaded._costs is None


@pytest.mark.parametrize("number", [None, 3])
def test_a_name_is_loaded_adaptive_where_no_number_is_given(number: int | None) -> None:
    tokens, stats = stream("ngram", PROMPTS[2], num_draft_tokens=number)
    assert tokens == TEXTS[2].output[:30]
    assert stats.adaptive is (number is None)


# Measuring in a request.


def test_a_measuring_that_fails_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory for a scratch row")

    monkeypatch.setattr(costs_module, "measure", fail)
    loaded = scripted([RIGHT, RIGHT])
    loaded.measuring_seconds = 1.0
    with caplog.at_level(logging.WARNING, "specdec"):
        tokens, stats = stream(loaded, PROMPTS[1])
    assert tokens == TEXTS[1].output[:30]
    assert stats.draft_errors == 0
    [record] = caplog.records
    assert record.exc_info is not None
    assert "no memory" in str(record.exc_info[1])


@pytest.mark.parametrize("kind", ["qwen3", "lfm2", "gemma3_text"])
def test_a_measuring_changes_no_token_of_the_request_that_waits_for_it(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model(kind)
    loaded = load_drafter("ngram", model)
    loaded.measuring_seconds = 0.03
    shares: list[float] = []
    loaded.progress = shares.append
    made = [
        [
            each.token
            for each in stream_generate(model, tiny_tokenizer(), PROMPTS[2], 12, drafter=drafter)
        ]
        for drafter in (None, loaded)
    ]
    assert made[0] == made[1]
    assert shares[-1] == 1
    loaded.close()
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_rows_that_cannot_have_drafts_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3")
    model.make_cache = lambda: [OwnCache() for _ in model.layers]
    loaded = load_drafter("ngram", model)
    loaded.measuring_seconds = 1.0
    monkeypatch.setattr(costs_module, "measure", lambda *_, **__: pytest.fail("it measured"))
    said = list(stream_generate(model, tiny_tokenizer(), PROMPTS[0], 8, drafter=loaded))
    assert tuple(each.token for each in said) == TEXTS[0].output[:8]
    stats = said[-1].stats
    assert stats is not None
    assert not stats.adaptive
    assert stats.reason is not None


# Batches.


def test_a_batch_where_drafts_never_pay_is_plain() -> None:
    for (tokens, stats), text in zip(batch(losing()), TEXTS, strict=True):
        assert tokens == text.output[:30]
        assert set(stats.widths) == {0}
        assert stats.pauses >= 1
        assert stats.adaptive


def test_a_batch_where_drafts_pay_has_them() -> None:
    for (tokens, stats), text in zip(batch(winning()), TEXTS, strict=True):
        assert tokens == text.output[:30]
        assert stats.target_forwards < 20
        assert stats.pauses == 0
        assert stats.adaptive


@pytest.mark.parametrize("make", [losing, winning, scripted])
def test_requests_of_a_batch_say_for_themselves(make: Any) -> None:
    served = batch(make(), numbers=[None, 2, 0])
    for (tokens, _), text in zip(served, TEXTS, strict=True):
        assert tokens == text.output[:30]
    paced, fixed, plain = (stats for _, stats in served)
    assert [each.adaptive for each in (paced, fixed, plain)] == [True, False, False]
    assert set(fixed.widths) <= {0, 1, 2}
    assert fixed.widths[2] >= 5
    assert set(plain.widths) == {0}
    assert fixed.pauses == plain.pauses == 0


def test_a_row_that_wants_no_drafts_reports_no_pause() -> None:
    rested = [stats for _, stats in batch(losing(), numbers=[None, None, 0])]
    assert [each.pauses > 0 for each in rested] == [True, True, False]


@pytest.mark.parametrize("adaptive", [None, True, False])
def test_a_generators_number_is_the_most_or_fixed(adaptive: bool | None) -> None:
    made = batch(losing(), num_draft_tokens=3, adaptive=adaptive)
    for (tokens, stats), text in zip(made, TEXTS, strict=True):
        assert tokens == text.output[:30]
        assert stats.adaptive is bool(adaptive)
        assert (set(stats.widths) == {0}) is bool(adaptive)


def test_seeded_rows_of_a_batch_keep_their_texts() -> None:
    with BatchGenerator(MODEL, drafter=losing(texts=SEEDED), max_tokens=20) as generator:
        generator.insert(PROMPTS, sampling=[SamplingOptions(temp=1.0)] * 3, seeds=[7] * 3)
        tokens: dict[int, list[int]] = {}
        while generator.has_work:
            for answer in generator.next()[1]:
                if answer.token is not None:
                    tokens.setdefault(answer.uid, []).append(answer.token)
    assert [tuple(each) for each in tokens.values()] == [text.output[:20] for text in SEEDED]


# Mistakes.


@pytest.mark.parametrize("wrong", ["yes", 1, 0, 0.5, [], "a\nb"])
def test_what_is_neither_true_nor_false_is_refused_in_one_line(wrong: Any) -> None:
    for call in (
        lambda: stream_generate(MODEL, tiny_tokenizer(), [1, 2], drafter="ngram", adaptive=wrong),
        lambda: stream_generate(MODEL, tiny_tokenizer(), [1, 2], adaptive=wrong),
        lambda: BatchGenerator(MODEL, drafter="ngram", adaptive=wrong),
    ):
        with pytest.raises(OptionError) as raised:
            call()
        message = str(raised.value)
        assert message.startswith("adaptive is ")
        assert "\n" not in message
