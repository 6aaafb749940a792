"""A grammar's masks, held against a matcher fed token by token, and against the text itself."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.errors import ConstraintError, OptionError
from specdec.grammar import BoundGrammar, Grammar, matcher
from specdec.grammar.marker import Marker
from specdec.grammar.vocabulary import _known, fast_tokenizer, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import TokenConstraint

ROOT = Path(__file__).parents[1]
DEMO: Any = AutoTokenizer.from_pretrained(
    ROOT / "plugins" / "specdec-demo" / "src" / "specdec_demo" / "models" / "demo-qwen3"
)
WIDTH = 8200  # as the logits of a model that pads its vocabulary of 8,192
ENDS = {0, 2}


def byte_tokenizer() -> Any:
    """256 bytes, each an id of its own, and the specials <end>, <stop> and <think>."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    made = fast(tokenizer_object=inner, eos_token="<end>")
    made.add_special_tokens({"additional_special_tokens": ["<stop>", "<think>"]})
    return made


BYTES = byte_tokenizer()
END, STOP, THINK = (int(BYTES.get_vocab()[name]) for name in ("<end>", "<stop>", "<think>"))
BYTES_WIDTH = 300

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICE = {
    "anyOf": [
        {"enum": ["yes", "no", None]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    ]
}
NESTED = {
    "type": "object",
    "properties": {
        "kind": {"const": "point"},
        "at": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2, 3]}, "y": {"type": "boolean"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "at"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and isinstance(tags := value.get("tags", []), list)
        and len(tags) <= 3
        and all(tag in ("red", "green") for tag in tags)
    )


def is_choice(value: Any) -> bool:
    if isinstance(value, list):
        return 1 <= len(value) <= 4 and all(type(item) is bool for item in value)
    return value is None or value in ("yes", "no")


def is_nested(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"kind", "at"}
        and value["kind"] == "point"
        and value["at"].keys() == {"x", "y"}
        and value["at"]["x"] in (1, 2, 3)
        and type(value["at"]["y"]) is bool
    )


def demo(grammar: Grammar) -> BoundGrammar:
    return grammar.bind(DEMO, WIDTH, ENDS)


def small(grammar: Grammar) -> BoundGrammar:
    return grammar.bind(BYTES, BYTES_WIDTH, {END, STOP})


def ids(text: str) -> list[int]:
    return [int(i) for i in BYTES.encode(text, add_special_tokens=False)]


def rows(row: TokenConstraint, draft: Sequence[int] = ()) -> tuple[list[set[int]], int]:
    """The allowed ids of every position, and how many drafts stand."""
    flags, allowed = row.masks(draft)
    assert flags is not None
    assert flags.dtype == mx.bool_
    return [set(np.flatnonzero(position).tolist()) for position in np.array(flags)], allowed


def now(row: TokenConstraint) -> set[int]:
    (position,), allowed = rows(row)
    assert allowed == 0
    return position


def feed(row: TokenConstraint, tokens: Sequence[int]) -> list[bool]:
    return [row.advance(token) for token in tokens]


def alone(bound: BoundGrammar, tokens: Sequence[int]) -> set[int]:
    """The mask of a fresh constraint that was fed the tokens one by one."""
    row = bound()
    feed(row, tokens)
    return now(row)


def prefixes(pattern: str, text: str) -> set[int]:
    """Brute force: the bytes after which the text can still become a match, and the ends."""
    found = {
        token
        for token in range(128)
        if regex.fullmatch(pattern, text + chr(token), partial=True) is not None
    }
    spelled = {ids(chr(token))[0] for token in found}
    return spelled | ({END, STOP} if re.fullmatch(pattern, text) else set())


def walk(row: TokenConstraint, seed: int, *, limit: int = 400) -> list[int]:
    """A uniformly random output; it stops where the constraint says that it is complete."""
    rng = random.Random(seed)
    emitted: list[int] = []
    while len(emitted) < limit:
        token = rng.choice(sorted(now(row)))
        if token in ENDS | {END, STOP}:
            return emitted
        emitted.append(token)
        if row.advance(token):
            return emitted
    raise AssertionError("the output does not end")


