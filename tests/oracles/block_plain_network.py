"""The network of a block drafter in float64: one vector at a time, with loops and no masks.

What is written here follows the descriptions of DFlash, DeepSpec and vLLM's speculators, and a
release's own config.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from attrs import define
from numpy.typing import NDArray

__all__ = ["PlainNetwork", "Vectors", "sigmoid"]

Vectors = NDArray[np.float64]


def sigmoid(x: Vectors) -> Vectors:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def rms(x: Vectors, weight: Vectors | None, eps: float) -> Vectors:
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(normed if weight is None else normed * weight)


@define(eq=False)
class PlainNetwork:
    """A release's layers.

    Attributes:
        config: all levels of its config in one.
        tensors: by their names in the release.
        value_norm: whether a Gemma drafter's values are normalised, as DeepSpec does it.
    """

    config: dict[str, Any]
    tensors: dict[str, Vectors]
    value_norm: bool = True

    @property
    def gemma(self) -> bool:
        return "Gemma4DSparkModel" in self.config["architectures"]

    def linear(self, name: str, x: Vectors) -> Vectors:
        """One projection, with its bias if it has one."""
        bias = self.tensors.get(f"{name}.bias")
        made = x @ self.tensors[f"{name}.weight"].T
        return np.asarray(made if bias is None else made + bias)

    def norm(self, name: str, x: Vectors) -> Vectors:
        return rms(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def frequencies(self, size: int) -> tuple[list[float], float]:
        """By pair of features how far a position turns, and a factor of what is turned."""
        scaling = self.config.get("rope_parameters") or {}
        if self.gemma:
            scaling = scaling["full_attention"]
        theta = scaling.get("rope_theta") or self.config["rope_theta"]
        plain = [theta ** (-2.0 * pair / size) for pair in range(size // 2)]
        kind = scaling.get("rope_type", "default")
        if kind == "proportional":
            turned = int(size * scaling["partial_rotary_factor"]) // 2
            return [rate if pair < turned else 0.0 for pair, rate in enumerate(plain)], 1.0
        if kind == "yarn":
            return self.stretched(plain, size, theta, scaling)
        return plain, 1.0

    @staticmethod
    def stretched(
        plain: list[float], size: int, theta: float, scaling: dict[str, Any]
    ) -> tuple[list[float], float]:
        """YaRN (Peng et al. 2023): slow pairs are slowed down by the factor, fast ones are not."""

        def pair_of(turns: float) -> float:
            around = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return size * math.log(around) / (2 * math.log(theta))

        low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
        high = min(math.ceil(pair_of(scaling["beta_slow"])), size - 1)
        found = []
        for pair, rate in enumerate(plain):
            slow = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            found.append(rate * (1 - slow) + rate / scaling["factor"] * slow)
        return found, 0.1 * math.log(scaling["factor"]) + 1.0

    def rotated(self, x: Vectors, position: int) -> Vectors:
        """One head's features at a position."""
        size = len(x)
        rates, factor = self.frequencies(size)
        interleaved = self.config.get("rope_is_neox_style", True) is False
        turned = np.empty(size)
        for pair, rate in enumerate(rates):
            one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
            c, s = math.cos(position * rate), math.sin(position * rate)
            turned[one] = factor * (x[one] * c - x[other] * s)
            turned[other] = factor * (x[other] * c + x[one] * s)
        return turned

    def keys_and_values(self, at: str, x: Vectors, position: int) -> list[tuple[Vectors, Vectors]]:
        """By head what one position is asked with, and what it answers."""
        size = len(self.tensors[f"{at}.k_norm.weight"])
        keys = self.linear(f"{at}.k_proj", x)
        shared = f"{at}.v_proj.weight" not in self.tensors
        values = keys if shared else self.linear(f"{at}.v_proj", x)
        found = []
        for start in range(0, len(keys), size):
            value = values[start : start + size]
            if self.gemma and self.value_norm:
                value = rms(value, None, self.config["rms_norm_eps"])
            key = self.norm(f"{at}.k_norm", keys[start : start + size])
            found.append((self.rotated(key, position), value))
        return found

    def sees(self, number: int, query: int, key: int, anchor: int) -> bool:
        """Whether a block's column at one position attends to another."""
        kind = (self.config.get("layer_types") or ["full_attention"] * (number + 1))[number]
        sliding = kind == "sliding_attention"
        if key < anchor:
            return not sliding or query - key < self.config["sliding_window"]
        if "speculators_model_type" in self.config:
            free = self.config.get(
                "sliding_window_non_causal", self.config["speculators_model_type"] == "dflash2"
            )
            return key <= query or not sliding or free
        names = ("causal", "is_causal", "dflash_query_causal")
        return key <= query or not any(self.config.get(name) for name in names)

    def attended(self, number: int, context: list[Vectors], normed: list[Vectors]) -> list[Vectors]:
        """One layer's attention, by column of the block."""
        at, anchor = f"layers.{number}.self_attn", len(context)
        held = [
            self.keys_and_values(at, x, position) for position, x in enumerate([*context, *normed])
        ]
        size = len(self.tensors[f"{at}.q_norm.weight"])
        scale = 1.0 if self.gemma else size**-0.5
        outputs = []
        for query, x in enumerate(normed, start=anchor):
            asked = self.linear(f"{at}.q_proj", x).reshape(-1, size)
            of_heads = []
            for head, own in enumerate(asked):
                place = head * len(held[0]) // len(asked)
                question = self.rotated(self.norm(f"{at}.q_norm", own), query)
                seen = [key for key in range(len(held)) if self.sees(number, query, key, anchor)]
                scores = np.array([scale * (question @ held[key][place][0]) for key in seen])
                shares = np.exp(scores - scores.max())
                shares = shares / shares.sum()
                of_heads.append(
                    sum(
                        share * held[key][place][1] for share, key in zip(shares, seen, strict=True)
                    )
                )
            outputs.append(self.linear(f"{at}.o_proj", np.concatenate(of_heads)))
        return outputs

    def mlp(self, at: str, x: Vectors) -> Vectors:
        gate = self.linear(f"{at}.gate_proj", x)
        if self.gemma:
            cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(cubic))
        else:
            gate = gate * sigmoid(gate)
        return self.linear(f"{at}.down_proj", gate * self.linear(f"{at}.up_proj", x))

    def convolved(
        self, at: str, stage: int, inputs: list[Vectors], normed: list[Vectors]
    ) -> list[Vectors]:
        """DFlash 2's sum over a column and the one before it; none without such weights."""
        if f"{at}.base_kernel" not in self.tensors:
            return inputs
        base = self.tensors[f"{at}.base_kernel"][stage]
        size, outputs = self.config["conv_group_size"], []
        for column, x in enumerate(normed):
            dynamic = self.linear(f"{at}.kernel_projection", x)
            dynamic = dynamic.reshape(2, len(base), -1)[stage]
            total = np.zeros_like(x)
            for back in range(min(len(base), column + 1)):
                for feature in range(len(x)):
                    weight = base[back, feature] + dynamic[back, feature // size]
                    total[feature] += weight * inputs[column - back][feature]
            outputs.append(total)
        return outputs

    def layer(self, number: int, context: list[Vectors], xs: list[Vectors]) -> list[Vectors]:
        at = f"layers.{number}"
        normed = [self.norm(f"{at}.input_layernorm", x) for x in xs]
        given = self.convolved(f"{at}.attention_conv", 0, normed, normed)
        attended = self.attended(number, context, given)
        attended = self.convolved(f"{at}.attention_conv", 1, attended, normed)
        if self.gemma:
            attended = [self.norm(f"{at}.post_attention_layernorm", each) for each in attended]
        xs = [x + each for x, each in zip(xs, attended, strict=True)]
        before = "pre_feedforward_layernorm" if self.gemma else "post_attention_layernorm"
        normed = [self.norm(f"{at}.{before}", x) for x in xs]
        given = self.convolved(f"{at}.mlp_conv", 0, normed, normed)
        made = [self.mlp(f"{at}.mlp", x) for x in given]
        made = self.convolved(f"{at}.mlp_conv", 1, made, normed)
        if not self.gemma:
            return [x + each for x, each in zip(xs, made, strict=True)]
        scalar = self.tensors[f"{at}.layer_scalar"]
        made = [self.norm(f"{at}.post_feedforward_layernorm", each) for each in made]
        return [(x + each) * scalar for x, each in zip(xs, made, strict=True)]
