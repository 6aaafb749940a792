"""A row's segments and what is flushed make the one-shot text, for every tokenizer kind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers_of_every_kind import KINDS, TEXTS, kind
from transformers import PreTrainedTokenizerFast

from specdec.errors import OptionError
from specdec.verify.ends import stop_strings_of
from specdec.verify.text import RowText

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers_of_every_kind import Kind

BROKEN = "\ufffd"
GRIN = "\U0001f600"
# Here the one-shot decode gives up a whole run of bytes for one unfinished character.
TAKES_BACK = "pieces, naive"
TRIMS = ("byte-level", "pieces", "demo-qwen3", "demo-qwen3_5")

texts = st.lists(st.sampled_from((*TEXTS, *"".join(TEXTS))), max_size=8).map("".join)
everything = pytest.mark.parametrize("name", KINDS)


def row_of(each: Kind, stop_strings: Sequence[str] = ()) -> RowText:
    return RowText(lambda: each.tokenizer.detokenizer, tuple(stop_strings))


def pushed(each: Kind, ids: Sequence[int], stop_strings: Sequence[str] = ()) -> RowText:
    row = row_of(each, stop_strings)
    for token in ids:
        assert not row.push(token, True)
    return row


def one_shot(each: Kind, ids: Sequence[int]) -> str:
    return with_its_bytes(each, ids) if each.name == TAKES_BACK else each.at_once(ids)


def with_its_bytes(each: Kind, ids: Sequence[int]) -> str:
    """SentencePiece by hand: of a run of bytes the characters in front of the first bad byte."""
    text, run = "", b""
    for piece in (*each.plain.convert_ids_to_tokens(list(ids)), ""):
        if piece.startswith("<0x"):
            run += bytes([int(piece[3:5], 16)])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + BROKEN * (len(run) - error.start)
        text += piece.replace("\u2581", " ")
        run = b""
    return text.removeprefix(" ")


def pieces_of(data: st.DataObject, each: Kind) -> list[int]:
    """Ids of a text, cut anywhere, or any ids at all."""
    if data.draw(st.booleans()):
        ids = each.encode(data.draw(texts))
        return ids[: data.draw(st.integers(0, len(ids)))]
    return data.draw(st.lists(st.sampled_from(each.ids), max_size=14))


@everything
@settings(max_examples=60)
@given(data=st.data())
def test_segments_and_flush_are_the_one_shot_text_of_what_was_delivered(
    name: str, data: st.DataObject
) -> None:
    each = kind(name)
    ids = pieces_of(data, each)
    row = pushed(each, ids)
    delivered = data.draw(st.integers(0, len(ids)))
    for count in (delivered, len(ids), delivered):
        shown = "".join(map(row.segment, range(count)))
        assert shown + row.flush(count) == row.text(count) == one_shot(each, ids[:count])


@everything
@settings(max_examples=60)
@given(text=texts)
def test_an_encoded_text_comes_as_transformers_decodes_it(name: str, text: str) -> None:
    each = kind(name)
    ids = each.encode(text)
    streamed, decoded = pushed(each, ids).text(len(ids)), each.decode(ids)
    if name in TRIMS:  # mlx-lm drops spaces in front of the first word
        streamed, decoded = streamed.lstrip(" "), decoded.lstrip(" ")
    assert streamed == decoded


@pytest.mark.parametrize("name", [name for name in KINDS if "words" not in name])
def test_an_emoji_cut_at_any_byte_is_broken_only_at_the_end(name: str) -> None:
    each = kind(name)
    ids = each.encode(f"ok {GRIN}{GRIN}")
    whole = pushed(each, ids)
    assert whole.text(len(ids)) == f"ok {GRIN}{GRIN}"
    assert not any(BROKEN in whole.segment(index) for index in range(len(ids)))
    broken = 0
    for count in range(len(ids)):
        text = whole.text(count)
        assert text == pushed(each, ids[:count]).text(count) == one_shot(each, ids[:count])
        assert f"ok {GRIN}{GRIN}".startswith(text.rstrip(BROKEN))
        broken += text.endswith(BROKEN)
    assert broken >= 2


@pytest.mark.parametrize("name", [name for name in KINDS if "words" not in name])
def test_what_is_readable_is_not_held_back(name: str) -> None:
    each = kind(name)
    ids = each.encode("ok caf\u00e9\nnew line")
    row = pushed(each, ids)
    for count in range(len(ids) + 1):
        shown = "".join(map(row.segment, range(count)))
        readable = one_shot(each, ids[:count]).rstrip(BROKEN)
        assert shown == readable or (shown + " " == readable and each.name in TRIMS)


def test_indentation_and_a_second_emoji_survive_where_mlx_lm_streams_them_wrong() -> None:
    each = kind(TAKES_BACK)
    for text in ("a\n    return x", f"{GRIN}{GRIN} ok"):
        ids = each.encode(text)
        detokenizer, streamed = each.tokenizer.detokenizer, ""
        for token in ids:
            detokenizer.add_token(token)
            streamed += detokenizer.last_segment
        detokenizer.finalize()
        streamed += detokenizer.last_segment
        assert streamed != text, "mlx-lm has mended it; this class may then do less"
        assert pushed(each, ids).text(len(ids)) == text


@pytest.mark.parametrize("text", ["is n't it", "do n ' t", "it 's , they 've . n", "a ' b ' m !"])
def test_text_that_clean_up_may_still_join_is_held_back(text: str) -> None:
    each = kind("words, cleaned")
    ids = each.encode(text)
    row = pushed(each, ids)
    for count in range(len(ids) + 1):
        assert row.text(count) == each.decode(ids[:count])


class Failing:
    """One letter a token, marks only with the next letter; fails where it is told to."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.waiting = self.ready = ""

    @property
    def last_segment(self) -> str:
        ready, self.ready = self.ready, ""
        return ready

    def add_token(self, token: int) -> None:
        if token == self.fails:
            raise IndexError(token)
        self.waiting += chr(token)
        if chr(token).isalpha():
            self.finalize()

    def finalize(self) -> None:
        if self.waiting.endswith("!"):
            raise KeyError("!")
        self.ready += self.waiting
        self.waiting = ""


