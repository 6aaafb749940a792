"""Every kind of request with every other one: exactly what the target alone gives.

The axes are how a request draws, what shapes its logits, what ends it, what it may write, who is
in the batch, and who drafts. Each option must show in its cell, or the cell would prove nothing.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import mlx.core as mx
import pytest
from attrs import evolve, frozen
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from request_oracle import JSON_PIECES, Asked, Told, alone, at_once, beyond, ngram, told_of
from scripted import RIGHT, WRONG, Script, ScriptedProvider, Text, on_device, target
from tiny_models import VOCABULARY, tiny_model

from specdec import Row, VerifyGroup
from specdec.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from specdec.contract import DraftProvider

DRAWS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seeded": {"temp": 0.8, "seed": 2**40 + 11, "top_p": 0.95, "top_k": 24},
}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "no processor": {},
    "repetition": {"repetition_penalty": 1.7, "repetition_context_size": 7},
    "presence": {"presence_penalty": 1.5, "presence_context_size": 9},
    "bias": {"logit_bias": {2: -4.0, 23: -3.0, 1: -2.0, 31: 1.5, 52: 1.0}},
}
STOPS = ("no stop", "stop string", "min tokens")
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 7},
            "age": {"type": "integer", "maximum": 99999},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
NUMBER = Grammar.json_schema({"type": "integer"})  # may end after each of its digits
GRAMMARS = ("no grammar", "JSON schema")
BATCHES = (1, 3)
DRAFTERS = ("n-gram", "adversarial")
Cell: TypeAlias = tuple[str, str, str, str, int, str]
CELLS: tuple[Cell, ...] = tuple(
    itertools.product(DRAWS, PROCESSORS, STOPS, GRAMMARS, BATCHES, DRAFTERS)
)

LETTERS = tuple(i for i, piece in enumerate(JSON_PIECES) if piece.isalpha())
LEAST = 14
PROMPTS = tuple(
    tuple((start * 7 + place * place * (start + 3)) % VOCABULARY for place in range(2 + start % 9))
    for start in range(40)
)


# Requests whose options show.


@frozen
class Shown:
    """A request, and what it gives; its prompt is such that each of its options shows."""

    asked: Asked
    told: Told


def endings(asked: Asked, stop: str) -> Iterator[Asked]:
    """The request with ends at places that it reaches, as far as such can be seen from its text."""
    free = alone(asked)
    if stop == "no stop":
        yield asked
    elif stop == "stop string":
        for place in range(LEAST - 1, len(free.tokens) - 3):
            string = at_once(asked.tokenizer, free.tokens[place : place + 2])
            before = at_once(asked.tokenizer, free.tokens[:place])
            if len(string) > 1 and string not in before:
                yield evolve(asked, stop_strings=(string,))
    elif asked.grammar is not None:
        yield evolve(asked, end_tokens=frozenset(LETTERS[::2]), min_tokens=LEAST)
    else:
        for token in free.tokens[2:6]:
            yield evolve(asked, end_tokens=frozenset([token]), min_tokens=LEAST)


def shows(asked: Asked) -> bool:
    """Whether the request gives something else without any one of its options."""
    told = alone(asked)
    if len(told.tokens) < LEAST:
        return False
    without: list[dict[str, Any]] = []
    if asked.penalties:
        without.append({"penalties": {}})
    if asked.grammar is not None:
        without.append({"grammar": None})
    if asked.min_tokens:
        without.append({"min_tokens": 0})
    if asked.stop_strings:
        if told.finish != "stop" or told.text == at_once(asked.tokenizer, told.tokens):
            return False
        without.append({"stop_strings": ()})
    others = [alone(evolve(asked, **each)) for each in without]
    return all(other.tokens != told.tokens for other in others) and not (
        asked.min_tokens and others[-1].end_token is None
    )


@cache
def shown(draw: str, processor: str, stop: str, grammar: str) -> Shown:
    """The first prompt whose request shows all its options."""
    written = None
    if grammar == "JSON schema":
        written = NUMBER if stop == "min tokens" else PERSON
    for prompt in PROMPTS:
        plain = Asked(
            prompt,
            penalties=PROCESSORS[processor],
            grammar=written,
            max_tokens=36,
            **DRAWS[draw],
        )
        for asked in endings(plain, stop):
            if shows(asked):
                return Shown(asked, alone(asked))
    raise AssertionError(f"no prompt shows {draw}, {processor}, {stop} and {grammar}")


def companions(place: int, main: Shown) -> list[Shown]:
    """Two requests with other options, which are done early."""
    kinds = tuple(itertools.product(DRAWS, PROCESSORS, STOPS, GRAMMARS))
    found: list[Shown] = []
    for step in itertools.count(5, 7):
        other = shown(*kinds[(place + step) % len(kinds)])
        if other.asked.prompt in {main.asked.prompt, *(each.asked.prompt for each in found)}:
            continue
        few = 3 + 2 * len(found)
        asked = evolve(other.asked, max_tokens=few, min_tokens=min(few, other.asked.min_tokens))
        found.append(Shown(asked, alone(asked)))
        if len(found) == 2:
            break
    return found


# Who drafts.


def adversary(rows: list[Shown], *, device: bool) -> ScriptedProvider:
    """Drafts that are right, wrong at every place, too many, none, and no ids at all."""
    texts = [Text(each.asked.prompt, beyond(each.asked, each.told)) for each in rows]
    moves: list[Any] = [
        [RIGHT] * 4,
        [RIGHT, RIGHT, WRONG, RIGHT],
        [WRONG, RIGHT, RIGHT],
        [RIGHT] * 9,
        [],
        [RIGHT, WRONG],
        [RIGHT] * 2,
        [RIGHT, VOCABULARY if device else 1.5, RIGHT],
    ]
    turned = [moves[place:] + moves[:place] for place in (0, 3, 5)]
    script = Script(texts, turned[: len(texts)], polite=False)
    return ScriptedProvider(script, device=on_device(script, lengths=True) if device else None)


# A cell.


def form(cell: Cell, row: int) -> Literal["ours", "mlx-lm"]:
    """Whose processors a row has; each in half of the rows."""
    place = CELLS.index(cell)
    return "ours" if (place // 3 + place + row) % 2 else "mlx-lm"


def on_the_device(cell: Cell) -> bool:
    """Whether the adversary leaves its drafts on the device."""
    return CELLS.index(cell) % 3 == 0


class Ran:
    """One cell's group, run to its end; state is looked at after each round."""

    def __init__(self, cell: Cell) -> None:
        *kind, size, drafter = cell
        place = CELLS.index(cell)
        main = shown(*map(str, kind))
        self.shown = [main, *(companions(place, main) if size == 3 else ())]
        self.provider: DraftProvider = ngram()
        if drafter == "adversarial":
            self.provider = adversary(self.shown, device=on_the_device(cell))
        self.group = VerifyGroup(target(), self.provider)
        self.published: list[Row] = []
        requests = [
            each.asked.request(
                form(cell, number),
                num_draft_tokens=4,
                publish=self._published,
            )
            for number, each in enumerate(self.shown)
        ]
        self.rows = self.group.admit(requests[:1])
        self._round()
        if requests[1:] and self.group.rows:
            self.rows = [*self.rows, *self.group.admit(requests[1:])]
        while self.group.rows:
            self._round()

    def _published(self, row: Row, caches: list[Any], checkpoint: Any) -> None:
        self.published.append(row)
        assert {cache.offset for cache in caches} == {row.processed}
        assert row.processed <= len(row.tokens) + (row.end_token is not None)
        if checkpoint is not None:
            assert checkpoint.processed_tokens == row.processed

    def _round(self) -> None:
        with self.group.round() as done:
            done.deliver_all()
        state = self.group._live.state
        assert state is not None
        early = self.group._live.flight
        for row, length in zip(self.group.rows, state.lengths, strict=True):
            ahead = early is not None and early.settled
            assert length == row.processed == len(row.tokens) - 1 + ahead


