"""Small mistakes in a head's rows that cost drafts and no token, each held to the right value.

Found by the mutants in ``tests/mutants/drafter_mtp.py``. A row alone that reads a text at once is
what rows in a batch, in parts or from a checkpoint are compared with.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, field
from mlx_lm.utils import load_model
from mtp_synthetic import split_release, write_qwen3_5
from oracles.driven import Driven, Watched, hidden_states

from specdec import load_drafter
from specdec.contract import Greedy, Listed, Proposal, Sampled
from specdec.drafting.modules import parameters_of
from specdec.state import RaggedState
from specdec.testing.target import TinyTarget
from specdec_mtp import live, loading
from specdec_mtp.find import HeadKind
from specdec_mtp.layers import family_of
from specdec_mtp.provider import Reading
from specdec_mtp.tiny import MTP_CONFIG, NEXTN_CONFIG, tiny_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from specdec.contract import Selection
    from specdec_mtp.provider import HeadProvider
    from specdec_mtp.rows import HeadRows

PROMPTS = ((1, 5, 2, 7), (3,), (6, 6, 0, 4, 2, 1))
READINGS = {
    "prompt": Reading(),
    "own": Reading(feeds_raw=True, reads_prompt=False),
}


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget()


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=1e-5)


def consume(driven: Driven, given: Sequence[Sequence[int]]) -> None:
    """Give each row tokens from outside, some rows perhaps none."""
    width = max(map(len, given))
    hidden = []
    for text, tokens in zip(driven.texts, given, strict=True):
        states = hidden_states(driven.target, [*text, *tokens], driven.rows.context)
        own = states[:, len(text) :]
        hidden.append(mx.pad(own, [(0, 0), (0, width - len(tokens)), (0, 0)]))
        text.extend(tokens)
    ids = [[*tokens, *[7] * (width - len(tokens))] for tokens in given]
    driven.rows.consume(mx.array(ids, mx.int32), mx.concatenate(hidden), list(map(len, given)))


def assert_drafts_as_if_read_at_once(driven: Driven, provider: HeadProvider) -> None:
    texts = [list(text) for text in driven.texts]
    found = driven.draft([4] * len(texts), 3)
    for row, text in zip(found, texts, strict=True):
        [alone] = Driven.of(driven.target, provider, [text]).draft([4], 3)
        assert_same(row.logprobs, alone.logprobs)
        assert row.tokens == alone.tokens


# What is read.


@pytest.mark.parametrize("given", [((5, 2), (1,), (3, 3, 6)), ((), (2,), ()), ((1,), (), (4, 2))])
def test_tokens_from_outside_go_on_from_what_each_row_has_not_read(
    given: Sequence[Sequence[int]], target: TinyTarget
) -> None:
    provider = tiny_head()
    driven = Driven.of(target, provider, PROMPTS)
    driven.draft([2, 3, 4], 3)
    driven.commit([2, 0, 3])  # so that two rows have unread tokens, of unequal number
    consume(driven, given)
    assert_drafts_as_if_read_at_once(driven, provider)


@pytest.mark.parametrize("whole", [1, 3, 4])
def test_texts_of_unequal_length_are_read_alike_in_parts_and_at_once(
    whole: int, target: TinyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = tiny_head()
    driven = Driven.of(target, provider, PROMPTS)
    monkeypatch.setattr(live, "_WHOLE", whole)
    consume(driven, [(5, 2), (1, 4, 4, 0, 7, 3, 3, 2, 6), ()])
    monkeypatch.undo()
    assert_drafts_as_if_read_at_once(driven, provider)


def test_a_cold_row_that_changes_places_is_cold_there(target: TinyTarget) -> None:
    provider = tiny_head()
    own = provider.grouped.open_prefill(target=target, checkpoints=[None])
    read, text = [1, 5, 2], [6, 0, 4]
    own.prefill(mx.array([read]), target.hidden(read, own.context, ()))
    group = provider.grouped.open_prefill(target=target, checkpoints=[None, own.capture(0)])
    group.filter_rows([1, 0])
    hidden = [target.hidden([*read, *text], own.context, ())[:, 3:]]
    hidden.append(target.hidden(text, own.context, ()))
    group.prefill(mx.array([text, text]), mx.concatenate(hidden))
    for row, history in enumerate((5, 2)):  # one less than the tokens that were read
        kept = group.capture(row).attachment
        assert kept.metadata["history"] == history
        alone = provider.grouped.open_prefill(target=target, checkpoints=[None])
        whole = [*read, *text] if row == 0 else text
        alone.prefill(mx.array([whole]), target.hidden(whole, own.context, ()))
        for name, array in alone.capture(0).attachment.arrays.items():
            assert_same(kept.arrays[name], array)


@pytest.mark.parametrize("history", READINGS)
def test_what_a_stored_row_has_not_read_comes_back_with_it(
    history: str, target: TinyTarget
) -> None:
    provider = tiny_head(reading=READINGS[history])
    driven = Driven.of(target, provider, PROMPTS)
    drafted = driven.draft([2, 3, 4], 3)
    accepted = (2, 0, 3)
    driven.commit(accepted)
    stored = [driven.rows.capture(row) for row in range(3)]
    for row, count in enumerate(accepted):
        text = driven.texts[row]
        unread = drafted[row].tokens[:count]
        assert stored[row].attachment.metadata["unread"] == " ".join(map(str, unread))
        hidden = hidden_states(target, text, driven.rows.context)[0, len(text) - 1 - count :]
        assert_same(stored[row].attachment.arrays["hidden"], hidden)
    found = driven.draft([5, 5, 5], 3)
    for row in range(3):
        watched = Watched()
        again = provider.grouped.open(
            target=target, sampling=watched, checkpoints=stored[row : row + 1]
        )
        assert again.draft([5], [3], [0]) == [found[row].tokens]
        assert_same([step[0] for step in watched.seen], found[row].logprobs)


@pytest.mark.parametrize("first", [mx.float32, mx.bfloat16])
def test_rows_over_targets_of_two_types_are_stored_and_restored(first: mx.Dtype) -> None:
    provider = tiny_head()
    provider.module.set_dtype(mx.bfloat16)  # type: ignore[union-attr]  # not closed
    second = mx.float32 if first == mx.bfloat16 else mx.bfloat16
    for dtype in (first, second):
        other = TinyTarget(seed=3)
        other.model.set_dtype(dtype)
        group = provider.grouped.open_prefill(target=other, checkpoints=[None])
        group.prefill(mx.array([[1, 2, 3]]), other.hidden([1, 2, 3], group.context, ()))
        stored = group.capture(0)
        assert stored.attachment.arrays["0.keys"].dtype == dtype
        rows = provider.grouped.open(target=other, sampling=Watched(), checkpoints=[stored])
        assert rows.row_count == 1


# Rounds.


def test_first_windows_have_the_width_that_the_backend_asks_for(
    target: TinyTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = tiny_head()
    plain, padded = (Driven.of(target, provider, PROMPTS) for _ in range(2))
    widths: list[int] = []
    begin = RaggedState.begin_round

    def logged(state: RaggedState, width: int, *, reading: bool = False) -> None:
        widths.append(width)
        begin(state, width, reading=reading)

    for accepted in ((2, 0, 1), (0, 0, 0), (3, 1, 0), (1, 1, 1)):
        depth = 2 if accepted == (1, 1, 1) else 3
        expected = plain.draft([2, 3, 4], depth)
        with monkeypatch.context() as patch:
            patch.setattr(RaggedState, "window_width", lambda _state, _needed, most: most)
            patch.setattr(RaggedState, "begin_round", logged)
            widths.clear()
            found = padded.draft([2, 3, 4], depth)
        assert widths == [4, *[1] * (depth - 1)], "1 + the longest draft of any round"
        for row, other in zip(found, expected, strict=True):
            assert_same(row.logprobs, other.logprobs)
        plain.commit(accepted)
        padded.commit(accepted)


# Draws.


@define
class Drawn:
    """Draws that keep the steps and scores they were asked with; the least likely is drawn."""

    selection: Selection = field(factory=Sampled)
    rejecting: bool = False
    steps: list[list[int]] = field(factory=list)
    scores: list[mx.array] = field(factory=list)

    def sample(self, scores: mx.array, steps: Sequence[int]) -> mx.array:
        self.steps.append(list(steps))
        self.scores.append(scores)
        return mx.argmin(scores, axis=-1)

    def log_distribution(self, scores: mx.array, steps: Sequence[int]) -> mx.array:
        assert list(steps) == self.steps[-1]
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


IDS = (1, 3, 4, 6)


def listed(drawn: Drawn) -> Drawn:
    def sample(scores: mx.array, steps: Sequence[int]) -> mx.array:
        return mx.array(IDS)[drawn.sample(scores, steps)]

    drawn.selection = Listed(IDS, sample, drawn.log_distribution)
    return drawn


def decoding(provider: HeadProvider, target: TinyTarget, sampling: Any) -> HeadRows:
    """Two rows that have read their prompts."""
    stored = []
    for prompt in PROMPTS[::2]:
        group = provider.grouped.open_prefill(target=target, checkpoints=[None])
        group.prefill(mx.array([prompt]), target.hidden(prompt, group.context, ()))
        stored.append(group.capture(0))
    return provider.grouped.open(target=target, sampling=sampling, checkpoints=stored)


@pytest.mark.parametrize("rejecting", [False, True])
def test_listed_drafts_are_drawn_at_their_own_steps_from_the_listed_rows(
    rejecting: bool, target: TinyTarget
) -> None:
    drawn = listed(Drawn(rejecting=rejecting))
    found = decoding(tiny_head(ids=IDS), target, drawn).draft([2, 5], [3, 3], [4, 9])
    assert drawn.steps == [[4, 9], [5, 10], [6, 11]]
    assert isinstance(found, Proposal) is rejecting
    drafts = found.tokens if isinstance(found, Proposal) else found
    chosen = np.stack([np.argmin(np.array(scores), axis=-1) for scores in drawn.scores], axis=1)
    assert np.array_equal(np.array(drafts), np.array(IDS)[chosen])
    whole = Watched()
    decoding(tiny_head(), target, whole).draft([2, 5], [1, 1], [4, 9])
    of_ids = whole.seen[0][:, mx.array(IDS)]
    assert_same(
        drawn.scores[0] - mx.logsumexp(drawn.scores[0], axis=-1, keepdims=True),
        of_ids - mx.logsumexp(of_ids, axis=-1, keepdims=True),
    )
    if isinstance(found, Proposal):
        declared = [s - mx.logsumexp(s, axis=-1, keepdims=True) for s in drawn.scores]
        assert_same(found.logq, mx.stack(declared, axis=1))


def test_another_target_has_its_own_listed_rows(target: TinyTarget) -> None:
    provider = tiny_head(ids=IDS)
    seen = []
    for each in (target, TinyTarget(seed=5), target):
        drawn = listed(Drawn())
        decoding(provider, each, drawn).draft([2, 5], [1, 1], [0, 0])
        fresh = listed(Drawn())
        decoding(tiny_head(ids=IDS), each, fresh).draft([2, 5], [1, 1], [0, 0])
        assert_same(drawn.scores[0], fresh.scores[0])
        seen.append(np.array(drawn.scores[0]))
    assert np.abs(seen[0] - seen[1]).max() > 0.1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("selection", [Sampled(), Greedy()], ids=["drawn", "greedy"])
def test_what_is_declared_is_what_each_draft_was_drawn_from(
    selection: Selection, on_device: bool, target: TinyTarget
) -> None:
    drawn = Drawn(selection, rejecting=True)
    rows = decoding(tiny_head(), target, drawn)
    found = (rows.draft_device if on_device else rows.draft)([2, 5], [3, 3], [0, 7])
    assert drawn.steps == [[0, 7], [1, 8], [2, 9]]
    logq: Any = getattr(found, "logq", None)
    assert logq is not None
    assert_same(logq, mx.stack(drawn.scores, axis=1))
    assert_same(mx.logsumexp(logq, axis=-1), np.zeros((2, 3)))
    assert np.abs(np.array(logq[:, 1] - logq[:, 0])).max() > 0.1, "steps differ"


# How a head is made.


@pytest.mark.parametrize("layers", range(3, 9))
def test_a_layer_attends_to_all_positions_wherever_the_targets_end(layers: int) -> None:
    config = {**MTP_CONFIG, "num_hidden_layers": layers}
    family = family_of(HeadKind.MTP, config)
    layer = family.make(family.read(config), dense=True)
    assert not layer.is_linear
    assert hasattr(layer, "self_attn")


@pytest.mark.parametrize("layers", range(2, 6))
@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_a_layer_has_experts_where_only_some_of_the_targets_have(
    layers: int, frequency: int
) -> None:
    changes: Mapping[str, Any] = {"num_hidden_layers": layers, "moe_layer_freq": frequency}
    config = {**NEXTN_CONFIG, **changes}
    family = family_of(HeadKind.NEXTN, config)
    assert hasattr(family.make(family.read(config), dense=False).mlp, "switch_mlp")


def test_routers_stay_as_they_are_when_a_head_is_quantized(tmp_path: Path) -> None:
    model, _ = load_model(write_qwen3_5(tmp_path, experts=4))
    held = []
    for options in ({}, {"bits": 4, "group_size": 32}):
        provider: Any = load_drafter(tmp_path, model, kind="mtp", probe=False, **options).provider
        held.append(parameters_of(provider.module))
    plain, packed = held
    for router in ("mlp.gate", "mlp.shared_expert_gate"):
        name = f"layers.0.{router}"
        assert mx.array_equal(plain[f"{name}.weight"], packed[f"{name}.weight"])
        assert f"{name}.scales" not in packed
    for other in ("fc", "layers.0.self_attn.q_proj", "layers.0.mlp.switch_mlp.up_proj"):
        assert packed[f"{other}.weight"].dtype == mx.uint32
        assert f"{other}.scales" in packed


def test_a_block_counts_the_pending_token_and_absurd_ones_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = write_qwen3_5(tmp_path / "full")
    model, _ = load_model(full)
    folder = split_release(full, tmp_path / "split")
    file = folder / "config.json"
    config = json.loads(file.read_text())

    def drafts(block: object) -> list[int]:
        """On a GPU, and on a CPU."""
        file.write_text(json.dumps({**config, "block_size": block}))
        found = []
        for device in (mx.gpu, mx.cpu):
            known = SimpleNamespace(
                default_device=lambda named=device: mx.Device(named), Device=mx.Device, cpu=mx.cpu
            )
            monkeypatch.setattr(loading, "mx", known)
            with load_drafter(folder, model, kind="mtp", probe=False) as loaded:
                found.append(loaded.num_draft_tokens)
        return found

    for block, wanted in ((2, 1), (4, 3), (17, 16), (18, 2), (1, 2), (True, 2), ("4", 2)):
        assert drafts(block) == [wanted, 1]
    asked = load_drafter(folder, model, kind="mtp", num_draft_tokens=5, probe=False)
    assert asked.num_draft_tokens == 5
