"""What a round costs where it runs, and how many drafts pay: measured, remembered, chosen by."""

from specdec.cost.account import Account
from specdec.cost.choose import Choice, choose
from specdec.cost.costs import Costs, measuring_seconds
from specdec.cost.curve import Curve, Point
from specdec.cost.measure import WIDTHS, Measured, measure
from specdec.cost.pace import AdaptivePace
from specdec.cost.store import CostStore, Kept, identity_of
from specdec.cost.survival import Survival
from specdec.cost.times import Kind, RoundTimes

__all__ = [
    "WIDTHS",
    "Account",
    "AdaptivePace",
    "Choice",
    "CostStore",
    "Costs",
    "Curve",
    "Kept",
    "Kind",
    "Measured",
    "Point",
    "RoundTimes",
    "Survival",
    "choose",
    "identity_of",
    "measure",
    "measuring_seconds",
]