PATTERNS = ["[0-9]+", "ab?c{2,3}", "(foo|fob)[xy]*", "a(b|c(d|e)f)?", "[^a]b", "x{3}|xy"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_allows_exactly_the_bytes_that_keep_the_text_a_beginning_of_a_match(
    pattern: str,
) -> None:
    bound = small(Grammar.regex(pattern))
    for seed in range(6):
        rng, row, text = random.Random(seed), bound(), ""
        for _ in range(8):
            expected = prefixes(pattern, text)
            # Bytes of longer characters are left to the engine: the oracle knows ASCII alone.
            allowed = {i for i in now(row) if i >= 256 or ord(BYTES.decode([i])[0]) < 128}
            assert allowed == expected
            content = sorted(expected - {END, STOP})
            if not content:
                break
            row.advance(token := rng.choice(content))
            text += BYTES.decode([token])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_token_of_several_letters_is_allowed_where_its_whole_text_fits(pattern: str) -> None:
    row, text = demo(Grammar.regex(pattern))(), ""
    spelled = {i: DEMO.decode([i]) for i in range(4, 8192)}
    for seed in range(4):
        allowed = now(row)
        fits = {
            i
            for i, piece in spelled.items()
            if piece.isascii() and regex.fullmatch(pattern, text + piece, partial=True)
        }
        forced = set(row.propose(1))
        ascii_ids = {i for i in allowed - ENDS if spelled[i].isascii()}
        assert ascii_ids == (forced or fits)
        assert forced <= fits
        assert (allowed >= ENDS) == bool(re.fullmatch(pattern, text))
        if not fits:
            break
        token = random.Random(seed).choice(sorted(ascii_ids))
        row.advance(token)
        text += spelled[token]


@given(seed=st.integers(0, 10_000), width=st.integers(0, 6), case=st.integers(0, 3))
def test_every_position_has_the_mask_of_a_fresh_matcher_fed_one_by_one(
    seed: int, width: int, case: int
) -> None:
    bound = _bound(case)
    text = walk(bound(), seed)
    start = seed % len(text)
    row = bound()
    feed(row, text[:start])
    draft = text[start : start + width]
    positions, allowed = rows(row, draft)
    assert allowed == len(draft)
    assert positions == [alone(bound, text[: start + place]) for place in range(len(draft) + 1)]


_made: dict[int, BoundGrammar] = {}


def _bound(case: int) -> BoundGrammar:
    makers: list[Callable[[], BoundGrammar]] = [
        lambda: demo(Grammar.json_schema(PERSON)),
        lambda: demo(Grammar.json_schema(CHOICE, whitespace=False)),
        lambda: demo(Grammar.lark('start: word ("," word)*\nword: /[a-c]{1,3}/ | "dog"')),
        lambda: small(Grammar.json_schema(NESTED)),
    ]
    if case not in _made:
        _made[case] = makers[case]()
    return _made[case]


def test_the_positions_are_those_of_the_engine_without_any_of_our_code() -> None:
    schema, text = json.dumps(PERSON), '{"name":"Ada","age":36,"tags":["red"]}'
    engine = LLMatcher(
        from_tokenizer(DEMO, n_vocab=WIDTH, eos_token=sorted(ENDS)),
        LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False}),
        log_level=0,
    )
    draft = [int(i) for i in DEMO.encode(text)]
    positions, allowed = rows(demo(Grammar.json_schema(schema))(), draft)
    assert allowed == len(draft)
    for place, position in enumerate(positions):
        bits = np.frombuffer(engine.compute_bitmask(), dtype=np.uint8)
        assert position == set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
        if place < len(draft):
            assert engine.consume_token(draft[place])


@given(
    seed=st.integers(0, 1000),
    looks=st.lists(st.lists(st.integers(-2, WIDTH + 2), max_size=5), max_size=4),
    case=st.integers(0, 2),
)
def test_looking_changes_nothing(seed: int, looks: list[list[int]], case: int) -> None:
    bound = _bound(case)
    text = walk(bound(), seed)
    calm, looked_at = bound(), bound()
    for place, token in enumerate(text):
        before = now(calm)
        for draft in [*looks, text[place : place + 3], text[place : place + 1] * 4]:
            looked_at.masks(draft)
            looked_at.propose(len(draft))
        assert now(looked_at) == before
        assert looked_at.propose(50) == calm.propose(50)
        assert calm.advance(token) == looked_at.advance(token)


