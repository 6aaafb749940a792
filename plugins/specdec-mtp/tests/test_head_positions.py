"""At which positions a head reads: rope scaling, rounds without a gap, prompts in chunks."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, evolve, field
from mlx_lm.utils import load_model
from mtp_synthetic import write_glm, write_qwen3_5
from oracles.driven import Driven, RoundLog, Watched, head_of, log_softmax
from oracles.plain import Release
from oracles.tiny_releases import SIZES

from specdec import Request, SamplingOptions, VerifyGroup
from specdec.targets import MlxLmTarget
from specdec_mtp.heads import MtpHead, NextnHead
from specdec_mtp.rows import HeadRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PLACES = (10, 1000, 4000)


def release(write: Callable[[Path], Path], folder: Path) -> tuple[Release, MlxLmTarget]:
    own = Release.of(write(folder))
    return own, MlxLmTarget(own.model, own.folder)


# Rope scaling: the hidden states are random, since the head cannot know where they come from.


def random_text(own: Release, length: int) -> tuple[list[int], mx.array]:
    draws = np.random.default_rng(3)
    tokens = [int(token) for token in draws.integers(1, 96, length)]
    hidden = draws.standard_normal((1, length, SIZES["hidden_size"]))
    return tokens, mx.array(hidden, dtype=mx.float32)


def logprobs_at(
    own: Release, target: MlxLmTarget, kind: str, places: Sequence[int]
) -> list[np.ndarray[Any, Any]]:
    """What the rows draw from, one row for each place that a pending token is read at."""
    provider = head_of(target, kind, history="prompt")
    tokens, hidden = random_text(own, max(places) + 2)
    checkpoints = []
    for place in places:
        group = provider.grouped.open_prefill(target=target, checkpoints=[None])
        for start in range(0, place + 1, 512):
            end = min(start + 512, place + 1)
            group.prefill(mx.array([tokens[start:end]]), hidden[:, start:end])
        checkpoints.append(group.capture(0))
    watched = Watched()
    rows = provider.grouped.open(target=target, sampling=watched, checkpoints=checkpoints)
    rows.draft([tokens[place + 1] for place in places], [1] * len(places), [0] * len(places))
    [seen] = watched.seen
    return [np.array(row, dtype=np.float64) for row in seen]


def expected_at(
    own: Release, places: Sequence[int], change: Mapping[str, Any] | None = None
) -> list[np.ndarray[Any, Any]]:
    """The float64 head's, with some settings of the config replaced."""
    tokens, hidden = random_text(own, max(places) + 2)
    states = np.array(hidden[0], dtype=np.float64)
    pairs = [(own.embed(token), state) for token, state in zip(tokens[1:], states, strict=False)]
    if change is not None:
        own = evolve(own, config=changed(own.config, change))
    output = own.step(pairs)
    return [log_softmax(own.score(output[place])) for place in places]


