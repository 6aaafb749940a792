"""DeepSpec drafters and vLLM's speculators in float64, position by position, from descriptions.

Nothing is kept between calls, and nothing of specdec is used: a block is computed from a release's
files and the tapped hidden states of the whole text. Loops stand where an implementation has masks,
caches and fused operations.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from attrs import define, field, frozen
from oracles.block_plain_network import PlainNetwork, Vectors, sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["PlainBlock", "PlainDrafter", "Vectors"]


@frozen
class PlainBlock:
    """One block.

    Attributes:
        tokens: d ids of the target's vocabulary.
        logits: ``[d, N]`` that each was chosen from.
        ids: ``[d, N]`` which ids these are.
        confidence: ``[d]``, or ``None`` where the release has no such head.
    """

    tokens: list[int]
    logits: Vectors = field(repr=False)
    ids: list[list[int]] = field(repr=False)
    confidence: Vectors | None = field(repr=False)

    def kept(self, threshold: float) -> int:
        """How many are proposed: those before the first that is below the threshold."""
        assert self.confidence is not None
        for place, sure in enumerate(self.confidence):
            if sure < threshold:
                return place
        return len(self.tokens)


@define(eq=False)
class PlainDrafter:
    """A release.

    Attributes:
        network: its layers.
        embed_target: the target's embedding of an id, as its own input is scaled.
        head_target: ``[V, H]`` of the target.
    """

    network: PlainNetwork
    embed_target: Callable[[int], Vectors]
    head_target: Vectors

    @classmethod
    def of(
        cls, folder: Path, embed_target: Callable[[int], Vectors], head_target: Vectors
    ) -> PlainDrafter:
        """Read a release's files."""
        config = json.loads((folder / "config.json").read_text())
        config = {**config, **config.get("transformer_layer_config", {})}
        config = {**config, **config.get("dflash_config", {})}
        loaded: Any = mx.load(str(folder / "model.safetensors"))
        tensors = {name: np.array(array).astype(np.float64) for name, array in loaded.items()}
        return cls(PlainNetwork(config, tensors), embed_target, head_target)

    @property
    def config(self) -> dict[str, Any]:
        return self.network.config

    @property
    def tensors(self) -> dict[str, Vectors]:
        return self.network.tensors

    # What the config says.

    @property
    def taps(self) -> list[int]:
        """Layers whose output is tapped."""
        numbers = self.config.get("aux_hidden_state_layer_ids")
        if numbers is not None:
            return [number - 1 for number in numbers]
        return list(self.config["target_layer_ids"])

    @property
    def first(self) -> int:
        """The first column that drafts."""
        if self.config.get("dspark_bonus_anchor"):
            return 1
        return 0 if self.config.get("sample_from_anchor", True) else 1

    @property
    def longest(self) -> int:
        """Drafts of a whole block."""
        counted = self.config["block_size"]
        if "speculators_model_type" in self.config:
            return int(counted - self.first)
        return int(counted - bool(self.config.get("dspark_bonus_anchor")))

    @property
    def ids(self) -> list[int]:
        """What the drafter scores."""
        offsets = self.tensors.get("d2t")
        if offsets is None:
            return list(range(self.config["vocab_size"]))
        return [at + int(offset) for at, offset in enumerate(offsets)]

    # A block.

    def embed(self, token: int) -> Vectors:
        own = self.tensors.get("embed_tokens.weight")
        if own is None:
            return self.embed_target(token)
        return np.asarray(own[token] * (math.sqrt(len(own[token])) if self.network.gemma else 1.0))

    def hidden(self, taps: Vectors, pending: int, columns: int) -> Vectors:
        """``[columns, H]`` after the final norm; taps ``[L, m·H]`` are of all that was read."""
        context = [
            self.network.norm("hidden_norm", self.network.linear("fc", tapped)) for tapped in taps
        ]
        ids = [pending] + [self.config["mask_token_id"]] * (columns - 1)
        xs = [self.embed(token) for token in ids]
        for number in range(self.config["num_hidden_layers"]):
            xs = self.network.layer(number, context, xs)
        return np.array([self.network.norm("norm", x) for x in xs])

    def base_logits(self, hidden: Vectors) -> Vectors:
        logits = self.tensors.get("lm_head.weight", self.head_target) @ hidden
        cap = self.config.get("final_logit_softcapping")
        return np.asarray(cap * np.tanh(logits / cap) if cap else logits)

    def bias(self, before: int, hidden: Vectors, state: Vectors) -> tuple[Vectors, Vectors]:
        """What the token before a slot says of it, and the state after it."""
        known = self.tensors["markov_head.markov_w1.weight"][before]
        kind, latent = self.config["markov_head_type"], known
        if kind == "gated":
            gate = self.network.linear("markov_head.gate_proj", np.concatenate([hidden, known]))
            latent = sigmoid(gate) * known
        elif kind == "rnn":
            joint = self.network.linear(
                "markov_head.joint_proj", np.concatenate([state, known, hidden])
            )
            gate, candidate, output = joint.reshape(3, -1)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            latent = np.tanh(output)
        return self.network.linear("markov_head.markov_w2", latent), state

    def candidates(
        self, hidden: Vectors, before: int, logits: Vectors
    ) -> tuple[list[int], Vectors]:
        """The selector's scores of a slot's best tokens, by ascending id."""
        count = self.config["selector_top_k"]
        best = sorted(sorted(range(len(logits)), key=lambda token: -logits[token])[:count])
        books = [
            self.tensors[f"candidate_selector.{name}_codebook"]
            for name in ("predecessor", "successor")
        ]
        weights = self.network.linear("candidate_selector.hidden_projection", hidden)
        return best, np.array(
            [logits[token] + (books[0][before] * weights) @ books[1][token] for token in best]
        )

    def draft(
        self,
        taps: Vectors,
        pending: int,
        depth: int,
        choose: Callable[[int, Vectors, Sequence[int]], int] | None = None,
    ) -> PlainBlock:
        """Draft a block of just as many columns as the drafts need.

        Args:
            taps: ``[L, m·H]`` of all that was read.
            pending: the token at position L.
            depth: d.
            choose: the place among a slot's logits ``[N]`` of these ids; by default the best.
        """
        hidden = self.hidden(taps, pending, depth + self.first)[self.first :]
        before, state = pending, np.zeros(self.config.get("markov_rank", 0))
        tokens, scored, listed, features = [], [], [], []
        for slot, each in enumerate(hidden):
            logits, ids = self.base_logits(each), self.ids
            feature = each
            if "markov_head.markov_w1.weight" in self.tensors:
                known = self.tensors["markov_head.markov_w1.weight"][before]
                bias, state = self.bias(before, each, state)
                logits, feature = logits + bias, np.concatenate([each, known])
            if "candidate_selector.predecessor_codebook" in self.tensors:
                ids, logits = self.candidates(each, before, logits)
            place = int(np.argmax(logits)) if choose is None else choose(slot, logits, ids)
            before = ids[place]
            tokens.append(before)
            scored.append(logits)
            listed.append(list(ids))
            features.append(feature)
        return PlainBlock(tokens, np.array(scored), listed, self.confidence(features))

    def confidence(self, features: list[Vectors]) -> Vectors | None:
        """``[d]`` in 0 to 1, where the release has the head for it."""
        if "confidence_head.proj.weight" not in self.tensors:
            return None
        width = self.tensors["confidence_head.proj.weight"].shape[1]
        told = [self.network.linear("confidence_head.proj", each[:width])[0] for each in features]
        return sigmoid(np.array(told))
