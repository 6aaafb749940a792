"""What a drafter, a consumer, a sampler, a stop rule or the target does wrong stays where it is."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from scripted import (
    RIGHT,
    WRONG,
    Ending,
    Fault,
    OnDevice,
    Script,
    ScriptedProvider,
    ScriptedRows,
    Text,
    drain,
    ending_of,
    expected,
    on_device,
    request,
    solo,
    target,
    text_of,
)
from tiny_models import VOCABULARY, tiny_model

from specdec import Row, VerifyGroup
from specdec.contract import (
    ContextKind,
    DeviceProposal,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    Swap,
    commit_all,
)
from specdec.errors import GroupFailedError, OptionError, one_line
from specdec.state import RaggedState
from specdec.targets import MlxLmTarget
from specdec.verify import flight
from specdec.verify.lane import MAX_FAILURES, MAX_FAULTS
from specdec.verify.proposals import check_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec import Emission
    from specdec.state import RowState

PROMPTS = ((1, 2, 3), (5, 9, 40, 3, 22, 17), (7,))
TEXTS = [text_of(prompt) for prompt in PROMPTS]
LIMITS = (16, 12, 9)

READERS = {
    "tokens": (PrefillMode.TAIL_SPLIT, ContextKind.NONE),
    "whole prompt": (PrefillMode.FULL, ContextKind.NONE),
    "hidden states": (PrefillMode.FULL, ContextKind.PRE_NORM),
}


def provider_of(
    faults: dict[str, Sequence[int]], *, device: bool = False, reader: str = "tokens"
) -> ScriptedProvider:
    moves = [[[RIGHT] * 3], [[RIGHT, WRONG], [RIGHT] * 4], [[WRONG], [RIGHT] * 2]]
    plan = Script(TEXTS, moves)
    mode, context = READERS[reader]
    return ScriptedProvider(
        plan,
        device=on_device(plan, lengths=True) if device else None,
        mode=mode,
        context=context,
        faults=faults,
    )


def serve(provider: ScriptedProvider) -> tuple[list[Row], Counter[str]]:
    """Two rows, a third one that joins after a round; rows leave one after another.

    Returns:
        The rows, and how often each verb was called while there were rows.
    """
    group = VerifyGroup(target(), provider, drafter="scripted", prefill_step_size=3)
    asked = [
        request(text.prompt, max_tokens=limit, num_draft_tokens=4)
        for text, limit in zip(TEXTS, LIMITS, strict=True)
    ]
    rows = group.admit(asked[:2])
    with group.round() as done:
        done.deliver_all()
    rows += group.admit(asked[2:])
    drain(group)
    calls = Counter(provider.calls)
    group.close()
    for row, text, limit in zip(rows, TEXTS, LIMITS, strict=True):
        assert ending_of(row) == expected(text.output, (), limit)
    assert provider.complaints == []
    assert provider.left_open == []
    return rows, calls


# Exceptions of the drafter.

HOST_VERBS = (
    "open_prefill",
    "prefill",
    "capture",
    "open",
    "prepare_append",
    "join",
    "draft",
    "commit",
    "filter_rows",
    "close",
)
DEVICE_VERBS = ("draft_device", "resolve", "commit")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("verb", HOST_VERBS)
def test_a_drafter_that_raises_changes_no_token_and_is_reported(
    verb: str, call: int, reader: str
) -> None:
    provider = provider_of({verb: [call]}, reader=reader)
    rows, calls = serve(provider)
    reported = [row.stats for row in rows if row.stats.draft_errors]
    assert bool(reported) == (calls[verb] >= call)
    for stats in reported:
        assert stats.draft_errors == 1
        assert stats.last_draft_error == f"Fault: {verb} {call}"


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("verb", DEVICE_VERBS)
def test_a_drafter_that_raises_on_the_device_path_changes_no_token_and_is_reported(
    verb: str, call: int
) -> None:
    provider = provider_of({verb: [call]}, device=True)
    rows, calls = serve(provider)
    reported = [row.stats for row in rows if row.stats.draft_errors]
    assert bool(reported) == (calls[verb] >= call)
    for stats in reported:
        assert stats.draft_errors == 1
        assert stats.last_draft_error == f"Fault: {verb} {call}"


@pytest.mark.parametrize("reader", READERS)
def test_every_verb_of_the_drafter_is_reached_by_these_tests(reader: str) -> None:
    rows, calls = serve(provider_of({}, reader=reader))
    assert [verb for verb in HOST_VERBS if calls[verb] == 0] == []
    assert calls["draft"] >= 4
    assert {row.stats.draft_errors for row in rows} == {0}
    assert {row.stats.reason for row in rows} == {None}
    _, calls = serve(provider_of({}, device=True))
    assert [verb for verb in DEVICE_VERBS if calls[verb] == 0] == []


@pytest.mark.parametrize("call", range(1, 5))
@pytest.mark.parametrize(
    ("verb", "device"),
    [
        ("draft", False),
        ("commit", False),
        ("draft_device", True),
        ("resolve", True),
        ("commit", True),
    ],
)
def test_a_drafter_of_tokens_alone_is_opened_again_and_drafts_as_before(
    verb: str, call: int, device: bool
) -> None:
    provider = provider_of({verb: [call]}, device=device)
    rows, calls = serve(provider)
    assert calls["open"] == 2
    assert {row.stats.reason for row in rows} == {None}
    _, again = (group for group in provider.groups if group.decodes)
    later = [told for told in provider.rounds if told.group is again]
    assert later
    assert all(told.accepted is not None for told in later)
    assert sum(sum(told.accepted or ()) for told in later) > 0


@pytest.mark.parametrize("verb", ["draft", "commit"])
def test_a_drafter_that_keeps_raising_is_let_go_with_the_reason(verb: str) -> None:
    provider = provider_of({verb: range(1, 100)})
    rows, calls = serve(provider)
    assert calls[verb] == calls["open"] == MAX_FAILURES
    for row in rows:
        assert row.stats.reason == f"drafter scripted failed: Fault: {verb} {MAX_FAILURES}"
    # A row that joined after the first time counts what it saw.
    assert [row.stats.draft_errors for row in rows] == sorted(
        (row.stats.draft_errors for row in rows), reverse=True
    )
    assert rows[0].stats.draft_errors == MAX_FAILURES
    assert rows[-1].stats.draft_errors >= 1
    assert calls["draft"] == MAX_FAILURES


@pytest.mark.parametrize("verb", ["open_prefill", "prefill", "capture", "open"])
def test_a_drafter_that_cannot_be_opened_again_is_let_go_with_the_reason(verb: str) -> None:
    """Each row meets it a few times. Of rows that are refused together, each is asked alone too."""
    rows, calls = serve(provider_of({verb: range(1, 100)}))
    # A prompt of one token leaves a drafter nothing to read.
    refused = rows[:2] if verb == "prefill" else rows
    together = MAX_FAILURES if verb == "open" else 0
    assert calls[verb] == MAX_FAILURES * len(refused) + together
    for row in refused:
        assert row.stats.draft_errors == MAX_FAILURES
        assert row.stats.reason == f"drafter scripted failed: {row.stats.last_draft_error}"
        assert re.fullmatch(rf"Fault: {verb} \d+", row.stats.last_draft_error or "")
        assert row.stats.drafted == 0
    for row in rows[len(refused) :]:
        assert (row.stats.draft_errors, row.stats.reason) == (0, None)
        assert row.stats.accepted > 0


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_drafter_of_hidden_states_is_let_go_at_its_first_failure(call: int) -> None:
    provider = provider_of({"draft": [call]}, reader="hidden states")
    rows, calls = serve(provider)
    assert calls["draft"] == call
    assert calls["open"] == 1
    for row in rows:
        assert row.stats.reason == f"drafter scripted failed: Fault: draft {call}"


def test_rows_that_come_after_a_drafter_was_let_go_say_why_they_have_none() -> None:
    provider = provider_of({"draft": range(1, 100)})
    group = VerifyGroup(target(), provider, drafter="scripted")
    group.admit([request(PROMPTS[0], max_tokens=8, num_draft_tokens=4)])
    drain(group)
    [late] = group.admit([request(PROMPTS[1], max_tokens=8, num_draft_tokens=4)])
    drain(group)
    assert late.emitted == TEXTS[1].output[:8]
    assert (late.stats.drafter, late.stats.num_draft_tokens) == (None, 0)
    assert late.stats.reason == f"drafter scripted failed: Fault: draft {MAX_FAILURES}"


def test_a_prepared_change_that_raises_when_it_is_discarded_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clinging(ScriptedRows):
        def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Swap:
            def drop() -> None:
                raise Fault("discard")

            return Swap(super().prepare_append(checkpoints).commit, drop)

    plan = Script.always(TEXTS[:2], [RIGHT] * 3)
    group = VerifyGroup(target(), ScriptedProvider(plan, rows=Clinging))
    [live] = group.admit([request(PROMPTS[0], max_tokens=20, num_draft_tokens=3)])

    def failing(build: Sequence[Callable[[], Any]]) -> None:
        def full() -> Any:
            raise MemoryError("no room")

        commit_all([*build, full])

    with monkeypatch.context() as patch:
        patch.setattr("specdec.verify.live.commit_all", failing)
        with pytest.raises(MemoryError):
            group.admit([request(PROMPTS[1], max_tokens=9, num_draft_tokens=3)])
    assert group.rows == [live]
    [late] = group.admit([request(PROMPTS[1], max_tokens=9, num_draft_tokens=3)])
    drain(group)
    assert live.emitted == TEXTS[0].output[:20]
    assert late.emitted == TEXTS[1].output[:9]
    assert live.stats.last_draft_error == "Fault: discard"


class Modeless(ScriptedRows):
    """Cannot say how it reads prompts."""

    @property
    def prefill_mode(self) -> Any:
        raise Fault("mode")

    @prefill_mode.setter
    def prefill_mode(self, _value: Any) -> None:
        pass


class OddMode(Modeless):
    @property
    def prefill_mode(self) -> Any:
        return "sideways"

    @prefill_mode.setter
    def prefill_mode(self, _value: Any) -> None:
        pass


class Uncaptured(ScriptedRows):
    """Gives no checkpoint."""

    def capture(self, row: int, /) -> Any:
        return None


class OtherContext(ScriptedRows):
    """Reads other hidden states than its provider says."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tap_layers = (1,)
        self.context = ContextKind.TAPS


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (Modeless, "Fault: mode"),
        (OddMode, "ValueError: 'sideways' is not a valid PrefillMode"),
        (Uncaptured, "ContractError: capture() returned NoneType"),
        (
            OtherContext,
            "ContractError: the group taps [1] as taps, but its provider declares []",
        ),
    ],
)
def test_a_draft_group_that_is_none_is_let_go_with_the_reason(
    rows: type[ScriptedRows], said: str
) -> None:
    served, _ = serve(ScriptedProvider(rows=rows))
    for row in served:
        assert row.stats.reason == f"drafter scripted failed: {said}"


