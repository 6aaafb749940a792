"""Mutants of drafters: small mistakes that a drafter's author makes, and the checks that find them.

``killed_by`` is the name of a check of the conformance kit, or the node id of a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutants.drafter_dflash import DFLASH, DFLASH_MUTANTS
from mutants.drafter_mtp import MTP, MTP_MUTANTS
from mutants.drafter_ngram import NGRAM, NGRAM_MUTANTS
from mutants.drafter_recurrent import RECURRENT, RECURRENT_MUTANTS
from mutants.drafter_tapped import TAPPED, TAPPED_MUTANTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mutants.edits import Mutant

__all__ = ["DFLASH", "DRAFTER_MUTANTS", "MTP", "NGRAM", "RECURRENT", "TAPPED"]

DRAFTER_MUTANTS: Sequence[Mutant] = (
    *NGRAM_MUTANTS,
    *TAPPED_MUTANTS,
    *RECURRENT_MUTANTS,
    *MTP_MUTANTS,
    *DFLASH_MUTANTS,
)
