"""A small target with seeded weights and every port, for tests of drafters.

It is a two-layer Llama of mlx-lm in float32, bound as any model is, with the ports added that
mlx-lm's models do not have. Weights do not depend on MLX's global random state, and are scaled so
that greedy text does not get stuck on one token.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from specdec.contract import AssistantDonors, ContextKind, ResidualBasis
from specdec.state import read_donors
from specdec.targets import MlxLmTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from specdec.state import RowState

    LiveRows = Callable[[], tuple[RowState, Sequence[int] | None]]
    _Pair = tuple[mx.array, mx.array]

__all__ = ["PORTS", "TinyTarget", "seeded_weights"]

PORTS = ("hidden_taps", "recurrent_mtp", "assistant_rows", "residual_basis")
"""Ports of a target that a drafter may need; ``TinyTarget`` has them all."""

_HEADS = 2
_SLIDING = 8  # positions that the sliding donor holds


def seeded_weights(model: Any, seed: int) -> Any:
    """Give an mlx-lm model random weights that depend on the seed alone.

    Args:
        model: any ``nn.Module``; changed in place and returned.
        seed: 0 or more.
    """
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    drawn = []
    for (name, held), key in zip(parameters, keys, strict=True):
        noise = mx.random.normal(held.shape, key=key)
        if "norm" in name:  # around its own start: some are scales, some offsets from 1
            drawn.append((name, held + 0.1 * noise))
        elif "embed" in name:
            drawn.append((name, noise * held.shape[-1] ** -0.5))
        else:
            drawn.append((name, noise * 2.0 * held[0].size ** -0.5))
    model.update(tree_unflatten(drawn))
    mx.eval(model.parameters())
    return model


class TinyTarget(MlxLmTarget):
    """A deterministic target of any small size, with every port of the contract.

    Args:
        vocab_size: V. A small one makes texts repeat, which history drafters need.
        hidden_size: H; a multiple of 4.
        layers: number of layers.
        seed: of the weights.
        lacks: names of ports to leave out (see :data:`PORTS`).
    """

    def __init__(
        self,
        vocab_size: int = 8,
        *,
        hidden_size: int = 32,
        layers: int = 2,
        seed: int = 0,
        lacks: Sequence[str] = (),
    ) -> None:
        args = llama.ModelArgs(
            model_type="llama",
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            intermediate_size=2 * hidden_size,
            num_attention_heads=_HEADS,
            num_key_value_heads=1,
            rms_norm_eps=1e-6,
            vocab_size=vocab_size,
            tie_word_embeddings=False,
        )
        super().__init__(seeded_weights(llama.Model(args), seed))
        self._lacks = frozenset(lacks)
        self._made = {"hidden_size": hidden_size, "layers": layers, "seed": seed}
        self._donors = _Donors(self)
        self._basis = ResidualBasis(rotation=_rotation(hidden_size, seed))
        self._seen: dict[tuple[Any, ...], mx.array] = {}

    def without(self, port: str) -> TinyTarget:
        """The same target without a port."""
        made = cast("Mapping[str, Any]", self._made)
        return TinyTarget(self.vocab_size, **made, lacks=(*self._lacks, port))

    @property
    def hidden_taps(self) -> Any:
        """Layers, embedding and head."""
        return None if "hidden_taps" in self._lacks else super().hidden_taps

    @property
    def recurrent_mtp(self) -> Any:
        """Embedding and head."""
        return None if "recurrent_mtp" in self._lacks else super().recurrent_mtp

    @property
    def assistant_rows(self) -> Any:
        """K/V donors of the rows that were shown with :meth:`show`, or of a verify group's."""
        return None if "assistant_rows" in self._lacks else self._donors

    @property
    def residual_basis(self) -> ResidualBasis | None:
        """A rotation of the residual stream."""
        return None if "residual_basis" in self._lacks else self._basis

    def can_tap(self, layers: Sequence[int]) -> bool:
        """Whether a forward can capture these layers."""
        return super().can_tap(layers) and (not layers or "hidden_taps" not in self._lacks)

    @cached_property
    def keeps_bits(self) -> bool:
        """Whether this host gives a row the same bits whatever stands beside it.

        CPUs were seen to; GPUs choose their kernels by shape. Where it does not hold, state is
        compared with a margin, and drafts within rounding of a tie may differ.
        """
        weight = self.model.layers[0].mlp.up_proj.weight
        rows = mx.random.normal((5, 3, weight.shape[1]), key=mx.random.key(7))
        together = rows @ weight.T
        return all(
            bool(
                mx.array_equal(
                    rows[row : row + 1, :width] @ weight.T, together[row : row + 1, :width]
                )
            )
            for row in range(5)
            for width in (1, 2, 3)
        )

    def show(self, rows: Sequence[Sequence[int]]) -> None:
        """Say what the target's live rows have read, for ``assistant_rows``.

        Args:
            rows: the ids of each row, in the draft group's order.
        """
        self._donors.rows = [tuple(row) for row in rows]

    def hidden(self, tokens: Sequence[int], kind: ContextKind, taps: Sequence[int]) -> mx.array:
        """Hidden states ``[1, L, ·]`` of L ids read from the start, of the kind that is declared.

        Args:
            tokens: L ids, at least one.
            kind: which hidden states; not ``NONE``.
            taps: layers, for ``TAPS``.
        """
        key = (tuple(tokens), kind, tuple(taps))
        if key not in self._seen:
            state = self.new_state()
            state.begin_round(len(tokens))
            context = self.forward(mx.array([list(tokens)], mx.int32), state, kind, taps).context
            assert context is not None
            mx.eval(context)
            if len(self._seen) > 4096:
                self._seen.clear()
            self._seen[key] = context
        return self._seen[key]


