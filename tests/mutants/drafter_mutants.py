"""Mutants of drafters: small mistakes that a drafter's author makes, and the checks that find them.

``killed_by`` is the name of a check of the conformance kit, or the node id of a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutants.drafter_assistant import ASSISTANT, ASSISTANT_MUTANTS
from mutants.drafter_dflash import DFLASH, DFLASH_MUTANTS
from mutants.drafter_mtp import MTP, MTP_MUTANTS
from mutants.drafter_ngram import NGRAM, NGRAM_MUTANTS
from mutants.drafter_recurrent import RECURRENT, RECURRENT_MUTANTS
from mutants.drafter_tapped import TAPPED, TAPPED_MUTANTS
from mutants.drafter_two_model import MODEL, MODEL_MUTANTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mutants.edits import Mutant

__all__ = ["ASSISTANT", "DFLASH", "DRAFTER_MUTANTS", "MODEL", "MTP", "NGRAM", "RECURRENT", "TAPPED"]

DRAFTER_MUTANTS: Sequence[Mutant] = (
    *NGRAM_MUTANTS,
    *TAPPED_MUTANTS,
    *RECURRENT_MUTANTS,
    *MTP_MUTANTS,
    *DFLASH_MUTANTS,
    *ASSISTANT_MUTANTS,
    *MODEL_MUTANTS,
)
