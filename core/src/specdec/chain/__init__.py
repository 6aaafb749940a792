"""Several drafters in a row: the first that proposes wins the round, for each row of its own.

A cheap drafter that is sure or silent, such as a copy of what was said before, goes in front of a
learned one that always has something to say. Every member reads every token, whoever's proposal was
taken: what it drafted itself through ``commit``, everything else through ``consume``. So no drafter
loses its place.
"""

from specdec.chain.members import ChainMember
from specdec.chain.provider import ChainGroups, ChainProvider
from specdec.chain.rows import ChainRows

__all__ = ["ChainGroups", "ChainMember", "ChainProvider", "ChainRows"]
