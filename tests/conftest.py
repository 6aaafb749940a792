"""Hypothesis runs the same examples every time: a failure here is a failure everywhere."""

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci")
