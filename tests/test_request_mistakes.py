"""What a newcomer gets wrong about requests is said in one line, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from scripted import solo, target, tiny_tokenizer
from tiny_models import VOCABULARY, tiny_model

from specdec import BatchGenerator, Request, SamplingOptions, VerifyGroup, generate
from specdec.errors import ClosedError, ConstraintError, OptionError
from specdec.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = (5, 9, 40, 3, 22, 17)


class Even:
    """Allows even ids; a mask's shape may be wrong on purpose."""

    def __init__(self, rows: int = 0, width: int = VOCABULARY) -> None:
        self.rows, self.width = rows, width

    def masks(self, draft: Sequence[int], /) -> tuple[mx.array, int]:
        allowed = 0
        while allowed < len(draft) and draft[allowed] % 2 == 0:
            allowed += 1
        row = mx.arange(self.width) % 2 == 0
        return mx.broadcast_to(row, (allowed + 1 + self.rows, self.width)), allowed

    def advance(self, token: int, /) -> bool:
        assert token % 2 == 0
        return False

    def propose(self, max_tokens: int, /) -> Sequence[int]:
        return [4, 6, 8][:max_tokens]


def ask(constraint: Any, **options: Any) -> Request:
    return Request(
        prompt=PROMPT,
        sampling=SamplingOptions(),
        max_tokens=6,
        constraint=constraint,
        **options,
    )


def finished(request: Request) -> Any:
    group = VerifyGroup(target())
    [other] = group.admit([Request(prompt=PROMPT, sampling=SamplingOptions(), max_tokens=6)])
    [row] = group.admit([request])
    while group.rows:
        with group.round() as done:
            done.deliver_all()
    assert other.emitted == solo(PROMPT)[:6], "the row beside is untouched"
    return row


def test_a_mask_of_the_right_shape_is_taken() -> None:
    row = finished(ask(Even))
    assert (row.finish, row.error, len(row.emitted)) == ("length", None, 6)
    assert all(token % 2 == 0 for token in row.emitted)


@pytest.mark.parametrize(("rows", "width"), [(1, VOCABULARY), (0, 10), (0, VOCABULARY + 1)])
def test_a_mask_of_another_shape_ends_its_row_with_both_shapes(rows: int, width: int) -> None:
    row = finished(ask(lambda: Even(rows, width), num_forced_tokens=0))
    assert row.finish == "error"
    assert isinstance(row.error, ConstraintError)
    assert f"[{1 + rows}, {width}]" in str(row.error)
    assert f"give [1, {VOCABULARY}]" in str(row.error)


def test_a_callable_that_makes_no_constraint_is_refused() -> None:
    with pytest.raises(OptionError, match="made 3, which has no masks and no advance"):
        VerifyGroup(target()).admit([ask(lambda: 3)])


def test_a_grammar_that_is_not_bound_is_refused_by_a_request() -> None:
    with pytest.raises(OptionError, match=r"constraint is Grammar.*bind\(tokenizer"):
        ask(Grammar.regex("a+"))


@pytest.mark.parametrize("wrong", ["[a-z]+", {"type": "object"}, Even()])
def test_what_is_no_grammar_is_refused_with_a_way_out(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"such as Grammar\.regex") as caught:
        generate(tiny_model("qwen3"), tiny_tokenizer(), list(PROMPT), grammar=wrong)
    assert "\n" not in str(caught.value)


def test_forced_tokens_can_be_turned_off_per_prompt() -> None:
    with BatchGenerator(tiny_model("qwen3"), max_tokens=6, stop_tokens=()) as batch:
        with_forced, without = batch.insert(
            [list(PROMPT)] * 2, grammars=[Even, Even], num_forced_tokens=[3, 0]
        )
        forced = {}
        tokens: dict[int, list[int | None]] = {with_forced: [], without: []}
        while batch.has_work:
            for response in batch.next()[1]:
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    assert response.stats is not None
                    forced[response.uid] = response.stats.forced
    assert tokens[with_forced] == tokens[without]
    assert forced[without] == 0


def test_a_closed_generator_says_what_is_closed() -> None:
    batch = BatchGenerator(tiny_model("qwen3"))
    batch.close()
    with pytest.raises(ClosedError, match="on a closed batch generator; open a new one"):
        batch.insert([[1]])