@cache
def ran(cell: Cell) -> Ran:
    return Ran(cell)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: ", ".join(map(str, cell)))
def test_a_request_gives_what_the_target_alone_gives(
    cell: Cell,
) -> None:
    done = ran(cell)
    assert len(done.rows) == cell[4]
    for row, each in zip(done.rows, done.shown, strict=True):
        assert row.error is None
        assert told_of(row) == each.told
        assert row.stats.emitted == len(each.told.tokens)
        assert row.stats.emitted <= row.stats.drafted + row.stats.forced + row.stats.rounds
        assert row.stats.accepted <= row.stats.drafted
    # Every row left with its state exact, and those that came later left earlier.
    assert sorted(map(id, done.published)) == sorted(map(id, done.rows))
    assert done.published[-1] is done.rows[0]
    if isinstance(done.provider, ScriptedProvider):
        assert done.provider.complaints == []


# Against vacuity.


def test_the_matrix_has_all_its_cells() -> None:
    assert len(CELLS) == len(set(CELLS)) == 192
    assert [len(set(axis)) for axis in zip(*CELLS, strict=True)] == [2, 4, 3, 2, 2, 2]


def test_both_forms_of_processors_and_both_kinds_of_drafts_come_with_each_option() -> None:
    for axis in range(6):
        for value in {cell[axis] for cell in CELLS}:
            cells = [cell for cell in CELLS if cell[axis] == value]
            if value != "no processor":
                shaped = {form(cell, 0) for cell in cells if cell[1] != "no processor"}
                assert shaped == {"ours", "mlx-lm"}
            assert {on_the_device(cell) for cell in cells} == {False, True}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_accepted_and_refused_all_over_the_matrix(drafter: str) -> None:
    mains = [ran(cell).rows[0].stats for cell in CELLS if cell[5] == drafter]
    drafted, accepted = (
        sum(getattr(each, name) for each in mains) for name in ("drafted", "accepted")
    )
    forced = sum(ran(cell).rows[0].stats.forced for cell in CELLS if cell[3] == "JSON schema")
    assert 100 < accepted < drafted - 100
    assert forced > 100
    if drafter == "adversarial":
        assert sum(each.invalid_drafts for each in mains) > 20
        done = [ran(cell) for cell in CELLS if cell[5] == drafter]
        assert all(each.rows[0].stats.accepted > 0 for each in done)
        rounds = [
            asked.on_device
            for each in done
            if isinstance(each.provider, ScriptedProvider)
            for asked in each.provider.rounds
        ]
        assert 50 < sum(rounds) < len(rounds) - 50


def test_the_text_is_the_same_without_a_drafter_and_without_forced_tokens() -> None:
    """The plain run of the executor is one more witness, and itself held against the loop."""
    for kind in itertools.product(DRAWS, PROCESSORS, STOPS, GRAMMARS):
        each = shown(*kind)
        group = VerifyGroup(target())
        [row] = group.admit([each.asked.request(num_forced_tokens=0)])
        while group.rows:
            with group.round() as done:
                done.deliver_all()
        assert told_of(row) == each.told
        assert row.stats.target_forwards == len(each.told.tokens) + (row.end_token is not None)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_where_mlx_lm_can_do_it_the_oracle_is_mlx_lm(processor: str) -> None:
    for prompt in PROMPTS[:6]:
        asked = Asked(prompt, penalties=PROCESSORS[processor])
        steps = generate_step(
            mx.array(prompt),
            tiny_model("qwen3"),
            max_tokens=asked.max_tokens,
            logits_processors=mlx_lm_processors(**asked.penalties),
        )
        want = list(steps)
        told = alone(asked)
        assert told.tokens == tuple(token for token, _ in want)
        for got, (_, logprobs) in zip(told.logprobs, want, strict=True):
            assert mx.array_equal(got, logprobs).item()
