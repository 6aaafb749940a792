"""Draws that depend on a request's seed and step alone."""

from specdec.sampling.noise import gumbel, uniform_bits
from specdec.sampling.options import SamplingOptions
from specdec.sampling.rows import RowSamplers

__all__ = ["RowSamplers", "SamplingOptions", "gumbel", "uniform_bits"]
