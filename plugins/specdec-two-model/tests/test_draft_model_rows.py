"""Rows of a draft model, driven by hand, beside the same model in mlx-lm's own code.

A draft model that is its own target must be right in every draft, whatever was rejected before: a
position too many or too few, an unread token or a state that was not undone shows in the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from draft_model_driven import DrivenRows, cold, greedy, scores
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.checkpoints import checkpoint_from_bytes, to_bytes
from specdec.contract import Proposal
from specdec.drafting import DraftModelProvider
from specdec.errors import CheckpointError, ContractError, UnsupportedModelError
from specdec.sampling import SamplingOptions
from specdec.targets import MlxLmTarget
from specdec_two_model.tiny import KINDS, tiny_draft_model, tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence

V = 8
FIRST, SECOND, THIRD = (1, 5, 2, 7, 3), (4, 4, 1), (6, 0, 3, 3, 2, 1, 7, 5)
LIVELY = {"attention": 3}  # seeds at which a text does not stay on one token
READ_ONCE = settings(max_examples=6, deadline=None, derandomize=True, database=None)


def target_of(provider: DraftModelProvider) -> MlxLmTarget:
    """The draft model's own bound model."""
    model = provider.grouped.model
    assert isinstance(model, MlxLmTarget)
    return model


def own_drafter(kind: str) -> tuple[DraftModelProvider, MlxLmTarget]:
    provider = tiny_draft_model(kind, seed=LIVELY.get(kind, 0))
    return provider, target_of(provider)


def opened(
    provider: DraftModelProvider,
    target: MlxLmTarget,
    texts: Sequence[Sequence[int]],
    **options: Any,
) -> DrivenRows:
    """Rows that have read all of these texts but the last token."""
    checkpoints = [cold(provider, target, text[:-1], step=3) for text in texts]
    return DrivenRows(provider, target, checkpoints, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_drafts_for_itself_is_always_right_whatever_was_rejected(kind: str) -> None:
    provider, target = own_drafter(kind)
    rows, text = opened(provider, target, [FIRST]), list(FIRST)
    longest = 20 if kind == "positions" else 60
    truth = list(greedy(target.model, FIRST, longest + 5))
    done, round_number = 0, 0
    while done < longest:
        [draft] = rows.draft([text[-1]], [3])
        assert draft == tuple(truth[done : done + 3]), f"round {round_number}"
        accepted = (3, 3, 0, 1, 3, 2)[round_number % 6]  # rejections that nobody needed
        rows.commit([accepted])
        text += truth[done : done + accepted + 1]
        done += accepted + 1
        round_number += 1


@given(
    depths=st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=4, max_size=6),
    shares=st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=6, max_size=6),
    kind=st.sampled_from(["attention", "sliding", "hybrid"]),
)
@READ_ONCE
def test_rows_of_other_depths_and_acceptance_draft_what_each_drafts_alone(
    depths: list[tuple[int, ...]], shares: list[tuple[float, ...]], kind: str
) -> None:
    provider, target = own_drafter(kind)
    texts = [list(text) for text in (FIRST, SECOND, THIRD)]
    rows = opened(provider, target, texts)
    for number, depth in enumerate(depths):
        drafts = rows.draft([text[-1] for text in texts], depth, on_device=number % 2 == 0)
        for text, draft, most in zip(texts, drafts, depth, strict=True):
            assert draft == greedy(target.model, text, most)
        # Everything accepted leaves the last draft unread; else another token corrects it.
        accepted = [round(s * len(d)) for s, d in zip(shares[number], drafts, strict=True)]
        rows.commit(accepted)
        for text, draft, count in zip(texts, drafts, accepted, strict=True):
            text += [*draft[:count], (text[-1] + 3 * number + 1) % V]


def test_the_last_draft_that_was_accepted_is_read_in_front_of_the_next_token() -> None:
    provider, target = own_drafter("attention")
    rows = opened(provider, target, [FIRST, SECOND])
    drafts = rows.draft([FIRST[-1], SECOND[-1]], [2, 2])
    rows.commit([2, 1])
    unread = [rows.group.capture(row).attachment.metadata["unread"] for row in range(2)]
    assert unread == [drafts[0][1], -1]
    texts = [[*FIRST, *drafts[0], 4], [*SECOND, drafts[1][0], 4]]
    for text in texts:
        assert text[-1] == 4
    found = rows.draft([4, 4], [1, 1])
    assert found == [greedy(target.model, text, 1) for text in texts]
    rows.commit([1, 0])  # of one draft, that one
    assert rows.group.capture(0).attachment.metadata["unread"] == found[0][0]


