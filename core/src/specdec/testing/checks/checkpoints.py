"""Checkpoints: captured, restored, stored, and refused where they do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import evolve
from hypothesis import strategies as st

from specdec.checkpoints.layout import checkpoint_from_bytes, to_bytes
from specdec.contract import RowCheckpoint
from specdec.errors import CheckpointError
from specdec.testing.checks.membership import assert_as_alone
from specdec.testing.driven import Kept
from specdec.testing.expect import must_raise
from specdec.testing.harness import frozen_copy
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, row_ids, row_ints

if TYPE_CHECKING:
    from collections.abc import Iterator


def read_row(kit: Kit) -> Kept:
    """A row that has read a prompt and gone through a round."""
    with kit.open([kit.cold((0, 1, 1, 0, 1))]) as rows:
        rows.draft((1,), (kit.max_depth,))
        rows.commit((1,))
        return rows.capture(0)


def assert_refused(kit: Kit, wrong: RowCheckpoint, what: str) -> None:
    """Neither a new group nor a live one takes the checkpoint, and the live rows stay right."""
    good = kit.cold((0, 1, 0))
    with kit.open([good]) as rows:
        for verb, call in (
            ("open", lambda: kit.open([Kept(wrong, good.row)]).close()),
            ("open_prefill", lambda: kit.prefill_group([wrong]).__exit__()),
            ("prepare_append", lambda: rows.group.prepare_append([wrong])),
        ):
            must_raise(CheckpointError, call, f"{verb}() of a checkpoint with {what}")
        assert_as_alone(kit, rows, (1,), (kit.max_depth,))


@check()
def checkpoint_is_well_formed(kit: Kit) -> None:
    """A checkpoint has the group's namespace, a schema, named arrays and flat metadata."""
    held = read_row(kit).checkpoint
    assert isinstance(held, RowCheckpoint), f"capture() returned {type(held).__name__}"
    assert held.namespace == kit.grouped.checkpoint_namespace
    assert held.attachment.schema.strip(), "the attachment's schema is blank"
    for name, value in held.attachment.metadata.items():
        assert isinstance(name, str), f"metadata has the name {name!r}; names are strings"
        assert isinstance(value, str | int | float | bool), (
            f"metadata {name} is {value!r}; a string, number or bool can be stored"
        )
    for name, array in held.attachment.arrays.items():
        assert isinstance(array, mx.array), f"{name} is {type(array).__name__}, not an mx.array"


@check()
def unread_row_can_be_captured(kit: Kit) -> None:
    """A row that has read nothing gives an empty checkpoint that a decode group opens from."""
    if kit.shortest:
        return
    held = kit.cold(())
    assert held.checkpoint.processed_tokens == 0
    with kit.open([held, kit.cold((1, 0))]) as rows:
        assert_as_alone(kit, rows, (1, 1), (kit.max_depth, kit.max_depth))
        rows.commit((kit.max_depth, kit.max_depth))
        assert_as_alone(kit, rows, (0, 1), (kit.max_depth, kit.max_depth))


