"""A release with its plain float64 head and mlx-lm's float32 target: what a head must draft."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import field, frozen
from mlx_lm.utils import load_model
from mtp_reference import chain, mtp_step, nextn_step, read_tensors, rounded_norms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mtp_reference import Pair, Vectors

__all__ = ["Release"]


@frozen
class Release:
    """A full release: its raw tensors in float64, and mlx-lm's target of it in float32."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Vectors]
    model: Any = field(repr=False)
    _known: dict[tuple[Any, ...], list[Vectors]] = field(factory=dict, repr=False)

    @classmethod
    def of(cls, folder: Path) -> Release:
        """Reads and loads ``folder``; a head's norms are rounded as a split release rounds them."""
        model, config = load_model(folder)
        model.set_dtype(mx.float32)
        tensors = read_tensors(folder)
        if config.get("torch_dtype") == "bfloat16":
            tensors = rounded_norms(tensors)
        return cls(folder, deepcopy(config), tensors, model)

    def embed(self, token: int) -> Vectors:
        """One token's embedding, [H]."""
        table = self.model.model.embed_tokens.weight
        return np.array(table[token].astype(mx.float32), dtype=np.float64)

    def score(self, output: Vectors) -> Vectors:
        """The target's logits of a normed state, [V]."""
        head = self.tensors.get("lm_head.weight")
        if head is None:
            head = self.tensors["model.language_model.embed_tokens.weight"]
        return np.asarray(head @ output)

    def hidden(self, tokens: Sequence[int], *, normed: bool = True) -> list[Vectors]:
        """The target's hidden states; without its final norm where ``normed`` is false."""
        if (found := self._known.get((normed, *tokens))) is not None:
            return found
        trunk = self.model.model
        norm = trunk.norm
        try:
            trunk.norm = norm if normed else lambda states: states
            states = trunk(mx.array([list(tokens)]))
        finally:
            trunk.norm = norm
        found = self._known[normed, *tokens] = list(np.array(states[0], dtype=np.float64))
        return found

    def pairs(self, tokens: Sequence[int], **how: bool) -> list[Pair]:
        """What a head reads of ``tokens``: the last one has no hidden state yet."""
        known = zip(tokens[1:], self.hidden(tokens[:-1], **how), strict=True)
        return [(self.embed(token), state) for token, state in known]

    def step(self, pairs: Sequence[Pair]) -> Vectors:
        """The head's output after its last norm, which gives the logits."""
        if "mtp.fc.weight" in self.tensors:
            return mtp_step(self.tensors, self.config, pairs)
        return nextn_step(self.tensors, self.config, pairs)[1]

    def drafts(self, pairs: Sequence[Pair], depth: int = 4) -> tuple[list[int], Vectors]:
        """Greedy drafts after ``pairs`` and their logits; the normed output is fed on."""

        def step(known: Sequence[Pair]) -> tuple[Vectors, Vectors]:
            output = self.step(known)
            return output, output

        return chain(step, embed=self.embed, score=self.score, pairs=pairs, depth=depth)

    def greedy(self, tokens: Sequence[int]) -> list[int]:
        """The target's choice after each of ``tokens``."""
        return [int(np.argmax(self.score(state))) for state in self.hidden(tokens)]
