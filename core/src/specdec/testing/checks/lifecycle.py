"""The life of a group: order of verbs, closing, and what groups share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from specdec.contract import (
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsLookup,
    SupportsPreview,
)
from specdec.errors import ClosedError, NoOpenRoundError, RoundOpenError
from specdec.sampling import SamplingOptions
from specdec.testing.driven import DrivenRow
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, row_ids, row_ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specdec.testing.driven import DrivenGroup


def between_rounds(kit: Kit, rows: DrivenGroup) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every verb that belongs between rounds, with arguments that are right there."""
    group: Any = rows.group
    size = len(rows.rows)
    zeros = [0] * size
    joining = [kit.cold((0,)).checkpoint]
    yield "prepare_append", lambda: group.prepare_append(joining)
    yield "filter_rows", lambda: group.filter_rows(list(range(size)))
    yield "capture", lambda: group.capture(0)
    yield "draft", lambda: group.draft(zeros, zeros, zeros)
    if isinstance(group, SupportsDeviceDraft):
        yield "draft_device", lambda: group.draft_device(zeros, [1] * size, zeros)
    if isinstance(group, SupportsPreview):
        yield "preview", lambda: group.preview(zeros, [1] * size, zeros)
    if isinstance(group, SupportsLookup):
        yield "look_up", lambda: group.look_up(zeros, [1] * size)
    if isinstance(group, SupportsConsume):
        context = kit.context([row.tokens for row in rows.rows], [(0,)] * size, 1)
        block = mx.zeros((size, 1), mx.int32)
        yield "consume", lambda: group.consume(block, context, [1] * size)


@check()
def verbs_keep_their_order(kit: Kit) -> None:
    """Inside a round only ``commit`` and ``close`` may be called; outside, ``commit`` may not."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows, grown(kit, plan) as twin:
            context = kit.context([row.tokens for row in rows.rows], [(0,)] * len(rows.rows), 1)
            must_raise(
                NoOpenRoundError,
                lambda: rows.group.commit([0] * len(rows.rows), context),
                "commit() without a round",
            )
            drafts = rows.draft(pending, depths)
            for verb, call in between_rounds(kit, rows):
                must_raise(RoundOpenError, call, f"{verb}() inside a round")
            assert twin.draft(pending, depths) == drafts, "a commit without a round changed a row"
            for group in (rows, twin):
                group.commit([kit.max_depth] * len(group.rows))
            assert rows.draft(pending, depths) == twin.draft(pending, depths), (
                "what was refused inside a round has changed a row"
            )

    kit.examples(
        run,
        plan=plans(kit, most_turns=1),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def close_is_final(kit: Kit) -> None:
    """``close`` may be called at any time and again; every other verb then raises."""
    for inside in (False, True):
        rows = kit.open([kit.cold((0, 1)), kit.cold((1,))])
        calls = list(between_rounds(kit, rows))
        context = kit.context([row.tokens for row in rows.rows], [(0,)] * 2, 1)
        if inside:
            rows.draft((0, 0), (1, 1))
        rows.close()
        rows.close()
        calls.append(("commit", partial(rows.group.commit, [0, 0], context)))
        for verb, call in calls:
            must_raise(ClosedError, call, f"{verb}() after close()")
    prefill = kit.grouped.open_prefill(target=kit.target, checkpoints=[None])
    prefill.close()
    prefill.close()
    context = kit.context([()], [(0,)], 1)
    for verb, call in (
        ("prefill", lambda: prefill.prefill(mx.zeros((1, 1), mx.int32), context)),
        ("prepare_append", lambda: prefill.prepare_append([None])),
        ("filter_rows", lambda: prefill.filter_rows([0])),
        ("capture", lambda: prefill.capture(0)),
        ("materialize", prefill.materialize),
    ):
        must_raise(ClosedError, call, f"{verb}() of a prefill group after close()")


@check()
def groups_share_nothing(kit: Kit) -> None:
    """What one group of a provider does is not seen in another, nor in a later one."""

    def run(one: Plan, other: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, one) as first:
            expected = first.draft(pending, depths)
        with grown(kit, one) as first:
            with grown(kit, other) as second:
                second.draft(pending, depths)
                got = first.draft(pending, depths)
                assert got == expected, (
                    f"beside another group a group drafts {list(map(list, got))}, without it "
                    f"{list(map(list, expected))}"
                )
                second.commit([kit.max_depth] * len(second.rows))
            first.commit([0] * len(first.rows))

    kit.examples(
        run,
        one=plans(kit),
        other=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def provider_outlives_its_groups(kit: Kit) -> None:
    """A closed group leaves its provider as it was: the next one drafts the same."""
    texts = []
    for _ in range(2):
        with kit.open([kit.cold((0, 1, 0, 1, 0))]) as rows:
            for pending in (1, 0, 1):
                rows.draft((pending,), (kit.max_depth,))
                rows.commit((1,))
            texts.append(rows.rows[0].tokens)
    assert texts[0] == texts[1]


@check()
def random_state_is_left_alone(kit: Kit) -> None:
    """Nothing draws from MLX's global random state, which belongs to the process."""
    mx.random.seed(7)
    before = _random_state()
    fresh = kit.again()
    assert _random_state() == before, (
        "making the drafter drew from mx.random or seeded it; make weights with mx.random.key. A "
        "model or a module of MLX draws when it is built: build it once, outside make_provider(), "
        "or in `with specdec.drafting.modules.without_drawing():`"
    )
    for options in (SamplingOptions(), SamplingOptions(temp=0.9)):
        with fresh.open([fresh.cold((0, 1, 0), row=DrivenRow(options=options))]) as rows:
            for pending in (1, 0):
                rows.draft((pending,), (kit.max_depth,))
                rows.commit((kit.max_depth,))
            rows.capture(0)
    fresh.provider.close()
    assert _random_state() == before, (
        "the drafter drew from mx.random or seeded it; draw with RowSampling.sample"
    )


def _random_state() -> list[object]:
    return [held.tolist() for held in mx.random.state]  # type: ignore[attr-defined]  # a list
