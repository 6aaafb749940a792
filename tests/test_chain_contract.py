"""The conformance kit over chains: what holds for one drafter holds for several in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis

from specdec.chain import ChainMember, ChainProvider
from specdec.contract import ContextKind
from specdec.testing import DraftRowContract
from specdec_dflash.tiny import tiny_block
from specdec_mtp.provider import Reading
from specdec_mtp.tiny import tiny_head
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

# The members have their own runs of the kit; here the looks are at what the chain adds.
CLOSE = hypothesis.settings(
    max_examples=6, stateful_step_count=12, deadline=None, derandomize=True, database=None
)
FEWER = hypothesis.settings(
    max_examples=2, stateful_step_count=8, deadline=None, derandomize=True, database=None
)


def chain(*providers: Any, width: int = 4) -> ChainProvider:
    """A chain of these, each of which drafts ``width`` tokens at most."""
    return ChainProvider(
        [ChainMember(f"member{n}", each, width) for n, each in enumerate(providers)]
    )


class TestCopyBeforeHead(DraftRowContract):
    """The usual chain: n-gram in front of a head, which reads whole prompts."""

    settings = CLOSE

    def make_provider(self) -> ChainProvider:
        return chain(NgramProvider(), tiny_head())

    def make_other_providers(self) -> Sequence[ChainProvider]:
        return [
            chain(NgramProvider(), tiny_head(seed=1)),
            chain(NgramProvider(max_ngram=3), tiny_head()),
            chain(tiny_head(), NgramProvider()),
            chain(NgramProvider(), NgramProvider(max_ngram=3), tiny_head()),
        ]


class TestThreeThatReadDifferentStates(DraftRowContract):
    """Taps, states before the final norm and states after it, from one reading of the target."""

    settings = FEWER

    def make_provider(self) -> ChainProvider:
        return self.made(ContextKind.PRE_NORM)

    def make_other_provider(self) -> ChainProvider:
        return self.made(ContextKind.POST_NORM)

    def made(self, context: ContextKind) -> ChainProvider:
        head = tiny_head(reading=Reading(context=context))
        block = tiny_block(taps=(1, 0), ids=(0, 2, 3, 5, 6), own_embedding=True)
        return chain(NgramProvider(min_ngram=3), head, block, tiny_head(seed=2), width=2)
