"""Drafts that are looked up on the host: what they would be, asked without a round."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st

from specdec.errors import ContractError
from specdec.testing.checks.membership import assert_as_alone
from specdec.testing.driven import host_drafts
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, row_ids, row_ints


@check(needs="look_up")
def look_up_is_the_next_draft(kit: Kit) -> None:
    """What ``look_up`` gives is what ``draft`` then proposes for the same pending and depths."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            group: Any = rows.group
            size = len(rows.rows)
            seen = host_drafts(group.look_up(list(pending[:size]), list(depths[:size])))
            drafts = rows.draft(pending, depths)
            assert seen == drafts, (
                f"look_up gave {list(map(list, seen))}, then {list(map(list, drafts))} was "
                f"drafted, for depths {list(depths[:size])}"
            )

    kit.examples(run, plan=plans(kit), pending=row_ids(kit), depths=row_ints(kit, kit.max_depth))


@check(needs="look_up")
def look_up_changes_nothing(kit: Kit) -> None:
    """After any number of look-ups a row's checkpoint is the same, and it drafts as alone."""

    def run(plan: Plan, looks: list[tuple[int, ...]], pending: tuple[int, ...]) -> None:
        depths = (kit.max_depth,) * kit.max_rows
        with grown(kit, plan) as rows:
            group: Any = rows.group
            size = len(rows.rows)
            before = [group.capture(place) for place in range(size)]
            for look in looks:
                group.look_up(list(look[:size]), list(depths[:size]))
            for place, held in enumerate(before):
                assert kit.same_state(held, group.capture(place)), (
                    f"row {place} has another checkpoint after look_up()"
                )
            assert_as_alone(kit, rows, pending, depths)
            rows.commit((1,) * kit.max_rows)
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(
        run,
        plan=plans(kit),
        looks=st.lists(row_ids(kit), min_size=1, max_size=3),
        pending=row_ids(kit),
    )


@check(needs="look_up")
def look_up_refuses_wrong_lists(kit: Kit) -> None:
    """Lists that are not one entry per row, or a negative depth, are refused as by ``draft``."""
    with kit.open([kit.cold((0, 1)), kit.cold((1, 1))]) as rows:
        group: Any = rows.group
        for pending, depths in (
            ([0], [1, 1]),
            ([0, 1], [1]),
            ([0] * 3, [1] * 3),
            ([0, 1], [1, -1]),
        ):
            for verb, call in (
                ("look_up", partial(group.look_up, pending, depths)),
                ("draft", partial(group.draft, pending, depths, [0, 0])),
            ):
                must_raise(ContractError, call, f"{verb}({pending}, {depths}) of two rows")
        assert_as_alone(kit, rows, (1, 0), (kit.max_depth,) * 2)
