"""Drafters that reach their limit, that pause, and that serve one request after another.

Cases H1, H2, H6 and I4 of the known ways to get this wrong, through the executor; the other cases
have their tests in the files of their parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted import (
    RIGHT,
    Script,
    ScriptedProvider,
    drain,
    on_device,
    request,
    solo,
    target,
    text_of,
)

from specdec import VerifyGroup
from specdec.contract import ContextKind
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec import Row

PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (33, 8, 33, 8, 33, 8, 2))


def play(group: VerifyGroup, rounds: int) -> None:
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()


class Limited(Script):
    """Drafts nothing once a row has reached its limit, as a drafter does at its context's end."""

    limit = 24

    def __call__(self, tokens: tuple[int, ...], depth: int, step: int) -> Any:
        return super().__call__(tokens, depth, step) if len(tokens) < self.limit else []


@pytest.mark.parametrize("long", [20, 30])
def test_a_row_beyond_the_drafters_limit_decodes_on_and_the_other_drafts(long: int) -> None:
    prompt = tuple((7 * place + 3) % 64 for place in range(long))
    texts = [text_of(prompt), text_of(PROMPTS[0])]
    plan = Limited.always(texts, [RIGHT] * 4)
    group = VerifyGroup(target(), ScriptedProvider(plan))
    beyond, within = group.admit(
        [request(each.prompt, max_tokens=20, num_draft_tokens=4) for each in texts]
    )
    drain(group)
    assert [beyond.emitted, within.emitted] == [each.output[:20] for each in texts]
    assert plan.complaints == []
    assert within.stats.accepted == within.stats.drafted >= 16
    assert (beyond.stats.drafted > 0) is (long < Limited.limit)
    assert beyond.stats.drafted <= Limited.limit


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("reads", [ContextKind.NONE, ContextKind.POST_NORM])
@pytest.mark.parametrize("device", [False, True])
def test_a_row_that_pauses_drafts_again_and_has_missed_nothing(
    device: bool, reads: ContextKind, alone: bool
) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS[: 1 if alone else 2]]
    plan = Script.always(texts, [RIGHT] * 3)
    provider = ScriptedProvider(
        plan, context=reads, device=on_device(plan, lengths=True) if device else None
    )
    group = VerifyGroup(target(), provider)
    rows = group.admit([request(t.prompt, max_tokens=32, num_draft_tokens=3) for t in texts])
    paused: Row = rows[0]
    play(group, 2)
    before, emitted = paused.stats.accepted, len(paused.emitted)
    paused.width = 0
    play(group, 5)
    assert (paused.stats.accepted, len(paused.emitted)) == (before, emitted + 5)
    paused.width = 3
    early = group._live.flight is not None  # a plain window on its way when the pause ends
    play(group, 2 + early)
    assert paused.stats.accepted == paused.stats.drafted == before + 6
    drain(group)
    assert [row.emitted for row in rows] == [text.output[:32] for text in texts]
    assert [row.stats.reason for row in rows] == [None] * len(rows)
    assert plan.complaints == []


def counts(row: Row) -> tuple[tuple[int, ...], int, int, list[int]]:
    stats = row.stats
    return row.emitted, stats.drafted, stats.accepted, stats.drafted_per_position


def ngram_run(group: VerifyGroup, *prompts: Sequence[int]) -> list[Any]:
    rows = group.admit([request(p, max_tokens=24, num_draft_tokens=4) for p in prompts])
    drain(group)
    return [counts(row) for row in rows]


def test_what_one_request_wrote_is_not_drafted_for_the_next() -> None:
    """The second request's drafts are those of a fresh executor, alone and beside the first."""
    first, second = (*PROMPTS[2] * 3, 33), (*PROMPTS[1], *PROMPTS[1])
    fresh = ngram_run(VerifyGroup(target(), NgramProvider(min_ngram=1)), second)
    used = VerifyGroup(target(), NgramProvider(min_ngram=1))
    assert ngram_run(used, first)[0][1] > 0
    assert ngram_run(used, second) == fresh
    together = ngram_run(VerifyGroup(target(), NgramProvider(min_ngram=1)), first, second)
    assert together[1:] == fresh


@pytest.mark.parametrize(
    "prompt", [(4,), (4, 5), (4, 4), (4, 5, 6), (4,) * 9, (1, 2, 9, 1, 2), (9, 1, 2)]
)
def test_ngram_takes_prompts_without_a_match_and_with_nothing_behind_it(
    prompt: tuple[int, ...],
) -> None:
    for shortest in (1, 2, 3):
        provider = NgramProvider(min_ngram=shortest)
        [told] = ngram_run(VerifyGroup(target(), provider), prompt)
        assert told[0] == solo(prompt)[:24]
