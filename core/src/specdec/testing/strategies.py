"""Hypothesis strategies over what a group is asked.

Arguments do not depend on the state they meet: lists are as long as a group may be and are cut to
its rows where they are used, so that a printed example is a complete reproducer and shrinks fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from hypothesis import strategies as st

if TYPE_CHECKING:
    from specdec.testing.driven import DrivenGroup
    from specdec.testing.harness import Harness

__all__ = ["Plan", "Turn", "grown", "orders", "plans", "prompts", "row_ids", "row_ints", "turns"]


@frozen
class Turn:
    """One round for up to ``max_rows`` rows: what is pending, how deep, how much is accepted."""

    pending: tuple[int, ...]
    depths: tuple[int, ...]
    accepted: tuple[int, ...]


@frozen
class Plan:
    """Prompts of some rows, whether they sample, and the rounds they go through."""

    prompts: tuple[tuple[int, ...], ...]
    turns: tuple[Turn, ...]
    sampled: bool


def row_ids(kit: Harness) -> st.SearchStrategy[tuple[int, ...]]:
    """One id for each row there could be."""
    return row_ints(kit, kit.vocab_size - 1)


def row_ints(kit: Harness, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """One int of 0 to ``most`` for each row there could be."""
    one = st.integers(0, most)
    return st.lists(one, min_size=kit.max_rows, max_size=kit.max_rows).map(tuple)


def prompts(kit: Harness, longest: int = 10) -> st.SearchStrategy[tuple[int, ...]]:
    """What a row reads before it decodes."""
    ids = st.integers(0, kit.vocab_size - 1)
    return st.lists(ids, min_size=kit.shortest, max_size=longest).map(tuple)


def orders(kit: Harness) -> st.SearchStrategy[tuple[int, ...]]:
    """Old row numbers in a new order, some of them gone."""
    rows = st.permutations(range(kit.max_rows))
    return st.tuples(rows, st.integers(0, kit.max_rows)).map(
        lambda drawn: tuple(drawn[0][: drawn[1]])
    )


def turns(kit: Harness) -> st.SearchStrategy[Turn]:
    """One round."""
    return st.builds(
        Turn,
        pending=row_ids(kit),
        depths=row_ints(kit, kit.max_depth),
        accepted=row_ints(kit, kit.max_depth),
    )


def plans(kit: Harness, *, rows: int = 1, most_turns: int = 3) -> st.SearchStrategy[Plan]:
    """Some rows that have decoded for a while.

    Args:
        kit: the drafter on its target.
        rows: the fewest rows.
        most_turns: the most rounds.
    """
    return st.builds(
        Plan,
        prompts=st.lists(prompts(kit), min_size=rows, max_size=kit.max_rows).map(tuple),
        turns=st.lists(turns(kit), max_size=most_turns).map(tuple),
        sampled=st.booleans(),
    )


def grown(kit: Harness, plan: Plan) -> DrivenGroup:
    """A decode group whose rows have been through a plan."""
    from specdec.sampling import SamplingOptions
    from specdec.testing.driven import DrivenRow

    # By rejection, so that a drafter that declares only what is looked at declares it here.
    sampled = SamplingOptions(temp=0.9, acceptance="rejection")
    options = sampled if plan.sampled else SamplingOptions()
    rows = [DrivenRow(options=options, seed=11 + place) for place in range(len(plan.prompts))]
    group = kit.open(
        [kit.cold(prompt, row=row) for prompt, row in zip(plan.prompts, rows, strict=True)]
    )
    for turn in plan.turns:
        group.draft(turn.pending, turn.depths)
        group.commit(turn.accepted)
    return group
