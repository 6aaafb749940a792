"""A drafter that attends to what two of the target's layers said of the text (``TAPS``).

Its weights are random: it is here to be held to the contract, by numbers and by mistakes.

Shapes: H hidden size, m = 2 tapped layers, D features of a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from drafters import verbs
from drafters.tapped_rows import SCHEMA, TappedRows, tapped_layers

from specdec.contract import require_port
from specdec.errors import TargetLacksError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.contract import RowCheckpoint, RowConstraints, RowSampling, TargetView

__all__ = ["TappedProvider"]


class _Groups:
    """Makes groups of one drafter's rows."""

    supports_adapters = False  # it reads hidden states of the weights it was made for

    def __init__(self, weights: dict[str, mx.array]) -> None:
        self._weights = weights
        self.checkpoint_namespace = f"{SCHEMA}:{verbs.fingerprint(weights)}"

    def target_tap_layers(self, target: TargetView, /) -> tuple[int, ...]:
        """The first layer and the last."""
        return tapped_layers(target)

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> TappedRows:
        """A group that reads prompts."""
        return self._open(target, None, checkpoints)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,
    ) -> TappedRows:
        """A group that decodes."""
        return self._open(target, sampling, checkpoints)

    def _open(
        self,
        target: TargetView,
        sampling: RowSampling | None,
        checkpoints: Sequence[RowCheckpoint | None],
    ) -> TappedRows:
        port = require_port(target, "hidden_taps", "the tapped drafter")
        if not target.can_tap(tapped_layers(target)):
            raise TargetLacksError("hidden_taps of its first and last layer", "the tapped drafter")
        if port.hidden_size != self._weights["query"].shape[0]:
            made_for = self._weights["query"].shape[0]
            raise TargetLacksError(f"hidden_taps of size {made_for}", "the tapped drafter")
        rows = TappedRows(self._weights, self.checkpoint_namespace, target, sampling)
        rows.prepare_append(checkpoints).commit()
        return rows


class TappedProvider:
    """The drafter.

    Args:
        weights: ``keys`` and ``values`` of ``[(m + 1)·H, D]``, ``query`` of ``[H, D]``, ``out`` of
            ``[D, H]``.
    """

    id = "tapped"

    def __init__(self, weights: dict[str, mx.array]) -> None:
        self._weights = weights
        self.weight_bytes = sum(array.nbytes for array in weights.values())
        self.grouped = _Groups(weights)

    @classmethod
    def tiny(cls, seed: int = 0, *, hidden_size: int = 32, size: int = 16) -> TappedProvider:
        """Small random weights.

        Args:
            seed: of the weights.
            hidden_size: H of the target.
            size: D.
        """
        # Gains at which a draft depends on the whole text and on its last token.
        sizes = {
            "keys": (1.2, 3 * hidden_size, size),
            "values": (1.0, 3 * hidden_size, size),
            "query": (1.2, hidden_size, size),
            "out": (0.7, size, hidden_size),
        }
        keys = mx.random.split(mx.random.key(seed), len(sizes))
        weights = {
            name: mx.random.normal((ins, outs), key=key) * gain * ins**-0.5
            for (name, (gain, ins, outs)), key in zip(sizes.items(), keys, strict=True)
        }
        mx.eval(weights)
        return cls(weights)

    def close(self) -> None:
        """Let the weights go."""
        self._weights.clear()
