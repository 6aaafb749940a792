"""What a drafter proposes: an argmax, or the very draw of its row, over all ids or over some.

The reference is plain float64 over the documented noise: ``argmax(scores / T + gumbel(seed, step,
id))`` over the ids that were scored, the others at ``-inf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec import SamplingOptions
from specdec.contract import Greedy, Listed, Sampled
from specdec.drafting.choose import BlockChoices, Choice, Chooser, declared
from specdec.sampling import RowSamplers
from specdec.sampling.noise import gumbel, seed_words
from specdec.verify.members import MemberSampling

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = npt.NDArray[np.float64]

V = 24
LISTED = (1, 4, 5, 9, 16, 20, 23)
GREEDY = SamplingOptions()
COLD = SamplingOptions(temp=0.4, seed=3)
HOT = SamplingOptions(temp=1.7, seed=-5)
FILTERED = SamplingOptions(temp=1.3, top_k=3, seed=9)
REJECTING = SamplingOptions(temp=0.9, seed=4, acceptance="rejection")


def rows_of(*options: SamplingOptions) -> RowSamplers:
    rows = RowSamplers()
    rows.prepare_append([(each, each.resolved_seed()) for each in options]).commit()
    return rows


def drawn_logits(seed: int, *shape: int) -> Floats:
    """Scores with no constant, as a drafter's own head gives them, exact in float32."""
    found = np.random.default_rng(seed).normal(size=shape) * 1.5 + 2.0
    return found.astype(np.float32).astype(np.float64)


def floats(array: mx.array | None) -> Floats:
    assert array is not None
    return np.array(array.astype(mx.float32)).astype(np.float64)


def everywhere(scores: Floats, ids: Sequence[int]) -> Floats:
    whole = np.full(V, -np.inf)
    whole[list(ids)] = scores
    return whole


def log_softmax(scores: Floats) -> Floats:
    top = scores - scores.max()
    result: Floats = top - np.log(np.exp(top).sum())
    return result


def log_q(options: SamplingOptions, scores: Floats) -> Floats:
    """What a row draws from, ``[V]``."""
    temp, top_k = options.temp, options.top_k
    if not temp:
        sure = np.full(len(scores), -np.inf)
        sure[int(np.argmax(scores))] = 0.0
        return sure
    kept = scores.copy()
    if top_k:
        kept[np.argsort(-kept)[top_k:]] = -np.inf
    return log_softmax(kept / temp)


def expected(options: SamplingOptions, scores: Floats, step: int) -> int:
    """A row's draw over scores ``[V]``."""
    if not options.temp:
        return int(np.argmax(scores))
    words = mx.array([seed_words(options.seed or 0)], mx.uint32)
    noise = gumbel(words, mx.array([[step]]), mx.arange(V, dtype=mx.uint32))
    return int(np.argmax(log_q(options, scores) + floats(noise)[0, 0]))


def chosen(choice: Choice) -> list[int]:
    held: Any = choice.ids.tolist()
    return list(held)


row_options = st.sampled_from([GREEDY, COLD, HOT, FILTERED])


# One token.


def test_greedy_rows_take_the_best_id_of_what_was_scored() -> None:
    choose = Chooser(rows_of(GREEDY, GREEDY), V)
    assert choose.greedy
    assert not choose.lists
    scores = drawn_logits(1, 2, V)
    whole = choose(mx.array(scores), [0, 0])
    assert whole.logq is None
    assert chosen(whole) == np.argmax(scores, axis=-1).tolist()
    own = np.array([[3, 20, 8], [7, 0, 11]])
    few = drawn_logits(2, 2, 3)
    best = np.argmax(few, axis=-1)
    assert len(set(best.tolist())) == 2, "rows differ"
    of_all = choose(mx.array(few), [0, 0], mx.array(own[0]))
    of_each = choose(mx.array(few), [0, 0], mx.array(own))
    assert chosen(of_all) == own[0][best].tolist()
    assert chosen(of_each) == own[[0, 1], best].tolist()
    assert of_all.logq is of_each.logq is None


@given(data=st.data())
def test_each_row_draws_by_its_own_options_and_step_from_what_was_scored(
    data: st.DataObject,
) -> None:
    options = data.draw(st.lists(row_options, min_size=1, max_size=4))
    steps = data.draw(st.lists(st.integers(0, 40), min_size=len(options), max_size=len(options)))
    seed = data.draw(st.integers(0, 10_000))
    how = data.draw(st.sampled_from(["whole", "shared ids", "ids of each row"]))
    random = np.random.default_rng(seed)
    size = V if how == "whole" else 7
    scores = drawn_logits(seed, len(options), size)
    own = np.stack([random.permutation(V)[:size] for _ in options])
    if how == "shared ids":
        own[:] = own[0]
    ids = {"whole": None, "shared ids": mx.array(own[0]), "ids of each row": mx.array(own)}[how]
    if how == "whole":
        own[:] = np.arange(V)
    found = Chooser(rows_of(*options), V)(mx.array(scores, mx.float32), steps, ids)
    spread = [everywhere(each, at.tolist()) for each, at in zip(scores, own, strict=True)]
    assert chosen(found) == [expected(*each) for each in zip(options, spread, steps, strict=True)]
    assert found.logq is None, "nobody asks"