def letters(text: str, decode: Callable[[Sequence[int]], str] | None) -> RowText:
    row = RowText(lambda: Failing(ord("?")), decode=decode)
    for letter in text:
        row.push(ord(letter), True)
    return row


@pytest.mark.parametrize(
    "text", ["ab", "a?b", "?", "??a", "ab?", "ab!", "a!?b", "!?", "a-?b", "-!", "-!a"]
)
def test_what_the_detokenizer_fails_on_is_decoded_by_the_tokenizer(text: str) -> None:
    row = letters(text, lambda ids: "".join(map(chr, ids)))
    for count in range(len(text) + 1):
        assert row.text(count) == text[:count]


def test_without_a_decoder_or_with_a_failing_one_such_tokens_have_no_text() -> None:
    def failing(ids: Sequence[int]) -> str:
        raise OverflowError(ids)

    for decode in (None, failing):
        assert letters("a?b", decode).text(3) == "ab"
        assert letters("a!", decode).text(2) == "a"


def test_ids_that_a_tokenizer_does_not_have_end_no_row() -> None:
    for name in KINDS:
        each = kind(name)
        ids = each.encode("ok")
        strange = [*ids, len(each.ids) + 7, *ids]
        row = RowText(lambda: each.tokenizer.detokenizer, decode=each.plain.decode)  # noqa: B023
        for token in strange:
            row.push(token, True)
        if issubclass(type(each.tokenizer.detokenizer), BPEStreamingDetokenizer):
            assert row.text(len(strange)) == each.at_once(strange)  # mlx-lm writes "!"
        else:
            assert row.text(len(strange)) == each.decode(strange)
    each = kind("words")
    assert pushed(each, [*each.encode("fox"), -1]).text(2) == each.decode(each.encode("fox"))