@pytest.mark.parametrize("kind", ["attention", "sliding", "recurrent", "hybrid"])
def test_rows_join_leave_and_come_back_from_bytes(kind: str) -> None:
    provider, target = own_drafter(kind)
    rows, texts = opened(provider, target, [FIRST, SECOND]), [list(FIRST), list(SECOND)]

    def round_of(depths: Sequence[int], accepted: Sequence[int]) -> None:
        drafts = rows.draft([text[-1] for text in texts], depths)
        assert drafts == [greedy(target.model, t, d) for t, d in zip(texts, depths, strict=True)]
        rows.commit(accepted)
        for text, draft, count in zip(texts, drafts, accepted, strict=True):
            text += [*draft[:count], (text[-1] + 2) % V]

    round_of([3, 2], [3, 0])
    rows.join([cold(provider, target, THIRD[:-1])])
    texts.append(list(THIRD))
    round_of([0, 0, 0], [0, 0, 0])
    round_of([2, 3, 1], [2, 3, 1])
    rows.filter([2, 1])
    texts = texts[2:0:-1]
    kept = [checkpoint_from_bytes(to_bytes(rows.group.capture(row))) for row in range(2)]
    assert {each.attachment.metadata["unread"] for each in kept} != {-1}
    round_of([3, 3], [1, 3])
    rows.filter([])
    texts = [text[: each.processed_tokens + 1] for text, each in zip(texts, kept, strict=True)]
    rows.join(kept)
    round_of([3, 3], [3, 2])


def test_a_chosen_text_is_read_behind_what_is_unread_in_rows_of_any_length() -> None:
    for kind in ("attention", "hybrid"):
        provider, target = own_drafter(kind)
        texts = [list(FIRST), list(SECOND), list(THIRD)]
        rows = opened(provider, target, texts)
        drafts = rows.draft([text[-1] for text in texts], [2, 2, 1])
        rows.commit([2, 0, 1])
        kept = zip(texts, drafts, [2, 0, 1], strict=True)
        texts = [[*text, *draft[:count]] for text, draft, count in kept]
        given = [[3, 1, 6], [], [2]]
        padded = mx.array([[3, 1, 6], [0, 0, 0], [2, 0, 0]], mx.int32)
        rows.group.consume(padded, None, [3, 0, 1])
        texts = [[*text, *more] for text, more in zip(texts, given, strict=True)]
        found = rows.draft([5, 5, 5], [2, 2, 2])
        assert found == [greedy(target.model, [*text, 5], 2) for text in texts]
        rows.commit([0, 0, 0])


@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_a_prompt_goes_on_behind_an_answer_whose_last_draft_is_unread(kind: str) -> None:
    provider, target = own_drafter(kind)
    rows = opened(provider, target, [FIRST])
    [draft] = rows.draft([FIRST[-1]], [2])
    rows.commit([2])
    kept = rows.group.capture(0)
    assert kept.attachment.metadata["unread"] == draft[1]
    group = provider.grouped.open_prefill(target=target, checkpoints=[kept, None])
    group.prefill(mx.array([[1, 6, 4], [1, 6, 4]], mx.int32), None)
    behind = DrivenRows(provider, target, [group.capture(row) for row in range(2)])
    texts = [(*FIRST, *draft, 1, 6, 4, 5), (1, 6, 4, 5)]
    assert behind.draft([5, 5], [3, 3]) == [greedy(target.model, text, 3) for text in texts]


