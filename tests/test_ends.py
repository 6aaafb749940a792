"""A row ends at the first token that completes a stop sequence or a stop string, at any count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import StopSequences as MlxLmStopSequences
from tokenizers_of_every_kind import kind

from specdec.errors import OptionError
from specdec.verify.accept import accept_tokens
from specdec.verify.ends import RowEnds, StopSequences, stop_rule
from specdec.verify.text import RowText

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES = kind("byte-level")
GRIN = "\U0001f600"
# Tokens of one character or a few, so that sequences and strings meet often.
WORDS = [BYTES.encode(word)[0] for word in ("a", "b", " ", "Hello", "<a b>")]
SPLIT = BYTES.encode(GRIN)
assert [BYTES.decode([token]) for token in WORDS] == ["a", "b", " ", "Hello", "<a b>"]
IDS = st.sampled_from([*WORDS[:4], SPLIT[0]])
SEQUENCES = st.lists(st.lists(IDS, min_size=1, max_size=4), max_size=3)
STRINGS = st.lists(st.text(st.sampled_from("abe "), min_size=1, max_size=3), max_size=2)


def new_text(stop_strings: Sequence[str] = ()) -> RowText:
    return RowText(lambda: BYTES.tokenizer.detokenizer, tuple(stop_strings))


def completed_by(tokens: Sequence[int], sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest sequence that the tokens end with."""
    ends = [len(each) for each in sequences if list(tokens[-len(each) :]) == list(each)]
    return max(ends, default=0)


