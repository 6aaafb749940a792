"""The conformance kit over draft models of several kinds of state, with and without a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis

from specdec.testing import DraftRowContract, PluginContract
from specdec_two_model.tiny import tiny_draft_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.drafting import DraftModelProvider

# The kinds share their verbs: the first class looks closely, the others at what differs.
FEWER = hypothesis.settings(
    max_examples=2, stateful_step_count=10, deadline=None, derandomize=True, database=None
)
CLOSER = hypothesis.settings(FEWER, max_examples=5)


class TestRowsOfAttention(DraftRowContract):
    settings = CLOSER

    def make_provider(self) -> DraftModelProvider:
        return tiny_draft_model()

    def make_other_providers(self) -> Sequence[DraftModelProvider]:
        return [
            tiny_draft_model(seed=1),
            tiny_draft_model(vocab_size=9),
            tiny_draft_model(limit=40),
            tiny_draft_model("sliding"),
        ]


class TestRowsOfSlidingWindows(DraftRowContract):
    """A window of four positions: texts are before the wrap, in it and behind it."""

    settings = FEWER

    def make_provider(self) -> DraftModelProvider:
        return tiny_draft_model("sliding")

    def make_other_provider(self) -> DraftModelProvider:
        return tiny_draft_model("sliding", seed=1)


class TestRowsOfRecurrentState(DraftRowContract):
    """No attention at all: a rejected draft has gone through the state, and must be undone."""

    settings = FEWER

    def make_provider(self) -> DraftModelProvider:
        return tiny_draft_model("recurrent")

    def make_other_provider(self) -> DraftModelProvider:
        return tiny_draft_model("recurrent", seed=1)


class TestRowsThatOutgrowTheirContext(DraftRowContract):
    """Convolution state and attention; rows end after nine tokens, their neighbours do not."""

    settings = FEWER

    def make_provider(self) -> DraftModelProvider:
        return tiny_draft_model("hybrid", limit=9)

    def make_other_provider(self) -> DraftModelProvider:
        return tiny_draft_model("hybrid", limit=10)


class TestDraftModelPlugin(PluginContract):
    distribution = "specdec-two-model"
