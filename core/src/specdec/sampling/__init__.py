"""Draws that depend on a request's seed and step alone, and what shapes the logits before them."""

from specdec.sampling.masks import AllowedTokens, BannedTokens, MinTokens
from specdec.sampling.noise import gumbel, uniform_bits
from specdec.sampling.options import SamplingOptions
from specdec.sampling.penalties import (
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
    make_logits_processors,
)
from specdec.sampling.processors import (
    LogitsProcessor,
    Processors,
    VocabularyBound,
    WindowProcessor,
    WindowView,
    stateless,
)
from specdec.sampling.rejection import Drafted
from specdec.sampling.rows import RowSamplers

__all__ = [
    "AllowedTokens",
    "BannedTokens",
    "Drafted",
    "FrequencyPenalty",
    "LogitBias",
    "LogitsProcessor",
    "MinTokens",
    "PresencePenalty",
    "Processors",
    "RepetitionPenalty",
    "RowSamplers",
    "SamplingOptions",
    "VocabularyBound",
    "WindowProcessor",
    "WindowView",
    "gumbel",
    "make_logits_processors",
    "stateless",
    "uniform_bits",
]
