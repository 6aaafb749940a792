"""What drafters share: checks of what a group's verbs are given."""

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

__all__ = [
    "check_features",
    "check_ids",
    "check_no_context",
    "check_token_array",
    "kept_rows",
    "outside",
    "row_ints",
    "row_number",
    "row_tokens",
]
