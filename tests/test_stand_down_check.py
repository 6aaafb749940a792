"""The kit's check of ``stood_down`` finds what is wrong in it, and nothing in what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from drafters.tapped import TappedProvider

from specdec.drafting import model_provider
from specdec.drafting.model_rows import DraftModelRows
from specdec.testing import DraftRowContract
from specdec_ngram.provider import NgramProvider
from specdec_two_model.tiny import tiny_draft_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import DeviceProposal, DraftProvider, RowCheckpoint

CHECK = "stood_down_rows_stay_down"


class Limited(DraftRowContract):
    """Rows end after twelve tokens."""

    shrink = False
    limit = 12

    def make_provider(self) -> DraftProvider:
        return tiny_draft_model(limit=self.limit)


class Far(Limited):
    """They end behind the texts of every other check of the kit."""

    limit = 50


class Always(DraftModelRows):
    """Says it of every row, and drafts on."""

    @property
    def stood_down(self) -> list[str | None]:
        return ["always" for _ in range(self.row_count)]


class Few(DraftModelRows):
    """Has entries for the rows that ended alone."""

    @property
    def stood_down(self) -> list[str | None]:
        return [reason for reason in super().stood_down if reason is not None]


class Flags(DraftModelRows):
    @property
    def stood_down(self) -> Any:
        return [reason is not None for reason in super().stood_down]


class Speechless(DraftModelRows):
    @property
    def stood_down(self) -> list[str | None]:
        return [reason and "" for reason in super().stood_down]


class Remembering(DraftModelRows):
    """Base of mistakes: what was said at the last draft, by place."""

    said: list[str | None]

    def draft(self, *asked: Any) -> Any:
        drafts = super().draft(*asked)
        self.said = super().stood_down
        return drafts

    def draft_device(self, *asked: Any) -> DeviceProposal | None:
        proposal = super().draft_device(*asked)
        if proposal is not None:
            self.said = super().stood_down
        return proposal

    @property
    def stood_down(self) -> list[str | None]:
        said = getattr(self, "said", [])
        return [*said, *[None] * self.row_count][: self.row_count]


class LostOnFilter(Remembering):
    def filter_rows(self, keep: Sequence[int], /) -> None:
        super().filter_rows(keep)
        self.said = [None] * len(keep)


class Unordered(Remembering):
    """Reasons stay where they were while rows change places."""


class Once(Remembering):
    """Says it in one round, and has forgotten it after the commit."""

    def commit(self, *args: Any) -> None:
        super().commit(*args)
        self.said = [None] * self.row_count


class Restored(DraftModelRows):
    """A row from a checkpoint says nothing any more."""

    mute = 0

    def prepare_append(self, checkpoints: Sequence[RowCheckpoint | None], /) -> Any:
        self.mute = self.row_count
        return super().prepare_append(checkpoints)

    @property
    def stood_down(self) -> list[str | None]:
        said = super().stood_down
        return [None if 0 < self.mute <= place else reason for place, reason in enumerate(said)]


class DeviceForgets(DraftModelRows):
    """Has it only once the draft is resolved."""

    @property
    def stood_down(self) -> list[str | None]:
        waiting = getattr(self, "waiting", False)
        return [None if waiting else reason for reason in super().stood_down]

    def draft_device(self, *asked: Any) -> Any:
        proposal = super().draft_device(*asked)
        if proposal is None:
            return None
        self.waiting, resolve = True, proposal.resolve

        def then(ids: Sequence[int]) -> Sequence[Sequence[int]]:
            self.waiting = False
            return resolve(ids)

        return type(proposal)(tokens=proposal.tokens, resolve=then, lengths=proposal.lengths)


MISTAKES = {
    Always: r"row \d has stood down \('always'\), but drafts \[\d",
    Few: r"stood_down has \d entries for \d rows",
    Flags: r"stood_down has (True|False) for row 0: say why in a few words, or give None",
    Speechless: r"stood_down has '' for row \d",
    LostOnFilter: r"after filter_rows\(.*\) its stood_down is None",
    Unordered: r"after filter_rows\(.*\) its stood_down is None|has stood down .* but drafts",
    Once: r"after commit\(\) its stood_down is None",
    Restored: r"captured and restored they say \[None",
    DeviceForgets: r"resolve\(\) changes what stood_down says",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found(mistake: type[DraftModelRows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_provider, "DraftModelRows", mistake)
    with pytest.raises(AssertionError, match=MISTAKES[mistake]):
        Limited().run_check(CHECK)


@pytest.mark.parametrize("kit", [Limited, Far], ids=lambda kit: kit.__name__)
def test_rows_end_in_the_check_and_what_is_right_passes(
    kit: type[Limited], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[bool] = set()

    class Watched(DraftModelRows):
        @property
        def stood_down(self) -> list[str | None]:
            said = super().stood_down
            seen.update(reason is not None for reason in said)
            return said

    monkeypatch.setattr(model_provider, "DraftModelRows", Watched)
    kit().run_check(CHECK)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "make", [NgramProvider, lambda: TappedProvider.tiny(seed=0)], ids=["ngram", "tapped"]
)
def test_a_drafter_that_never_stands_down_need_not_say_so(
    make: Callable[[], DraftProvider],
) -> None:
    class Without(DraftRowContract):
        def make_provider(self) -> DraftProvider:
            return make()

    with pytest.raises(pytest.skip.Exception, match="offers no stood_down, which is optional"):
        Without().run_check(CHECK)
