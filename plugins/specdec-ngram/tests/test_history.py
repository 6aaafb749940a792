"""The method, without MLX: what is proposed, against a slow oracle, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import OptionError
from specdec_ngram.history import DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM, NgramHistory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SETTINGS = settings(max_examples=1000, deadline=None)
TOKENS = st.lists(st.integers(0, 3), max_size=40)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda pair: (max(pair), min(pair)))


def slow_proposal(text: list[int], width: int, longest: int, shortest: int) -> list[int]:
    """The rule read aloud: compare the end of the text with every place before it."""
    for n in range(longest, shortest - 1, -1):
        tail = text[len(text) - n :]
        for place in range(len(text) - n - 1, -1, -1):
            if len(tail) == n and text[place : place + n] == tail:
                period = len(text) - (place + n)
                grown = list(text)
                while len(grown) < len(text) + width:
                    grown.append(grown[-period])
                return grown[len(text) :]
    return []


@SETTINGS
@given(TOKENS, st.integers(0, 3), st.integers(0, 12), SIZES)
def test_a_proposal_is_what_the_slow_oracle_finds(
    tokens: list[int], pending: int, width: int, sizes: tuple[int, int]
) -> None:
    history = NgramHistory(tokens, max_ngram=sizes[0], min_ngram=sizes[1])
    assert history.propose(pending, width) == slow_proposal([*tokens, pending], width, *sizes)


@SETTINGS
@given(st.lists(TOKENS, max_size=6), st.integers(0, 3), SIZES)
def test_tokens_read_in_pieces_are_the_same_as_read_at_once(
    pieces: list[list[int]], pending: int, sizes: tuple[int, int]
) -> None:
    whole = [token for piece in pieces for token in piece]
    at_once = NgramHistory(whole, max_ngram=sizes[0], min_ngram=sizes[1])
    in_pieces = NgramHistory(max_ngram=sizes[0], min_ngram=sizes[1])
    one_by_one = NgramHistory(max_ngram=sizes[0], min_ngram=sizes[1])
    for piece in pieces:
        in_pieces.extend(piece)
    for token in whole:
        one_by_one.append(token)
    assert at_once.tokens == in_pieces.tokens == one_by_one.tokens == tuple(whole)
    assert at_once.index_size == in_pieces.index_size == one_by_one.index_size
    drafts = at_once.propose(pending, 6)
    assert drafts == in_pieces.propose(pending, 6) == one_by_one.propose(pending, 6)


@SETTINGS
@given(TOKENS, st.integers(0, 3), st.integers(0, 8), st.integers(0, 8))
def test_a_proposal_changes_nothing_and_a_shorter_one_is_its_start(
    tokens: list[int], pending: int, width: int, less: int
) -> None:
    history = NgramHistory(tokens)
    longer = history.propose(pending, width + less)
    assert history.propose(pending, width) == longer[:width]
    assert history.propose(pending, width + less) == longer
    assert history.tokens == tuple(tokens)


@SETTINGS
@given(TOKENS, st.integers(0, 3), st.integers(1, 8))
def test_a_proposal_is_as_long_as_asked_or_empty(
    tokens: list[int], pending: int, width: int
) -> None:
    proposal = NgramHistory(tokens).propose(pending, width)
    assert len(proposal) in (0, width)
    assert set(proposal) <= {*tokens, pending}


@SETTINGS
@given(TOKENS, SIZES)
def test_the_index_has_at_most_one_entry_for_each_size_and_token(
    tokens: list[int], sizes: tuple[int, int]
) -> None:
    history = NgramHistory(tokens, max_ngram=sizes[0], min_ngram=sizes[1])
    assert history.index_size <= len(tokens) * (sizes[0] - sizes[1] + 1)


@pytest.mark.parametrize("shortest", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_about_as_long_as_the_shortest_ngram_is_no_error(
    shortest: int, extra: int
) -> None:
    prompt = list(range(max(1, shortest + extra)))
    history = NgramHistory(prompt[:-1], max_ngram=4, min_ngram=shortest)
    assert history.propose(prompt[-1], 4) == []


def test_an_empty_history_proposes_nothing() -> None:
    assert NgramHistory().propose(5, 4) == []
    assert len(NgramHistory()) == 0


def test_a_constant_text_is_proposed_to_go_on() -> None:
    assert NgramHistory([7], min_ngram=1).propose(7, 4) == [7, 7, 7, 7]
    assert NgramHistory([7] * 9).propose(7, 4) == [7, 7, 7, 7]


def test_the_trailing_ngram_is_no_occurrence_of_itself() -> None:
    assert NgramHistory([1, 2, 3, 4]).propose(5, 4) == []


def test_a_match_just_before_the_end_is_copied_and_the_copy_goes_on() -> None:
    assert NgramHistory([9, 1, 2], min_ngram=1).propose(1, 5) == [2, 1, 2, 1, 2]
    assert NgramHistory([9, 1, 2, 3, 1]).propose(2, 5) == [3, 1, 2, 3, 1]


def test_the_longest_ngram_wins_over_a_more_recent_shorter_one() -> None:
    assert NgramHistory([1, 2, 3, 8, 0, 3, 9, 1, 2]).propose(3, 1) == [8]


def test_the_most_recent_occurrence_is_copied_even_if_another_is_more_frequent() -> None:
    text = [1, 2, 6, 0, 1, 2, 6, 4, 1, 2, 6, 5, 1, 2, 7, 3, 1]
    assert NgramHistory(text).propose(2, 2) == [7, 3]


def test_the_defaults_are_those_of_the_readme() -> None:
    assert (DEFAULT_MAX_NGRAM, DEFAULT_MIN_NGRAM) == (4, 2)


@pytest.mark.parametrize(
    ("longest", "shortest", "named"),
    [
        (0, 1, "max_ngram is 0"),
        (3, 0, "min_ngram is 0"),
        (2, 3, "min_ngram is 3, but max_ngram is 2"),
        (3.0, 1, "max_ngram is 3.0"),
        ("3", 1, "max_ngram is '3'"),
        (True, 1, "max_ngram is True"),
        (3, None, "min_ngram is None"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_in_one_line(
    longest: Any, shortest: Any, named: str
) -> None:
    with pytest.raises(OptionError) as raised:
        NgramHistory(max_ngram=longest, min_ngram=shortest)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


class Meter:
    """Counts every token that is looked at and every entry that is looked up or written."""

    def __init__(self, history: NgramHistory) -> None:
        self.count = 0
        meter = self

        class Tokens(list[int]):
            def __getitem__(self, key: Any) -> Any:
                found = super().__getitem__(key)
                meter.count += len(found) if isinstance(key, slice) else 1
                return found

            def __iter__(self) -> Any:
                meter.count += len(self)
                return super().__iter__()

            def extend(self, tokens: Iterable[int]) -> None:
                added = list(tokens)
                meter.count += len(added)
                super().extend(added)

        class Followers(dict[tuple[int, ...], int]):
            def get(self, key: Any, default: Any = None) -> Any:
                meter.count += 1
                return super().get(key, default)

            def update(self, pairs: Any) -> None:
                added = list(pairs)
                meter.count += len(added)
                super().update(added)

        history._tokens = Tokens(history._tokens)
        history._followers = Followers(history._followers)


def steps(history: NgramHistory, read: Sequence[int], pending: int) -> int:
    meter = Meter(history)
    for token in read:
        history.append(token)
    history.propose(pending, 8)
    return meter.count


@pytest.mark.parametrize(
    ("read", "pending"),
    [((3, 4, 5), 6), ((10**6, 10**6 + 1), 10**6 + 2), ((50, 10**6), 50)],
    ids=["longest matches", "nothing matches", "shortest matches"],
)
def test_reading_and_proposing_cost_the_same_after_100_and_100000_tokens(
    read: tuple[int, ...], pending: int
) -> None:
    short, long = NgramHistory(range(100)), NgramHistory(range(100_000))
    assert steps(short, read, pending) == steps(long, read, pending)


def test_a_constant_history_costs_no_more_the_longer_it_is() -> None:
    assert steps(NgramHistory([1] * 100), [1], 1) == steps(NgramHistory([1] * 100_000), [1], 1)


def test_the_history_imports_no_mlx() -> None:
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None; "
        "from specdec_ngram.history import NgramHistory; "
        "print(NgramHistory([1, 2, 1]).propose(2, 2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 2]"
