"""A target that lends what was drawn, and what an assistant drafts over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from assistant_synthetic import BACKBONE, CASES, STEPS, VOCABULARY, Loan, embedding
from attrs import define, field

from specdec.contract import AssistantDonors, Attachment, Greedy, RowCheckpoint
from specdec.plugins import LoadRequest
from specdec_assistant.loading import load_assistant
from specdec_assistant.model import AssistantModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pytest

__all__ = ["Chains", "Lender", "Sampling", "chains", "row_of"]

FULL, SLIDING = "full_attention", "sliding_attention"


@define
class Sampling:
    """Greedy rows."""

    selection: Greedy = field(factory=Greedy)
    rejecting: bool = False

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("a greedy draft is an argmax")

    def log_distribution(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        raise AssertionError("nobody is judged by rejection")


@define(eq=False)
class Lender:
    """A target that has nothing but what it lends; also its port.

    Attributes:
        loans: of its rows.
        columns: of the sliding donor at most; ``None`` for all positions.
        vocab_size: V.
        lends: which donors it says it has.
        reads: how often the donors were read.
        donors: what is lent in place of the loans.
        folder: where its checkpoint is.
    """

    loans: Sequence[Loan] = ()
    columns: int | None = None
    vocab_size: int = VOCABULARY
    lends: frozenset[str] = frozenset({"sliding", "full"})
    reads: int = 0
    hidden_size: int = BACKBONE
    recurrent_mtp: None = None
    donors: AssistantDonors | None = None
    folder: Path | None = None

    @property
    def identity(self) -> object:
        return self

    @property
    def assistant_rows(self) -> Lender:
        return self

    def embed(self, ids: mx.array) -> mx.array:
        return mx.array(embedding())[ids]

    def read_donors(self) -> AssistantDonors:
        self.reads += 1
        if self.donors is not None:
            return self.donors
        lengths = tuple(loan.kv[FULL][0].shape[1] for loan in self.loans)
        return AssistantDonors(
            sliding=self.padded(SLIDING, self.columns), full=self.padded(FULL), positions=lengths
        )

    def padded(self, kind: str, columns: int | None = None) -> tuple[mx.array, mx.array]:
        """Rows beside each other, with junk behind the shorter ones."""
        cut = [[a[:, -columns:] if columns else a for a in loan.kv[kind]] for loan in self.loans]
        longest = max(keys.shape[1] for keys, _ in cut)
        keys, values = (
            np.stack(
                [
                    np.pad(
                        pair[side],
                        [(0, 0), (0, longest - pair[side].shape[1]), (0, 0)],
                        constant_values=99.0,
                    )
                    for pair in cut
                ]
            )
            for side in (0, 1)
        )
        return mx.array(keys), mx.array(values)


@define
class Chains:
    """What a group drafted: per row tokens, logits and hidden states."""

    drafts: list[list[int]]
    logits: Any
    hidden: Any

    def row(self, number: int) -> tuple[Any, Any, Any]:
        return self.drafts[number], self.logits[number], self.hidden[number]


def row_of(grouped: Any, tokens: int, hidden: mx.array) -> RowCheckpoint:
    """The checkpoint of a row that has read so many tokens."""
    attachment = Attachment(
        schema="assistant-1", arrays={"hidden": hidden}, metadata={"tokens": tokens}
    )
    return RowCheckpoint(
        namespace=grouped.checkpoint_namespace, processed_tokens=tokens, attachment=attachment
    )


def chains(
    folder: Path,
    case: str,
    lengths: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    columns: int | None = None,
    **options: Any,
) -> Chains:
    """A round of rows of these lengths."""
    release = CASES[case]
    target: Any = Lender([release.loan(length) for length in lengths], columns)
    request = LoadRequest(kind="assistant", target=target, path=folder, options=options)
    grouped: Any = load_assistant(request).provider.grouped
    kept = [
        row_of(grouped, length, mx.array(loan.hidden)[None, None])
        for length, loan in zip(lengths, target.loans, strict=True)
    ]
    group = grouped.open(target=target, sampling=Sampling(), checkpoints=kept)
    seen: list[tuple[mx.array, mx.array]] = []
    hiddens: list[mx.array] = []
    score, step = AssistantModel.score, AssistantModel.__call__

    def scored(model: AssistantModel, normed: mx.array, vocab_size: int) -> Any:
        logits, ids = score(model, normed, vocab_size)
        every = logits
        if ids is not None:
            nothing = mx.full((logits.shape[0], vocab_size), -mx.inf)
            every = mx.put_along_axis(nothing, ids, logits, axis=-1)
        seen.append((every, logits))
        return logits, ids

    def stepped(model: AssistantModel, *given: Any) -> Any:
        normed, hidden = step(model, *given)
        hiddens.append(hidden[:, 0])
        return normed, hidden

    monkeypatch.setattr(AssistantModel, "score", scored)
    monkeypatch.setattr(AssistantModel, "__call__", stepped)
    drafts = group.draft(
        [loan.pending for loan in target.loans], [STEPS] * len(lengths), [0] * len(lengths)
    )
    assert target.reads == 1, "one snapshot serves a whole round"
    logits = mx.stack([every for every, _ in seen], axis=1)
    return Chains(drafts, np.array(logits), np.array(mx.stack(hiddens, axis=1)))