@pytest.mark.parametrize(
    ("draft", "allowed"),
    [("a12", 0), ("1a2", 1), ("12a", 2), ("12ab", 2), ("abc", 0), ("123", 3)],
)
def test_a_draft_is_cut_at_its_first_letter(draft: str, allowed: int) -> None:
    bound = small(Grammar.regex("[0-9]+"))
    row = bound()
    row.advance(ids("7")[0])
    positions, found = rows(row, ids(draft))
    assert found == allowed
    assert len(positions) == allowed + 1
    assert positions == [{*ids("0123456789"), END, STOP}] * (allowed + 1)
    feed(row, ids("1"))
    assert now(row) == alone(bound, ids("71"))


@pytest.mark.parametrize("junk", [-1, -(2**40), BYTES_WIDTH, 299, 259, 2**31 - 1, 2**31, 2**70])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_ids_that_do_not_exist_cut_the_draft_and_break_nothing(junk: int, place: int) -> None:
    bound = small(Grammar.regex("[0-9]+"))
    row = bound()
    draft = ids("12")
    draft.insert(place, junk)
    positions, allowed = rows(row, draft)
    assert allowed == place
    assert positions == [alone(bound, draft[:end]) for end in range(place + 1)]
    feed(row, ids("12"))
    with pytest.raises(ConstraintError):
        row.advance(junk)
    assert now(row) == alone(bound, ids("12"))


def test_a_token_that_is_not_allowed_raises_and_leaves_everything_usable() -> None:
    bound = demo(Grammar.json_schema(PERSON))
    row, text = bound(), [int(i) for i in DEMO.encode('{"name":"Ada","age":36}')]
    for place, token in enumerate(text):
        for wrong in (*DEMO.encode("\n"), *ENDS, WIDTH - 1, WIDTH, -1):
            with pytest.raises(ConstraintError, match=f"token {wrong} is not allowed") as caught:
                row.advance(wrong)
            assert "\n" not in str(caught.value)
        assert now(row) == alone(bound, text[:place])
        assert row.advance(token) is (place == len(text) - 1)
    with pytest.raises(ConstraintError):
        row.advance(text[0])
    assert now(row) == ENDS


def test_an_end_is_allowed_exactly_where_the_grammar_accepts_even_beyond_the_tokenizer() -> None:
    ends = {END, STOP, 290}
    bound = Grammar.regex("a{2,3}").bind(BYTES, BYTES_WIDTH, ends | {-1, 9999})
    a = ids("a")[0]
    positions, allowed = rows(bound(), [a, a, a])
    assert allowed == 3
    assert positions == [{a}, {a}, {a} | ends, ends]
    for end in ends:
        assert rows(bound(), [a, a, end, a]) == ([{a}, {a}, {a} | ends, ends], 3)
        assert rows(bound(), [a, a, a, end]) == ([{a}, {a}, {a} | ends, ends, ends], 4)
        assert rows(bound(), [a, end]) == ([{a}, {a}], 1)


def test_without_end_tokens_an_output_ends_where_it_is_complete_and_only_there() -> None:
    bound = Grammar.regex("a{2,3}").bind(BYTES, BYTES_WIDTH, ())
    row, a = bound(), ids("a")[0]
    # The token that completes the output is drawn, not drafted: nothing could follow it.
    assert rows(row, [a, a, a, a]) == ([{a}, {a}, {a}], 2)
    assert feed(row, [a, a, a]) == [False, False, True]
    with pytest.raises(ConstraintError, match="no id of the vocabulary can follow"):
        row.masks([])


@pytest.mark.parametrize("ends", [{END, STOP}, {STOP}, set()])
def test_an_end_token_is_no_content_even_where_the_output_may_end(ends: set[int]) -> None:
    row = Grammar.regex("a{2,3}").bind(BYTES, BYTES_WIDTH, ends)()
    feed(row, ids("aa"))
    for end in (END, STOP):
        with pytest.raises(ConstraintError, match=f"token {end} is not allowed"):
            row.advance(end)
    assert now(row) == {*ids("a")} | ends
    assert feed(row, ids("a")) == [True]