def test_a_prefill_mode_may_be_its_bare_value() -> None:
    class Bare(ScriptedRows):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.prefill_mode: Any = "full"
            self.context: Any = "none"

    plan = Script.always(TEXTS, [RIGHT] * 3)
    served, _ = serve(ScriptedProvider(plan, rows=Bare))
    assert all(row.stats.accepted > 0 for row in served)
    assert all(row.stats.target_forwards == row.stats.rounds + 1 for row in served)


class Scribbler(ScriptedRows):
    """Writes into every list that it is given."""

    def draft(
        self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
    ) -> list[Any]:
        proposals = super().draft(pending, depths, steps)
        for given in (pending, depths, steps):
            scribble(given)
        return proposals

    def commit(self, accepted: Sequence[int], context: mx.array | None, /) -> None:
        super().commit(accepted, context)
        scribble(accepted)

    def filter_rows(self, keep: Sequence[int], /) -> None:
        super().filter_rows(keep)
        scribble(keep)


def scribble(given: Sequence[int]) -> None:
    if isinstance(given, list):
        given[:] = [99] * 7


def test_a_drafter_may_write_into_the_lists_that_it_is_given() -> None:
    plan = Script(TEXTS, [[[RIGHT] * 3], [[RIGHT, WRONG]], [[WRONG], [RIGHT] * 2]])
    rows, _ = serve(ScriptedProvider(plan, rows=Scribbler))
    assert {row.stats.draft_errors for row in rows} == {0}
    assert sum(row.stats.accepted for row in rows) > 0


