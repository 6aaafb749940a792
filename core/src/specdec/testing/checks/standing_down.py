"""Rows that a drafter will not draft for any more: they say why, and stay silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from specdec.contract import SupportsDeviceDraft
from specdec.testing.driven import resolved
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Turn, orders, prompts, turns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.testing.driven import DrivenGroup

_LONGEST = 64  # tokens of a prompt: a drafter's own limit may be in it, or soon behind it


@check(needs="stood_down")
def stood_down_rows_stay_down(kit: Kit) -> None:
    """A row that says why it drafts no more proposes nothing from then on, wherever it goes."""
    bodies = st.tuples(prompts(kit), st.integers(kit.shortest, _LONGEST))

    def run(texts: list[Any], rounds: list[Turn], last: Turn, keep: tuple[int, ...]) -> None:
        cold = [kit.cold(_repeated(text, length)) for text, length in texts]
        with kit.open(cold) as rows:
            said = _reasons(rows, "open()")
            for turn in rounds:
                said = _round(rows, turn, said)
            order = [row for row in keep if row < len(said)] or [0]
            rows.filter(order)
            said = _kept([said[row] for row in order], rows, f"filter_rows({order})")
            down = [row for row, reason in enumerate(said) if reason is not None]
            del down[kit.max_rows - len(said) :]
            rows.join([rows.capture(row) for row in down])
            # A restored row may find out when it is asked again.
            said = _kept([*said, *[None] * len(down)], rows, "a join")
            restored = _round(rows, last, said)[len(said) - len(down) :]
            assert None not in restored, (
                f"the rows {down} had stood down; captured and restored they say {restored}"
            )
            _look_on_the_device(rows, last)

    run(**_some_end_and_some_do_not(kit))
    kit.examples(
        run,
        texts=st.lists(bodies, min_size=1, max_size=kit.max_rows),
        rounds=st.lists(turns(kit), max_size=3),
        last=turns(kit),
        keep=orders(kit),
    )


def _some_end_and_some_do_not(kit: Kit) -> dict[str, Any]:
    """An example for any limit of 3 to 60 tokens: short and long rows that change places."""
    lengths = [_LONGEST, kit.shortest, _LONGEST // 2, 1][: kit.max_rows]
    deep = Turn((0, 1) * kit.max_rows, (kit.max_depth,) * kit.max_rows, (0, 1) * kit.max_rows)
    return {
        "texts": [((0, 1, 1, 0), length) for length in lengths],
        "rounds": [deep, deep],
        "last": deep,
        "keep": (2, 1, 0),
    }


def _repeated(text: Sequence[int], length: int) -> tuple[int, ...]:
    """A text of so many tokens."""
    return (tuple(text or (0,)) * length)[:length]


def _reasons(rows: DrivenGroup, when: str) -> list[str | None]:
    """What the group says of its rows, which is well formed."""
    group: Any = rows.group
    said = list(group.stood_down)
    assert len(said) == len(rows.rows), (
        f"after {when} stood_down has {len(said)} entries for {len(rows.rows)} rows"
    )
    for place, reason in enumerate(said):
        assert reason is None or (isinstance(reason, str) and reason.strip()), (
            f"after {when} stood_down has {reason!r} for row {place}: say why in a few words, or "
            "give None"
        )
    return said


def _kept(before: Sequence[str | None], rows: DrivenGroup, when: str) -> list[str | None]:
    """What the group says now; who had a reason has it still."""
    said = _reasons(rows, when)
    for place, (reason, now) in enumerate(zip(before, said, strict=True)):
        assert reason is None or now == reason, (
            f"row {place} stood down ({reason!r}), and after {when} its stood_down is {now!r}"
        )
    return said


def _round(rows: DrivenGroup, turn: Turn, before: Sequence[str | None]) -> list[str | None]:
    """A round, in which nobody who has stood down proposes anything.

    Args:
        rows: the group.
        turn: what it is asked.
        before: what each row must keep.
    """
    drafts = rows.draft(turn.pending, turn.depths)
    said = _reasons(rows, "draft()")
    for place, (draft, reason, now) in enumerate(zip(drafts, before, said, strict=True)):
        why = reason if reason is not None else now
        assert why is None or not draft, (
            f"row {place} has stood down ({why!r}), but drafts {list(draft)}"
        )
    said = _kept(before, rows, "draft()")
    rows.commit(turn.accepted)
    return _kept(said, rows, "commit()")


def _look_on_the_device(rows: DrivenGroup, turn: Turn) -> None:
    """The executor looks while a device draft is under way, before it is resolved."""
    group, depths = rows.group, turn.depths
    if not isinstance(group, SupportsDeviceDraft) or not any(depths[: len(rows.rows)]):
        return
    proposal = group.draft_device(*rows.asked(turn.pending, depths))
    if proposal is None:
        return
    said = _reasons(rows, "draft_device()")
    drafts = resolved(proposal, len(said))
    assert _reasons(rows, "resolve()") == said, "resolve() changes what stood_down says"
    for place, (draft, reason) in enumerate(zip(drafts, said, strict=True)):
        assert reason is None or not draft, (
            f"row {place} has stood down ({reason!r}), but drafts {list(draft)} on the device"
        )
