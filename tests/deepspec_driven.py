"""Rows of a block drafter whose rounds a test decides, beside the plain float64 computation.

Tapped hidden states come from ``MlxLmTarget.forward`` over each row's whole text, so any number of
drafts can be taken as accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import define, field
from deepspec_synthetic import target_model
from oracles.block_plain import PlainDrafter
from oracles.driven import Watched

from specdec.contract import ContextKind
from specdec.plugins import LoadedDraft, LoadRequest
from specdec.targets import MlxLmTarget
from specdec_dflash.files import read_files
from specdec_dflash.packagings import kind_of
from specdec_dflash.plugin import load_block

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from oracles.block_plain import PlainBlock, Vectors

    from specdec.contract import RowSampling
    from specdec.drafting import ProjectedRows

__all__ = ["Driven", "Watched", "loaded", "log_softmax", "plain", "tapped"]


def loaded(folder: Path, target: MlxLmTarget, **options: Any) -> LoadedDraft:
    """A release's drafter; a random one agrees with nothing, so it is not tried."""
    kind = kind_of(read_files(folder).config)
    assert kind is not None
    usual = {"probe": False, "block": "short", **({"bits": 0} if kind == "dflash2" else {})}
    options = {**usual, **options}
    return load_block(LoadRequest(kind=kind, path=folder, target=target, options=options))


def plain(folder: Path) -> PlainDrafter:
    """A release's oracle, with the embedding and the head of :func:`target_model`."""
    model = target_model()
    embedding = np.array(model.model.embed_tokens.weight).astype(np.float64)
    head = np.array(model.lm_head.weight).astype(np.float64)
    return PlainDrafter.of(folder, lambda token: embedding[token], head)


def tapped(target: MlxLmTarget, tokens: Sequence[int], taps: Sequence[int]) -> mx.array:
    """The target's hidden states ``[1, n, m·H]`` at every position of a text."""
    state = target.new_state()
    state.begin_round(len(tokens), reading=True)
    found = target.forward(mx.array([list(tokens)]), state, ContextKind.TAPS, list(taps)).context
    assert found is not None
    return found


def log_softmax(logits: Vectors) -> Vectors:
    """``[..., N]``, which takes a row's common part away."""
    raised = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(raised - np.log(np.exp(raised).sum(axis=-1, keepdims=True)))


@define(eq=False)
class Driven:
    """A group of rows.

    Attributes:
        texts: each row's tokens that the target has read.
    """

    target: MlxLmTarget
    rows: ProjectedRows
    oracle: PlainDrafter
    texts: list[list[int]]
    _window: list[list[int]] = field(factory=list)

    @classmethod
    def of(
        cls,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        sampling: RowSampling,
        *,
        step: int = 5,
        **options: Any,
    ) -> Driven:
        """Rows that have read their prompts in chunks, each alone, and decode together."""
        target = MlxLmTarget(target_model())
        provider: Any = loaded(folder, target, **options).provider
        oracle = plain(folder)
        assert list(provider.grouped.target_tap_layers(target)) == oracle.taps
        read = {}
        for prompt in {tuple(prompt) for prompt in prompts}:
            group = provider.grouped.open_prefill(target=target, checkpoints=[None])
            hidden = tapped(target, prompt, oracle.taps)
            for start in range(0, len(prompt), step):
                ids = mx.array([list(prompt[start : start + step])], mx.int32)
                group.prefill(ids, hidden[:, start : start + step])
            read[prompt] = group.capture(0)
            group.close()
        checkpoints = [read[tuple(prompt)] for prompt in prompts]
        rows = provider.grouped.open(target=target, sampling=sampling, checkpoints=checkpoints)
        return cls(target, rows, oracle, [list(prompt) for prompt in prompts])

    def taps(self, row: int) -> Vectors:
        """Hidden states ``[L, m·H]`` of all that a row has read."""
        found = tapped(self.target, self.texts[row], self.oracle.taps)
        return np.array(found[0]).astype(np.float64)

    def expected(self, row: int, pending: int, depth: int, choose: Any = None) -> PlainBlock:
        """The plain computation's block of a row."""
        return self.oracle.draft(self.taps(row), pending, depth, choose)

    def opened(self, pending: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Remember the window that the target would verify."""
        self._window = [[first, *draft] for first, draft in zip(pending, drafts, strict=True)]

    def commit(self, accepted: Sequence[int]) -> None:
        """Take so many of each row's drafts as accepted, whatever the target would have said."""
        width = max(map(len, self._window))
        contexts = []
        for text, window in zip(self.texts, self._window, strict=True):
            hidden = tapped(self.target, [*text, *window], self.oracle.taps)
            own = hidden[:, len(text) :]
            contexts.append(mx.pad(own, [(0, 0), (0, width - len(window)), (0, 0)]))
        self.rows.commit(accepted, mx.concatenate(contexts))
        for text, window, count in zip(self.texts, self._window, accepted, strict=True):
            text.extend(window[: 1 + count])