def test_ids_beyond_the_tokenizer_and_special_tokens_are_never_allowed() -> None:
    bound = small(Grammar.regex("(?s:.*)"))
    allowed = now(bound())
    assert allowed <= {*range(256), END, STOP}
    assert {*ids("a{}\n"), END, STOP} <= allowed
    flags, _ = bound().masks([])
    assert flags is not None
    assert flags.shape == (1, BYTES_WIDTH)


def test_a_model_with_fewer_ids_than_its_tokenizer_is_never_led_beyond_them() -> None:
    a, b, z = ids("abz")
    width = z  # the model has no z, and no end token
    bound = Grammar.regex("a(z|b)|bz").bind(BYTES, width, {END})
    flags, allowed = bound().masks([a, z])
    assert flags is not None
    assert flags.shape == (2, width)
    assert allowed == 1
    assert rows(bound(), [a]) == ([{a, b}, {b}], 1)
    # Behind b only z could follow. The row meets that when it has drawn b, with and without drafts.
    assert rows(bound(), [b]) == ([{a, b}], 0)
    row = bound()
    assert row.advance(b) is False
    assert row.propose(4) == ()
    with pytest.raises(ConstraintError, match="no id of the vocabulary can follow"):
        row.masks([])


SCHEMAS = [(PERSON, is_person), (CHOICE, is_choice), (NESTED, is_nested)]


@pytest.mark.parametrize(("schema", "is_valid"), SCHEMAS)
@pytest.mark.parametrize("whitespace", [False, True])
def test_a_hundred_random_walks_end_in_json_of_the_schema(
    schema: dict[str, Any], is_valid: Callable[[Any], bool], whitespace: bool
) -> None:
    bound = demo(Grammar.json_schema(schema, whitespace=whitespace))
    texts = [
        DEMO.decode(walk(bound(), seed, limit=4000)) for seed in range(30 if whitespace else 100)
    ]
    assert all(is_valid(json.loads(text)) for text in texts)
    if not whitespace:
        assert all(
            text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
            or "\\" in text
            for text in texts
        )
    assert len(set(texts)) > 5
    assert not any(other({"x": 1}) for _, other in SCHEMAS), "the validators refuse something"


def test_walks_without_the_masks_are_no_json() -> None:
    rng = random.Random(0)
    for _ in range(20):
        text = DEMO.decode([rng.randrange(4, 8192) for _ in range(12)])
        with pytest.raises(ValueError):  # noqa: PT011 - a JSONDecodeError
            json.loads(text)


@pytest.mark.parametrize("case", [0, 1, 2, 3])
def test_an_output_is_called_complete_exactly_where_only_an_end_may_follow(case: int) -> None:
    bound = _bound(case)
    ends = {END, STOP} if case == 3 else ENDS
    for seed in range(20):
        row, rng = bound(), random.Random(seed)
        complete = False
        for _ in range(300):
            allowed = now(row)
            assert complete == (allowed <= ends)
            if complete:
                break
            complete = row.advance(rng.choice(sorted(allowed - ends)))
        assert complete or case == 2


@pytest.mark.parametrize("case", [0, 1, 3])
def test_proposed_tokens_are_each_the_only_one_that_the_mask_allows(case: int) -> None:
    bound, proposed = _bound(case), 0
    for seed in range(15):
        text = walk(bound(), seed)
        row = bound()
        for token in text:
            forced = list(row.propose(100))
            for most in (-1, 0, 1, 2):
                assert list(row.propose(most)) == forced[: max(most, 0)]
            positions, allowed = rows(row, forced)
            assert allowed == len(forced)
            assert positions[: len(forced)] == [{token} for token in forced]
            proposed += len(forced)
            row.advance(token)
        assert row.propose(100) == ()
    assert proposed > 20


def test_compact_json_forces_more_than_json_with_whitespace() -> None:
    compact, spaced = (demo(Grammar.json_schema(NESTED, whitespace=w))() for w in (False, True))
    assert DEMO.decode(list(compact.propose(100))).startswith('{"kind":"point","at":{"x":')
    assert len(compact.propose(100)) > len(spaced.propose(100))