def test_a_long_chosen_text_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.drafting.model_live._WHOLE", 4)
    provider, target = own_drafter("sliding")
    rows = opened(provider, target, [FIRST, SECOND])
    longer = [(3 * at + 1) % V for at in range(11)]
    rows.group.consume(mx.array([longer, longer[::-1]], mx.int32), None, [11, 6])
    texts = [[*FIRST[:-1], *longer, 5], [*SECOND[:-1], *longer[::-1][:6], 5]]
    assert rows.draft([5, 5], [3, 3]) == [greedy(target.model, text, 3) for text in texts]


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_a_history_that_comes_in_one_chunk_is_read_in_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.drafting.model_live._WHOLE", 4)
    provider, target = own_drafter(kind)
    widths: list[int] = []
    forward = MlxLmTarget.forward

    def watched(self: Any, ids: mx.array, *rest: Any, **more: Any) -> Any:
        widths.append(ids.shape[1])
        return forward(self, ids, *rest, **more)

    history = [(3 * at + 1) % V for at in range(11)]
    with monkeypatch.context() as patch:
        patch.setattr(MlxLmTarget, "forward", watched)
        kept = cold(provider, target, history)
    assert widths == [4, 4, 3]
    rows = DrivenRows(provider, target, [kept])
    assert rows.draft([5], [3]) == [greedy(target.model, [*history, 5], 3)]


@pytest.mark.parametrize("kind", ["attention", "sliding", "recurrent", "hybrid"])
def test_what_a_row_declares_in_a_batch_is_what_it_declares_alone_to_the_bit(kind: str) -> None:
    provider, target = own_drafter(kind)
    hot = SamplingOptions(temp=1.1, acceptance="rejection")
    texts = [list(FIRST), list(SECOND), list(THIRD)]
    rows = opened(provider, target, texts, options=[hot] * 3, seeds=[1, 2, 3])
    alone = [
        opened(provider, target, [text], options=[hot], seeds=[seed])
        for seed, text in enumerate(texts, 1)
    ]
    pending = [text[-1] for text in texts]
    for number, depths in enumerate(((6, 2, 0), (0, 0, 0), (1, 3, 4), (2, 5, 1), (3, 3, 3))):
        found = rows.proposed(pending, depths)
        drafts = found.tokens if isinstance(found, Proposal) else found
        accepted = [min(depth, (number + row) % 7) for row, depth in enumerate(depths)]
        for row, (lone, depth) in enumerate(zip(alone, depths, strict=True)):
            own = lone.proposed([pending[row]], [depth])
            if depth:
                assert isinstance(found, Proposal)
                assert isinstance(own, Proposal)
                assert found.logq is not None
                assert own.logq is not None
                assert drafts[row] == own.tokens[0]
                got, want = found.logq[row, :depth], own.logq[0]
                assert mx.allclose(mx.exp(want).sum(-1), mx.ones(depth), atol=1e-5).item()
                on_cpu = mx.default_device().type == mx.cpu
                close = 0.0 if on_cpu else 1e-3
                assert mx.allclose(got, want, rtol=close, atol=close).item(), (number, row)
            lone.commit([accepted[row]])
        rows.commit(accepted)
        pending = [(3 * number + row) % V for row in range(3)]


# The context of the draft model.


def test_a_row_drafts_less_near_the_end_of_its_context_and_then_ends_alone() -> None:
    provider = tiny_draft_model(seed=3, limit=10)
    target = target_of(provider)
    rows, texts = opened(provider, target, [FIRST, SECOND]), [list(FIRST), list(SECOND)]
    seen = []
    for _ in range(4):
        drafts = rows.draft([text[-1] for text in texts], [3, 3])
        seen.append([len(draft) for draft in drafts])
        for text, draft in zip(texts, drafts, strict=True):
            assert draft == greedy(target.model, text, len(draft))
        reasons = rows.group.stood_down
        rows.commit([min(2, len(drafts[0])), 0])
        texts[0] += [*drafts[0][:2], 1]
        texts[1].append(2)
    # The first row has read 4, 7 and 10 tokens when it is asked: it may read 10.
    assert seen == [[3, 3], [3, 3], [0, 3], [0, 3]]
    assert reasons == ["the draft model's context of 10 tokens is full", None]
    # An ended row takes every verb, and can be kept; it counts on.
    kept = checkpoint_from_bytes(to_bytes(rows.group.capture(0)))
    assert kept.processed_tokens == len(texts[0]) - 1
    assert (dict(kept.attachment.arrays), kept.attachment.metadata["ended"]) == ({}, True)
    again = DrivenRows(provider, target, [kept, rows.group.capture(1)])
    assert again.group.stood_down == reasons
    again.group.consume(mx.array([[1], [1]], mx.int32), None, [1, 1])
    assert again.group.capture(0).processed_tokens == len(texts[0])
    assert again.draft([3, 3], [2, 2]) == [(), greedy(target.model, [*texts[1][:-1], 1, 3], 2)]
    again.commit([0, 1])
    again.filter([0])
    assert again.draft([3], [2], on_device=False) == [()]


