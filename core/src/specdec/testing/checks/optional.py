"""Optional verbs: previews, device drafts, tokens that somebody else chose."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from specdec.errors import ContractError
from specdec.testing.checks.membership import assert_as_alone
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, row_ids, row_ints


@check(needs="preview")
def preview_changes_nothing(kit: Kit) -> None:
    """After any number of previews every row drafts as if there had been none."""

    def run(plan: Plan, looks: list[tuple[int, ...]], pending: tuple[int, ...]) -> None:
        depths = (kit.max_depth,) * kit.max_rows
        with grown(kit, plan) as rows:
            group: Any = rows.group
            for look in looks:
                seen = group.preview(*rows.asked(look, depths))
                if seen is not None:
                    mx.eval(seen)
            assert_as_alone(kit, rows, pending, depths)
            rows.commit((1,) * kit.max_rows)
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(
        run,
        plan=plans(kit),
        looks=st.lists(row_ids(kit), min_size=1, max_size=2),
        pending=row_ids(kit),
    )


@check(needs="preview")
def preview_is_the_start_of_a_draft(kit: Kit) -> None:
    """What ``preview`` shows is how the draft begins that follows it."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            group: Any = rows.group
            seen = group.preview(*rows.asked(pending, depths))
            drafts = rows.draft(pending, depths)
            if seen is None:
                return
            assert seen.shape[0] == len(rows.rows)
            assert seen.shape[1] <= max(depths[: len(rows.rows)])
            for place, shown in enumerate(seen.tolist()):
                draft = list(drafts[place])
                assert shown[: len(draft)] == draft[: len(shown)], (
                    f"row {place}: preview showed {shown}, then {draft} was drafted"
                )

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check(needs="draft_device")
def device_drafts_equal_host_drafts(kit: Kit) -> None:
    """Left on the device and resolved, a draft is the one that ``draft`` gives, and so after it."""

    def run(
        plan: Plan,
        pending: tuple[int, ...],
        depths: tuple[int, ...],
        accepted: tuple[int, ...],
    ) -> None:
        with grown(kit, plan) as host, grown(kit, plan) as device:
            for _ in range(2):
                expected = host.draft(pending, depths)
                got = device.draft(pending, depths, on_device=True)
                assert got == expected, (
                    f"on the device {list(map(list, got))}, on the host "
                    f"{list(map(list, expected))}, for depths {depths[: len(got)]}"
                )
                assert host.commit(accepted) == device.commit(accepted)

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
        accepted=row_ints(kit, kit.max_depth),
    )


@check(needs="draft_device")
def device_drafts_have_one_shape(kit: Kit) -> None:
    """A device draft is ``[B, d]``, integer, d at most the largest depth, lengths within it."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        if not any(depths[: len(plan.prompts)]):
            return  # a device draft is never asked for where no row may draft
        with grown(kit, plan) as rows:
            group: Any = rows.group
            proposal = group.draft_device(*rows.asked(pending, depths))
            if proposal is None:
                drafts = rows.draft(pending, depths)
                assert len(drafts) == len(rows.rows), "after None, draft() must open the round"
                return
            most = max(depths[: len(rows.rows)])
            assert proposal.tokens.ndim == 2
            assert proposal.tokens.shape[0] == len(rows.rows)
            assert proposal.tokens.shape[1] <= most, (
                f"{proposal.tokens.shape[1]} drafts a row where {most} were asked at most"
            )
            assert mx.issubdtype(proposal.tokens.dtype, mx.integer)
            width = proposal.tokens.shape[1]
            lengths: Any = (
                [width] * len(rows.rows) if proposal.lengths is None else proposal.lengths.tolist()
            )
            for length, depth in zip(lengths, depths, strict=False):
                assert 0 <= length <= min(depth, width), (
                    f"lengths {lengths} for depths {depths[: len(lengths)]}"
                )

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth).filter(any),
    )


@check(needs="consume")
def consumed_tokens_count_as_committed(kit: Kit) -> None:
    """Rows that consume tokens, of different number, draft as alone and have processed them."""

    def run(plan: Plan, chunks: list[list[int]], pending: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            rows.consume([list(chunk) for chunk in chunks[: len(rows.rows)]])
            for place, row in enumerate(rows.rows):
                assert rows.group.capture(place).processed_tokens == len(row.tokens)
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    ids = st.integers(0, kit.vocab_size - 1)
    kit.examples(
        run,
        plan=plans(kit),
        chunks=st.lists(st.lists(ids, max_size=4), min_size=kit.max_rows, max_size=kit.max_rows),
        pending=row_ids(kit),
    )


@check(needs="consume", history_only=True)
def consumed_tokens_equal_read_tokens(kit: Kit) -> None:
    """A row that consumed tokens drafts what a cold row drafts that read them."""

    def run(prompt: list[int], chunk: list[int], pending: tuple[int, ...]) -> None:
        with kit.open([kit.cold(prompt)]) as rows, kit.open([kit.cold(prompt + chunk)]) as cold:
            rows.consume([chunk])
            [one] = rows.draft(pending, (kit.max_depth,))
            [other] = cold.draft(pending, (kit.max_depth,))
            assert one == other

    ids = st.integers(0, kit.vocab_size - 1)
    kit.examples(
        run,
        prompt=st.lists(ids, min_size=1, max_size=6),
        chunk=st.lists(ids, min_size=1, max_size=6),
        pending=row_ids(kit),
    )


@check(needs="consume")
def consume_refuses_wrong_lengths(kit: Kit) -> None:
    """Lengths beyond the chunk, negative ones, or not one per row, change nothing."""
    with kit.open([kit.cold((0, 1)), kit.cold((1, 1))]) as rows:
        group: Any = rows.group
        tokens = mx.array([[0, 1], [1, 0]], mx.int32)
        context = kit.context([row.tokens for row in rows.rows], [(0, 1), (1, 0)], 2)
        for lengths in ([3, 0], [-1, 0], [1], [1, 1, 1]):
            must_raise(
                ContractError,
                partial(group.consume, tokens, context, lengths),
                f"consume() of lengths {lengths} for two rows of two tokens",
            )
        assert_as_alone(kit, rows, (1, 0), (kit.max_depth,) * 2)