def test_a_draft_over_some_ids_is_the_whole_draw_wherever_that_is_among_them() -> None:
    ids = np.arange(0, V, 2)
    scores = drawn_logits(5, 1, V)
    choose = Chooser(rows_of(HOT), V)
    hit, missed = 0, 0
    for step in range(60):
        [whole] = chosen(choose(mx.array(scores, mx.float32), [step]))
        part = mx.array(scores[:, ids], mx.float32)
        [some] = chosen(choose(part, [step], mx.array(ids)))
        assert some in ids
        assert whole % 2 or some == whole
        hit += some == whole
        missed += some != whole
    assert min(hit, missed) > 10


# What was drawn from.


@pytest.mark.parametrize("how", ["whole", "ids of each row"])
def test_where_a_row_judges_by_rejection_all_declare_what_they_draw_from(how: str) -> None:
    options = (REJECTING, GREEDY, FILTERED)
    choose = Chooser(rows_of(*options), V)
    assert not choose.greedy
    own = np.stack([np.random.default_rng(row).permutation(V)[:6] for row in range(3)])
    scores = drawn_logits(8, 3, 6) if how != "whole" else drawn_logits(8, 3, V)
    ids = None if how == "whole" else mx.array(own)
    found = choose(mx.array(scores, mx.float32), [4, 5, 6], ids)
    for row, each in enumerate(options):
        scored = everywhere(scores[row], range(V) if ids is None else own[row].tolist())
        wanted = log_q(each, scored)
        assert floats(found.logq).shape == (3, V)
        np.testing.assert_allclose(floats(found.logq)[row], wanted, atol=1e-5)
        assert chosen(found)[row] == expected(each, scored, 4 + row)


class Draws:
    """Draws that are told what to say: the least likely is drawn, and what was asked is kept."""

    def __init__(self, selection: Any = None, *, rejecting: bool = False) -> None:
        self.selection: Any = selection or Sampled()
        self.rejecting = rejecting
        self.asked: list[tuple[str, mx.array, list[int]]] = []

    def sample(self, scores: mx.array, steps: Sequence[int]) -> mx.array:
        self.asked.append(("sample", scores, list(steps)))
        return mx.argmin(scores, axis=-1)

    def log_distribution(self, scores: mx.array, steps: Sequence[int]) -> mx.array:
        self.asked.append(("log_distribution", scores, list(steps)))
        return scores + 100.0


@pytest.mark.parametrize("selection", [Greedy(), Sampled()])
@pytest.mark.parametrize("rejecting", [False, True])
def test_a_fused_argmax_is_taken_only_where_nobody_asks_what_it_was_drawn_from(
    selection: Any, rejecting: bool
) -> None:
    draws = Draws(selection, rejecting=rejecting)
    scores = drawn_logits(4, 2, V)
    found = Chooser(draws, V)(mx.array(scores, mx.float32), [3, 8])
    if isinstance(selection, Greedy) and not rejecting:
        assert draws.asked == []
        assert found.logq is None
        return
    assert [(verb, steps) for verb, _, steps in draws.asked] == [
        ("sample", [3, 8]),
        *([("log_distribution", [3, 8])] if rejecting else []),
    ]
    for _, shown, _ in draws.asked:
        np.testing.assert_allclose(floats(shown), [log_softmax(each) for each in scores], atol=1e-5)
    assert (found.logq is not None) == rejecting
    if rejecting:
        np.testing.assert_allclose(
            floats(found.logq), [log_softmax(each) + 100 for each in scores], atol=1e-4
        )


def test_rows_are_asked_anew_at_each_step() -> None:
    rows = rows_of(GREEDY)
    choose = Chooser(rows, V)
    assert choose.greedy
    rows.prepare_append([(REJECTING, 4)]).commit()
    assert not choose.greedy
    scores = drawn_logits(6, 2, V)
    assert choose(mx.array(scores, mx.float32), [0, 0]).logq is not None
    rows.filter_rows([0])
    assert choose.greedy


# The declared vocabulary.


