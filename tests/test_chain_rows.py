"""Rows of a chain: whoever wins, every member stays where it would be alone."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.chain import ChainMember, ChainProvider
from specdec.chain.attachment import join, namespace_of, split
from specdec.contract import (
    Attachment,
    ContextKind,
    DeviceProposal,
    Listed,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    Sampled,
    Swap,
)
from specdec.errors import (
    CheckpointError,
    ClosedError,
    ContractError,
    NoOpenRoundError,
    OptionError,
    RoundOpenError,
    TargetLacksError,
    blamed_on,
    one_line,
)
from specdec.sampling import SamplingOptions
from specdec.testing import TinyTarget
from specdec.testing.driven import DrivenRow
from specdec.testing.harness import Harness
from specdec.verify.proposals import cut_device
from specdec_dflash.tiny import tiny_block
from specdec_mtp.provider import Reading
from specdec_mtp.tiny import tiny_head
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VOCABULARY, DEEPEST = 8, 3


@cache
def tiny() -> TinyTarget:
    return TinyTarget(VOCABULARY)


def harness(provider: Any) -> Harness:
    return Harness(provider, tiny(), max_rows=3, max_depth=DEEPEST)


def chain(*members: Any, widths: Sequence[int] = (9, 9, 9, 9)) -> ChainProvider:
    return ChainProvider(
        [
            ChainMember(f"m{number}", each, width)
            for number, (each, width) in enumerate(zip(members, widths, strict=False))
        ]
    )


@cache
def parts() -> tuple[Any, ...]:
    """Members that read tokens, taps, and the states after and before the final norm."""
    before = tiny_head(seed=3, reading=Reading(context=ContextKind.PRE_NORM))
    return NgramProvider(), tiny_block(taps=(1, 0)), tiny_head(), before


# In step.


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_after_any_interleaving_each_member_is_where_it_is_alone_behind_the_same_text(
    data: st.DataObject,
) -> None:
    places = data.draw(st.sampled_from([(0, 2), (2, 0), (0, 1), (0, 3, 1, 2)]))
    members = [parts()[place] for place in places]
    driven = harness(chain(*members, widths=data.draw(st.permutations((1, 2, 3, 3)))))
    ids = st.integers(0, VOCABULARY - 1)
    prompts = data.draw(st.lists(st.lists(ids, min_size=2, max_size=7), min_size=1, max_size=3))
    with driven.open([driven.cold(prompt) for prompt in prompts]) as rows:
        many = len(prompts)
        for _ in range(data.draw(st.integers(1, 4))):
            if data.draw(st.integers(0, 4)) == 0:
                rows.consume(
                    data.draw(st.lists(st.lists(ids, max_size=3), min_size=many, max_size=many))
                )
            few = st.lists(st.integers(0, DEEPEST), min_size=many, max_size=many)
            pending = data.draw(st.lists(ids, min_size=many, max_size=many))
            rows.draft(pending, data.draw(few), on_device=data.draw(st.booleans()))
            rows.commit(data.draw(few))
        pending = data.draw(st.lists(ids, min_size=many, max_size=many))
        for place, row in enumerate(rows.rows):
            held = rows.capture(place).checkpoint
            names = [member.grouped.checkpoint_namespace for member in members]
            apart = split([held], rows.group.namespace, names)
            for member, [own] in zip(members, apart, strict=True):
                assert own is not None
                assert_as_read(harness(member), own, row, pending[place])


def assert_as_read(alone: Harness, held: RowCheckpoint, row: DrivenRow, pending: int) -> None:
    """A member's part is the state of a member that read the row's text at once."""
    read = alone.cold(row.tokens, row=row)
    wanted = read.checkpoint
    assert held.processed_tokens == wanted.processed_tokens == len(row.tokens)
    if "unread" not in wanted.attachment.metadata:  # a head leaves some for its next draft
        assert dict(held.attachment.metadata) == dict(wanted.attachment.metadata)
        assert set(held.attachment.arrays) == set(wanted.attachment.arrays)
        for name, array in wanted.attachment.arrays.items():
            assert mx.allclose(held.attachment.arrays[name], array, atol=1e-4), name
    ours = evolve(read, checkpoint=held)
    with alone.open([ours]) as one, alone.open([read]) as other:
        assert one.draft([pending], [DEEPEST]) == other.draft([pending], [DEEPEST])


# Members that say what they are told, and remember what they are asked.


class Told:
    """A member whose rows propose what ``says`` holds for them, in each round anew."""

    weight_bytes = 5
    checkpoint_namespace = "told"
    supports_adapters = True
    prefill_mode = PrefillMode.TAIL_SPLIT
    context = ContextKind.NONE
    tap_layers: tuple[int, ...] = ()

    def __init__(self, says: Sequence[Sequence[int]] = (), **changes: Any) -> None:
        self.says = [list(each) for each in says]
        self.logq: mx.array | None = None
        self.log: list[tuple[Any, ...]] = []
        self.texts: list[list[int]] = [[] for _ in self.says]
        self.seen: list[list[float]] = [[] for _ in self.says]
        self.stood_down: list[str | None] = [None] * len(self.says)
        self.closes = 0
        self.sampling: Any = None
        for name, value in changes.items():
            setattr(self, name, value)

    id = "told"
    namespace = checkpoint_namespace

    @property
    def grouped(self) -> Any:
        return self

    @property
    def row_count(self) -> int:
        return len(self.says)

    def open_prefill(self, **_: Any) -> Any:
        return Told()

    def open(self, *, sampling: Any, **_: Any) -> Any:
        self.sampling = sampling
        return self

    def prepare_append(self, checkpoints: Sequence[Any], /) -> Swap:
        return Swap(lambda: self.log.append(("joined", len(checkpoints))))

    def capture(self, row: int, /) -> RowCheckpoint:
        return RowCheckpoint(
            namespace="told",
            processed_tokens=len(self.texts[row]),
            attachment=Attachment(schema="told"),
        )

    def filter_rows(self, keep: Sequence[int], /) -> None:
        self.log.append(("filter", list(keep)))

    def materialize(self) -> None:
        self.log.append(("materialize",))

    def draft(self, pending: Any, depths: Any, steps: Any, /) -> Any:
        self.log.append(("draft", list(depths)))
        self.round = list(pending)
        drafts = [each[:depth] for each, depth in zip(self.says, depths, strict=True)]
        self.said = drafts
        return drafts if self.logq is None else Proposal(drafts, self.logq)

    def commit(self, accepted: Any, context: Any, /) -> None:
        self.log.append(("commit", list(accepted)))
        for text, head, draft, count in zip(
            self.texts, self.round, self.said, accepted, strict=True
        ):
            text.extend([head, *draft[:count]])
        self._see(context, [1 + count for count in accepted])

    def consume(self, tokens: mx.array, context: Any, lengths: Any, /) -> None:
        read: Any = tokens.tolist()
        self.log.append(("consume", list(lengths)))
        for text, ids, count in zip(self.texts, read, lengths, strict=True):
            text.extend(ids[:count])
        self._see(context, lengths)

    def _see(self, context: mx.array | None, counts: Sequence[int]) -> None:
        """Remember the first feature of the hidden state at each token."""
        if context is not None:
            read: Any = context[..., 0].tolist()
            for seen, values, count in zip(self.seen, read, counts, strict=True):
                seen.extend(values[:count])

    def close(self) -> None:
        self.closes += 1


class ToldOnDevice(Told):
    """The same ids, left on the device, behind a length for each row."""

    junk = 7
    cuts: list[int] | None = None
    declines = False

    def draft_device(self, pending: Any, depths: Any, steps: Any, /) -> DeviceProposal | None:
        self.log.append(("device", list(depths)))
        if self.declines:
            return None
        self.round = list(pending)
        width = max(depths)
        rows = [(each[:width] + [self.junk] * width)[:width] for each in self.says]
        cuts = self.cuts or [min(d, len(each)) for d, each in zip(depths, self.says, strict=True)]

        def resolve(read: Sequence[int]) -> list[list[int]]:
            self.said = [list(read[b * width :][:width][:cut]) for b, cut in enumerate(cuts)]
            return [list(draft) for draft in self.said]

        return DeviceProposal(mx.array(rows), resolve, mx.array(cuts), self.logq)


class Draws:
    """Draws of nobody; says what it is told of rejection and selection."""

    def __init__(self, rejecting: bool = False, selection: Any = None) -> None:
        self.rejecting = rejecting
        self.selection = selection or Sampled()


def opened(*members: Told, draws: Any = None, widths: Sequence[int] = (9, 9, 9)) -> Any:
    grouped: Any = chain(*members, widths=widths).grouped
    return grouped.open(target=tiny(), sampling=draws or Draws(), checkpoints=[])


def verbs(member: Told) -> list[str]:
    return [each[0] for each in member.log]


def test_the_first_that_proposes_wins_each_row_and_the_others_read_what_it_won() -> None:
    first = Told([[1, 2], [], []])
    second = Told([[7, 7], [3, 4, 5], []])
    rows = opened(first, second)
    assert rows.draft([6, 6, 6], [3, 3, 3], [0, 0, 0]) == [[1, 2], [3, 4, 5], []]
    assert second.log == [("draft", [0, 3, 3])]
    rows.commit([1, 2, 0], None)
    assert first.log == [("draft", [3, 3, 3]), ("commit", [1, 0, 0]), ("consume", [0, 2, 0])]
    assert second.log[1:] == [("commit", [0, 2, 0]), ("consume", [1, 0, 0])]
    assert first.texts == second.texts == [[6, 1], [6, 3, 4], [6]]


def test_a_member_that_no_row_needs_is_not_asked_and_reads_pending_and_accepted_tokens() -> None:
    first, second = Told([[1, 2], [3]]), Told([[5], [5]])
    rows = opened(first, second)
    assert rows.draft([6, 7], [2, 2], [0, 0]) == [[1, 2], [3]]
    rows.commit([2, 0], None)
    assert second.log == [("consume", [3, 1])]
    assert rows.draft([4, 4], [0, 0], [0, 0]) == [[], []]
    rows.commit([0, 0], None)
    assert verbs(first) == ["draft", "commit", "consume"]
    assert first.texts == second.texts == [[6, 1, 2, 4], [7, 4]]


def test_every_token_comes_with_the_hidden_states_at_its_own_position() -> None:
    def told(*says: Sequence[int], **reads: Any) -> Told:
        made = Told(says, **reads)
        return Told(says, open_prefill=lambda **_: made, **reads)

    taps = {"context": ContextKind.TAPS, "tap_layers": (1, 0)}
    first = told([1, 2], [], [1])
    second = told([], [3, 4], [], context=ContextKind.POST_NORM)
    third = told([], [5], [], **taps, target_tap_layers=lambda _target: (1, 0))
    rows = opened(first, second, third)
    assert (rows.context, rows.tap_layers) == (ContextKind.TAPS, (0, 1, 2))
    size = tiny().hidden_taps.hidden_size
    states = mx.arange(9).reshape(3, 3)[..., None] + mx.array([[[0.0, 100.0, 200.0]]])
    assert rows.draft([6, 6, 6], [2, 2, 2], [0, 0, 0]) == [[1, 2], [3, 4], [1]]
    rows.commit([2, 1, 0], mx.repeat(states, size, axis=-1))
    positions = [[0.0, 1.0, 2.0], [3.0, 4.0], [6.0]]
    assert first.seen == [[], [], []], "it reads tokens alone"
    assert second.seen == [[200 + at for at in row] for row in positions]
    assert third.seen == [[100 + at for at in row] for row in positions]
    rows.consume(mx.array([[1, 2], [3, 0], [0, 0]]), mx.repeat(states, size, axis=-1), [2, 1, 0])
    assert [len(each) for each in third.seen] == [5, 3, 1]


def test_each_member_drafts_at_most_what_it_was_loaded_with() -> None:
    first, second = Told([[], [1, 1, 1]]), Told([[2, 2, 2, 2], []])
    rows = opened(first, second, widths=(2, 3))
    assert rows.draft([0, 0], [4, 4], [0, 0]) == [[2, 2, 2], [1, 1]]
    assert (first.log, second.log) == ([("draft", [2, 2])], [("draft", [3, 0])])


def test_a_member_that_stood_down_is_asked_no_more_and_a_row_only_when_all_have() -> None:
    first, second = Told([[1], [1]]), Told([[2], [2]])
    rows = opened(first, second)
    first.stood_down = ["it is full", None]
    assert rows.stood_down == [None, None]
    assert rows.remarks == ["m0 stood down: it is full", None]
    assert rows.draft([0, 0], [1, 1], [0, 0]) == [[2], [1]]
    assert (first.log, second.log) == ([("draft", [0, 1])], [("draft", [1, 0])])
    rows.commit([0, 0], None)
    second.stood_down = ["so is it", "it too"]
    assert rows.stood_down == ["m0: it is full; m1: so is it", None]
    rows.draft([0, 0], [1, 1], [0, 0])
    rows.commit([0, 1], None)
    assert [len(text) for text in first.texts] == [len(text) for text in second.texts] == [2, 3]


# On the device.


def test_drafts_of_host_and_device_are_one_proposal_and_each_reads_all_of_it() -> None:
    first = Told([[1, 2], [], [], []])
    second = ToldOnDevice([[], [3, 4, 5], [6], []])
    rows = opened(first, second)
    device = rows.draft_device([0, 0, 0, 0], [3, 3, 1, 3], [0, 0, 0, 0])
    assert second.log == [("device", [0, 3, 1, 3])]
    told: Any = device.lengths.tolist()
    read: Any = device.tokens.tolist()
    assert told == [2, 3, 1, 0]
    assert [ids[:count] for ids, count in zip(read, told, strict=True)] == [
        [1, 2],
        [3, 4, 5],
        [6],
        [],
    ]
    with pytest.raises(NoOpenRoundError, match="resolve"):
        rows.commit([0, 0, 0, 0], None)
    assert device.resolve([token for ids in read for token in ids]) == [[1, 2], [3, 4, 5], [6], []]
    rows.commit([2, 1, 1, 0], None)
    assert first.texts == second.texts == [[0, 1, 2], [0, 3], [0, 6], [0]]


def test_a_host_draft_may_be_longer_than_those_on_the_device() -> None:
    first, second = Told([[1, 2, 3], []]), ToldOnDevice([[], [4]])
    rows = opened(first, second, widths=(3, 1))
    device = rows.draft_device([0, 0], [3, 3], [0, 0])
    read: Any = device.tokens.tolist()
    assert (device.tokens.shape, device.lengths.tolist()) == ((2, 3), [3, 1])
    assert device.resolve([token for ids in read for token in ids]) == [[1, 2, 3], [4]]
    rows.commit([3, 1], None)
    assert first.texts == second.texts == [[0, 1, 2, 3], [0, 4]]


def test_where_nobody_before_proposes_the_devices_arrays_pass_as_they_are() -> None:
    second = ToldOnDevice([[3, 4], [5, 6]])
    rows = opened(Told([[], []]), second)
    device = rows.draft_device([0, 0], [2, 2], [0, 0])
    made = second.draft_device([0, 0], [2, 2], [0, 0])
    assert made is not None
    assert (device.tokens.tolist(), device.lengths.tolist()) == (
        made.tokens.tolist(),
        [2, 2],
    )
    assert device.tokens.dtype == made.tokens.dtype
    assert device.resolve([3, 4, 5, 6]) == [[3, 4], [5, 6]]


@pytest.mark.parametrize("declines", [True, False])
def test_after_none_the_host_draft_asks_nobody_twice(declines: bool) -> None:
    wins = [[1], [2]] if not declines else [[1], []]
    first, second = Told(wins), ToldOnDevice([[3], [3]], declines=declines)
    rows = opened(first, second)
    asked = ([0, 0], [1, 1], [0, 0])
    assert rows.draft_device(*asked) is None
    with pytest.raises(RoundOpenError):
        rows.capture(0)
    with pytest.raises(NoOpenRoundError):
        rows.commit([0, 0], None)
    with pytest.raises(ContractError, match="asked other than draft_device"):
        rows.draft([1, 1], [1, 1], [0, 0])
    assert rows.draft(*asked) == ([[1], [3]] if declines else [[1], [2]])
    assert verbs(first) == ["draft"]
    assert verbs(second) == (["device", "draft"] if declines else [])
    rows.commit([1, 1], None)
    assert first.texts == second.texts


def test_a_last_member_of_the_host_leaves_nothing_asked_behind() -> None:
    first = Told([[1]])
    rows = opened(first, Told([[2]]))
    assert rows.draft_device([0], [1], [0]) is None
    assert first.log == []
    assert rows.draft([5], [1], [0]) == [[1]]


# Distributions.


def logs(*rows: Sequence[Sequence[float]]) -> mx.array:
    return mx.log(mx.array([list(row) for row in rows]))


FLAT = [1 / VOCABULARY] * VOCABULARY


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_without_a_distribution_are_certain_beside_those_that_have_one(
    on_device: bool,
) -> None:
    first, second = Told([[1, 2], []]), ToldOnDevice([[], [3]])
    second.logq = logs([FLAT], [FLAT])
    rows = opened(first, second, draws=Draws(rejecting=True))
    asked = ([0, 0], [2, 1], [0, 0])
    made = rows.draft_device(*asked) if on_device else rows.draft(*asked)
    assert made.logq.shape == (2, 2, VOCABULARY)
    kept: Any = mx.exp(made.logq).tolist()
    assert [ids.index(1.0) for ids in kept[0]] == [1, 2]
    assert [sum(ids) for ids in kept[0]] == [1.0, 1.0]
    assert kept[1][0] == pytest.approx(FLAT)


def test_a_device_draft_without_a_distribution_is_certain_too() -> None:
    first, second = Told([[1], []]), ToldOnDevice([[], [3]])
    first.logq = logs([FLAT], [FLAT])
    rows = opened(first, second, draws=Draws(rejecting=True))
    made: Any = mx.exp(rows.draft_device([0, 0], [1, 1], [0, 0]).logq).tolist()
    assert made[0][0] == pytest.approx(FLAT)
    assert made[1][0] == [float(token == 3) for token in range(VOCABULARY)]


def test_a_distribution_of_listed_ids_is_spread_and_none_is_made_where_nobody_asks() -> None:
    listed = (1, 4, 6)
    second = Told([[4]], draft_vocabulary=lambda _target: listed)
    second.logq = logs([[0.5, 0.25, 0.25]])
    draws = Draws(rejecting=True)
    rows = opened(Told([[]]), second, draws=draws)
    made = rows.draft([0], [1], [0])
    found: Any = mx.exp(made.logq)[0, 0].tolist()
    assert found == pytest.approx([0, 0.5, 0, 0, 0.25, 0, 0.25, 0])
    rows.commit([0], None)
    draws.rejecting = False
    assert rows.draft([0], [1], [0]) == [[4]], "a list alone"


def test_what_is_no_id_has_no_probability() -> None:
    first, second = Told([[9, 2], []]), Told([[], [3]])
    second.logq = logs([FLAT], [FLAT])
    made = opened(first, second, draws=Draws(rejecting=True)).draft([0, 0], [2, 1], [0, 0])
    assert [list(each) for each in made.tokens] == [[9, 2], [3]], "the executor judges ids"
    assert mx.all(made.logq[0, 0] == -mx.inf)
    assert made.logq[0, 1, 2] == 0


def test_real_distributions_are_those_of_the_member_alone() -> None:
    options = SamplingOptions(temp=0.8, acceptance="rejection", seed=3)
    both, alone = harness(chain(NgramProvider(), tiny_head())), harness(tiny_head())
    row = DrivenRow(options=options, seed=3)
    texts = [[1, 2, 3, 4], [5, 1, 2, 5, 1]]
    with (
        both.open([both.cold(text, row=row) for text in texts]) as rows,
        alone.open([alone.cold(text, row=row) for text in texts]) as lone,
    ):
        ours: Any = rows.group.draft([5, 2], [2, 2], [0, 0])
        theirs: Any = lone.group.draft([5, 2], [2, 2], [0, 0])
        assert (list(ours.tokens[0]), list(ours.tokens[1])) == (list(theirs.tokens[0]), [5, 1])
        assert mx.allclose(ours.logq[0], theirs.logq[0], atol=1e-5)
        assert mx.exp(ours.logq[1]).argmax(axis=-1).tolist() == [5, 1]
        assert mx.exp(ours.logq[1]).sum(axis=-1).tolist() == [1, 1]


# What members declare.


def test_a_chain_declares_the_one_vocabulary_of_its_members() -> None:
    def lists(*ids: int) -> Told:
        return Told(draft_vocabulary=lambda _target: ids or None)

    def declared(*members: Told) -> Any:
        return chain(*members).grouped.draft_vocabulary(tiny())

    assert declared(Told(), lists(1, 2)) == (1, 2)
    assert declared(lists(1, 2), lists(1, 2), lists()) == (1, 2)
    assert declared(lists(1, 2), lists(1, 3)) is None
    assert declared(Told(), lists()) is None


def test_a_member_that_lists_no_ids_is_shown_no_listed_selection() -> None:
    listed = Listed(
        (1, 2), sample=lambda *_: mx.array([1]), log_distribution=lambda *_: mx.array([0.0])
    )
    plain, lists = Told(), Told(draft_vocabulary=lambda _target: (1, 2))
    draws = Draws(rejecting=True, selection=listed)
    opened(plain, lists, draws=draws)
    assert lists.sampling is draws
    assert (plain.sampling.selection, plain.sampling.rejecting) == (Sampled(), True)
    draws.selection = "another"
    assert plain.sampling.selection == "another"


def test_sums_and_names_are_those_of_all_members() -> None:
    heavy = Told(row_bytes=lambda _target, tokens: 3 * tokens, supports_adapters=False)
    both = chain(Told(), heavy)
    assert (both.id, both.weight_bytes) == ("told,told", 10)
    assert both.grouped.row_bytes(tiny(), 7) == 21
    assert not both.grouped.supports_adapters
    assert chain(Told(), NgramProvider()).grouped.supports_adapters
    assert both.grouped.checkpoint_namespace == "chain-1:told+told"


def test_members_of_one_kind_of_context_share_it_and_others_share_taps() -> None:
    ngram, block, after, before = parts()
    layers = tiny().hidden_taps.layer_count

    def reads(*members: Any) -> tuple[Any, ...]:
        group = chain(*members).grouped.open_prefill(target=tiny(), checkpoints=[])
        declared = chain(*members).grouped.target_tap_layers(tiny())
        assert declared == group.tap_layers
        return group.context, group.tap_layers, group.prefill_mode

    full, tail = PrefillMode.FULL, PrefillMode.TAIL_SPLIT
    assert reads(ngram, NgramProvider(max_ngram=3)) == (ContextKind.NONE, (), tail)
    assert reads(ngram, after) == (ContextKind.POST_NORM, (), full)
    assert reads(before, ngram) == (ContextKind.PRE_NORM, (), full)
    assert reads(ngram, block) == (ContextKind.TAPS, (1, 0), tail)
    assert reads(before, after) == (ContextKind.TAPS, (layers - 1, layers), full)
    assert reads(after, ngram, block) == (ContextKind.TAPS, (0, 1, layers), full)


def test_different_contexts_need_a_target_that_can_be_tapped() -> None:
    _, _, after, before = parts()
    blind = TinyTarget(VOCABULARY, lacks=("hidden_taps",))
    with pytest.raises(TargetLacksError, match=r"a chain of m0 and m2 needs .*hidden_taps"):
        chain(before, NgramProvider(), after).grouped.target_tap_layers(blind)
    assert chain(NgramProvider(), after).grouped.target_tap_layers(blind) == ()


def test_a_group_that_taps_other_layers_than_declared_is_refused() -> None:
    wrong = Told(target_tap_layers=lambda _target: (1,))
    with pytest.raises(ContractError, match="drafter m1: its group taps"):
        chain(Told(), wrong).grouped.target_tap_layers(tiny())


# Refusals, and ends.


class Deaf:
    """A group that only drafts."""

    def __init__(self) -> None:
        self.closes = 0

    def close(self) -> None:
        self.closes += 1


def test_a_member_without_consume_is_refused_by_name_and_everything_closed() -> None:
    deaf = Deaf()
    first, second = Told(), Told(open=lambda **_: deaf)
    with pytest.raises(OptionError, match=r"drafter m1 cannot stand in a chain: .*\(consume\)"):
        opened(first, second)
    assert (first.closes, deaf.closes) == (1, 1)


def test_a_member_that_does_not_open_closes_those_before_it() -> None:
    def refuses(**_: Any) -> Any:
        raise TargetLacksError("residual_basis", "told")

    first = Told(close=lambda: 1 / 0)
    second, third = Told(), Told(open=refuses)
    with pytest.raises(TargetLacksError):
        opened(first, second, third)
    assert second.closes == 1


def test_closing_closes_all_also_where_one_raises() -> None:
    def fails() -> None:
        raise RuntimeError("stuck")

    first, second = Told([[1]], close=fails), Told([[1]])
    rows = opened(first, second)
    with pytest.raises(RuntimeError, match="stuck"):
        rows.close()
    assert second.closes == 1
    with pytest.raises(ClosedError):
        rows.draft([0], [1], [0])
    with pytest.raises(RuntimeError, match="stuck"):
        chain(first, second).close()
    assert second.closes == 2


def test_a_join_that_one_member_refuses_is_discarded_by_the_others() -> None:
    gone: list[str] = []

    def refuses(_checkpoints: Any) -> Any:
        raise CheckpointError("not mine")

    first = Told([[1]], prepare_append=lambda _: Swap(lambda: None, lambda: gone.append("first")))
    rows = opened(first, Told([[1]], prepare_append=refuses))
    with pytest.raises(CheckpointError, match="not mine"):
        rows.prepare_append([rows.capture(0)])
    assert gone == ["first"]


def test_members_that_read_different_numbers_of_tokens_make_no_checkpoint() -> None:
    first, second = Told([[1]]), Told([[1]])
    rows = opened(first, second)
    first.texts[0] += [1]
    with pytest.raises(CheckpointError, match=r"the members have processed \[1, 0\] tokens"):
        rows.capture(0)


def test_a_checkpoint_with_what_no_member_left_is_refused() -> None:
    part = Told([[1]]).capture(0)
    whole = join([part, part], "chain")
    assert [
        [each.attachment.schema for each in own if each]
        for own in split([whole], "chain", ["told"] * 2)
    ] == [["told"]] * 2
    cases: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda m: m.update({"2.x": 1}), "has 2.x, which no member"),
        (lambda m: m.update({"x": 1}), "has x, which no member"),
        (lambda m: m.pop("1:schema"), "says nothing of the chain's member 1"),
    ]
    for change, message in cases:
        metadata = dict(whole.attachment.metadata)
        change(metadata)
        other = evolve(whole, attachment=evolve(whole.attachment, metadata=metadata))
        with pytest.raises(CheckpointError, match=message):
            split([other], "chain", ["told"] * 2)


@pytest.mark.parametrize("said", [None, "ab", [[1]], [[1], "b"], [[1], 5]])
def test_what_is_no_list_for_each_row_is_an_error_that_names_the_member(said: Any) -> None:
    first = Told([[], []], draft=lambda *_: said)
    with pytest.raises(ContractError, match=r"draft\(\) of m0 returned"):
        opened(first, Told([[2], [2]])).draft([0, 0], [1, 1], [0, 0])


# Previews.


def test_a_preview_shows_the_first_members_or_the_next_ones_where_a_single_row_gets_none() -> None:
    def shows(*ids: int) -> Any:
        return lambda *_: mx.array([list(ids)]) if ids else None

    def seen(count: int, *members: Told) -> Any:
        rows = opened(*members)
        found = rows.preview([0] * count, [2] * count, [0] * count)
        return None if found is None else found.tolist()

    one, two = [[1]], [[1], [1]]
    assert seen(1, Told(one, preview=shows(4)), Told(one, preview=shows(5))) == [[4]]
    assert seen(1, Told(one, preview=shows()), Told(one, preview=shows(5))) == [[5]]
    assert seen(1, Told(one), Told(one, preview=shows(5))) is None, "it might draft"
    assert seen(2, Told(two, preview=shows()), Told(two, preview=shows(5, 5))) is None
    full = Told(one, preview=shows(4), stood_down=["full"])
    assert seen(1, full, Told(one, preview=shows(5))) == [[5]]


def test_a_preview_of_several_rows_says_nothing_where_a_member_has_stood_down_for_one() -> None:
    two: list[list[int]] = [[], []]
    first = Told(two, preview=lambda *_: mx.array([[4], [4]]), stood_down=["full", None])
    rows = opened(first, Told(two, preview=lambda *_: mx.array([[5], [5]])))
    assert rows.preview([0, 0], [2, 2], [0, 0]) is None, "another member drafts for the first row"
    shown = rows.preview([0, 0], [0, 2], [0, 0])
    assert shown.tolist() == [[4], [4]], "nothing was asked of the first row"


@pytest.mark.parametrize("wrong", [None, "x", 1 << 40, -1, 1.5])
def test_what_is_no_id_beside_drafts_on_the_device_is_cut_in_its_own_row(wrong: Any) -> None:
    first, second = Told([[2, wrong, 3], []]), ToldOnDevice([[], [4, 5]])
    rows = opened(first, second)
    device = rows.draft_device([0, 0], [3, 3], [0, 0])
    told: Any = device.tokens.tolist()
    lengths: Any = device.lengths.tolist()
    assert told[0] == [2, VOCABULARY, 3]
    resolved = device.resolve([token for row in told for token in row])
    drafts, faults = cut_device(told, lengths, resolved, [3, 3], VOCABULARY)
    assert drafts == [[2], [4, 5]]
    assert [fault is not None for fault in faults] == [True, False]
    rows.commit([1, 2], None)
    assert first.texts == second.texts == [[0, 2], [0, 4, 5]]


def test_namespaces_of_different_members_never_read_alike() -> None:
    names = [["a+b", "c"], ["a", "b+c"], ["a", "b", "c"], ["a%2Bb", "c"], ["c", "a+b"]]
    assert len({namespace_of(each) for each in names}) == len(names)


@pytest.mark.parametrize("place", [0, 1])
def test_whatever_a_member_raises_keeps_its_type_and_says_whose_it_is(place: int) -> None:
    """Every verb that asks all members, and those of a round."""

    class Failing(ToldOnDevice):
        def __getattribute__(self, name: str) -> Any:
            if name == object.__getattribute__(self, "fails"):

                def fail(*_: Any) -> Any:
                    raise KeyError("boom\nbang")

                return fail
            return object.__getattribute__(self, name)

        fails = ""

    def members() -> tuple[Any, list[ToldOnDevice]]:
        made: list[ToldOnDevice] = [ToldOnDevice([[]]), ToldOnDevice([[1]])]
        made[place] = Failing([[place]] if place else [[]])
        return opened(*made), made

    def fails(verb: str, call: Callable[[Any], Any], before: Callable[[Any], Any] = list) -> None:
        rows, made = members()
        if before is not list:
            before(rows)
        made[place].fails = verb  # type: ignore[attr-defined]  # of the one that fails
        with pytest.raises(KeyError) as caught:
            call(rows)
        assert one_line(caught.value) == f"m{place}: KeyError: 'boom\\nbang'"

    ids, one = mx.array([[1]]), [1]
    fails("prepare_append", lambda rows: rows.prepare_append([]))
    fails("filter_rows", lambda rows: rows.filter_rows([0]))
    fails("capture", lambda rows: rows.capture(0))
    fails("materialize", lambda rows: rows.materialize())
    fails("consume", lambda rows: rows.consume(ids, None, one))
    fails("close", lambda rows: rows.close())
    fails("draft", lambda rows: rows.draft(one, one, [0]))
    fails("commit", lambda rows: rows.commit([0], None), lambda rows: rows.draft(one, one, [0]))
    if place:
        fails("draft_device", lambda rows: rows.draft_device(one, one, [0]))


def test_an_error_that_is_raised_again_names_its_member_once() -> None:
    error = ValueError("x")
    for _ in range(2):
        with pytest.raises(ValueError, match="x"), blamed_on("ngram"):
            raise error
    assert one_line(error) == "ngram: ValueError: x"
    assert one_line(ValueError("x")) == "ValueError: x"


def test_a_member_that_cannot_open_or_resolve_is_named() -> None:
    def boom(*_: Any, **__: Any) -> Any:
        raise KeyError("boom")

    class Unresolved(ToldOnDevice):
        def draft_device(self, pending: Any, depths: Any, steps: Any, /) -> Any:
            device = super().draft_device(pending, depths, steps)
            assert device is not None
            return evolve(device, resolve=boom)

    with pytest.raises(KeyError) as caught:
        opened(Told([[1]]), Told([[1]], open=boom))
    assert one_line(caught.value) == "m1: KeyError: 'boom'"
    device = opened(Told([[]]), Unresolved([[1]])).draft_device([0], [1], [0])
    with pytest.raises(KeyError) as caught:
        device.resolve([1])
    assert one_line(caught.value) == "m1: KeyError: 'boom'"