def changed(config: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other settings of its text model."""
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **change}}
    return {**config, **change}


def worst(found: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    return [float(np.abs(f - e).max()) for f, e in zip(found, expected, strict=True)]


SCALED: Mapping[str, tuple[Callable[[Path], Path], str, str]] = {
    "yarn": (partial(write_qwen3_5, rope=YARN), "mtp", "rope_parameters"),
    "linear": (partial(write_qwen3_5, rope=LINEAR), "mtp", "rope_parameters"),
    "glm yarn": (
        partial(write_glm, model_type="glm4_moe_lite", changes={"rope_scaling": YARN}),
        "nextn",
        "rope_scaling",
    ),
}
PLAIN_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}


@pytest.mark.parametrize("name", SCALED)
def test_a_head_turns_as_its_targets_scaled_rope_does_near_and_far(
    name: str, tmp_path: Path
) -> None:
    write, kind, setting = SCALED[name]
    own, target = release(write, tmp_path)
    found = logprobs_at(own, target, kind, PLACES)
    assert max(worst(found, expected_at(own, PLACES))) < 1e-4
    plain = {setting: PLAIN_ROPE if kind == "mtp" else None}
    assert min(worst(found[:2], expected_at(own, PLACES[:2], plain))) > 0.1


OVERRIDDEN: Mapping[str, tuple[Callable[[Path], Path], str, Mapping[str, Any]]] = {
    "scaled": (write_qwen3_5, "mtp", {"rope_parameters": {**PLAIN_ROPE, **YARN}}),
    "scaling taken away": (
        partial(write_qwen3_5, rope=YARN),
        "mtp",
        {"rope_parameters": PLAIN_ROPE},
    ),
    "glm4_moe_lite scaled": (
        partial(write_glm, model_type="glm4_moe_lite"),
        "nextn",
        {"rope_scaling": YARN},
    ),
    "glm4_moe of another base": (
        partial(write_glm, model_type="glm4_moe"),
        "nextn",
        {"rope_theta": 50.0},
    ),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_head_follows_its_target_as_it_runs_and_not_the_file(name: str, tmp_path: Path) -> None:
    write, kind, override = OVERRIDDEN[name]
    own, _ = release(write, tmp_path)
    model = load_model(own.folder, model_config=changed(own.config, deepcopy(override)))[0]
    found = logprobs_at(own, MlxLmTarget(model, own.folder), kind, (10, 300))
    assert max(worst(found, expected_at(own, (10, 300), override))) < 1e-4
    assert min(worst(found, expected_at(own, (10, 300)))) > 0.1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> RoundLog:
    return RoundLog.of(monkeypatch)


@define
class Calls:
    """Windows that a head was called with: where each row's begins, and how wide it is."""

    offsets: list[list[int]] = field(factory=list)
    widths: list[int] = field(factory=list)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Logs the position that the layer's cache tells, at each call of a head."""
    found = Calls()

    def logging(kind: type[Any]) -> Callable[..., Any]:
        call = kind.__call__

        def logged(self: Any, embedded: mx.array, hidden: mx.array, caches: list[Any]) -> Any:
            cache = getattr(caches[0], "caches", caches)[0]
            offset = np.broadcast_to(np.array(cache.offset), (embedded.shape[0],))
            found.offsets.append([int(each) for each in offset])
            found.widths.append(embedded.shape[1])
            return call(self, embedded, hidden, caches)

        return logged

    for kind in (MtpHead, NextnHead):
        monkeypatch.setattr(kind, "__call__", logging(kind))
    return found


HEADS: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "qwen3_5": (write_qwen3_5, "mtp"),
    "glm4_moe": (partial(write_glm, model_type="glm4_moe"), "nextn"),
    "glm_moe_dsa": (partial(write_glm, model_type="glm_moe_dsa"), "nextn"),
}
PROMPTS = ((3, 17, 42, 8, 5), (11,), tuple((7 * place + 2) % 96 for place in range(21)))


@pytest.mark.parametrize("history", ["prompt", "own"])
@pytest.mark.parametrize("chain", ["true", "own"])
@pytest.mark.parametrize("name", HEADS)
def test_positions_go_on_without_a_gap_whatever_is_accepted(
    name: str, chain: str, history: str, tmp_path: Path, calls: Calls
) -> None:
    write, kind = HEADS[name]
    _, target = release(write, tmp_path)
    driven = Driven.of(target, head_of(target, kind, chain=chain, history=history), PROMPTS)
    # A head of its own history counts from the last token of its prompt.
    begins = [len(prompt) - 1 if history == "own" else 0 for prompt in PROMPTS]
    read = [len(text) - 1 - begin for text, begin in zip(driven.texts, begins, strict=True)]
    accepts = [(0, 1, 3), (3, 0, 2), (3, 3, 3), (2, 3, 0), (0, 0, 0), (1, 2, 1), (3, 1, 0)]
    for number, accepted in enumerate(accepts):
        calls.offsets.clear()
        driven.draft([7, 9, 13], 3)
        committed = [len(text) - begin for text, begin in zip(driven.texts, begins, strict=True)]
        first, *steps = calls.offsets
        assert first == read, number
        # The first call ends with the pending token, whose hidden is the last committed one's.
        assert steps == [[end + ahead for end in committed] for ahead in range(2)]
        driven.commit(accepted)
        kept = [min(count, 2) if chain == "own" else 0 for count in accepted]
        read = [end + more for end, more in zip(committed, kept, strict=True)]
        if number == 3:  # rows may change places
            order = [2, 0, 1]
            driven.rows.filter_rows(order)
            driven.texts = [driven.texts[row] for row in order]
            read, begins = [read[row] for row in order], [begins[row] for row in order]