@check()
def capture_changes_nothing(kit: Kit) -> None:
    """Capturing a row, any number of times, leaves every row as it was."""

    def run(plan: Plan, which: int, pending: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            place = which % len(rows.rows)
            one, again = rows.capture(place), rows.capture(place)
            assert kit.same_state(one.checkpoint, again.checkpoint), "two captures differ"
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    kit.examples(run, plan=plans(kit), which=st.integers(0, kit.max_rows - 1), pending=row_ids(kit))


@check()
def capture_is_independent(kit: Kit) -> None:
    """What was captured never changes, whatever its group does afterwards."""

    def run(
        plan: Plan,
        which: int,
        pending: tuple[int, ...],
        accepted: tuple[int, ...],
    ) -> None:
        with grown(kit, plan) as rows:
            held = rows.capture(which % len(rows.rows))
            before = frozen_copy(held.checkpoint)
            for _ in range(2):
                rows.draft(pending, (kit.max_depth,) * kit.max_rows)
                rows.commit(accepted)
            rows.filter(list(range(len(rows.rows)))[::-1])
            rows.draft(pending, (0,) * kit.max_rows)
            rows.commit(accepted)
        assert kit.same_state(held.checkpoint, before), (
            "a captured checkpoint changed when its group went on: capture() must copy"
        )

    kit.examples(
        run,
        plan=plans(kit),
        which=st.integers(0, kit.max_rows - 1),
        pending=row_ids(kit),
        accepted=row_ints(kit, kit.max_depth),
    )


@check()
def restored_row_goes_on_the_same(kit: Kit) -> None:
    """Captured and restored, alone or beside others, a row drafts as if it had stayed."""

    def run(
        plan: Plan,
        which: int,
        pending: tuple[int, ...],
        accepted: tuple[int, ...],
    ) -> None:
        depths = (kit.max_depth,) * kit.max_rows
        with grown(kit, plan) as rows:
            place = which % len(rows.rows)
            held = rows.capture(place)
            with kit.open([held]) as lone:
                lone.join([held])
                lone.filter([1])
                for _ in range(2):
                    drafts = rows.draft(pending, depths)
                    [draft] = lone.draft((pending[place],), (kit.max_depth,))
                    assert draft == drafts[place], (
                        f"a restored row drafts {list(draft)}, the row it was captured from "
                        f"{list(drafts[place])}; its log is {held.row.log}"
                    )
                    rows.commit(accepted)
                    lone.commit((accepted[place],))
                one, other = rows.capture(place).checkpoint, lone.capture(0).checkpoint
                assert kit.same_state(one, other, beside_others=True), (
                    "a row that was captured and restored went on with another state than the "
                    "row it was captured from; store all of it, as it is"
                )

    kit.examples(
        run,
        plan=plans(kit),
        which=st.integers(0, kit.max_rows - 1),
        pending=row_ids(kit),
        accepted=row_ints(kit, kit.max_depth),
    )


@check()
def checkpoint_is_borrowed(kit: Kit) -> None:
    """A checkpoint that was restored is unchanged, and can be restored any number of times."""

    def run(plan: Plan, pending: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        depths = (kit.max_depth,) * kit.max_rows
        with grown(kit, plan) as rows:
            held = rows.capture(0)
        before = frozen_copy(held.checkpoint)
        firsts = []
        for _ in range(2):
            with kit.open([held, held]) as restored:
                firsts.append(restored.draft(pending[:1] * 2, depths))
                restored.commit(accepted)
                restored.draft(pending, depths)
                restored.commit(accepted)
            with kit.prefill_group([held.checkpoint]) as prefill:
                kit.read(prefill, [held.row.copy()], [pending])
        assert firsts[0] == firsts[1], "restoring a checkpoint a second time drafts otherwise"
        assert kit.same_state(held.checkpoint, before), (
            "a group wrote into the checkpoint it was opened from; copy what is written to"
        )

    kit.examples(run, plan=plans(kit), pending=row_ids(kit), accepted=row_ints(kit, kit.max_depth))


@check()
def checkpoint_survives_safetensors(kit: Kit) -> None:
    """Stored as safetensors bytes and read again, a checkpoint restores the same row."""

    def run(plan: Plan, which: int, pending: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            held = rows.capture(which % len(rows.rows))
        read = checkpoint_from_bytes(to_bytes(held.checkpoint))
        assert kit.same_state(read, held.checkpoint), "bytes hold another state"
        with kit.open([held, Kept(read, held.row)]) as both:
            one, other = both.draft(pending[:1] * 2, (kit.max_depth,) * 2)
            assert one == other, f"the row drafts {list(one)}, read from bytes {list(other)}"

    kit.examples(run, plan=plans(kit), which=st.integers(0, kit.max_rows - 1), pending=row_ids(kit))


@check()
def wrong_namespace_is_refused(kit: Kit) -> None:
    """A checkpoint of another artifact or setting is refused."""
    held = read_row(kit).checkpoint
    for namespace in (*kit.other_namespaces(), held.namespace + "x", "another drafter's"):
        assert_refused(kit, evolve(held, namespace=namespace), f"the namespace {namespace!r}")


@check()
def wrong_schema_is_refused(kit: Kit) -> None:
    """A checkpoint of another layout is refused, whatever it holds."""
    held = read_row(kit).checkpoint
    for schema in ("another-layout-v1", held.attachment.schema + "0"):
        attachment = evolve(held.attachment, schema=schema)
        assert_refused(kit, evolve(held, attachment=attachment), f"the schema {schema!r}")


def damaged(held: RowCheckpoint) -> Iterator[tuple[str, RowCheckpoint]]:
    """Every way to lose or cut one array."""
    arrays = dict(held.attachment.arrays)
    for name, array in arrays.items():
        rest = {key: value for key, value in arrays.items() if key != name}
        yield f"no array {name}", _with(held, rest)
        for axis, size in enumerate(array.shape):
            if size:
                start = [slice(None)] * array.ndim
                start[axis] = slice(0, size - 1)
                yield (
                    f"{name} cut on axis {axis}",
                    _with(held, {**arrays, name: array[tuple(start)]}),
                )
        yield f"{name} with one axis more", _with(held, {**arrays, name: array[None]})


def _with(held: RowCheckpoint, arrays: dict[str, mx.array]) -> RowCheckpoint:
    return evolve(held, attachment=evolve(held.attachment, arrays=arrays))


@check()
def truncated_attachment_is_refused(kit: Kit) -> None:
    """A checkpoint with an array missing, cut or of another shape is refused."""
    held = read_row(kit).checkpoint
    if not held.attachment.arrays:
        assert held.attachment.metadata, "the checkpoint holds nothing at all"
    for what, wrong in damaged(held):
        assert_refused(kit, wrong, what)


@check()
def misaligned_checkpoint_is_refused(kit: Kit) -> None:
    """A checkpoint whose state does not cover ``processed_tokens`` is refused."""
    held = read_row(kit).checkpoint
    count = held.processed_tokens
    for wrong in (count - 1, count + 1, 0):
        assert_refused(
            kit, evolve(held, processed_tokens=wrong), f"processed_tokens {wrong} for {count}"
        )
