"""Rounds: what a draft is, and what a commit keeps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve
from hypothesis import strategies as st

from specdec.contract import ContextKind, SupportsDeviceDraft
from specdec.errors import ContractError
from specdec.testing.checks.membership import assert_as_alone
from specdec.testing.driven import host_drafts, resolved
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, prompts, row_ids, row_ints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.testing.driven import DrivenGroup


@check()
def drafts_fit_their_depth(kit: Kit) -> None:
    """``draft`` gives B rows of 0 to depth ids of the vocabulary."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            drafts = rows.draft(pending, depths)
            assert len(drafts) == len(rows.rows), f"{len(drafts)} drafts for {len(rows.rows)} rows"
            for draft, depth in zip(drafts, depths, strict=False):
                assert len(draft) <= depth, f"{list(draft)} was drafted where {depth} were asked"
                assert all(0 <= token < kit.vocab_size for token in draft), (
                    f"{list(draft)} has an id outside 0 to {kit.vocab_size - 1}"
                )

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


def _some_texts(kit: Kit) -> Iterator[tuple[list[int], int]]:
    """Beginnings of a text that repeats itself after twelve tokens, and what follows each."""
    text = [token % kit.vocab_size for token in (0, 1, 2, 3, 1, 2, 0, 4, 2, 3, 1, 5) * 6]
    for length in (kit.shortest, 1, 2, 4, 7, 11, 15, 20, 30, 45, 66):
        yield text[:length], text[length]


@check()
def draft_answers_the_last_tokens(kit: Kit) -> None:
    """On a text that repeats itself, or on some text, the drafter drafts something."""
    for read, pending in _some_texts(kit):
        with kit.open([kit.cold(read)]) as rows:
            [draft] = rows.draft((pending,), (kit.max_depth,))
            if draft:
                return
    raise AssertionError("the drafter never drafts anything, whatever it has read")


@check()
def drafts_depend_on_the_pending_token(kit: Kit) -> None:
    """After some text another pending token gives another draft: a draft follows it."""
    for read, _ in _some_texts(kit):
        kept = kit.cold(read)
        seen = set()
        for pending in range(kit.vocab_size):
            with kit.open([kept]) as rows:
                seen.update(rows.draft((pending,), (kit.max_depth,)))
            if len(seen) > 1:
                return
    raise AssertionError(
        "whatever token is pending, the same is drafted; a draft comes after the pending token, "
        "which neither target nor drafter has read yet"
    )


@check()
def processed_tokens_count_what_was_read(kit: Kit) -> None:
    """A row that read n tokens has ``processed_tokens`` n, and a round adds accepted + 1."""

    def run(plan: Plan) -> None:
        with grown(kit, plan) as rows:
            for place, row in enumerate(rows.rows):
                counted = rows.group.capture(place).processed_tokens
                assert counted == len(row.tokens), (
                    f"row {place} has processed {len(row.tokens)} tokens, but its checkpoint "
                    f"says {counted}; its log is {row.log}"
                )

    kit.examples(run, plan=plans(kit))