# Prompts in chunks.


@define
class Read:
    """What a head's rows were given of a prompt."""

    tokens: list[int] = field(factory=list)
    hidden: list[Any] = field(factory=list)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    found = Read()
    prefill = HeadRows.prefill

    def reading(self: Any, tokens: mx.array, context: mx.array, /) -> None:
        found.tokens += [int(token) for token in np.array(tokens[0])]
        found.hidden += list(np.array(context[0]))
        prefill(self, tokens, context)

    monkeypatch.setattr(HeadRows, "prefill", reading)
    return found


@pytest.mark.parametrize("step", [8, 2048])
@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_of_three_chunks_and_a_token_is_read_once_in_order_and_never_wider(
    name: str, step: int, tmp_path: Path, calls: Calls, read: Read, log: RoundLog
) -> None:
    write, kind = HEADS[name]
    own, target = release(write, tmp_path)
    prompt = [(7 * place + 2) % 96 for place in range(25)]
    provider = head_of(target, kind, history="prompt", feed="normed")
    provider.grouped.open_prefill(target=target, checkpoints=[None])  # which tries a call first
    calls.widths, calls.offsets = [], []
    group = VerifyGroup(target, provider, drafter=kind, prefill_step_size=step)
    request = Request(prompt=prompt, sampling=SamplingOptions(), max_tokens=16, num_draft_tokens=3)
    [row] = group.admit([request])
    assert read.tokens == prompt
    np.testing.assert_allclose(read.hidden, own.hidden(prompt), rtol=0, atol=1e-5)
    # The first token has no hidden state before it; the last is a chunk of its own.
    assert calls.widths == ([7, 8, 8, 1] if step == 8 else [23, 1])
    assert calls.offsets == ([[0], [7], [15], [23]] if step == 8 else [[0], [23]])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert (row.error, row.stats.reason) == (None, None)
    known, checked = list(prompt), 0
    for each in log.rounds[0]:
        known.append(each.pending)
        if each.drafts:
            assert each.drafts == own.drafts(own.pairs(known), len(each.drafts))[0]
        known += each.drafts[: each.accepted]
        checked += len(each.drafts)
    assert checked > 20


@pytest.mark.parametrize("history", ["prompt", "own"])
def test_a_chunks_hidden_states_are_let_go(history: str, tmp_path: Path) -> None:
    _, target = release(write_qwen3_5, tmp_path)
    provider = head_of(target, "mtp", history=history)
    rows = provider.grouped.open_prefill(target=target, checkpoints=[None])
    ids, size = mx.zeros((1, 1000), mx.int32), 1000 * SIZES["hidden_size"] * 4
    mx.eval(ids)
    grown = []
    for held in (False, False, True):  # of a cold row, of one that has read, and the control
        before = mx.get_active_memory()
        context = mx.random.normal((1, 1000, SIZES["hidden_size"]), key=mx.random.key(0))
        kept = [context] if held else []
        rows.prefill(ids, context)
        del context
        grown.append((mx.get_active_memory() - before) / size)
        del kept
    # The keys and values of a position are as large as its hidden state here.
    own = 1.0 if history == "prompt" else 0.0
    assert max(grown[:2]) < own + 0.4  # room for more of them
    assert grown[2] > own + 0.9
