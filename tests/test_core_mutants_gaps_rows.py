"""What mutants of forced drafts, reports, readings and outside tokens got away with before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mutants.constrained import PROMPT, Following, Steps, constrained, drafting, form
from scripted import RIGHT, Script, ScriptedProvider, drain, request, solo, target, text_of
from tiny_models import tiny_model

from specdec import VerifyGroup
from specdec.contract import PrefillMode
from specdec.errors import GroupFailedError, OptionError
from specdec.sampling import BannedTokens

if TYPE_CHECKING:
    from specdec import Emission

PROMPTS = ((7,), (1, 2, 3), PROMPT)


def widths_of(group: VerifyGroup, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How wide each forward of the group is from now on."""
    widths: list[int] = []
    forward = group.target.forward

    def counted(tokens: mx.array, *rest: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(tokens, *rest)

    monkeypatch.setattr(group.target, "forward", counted)
    return widths


def forced_request(**options: Any) -> Any:
    return request(PROMPT, constraint=lambda: Steps(form), **options)


@pytest.mark.parametrize("budget", [4, 5, 9, 24])
@pytest.mark.parametrize("forced", [0, 2, 16])
def test_a_drafter_drafts_behind_what_is_forced(
    forced: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = constrained(form)
    provider = drafting(text, Following)
    group = VerifyGroup(target(), provider)
    [row] = group.admit(
        [forced_request(max_tokens=budget, num_draft_tokens=4, num_forced_tokens=forced)]
    )
    while group.rows:
        left = row.budget
        with monkeypatch.context() as patch:
            widths = widths_of(group, patch)
            with group.round() as done:
                done.deliver_all()
        assert left is not None
        assert max(widths) <= left
    assert row.emitted == text.output[:budget]
    assert provider.complaints == []
    assert row.stats.draft_errors == 0
    if budget == 24:
        accepted = sum(sum(each.accepted or ()) for each in provider.rounds)
        assert accepted > 4
        assert (provider.calls["consume"] > 2) == (forced > 0)
        assert row.stats.forced >= (5 if forced else 0)


def test_a_drafter_that_cannot_follow_drafts_without_what_is_forced() -> None:
    text = constrained(form)
    provider = drafting(text)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([forced_request(max_tokens=24, num_draft_tokens=4)])
    drain(group)
    assert row.emitted == text.output
    assert (provider.complaints, row.stats.draft_errors, row.stats.reason) == ([], 0, None)
    assert sum(sum(each.accepted or ()) for each in provider.rounds) == row.stats.accepted > 4


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("shaped", [False, True])
def test_each_token_reports_its_own_place_in_what_it_was_drawn_from(
    shaped: bool, drafts: bool
) -> None:
    banned = [token for token in range(64) if token % 16]  # four are left
    text = text_of(PROMPT)
    heard: list[Emission] = []
    group = VerifyGroup(target(), drafting(text) if drafts and not shaped else None)
    group.admit(
        [
            request(
                PROMPT,
                temp=1.0 if shaped else 0.0,
                seed=3,
                max_tokens=12,
                num_draft_tokens=4,
                logprobs=5,
                processors=[BannedTokens(banned)] if shaped else [],
                consumer=heard.append,
            ),
            request(PROMPTS[1], max_tokens=12, logprobs=9),
        ]
    )
    drain(group)
    tokens = [*PROMPT, *(each.token for each in heard)]
    logits = np.array(tiny_model("qwen3")(mx.array([tokens]))[0], np.float64)
    if shaped:
        logits[:, banned] = -np.inf
    for place, each in enumerate(heard, start=len(PROMPT) - 1):
        scores = logits[place] - np.log(np.exp(logits[place]).sum())
        best = np.argsort(-scores)[: 4 if shaped else 5]
        told = each.token_logprobs
        assert told is not None
        assert told.logprob == pytest.approx(scores[each.token], abs=1e-4)
        assert told.rank == 1 + (scores > scores[each.token]).sum()
        assert [token for token, _ in told.top] == best.tolist()
        assert [value for _, value in told.top] == pytest.approx(scores[best], abs=1e-4)
    assert len(heard) == 12
    assert len({each.token for each in heard}) > 1


def test_a_reading_tells_what_is_left_of_it() -> None:
    group = VerifyGroup(target(), prefill_step_size=4)
    reading = group.read(request(tuple(range(1, 12))))
    left = [reading.left]
    while not reading.done:
        left.append(left[-1] - reading.step())
        assert reading.left == (0 if reading.done else left[-1])
    assert left == [11, 7, 3, 1, 1]


def whole_prompts() -> ScriptedProvider:
    return ScriptedProvider(
        Script([text_of(p) for p in PROMPTS], [[[RIGHT] * 3]] * 3), mode=PrefillMode.FULL
    )


@pytest.mark.parametrize("leaves", range(3))
def test_first_tokens_stay_with_their_rows_when_another_leaves_before_them(leaves: int) -> None:
    provider = whole_prompts()
    group = VerifyGroup(target(), provider)
    rows = group.admit([request(p, max_tokens=7, num_draft_tokens=3) for p in PROMPTS[:2]])
    rows += group.admit([request(PROMPTS[2], max_tokens=7, num_draft_tokens=3)])
    group.remove([rows[leaves]])
    drain(group)
    for place, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        assert row.emitted == (() if place == leaves else solo(prompt)[:7])
    assert provider.complaints == []


@pytest.mark.parametrize("drafts", [False, True])
def test_a_copy_of_a_rows_caches_covers_what_it_says(drafts: bool) -> None:
    group = VerifyGroup(target(), drafting(text_of(PROMPT)) if drafts else None)
    row, _ = group.admit([request(p, max_tokens=9, num_draft_tokens=4) for p in (PROMPT, (7,))])
    for _ in range(3):
        with group.round() as done:
            done.deliver_all()
        caches, covered = group.extract(row)
        assert covered == tuple(row.tokens)[: len(covered)]
        assert {each.offset for each in caches} == {len(covered)}
        assert len(covered) in {len(row.tokens) - 1, len(row.tokens)}
    drain(group)
    assert row.emitted == solo(PROMPT)[:9]


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("kind", ["none", "drafter"])
def test_tokens_from_outside_are_read_as_if_the_row_had_written_them(
    kind: str, rounds: int
) -> None:
    texts = [text_of(prompt) for prompt in PROMPTS]
    script = Script(texts, [[[RIGHT] * 2]] * 3)
    provider = ScriptedProvider(script, rows=Following)
    group = VerifyGroup(target(), provider if kind == "drafter" else None, prefill_step_size=3)
    rows = group.admit([request(p, max_tokens=20, num_draft_tokens=2) for p in PROMPTS])
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()
    for row in rows:
        given = [1] * ((row.budget or 0) + 1)
        with pytest.raises(OptionError, match="max_tokens leaves it"):
            group.consume([given if each is row else [] for each in rows])
    counts = [len(row.tokens) - len(row.request.prompt) for row in rows]
    group.consume(
        [text.output[n : n + more] for text, n, more in zip(texts, counts, (5, 0, 2), strict=True)]
    )
    for row in rows:
        caches, covered = group.extract(row)
        assert covered == tuple(row.tokens[:-1])
        assert {each.offset for each in caches} == {len(covered)}
    drain(group)
    assert [row.emitted for row in rows] == [text.output[:20] for text in texts]
    assert provider.complaints == []
    assert rows[0].stats.consumed == 5
    assert rows[0].stats.draft_errors == 0


@pytest.mark.parametrize("drafts", [False, True])
def test_outside_tokens_end_a_row_where_its_rules_say(drafts: bool) -> None:
    text = constrained(form).output
    provider = drafting(constrained(form), Following)
    group = VerifyGroup(target(), provider if drafts else None)
    options: dict[str, Any] = {"num_draft_tokens": 4, "max_tokens": 6}
    stopped, spent, kept = group.admit(
        [
            forced_request(stop_sequences=[text[1:3]], **options),
            forced_request(**options),
            forced_request(**options),
        ]
    )
    wrong = [*text[:2], (text[2] + 1) % 64]
    with pytest.raises(OptionError, match="constraint does not allow"):
        group.consume([text[:1], text[:1], wrong])
    assert stopped.emitted == spent.emitted == kept.emitted == ()
    group.consume([text[:5], text[:6], text[:2]])
    assert (stopped.finish, stopped.emitted) == ("stop", text[:3])
    assert (spent.finish, spent.emitted) == ("length", text[:6])
    assert group.rows == [kept]
    drain(group)
    assert (kept.finish, kept.emitted) == ("length", text[:6])
    assert provider.complaints == []


def test_a_row_of_a_failed_group_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = VerifyGroup(target(), drafting(text_of(PROMPT)))
    [row] = broken.admit([request(PROMPT, max_tokens=12, num_draft_tokens=4)])
    for _ in range(2):
        with broken.round() as done:
            done.deliver_all()
    before = row.emitted
    with monkeypatch.context() as patch:
        patch.setattr(target(), "forward", None)
        with pytest.raises(GroupFailedError):
            broken.round()
    assert (row.finish, row.emitted) == (None, before)
    provider = drafting(text_of(PROMPT))
    group = VerifyGroup(target(), provider)
    reading = group.read(row)
    assert reading.left == len(PROMPT) + len(before)
    while not reading.done:
        reading.step()
    group.join([reading])
    drain(group)
    assert row.emitted == solo(PROMPT)[:12] != before
    assert provider.complaints == []