def test_a_spelling_that_the_mask_does_not_prefer_is_cut_from_a_draft() -> None:
    row = demo(Grammar.json_schema(PERSON))()
    (brace,) = DEMO.encode("{")
    assert now(row) == set(row.propose(1))
    assert brace not in now(row), "the tokenizer would write more than the brace as one token"
    assert rows(row, [brace])[1] == 0


def test_rows_of_one_grammar_are_independent() -> None:
    bound = small(Grammar.regex("[0-9]{2}x"))
    first, second = bound(), bound()
    feed(first, ids("12"))
    assert now(first) == {*ids("x")}
    assert now(second) == now(bound()) == {*ids("0123456789")}
    with pytest.raises(ConstraintError):
        second.advance(ids("x")[0])
    assert feed(first, ids("x")) == [True]
    assert feed(second, ids("98x")) == [False, False, True]


# A constraint that begins inside the block.

DIGIT = {*ids("0123456789")}
EVERYTHING = {*range(BYTES_WIDTH)}


def reasoning(after: str | list[int] = "<think>") -> TokenConstraint:
    return small(Grammar.regex("[0-9]{2,}", after=after))()


def test_before_its_marker_nothing_is_restricted_and_nothing_is_forced() -> None:
    row = reasoning()
    assert row.masks([]) == (None, 0)
    assert row.masks(ids("ab")) == (None, 2)
    assert row.masks([*ids("a"), BYTES_WIDTH, *ids("b")]) == (None, 1)
    assert row.masks([END]) == (None, 1)
    assert row.propose(5) == ()
    assert feed(row, ids("any text")) == [False] * 8
    with pytest.raises(ConstraintError):
        row.advance(BYTES_WIDTH)
    assert row.masks([]) == (None, 0)


def test_a_marker_as_a_middle_draft_restricts_what_is_drafted_behind_it() -> None:
    row = reasoning()
    feed(row, ids("x"))
    positions, allowed = rows(row, [*ids("a"), THINK, *ids("bb")])
    assert allowed == 2
    assert positions == [EVERYTHING, EVERYTHING, DIGIT]
    positions, allowed = rows(row, [*ids("a"), THINK, *ids("12b")])
    assert allowed == 4
    assert positions == [EVERYTHING, EVERYTHING, DIGIT, DIGIT, DIGIT | {END, STOP}]
    assert row.masks([]) == (None, 0)


def test_a_marker_as_the_last_draft_restricts_the_bonus() -> None:
    row = reasoning()
    assert rows(row, [*ids("a"), THINK]) == ([EVERYTHING, EVERYTHING, DIGIT], 2)
    assert rows(row, [THINK]) == ([EVERYTHING, DIGIT], 1)


def test_a_marker_as_the_bonus_restricts_the_next_round() -> None:
    row = reasoning()
    assert feed(row, [*ids("a"), THINK]) == [False, False]
    assert rows(row, ids("1x")) == ([DIGIT, DIGIT], 1)
    assert feed(row, ids("12")) == [False, False]
    assert now(row) == DIGIT | {END, STOP}


def test_a_marker_that_is_drafted_and_rejected_restricts_nothing() -> None:
    row = reasoning()
    rows(row, [*ids("a"), THINK, *ids("12")])
    feed(row, ids("ab"))  # a was accepted, the marker was not
    assert row.masks(ids("cd")) == (None, 2)
    feed(row, [THINK])
    assert now(row) == DIGIT


def test_once_begun_a_grammar_holds_and_a_second_marker_is_not_content() -> None:
    row = reasoning()
    feed(row, [THINK, *ids("12")])
    with pytest.raises(ConstraintError):
        row.advance(THINK)
    assert now(row) == DIGIT | {END, STOP}


@pytest.mark.parametrize("cut", range(6))
def test_a_marker_may_be_split_between_what_is_emitted_and_what_is_drafted(cut: int) -> None:
    text, row = ids("aabaab"), reasoning("aabaab")
    feed(row, ids("a"))  # so that the marker is found only by who falls back inside it
    feed(row, text[:cut])
    positions, allowed = rows(row, [*text[cut:], *ids("1x")])
    assert allowed == 6 - cut + 1
    assert positions == [EVERYTHING] * (6 - cut) + [DIGIT, DIGIT]
    assert feed(row, [*text[cut:], *ids("1")]) == [False] * allowed
    assert now(row) == DIGIT


