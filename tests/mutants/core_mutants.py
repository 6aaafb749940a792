"""Deliberately wrong pieces of the core: mistakes that were made elsewhere, or could be made here.

Each is one small edit of a file under ``core/src``, and names the test that fails on it.
"""

from __future__ import annotations

from mutants.core_chain_of_drafters import DRAFTER_CHAIN_MUTANTS
from mutants.core_chains import CHAIN_MUTANTS
from mutants.core_costs import COST_MUTANTS
from mutants.core_drafting import DRAFTING_MUTANTS
from mutants.core_ends import END_MUTANTS
from mutants.core_executor import EXECUTOR_MUTANTS
from mutants.core_group import GROUP_MUTANTS
from mutants.core_paces import PACE_MUTANTS
from mutants.core_projected import PROJECTED_MUTANTS
from mutants.core_rejection import REJECTION_MUTANTS
from mutants.core_requests import REQUEST_MUTANTS
from mutants.core_rings import RING_MUTANTS
from mutants.core_rounds import ROUND_MUTANTS
from mutants.core_row_forms import ROW_FORM_MUTANTS
from mutants.core_rows import ROW_MUTANTS
from mutants.core_sampling import SAMPLING_MUTANTS
from mutants.core_shaping import SHAPING_MUTANTS
from mutants.core_state import STATE_MUTANTS
from mutants.core_tempo import TEMPO_MUTANTS

__all__ = ["CORE_MUTANTS"]

CORE_MUTANTS = (
    *ROUND_MUTANTS,
    *GROUP_MUTANTS,
    *EXECUTOR_MUTANTS,
    *STATE_MUTANTS,
    *RING_MUTANTS,
    *ROW_FORM_MUTANTS,
    *CHAIN_MUTANTS,
    *SAMPLING_MUTANTS,
    *SHAPING_MUTANTS,
    *REJECTION_MUTANTS,
    *END_MUTANTS,
    *REQUEST_MUTANTS,
    *ROW_MUTANTS,
    *DRAFTING_MUTANTS,
    *PROJECTED_MUTANTS,
    *DRAFTER_CHAIN_MUTANTS,
    *COST_MUTANTS,
    *PACE_MUTANTS,
    *TEMPO_MUTANTS,
)
