"""A block drafter as a provider: its weights, and the row groups over a target.

A new drafter of the family gives ``bind``, which checks that it belongs to a target and returns its
:class:`~specdec.drafting.block_method.BlockMethod` for it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec.contract import require_port
from specdec.drafting.choose import Chooser
from specdec.drafting.projected import ProjectedRows, RowsSettings, cache_layout
from specdec.errors import ClosedError, TargetLacksError
from specdec.state import room_for
from specdec.state.rings import SLACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.contract import (
        HiddenTaps,
        RowCheckpoint,
        RowConstraints,
        RowSampling,
        TargetView,
    )
    from specdec.drafting.block_method import BlockMethod

__all__ = ["ProjectedGroups", "ProjectedProvider"]


class ProjectedGroups:
    """Makes groups of one block drafter's rows.

    Args:
        name: of the drafter, for messages.
        schema: persistent name of the layout of a row's arrays.
        namespace: what identifies weights and settings; :attr:`checkpoint_namespace` is the
            schema and it.
        tap_layers: of the target, in order.
        bind: the method for a target; raises where they do not belong together. Called when the
            target is another than the last one, after its port and its taps have been checked.
        vocabulary: ascending ids that the method scores alone, or ``None`` for all.

    Attributes:
        listed: ``[N]`` the vocabulary; choices over it are made with this very array.
    """

    supports_adapters = False  # it reads hidden states of the weights it was trained with

    def __init__(
        self,
        *,
        name: str,
        schema: str,
        namespace: Callable[[], str],
        tap_layers: Sequence[int],
        bind: Callable[[TargetView], BlockMethod],
        vocabulary: Sequence[int] | None = None,
    ) -> None:
        self._name = name
        self._schema = schema
        self._namespace: str | Callable[[], str] = namespace
        self._tap_layers = tuple(tap_layers)
        self._bind: Callable[[TargetView], BlockMethod] | None = bind
        self._vocabulary = None if vocabulary is None else tuple(vocabulary)
        self.listed = None if vocabulary is None else mx.array(list(vocabulary), mx.int32)
        self._bound: tuple[object, RowsSettings] | None = None

    @property
    def checkpoint_namespace(self) -> str:
        """The layout's name, the weights, and how they are used."""
        if not isinstance(self._namespace, str):
            self._namespace = f"{self._schema}:{self._namespace()}"
        return self._namespace

    def target_tap_layers(self, target: TargetView, /) -> tuple[int, ...]:
        """The tapped layers, the same for every target."""
        del target
        return self._tap_layers

    def draft_vocabulary(self, target: TargetView, /) -> tuple[int, ...] | None:
        """The ids that the drafter scores alone, if they are not all."""
        del target
        return self._vocabulary

    def row_bytes(self, target: TargetView, tokens: int, /) -> int:
        """Bytes that one row's context takes at so many tokens, by its shapes."""
        settings = self._settings_for(target)
        total = 0
        for number, layer in enumerate(settings.method.layers):
            held = room_for(tokens)
            if layer.window is not None:
                held = min(held, layer.window + SLACK)
            for name in ("keys", "values"):
                shape, dtype = settings.layout[f"{number}.{name}"]
                total += prod(shape) * dtype.size * held
        return total

    def method_for(self, target: TargetView) -> BlockMethod:
        """The method, bound to a target.

        Raises:
            TargetLacksError: it has no tapped layers, or not these.
            ClosedError: the weights are gone.
        """
        return self._settings_for(target).method

    def open_prefill(
        self, *, target: TargetView, checkpoints: Sequence[RowCheckpoint | None]
    ) -> ProjectedRows:
        """A group that reads prompts.

        Args:
            target: the bound target.
            checkpoints: one per row, borrowed; ``None`` is a cold row.

        Raises:
            TargetLacksError: it has no tapped layers, or not these.
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, None)

    def open(
        self,
        *,
        target: TargetView,
        sampling: RowSampling,
        checkpoints: Sequence[RowCheckpoint],
        constraints: RowConstraints | None = None,  # noqa: ARG002  what is forced is the core's
    ) -> ProjectedRows:
        """A group that decodes.

        Args:
            target: the bound target.
            sampling: the rows' draws.
            checkpoints: one per row, borrowed.
            constraints: not used.

        Raises:
            TargetLacksError: it has no tapped layers, or not these.
            CheckpointError: a checkpoint does not fit.
        """
        return self._open(target, checkpoints, sampling)

    def release(self) -> None:
        """Let the weights go; groups that are open keep theirs until they are closed."""
        self._bind = self._bound = None

    def _open(
        self,
        target: TargetView,
        checkpoints: Sequence[RowCheckpoint | None],
        sampling: RowSampling | None,
    ) -> ProjectedRows:
        settings = self._settings_for(target)
        choose = None
        if sampling is not None:
            choose = Chooser(sampling, target.vocab_size, self.listed)
        rows = ProjectedRows(settings, target.vocab_size, choose)
        rows.prepare_append(checkpoints).commit()
        return rows

    def _settings_for(self, target: TargetView) -> RowsSettings:
        if self._bind is None:
            raise ClosedError("open")
        if self._bound is not None and self._bound[0] is target.identity:
            return self._bound[1]
        port: HiddenTaps = require_port(target, "hidden_taps", self._name)
        if not target.can_tap(self._tap_layers):
            raise TargetLacksError(
                f"hidden_taps of layers {', '.join(map(str, self._tap_layers))} (it has "
                f"{port.layer_count})",
                self._name,
            )
        namespace = self.checkpoint_namespace  # the same whatever target it is bound to first
        method = self._bind(target)
        features = len(self._tap_layers) * port.hidden_size
        if method.features != features:
            raise TargetLacksError(
                f"hidden_taps of {method.features} features (its {len(self._tap_layers)} taps have "
                f"{features})",
                self._name,
            )
        dtype = port.embed(mx.zeros((1, 1), mx.int32)).dtype
        settings = RowsSettings(
            method=method,
            namespace=namespace,
            schema=self._schema,
            layout=cache_layout(method, dtype),
            dtype=dtype,
            tap_layers=self._tap_layers,
        )
        self._bound = target.identity, settings
        return settings


class ProjectedProvider:
    """A block drafter as a drafter.

    Args:
        name: for people.
        weight_bytes: of its own weights.
        grouped: makes its groups.
    """

    def __init__(self, name: str, weight_bytes: int, grouped: ProjectedGroups) -> None:
        self._name = name
        self._weight_bytes = weight_bytes
        self._grouped = grouped

    @property
    def id(self) -> str:
        """What the drafter was loaded from."""
        return self._name

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights."""
        return self._weight_bytes

    @property
    def grouped(self) -> ProjectedGroups:
        """The factory of this provider's row groups."""
        return self._grouped

    def close(self) -> None:
        """Let the weights go."""
        self._grouped.release()