def test_the_depth_shrinks_to_what_is_left() -> None:
    provider = tiny_draft_model(limit=7)
    rows = opened(provider, target_of(provider), [FIRST])
    seen = []
    for _ in range(4):  # 4, 5, 6 and 7 tokens are read
        [draft] = rows.draft([2], [5])
        seen.append(len(draft))
        rows.commit([0])
    assert seen == [3, 2, 1, 0]
    assert rows.group.stood_down[0] is not None


def test_a_prompt_that_is_too_long_ends_its_row_when_it_is_read() -> None:
    provider = tiny_draft_model(seed=3, limit=6)
    target = target_of(provider)
    rows = opened(provider, target, [THIRD, FIRST])
    assert [bool(reason) for reason in rows.group.stood_down] == [True, False]
    assert rows.draft([5, FIRST[-1]], [2, 2]) == [(), greedy(target.model, FIRST, 2)]


def test_a_table_of_positions_is_never_left(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = tiny_draft_model("positions", limit=64 - 32)
    target = target_of(provider)
    seen: list[mx.array] = []
    table = target.model.model.wpe
    lookup = type(table).__call__

    def watched(self: Any, ids: mx.array) -> mx.array:
        if self is table:
            seen.append(ids)
        found: mx.array = lookup(self, ids)
        return found

    monkeypatch.setattr(type(table), "__call__", watched)
    rows = opened(provider, target, [THIRD * 4, SECOND])
    rows.group.consume(mx.array([[1] * 25] * 2, mx.int32), None, [1, 25])
    for _ in range(3):
        drafts = rows.draft([1, 1], [32, 32])
        rows.commit([len(draft) for draft in drafts])
    highest = max(int(np.array(ids).max()) for ids in seen)
    assert 32 < highest < 64


# Vocabularies of other sizes.


def test_a_draft_model_with_fewer_tokens_proposes_its_own_and_reads_any() -> None:
    target = MlxLmTarget(tiny_model(seed=3, vocab_size=12))
    provider = tiny_draft_model(seed=3, vocab_size=V)
    rows = opened(provider, target, [(1, 11, 5)])
    [draft] = rows.draft([9], [3])
    model = target_of(provider).model
    assert draft == greedy(model, (1, 0, 0), 3), "unknown tokens are read as some known one"
    assert max(draft) < V
    hot = SamplingOptions(temp=3.0)
    drawing = opened(provider, target, [(1, 2, 5)] * 4, options=[hot] * 4, seeds=[0, 1, 2, 3])
    assert max(max(row) for row in drawing.draft([5] * 4, [4] * 4)) < V


def test_what_a_draft_model_has_beyond_the_targets_tokens_is_cut_off_before_it_draws() -> None:
    target = MlxLmTarget(tiny_model(seed=3, vocab_size=5))
    provider = tiny_draft_model(seed=3, vocab_size=V)
    model = target_of(provider).model
    text = [1, 2, 3]
    rows = opened(provider, target, [text])
    wanted: list[int] = []
    for _ in range(4):
        best: Any = mx.argmax(scores(model, [*text, *wanted])[-1, :5]).item()
        wanted.append(best)
    assert rows.draft([3], [4]) == [tuple(wanted)]
    assert tuple(wanted) != greedy(model, text, 4), "it would have proposed another token"


# Draws.


def test_the_distribution_that_drafts_are_drawn_from_is_declared_where_somebody_rejects() -> None:
    provider, target = own_drafter("attention")
    hot = SamplingOptions(temp=0.9, acceptance="rejection")
    rows = opened(provider, target, [FIRST], options=[hot], seeds=[5])
    found = rows.proposed([FIRST[-1]], [3])
    assert isinstance(found, Proposal)
    assert found.logq is not None
    [draft] = found.tokens
    logits = scores(target.model, [*FIRST, *draft])[len(FIRST) - 1 : -1]
    wanted = np.array(logits, np.float64) / 0.9
    wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.array(found.logq[0], np.float64), wanted, atol=2e-4)
    plain = opened(provider, target, [FIRST]).proposed([FIRST[-1]], [3])
    assert not isinstance(plain, Proposal), "nobody asks"


