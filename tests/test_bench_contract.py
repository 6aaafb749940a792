"""The simulated drafter keeps the contract that every drafter keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings

from specdec.bench.simulated import Simulated, SimulatedProvider, Texts
from specdec.testing import DraftRowContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import DraftProvider


class Endless(Texts):
    """Something is known of every prompt, whatever the vocabulary."""

    def of(self, prompt: Sequence[int]) -> list[list[int]]:
        return [[sum(prompt[:9]) % 2, 1, 0, 1, 1, 0] * 4]


class TestSimulatedRows(DraftRowContract):
    # Where in a text a row stands follows from the draws so far, too.
    state_is_history = False
    settings = settings(max_examples=12, deadline=None, derandomize=True, database=None)

    def make_provider(self) -> DraftProvider:
        return SimulatedProvider(Simulated(0.7), Endless())

    def make_other_providers(self) -> list[DraftProvider]:
        return [
            SimulatedProvider(Simulated(0.8), Endless()),
            SimulatedProvider(Simulated(0.7, seed=1), Endless()),
        ]
