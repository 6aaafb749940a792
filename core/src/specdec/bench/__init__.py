"""Timing drafters fairly: beside plain decoding, on the same prompts, in the same run."""

from specdec.bench.compare import compare
from specdec.bench.entrants import options_for
from specdec.bench.figures import Result
from specdec.bench.growth import GrowthPoint, grow
from specdec.bench.phases import Phases
from specdec.bench.prompt_sets import BUILT_IN, built_in, random_prompts
from specdec.bench.simulated import Simulated

__all__ = [
    "BUILT_IN",
    "GrowthPoint",
    "Phases",
    "Result",
    "Simulated",
    "built_in",
    "compare",
    "grow",
    "options_for",
    "random_prompts",
]
