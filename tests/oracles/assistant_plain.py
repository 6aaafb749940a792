"""An assistant in float64: one vector, one head and one position at a time, without masks.

Written from the description of Gemma 4's assistants and a release's own config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PlainAssistant", "Vectors"]

Vectors = NDArray[np.float64]


@define(eq=False)
class PlainAssistant:
    """An assistant's arithmetic.

    Attributes:
        config: its ``config.json``.
        tensors: by name.
        advancing: whether each step stands a position further.
        window: positions that a sliding layer sees, in place of the config's.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Vectors]
    advancing: bool = False
    window: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Mapping[str, Any], **how: Any) -> Any:
        """From float32 tensors."""
        return cls(config, {name: np.asarray(t, np.float64) for name, t in tensors.items()}, **how)

    def draft(
        self,
        kv: Mapping[str, tuple[Any, Any]],
        hidden: Vectors,
        embedded: Vectors,
        table: Vectors,
        steps: int,
    ) -> tuple[list[int], Vectors, Vectors]:
        """A chain.

        Args:
            kv: by layer type, keys and values ``[kv heads, n, D]``.
            hidden: ``[H]``.
            embedded: the embedding ``[H]`` of the pending token.
            table: ``[V, H]`` embeddings of drafted tokens.
            steps: drafts.

        Returns:
            Tokens, logits ``[steps, V]`` with ``-inf`` where nothing was scored, and the next
            hidden states ``[steps, H]``.
        """
        last = kv["full_attention"][0].shape[1] - 1
        tokens: list[int] = []
        logits, chained = [], []
        for step in range(steps):
            position = last + step if self.advancing else last
            x = self.linear("pre_projection", np.concatenate([embedded, hidden]))
            for number, kind in enumerate(self.text["layer_types"]):
                x = self.layer(f"model.layers.{number}.", kind, x, kv[kind], position)
            x = self.norm("model.norm", x)
            hidden = self.linear("post_projection", x)
            logits.append(self.score(x))
            chained.append(hidden)
            tokens.append(int(np.argmax(logits[-1])))
            embedded = table[tokens[-1]]
        return tokens, np.array(logits), np.array(chained)

    @property
    def text(self) -> Mapping[str, Any]:
        """Its text config."""
        found: Mapping[str, Any] = self.config["text_config"]
        return found

    def linear(self, name: str, x: Vectors) -> Vectors:
        return np.asarray(self.tensors[f"{name}.weight"] @ x)

    def norm(self, name: str, x: Vectors) -> Vectors:
        mean = np.mean(x * x) + self.text["rms_norm_eps"]
        return np.asarray(x / np.sqrt(mean) * self.tensors[f"{name}.weight"])

    def layer(self, at: str, kind: str, x: Vectors, kv: tuple[Any, Any], position: int) -> Vectors:
        read = self.attend(
            f"{at}self_attn.", kind, self.norm(f"{at}input_layernorm", x), kv, position
        )
        x = x + self.norm(f"{at}post_attention_layernorm", read)
        inner = self.norm(f"{at}pre_feedforward_layernorm", x)
        gate = self.linear(f"{at}mlp.gate_proj", inner)
        bent = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        fed = self.linear(f"{at}mlp.down_proj", bent * self.linear(f"{at}mlp.up_proj", inner))
        x = x + self.norm(f"{at}post_feedforward_layernorm", fed)
        return np.asarray(x * self.tensors[f"{at}layer_scalar"])

    def attend(self, at: str, kind: str, x: Vectors, kv: tuple[Any, Any], position: int) -> Vectors:
        keys, values = (np.asarray(each, np.float64) for each in kv)
        if kind == "sliding_attention":
            window = self.window or self.text["sliding_window"]
            keys, values = keys[:, -window:], values[:, -window:]
        heads, size = self.text["num_attention_heads"], keys.shape[2]
        queries = self.linear(f"{at}q_proj", x).reshape(heads, size)
        read = []
        for head, query in enumerate(queries):
            turned = self.turn(kind, self.norm(f"{at}q_norm", query), position)
            group = head * keys.shape[0] // heads
            scores = np.array([turned @ key for key in keys[group]])
            weights = np.exp(scores - scores.max())
            read.append(weights / weights.sum() @ values[group])
        return self.linear(f"{at}o_proj", np.concatenate(read))

    def turn(self, kind: str, vector: Vectors, position: int) -> Vectors:
        """Rotary positions: feature i goes with feature i + half."""
        rope, size = self.text["rope_parameters"][kind], len(vector)
        half, turned = size // 2, vector.copy()
        pairs = half
        if rope["rope_type"] == "proportional":
            pairs = int(rope["partial_rotary_factor"] * size // 2)
        for pair in range(pairs):
            angle = position * rope["rope_theta"] ** (-2 * pair / size) / rope.get("factor", 1.0)
            one, two = vector[pair], vector[pair + half]
            turned[pair] = one * np.cos(angle) - two * np.sin(angle)
            turned[pair + half] = one * np.sin(angle) + two * np.cos(angle)
        return turned

    def score(self, x: Vectors) -> Vectors:
        tied = self.config["tie_word_embeddings"]
        table = self.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
        logits = np.full(len(table), -np.inf)
        if "masked_embedding.centroids.weight" not in self.tensors:
            return np.asarray(table @ x)
        order = self.tensors["masked_embedding.token_ordering"].astype(int)
        fit = self.linear("masked_embedding.centroids", x)
        each = len(order) // len(fit)
        for centroid in np.argsort(-fit)[: self.config["centroid_intermediate_top_k"]]:
            for token in order[centroid * each : (centroid + 1) * each]:
                logits[token] = table[token] @ x
        return logits
