"""DFlash and DFlash 2 in plain float64: one block after one text, nothing kept, nothing shared.

Written from the papers' and the model cards' description (arXiv 2602.06036), with one dense mask.

Shapes: n positions of the text, W columns of the block, m tapped layers, H hidden size, V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from oracles.rotary import Vectors, frequencies, turned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from block_synthetic import Release

__all__ = ["PlainBlocks"]


@define
class PlainBlocks:
    """A drafter over a target's embedding and head.

    Attributes:
        config: of the drafter.
        tensors: by name, without a prefix.
        embedding: ``[V, H]`` of the target.
        head: ``[V, H]`` of the target.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Vectors]
    embedding: Vectors
    head: Vectors

    @classmethod
    def of(cls, release: Release, model: Any) -> PlainBlocks:
        """A case's drafter over mlx-lm's qwen3."""
        tensors = {name: t.astype(np.float64) for name, t in release.draws().tensors.items()}
        both = (model.model.embed_tokens.weight, model.lm_head.weight)
        embedding, head = (np.array(each).astype(np.float64) for each in both)
        return cls(release.config, tensors, embedding, head)

    @property
    def own(self) -> Mapping[str, Any]:
        """The config's part for this drafter."""
        found: Mapping[str, Any] = self.config["dflash_config"]
        return found

    def draft(self, taps: Vectors, pending: int, depth: int) -> tuple[list[int], Vectors]:
        """Drafts, and logits ``[depth, V]``.

        Args:
            taps: ``[n, m·H]`` of the whole text.
            pending: the token behind it.
            depth: drafts, W - 1.
        """
        ids = [pending] + [self.own["mask_token_id"]] * depth
        x = self.embedding[ids] * self.own.get("input_embedding_scale", 1.0)
        context = self._norm(taps @ self.tensors["fc.weight"].T, "hidden_norm")
        for number in range(self.config["num_hidden_layers"]):
            x = self._layer(number, x, context)
        hidden = self._norm(x, "norm")[1:]
        logits = hidden @ self.head.T * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping", self.config.get("final_logit_softcapping"))
        if cap:
            logits = np.tanh(logits / cap) * cap
        if "selector_rank" not in self.own:
            return np.argmax(logits, axis=-1).tolist(), logits
        return self._selected(hidden, logits, pending), logits

    def _norm(self, x: Vectors, name: str) -> Vectors:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        normed: Vectors = x / scale * self.tensors[f"{name}.weight"]
        return normed

    def _layer(self, number: int, x: Vectors, context: Vectors) -> Vectors:
        at = f"layers.{number}"
        normed = self._norm(x, f"{at}.input_layernorm")
        x = x + self._around(
            f"{at}.attention_conv", normed, lambda y: self._attention(number, y, context)
        )
        normed = self._norm(x, f"{at}.post_attention_layernorm")
        made: Vectors = x + self._around(
            f"{at}.mlp_conv", normed, lambda y: self._mlp(f"{at}.mlp", y)
        )
        return made

    def _mlp(self, at: str, y: Vectors) -> Vectors:
        gate = y @ self.tensors[f"{at}.gate_proj.weight"].T
        up = y @ self.tensors[f"{at}.up_proj.weight"].T
        made: Vectors = (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{at}.down_proj.weight"].T
        return made

    def _around(self, at: str, normed: Vectors, part: Any) -> Vectors:
        """A part between its two convolutions, where it has them."""
        base = self.tensors.get(f"{at}.base_kernel")
        if base is None:
            plain: Vectors = part(normed)
            return plain
        _, kernel, hidden = base.shape
        groups = hidden // self.own["conv_group_size"]
        dynamic = normed @ self.tensors[f"{at}.kernel_projection.weight"].T
        dynamic = dynamic.reshape(len(normed), 2, kernel, groups)

        def convolved(y: Vectors, which: int) -> Vectors:
            found = np.zeros_like(y)
            for column in range(len(y)):
                for back in range(min(kernel, column + 1)):
                    own = np.repeat(dynamic[column, which, back], hidden // groups)
                    found[column] += (base[which, back] + own) * y[column - back]
            return found

        return convolved(part(convolved(normed, 0)), 1)

    def _attention(self, number: int, y: Vectors, context: Vectors) -> Vectors:
        config, at = self.config, f"layers.{number}.self_attn"
        size, heads = config["head_dim"], config["num_attention_heads"]
        both = np.concatenate([context, y])

        def split(name: str, x: Vectors) -> Vectors:
            return (x @ self.tensors[f"{at}.{name}.weight"].T).reshape(len(x), -1, size)

        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = scaling.get("rope_theta") or config["rope_theta"]
        rope = frequencies(size, theta, scaling)
        before = np.zeros((len(context), heads, size))
        queries = self._norm(split("q_proj", y), f"{at}.q_norm")
        queries = turned(np.concatenate([before, queries]), rope, neighbours=False)[len(context) :]
        keys = turned(self._norm(split("k_proj", both), f"{at}.k_norm"), rope, neighbours=False)
        repeats = heads // config["num_key_value_heads"]
        keys, values = (np.repeat(a, repeats, axis=1) for a in (keys, split("v_proj", both)))
        scores = np.einsum("qhd,khd->hqk", queries, keys) * size**-0.5
        scores = np.where(self._seen(number, len(context), len(y)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, values).reshape(len(y), -1)
        output: Vectors = attended @ self.tensors[f"{at}.o_proj.weight"].T
        return output

    def _seen(self, number: int, length: int, width: int) -> Any:
        """Which positions of text and block ``[W, n + W]`` each column sees."""
        config = self.config
        types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        slides = types[number] == "sliding_attention"
        causal = config.get("is_causal")
        query = length + np.arange(width)[:, None]
        key = np.arange(length + width)[None]
        seen = np.ones((width, length + width), dtype=bool)
        if slides:
            seen &= (key >= length) | (query - key < config["sliding_window"])
        if slides if causal is None else causal:
            seen &= key <= query
        return seen

    def _selected(self, hidden: Vectors, logits: Vectors, pending: int) -> list[int]:
        """The selector's walk: of each slot's best tokens, the one that follows best."""
        at, found, last = "candidate_selector", list[int](), pending
        before, after = (
            self.tensors[f"{at}.{n}"] for n in ("predecessor_codebook", "successor_codebook")
        )
        weights = hidden @ self.tensors[f"{at}.hidden_projection.weight"].T
        for slot, scores in enumerate(logits):
            best = np.argsort(-scores)[: self.own["selector_top_k"]]
            total = scores[best] + after[best] @ (before[last] * weights[slot])
            last = int(best[np.argmax(total)])
            found.append(last)
        return found
