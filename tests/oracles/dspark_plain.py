"""A ``dspark.json`` drafter in plain float64, one row and one position at a time.

Written from the format's description; it shares nothing with the plugin.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
import numpy as np
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    Vectors = NDArray[np.float64]

__all__ = ["PlainDraft", "PlainDspark"]


@frozen
class PlainDraft:
    """What is drafted from one position.

    Attributes:
        tokens: d ids, a whole block.
        logits: ``[d, V]`` that each was the largest of.
        confidence: ``[d]``, or ``None``.
    """

    tokens: list[int]
    logits: Vectors = field(repr=False)
    confidence: Vectors | None = None

    def proposed(self, depth: int, thresholds: list[float] | None = None) -> list[int]:
        """The drafts that are proposed."""
        if thresholds is None:
            return self.tokens[:depth]
        assert self.confidence is not None
        count = 1
        while count < depth and self.confidence[count] >= thresholds[count]:
            count += 1
        return self.tokens[:count]


@frozen
class PlainDspark:
    """A checkpoint, and its target's embedding and head in float64."""

    config: dict[str, Any]
    eps: float
    tensors: dict[str, Vectors] = field(repr=False)
    embed: Callable[[int], Vectors]
    score: Callable[[Vectors], Vectors]

    @classmethod
    def of(
        cls, folder: Path, embed: Callable[[int], Vectors], score: Callable[[Vectors], Vectors]
    ) -> Self:
        described = json.loads((folder / "dspark.json").read_text())
        loaded = mx.load(str(folder / "model.safetensors"))
        assert isinstance(loaded, dict)
        tensors = {name: np.array(value, dtype=np.float64) for name, value in loaded.items()}
        return cls(described["config"], described["dims"]["eps"], tensors, embed, score)

    def draft(self, taps: Vectors, pending: int) -> PlainDraft:
        """Draft behind ``[n, m·H]`` tapped hidden states of the text before ``pending``."""
        t = self.tensors
        context = self._rms(taps @ t["W_c"], "ctx_norm")
        block = self.embed(pending) @ t["tok_proj"] + t["block_pos"][:1]
        if self.config["gamma"] > 1:
            block = np.concatenate([block, t["mask_emb"] + t["block_pos"][1:]])
        for number in range(self.config["nLayers"]):
            block = self._layer(f"bb.{number}.", context, block)
        hidden = self._rms(block, "out_norm")
        base = np.array([self.score(row @ t["out_proj"]) for row in hidden])
        return self._tokens(hidden, base, pending)

    def _tokens(self, hidden: Vectors, base: Vectors, last: int) -> PlainDraft:
        t = self.tensors
        if "markov.w1" not in t:
            return PlainDraft([int(np.argmax(row)) for row in base], base)
        state = np.zeros(self.config["markovRank"])
        tokens, logits, confidence = [], [], []
        for row, own in zip(hidden, base, strict=True):
            before = t["markov.w1"][last]
            if self.config.get("seqHead") == "rnn":
                state = np.tanh(state @ t["rnn.wH"] + before + t["rnn.bH"])
                logits.append(own + state @ t["rnn.wO"])
            else:
                logits.append(own + before @ t["markov.w2"])
            odds = (np.concatenate([row, before]) @ t["conf.w"] + t["conf.b"])[0]
            confidence.append(1.0 / (1.0 + np.exp(-odds)))
            last = int(np.argmax(logits[-1]))
            tokens.append(last)
        return PlainDraft(tokens, np.array(logits), np.array(confidence))

    def _layer(self, at: str, context: Vectors, block: Vectors) -> Vectors:
        t, heads = self.tensors, self.config["nHeads"]
        size = block.shape[1] // heads
        normed = self._rms(block, f"{at}attn_norm")
        seen = np.concatenate([self._rms(context, f"{at}attn_norm"), normed])
        queries, keys, values = (
            (rows @ t[f"{at}{name}"]).reshape(-1, heads, size)
            for rows, name in ((normed, "q"), (seen, "k"), (seen, "v"))
        )
        attended = np.zeros_like(queries)
        for head in range(heads):
            scores = queries[:, head] @ keys[:, head].T / np.sqrt(size)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            attended[:, head] = weights @ values[:, head]
        block = block + attended.reshape(block.shape) @ t[f"{at}o"]
        normed = self._rms(block, f"{at}ff_norm")
        gate = normed @ t[f"{at}gate"]
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return np.asarray(block + (gelu * (normed @ t[f"{at}up"])) @ t[f"{at}down"])

    def _rms(self, rows: Vectors, name: str) -> Vectors:
        scale = np.sqrt((rows**2).mean(axis=-1, keepdims=True) + self.eps)
        return np.asarray(rows / scale * self.tensors[name])
