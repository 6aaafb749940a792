"""The verify executor: everything about one round."""

from specdec.verify.accept import Acceptance, accept_tokens
from specdec.verify.emission import Emission, FinishReason, TokenLogprobs
from specdec.verify.group import VerifyGroup
from specdec.verify.request import Request
from specdec.verify.round import Round
from specdec.verify.row import Row
from specdec.verify.stats import GenerationStats

__all__ = [
    "Acceptance",
    "Emission",
    "FinishReason",
    "GenerationStats",
    "Request",
    "Round",
    "Row",
    "TokenLogprobs",
    "VerifyGroup",
    "accept_tokens",
]
