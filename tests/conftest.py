"""Hypothesis runs the same examples every time: a failure here is a failure everywhere."""

import os

from hypothesis import Phase, settings

settings.register_profile("ci", deadline=None, derandomize=True, database=None)
# A mutant (tests/mutants) has to be found, not to be shrunk.
settings.register_profile(
    "mutant", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("mutant" if os.environ.get("SPECDEC_MUTANT") else "ci")
