"""The conformance kit over both kinds of head, and over every way to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
from attrs import evolve

from specdec.contract import ContextKind
from specdec.testing import DraftRowContract, PluginContract
from specdec_mtp.find import HeadKind
from specdec_mtp.live import Chain
from specdec_mtp.provider import Reading
from specdec_mtp.tiny import tiny_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec_mtp.provider import HeadProvider

OWN_HISTORY = Reading(feeds_raw=True, reads_prompt=False)


# The ways of reading share their code: the first class looks closely, the others at what differs.
FEWER = hypothesis.settings(
    max_examples=10, stateful_step_count=15, deadline=None, derandomize=True, database=None
)


class TestMtpRows(DraftRowContract):
    """Accepted tokens are read anew, so a row's state follows from its text."""

    def make_provider(self) -> HeadProvider:
        return tiny_head()

    def make_other_providers(self) -> Sequence[HeadProvider]:
        settings = (
            {"context": ContextKind.PRE_NORM},
            {"chain": Chain.OWN},
            {"feeds_raw": True},
            {"reads_prompt": False},
        )
        readings = [evolve(Reading(), **each) for each in settings]
        return [tiny_head(seed=1), *(tiny_head(reading=reading) for reading in readings)]


class TestMtpRowsThatKeepTheirOwnSteps(DraftRowContract):
    """Entries of accepted tokens stay as they were drafted, so a row's state has a history."""

    state_is_history = False
    settings = FEWER

    def make_provider(self) -> HeadProvider:
        return tiny_head(reading=Reading(context=ContextKind.PRE_NORM, chain=Chain.OWN))

    def make_other_provider(self) -> HeadProvider:
        return tiny_head(seed=1, reading=Reading(context=ContextKind.PRE_NORM, chain=Chain.OWN))


class TestNextnRows(DraftRowContract):
    """The head's history begins with the first draft, so it is not that of the text."""

    state_is_history = False
    settings = FEWER

    def make_provider(self) -> HeadProvider:
        return tiny_head(HeadKind.NEXTN, reading=OWN_HISTORY)

    def make_other_provider(self) -> HeadProvider:
        return tiny_head(HeadKind.NEXTN, seed=1, reading=OWN_HISTORY)


class TestMtpPlugin(PluginContract):
    distribution = "specdec-mtp"
