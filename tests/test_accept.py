"""The accept walk gives what the target would have written alone, and reads no sample too many."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.verify import Acceptance, accept_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specdec.verify.accept import Ending

# Few ids, so that drafts, samples and end tokens meet often.
IDS = st.integers(0, 3)


class Samples:
    """The target's samples, one by one; remembers how many were read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for token in self.tokens:
            self.read += 1
            yield token
        raise AssertionError("read past the last sample")


def written_alone(
    draft: Sequence[int],
    samples: Sequence[int],
    end_tokens: frozenset[int],
    budget: int | None,
    stops: frozenset[int],
) -> Acceptance:
    """The same by places instead of a walk: where does each reason to end come first?"""
    matching = [d == s for d, s in zip(draft, samples, strict=False)]
    run = len(list(takewhile(bool, matching)))
    said = list(samples[: run + 1])  # the accepted drafts, then the correction or the bonus
    never = len(said)
    ends = next((i for i, token in enumerate(said) if token in end_tokens), never)
    halts = next((i for i, token in enumerate(said) if token in stops), never)
    spent = never if budget is None else budget - 1
    first = min(ends, halts, spent)
    if first == never or first > never:
        return Acceptance(run, tuple(said))
    accepted = min(run, first + 1)
    if ends == first:
        return Acceptance(accepted, tuple(said[:first]), said[first], "stop")
    reason: Ending = "stop" if halts == first else "length"
    return Acceptance(accepted, tuple(said[: first + 1]), None, reason)


@settings(max_examples=2000, deadline=None)
@given(
    data=st.data(),
    draft=st.lists(IDS, max_size=6),
    agree=st.integers(0, 6),
    end_tokens=st.frozensets(IDS, max_size=1),
    budget=st.none() | st.integers(1, 8),
    stops=st.frozensets(IDS, max_size=1),
)
def test_a_walk_gives_what_plain_decoding_gives_and_reads_no_further(
    data: st.DataObject,
    draft: list[int],
    agree: int,
    end_tokens: frozenset[int],
    budget: int | None,
    stops: frozenset[int],
) -> None:
    # The samples follow the draft for a while, so that long runs are as common as short ones.
    rest = data.draw(st.lists(IDS, min_size=len(draft) + 1, max_size=len(draft) + 1))
    samples = [*draft[:agree], *rest[len(draft[:agree]) :]]
    told: list[int] = []

    def stop(token: int) -> bool:
        told.append(token)
        return token in stops

    reader = Samples(samples)
    found = accept_tokens(draft, reader, end_tokens=end_tokens, budget=budget, stops=stop)

    assert found == written_alone(draft, samples, end_tokens, budget, stops)
    assert reader.read == len(found.tokens) + (found.end_token is not None)
    assert told == list(found.tokens)
    without = accept_tokens(draft, samples, end_tokens=end_tokens, budget=budget)
    assert without == written_alone(draft, samples, end_tokens, budget, frozenset())


@pytest.mark.parametrize("place", range(6))
def test_an_end_token_ends_the_row_wherever_it_falls(place: int) -> None:
    """In an accepted draft (0 to 3), as the bonus (4); 5 is behind the window."""
    text = [10, 11, 12, 13, 14]
    end = [*text, 99][place]
    found = accept_tokens(text[:4], text, end_tokens={end}, budget=None)
    if place == 5:
        assert found == Acceptance(4, (10, 11, 12, 13, 14))
    else:
        assert found == Acceptance(min(place + 1, 4), tuple(text[:place]), end, "stop")


@pytest.mark.parametrize("place", range(4))
def test_an_end_token_as_the_correction_is_no_accepted_draft(place: int) -> None:
    draft = [10, 11, 12, 13]
    samples = [*draft[:place], 99, 0, 0, 0]
    found = accept_tokens(draft, samples, end_tokens={99}, budget=None)
    assert found == Acceptance(place, tuple(draft[:place]), 99, "stop")


@pytest.mark.parametrize("budget", range(1, 7))
def test_a_budget_ends_the_row_wherever_it_is_spent(budget: int) -> None:
    text = [10, 11, 12, 13, 14]
    found = accept_tokens(text[:4], text, end_tokens=(), budget=budget)
    kept = min(budget, 5)
    ending: Ending | None = "length" if budget <= 5 else None
    assert found == Acceptance(min(budget, 4), tuple(text[:kept]), None, ending)


@pytest.mark.parametrize("draft", [[], [7], [7, 8], [8], [9, 9]])
def test_an_end_token_wins_over_a_budget_of_one(draft: list[int]) -> None:
    found = accept_tokens(draft, [7, 8, 9], end_tokens={7}, budget=1)
    assert found == Acceptance(int(draft[:1] == [7]), (), 7, "stop")


def test_an_end_token_after_the_budget_is_never_reached() -> None:
    found = accept_tokens([1, 2], [1, 2, 3], end_tokens={2}, budget=1)
    assert found == Acceptance(1, (1,), None, "length")


def test_a_stop_rule_wins_over_the_budget_on_one_token_and_an_end_token_over_both() -> None:
    found = accept_tokens([], [5], end_tokens=(), budget=1, stops=lambda token: token == 5)
    assert found.ending == "stop"
    found = accept_tokens([], [5], end_tokens={5}, budget=1, stops=lambda token: token == 5)
    assert (found.ending, found.end_token) == ("stop", 5)


def test_a_drafter_that_is_always_wrong_has_nothing_accepted() -> None:
    for width in (1, 4):
        found = accept_tokens([0] * width, [1] * (width + 1), end_tokens=(), budget=None)
        assert found == Acceptance(0, (1,))


def test_no_sample_is_drawn_behind_a_mismatch_or_the_bonus() -> None:
    for draft, reads in ([], 1), ([0], 2), ([0, 9, 2], 2), ([0, 1, 2], 4):
        drawn = count()
        found = accept_tokens(draft, drawn, end_tokens=(), budget=None)
        assert next(drawn) == reads
        assert len(found.tokens) == reads
