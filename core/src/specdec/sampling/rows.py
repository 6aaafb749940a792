"""The draws of a group's rows: which token each row takes at each position of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import frozen

from specdec.contract import Greedy, Sampled, Swap, check_keep
from specdec.sampling import filters
from specdec.sampling.noise import gumbel, seed_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import PendingChange, Selection
    from specdec.sampling.options import SamplingOptions

__all__ = ["RowSamplers", "normalize"]


def normalize(logits: mx.array) -> mx.array:
    """Log-probabilities of logits, in their own dtype, as mlx-lm computes them.

    Greedy rows take the argmax of these, not of the logits: in 16 bits the subtraction rounds,
    so two logits that differ can become one log-probability, and mlx-lm takes the first of them.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@frozen(eq=False)
class _Row:
    options: SamplingOptions
    seed: int

    @property
    def draw_key(self) -> tuple[float, float, float, int] | None:
        return None if self.options.greedy else self.options.filters


class RowSamplers:
    """Samplers of B rows; implements the contract's ``RowSampling``.

    Rows with equal options are drawn in one operation. A draw depends on the row's
    ``(seed, step)`` and scores alone.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._bind()

    @property
    def row_count(self) -> int:
        """Rows, B."""
        return len(self._rows)

    @property
    def stateless(self) -> bool:
        """Whether no row has a sampler callable of the user's."""
        return self._stateless

    @property
    def selection(self) -> Selection:
        """How drafters select: greedy if every row is greedy, else each row's own draw."""
        return Greedy() if self._plan == [(None, None)] else Sampled()

    def callable_of(self, row: int) -> Callable[[mx.array], mx.array] | None:
        """A row's sampler callable; ``None`` for rows that draw by seed and step."""
        return self._rows[row].options.sampler

    def prepare_append(self, rows: Sequence[tuple[SamplingOptions, int]]) -> PendingChange:
        """Rows to add, as options and resolved seeds."""
        grown = self._rows + [_Row(options, seed) for options, seed in rows]
        return Swap(lambda: self._swap(grown))

    def filter_rows(self, keep: Sequence[int]) -> None:
        """Keep and reorder rows.

        Raises:
            RowIndexError: an index twice, negative or out of range; nothing changed.
        """
        check_keep(keep, self.row_count)
        self._swap([self._rows[k] for k in keep])

    def sample(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Each row's draw at one position: ``[B, V] -> [B]`` (for drafters)."""
        return self.draw(logprobs[:, None], steps)[:, 0]

    def draw(self, logprobs: mx.array, steps: Sequence[int]) -> mx.array:
        """Each row's draw at every position of a window.

        Args:
            logprobs: ``[B, W, V]`` log-probabilities at temperature 1.
            steps: B ints, samples drawn before the window's first position.

        Returns:
            ``[B, W]`` uint32 ids, on the device. Rows with a callable get their argmax: the
            round calls their sampler itself, position by position.
        """
        if self._plan == [(None, None)]:
            return mx.argmax(logprobs, axis=-1)
        width = logprobs.shape[1]
        positions = mx.array(list(steps), mx.uint32)[:, None] + mx.arange(width, dtype=mx.uint32)
        if len(self._plan) == 1:
            return self._draw_alike(self._plan[0][0], logprobs, positions, self._seeds)
        parts = []
        for key, index in self._plan:
            assert index is not None
            parts.append(
                self._draw_alike(key, logprobs[index], positions[index], self._seeds[index])
            )
        return mx.concatenate(parts, axis=0)[self._inverse]

    @staticmethod
    def _draw_alike(
        key: tuple[float, float, float, int] | None,
        logprobs: mx.array,
        steps: mx.array,
        seeds: mx.array,
    ) -> mx.array:
        if key is None or key[0] == 0:  # greedy, or a callable of the user's
            return mx.argmax(logprobs, axis=-1)
        temp, top_p, min_p, top_k = key
        vocabulary = logprobs.shape[-1]
        kept = logprobs
        if top_p > 0:
            kept = filters.top_p(kept, top_p)
        if min_p > 0:
            kept = filters.min_p(kept, min_p)
        if 0 < top_k < vocabulary:
            kept = filters.top_k(kept, top_k)
        noise = gumbel(seeds, steps, mx.arange(vocabulary, dtype=mx.uint32))
        return mx.argmax(kept.astype(mx.float32) * (1.0 / temp) + noise, axis=-1)

    def _swap(self, rows: list[_Row]) -> None:
        self._rows = rows
        self._bind()

    def _bind(self) -> None:
        """Group rows by equal options; resolved at membership changes, not in rounds."""
        groups: dict[tuple[float, float, float, int] | None, list[int]] = {}
        for row, sampler in enumerate(self._rows):
            groups.setdefault(sampler.draw_key, []).append(row)
        self._stateless = all(row.options.sampler is None for row in self._rows)
        self._seeds = mx.array([seed_words(row.seed) for row in self._rows] or [(0, 0)], mx.uint32)
        self._plan: list[tuple[tuple[float, float, float, int] | None, mx.array | None]]
        if len(groups) <= 1:
            self._plan = [(next(iter(groups), None), None)]
            return
        self._plan = [(key, mx.array(rows, mx.int32)) for key, rows in groups.items()]
        order = [row for rows in groups.values() for row in rows]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        self._inverse = mx.array(inverse, mx.int32)
