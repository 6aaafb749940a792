"""Rows that join, leave and change places, in two phases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import strategies as st

from specdec.contract import append
from specdec.errors import CheckpointError, ClosedError, RowIndexError
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, orders, plans, prompts, row_ids, row_ints

if TYPE_CHECKING:
    from specdec.testing.driven import DrivenGroup


def assert_as_alone(
    kit: Kit, rows: DrivenGroup, pending: tuple[int, ...], depths: tuple[int, ...]
) -> None:
    """Every row drafts what it drafts alone; opens a round."""
    assert rows.group.row_count == len(rows.rows)
    drafts = rows.draft(pending, depths)
    for place, (row, head, depth) in enumerate(zip(rows.rows, pending, depths, strict=False)):
        alone = kit.next_of(row, head, depth)
        assert drafts[place] == alone, (
            f"row {place} of {len(rows.rows)} drafted {list(drafts[place])}, but alone, driven "
            f"through the same log, it drafts {list(alone)}; its log is {row.log}"
        )


@check()
def rows_join_behind_the_others(kit: Kit) -> None:
    """A joined row is the last one, drafts at once, and the live rows go on as they were."""

    def run(
        plan: Plan,
        prompt: tuple[int, ...],
        pending: tuple[int, ...],
        depths: tuple[int, ...],
    ) -> None:
        with grown(kit, plan) as rows:
            if len(rows.rows) == kit.max_rows:
                rows.filter(range(kit.max_rows - 1))
            like = rows.rows[0]
            rows.join([kit.cold(prompt, row=evolve(like, seed=99))])
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(
        run,
        plan=plans(kit),
        prompt=prompts(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def filter_keeps_and_reorders(kit: Kit) -> None:
    """``filter_rows(keep)`` keeps exactly the named rows, in the named order."""

    def run(
        plan: Plan,
        order: tuple[int, ...],
        pending: tuple[int, ...],
        depths: tuple[int, ...],
    ) -> None:
        with grown(kit, plan) as rows:
            rows.filter([row for row in order if row < len(rows.rows)])
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(
        run,
        plan=plans(kit, rows=min(2, kit.max_rows)),
        order=orders(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def drained_group_takes_rows_again(kit: Kit) -> None:
    """``filter_rows([])`` leaves an empty, usable group."""

    def run(plan: Plan, prompt: tuple[int, ...], pending: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            like = rows.rows[0]
            rows.filter([])
            assert rows.group.row_count == 0
            rows.filter([])
            rows.join([kit.cold(prompt, row=like)])
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    kit.examples(run, plan=plans(kit), prompt=prompts(kit), pending=row_ids(kit))


@check()
def filter_refuses_wrong_rows(kit: Kit) -> None:
    """A row twice, a negative one or one too many is refused, and nothing changes."""
    with kit.open([kit.cold((0, 1)), kit.cold((1, 1, 0))]) as rows:
        for keep in ([0, 0], [-1], [2], [0, 1, 5]):
            call = partial(rows.group.filter_rows, keep)
            must_raise(RowIndexError, call, f"filter_rows({keep}) of two rows")
        for row in (-1, 2):
            must_raise(
                RowIndexError, partial(rows.group.capture, row), f"capture({row}) of two rows"
            )
        assert_as_alone(kit, rows, (1, 0), (kit.max_depth, kit.max_depth))


@check()
def append_is_invisible_until_commit(kit: Kit) -> None:
    """A prepared join shows nothing before ``commit``, and all of it afterwards."""

    def run(plan: Plan, prompt: tuple[int, ...], pending: tuple[int, ...]) -> None:
        depths = (kit.max_depth,) * kit.max_rows
        with grown(kit, plan) as rows:
            rows.filter(range(min(len(rows.rows), kit.max_rows - 1)))
            count = rows.group.row_count
            joining = kit.cold(prompt, row=evolve(rows.rows[0], seed=99))
            change = rows.prepare([joining])
            assert rows.group.row_count == count, "a prepared row is visible before commit()"
            rows.samplers.prepare_append([(joining.row.options, joining.row.seed)]).commit()
            change.commit()
            assert rows.group.row_count == count + 1, "commit() of a join added no row"
            rows.rows.append(joining.row.copy())
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(run, plan=plans(kit), prompt=prompts(kit), pending=row_ids(kit))


@check()
def discarded_append_leaves_no_trace(kit: Kit) -> None:
    """``discard`` leaves the group as it was; a ``commit`` after it does nothing."""

    def run(plan: Plan, prompt: tuple[int, ...], pending: tuple[int, ...], late: bool) -> None:
        with grown(kit, plan) as rows:
            change = rows.prepare([kit.cold(prompt, row=rows.rows[0])])
            change.discard()
            change.discard()
            if late:
                change.commit()
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    kit.examples(
        run,
        plan=plans(kit),
        prompt=prompts(kit),
        pending=row_ids(kit),
        late=st.booleans(),
    )


@check()
def append_counts_once(kit: Kit) -> None:
    """A second ``commit``, and a ``discard`` after it, change nothing."""
    with kit.open([kit.cold((0, 1))]) as rows:
        joining = kit.cold((1, 0, 1))
        change = rows.prepare([joining])
        rows.samplers.prepare_append([(joining.row.options, joining.row.seed)]).commit()
        change.commit()
        change.commit()
        change.discard()
        rows.rows.append(joining.row.copy())
        assert_as_alone(kit, rows, (1, 1), (kit.max_depth, kit.max_depth))


@check()
def append_to_a_closed_group_is_harmless(kit: Kit) -> None:
    """A prepared join may outlive its group: ``commit`` and ``discard`` then do nothing."""
    for end in ("commit", "discard"):
        rows = kit.open([kit.cold((0, 1))])
        change = rows.prepare([kit.cold((1, 0))])
        rows.close()
        getattr(change, end)()
        change.discard()
        must_raise(
            ClosedError,
            partial(rows.group.filter_rows, [0]),
            f"filter_rows() of a closed group after {end}() of a join",
        )


@check()
def refused_append_changes_nothing(kit: Kit) -> None:
    """If one of several joining rows is refused, none joins and the live rows are as before."""

    def run(plan: Plan, prompt: tuple[int, ...], pending: tuple[int, ...], place: int) -> None:
        with grown(kit, plan) as rows:
            good = kit.cold(prompt, row=rows.rows[0]).checkpoint
            bad = evolve(good, namespace="another drafter's")
            joining = [good, good]
            joining.insert(place, bad)
            must_raise(
                CheckpointError,
                lambda: rows.group.prepare_append(joining),
                "prepare_append() of a checkpoint of another namespace",
            )
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    kit.examples(
        run,
        plan=plans(kit),
        prompt=prompts(kit),
        pending=row_ids(kit),
        place=st.integers(0, 2),
    )


@check()
def cold_rows_join_prefill_groups_alone(kit: Kit) -> None:
    """``None`` is a row that reads from the start; a decode group refuses it."""
    with kit.open([kit.cold((0, 1))]) as rows:
        must_raise(
            CheckpointError,
            lambda: rows.group.prepare_append([None]),
            "a cold row that joins a decode group",
        )
        assert_as_alone(kit, rows, (1,), (kit.max_depth,))
    with kit.prefill_group([]) as group:
        append(group, [])
        assert group.row_count == 0
        append(group, [None, None])
        assert group.row_count == 2
        group.filter_rows([1])
        assert group.row_count == 1
