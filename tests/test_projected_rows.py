"""The verbs of rows over projected context, with a small block drafter of this file's own.

Its block is one pass over two layers, one of them of a window, and its choices are either all made
at once or walked from left to right. A row alone in its group is the reference for rows in one.

Shapes: B rows, L positions, W columns of a block, H hidden size, d drafts, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import pytest
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import SamplingOptions
from specdec.contract import (
    Attachment,
    ContextKind,
    PrefillMode,
    Proposal,
    RowCheckpoint,
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsPreview,
)
from specdec.drafting.block_method import BlockDraft
from specdec.drafting.context import ContextLayer
from specdec.drafting.projected import cache_layout
from specdec.drafting.projected_provider import ProjectedGroups, ProjectedProvider
from specdec.errors import (
    CheckpointError,
    ClosedError,
    ContractError,
    NoOpenRoundError,
    RoundOpenError,
    RowIndexError,
    TargetLacksError,
)
from specdec.sampling import RowSamplers
from specdec.testing.target import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import TargetView
    from specdec.drafting.choose import BlockChoices
    from specdec.drafting.context import BlockContext, KeysAndValues
    from specdec.drafting.projected import ProjectedRows

V, H, HEADS, SIZE = 8, 32, 2, 8
TAPS: Final = (0, 1)
PROMPTS: Final = ((1, 5, 2, 7, 3, 3, 0, 4), (3,), (6, 6, 0, 4, 2, 1))
GREEDY, HOT = SamplingOptions(), SamplingOptions(temp=1.1, seed=7)


@define
class Small:
    """A block drafter.

    Attributes:
        target: embeds and scores.
        walks: whether a slot's scores depend on the token before it.
        cut: drafts that rows are cut to, by the parity of their pending token; ``None`` for all.
        projected: layers that ``project`` returns.
    """

    target: TargetView
    walks: bool = False
    cut: tuple[int, int] | None = None
    projected: int = 2
    longest: int = 4
    features: int = 2 * H
    layers: tuple[ContextLayer, ...] = (ContextLayer(), ContextLayer(5))
    blocks: list[tuple[int, int]] = field(factory=list)  # depth and width of each

    def weights(self, name: int, ins: int, outs: int) -> mx.array:
        gain = 2.0 * ins**-0.5
        return mx.random.normal((ins, outs), scale=gain, key=mx.random.key(name))

    def columns(self, depth: int, /) -> int:
        return depth + 1

    def project(self, hidden: mx.array, positions: int | mx.array, /) -> list[KeysAndValues]:
        context = mx.fast.rms_norm(hidden @ self.weights(0, 2 * H, H), None, 1e-6)
        return [self._pair(layer % 2, context, positions) for layer in range(self.projected)]

    def _pair(self, layer: int, x: mx.array, positions: int | mx.array) -> KeysAndValues:
        keys, values = (
            (x @ self.weights(1 + 2 * layer + part, H, HEADS * SIZE))
            .reshape(*x.shape[:2], HEADS, SIZE)
            .swapaxes(1, 2)
            for part in (0, 1)
        )
        return turned(keys, positions), values

    def draft_device(
        self, context: BlockContext, pending: mx.array, depth: int, choices: BlockChoices, /
    ) -> BlockDraft:
        self.blocks.append((depth, context.width))
        port: Any = self.target.hidden_taps
        masks = mx.full((pending.shape[0], context.width - 1), V - 1, pending.dtype)
        x = port.embed(mx.concatenate([pending[:, None], masks], axis=1))
        for layer in range(2):
            normed = mx.fast.rms_norm(x, None, 1e-6)
            queries = (normed @ self.weights(7 + layer, H, HEADS * SIZE)).reshape(
                *x.shape[:2], HEADS, SIZE
            )
            attended = context.attend(
                layer,
                turned(queries.swapaxes(1, 2), context.positions),
                *self._pair(layer, normed, context.positions),
                scale=SIZE**-0.5,
            )
            flat = attended.swapaxes(1, 2).reshape(*x.shape[:2], -1)
            x = x + flat @ self.weights(9 + layer, HEADS * SIZE, H)
        hidden = mx.fast.rms_norm(x[:, 1 : 1 + depth], None, 1e-6)
        lengths = None
        if self.cut is not None:
            lengths = mx.where(pending % 2 == 0, self.cut[0], self.cut[1])
        if not self.walks:
            return BlockDraft(choices.every(port.logits(hidden)), lengths)
        tokens, last = [], pending
        for slot in range(depth):
            said = hidden[:, slot] + port.embed(last[:, None])[:, 0]
            last = choices.next(port.logits(said[:, None])[:, 0])
            tokens.append(last)
        return BlockDraft(mx.stack(tokens, axis=1), lengths)


def turned(x: mx.array, positions: int | mx.array) -> mx.array:
    rotated: mx.array = mx.fast.rope(
        x, SIZE, traditional=False, base=100.0, scale=1.0, offset=positions
    )
    return rotated


def groups(taps: tuple[int, ...] = TAPS, **options: Any) -> tuple[ProjectedGroups, list[Small]]:
    """The factory, and the methods that it binds."""
    bound: list[Small] = []

    def bind(target: TargetView) -> Small:
        bound.append(Small(target, **options))
        return bound[-1]

    factory = ProjectedGroups(
        name="the small drafter",
        schema="small-v1",
        namespace=lambda: "w",
        tap_layers=taps,
        bind=bind,
    )
    return factory, bound


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget(V)


@define(eq=False)
class Live:
    """Rows, and what each has read.

    Attributes:
        texts: tokens that the target has read, per row.
    """

    target: TinyTarget
    group: ProjectedRows
    texts: list[list[int]]

    @classmethod
    def of(
        cls,
        target: TinyTarget,
        factory: ProjectedGroups,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        sampling: Sequence[SamplingOptions] = (),
    ) -> Live:
        samplers = RowSamplers()
        options = sampling or [GREEDY] * len(prompts)
        samplers.prepare_append([(each, each.resolved_seed()) for each in options]).commit()
        stored = []
        for prompt in prompts:
            reading = factory.open_prefill(target=target, checkpoints=[None])
            if prompt:
                reading.prefill(mx.array([list(prompt)]), seen(target, prompt))
            stored.append(reading.capture(0))
        opened = factory.open(target=target, sampling=samplers, checkpoints=stored)
        return cls(target, opened, [list(prompt) for prompt in prompts])

    def context(self, windows: Sequence[Sequence[int]]) -> mx.array:
        """Hidden states ``[B, W, 2·H]`` of what comes behind each text."""
        width = max(map(len, windows))
        told = []
        for text, window in zip(self.texts, windows, strict=True):
            own = seen(self.target, [*text, *window])[:, len(text) :]
            told.append(mx.pad(own, [(0, 0), (0, width - len(window)), (0, 0)]))
        return mx.concatenate(told)

    def commit(
        self, pending: Sequence[int], drafts: Sequence[Sequence[int]], accepted: Sequence[int]
    ) -> None:
        windows = [[head, *draft] for head, draft in zip(pending, drafts, strict=True)]
        self.group.commit(accepted, self.context(windows))
        for text, window, count in zip(self.texts, windows, accepted, strict=True):
            text.extend(window[: 1 + count])

    def stored(self) -> list[dict[str, mx.array]]:
        rows = range(self.group.row_count)
        return [dict(self.group.capture(row).attachment.arrays) for row in rows]


def seen(target: TinyTarget, tokens: Sequence[int]) -> mx.array:
    return target.hidden(tokens, ContextKind.TAPS, TAPS)


def ids(drafts: Any) -> list[list[int]]:
    """What was proposed on the host."""
    return list(drafts.tokens if isinstance(drafts, Proposal) else drafts)


def of_device(group: ProjectedRows, *asked: Sequence[int]) -> list[list[int]]:
    proposal = group.draft_device(*asked)
    assert proposal is not None
    flat: Any = proposal.tokens.reshape(-1).tolist()
    return [list(row) for row in proposal.resolve(flat)]


def assert_same_state(
    found: Sequence[dict[str, mx.array]], expected: Sequence[dict[str, mx.array]]
) -> None:
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        for name, array in one.items():
            assert mx.allclose(array, other[name], atol=1e-5, rtol=0), name


# What may be asked when.

ASKED: Final = ([1, 2, 3], [2, 2, 2], [0, 0, 0])
OUTSIDE: Final[dict[str, Callable[[ProjectedRows], Any]]] = {
    "prepare_append": lambda rows: rows.prepare_append([]),
    "filter_rows": lambda rows: rows.filter_rows([0]),
    "capture": lambda rows: rows.capture(0),
    "prefill": lambda rows: rows.prefill(mx.zeros((3, 1), mx.int32), mx.zeros((3, 1, 2 * H))),
    "consume": lambda rows: rows.consume(
        mx.zeros((3, 1), mx.int32), mx.zeros((3, 1, 2 * H)), [1, 1, 1]
    ),
    "draft": lambda rows: rows.draft(*ASKED),
    "draft_device": lambda rows: rows.draft_device(*ASKED),
    "preview": lambda rows: rows.preview(*ASKED),
}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("verb", OUTSIDE)
def test_inside_a_round_a_verb_is_refused_and_the_round_goes_on(
    verb: str, on_device: bool, target: TinyTarget
) -> None:
    live = Live.of(target, groups()[0])
    drafts = of_device(live.group, *ASKED) if on_device else ids(live.group.draft(*ASKED))
    with pytest.raises(RoundOpenError, match=rf"{verb}\(\) "):
        OUTSIDE[verb](live.group)
    live.group.materialize()
    live.commit(ASKED[0], drafts, [1, 0, 2])
    assert_same_state(live.stored(), Live.of(target, groups()[0], live.texts).stored())


@pytest.mark.parametrize("verb", [*OUTSIDE, "materialize", "commit"])
def test_a_closed_group_refuses_a_verb(verb: str, target: TinyTarget) -> None:
    group = Live.of(target, groups()[0]).group
    pending = group.prepare_append([])
    group.draft(*ASKED)
    group.close()
    group.close()
    pending.commit()
    assert group.row_count == 0
    verbs: dict[str, Callable[[ProjectedRows], Any]] = {
        **OUTSIDE,
        "materialize": lambda rows: rows.materialize(),
        "commit": lambda rows: rows.commit([], None),
    }
    with pytest.raises(ClosedError, match=rf"{verb}\(\) "):
        verbs[verb](group)


def test_rows_that_join_after_the_end_do_not(target: TinyTarget) -> None:
    live = Live.of(target, groups()[0])
    change = live.group.prepare_append([live.group.capture(0)])
    live.group.close()
    change.commit()
    assert live.group.row_count == 0


def test_a_commit_needs_a_round_whose_drafts_were_read(target: TinyTarget) -> None:
    live = Live.of(target, groups()[0])
    with pytest.raises(NoOpenRoundError, match="without an open round"):
        live.group.commit([0, 0, 0], mx.zeros((3, 3, 2 * H)))
    proposal = live.group.draft_device(*ASKED)
    assert proposal is not None
    with pytest.raises(NoOpenRoundError, match="resolve"):
        live.group.commit([0, 0, 0], mx.zeros((3, 3, 2 * H)))
    flat: Any = proposal.tokens.reshape(-1).tolist()
    live.commit(ASKED[0], proposal.resolve(flat), [2, 2, 2])
    with pytest.raises(NoOpenRoundError):
        live.group.commit([0, 0, 0], mx.zeros((3, 3, 2 * H)))


def test_a_bad_commit_leaves_the_round_open(target: TinyTarget) -> None:
    live = Live.of(target, groups()[0])
    drafts = ids(live.group.draft([1, 2, 3], [2, 0, 1], [0, 0, 0]))
    right = mx.zeros((3, 3, 2 * H))
    wrong: list[tuple[Any, Any, str]] = [
        ([0, 0], right, "accepted: got 2 numbers for 3 rows"),
        ([0, 1, 0], right, "accepted: row 1 has 1; it must be 0 to 0"),
        ([-1, 0, 0], right, "accepted: row 0 has -1"),
        ([0, 0, 0.0], right, "accepted: row 2 has 0.0; pass a whole number"),
        ([0, 0, 0], None, "commit: there is no context"),
        ([0, 0, 0], right[:, :2], r"commit: the context has shape \(3, 2, 64\); pass \[3, 3, 64\]"),
        ([0, 0, 0], right[..., :H], r"pass \[3, 3, 64\]"),
        ([0, 0, 0], right[:2], r"pass \[3, 3, 64\]"),
    ]
    for accepted, context, said in wrong:
        with pytest.raises(ContractError, match=said):
            live.group.commit(accepted, context)
    live.commit([1, 2, 3], drafts, [2, 0, 1])
    assert_same_state(live.stored(), Live.of(target, groups()[0], live.texts).stored())


TOKENS: Final = mx.zeros((3, 2), mx.int32)
HIDDEN: Final = mx.zeros((3, 2, 2 * H))


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda g: g.draft([1, 2], [1, 1, 1], [0, 0, 0]), ContractError, "pending: got 2"),
        (lambda g: g.draft([1, 2, V], [1, 1, 1], [0, 0, 0]), ContractError, "row 2 has 8"),
        (lambda g: g.draft([1, 2, 3], [1, -1, 1], [0, 0, 0]), ContractError, "depths: row 1"),
        (lambda g: g.draft_device([1, 2, 3], [1, 1, 1], [0]), ContractError, "steps: got 1"),
        (lambda g: g.preview([1, 2, 3], [1, 1, 1], [0, 0, -1]), ContractError, "steps: row 2"),
        (lambda g: g.filter_rows([0, 0]), RowIndexError, "0, 0"),
        (lambda g: g.filter_rows([3]), RowIndexError, "3"),
        (lambda g: g.filter_rows([-1]), RowIndexError, "-1"),
        (lambda g: g.capture(3), RowIndexError, "3"),
        (lambda g: g.capture(-1), RowIndexError, "-1"),
        (lambda g: g.prefill(TOKENS[:2], HIDDEN), ContractError, r"prefill: tokens .*\[3, L\]"),
        (lambda g: g.prefill(TOKENS[0], HIDDEN), ContractError, "prefill: tokens"),
        (lambda g: g.prefill(TOKENS * 1.0, HIDDEN), ContractError, "float32; pass integers"),
        (lambda g: g.prefill(TOKENS, None), ContractError, "prefill: there is no context"),
        (lambda g: g.prefill(TOKENS, HIDDEN[:, :1]), ContractError, r"pass \[3, 2, 64\]"),
        (lambda g: g.prefill(TOKENS, HIDDEN[0]), ContractError, r"pass \[3, 2, 64\]"),
        (lambda g: g.consume(TOKENS, HIDDEN, [1, 1]), ContractError, "lengths: got 2"),
        (lambda g: g.consume(TOKENS, HIDDEN, [1, 3, 0]), ContractError, "row 1 has 3"),
        (lambda g: g.consume(TOKENS, HIDDEN, [1, -1, 0]), ContractError, "row 1 has -1"),
        (lambda g: g.consume(TOKENS, None, [1, 1, 1]), ContractError, "consume: there is no"),
        (lambda g: g.consume(TOKENS, HIDDEN[:, :1], [1, 2, 1]), ContractError, r"\[3, 2, 64\]"),
        (lambda g: g.consume(TOKENS * 1.0, HIDDEN, [1, 1, 1]), ContractError, "pass integers"),
        (lambda g: g.prepare_append([None]), CheckpointError, "a cold row cannot decode"),
    ],
)
def test_a_wrong_use_says_what_is_wrong_and_changes_nothing(
    ask: Callable[[ProjectedRows], Any], error: type[Exception], said: str, target: TinyTarget
) -> None:
    live = Live.of(target, groups()[0])
    with pytest.raises(error, match=said) as caught:
        ask(live.group)
    assert "\n" not in str(caught.value)
    assert_same_state(live.stored(), Live.of(target, groups()[0], PROMPTS).stored())


def test_a_prefill_group_drafts_nothing(target: TinyTarget) -> None:
    group = groups()[0].open_prefill(target=target, checkpoints=[None])
    for ask in (group.draft, group.draft_device, group.preview):
        with pytest.raises(ContractError, match="a prefill group drafts nothing"):
            ask([1], [1], [0])
    group.prefill(mx.array([[1, 2]]), seen(target, [1, 2]))
    group.prefill(mx.zeros((1, 0), mx.int32), mx.zeros((1, 0, 2 * H)))
    assert group.capture(0).processed_tokens == 2


def test_rows_say_what_they_are(target: TinyTarget) -> None:
    group = groups()[0].open_prefill(target=target, checkpoints=[None, None])
    assert (group.namespace, group.tap_layers, group.row_count) == ("small-v1:w", TAPS, 2)
    assert (group.prefill_mode, group.context) == (PrefillMode.TAIL_SPLIT, ContextKind.TAPS)
    for kind in (SupportsConsume, SupportsDeviceDraft, SupportsPreview):
        assert isinstance(group, kind)
    assert group.capture(0).attachment.arrays == {}


# The provider.


def test_a_target_that_lacks_taps_is_refused_before_anything_is_bound(target: TinyTarget) -> None:
    factory, bound = groups()
    with pytest.raises(TargetLacksError, match="hidden_taps"):
        factory.open_prefill(target=target.without("hidden_taps"), checkpoints=[None])
    further, none_bound = groups(taps=(0, 3))
    with pytest.raises(TargetLacksError, match=r"hidden_taps of layers 0, 3 \(it has 2\)"):
        further.row_bytes(target, 10)
    assert bound == none_bound == []
    assert factory.target_tap_layers(target) == TAPS


def test_a_method_is_bound_once_for_each_target(target: TinyTarget) -> None:
    factory, bound = groups()
    assert factory.method_for(target) is factory.method_for(target)
    Live.of(target, factory)
    assert len(bound) == 1
    factory.method_for(TinyTarget(V, seed=3))
    assert len(bound) == 2


def test_a_closed_provider_opens_nothing_and_open_groups_go_on(target: TinyTarget) -> None:
    factory, _ = groups()
    provider = ProjectedProvider("small", 12, factory)
    assert (provider.id, provider.weight_bytes) == ("small", 12)
    live = Live.of(target, provider.grouped)
    provider.close()
    provider.close()
    with pytest.raises(ClosedError):
        factory.open_prefill(target=target, checkpoints=[None])
    live.commit(ASKED[0], ids(live.group.draft(*ASKED)), [0, 0, 0])


@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_a_rows_bytes_are_told_ahead(tokens: int, target: TinyTarget) -> None:
    factory, _ = groups()
    told = factory.row_bytes(target, tokens)
    group = factory.open_prefill(target=target, checkpoints=[None])
    for start in range(0, tokens, 1024):
        count = min(1024, tokens - start)
        group.prefill(mx.zeros((1, count), mx.int32), mx.zeros((1, count, 2 * H)))
    held = sum(array.nbytes for array in group._rows.arrays())
    assert 0.5 * held <= told <= 1.3 * held + 64 * 2 * HEADS * SIZE * 4


def test_the_layout_is_of_one_position_in_the_targets_type(target: TinyTarget) -> None:
    layout = cache_layout(Small(target), mx.float32)
    assert list(layout) == ["0.keys", "0.values", "1.keys", "1.values"]
    assert set(layout.values()) == {((1, HEADS, 1, SIZE), mx.float32)}


@pytest.mark.parametrize("layers", [1, 3])
def test_a_method_with_another_number_of_layers_is_refused(layers: int, target: TinyTarget) -> None:
    factory, _ = groups(projected=layers)
    group = factory.open_prefill(target=target, checkpoints=[None])
    with pytest.raises(ContractError, match=rf"returned {layers} layers, but 2 are declared"):
        group.prefill(mx.array([[1, 2]]), seen(target, [1, 2]))
    assert group.row_count == 1
    assert group.capture(0).processed_tokens == 0


# Checkpoints.


def changed(stored: RowCheckpoint, **arrays: mx.array | None) -> RowCheckpoint:
    held = {**stored.attachment.arrays, **arrays}
    kept = {name: array for name, array in held.items() if array is not None}
    return evolve(stored, attachment=evolve(stored.attachment, arrays=kept))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: evolve(c, namespace="small-v1:x"), "is of small-v1:x, not of small-v1:w"),
        (
            lambda c: evolve(c, attachment=evolve(c.attachment, schema="small-v0")),
            "has the schema small-v0, not small-v1",
        ),
        (lambda c: evolve(c, processed_tokens=7), "is of 7 tokens, but its state says 8"),
        (
            lambda c: evolve(c, attachment=evolve(c.attachment, metadata={})),
            "is of 8 tokens, but its state says None",
        ),
        (lambda c: changed(c, **{"0.keys": None}), "has the arrays 0.values, 1.keys, 1.values"),
        (lambda c: changed(c, **{"2.keys": mx.zeros((1,))}), "1.values, 2.keys, not"),
        (
            lambda c: changed(c, **{"0.keys": c.attachment.arrays["0.keys"][:, :, :7]}),
            r"0.keys is .*\(1, 2, 7, 8\), not .*\(1, 2, 8, 8\)",
        ),
        (
            lambda c: changed(c, **{"1.values": c.attachment.arrays["0.values"]}),
            r"1.values is .*\(1, 2, 8, 8\), not .*\(1, 2, 5, 8\)",
        ),
        (
            lambda c: changed(c, **{"1.keys": c.attachment.arrays["1.keys"].astype(mx.bfloat16)}),
            r"1.keys is .*bfloat16 .*, not .*float32",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_what_is_wrong(
    change: Callable[[RowCheckpoint], RowCheckpoint], said: str, target: TinyTarget
) -> None:
    factory, _ = groups()
    live = Live.of(target, factory)
    good = live.group.capture(0)
    wrong = change(good)
    for refuse in (
        lambda: live.group.prepare_append([good, wrong]),
        lambda: factory.open(target=target, sampling=RowSamplers(), checkpoints=[wrong]),
        lambda: factory.open_prefill(target=target, checkpoints=[wrong]),
    ):
        with pytest.raises(CheckpointError, match=said) as caught:
            refuse()
        assert "\n" not in str(caught.value)
    assert live.group.row_count == 3
    live.group.prepare_append([good]).commit()
    assert live.group.row_count == 4


def test_a_checkpoint_says_how_far_it_is_and_holds_a_windows_last_positions(
    target: TinyTarget,
) -> None:
    live = Live.of(target, groups()[0], [*PROMPTS, ()])
    for row, text in enumerate(live.texts):
        stored = live.group.capture(row)
        assert isinstance(stored.attachment, Attachment)
        assert stored.processed_tokens == stored.attachment.metadata["tokens"] == len(text)
        lengths = {name: array.shape[2] for name, array in stored.attachment.arrays.items()}
        expected = {"0.keys": len(text), "1.keys": min(len(text), 5)}
        assert {n: k for n, k in lengths.items() if "keys" in n} == (expected if text else {})
        whole = Small(target).project(seen(target, text), 0) if text else []
        for number, pair in enumerate(whole):
            for name, array in zip(("keys", "values"), pair, strict=True):
                last = array if number == 0 else array[:, :, -5:]
                found = stored.attachment.arrays[f"{number}.{name}"]
                assert mx.allclose(found, last, atol=1e-5, rtol=0)


# Drafts.


rows_asked = st.integers(1, 4).flatmap(
    lambda count: st.tuples(
        *(
            st.lists(each, min_size=count, max_size=count)
            for each in (
                st.integers(0, 2),  # which prompt
                st.integers(0, V - 1),
                st.integers(0, 9),
                st.integers(0, 50),
                st.sampled_from([GREEDY, HOT, SamplingOptions(temp=0.6, seed=-4, top_k=3)]),
            )
        )
    )
)


@settings(max_examples=40)
@given(asked=rows_asked, walks=st.booleans(), on_device=st.booleans())
def test_a_rows_drafts_are_those_it_makes_alone_whatever_others_ask(
    asked: tuple[list[int], list[int], list[int], list[int], list[SamplingOptions]],
    walks: bool,
    on_device: bool,
) -> None:
    chosen, pending, depths, steps, sampling = asked
    target = TARGET
    factory, bound = groups(walks=walks)
    live = Live.of(target, factory, [PROMPTS[each] for each in chosen], sampling)
    if on_device and any(depths):
        found = of_device(live.group, pending, depths, steps)
    else:
        found = ids(live.group.draft(pending, depths, steps))
    assert [len(draft) for draft in found] == [min(depth, 4) for depth in depths]
    if any(depths):
        deepest = min(4, max(depths))
        assert bound[0].blocks[-1] == (deepest, 1 + deepest), "no wider than it was trained for"
    for row, draft in enumerate(found):
        alone = Live.of(target, factory, [PROMPTS[chosen[row]]], [sampling[row]])
        assert ids(alone.group.draft([pending[row]], [depths[row]], [steps[row]])) == [draft]


TARGET: Final = TinyTarget(V)


def test_drafts_depend_on_text_pending_depth_and_step() -> None:
    """A control: what the rows alone are compared by is no constant."""
    factory, _ = groups()
    live = Live.of(TARGET, factory, PROMPTS * 2, [GREEDY] * 3 + [HOT] * 3)
    found = set()
    for pending, depth, step in ((1, 4, 0), (6, 4, 0), (1, 3, 0), (1, 4, 5)):
        for row, draft in enumerate(ids(live.group.draft([pending] * 6, [depth] * 6, [step] * 6))):
            found.add((row, tuple(draft[:3])))
        live.group.close()
        live = Live.of(TARGET, factory, PROMPTS * 2, [GREEDY] * 3 + [HOT] * 3)
    assert len(found) > 12


@settings(max_examples=25)
@given(
    asked=rows_asked,
    walks=st.booleans(),
    cut=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_preview_draft_and_device_draft_agree_and_a_preview_changes_nothing(
    asked: tuple[list[int], list[int], list[int], list[int], list[SamplingOptions]],
    walks: bool,
    cut: tuple[int, int] | None,
) -> None:
    chosen, *numbers, sampling = asked
    factory, _ = groups(walks=walks, cut=cut)

    def live() -> Live:
        return Live.of(TARGET, factory, [PROMPTS[each] for each in chosen], sampling)

    host, device = live(), live()
    before = host.stored()
    shown = host.group.preview(*numbers)
    again = host.group.preview(*numbers)
    assert_same_state(host.stored(), before)
    drafts = ids(host.group.draft(*numbers))
    deepest = min(4, max(numbers[1]))
    expected = [min(4, depth) for depth in numbers[1]]
    if cut is not None:
        expected = [min(n, cut[head % 2]) for n, head in zip(expected, numbers[0], strict=True)]
    assert list(map(len, drafts)) == expected
    if not deepest:
        assert shown is None
        assert device.group.draft_device(*numbers) is None
        assert ids(device.group.draft(*numbers)) == drafts
        return
    assert shown is not None
    assert again is not None
    assert mx.array_equal(shown, again)
    assert shown.shape[1] == (deepest if cut is None else 1)
    for row, draft in zip(np.array(shown).tolist(), drafts, strict=True):
        assert row[: len(draft)] == draft[: len(row)]
    assert of_device(device.group, *numbers) == drafts
    for each in (host, device):
        each.commit(numbers[0], drafts, [len(draft) // 2 for draft in drafts])
    assert_same_state(host.stored(), device.stored())


@settings(max_examples=15)
@given(data=st.data())
def test_rounds_and_consumed_tokens_leave_the_state_of_a_text_read_at_once(
    data: st.DataObject,
) -> None:
    factory, _ = groups()
    live = Live.of(TARGET, factory)
    for _ in range(data.draw(st.integers(1, 5))):
        pending = [data.draw(st.integers(0, V - 1)) for _ in range(3)]
        if data.draw(st.booleans()):
            depths = [data.draw(st.integers(0, 4)) for _ in range(3)]
            drafts = ids(live.group.draft(pending, depths, [0] * 3))
            accepted = [data.draw(st.integers(0, len(draft))) for draft in drafts]
            live.commit(pending, drafts, accepted)
        else:
            counts = [data.draw(st.integers(0, 3)) for _ in range(3)]
            given_ = [[head, 5, 0][:count] for head, count in zip(pending, counts, strict=True)]
            padded = [[*each, *[7] * (4 - len(each))] for each in given_]
            live.group.consume(mx.array(padded), live.context(padded), counts)
            for text, more in zip(live.texts, given_, strict=True):
                text.extend(more)
    assert_same_state(live.stored(), Live.of(TARGET, factory, live.texts).stored())
    assert [live.group.capture(row).processed_tokens for row in range(3)] == [
        len(text) for text in live.texts
    ]


def test_rows_may_leave_change_places_and_join_between_rounds() -> None:
    factory, _ = groups()
    live = Live.of(TARGET, factory)
    kept = live.group.capture(1)
    live.group.filter_rows([2, 0])
    live.group.prepare_append([kept, kept]).discard()
    live.group.prepare_append([kept]).commit()
    live.texts = [live.texts[row] for row in (2, 0, 1)]
    live.commit([1, 2, 3], ids(live.group.draft(*ASKED)), [0, 2, 1])
    assert_same_state(live.stored(), Live.of(TARGET, factory, live.texts).stored())
    live.group.filter_rows([])
    assert live.group.draft([], [], []) == []
    live.group.commit([], mx.zeros((0, 1, 2 * H)))
    live.group.prepare_append([kept]).commit()
    assert live.group.row_count == 1


def test_rejecting_rows_are_told_what_each_draft_was_drawn_from() -> None:
    judged = SamplingOptions(temp=0.9, seed=4, acceptance="rejection")
    for walks in (False, True):
        live = Live.of(TARGET, groups(walks=walks)[0], PROMPTS, [judged, GREEDY, judged])
        told = live.group.draft([1, 2, 3], [3, 2, 3], [4, 0, 9])
        assert isinstance(told, Proposal)
        assert told.logq is not None
        logq = np.array(told.logq)
        assert logq.shape == (3, 3, V)
        np.testing.assert_allclose(np.exp(logq).sum(axis=-1), 1.0, atol=1e-5)
        for row, draft in enumerate(told.tokens):
            for slot, token in enumerate(draft):
                assert logq[row, slot, token] > -np.inf
        assert np.array_equal(np.exp(logq[1]).max(axis=-1), [1.0] * 3), "an argmax is certain"
        assert np.exp(logq[0]).max() < 0.999


# Graphs.


def lazy_rounds(live: Live, *, look: bool) -> int:
    """200 rounds without drafts, nothing of them read; bytes that are held afterwards.

    Args:
        live: two rows.
        look: whether a round is opened by the verb, which computes what was read before.
    """
    hidden = mx.random.normal((2, 64, 2 * H), key=mx.random.key(1))
    mx.eval(hidden)
    before = mx.get_active_memory()
    for _ in range(200):
        # New arrays each round, as verify windows are: a graph that grows holds them all.
        context = hidden * 1.0
        mx.eval(context)
        if look:
            assert ids(live.group.draft([1, 2], [0, 0], [0, 0])) == [[], []]
            live.group.commit([0, 0], context)
        else:
            live.group._append(context, [1, 1])
    return mx.get_active_memory() - before


def test_rounds_without_drafts_let_no_graph_grow() -> None:
    factory, _ = groups()
    window = 2 * 64 * 2 * H * 4
    bounded = lazy_rounds(Live.of(TARGET, factory, PROMPTS[:2]), look=True)
    assert bounded < 20 * window
    unbounded = Live.of(TARGET, factory, PROMPTS[:2])
    assert lazy_rounds(unbounded, look=False) > 100 * window, "the measure sees a graph that grows"
    unbounded.group.materialize()


def test_rounds_that_only_consume_let_no_graph_grow() -> None:
    live = Live.of(TARGET, groups()[0], PROMPTS[:2])
    hidden = mx.random.normal((2, 64, 2 * H), key=mx.random.key(1))
    mx.eval(hidden)
    before = mx.get_active_memory()
    for _ in range(200):
        context = hidden * 1.0
        mx.eval(context)
        live.group.consume(mx.zeros((2, 2), mx.int32), context, [1, 2])
    assert mx.get_active_memory() - before < 20 * context.nbytes


def test_whoever_reads_the_ids_has_computed_what_was_read() -> None:
    live = Live.of(TARGET, groups()[0], PROMPTS[:2])
    hidden = mx.random.normal((2, 64, 2 * H), key=mx.random.key(1))
    mx.eval(hidden)
    before = mx.get_active_memory()
    for _ in range(60):
        context = hidden * 1.0
        mx.eval(context)
        drafts = of_device(live.group, [1, 2], [3, 3], [0, 0])
        assert list(map(len, drafts)) == [3, 3]
        live.group.commit([0, 1], context)
    assert mx.get_active_memory() - before < 20 * context.nbytes
