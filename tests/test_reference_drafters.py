"""Two numeric drafters keep the contract, in full: this also runs what the kit has for them.

``tapped`` reads hidden layers, drafts on the device and is its history; ``recurrent`` continues
the last hidden, drafts on the host and depends on what it drafted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafters.recurrent import RecurrentProvider
from drafters.tapped import TappedProvider

from specdec.testing import DraftRowContract

if TYPE_CHECKING:
    from specdec.contract import DraftProvider


class TestTappedRows(DraftRowContract):
    def make_provider(self) -> DraftProvider:
        return TappedProvider.tiny(seed=0)

    def make_other_provider(self) -> DraftProvider:
        return TappedProvider.tiny(seed=1)


class TestRecurrentRows(DraftRowContract):
    state_is_history = False

    def make_provider(self) -> DraftProvider:
        return RecurrentProvider.tiny(seed=0)

    def make_other_provider(self) -> DraftProvider:
        return RecurrentProvider.tiny(seed=1)