@pytest.mark.parametrize("rejecting", [False, True])
def test_a_declared_vocabulary_is_drawn_from_as_it_was_scored(rejecting: bool) -> None:
    second = REJECTING if rejecting else COLD
    rows = rows_of(HOT, second)
    listed = mx.array(LISTED, mx.int32)
    choose = Chooser(MemberSampling(rows, LISTED), V, listed)
    assert choose.lists
    assert not choose.greedy
    for step in range(12):
        scores = drawn_logits(step, 2, len(LISTED))
        found = choose(mx.array(scores, mx.float32), [step, step + 2], listed)
        spread = [everywhere(each, LISTED) for each in scores]
        assert chosen(found) == [
            expected(HOT, spread[0], step),
            expected(second, spread[1], step + 2),
        ]
        assert (found.logq is not None) == rejecting
        if rejecting:
            wanted = [log_q(HOT, spread[0])[list(LISTED)], log_q(second, spread[1])[list(LISTED)]]
            np.testing.assert_allclose(floats(found.logq), wanted, atol=1e-5)


def test_other_ids_than_the_declared_ones_go_through_the_whole_draw() -> None:
    # Equal ids in another array are another list: its rows need not be the declared ones.
    seen: list[str] = []

    def refuse(*_: Any) -> mx.array:
        seen.append("listed")
        raise AssertionError

    draws = Draws(Listed(LISTED, refuse, refuse), rejecting=True)
    choose = Chooser(draws, V, mx.array(LISTED, mx.int32))
    scores = drawn_logits(1, 2, 3)
    own = np.array([[3, 20, 8], [7, 0, 11]])
    found = choose(mx.array(scores, mx.float32), [0, 1], mx.array(own))
    assert seen == []
    assert [verb for verb, *_ in draws.asked] == ["sample", "log_distribution"]
    wanted = [log_softmax(everywhere(each, at)) for each, at in zip(scores, own, strict=True)]
    np.testing.assert_allclose(floats(draws.asked[0][1]), wanted, atol=1e-5)
    assert floats(found.logq).shape == (2, V)


def test_listed_draws_are_asked_with_their_steps_and_nothing_else() -> None:
    of_list = Draws()
    draws = Draws(Listed(LISTED, of_list.sample, of_list.log_distribution), rejecting=True)
    listed = mx.array(LISTED, mx.int32)
    scores = mx.array(drawn_logits(2, 2, len(LISTED)), mx.float32)
    found = Chooser(draws, V, listed)(scores, [4, 9], listed)
    assert draws.asked == []
    assert [(verb, steps) for verb, _, steps in of_list.asked] == [
        ("sample", [4, 9]),
        ("log_distribution", [4, 9]),
    ]
    assert all(shown is scores for _, shown, _ in of_list.asked)
    assert floats(found.logq).shape == (2, len(LISTED))


# A block.


@pytest.mark.parametrize("options", [(GREEDY, GREEDY), (HOT, FILTERED), (REJECTING, GREEDY)])
@pytest.mark.parametrize("part", [False, True])
def test_slots_at_once_are_slots_one_by_one(
    options: tuple[SamplingOptions, ...], part: bool
) -> None:
    choose = Chooser(rows_of(*options), V)
    own = (2, 3, 11, 17, 22)
    ids = mx.array(own) if part else None
    scores = drawn_logits(12, 2, 4, len(own) if part else V)
    logits, steps = mx.array(scores, mx.float32), [3, 7]
    at_once, one_by_one = BlockChoices(choose, steps), BlockChoices(choose, steps)
    tokens = at_once.every(logits, ids)
    slots = [one_by_one.next(logits[:, at], ids) for at in range(4)]
    assert tokens.tolist() == mx.stack(slots, axis=1).tolist()
    spread = [[everywhere(slot, own if part else range(V)) for slot in each] for each in scores]
    assert tokens.tolist() == [
        [expected(each, slot, step + at) for at, slot in enumerate(row)]
        for each, row, step in zip(options, spread, steps, strict=True)
    ]
    if REJECTING not in options:
        assert at_once.logq is one_by_one.logq is None
        return
    wanted = [
        [log_q(each, slot) for slot in row] for each, row in zip(options, spread, strict=True)
    ]
    for block in (at_once, one_by_one):
        np.testing.assert_allclose(floats(block.logq), wanted, atol=1e-5)


def test_greedy_slots_of_ids_of_each_row_are_picked_from_their_own_row() -> None:
    choose = Chooser(rows_of(GREEDY, GREEDY), V)
    own = np.array([[3, 20, 8], [7, 0, 11]])
    scores = drawn_logits(2, 2, 3)
    block = BlockChoices(choose, [0, 0])
    found: Any = block.next(mx.array(scores), mx.array(own)).tolist()
    assert found == own[[0, 1], np.argmax(scores, axis=-1)].tolist()
    assert block.logq is None


def test_what_a_draft_declares_is_in_the_order_of_its_slots_and_complete_or_nothing() -> None:
    ids = mx.array([1, 2])
    first, second = mx.zeros((2, V)), mx.ones((2, V))
    both = declared([Choice(ids, first), Choice(ids, second)])
    assert floats(both).tolist() == np.stack([np.zeros((2, V)), np.ones((2, V))], 1).tolist()
    assert declared([Choice(ids, first), Choice(ids)]) is None
    assert declared([Choice(ids)]) is None
    assert declared([]) is None