class Trap(list[Any]):
    """A list that cannot be read."""

    def __iter__(self) -> Any:
        raise Fault("trap")


class Bomb:
    """No id, and it cannot be shown either."""

    def __index__(self) -> int:
        raise Fault("bomb")


@pytest.mark.parametrize("proposal", [Trap([1]), [Bomb()], [1, Bomb()]])
def test_a_proposal_that_raises_when_it_is_read_counts_as_the_drafters_exception(
    proposal: Any,
) -> None:
    provider = ScriptedProvider(lambda *_: proposal)
    rows, _ = serve(provider)
    assert rows[0].stats.draft_errors == MAX_FAILURES
    assert rows[0].stats.last_draft_error in ("Fault: trap", "Fault: bomb")


# Proposals that are no drafts.

TOO_MANY = [RIGHT] * 9
INVALID: dict[str, Any] = {
    "negative": [RIGHT, -1],
    "the vocabulary's size": [VOCABULARY],
    "the largest int32": [2**31 - 1, RIGHT],
    "a float": [1.0],
    "nothing": [None],
    "a string": ["7"],
    "too many": TOO_MANY,
    "no list": None,
    "a number": 7,
    "text": "12",
}


@pytest.mark.parametrize("name", INVALID)
def test_a_row_with_invalid_proposals_stands_down_and_the_others_keep_drafting(name: str) -> None:
    rude = Script.always(TEXTS[:1], INVALID[name])
    rude.polite = False
    kind = Script.always(TEXTS[1:2], [RIGHT] * 2)

    def plan(text: tuple[int, ...], depth: int, step: int) -> Any:
        if text[:3] != PROMPTS[0]:
            return kind(text, depth, step)
        return rude(text, depth, step) if depth else []

    provider = ScriptedProvider(plan)
    group = VerifyGroup(target(), provider, drafter="scripted")
    bad, good = group.admit(
        [request(text.prompt, max_tokens=20, num_draft_tokens=4) for text in TEXTS[:2]]
    )
    drain(group)
    assert bad.emitted == TEXTS[0].output[:20]
    assert good.emitted == TEXTS[1].output[:20]
    depths = [told.depths[0] for told in provider.rounds if len(told.depths) == 2]
    assert depths == [4] * MAX_FAULTS + [0] * (len(depths) - MAX_FAULTS)
    assert len(depths) > MAX_FAULTS
    assert bad.stats.invalid_drafts == MAX_FAULTS
    assert bad.stats.last_draft_error is not None
    assert bad.stats.reason == f"drafter scripted stood down: {bad.stats.last_draft_error}"
    assert bad.stats.draft_errors == good.stats.draft_errors == 0
    assert (good.stats.invalid_drafts, good.stats.last_draft_error) == (0, None)
    assert good.stats.reason is None
    assert good.stats.accepted > 10
    assert provider.complaints == rude.complaints == kind.complaints == []


@pytest.mark.parametrize("bad_id", [-1, VOCABULARY, 2**31 - 1])
@pytest.mark.parametrize("lengths", [True, False])
def test_a_row_with_invalid_ids_on_the_device_stands_down_and_the_others_keep_drafting(
    bad_id: int, lengths: bool
) -> None:
    plan = Script(TEXTS[:2], [[[RIGHT, bad_id]], [[RIGHT] * 2]])
    provider = ScriptedProvider(plan, device=on_device(plan, lengths=lengths))
    group = VerifyGroup(target(), provider, drafter="scripted")
    bad, good = group.admit(
        [request(text.prompt, max_tokens=20, num_draft_tokens=4) for text in TEXTS[:2]]
    )
    drain(group)
    assert bad.emitted == TEXTS[0].output[:20]
    assert good.emitted == TEXTS[1].output[:20]
    assert bad.stats.invalid_drafts == MAX_FAULTS
    assert bad.stats.accepted == MAX_FAULTS
    assert bad.stats.reason == (
        f"drafter scripted stood down: a draft is {bad_id}; ids are 0 to {VOCABULARY - 1}"
    )
    assert good.stats.invalid_drafts == 0
    assert good.stats.accepted > 8
    assert provider.complaints == []


@pytest.mark.parametrize("proposal", [None, [], [[1]], [[1]] * 3, 5, Proposal([[1]]), "ab"])
def test_a_proposal_of_the_wrong_number_of_rows_blames_every_row(proposal: Any) -> None:
    class Odd(ScriptedRows):
        def draft(
            self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
        ) -> Any:
            super().draft(pending, depths, steps)
            return proposal

    group = VerifyGroup(target(), ScriptedProvider(rows=Odd), drafter="scripted")
    rows = group.admit(
        [request(text.prompt, max_tokens=8, num_draft_tokens=4) for text in TEXTS[:2]]
    )
    drain(group)
    for row, text in zip(rows, TEXTS, strict=False):
        assert row.emitted == text.output[:8]
    assert [row.stats.invalid_drafts for row in rows] == [MAX_FAULTS] * 2


def test_a_host_proposal_may_come_with_the_distribution_it_was_drawn_from() -> None:
    class WithLogq(ScriptedRows):
        def draft(
            self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
        ) -> Any:
            drafts = super().draft(pending, depths, steps)
            return Proposal(drafts, mx.zeros((len(drafts), max(depths), VOCABULARY)))

    plan = Script.always(TEXTS, [RIGHT] * 3)
    rows, _ = serve(ScriptedProvider(plan, rows=WithLogq))
    assert {row.stats.invalid_drafts for row in rows} == {0}
    assert all(row.stats.accepted == row.stats.drafted > 0 for row in rows)


