"""The n-gram drafter keeps the contract, in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.testing import DraftRowContract, PluginContract
from specdec_ngram.provider import NgramProvider

if TYPE_CHECKING:
    from specdec.contract import DraftProvider


class TestNgramRows(DraftRowContract):
    def make_provider(self) -> DraftProvider:
        return NgramProvider()

    def make_other_providers(self) -> list[DraftProvider]:
        return [NgramProvider(max_ngram=7), NgramProvider(min_ngram=3)]


class TestNgramRowsOfOneToken(DraftRowContract):
    """The shortest n-grams match most often, in a vocabulary of three."""

    vocab_size = 3

    def make_provider(self) -> DraftProvider:
        return NgramProvider(max_ngram=3, min_ngram=1)

    def make_other_providers(self) -> list[DraftProvider]:
        return [NgramProvider(max_ngram=3, min_ngram=2), NgramProvider(max_ngram=2, min_ngram=1)]


class TestNgramPlugin(PluginContract):
    distribution = "specdec-ngram"
