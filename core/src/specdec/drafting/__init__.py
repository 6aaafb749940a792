"""What drafters share.

``checks`` and ``rounds`` hold a group's verbs to the contract, ``choose`` picks tokens,
``modules`` reads weights, ``probe`` asks whether drafter and target agree; ``context`` and
``projected`` are everything of a block drafter but its numerics, and ``model_rows`` everything of a
drafter that is a whole model.
"""

from specdec.drafting.block_method import BlockDraft, BlockMethod
from specdec.drafting.checks import (
    check_features,
    check_ids,
    check_no_context,
    check_token_array,
    kept_rows,
    outside,
    row_ints,
    row_number,
    row_tokens,
)
from specdec.drafting.choose import BlockChoices, Choice, Chooser, declared, head_of
from specdec.drafting.context import BlockContext, ContextLayer, ContextRows, KeysAndValues
from specdec.drafting.model_live import BEYOND
from specdec.drafting.model_provider import DraftModelGroups, DraftModelProvider
from specdec.drafting.model_rows import DraftModelRows
from specdec.drafting.projected import ProjectedRows
from specdec.drafting.projected_provider import ProjectedGroups, ProjectedProvider
from specdec.drafting.rounds import Asked, Drafted, Rounds

__all__ = [
    "BEYOND",
    "Asked",
    "BlockChoices",
    "BlockContext",
    "BlockDraft",
    "BlockMethod",
    "Choice",
    "Chooser",
    "ContextLayer",
    "ContextRows",
    "DraftModelGroups",
    "DraftModelProvider",
    "DraftModelRows",
    "Drafted",
    "KeysAndValues",
    "ProjectedGroups",
    "ProjectedProvider",
    "ProjectedRows",
    "Rounds",
    "check_features",
    "check_ids",
    "check_no_context",
    "check_token_array",
    "declared",
    "head_of",
    "kept_rows",
    "outside",
    "row_ints",
    "row_number",
    "row_tokens",
]