def never(_ids: Sequence[int]) -> Sequence[Sequence[int]]:
    raise AssertionError("resolve() of a proposal that was refused")


def unfit(tokens: Any, lengths: Any = None) -> DeviceProposal:
    return DeviceProposal(tokens=tokens, resolve=never, lengths=lengths)


@pytest.mark.parametrize(
    ("proposal", "said"),
    [
        (unfit(mx.zeros((2, 2))), "tokens of mlx.core.float32"),
        (unfit([[1, 2], [3, 4]]), "tokens of"),
        (unfit(mx.zeros((3, 2), mx.int32)), r"tokens of shape \(3, 2\)"),
        (unfit(mx.zeros((2, 9), mx.int32)), r"tokens of shape \(2, 9\)"),
        (unfit(mx.zeros((2, 0), mx.int32)), r"tokens of shape \(2, 0\)"),
        (unfit(mx.zeros((2, 2), mx.int32), mx.zeros((2,))), "lengths that are no integers"),
        (unfit(mx.zeros((2, 2), mx.int32), mx.zeros((1,), mx.int32)), "lengths of shape"),
        ([[1], [2]], "no attribute 'tokens'"),
        (7, "no attribute 'tokens'"),
    ],
)
def test_a_device_proposal_of_the_wrong_form_counts_as_the_drafters_exception(
    proposal: Any, said: str
) -> None:
    provider = ScriptedProvider(device=lambda *_: proposal)
    group = VerifyGroup(target(), provider, drafter="scripted")
    rows = group.admit(
        [request(text.prompt, max_tokens=8, num_draft_tokens=4) for text in TEXTS[:2]]
    )
    drain(group)
    for row, text in zip(rows, TEXTS, strict=False):
        assert row.emitted == text.output[:8]
        assert row.stats.draft_errors == MAX_FAILURES
        assert row.stats.last_draft_error is not None
        assert re.search(said, row.stats.last_draft_error)