def test_an_added_token_that_mlx_lm_cannot_finalize_is_shown() -> None:
    made = Tokenizer.from_str(kind("byte-level").plain.backend_tokenizer.to_str())
    made.add_tokens([AddedToken("\u65e5\u00e9")])
    plain: Any = PreTrainedTokenizerFast(tokenizer_object=made)  # type: ignore[no-untyped-call]
    shared = BPEStreamingDetokenizer(plain)

    def fresh() -> Any:
        shared.reset()
        return shared

    ids = plain.encode("x\u65e5\u00e9")
    row = RowText(fresh, decode=plain.decode)
    for token in ids:
        row.push(token, True)
    with pytest.raises(KeyError):
        shared.finalize()
    assert row.text(len(ids)) == plain.decode(ids) == "x\u65e5\u00e9"


# -- stop strings: every character in the tests below is made of the byte tokens of one kind --

BYTES = kind("byte-level")


def tokens_of(*pieces: str | bytes) -> list[int]:
    """A token for each piece: an added one if there is one, else one a byte."""
    ids: list[int] = []
    for piece in pieces:
        ids += BYTES.encode(piece) if isinstance(piece, str) else map(byte_token, piece)
    return ids


def byte_token(byte: int) -> int:
    table = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letter = chr(byte) if byte in table else None
    if letter is None:
        others = [each for each in range(256) if each not in table]
        letter = chr(256 + others.index(byte))
    return int(BYTES.plain.convert_tokens_to_ids(letter))


class Plan:
    """A row of this text's tokens, run until it stops; what it should show, by plain search."""

    def __init__(self, ids: Sequence[int], stop_strings: Sequence[str], min_tokens: int) -> None:
        self.row = row_of(BYTES, stop_strings)
        self.count, self.stopped = 0, False
        for token in ids:
            self.count += 1
            if self.row.push(token, self.count >= min_tokens):
                self.stopped = True
                break
        self.should_stop, self.should_count, self.cut = False, len(ids), None
        detokenizer, self.readable = BYTES.tokenizer.detokenizer, [""]
        for count, token in enumerate(ids, start=1):
            detokenizer.add_token(token)
            self.readable.append(detokenizer.text)
            cut = completed(self.readable[-1], len(self.readable[-2]), stop_strings)
            if cut is not None and count >= min_tokens:
                self.should_stop, self.should_count, self.cut = True, count, cut
                break
        self.stop_strings, self.ids, self.min_tokens = stop_strings, ids, min_tokens

    def text(self, delivered: int) -> str:
        if self.should_stop and delivered == self.should_count:
            return self.readable[delivered][: self.cut]
        text = BYTES.at_once(self.ids[:delivered])
        cut = completed(text, len(self.readable[delivered]), self.stop_strings)
        return text if cut is None or delivered < self.min_tokens else text[:cut]

    def shown(self, delivered: int) -> str:
        """As much as can be shown by then: all that is not the beginning of a stop string."""
        text = self.readable[delivered]
        if self.should_stop and delivered == self.should_count:
            return text[: self.cut]
        open_at = (at for at in range(len(text)) if not self.decided(text[at:]))
        return text[: next(open_at, len(text))]

    def decided(self, tail: str) -> bool:
        return not any(each.startswith(tail) and each != tail for each in self.stop_strings)

    def check(self) -> None:
        assert (self.stopped, self.count) == (self.should_stop, self.should_count)
        for delivered in range(self.count + 1):
            segments = "".join(map(self.row.segment, range(delivered)))
            assert segments == self.shown(delivered)
            assert segments + self.row.flush(delivered) == self.text(delivered)


def completed(text: str, known: int, stop_strings: Sequence[str]) -> int | None:
    """Where the first stop string begins that ends behind the first ``known`` characters."""
    starts = [
        at
        for each in stop_strings
        for at in range(len(text))
        if text.startswith(each, at) and at + len(each) > known
    ]
    return min(starts, default=None)


alphabet = st.sampled_from(
    ["a", "b", "ab", " ", "Hello", GRIN, "\u00e9", "<a b>", b"\xf0", b"\xc3"]
)
stops = st.lists(
    st.text(st.sampled_from(["a", "b", " ", GRIN, "\u00e9", BROKEN]), min_size=1, max_size=4),
    max_size=3,
)


