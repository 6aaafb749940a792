"""Continuous batching on the verify executor: requests come and go while others decode."""

from specdec.batch.counters import BatchStats
from specdec.batch.generator import BatchGenerator
from specdec.batch.options import PromptOptions
from specdec.batch.responses import BatchResponse, PromptResponse

__all__ = ["BatchGenerator", "BatchResponse", "BatchStats", "PromptOptions", "PromptResponse"]
