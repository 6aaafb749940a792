"""What outlives a request: checkpoints as files, identities of weights, the prefix cache."""

from __future__ import annotations

from specdec.checkpoints.entry import PrefixEntry
from specdec.checkpoints.hit import PrefixHit
from specdec.checkpoints.identity import artifact_identity, weights_identity
from specdec.checkpoints.layout import (
    attachment_from_bytes,
    checkpoint_from_bytes,
    load_attachment,
    load_checkpoint,
    save,
    to_bytes,
)
from specdec.checkpoints.prefix import PrefixCache
from specdec.checkpoints.tally import PrefixCacheStats

__all__ = [
    "PrefixCache",
    "PrefixCacheStats",
    "PrefixEntry",
    "PrefixHit",
    "artifact_identity",
    "attachment_from_bytes",
    "checkpoint_from_bytes",
    "load_attachment",
    "load_checkpoint",
    "save",
    "to_bytes",
    "weights_identity",
]