def begun_by(tokens: Sequence[int], sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest end of the tokens that begins a longer sequence."""
    return max(
        (
            size
            for each in sequences
            for size in range(1, min(len(each) - 1, len(tokens)) + 1)
            if list(tokens[-size:]) == list(each[:size])
        ),
        default=0,
    )


def first_string(text: str, known: int, stop_strings: Sequence[str]) -> int | None:
    """Where the first stop string begins that ends behind the first ``known`` characters."""
    starts = [
        at
        for each in stop_strings
        for at in range(len(text))
        if text.startswith(each, at) and at + len(each) > known
    ]
    return min(starts, default=None)


@given(sequences=SEQUENCES, tokens=st.lists(IDS, max_size=16))
def test_the_matcher_agrees_with_mlx_lms_and_with_a_plain_search(
    sequences: list[list[int]], tokens: list[int]
) -> None:
    ours, theirs = StopSequences(sequences).matcher(), MlxLmStopSequences(sequences).matcher()
    for count, token in enumerate(tokens, start=1):
        assert ours.advance(token) == theirs.advance(token)
        assert ours.matched == completed_by(tokens[:count], sequences)
        assert ours.open == begun_by(tokens[:count], sequences)


@pytest.mark.parametrize(
    ("sequences", "tokens", "ends"),
    [
        ([[1, 1, 2]], [1, 1, 1, 2], 4),
        ([[1, 2, 3, 4], [2, 3]], [1, 2, 3, 4], 3),
        ([[1, 2, 3, 4], [2, 5]], [1, 2, 5], 3),
        ([[1, 2, 1, 2, 3]], [1, 2, 1, 2, 1, 2, 3], 7),
        ([[7], [7], [7, 8]], [7, 8], 1),
        ([[0]], [1, 0], 2),
    ],
)
def test_sequences_that_overlap_themselves_and_each_other_are_seen(
    sequences: list[list[int]], tokens: list[int], ends: int
) -> None:
    row = RowEnds(StopSequences(sequences))
    assert [row.advance(token) for token in tokens[:ends]] == [False] * (ends - 1) + [True]


def test_two_rows_of_one_request_do_not_share_a_place() -> None:
    stop = StopSequences([[1, 2]])
    first, second = RowEnds(stop), RowEnds(stop)
    assert not first.advance(1)
    assert not second.advance(2)
    assert first.advance(2)


class Expected:
    """Where a row ends and what it shows, by searching everything that was said so far."""

    def __init__(
        self,
        ids: Sequence[int],
        sequences: Sequence[Sequence[int]],
        strings: Sequence[str],
        least: int,
    ) -> None:
        self.ids, self.strings, self.least = ids, strings, least
        self.count, self.stops, self.hidden, self.cut = len(ids), False, 0, None
        detokenizer, self.readable = BYTES.tokenizer.detokenizer, [""]
        for count, token in enumerate(ids, start=1):
            detokenizer.add_token(token)
            self.readable.append(detokenizer.text)
            length = completed_by(ids[:count], sequences)
            cut = first_string(self.readable[-1], len(self.readable[-2]), strings)
            if count >= least and (length or cut is not None):
                self.count, self.stops, self.hidden, self.cut = count, True, length, cut
                return

    def text(self, delivered: int) -> str:
        ended = self.stops and delivered == self.count
        kept = delivered - self.hidden if ended else delivered
        text = BYTES.at_once(self.ids[:kept])
        cuts = [self.cut] if ended and self.cut is not None else []
        last = first_string(text, len(self.readable[kept]), self.strings)
        if last is not None and kept >= max(1, self.least):
            cuts.append(last)
        return text[: min(cuts)] if cuts else text


def walked(row: RowEnds, ids: Sequence[int], rounds: Sequence[int]) -> tuple[int, bool]:
    """Run a row through the accept walk in rounds of these widths: content tokens, stopped."""
    said: list[int] = []
    widths = iter(rounds)
    while len(said) < len(ids):
        samples = list(ids[len(said) : len(said) + next(widths, 1)])
        taken = accept_tokens(samples[:-1], samples, end_tokens=(), budget=None, stops=row.advance)
        said += taken.tokens
        if taken.ending is not None:
            return len(said), True
    return len(said), False


@settings(max_examples=400)
@given(
    ids=st.lists(IDS, max_size=12),
    sequences=SEQUENCES,
    strings=STRINGS,
    least=st.integers(0, 13),
    rounds=st.lists(st.integers(1, 5), max_size=12),
)
def test_rows_end_and_show_what_a_plain_search_says_at_every_count(
    ids: list[int],
    sequences: list[list[int]],
    strings: list[str],
    least: int,
    rounds: list[int],
) -> None:
    row = RowEnds(StopSequences(sequences), new_text(strings), least)
    expected = Expected(ids, sequences, strings, least)
    count, stopped = walked(row, ids, rounds)
    assert (count, stopped) == (expected.count, expected.stops)
    for delivered in range(count + 1):
        segments = "".join(map(row.text_of, range(delivered)))
        assert segments + row.flush(delivered) == expected.text(delivered)
        kept = delivered - expected.hidden if stopped and delivered == count else delivered
        hidden = begun_by(ids[:delivered], sequences)
        if not strings and not (stopped and delivered == count):  # nothing else is held back
            assert segments == expected.readable[kept - hidden]


def test_the_text_of_a_stop_sequence_is_held_back_until_it_is_decided() -> None:
    a, b, _, hello, _ = WORDS
    row = RowEnds(StopSequences([[a, b, hello]]), new_text())
    assert not any(map(row.advance, [b, a, b]))
    assert [row.text_of(index) for index in range(3)] == ["b", "", ""]
    assert not row.advance(a)
    assert row.text_of(3) == "ab"
    assert row.flush(4) == "a"
    assert [row.advance(token) for token in (b, hello)] == [False, True]
    assert "".join(map(row.text_of, range(6))) + row.flush(6) == "bab"
    assert row.flush(5) == "ab"


def test_of_an_mlx_lm_stop_sequence_the_text_is_shown() -> None:
    a, b, *_ = WORDS
    row = RowEnds(stop_rule(MlxLmStopSequences([[a, b]])), new_text())
    assert [row.advance(token) for token in (b, a, b)] == [False, False, True]
    assert [row.text_of(index) for index in range(3)] == ["b", "a", "b"]
    assert row.flush(3) == ""


@pytest.mark.parametrize("least", range(9))
def test_nothing_stops_a_row_below_min_tokens(least: int) -> None:
    a, b, *_ = WORDS
    said = [a, b] * 4
    by_sequence = RowEnds(StopSequences([[a, b]]), None, least)
    by_string = RowEnds(None, new_text(["ab"]), least)
    ends = max(2, least + least % 2)
    for row in (by_sequence, by_string):
        assert [row.advance(token) for token in said[:ends]] == [False] * (ends - 1) + [True]
    assert by_string.flush(ends) == ""
    assert "".join(map(by_string.text_of, range(ends))) == "ab" * (ends // 2 - 1)


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_string_anywhere_in_a_long_accepted_run_is_seen(offset: int) -> None:
    a, b, *_ = WORDS
    said = [a] * offset + [b] + [a] * (8 - offset)
    row = RowEnds(None, new_text(["b"]))
    taken = accept_tokens(said[:8], said, end_tokens=(), budget=None, stops=row.advance)
    assert (len(taken.tokens), taken.ending) == (offset + 1, "stop")
    shown = "".join(map(row.text_of, range(offset + 1))) + row.flush(offset + 1)
    assert shown == "a" * offset


@pytest.mark.parametrize("rounds", [[4], [2, 2], [3, 1], [1, 1, 1, 1]])
def test_a_stop_string_of_two_tokens_is_seen_across_and_inside_rounds(rounds: list[int]) -> None:
    a, b, _, hello, _ = WORDS
    row = RowEnds(None, new_text(["bHe"]))
    assert walked(row, [a, b, hello, a], rounds) == (3, True)
    assert "".join(map(row.text_of, range(3))) + row.flush(3) == "a"


@pytest.mark.parametrize("rounds", [[len(SPLIT) + 1], [1, 1], [2, 3], [3, 2], [4, 1]])
def test_an_emoji_split_by_rounds_is_whole(rounds: list[int]) -> None:
    assert len(SPLIT) > 1
    said = [WORDS[0], *SPLIT]
    row = RowEnds(StopSequences([[*SPLIT, WORDS[1]]]), new_text([GRIN + "b"]))
    assert walked(row, said, rounds) == (len(said), False)
    for delivered in range(len(said) + 1):
        shown = "".join(map(row.text_of, range(delivered))) + row.flush(delivered)
        assert shown == BYTES.at_once(said[:delivered])


def test_a_row_without_text_has_none() -> None:
    row = RowEnds(StopSequences([[1]]))
    assert row.advance(1)
    assert (row.text_of(0), row.flush(1)) == ("", "")


def test_whatever_counts_as_whole_numbers_is_taken() -> None:
    assert StopSequences([np.array([3, 4]), (5,)]).sequences == ((3, 4), (5,))
    assert stop_rule([[3]]) == StopSequences(((3,),))
    assert stop_rule(None) == StopSequences()
    given_back = MlxLmStopSequences([[1]])
    assert stop_rule(given_back) is given_back


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[]], "an empty sequence"),
        ([[1], ()], "an empty sequence"),
        ([[1, -2]], "stop_sequences has -2"),
        ([1, 2], r"stop_sequences is \[1, 2\]; give sequences of token ids"),
        ([[1.5]], "give sequences of token ids"),
        (7, "stop_sequences is 7"),
        ("END", "or the text as a stop string"),
        (["END"], "give sequences of token ids"),
        ([[None]], "give sequences of token ids"),
    ],
)
def test_what_is_no_stop_sequence_is_refused(wrong: Any, message: str) -> None:
    for make in (StopSequences, stop_rule):
        with pytest.raises(OptionError, match=message):
            make(wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None])
def test_min_tokens_that_is_no_count_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"min_tokens is .*; give 0 or a positive whole number"):
        RowEnds(None, None, wrong)
