"""An mlx-lm model as the target: forwards over windows, ports for drafters, states for rows."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from attrs import frozen
from mlx_lm.models.cache import make_prompt_cache

from specdec.checkpoints import weights_identity
from specdec.contract import ContextKind
from specdec.errors import OptionError, TargetLacksError, UnsupportedModelError, one_line
from specdec.state import (
    CacheOptions,
    Format,
    KvQuantization,
    NativeState,
    RaggedState,
    RowBatch,
    kinds_lent,
    row_state,
    types_without_row_form,
)
from specdec.targets.adapters import adapter_layers
from specdec.targets.donors import DonorPort
from specdec.targets.fit import does_not_run, fit_of, positions_of
from specdec.targets.intercept import Backbone, find_backbone
from specdec.targets.native_heads import declared_head
from specdec.targets.recurrent import Recurrence
from specdec.targets.sizes import RowSizes
from specdec.targets.vocabulary import DraftVocabularyHead, head_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from specdec.contract import ResidualBasis, VocabularySubset
    from specdec.state import RowState, Together

__all__ = ["MlxLmTarget"]

_AS_THE_MODEL = CacheOptions()
_PROBED = 5  # positions before the window that recurrent layers are looked for in


@frozen(eq=False)
class _Window:
    logits: mx.array
    context: mx.array | None


class _HiddenPort:
    """Embedding and head of the bound model; serves both hidden ports of the contract."""

    def __init__(self, backbone: Backbone, hidden_size: int) -> None:
        self._backbone = backbone
        self._hidden_size = hidden_size

    @property
    def layer_count(self) -> int:
        return len(self._backbone.layers)

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @property
    def vocabulary_head(self) -> Any | None:
        found = head_module(self._backbone)
        quantized = found is not None and "scales" in found[2]
        return found[2] if found is not None and quantized else None

    @property
    def args(self) -> Any | None:
        return getattr(self._backbone.parent, "args", None)

    def subset(self, ids: Sequence[int]) -> VocabularySubset | None:
        return DraftVocabularyHead.of(self._backbone, ids)

    def embed(self, ids: mx.array) -> mx.array:
        return self._backbone.embed(ids)

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._backbone.head(hidden, mx.zeros(hidden.shape[:2], mx.uint32))
        return logits


class MlxLmTarget:
    """An mlx-lm model, driven from outside; implements the contract's ``TargetView``.

    Args:
        model: what ``mlx_lm.load`` returned. It is neither changed nor copied.
        folder: where its checkpoint is, if that is known.

    Raises:
        UnsupportedModelError: calling the model does not give logits ``[B, L, V]``.
    """

    def __init__(self, model: Any, folder: Path | None = None) -> None:
        self.model = model
        self._folder = folder
        self._backbone = find_backbone(model)
        # Built but never evaluated: shapes alone tell whether the model fits.
        probe = mx.zeros((1, 2), mx.uint32)
        try:
            logits = model(probe)
        except (RuntimeError, ValueError, TypeError) as error:
            raise does_not_run(model, error) from error
        if not isinstance(logits, mx.array) or logits.ndim != 3 or logits.shape[:2] != (1, 2):
            raise UnsupportedModelError(
                f"{type(model).__module__}: calling the model gives no logits [batch, length, "
                "vocabulary]; specdec drives text models as mlx-lm loads them"
            )
        self.vocab_size: int = logits.shape[2]
        self._port = self._probe_port(probe)
        self._types_missing = types_without_row_form(make_prompt_cache(model))
        self._fit = fit_of(model, self.vocab_size)
        self._recurrence = self._find_recurrence()
        state = self.new_state()
        self._reason = state.reason
        lends = kinds_lent(state)
        self._donor_port = DonorPort(self._port, lends) if self._port and lends else None
        self._sizes = RowSizes()
        self._packings: set[Format] = set()

    @property
    def identity(self) -> object:
        """The model itself."""
        return self.model

    @property
    def folder(self) -> Path | None:
        """Where the checkpoint is, if that is known."""
        return self._folder

    @property
    def native_draft(self) -> str | None:
        """The kind of drafter that the checkpoint's config declares as its own, if any."""
        return None if self._folder is None else declared_head(self._folder)

    @property
    def hidden_taps(self) -> _HiddenPort | None:
        """Layers, embedding and head; ``None`` where the model has no usual ``model.layers``."""
        return self._port

    @property
    def recurrent_mtp(self) -> _HiddenPort | None:
        """Embedding and head; ``None`` where the model has no usual ``model.layers``."""
        return self._port

    @property
    def assistant_rows(self) -> DonorPort | None:
        """Donors of a group's rows; ``None`` without usual layers, or without attention keys."""
        return self._donor_port

    @property
    def residual_basis(self) -> ResidualBasis | None:
        """mlx-lm models carry no rotated residual stream."""
        return None

    @property
    def draft_projections(self) -> Mapping[str, Callable[..., mx.array]] | None:
        """None are declared."""
        return None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Types of the adapter layers that are in the model now, such as ``LoRALinear``."""
        return adapter_layers(self.model)

    @property
    def no_speculation_reason(self) -> str | None:
        """Why this target decodes one position at a time, if it does."""
        return self._reason

    def can_tap(self, layers: Sequence[int]) -> bool:
        """Whether a forward can capture exactly these layers."""
        if not layers:
            return True
        count = self._port.layer_count if self._port is not None else -1
        return all(0 <= layer <= count for layer in layers) and len(set(layers)) == len(layers)

    @property
    def together(self) -> Together:
        """Which rows the model's code takes in one call."""
        return self._fit.together

    @property
    def recurrence(self) -> Recurrence:
        """The modules that update recurrent state."""
        return self._recurrence

    def new_state(self, options: CacheOptions = _AS_THE_MODEL) -> RowState:
        """The state of one cold row.

        Raises:
            OptionError: the model's keys cannot be quantized so.
        """
        return self._state(make_prompt_cache(self.model, options.max_kv_size), options)

    def row_bytes(self, tokens: int, options: CacheOptions = _AS_THE_MODEL) -> int:
        """Bytes that the caches of one row take at most at so many positions."""
        return self._sizes.at(self, tokens, options)

    def state_identity(self, options: CacheOptions = _AS_THE_MODEL) -> str:
        """Weights and adapters as they are now, the caches that hold a row, and what computes."""
        scheme = _scheme(make_prompt_cache(self.model, options.max_kv_size))
        if options.kv_bits is not None:
            scheme += f", {options}"
        return f"{weights_identity(self.model)}; {scheme}; {_backend()}"

    def state_of(self, caches: Sequence[Any], options: CacheOptions = _AS_THE_MODEL) -> RowState:
        """The state of one row that continues the caller's mlx-lm caches.

        Raises:
            OptionError: the caches are not one per layer of this model, or stand at different
                positions.
        """
        expected = len(make_prompt_cache(self.model))
        if len(caches) != expected:
            raise OptionError(
                f"prompt_cache has {len(caches)} entries, but this model needs {expected}; make it "
                "with mlx_lm.models.cache.make_prompt_cache(model)"
            )
        stand = positions_of(self.model, caches)
        if len(stand) > 1:
            raise OptionError(
                f"prompt_cache stands at different positions ({sorted(stand)}) in different "
                "layers; trim it with mlx_lm.models.cache.trim_prompt_cache or start a new one"
            )
        return self._state(caches, options)

    def forward(
        self,
        tokens: mx.array,
        state: RowState,
        context: ContextKind = ContextKind.NONE,
        taps: Sequence[int] = (),
    ) -> _Window:
        """Run the window that was begun on ``state``.

        Args:
            tokens: ``[B, W]`` ids.
            state: rows with a round of width W open; each row continues at its own position.
            context: which hidden states to return.
            taps: layers, for ``ContextKind.TAPS``.

        Raises:
            TargetLacksError: hidden states were asked of a model without the usual layers.
        """
        batches = state.row_caches
        records = state.records or self._recurrence.updates
        if records and not self._recurrence.is_current:
            self._recurrence = self._find_recurrence()  # somebody has replaced layers
        with self._recurrence.recording() if records else nullcontext():
            if len(batches) == 1:
                return self._run(tokens, batches[0][0], context, taps)
            windows = [
                self._run(tokens[mx.array(list(rows), mx.int32)], caches, context, taps)
                for caches, rows in batches
            ]
        # Back into the order of the rows.
        order = [row for _, rows in batches for row in rows]
        index = mx.array(sorted(range(len(order)), key=order.__getitem__), mx.int32)
        contexts = [w.context for w in windows if w.context is not None]
        return _Window(
            mx.concatenate([w.logits for w in windows], axis=0)[index],
            mx.concatenate(contexts, axis=0)[index] if contexts else None,
        )

    def _run(
        self, tokens: mx.array, caches: list[Any], context: ContextKind, taps: Sequence[int]
    ) -> _Window:
        if context is ContextKind.NONE:
            return _Window(self.model(tokens, cache=caches), None)
        backbone = self._backbone
        if backbone is None:
            raise TargetLacksError("hidden_taps")
        last = len(backbone.layers)
        wanted = {
            ContextKind.PRE_NORM: (last - 1,),
            ContextKind.POST_NORM: (last,),
        }.get(context, tuple(taps))
        with backbone.recording([i for i in wanted if i < last], last in wanted) as recorded:
            logits = self.model(tokens, cache=caches)
        outputs = [recorded[i].output for i in wanted]
        return _Window(logits, outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, -1))

    def _state(self, caches: Sequence[Any], options: CacheOptions) -> RowState:
        if self._fit.reason is not None:
            return NativeState(caches, self._fit.reason)
        if options.kv_bits is not None:
            self._check_packing(options)
        return row_state(
            caches,
            together=self._fit.together,
            quantization=_quantization(options),
            exact_keys=self._fit.exact_keys,
        )

    def _check_packing(self, options: CacheOptions) -> None:
        """Check once that the model can attend over keys that are quantized so.

        Raises:
            OptionError: it cannot.
        """
        packing = Format(options.kv_group_size, options.kv_bits or 0)
        if packing in self._packings:
            return
        batch = RowBatch(make_prompt_cache(self.model), KvQuantization(packing, 0))
        try:
            for _ in range(2):  # the first position is quantized behind it
                batch.begin(1, reading=False)
                self.model(mx.zeros((1, 1), mx.uint32), cache=batch.caches)
                batch.finish(None)
                batch.quantize_if_due()
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"kv_bits is {packing.bits} with kv_group_size {packing.group_size}, which "
                f"{type(self.model).__module__} cannot do ({one_line(error)}); "
                "give another size, or no kv_bits"
            ) from error
        self._packings.add(packing)

    def _find_recurrence(self) -> Recurrence:
        """The modules that update recurrent state; none where there is no such state."""
        if self._types_missing or self._fit.reason is not None:
            return Recurrence([])
        state = RaggedState(make_prompt_cache(self.model), together=self._fit.together)
        state.begin_round(3)
        if not state.records:
            return Recurrence([])
        state.rollback([0])
        caches = state.row_caches[0][0]

        def forward() -> None:
            state.begin_round(_PROBED, reading=True)
            self.model(mx.zeros((1, _PROBED), mx.uint32), cache=caches)
            state.commit_round()
            state.begin_round(3)
            self.model(mx.array([[1, 2, 3]], mx.uint32) % self.vocab_size, cache=caches)

        return Recurrence.find(self.model, forward)

    def _probe_port(self, probe: mx.array) -> _HiddenPort | None:
        """The hidden port, if one recorded call shows hidden states of one shape throughout."""
        backbone = self._backbone
        if backbone is None:
            return None
        every = range(len(backbone.layers))
        with backbone.recording(every, final=True) as recorded:
            self.model(probe)
        shapes = {getattr(tap.output, "shape", None) for tap in recorded.values()}
        shape = next(iter(shapes))
        if len(shapes) != 1 or shape is None or len(shape) != 3 or shape[:2] != probe.shape:
            return None
        if backbone.embed(probe).shape != shape:
            return None
        return _HiddenPort(backbone, shape[2])


def _quantization(options: CacheOptions) -> KvQuantization | None:
    if options.kv_bits is None:
        return None
    packing = Format(options.kv_group_size, options.kv_bits)
    return KvQuantization(packing, options.quantized_kv_start)


def _scheme(caches: Sequence[Any]) -> str:
    """How a row of these caches is laid out: each type once a run of layers, with its settings."""
    kinds = []
    for held in caches:
        settings = {
            name: value
            for name, value in sorted(vars(held).items())
            if isinstance(value, int | float | str)
        }
        kinds.append(f"{type(held).__name__}{settings}")
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return ", ".join(f"{count} x {kind}" for kind, count in runs)


def _backend() -> str:
    return f"{_versions()} on {mx.default_device()}"


@cache
def _versions() -> str:
    # A release may mend how state is computed; what the one before stored is then another state.
    return ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "specdec-core"))