def test_a_marker_is_found_where_it_first_stands() -> None:
    """All markers of up to 4 and all streams of 8 symbols, cut at each place."""
    found = 0
    for size in range(1, 5):
        for marker in product((0, 1), repeat=size):
            search = Marker(marker)
            for stream in product((0, 1), repeat=8):
                first = next((n for n in range(size, 9) if stream[n - size : n] == marker), None)
                found += first is not None
                matched = 0
                for cut in range(9 if first is None else first):
                    rest = list(stream[cut:])
                    assert search.found_at(matched, rest) == (first and first - cut)
                    if rest:
                        matched = search.step(matched, rest[0])
    assert found > 1000


def test_a_longer_marker_is_found_behind_any_false_beginning() -> None:
    for marker in product((0, 1), repeat=7):
        for noise in product((0, 1), repeat=4):
            stream = (*noise, *marker)
            first = next(n for n in range(7, 12) if stream[n - 7 : n] == marker)
            assert Marker(marker).found_at(0, list(stream)) == first


@pytest.mark.parametrize("after", ["", [], [-1], ["a"], [True], 3, b"ab", [BYTES_WIDTH], [END]])
def test_a_marker_that_can_never_be_emitted_is_refused(after: Any) -> None:
    with pytest.raises(OptionError, match=r"^after is ") as caught:
        small(Grammar.regex("a", after=after))
    assert "\n" not in str(caught.value)