class _Donors:
    """``AssistantRows`` over rows that the kit shows, or over those of a verify group.

    Args:
        target: whose layers they are.
        live: the group's rows; ``None`` for those that are shown.
    """

    def __init__(self, target: TinyTarget, live: LiveRows | None = None) -> None:
        self._target = target
        self._live = live
        self._known: dict[tuple[int, ...], _Pair] = {}
        self.rows: list[tuple[int, ...]] = []

    @property
    def hidden_size(self) -> int:
        taps = self._target.recurrent_mtp or self._target.hidden_taps
        size: int = taps.hidden_size
        return size

    @property
    def lends(self) -> frozenset[str]:
        """Both."""
        return frozenset({"sliding", "full"})

    def embed(self, ids: mx.array) -> mx.array:
        embedded: mx.array = self._target.model.model.embed_tokens(ids)
        return embedded

    def of_group(self, live: LiveRows, /) -> _Donors:
        """The port over a group's rows."""
        return _Donors(self._target, live)

    def read_donors(self) -> AssistantDonors:
        """K/V of the last layer, and its last positions as if it saw a window of them alone."""
        if self._live is None:
            full = _stacked([self._last_layer(row) for row in self.rows])
            positions = tuple(len(row) for row in self.rows)
        else:
            found = read_donors(*self._live())
            if found.full is None:  # nobody has read anything
                return found
            full, positions = found.full, found.positions
        length = full[0].shape[2]
        starts = [max(min(count, length) - _SLIDING, 0) for count in positions]
        places = mx.array(starts, mx.int32)[:, None] + mx.arange(min(_SLIDING, length))
        index = mx.minimum(places, max(length - 1, 0))[:, None, :, None]
        keys, values = (mx.take_along_axis(each, index, axis=2) for each in full)
        return AssistantDonors(sliding=(keys, values), full=full, positions=positions)

    def _last_layer(self, row: tuple[int, ...]) -> _Pair:
        if row not in self._known:
            caches = make_prompt_cache(self._target.model)
            self._target.model(mx.array([row or (0,)], mx.int32), cache=caches)
            keys, values = caches[-1].keys[..., : len(row), :], caches[-1].values
            pair = keys, values[..., : len(row), :]
            mx.eval(pair)
            if len(self._known) > 4096:
                self._known.clear()
            self._known[row] = pair
        return self._known[row]


def _stacked(pairs: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    longest = max(k.shape[2] for k, _ in pairs)

    def stack(arrays: Sequence[mx.array]) -> mx.array:
        padded = [mx.pad(a, [(0, 0), (0, 0), (0, longest - a.shape[2]), (0, 0)]) for a in arrays]
        return mx.concatenate(padded, axis=0)

    return stack([k for k, _ in pairs]), stack([v for _, v in pairs])


def _rotation(size: int, seed: int) -> mx.array:
    """An orthogonal ``[size, size]`` matrix: a product of Householder reflections."""
    rotation = mx.eye(size)
    for key in mx.random.split(mx.random.key(seed + 1), 3):
        v = mx.random.normal((size, 1), key=key)
        rotation = rotation - 2 * v @ (v.T @ rotation) / (v.T @ v)
    mx.eval(rotation)
    return rotation
