"""Draws: what a drafter that samples asks of its rows' samplers, and what it declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import evolve

from specdec.contract import DeclaresVocabulary, Proposal
from specdec.testing.driven import host_drafts
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import Plan, grown, plans, row_ids, row_ints

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUMS_TO_ONE = 1e-3  # of the logarithm of a sum; a bfloat16 head is farther from it than this


@check()
def draws_count_on_from_the_rows_step(kit: Kit) -> None:
    """A drafter that samples draws its draft i at the row's step + i, as the target will."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, evolve(plan, sampled=True)) as rows:
            rows.samplers.asked.clear()
            drafts = rows.draft(pending, depths)
            asked = list(rows.samplers.asked)
            if not asked:
                return  # it does not sample
            for place, (row, draft) in enumerate(zip(rows.rows, drafts, strict=True)):
                steps = [call[place] for call in asked]
                wanted = range(row.drawn, row.drawn + len(draft))
                if len(asked) < len(draft):
                    continue  # not drawn, or not all of it: copied, say
                assert set(wanted) <= set(steps), (
                    f"row {place} has drawn {row.drawn} samples and drafted {len(draft)} tokens; "
                    f"they are drawn at steps {list(wanted)}, but were drawn at {steps}"
                )

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


@check()
def declared_distributions_fit_their_drafts(kit: Kit) -> None:
    """A ``logq`` is ``[B, d, V or N]`` log-probabilities that allow what was drafted."""

    def run(plan: Plan, pending: tuple[int, ...], depths: tuple[int, ...]) -> None:
        with grown(kit, plan) as rows:
            proposed = rows.group.draft(*rows.asked(pending, depths))
            if isinstance(proposed, Proposal) and proposed.logq is not None:
                assert_fits(kit, proposed.logq, host_drafts(proposed))

    kit.examples(
        run,
        plan=plans(kit),
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
    )


def assert_fits(kit: Kit, logq: mx.array, drafts: Sequence[Sequence[int]]) -> None:
    """What was drafted could have been drawn from what is declared."""
    listed: Sequence[int] | None = None
    if isinstance(kit.grouped, DeclaresVocabulary):
        listed = kit.grouped.draft_vocabulary(kit.target)
    sizes = {kit.vocab_size} if listed is None else {kit.vocab_size, len(listed)}
    longest = max(map(len, drafts), default=0)
    assert logq.ndim == 3, f"logq is {logq.shape}, not [B, d, V]"
    assert logq.shape[0] == len(drafts), f"logq is {logq.shape} for {len(drafts)} rows"
    assert logq.shape[1] >= longest, f"logq is {logq.shape} for drafts of up to {longest}"
    assert logq.shape[2] in sizes, f"logq is {logq.shape}; its last axis has {sorted(sizes)}"
    sums: Any = mx.logsumexp(logq.astype(mx.float32), axis=-1).tolist()
    held: Any = logq.astype(mx.float32).tolist()
    for row, draft in enumerate(drafts):
        for at, token in enumerate(draft):
            total = sums[row][at]
            assert abs(total) < _SUMS_TO_ONE, (
                f"logq of row {row}, draft {at} sums to e^{total:.3f}; give log-probabilities"
            )
            place = token if logq.shape[2] == kit.vocab_size else list(listed or ()).index(token)
            assert held[row][at][place] > -mx.inf, (
                f"row {row} drafted {token} at {at}, where its logq makes that impossible"
            )