LIES: dict[str, Callable[[list[list[int]]], Any]] = {
    "other ids": lambda rows: [[(token + 1) % VOCABULARY for token in row] for row in rows],
    "fewer ids": lambda rows: [row[:1] for row in rows],
    "more ids": lambda rows: [[*row, 3] for row in rows],
    "a row too few": lambda rows: rows[:1],
    "nothing": lambda _: None,
    "text": lambda _: "ab",
    "floats": lambda rows: [[1.5] * len(row) for row in rows],
    "ids out of range": lambda rows: [[-1] * len(row) for row in rows],
    "a trap": lambda rows: [Trap(row) for row in rows],
}
HARMLESS = ("fewer ids", "more ids")


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("right", [True, False])
def test_a_drafter_that_misremembers_its_device_drafts_changes_no_token(
    lie: str, right: bool
) -> None:
    plan = Script.always(TEXTS[:2], [RIGHT if right else WRONG] * 3)
    honest = on_device(plan, lengths=True)

    def lying(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> Any:
        said = honest(texts, depths, steps)
        return None if said is None else OnDevice(said.rows, said.lengths, LIES[lie])

    provider = ScriptedProvider(plan, device=lying)
    group = VerifyGroup(target(), provider, drafter="scripted")
    rows = group.admit(
        [request(text.prompt, max_tokens=12, num_draft_tokens=3) for text in TEXTS[:2]]
    )
    drain(group)
    for row, text in zip(rows, TEXTS, strict=False):
        assert row.emitted == text.output[:12]
        told = row.stats.invalid_drafts + row.stats.draft_errors
        assert (told > 0) == (lie not in HARMLESS)
    assert provider.complaints == []


@pytest.mark.parametrize("length", [-5, 0, 2, 99])
def test_device_lengths_out_of_range_change_no_token(length: int) -> None:
    plan = Script.always(TEXTS[:1], [RIGHT] * 3)
    honest = on_device(plan, lengths=False)

    def odd(texts: list[tuple[int, ...]], depths: list[int], steps: list[int]) -> Any:
        said = honest(texts, depths, steps)
        return None if said is None else OnDevice(said.rows, [length])

    provider = ScriptedProvider(plan, device=odd)
    group = VerifyGroup(target(), provider)
    [row] = group.admit([request(PROMPTS[0], max_tokens=13, num_draft_tokens=3)])
    drain(group)
    assert row.emitted == TEXTS[0].output[:13]
    assert provider.rounds[0].accepted == [min(3, max(0, length))]
    assert provider.complaints == []


# Standing down, resting, coming back.


def test_a_drafter_rests_while_no_row_drafts_and_comes_back_for_one_that_does() -> None:
    plan = Script(TEXTS[:2], [[[-1]], [[RIGHT] * 3]])
    provider = ScriptedProvider(plan)
    group = VerifyGroup(target(), provider, drafter="scripted")
    [bad] = group.admit([request(PROMPTS[0], max_tokens=30, num_draft_tokens=4)])
    for _ in range(MAX_FAULTS + 4):
        with group.round() as done:
            done.deliver_all()
    assert provider.calls["draft"] == MAX_FAULTS
    assert provider.left_open == []
    [good] = group.admit([request(PROMPTS[1], max_tokens=16, num_draft_tokens=4)])
    drain(group)
    assert bad.emitted == TEXTS[0].output[:30]
    assert good.emitted == TEXTS[1].output[:16]
    assert bad.stats.invalid_drafts == MAX_FAULTS
    assert good.stats.accepted > 8
    assert good.stats.reason is None
    assert all(told.depths[0] == 0 for told in provider.rounds[MAX_FAULTS:] if told.depths[1:])
    assert provider.complaints == []


def test_a_request_without_drafts_does_not_take_the_drafter_from_later_ones() -> None:
    plan = Script.always(TEXTS[:2], [RIGHT] * 3)
    provider = ScriptedProvider(plan)
    group = VerifyGroup(target(), provider, drafter="scripted")
    [plain] = group.admit([request(PROMPTS[0], max_tokens=6, num_draft_tokens=0)])
    drain(group)
    [drafting] = group.admit([request(PROMPTS[1], max_tokens=12, num_draft_tokens=3)])
    drain(group)
    assert provider.calls["draft"] == 3
    assert (plain.stats.drafter, plain.stats.reason) == (None, "num_draft_tokens is 0")
    assert (drafting.stats.drafter, drafting.stats.reason) == ("scripted", None)
    assert drafting.stats.accepted == 9


def test_a_drafter_of_hidden_states_stays_in_step_with_rows_that_want_no_drafts() -> None:
    provider = provider_of({}, reader="hidden states")
    group = VerifyGroup(target(), provider, drafter="scripted")
    plain = request(PROMPTS[0], max_tokens=12, num_draft_tokens=0)
    group.admit([plain])
    for _ in range(3):
        with group.round() as done:
            done.deliver_all()
    [late] = group.admit([request(PROMPTS[1], max_tokens=6, num_draft_tokens=3)])
    drain(group)
    assert late.emitted == TEXTS[1].output[:6]
    assert late.stats.accepted > 0
    assert late.stats.reason is None
    # And a row that wants none has its own reason.
    assert group.rows == []
    none, after = group.admit(
        [
            request(PROMPTS[2], max_tokens=4, num_draft_tokens=0),
            request(PROMPTS[0], max_tokens=12, num_draft_tokens=3),
        ]
    )
    drain(group)
    assert none.emitted == TEXTS[2].output[:4]
    assert after.emitted == TEXTS[0].output[:12]
    assert (none.stats.drafter, none.stats.reason) == (None, "num_draft_tokens is 0")
    assert (after.stats.drafter, after.stats.reason) == ("scripted", None)
    assert after.stats.accepted > 4
    assert provider.complaints == []


def test_a_row_that_wants_no_drafts_says_so_while_the_drafter_rests() -> None:
    group = VerifyGroup(target(), ScriptedProvider(), drafter="scripted")
    rows = []
    for _ in range(2):
        rows += group.admit([request(PROMPTS[0], max_tokens=6, num_draft_tokens=0)])
        with group.round() as done:
            done.deliver_all()
    drain(group)
    for row in rows:
        assert (row.stats.drafter, row.stats.num_draft_tokens) == (None, 0)
        assert row.stats.reason == "num_draft_tokens is 0"


# Consumers and cancellation.


def publishing(into: dict[int, tuple[int, set[int]]]) -> Callable[[Row, list[Any], Any], None]:
    def publish(row: Row, caches: list[Any], checkpoint: Any) -> None:
        into[id(row)] = (checkpoint.processed_tokens, {cache.offset for cache in caches})

    return publish


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("leaves", ["raises", "returns False"])
@pytest.mark.parametrize("device", [False, True])
def test_a_consumer_that_leaves_in_a_burst_ends_its_row_alone(
    place: int, leaves: str, device: bool
) -> None:
    boom = Fault("consumer")
    heard: list[Emission] = []

    def consumer(emission: Emission) -> bool | None:
        heard.append(emission)
        if len(heard) <= place:
            return None
        if leaves == "raises":
            raise boom
        return False

    published: dict[int, tuple[int, set[int]]] = {}
    plan = Script.always(TEXTS[:2], [RIGHT] * 4)
    provider = ScriptedProvider(plan, device=on_device(plan, lengths=True) if device else None)
    group = VerifyGroup(target(), provider)
    options: dict[str, Any] = {
        "max_tokens": 18,
        "num_draft_tokens": 4,
        "publish": publishing(published),
    }
    gone, other = group.admit(
        [
            request(PROMPTS[0], consumer=consumer, **options),
            request(PROMPTS[1], **options),
        ]
    )
    drain(group)
    assert gone.emitted == TEXTS[0].output[: place + 1]
    assert other.emitted == TEXTS[1].output[:18]
    assert (gone.finish, other.finish) == (
        "error" if leaves == "raises" else "cancelled",
        "length",
    )
    assert gone.error is (boom if leaves == "raises" else None)
    assert other.error is None
    # What was not delivered is in no state. A correction or bonus is never read yet.
    bonus = place % 5 == 4
    assert gone.processed == len(gone.tokens) - bonus
    for row in (gone, other):
        assert published[id(row)] == (row.processed, {row.processed})
    assert gone.stats.emitted == place + 1
    assert provider.complaints == []


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("drafting", [True, False])
def test_cancellation_is_looked_at_before_each_token(place: int, drafting: bool) -> None:
    looks = itertools.count(1)
    looked: list[int] = []

    def cancelled() -> bool:
        looked.append(next(looks))
        return looked[-1] > place

    plan = Script.always(TEXTS[:2], [RIGHT] * 3)
    group = VerifyGroup(target(), ScriptedProvider(plan) if drafting else None)
    gone, other = group.admit(
        [
            request(PROMPTS[0], max_tokens=20, num_draft_tokens=3, cancelled=cancelled),
            request(PROMPTS[1], max_tokens=9, num_draft_tokens=3),
        ]
    )
    drain(group)
    assert gone.emitted == TEXTS[0].output[:place]
    assert gone.finish == "cancelled"
    assert len(looked) == place + 1
    assert other.emitted == TEXTS[1].output[:9]


def test_an_end_token_is_not_delivered_to_a_row_that_was_cancelled_before_it() -> None:
    text = TEXTS[0]
    heard: list[Emission] = []
    plan = Script.always([text], [RIGHT] * 4)
    group = VerifyGroup(target(), ScriptedProvider(plan))
    [row] = group.admit(
        [
            request(
                text.prompt,
                max_tokens=9,
                end_tokens={text.output[2]},
                num_draft_tokens=4,
                cancelled=lambda: len(heard) == 2,
                consumer=heard.append,
            )
        ]
    )
    drain(group)
    assert ending_of(row) == Ending(text.output[:2], None, "cancelled")
    assert len(heard) == 2


def test_a_cancellation_check_that_raises_ends_its_row_alone() -> None:
    boom = Fault("cancelled")

    def cancelled() -> bool:
        raise boom

    group = VerifyGroup(target())
    gone, other = group.admit(
        [request(PROMPTS[0], cancelled=cancelled), request(PROMPTS[1], max_tokens=5)]
    )
    drain(group)
    assert (gone.finish, gone.error, gone.emitted) == ("error", boom, ())
    assert other.emitted == TEXTS[1].output[:5]


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("place", range(6))
def test_an_interrupt_in_a_consumer_leaves_every_row_with_exactly_what_it_was_given(
    drafting: bool, place: int
) -> None:
    heard: list[Emission] = []

    def consumer(emission: Emission) -> None:
        heard.append(emission)
        if len(heard) > place:
            raise KeyboardInterrupt

    plan = Script.always(TEXTS, [RIGHT] * 3)
    group = VerifyGroup(target(), ScriptedProvider(plan) if drafting else None)
    caches = [[KVCache(), KVCache()] for _ in TEXTS]
    first, second, third = rows = group.admit(
        [
            request(
                text.prompt,
                max_tokens=20,
                num_draft_tokens=3,
                consumer=consumer if text is TEXTS[1] else None,
                cache=cache,
            )
            for text, cache in zip(TEXTS, caches, strict=True)
        ]
    )
    with pytest.raises(KeyboardInterrupt):
        drain(group)
    group.close()
    assert second.emitted == TEXTS[1].output[: place + 1]
    assert len(first.emitted) > len(third.emitted) or not drafting
    for row, text, cache in zip(rows, TEXTS, caches, strict=True):
        assert row.emitted == text.output[: len(row.emitted)]
        assert row.finish == "cancelled"
        assert {layer.offset for layer in cache} == {len(row.tokens)}


# Samplers and stop rules.


def argmax_until(fails: int, boom: Exception) -> Callable[[mx.array], mx.array]:
    calls = itertools.count()

    def sampler(logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, VOCABULARY)
        if next(calls) == fails:
            raise boom
        return mx.argmax(logprobs, axis=-1)

    return sampler


def drafter_for(kind: str, texts: Sequence[Text]) -> ScriptedProvider | None:
    plan = Script(texts, [[[RIGHT] * 3, [RIGHT, WRONG], [WRONG]]] * len(texts))
    return {
        "plain": None,
        "host": ScriptedProvider(plan),
        "device": ScriptedProvider(plan, device=on_device(plan, lengths=True)),
        "whole prompt": ScriptedProvider(plan, mode=PrefillMode.FULL),
    }[kind]


DRAFTING = ("plain", "host", "device", "whole prompt")


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("place", range(7))
def test_a_sampler_that_raises_ends_its_row_alone_after_the_tokens_before(
    drafting: str, place: int
) -> None:
    boom = Fault("sampler")
    group = VerifyGroup(target(), drafter_for(drafting, TEXTS[:2]))
    gone, other = group.admit(
        [
            request(
                PROMPTS[0], sampler=argmax_until(place, boom), max_tokens=20, num_draft_tokens=4
            ),
            request(PROMPTS[1], max_tokens=12, num_draft_tokens=4),
        ]
    )
    drain(group)
    assert (gone.finish, gone.error) == ("error", boom)
    assert gone.emitted == TEXTS[0].output[:place]
    assert ending_of(other) == expected(TEXTS[1].output, (), 12)
    assert gone.stats.emitted == place
    assert gone.stats.accepted <= gone.stats.drafted


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("place", range(7))
def test_a_stop_rule_that_raises_ends_its_row_alone_after_the_tokens_before(
    drafting: str, place: int
) -> None:
    boom = Fault("stop rule")
    told: list[int] = []

    def stops(token: int) -> bool:
        if len(told) == place:
            raise boom
        told.append(token)
        return False

    group = VerifyGroup(target(), drafter_for(drafting, TEXTS[:2]))
    gone, other = group.admit(
        [
            request(PROMPTS[0], stops=stops, max_tokens=20, num_draft_tokens=4),
            request(PROMPTS[1], max_tokens=12, num_draft_tokens=4),
        ]
    )
    drain(group)
    assert (gone.finish, gone.error) == ("error", boom)
    assert gone.emitted == TEXTS[0].output[:place] == tuple(told)
    assert ending_of(other) == expected(TEXTS[1].output, (), 12)


def test_a_stop_rule_is_not_told_of_a_token_that_a_failed_sampler_never_drew() -> None:
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return False

    group = VerifyGroup(target())
    [row] = group.admit(
        [
            request(
                PROMPTS[0],
                sampler=argmax_until(2, Fault("sampler")),
                stops=stops,
                max_tokens=9,
            )
        ]
    )
    drain(group)
    assert tuple(told) == row.emitted == TEXTS[0].output[:2]


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("given", [None, "text", mx.array([1, 2])])
def test_a_sampler_that_returns_no_id_ends_its_row_alone(drafting: str, given: Any) -> None:
    group = VerifyGroup(target(), drafter_for(drafting, TEXTS[:2]))
    gone, other = group.admit(
        [
            request(PROMPTS[0], sampler=lambda _: given, max_tokens=9, num_draft_tokens=4),
            request(PROMPTS[1], max_tokens=12, num_draft_tokens=4),
        ]
    )
    drain(group)
    assert gone.finish == "error"
    assert isinstance(gone.error, AttributeError | ValueError | TypeError)
    assert other.emitted == TEXTS[1].output[:12]


# The target.


class Failing(MlxLmTarget):
    """Fails in one forward, counted from when it is armed."""

    def __init__(self) -> None:
        super().__init__(tiny_model("qwen3"))
        self.left: int | None = None

    def forward(
        self,
        tokens: mx.array,
        state: RowState,
        context: ContextKind = ContextKind.NONE,
        taps: Sequence[int] = (),
    ) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Fault("target")
        return super().forward(tokens, state, context, taps)


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("cached", [False, True])
def test_a_target_that_fails_leaves_rows_to_be_admitted_again_with_the_same_text(
    drafting: str, call: int, cached: bool
) -> None:
    failing = Failing()
    texts = [TEXTS[0], text_of(PROMPTS[1], 1.0, 7)]
    provider = drafter_for(drafting, texts)
    group = VerifyGroup(failing, provider, drafter="scripted")
    caches = [[KVCache(), KVCache()] if cached else None for _ in texts]
    asked = [
        request(PROMPTS[0], max_tokens=30, num_draft_tokens=4, cache=caches[0]),
        request(PROMPTS[1], temp=1.0, seed=7, max_tokens=30, num_draft_tokens=4, cache=caches[1]),
    ]
    rows = group.admit(asked)
    failing.left = call
    with pytest.raises(GroupFailedError, match="target") as caught:
        drain(group)
    assert isinstance(caught.value.__cause__, Fault)
    failing.left = None

    with pytest.raises(GroupFailedError, match="Fault: target"):
        group.round()
    with pytest.raises(GroupFailedError, match="Fault: target"):
        group.admit(asked)
    group.close()
    if provider is not None:
        assert provider.left_open == []
    for row, text, cache in zip(rows, texts, caches, strict=True):
        done = len(row.emitted)
        assert row.emitted == text.output[:done]
        assert row.finish is None
        if cache is not None:
            # The committed text, with or without its last token, and nothing else.
            [offset] = {layer.offset for layer in cache}
            assert offset in (len(row.tokens) - 1, len(row.tokens))
            again = VerifyGroup(failing)
            tail = [*row.tokens[offset:], 5]
            [warm] = again.admit([request(tail, max_tokens=6, cache=cache)])
            drain(again)
            assert warm.emitted == solo((*row.tokens, 5))[:6]
    # A greedy row goes on from its committed tokens; a seeded one is asked again as it was.
    again = VerifyGroup(failing)
    left = 30 - len(rows[0].emitted)
    onward, afresh = again.admit(
        [
            request(rows[0].tokens, max_tokens=left),
            request(PROMPTS[1], temp=1.0, seed=7, max_tokens=30),
        ]
    )
    drain(again)
    assert rows[0].emitted + onward.emitted == texts[0].output[:30]
    assert afresh.emitted == texts[1].output[:30]


@pytest.mark.parametrize("closing", [False, True])
def test_a_target_that_fails_in_the_last_read_for_a_caller_fails_the_group(closing: bool) -> None:
    failing = Failing()
    plan = Script.always(TEXTS[:2], [WRONG] * 2)
    provider = ScriptedProvider(plan)
    group = VerifyGroup(failing, provider)
    caches = [[KVCache(), KVCache()] for _ in range(2)]
    rows = group.admit(
        [
            request(text.prompt, max_tokens=limit, num_draft_tokens=2, cache=cache)
            for text, limit, cache in zip(TEXTS, (3, 9), caches, strict=False)
        ]
    )
    if closing:
        with group.round() as done:
            done.deliver_all()
        failing.left = 1
        with pytest.raises(GroupFailedError, match="Fault: target"):
            group.close()
        group.close()
    else:
        failing.left = 4  # three rounds, then what the ended row's cache still lacks
        with pytest.raises(GroupFailedError, match="Fault: target"):
            drain(group)
    with pytest.raises(GroupFailedError, match="Fault: target"):
        group.round()
    for row, text, cache in zip(rows, TEXTS, caches, strict=False):
        assert row.emitted == text.output[: 1 if closing else 3]
        [offset] = {layer.offset for layer in cache}
        assert offset in (len(row.tokens) - 1, len(row.tokens))
    assert provider.left_open == []


@pytest.mark.parametrize("drafting", DRAFTING)
def test_a_failure_while_reading_the_device_fails_the_group(
    drafting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = VerifyGroup(target(), drafter_for(drafting, TEXTS[:1]))
    [row] = group.admit([request(PROMPTS[0], max_tokens=30, num_draft_tokens=4)])
    for _ in range(2):
        with group.round() as done:
            done.deliver_all()

    def lost(_array: mx.array) -> Any:
        raise Fault("device lost")

    monkeypatch.setattr(flight, "host_read", lost)
    with pytest.raises(GroupFailedError, match="device lost"):
        group.round()
    with pytest.raises(GroupFailedError, match="device lost"):
        group.round()
    assert row.emitted == TEXTS[0].output[: len(row.emitted)]
    assert len(row.emitted) >= 2


def test_an_interrupt_inside_a_round_passes_and_fails_the_group() -> None:
    class Interrupted(ScriptedRows):
        def draft(
            self, pending: Sequence[int], depths: Sequence[int], steps: Sequence[int], /
        ) -> list[Any]:
            raise KeyboardInterrupt

    caches = [KVCache(), KVCache()]
    group = VerifyGroup(target(), ScriptedProvider(rows=Interrupted))
    group.admit([request(PROMPTS[0], max_tokens=9, num_draft_tokens=2, cache=caches)])
    with pytest.raises(KeyboardInterrupt):
        group.round()
    assert {layer.offset for layer in caches} == {len(PROMPTS[0])}
    with pytest.raises(GroupFailedError, match="KeyboardInterrupt"):
        group.round()


# Admissions that fail.


def bad_cache() -> Any:
    return request(PROMPTS[2], cache=[KVCache()])


def uneven_cache() -> Any:
    caches = [KVCache(), KVCache()]
    caches[1].offset = 3
    return request(PROMPTS[2], cache=caches)


def interrupted() -> Any:
    def progress(done: int, _of: int) -> None:
        if done:
            raise Fault("progress")

    return request((*PROMPTS[2], 3, 4, 5), progress=progress)


def another() -> Any:
    return request((4, 5, 6), max_tokens=3, num_draft_tokens=4)


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("rounds", range(4))
@pytest.mark.parametrize(
    ("broken", "error"),
    [(bad_cache, OptionError), (uneven_cache, OptionError), (interrupted, Fault), (None, Fault)],
)
def test_an_admission_that_fails_leaves_the_live_rows_as_they_were(
    drafting: str, rounds: int, broken: Any, error: type[Exception]
) -> None:
    failing = Failing()
    texts = [TEXTS[0], text_of(PROMPTS[1], 1.0, 7)]
    provider = drafter_for(drafting, [*texts, TEXTS[2]])
    group = VerifyGroup(failing, provider)
    live = group.admit(
        [
            request(PROMPTS[0], max_tokens=20, num_draft_tokens=4),
            request(PROMPTS[1], temp=1.0, seed=7, max_tokens=14, num_draft_tokens=4),
        ]
    )
    for _ in range(rounds):
        with group.round() as done:
            done.deliver_all()
    before = [list(row.tokens) for row in live]
    healthy = request((1, 1, 1), max_tokens=3, num_draft_tokens=4)
    if broken is None:  # the target fails in the second request's prompt
        failing.left = 2
        broken = another
    with pytest.raises(error):
        group.admit([healthy, broken()])
    failing.left = None
    assert group.rows == live
    assert [row.tokens for row in live] == before
    if provider is not None:
        assert provider.left_open == [provider.decoding]
        assert provider.decoding.row_count == 2
    # The same healthy request can still join, and everybody's text is right.
    [late] = group.admit([request(PROMPTS[2], max_tokens=9, num_draft_tokens=4)])
    drain(group)
    assert live[0].emitted == texts[0].output[:20]
    assert live[1].emitted == texts[1].output[:14]
    assert late.emitted == TEXTS[2].output[:9]
    if provider is not None:
        assert provider.complaints == []
        assert live[0].stats.draft_errors == 0


@pytest.mark.parametrize("drafting", DRAFTING)
def test_rows_that_cannot_be_joined_leave_the_live_rows_as_they_were(
    drafting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = drafter_for(drafting, TEXTS)
    group = VerifyGroup(target(), provider)
    [live] = group.admit([request(PROMPTS[0], max_tokens=20, num_draft_tokens=4)])
    for _ in range(2):
        with group.round() as done:
            done.deliver_all()

    def full(*_: Any) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RaggedState, "prepare_append", full)
        with pytest.raises(MemoryError):
            group.admit([request(PROMPTS[1], max_tokens=9, num_draft_tokens=4)])
    assert group.rows == [live]
    assert group._live.samplers.row_count == 1
    [late] = group.admit([request(PROMPTS[1], max_tokens=9, num_draft_tokens=4)])
    drain(group)
    assert live.emitted == TEXTS[0].output[:20]
    assert late.emitted == TEXTS[1].output[:9]
    if provider is not None:
        assert provider.complaints == []


@pytest.mark.parametrize("drafting", DRAFTING)
def test_a_publisher_that_raises_ends_nothing_but_is_kept_as_the_rows_error(drafting: str) -> None:
    boom = Fault("publish")

    def publish(_row: Row, _caches: list[Any], _checkpoint: Any) -> None:
        raise boom

    group = VerifyGroup(target(), drafter_for(drafting, TEXTS[:2]))
    first, second = group.admit(
        [
            request(PROMPTS[0], max_tokens=4, num_draft_tokens=4, publish=publish),
            request(PROMPTS[1], max_tokens=12, num_draft_tokens=4),
        ]
    )
    drain(group)
    assert ending_of(first) == expected(TEXTS[0].output, (), 4)
    assert first.error is boom
    assert ending_of(second) == expected(TEXTS[1].output, (), 12)
    assert second.error is None


def test_what_the_target_and_the_drafter_say_is_put_into_one_line() -> None:
    class Loud(Fault):
        def __str__(self) -> str:
            return "first\nsecond " + "x" * 1000

    class Mute(Fault):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert one_line(Loud("")).startswith("Loud: first second xxx")
    assert len(one_line(Loud(""))) < 450
    assert one_line(Mute("")) == "Mute"
    model = mock.Mock(wraps=tiny_model("qwen3"), side_effect=Loud(""))
    group = VerifyGroup(target())
    group.admit([request(PROMPTS[0], max_tokens=4)])
    with mock.patch.object(group.target, "model", model), pytest.raises(GroupFailedError) as raised:
        group.round()
    assert len(str(raised.value).splitlines()) == 1
    drafts = check_host([[mx.array([[1.5], [2.5]])]], [1], 64)[1]
    assert drafts[0] is not None
    assert len(drafts[0].splitlines()) == 1


def test_a_late_row_counts_only_what_the_drafter_raised_since_it_joined() -> None:
    provider = provider_of({"draft": [1]})
    group = VerifyGroup(target(), provider, drafter="scripted")
    [early] = group.admit([request(PROMPTS[0], max_tokens=12, num_draft_tokens=3)])
    with group.round() as done:
        done.deliver_all()
    [late] = group.admit([request(PROMPTS[1], max_tokens=6, num_draft_tokens=3)])
    drain(group)
    assert (early.stats.draft_errors, late.stats.draft_errors) == (1, 0)
    assert early.stats.last_draft_error == "Fault: draft 1"
    assert late.stats.last_draft_error is None


def test_drafts_stay_on_the_device_only_where_every_draw_is_stateless() -> None:
    provider = provider_of({}, device=True)
    group = VerifyGroup(target(), provider, drafter="scripted")
    asked = request(
        PROMPTS[0],
        sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
        max_tokens=8,
        num_draft_tokens=3,
    )
    [row] = group.admit([asked])
    drain(group)
    assert row.emitted == TEXTS[0].output[:8]
    assert provider.calls["draft_device"] == 0
    assert provider.calls["draft"] > 0


def test_the_first_tokens_of_whole_prompts_are_read_at_once() -> None:
    provider = provider_of({}, reader="whole prompt")
    group = VerifyGroup(target(), provider, drafter="scripted")
    rows = group.admit([request(p, max_tokens=5, num_draft_tokens=2) for p in PROMPTS[:3]])
    with mock.patch.object(flight, "host_read", side_effect=flight.host_read) as read:
        with group.round() as done:
            done.deliver_all()
        assert read.call_count == 1
    drain(group)
    assert [row.emitted for row in rows] == [text.output[:5] for text in TEXTS[:3]]
