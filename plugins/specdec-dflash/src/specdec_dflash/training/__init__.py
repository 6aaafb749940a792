"""Training a DFlash drafter on one's own target; ``python -m specdec_dflash.train`` runs it."""

from specdec_dflash.training.agreement import Agreement, agreement_of
from specdec_dflash.training.checkpoint import describe, load_state, save_drafter, save_state
from specdec_dflash.training.data import TextWindows, read_texts, read_tokens
from specdec_dflash.training.loop import Progress, Trainer, train
from specdec_dflash.training.settings import TrainSettings
from specdec_dflash.training.teacher import Reading, Teacher

__all__ = [
    "Agreement",
    "Progress",
    "Reading",
    "Teacher",
    "TextWindows",
    "TrainSettings",
    "Trainer",
    "agreement_of",
    "describe",
    "load_state",
    "read_texts",
    "read_tokens",
    "save_drafter",
    "save_state",
    "train",
]