@check()
def rows_draft_as_alone(kit: Kit) -> None:
    """A row in a group drafts what a row alone drafts that went the same way (any batch)."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            assert_as_alone(kit, rows, pending, depths)

    kit.examples(
        run,
        plan=plans(kit, rows=min(2, kit.max_rows), most_turns=4),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def depth_zero_reads_the_pending_token(kit: Kit) -> None:
    """A row of depth 0 drafts nothing, and still reads its pending token at ``commit``."""

    def run(plan: Plan, pending: tuple[int, ...], after: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            depths = tuple((place % 2) * kit.max_depth for place in range(kit.max_rows))
            drafts = rows.draft(pending, depths)
            assert all(not draft for draft in drafts[::2]), "a row of depth 0 drafted something"
            rows.commit([0] * len(rows.rows))
            for place, row in enumerate(rows.rows):
                counted = rows.group.capture(place).processed_tokens
                assert counted == len(row.tokens), (
                    f"a round of depth {depths[place]} left row {place} at {counted} tokens, not "
                    f"{len(row.tokens)}"
                )
            assert_as_alone(kit, rows, after, (kit.max_depth,) * kit.max_rows)

    kit.examples(run, plan=plans(kit), pending=row_ids(kit), after=row_ids(kit))


@check(history_only=True)
def rows_draft_as_cold_rows(kit: Kit) -> None:
    """A row drafts what a cold row drafts that was given its tokens: its state is its history."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            drafts = rows.draft(pending, depths)
            for place, row in enumerate(rows.rows):
                cold = kit.next_of_cold(row, pending[place], depths[place])
                assert drafts[place] == cold, (
                    f"row {place} drafted {list(drafts[place])}, but a cold row that read the same "
                    f"{len(row.tokens)} tokens drafts {list(cold)}; its log is {row.log}"
                )

    kit.examples(
        run,
        plan=plans(kit, most_turns=4),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def rejected_drafts_leave_no_trace(kit: Kit) -> None:
    """Accepting a of D drafts is the same as accepting a of D', for any D and D' above a."""

    def run(
        prompt: tuple[int, ...], pending: tuple[int, ...], depths: tuple[int, int], keep: int
    ) -> None:
        ways = [kit.cold(prompt), kit.cold(prompt)]
        with kit.open(ways) as rows:
            drafts = rows.draft((pending[0],) * 2, depths)
            short, long = sorted(drafts, key=len)
            if long[: len(short)] != short:
                return  # a block drafter may draft otherwise at another depth
            accepted = min(keep, len(short) - 1)
            if accepted < 0 or (len(short) == accepted) != (len(long) == accepted):
                return
            rows.commit([accepted] * 2)
            after = rows.draft((pending[-1],) * 2, (kit.max_depth,) * 2)
            assert after[0] == after[1], (
                f"after {accepted} of {len(drafts[0])} drafts the row drafts {list(after[0])}, "
                f"after {accepted} of {len(drafts[1])} it drafts {list(after[1])}"
            )

    deep = st.integers(0, kit.max_depth)
    kit.examples(
        run,
        prompt=prompts(kit),
        pending=row_ids(kit),
        depths=st.tuples(deep, deep),
        keep=st.integers(0, kit.max_depth),
    )


@check()
def draft_refuses_wrong_lists(kit: Kit) -> None:
    """Pending tokens, depths or steps that are not one per row open no round."""
    with kit.open([kit.cold((0, 1, 0)), kit.cold((1, 1, 1))]) as rows:
        pair, depths, steps = [1, 0], [kit.max_depth] * 2, [0, 0]
        for asked in (
            ([1], depths, steps),
            ([1, 0, 1], depths, steps),
            (pair, [1], steps),
            (pair, depths, [0]),
        ):
            must_raise(
                ContractError, partial(rows.group.draft, *asked), f"draft{asked} of two rows"
            )
        assert_as_alone(kit, rows, (1, 0), (kit.max_depth,) * 2)


@check()
def commit_refuses_wrong_counts(kit: Kit) -> None:
    """A count outside 0 to the draft's length, or not one per row, changes nothing."""
    with kit.open([kit.cold((0, 1, 0, 1, 0)), kit.cold((1, 1, 1))]) as rows:
        drafts = rows.draft((1, 1), (kit.max_depth,) * 2)
        lengths = [len(draft) for draft in drafts]
        context = rows.window_context()
        for counts in (
            [-1, 0],
            [0, lengths[1] + 1],
            [0],
            [0, 0, 0],
        ):
            must_raise(
                ContractError,
                partial(rows.group.commit, counts, context),
                f"commit({counts}) for drafts of {lengths} tokens",
            )
        rows.commit(lengths)
        assert_as_alone(kit, rows, (0, 1), (kit.max_depth,) * 2)


@check()
def commit_refuses_a_wrong_context(kit: Kit) -> None:
    """A context that was not declared, or of another number of rows, changes nothing."""
    with kit.open([kit.cold((0, 1, 0, 1, 0)), kit.cold((1, 1, 1))]) as rows:
        rows.draft((1, 1), (kit.max_depth,) * 2)
        right = rows.window_context()
        wrong: list[mx.array | None]
        if right is None:
            wrong = [mx.zeros((2, 1, 4))]
        else:
            wrong = [None, right[:1], right[:, :0], right[..., :-1]]
        for context in wrong:
            must_raise(
                ContractError,
                partial(rows.group.commit, [0, 0], context),
                f"commit() with a context of {None if context is None else context.shape}, where "
                f"the window's is {None if right is None else right.shape},",
            )
        rows.commit([kit.max_depth] * 2)
        assert_as_alone(kit, rows, (0, 1), (kit.max_depth,) * 2)


@check()
def padding_is_never_read(kit: Kit) -> None:
    """What stands behind a row's own window in the context changes nothing."""
    if kit.kind is ContextKind.NONE:
        return

    def run(prompt: tuple[int, ...], pending: tuple[int, ...], fill: float) -> None:
        kept = [kit.cold(prompt), kit.cold(prompt)]
        after = []
        for value in (0.0, fill):
            with kit.open(kept) as rows:
                drafts = rows.draft(pending[:2], (kit.max_depth, 1))
                context: Any = rows.window_context()
                own = len(drafts[1]) + 1
                if context.shape[1] > own:
                    block = mx.full((1, context.shape[1] - own, context.shape[2]), value).astype(
                        context.dtype
                    )
                    second = mx.concatenate([context[1:, :own], block], axis=1)
                    context = mx.concatenate([context[:1], second], axis=0)
                rows.group.commit([0, len(drafts[1])], context)
                rows.rows[0].tokens += pending[:1]
                rows.rows[1].tokens += (pending[1], *drafts[1])
                rows.tell()
                steps = [1, 1 + len(drafts[1])]
                asked = (list(pending[-2:]), [kit.max_depth] * 2, steps)
                after.append(host_drafts(rows.group.draft(*asked)))
        assert after[0] == after[1], (
            f"with zeros behind the window the rows draft {after[0]}, with {fill} {after[1]}"
        )

    kit.examples(
        run, prompt=prompts(kit), pending=row_ids(kit), fill=st.sampled_from([1.0, -3.0, 50.0])
    )


def _drafted(
    rows: DrivenGroup, lists: tuple[list[int], ...], on_device: bool, vocab_size: int
) -> list[tuple[int, ...]]:
    """Draft, and write into the lists that were passed in as soon as the call has returned."""
    group: Any = rows.group
    proposal = group.draft_device(*lists) if on_device else None
    host: Any = group.draft(*lists) if proposal is None else None
    for part in lists:
        part[:] = [(value + 1) % vocab_size for value in part]
    return host_drafts(host) if proposal is None else resolved(proposal, 1)


@check()
def arguments_are_borrowed(kit: Kit) -> None:
    """Lists and arrays that were passed in may change afterwards; the rows do not."""

    def run(prompt: tuple[int, ...], pending: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        chunk = list(prompt) or [0]
        tokens = mx.array([chunk], mx.int32)
        context = kit.context([()], [chunk], len(chunk))
        with kit.prefill_group([None]) as prefill:
            prefill.prefill(tokens, context)
            tokens[:] = (tokens + 1) % kit.vocab_size
            if context is not None:
                context[:] = context + 5.0
            captured = prefill.capture(0)
        kept = kit.cold(chunk)
        assert kit.same_state(captured, kept.checkpoint), (
            "what was written into tokens or context after prefill() reached the row"
        )
        for on_device in (False, True):
            with kit.open([kept]) as rows, kit.open([kept]) as other:
                if on_device and not isinstance(rows.group, SupportsDeviceDraft):
                    continue
                drafts = rows.draft(pending, (kit.max_depth,), on_device=on_device)
                lists = other.asked(pending, (kit.max_depth,))
                drafted = _drafted(other, lists, on_device, kit.vocab_size)
                assert drafted == drafts, (
                    f"{list(map(list, drafted))} was drafted where the lists that were passed in "
                    f"changed after the call, else {list(map(list, drafts))}"
                )
                count = [min(accepted[0], len(drafts[0]))]
                window = rows.window_context()
                other.group.commit(count, window)
                if window is not None:
                    window[:] = window + 5.0
                count[:] = [0]
                rows.commit(accepted)
                assert kit.same_state(other.group.capture(0), rows.group.capture(0)), (
                    "what was written into an argument after the call reached the row"
                )

    kit.examples(
        run,
        prompt=prompts(kit),
        pending=row_ids(kit),
        accepted=row_ints(kit, kit.max_depth),
    )


@check()
def draws_follow_the_row(kit: Kit) -> None:
    """A sampled row drafts the same wherever it stands: its draw knows its seed and step alone."""

    def run(plan: Plan, order: tuple[int, ...], pending: tuple[int, ...]) -> None:
        with grown(kit, evolve(plan, sampled=True)) as rows:
            size = len(rows.rows)
            rows.filter([row for row in order if row < size])
            assert_as_alone(kit, rows, pending, (kit.max_depth,) * kit.max_rows)

    kit.examples(
        run,
        plan=plans(kit, rows=min(2, kit.max_rows)),
        order=st.permutations(range(kit.max_rows)).map(tuple),
        pending=row_ids(kit),
    )