def test_drafts_are_drawn_with_the_noise_of_the_step_they_are_for() -> None:
    provider, target = own_drafter("attention")
    hot = SamplingOptions(temp=0.8)
    rows = opened(provider, target, [FIRST, SECOND], options=[hot, hot], seeds=[5, 6])
    rows.drawn = [4, 9]
    rows.draft([1, 1], [3, 3])
    assert rows.samplers.asked == [(4, 9), (5, 10), (6, 11)]


# What is refused.


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    provider, target = own_drafter("hybrid")
    good = cold(provider, target, FIRST)
    attachment = good.attachment
    rows = opened(provider, target, [SECOND])

    def refused(match: str, **changes: Any) -> None:
        wrong = evolve(good, attachment=evolve(attachment, **changes))
        with pytest.raises(CheckpointError, match=match):
            rows.group.prepare_append([wrong])

    arrays, metadata = dict(attachment.arrays), dict(attachment.metadata)
    names = list(arrays)
    refused("schema", schema="standalone-draft-0")
    refused("unread token", metadata={**metadata, "unread": V})
    refused("unread token", metadata={**metadata, "unread": True})
    refused("ended is", metadata={**metadata, "ended": 0})
    for name in ("unread", "tokens", "ended"):
        wrong = evolve(attachment, metadata={**metadata, name: "[\n" * 5000})
        with pytest.raises(CheckpointError) as caught:
            rows.group.prepare_append([evolve(good, attachment=wrong)])
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 600
    refused("says", metadata={**metadata, "tokens": 4})
    refused("does not say", metadata={**metadata, "caches": 3})
    refused("cannot be used", metadata={**metadata, "caches": "["})
    refused("cannot be used", arrays={name: arrays[name] for name in names[1:]})
    refused("are of no cache", arrays={**arrays, "cache.9": mx.zeros(2)})
    refused("stands at", metadata={**metadata, "unread": 3})
    refused("that holds none", metadata={**metadata, "ended": True})
    refused("holds", arrays={name: array[..., :-1] for name, array in arrays.items()})
    refused("holds", arrays={name: array.astype(mx.float16) for name, array in arrays.items()})
    swapped = str(metadata["caches"]).replace('"KVCache"', '"ConcatenateKVCache"')
    refused("cannot be used|is a Conc", metadata={**metadata, "caches": swapped})
    with pytest.raises(CheckpointError, match="is of"):
        rows.group.prepare_append([evolve(good, namespace="another")])
    with pytest.raises(CheckpointError, match="read its prompt"):
        rows.group.prepare_append([None])
    rows.group.prepare_append([good]).commit()
    assert rows.group.row_count == 2


def test_a_checkpoint_that_goes_on_behind_the_draft_models_context_is_refused() -> None:
    longer, shorter = (tiny_draft_model("positions", limit=limit) for limit in (9, 8))
    target = target_of(longer)
    kept = cold(longer, target, [*THIRD, 1])
    rows = opened(shorter, target, [SECOND])
    moved = evolve(kept, namespace=shorter.grouped.checkpoint_namespace)
    with pytest.raises(CheckpointError, match="has read 9 tokens, but the draft model reads 8"):
        rows.group.prepare_append([moved])


def test_a_context_of_the_target_is_refused() -> None:
    provider, target = own_drafter("attention")
    rows = opened(provider, target, [FIRST])
    with pytest.raises(ContractError, match="declares ContextKind"):
        rows.group.consume(mx.array([[1]]), mx.zeros((1, 1, 4)), [1])


def test_a_model_whose_state_cannot_be_rolled_back_is_refused() -> None:
    class Stuck(MlxLmTarget):
        no_speculation_reason = "no row form for cache type OwnCache"

    with pytest.raises(UnsupportedModelError, match="OwnCache"):
        DraftModelProvider("stuck", Stuck(tiny_model()), weight_bytes=1)


def test_a_row_takes_the_memory_that_is_said() -> None:
    provider, target = own_drafter("attention")
    grouped = provider.grouped
    assert grouped.row_bytes(target, 40) == target.row_bytes(40)
    assert tiny_draft_model(limit=10).grouped.row_bytes(target, 400) == target.row_bytes(10)