# What goes wrong.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.regex("[0-9"), "regex .*unclosed character class"),
        (lambda: Grammar.regex("a(?=b)"), "regex .*look-around"),
        (lambda: Grammar.regex(r"[^\s\S]"), "regex .*allows no text"),
        (lambda: Grammar.regex(""), "regex .*allows no text"),
        (lambda: Grammar.regex(3), "regex is 3"),  # type: ignore[arg-type]
        (lambda: Grammar.lark("start: x\n"), 'Lark grammar .*unknown name: "x"'),
        (lambda: Grammar.lark(""), "Lark grammar .*Empty grammar"),
        (lambda: Grammar.json_schema({"type": "foo"}), "JSON schema .*Invalid type: foo"),
        (lambda: Grammar.json_schema({"not": {}}), "JSON schema .*Unimplemented keys"),
        (lambda: Grammar.json_schema("{"), "JSON schema is no JSON"),
        (lambda: Grammar.json_schema({"a": {1}}), "JSON schema is no JSON"),
        (lambda: Grammar.json_schema("[\n1]"), r"JSON schema is \[1\]; give an object"),
        (lambda: Grammar.json_schema("false"), "JSON schema is false; give an object"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(make: Callable[[], Grammar], says: str) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        small(make())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


AMBIGUOUS = 'start: "y" /[a-z]+/ | "z" heap\nheap: "a" | heap heap | "a" heap "a"?\n'


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> BoundGrammar:
    """A grammar that passes a limit of the engine a few tokens behind its z."""
    few = LLParserLimits(verbose_errors=False, max_items_in_row=20)
    monkeypatch.setattr(matcher, "limits", lambda: few)
    return small(Grammar.lark(AMBIGUOUS))


def test_a_draft_that_breaks_the_engine_costs_its_row_nothing(tight: BoundGrammar) -> None:
    row = tight()
    assert rows(row, [*ids("z"), *ids("a") * 40]) == ([{*ids("yz")}], 0)
    feed(row, ids("yes"))
    letters = {*ids("abcdefghijklmnopqrstuvwxyz")}
    assert now(row) == letters | {END, STOP}
    assert rows(row, ids("ab"))[1] == 2


def test_a_limit_that_the_row_itself_meets_is_one_line_and_the_state_is_kept(
    tight: BoundGrammar,
) -> None:
    row, other, emitted = tight(), tight(), 0
    row.advance(ids("z")[0])

    def go_on() -> None:
        nonlocal emitted
        for _ in range(40):
            row.masks([])
            row.advance(ids("a")[0])
            emitted += 1

    with pytest.raises(ConstraintError, match=r"cannot go on behind .*max is 20") as first:
        go_on()
    assert "\n" not in str(first.value)
    assert 0 < emitted < 40
    with pytest.raises(ConstraintError) as second:
        go_on()
    assert str(second.value) == str(first.value)
    assert now(other) == {*ids("yz")}


def test_mlx_lms_wrapper_and_the_tokenizer_in_it_are_one_vocabulary() -> None:
    wrapper = TokenizerWrapper(BYTES)
    assert fast_tokenizer(wrapper) is BYTES
    assert fast_tokenizer(BYTES) is BYTES
    made = read_vocabulary(BYTES, BYTES_WIDTH, {END})
    assert read_vocabulary(wrapper, BYTES_WIDTH, [END, END]) is made
    assert read_vocabulary(BYTES, BYTES_WIDTH, {STOP}) is not made
    assert read_vocabulary(BYTES, BYTES_WIDTH + 1, {END}) is not made
    row = Grammar.regex("a", after="<think>").bind(wrapper, BYTES_WIDTH, {END})()
    feed(row, [THINK])
    assert now(row) == {*ids("a")}


def test_a_vocabulary_goes_with_its_tokenizer_and_sees_tokens_that_are_added() -> None:
    gc.collect()
    before = len(_known)
    made = byte_tokenizer()
    first = read_vocabulary(made, BYTES_WIDTH, {END})
    made.add_tokens(["abc"])
    assert read_vocabulary(made, BYTES_WIDTH, {END}) is not first
    row = Grammar.regex("(abc|b)+").bind(made, BYTES_WIDTH, {END})()
    assert made.get_vocab()["abc"] in now(row)
    assert len(_known) == before + 1
    del made
    gc.collect()
    assert len(_known) == before


@pytest.mark.parametrize("tokenizer", [None, "name", object(), BYTES.backend_tokenizer])
def test_a_tokenizer_that_is_not_fast_is_refused(tokenizer: Any) -> None:
    with pytest.raises(OptionError, match=f"type {type(tokenizer).__name__};"):
        Grammar.regex("a").bind(tokenizer, 10, {0})


@pytest.mark.parametrize("size", [0, -1, True, 2.5, None])
def test_a_vocabulary_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(OptionError, match="vocab_size is"):
        Grammar.regex("a").bind(BYTES, size, {END})


def test_a_tokenizer_without_any_end_is_refused() -> None:
    made = byte_tokenizer()
    made.eos_token = None
    with pytest.raises(OptionError, match="a grammar needs one"):
        Grammar.regex("a").bind(made, BYTES_WIDTH, ())
    assert Grammar.regex("a").bind(made, BYTES_WIDTH, {STOP})() is not None


@pytest.mark.parametrize("missing", ["llguidance", "llguidance.hf"])
def test_without_its_extra_a_grammar_says_how_to_install_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar.regex("a")
    for name in ("matcher", "vocabulary"):
        monkeypatch.delitem(sys.modules, f"specdec.grammar.{name}")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OptionError, match=r"pip install 'specdec-core\[grammar\]'") as caught:
        grammar.bind(BYTES, BYTES_WIDTH, {END})
    assert "\n" not in str(caught.value)


def test_writing_a_grammar_down_imports_nothing_heavy() -> None:
    code = """
import sys
for name in ("mlx", "mlx.core", "mlx_lm", "transformers", "numpy", "llguidance"):
    sys.modules[name] = None
import specdec
assert not [name for name in sys.modules if name.startswith("specdec.grammar")]
from specdec.grammar import Grammar
print(Grammar.json_schema({"type": "object"}, after="</think>").text)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "core" / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, '{"type": "object"}\n'), done.stderr


def test_a_grammar_is_a_value() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, other = Grammar.json_schema(schema), Grammar.json_schema(json.dumps(schema, indent=2))
    assert one == other
    assert hash(one) == hash(other)
    assert json.loads(one.text) == schema
    assert list(json.loads(one.text)["properties"]) == ["b", "a"]
    assert one != Grammar.json_schema(schema, whitespace=True)
    assert Grammar.regex("a", after=[1, 2]) == Grammar.regex("a", after=(1, 2))
