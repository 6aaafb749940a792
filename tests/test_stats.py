"""Statistics count what was emitted: a round's surplus behind the output's end never counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verify import Acceptance, GenerationStats, accept_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

IDS = st.integers(0, 3)


@frozen
class Counted:
    """One round as it happened: the draft, the walk's result, what was delivered."""

    draft: tuple[int, ...]
    acceptance: Acceptance
    delivered: int

    @property
    def shown(self) -> int:
        """Drafts that were emitted."""
        matching = zip(self.draft, self.acceptance.tokens[: self.delivered], strict=False)
        return next((i for i, (a, b) in enumerate(matching) if a != b), self._upto)

    @property
    def _upto(self) -> int:
        return min(len(self.draft), self.delivered)

    @property
    def counts(self) -> int:
        """Drafts that the output decided on: all, unless it ends inside the accepted run."""
        if self.delivered > self.shown:  # a correction or a bonus was emitted
            return len(self.draft)
        corrected = self.acceptance.end_token is not None and (
            self.draft[self.shown : self.shown + 1] != (self.acceptance.end_token,)
        )
        all_shown = self.delivered == len(self.acceptance.tokens)
        return len(self.draft) if corrected and all_shown else self.shown


def run(
    text: Sequence[int],
    drafts: Sequence[Sequence[int]],
    *,
    end_tokens: frozenset[int],
    budget: int,
    patience: int,
) -> tuple[list[Counted], int]:
    """Decode ``text`` with drafts; the consumer goes away after ``patience`` tokens."""
    rounds: list[Counted] = []
    emitted = 0
    for draft in drafts:
        samples = text[emitted : emitted + len(draft) + 1]
        found = accept_tokens(draft, samples, end_tokens=end_tokens, budget=budget - emitted)
        delivered = min(len(found.tokens), patience - emitted)
        rounds.append(Counted(tuple(draft), found, delivered))
        emitted += delivered
        if found.ending is not None or delivered < len(found.tokens) or emitted == patience:
            break
    return rounds, emitted


@settings(max_examples=1500, deadline=None)
@given(
    text=st.lists(IDS, min_size=60, max_size=60),
    hints=st.lists(st.tuples(st.integers(0, 6), st.lists(IDS, max_size=3)), max_size=8),
    end_tokens=st.frozensets(st.just(3)),
    budget=st.integers(1, 30),
    patience=st.integers(1, 40),
)
def test_counters_add_up_to_the_output_however_it_ends(
    text: list[int],
    hints: list[tuple[int, list[int]]],
    end_tokens: frozenset[int],
    budget: int,
    patience: int,
) -> None:
    # Each draft is right for a while; where a round begins depends on the rounds before it.
    drafts: list[list[int]] = []
    for right, tail in hints:
        rounds, at = run(
            text, [*drafts, []], end_tokens=end_tokens, budget=budget, patience=patience
        )
        begun = at - rounds[-1].delivered if len(rounds) > len(drafts) else 0
        drafts.append([*text[begun : begun + right], *tail])
    rounds, emitted = run(text, drafts, end_tokens=end_tokens, budget=budget, patience=patience)

    stats = GenerationStats()
    for each in rounds:
        stats.count_round(len(each.draft), each.acceptance, each.delivered)

    assert stats.emitted == emitted == sum(each.delivered for each in rounds)
    assert stats.rounds == stats.target_forwards == len(rounds)
    assert stats.accepted == sum(each.shown for each in rounds)
    assert stats.drafted == sum(each.counts for each in rounds)
    verified = sum(len(each.draft) for each in rounds)
    assert stats.accepted <= stats.drafted <= verified
    assert sum(stats.drafted_per_position) == stats.drafted
    assert sum(stats.accepted_per_position) == stats.accepted
    for counts in (stats.drafted_per_position, stats.accepted_per_position):
        assert counts == sorted(counts, reverse=True)
        assert 0 not in counts
    for place, accepted in enumerate(stats.accepted_per_position):
        assert accepted <= stats.drafted_per_position[place]
    # Each round emits its accepted drafts and one token more, unless the output ends in it.
    assert stats.accepted + len(rounds) - 1 <= stats.emitted <= stats.accepted + len(rounds)
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.tokens_per_forward == (emitted / len(rounds) if rounds else 0)


DRAFT = 4


@pytest.mark.parametrize(
    ("acceptance", "delivered", "drafted", "accepted"),
    [
        pytest.param(Acceptance(4, (1, 2, 3, 4, 5)), 5, 4, 4, id="all accepted and a bonus"),
        pytest.param(Acceptance(2, (1, 2, 9)), 3, 4, 2, id="a correction"),
        pytest.param(Acceptance(0, (9,)), 1, 4, 0, id="none accepted"),
        pytest.param(Acceptance(3, (1, 2), 0, "stop"), 2, 2, 2, id="end token among the drafts"),
        pytest.param(Acceptance(1, (), 0, "stop"), 0, 0, 0, id="end token as the first draft"),
        pytest.param(Acceptance(2, (1, 2), 0, "stop"), 2, 4, 2, id="end token as the correction"),
        pytest.param(Acceptance(4, (1, 2, 3, 4), 0, "stop"), 4, 4, 4, id="end token as the bonus"),
        pytest.param(Acceptance(2, (1, 2), None, "length"), 2, 2, 2, id="budget among the drafts"),
        pytest.param(Acceptance(2, (1, 2, 9), None, "length"), 3, 4, 2, id="budget, correction"),
        pytest.param(Acceptance(2, (1, 2), None, "stop"), 2, 2, 2, id="stop rule among the drafts"),
        pytest.param(Acceptance(4, (1, 2, 3, 4, 5)), 2, 2, 2, id="consumer left in the run"),
        pytest.param(Acceptance(2, (1, 2, 9)), 2, 2, 2, id="consumer left before the correction"),
        pytest.param(Acceptance(4, (1, 2, 3, 4, 5)), 0, 0, 0, id="consumer took nothing"),
    ],
)
def test_a_round_is_trimmed_to_the_output(
    acceptance: Acceptance, delivered: int, drafted: int, accepted: int
) -> None:
    stats = GenerationStats()
    stats.count_round(DRAFT, acceptance, delivered)
    assert (stats.drafted, stats.accepted, stats.emitted) == (drafted, accepted, delivered)
    assert stats.drafted_per_position == [1] * drafted
    assert stats.accepted_per_position == [1] * accepted


def test_rounds_without_drafts_count_forwards_and_tokens_alone() -> None:
    stats = GenerationStats()
    for _ in range(3):
        stats.count_round(0, Acceptance(0, (7,)), 1)
    assert (stats.rounds, stats.target_forwards, stats.emitted) == (3, 3, 3)
    assert (stats.drafted, stats.accepted) == (0, 0)
    assert stats.drafted_per_position == stats.accepted_per_position == []
    assert stats.tokens_per_forward == 1.0


def test_rates_of_nothing_are_zero() -> None:
    stats = GenerationStats()
    assert stats.tokens_per_forward == stats.acceptance_rate == 0.0


def test_statistics_go_to_json_with_the_rate() -> None:
    stats = GenerationStats(prompt_tokens=3, drafter="ngram")
    stats.count_round(DRAFT, Acceptance(2, (1, 2, 9)), 3)
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["drafter"] == "ngram"
    assert found["tokens_per_forward"] == 3.0
    assert found["accepted_per_position"] == [1, 1]