@settings(max_examples=400)
@given(pieces=st.lists(alphabet, max_size=10), stop_strings=stops, min_tokens=st.integers(0, 12))
def test_stop_strings_end_rows_where_a_plain_search_says(
    pieces: list[str | bytes], stop_strings: list[str], min_tokens: int
) -> None:
    Plan(tokens_of(*pieces), stop_strings, min_tokens).check()


@pytest.mark.parametrize(
    ("pieces", "stop_strings", "text", "stops_at"),
    [
        (["a", "b", "c"], ["bc"], "a", 3),
        (["x", "Hello", "y"], ["el"], "xH", 2),
        (["a", "a", "a", "a", "a", "b", "x"], ["aab"], "aaa", 6),
        ([GRIN], [GRIN], "", None),
        (["a", "b", "x"], ["abc"], "abx", 0),
        (["a", "b"], ["abc"], "ab", 0),
        (["a", "b", "c"], ["ab", "abc"], "", 2),
        (["x", "Hello"], ["Hello", "el"], "x", 2),
        (["x", "Hello"], ["el", "Hell"], "x", 2),
        (["a", "b", "c", "d"], ["abcd", "bc"], "a", 3),
        (["a", " "], ["a "], "", 0),
    ],
)
def test_stop_strings_cut_the_text_at_their_first_character(
    pieces: list[str], stop_strings: list[str], text: str, stops_at: int | None
) -> None:
    ids = tokens_of(*pieces)
    plan = Plan(ids, stop_strings, 0)
    plan.check()
    assert plan.row.text(plan.count) == text
    assert plan.stopped == (stops_at != 0)
    assert plan.count == (stops_at or len(ids))


def test_a_stop_string_that_is_an_emoji_is_seen_when_its_last_byte_comes() -> None:
    ids = tokens_of("a", GRIN.encode(), "b")
    plan = Plan(ids, [GRIN], 0)
    plan.check()
    assert (plan.stopped, plan.count, plan.row.text(5)) == (True, 5, "a")
    assert plan.row.text(4) == BYTES.at_once(ids[:4]) == "a" + BROKEN


def test_a_stop_string_that_only_the_end_completes_cuts_unless_it_came_too_early() -> None:
    ids = tokens_of("a", " ")
    assert Plan(ids, ["a "], 2).row.text(2) == ""
    assert Plan(ids, ["a "], 3).row.text(2) == "a "


def test_a_stop_string_may_begin_in_text_that_came_too_early_to_stop() -> None:
    ids = tokens_of("a", "a", "a")
    plan = Plan(ids, ["aa"], 3)
    plan.check()
    assert (plan.stopped, plan.count, plan.row.text(3)) == (True, 3, "a")


def test_a_token_costs_the_same_however_much_text_the_row_has() -> None:
    each = kind("words")  # mlx-lm's own class decodes the whole line again
    ids = each.encode("the fox is here, world") * 40
    row, times = row_of(each, ["never there"]), []
    for _ in range(12):
        start = time.perf_counter()
        for token in ids:
            row.push(token, True)
        times.append(time.perf_counter() - start)
    assert min(times[6:]) < 3 * min(times[:3])


@pytest.mark.parametrize("wrong", [[""], ["a", ""], [1], 5, ["a", None], [b"a"]])
def test_stop_strings_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"stop_strings (is|has) .*; give strings of"):
        stop_strings_of(wrong)
    with pytest.raises(OptionError, match="stop_strings"):
        RowText(lambda: BYTES.tokenizer.detokenizer, wrong)


def test_one_stop_string_may_be_given_alone() -> None:
    assert stop_strings_of("END") == ("END",)
    assert stop_strings_of(None) == ()
    assert stop_strings_of(["a", "b"]) == ("a", "b")


def test_more_tokens_than_the_row_has_cannot_have_been_delivered() -> None:
    with pytest.raises(IndexError, match="delivered is 2, but the row has 1 tokens"):
        pushed(BYTES, tokens_of("a")).flush(2)
