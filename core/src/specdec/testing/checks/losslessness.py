"""Behind the executor: with this drafter the text is the target's own, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from hypothesis import strategies as st

from specdec.sampling import SamplingOptions
from specdec.testing.kit import Kit, check
from specdec.verify import Request, VerifyGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy

    from specdec.verify import Row


@frozen
class Wish:
    """A request, and how many rounds the group has run when it comes."""

    prompt: tuple[int, ...]
    max_tokens: int
    width: int
    end: int | None
    seed: int | None
    arrives: int


def wishes(kit: Kit, *, sampled: bool) -> SearchStrategy[list[Wish]]:
    """Some requests that come and go."""
    ids = st.integers(0, kit.vocab_size - 1)
    wish = st.builds(
        Wish,
        prompt=st.lists(ids, min_size=1, max_size=9).map(tuple),
        max_tokens=st.integers(1, 10),
        width=st.integers(0, kit.max_depth),
        end=st.none() | ids,
        seed=st.integers(0, 2**32) if sampled else st.none(),
        arrives=st.integers(0, 4),
    )
    return st.lists(wish, min_size=1, max_size=kit.max_rows)


def run_all(kit: Kit, asked: Sequence[Wish], *, plain: bool) -> list[Row]:
    """Serve requests as they come; with the drafter together, plainly each alone."""
    if plain and len(asked) > 1:
        return [row for wish in asked for row in run_all(kit, [wish], plain=True)]
    group = VerifyGroup(kit.target, None if plain else kit.provider, drafter="drafter under test")
    rows: dict[int, Row] = {}
    rounds = 0
    while len(rows) < len(asked) or group.rows:
        now = [n for n, wish in enumerate(asked) if n not in rows and wish.arrives <= rounds]
        for number, row in zip(now, group.admit([_request(asked[n]) for n in now]), strict=True):
            rows[number] = row
        with group.round() as done:
            done.deliver_all()
        rounds += 1
        assert rounds < 500, "the group does not come to an end"
    group.close()
    return [rows[number] for number in range(len(asked))]


def _request(wish: Wish) -> Request:
    return Request(
        prompt=wish.prompt,
        sampling=SamplingOptions(temp=0.0 if wish.seed is None else 0.8, seed=wish.seed),
        max_tokens=wish.max_tokens,
        end_tokens=() if wish.end is None else (wish.end,),
        num_draft_tokens=wish.width,
    )


def compare(kit: Kit, asked: list[Wish]) -> None:
    """With and without the drafter: the same tokens, ends, and no fault of the drafter."""
    ours, own = run_all(kit, asked, plain=False), run_all(kit, asked, plain=True)
    for wish, row, alone in zip(asked, ours, own, strict=True):
        stats = row.stats
        assert not stats.draft_errors, (
            f"the drafter raised {stats.draft_errors} times behind the executor; the last: "
            f"{stats.last_draft_error}"
        )
        assert not stats.invalid_drafts, f"an invalid draft: {stats.last_draft_error}"
        assert row.emitted == alone.emitted, f"{wish} gave {row.emitted}, alone {alone.emitted}"
        assert (row.finish, row.end_token) == (alone.finish, alone.end_token)
        assert stats.emitted == len(row.emitted)
        assert stats.accepted <= stats.drafted


@check()
def greedy_text_is_the_targets(kit: Kit) -> None:
    """Greedy texts, in any batch, with ends and budgets inside a draft, are the target's own."""

    def run(asked: list[Wish]) -> None:
        compare(kit, asked)

    kit.examples(run, asked=wishes(kit, sampled=False))


@check()
def seeded_text_is_the_targets(kit: Kit) -> None:
    """The same seed gives the same text with and without the drafter."""

    def run(asked: list[Wish]) -> None:
        compare(kit, asked)

    kit.examples(run, asked=wishes(kit, sampled=True))
