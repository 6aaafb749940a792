"""A warm request gives the text of a cold one, token for token, whatever was kept before it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import mamba
from scripted import (
    RIGHT,
    WRONG,
    Script,
    ScriptedProvider,
    drain,
    on_device,
    request,
    solo,
    target,
    tiny_tokenizer,
)
from tiny_models import HYBRID, VOCABULARY, WINDOWED, build_model, tiny_model

import specdec.targets.mlx_lm
from specdec import PrefixCache, VerifyGroup, bind_target, stream_generate
from specdec.contract import ContextKind, PrefillMode
from specdec.errors import CheckpointError, OptionError
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget
from specdec.testing.target import seeded_weights
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specdec import Row
    from specdec.contract import DraftProvider, RowCheckpoint

MB = 1 << 20
PROMPT = tuple((7 * i + 3) % VOCABULARY for i in range(23))


class Everything(Script):
    """Proposes right and wrong drafts for texts of any request; keeps no list of moves."""

    def __init__(self, architecture: str = "qwen3") -> None:
        super().__init__([], [])
        self.polite = True
        self.architecture = architecture

    def find(self, tokens: tuple[int, ...], step: int) -> int | None:
        return 0

    def move(self, tokens: tuple[int, ...], step: int) -> tuple[Any, Sequence[int]]:
        prompt = tokens[: len(tokens) - step]
        cells = ((RIGHT, RIGHT, WRONG), (RIGHT,) * 4, (), (WRONG,), (RIGHT, WRONG))[len(tokens) % 5]
        return cells, (solo(prompt, count=24, architecture=self.architecture) * 3)[step:]

    def __call__(self, tokens: tuple[int, ...], depth: int, step: int) -> Any:
        from scripted import spell

        cells, continuation = self.move(tokens, step)
        return spell(cells, continuation)[:depth]


DRAFTERS = ("none", "ngram", "host", "device", "taps", "full")


def drafter(kind: str, architecture: str = "qwen3") -> DraftProvider | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramProvider(min_ngram=1)
    script = Everything(architecture)
    if kind == "device":
        return ScriptedProvider(script, device=on_device(script, lengths=True))
    if kind == "taps":
        return ScriptedProvider(script, context=ContextKind.TAPS, taps=(0, 2))
    if kind == "full":
        return ScriptedProvider(script, mode=PrefillMode.FULL, context=ContextKind.PRE_NORM)
    return ScriptedProvider(script)


def serve(
    cache: PrefixCache | None,
    *prompts: Sequence[int],
    provider: DraftProvider | None = None,
    on: MlxLmTarget | None = None,
    **options: Any,
) -> list[Row]:
    """Rows of these prompts, generated together in a group of their own."""
    group = VerifyGroup(on or target(), provider, drafter="it", prefill_step_size=5)
    width = 0 if provider is None else 4
    asked = {"max_tokens": 12, "num_draft_tokens": width, "prefix_cache": cache, **options}
    rows = group.admit([request(prompt, **asked) for prompt in prompts])
    drain(group)
    group.close()
    return rows


class Noted(PrefixCache):
    """A cache that notes what it was given."""

    def __init__(self) -> None:
        super().__init__(8 * MB)
        self.keys: set[tuple[int, ...]] = set()

    def put(
        self, namespace: str, tokens: Sequence[int], caches: Any, checkpoint: Any = None
    ) -> bool:
        kept = super().put(namespace, tokens, caches, checkpoint)
        assert kept
        self.keys.add(tuple(tokens))
        return kept


def warm(cache: PrefixCache, prompt: Sequence[int], **options: Any) -> Row:
    [row] = serve(cache, prompt, **options)
    return row


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_same_prompt_is_read_once(kind: str) -> None:
    cache = PrefixCache(MB)
    for cached in (0, 22, 22):
        provider = drafter(kind)
        row = warm(cache, PROMPT, provider=provider)
        assert row.stats.cached_tokens == cached
        assert row.emitted == solo(PROMPT)[:12]
        assert row.stats.draft_errors == 0
        assert row.stats.time_to_first_token is not None
        if isinstance(provider, ScriptedProvider):
            assert provider.complaints == []
            assert provider.left_open == []


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_a_second_turn_begins_where_the_first_ended(kind: str, temp: float) -> None:
    cache = PrefixCache(MB)
    first = warm(cache, PROMPT, provider=drafter(kind), temp=temp, seed=5)
    turn = (*PROMPT, *first.emitted, 9, 8, 7, 6)
    second = warm(cache, turn, provider=drafter(kind), temp=temp, seed=6)
    assert second.stats.cached_tokens == first.processed
    assert second.emitted == solo(turn, temp, 6 if temp else None)[:12]
    third = warm(cache, turn, provider=drafter(kind), temp=temp, seed=6)
    assert third.stats.cached_tokens == len(turn) - 1
    assert third.emitted == second.emitted


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_is_kept_is_what_was_really_read(kind: str) -> None:
    text = solo(PROMPT)
    for budget in (1, 2, 3, 5, 8):
        cache = Noted()
        row = warm(cache, PROMPT, provider=drafter(kind), max_tokens=budget)
        whole = (*PROMPT, *text[:budget])
        assert row.processed <= len(whole)
        assert cache.keys == {PROMPT[:-1], whole[: row.processed]}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_end_token_is_part_of_what_was_read_where_it_was(kind: str) -> None:
    text = solo(PROMPT)
    for place in range(1, 8):
        end = text[place]
        if end in text[:place]:
            continue
        cache = Noted()
        row = warm(cache, PROMPT, provider=drafter(kind), end_tokens={end})
        assert row.end_token == end
        assert cache.keys == {PROMPT[:-1], (*PROMPT, *text[: place + 1])[: row.processed]}
        turn = (*PROMPT, *text[: place + 1], 1, 2, 3)
        again = warm(cache, turn, provider=drafter(kind), end_tokens={end}, max_tokens=5)
        assert again.stats.cached_tokens == row.processed
        cold = warm(PrefixCache(MB), turn, provider=None, end_tokens={end}, max_tokens=5)
        assert again.emitted == cold.emitted


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_consumer_that_stops_leaves_what_it_was_told(kind: str) -> None:
    text = solo(PROMPT)
    for stop in (1, 2, 4):
        told: list[int] = []

        def consumer(emission: Any, told: list[int] = told, stop: int = stop) -> bool:
            told.append(emission.token)
            return len(told) < stop

        cache = Noted()
        row = warm(cache, PROMPT, provider=drafter(kind), consumer=consumer)
        assert tuple(told) == text[:stop]
        assert cache.keys == {PROMPT[:-1], (*PROMPT, *told)[: row.processed]}
        turn = (*PROMPT, *told, 4, 4)
        assert warm(cache, turn, provider=drafter(kind)).emitted == solo(turn)[:12]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_third_prompt_begins_where_two_others_parted(kind: str) -> None:
    cache = PrefixCache(MB)
    shared = PROMPT[:14]
    prompts = [(*shared, 50 + n, 3, 5) for n in range(3)]
    cached = []
    for prompt in prompts:
        row = warm(cache, prompt, provider=drafter(kind))
        cached.append(row.stats.cached_tokens)
        assert row.emitted == solo(prompt)[:12]
    assert cached == [0, 0, 14]


@pytest.mark.parametrize("kind", ["none", "ngram", "taps", "full"])
def test_a_snapshot_is_taken_where_the_request_says(kind: str) -> None:
    cache = PrefixCache(MB)
    shared = PROMPT[:9]
    first = warm(cache, (*shared, 1, 2, 3), provider=drafter(kind), snapshot_at=(9, 12))
    assert first.emitted == solo((*shared, 1, 2, 3))[:12]
    row = warm(cache, (*shared, 4, 5), provider=drafter(kind))
    assert row.stats.cached_tokens == 9
    assert row.emitted == solo((*shared, 4, 5))[:12]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("architecture", [WINDOWED, HYBRID, "gemma2"])
def test_every_kind_of_state_is_kept(architecture: str, kind: str) -> None:
    # Past the sliding window, and a second turn that shares next to nothing with the first.
    cache = PrefixCache(8 * MB)
    bound, provider = target(architecture), drafter(kind, architecture)
    first = warm(cache, PROMPT, on=bound, provider=provider, max_tokens=20)
    assert first.emitted == solo(PROMPT, architecture=architecture)[:20]
    assert len(PROMPT) + 20 > 16
    turns = [
        (*PROMPT[:4], 60, 61, 62),
        (*PROMPT, *first.emitted, 1, 2, 3),
        PROMPT,
        (*PROMPT, *first.emitted, 1, 2, 3, 4),
    ]
    expected = [0, first.processed, 22, first.processed + 3]
    for turn, cached in zip(turns, expected, strict=True):
        row = warm(cache, turn, on=bound, provider=provider)
        assert row.emitted == solo(turn, architecture=architecture)[:12]
        assert row.stats.cached_tokens == cached
        assert row.stats.draft_errors == 0
        if kind not in ("none", "ngram"):  # which may find nothing to draft
            assert row.stats.accepted > 0


def test_recurrent_caches_that_tell_no_length_are_kept_turn_after_turn() -> None:
    args = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        state_size=8,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    )
    bound = MlxLmTarget(seeded_weights(mamba.Model(args), 0))
    cache = Noted()
    turn: tuple[int, ...] = PROMPT
    cached = 0
    for _ in range(3):
        row = warm(cache, turn, on=bound)
        assert row.stats.cached_tokens == cached
        assert row.emitted == warm(PrefixCache(MB), turn, on=bound).emitted
        assert (*turn, *row.emitted)[: row.processed] in cache.keys
        cached = row.processed
        turn = (*turn, *row.emitted, 5, 6)


def test_prompts_of_one_and_two_tokens() -> None:
    cache = PrefixCache(MB)
    for kind in DRAFTERS:
        for prompt in ((5,), (5, 6), (5,), (5, 6)):
            row = warm(cache, prompt, provider=drafter(kind))
            assert row.emitted == solo(prompt)[:12]


# Whose state it is.


def test_rows_of_another_drafter_or_setting_are_not_taken() -> None:
    cache = PrefixCache(MB)
    providers = [None, NgramProvider(), NgramProvider(max_ngram=7), drafter("host")]
    for provider in providers:
        assert warm(cache, PROMPT, provider=provider).stats.cached_tokens == 0
    for provider in providers:
        assert warm(cache, PROMPT, provider=provider).stats.cached_tokens == 22


def test_rows_of_other_weights_are_not_taken() -> None:
    cache = PrefixCache(8 * MB)
    model = build_model("qwen3", seed=3)
    bound = MlxLmTarget(model)
    first = warm(cache, PROMPT, on=bound)
    assert warm(cache, PROMPT, on=bound).stats.cached_tokens == 22
    # The same weights in another object are the same weights.
    assert (
        warm(cache, PROMPT, on=MlxLmTarget(build_model("qwen3", seed=3))).stats.cached_tokens == 22
    )
    # An adapter's, or an update's, are not, from the next request on.
    model.layers[0].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight * -2.0
    changed = warm(cache, PROMPT, on=bound)
    assert changed.stats.cached_tokens == 0
    assert changed.emitted != first.emitted
    assert changed.emitted == warm(PrefixCache(MB), PROMPT, on=bound).emitted


def test_an_adapter_and_its_scale_are_part_of_the_weights() -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = build_model("qwen3", seed=3)
    bound = bind_target(model)
    names = [bound.state_identity()]
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    names.append(bound.state_identity())
    layer = next(m for _, m in model.named_modules() if hasattr(m, "lora_b"))
    layer.lora_b = layer.lora_b + 0.1
    names.append(bound.state_identity())
    layer.scale = 20.0
    names.append(bound.state_identity())
    assert len(set(names)) == 4
    assert bound.state_identity() == names[-1]


def test_weights_that_change_while_a_row_decodes_leave_no_row() -> None:
    cache = Noted()
    model = build_model("qwen3", seed=3)
    group = VerifyGroup(MlxLmTarget(model))
    group.admit([request(PROMPT, max_tokens=6, prefix_cache=cache)])
    with group.round() as done:
        done.deliver_all()
    weight = model.layers[1].mlp.up_proj.weight
    model.layers[1].mlp.up_proj.weight = weight * 2
    drain(group)
    assert cache.keys == {PROMPT[:-1]}


# What may go wrong.


class Refuses(NgramProvider):
    """Will not have its own state back."""

    class Groups:
        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.refused = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def open_prefill(self, *, target: Any, checkpoints: Sequence[RowCheckpoint | None]) -> Any:
            if any(checkpoint is not None for checkpoint in checkpoints):
                self.refused += 1
                raise CheckpointError("made by an older version")
            return self._inner.open_prefill(target=target, checkpoints=checkpoints)

    def __init__(self) -> None:
        super().__init__()
        self.groups: Any = self.Groups(super().grouped)

    @property
    def grouped(self) -> Any:
        return self.groups


def test_a_drafter_that_refuses_a_kept_row_reads_the_prompt() -> None:
    cache = PrefixCache(MB)
    provider = Refuses()
    for _ in range(5):
        row = warm(cache, PROMPT, provider=provider)
        assert row.stats.cached_tokens == 0
        assert row.stats.draft_errors == 0
        assert row.stats.drafter == "it"
        assert row.emitted == solo(PROMPT)[:12]
    assert provider.groups.refused == 4


@pytest.mark.parametrize("verb", ["capture", "open_prefill", "prefill", "draft", "commit", "open"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_drafter_that_raises_leaves_text_and_cache_right(verb: str, at: int) -> None:
    cache = PrefixCache(MB)
    for _ in range(3):
        provider = ScriptedProvider(Everything(), faults={verb: [at]})
        row = warm(cache, PROMPT, provider=provider)
        assert row.emitted == solo(PROMPT)[:12]
        assert provider.left_open == []
    again = ScriptedProvider(Everything())
    row = warm(cache, (*PROMPT, *solo(PROMPT)[:12], 4), provider=again)
    assert row.emitted == solo((*PROMPT, *solo(PROMPT)[:12], 4))[:12]
    assert again.complaints == []


def test_an_interrupt_while_a_row_is_restored_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = PrefixCache(MB)
    warm(cache, PROMPT, provider=ScriptedProvider(Everything()))
    provider = ScriptedProvider(Everything())
    with monkeypatch.context() as patch:
        patch.setattr(RaggedState, "arrays", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            warm(cache, PROMPT, provider=provider)
    assert provider.calls["open_prefill"] == 1
    assert provider.left_open == []
    assert warm(cache, PROMPT, provider=provider).stats.cached_tokens == 22


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    with PrefixCache(MB, tmp_path) as cache:
        warm(cache, PROMPT, provider=NgramProvider())
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        path.write_bytes(path.read_bytes()[:-9])
    with PrefixCache(MB, tmp_path) as cache:
        row = warm(cache, PROMPT, provider=NgramProvider())
    assert row.stats.cached_tokens == 0
    assert row.emitted == solo(PROMPT)[:12]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_another_process_goes_on_from_the_files(kind: str, tmp_path: Path) -> None:
    with PrefixCache(MB, tmp_path) as cache:
        first = warm(cache, PROMPT, provider=drafter(kind))
    turn = (*PROMPT, *first.emitted, 3, 1)
    with PrefixCache(MB, tmp_path) as cache:
        row = warm(cache, turn, provider=drafter(kind))
        assert row.stats.cached_tokens == first.processed
        assert row.emitted == solo(turn)[:12]
        assert warm(cache, turn, provider=drafter(kind)).stats.cached_tokens == len(turn) - 1


def test_a_row_joins_from_the_cache_while_others_decode() -> None:
    cache = PrefixCache(4 * MB)
    warm(cache, PROMPT, provider=NgramProvider())
    group = VerifyGroup(target(), NgramProvider(), drafter="ngram")
    others = [tuple((5 * i + n) % VOCABULARY for i in range(6 + n)) for n in range(3)]
    rows = group.admit(
        [request(p, max_tokens=20, num_draft_tokens=3, prefix_cache=cache) for p in others]
    )
    for _ in range(2):
        with group.round() as done:
            done.deliver_all()
    rows += group.admit([request(PROMPT, max_tokens=20, num_draft_tokens=3, prefix_cache=cache)])
    assert rows[-1].stats.cached_tokens == 22
    drain(group)
    for row, prompt in zip(rows, [*others, PROMPT], strict=True):
        assert row.emitted == solo(prompt)[:20]


def test_two_caches_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match="give one or the other"):
        request(PROMPT, cache=[], prefix_cache=PrefixCache(MB))


@pytest.mark.parametrize("places", [(0,), (-3,), (1.5,), 5, None, (24,)])
def test_senseless_snapshots_are_refused(places: Any) -> None:
    with pytest.raises(OptionError, match=r"snapshot_at (has|is) "):
        request(PROMPT, prefix_cache=PrefixCache(MB), snapshot_at=places)


def test_snapshots_may_come_from_a_generator_and_be_numbers_of_any_kind() -> None:
    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    places: Any = (Number(value) for value in (9, 4))
    assert request(PROMPT, prefix_cache=PrefixCache(MB), snapshot_at=places).snapshot_at == (9, 4)


def test_what_is_no_prefix_cache_is_refused() -> None:
    wrong: Any = "a folder"
    with pytest.raises(OptionError, match="prefix_cache is 'a folder'; give a"):
        request(PROMPT, prefix_cache=wrong)


def test_a_row_that_runs_plain_in_a_drafting_group_is_kept_as_a_plain_one() -> None:
    cache = Noted()
    provider = ScriptedProvider(Everything())
    row = warm(cache, PROMPT, provider=provider, num_draft_tokens=0)
    assert row.emitted == solo(PROMPT)[:12]
    assert row.stats.reason == "num_draft_tokens is 0"
    assert cache.keys == {PROMPT[:-1], (*PROMPT, *row.emitted)[: row.processed]}
    assert provider.calls["open_prefill"] == 0, "no prompt is read that nobody drafts for"
    turn = (*PROMPT, *row.emitted, 3)
    assert warm(cache, turn).stats.cached_tokens == row.processed


def test_a_drafter_that_was_let_go_leaves_plain_rows() -> None:
    cache = PrefixCache(8 * MB)
    provider = ScriptedProvider(Everything(), faults={"draft": range(1, 99)})
    group = VerifyGroup(target(), provider, drafter="it")
    cached = []
    for _ in range(3):
        asked = request(PROMPT, max_tokens=12, num_draft_tokens=4, prefix_cache=cache)
        [row] = group.admit([asked])
        drain(group)
        cached.append(row.stats.cached_tokens)
        assert row.emitted == solo(PROMPT)[:12]
    assert cached == [0, 0, 22]


def test_state_of_another_mlx_lm_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(8 * MB)
    warm(cache, PROMPT)
    monkeypatch.setattr(specdec.targets.mlx_lm, "_versions", lambda: "mlx-lm of tomorrow")
    assert warm(cache, PROMPT).stats.cached_tokens == 0


def test_an_entry_that_covers_other_tokens_than_it_says_is_not_taken() -> None:
    class Lies(PrefixCache):
        def take(self, namespace: str, prompt: Sequence[int], *, longest: int) -> Any:
            hit = super().take(namespace, prompt, longest=longest)
            if hit is not None:
                hit.tokens -= 3
            return hit

    cache = Lies(MB)
    for _ in range(2):
        row = warm(cache, PROMPT)
        assert row.stats.cached_tokens == 0
        assert row.emitted == solo(PROMPT)[:12]


def test_a_generator_that_is_never_started_closes_the_drafter_that_it_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(NgramProvider, "close", lambda _self: closed.append("ngram"))
    responses = stream_generate(
        tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), drafter="ngram"
    )
    assert closed == []
    del responses
    gc.collect()
    assert closed == ["ngram"]


# Through stream_generate.


def generated(prompt: Sequence[int], **options: Any) -> tuple[list[int], Any]:
    responses = list(
        stream_generate(
            tiny_model("qwen3"), tiny_tokenizer(), list(prompt), max_tokens=10, **options
        )
    )
    return [response.token for response in responses], responses[-1].stats


def test_stream_generate_says_what_was_cached_and_when_the_first_token_came() -> None:
    cache = PrefixCache(MB)
    told: list[tuple[int, int]] = []
    for cached in (0, 22):
        told.clear()
        tokens, stats = generated(
            PROMPT,
            prefix_cache=cache,
            drafter="ngram",
            prompt_progress_callback=lambda done, of: told.append((done, of)),
        )
        assert tokens == list(solo(PROMPT)[:10])
        assert stats.cached_tokens == cached
        assert stats.prompt_tokens == 23
        assert 0 < stats.time_to_first_token < 60
        assert told[0] == (cached, 23)
        assert told[-1] == (23, 23)
        assert stats.as_dict()["cached_tokens"] == cached


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": "a folder"}, "prefix_cache is 'a folder'; give a specdec.PrefixCache"),
        ({"snapshot_at": [3]}, "snapshot_at was given without a prefix_cache"),
        ({"prefix_cache": True, "snapshot_at": [24]}, "snapshot_at has 24, but the prompt has 23"),
    ],
)
def test_stream_generate_refuses_what_makes_no_sense(options: dict[str, Any], message: str) -> None:
    if options.get("prefix_cache") is True:
        options = {**options, "prefix_cache": PrefixCache(MB)}
    with pytest.raises(OptionError, match=message):
        generated(PROMPT, **options)


# Any sequence of requests.

STEMS = [PROMPT[:n] for n in (1, 5, 9, 16)]
ASKED = st.builds(
    lambda stem, tail, again, budget, seed, at: (stem, tuple(tail), again, budget, seed, at),
    stem=st.sampled_from(STEMS),
    tail=st.lists(st.integers(0, 2), max_size=4),
    again=st.booleans(),
    budget=st.integers(1, 8),
    seed=st.none() | st.integers(0, 2),
    at=st.none() | st.integers(1, 9),
)


@settings(max_examples=30, deadline=None)
@given(
    asked=st.lists(ASKED, min_size=2, max_size=8),
    kind=st.sampled_from(DRAFTERS),
    small=st.booleans(),
)
def test_any_sequence_of_requests_gives_cold_texts(
    asked: list[Any], kind: str, small: bool
) -> None:
    # A small cache holds two or three rows, so that entries go while others are used.
    cache = PrefixCache(40_000 if small else MB)
    provider = drafter(kind)
    before: tuple[int, ...] = ()
    for stem, tail, again, budget, seed, at in asked:
        prompt = (*before, 11, *tail) if again and before else (*stem, *tail)
        options: dict[str, Any] = {} if seed is None else {"temp": 0.7, "seed": seed}
        places: dict[str, Any] = {}
        if at is not None and at <= len(prompt):
            places["snapshot_at"] = (at,)
        [row] = serve(cache, prompt, provider=provider, max_tokens=budget, **options, **places)
        assert row.emitted == solo(prompt, options.get("temp", 0.0), seed, count=8)[:budget]
        assert row.stats.cached_tokens < len(prompt)
        assert cache.nbytes <= (40_000 if small else MB)
        before = (*prompt, *row.emitted)
    if isinstance(provider, ScriptedProvider):
        assert provider.complaints == []
