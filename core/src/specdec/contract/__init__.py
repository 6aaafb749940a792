"""What drafters and the core promise each other: protocols and frozen values.

Nothing in this package imports MLX at run time. ``docs/contract.md`` says in prose when each verb
may be called; the docstrings here say it per method.
"""

from specdec.contract.changes import PendingChange, Swap, append, check_keep, commit_all
from specdec.contract.checkpoint import Attachment, RowCheckpoint
from specdec.contract.constraint import TokenConstraint
from specdec.contract.provider import (
    DeclaresRowBytes,
    DeclaresTaps,
    DeclaresVocabulary,
    DraftProvider,
    GroupedDraftProvider,
    validate_provider,
)
from specdec.contract.row_table import RowTable
from specdec.contract.rows import (
    ContextKind,
    DeviceProposal,
    DraftPrefillGroup,
    DraftRowGroup,
    DraftRows,
    PrefillMode,
    Proposal,
    SupportsConsume,
    SupportsDeviceDraft,
    SupportsLookup,
    SupportsPreview,
    SupportsRemarks,
    SupportsStandDown,
)
from specdec.contract.sampling import (
    Greedy,
    Listed,
    RowConstraints,
    RowSampling,
    Sampled,
    Selection,
    VocabularySubset,
)
from specdec.contract.target import (
    AssistantDonors,
    AssistantRows,
    HiddenTaps,
    RecurrentMtp,
    ResidualBasis,
    TargetView,
    require_port,
)

__all__ = [
    "AssistantDonors",
    "AssistantRows",
    "Attachment",
    "ContextKind",
    "DeclaresRowBytes",
    "DeclaresTaps",
    "DeclaresVocabulary",
    "DeviceProposal",
    "DraftPrefillGroup",
    "DraftProvider",
    "DraftRowGroup",
    "DraftRows",
    "Greedy",
    "GroupedDraftProvider",
    "HiddenTaps",
    "Listed",
    "PendingChange",
    "PrefillMode",
    "Proposal",
    "RecurrentMtp",
    "ResidualBasis",
    "RowCheckpoint",
    "RowConstraints",
    "RowSampling",
    "RowTable",
    "Sampled",
    "Selection",
    "SupportsConsume",
    "SupportsDeviceDraft",
    "SupportsLookup",
    "SupportsPreview",
    "SupportsRemarks",
    "SupportsStandDown",
    "Swap",
    "TargetView",
    "TokenConstraint",
    "VocabularySubset",
    "append",
    "check_keep",
    "commit_all",
    "require_port",
    "validate_provider",
]
