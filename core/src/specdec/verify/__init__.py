"""The verify executor: everything about one round."""

from specdec.verify.accept import Acceptance, accept_tokens
from specdec.verify.group import VerifyGroup
from specdec.verify.request import Emission, Request, Row
from specdec.verify.round import Round
from specdec.verify.stats import GenerationStats

__all__ = [
    "Acceptance",
    "Emission",
    "GenerationStats",
    "Request",
    "Round",
    "Row",
    "VerifyGroup",
    "accept_tokens",
]
